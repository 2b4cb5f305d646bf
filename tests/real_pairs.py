"""Fifty pairs of real photos, of $MATCHER_DATA: each photo of a folder with the next."""

import os
from pathlib import Path

import pytest

from matcher.data.photos import find_images

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
