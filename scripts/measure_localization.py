"""Localise photos of a set in a map of the others, whose poses are known.

    python scripts/measure_localization.py kitchen|sceaux_castle|kitti_mini|FOLDER --work DIR
        [--preset NAME] [--split last|blocks|even] [--max-keypoints N] [--unknown-cameras] [--elsewhere DIR]
        [--map-sizes 300,10000]

The split is by time: the last third of the photos is localised, or every third block of 15, or every other
photo. `--elsewhere` also localises photos of other places, which should all be refused.
`--map-sizes` only times photos, in the set's map and in maps of so many images, the others simulated.
"""

import argparse
import sys
from pathlib import Path

from matcher.errors import MatcherError
from matcher.evaluate.localization import make_map, measure_localization, time_localization
from matcher.evaluate.multiview import SPLITS, find_other_photos, find_posed_photos
from matcher.localization.sparse_map import LocalizationConfig
from matcher.presets import DEFAULT_PRESET


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("set", help="name of a set, or a folder with images and poses")
    parser.add_argument("--work", type=Path, required=True, help="folder for the runs and models, kept")
    parser.add_argument("--preset", default=DEFAULT_PRESET)
    parser.add_argument("--split", choices=SPLITS, default="last")
    parser.add_argument("--max-keypoints", type=int, default=1024)
    parser.add_argument("--resize", type=int, default=1024, help="longer side in pixels")
    parser.add_argument("--neighbours", type=int, default=LocalizationConfig.neighbours)
    parser.add_argument("--no-refine", action="store_true", help="leave keypoints where they were found")
    parser.add_argument("--unknown-cameras", action="store_true", help="estimate the cameras of the photos")
    parser.add_argument("--elsewhere", type=Path, help="folder of photos of other places")
    parser.add_argument("--count", type=int, default=200, help="of them, at most")
    parser.add_argument("--map-sizes", help="time a photo in maps of these sizes, such as 300,10000")
    parser.add_argument("--photos", type=int, default=20, help="of them, at most, that --map-sizes times")
    options = parser.parse_args()
    try:
        photos = find_posed_photos(options.set)
        work = options.work / f"{photos.title}-{options.split}-{options.preset}"
        config = LocalizationConfig(neighbours=options.neighbours, refine=not options.no_refine)
        features = {"max_keypoints": options.max_keypoints, "resize": options.resize}
        split = photos.split(options.split)
        if options.map_sizes:
            make_map(photos, split[0], work, options.preset, features)
            sizes = [int(size) for size in options.map_sizes.split(",")]
            every = max(1, len(split[1]) // options.photos)
            names = split[1][::every][: options.photos]
            for row in time_localization(photos, names, work, sizes, config):
                print(row.line(), flush=True)
            return 0
        report = measure_localization(
            photos,
            split,
            work,
            preset=options.preset,
            options=features,
            config=config,
            cameras_known=not options.unknown_cameras,
            elsewhere=find_other_photos(options.elsewhere, options.count) if options.elsewhere else (),
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except MatcherError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print("\n".join(report.lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
