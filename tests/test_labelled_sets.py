"""Sets of labelled views: where they are written."""

import pytest

from matcher.errors import UsageError
from matcher.train import labelling as label


def test_a_folder_that_is_no_set_is_never_replaced(tmp_path, monkeypatch):
    """The photos' own folder was deleted where sets were asked for beside it."""
    photos = tmp_path / "castle"
    photos.mkdir()
    (photos / "a.jpg").write_bytes(b"photo")
    monkeypatch.setattr(label, "estimate_poses", lambda *_: pytest.fail("hours of work"))
    with pytest.raises(UsageError, match="castle exists and is no finished set"):
        label.label_views(photos, photos, tmp_path / "work", lambda line: None)
    assert (photos / "a.jpg").read_bytes() == b"photo"


def test_finished_sets_are_kept(tmp_path):
    for name in ("castle", "castle-1", "castle-2"):
        (tmp_path / name).mkdir()
    for name in ("castle", "castle-1"):
        (tmp_path / name / label.DONE).touch()
    found = label.label_views(tmp_path, tmp_path / "castle", tmp_path / "work", lambda line: None)
    assert [folder.name for folder in found] == ["castle", "castle-1"]
