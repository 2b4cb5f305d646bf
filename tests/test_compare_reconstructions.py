"""Reconstructions from our matches beside those from COLMAP's SIFT."""

import pytest

from matcher.benchmark.rows import compare_reconstructions
from matcher.errors import UsageError
from matcher.images import data_folder

PHOTOS = data_folder() / "multiview" / "train" / "dim_cyprus" / "images"


def test_a_folder_that_is_there_is_refused(tmp_path):
    with pytest.raises(UsageError, match="new folder"):
        compare_reconstructions(tmp_path, tmp_path, ["nearest"])


@pytest.mark.slow
@pytest.mark.skipif(not PHOTOS.is_dir(), reason="needs multiview/train/dim_cyprus in MATCHER_DATA")
def test_both_models_are_described(tmp_path):
    pytest.importorskip("pycolmap")
    found = compare_reconstructions(PHOTOS, tmp_path / "new", ["nearest"], threads=1, max_keypoints=1024)
    assert list(found) == ["COLMAP's SIFT", "nearest"]
    for row in found.values():
        assert row["registered"] >= 8 and row["points"] > 300
        assert row["track_length"] > 2 and 0 < row["reprojection_error"] < 1
