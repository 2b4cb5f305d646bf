"""Reads foreign checkpoint files without running any code in them."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from torch import Tensor

from matcher.errors import IntegrityError, UsageError
from matcher.files import read_given
from matcher.weights.manifest import LARGEST_WEIGHTS

SUFFIXES = (".pth", ".ckpt", ".pt", ".bin", ".safetensors")
PREFIXES = ("matcher.", "module.")
# Keys under which training checkpoints keep the network, beside the optimiser and the rest.
_CONTAINERS = ("state_dict", "model", "model_state_dict", "extractor", "disk", "net")
_PAGES = (b"<!doctype", b"<html", b"<?xml", b"<head")
_POINTER = b"version https://git-lfs"


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, without the prefixes `matcher.` and `module.`.

    Args:
        path: safetensors, or a file of `torch.save` (.pth, .pt, .ckpt, .bin), of which only tensors are read
            and no code runs.

    Raises:
        UsageError: another suffix.
        IntegrityError: the file is absent, cut short, a web page, holds code or other objects, or no tensors.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{path}: a checkpoint ends in {', '.join(SUFFIXES)}")
    try:
        data = read_given(path, LARGEST_WEIGHTS)
    except FileNotFoundError as error:
        raise IntegrityError(f"{path} is absent: check the path") from error
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read ({error.strerror}): check the path") from error
    if fault := page_fault(data[:512]):
        raise IntegrityError(f"{path} {fault}")
    if path.suffix.lower() == ".safetensors":
        found = _read_safetensors(path, data)
    else:
        found = _find_tensors(path, _unpickle(path, data))
    return _strip(path, found)


def page_fault(start: bytes) -> str | None:
    """What a file is if it is no checkpoint at all, from its first bytes; None when it may be one."""
    start = start.lstrip()
    if start[:16].lower().startswith(_PAGES):
        return "is a web page, not a checkpoint: the link led to a page about the file; fetch the file itself"
    if start.startswith(_POINTER):
        return "is a git-lfs pointer, not the file itself: run `git lfs pull`"
    return None if start else "is empty: fetch it again"


def _read_safetensors(path: Path, data: bytes) -> dict[str, Tensor]:
    try:
        tensors = parse_tensors(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (SafetensorError, ValueError, KeyError) as error:
        raise IntegrityError(f"{path} is not an intact safetensors file ({error}): fetch it again") from error
    if "config" in header.get("__metadata__", {}):
        raise UsageError(
            f"{path} is one of this package's weights files already; give it as weights={path.name}"
        )
    return tensors


def _unpickle(path: Path, data: bytes) -> Any:
    if data[:2] != b"PK" and data[:1] != b"\x80":
        raise IntegrityError(f"{path} is not a file of torch.save, or is damaged: fetch it again")
    if data[:2] == b"PK" and not zipfile.is_zipfile(io.BytesIO(data)):
        raise IntegrityError(f"{path} is cut short: fetch it again")
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise IntegrityError(f"{path} {_pickle_fault(str(error))}") from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise IntegrityError(f"{path} is damaged or cut short ({reason}): fetch it again") from error
    except (IndexError, AssertionError, OverflowError, RecursionError, ImportError) as error:
        raise IntegrityError(f"{path} is damaged ({type(error).__name__}): fetch it again") from error


def _pickle_fault(reason: str) -> str:
    """Why the reader of tensors stopped: at something that could run, or at nonsense."""
    for mark in ("Unsupported global: GLOBAL ", "Unsupported class "):
        if mark in reason:
            name = reason.split(mark)[1].split()[0].rstrip(".,")
            return (
                f"holds more than tensors ({name}), which could run code, so it was not opened. Save its"
                " tensors alone, torch.save({name: tensor}), where that is safe, or use another copy"
            )
    return f"is damaged or holds more than tensors ({' '.join(reason.split())[-160:]}): fetch it again"


def _find_tensors(path: Path, content: Any, depth: int = 0) -> dict[str, Tensor]:
    """The state dict itself, or the one under a known key of a training checkpoint."""
    if isinstance(content, dict):
        for key in _CONTAINERS if depth < 3 else ():
            if isinstance(content.get(key), dict):
                return _find_tensors(path, content[key], depth + 1)
        tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
        if tensors and all(isinstance(name, str) for name in tensors):
            return tensors
    keys = ", ".join(map(str, list(content)[:8])) if isinstance(content, dict) else type(content).__name__
    raise IntegrityError(
        f"{path} holds no network's tensors (it holds {keys or 'nothing'}): use another file"
    )


def _strip(path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    stripped: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        short = name
        while short.startswith(PREFIXES):
            short = short.split(".", 1)[1]
        if short in stripped:
            raise IntegrityError(f"{path} holds {short} twice, with and without a prefix: use another file")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_complex():
            raise IntegrityError(f"{path} holds {name} in a form that is not plain numbers: use another file")
        stripped[short] = tensor.detach()
    return stripped
