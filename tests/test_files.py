import os

import pytest

from matcher.errors import UsageError
from matcher.files import check_output, write_whole


def test_it_writes_and_replaces(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, b"old")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_bytes(b"old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_the_file_has_the_mode_of_any_new_file(tmp_path):
    write_whole(tmp_path / "a", b"")
    (tmp_path / "b").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_outputs_are_checked_before(tmp_path):
    assert check_output(tmp_path / "a.JSON", (".json",)) == tmp_path / "a.JSON"
    with pytest.raises(UsageError, match=r"must end in \.npz or \.json"):
        check_output(tmp_path / "a.txt", (".npz", ".json"))
    with pytest.raises(UsageError, match="make it first"):
        check_output(tmp_path / "none" / "a.json", (".json",))
    (tmp_path / "b.json").mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        check_output(tmp_path / "b.json", (".json",))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="cannot be written"):
        check_output(tmp_path / "a.json", (".json",))
