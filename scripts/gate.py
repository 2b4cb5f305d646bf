"""Hold a change of the code against a recorded state: matches, time, code that runs, and size.

    cd TREE                                   # a checkout, whose `matcher` is run
    python scripts/gate.py record golden.npz  # matches, geometry and verdicts of fixed pairs and settings
    python scripts/gate.py check golden.npz   # the same again, compared; exits 1 where they differ too much
    python scripts/gate.py time OTHER_TREE    # processor time of a match here and there, in turns
    python scripts/gate.py modules            # what one match imports, enters and queues
    python scripts/gate.py size               # lines, files, numeric constants of modules

Pairs are in `assets/` and in the folder that MATCHER_DATA names. A recording holds for one processor, version
of torch and choice of kernels (MATCHER_COMPILED=avx512_bf16), because bfloat16 rounds differently elsewhere.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
TREE, DATA = Path.cwd(), Path(os.environ.get("MATCHER_DATA", "../shared")).resolve()
sys.path.insert(0, str(TREE))
import matcher  # noqa: E402 - that of the tree

ONE_PASS, ALL_PASSES = {"further_passes": False}, {}
SAME_PX = 0.05  # stored pixels within which both points of the same match lie
LEAST_SHARE, MOST_VERDICT = 0.999, 0.001  # of matches that are the same; mean difference of verdicts

KITTI, CASTLE = DATA / "bench/kitti_mini/KITTI_sequence_1", DATA / "bench/sceaux_castle"
SETS = {  # where the images of a set are, and its pairs
    "views": (TREE / "assets/view{}.jpg", "0:1 0:2 1:2"),
    "graf": (DATA / "bench/oxford_graf/img{}.png", "1:2 1:3 1:4 1:5"),
    "castle": (CASTLE / "images/0000{}.jpg", "0:1 1:3 2:6 4:9"),
    "kitti": (KITTI / "image_l/0000{}.png", "00:03 10:16 20:30 30:45"),
    "kitchen": (DATA / "multiview/val/kitchen/images/00{}.jpg",
                "057:071 045:246 039:191 213:343 201:233 033:215 027:191 021:240"),
    "bookstore": (DATA / "multiview/val/bookstore_rendered/00{}.jpg", "00:04 05:07 21:27 29:31"),
    "sensors": (DATA / "bench/multimodal/RemoteSensing/{}.png",
                "CrossSeason/CS1a:CrossSeason/CS1b DayNight/DN1a:DayNight/DN1b "
                "Infrared_Optical/IO1a:Infrared_Optical/IO1b Optical_Optical/OO1a:Optical_Optical/OO1b"),
    "unrelated": (DATA / "photos/val/{}.jpg",
                  "opensfm/12_d9bcf9:opencv_samples/rubberwhale1_e2b08d "
                  "elementary/Temple_01c890:budgie/tea-gardens_d34ba3 "
                  "cid22/225284_d307ae:facades_spb/img_166_3c0458 "
                  "skimage/rocket_32bdd3:popos/jared-evans-119758_6de6c8"),
}  # fmt: skip
PAIRS = {
    f"{name}{number}": [str(place).format(side) for side in sides.split(":")]
    for name, (place, pairs) in SETS.items()
    for number, sides in enumerate(pairs.split())
}
FEW = "views0 graf1 castle0 kitti0 kitchen0 bookstore2"
HARD = "views0 graf castle3 kitchen bookstore0 sensors unrelated0 unrelated3"
OURS = "hybrid-learned"
GROUPS = {  # preset, passes, pairs and whole sets, options, environment
    "one pass": (OURS, ONE_PASS, " ".join(SETS), {}, {}),
    "all passes": (OURS, ALL_PASSES, HARD, {}, {}),
    "SIFT": ("hybrid", ONE_PASS, f"{FEW} sensors2 unrelated0 graf2 castle2", {}, {}),
    "nearest": ("nearest", ONE_PASS, FEW, {}, {}),
    "nearest, learned": ("nearest-learned", ONE_PASS, FEW, {}, {}),
    "512 keypoints": (OURS, ONE_PASS, FEW, {"max_keypoints": 512}, {}),
    "homography": (OURS, ONE_PASS, "views0 graf kitchen0 sensors", {"geometry": "homography"}, {}),
    "essential": (OURS, ONE_PASS, "views0 castle kitti", {"geometry": "essential"}, {}),
    "float32": (OURS, ONE_PASS, FEW, {"precision": "float32"}, {}),
    "no kernels": (OURS, ONE_PASS, FEW, {}, {"MATCHER_COMPILED": "0"}),
    "no kernels, SIFT": ("hybrid", ONE_PASS, "views0 graf1", {}, {"MATCHER_COMPILED": "0"}),
}
FIELDS = ("points", "scores", "inliers", "model", "status", "verdict")
PLAIN = (ast.Constant, ast.Tuple, ast.UnaryOp, ast.BinOp, ast.operator, ast.unaryop, ast.expr_context)
TIMED = [(pair, n, how) for pair in ("views0", "views1") for n in (1024, 2048) for how in ("one", "all")]
TIMED += [("kitchen2", 2048, "all")]  # further passes follow


def cameras(pair: str) -> dict[str, np.ndarray]:
    truth = json.loads(((CASTLE if "castle" in pair else TREE / "assets") / "poses.json").read_text())
    K = np.array((truth[0] if "castle" in pair else truth)["K"])
    if "kitti" in pair:
        K = np.array((KITTI / "calib.txt").read_text().split()[:12], float).reshape(3, 4)[:, :3]
    return {"camera0": K, "camera1": K}


def match_group(group: str) -> dict[str, np.ndarray]:
    """What is recorded of a group, by `group|pair|field`; the process runs no other one."""
    preset, passes, pairs, options, environment = GROUPS[group]
    os.environ.update(environment)
    pipeline, found, start = matcher.load(preset, **passes, **options), {}, time.process_time()
    for pair in (p for p in PAIRS if {p, p.rstrip("0123456789")} & set(pairs.split())):
        result = pipeline.match(*PAIRS[pair], **(cameras(pair) if group == "essential" else {}))
        geometry, verdict = result.geometry, result.verdict
        model = geometry.matrix if geometry.cam1_from_cam0 is None else geometry.cam1_from_cam0
        points, model = np.hstack([result.points0, result.points1]), np.zeros(0) if model is None else model
        probability = -1.0 if verdict is None else verdict.probability
        values = (points, result.scores, geometry.inliers, model, geometry.status, probability)
        found |= {f"{group}|{pair}|{key}": np.asarray(v) for key, v in zip(FIELDS, values, strict=True)}
    print(f"{group}: {time.process_time() - start:.1f} s", file=sys.stderr, flush=True)
    return found


def match_all(only: str) -> dict[str, np.ndarray]:
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        found = pool.map(match_group, [group for group in GROUPS if only in group])
        return {key: value for each in found for key, value in each.items()}


def check(file: Path, only: str) -> bool:
    """Print a line for each case that differs and for each group; whether the whole differs little."""
    golden, present, rows = dict(np.load(file)), match_all(only), {}
    for case in (key.removesuffix("|status") for key in present if key.endswith("|status")):
        a, b = ({key: side[f"{case}|{key}"] for key in FIELDS} for side in (golden, present))
        rows[case] = row = compare(a, b, plane=case.startswith("homography"))
        if row[0] > row[1] or row[2] > row[3] or row[-1]:
            print(f"  {case}: {row[1]} of {row[0]} again, {row[2] - row[3]} new; {b['status']}")
    print("group            pairs  recorded     again   new   scores: max   verdicts: mean, max   "
          "models, px or degrees   status")  # fmt: skip
    for group in [*dict.fromkeys(case.split("|")[0] for case in rows), "total"]:
        table = np.array([row for case, row in rows.items() if group in (case.split("|")[0], "total")])
        recorded, again, count, kept, score, verdict, model, other = table.T
        shares = [part.sum() / max(whole.sum(), 1) for part, whole in ((again, recorded), (kept, count))]
        print(
            f"{group:<17}{len(table):>5}{recorded.sum():>10.0f}{shares[0]:>10.3%}{(count - kept).sum():>6.0f}"
            f"{score.max():>14.4f}{verdict.mean():>17.5f}{verdict.max():>8.4f}{np.median(model):>15.4f}"
            f"{model.max():>9.4f}{other.sum():>9.0f}"
        )
    passed = min(shares) >= LEAST_SHARE and verdict.mean() <= MOST_VERDICT and not other.any()
    print("passed" if passed else "FAILED", f"{shares[0]:.3%} again, {shares[1]:.3%} of present ones known")
    return bool(passed)


def compare(a: dict[str, np.ndarray], b: dict[str, np.ndarray], plane: bool) -> tuple[float, ...]:
    """Recorded matches, how many of them are found again, present ones, how many of them were recorded, the
    differences of scores, verdict and model, and whether there is another status or a model less or more."""
    apart = (a["points"][:, None] - b["points"][None]).reshape(len(a["points"]), len(b["points"]), 2, 2)
    near = (np.linalg.norm(apart, axis=-1) <= SAME_PX).all(-1)
    scores = np.where(near, np.abs(a["scores"][:, None] - b["scores"][None]), np.inf).min(1, initial=np.inf)
    score, verdict = scores[near.any(1)].max(initial=0.0), abs(a["verdict"] - b["verdict"])
    other = a["status"] != b["status"] or a["model"].shape != b["model"].shape
    model = 0.0 if other or not a["model"].size else model_difference(a, b["model"], plane)
    return len(near), near.any(1).sum(), near.shape[1], near.any(0).sum(), score, verdict, model, other


def model_difference(a: dict[str, np.ndarray], model: np.ndarray, plane: bool) -> float:
    """Pixels that a homography moves an inlier, or that its distance from the epipolar line changes, at most;
    for poses degrees, of the rotation or the direction, whichever is more."""
    if model.shape == (4, 4):
        turn, towards = np.trace(a["model"][:3, :3].T @ model[:3, :3]), a["model"][:3, 3] @ model[:3, 3]
        return float(np.degrees(np.arccos(np.clip([(turn - 1) / 2, towards], -1, 1))).max())
    points = np.insert(a["points"].astype(float), (2, 4), 1, axis=1)[a["inliers"]]  # homogeneous
    mapped = [points[:, :3] @ matrix.T for matrix in (a["model"], model)]
    if plane:
        apart = np.linalg.norm(np.subtract(*(m[:, :2] / m[:, 2:] for m in mapped)), axis=1)
    else:
        apart = np.subtract(*(np.abs((m * points[:, 3:]).sum(1)) / np.hypot(*m[:, :2].T) for m in mapped))
    return float(np.abs(apart).max(initial=0.0))


def times_here() -> None:
    """Print seconds of processor time of three matches of each kind, after one that warms up, as JSON."""
    seconds = []
    for pair, count, how in TIMED:
        pipeline = matcher.load(OURS, **(ONE_PASS if how == "one" else ALL_PASSES), max_keypoints=count)
        clock = [(pipeline.match(*PAIRS[pair]), time.process_time())[1] for _ in range(4)]
        seconds.append(np.diff(clock).tolist())
    print(json.dumps(seconds))


def compare_times(other: Path) -> None:
    """Medians of the default match in this tree and in another one, in processes that take turns."""
    trees, seconds = (TREE, other.resolve()), ([], [])
    for side in (side for turn in range(5) for side in (turn % 2, 1 - turn % 2)):
        own = os.environ | {"MATCHER_DATA": str(DATA), "PYTHONPATH": str(trees[side])}
        command = [sys.executable, __file__, "times-here"]
        done = subprocess.run(command, cwd=trees[side], env=own, capture_output=True, text=True, check=True)
        seconds[side].append(json.loads(done.stdout.splitlines()[-1]))
    print("pair      keypoints passes      here     there  ratio (medians, ms of processor time)")
    medians = [1000 * np.median(np.array(each), axis=(0, 2)) for each in seconds]
    for (pair, count, how), here, there in zip(TIMED, *medians, strict=True):
        print(f"{pair:<9}{count:>10} {how:<6}{here:>10.1f}{there:>10.1f}{here / there:>7.3f}")


def modules() -> None:
    """What a match of one pass imports, enters and queues."""
    from torch.profiler import ProfilerActivity, profile

    entered = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_flags & 1:  # a function, not the body of a module or class
            entered.add(frame.f_code.co_filename)

    sys.setprofile(note)
    pipeline = matcher.load(OURS, **ONE_PASS, max_keypoints=1024)
    pipeline.match(*PAIRS["views0"])
    sys.setprofile(None)
    files = {str(m.__file__) for name, m in sys.modules.items() if name.split(".")[0] == "matcher"}
    print(f"imported: {measure(files)}; entered by load and match: {measure(files & entered)}")
    features = [pipeline.extract(image) for image in PAIRS["views0"]]
    for match, given in ((pipeline.match, PAIRS["views0"]), (pipeline.match_features, features)):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            match(*given)
        found = [event for event in profiler.events() if event.name.startswith("aten::")]
        top = [e for e in found if e.cpu_parent is None or not e.cpu_parent.name.startswith("aten::")]
        print(f"top-level aten operations of {match.__name__}: {len(top)}")
    print(*sorted(str(Path(file).relative_to(TREE)) for file in files & entered), sep="\n")


def measure(files: Any) -> str:
    lines = sum(len(Path(file).read_text(encoding="utf-8").splitlines()) for file in files)
    return f"{len(files)} files, {lines:,} lines"


def size() -> None:
    """Lines and files of the parts, and numeric constants of modules."""
    found = {name: sorted((TREE / name).rglob("*.py")) for name in ("matcher", "tests", "scripts")}
    found["C++"] = [file for file in TREE.glob("*/**/*") if file.suffix in (".cpp", ".h")]
    for file in found["matcher"]:
        found.setdefault("/".join(file.relative_to(TREE).parts[:-1][:2]) + "/", []).append(file)
    print("\n".join(f"{name:<24}{measure(files)}" for name, files in found.items()))
    constants = 0
    for node in (n for f in found["matcher"] for n in ast.parse(f.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            kinds = {type(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant)}
            plain = kinds <= {int, float} and all(isinstance(part, PLAIN) for part in ast.walk(node.value))
            names = [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]  # not in a plain value
            constants += bool(plain and kinds) * sum(map(str.isupper, names))
    print(f"upper-case names of modules in matcher that are numbers or tuples of them: {constants}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("command", choices=("record", "check", "time", "modules", "size", "times-here"))
    parser.add_argument("path", type=Path, nargs="?", help="the recording, or the other tree")
    parser.add_argument("--only", default="", help="groups whose names contain this")
    given = parser.parse_args()
    if given.command == "record":
        np.savez_compressed(given.path, **match_all(given.only))
    elif given.command == "time":
        compare_times(given.path)
    elif given.command != "check":
        {"times-here": times_here, "modules": modules, "size": size}[given.command]()
    return 0 if given.command != "check" else int(not check(given.path, given.only))


if __name__ == "__main__":
    sys.exit(main())
