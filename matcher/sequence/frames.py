"""What a tracker returns for a frame; NumPy only, C-contiguous.

Letters for shapes: N keypoints of the frame, K links. A pose b_from_a (4, 4) takes points in the
coordinates of a to those of b; cameras look along z, x is right, y is down. The world is the camera of the
first frame.
"""

from __future__ import annotations

import io
import json
import math
import warnings
import zipfile
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import cv2
import numpy as np

from matcher.cameras import Camera
from matcher.errors import MALFORMED, IntegrityError, UsageError
from matcher.extract.sift import SiftExtractor
from matcher.files import write_whole
from matcher.geometry import check_poses
from matcher.match.nearest import mutual_minima
from matcher.types import Extractor, Features, Image

# --- frames: What a tracker returns for a frame; NumPy only, C-contiguous.

FrameStatus = Literal[
    "first",  # there is none before it
    "tracked",  # linked to an earlier frame
    "lost",  # linked to no frame that is still held; new tracks begin
    "blank",  # no keypoints (a black frame, a lens covered): it is skipped
    "dropped",  # None instead of an image
    "out_of_order",  # older than the frame before: it is skipped
]
PoseStatus = Literal[
    "ok",
    "no_camera",  # none was given
    "other_size",  # the frame's sides have another ratio than those of the images that the camera is for
    "starting",  # one camera only: not enough parallax yet
    "too_few",  # points of known depth agree with a pose
    "bridged",  # tracking was lost: the last motion, extrapolated
    "none",  # the frame was skipped
]


@dataclass(frozen=True, eq=False, repr=False)
class FrameLinks:
    """Which keypoints of an earlier frame are which of this one."""

    frame: int  # index of the earlier frame
    indices: np.ndarray  # (K, 2) int64: keypoint of the earlier frame, of this one
    scores: np.ndarray  # (K,) float32 in [0, 1]
    consistent: np.ndarray  # (K,) bool: agree with one epipolar geometry; only these carry track ids

    def __len__(self) -> int:
        """The number of links K."""
        return len(self.indices)

    def __repr__(self) -> str:
        """One line."""
        return f"FrameLinks(to frame {self.frame}, {int(self.consistent.sum())} of {len(self)} consistent)"


@dataclass(frozen=True, eq=False, repr=False)
class FrameResult:
    """Everything known of one frame once it has been seen; `Tracker.push` returns it.

    Its arrays are copies, free to be changed.

    >>> import matcher, numpy as np
    >>> frame = np.random.default_rng(0).integers(0, 255, (240, 320), dtype=np.uint8)
    >>> result = matcher.Tracker("nearest", max_keypoints=200).push(frame)
    >>> result.index, result.size, len(result.keypoints) == len(result.track_ids)
    (0, (320, 240), True)
    >>> repr(result).startswith("FrameResult(0, first, ")
    True
    """

    index: int  # frames pushed before it
    timestamp: float | None  # as it was given
    status: FrameStatus
    size: tuple[int, int]  # (width, height) in pixels; (0, 0) when dropped
    keypoints: np.ndarray  # (N, 2) float32 xy pixels
    track_ids: np.ndarray  # (N,) int64, the same number as long as a point is seen; never used again
    track_lengths: np.ndarray  # (N,) int64 frames that the track has been seen in, this one included
    to_previous: FrameLinks | None = None  # the last frame that was not skipped
    to_keyframe: FrameLinks | None = None
    is_keyframe: bool = False
    keyframe: int | None = None  # index of the keyframe it is linked to; None for the first
    parallax: float | None = None  # median displacement of the keypoints since the keyframe, pixels
    kept: float | None = (
        None  # share of the keyframe's links still seen; with pairs, of the close ones if fewer
    )
    pose_status: PoseStatus = "none"
    cam_from_keyframe: np.ndarray | None = None  # (4, 4) float64
    world_from_cam: np.ndarray | None = None  # (4, 4) float64
    camera: Camera | None = None  # the tracker's, rescaled where the frame has another size; None: unknown
    right: np.ndarray | None = None  # (N, 2) float32 pixels in the right image of a pair, NaN where unknown
    depths: np.ndarray | None = None  # (N,) float64 along z, NaN where unknown; metres with a baseline
    map_from_cam: np.ndarray | None = None  # (4, 4) float64, in the map of `Tracker.load_map`
    milliseconds: dict[str, float] = field(default_factory=dict)  # by stage

    @classmethod
    def skipped(
        cls,
        index: int,
        timestamp: float | None,
        status: FrameStatus,
        size: tuple[int, int],
        milliseconds: dict[str, float],
    ) -> FrameResult:
        """The result of a frame that is passed over."""
        nothing = np.zeros((0, 2), np.float32), np.zeros(0, np.int64), np.zeros(0, np.int64)
        return cls(index, timestamp, status, size, *nothing, milliseconds=milliseconds)

    @property
    def passed_over(self) -> bool:
        """Whether the frame was skipped: no other frame is linked to it."""
        return self.status in ("blank", "dropped", "out_of_order")

    @property
    def T_to_world(self) -> np.ndarray | None:
        """The old name of `world_from_cam`."""
        _warn_renamed("T_to_world", "world_from_cam")
        return self.world_from_cam

    @property
    def T_keyframe_to_frame(self) -> np.ndarray | None:
        """The old name of `cam_from_keyframe`."""
        _warn_renamed("T_keyframe_to_frame", "cam_from_keyframe")
        return self.cam_from_keyframe

    def __repr__(self) -> str:
        """One line."""
        parts = [f"{self.index}", self.status.replace("_", " ")]
        if not self.passed_over:
            parts.append(f"{len(self.keypoints)} keypoints")
            parts.append(f"{int(np.count_nonzero(self.track_lengths > 1))} seen before")
        if self.depths is not None:
            parts.append(f"{int(np.isfinite(self.depths).sum())} with depth")
        if self.pose_status != "none":
            parts.append(f"pose {self.pose_status.replace('_', ' ')}")
        parts += ["keyframe"] if self.is_keyframe else []
        if "total" in self.milliseconds:
            parts.append(f"{self.milliseconds['total']:.0f} ms")
        return f"FrameResult({', '.join(parts)})"


