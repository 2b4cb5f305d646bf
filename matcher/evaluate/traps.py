"""Pairs that are easily wrong and look sure: planes, repeated patterns, overlays; made of photos.

The truth of a pair is read as: the right geometry, or none. A pair is made when it is asked for, and depends
on the seed and its own number only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from matcher.cameras import Camera
from matcher.evaluate.calibration import reliability
from matcher.evaluate.measure import pose_error, reprojection_errors
from matcher.evaluate.protocols import HomographyPair, Pair, PairImage, PairSet, PosePair, UnrelatedPair
from matcher.evaluate.synthetic import PairsOnAccess, degrade
from matcher.images import read_image
from matcher.loading import with_estimation
from matcher.pipeline import Pipeline
from matcher.result import Result
from matcher.verify.verdict import SAME

SIZE = (640, 480)  # of views of walls
OVERLAID = (448, 336)  # of parts of photos with an overlay
RIGHT_POSE = 10.0  # degrees
RIGHT_MATCH = 5.0  # pixels
_PIXEL = 1 / 400  # length of a pixel of a texture; a wall is some 3 long
_K = np.array([[560.0, 0, 319.5], [0, 560.0, 239.5], [0, 0, 1]])

# Scenes of textured rectangles


class Board(NamedTuple):
    """A rectangle parallel to the wall z = 0, seen from negative z."""

    texture: np.ndarray  # (h, w, 3) uint8
    centre: tuple[float, float, float]


def rendered(boards: Sequence[Board], cam_from_world: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The boards, of which earlier ones lie behind, as a camera of `_K` sees them, in other light."""
    view = np.full((*SIZE[::-1], 3), 90, np.uint8)
    for texture, centre in boards:
        height, width = texture.shape[:2]
        corner = np.array(centre) - _PIXEL * np.array([(width - 1) / 2, (height - 1) / 2, 0])
        axes = np.column_stack([[_PIXEL, 0, 0], [0, _PIXEL, 0], corner])
        H = _K @ (cam_from_world[:3, :3] @ axes + np.outer(cam_from_world[:3, 3], [0, 0, 1]))
        nearness = _PIXEL * _K[0, 0] / np.linalg.norm(cam_from_world[:3, :3] @ centre + cam_from_world[:3, 3])
        if nearness < 1:
            texture = cv2.GaussianBlur(texture, (0, 0), max(0.5 * math.sqrt(nearness**-2 - 1), 0.05))
        seen = cv2.warpPerspective(texture, H, SIZE, flags=cv2.INTER_CUBIC)
        inside = cv2.warpPerspective(np.ones((height, width), np.uint8), H, SIZE, flags=cv2.INTER_NEAREST)
        view[inside > 0] = seen[inside > 0]
    return degrade(view, 0.5, rng)


def looking(position: Sequence[float], target: Sequence[float], roll: float = 0.0) -> np.ndarray:
    """cam_from_world (4, 4) of a camera that looks at a target, the y axis of the world downwards."""
    ahead = np.subtract(target, position) / np.linalg.norm(np.subtract(target, position))
    right = np.cross([math.sin(roll), math.cos(roll), 0.0], ahead)
    right /= np.linalg.norm(right)
    pose = np.eye(4)
    pose[:3, :3] = [right, np.cross(ahead, right), ahead]
    pose[:3, 3] = -pose[:3, :3] @ position
    return pose


def two_cameras(rng: np.random.Generator, apart: tuple[float, float] = (12.0, 50.0)) -> list[np.ndarray]:
    """Two poses before the wall, which see it `apart` degrees apart."""
    between, middle = np.radians(rng.uniform(*apart)), np.radians(rng.uniform(-15, 15))
    poses = []
    for side in rng.permutation([-0.5, 0.5]):
        across, up = middle + side * between, np.radians(rng.uniform(-20, 20))
        target = np.array([rng.uniform(-0.15, 0.15), rng.uniform(-0.1, 0.1), 0.0])
        away = np.array([math.sin(across), math.sin(up), -math.cos(across)]) * rng.uniform(1.3, 2.1)
        poses.append(looking(target + away, target, np.radians(rng.uniform(-6, 6))))
    return poses


