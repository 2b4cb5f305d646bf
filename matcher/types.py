"""The nouns: `Image`, `Features`, `Matches`, `TwoViewGeometry`, and the parts that a pipeline is made of."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import cv2
import numpy as np

from matcher import geometry
from matcher.cameras import Camera
from matcher.config import GRID_KIND, GeometryKind, GeometryStatus
from matcher.errors import UsageError
from matcher.geometry import UPRIGHT, resize_points

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# NumPy arrays and torch tensors side by side, without loading torch.


def is_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def library(value: Any) -> ModuleType:
    """torch for a tensor, else NumPy: for functions that both have under one name."""
    return sys.modules["torch"] if is_tensor(value) else np


def to_numpy(value: Any) -> np.ndarray:
    """A tensor on any device, or an array, as an array; the same memory where that is possible."""
    if not is_tensor(value):
        return np.asarray(value)
    value = value.float() if "bfloat16" in str(value.dtype) else value  # NumPy has none
    plain = value.is_cpu and not value.requires_grad
    found = np.from_dlpack(value) if plain else value.numpy(force=True)
    return found if found.flags.writeable else value.numpy(force=True)  # some make it read-only


def thinned(values: Any, most: int) -> Any:
    """At most so many of the values, a sequence or an array (N, …), at equal distances."""
    return values[:: -(-len(values) // most) or 1]


def converted(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value.to(dtype)`, without a call where it has that type."""
    return value if value.dtype == dtype else value.to(dtype)


def all_finite(value: np.ndarray | Tensor) -> bool:
    """Whether no number is NaN or infinite."""
    # The sum shows it at a tenth of the cost, unless it overflows.
    xp = library(value)
    with np.errstate(all="ignore"):
        return bool(xp.isfinite(value.sum())) or bool(xp.isfinite(value).all())


@dataclass(frozen=True, eq=False, repr=False)
class Image:
    """One image, upright and resized, ready for a front end; `read_image` makes one of a file.

    >>> import numpy as np
    >>> from matcher import Image
    >>> image = Image(np.zeros((60, 80), np.uint8), size=(160, 120), scale=(0.5, 0.5))
    >>> image.to_stored(np.array([[0.0, 0.0]])).tolist()
    [[0.5, 0.5]]
    """

    pixels: np.ndarray  # (H, W) or (H, W, 3) RGB, uint8; uint16 if read as `deep`
    size: tuple[int, int]  # (width, height) as stored in the file, before orientation and resize
    scale: tuple[float, float] = (1.0, 1.0)  # (sx, sy) = resized / upright size, after rounding
    orientation: int = 1  # EXIF 1-8: how the stored pixels were turned to become `pixels`
    path: Path | None = None
    mask: np.ndarray | None = None  # (H, W) bool, True where keypoints may lie
    exif_orientation: int | None = None  # of the file, if it was not applied; else `orientation`
    # (H, W) grey, stored pixels at the file's resolution and depth, uint8 or uint16; refinement
    # reads it. And (H, W) bool, where it may.
    stored: np.ndarray | None = None
    stored_mask: np.ndarray | None = None

    @property
    def axes_to_stored(self) -> np.ndarray:
        """(2, 2) float64: the linear map from vectors of `pixels` to vectors of the stored image."""
        return UPRIGHT[self.orientation].T @ np.diag([1 / self.scale[0], 1 / self.scale[1]])

    def grey(self) -> np.ndarray:
        """(H, W): `pixels` without colour."""
        return self.pixels if self.pixels.ndim == 2 else cv2.cvtColor(self.pixels, cv2.COLOR_RGB2GRAY)

    def to_stored(self, points: np.ndarray) -> np.ndarray:
        """Points (…, 2) of `pixels` → stored pixels, float64."""
        upright = resize_points(points, (1 / self.scale[0], 1 / self.scale[1]))
        return geometry.upright_to_stored(upright, self.size, self.orientation)

    def from_stored(self, points: np.ndarray) -> np.ndarray:
        """Stored pixels (…, 2) → points of `pixels`, float64; the inverse of `to_stored`."""
        return resize_points(geometry.stored_to_upright(points, self.size, self.orientation), self.scale)

    def resized(self, factor: float) -> Image:
        """The same image with fewer or more pixels, and its mask."""
        height, width = self.pixels.shape[:2]
        size = (max(1, round(width * factor)), max(1, round(height * factor)))
        how = cv2.INTER_AREA if factor < 1 else cv2.INTER_CUBIC
        mask = self.mask
        if mask is not None:
            mask = cv2.resize(mask * np.uint8(255), size, interpolation=cv2.INTER_AREA) > 127
        scale = (self.scale[0] * size[0] / width, self.scale[1] * size[1] / height)
        return replace(self, pixels=cv2.resize(self.pixels, size, interpolation=how), mask=mask, scale=scale)

    def is_reduced(self, resize: int | None) -> bool:
        """Whether it was made smaller than to this longer side, because it was soft."""
        height, width = self.pixels.shape[:2]
        full, _ = geometry.resized(geometry.upright_size(self.size, self.orientation), resize)
        return width * height < full[0] * full[1]

    def features_fields(self) -> dict[str, Any]:
        """What `Features` take from their image: size, scale and orientations, as keyword arguments."""
        exif = self.orientation if self.exif_orientation is None else self.exif_orientation
        scale = self.scale[::-1] if self.orientation >= 5 else self.scale  # along the stored axes
        return {
            "size": np.asarray(self.size, dtype=np.float32),
            "scale": np.asarray(scale, dtype=np.float32),
            "exif_orientation": np.asarray(exif),
            "view_orientation": None if exif == self.orientation else np.asarray(self.orientation),
        }

    def __repr__(self) -> str:
        height, width = self.pixels.shape[:2]
        colour = "grey" if self.pixels.ndim == 2 else "RGB"
        parts = [f"{self.size[0]} x {self.size[1]} stored", f"{width} x {height} {colour}"]
        parts += [f"EXIF {self.orientation}"] * (self.orientation != 1)
        parts += ["masked"] * (self.mask is not None)
        parts += [] if self.path is None else [repr(str(self.path))]
        return f"Image({', '.join(parts)})"


