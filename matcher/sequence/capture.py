"""Where frames come from, and when: folders of images, video files, cameras."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path, PurePath

import numpy as np
import PIL.Image

from matcher.errors import ImageError, UsageError, counted
from matcher.files import read_text
from matcher.images import IMAGE_SUFFIXES, MAX_PIXELS, find_masks, is_image, natural_key, read_mask

DEFAULT_RATE = 10.0  # frames per second, of folders that do not say when their images were taken
_TIME_FILES = ("times.txt", "timestamps.txt", "data.csv", "rgb.txt")  # of KITTI, KITTI's raw data, EuRoC, TUM
_EXIF = {90: 6, 180: 3, 270: 8}  # orientation of what is to be shown turned by so many degrees, clockwise
_PATIENCE = 30  # frames in a row that a camera may fail to give


@dataclass(frozen=True, eq=False)
class SourceFrame:
    """What a source gives at one time."""

    name: str  # for messages
    timestamp: float  # seconds
    image: Path | np.ndarray | PIL.Image.Image | None  # None: dropped
    right: Path | None = None  # of a rectified pair
    mask: Path | np.ndarray | None = None  # of the (left) image


@dataclass(eq=False)
class FrameSource:
    """Frames in order; `problem` is set afterwards if they ended early."""

    name: str
    count: int | None  # frames that are announced
    shots: Callable[[FrameSource], Iterator[SourceFrame]]
    problem: str | None = None
    numbers: list[int] | None = None  # of the frames, where the names of all are numbers
    notes: Sequence[str] = ()  # what the user should know of the frames before they are tracked

    def __iter__(self) -> Iterator[SourceFrame]:
        return self.shots(self)


def open_frames(
    source: str, right: Path | None = None, rate: float | None = None, masks: Path | None = None
) -> FrameSource:
    """The frames of a folder, a video file or a camera, which is named by its number. `right` (images of
    rectified pairs), `rate` (frames per second, instead of `_times_of`) and a folder of masks named like the
    frames are for folders only; `masks` may also be one image file for all frames."""
    path = Path(source)
    if masks is not None and not masks.is_dir():
        found, mask = open_frames(source, right, rate), read_mask(masks, MAX_PIXELS)
        shots = found.shots
        found.shots = lambda own: (replace(shot, mask=mask) for shot in shots(own))
        return found
    if path.is_dir():
        return _folder(path, right, rate, masks)
    for given, what in (
        (masks, "a folder of masks is for a folder of frames"),
        (right, "rectified pairs come from two folders of images"),
        (rate, "a video or camera has timestamps of its own, so a frame rate is for a folder"),
    ):
        if given is not None:
            raise UsageError(f"{source} is no folder, and {what}")
    if source.isdecimal() and not path.exists():
        return _camera(int(source))
    return _video(path)


def _folder(folder: Path, right: Path | None, rate: float | None, masks: Path | None) -> FrameSource:
    images = _images(folder)
    names = [path.name for path in images]
    masked = {} if masks is None else find_masks(masks, names, str(folder))
    found = [masked.get(name) for name in names]
    if right is not None and not right.is_dir():
        raise UsageError(f"{right}: no such folder of right images")
    there = {} if right is None else {path.name: path for path in _images(right)}
    partners = [there.get(path.name) for path in images]
    if there and not any(partners):
        raise UsageError(f"{right}: no image there has the same name as one in {folder}; pairs share a name")
    if rate is not None and not 0 < rate < float("inf"):
        raise UsageError(f"the frame rate must be a positive number, not {rate}")
    times, unused = (None, None) if rate is not None else _times_of(images)
    counts, missing = _counted_by([path.stem for path in images])
    notes = [f"{folder}: {missing}"] if missing and times is None else []
    if unused is not None:
        notes.append(
            f"{unused} is not used, since it has no time for each of the {len(names)} images: "
            f"{DEFAULT_RATE:g} frames per second are assumed; correct it, or give --fps"
        )
    times = times or [count / (rate or DEFAULT_RATE) for count in counts]
    if unmasked := [name for name in names if name not in masked and masks is not None]:
        notes.append(f"{masks}: {len(unmasked)} of {len(names)} frames have no mask, such as {unmasked[0]}")
    shots = [
        SourceFrame(path.name, stamp, None if right and partner is None else path, partner, mask)
        for path, stamp, partner, mask in zip(images, times, partners, found, strict=True)
    ]
    shots.sort(key=lambda shot: shot.timestamp)  # 0.55 is before 0.6, and not by its name
    numbers = _numbers([Path(shot.name).stem for shot in shots])
    return FrameSource(str(folder), len(images), lambda _: iter(shots), None, numbers, notes)


def _images(folder: Path) -> list[Path]:
    """The images of a folder or, where it is a data set's and they lie in one below it, of that one."""
    below = {"data.csv": "data", "rgb.txt": "rgb", "timestamps.txt": "data"}  # of EuRoC, TUM and KITTI
    places = [folder / name for file, name in below.items() if (folder / file).is_file()]
    for place in (folder, *filter(Path.is_dir, places)):
        found = [path for path in place.iterdir() if is_image(path) and not path.name.startswith(".")]
        if found:
            return sorted(found, key=lambda path: natural_key(path.name))
    raise UsageError(f"{folder}: no images there ({', '.join(IMAGE_SUFFIXES)})")


