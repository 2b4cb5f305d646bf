"""Pairs of real photos, of $MATCHER_DATA: fifty, each photo of a folder with the next, and three others."""

import os
from pathlib import Path

import pytest

from matcher.images import find_images

FOLDERS = {  # how many of each folder's first photos
    "bench/sceaux_castle/images": 10,
    "bench/oxford_graf": 6,
    "bench/kitti_mini/KITTI_sequence_1/image_l": 17,
    "multiview/val/kitchen/images": 11,
    "multiview/val/odm_brighton_beach/images": 11,
}


def fifty_pairs() -> list[list[Path]]:
    """The photos of each folder, in order; skips the test where they are not there."""
    data = Path(os.environ.get("MATCHER_DATA", "absent"))
    if not all((data / folder).is_dir() for folder in FOLDERS):
        pytest.skip("needs MATCHER_DATA with bench/ and multiview/")
    found = [find_images(data / folder)[:count] for folder, count in FOLDERS.items()]
    assert sum(len(photos) - 1 for photos in found) == 50
    return found


def three_pairs() -> dict[str, tuple[Path, Path]]:
    """The pictures of `assets`, two of a street and the ends of a stereo rig; skips as `fifty_pairs`."""
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