SIFT_DIM = 128
UNNORMALISED = ("dedodeb", "dedodeg", GRID_KIND)  # front ends whose descriptors have any length
JOINED = "joined"  # kind of the features of several front ends
RAW_SIFT = (
    "these are raw SIFT descriptors, but matchers of SIFT take RootSIFT: build the features by "
    "Features.from_cv2(keypoints, descriptors, size), which converts them"
)


def root_sift(descriptors: np.ndarray) -> np.ndarray:
    """Raw SIFT (N, 128) → square roots of the L1-normalised values, float32 of norm 1.

    Arandjelović and Zisserman, Three things everyone should know to improve object retrieval, 2012.
    """
    total = np.maximum(descriptors.sum(axis=1, keepdims=True, dtype=np.float32), 1e-6)
    return np.sqrt(descriptors.astype(np.float32) / total)


def typical_norm(descriptors: np.ndarray) -> float:
    """Median Euclidean norm of descriptors (N, D) that are not zero; 1 where there is none."""
    norms = np.linalg.norm(descriptors.astype(np.float32), axis=-1)
    norms = norms[norms > 0]
    return float(np.median(norms)) if len(norms) else 1.0


def is_raw_sift(descriptors: np.ndarray) -> bool:
    """Whether (N, 128) descriptors look like OpenCV's SIFT: not negative, of norm 512 or so."""
    some = descriptors[:64]
    return some.shape[-1] == SIFT_DIM and bool((some >= 0).all()) and typical_norm(some) > 2


_EXIF = ("exif_orientation", "view_orientation")