@dataclass(frozen=True, eq=False, repr=False)
class Relocalisation:
    """Where an image was taken, as far as the kept keyframes show the same place."""

    keyframe: int | None  # index of the keyframe with the most consistent links; None: not found
    candidates: tuple[int, ...]  # keyframes that were matched, the most similar first
    links: FrameLinks | None = None  # keyframe → image
    keypoints: np.ndarray | None = None  # (N, 2) float32, of the image
    cam_from_keyframe: np.ndarray | None = None  # (4, 4); unit translation where no depths are known
    world_from_cam: np.ndarray | None = None  # (4, 4); None where no depths are known

    def __repr__(self) -> str:
        """One line."""
        if self.keyframe is None:
            return f"Relocalisation(no keyframe, {len(self.candidates)} tried)"
        pose = (
            "with a pose in the world" if self.world_from_cam is not None else "without a pose in the world"
        )
        links = 0 if self.links is None else int(self.links.consistent.sum())
        return f"Relocalisation(keyframe {self.keyframe}, {links} consistent links, {pose})"


def _warn_renamed(old: str, new: str) -> None:
    warnings.warn(f"FrameResult.{old} is now FrameResult.{new}", DeprecationWarning, stacklevel=3)


# --- kept_frames: What is kept of a map that is being made: images of keyframes, and all poses in one file;
# always whole.

KEPT = "tracked.npz"  # in the folder of a map that is not finished
_LARGEST = 1 << 31  # bytes
_QUICK = (cv2.IMWRITE_PNG_COMPRESSION, 1)  # a fifth of the time, for a seventh more bytes


@dataclass(frozen=True, eq=False)
class PlacedFrame:
    """A frame with a pose, and the keyframe that it moves with."""

    index: int
    time: float
    world_from_cam: np.ndarray  # (4, 4)
    keyframe: int


@dataclass(frozen=True, eq=False)
class KeptFrames:
    """Frames of a map that is not finished, and what its features are found with."""

    frames: list[PlacedFrame]
    camera: Camera
    preset: str
    options: dict[str, Any]  # of `matcher.load`


def write_kept(folder: Path, kept: KeptFrames) -> None:
    """Write all frames so far; a crash leaves the file as it was.

    Raises:
        OSError: the disk is full.
    """
    frames = kept.frames
    facts = {"camera": asdict(kept.camera), "preset": kept.preset, "options": kept.options}
    buffer = io.BytesIO()
    np.savez(
        buffer,
        index=np.array([frame.index for frame in frames], dtype=np.int64),
        time=np.array([frame.time for frame in frames], dtype=np.float64),
        world_from_cam=np.array([frame.world_from_cam for frame in frames]).reshape(-1, 4, 4),
        keyframe=np.array([frame.keyframe for frame in frames], dtype=np.int64),
        facts=np.array(json.dumps(facts, default=str)),
    )
    write_whole(folder / KEPT, buffer.getvalue())


