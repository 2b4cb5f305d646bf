"""What ONNX files with weights in float16 and int8 cost: sizes, the same matches, accuracy and time.

    python scripts/compare_onnx_numbers.py kitti_mini --pairs 12
    python scripts/compare_onnx_numbers.py oxford_graf

The front end is the same for all; each matcher runs in ONNX Runtime, in one pass, not refined.
"""

import argparse
import sys
from dataclasses import replace
from typing import get_args

from matcher.errors import MatcherError
from matcher.evaluate.protocols import PairSet
from matcher.evaluate.run import Method, as_markdown, as_object, evaluate
from matcher.evaluate.sets import SetOptions, find_sets
from matcher.loading import load
from matcher.onnx.linear import Numbers
from matcher.onnx.matching import OnnxMatcher
from matcher.onnx.models import network_model
from matcher.onnx.trained import trained_network
from matcher.pipeline import Pipeline
from matcher.types import Features


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "set", help="name or folder of a set with ground truth, as `matcher evaluate` takes it"
    )
    parser.add_argument("--preset", default="hybrid-learned")
    parser.add_argument("--pairs", type=int, help="at most so many")
    parser.add_argument("--max-keypoints", type=int, default=1024)
    options = parser.parse_args()
    try:
        pipeline = load(
            options.preset,
            engine="onnx",
            second_pass=False,
            refine=False,
            max_keypoints=options.max_keypoints,
        )
        trained = trained_network(options.preset, pipeline.config.matcher.policy)
        variants = {
            numbers: replace(pipeline, matcher=OnnxMatcher(trained, numbers)) for numbers in get_args(Numbers)
        }
        for numbers in variants:
            megabytes = len(network_model(trained, numbers=numbers)) / 1e6
            print(f"{options.preset}.onnx, {numbers}: {megabytes:.1f} MB")
        for pairs in find_sets(options.set, SetOptions(pairs=options.pairs)):
            print("\n".join(same_matches(pairs, variants)))
            methods = [Method(numbers, one) for numbers, one in variants.items()]
            print(as_markdown(as_object(evaluate(pairs, methods))))
    except MatcherError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def same_matches(pairs: PairSet, variants: dict[str, Pipeline]) -> list[str]:
    """A line for each variant: how many matches of the first it has too."""
    found: dict[str, set[tuple[int, int, int]]] = {numbers: set() for numbers in variants}
    reader = next(iter(variants.values()))
    for place in range(len(pairs)):
        pair, config = pairs.pairs[place], reader.config.extractor
        images = [
            side.open(config.resize, pairs.shorter_side, config.soft_resize)
            for side in (pair.image0, pair.image1)
        ]
        features = [Features.stack([each]) for each in reader.extractor(images)]
        for numbers, one in variants.items():
            indices = one.matcher(*features)[0].indices
            found[numbers] |= {(place, *match) for match in indices.tolist()}
    first = next(iter(found.values()))
    return [
        f"{numbers}: {len(first & those)} of {len(first)} matches the same, {len(those - first)} others"
        for numbers, those in found.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
