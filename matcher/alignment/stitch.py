"""Several photos as one picture: of a flat scene, or from one viewpoint; the stages are OpenCV's `detail`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal, Unpack, get_args

import cv2
import numpy as np

from matcher.alignment.align import PICTURE_FORMATS, planar_pipeline, write_picture
from matcher.collection.collection import MatchedSet, match_set
from matcher.errors import ImageError, UsageError, unknown_name
from matcher.files import check_output
from matcher.geometry import upright_matrix, warp_points
from matcher.image_files import read_resolution
from matcher.images import MAX_PIXELS, ImageInput, at_one_depth, find_images, read_once, to_8_bits, white
from matcher.presets import DEFAULT_PRESET, LoadOptions, refuse_further_passes
from matcher.types import to_numpy
from matcher.viz.overlays import LARGEST_SIDE, as_colour

Projection = Literal["auto", "plane", "cylindrical", "spherical"]
PlaneModel = Literal["auto", "translation", "similarity", "homography"]


class NotJoinedError(ImageError):
    """Images that can be read, and do not make one picture."""

    exit_code = 4


@dataclass(frozen=True, eq=False)
class Panorama:
    """What `stitch` made."""

    pixels: np.ndarray = field(repr=False)  # (H, W, 3) RGB: uint8, or uint16 with an image's own values
    covered: np.ndarray = field(repr=False)  # (H, W) bool, where some image lies
    used: tuple[int, ...]  # the images that it shows, by their number
    projection: Projection
    model: PlaneModel | None  # of planes
    # Share of the matches that agree with it, on a plane within 3 pixels of what was matched; low where the
    # scene has depth, or the images do not move as the model allows.
    agreeing: float
    grey: bool = False  # all images are, and so is the file of the panorama
    resolution: tuple[int, int] | None = None  # dots per inch that all files state

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write a `.png`, `.jpg` or `.tif`, which appears whole or not at all; `UsageError`: another suffix,
        a folder that is absent, or, without `overwrite`, a foreign file."""
        path = check_output(path, PICTURE_FORMATS, overwrite=overwrite)
        write_picture(path, self.pixels[..., 0] if self.grey else self.pixels, self.resolution)
        return path


