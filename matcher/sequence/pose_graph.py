"""Keyframes on disk: matched with each other, loops found, and the graph of their poses optimised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from matcher.collection.collection import Collection
from matcher.collection.exporting.cameras import CameraChoice
from matcher.collection.reconstruction.given_poses import GivenPoses
from matcher.collection.reconstruction.reconstruct import ReconstructionError, reconstruct
from matcher.data.camera import Camera
from matcher.sequence.loop_check import kind_of_pair, path_lengths
from matcher.sequence.step_graph import loop_edges, spread

FRAMES, RUN, MODEL = "frames", "model-run", "model"
GRAPH = ".graph"  # folder of the graph's model while the sequence goes on
_NEXT, _SIMILAR = 4, 4  # keyframes that each is matched with, by time and by their looks
_LOOP_INLIERS = 40  # of a pair that closes a loop
_FEWEST = 3  # keyframes that are worth matching
# A step from a keyframe to the next is torn where it is so many times longer or shorter than tracked, or
# turned by more than 120 degrees; in a kitchen whose poses became better at most 2.1 times and 85 degrees.
_TORN, _BACK = 3.0, -0.5
_SLIGHT = 0.25  # of the median step: how far a step may change whatever its length
_DRIFTED = 1.25  # times that a step was shortened or stretched, from which the unit of length has drifted

Loop = tuple[int, int, int]  # two keyframes, by their frames, and the inliers between them


@dataclass(frozen=True, eq=False)
class Closing:
    """The loops that are known, and where they put the keyframes."""

    loops: tuple[Loop, ...]
    world_from_cam: dict[int, np.ndarray]  # keyframe → (4, 4), in the coordinates of the first


@dataclass(eq=False)
class PoseGraph:
    """Keyframes in a folder, by the indices of their frames; everything that is matched stays there.

    Called with the tracked poses of the keyframes so far, it looks for loops: a task beside tracking.
    """

    folder: Path
    camera: Camera
    preset: str
    options: dict[str, Any]  # of `matcher.load`
    overwrite: bool = False
    unclosed: str | None = field(default=None, init=False)  # why the last model was not closed
    # Verified pairs that cannot show one place, as `loops` has found; no graph and no model has them.
    alike: frozenset[tuple[str, str]] = field(default=frozenset(), init=False)
    _loops: int = field(default=0, init=False)

    def __call__(self, tracked: Mapping[int, np.ndarray]) -> Closing | Literal[False]:
        """The closing of the keyframes (index → world_from_cam); False where no loop is new."""
        if len(tracked) < _FEWEST:
            return False
        collection = self.match(sorted(tracked))
        loops = self.loops(collection, tracked)
        if len(loops) <= self._loops:
            return False
        self._loops = len(loops)
        try:
            start = self.optimised(collection, tracked, loops, self.folder / GRAPH)
        except ReconstructionError:
            return False  # not yet: more keyframes will connect them
        return Closing(loops, {index_of(name): np.linalg.inv(pose) for name, pose in start.items()})

    def match(self, keyframes: list[int]) -> Collection:
        """The keyframes, matched with their neighbours and with similar ones."""
        collection = Collection.open(self.folder / RUN, preset=self.preset, workers=0, **self.options)
        names = [name_of(index) for index in keyframes]
        collection.add_images(self.folder / FRAMES, include=names, restart=self.overwrite)
        self.overwrite = False
        collection.add_pairs(sequential=_NEXT)
        collection.add_pairs(similar=_SIMILAR)
        collection.run()
        return collection

    def loops(self, collection: Collection, tracked: Mapping[int, np.ndarray]) -> tuple[Loop, ...]:
        """Verified pairs of keyframes that are not neighbours in time and may show one place.

        Those that cannot, since tracking would have to be wrong by most of the path, are kept as `alike`.
        """
        keyframes = sorted(tracked)
        rank = {name_of(index): place for place, index in enumerate(keyframes)}
        poses = np.array([tracked[index] for index in keyframes])
        path = path_lengths(poses)
        found, alike = [], set()
        for pair in collection:
            if pair.name0 not in rank or pair.name1 not in rank or pair.geometry.status != "ok":
                continue
            first, second = rank[pair.name0], rank[pair.name1]
            if abs(second - first) <= _NEXT:
                continue
            inliers = pair.geometry.inliers
            ends = pair.matches.points0[inliers], pair.matches.points1[inliers]
            travelled = float(abs(path[second] - path[first]))
            kind = kind_of_pair(*ends, self.camera, (poses[first], poses[second]), travelled)
            if kind == "alike":
                alike.add((pair.name0, pair.name1))
            elif kind == "loop" and (count := int(inliers.sum())) >= _LOOP_INLIERS:
                found.append((keyframes[first], keyframes[second], count))
        self.alike = frozenset(alike)
        return tuple(sorted(found))

    def optimised(
        self,
        collection: Collection,
        tracked: Mapping[int, np.ndarray],
        loops: tuple[Loop, ...],
        out: Path,
    ) -> dict[str, np.ndarray]:
        """Poses cam_from_world by name, with the loops closed.

        COLMAP's global mapper makes them of the pairs alone, but where three keyframes in a row share little
        it tears the path apart; then the tracked steps are edges too, and all is adjusted from there.

        Raises:
            ReconstructionError: the graph connects fewer than two keyframes, or is torn both ways.
        """
        start = {name_of(index): np.linalg.inv(pose) for index, pose in tracked.items()}
        how = dict(choice=CameraChoice(camera=self.camera), threads=1, overwrite=True, only=list(start))
        for mapper in ("global", "incremental"):
            if mapper == "incremental":
                how["poses"] = self._spread(collection, tracked, loops)
            with collection.store as store:
                made = reconstruct(store, out, mapper=mapper, without=self.alike, **how)
            found = in_tracked_coordinates(start, made.largest.cam_from_world)
            if (torn := torn_at(start, found)) is None:
                return found
        raise ReconstructionError(
            f"the way from {torn[0]} to {torn[1]} does not agree with tracking, since they share too little"
        )

    def _spread(
        self, collection: Collection, tracked: Mapping[int, np.ndarray], loops: tuple[Loop, ...]
    ) -> GivenPoses:
        """Poses to start from, of the graph of tracked steps and loops."""
        closing = {(name_of(first), name_of(second)) for first, second, _ in loops}
        pairs = [pair for pair in collection if (pair.name0, pair.name1) in closing]
        found = spread(tracked, loop_edges(pairs, self.camera, {name_of(index): index for index in tracked}))
        poses = {name_of(index): np.linalg.inv(pose) for index, pose in found.items()}
        return GivenPoses(poses, dict.fromkeys(poses, self.camera), fixed=False)

    def model(
        self, collection: Collection, tracked: Mapping[int, np.ndarray], loops: tuple[Loop, ...]
    ) -> dict[int, np.ndarray]:
        """The keyframes' adjusted poses world_from_cam, of a model in the coordinates of the first one.

        Where the graph cannot be optimised, all is adjusted from the tracked poses, and `unclosed` says why.

        Args:
            collection: of `match`.
            tracked: keyframe → world_from_cam (4, 4).
            loops: to be closed; where there are none, or they are not, loops only share points.
        """
        start = {name_of(index): np.linalg.inv(pose) for index, pose in tracked.items()}
        out = self.folder / MODEL
        self.unclosed, closed = None, False
        if loops:
            try:
                start, closed = self.optimised(collection, tracked, loops, out), True
            except ReconstructionError as error:
                self.unclosed = f"the graph of poses was not optimised, and loops only share points: {error}"
        poses = GivenPoses(start, dict.fromkeys(start, self.camera), fixed=closed)
        with collection.store as store:
            choice = CameraChoice(camera=self.camera)
            how = dict(choice=choice, poses=poses, without=self.alike, threads=1, overwrite=True)
            made = reconstruct(store, out, **how)
        found = {name: np.vstack([pose, [0, 0, 0, 1]]) for name, pose in made.largest.cam_from_world.items()}
        return {index_of(name): np.linalg.inv(pose) for name, pose in found.items()}


def name_of(index: int) -> str:
    """The file of a keyframe."""
    return f"{index:06d}.png"


def index_of(name: str) -> int:
    """The inverse of `name_of`."""
    return int(Path(name).stem)


def in_tracked_coordinates(
    tracked: dict[str, np.ndarray], found: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Poses cam_from_world of a model whose first camera and scale are made those of the tracked ones.

    The scale is the median of the ratios of neighbouring keyframes' distances, which drift changes least.

    Raises:
        ReconstructionError: fewer than two keyframes are in the model.
    """
    names = [name for name in sorted(tracked) if name in found]
    if len(names) < 2:
        raise ReconstructionError("the graph of poses connects fewer than two keyframes")
    wanted = np.array([np.linalg.inv(tracked[name]) for name in names])
    given = np.array([np.linalg.inv(np.vstack([found[name], [0, 0, 0, 1]])) for name in names])
    steps = [np.linalg.norm(np.diff(poses[:, :3, 3], axis=0), axis=1) for poses in (wanted, given)]
    usable = steps[1] > 1e-9
    scale = float(np.median(steps[0][usable] / steps[1][usable])) if usable.any() else 1.0
    given[:, :3, 3] *= scale
    start = wanted[0] @ np.linalg.inv(given[0])
    return {name: np.linalg.inv(start @ pose) for name, pose in zip(names, given, strict=True)}


