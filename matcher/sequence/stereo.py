"""Rectified pairs: where the right image shows the left one's points, and how far away they are."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import cv2
import numpy as np
import poselib

from matcher.cameras import Camera
from matcher.errors import UsageError
from matcher.geometry import resize_points
from matcher.sequence.frames import TEXTURE, WINDOW, FrameLinks, correlate, cut, deviation, nearest, peaks
from matcher.sequence.keyframes import KeptFrame
from matcher.types import Image

# --- stereo: Rectified pairs: where the right image shows the left one's points, and how far away they are.

MAX_ROW_ERROR = 2.0  # pixels between the rows of two points that depth is taken from
_MIN_DISPARITY = 0.5  # pixels; below it a depth says little more than "far"


def partners(points0: np.ndarray, points1: np.ndarray, links: FrameLinks) -> np.ndarray:
    """(N, 2) float32 pixels in the right image of the left one's points, NaN where there is none.

    Args:
        points0: (N, 2) keypoints of the left image.
        points1: (M, 2) of the right one.
        links: left → right; the consistent ones count.
    """
    found = np.full((len(points0), 2), np.nan, np.float32)
    indices = links.indices[links.consistent]
    found[indices[:, 0]] = points1[indices[:, 1]]
    return found


def within(points0: np.ndarray, right: np.ndarray, window: float) -> np.ndarray:
    """The same, NaN also where rows differ by more than `window` pixels, and behind the cameras."""
    step = points0 - right
    with np.errstate(invalid="ignore"):
        good = (np.abs(step[:, 1]) <= window) & (step[:, 0] > 0)
    return np.where(good[:, None], right, np.float32(np.nan))


def depths_of(points0: np.ndarray, right: np.ndarray, focal: float, baseline: float) -> np.ndarray:
    """(N,) depth along z of the left image's points, in units of the baseline; NaN where unknown.

    z = f·b / (x_left − x_right). Only points whose rows agree within `MAX_ROW_ERROR` have one.

    Args:
        points0: (N, 2) in pixels of images with one focal length and one principal point.
        right: (N, 2) the same points in the right image, NaN where unknown.
        focal: fx in pixels.
        baseline: distance between the cameras.
    """
    step = points0.astype(np.float64) - right
    with np.errstate(invalid="ignore"):
        good = (np.abs(step[:, 1]) <= MAX_ROW_ERROR) & (step[:, 0] >= _MIN_DISPARITY)
    return np.where(good, focal * baseline / np.where(good, step[:, 0], 1.0), np.nan)


# --- surfaces: The piece of surface around a point, as a rectified pair shows it: its disparity and how
# that changes.

_ROUNDS = 6  # of least squares; four are enough for nearly all
_STEP = 1.0  # pixels that a round may move a window
_STEEPEST = 0.7  # change of disparity per pixel beyond which surfaces are hardly seen by both cameras
_DAMPING = 1e-3  # share added to the squares, for windows that show texture in one direction only
_HALF_ERROR = 0.5  # pixels that half a window may be off the whole
_HALF_REACH = 4  # pixels to either side in which the half is searched
_STEEP = 0.15  # change of disparity per pixel from which a slant must be confirmed by points around it
_NEIGHBOURS, _CONFIRMING = 8, 3  # of so many points around, so many must confirm it
_CONFIRMED = 1.0  # pixels that a confirming surface may be off


class Surfaces(NamedTuple):
    """Where N left windows are in the right image, and how they slant there."""

    x: np.ndarray  # (N,) pixels
    slants: np.ndarray  # (N, 2) minus the change of disparity per pixel to the right, and per pixel down
    correlation: np.ndarray  # (N,) correlation there, −1 to 1


def fit(
    left: np.ndarray,
    right: np.ndarray,
    points: np.ndarray,
    positions: np.ndarray,
    slants: np.ndarray | None = None,
) -> Surfaces:
    """Position and slant of least difference, from a first guess that is off by a few pixels at most.

    Args:
        left, right: (H, W) float32.
        points: (N, 2) in the left image.
        positions: (N, 2) guessed in the right one; the row is taken as it is.
        slants: (N, 2) guessed; none when absent.
    """
    x = positions[:, 0].astype(np.float64)
    slants = np.zeros((len(points), 2)) if slants is None else slants.astype(np.float64)
    if len(points) == 0:
        return Surfaces(x, slants, np.zeros(0))
    template, slopes, inverse = _template(left, points)
    for _ in range(_ROUNDS):
        seen = _normalised(cut(right, np.column_stack([x, positions[:, 1]]), slants=slants))
        step = np.einsum("nij,nj->ni", inverse, np.einsum("nki,nk->ni", slopes, seen - template))
        shift = np.clip(step[:, 0], -_STEP, _STEP)
        change = np.clip(step[:, 1:], -0.2, 0.2)
        # The window is moved by the inverse of the step that would move the template.
        stretch = (1 + slants[:, 0]) / (1 + change[:, 0])
        x = x - stretch * shift
        slants = np.column_stack([stretch - 1, slants[:, 1] - stretch * change[:, 1]])
        slants = np.clip(slants, -_STEEPEST, _STEEPEST)
    seen = _normalised(cut(right, np.column_stack([x, positions[:, 1]]), slants=slants))
    return Surfaces(x, slants, np.einsum("nk,nk->n", template, seen))


def of_one_surface(
    left: np.ndarray, right: np.ndarray, points: np.ndarray, y: np.ndarray, found: Surfaces
) -> np.ndarray:
    """(N,) bool: each half of the window is found where the whole is.

    Beside an edge in depth the window shows two surfaces and is found where the more textured one is, which
    need not be that of the point. `y` (N,) are the rows in the right image.
    """
    windows = cut(left, points)
    strips = cut(right, np.column_stack([found.x, y]), WINDOW + 2 * _HALF_REACH, found.slants)
    one = np.ones(len(points), bool)
    if len(points) == 0:
        return one
    low, high, whole = (0, WINDOW // 2 + 1), (WINDOW // 2, WINDOW), (0, WINDOW)
    for (top, bottom), (begin, end) in ((whole, low), (whole, high), (low, whole), (high, whole)):
        half = windows[:, top:bottom, begin:end]
        scores = correlate(half, strips[:, top:bottom, begin : end + 2 * _HALF_REACH])
        one &= (np.abs(peaks(scores) - _HALF_REACH) <= _HALF_ERROR) | (deviation(half) < TEXTURE)
    return one


def predict(points: np.ndarray, known: np.ndarray, found: Surfaces, rows: np.ndarray) -> np.ndarray:
    """(N, k) x in the right image at which surfaces of other points would show left points (N, 2).

    Args:
        points: (N, 2) in the left image.
        known: (K, 2) left points whose surfaces `found` are.
        found: of the known points.
        rows: (N, k) of `known`, those asked for each point.
    """
    step = points[:, None] - known[rows]
    return found.x[rows] + step[..., 0] + np.einsum("nki,nki->nk", found.slants[rows], step)


def confirmed(points: np.ndarray, found: Surfaces, good: np.ndarray) -> np.ndarray:
    """(N,) bool: the surface hardly slants, or surfaces around it, of points that are `good` (N,), agree.

    A window across an edge in depth is fitted by a steep plane where there is none.
    """
    flat = np.hypot(*found.slants.T) <= _STEEP
    others = np.flatnonzero(good)
    if len(others) <= _CONFIRMING:
        return flat
    distance = np.linalg.norm(points[:, None] - points[None, others], axis=2)
    distance[distance < WINDOW / 4] = np.inf  # itself, and points whose windows are the same
    count = min(_NEIGHBOURS, len(others))
    rows = np.argpartition(distance, count - 1, axis=1)[:, :count]
    known = Surfaces(*(each[others] for each in found))
    error = np.abs(predict(points, points[others], known, rows) - found.x[:, None])
    error[~np.isfinite(np.take_along_axis(distance, rows, axis=1))] = np.inf
    return flat | ((error <= _CONFIRMED).sum(axis=1) >= _CONFIRMING)


def _template(left: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Normalised windows (N, P), their change with shift and slant (N, P, 3), inverse squares (N, 3, 3)."""
    wide = cut(left, points, WINDOW + 2)
    windows = wide[:, :, 1:-1]
    slope = (wide[:, :, 2:] - wide[:, :, :-2]) / 2
    length = np.maximum(np.linalg.norm(_centred(windows), axis=1), 1e-3)
    reach = np.arange(WINDOW, dtype=np.float32) - (WINDOW - 1) / 2
    parts = (slope, slope * reach, slope * reach[:, None])
    slopes = np.stack([_centred(part) / length[:, None] for part in parts], axis=2)
    squares = np.einsum("nki,nkj->nij", slopes, slopes)
    diagonal = np.arange(3)
    squares[:, diagonal, diagonal] *= 1 + _DAMPING
    squares[:, diagonal, diagonal] += 1e-9
    return _normalised(windows), slopes, np.linalg.inv(squares)


