"""The arguments that the scripts which draw a pair of images share, and the pipeline for them."""

import argparse
from pathlib import Path

import matcher


def pair_parser(description: str) -> argparse.ArgumentParser:
    """A parser for two images, the output file and the preset."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("image0", type=Path)
    parser.add_argument("image1", type=Path)
    parser.add_argument("output", type=Path, help=".png, .jpg, .pdf or .svg")
    parser.add_argument("--preset", default="hybrid-learned", help="see `matcher presets`")
    parser.add_argument("--weights", help="a file, or a name from `matcher weights list`")
    parser.add_argument("--resize", type=int, default=1024, help="longer side in pixels")
    parser.add_argument("--stacked", action="store_true", help="one image above the other")
    return parser


def load_pipeline(args: argparse.Namespace, **options: str) -> matcher.Pipeline:
    """The pipeline for these arguments, on the CPU; raises as `matcher.load` does."""
    return matcher.load(args.preset, weights=args.weights, resize=args.resize, device="cpu", **options)