@dataclass(frozen=True, eq=False, repr=False)
class Features:
    """Keypoints and descriptors of one image (no leading axis) or of a padded batch (leading axis B).

    Arrays may be NumPy or torch when users build it; positions become float32. They are kept as torch tensors
    in a process that has loaded torch, else as NumPy arrays; `np.asarray` reads both, and `numpy` converts.
    Descriptors are those the matcher was trained with: of norm 1, for SIFT as RootSIFT (`from_cv2` converts);
    networks refuse others.

    >>> from matcher import Features
    >>> Features(keypoints=[[10, 20], [30, 40]], descriptors=[[1, 0], [0, 1]], size=(64, 48))
    Features(2 keypoints, 2-d 'any' descriptors, 64 x 48 pixels)

    Raises:
        UsageError: shapes that do not fit, values that are not finite, keypoints outside the image, a size
            or orientation of no image, or raw SIFT descriptors under the name "sift".
    """

    # Any: lists and arrays of users, which become tensors.
    keypoints: Tensor | Any  # (..., N, 2) float32 xy in stored-image pixels
    descriptors: Tensor | Any  # (..., N, D), of norm 1 for all matchers but those of DeDoDe and LoFTR
    scores: Tensor | Any | None = None  # (..., N) detector score, larger is better; ones when absent
    size: Tensor | Any | None = None  # (..., 2) stored (width, height); required
    scales: Tensor | Any | None = None  # (..., N) keypoint diameter in stored pixels
    orientations: Tensor | Any | None = None  # (..., N) radians, from x towards y, in the stored frame
    # (..., N, 2, 2) columns are the axes of the described patch, stored pixels
    affine_frames: Tensor | Any | None = None
    cells: Tensor | Any | None = None  # (..., N, 2) column and row of the point on the grid of its front end
    grid: Tensor | Any | None = None  # (..., 2) columns and rows of that grid
    maps: Tensor | Any | None = None  # (..., C, h, w) finer map of the image, to refine matches on
    mask: Tensor | Any | None = None  # (..., N) bool, True = valid; all valid when absent
    exif_orientation: Tensor | Any | None = None  # (...) int64 EXIF code 1-8 of stored pixels; 1 if absent
    # (...) int64 EXIF code of the view in which positions are normalised, where a matcher turned the image
    view_orientation: Tensor | Any | None = None
    # (..., 2) size that the front end saw / stored size, along the stored x and y axes; 1 when absent
    scale: Tensor | Any | None = None
    kind: str = "any"  # the front end that made them; a matcher of another kind refuses them
    _PER_IMAGE = ("size", "scale", *_EXIF, "grid", "maps")

    def __post_init__(self) -> None:
        for name, value in self._fields().items():
            if value is not None:
                object.__setattr__(self, name, _as_field(value, name))
        if any(given is None for given in (self.keypoints, self.descriptors, self.size)):
            raise UsageError("Features need keypoints (..., N, 2), descriptors (..., N, D) and size (..., 2)")
        shape = tuple(self.keypoints.shape)
        if len(shape) < 2 or shape[-1] != 2:
            raise UsageError(f"Features.keypoints must be (..., N, 2), not {shape}")
        leading, points = shape[:-2], shape[:-1]
        wanted = dict.fromkeys(("scores", "scales", "orientations", "mask"), points)
        wanted |= dict.fromkeys(("size", "scale", "grid"), (*leading, 2)) | dict.fromkeys(_EXIF, leading)
        wanted |= {"keypoints": shape, "affine_frames": (*shape, 2), "cells": shape}
        wanted["descriptors"] = (*points, *self.descriptors.shape[-1:])
        wanted["maps"] = () if self.maps is None else (*leading, *self.maps.shape[-3:])
        for name, value in self._fields().items():
            if value is None:
                continue
            if tuple(value.shape) != wanted[name]:
                raise UsageError(f"Features.{name} must be {wanted[name]}, not {tuple(value.shape)}")
            if not all_finite(value):
                raise UsageError(f"Features.{name} holds values that are not finite (NaN or infinity)")
            if name in _EXIF and not bool(((value >= 1) & (value <= 8)).all()):
                raise UsageError(f"Features.{name} must be an EXIF orientation, 1 to 8")
        self._fill_defaults()
        if not bool((self.size > 0).all() & (self.scale > 0).all()):
            raise UsageError("Features.size and Features.scale must be positive")
        half = self.size[..., None, :] / 2
        inside = (abs(self.keypoints + 0.5 - half) <= half + 0.01 * half.max() + 2).all(-1)  # or nearly
        if (count := int((self.mask & ~inside).sum())) > 0.01 * int(self.mask.sum()):  # fewer do no harm
            raise UsageError(
                f"{count} of {len(self)} Features.keypoints lie outside the image of {self.size.tolist()}: "
                "give x, y in its pixels, and its size as (width, height)"
            )
        some = self.descriptors[..., :64, :].reshape(-1, max(self.descriptors.shape[-1], 1))[:64]
        if self.kind == "sift" and is_raw_sift(to_numpy(some)):
            raise UsageError(RAW_SIFT)

    def _fields(self) -> dict[str, Any]:
        """All but `kind`."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "kind"}

    def _fill_defaults(self) -> None:
        points, xp = self.keypoints[..., 0], library(self.keypoints)
        ones = {"scores": (points, None), "mask": (points, bool), "scale": (self.size, None)}
        ones["exif_orientation"] = (self.size[..., 0], xp.int64)
        for name, (shaped, dtype) in ones.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, xp.ones_like(shaped, dtype=dtype))

    @property
    def matched_orientation(self) -> Tensor:
        """(...) int64 EXIF code of the view in which positions are normalised for matching."""
        return self.exif_orientation if self.view_orientation is None else self.view_orientation

    @property
    def image_size(self) -> tuple[int, int]:
        """(width, height) of the stored image, of features of one image; `UsageError`: of a batch."""
        if self.size.ndim != 1:
            raise UsageError("features of a batch have several sizes; take it apart by unstack()")
        return tuple(round(side) for side in to_numpy(self.size).tolist())

    def __len__(self) -> int:
        """Points per image, padding included."""
        return self.keypoints.shape[-2]

    def __repr__(self) -> str:
        parts = [f"{len(self)} keypoints", f"{self.descriptors.shape[-1]}-d {self.kind!r} descriptors"]
        if self.keypoints.ndim == 2:
            parts.append("{:.0f} x {:.0f} pixels".format(*self.size.tolist()))
        else:
            parts.insert(0, f"batch {tuple(self.keypoints.shape[:-2])}")
        return f"Features({', '.join(parts)})"

    @classmethod
    def of_valid(cls, **values: Tensor | str) -> Features:
        """As the constructor, unchecked, of tensors of the right types: on a GPU each check waits for it."""
        made = object.__new__(cls)
        for f in fields(cls):
            object.__setattr__(made, f.name, values.pop(f.name, f.default))
        if values:
            raise TypeError(f"Features have no field {', '.join(values)}")
        made._fill_defaults()
        return made

    @classmethod
    def from_image(
        cls,
        image: Image,
        points: np.ndarray,
        descriptors: np.ndarray | Tensor,
        *,
        scores: np.ndarray | Tensor | None = None,
        diameters: np.ndarray | None = None,
        angles: np.ndarray | None = None,
        kind: str = "any",
    ) -> Features:
        """What a front end found on `image.pixels`, carried back to the stored image; errors as above.

        >>> import numpy as np
        >>> from matcher import Features, Image
        >>> image = Image(np.zeros((60, 80), np.uint8), size=(160, 120), scale=(0.5, 0.5))
        >>> Features.from_image(image, np.array([[4.5, 2.0]]), np.ones((1, 4))).keypoints.tolist()
        [[9.5, 4.5]]

        Args:
            image: what the front end was given.
            points: (N, 2) xy in pixels of `image.pixels`, whose first pixel's centre is (0, 0).
            descriptors, scores, kind: as of the constructor.
            diameters: (N,) of the keypoints, pixels of `image.pixels`; they become `scales`.
            angles: (N,) radians from x towards y on `image.pixels`; they become `orientations`.
        """
        turn = UPRIGHT[image.orientation].T
        return cls(
            image.to_stored(np.asarray(points)).astype(np.float32),
            descriptors,
            scores,
            scales=None if diameters is None else diameters / np.float32(np.sqrt(np.prod(image.scale))),
            orientations=None if angles is None else geometry.turn_angles(angles, turn).astype(np.float32),
            kind=kind,
            **image.features_fields(),
        )

    @classmethod
    def from_cv2(
        cls,
        keypoints: Sequence[cv2.KeyPoint],
        descriptors: np.ndarray | None,
        size: tuple[int, int],
        *,
        kind: str = "sift",
    ) -> Features:
        """What OpenCV's `detectAndCompute` returns; raw SIFT descriptors become RootSIFT.

        >>> import cv2, numpy as np
        >>> from matcher import Features
        >>> image = np.random.default_rng(0).integers(0, 255, (48, 64), dtype=np.uint8)
        >>> features = Features.from_cv2(*cv2.SIFT_create().detectAndCompute(image, None), size=(64, 48))
        >>> round(float(np.linalg.norm(features.descriptors[0])), 3)
        1.0

        Args:
            keypoints: in stored pixels.
            descriptors: (N, D) float; None where there are no keypoints.
            size: (width, height) of the image.
            kind: the front end; "sift" is what `hybrid` and `lightglue-sift` take.

        Raises:
            UsageError: binary descriptors, such as ORB's, and what the constructor refuses.
        """
        values = np.zeros((0, SIFT_DIM), np.float32) if descriptors is None else np.asarray(descriptors)
        if values.dtype == np.uint8 and values.shape[-1:] != (SIFT_DIM,):
            raise UsageError("binary descriptors (ORB, BRISK, AKAZE) are not supported; use SIFT's")
        if kind == "sift" and is_raw_sift(values):
            values = root_sift(values)
        table = np.array([(*k.pt, k.size, k.angle, k.response) for k in keypoints], np.float32).reshape(-1, 5)
        diameters, angles, scores = table[:, 2], np.deg2rad(table[:, 3]), table[:, 4]
        return cls(table[:, :2], values, scores, size, scales=diameters, orientations=angles, kind=kind)

    def to_cv2(self) -> list[cv2.KeyPoint]:
        """The valid keypoints of one image as OpenCV's, in stored pixels; `UsageError` for a batch."""
        if self.keypoints.ndim != 2:
            raise UsageError("features of one image are needed; take a batch apart by unstack()")
        chosen = self.select(self.mask)
        sizes, angles = np.ones(len(chosen)), np.full(len(chosen), -1.0)
        if chosen.scales is not None:
            sizes = to_numpy(chosen.scales)
        if chosen.orientations is not None:
            angles = np.rad2deg(to_numpy(chosen.orientations)) % 360
        table = np.column_stack([to_numpy(chosen.keypoints), sizes, angles, to_numpy(chosen.scores)])
        return [cv2.KeyPoint(*row) for row in table.tolist()]

    def _map(self, change: Callable[[str, Any], Any]) -> Features:
        values = self._fields().items()
        return self.with_valid(**{k: None if v is None else change(k, v) for k, v in values})

    def with_valid(self, **values: Tensor | None) -> Features:
        """The same with other fields, unchecked as of `of_valid`."""
        changed = copy.copy(self)
        for name, value in values.items():
            object.__setattr__(changed, name, value)
        return changed

    def to(self, device: torch.device | str) -> Features:
        """The same features as torch tensors on a device; themselves if they are that."""
        import torch

        if is_tensor(self.keypoints):
            there = self.keypoints.device == torch.device(device)
            return self if there else self._map(lambda _, value: value.to(device))
        return replace(self).to(device)  # torch is loaded now, so that fields become tensors

    def numpy(self) -> dict[str, np.ndarray]:
        """All fields that are there as NumPy arrays, by name, but for `kind`."""
        return {name: to_numpy(value) for name, value in self._fields().items() if value is not None}

    def select(self, index: Tensor | np.ndarray) -> Features:
        """The points named by `index` ((K,) int64 or (N,) bool) of one image."""
        return self._map(lambda name, value: value if name in self._PER_IMAGE else value[index])

    def entries(self, chosen: Tensor | Sequence[int], count: int | None = None) -> Features:
        """Some images of a batch, as a batch, with at most `count` points each: a front end's strongest."""
        return self._map(lambda k, v: v[chosen] if k in self._PER_IMAGE else v[chosen][:, :count])

    def unstack(self) -> list[Features]:
        """A padded batch taken apart into single images without their padding."""
        singles = [self._map(lambda _, value, b=b: value[b]) for b in range(self.keypoints.shape[0])]
        return [single.select(single.mask) for single in singles]

    @staticmethod
    def stack(items: Sequence[Features]) -> Features:
        """Single images padded with masked zeros to one batch; `UsageError` for mixed kinds or no image."""
        kinds = sorted({f"{item.kind} ({item.descriptors.shape[-1]}-d)" for item in items})
        if len(kinds) != 1:
            raise UsageError(f"a batch needs features of one kind, not of {', '.join(kinds) or 'no image'}")
        columns = {}
        for name in items[0]._fields():
            values = [getattr(item, name) for item in items]
            if name == "view_orientation" and any(value is not None for value in values):
                values = [item.matched_orientation for item in items]
            absent = any(value is None for value in values)
            columns[name] = None if absent else _as_field(_stack_padded(values), name)
        return items[0].with_valid(**columns)


