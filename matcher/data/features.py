"""Keypoints and descriptors of an image or of a padded batch of images.

Letters for shapes: B images, N keypoints, D descriptor size. Points are xy in stored pixels; the centre of
the first pixel is (0, 0); `size` is (width, height).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from matcher.data.descriptors import SIFT_DIM, is_raw_sift, root_sift
from matcher.data.field_arrays import ORIENTATIONS, all_finite, as_array, as_tensor, stack_padded
from matcher.data.geometry import UPRIGHT, turn_angles
from matcher.data.image import Image
from matcher.data.tensors import is_tensor, library, loaded_torch, to_numpy
from matcher.errors import UsageError

if TYPE_CHECKING:
    import cv2
    import torch
    from torch import Tensor

RAW_SIFT = (
    "these are raw SIFT descriptors, but matchers of SIFT take RootSIFT: build the features by "
    "Features.from_cv2(keypoints, descriptors, size), which converts them"
)


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
        UsageError: shapes that do not fit, values that are not finite, a size or orientation of no image,
            or raw SIFT descriptors under the name "sift".
    """

    keypoints: Tensor  # (..., N, 2) float32 xy in stored-image pixels
    descriptors: Tensor  # (..., N, D), of norm 1 for all matchers but those of DeDoDe and LoFTR
    scores: Tensor | None = None  # (..., N) detector score, larger is better; ones when absent
    size: Tensor | None = None  # (..., 2) stored (width, height); required
    scales: Tensor | None = None  # (..., N) keypoint diameter in stored pixels
    orientations: Tensor | None = None  # (..., N) radians, from x towards y, in the stored frame
    # (..., N, 2, 2) columns are the axes of the described patch, stored pixels
    affine_frames: Tensor | None = None
    cells: Tensor | None = None  # (..., N, 2) column and row of the point on the grid of its front end
    grid: Tensor | None = None  # (..., 2) columns and rows of that grid
    maps: Tensor | None = None  # (..., C, h, w) finer map of the image, to refine matches on
    mask: Tensor | None = None  # (..., N) bool, True = valid; all valid when absent
    exif_orientation: Tensor | None = None  # (...) int64 EXIF code 1-8 of the stored pixels; 1 when absent
    # (...) int64 EXIF code of the view in which positions are normalised, where a matcher turned the image
    view_orientation: Tensor | None = None
    # (..., 2) size that the front end saw / stored size, along the stored x and y axes; 1 when absent
    scale: Tensor | None = None
    kind: str = "any"  # the front end that made them; a matcher of another kind refuses them
    _PER_IMAGE = ("size", "scale", "exif_orientation", "view_orientation", "grid", "maps")

    def __post_init__(self) -> None:
        convert = as_array if loaded_torch() is None else as_tensor
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name != "kind" and value is not None:
                object.__setattr__(self, f.name, convert(value, f.name))
        self._fill_defaults()
        self._check()

    def _fill_defaults(self) -> None:
        if self.keypoints is None or self.descriptors is None:
            raise UsageError("Features need keypoints (..., N, 2) and descriptors (..., N, D)")
        points, xp = self.keypoints, library(self.keypoints)
        if self.size is None:
            raise UsageError("Features need size=(width, height) of the stored image; it is never guessed")
        shape = tuple(self.keypoints.shape)
        if len(shape) < 2 or shape[-1] != 2:
            raise UsageError(f"Features.keypoints must be (..., N, 2), not {shape}")
        if tuple(self.size.shape) != (*shape[:-2], 2):
            raise UsageError(f"Features.size must be {(*shape[:-2], 2)}, not {tuple(self.size.shape)}")
        if self.scores is None:
            object.__setattr__(self, "scores", xp.ones_like(points[..., 0]))
        if self.mask is None:
            object.__setattr__(self, "mask", xp.ones_like(points[..., 0], dtype=bool))
        if self.exif_orientation is None:
            upright = xp.ones_like(self.size[..., 0], dtype=xp.int64)
            object.__setattr__(self, "exif_orientation", upright)
        if self.scale is None:
            object.__setattr__(self, "scale", xp.ones_like(self.size))

    def _check(self) -> None:
        shape = self.keypoints.shape
        wanted = dict.fromkeys(("scores", "scales", "orientations", "mask"), tuple(shape[:-1]))
        wanted |= dict.fromkeys(("size", "scale", "grid"), (*shape[:-2], 2))
        wanted |= dict.fromkeys(ORIENTATIONS, tuple(shape[:-2]))
        wanted |= {"affine_frames": (*shape, 2), "cells": tuple(shape)}
        wanted["descriptors"] = (*shape[:-1], *self.descriptors.shape[-1:])
        wanted["maps"] = () if self.maps is None else (*shape[:-2], *self.maps.shape[-3:])
        for name, value in ((f.name, getattr(self, f.name)) for f in fields(self) if f.name != "kind"):
            if value is not None and value.shape != wanted.get(name, value.shape):
                raise UsageError(f"Features.{name} must be {wanted[name]}, not {tuple(value.shape)}")
            if not (value is None or all_finite(value)):
                raise UsageError(f"Features.{name} holds values that are not finite (NaN or infinity)")
        if not bool((self.size > 0).all() & (self.scale > 0).all()):
            raise UsageError("Features.size and Features.scale must be positive")
        for name in ORIENTATIONS:
            codes = getattr(self, name)
            if codes is not None and not bool(((codes >= 1) & (codes <= 8)).all()):
                raise UsageError(f"Features.{name} must be an EXIF orientation, 1 to 8")
        some = self.descriptors[..., :64, :].reshape(-1, max(self.descriptors.shape[-1], 1))[:64]
        if self.kind == "sift" and is_raw_sift(to_numpy(some)):
            raise UsageError(RAW_SIFT)

    @property
    def matched_orientation(self) -> Tensor:
        """(...) int64 EXIF code of the view in which positions are normalised for matching.

        It is `view_orientation` where a matcher turned the image, else the file's `exif_orientation`.
        """
        return self.exif_orientation if self.view_orientation is None else self.view_orientation

    @property
    def image_size(self) -> tuple[int, int]:
        """(width, height) of the stored image, of features of one image."""
        width, height = (round(value) for value in self.size.tolist())
        return width, height

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
        """As the constructor, of tensors of the fields' types, which are not checked: on a GPU every check
        waits for it."""
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
        """What a front end found on `image.pixels`, carried back to the stored image.

        >>> import numpy as np
        >>> from matcher import Features, Image
        >>> image = Image(np.zeros((60, 80), np.uint8), size=(160, 120), scale=(0.5, 0.5))
        >>> Features.from_image(image, np.array([[4.5, 2.0]]), np.ones((1, 4))).keypoints.tolist()
        [[9.5, 4.5]]

        Args:
            image: what the front end was given.
            points: (N, 2) xy in pixels of `image.pixels`, whose first pixel's centre is (0, 0).
            descriptors: (N, D).
            scores: (N,) detector score, larger is better.
            diameters: (N,) of the keypoints, pixels of `image.pixels`; they become `scales`.
            angles: (N,) radians from x towards y on `image.pixels`; they become `orientations`.
            kind: the front end's name; "any" goes with every matcher.

        Raises:
            UsageError: as the constructor.
        """
        turn = UPRIGHT[image.orientation].T
        return cls(
            keypoints=image.to_stored(np.asarray(points)).astype(np.float32),
            descriptors=descriptors,
            scores=scores,
            scales=None if diameters is None else diameters / np.float32(np.sqrt(np.prod(image.scale))),
            orientations=None if angles is None else turn_angles(angles, turn).astype(np.float32),
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
        return cls(
            keypoints=table[:, :2],
            descriptors=values,
            scores=table[:, 4],
            size=size,
            scales=table[:, 2],
            orientations=np.deg2rad(table[:, 3]),
            kind=kind,
        )

    def to_cv2(self) -> list[cv2.KeyPoint]:
        """The valid keypoints of one image as OpenCV's, in stored pixels; `UsageError` for a batch."""
        import cv2

        if self.keypoints.ndim != 2:
            raise UsageError("features of one image are needed; take a batch apart by unstack()")
        chosen = self.select(self.mask)
        points, scores = chosen.keypoints.tolist(), chosen.scores.tolist()
        sizes = [1.0] * len(points) if chosen.scales is None else chosen.scales.tolist()
        angles = [-1.0] * len(points)
        if chosen.orientations is not None:
            angles = (np.rad2deg(to_numpy(chosen.orientations)) % 360).tolist()
        columns = zip(points, sizes, angles, scores, strict=True)
        return [cv2.KeyPoint(*point, size, angle, score) for point, size, angle, score in columns]

    def _map(self, change) -> Features:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "kind"}
        return self.with_valid(**{k: None if v is None else change(k, v) for k, v in values.items()})

    def with_valid(self, **values: Tensor | None) -> Features:
        """The same with other fields, which are not checked: on a GPU every check waits for it."""
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
        # Fields are converted where a tensor is among them.
        return replace(self, keypoints=torch.from_numpy(self.keypoints)).to(device)

    def numpy(self) -> dict[str, np.ndarray]:
        """All fields that are there as NumPy arrays, by name, but for `kind`."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "kind"}
        return {name: to_numpy(value) for name, value in values.items() if value is not None}

    def select(self, index: Tensor) -> Features:
        """The points named by `index` ((K,) int64 or (N,) bool) of one image."""
        return self._map(lambda name, value: value if name in self._PER_IMAGE else value[index])

    def entries(self, chosen: Tensor | Sequence[int]) -> Features:
        """Some images of a batch, as a batch."""
        return self._map(lambda _, value: value[chosen])

    def first(self, count: int | None) -> Features:
        """At most so many points of every image of a batch, which are the strongest of a front end's."""
        return self._map(lambda name, value: value if name in self._PER_IMAGE else value[:, :count])

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
        columns, convert = {}, as_array if loaded_torch() is None else as_tensor
        for name in (f.name for f in fields(Features) if f.name != "kind"):
            values = [getattr(item, name) for item in items]
            if name == "view_orientation" and any(value is not None for value in values):
                values = [item.matched_orientation for item in items]
            absent = any(value is None for value in values)
            columns[name] = None if absent else convert(stack_padded(values), name)
        return items[0].with_valid(**columns)
