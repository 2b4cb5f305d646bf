"""Pairs of real photos, of $MATCHER_DATA."""

import os
from pathlib import Path

import pytest


def three_pairs() -> dict[str, tuple[Path, Path]]:
    """The pictures of `assets`, of a street and of a stereo rig; skips the test where they are not there."""
    assets = Path(__file__).resolve().parent.parent / "assets"
    data = Path(os.environ.get("MATCHER_DATA", "absent")) / "bench"
    street, cones = data / "kitti_mini" / "KITTI_sequence_1" / "image_l", data / "middlebury2003" / "cones"
    pairs = {
        "assets": (assets / "view0.jpg", assets / "view1.jpg"),
        "street": (street / "000000.png", street / "000001.png"),
        "stereo": (cones / "im2.png", cones / "im6.png"),
    }
    if not all(path.is_file() for pair in pairs.values() for path in pair):
        pytest.skip("needs MATCHER_DATA with bench/")
    return pairs