def _as_field(value: Any, name: str) -> np.ndarray | Tensor:
    """A field of `Features` in its own type: a tensor as it is, else a copy as this process keeps fields."""
    torch = sys.modules.get("torch")
    kind = {"mask": "bool", **dict.fromkeys(_EXIF, "int64")}.get(name, "float32")
    if is_tensor(value):
        as_given = name == "descriptors" and value.is_floating_point()
        return value if as_given else converted(value, getattr(torch, kind))
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise UsageError(f"Features.{name} is no array of numbers ({error})") from None
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        raise UsageError(f"Features.{name} must hold numbers of at most 64 bits, not {array.dtype}")
    # A copy that keeps scalars scalar, which ascontiguousarray would not.
    array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    if name != "descriptors" or array.dtype.kind != "f":
        array = array.astype(kind, copy=False)
    return array if torch is None else torch.from_numpy(array)


def _stack_padded(values: Sequence[np.ndarray | Tensor]) -> np.ndarray | Tensor:
    """Arrays or tensors of any sizes along a new first axis, with zeros where they are shorter."""
    if len(values) == 1:
        return values[0][None]
    shape = [len(values), *map(max, zip(*(value.shape for value in values), strict=True))]
    widest = max(values, key=lambda value: value.dtype.itemsize)
    padded = widest.new_zeros(shape) if is_tensor(widest) else np.zeros(shape, widest.dtype)
    for index, value in enumerate(values):
        padded[(index, *map(slice, value.shape))] = value
    return padded


