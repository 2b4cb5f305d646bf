"""Which photos share a camera, and what is known about it before the reconstruction.

COLMAP's pixels: the corner of the first pixel is (0, 0), its centre (0.5, 0.5).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import hypot
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from matcher.data.camera import CAMERA_MODELS, Camera
from matcher.data.rig_config import RigConfig
from matcher.errors import UsageError

if TYPE_CHECKING:
    from matcher.collection.records import StoredImage

Sharing = Literal["auto", "single", "each"]
HALF_PIXEL = 0.5
GUESSED_FOCAL = 1.2  # of the longer side, a moderate wide angle, where nothing is known
FULL_FRAME = (36.0, 24.0)  # mm; the equivalent focal length refers to its diagonal
_EXIF, _FOCAL, _FOCAL_35MM = 0x8769, 0x920A, 0xA405
_MAKE, _MODEL = 0x010F, 0x0110

# COLMAP's models that can start without distortion.
MODELS = tuple(name for name in CAMERA_MODELS if name != "FOV")


@dataclass(frozen=True)
class CameraChoice:
    """How an export or a reconstruction sets up cameras.

        >>> from matcher.collection.exporting.cameras import CameraChoice
        >>> CameraChoice(model="OPENCV", sharing="single").camera is None
        True

    Raises:
        UsageError: an unknown model or way of sharing.
    """

    camera: Camera | None = None  # of all photos, stored pixels; None: from the store, EXIF or a guess
    sharing: Sharing = "auto"  # same size, folder and EXIF · one for all photos · each photo its own
    model: str = "SIMPLE_RADIAL"  # of cameras that are not given
    known: Mapping[str, Camera] = field(default_factory=dict)  # by name of image, such as those of a model
    refine_known: bool = False  # adjust those of `known` in the reconstruction
    rig: RigConfig | None = None  # cameras that are fixed to each other; each has its own intrinsics

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise UsageError(f"the camera model must be one of {', '.join(MODELS)}, not {self.model!r}")
        if self.sharing not in ("auto", "single", "each"):
            raise UsageError(f"cameras are shared auto, single or each, not {self.sharing!r}")
        if self.rig is not None and self.sharing != "auto":
            raise UsageError("the pictures of each camera of a rig share it: leave the sharing at auto")


@dataclass(frozen=True)
class Intrinsics:
    """One camera in COLMAP's terms; the centre of the first pixel is (0.5, 0.5)."""

    model: str
    size: tuple[int, int]
    params: tuple[float, ...]
    given: bool  # by the user: it is not refined
    focal_known: bool  # given or from EXIF


@dataclass(frozen=True)
class _Exif:
    make: str = ""
    model: str = ""
    focal: float = 0.0  # mm
    focal_35mm: float = 0.0


def check_used(choice: CameraChoice, names: Iterable[str]) -> None:
    """Refuse a camera for all photos where every photo has another one.

    Raises:
        UsageError: the camera would be that of none of the photos.
    """
    if choice.camera is None:
        return
    of_rigs, others = _cameras_of_rigs(choice), set()
    for name in names:
        mounted = choice.rig and choice.rig.camera_of(name)
        other = (of_rigs.get(mounted.prefix) if mounted else None) or choice.known.get(name)
        if other is None or _same(other, choice.camera):
            return
        others.add(name)
    if others:
        where = "their poses" if choice.rig is None else f"{choice.rig.source}, or with their poses"
        raise UsageError(
            f"the camera that is given would be that of no photo: all {len(others)} have theirs in {where}; "
            "leave it out"
        )


