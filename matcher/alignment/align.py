"""Planar alignment: one image warped onto another by a homography, affine map or similarity."""

from __future__ import annotations

import struct
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Unpack, get_args

import cv2
import numpy as np

from matcher.config import GeometryStatus, PlanarModel
from matcher.errors import ImageWarning, UsageError, counted, unknown_name
from matcher.files import check_output, write_output
from matcher.geometry import upright_matrix, warp_points
from matcher.image_files import read_resolution
from matcher.images import read_once, to_8_bits, white
from matcher.loading import open_pipeline, with_estimation
from matcher.pipeline import ImageInput, Mask, Pipeline
from matcher.presets import DEFAULT_PRESET, LoadOptions
from matcher.result import Result, agreement
from matcher.verify.estimation import RobustEstimator
from matcher.viz.overlays import blend, checkerboard, difference, lay_over

# What alignment, templates and panoramas share.

PICTURE_FORMATS = (".png", ".jpg", ".jpeg", ".tif", ".tiff")


def planar_pipeline(preset: str | Pipeline, options: LoadOptions) -> Pipeline:
    """A preset with options, or a pipeline, that verifies its matches by a homography."""
    if options.get("geometry") not in (None, "homography"):
        raise UsageError(f"planes are matched by geometry 'homography', not {options['geometry']!r}")
    given = {name: value for name, value in options.items() if name != "geometry"}
    pipeline = open_pipeline(preset, given)
    wanted = replace(pipeline.config.estimation, kind="homography")
    return pipeline if wanted == pipeline.config.estimation else with_estimation(pipeline, wanted)


def write_picture(path: Path, pixels: np.ndarray, resolution: tuple[int, int] | None) -> None:
    """Write (H, W), (H, W, 3) or (H, W, 4) pixels, uint8 or uint16, whole, in the format of the suffix. A
    .jpg has no transparency, and 8 bits, with an `ImageWarning` if there were more; a .tif has the dots per
    inch along x and y, if known."""
    suffix, how = path.suffix.lower(), []
    is_jpeg = suffix in (".jpg", ".jpeg")
    if pixels.ndim == 3:
        pixels = pixels[..., [2, 1, 0, 3][: 3 if is_jpeg else pixels.shape[2]]]
    if is_jpeg:
        how = [cv2.IMWRITE_JPEG_QUALITY, 95]
        if pixels.dtype == np.uint16:
            text = f"8 bits, so 0 to {white(pixels)} became 0 to 255; a .png or .tif keeps the values"
            warnings.warn(f"{path}: a JPEG has {text}", ImageWarning, stacklevel=3)
            pixels = to_8_bits(pixels)
    elif suffix != ".png":
        how = [cv2.IMWRITE_TIFF_COMPRESSION, 8, cv2.IMWRITE_TIFF_PREDICTOR, 2]  # Deflate, of differences
        if resolution is not None:
            how += [cv2.IMWRITE_TIFF_RESUNIT, 2, cv2.IMWRITE_TIFF_XDPI, resolution[0]]  # in inches
            how += [cv2.IMWRITE_TIFF_YDPI, resolution[1]]
    data = cv2.imencode(suffix, pixels, how)[1].tobytes()
    transparent = suffix.startswith(".tif") and pixels.shape[2:] == (4,)
    write_output(path, _with_transparency(data) if transparent else data)


def _with_transparency(tiff: bytes) -> bytes:
    """A TIFF of OpenCV's with the tag ExtraSamples, by which others know that the fourth sample is
    transparency: a copy of its directory at the end has it."""
    (start,) = struct.unpack_from("<I", tiff, 4)  # OpenCV writes as the processor does
    (count,) = struct.unpack_from("<H", tiff, start)
    rows = [tiff[at : at + 12] for at in range(start + 2, start + 2 + 12 * count, 12)]
    rows.append(struct.pack("<HHIHH", 338, 3, 1, 2, 0))
    rows.sort(key=lambda row: struct.unpack("<H", row[:2]))
    tiff += bytes(len(tiff) % 2)
    head = tiff[:4] + struct.pack("<I", len(tiff))
    return b"".join([head, tiff[8:], struct.pack("<H", count + 1), *rows, bytes(4)])