# Matches of a pair and the geometry that they agree with; NumPy, K matches.

UNMATCHED = -1  # in place of a partner's index, and for keypoints without a match
MATCHED = 0  # among the fates of keypoints, beside UNMATCHED and n > 0: pruned after layer n
# What refinement did to a match: "refined", or why it was left as it was.
REFINEMENTS = ("refined", "outside", "no_map", "flat", "moved_far", "low_correlation", "not_converged")


@dataclass(frozen=True, eq=False, repr=False)
class MatchRefinement:
    """What least-squares matching on the images says of K matches: refined, or left where they were, because

    - `outside`: half of the window around it is on no image, or masked, or it would move there;
    - `no_map`: the matches around it do not tell how its surroundings are deformed;
    - `flat`: there is no contrast around it;
    - `moved_far`: the windows would fit best where the match cannot be;
    - `low_correlation`: neither grey values nor gradients look alike there;
    - `not_converged`: there is no clear best place.
    """

    status: np.ndarray  # (K,) uint8, an index into `matcher.types.REFINEMENTS`
    covariances: np.ndarray  # (K, 2, 2) float32 of points1, in stored pixels²; of an unrefined match a guess
    correlations: np.ndarray  # (K,) float32 of the windows, in [-1, 1]

    @property
    def accepted(self) -> np.ndarray:
        """(K,) bool: matches that were refined."""
        return self.status == 0

    def select(self, index: np.ndarray) -> MatchRefinement:
        """That of some matches, by indices or a mask."""
        return MatchRefinement(self.status[index], self.covariances[index], self.correlations[index])

    def counts(self) -> dict[str, int]:
        """The number of matches by status, those that occur."""
        found = np.bincount(self.status, minlength=len(REFINEMENTS)).tolist()
        return {name: count for name, count in zip(REFINEMENTS, found, strict=True) if count}

    def __repr__(self) -> str:
        counts = [f"{count} {name}" for name, count in self.counts().items()]
        return f"MatchRefinement({', '.join(counts) or 'none'})"