def stitch(
    images: Sequence[ImageInput] | str | Path,
    preset: str = DEFAULT_PRESET,
    *,
    projection: Projection = "auto",
    model: PlaneModel = "auto",
    crop: bool = False,
    **options: Unpack[LoadOptions],
) -> Panorama:
    """Join overlapping photos of a flat scene, or of any scene from one viewpoint.

    Exposure is evened out by a gain for each image, seams go where the images agree, and frequencies of what
    they differ by are blended in bands (Burt and Adelson 1983; Brown and Lowe 2007).

    >>> import matcher, numpy as np
    >>> scene = np.random.default_rng(0).integers(0, 255, (240, 400), dtype=np.uint8)
    >>> parts = [scene[:, :300], scene[:, 100:]]
    >>> made = matcher.stitch(parts, "nearest", max_keypoints=500)
    >>> made.pixels.shape, made.model
    ((240, 400, 3), 'translation')

    Args:
        images: two or more, in any order, as `matcher.load(…).match` takes them, or a folder of them.
        preset: that matches them.
        projection: the surface. `auto` is a plane up to 70 degrees of view, else a sphere.
        model: how images move on a plane; `auto` is the simplest that explains the matches.
        crop: cut off what is not covered.
        options: of `matcher.load`.

    Raises:
        UsageError: an unknown projection or model, a model without a plane, or too wide a view for one.
        ImageError: an image cannot be read, or, as `NotJoinedError`, they make no picture.
    """
    for what, value, known in (("projection", projection, Projection), ("model", model, PlaneModel)):
        if value not in get_args(known):
            raise UsageError(unknown_name(what, value, get_args(known)))
    if model != "auto" and projection in ("cylindrical", "spherical"):
        raise UsageError(f"model={model!r} is of planes, not of projection={projection!r}; leave it out")
    projection = projection if model == "auto" else "plane"
    refuse_further_passes(options, "the pairs of a panorama share the keypoints of an image")
    images = find_images(Path(images)) if isinstance(images, (str, Path)) else images
    images, pipeline = list(map(read_once, images)), planar_pipeline(preset, options)
    found = match_set(images, pipeline)
    group = found.groups()[0]
    if len(group) < 2:
        raise NotJoinedError("no two of these images overlap; give more of them, or photos that share more")
    read = [pipeline.read_full(images[number], deep=True) for number in group]
    turns = [upright_matrix(image.size, image.orientation) for image in read]
    pixels = at_one_depth([as_colour(image.pixels) for image in read])
    cameras = None if projection == "plane" else _cameras(found, group, pixels, turns)
    if projection == "auto":  # beyond 70 degrees, a plane stretches its edges to more than twice their width
        wide = cameras is not None and _angle_of_view(cameras, pixels) > 70
        projection = "spherical" if wide else "plane"
    # 3 pixels of what was matched, in stored pixels
    near = 3 * max(1, 1 / min(to_numpy(found.features[number].scale).min() for number in group))
    pairs = [both for pair, both in found.pairs.items() if set(pair) <= set(group) and both[1].status == "ok"]
    agreeing = float(np.concatenate([geometry.inliers for _, geometry in pairs]).mean())
    chosen = None
    if projection == "plane":
        candidates = ("translation", "similarity", "homography") if model == "auto" else (model,)
        tried = {name: _placed(found, group, name, near) for name in candidates}
        most = 1.2 * min(residual for _, residual, _ in tried.values()) + 0.1  # for a simpler map to be taken
        chosen = next(name for name, (_, residual, _) in tried.items() if residual <= most)
        placed, _, share = tried[chosen]
        agreeing *= share
        reference = turns[group.index(next(iter(placed)))]
        maps = [reference @ placed[n] @ np.linalg.inv(t) for n, t in zip(group, turns, strict=True)]
        if chosen == "translation":  # by whole pixels where all nearly are: then nothing is resampled
            shifted = np.array(maps)
            shifted[:, :2, 2] -= maps[0][:2, 2]
            maps = maps if np.abs(shifted - np.rint(shifted)).max() > 0.2 else list(np.rint(shifted))
        pieces = _warped(pixels, maps)
    elif cameras is None:
        raise NotJoinedError("the images do not determine a focal length; use projection='plane'")
    else:
        agreeing *= _turning(found, group, cameras, turns, near)
        pieces = _projected(pixels, cameras, projection)
    if agreeing < 0.1:
        text = "the camera did more than turn, or the images move otherwise; use another projection or model"
        raise NotJoinedError(f"{agreeing:.0%} of the matches agree with one picture ({projection}): {text}")
    panorama, covered = _blended(pieces)
    if crop:
        inner = _without_edges(covered)
        panorama, covered = panorama[inner], covered[inner]
    grey = all(image.pixels.ndim == 2 for image in read)
    resolution = read_resolution(image.path for image in read)
    return Panorama(panorama, covered, tuple(group), projection, chosen, agreeing, grey, resolution)


def _fit(model: PlaneModel, points: np.ndarray, targets: np.ndarray) -> np.ndarray | None:
    """(3, 3) the least-squares map of a kind from points (K, 2) to targets (K, 2)."""
    if model == "homography":
        return cv2.findHomography(points, targets, 0)[0]
    if model == "similarity":
        found, _ = cv2.estimateAffinePartial2D(points, targets, method=cv2.LMEDS)
        return None if found is None else np.vstack([found, [0, 0, 1]])
    matrix = np.eye(3)
    matrix[:2, 2] = np.median(targets - points, axis=0)
    return matrix