def _numbers(stems: list[str]) -> list[int] | None:
    whole = all(re.fullmatch(r"\d{1,19}", stem) for stem in stems)
    return [int(stem) for stem in stems] if whole else None


def _counted_by(stems: list[str]) -> tuple[list[int], str | None]:
    """The place of each frame in the sequence, from 0: by the numbers at the end of names that differ in
    nothing else, in steps of their greatest common divisor, and what to say of missing ones."""
    found = [re.fullmatch(r"(.*?)(\d{1,18})", stem) for stem in stems]
    steps = np.diff(np.array([int(each[2]) for each in found if each is not None], np.int64))
    if not all(found) or len({each[1] for each in found}) > 1 or not len(steps) or steps.min() < 1:
        return list(range(len(stems))), None
    steps //= np.gcd.reduce(steps)
    lacking = int((steps - 1).sum())
    if lacking > len(stems):  # a time of day, or of several sequences
        return list(range(len(stems))), None
    text = f"{counted(lacking, 'frame')} missing by their numbers, first after {stems[np.argmax(steps > 1)]}"
    return [0, *np.cumsum(steps).tolist()], text if lacking else None


def _times_of(images: list[Path]) -> tuple[list[float] | None, Path | None]:
    """Seconds at which images of one folder were taken, by their names or a file in the folder or beside it.
    Names are in seconds (1305031102.175304.png) or nanoseconds (1403636579763555584.png); a file has a row
    for each image, with its name and its time, or the times alone, in order or by the numbers of the images.
    And the first file that does not fit, where none does."""
    stems = [path.stem for path in images]
    if all(re.fullmatch(r"\d+\.\d+", stem) for stem in stems):
        return [float(stem) for stem in stems], None
    if (numbers := _numbers(stems)) and (seconds := _since_1970(np.array(numbers, float))) is not None:
        return seconds.tolist(), None
    unused = None
    for place in (images[0].parent, images[0].absolute().parent.parent):
        for name in _TIME_FILES:
            if (place / name).is_file():
                if (times := _listed(place / name, images)) is not None:
                    return times, None
                unused = unused or place / name
    return None, unused


def _since_1970(times: np.ndarray) -> np.ndarray | None:
    """Seconds of times in s, ms, µs or ns, the unit in which all are of 2001 to 2099; None: there is none."""
    for unit in (1.0, 1e3, 1e6, 1e9):
        if len(times) and (times / unit >= 1e9).all() and (times / unit < 4.1e9).all():
            return times / unit
    return None