@dataclass(frozen=True, eq=False, repr=False)
class Matches:
    """Mutual matches of one pair, best first.

    >>> import numpy as np
    >>> from matcher import Matches
    >>> points = np.zeros((1, 2), np.float32)
    >>> Matches(np.array([[4, 7]]), points, points, np.array([0.75], np.float32))
    Matches(1 match, scores 0.75 to 0.75)
    """

    indices: np.ndarray  # (K, 2) int64 into the features of image 0 and 1
    points0: np.ndarray  # (K, 2) float32 stored pixels
    points1: np.ndarray  # (K, 2)
    # (K,) float32 in [0, 1]: the probability of being within 3 pixels where a preset is calibrated, given an
    # epipolar geometry, not a homography, once it is known; else what the network or the ratio test gave.
    scores: np.ndarray
    layers_run: int = 0
    kept0: int = 0  # points not pruned
    kept1: int = 0
    refinement: MatchRefinement | None = None  # None where the images were not looked at again
    prior: np.ndarray | None = None  # (K,) float32, see `prior_scores`; None: they are `scores`
    # (L, 2, 2) float32 points of image 0 and 1 of matches left out: of a stamp, logo or frame on both
    overlay: np.ndarray = field(default_factory=lambda: np.zeros((0, 2, 2), np.float32))

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("indices", "points0", "points1", "scores")}
        if other := [name for name, value in given.items() if not isinstance(value, np.ndarray)]:
            raise UsageError(f"Matches.{other[0]} must be an array of NumPy; from_indices takes lists too")
        shapes = [value.shape for value in given.values()]
        if shapes != 3 * [(len(self.scores), 2)] + [(len(self.scores),)]:
            raise UsageError(f"Matches need indices and points of (K, 2) and scores of (K,), not {shapes}")

    @classmethod
    def from_indices(
        cls, indices: np.ndarray, keypoints0: np.ndarray, keypoints1: np.ndarray, scores: np.ndarray
    ) -> Matches:
        """Matches from pairs of keypoint indices, sorted best first.

        >>> import numpy as np
        >>> from matcher import Matches
        >>> keypoints = np.arange(10.0).reshape(5, 2)
        >>> found = Matches.from_indices([[0, 1], [3, 2]], keypoints, keypoints, [0.5, 0.9])
        >>> found.points0.tolist(), found.scores.round(2).tolist()
        ([[6.0, 7.0], [0.0, 1.0]], [0.8999999761581421, 0.5])

        Args:
            indices: (K, 2) into keypoints0 and keypoints1; a keypoint occurs at most once on its side.
            keypoints0, keypoints1: (N, 2) and (M, 2) stored pixels, NumPy or torch.
            scores: (K,) in [0, 1].

        Raises:
            UsageError: arrays of other shapes, values that are not finite, a score beyond [0, 1], an index
                without a keypoint, or one that occurs twice.
        """
        given = (indices, np.float64), *((x, np.float32) for x in (keypoints0, keypoints1, scores))
        try:
            rows, *sides, exact = (np.asarray(to_numpy(value), dtype) for value, dtype in given)
        except (TypeError, ValueError) as error:
            raise UsageError(f"matches are made of arrays of numbers ({error})") from None
        rows = rows if rows.size else rows.reshape(0, 2)
        if rows.ndim != 2 or rows.shape[1] != 2 or not (rows == np.floor(rows)).all():
            raise UsageError(f"indices of matches must be (K, 2) whole numbers, not of {rows.shape}")
        for number, (points, index) in enumerate(zip(sides, rows.T, strict=True)):
            name = f"keypoints{number}"
            if points.ndim != 2 or points.shape[1] != 2 or not all_finite(points):
                raise UsageError(f"{name} must be (N, 2) finite numbers, not of {points.shape}")
            if len(index) and not 0 <= index.min() <= index.max() < len(points):
                raise UsageError(f"indices of matches name other points than the {len(points)} of {name}")
            if len(np.unique(index)) < len(index):
                raise UsageError(f"indices of matches name a point of {name} twice")
        scores = exact.clip(0, 1)
        if scores.shape != (len(rows),) or not np.allclose(scores, exact):  # but for rounding
            raise UsageError(f"scores of {len(rows)} matches must be as many, in [0, 1], not {exact}")
        indices = rows.astype(np.int64)
        order = np.argsort(-scores, kind="stable")
        points = (side[index] for side, index in zip(sides, indices[order].T, strict=True))
        return cls(indices[order], *points, scores[order], 0, *map(len, sides))

    @property
    def prior_scores(self) -> np.ndarray:
        """(K,) float32 in [0, 1], after refinement, by which geometry and verdict weigh the matches."""
        return self.scores if self.prior is None else self.prior

    @property
    def covariances(self) -> np.ndarray | None:
        """(K, 2, 2) of points1, in stored pixels², where the images were looked at again."""
        return None if self.refinement is None else self.refinement.covariances

    def select(self, index: np.ndarray) -> Matches:
        """Some matches, by indices or a mask (K,)."""
        names = ("indices", "points0", "points1", "scores", "prior")
        chosen = {n: None if getattr(self, n) is None else getattr(self, n)[index] for n in names}
        return replace(self, **chosen, refinement=self.refinement and self.refinement.select(index))

    def __len__(self) -> int:
        return len(self.indices)

    def __repr__(self) -> str:
        if not len(self):
            return "Matches(none)"
        count = "1 match" if len(self) == 1 else f"{len(self)} matches"
        layers = f", {self.layers_run} layers" if self.layers_run else ""
        return f"Matches({count}, scores {self.scores.min():.2f} to {self.scores.max():.2f}{layers})"

    def to_cv2(self) -> list[cv2.DMatch]:
        """OpenCV's, for `Features.to_cv2`: query is image 0, train image 1, distance 1 − score."""
        rows = zip(self.indices.tolist(), self.scores.tolist(), strict=True)
        return [cv2.DMatch(query, train, 1.0 - score) for (query, train), score in rows]