def photo(paths: Sequence[Path], rng: np.random.Generator, size: tuple[int, int] | None = None) -> np.ndarray:
    """A photo in colour; or a part of one, of this (width, height)."""
    pixels = read_image(paths[rng.integers(len(paths))], resize=640, upright=False).pixels
    pixels = pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, axis=2)
    if size is None:
        return pixels
    height, width = pixels.shape[:2]
    grow = max(size[0] / width, size[1] / height, 1.0)
    if grow > 1:
        pixels = cv2.resize(pixels, None, fx=grow * 1.01, fy=grow * 1.01, interpolation=cv2.INTER_CUBIC)
    y, x = (
        int(rng.integers(0, have - want + 1)) for have, want in zip(pixels.shape, size[::-1], strict=False)
    )
    return np.ascontiguousarray(pixels[y : y + size[1], x : x + size[0]])


def _sides(name: str, *views: np.ndarray) -> tuple[PairImage, ...]:
    return tuple(PairImage(Path(f"{name} {side}.png"), view) for side, view in enumerate(views))


def _posed(name: str, group: str, scenes: Sequence[Sequence[Board]], rng: np.random.Generator) -> PosePair:
    poses = two_cameras(rng)
    views = (rendered(boards, pose, rng) for boards, pose in zip(scenes, poses, strict=True))
    return PosePair(name, group, *_sides(name, *views), _K, _K, poses[1] @ np.linalg.inv(poses[0]))


# Planes


def planes_set(paths: Sequence[Path], *, count: int = 120, seed: int = 0) -> PairSet:
    """Walls of photos, with known pose, and 0 to 4 boards before them that show other photos."""

    def make(position: int) -> PosePair:
        rng = np.random.default_rng([seed, position, 11])
        wall = np.vstack([np.hstack([photo(paths, rng, (640, 480)) for _ in range(2)]) for _ in range(2)])
        before = (0, 0, 1, 2, 4)[position % 5]
        boards = [Board(wall, (0.0, 0.0, 0.0)), *_boards(paths, rng, before)]
        group = "one plane" if not before else f"a plane and {before} board{'s' * (before > 1)}"
        return _posed(f"planes {position}", group, (boards, boards), rng)

    return _made("planes", paths, count, make, "pose known", seed)


def _boards(paths: Sequence[Path], rng: np.random.Generator, count: int, near: float = 0.3) -> list[Board]:
    """Small boards up to so far before the wall, the farthest from the camera first; 0: on the wall."""
    depths = np.sort(rng.uniform(0.1, near, count)) if near else np.zeros(count)
    places, sizes = (
        rng.uniform((-0.45, -0.3), (0.45, 0.3), (count, 2)),
        rng.integers((70, 60), (150, 120), (count, 2)),
    )
    rows = zip(places.tolist(), depths.tolist(), sizes.tolist(), strict=True)
    return [Board(photo(paths, rng, tuple(size)), (*place, -depth)) for place, depth, size in rows]


# Repeats

_LETTERS = "etaoinshrdlucmfwygpbvk"


