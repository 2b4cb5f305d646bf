"""Compare matches of real photos across versions of PyTorch, threads, kernels and batches, in float32.

    python scripts/compare_torch_versions.py FOLDER [FOLDER …] --versions 2.6.0 2.15.0 --environments DIR

In DIR a virtual environment is made for each version (several GB where only CUDA builds are offered), or used
if it is there. The pairs of each folder are its first photo with each of the others. Compared is with the
torch that runs this script: one thread, no compiled kernels, pair by pair. The table gives the share of
matches that both have, of all pairs, and that of the worst pair.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
NEAR = 0.05  # pixels, in each coordinate
BATCH = 4
# (threads, MATCHER_COMPILED): 0 is without kernels.
SETTINGS = ((1, "0"), (2, "0"), (1, "1"), (2, "1"))

PROGRAM = """
import json, sys
import numpy as np, torch
import matcher

threads, keypoints, batch, pairs, out = json.loads(sys.argv[1])
torch.set_num_threads(threads)
pipe = matcher.load(device="cpu", precision="float32", max_keypoints=keypoints, second_pass=False)
kept = {}

def features(path):
    if path not in kept:
        kept[path] = pipe.extract(path)
    return kept[path]

def points(sides, found):
    a, b = found.indices.T
    ends = (sides[0].keypoints.numpy()[a], sides[1].keypoints.numpy()[b])
    return np.hstack([np.asarray(end).reshape(-1, 2) for end in ends])

arrays, sides = {"version": np.array(torch.__version__)}, []
for number, (first, second) in enumerate(pairs):
    result = pipe.match(first, second)
    arrays[f"match {number}"] = np.hstack([result.points0, result.points1])
    sides.append((features(first), features(second)))
    arrays[f"alone {number}"] = points(sides[-1], pipe.match_features(*sides[-1]))
for start in range(0, len(sides), batch):
    for more, found in enumerate(pipe.match_features_batch(sides[start : start + batch])):
        arrays[f"batch {start + more}"] = points(sides[start + more], found)
np.savez(out, **arrays)
"""


def environment(folder: Path, version: str) -> str:
    """The Python of an environment with that torch, made if it is not there."""
    place = folder / f"torch-{version}"
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        venv.create(place, with_pip=True)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        others = [row for row in project["dependencies"] if not row.startswith("torch")]
        subprocess.run([python, "-m", "pip", "install", f"torch=={version}", *others], check=True)
    return str(python)


def matches(python: str, pairs: list, threads: int, kernels: str, keypoints: int) -> dict[str, np.ndarray]:
    """What one Python finds, by `match`, from cached features `alone`, and in a `batch`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.npz"
        given = json.dumps([threads, keypoints, BATCH, pairs, str(out)])
        variables = {"PYTHONPATH": str(ROOT), "MATCHER_COMPILED": kernels, "OMP_NUM_THREADS": str(threads)}
        command = [python, "-P", "-c", PROGRAM, given]
        subprocess.run(command, env={**os.environ, **variables}, check=True)
        with np.load(out) as found:
            return dict(found)


def in_common(first: np.ndarray, second: np.ndarray) -> tuple[int, int]:
    """Matches (K, 4) that both have, and how many the longer of both has."""
    if not len(first) or not len(second):
        return 0, max(len(first), len(second))
    near = (np.abs(first[:, None] - second[None]) < NEAR).all(axis=2)
    return int(min(near.any(axis=1).sum(), near.any(axis=0).sum())), max(len(first), len(second))


def shares(reference: dict, found: dict, kind: str, against: str, count: int) -> tuple[float, float, int]:
    """Share of all matches in common, of the worst pair's, and the number of matches."""
    both = [in_common(reference[f"{against} {i}"], found[f"{kind} {i}"]) for i in range(count)]
    common, most = map(sum, zip(*both, strict=True))
    return common / most, min(c / m if m else 1.0 for c, m in both), most


def photo_pairs(folders: list[Path], limit: int) -> list[tuple[str, str]]:
    """The first photo of each folder with each of the others."""
    from matcher.images import find_images

    found = []
    for folder in folders:
        first, *others = find_images(folder)
        found += [(str(first), str(other)) for other in others[:limit]]
    return found


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--versions", nargs="*", default=[])
    parser.add_argument("--environments", type=Path, default=Path("torch-environments"))
    parser.add_argument("--pairs", type=int, default=10, help="of each folder, at most")
    parser.add_argument("--max-keypoints", type=int, default=512)
    given = parser.parse_args()
    pythons = [sys.executable, *(environment(given.environments, version) for version in given.versions)]
    pairs = photo_pairs(given.folders, given.pairs)
    reference = matches(sys.executable, pairs, *SETTINGS[0], given.max_keypoints)
    print(
        f"{len(pairs)} pairs; compared with torch {reference['version']}, one thread, no kernels", flush=True
    )
    print("| torch | threads | kernels | `match` | worst pair | batches of 4 | worst pair |")
    print("|---|---|---|---|---|---|---|", flush=True)
    least = 1.0
    for python in pythons:
        for threads, kernels in SETTINGS:
            found = matches(python, pairs, threads, kernels, given.max_keypoints)
            whole, worst, _ = shares(reference, found, "match", "match", len(pairs))
            batch, worst_batch, _ = shares(reference, found, "batch", "alone", len(pairs))
            cells = (f"{share:.2%}" for share in (whole, worst, batch, worst_batch))
            kind = "on" if kernels == "1" else "off"
            print(f"| {found['version']} | {threads} | {kind} | " + " | ".join(cells) + " |", flush=True)
            least = min(least, whole, batch)
    return 0 if least >= 0.999 else 4


if __name__ == "__main__":
    sys.exit(main())