def torn_at(tracked: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> tuple[str, str] | None:
    """The first neighbouring keyframes whose step drift cannot explain; None where it explains all.

    Args:
        tracked: poses cam_from_world by name.
        found: the same in the same unit of length, of some of them.
    """
    pairs = list(pairwise(name for name in sorted(tracked) if name in found))
    steps = np.array([[_step(poses, *each) for poses in (tracked, found)] for each in pairs])
    steps = steps.reshape(-1, 2, 3)
    lengths = np.linalg.norm(steps, axis=2)
    # Where a camera stands or turns in its place, what is left of a step is noise.
    slight = _SLIGHT * np.median(lengths[:, 0]) if pairs else 0.0
    for names, (before, after), (a, b) in zip(pairs, steps, lengths, strict=True):
        explained = min(a, b) * _TORN > max(a, b) and before @ after >= _BACK * a * b
        if not (explained or np.linalg.norm(after - before) <= slight):  # so that NaN is not explained
            return names
    return None


def _step(poses: Mapping[str, np.ndarray], first: str, second: str) -> np.ndarray:
    """(3,) the second camera, as the first sees it."""
    return (poses[first] @ np.linalg.inv(poses[second]))[:3, 3]


def carried(
    frames: Sequence[tuple[int, np.ndarray]],
    tracked: Mapping[int, np.ndarray],
    adjusted: Mapping[int, np.ndarray],
) -> np.ndarray:
    """(F, 4, 4) world_from_cam of frames that move with their keyframes.

    With one camera the unit of length drifts: where the step from a keyframe to the next has become much
    longer or shorter, those of the frames between them have too.

    Args:
        frames: the keyframe and world_from_cam (4, 4), as tracked, of each of F frames.
        tracked: keyframe → world_from_cam (4, 4) as tracked, in order.
        adjusted: the same, adjusted; keyframes that are absent stay where they are.
    """
    scales = dict.fromkeys(tracked, 1.0)
    for index, following in pairwise(tracked):
        if index in adjusted and following in adjusted:
            ends = ((poses[index][:3, 3], poses[following][:3, 3]) for poses in (tracked, adjusted))
            before, after = (float(np.linalg.norm(second - first)) for first, second in ends)
            near = before / _DRIFTED <= after <= before * _DRIFTED
            scales[index] = 1.0 if near or before == 0 else after / before
            scales[following] = scales[index]  # the last one has no next
    found = []
    for index, pose in frames:
        step = np.linalg.inv(tracked[index]) @ pose
        step[:3, 3] *= scales[index]
        found.append(adjusted.get(index, tracked[index]) @ step)
    return np.array(found)