def papered(paths: Sequence[Path], rng: np.random.Generator) -> np.ndarray:
    """A wall papered with one motif of a photo."""
    motif = photo(paths, rng, tuple(rng.integers(90, 200, 2)))
    if rng.random() < 0.3:
        motif = np.hstack([motif, motif[:, ::-1]])
    return np.tile(motif, (-(-960 // motif.shape[0]), -(-1280 // motif.shape[1]), 1))[:960, :1280]


def facade(paths: Sequence[Path], rng: np.random.Generator) -> np.ndarray:
    """A plastered wall with equal windows in rows."""
    wall = np.full((960, 1280, 3), rng.integers(90, 220, 3), np.uint8)
    grain = rng.normal(0, 6, (960, 1280, 1))
    wall = np.clip(wall + cv2.GaussianBlur(grain, (0, 0), 1.5)[..., None] * 3, 0, 255).astype(np.uint8)
    width, height = rng.integers((50, 80), (90, 130))
    window = photo(paths, rng, (int(width), int(height)))
    window = cv2.copyMakeBorder(
        window, 5, 12, 5, 5, cv2.BORDER_CONSTANT, value=rng.integers(0, 255, 3).tolist()
    )
    step = (window.shape[1] + int(rng.integers(20, 60)), window.shape[0] + int(rng.integers(25, 70)))
    for y in range(10, 960 - window.shape[0], step[1]):
        for x in range(10, 1280 - window.shape[1], step[0]):
            wall[y : y + window.shape[0], x : x + window.shape[1]] = window
    return wall


def chequered(_: Sequence[Path], rng: np.random.Generator) -> np.ndarray:
    """Tiles of two colours."""
    side, colours = int(rng.integers(35, 70)), rng.integers(0, 255, (2, 3))
    y, x = np.indices((960, 1280)) // side
    return colours[(x + y) % 2].astype(np.uint8)


def page(rng: np.random.Generator, table: bool) -> np.ndarray:
    """Printed words in lines, or a table of numbers; the layout is always the same."""
    sheet, font = np.full((960, 1280, 3), 240, np.uint8), cv2.FONT_HERSHEY_COMPLEX
    for y in range(40, 950, 34):
        if table:
            words = [f"{rng.integers(0, 10 ** rng.integers(2, 6))}" for _ in range(9)]
            cv2.line(sheet, (20, y + 9), (1260, y + 9), (60, 60, 60), 1)
        else:
            words = ["".join(rng.choice(list(_LETTERS), rng.integers(2, 9))) for _ in range(11)]
        x = 30
        for word in words:
            cv2.putText(sheet, word, (x, y), font, 0.7, (25, 25, 25), 1, cv2.LINE_AA)
            x += 137 if table else cv2.getTextSize(word, font, 0.7, 1)[0][0] + 14
    for x in range(20, 1261, 137) if table else ():
        cv2.line(sheet, (x, 10), (x, 950), (60, 60, 60), 1)
    return sheet


_WALLS = {"wallpaper": papered, "façade": facade, "tiles": chequered}


def repeats_set(paths: Sequence[Path], *, count: int = 120, seed: int = 0) -> PairSet:
    """Walls with patterns that repeat, and a few things that do not; odd pairs show another instance."""
    kinds = (*_WALLS, "text", "table")

    def make(position: int) -> Pair:
        kind, other = kinds[(position // 2) % len(kinds)], position % 2 == 1
        rng = np.random.default_rng([seed, position // 2, 12])  # both of a kind with one wall
        if kind in _WALLS:
            wall = _WALLS[kind](paths, rng)
            scenes = [[Board(wall, (0.0, 0.0, 0.0)), *_things(paths, rng)] for _ in range(2)]
        else:
            scenes = [[Board(page(rng, kind == "table"), (0.0, 0.0, 0.0))] for _ in range(2)]
        if not other:
            return _posed(f"repeats {position}", f"{kind}, the same", (scenes[0], scenes[0]), rng)
        pair = _posed(f"repeats {position}", kind, scenes, rng)
        return UnrelatedPair(pair.name, f"{kind}, another", pair.image0, pair.image1)

    return _made("repeats", paths, count, make, "half of the pairs show another instance", seed)


def _things(paths: Sequence[Path], rng: np.random.Generator) -> list[Board]:
    """What does not repeat: posters on the wall and a board before it."""
    return [
        *_boards(paths, rng, int(rng.integers(2, 5)), near=0.0),
        *_boards(paths, rng, int(rng.integers(0, 3))),
    ]


# Overlays


def stamp(paths: Sequence[Path], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A date in a corner: colours and opacity (h, w, 3) and (h, w)."""
    ink, alpha = np.zeros((*SIZE[::-1], 3), np.uint8), np.zeros(SIZE[::-1], np.uint8)
    y, size = (int(rng.choice([35, 460])), float(rng.uniform(0.6, 1.1)))
    text = (
        f"20{rng.integers(10, 27)}-{rng.integers(10, 13)}-{rng.integers(10, 29)} {rng.integers(10, 24)}:17:45"
    )
    cv2.putText(alpha, text, (int(rng.integers(10, 200)), y), 0, size, 255, 2, cv2.LINE_AA)
    ink[:] = ((255, 255, 255), (255, 220, 0), (255, 120, 20))[rng.integers(3)]
    return ink, alpha / 255


def logo(paths: Sequence[Path], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A picture over a corner, perhaps half transparent."""
    ink, alpha = np.zeros((*SIZE[::-1], 3), np.uint8), np.zeros(SIZE[::-1])
    width, height = rng.integers((90, 60), (200, 130))
    x, y = (
        int(rng.choice([10, limit - int(side) - 10]))
        for limit, side in zip(SIZE, (width, height), strict=True)
    )
    ink[y : y + height, x : x + width] = photo(paths, rng, (int(width), int(height)))
    alpha[y : y + height, x : x + width] = rng.choice([0.5, 0.8, 1.0])
    return ink, alpha


def display(paths: Sequence[Path], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Numbers, scales and a cross all over the picture, as of a drone or a camera."""
    alpha = np.zeros(SIZE[::-1], np.uint8)
    for x, y in ((15, 30), (15, 60), (500, 30), (500, 60), (15, 440), (15, 468), (480, 440), (480, 468)):
        cv2.putText(
            alpha,
            f"{rng.choice(['H', 'D', 'V', 'ISO', 'BAT'])} {rng.integers(10, 999)}",
            (x, y),
            0,
            0.65,
            255,
            2,
        )
    for step in range(-5, 6):
        cv2.line(alpha, (600, 240 + 30 * step), (620 + 10 * (step % 2), 240 + 30 * step), 255, 2)
    cv2.drawMarker(alpha, (320, 240), 255, cv2.MARKER_CROSS, 60, 2)
    cv2.rectangle(alpha, (220, 160), (420, 320), 255, 1)
    ink = np.full((*SIZE[::-1], 3), (60, 255, 60) if rng.random() < 0.5 else (255, 255, 255), np.uint8)
    return ink, alpha / 255


def frame(paths: Sequence[Path], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A patterned frame around the picture."""
    wide, alpha = int(rng.integers(25, 60)), np.ones(SIZE[::-1])
    alpha[wide:-wide, wide:-wide] = 0
    ink = cv2.resize(photo(paths, rng, (640, 480)), SIZE)
    return ink, alpha


_OVERLAYS = {"stamp": stamp, "logo": logo, "display": display, "frame": frame}


def overlays_set(paths: Sequence[Path], *, count: int = 160, seed: int = 0) -> PairSet:
    """The same overlay on unrelated photos, on parts of one photo, and on two of one place."""
    truths = ("unrelated", "moved", "moved", "still")

    def make(position: int) -> Pair:
        rng = np.random.default_rng([seed, position, 13])
        truth, kind = truths[position % 4], (*_OVERLAYS, "nothing")[(position // 4) % 5]
        name, group, shift = f"overlays {position}", f"{truth}, {kind}", np.zeros(2, np.int64)
        scene = photo(paths, rng, (740, 520))
        if truth == "moved":
            turn = rng.choice([0.0, math.pi / 2]) + rng.uniform(-0.4, 0.4)
            away = rng.uniform(0.2, 0.6) * np.abs([math.cos(turn), math.sin(turn)])
            shift = np.minimum(np.rint(away * OVERLAID), (740, 520) - np.array(OVERLAID)).astype(np.int64)
        start = rng.integers(0, (740, 520) - np.array(OVERLAID) - shift + 1)
        ends = [(scene, start), (scene, start + shift)]
        if truth == "unrelated":
            ends[1] = photo(paths, rng, (740, 520)), start
        width, height = OVERLAID
        views = [np.ascontiguousarray(p[y : y + height, x : x + width]) for p, (x, y) in ends]
        views = [degrade(view, 0.6, rng) for view in views]
        if kind in _OVERLAYS:
            ink, alpha = (cv2.resize(each, OVERLAID) for each in _OVERLAYS[kind](paths, rng))
            views = [v + alpha[..., None] * (ink.astype(np.float64) - v) for v in views]
            views = [degrade(np.rint(view).astype(np.uint8), 0.1, rng) for view in views]
        if truth == "unrelated":
            return UnrelatedPair(name, group, *_sides(name, *views))
        homography = np.eye(3)
        homography[:2, 2] = -shift
        return HomographyPair(name, group, *_sides(name, *views), homography)

    return _made("overlays", paths, count, make, "`still` pairs are the counter-example", seed)


def _made(
    name: str, paths: Sequence[Path], count: int, make: Callable[[int], Pair], note: str, seed: int
) -> PairSet:
    return PairSet(name, "trap", PairsOnAccess(count, make), note=f"{len(paths)} photos; {note}. Seed {seed}")


# Judgement


@dataclass(frozen=True)
class Outcome:
    """What a pipeline said of a pair, and what is true."""

    group: str
    same: bool  # the truth
    probability: float  # of the same place
    status: str
    right: bool  # the geometry; of `alternatives`, where it is ambiguous, one

    @property
    def word(self) -> str:
        """ "right", "ambiguous" (one of the answers is right), "refused" or "wrong"."""
        if self.status == "ambiguous" and self.same:
            return "ambiguous" if self.right else "wrong"
        if self.status not in ("ok", "degenerate") or self.probability < 0.5:
            return "refused"
        return "right" if self.right else "wrong"


def judged(pair: Pair, pipeline: Pipeline) -> Outcome:
    """What the pipeline says of a pair; one with a pose is matched with its cameras."""
    cameras = {}
    if isinstance(pair, PosePair):
        pipeline = with_estimation(pipeline, replace(pipeline.config.estimation, kind="essential"))
        cameras = {"camera0": Camera.from_K(pair.K0), "camera1": Camera.from_K(pair.K1)}
    return outcome(pair, pipeline.match(pair.image0.given(), pair.image1.given(), **cameras))


def outcome(pair: Pair, result: Result) -> Outcome:
    """The outcome of a result."""
    geometry, same, right = result.geometry, not isinstance(pair, UnrelatedPair), False
    if isinstance(pair, PosePair):
        known = [geometry.cam1_from_cam0] if geometry.status == "ok" else geometry.alternatives
        right = any(max(pose_error(pose, pair.cam1_from_cam0)) <= RIGHT_POSE for pose in known)
    elif same and result.inliers.any():
        ends = (points[result.inliers].astype(np.float64) for points in (result.points0, result.points1))
        right = bool(np.mean(reprojection_errors(*ends, pair.H_1_from_0) <= RIGHT_MATCH) >= 0.8)
    return Outcome(pair.group, same, result.verdict.probability, geometry.status, right)


WORDS = ("right", "ambiguous", "refused", "wrong")


def measured(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts of the words by group, of wrong ones that are sure, and how well the verdicts hold."""
    said = np.array([one.probability for one in outcomes])
    same = np.array([one.same for one in outcomes])
    wrong = np.array([one.word == "wrong" for one in outcomes])
    surest = np.argsort(-np.abs(said - 0.5), kind="stable")[: math.ceil(0.8 * len(said))]
    rows = []
    for group in [*sorted({one.group for one in outcomes}), "all"]:
        at = np.array([group in (one.group, "all") for one in outcomes])
        words = [one.word for one, chosen in zip(outcomes, at, strict=True) if chosen]
        rows.append(
            {
                "group": group,
                "pairs": len(words),
                **{word: words.count(word) for word in WORDS},
                "wrong and sure": int((wrong & (said >= SAME) & at).sum()),
                "called the same": int(((said >= SAME) & at).sum()),
                "probability": float(said[at].mean()),
            }
        )
    return {
        "rows": rows,
        "expected calibration error": reliability(said, same).error,
        "wrong of the 80 % surest": float(((said >= 0.5) != same)[surest].mean()),
    }


def as_markdown(name: str, note: str, found: dict[str, Any]) -> str:
    """The tables of methods, as `measured` gives them by name."""
    lines = [f"## {name}", "", f"{note}.", ""]
    for method, table in found.items():
        titles = list(table["rows"][0])
        lines += [f"| {method}: {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
        lines += [
            f"| {' | '.join(f'{v:.2f}' if isinstance(v, float) else str(v) for v in row.values())} |"
            for row in table["rows"]
        ]
        ece, risk = table["expected calibration error"], table["wrong of the 80 % surest"]
        lines += [
            "",
            f"Expected calibration error {ece:.3f}; of the 80 % surest {100 * risk:.1f} % wrong.",
            "",
        ]
    return "\n".join(lines)