def read_kept(folder: Path) -> KeptFrames:
    """What `write_kept` wrote.

    Raises:
        UsageError: there is none, because the map is finished or nothing was tracked.
        IntegrityError: the file is damaged.
    """
    path = folder / KEPT
    if not path.is_file():
        raise UsageError(f"{folder} holds no unfinished map (no {KEPT})")
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError("it is too large")
        with np.load(path) as rows:
            # We write without compression, so what unpacks to more than the file is not ours.
            if sum(each.file_size for each in rows.zip.infolist()) > path.stat().st_size:
                raise ValueError("it unpacks to more than it may")
            index, time, poses, keyframe = (rows[n] for n in ("index", "time", "world_from_cam", "keyframe"))
            facts = json.loads(str(rows["facts"]))
        if poses.shape != (len(index), 4, 4) or not len(index) == len(time) == len(keyframe):
            raise ValueError("its arrays do not fit each other")
        check_poses(poses)
        camera = facts["camera"]
        camera = Camera(**{**camera, "distortion": tuple(camera["distortion"])})
        preset, options = str(facts["preset"]), dict(facts["options"])
    except (*MALFORMED, zipfile.BadZipFile, zlib.error) as error:
        raise IntegrityError(f"{path}: the poses of the unfinished map are damaged ({error})") from error
    rows = zip(index.tolist(), time.tolist(), poses, keyframe.tolist(), strict=True)
    return KeptFrames([PlacedFrame(*row) for row in rows], camera, preset, options)


def write_image(path: Path, pixels: np.ndarray, mask: np.ndarray | None = None) -> None:
    """Write a keyframe (H, W[, 3]) as a PNG that appears whole; its alpha is 0 where the mask (H, W) is.

    Raises:
        OSError: the disk is full.
    """
    colour = pixels if pixels.ndim == 2 else cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR)
    if mask is not None:
        colour = cv2.cvtColor(colour, cv2.COLOR_GRAY2BGRA if pixels.ndim == 2 else cv2.COLOR_BGR2BGRA)
        colour[..., 3] = np.where(mask, 255, 0)
    write_whole(path, cv2.imencode(".png", colour, _QUICK)[1].tobytes())


def count_keyframes(frames: Sequence[PlacedFrame]) -> int:
    """How many of the frames are keyframes."""
    return sum(frame.index == frame.keyframe for frame in frames)


# --- tracks: Identities of points over frames.


