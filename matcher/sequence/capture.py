"""Where frames come from: folders of images, video files, cameras."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from matcher.data.images import MAX_PIXELS
from matcher.data.masks import find_mask, no_mask, read_mask
from matcher.data.photos import IMAGE_SUFFIXES, is_image, natural_key
from matcher.errors import ImageError, UsageError

DEFAULT_RATE = 10.0  # frames per second, of folders whose files are not named by their time
_PATIENCE = 30  # frames in a row that a camera may fail to give


@dataclass(frozen=True, eq=False)
class SourceFrame:
    """What a source gives at one time."""

    name: str  # for messages
    timestamp: float  # seconds
    image: Path | np.ndarray | None  # None: dropped
    right: Path | None = None  # of a rectified pair
    mask: Path | np.ndarray | None = None  # of the (left) image


@dataclass(eq=False)
class FrameSource:
    """Frames in order; `problem` is set afterwards if they ended early."""

    name: str
    count: int | None  # frames that are announced
    shots: Callable[[], Iterator[SourceFrame]]
    problem: str | None = None

    def __iter__(self) -> Iterator[SourceFrame]:
        return self.shots()


def open_frames(
    source: str,
    right: str | Path | None = None,
    rate: float | None = None,
    masks: str | Path | None = None,
) -> FrameSource:
    """A folder, a video file or, by its number, a camera.

    Args:
        source: a path, or digits.
        right: the folder of the right images of rectified pairs; for folders only.
        rate: frames per second, of a folder.
        masks: one image file for all frames; or, for folders only, a folder of masks named like the frames.

    Raises:
        UsageError: arguments that do not fit each other, an image, or a folder without images.
        ImageError: a video that cannot be opened, or a camera that is not there.
    """
    path, masks = Path(source), None if masks is None else Path(masks)
    if masks is not None and not masks.is_dir():
        return _with_mask(open_frames(source, right, rate), read_mask(masks, MAX_PIXELS))
    if path.is_dir():
        return _folder(path, None if right is None else Path(right), rate, masks)
    if masks is not None:
        raise UsageError(f"{masks}: a folder of masks is for a folder of frames; {source} takes one file")
    if right is not None:
        raise UsageError(f"{source}: rectified pairs come from two folders of images, and this is no folder")
    if rate is not None:
        raise UsageError(f"{source}: videos and cameras have their own timestamps; leave the frame rate out")
    if source.isdecimal() and not path.exists():
        return _camera(int(source))
    return _video(path)


def _with_mask(source: FrameSource, mask: np.ndarray) -> FrameSource:
    """The same frames, each with that mask."""
    shots = source.shots

    def masked() -> Iterator[SourceFrame]:
        return (replace(shot, mask=mask) for shot in shots())

    source.shots = masked
    return source


def _folder(folder: Path, right: Path | None, rate: float | None, masks: Path | None) -> FrameSource:
    images = _images(folder)
    found = [None if masks is None else find_mask(masks, path.name) for path in images]
    if masks is not None and not any(found):
        raise no_mask(masks, [path.name for path in images], str(folder))
    partners: list[Path | None] = [None] * len(images)
    if right is not None:
        if not right.is_dir():
            raise UsageError(f"{right}: no such folder of right images")
        there = {path.name: path for path in _images(right)}
        partners = [there.get(path.name) for path in images]
        if not any(partners):
            raise UsageError(
                f"{right}: no image there has the same name as one in {folder}; pairs share a name"
            )
    times = _times(images, rate)

    def shots() -> Iterator[SourceFrame]:
        for path, time_, partner, mask in zip(images, times, partners, found, strict=True):
            missing = right is not None and partner is None
            yield SourceFrame(path.name, time_, None if missing else path, partner, mask)

    return FrameSource(str(folder), len(images), shots)


def _images(folder: Path) -> list[Path]:
    found = [path for path in folder.iterdir() if is_image(path) and not path.name.startswith(".")]
    if not found:
        raise UsageError(f"{folder}: no images there ({', '.join(IMAGE_SUFFIXES)})")
    return sorted(found, key=lambda path: natural_key(path.name))


def _times(images: list[Path], rate: float | None) -> list[float]:
    """Seconds: names such as 1305031102.175304.png are times; else as the rate says."""
    if rate is None and all(re.fullmatch(r"\d+\.\d+", path.stem) for path in images):
        return [float(path.stem) for path in images]
    rate = DEFAULT_RATE if rate is None else rate
    if not 0 < rate < float("inf"):
        raise UsageError(f"the frame rate must be a positive number, not {rate}")
    return [index / rate for index in range(len(images))]


def _video(path: Path) -> FrameSource:
    import cv2

    if not path.is_file():
        raise ImageError(f"{path}: no such video, folder or camera; check the path")
    if is_image(path):
        raise UsageError(f"{path}: a single image; name its folder, or use `matcher match`")
    if _is_text(path):  # which OpenCV would show as a film of a terminal
        raise UsageError(f"{path}: a text file, not a video; name a video, a folder of images or a camera")
    capture = cv2.VideoCapture(str(path))
    announced = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
    if not capture.isOpened() or not capture.grab():
        raise ImageError(
            f"{path}: cannot be read as a video; it is damaged, incomplete or in an unknown format; convert "
            "it, for example with ffmpeg, to MP4"
        )
    source = FrameSource(str(path), announced if announced > 0 else None, lambda: iter(()))

    def shots() -> Iterator[SourceFrame]:
        capture.set(cv2.CAP_PROP_POS_FRAMES, 0)
        held: SourceFrame | None = None
        number = 0
        while True:
            good, pixels = capture.read()
            if not good:
                break
            if held is not None:
                yield held
            seconds = capture.get(cv2.CAP_PROP_POS_MSEC) / 1000
            held = SourceFrame(f"frame {number}", seconds, np.ascontiguousarray(pixels[..., ::-1]))
            number += 1
        capture.release()
        if held is not None and source.count is not None and number < source.count:
            source.problem = f"{path}: ends after {number} of {source.count} frames; the last one is left out"
            held = SourceFrame(held.name, held.timestamp, None)  # the decoder fills what is cut off with grey
        if held is not None:
            yield held

    source.shots = shots
    return source


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(4096)
    return bool(start) and b"\0" not in start and start.isascii()


def _camera(number: int) -> FrameSource:
    import cv2

    # OpenCV prints warnings of its own where there is no device, so that is asked first.
    absent = sys.platform == "linux" and not Path(f"/dev/video{number}").exists()
    capture = None if absent else cv2.VideoCapture(number)
    if capture is None or not capture.isOpened():
        raise ImageError(f"no live camera {number}, or it is in use; connect it, or try another number")
    source = FrameSource(f"camera {number}", None, lambda: iter(()))

    def shots() -> Iterator[SourceFrame]:
        index = failures = 0
        try:
            while failures < _PATIENCE:
                good, pixels = capture.read()
                failures = 0 if good else failures + 1
                image = np.ascontiguousarray(pixels[..., ::-1]) if good else None
                yield SourceFrame(f"frame {index}", time.time(), image)
                index += 1
            source.problem = f"camera {number} gave no image {_PATIENCE} times in a row"
        finally:
            capture.release()

    source.shots = shots
    return source
