"""Cameras of images by name, in the lines of hloc's query lists."""

from __future__ import annotations

from pathlib import Path

from matcher.data.camera import Camera
from matcher.errors import UsageError
from matcher.files import read_given


def read_camera_list(path: str | Path) -> dict[str, Camera]:
    """Cameras by name of image, from lines `NAME MODEL WIDTH HEIGHT PARAMS…` with COLMAP's models.

    Raises:
        UsageError: the file cannot be read, or a line is something else.
    """
    path = Path(path)
    try:
        lines = read_given(path).decode("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as a list of cameras ({error})") from error
    found = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            name, model, width, height, *params = words
            size = int(width), int(height)
            found[name] = Camera.from_colmap(model, [float(value) for value in params], size)
        except ValueError as error:  # a UsageError is one
            raise UsageError(
                f"{path}, line {number}: NAME MODEL WIDTH HEIGHT PARAMS… with a model of COLMAP's is needed "
                f"({error})"
            ) from error
    if not found:
        raise UsageError(f"{path} names no camera")
    return found