def _centred(windows: np.ndarray) -> np.ndarray:
    """(N, P) with mean 0."""
    flat = windows.reshape(len(windows), -1)
    return flat - flat.mean(axis=1, keepdims=True)


def _normalised(windows: np.ndarray) -> np.ndarray:
    """(N, P) with mean 0 and length 1."""
    centred = _centred(windows)
    return centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-3)


# --- disparity: Where the right image of a rectified pair shows the left one's points, by correlation along
# the row.

MIN_LINKS = 6  # located exactly, from which other points are predicted
_REACH = 4  # pixels that a link may be off, and that a point may be off what its neighbours predict
_LONGEST = 64  # pixels of a row that are searched at most
_BACK = 1.0  # pixels that the search back from the right may be off
_APART = 3  # pixels between the best position and its rival
# Points of the learned front end often lie on contours, where windows show two surfaces and correlate little;
# for them these are strict.
_MIN_LINK, _MIN_NEW = 0.8, 0.9  # least correlation of a link, and of a point that has none
_MIN_SEARCHED = 0.6  # least correlation while the slant is that of a neighbour
_CLEAR = 0.1  # by which a point without a link must be better than its rival


def complete_partners(images: tuple[Image, Image], points: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The points in the right image, located exactly where they were linked and searched for where not.

    A link whose windows do not correlate or that lies on a depth discontinuity is left out; where a window
    has no texture it stays as it was. Rows are those of the links: nothing is assumed of the images but that
    the rows of neighbouring points differ equally.

    Args:
        images: left and right, with their pixels. Images that lie on their side are left as they are.
        points: (N, 2) pixels in the left image.
        right: (N, 2) float32 pixels in the right one, NaN where there is no link.

    Returns:
        (N, 2) float32; `right` itself where fewer than `MIN_LINKS` are linked.
    """
    linked = np.isfinite(right[:, 0])
    if any(image.orientation != 1 for image in images) or np.count_nonzero(linked) < MIN_LINKS:
        return right
    grey = (_grey(images[0]), _grey(images[1]))
    there, back = images[1].scale, (1 / images[1].scale[0], 1 / images[1].scale[1])
    seen = resize_points(points.astype(np.float64), images[0].scale)
    found = resize_points(right.astype(np.float64), there)

    found[linked, 1] = seen[linked, 1] + _rises(seen[linked], found[linked, 1] - seen[linked, 1])
    surfaces, good, textured = _place(grey, seen[linked], found[linked])
    x = np.where(good, surfaces.x, np.where(textured, np.nan, found[linked, 0]))
    if np.count_nonzero(good) >= MIN_LINKS and not linked.all():
        known, exact = seen[linked][good], Surfaces(*(each[good] for each in surfaces))
        rise = (found[linked, 1] - seen[linked, 1])[good]
        found[~linked] = _search(grey, seen[~linked], known, exact, rise)
    found[linked, 0] = x
    found[np.isnan(found[:, 0])] = np.nan
    return resize_points(found, back).astype(np.float32)


def _rises(points: np.ndarray, rises: np.ndarray) -> np.ndarray:
    """(K,) rows that points (K, 2) are lower in the right image: the median of those around, itself included.

    Rows of a rectified pair differ little and alike; a link whose row differs from its neighbours' is inexact
    or wrong there, and would be compared along the wrong row.
    """
    rows = nearest(points, points, min(MIN_LINKS + 1, len(points)))
    return np.median(rises[rows], axis=1)


def _place(
    images: tuple[np.ndarray, np.ndarray], points: np.ndarray, positions: np.ndarray
) -> tuple[Surfaces, np.ndarray, np.ndarray]:
    """Surfaces of linked points (K, 2), whether each link holds (K,), and whether it has texture (K,)."""
    surfaces = fit(*images, points, positions)
    good = (surfaces.correlation >= _MIN_LINK) & (np.abs(surfaces.x - positions[:, 0]) <= _REACH)
    textured = deviation(cut(images[0], points)) >= TEXTURE
    good &= textured & of_one_surface(*images, points, positions[:, 1], surfaces)
    return surfaces, good & confirmed(points, surfaces, good), textured


def _search(
    images: tuple[np.ndarray, np.ndarray],
    points: np.ndarray,
    known: np.ndarray,
    surfaces: Surfaces,
    rise: np.ndarray,
) -> np.ndarray:
    """(N, 2) positions in the right image of left points (N, 2), NaN where none is certain.

    Each is searched where the surfaces around it predict it.

    Args:
        images: left and right.
        points: those without a link.
        known: (K, 2) left points whose surfaces are known.
        surfaces: of the known points.
        rise: (K,) rows that the known points are lower in the right image.
    """
    rows = nearest(known, points, MIN_LINKS)
    y = points[:, 1] + np.median(rise[rows], axis=1)
    predicted = predict(points, known, surfaces, rows)
    middle = np.median(predicted, axis=1)
    start = np.maximum(predicted.min(axis=1) - _REACH, middle - _LONGEST / 2)
    stop = np.minimum(predicted.max(axis=1) + _REACH, middle + _LONGEST / 2)
    found, good = _search_rows(images, points, y, start, stop, surfaces.slants[rows[:, 0]])
    everything = np.concatenate([points, known])
    both = Surfaces(*(np.concatenate(pair) for pair in zip(found, surfaces, strict=True)))
    good &= confirmed(everything, both, np.concatenate([good, np.ones(len(known), bool)]))[: len(points)]
    return np.where(good[:, None], np.column_stack([found.x, y]), np.nan)


def _search_rows(
    images: tuple[np.ndarray, np.ndarray],
    points: np.ndarray,
    y: np.ndarray,
    start: np.ndarray,
    stop: np.ndarray,
    slants: np.ndarray,
) -> tuple[Surfaces, np.ndarray]:
    """Surfaces of left points (N, 2) on rows `y` (N,), from `start` to `stop` (N,); and which are certain."""
    x, correlation, clear = _along_rows(*images, points, y, start, stop, slants)
    found = Surfaces(x, slants.copy(), correlation)
    likely = np.flatnonzero(clear & (correlation >= _MIN_SEARCHED))
    seen, guess = points[likely], np.column_stack([x[likely], y[likely]])
    fitted = fit(*images, seen, guess, slants[likely])
    good = (fitted.correlation >= _MIN_NEW) & (np.abs(fitted.x - guess[:, 0]) <= _REACH / 2)
    good &= of_one_surface(*images, seen, guess[:, 1], fitted)
    # The same disparities, seen from the positions found.
    stretch, offset = 1 + fitted.slants[:, :1], guess[:, 0] + seen[:, 0]
    back, _, _ = _along_rows(
        *images[::-1],
        np.column_stack([fitted.x, guess[:, 1]]),
        seen[:, 1],
        offset - stop[likely],
        offset - start[likely],
        np.hstack([1 / stretch - 1, -fitted.slants[:, 1:] / stretch]),
    )
    good &= np.abs(back - seen[:, 0]) <= _BACK
    for whole, part in zip(found, fitted, strict=True):
        whole[likely] = part
    certain = np.zeros(len(points), bool)
    certain[likely[good]] = True
    return found, certain


def _along_rows(
    image: np.ndarray,
    other: np.ndarray,
    points: np.ndarray,
    y: np.ndarray,
    start: np.ndarray,
    stop: np.ndarray,
    slants: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The best positions of points (N, 2) on rows `y` (N,) of the other image, `start` to `stop` (N,).

    Returns:
        x (N,), correlation (N,), and (N,) bool: not at an end of the range, clearly better than any other
        position, and of enough texture.
    """
    if len(points) == 0:
        return np.zeros(0), np.zeros(0), np.zeros(0, bool)
    windows = cut(image, points)
    # A strip is cut in steps of one column of the slanted window.
    step = 1 + slants[:, 0]
    counts = np.ceil((stop - start) / step).astype(int) + 1
    most = int(counts.max())
    middles = np.column_stack([start + step * (most - 1) / 2, y])
    scores = correlate(windows, cut(other, middles, most + WINDOW - 1, slants))
    number = np.arange(most)
    scores[number >= counts[:, None]] = -1.0
    best, correlation = scores.argmax(axis=1), scores.max(axis=1)
    # A smooth surface has one broad peak, which is no rival of itself: only another peak is.
    beside = np.pad(scores, ((0, 0), (1, 1)), constant_values=-1.0)
    peaked = (scores >= beside[:, :-2]) & (scores >= beside[:, 2:])
    rival = np.where(peaked & (np.abs(number - best[:, None]) >= _APART), scores, -1.0).max(axis=1)
    clear = (best > 0) & (best < counts - 1) & (correlation - rival >= _CLEAR)
    return start + step * peaks(scores), correlation, clear & (deviation(windows) >= TEXTURE)


def _grey(image: Image) -> np.ndarray:
    """(H, W) float32 of the image as the front end saw it."""
    pixels = image.pixels
    return (pixels if pixels.ndim == 2 else cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)).astype(np.float32)