def _placed(
    found: MatchedSet, group: list[int], model: PlaneModel, near: float
) -> tuple[dict[int, np.ndarray], float, float]:
    """A map for each image, so that the points of each track meet, the median distance from where they meet,
    and the share of those that do within `near` pixels. First maps are chained along the pairs with most
    inliers. Then tracks' means and maps are found in turns; points far from the mean, ever nearer, are of
    wrong matches."""
    pairs = {pair: both for pair, both in found.pairs.items() if both[1].status == "ok"}
    inliers = {pair: int(geometry.inliers.sum()) for pair, (_, geometry) in pairs.items()}
    strength = {image: sum(n for pair, n in inliers.items() if image in pair) for image in group}
    placed = {max(group, key=strength.get): np.eye(3)}
    while len(placed) < len(group):
        pair = max((pair for pair in pairs if len(placed.keys() & set(pair)) == 1), key=inliers.get)
        matches, geometry = pairs[pair]
        points = matches.points0[geometry.inliers], matches.points1[geometry.inliers]
        here, new = (0, 1) if pair[0] in placed else (1, 0)
        placed[pair[new]] = placed[pair[here]] @ _fit(model, points[new], points[here])
    track, image, keypoint = np.array([row for row in found.tracks.table() if row[1] in placed]).T
    keypoints = {number: to_numpy(found.features[number].keypoints) for number in placed}
    points = np.array([keypoints[i][k] for i, k in zip(image, keypoint, strict=True)])
    reference, good = next(iter(placed)), np.ones(len(points), dtype=bool)
    for limit in np.geomspace(40, 3, 40):
        moved = points.astype(np.float64)
        for number, matrix in placed.items():
            moved[image == number] = warp_points(points[image == number], matrix)
        good &= np.isfinite(moved).all(axis=1)
        count = np.bincount(track[good], minlength=len(found.tracks))
        sums = [np.bincount(track[good], side[good], minlength=len(count)) for side in moved.T]
        mean = (np.stack(sums, axis=1) / np.maximum(count, 1)[:, None])[track]
        distance = np.where(count[track] > 1, np.linalg.norm(moved - mean, axis=1), np.inf)
        good = distance < limit
        for number in placed.keys() - {reference}:
            own = good & (image == number)
            if own.sum() >= 12 and (matrix := _fit(model, points[own], mean[own])) is not None:
                placed[number] = matrix
    finite = distance[np.isfinite(distance)]
    return placed, float(np.median(finite)) if len(finite) else np.inf, float(np.mean(distance < near))


Piece = tuple[tuple[int, int], np.ndarray, np.ndarray]  # corner, pixels, mask (0 or 255)


def _warped(images: Sequence[np.ndarray], maps: Sequence[np.ndarray]) -> list[Piece]:
    """The images on one plane; `UsageError`: it would have more than 20,000 pixels a side."""
    outlines = []
    for image, matrix in zip(images, maps, strict=True):
        right, bottom = np.subtract(image.shape[1::-1], 1.0)
        outlines.append(warp_points(np.array([[0, 0], [right, 0], [right, bottom], [0, bottom]]), matrix))
    extent = np.ptp(np.vstack(outlines), axis=0)
    if not np.isfinite(extent).all() or extent.max() > 20_000:
        raise UsageError("these images span too wide an angle for one plane; use projection='spherical'")
    placed = []
    for image, outline, matrix in zip(images, outlines, maps, strict=True):
        start = np.floor(outline.min(axis=0) + 1e-6).astype(int)
        size = (np.ceil(outline.max(axis=0) - 1e-6).astype(int) - start + 1).tolist()
        warp = np.array([[1, 0, -start[0]], [0, 1, -start[1]], [0, 0, 1]]) @ matrix
        whole = np.full(image.shape[:2], 255, np.uint8)
        piece = cv2.warpPerspective(image, warp, size, borderMode=cv2.BORDER_REFLECT)
        mask = cv2.warpPerspective(whole, warp, size, flags=cv2.INTER_NEAREST)
        placed.append(((int(start[0]), int(start[1])), piece, mask))
    return placed