View = Literal["warped", "blend", "checkerboard", "difference"]
SCENE_WITH_DEPTH = 0.5  # share of agreeing matches below which the map is right on one plane only


def align(
    image0: ImageInput,
    image1: ImageInput,
    preset: str | Pipeline = DEFAULT_PRESET,
    *,
    model: PlanarModel = "homography",
    mask0: Mask | None = None,
    mask1: Mask | None = None,
    **options: Unpack[LoadOptions],
) -> Alignment:
    """Match two images and estimate the planar transformation from image 0 to image 1.

    It is exact if the scene is planar or distant, or the camera only rotated. Where the verdict is that the
    images show different places, none is found.

    >>> import matcher, numpy as np
    >>> image = np.random.default_rng(0).integers(0, 255, (240, 320), dtype=np.uint8)
    >>> found = matcher.align(image, np.roll(image, 20, axis=1), "nearest", model="similarity")
    >>> found.status, found.matrix.round(1).tolist()[0]
    ('ok', [1.0, 0.0, 20.0])

    Args:
        image0, image1, mask0, mask1: as `Pipeline.match` takes them, whose errors are also those of this.
        preset: a preset's name, with `options` of `matcher.load`; or a pipeline, whose estimator is replaced
            by one of homographies.
        model: "homography", "affine", or "similarity" (turn, one scale and shift).
    """
    if model not in get_args(PlanarModel):
        raise UsageError(unknown_name("model", model, get_args(PlanarModel)))
    pipeline = planar_pipeline(preset, options)
    if model != "homography":
        pipeline = replace(pipeline, estimator=RobustEstimator(pipeline.config.estimation, planar=model))
    image0, image1 = read_once(image0), read_once(image1)
    result = pipeline.match(image0, image1, mask0=mask0, mask1=mask1)
    refused = (geometry := result.geometry).rejected or geometry
    inliers = geometry.inliers if refused.matrix is None else refused.inliers
    fitted = result, model, geometry.status, inliers, geometry.matrix
    return Alignment(*fitted, images=(image0, image1), pipeline=pipeline)


