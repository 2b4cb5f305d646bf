"""Optimised models are kept in the cache folder, and only what is ours and whole is used."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from onnx_models import trained_of
from random_matcher import CONFIG, pair, random_model

from matcher.onnx import kept
from matcher.onnx.builder import Builder
from matcher.onnx.kept import kept_model
from matcher.onnx.matching import OnnxMatcher
from matcher.types import Features


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "onnx"


class Written:
    """Writes a model that multiplies by a factor, and counts how often."""

    def __init__(self, factor: float = 3.0) -> None:
        self.factor, self.times = float(factor), 0

    def __call__(self) -> bytes:
        self.times += 1
        graph = Builder("scaled")
        graph.output("y", graph.input("x", "float32", "N") * self.factor, "float32", "N")
        return graph.encode({})


def result(write: Written, *identity: str) -> list[float]:
    return kept_model(identity or ("some weights",), write)(x=np.array([1.0, 2.0], np.float32))["y"].tolist()


def test_what_was_optimised_once_is_not_written_again(cache):
    write = Written()
    assert [result(write) for _ in range(3)] == [[3, 6]] * 3
    assert write.times == 1 and len(list(cache.iterdir())) == 1
    other = Written(5)
    assert result(other, "other weights") == [5, 10] and other.times == 1
    assert result(write) == [3, 6]


@pytest.mark.parametrize("name", ["onnxruntime.__version__", "processor_flags", "_sources"])
def test_another_runtime_processor_or_source_has_a_model_of_its_own(name, monkeypatch):
    write = Written()
    result(write)
    other = "1.99.0" if "version" in name else (lambda: frozenset({"other"})) if "flags" in name else str
    monkeypatch.setattr(f"matcher.onnx.kept.{name}", other)
    result(write)
    assert write.times == 2


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def change_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def no_model(path: Path) -> None:
    path.write_bytes(hashlib.sha256(b"no model").digest() + b"no model")


def another_runtimes_model(path: Path) -> None:
    data = bytearray(path.read_bytes()[32:])
    data[12:40] = bytes(28)
    path.write_bytes(hashlib.sha256(data).digest() + data)


def a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    "damage", [cut_short, change_a_byte, empty, no_model, another_runtimes_model, a_link, Path.unlink]
)
def test_a_damaged_file_is_made_again(cache, damage):
    write = Written()
    result(write)
    (path,) = cache.iterdir()
    damage(path)
    assert [result(write) for _ in range(2)] == [[3, 6]] * 2
    assert write.times == 2 and path.is_file() and not path.is_symlink()


def let_others_write_the_file(path: Path) -> None:
    path.chmod(0o666)


def let_others_write_the_folder(path: Path) -> None:
    path.parent.chmod(0o777)


def give_it_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    os.chown(path, 12345, -1)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX rights")
@pytest.mark.parametrize("plant", [let_others_write_the_file, let_others_write_the_folder, give_it_away])
def test_what_others_may_have_put_there_is_not_loaded(cache, plant):
    result(Written(3))
    (path,) = cache.iterdir()
    plant(path)
    write = Written(7)
    with pytest.warns(UserWarning, match="kept ONNX model is not used: .*(others|somebody else)"):
        assert result(write) == [7, 14]
    assert result(write) == [7, 14] and write.times == 1  # it is ours again


@pytest.mark.parametrize("where", ["file/folder", "full"])
def test_without_a_place_to_keep_them_models_are_written_each_time(where, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path / where))
    if where == "full":
        monkeypatch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError("no room")))
    write = Written()
    assert [result(write) for _ in range(2)] == [[3, 6]] * 2 and write.times == 2
    assert not list((tmp_path / where).rglob("*.ort")) and not list(tmp_path.rglob("tmp*"))


def test_those_not_used_for_longest_are_deleted(cache, monkeypatch):
    monkeypatch.setattr(kept, "MOST", 2)
    first, second, third = Written(1), Written(2), Written(3)
    result(first, "first")
    for file in cache.iterdir():
        os.utime(file, (1000, 1000))
    result(second, "second")
    result(first, "first")  # now `second` is older
    for file in cache.iterdir():
        if file.stat().st_size and file != max(cache.iterdir(), key=lambda each: each.stat().st_mtime):
            os.utime(file, (2000, 2000))
    result(third, "third")
    assert len(list(cache.iterdir())) == 2
    result(first, "first"), result(third, "third")
    assert (first.times, third.times) == (1, 1)


def test_a_network_with_branches_and_loops_gives_the_same_from_the_cache(cache):
    trained = trained_of(random_model(config=CONFIG))._replace(sha256="0" * 64)
    sides = [Features.stack([side]) for side in pair(50, 40, seed=3)]
    first, again = (OnnxMatcher(trained)(*sides)[0] for _ in range(2))
    assert len(list(cache.iterdir())) == 1 and len(first) > 10
    np.testing.assert_array_equal(first.indices, again.indices)
    np.testing.assert_array_equal(first.scores, again.scores)
    assert first.layers_run == again.layers_run