class TrackIds:
    """Hands out track ids: a linked point has the id of its partner, any other a number never used before.

    Only the tracks of the frames that the caller still names are remembered, so memory is bounded.
    """

    def __init__(self) -> None:
        self._next = 0
        self._lengths: dict[int, int] = {}

    def extend(
        self, count: int, links: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids and lengths of the points of a new frame.

        Args:
            count: its points N.
            links: (ids (M,) of an earlier frame, indices (K, 2) into that frame and this one), the most
                trusted first. A point takes the first id that is offered to it, and an id goes to one point
                only.

        Returns:
            ids (N,) int64 and the number of frames that each was seen in, this one included (N,) int64.
        """
        ids = np.full(count, -1, np.int64)
        for earlier, indices in links:
            offered = earlier[indices[:, 0]]
            free = (ids[indices[:, 1]] < 0) & ~np.isin(offered, ids)
            offered, takers = offered[free], indices[free, 1]
            _, first = np.unique(offered, return_index=True)
            ids[takers[first]] = offered[first]
        new = np.flatnonzero(ids < 0)
        ids[new] = np.arange(self._next, self._next + len(new))
        self._next += len(new)
        lengths = [self._lengths.get(track, 0) + 1 for track in ids.tolist()]
        self._lengths |= zip(ids.tolist(), lengths, strict=True)
        return ids, np.array(lengths, np.int64)

    def forget(self, *kept: np.ndarray) -> None:
        """Remember the lengths of these tracks only."""
        alive = np.unique(np.concatenate(kept)).tolist() if kept else []
        self._lengths = {track: self._lengths[track] for track in alive if track in self._lengths}

    def __len__(self) -> int:
        """Tracks that are remembered."""
        return len(self._lengths)


# --- clock: Timestamps that may go back.


class Clock:
    """Distinguishes a frame that came too late from a clock that was set back.

    A frame older than the last accepted one is refused. If the next one is older too, but not older than the
    refused one, the clock has been set back, and from then on its new time counts.
    """

    def __init__(self) -> None:
        self._last = -math.inf
        self._refused = math.inf

    def accepts(self, timestamp: float | None) -> bool:
        """Whether a frame of this time (seconds; None: unknown, always accepted) is in order.

        Raises:
            UsageError: a time that is not a finite number.
        """
        if timestamp is None:
            return True
        if not isinstance(timestamp, (int, float)) or not math.isfinite(timestamp):
            raise UsageError(f"a timestamp must be a finite number of seconds, not {timestamp!r}")
        if timestamp < self._last and timestamp < self._refused:
            self._refused = timestamp
            return False
        self._last, self._refused = timestamp, math.inf
        return True


# --- latency: How long the stages of a frame take: percentiles over the last frames.

PERCENTILES = (50, 95, 99)


class StageTimes:
    """Milliseconds of the stages of one frame."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add what passes to a stage."""
        start = perf_counter()
        yield
        self._spent[stage] = self._spent.get(stage, 0.0) + 1000 * (perf_counter() - start)

    def milliseconds(self) -> dict[str, float]:
        """Stage → milliseconds, and their total."""
        return {**self._spent, "total": sum(self._spent.values())}


class Latency:
    """Milliseconds of each stage over the last `window` frames."""

    def __init__(self, window: int = 512) -> None:
        self._rows: deque[dict[str, float]] = deque(maxlen=window)

    def add(self, milliseconds: Mapping[str, float]) -> None:
        """Take in the stages of one frame."""
        self._rows.append(dict(milliseconds))

    def percentiles(self) -> dict[str, dict[str, float]]:
        """Stage → {"p50", "p95", "p99", "max"} in milliseconds; empty before the first frame."""
        stages = dict.fromkeys(stage for row in self._rows for stage in row)
        table = {}
        for stage in stages:
            values = [row[stage] for row in self._rows if stage in row]
            found = np.percentile(values, PERCENTILES).tolist()
            table[stage] = {f"p{p}": value for p, value in zip(PERCENTILES, found, strict=True)}
            table[stage]["max"] = max(values)
        return table

    def __len__(self) -> int:
        """Frames that the percentiles are of."""
        return len(self._rows)


# --- windows: Windows cut from an image, and how similar they are: zero-mean normalised correlation along
# rows.

WINDOW = 11  # pixels, the side of what is compared
TEXTURE = 2.0  # grey levels that a window must deviate by, or it has no texture


def cut(
    image: np.ndarray, centres: np.ndarray, width: int = WINDOW, slants: np.ndarray | None = None
) -> np.ndarray:
    """(N, WINDOW, width) float32 of an image around centres (N, 2) at any fraction of a pixel.

    Beyond its edge the image's last pixels are repeated.

    Args:
        image: (H, W) float32.
        centres: (N, 2) xy.
        width: columns of a window.
        slants: (N, 2) a, b: the sample at column u and row v from the centre is taken at x + (1 + a)·u + b·v,
            y + v. None: no slant.
    """
    shape = (len(centres), WINDOW, width)
    if len(centres) == 0:
        return np.zeros(shape, np.float32)
    u = np.arange(width, dtype=np.float32) - (width - 1) / 2
    v = np.arange(WINDOW, dtype=np.float32)[:, None] - (WINDOW - 1) / 2
    x, y = centres.astype(np.float32).T[:, :, None, None]
    columns = x + u
    if slants is not None:
        stretch, shear = slants.astype(np.float32).T[:, :, None, None]
        columns = columns + stretch * u + shear * v
    flat = (
        np.ascontiguousarray(np.broadcast_to(each, shape)).reshape(len(centres), -1)
        for each in (columns, y + v)
    )
    return cv2.remap(image, *flat, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE).reshape(shape)


def correlate(windows: np.ndarray, strips: np.ndarray) -> np.ndarray:
    """(N, S) zero-mean normalised correlation of (N, h, w) at the S positions of strips (N, h, w + S − 1)."""
    _, height, width = windows.shape
    views = np.lib.stride_tricks.sliding_window_view(strips, width, axis=2)
    centred = windows - windows.mean(axis=(1, 2), keepdims=True)
    product = np.einsum("nij,nisj->ns", centred, views)
    sums, squares = (
        np.lib.stride_tricks.sliding_window_view(each.sum(axis=1), width, axis=1).sum(axis=2)
        for each in (strips, strips * strips)
    )
    spread = np.maximum(squares - sums * sums / (height * width), 1e-3)
    length = np.maximum(np.square(centred).sum(axis=(1, 2)), 1e-3)
    return product / np.sqrt(length[:, None] * spread)


def peaks(scores: np.ndarray) -> np.ndarray:
    """(N,) where the scores (N, S) are highest, between steps by a parabola."""
    best, last = scores.argmax(axis=1), scores.shape[1] - 1
    rows = np.arange(len(scores))
    before, at, after = (scores[rows, np.clip(best + k, 0, last)] for k in (-1, 0, 1))
    curve = np.minimum(before - 2 * at + after, -1e-6)
    inside = (best > 0) & (best < last)
    return best + np.where(inside, np.clip(0.5 * (before - after) / curve, -0.5, 0.5), 0.0)


def deviation(windows: np.ndarray) -> np.ndarray:
    """(N,) standard deviation of the values of (N, h, w)."""
    return windows.std(axis=(1, 2))


# --- guided: Guided matching: links that matching missed, searched near where the verified ones predict
# them.

_NEIGHBOURS = 6  # links whose median motion predicts a point's
_ONE_TREE, _UNLIMITED = 4, -1  # FLANN's exact tree of few dimensions
_CLOSER = 0.95  # the best candidate is nearer than this share of the second one's distance
_PREDICTED = 80  # percentile of the links' own prediction errors within which others are searched
_LINK_PERCENTILE = 98  # percentile of the links' descriptor distances that a new one must keep below


@dataclass(frozen=True, eq=False)
class Guide:
    """What the verified links of two frames predict: where other points are, and how similar they look."""

    start: np.ndarray  # (K, 2) pixels of the links in the earlier frame
    end: np.ndarray  # (K, 2) and in the later one
    limit: float  # distance of descriptors that nearly all links keep below
    radius: float  # pixels around a predicted position in which a partner is searched
    fundamental: np.ndarray | None = None  # (3, 3) of the two frames
    tolerance: float = 1.5  # pixels to the epipolar line in the later frame

    @property
    def usable(self) -> bool:
        """Whether there are links enough to predict anything."""
        return len(self.start) >= _NEIGHBOURS

    def motions(self, points: np.ndarray) -> np.ndarray:
        """(N, 6, 2) motions of the links that begin nearest to each point (N, 2)."""
        return (self.end - self.start)[nearest(self.start, points, _NEIGHBOURS)]

    def narrowed(self, least_radius: float) -> Guide:
        """Search only as far as the links themselves are from their lines and from what is predicted.

        What is found further off is often a wrong point that looks similar, and poses suffer from it: with
        this, the error of `hybrid` on kitti_mini fell from 1.6 to 1.3 %.
        """
        if not self.usable:
            return self
        errors = np.linalg.norm(self.start + self.motion(self.start) - self.end, axis=1)
        radius = min(self.radius, max(least_radius, float(np.percentile(errors, _PREDICTED))))
        tolerance = self.tolerance
        if self.fundamental is not None:
            sides = (side.astype(np.float64) for side in (self.start, self.end))
            tolerance = min(tolerance, float(np.median(_line_distance(*sides, self.fundamental))))
        return replace(self, radius=radius, tolerance=tolerance)

    def motion(self, points: np.ndarray) -> np.ndarray:
        """(N, 2) their median."""
        return np.median(self.motions(points), axis=1)


def nearest(points: np.ndarray, queries: np.ndarray, count: int) -> np.ndarray:
    """(N, count) rows of the `points` (K, 2), K ≥ count, nearest to each query (N, 2), the nearest first."""
    if len(queries) == 0:
        return np.zeros((0, count), np.int64)
    known, asked = (np.ascontiguousarray(each, dtype=np.float32) for each in (points, queries))
    tree = cv2.flann_Index(known, {"algorithm": _ONE_TREE})
    return tree.knnSearch(asked, count, params={"checks": _UNLIMITED})[0]


def typical_limit(descriptors0: np.ndarray, descriptors1: np.ndarray) -> float:
    """The distance below which `_LINK_PERCENTILE` percent of linked descriptors (K, D) lie; 0 without any."""
    if len(descriptors0) == 0:
        return 0.0
    return float(np.percentile(np.linalg.norm(descriptors0 - descriptors1, axis=1), _LINK_PERCENTILE))


def search_guided(
    points0: np.ndarray,
    descriptors0: np.ndarray,
    points1: np.ndarray,
    descriptors1: np.ndarray,
    guide: Guide,
) -> tuple[np.ndarray, np.ndarray]:
    """Partners near the predicted position and the epipolar line: similar, clearly the best, and mutual.

    Args:
        points0: (N, 2) pixels in the earlier frame that have no partner.
        descriptors0: (N, D) float32, of any one kind; the guide says how similar is similar enough.
        points1: (M, 2) pixels in the later frame that have none.
        descriptors1: (M, D) float32.
        guide: from the links that the two frames have.

    Returns:
        (L, 2) int64 rows of the two sides and (L,) float32 scores, 1 − distance / distance of the second.
    """
    if not guide.usable or 0 in (len(points0), len(points1)):
        return np.zeros((0, 2), np.int64), np.zeros(0, np.float32)
    near = _squares(points0 + guide.motion(points0), points1) <= guide.radius**2
    rows, columns = np.nonzero(near)
    if guide.fundamental is not None:
        good = _line_distance(points0[rows], points1[columns], guide.fundamental) <= guide.tolerance
        rows, columns = rows[good], columns[good]
    distance = np.full(near.shape, np.inf, np.float32)
    distance[rows, columns] = np.linalg.norm(descriptors0[rows] - descriptors1[columns], axis=1)
    return _mutual(distance, guide.limit)


def _squares(points0: np.ndarray, points1: np.ndarray) -> np.ndarray:
    """(N, M) squared distances of pixels (N, 2) and (M, 2)."""
    return (points0[:, :1] - points1[:, 0]) ** 2 + (points0[:, 1:] - points1[:, 1]) ** 2


def _line_distance(points0: np.ndarray, points1: np.ndarray, fundamental: np.ndarray) -> np.ndarray:
    """(C,) distance of points of image 1 (C, 2) to the lines of their partners in image 0 (C, 2)."""
    lines = np.column_stack([points0, np.ones(len(points0))]) @ fundamental.T
    residual = np.sum(lines[:, :2] * points1, axis=1) + lines[:, 2]
    return np.abs(residual) / np.maximum(np.linalg.norm(lines[:, :2], axis=1), 1e-12)


def _mutual(distance: np.ndarray, limit: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns (L, 2) of entries that are the least of both, within the limit and clearly so."""
    rows, columns = mutual_minima(distance)
    best = distance[rows, columns]
    rest = distance[rows]
    rest[np.arange(len(rows)), columns] = np.inf
    second = rest.min(axis=1)
    keep = (best <= limit) & (best <= _CLOSER * second)
    scores = 1 - best[keep] / np.maximum(np.minimum(second[keep], 2 * limit), 1e-12)
    pairs = np.stack([rows[keep], columns[keep]], axis=1).astype(np.int64)
    return pairs, np.clip(scores, 0, 1).astype(np.float32)


# --- contrast: SIFT's threshold from frame to frame: points much weaker than the weakest one kept are
# skipped.

_SHARE = 0.6  # of the weakest point's response; a frame rarely has that much less contrast than the last one
_INTERVALS = 3  # of an octave, into which OpenCV divides its threshold


class AdaptiveContrast:
    """Extracts frames that come in order; their points are those that the front end alone would give.

    SIFT keeps the strongest of its points. Which they are does not depend on its threshold as long as enough
    pass it, but the time does: with 512 points of a frame, three in four are found only to be dropped again.
    Where too few pass, the frame is searched again by the front end's own threshold.
    """

    def __init__(self) -> None:
        self._weakest = 0.0  # response of the last frame's weakest point

    def extract(self, extractor: Extractor, images: list[Image]) -> list[Features]:
        """Features of each image, as the extractor gives them."""
        if not isinstance(extractor, SiftExtractor) or extractor.config.keep != "strongest":
            return extractor(images)
        config = extractor.config
        raised = max(config.contrast_threshold, _SHARE * _INTERVALS * self._weakest)
        features = SiftExtractor(replace(config, contrast_threshold=raised))(images)
        if raised > config.contrast_threshold:
            few = [i for i, found in enumerate(features) if len(found) < config.max_keypoints]
            for i, again in zip(few, extractor([images[i] for i in few]), strict=True):
                features[i] = again
        full = all(0 < len(found) == config.max_keypoints for found in features)
        self._weakest = min(float(found.scores[-1]) for found in features) if full else 0.0
        return features