# --- odometry: Pose of a frame from the keyframe's depths, and depths from poses.

MIN_POINTS = 12  # with a known depth that agree with a pose
_MAX_ERROR = 1.0  # pixels of the resized image that a point may be off its pose
_MIN_ANGLE = 0.6  # degrees between the rays of a point whose depth is worth something


def rays(points: np.ndarray, camera: Camera) -> np.ndarray:
    """(N, 3) points of depth 1 seen at pixels (N, 2)."""
    x = (points[:, 0] - camera.cx) / camera.fx
    y = (points[:, 1] - camera.cy) / camera.fy
    return np.column_stack([x, y, np.ones(len(points))]).astype(np.float64)


def move(points: np.ndarray, T: np.ndarray) -> np.ndarray:
    """Points (N, 3) under a rigid transform (4, 4)."""
    return points @ T[:3, :3].T + T[:3, 3]


def project(points: np.ndarray, camera: Camera) -> np.ndarray:
    """(N, 2) pixels of points (N, 3); those behind the camera are NaN."""
    z = np.where(points[:, 2] > 1e-9, points[:, 2], np.nan)
    return np.column_stack(
        [camera.fx * points[:, 0] / z + camera.cx, camera.fy * points[:, 1] / z + camera.cy]
    )


def solve_pose(
    points0: np.ndarray, depths0: np.ndarray, points1: np.ndarray, camera: Camera, scale: float = 1.0
) -> tuple[np.ndarray | None, np.ndarray]:
    """The pose of a frame that sees points whose depth an earlier one knows (LO-RANSAC, PoseLib).

    Args:
        points0: (K, 2) pixels in the earlier frame.
        depths0: (K,) along its z axis, NaN where unknown.
        points1: (K, 2) pixels in the frame.
        camera: of both.
        scale: camera pixels for one of the resized image, in which the threshold is.

    Returns:
        cam1_from_cam0 (4, 4) in the unit of the depths, or None; and (K,) bool, the points that agree.
    """
    inliers = np.zeros(len(points0), bool)
    known = np.flatnonzero(np.isfinite(depths0))
    if len(known) < MIN_POINTS:
        return None, inliers
    world = rays(points0[known], camera) * depths0[known, None]
    pinhole = {
        "model": "PINHOLE",
        "width": 0,
        "height": 0,
        "params": [camera.fx, camera.fy, camera.cx, camera.cy],
    }
    options = {
        "max_reproj_error": _MAX_ERROR * scale,
        "max_iterations": 2000,
        "min_iterations": 100,  # links have been verified before, so that few are wrong
        "success_prob": 0.9999,
        "seed": 0,
    }
    refinement = {"loss_type": "CAUCHY", "loss_scale": 0.5 * _MAX_ERROR * scale}
    pose, report = poselib.estimate_absolute_pose(
        points1[known].astype(np.float64), world, pinhole, options, refinement
    )
    inliers[known] = np.asarray(report["inliers"], dtype=bool)
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = pose.R, pose.t
    if inliers.sum() < MIN_POINTS or not np.isfinite(T).all():
        return None, np.zeros(len(points0), bool)
    return T, inliers


