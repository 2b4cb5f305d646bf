"""How well photos are localised in a map of others of the same place, made with their true poses.

    python scripts/localization.py kitchen --work DIR [--split blocks] [--elsewhere PHOTOS]

SET is kitchen, sceaux_castle or kitti_mini of $MATCHER_DATA, or a folder: of a recorded set, of a castle's
`poses.json` with `images/`, of a KITTI sequence, or of COLMAP's layout (`images/` beside `sparse/`).
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import torch

from matcher.cameras import Camera
from matcher.collection.collection import Collection
from matcher.errors import MatcherError
from matcher.evaluate.folders import camera_of, frames_of, read_matrix, read_rows
from matcher.images import data_folder, find_images
from matcher.localization.map import Map
from matcher.presets import DEFAULT_PRESET
from matcher.sfm.models import GivenPoses, read_given_poses
from matcher.sfm.reconstruct import reconstruct

PLACES = {
    "kitchen": "multiview/val/kitchen",
    "sceaux_castle": "bench/sceaux_castle",
    "kitti_mini": "bench/kitti_mini/KITTI_sequence_1",
}
WITHIN = ((0.05, 5.0), (0.1, 10.0), (0.25, 10.0))  # metres, degrees; of indoor localisation
BLOCK = 15  # photos of a block


def posed_photos(folder: Path) -> tuple[Path, dict[str, np.ndarray], dict[str, Camera]]:
    """The photos' folder, their true cam_from_world and their cameras by name."""
    images = folder / "images"
    if (folder / "cameras.json").is_file():
        frames = frames_of(folder)
        poses = {name: frame.cam_from_world for name, frame in frames.items()}
        return images, poses, {name: Camera.from_K(frame.K) for name, frame in frames.items()}
    if (folder / "calib.txt").is_file():
        left, right = read_matrix(folder / "calib.txt", (-1, 12)).reshape(-1, 3, 4)[:2]
        right_from_left, poses = np.eye(4), {}
        right_from_left[0, 3] = right[0, 3] / right[0, 0]
        rows = read_matrix(folder / "poses.txt", (-1, 12)).reshape(-1, 3, 4)
        for row, image in zip(rows, sorted((folder / "image_l").iterdir()), strict=False):
            poses[f"image_l/{image.name}"] = np.linalg.inv(np.vstack([row, [0, 0, 0, 1]]))
            poses[f"image_r/{image.name}"] = right_from_left @ poses[f"image_l/{image.name}"]
        return folder, poses, dict.fromkeys(poses, Camera.from_K(left[:, :3]))
    if (folder / "poses.json").is_file():
        rows = read_rows(path := folder / "poses.json", ("image", "K", "R", "C"))
        found = {Path(row["image"]).name: camera_of(row, path) for row in rows}
        found = {name: each for name, each in found.items() if (images / name).is_file()}
        cameras = {name: Camera.from_K(K) for name, (K, _) in found.items()}
        return images, {name: pose for name, (_, pose) in found.items()}, cameras
    given = read_given_poses(folder)
    return images, dict(given.cam_from_world), dict(given.cameras)