def _cameras(
    found: MatchedSet, group: list[int], images: Sequence[np.ndarray], turns: Sequence[np.ndarray]
) -> list[Any] | None:
    """OpenCV's `CameraParams` of images that only turn, after bundle adjustment; None where it fails."""
    features, centres, infos = [], [], []
    for index, (number, image, turn) in enumerate(zip(group, images, turns, strict=True)):
        height, width = image.shape[:2]
        points = warp_points(to_numpy(found.features[number].keypoints).astype(np.float64), turn)
        one = cv2.detail.ImageFeatures()
        one.img_idx, one.img_size = index, (width, height)
        one.keypoints = [cv2.KeyPoint(float(x), float(y), 1.0) for x, y in points]
        features.append(one)
        centres.append(points - [width / 2, height / 2])
    for i, j in product(range(len(group)), repeat=2):
        info = cv2.detail.MatchesInfo()
        info.src_img_idx, info.dst_img_idx = i, j
        pair = found.pairs.get((group[min(i, j)], group[max(i, j)]))
        if i != j and pair is not None and pair[1].status == "ok":
            rows = pair[0].indices[pair[1].inliers][:, :: 1 if i < j else -1]
            info.matches = [cv2.DMatch(int(a), int(b), 0.0) for a, b in rows]
            info.inliers_mask = np.ones(len(rows), np.uint8)
            info.num_inliers, info.confidence = len(rows), 2.0
            # between points seen from the centres of the images, as OpenCV's estimator expects
            info.H = cv2.findHomography(centres[i][rows[:, 0]], centres[j][rows[:, 1]], 0)[0]
        infos.append(info)
    try:
        right, cameras = cv2.detail_HomographyBasedEstimator().apply(features, infos, None)
        for camera in cameras if right else ():
            camera.R = camera.R.astype(np.float32)
        adjuster = cv2.detail_BundleAdjusterRay()
        adjuster.setConfThresh(1.0)
        right, cameras = adjuster.apply(features, infos, cameras) if right else (False, [])
        if not right:
            return None
        turned = cv2.detail.waveCorrect([np.copy(c.R) for c in cameras], cv2.detail.WAVE_CORRECT_HORIZ)
    except cv2.error:
        return None
    for camera, rotation in zip(cameras, turned, strict=True):
        camera.R = rotation
    # With more than 127 degrees of view the camera did not only turn.
    longest = max(max(image.shape[:2]) for image in images)
    return list(cameras) if all(c.focal > longest / 4 for c in cameras) else None


def _turning(
    found: MatchedSet, group: list[int], cameras: Sequence[Any], turns: Sequence[np.ndarray], near: float
) -> float:
    """The share of the pairs' inliers that cameras which only turn bring within `near` pixels."""
    rays, off = {}, []  # from stored pixels
    for number, camera, turn in zip(group, cameras, turns, strict=True):
        rays[number] = np.asarray(camera.R, np.float64) @ np.linalg.inv(camera.K()) @ turn
    for (i, j), (matches, geometry) in found.pairs.items():
        if i in rays and j in rays and geometry.status == "ok":
            moved = warp_points(matches.points0.astype(np.float64), np.linalg.inv(rays[j]) @ rays[i])
            off.append(np.linalg.norm(moved - matches.points1, axis=1)[geometry.inliers])
    return float(np.mean(np.concatenate(off) < near))


def _angle_of_view(cameras: Sequence[Any], images: Sequence[np.ndarray]) -> float:
    """Degrees between the directions of the image corners that are farthest apart."""
    rays = []
    for camera, image in zip(cameras, images, strict=True):
        corners = [[x, y, 1.0] for x in (0, image.shape[1]) for y in (0, image.shape[0])]
        directions = corners @ np.linalg.inv(camera.K().astype(np.float64)).T @ np.asarray(camera.R).T
        rays.extend(directions / np.linalg.norm(directions, axis=1, keepdims=True))
    return float(np.degrees(np.arccos(np.clip(np.inner(rays, rays), -1, 1)).max()))