def group_cameras(
    images: Sequence[StoredImage], choice: CameraChoice | None = None
) -> list[tuple[Intrinsics, list[StoredImage]]]:
    """The cameras of a collection, each with its photos.

    Raises:
        UsageError: one camera for photos of different sizes, one that was calibrated at another size, or one
            that no photo would have.
    """
    choice = choice or CameraChoice()
    check_used(choice, (image.name for image in images))
    groups: dict[tuple, list[StoredImage]] = {}
    found: dict[tuple, _Exif] = {}
    of_rigs = _cameras_of_rigs(choice)
    for image in images:
        mounted = choice.rig and choice.rig.camera_of(image.name)
        of_rig = of_rigs.get(mounted.prefix) if mounted else None
        known = of_rig or choice.known.get(image.name) or choice.camera or image.camera
        if known is not None and known.size not in (None, image.size):
            raise UsageError(
                f"{image.name} has {image.size[0]} x {image.size[1]} pixels, but its camera was given for "
                f"{known.size[0]} x {known.size[1]}"
            )
        exif = _Exif() if known is not None else read_exif(image.path)
        key: tuple = (image.size, known)
        if choice.sharing == "each":
            key = (*key, image.name)
        elif mounted:
            key = (*key, mounted.prefix)
        elif choice.sharing == "auto" and known is None:
            key = (*key, str(Path(image.name).parent), exif)
        groups.setdefault(key, []).append(image)
        found.setdefault(key, exif)
    if choice.rig is not None:
        _check_rig(choice.rig, list(groups.values()))
    if choice.sharing == "single" and len(groups) > 1:
        sizes = ", ".join(sorted({f"{w}x{h}" for (w, h), *_ in groups}))
        raise UsageError(
            f"one camera cannot take photos of {sizes} pixels or of several calibrations; use auto"
        )
    adjustable = set(choice.known.values()) if choice.refine_known else set()
    if choice.camera is not None:  # which is not refined, wherever it comes from
        adjustable = {each for each in adjustable if not _same(each, choice.camera)}
    adjustable -= set(choice.rig.intrinsics().values()) if choice.rig is not None else set()
    return [
        (_intrinsics(key, found[key], choice.model, given=key[1] not in adjustable), group)
        for key, group in groups.items()
    ]


def _same(first: Camera, second: Camera) -> bool:
    """Whether two cameras have the same intrinsics; one may not say its size."""
    return replace(first, size=None) == replace(second, size=None)


def _cameras_of_rigs(choice: CameraChoice) -> dict[str, Camera]:
    """By prefix: what the file of the rig says, else the camera of any of its pictures that is known."""
    if choice.rig is None:
        return {}
    mounted = {name: choice.rig.camera_of(name) for name in choice.known}
    known = {each.prefix: choice.known[name] for name, each in mounted.items() if each is not None}
    return known | choice.rig.intrinsics()


def _check_rig(rig: RigConfig, groups: list[list[StoredImage]]) -> None:
    first: dict[str, StoredImage] = {}
    for image, *_ in groups:
        mounted = rig.camera_of(image.name)
        if mounted and (other := first.setdefault(mounted.prefix, image)) is not image:
            raise UsageError(
                f"{rig.source}: all pictures of {mounted.prefix!r} are by one camera, but {other.name} has "
                f"{other.size[0]} x {other.size[1]} pixels and {image.name} {image.size[0]} x "
                f"{image.size[1]}, or their intrinsics differ"
            )


def _intrinsics(key: tuple, exif: _Exif, model: str, *, given: bool) -> Intrinsics:
    size, camera = key[:2]
    if camera is not None:
        return Intrinsics(camera.model, size, camera.to_colmap()[1], given=given, focal_known=True)
    focal = exif.focal_35mm / hypot(*FULL_FRAME) * hypot(*size)
    focals, more = CAMERA_MODELS[model]
    start = (focal or GUESSED_FOCAL * max(size),) * focals
    params = (*start, size[0] / 2, size[1] / 2, *(0.0,) * more)
    return Intrinsics(model, size, params, given=False, focal_known=focal > 0)


def read_exif(path: Path) -> _Exif:
    """Camera facts from a photo's EXIF header; empty if it cannot be read."""
    import PIL.Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with PIL.Image.open(path) as photo:
                tags = photo.getexif()
                more = tags.get_ifd(_EXIF)
                return _Exif(
                    str(tags.get(_MAKE, "")),
                    str(tags.get(_MODEL, "")),
                    _positive(more.get(_FOCAL)),
                    _positive(more.get(_FOCAL_35MM)),
                )
    except Exception:  # a header can be wrong in any way, and nothing depends on it
        return _Exif()


def _positive(value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, ZeroDivisionError):
        return 0.0
    return number if 0 < number < 1e5 else 0.0
