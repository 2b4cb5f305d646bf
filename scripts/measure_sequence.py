"""Measure tracking and odometry on driving images, stereo pairs, and the latency of tracking; prints JSON.

    python scripts/measure_sequence.py latency --frames 50
    python scripts/measure_sequence.py driving stereo --threads 2

`driving` and `stereo` need bench/kitti_mini and bench/middlebury2003 in the folder that MATCHER_DATA names
(default ../shared). Without arguments, all three are measured.
"""

import argparse
import json
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("driving", "stereo", "latency")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", nargs="*", default=KINDS, metavar="|".join(KINDS))
    parser.add_argument("--preset", default="hybrid-learned")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--precision")
    parser.add_argument("--max-keypoints", type=int, default=1024, help="latency uses 512")
    parser.add_argument("--frames", type=int, help="number of frames, of driving and latency")
    parser.add_argument("--budget-ms", type=float)
    parser.add_argument("--map", type=Path, help="of latency: map keyframes into new folders below this one")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if unknown := set(args.what) - set(KINDS):
        parser.error(f"{min(unknown)}: choose from {', '.join(KINDS)}")
    if args.threads:
        from matcher.processes import thread_environment

        os.environ.update(thread_environment(args.threads))  # read when torch and OpenCV are imported

    import matcher
    from matcher.benchmark import rows as sequences
    from matcher.images import data_folder
    from matcher.sequence.tracker import MATCH_THRESHOLD as threshold

    network = {} if args.preset == "nearest" else {"weights": args.weights, "precision": args.precision}
    bench = data_folder() / "bench"

    def pipelines(points: int, resize: int | None = None) -> dict[str, matcher.Pipeline]:
        common = {"max_keypoints": points, "resize": resize, "device": "cpu", "match_threshold": threshold}
        return {
            "nearest": matcher.load("nearest", **common),
            args.preset: matcher.load(args.preset, **common, **network),
        }

    for name, pipeline in pipelines(args.max_keypoints, 1280).items():
        if "driving" in args.what:
            folder = bench / "kitti_mini" / "KITTI_sequence_1"
            say(f"driving {name}", sequences.measure_driving(folder, pipeline, frames=args.frames))
            say(f"driving {name}, bare", sequences.measure_bare(folder, pipeline, frames=args.frames))
        if "stereo" in args.what:
            for folder in sorted((bench / "middlebury2003").glob("*/")):
                say(f"stereo {folder.name} {name}", sequences.measure_disparity(folder, pipeline))
    if "latency" in args.what:
        image = matcher.read_image(ROOT / "assets" / "view0.jpg").pixels
        for name, pipeline in pipelines(512).items():
            options = {"frames": args.frames or 200, "budget_ms": args.budget_ms}
            if args.map:
                args.map.mkdir(parents=True, exist_ok=True)
                options["map_folder"] = args.map / name
            say(f"latency {name}", sequences.measure_latency(image, pipeline, **options))


def say(title: str, found: dict) -> None:
    print(title, json.dumps(found, indent=1), flush=True)


if __name__ == "__main__":
    main()
