"""Models that ONNX Runtime has optimised, kept for the next process.

Writing the graph of a preset and optimising it takes a third of a second, loading what was optimised a
sixth of that. A kept model is only that of the same weights, configuration and sources, of this version of
ONNX Runtime and of this processor. Where nothing can be kept, every process writes its models afresh.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import onnxruntime

from matcher.extract import learned as architecture
from matcher.files import NotOursError, cache_folder, make_private, open_own
from matcher.kernels.loader import processor_flags
from matcher.onnx.runtime import Model, session

MOST = 12  # files that are kept; those that were not used for longest are deleted
_DIGEST = 32  # bytes of a sha256


def kept_model(identity: Sequence[str], write: Callable[[], bytes]) -> Model:
    """A model from the cache folder, or as it is written, and then kept there.

    Args:
        identity: all that the written model depends on beside our sources.
        write: gives the bytes of an .onnx file.
    """
    path = _path(identity)
    if path is not None and (data := _read(path)) is not None:
        return Model(data, create=partial(_load, path=path, write=write))
    return Model(write(), create=partial(_create, path=path))


def _path(identity: Sequence[str]) -> Path | None:
    processor = sorted(processor_flags()) or [platform.processor()]
    parts = [*identity, _sources(), onnxruntime.__version__, platform.machine(), *processor]
    digest = hashlib.sha256("\0".join(parts).encode())
    try:
        return cache_folder() / "onnx" / f"{digest.hexdigest()[:32]}.ort"
    except (OSError, RuntimeError):  # no home folder
        return None


@cache
def _sources() -> str:
    """A checksum of what writes the graphs, and of the rules and numbers that they take from elsewhere."""
    package, files = Path(__file__).parent.parent, [Path(architecture.__file__)]
    for name in ("onnx", "match", "data", "refine", "extract"):
        files += sorted((package / name).glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _read(path: Path) -> bytes | None:
    """The model that was kept, if it is whole and nobody else can have put it there."""
    try:
        with open_own(path) as file:
            data = file.read()
    except NotOursError as error:
        warnings.warn(f"the kept ONNX model is not used: {error}", UserWarning, stacklevel=2)
        return None
    except OSError:
        return None
    model = data[_DIGEST:]
    if hashlib.sha256(model).digest() != data[:_DIGEST]:
        return None
    with suppress(OSError):
        os.utime(path)  # when it was used last
    return model


def _load(data: bytes, *, path: Path, write: Callable[[], bytes]) -> onnxruntime.InferenceSession:
    try:
        return session(data, optimise=False)
    except Exception:  # ONNX Runtime has no narrower class
        return _create(write(), path=path)


def _create(data: bytes, *, path: Path | None) -> onnxruntime.InferenceSession:
    """A session of an .onnx file, whose optimised model is kept if it can be."""
    if path is None:
        return session(data)
    try:
        make_private(path.parent)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            created = session(data, keep_at=made)
            model = made.read_bytes()
            made.write_bytes(hashlib.sha256(model).digest() + model)
            made.chmod(0o644)
            made.replace(path)
        _forget_oldest(path.parent)
    except Exception:  # no right to write, no room: of the latter ONNX Runtime has a class of its own
        return session(data)
    return created


def _forget_oldest(folder: Path) -> None:
    used = sorted(folder.glob("*.ort"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in used[MOST:]:
        file.unlink(missing_ok=True)
