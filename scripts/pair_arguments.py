"""What the scripts that draw a pair of images take, and the pipeline that they ask for."""

import argparse
from pathlib import Path

import matcher


def pair_parser(description: str) -> argparse.ArgumentParser:
    """Two images, the file to write, the network."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("image0", type=Path)
    parser.add_argument("image1", type=Path)
    parser.add_argument("output", type=Path, help=".png, .jpg, .pdf or .svg")
    parser.add_argument("--preset", default="hybrid-learned")
    parser.add_argument("--weights", help="a file, or a name from `matcher weights list`")
    parser.add_argument("--resize", type=int, default=1024)
    parser.add_argument("--stacked", action="store_true")
    return parser


def load_pipeline(args: argparse.Namespace, **options: str) -> matcher.Pipeline:
    """The pipeline of those arguments, on the processor; raises as `matcher.load` does."""
    return matcher.load(args.preset, weights=args.weights, resize=args.resize, device="cpu", **options)