def split(names: list[str], how: str) -> tuple[list[str], list[str]]:
    """Photos of the map, and those to localise: the last third, every third block of 15, or every second.

    The right photos of a stereo pair go with the left ones into the map and are never localised.
    """
    left = [name for name in names if not name.startswith("image_r/")]
    index = np.arange(len(left))
    asked = {
        "last": index >= -(-2 * len(left) // 3),
        "blocks": index // BLOCK % 3 == 2,
        "even": index % 2 == 1,
    }
    queries = [name for name, out in zip(left, asked[how], strict=True) if out]
    beside = {name.replace("image_l/", "image_r/") for name in queries}
    return [name for name in names if name not in {*queries, *beside}], queries


def make_map(photos: Path, truth: GivenPoses, names: list[str], given: argparse.Namespace) -> None:
    """A run of these photos and a model with their true poses, unless both are there."""
    options = {"max_keypoints": given.max_keypoints, "resize": given.resize}
    collection = Collection.open(given.work / "run", preset=given.preset, workers=0, **options)
    collection.add_images(photos, include=names)
    if len(names) <= 13:
        collection.add_pairs(exhaustive=True)
    else:
        collection.add_pairs(similar=12)
        collection.add_pairs(sequential=4)
    if collection.run().matched or not (given.work / "model").is_dir():
        with collection.store as store:
            reconstruct(store, given.work / "model", poses=truth, threads=1, overwrite=True)


def main() -> int:
    """Make the map, localise the other photos, and print how far off they are."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("set", metavar="SET")
    parser.add_argument("--work", type=Path, required=True, help="folder for the run and the model")
    parser.add_argument("--split", choices=("last", "blocks", "even"), default="last", help="by time")
    parser.add_argument("--preset", default=DEFAULT_PRESET)
    parser.add_argument("--max-keypoints", type=int, default=1024)
    parser.add_argument("--resize", type=int, default=1024, help="longer side in pixels")
    parser.add_argument("--unknown-cameras", action="store_true", help="estimate the cameras of the photos")
    parser.add_argument("--elsewhere", type=Path, help="folder of photos of other places, to be refused")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    try:
        photos, poses, cameras = posed_photos(
            data_folder() / PLACES[given.set] if given.set in PLACES else Path(given.set)
        )
        kept, queries = split(sorted(poses), given.split)
        given.work /= f"{Path(given.set).name}-{given.split}-{given.preset}"
        make_map(photos, GivenPoses(poses, cameras), kept, given)
        localize(photos, poses, cameras, queries, given)
    except MatcherError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def localize(
    photos: Path,
    poses: dict[str, np.ndarray],
    cameras: dict[str, Camera],
    queries: list[str],
    given: argparse.Namespace,
) -> None:
    """Localise the photos and those of other places, and print what became of them."""
    rows, statuses = [], Counter()
    centres = np.array([np.linalg.inv(pose)[:3, 3] for pose in poses.values()])
    extent = np.linalg.norm(centres[:, None] - centres, axis=2).max()
    with Map.open(given.work / "model", run_dir=given.work / "run") as place:
        for name in queries:
            start, cpu = perf_counter(), process_time()
            pose = place.localize(photos / name, None if given.unknown_cameras else cameras[name])
            seconds = perf_counter() - start, process_time() - cpu
            shift = angle = np.inf
            if pose.ok:
                turn = pose.cam_from_world[:3, :3] @ poses[name][:3, :3].T
                shift = np.linalg.norm(pose.centre - np.linalg.inv(poses[name])[:3, 3])
                angle = np.degrees(np.arccos(np.clip((np.trace(turn) - 1) / 2, -1, 1)))
            statuses[pose.status] += 1
            rows.append((shift, angle, *seconds))
            print(f"{name}: {pose!r}, off by {shift:.4f} and {angle:.3f}°", file=sys.stderr, flush=True)
        found = find_images(given.elsewhere) if given.elsewhere else []
        others = [found[at] for at in np.linspace(0, len(found) - 1, min(200, len(found))).astype(int)]
        refused = Counter(place.localize(path).status for path in others)
        said = f"{len(rows)} photos in a map of {len(place.names)} images, {len(place.model.xyz)} points"
    shifts, angles, seconds, cpu = np.array(rows).T
    print(f"{given.set}, {given.preset}: {said}")
    shares = [(s, a, 100 * np.mean((shifts <= s) & (angles <= a))) for s, a in WITHIN]
    print(", ".join(f"within {s:g} and {a:g}°: {share:.1f} %" for s, a, share in shares))
    middle = np.median(shifts)
    print(
        f"median error {middle:.4f} ({100 * middle / extent:.3f} % of the extent), {np.median(angles):.3f}°"
    )
    print(f"largest {shifts.max():.4f}, {angles.max():.3f}°; {dict(statuses)}; elsewhere {dict(refused)}")
    print(f"median time of a photo {np.median(seconds):.3f} s, {np.median(cpu):.3f} s of CPU")


if __name__ == "__main__":
    sys.exit(main())