@dataclass(frozen=True, eq=False, repr=False)
class Alignment:
    """The planar transformation from image 0 to image 1, and pictures of it; returned by `align`.

    >>> import matcher, numpy as np
    >>> image = np.random.default_rng(0).integers(0, 255, (240, 320), dtype=np.uint8)
    >>> found = matcher.align(image, np.roll(image, 20, axis=1), "nearest", max_keypoints=300)
    >>> found.found, found.image("difference").shape, int(found.image()[0, 0, 3])
    (True, (240, 320, 3), 0)
    """

    result: Result  # the matches that the map was estimated from, and their verdict
    model: PlanarModel
    status: GeometryStatus  # use the map where it is "ok"; see `TwoViewGeometry`
    # (K,) bool, of the matches: what agrees with the map; where it is not "ok", with the one that is refused
    inliers: np.ndarray
    matrix: np.ndarray | None  # (3, 3) float64, stored pixels of image 0 → stored pixels of image 1
    images: tuple[ImageInput, ImageInput]  # as they were given
    pipeline: Pipeline  # that matched them

    @property
    def found(self) -> bool:
        """Whether the images are aligned: a map was found that enough matches agree with."""
        return self.status == "ok"

    @property
    def agreeing(self) -> float:
        """The share of the matches that agree with the map, 0 to 1; below a half the scene has depth."""
        return float(self.inliers.mean()) if len(self.inliers) else 0.0

    @property
    def matrix_upright(self) -> np.ndarray | None:
        """(3, 3) as `matrix`, for pixels after EXIF orientation, which `cv2.imread` and viewers show."""
        if self.matrix is None:
            return None
        sides = self.result.features0, self.result.features1
        turn0, turn1 = (upright_matrix(side.image_size, int(side.exif_orientation)) for side in sides)
        return turn1 @ self.matrix @ np.linalg.inv(turn0)

    @property
    def error(self) -> float | None:
        """Median transfer error of the inliers in image 1, stored pixels."""
        matrix = (self.result.geometry.rejected or self).matrix
        if matrix is None or not self.inliers.any():
            return None
        moved = warp_points(self.result.points0[self.inliers].astype(np.float64), matrix)
        return float(np.median(np.linalg.norm(moved - self.result.points1[self.inliers], axis=1)))

    @property
    def cautions(self) -> list[str]:
        """A warning where most matches disagree with the map that was found."""
        if not self.found or self.agreeing >= SCENE_WITH_DEPTH:
            return []
        share = f"only {self.agreeing:.0%} of the matches agree with it"
        return [f"warning: {share}: the scene is no plane, and what lies off it is not aligned"]

    def __repr__(self) -> str:
        count = int(self.inliers.sum())
        return f"Alignment({self.model}: {self.status}, {count} of {len(self.inliers)} inliers)"

    def image(self, view: View = "warped") -> np.ndarray:
        """An image in the frame of image 1, upright and at its full size.

        Args:
            view: "warped": image 0 as image 1 shows it, (H, W, 4) RGBA, transparent beyond its edge; or
                both in one, (H, W, 3) RGB: "difference" (absolute, of each channel), "checkerboard" or
                "blend" (image 0 red, image 1 blue, grey where they agree). uint8; the first two are uint16
                where an image has more bits, with its values.

        Raises:
            UsageError: an unknown view, the images are not aligned, or are too large to warp.
            ImageError: an image cannot be read.
        """
        if view not in get_args(View):
            raise UsageError(unknown_name("view", view, get_args(View)))
        if not self.found:
            raise UsageError(f"the images are not aligned, so there is nothing to show ({self._reason()})")
        both = [self.pipeline.read_full(image, deep=True) for image in self.images]
        if view in ("checkerboard", "blend"):  # which are only looked at
            both = [replace(one, pixels=to_8_bits(one.pixels)) for one in both]
        laid = lay_over(*both, self.matrix)
        if view == "warped":
            opaque = np.full_like(laid.above[..., 0], np.iinfo(laid.above.dtype).max)
            return np.dstack([laid.above, opaque]) * laid.covered[..., None]
        return {"checkerboard": checkerboard, "blend": blend, "difference": difference}[view](laid)

    def save(self, path: str | Path, view: View = "warped", *, overwrite: bool = False) -> Path:
        """Write the picture of a view, as `image` makes it, to a file, atomically; returns its path.

        A .png or .tif keeps 16 bits and the transparency of "warped"; a .jpg has black there. Errors: those
        of `image`, and `UsageError`: another suffix, no such folder, or, without `overwrite`, a foreign file.
        """
        path = check_output(path, PICTURE_FORMATS, overwrite=overwrite)
        write_picture(path, self.image(view), read_resolution([self.result.path1]))
        return path

    def to_dict(self) -> dict[str, Any]:
        """Model, status, matrices and counts as plain values, ready for `json.dumps`."""
        found = self.result.to_dict()
        kept = ("preset", "weights", "image0", "image1", "keypoints0", "keypoints1", "matches", "verdict")
        own = {name: getattr(self, name) for name in ("model", "status", "agreeing", "error")}
        for name, matrix in (("matrix", self.matrix), ("matrix_upright", self.matrix_upright)):
            own[name] = None if matrix is None else matrix.tolist()
        own |= {"inliers": int(self.inliers.sum()), "seconds": found["seconds"]}
        own["reason"] = None if self.found else self._reason()
        return {name: found[name] for name in kept} | own

    def summary(self) -> str:
        """A readable summary: images, matches and the transformation."""
        result = self.result
        count = counted(len(result.matches), "match", "matches")
        lines = [*result.image_lines(), f"{count} ({result.preset})"]
        lines += [] if result.verdict is None else [str(result.verdict)]
        if not self.found:
            return "\n".join([*lines, f"not aligned: {self._reason()}"])
        inliers = int(self.inliers.sum())
        lines.append(f"{inliers} are inliers of one {self._what}, median error {self.error:.2f} pixels")
        return "\n".join([*lines, *self.cautions])

    def _reason(self) -> str:
        """Why the images are not aligned."""
        result = self.result
        said = agreement(result.matches, result.geometry, result.verdict, self._what)
        return said.removeprefix("no match: ")

    @property
    def _what(self) -> str:
        return "affine map" if self.model == "affine" else self.model