class Repetition(NamedTuple):
    """Whether things that also occur elsewhere explain a geometry (`matcher.verify.repetition`), the worse of
    both images."""

    unrepeated: float  # share of the inliers that are of things which do not repeat
    found: float  # how often keypoints that do not repeat are inliers, relative to those around them that do
    share: float = 1.0  # of the keypoints around the inliers that do not repeat, how many are among these
    differing: float = (
        0.0  # how unlike one place the rest around them is; if most repeat, what does not; mean
    )

    @property
    def repetitive(self) -> bool:
        """Whether most inliers are of things that repeat."""
        return self.unrepeated < 0.5


@dataclass(frozen=True, eq=False, repr=False)
class TwoViewGeometry:
    """A model of how two views relate, or the reason why there is none.

    `status` is whether to use the model:

    - `ok`: use it.
    - `ambiguous`: the inliers are right and lie on one plane, which allows several poses, `alternatives`;
      too little lies off it to tell which is right. In a `Result` there is no matrix and no pose.
    - `low_inliers`: fewer inliers than required, or no more than chance gives, also among the matches of
      several passes; in a `Result` the model is then in `rejected` alone.
    - `mirrored`: neighbouring matches lie the other way round in image 1, as no two views of a surface do:
      one image is mirrored, or the matches are wrong.
    - `too_few`, `degenerate`, `no_model`: there is none; too few distinct points, points on a line, or
      nothing that fits. `degenerate` with a `homography`: the inliers are right and agree with that but for a
      few, as they lie on one plane, or the views only rotate.
    - `not_estimated`: no geometry was requested.

    >>> import numpy as np
    >>> from matcher import TwoViewGeometry
    >>> TwoViewGeometry("homography", "too_few", np.zeros(3, bool))
    TwoViewGeometry(homography: too_few, 0 of 3 inliers)
    """

    kind: GeometryKind
    status: GeometryStatus
    inliers: np.ndarray  # (K,) bool
    # (3, 3) float64. Homography: stored pixels of image 0 → image 1. Fundamental: x1ᵀ F x0 = 0 in stored
    # pixels; essential: the same in normalised coordinates of the cameras.
    matrix: np.ndarray | None = None
    cam1_from_cam0: np.ndarray | None = None  # (4, 4) float64, unit translation; essential only
    # Of homographies only, where `matrix` is that of the plane with most inliers:
    planes: np.ndarray | None = None  # (K,) int64 index into `matrices`, −1 for outliers
    matrices: np.ndarray | None = None  # (P, 3, 3) float64, most inliers first
    rejected: TwoViewGeometry | None = None  # what was estimated and is not to be used, for explanations
    # Of fundamental and essential, where most inliers lie on one plane, or the views only rotate:
    homography: np.ndarray | None = None  # (3, 3) float64, (undistorted) stored pixels of image 0 → image 1
    alternatives: tuple[np.ndarray, ...] = ()  # poses (4, 4) that a plane allows, the likeliest first
    evidence: float | None = None  # logarithm of how much likelier the first of them is than the second
    repetition: Repetition | None = None  # None where no descriptors were at hand

    @property
    def planar(self) -> bool:
        """Whether most inliers of a fundamental or essential matrix lie on one plane."""
        return self.homography is not None

    @property
    def repetitive(self) -> bool:
        """Whether most that agrees is of things that occur several times."""
        repeated = (self.rejected or self).repetition
        return repeated is not None and repeated.repetitive

    @property
    def described(self) -> str:
        """The status, "planar" and "repetitive" where that holds, as tables show them."""
        return self.status + ", planar" * self.planar + ", repetitive" * self.repetitive

    @property
    def likelier(self) -> str:
        """How much likelier the first of `alternatives` is, to be added to a sentence; else empty."""
        likelier = f", the first pose e^{self.evidence or 0:.1f} times as likely as the second"
        return likelier * (self.evidence is not None)

    @property
    def verified(self) -> bool:
        """Whether the inliers are right, even if they do not fix the model, as those on a plane may not."""
        return self.status == "ok" or (self.status in ("ambiguous", "degenerate") and self.planar)

    def without_rejected(self) -> TwoViewGeometry:
        """The same where the status is `ok`; else `rejected` has the model, and inliers not `verified`."""
        if self.status in ("ok", "not_estimated"):
            return self
        rejected = self.rejected or self
        if self.verified:
            return replace(self, matrix=None, cam1_from_cam0=None, rejected=rejected)
        return TwoViewGeometry(self.kind, self.status, np.zeros_like(self.inliers), rejected=rejected)

    def reordered(self, order: np.ndarray) -> TwoViewGeometry:
        """The same of matches in another order (K,)."""
        planes = None if self.planes is None else self.planes[order]
        rejected = self.rejected and self.rejected.reordered(order)
        return replace(self, inliers=self.inliers[order], planes=planes, rejected=rejected)

    def __repr__(self) -> str:
        count = int(np.count_nonzero(self.inliers))
        return f"TwoViewGeometry({self.kind}: {self.described}, {count} of {len(self.inliers)} inliers)"

    def to_dict(self) -> dict[str, Any]:
        """Kind, status, number of inliers and models as plain values, ready for `json.dumps`."""
        models = {n: getattr(self, n) for n in ("matrix", "cam1_from_cam0", "matrices", "homography")}
        repeated = (self.rejected or self).repetition
        return {
            "kind": self.kind,
            "status": self.status,
            "inliers": int(np.count_nonzero(self.inliers)),
            "rejected_inliers": None if self.rejected is None else int(self.rejected.inliers.sum()),
            "planar": self.planar,
            "alternatives": [pose.tolist() for pose in self.alternatives],
            "evidence": self.evidence,
            "repetition": repeated and repeated._asdict(),
            **{name: None if model is None else model.tolist() for name, model in models.items()},
        }