def _listed(file: Path, images: list[Path]) -> list[float] | None:
    """The times of all images in a text file of rows; None where one has none."""
    number = {name: row for row, path in enumerate(images) for name in (path.stem, path.name)}
    named, plain = {}, []
    try:
        for row in map(str.strip, read_text(file).splitlines()):
            if not row or row.startswith("#"):
                continue
            words, first = re.split(r"[,\s]+", row), not (named or plain)
            names = [word for word in words[1:] + words[:1] if PurePath(word).name in number]
            if re.match(r"\d{4}-\d\d-\d\d[ T]", row):  # KITTI's raw data: a date, to nanoseconds
                plain.append(datetime.fromisoformat(row[:26]).timestamp())
            elif names and len(words) > 1:
                time_ = next(word for word in words if word != names[0])
                named[number[PurePath(names[0]).name]] = float(time_)
            elif not (first and re.match("[A-Za-z]", row)):  # the columns' names
                plain.append(float(words[0]))
    except (OSError, ValueError, StopIteration):
        return None
    found = np.array([named[index] for index in sorted(named)] or plain)
    numbers = _numbers([path.stem for path in images])
    if not named and numbers is not None and max(len(images), *numbers) < len(found):
        found = found[numbers]
    if len(found) != len(images) or not np.isfinite(found).all():
        return None
    seconds = _since_1970(found)
    return (found if seconds is None else seconds).tolist()


# --- Videos and cameras.


def _video(path: Path) -> FrameSource:
    import cv2

    if not path.is_file():
        if re.search(r"%\d*d|#|[*?]", path.name):
            raise UsageError(f"{path}: patterns of names are not read; name the folder, {path.parent}")
        raise ImageError(f"{path}: no such video, folder or camera; check the path")
    if is_image(path):
        raise UsageError(f"{path}: a single image; name its folder, or use `matcher match`")
    with path.open("rb") as file:
        start = file.read(4096)
    if start and b"\0" not in start and start.isascii():  # OpenCV would show it as a film of a terminal
        raise UsageError(f"{path}: a text file, not a video; name a video, a folder of images or a camera")
    capture = cv2.VideoCapture(str(path))
    # Frames stay as stored, like photos, and say by EXIF how they are to be turned.
    capture.set(cv2.CAP_PROP_ORIENTATION_AUTO, 0)
    turn = int(capture.get(cv2.CAP_PROP_ORIENTATION_META)) % 360
    announced = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
    if not capture.isOpened() or not capture.grab():
        raise ImageError(f"{path}: cannot be read as a video: damaged, or not of a known format; make it MP4")

    def shots(source: FrameSource) -> Iterator[SourceFrame]:
        held, number, more = None, 0, True  # the first one is grabbed, and not all formats can go back to it
        while more and (read := capture.retrieve())[0]:
            if held is not None:
                yield held
            seconds = capture.get(cv2.CAP_PROP_POS_MSEC) / 1000
            held = SourceFrame(f"frame {number}", seconds, np.ascontiguousarray(read[1][..., ::-1]))
            if turn in _EXIF:
                image = PIL.Image.fromarray(held.image)
                image.getexif()[PIL.Image.ExifTags.Base.Orientation] = _EXIF[turn]
                held = replace(held, image=image)
            number, more = number + 1, capture.grab()
        capture.release()
        if held is not None and source.count is not None and number < source.count:
            source.problem = f"{path}: ends after {number} of {source.count} frames; the last one is left out"
            held = replace(held, image=None)  # the decoder fills what is cut off with grey
        if held is not None:
            yield held

    wide, high = (int(capture.get(each)) for each in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT))
    note = f"{path} is shown turned by {turn}°; the camera and points are of {wide} x {high} stored pixels"
    return FrameSource(str(path), announced if announced > 0 else None, shots, notes=[note] if turn else [])


def _camera(number: int) -> FrameSource:
    import cv2

    # OpenCV prints warnings of its own where there is no device, so that is asked first.
    absent = sys.platform == "linux" and not Path(f"/dev/video{number}").exists()
    capture = None if absent else cv2.VideoCapture(number)
    if capture is None or not capture.isOpened():
        raise ImageError(f"no live camera {number}, or it is in use; connect it, or try another number")

    def shots(source: FrameSource) -> Iterator[SourceFrame]:
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

    return FrameSource(f"camera {number}", None, shots)