def triangulate(
    points0: np.ndarray, points1: np.ndarray, cam1_from_cam0: np.ndarray, camera: Camera, scale: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Depths of points that two frames see, where they can be known.

    The midpoint of the shortest line between both rays (Hartley and Sturm 1997, section 5.3).

    Args:
        points0, points1: (K, 2) pixels.
        cam1_from_cam0: (4, 4).
        camera: of both.
        scale: as in `solve_pose`.

    Returns:
        depths (K,) along z in frame 0, NaN for points behind a camera, seen at too small an angle or
        projected too far away; and the angle between the rays (K,) in degrees.
    """
    a = rays(points0, camera) @ cam1_from_cam0[:3, :3].T  # rays of frame 0, turned into frame 1
    b, t = rays(points1, camera), cam1_from_cam0[:3, 3]
    angles = np.rad2deg(np.arctan2(np.linalg.norm(np.cross(a, b), axis=1), np.sum(a * b, axis=1)))
    aa, bb, ab = np.sum(a * a, axis=1), np.sum(b * b, axis=1), np.sum(a * b, axis=1)
    at, bt = a @ t, b @ t
    apart = np.maximum(aa * bb - ab * ab, 1e-15)
    depths = (ab * bt - bb * at) / apart  # least squares of depth0·a + t = depth1·b
    depths1 = (aa * bt - ab * at) / apart
    middle = (a * depths[:, None] + t + b * depths1[:, None]) / 2
    with np.errstate(invalid="ignore"):
        error = np.linalg.norm(project(middle, camera) - points1, axis=1)
        good = (depths > 0) & (depths1 > 0) & (angles >= _MIN_ANGLE) & (error <= 2 * _MAX_ERROR * scale)
    return np.where(good, depths, np.nan), angles


# --- disparity_offset: What all disparities of a pair are short of, because its cameras are not rectified
# exactly.

_PRIOR = 0.3  # standard deviation of the offset before anything was seen, pixels of the camera
_NOISE = 0.3  # of a disparity and of a position, pixels of the image as points were found
# Observations that count as one: the frames linked to a keyframe repeat the errors of its disparities, and
# neighbouring points those of the lens.
_DEPENDENT = 10.0


class DisparityOffset:
    """The offset, in pixels of the camera, estimated from every frame whose pose was found."""

    def __init__(self) -> None:
        self._information, self._sum = 1 / _PRIOR**2, 0.0

    @property
    def value(self) -> float:
        """To be added to every measured disparity; 0 until motion has shown it."""
        return self._sum / self._information

    @property
    def deviation(self) -> float:
        """Its standard deviation."""
        return self._information**-0.5

    def observe(
        self,
        points0: np.ndarray,
        disparities0: np.ndarray,
        used: float,
        points1: np.ndarray,
        cam1_from_cam0: np.ndarray,
        camera: Camera,
        focal_baseline: float,
        scale: float = 1.0,
    ) -> None:
        """Take in what one frame says of the disparities of an earlier one.

        The pose is estimated along with the offset and eliminated (the Schur complement), so that a motion
        which does not show the offset, such as a turn, says nothing.

        Args:
            points0: (K, 2) pixels of the camera in the earlier frame.
            disparities0: (K,) measured there, without the offset.
            used: the offset with which the pose was found.
            points1: (K, 2) where the frame shows the points that agree with the pose.
            cam1_from_cam0: (4, 4).
            camera: of both.
            focal_baseline: depth times disparity.
            scale: camera pixels for one of the image as points were found.
        """
        depths = focal_baseline / (disparities0 + used)
        found = move(rays(points0, camera) * depths[:, None], cam1_from_cam0)
        ahead = (found[:, 2] > 0) & (depths > 0)
        if np.count_nonzero(ahead) < 6:
            return
        found, points0, depths, points1 = (each[ahead] for each in (found, points0, depths, points1))
        residual = points1 - project(found, camera)
        slopes = _slopes(found, camera)
        turned = rays(points0, camera) @ cam1_from_cam0[:3, :3].T  # change of a point with its depth
        by_offset = np.einsum("kij,kj->ki", slopes, turned) * (-(depths**2) / focal_baseline)[:, None]
        by_pose = np.concatenate([np.cross(found[:, None], slopes), slopes], axis=2)
        variance = (_NOISE * scale) ** 2 * (1 + np.square(by_offset).sum(axis=1))
        weights = 1 / (_DEPENDENT * variance * (1 + np.square(residual).sum(axis=1) / (4 * variance)))
        pose_pose = np.einsum("kia,k,kib->ab", by_pose, weights, by_pose)
        pose_offset = np.einsum("kia,k,ki->a", by_pose, weights, by_offset)
        pose_residual = np.einsum("kia,k,ki->a", by_pose, weights, residual)
        absorbed = np.linalg.lstsq(pose_pose, np.column_stack([pose_offset, pose_residual]), rcond=None)[0]
        information = weights @ np.square(by_offset).sum(axis=1) - pose_offset @ absorbed[:, 0]
        moved = weights @ (by_offset * residual).sum(axis=1) - pose_offset @ absorbed[:, 1]
        if information > 0:
            self._information += information
            self._sum += moved + information * used


def _slopes(points: np.ndarray, camera: Camera) -> np.ndarray:
    """(K, 2, 3) derivatives of pixels by the coordinates of points (K, 3)."""
    inverse = 1 / points[:, 2]
    found = np.zeros((len(points), 2, 3))
    found[:, 0, 0], found[:, 1, 1] = camera.fx * inverse, camera.fy * inverse
    found[:, 0, 2] = -camera.fx * points[:, 0] * inverse**2
    found[:, 1, 2] = -camera.fy * points[:, 1] * inverse**2
    return found


# --- calibration: The camera of a sequence, rescaled for frames of another size.

_SAME_SHAPE = 0.01  # relative difference of the sides' ratio up to which a frame counts as resized


class Calibration:
    """A pinhole camera and the image size it is for: the one it names, or else that of the first frame.

    A frame of another size but the same shape is taken for a resized one, and the camera is rescaled to it.
    For a frame of another shape, which may be cropped anywhere, there is no camera.

    Raises:
        UsageError: a camera whose lens distorts.
    """

    def __init__(self, camera: Camera) -> None:
        if camera.distortion:
            raise UsageError(
                f"a tracker needs images without distortion, and the camera is {camera.model}: "
                "undistort them (cv2.undistort) and give the pinhole camera of the result"
            )
        self.camera = camera
        self._size = camera.size

    def begin(self, size: tuple[int, int]) -> None:
        """The first frame has this (width, height)."""
        self._size = self._size or size

    def of(self, size: tuple[int, int]) -> Camera | None:
        """The camera of frames of a (width, height), or None where the shape differs."""
        if self._size is None or size == self._size:
            return replace(self.camera, size=size)
        scale = (size[0] / self._size[0], size[1] / self._size[1])
        if abs(scale[0] / scale[1] - 1) > _SAME_SHAPE:
            return None
        centre = resize_points(np.array([self.camera.cx, self.camera.cy]), scale)
        return Camera(self.camera.fx * scale[0], self.camera.fy * scale[1], *centre.tolist(), size=size)

    def pixels(self, points: np.ndarray, size: tuple[int, int]) -> np.ndarray | None:
        """(N, 2) float64: a frame's pixels as pixels of the camera; None where the shape differs."""
        points = points.astype(np.float64)
        if self.of(size) is None:
            return None
        if self._size is None or size == self._size:
            return points
        return resize_points(points, (self._size[0] / size[0], self._size[1] / size[1]))

    def coarseness(self, frame: KeptFrame) -> float:
        """Camera pixels for one pixel of the frame as its points were found."""
        width = frame.size[0] if self._size is None else self._size[0]
        return width / (frame.size[0] * frame.scale[0])