def best_first(matches: Matches, geometry: TwoViewGeometry) -> tuple[Matches, TwoViewGeometry]:
    """The matches by falling score, equal ones in their order, and the geometry with their inliers."""
    order = np.argsort(-matches.scores, kind="stable")
    return matches.select(order), geometry.reordered(order)


class Extractor(Protocol):
    """A front end."""

    def __call__(self, images: Sequence[Image]) -> list[Features]:
        """Features of each image, unpadded."""


class Matcher(Protocol):
    """Features of B pairs → matches of each.

    One whose scores are probabilities may have a `calibration` (`matcher.config.CalibrationConfig`), by which
    a pipeline corrects those of refined and of verified matches; the scores of others stay as they are.
    """

    def __call__(self, features0: Features, features1: Features) -> list[Matches]:
        """Both arguments are batches."""


class Estimator(Protocol):
    """Matched points → two-view geometry.

    One whose attribute `takes_covariances` is true is also given `covariances`, of points1 in stored pixels²
    (K, 2, 2), where matches have them.
    """

    def __call__(
        self,
        points0: np.ndarray,
        points1: np.ndarray,
        *,
        cameras: tuple[Camera, Camera] | None = None,
        scores: np.ndarray | None = None,
        thresholds_scale: float = 1.0,
    ) -> TwoViewGeometry:
        """Estimate robustly; bad points give a status, never an error."""


def checked_pairs(pairs: Any) -> Sequence[tuple[Features, Features]]:
    """The pairs, if each is two `Features` of one image; else `UsageError`."""
    if not isinstance(pairs, (list, tuple)):
        raise UsageError(f"pairs must be a list of pairs of Features, not {type(pairs).__name__}")
    for number, pair in enumerate(pairs):
        given = pair if isinstance(pair, (list, tuple)) else [pair]
        if len(given) != 2 or any(not isinstance(f, Features) or f.keypoints.ndim != 2 for f in given):
            found = " and ".join(repr(f) if isinstance(f, Features) else type(f).__name__ for f in given)
            raise UsageError(
                f"pairs[{number}] must be two Features of one image each, not {found or 'none'}; "
                "take a batch apart by unstack()"
            )
    return pairs


def one_for_each(found: Any, kind: type, count: int, role: str, part: object) -> list[Any]:
    """What a part of a pipeline, perhaps a user's own, returned, if it is one of this kind for each."""
    listed = list(found) if hasattr(found, "__iter__") else []
    if len(listed) != count or not all(isinstance(each, kind) for each in listed):
        raise UsageError(f"the {role} {type(part).__name__} must return a list of {count} {kind.__name__}")
    return listed


def strongest_rows(features: Features, count: int) -> np.ndarray:
    """Rows of the `count` keypoints of the highest scores, in their order; of equal ones the first."""
    return np.sort(np.argsort(-to_numpy(features.scores), kind="stable")[:count])


def strongest(features: Features, count: int) -> Features:
    """The features of one image, at most `count`, those of the highest scores, in their order."""
    return features if len(features) <= count else features.select(strongest_rows(features, count))