def _projected(images: Sequence[np.ndarray], cameras: Sequence[Any], projection: Projection) -> list[Piece]:
    """The images on a cylinder or a sphere; `NotJoinedError`: one is too large there to be warped."""
    warper = cv2.PyRotationWarper(projection, float(np.median([camera.focal for camera in cameras])))
    placed = []
    for image, camera in zip(images, cameras, strict=True):
        how = camera.K().astype(np.float32), np.asarray(camera.R, np.float32)
        width, height = warper.warpRoi(image.shape[1::-1], *how)[2:]
        if max(width, height) > LARGEST_SIDE or not 0 < width * height <= MAX_PIXELS:
            text = "the camera did more than turn, or turned too far up or down; use another projection"
            raise NotJoinedError(f"an image would be {width} x {height} pixels ({projection}): {text}")
        corner, piece = warper.warp(image, *how, cv2.INTER_LINEAR, cv2.BORDER_REFLECT)
        whole = np.full(image.shape[:2], 255, np.uint8)
        placed.append((corner, piece, warper.warp(whole, *how, cv2.INTER_NEAREST, cv2.BORDER_CONSTANT)[1]))
    return placed


def _blended(placed: list[Piece]) -> tuple[np.ndarray, np.ndarray]:
    """Panorama (H, W, 3) and where it is covered (H, W): gains, seams, and bands of frequencies, of what the
    images differ by alone, so that pixels on which they agree stay as they were."""
    corners, pieces, masks = map(list, zip(*placed, strict=True))
    top = max(map(white, pieces))
    shallow = [to_8_bits(piece, top) for piece in pieces]
    exposure = cv2.detail.ExposureCompensator_createDefault(cv2.detail.ExposureCompensator_GAIN)
    exposure.feed(corners, shallow, masks)
    gains = np.ravel(exposure.getMatGains())
    seams = cv2.detail.SeamFinder_createDefault(cv2.detail.SeamFinder_DP_SEAM)
    cut = [one.get() for one in seams.find(shallow, corners, [mask.copy() for mask in masks])]
    if np.abs(gains - 1).max() > 0.01:  # less is noise or a step that nobody sees
        pieces = [np.minimum(cv2.addWeighted(p, g, p, 0, 0), top) for p, g in zip(pieces, gains, strict=True)]
    roi = cv2.detail.resultRoi(corners, [piece.shape[1::-1] for piece in pieces])
    panorama, spots = np.zeros((*roi[:1:-1], 3), pieces[0].dtype), []
    for (x, y), piece, mask in zip(corners, pieces, cut, strict=True):
        spots.append(panorama[y - roi[1] :, x - roi[0] :][: len(mask), : len(mask[0])])
        np.copyto(spots[-1], piece, where=mask[..., None] > 0)
    blender, scale = cv2.detail.MultiBandBlender(), np.float32(16000 / top)  # it computes in int16
    blender.prepare(roi)
    for corner, piece, mask, whole, spot in zip(corners, pieces, cut, masks, spots, strict=True):
        off = cv2.subtract(piece, spot, mask=whole, dtype=cv2.CV_32F)
        blender.feed(np.rint(off * scale).astype(np.int16), mask, corner)
    changes, covered = blender.blend(None, None)
    changed = np.rint(panorama + changes * np.float32(1 / scale)).clip(0, top)
    return changed.astype(panorama.dtype), np.asarray(covered) > 0


def _without_edges(covered: np.ndarray) -> tuple[slice, slice]:
    """The rectangle that is left where the least covered edge is cut off until all four are covered."""
    top, left, (bottom, right) = 0, 0, covered.shape
    while top < bottom and left < right:
        inner = covered[top:bottom, left:right]
        shares = [edge.mean() for edge in (inner[0], inner[-1], inner[:, 0], inner[:, -1])]
        if (least := min(shares)) == 1:
            return np.s_[top:bottom, left:right]
        cut = np.arange(4) == shares.index(least)
        top, bottom, left, right = np.array([top, bottom, left, right]) + cut * (1, -1, 1, -1)
    return np.s_[:, :]
