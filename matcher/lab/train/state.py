"""Checkpoints: written whole or not at all; a damaged one is an error."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from matcher.errors import IntegrityError
from matcher.files import write_whole


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint to a temporary file and rename it, so that the last good one survives a failure.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    try:
        write_whole(path, buffer.getvalue())
    except OSError as error:
        left = "the last good one is kept" if path.exists() else "there was none before"
        raise OSError(error.errno, f"{error.strerror}: this checkpoint is lost, {left}", str(path)) from error


def load_state(path: Path) -> dict[str, Any]:
    """Read a checkpoint, its tensors on the CPU.

    Raises:
        IntegrityError: absent, cut short or damaged; the message names the file and the remedy.
    """
    remedy = "restore a copy of it, or delete the run folder to start again"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise IntegrityError(f"{path} is absent: {remedy}") from None
    except (OSError, RuntimeError, ValueError, LookupError, EOFError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise IntegrityError(f"{path} is damaged ({reason}): {remedy}") from error
    if not isinstance(state, dict):
        raise IntegrityError(f"{path} is not a checkpoint: {remedy}")
    return state
