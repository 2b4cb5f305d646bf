"""Measure collections: reconstruction, worker processes on stored features, retrieval; prints JSON.

    python scripts/measure_collection.py workers --work outputs/collection
    python scripts/measure_collection.py castle retrieval

Data are those in the folder that MATCHER_DATA names (default ../shared): bench/sceaux_castle and photos/val.
Matches are kept in the work folder, so use a new one for new weights; `retrieval` uses the castle's matches.
"""

import argparse
import json
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("castle", "workers", "retrieval")
ARRANGEMENTS = {  # processes (0: the writing process itself) and threads of each
    "1 process, 1 thread": (0, 1),
    "1 process, 2 threads": (0, 2),
    "2 workers of 1 thread": (2, 1),
}
MIN_INLIERS = 30  # of two images of the castle that overlap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", nargs="*", default=["castle", "workers"], metavar="|".join(KINDS))
    parser.add_argument("--preset", default="hybrid-learned")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "collection")
    parser.add_argument("--max-keypoints", type=int, help="default: castle 4096, workers 512")
    parser.add_argument("--resize", type=int, default=2048, help="longer side of the castle's images")
    parser.add_argument("--keep", choices=("strongest", "largest"), help="keypoints of the castle")
    parser.add_argument("--neighbours", type=int, default=12, help="pairs per image for workers")
    args = parser.parse_args()
    if unknown := set(args.what) - set(KINDS):
        parser.error(f"{min(unknown)}: choose from {', '.join(KINDS)}")

    from matcher.benchmark.rows import measure_reconstruction, measure_workers
    from matcher.collection.workers import Workers
    from matcher.images import data_folder

    data = data_folder()
    options = {"preset": args.preset, "device": "cpu"}
    if args.weights:
        options["weights"] = str(args.weights.absolute())
    if "castle" in args.what:
        sizes = {"max_keypoints": args.max_keypoints or 4096, "resize": args.resize, "keep": args.keep}
        scene = data / "bench" / "sceaux_castle"
        for title, found in measure_reconstruction(scene, args.work / "castle", options | sizes):
            print(title, json.dumps(found), flush=True)
    if "workers" in args.what:
        sizes = {"max_keypoints": args.max_keypoints or 512}
        photos = data / "photos" / "val"
        work, more = args.work / "workers", {"neighbours": args.neighbours}
        means = {title: Workers(count=n, threads=threads) for title, (n, threads) in ARRANGEMENTS.items()}
        rows = measure_workers(photos, work, options | sizes, means, **more)
        for title, found in rows:
            print(title, json.dumps(found), flush=True)
    if "retrieval" in args.what:
        for title, found in retrieval(data, args.work, args.preset):
            print(title, json.dumps(found), flush=True)


def retrieval(data: Path, work: Path, preset: str) -> Iterable[tuple[str, dict[str, float]]]:
    """Recall of the true pairs by K: of five views of each photo, and of the castle among those views."""
    import numpy as np

    from matcher.collection.store import Store
    from matcher.evaluate.synthetic import LEVELS, draw_homography, warp
    from matcher.images import find_images, image_from_array, read_image
    from matcher.loading import load
    from matcher.match.retrieval import similar_pairs

    extractor, table, true_pairs = load(preset, device="cpu").extractor, {}, set()
    for number, path in enumerate(find_images(data / "photos" / "val")):
        pixels = read_image(path, resize=640, upright=False).pixels
        for view in LEVELS:  # 0 is the photo itself
            warped = pixels
            if view:
                rng = np.random.default_rng([view, number])
                homography = draw_homography(pixels.shape[1::-1], LEVELS[view], rng)
                warped = warp(pixels, homography)
            table[f"{number}-{view}"] = extractor([image_from_array(warped)])[0]
        true_pairs |= set(combinations([f"{number}-{view}" for view in LEVELS], 2))
    yield f"{len(table)} views", _recalls(table, true_pairs, similar_pairs)
    with Store.open(work / "castle" / "run") as store:
        castle = {image.name: store.features(image.name) for image in store.images()}
        overlapping = {(p.name0, p.name1) for p in store.pairs() if p.geometry.inliers.sum() >= MIN_INLIERS}
    yield f"{len(overlapping)} pairs of the castle", _recalls(castle | table, overlapping, similar_pairs)


def _recalls(table: dict, true_pairs: set, similar_pairs) -> dict[str, float]:
    found = {}
    for k in (3, 5, 10, 20):
        pairs = set(map(frozenset, similar_pairs(list(table), table.__getitem__, k)))
        found[f"K = {k}"] = sum(frozenset(pair) in pairs for pair in true_pairs) / len(true_pairs)
    return found


if __name__ == "__main__":
    main()
