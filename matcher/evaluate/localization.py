"""How well photos are localised in a map of others of the same place, made with true poses, and how fast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from matcher.collection.collection import Collection
from matcher.evaluate.multiview import PosedPhotos
from matcher.localization.localizer import Localizer
from matcher.localization.map import Map
from matcher.localization.pose import Pose
from matcher.localization.sparse_map import LocalizationConfig, RetrievalIndex
from matcher.sfm.models import GivenPoses
from matcher.sfm.reconstruct import reconstruct

THRESHOLDS = ((0.05, 5.0), (0.1, 10.0), (0.25, 10.0))  # metres, degrees; of indoor localisation


@dataclass(frozen=True, eq=False)
class LocalizedPhoto:
    """One photo, its pose and how far that is from the truth; infinite where there is none."""

    name: str
    pose: Pose
    shift: float  # between the centres, the map's units
    angle: float  # degrees
    seconds: float  # wall clock
    cpu_seconds: float


@dataclass(frozen=True, eq=False)
class LocalizationReport:
    """Photos of a set, localised in a map of the others."""

    title: str
    images: int  # of the map
    points: int
    photos: tuple[LocalizedPhoto, ...]
    elsewhere: tuple[Pose, ...]  # of photos of other places
    extent: float  # largest distance between two cameras, the map's units

    def within(self, shift: float, angle: float) -> float:
        """Share of the photos that are at most so far off."""
        return float(np.mean([row.shift <= shift and row.angle <= angle for row in self.photos]))

    def lines(self) -> list[str]:
        """The report, ready to print."""
        shifts, angles, seconds, cpu = np.array(
            [(row.shift, row.angle, row.seconds, row.cpu_seconds) for row in self.photos]
        ).T
        lines = [
            f"{self.title}: {len(self.photos)} photos in a map of {self.images} images, {self.points} points",
            ", ".join(f"within {s:g} and {a:g}°: {100 * self.within(s, a):.1f} %" for s, a in THRESHOLDS),
            f"median error {np.median(shifts):.4f} ({100 * np.median(shifts) / self.extent:.3f} % of the "
            f"extent), {np.median(angles):.3f}°; largest {shifts.max():.4f}, {angles.max():.3f}°",
            _counted([row.pose for row in self.photos]),
            f"median time of a photo {np.median(seconds):.3f} s, {np.median(cpu):.3f} s of CPU",
        ]
        if self.elsewhere:
            accepted = sum(pose.ok for pose in self.elsewhere)
            said = f"{accepted} of {len(self.elsewhere)} accepted ({_counted(self.elsewhere)})"
            lines.append(f"photos of other places: {said}")
        return lines


def _counted(poses: Sequence[Pose]) -> str:
    counts = Counter(pose.status for pose in poses)
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def measure_localization(
    photos: PosedPhotos,
    split: tuple[Sequence[str], Sequence[str]],
    work: Path,
    *,
    preset: str,
    options: dict[str, Any] | None = None,
    config: LocalizationConfig | None = None,
    cameras_known: bool = True,
    elsewhere: Sequence[Path] = (),
    progress: Callable[[str], None] | None = None,
) -> LocalizationReport:
    """Make a map of some photos with their true poses, and localise the others.

    Args:
        photos: with poses and cameras.
        split: names of the map's photos, and of those to localise.
        work: folder for the run and the model; what is there already is used again.
        preset: of the pipeline.
        options: of `matcher.load`.
        config: of the localisation.
        cameras_known: give the true cameras of the photos.
        elsewhere: photos of other places, which should be refused.
        progress: called with a line for each photo.
    """
    say = progress or (lambda _: None)
    make_map(photos, split[0], work, preset, options or {})
    rows, refused = [], []
    with Map.open(work / "model", run_dir=work / "run", config=config) as place:
        for name in split[1]:
            start, cpu = perf_counter(), process_time()
            pose = place.localize(photos.folder / name, photos.cameras[name] if cameras_known else None)
            seconds, cpu = perf_counter() - start, process_time() - cpu
            rows.append(LocalizedPhoto(name, pose, *pose_errors(pose, photos.poses[name]), seconds, cpu))
            say(f"{name}: {pose!r}, off by {rows[-1].shift:.4f} and {rows[-1].angle:.3f}°")
        for path in elsewhere:
            refused.append(place.localize(path))
            say(f"{path.name}: {refused[-1]!r}")
        title, counts = f"{photos.title}, {preset}", (len(place.names), len(place.model.xyz))
        return LocalizationReport(title, *counts, tuple(rows), tuple(refused), photos.extent())


def make_map(
    photos: PosedPhotos, names: Sequence[str], work: Path, preset: str, options: dict[str, Any]
) -> None:
    """A run of these photos and a model with their true poses, unless both are there."""
    work.mkdir(parents=True, exist_ok=True)
    collection = Collection.open(work / "run", preset=preset, workers=0, **options)
    collection.add_images(photos.folder, include=list(names))
    if len(names) <= 13:
        collection.add_pairs(exhaustive=True)
    else:
        collection.add_pairs(similar=12)
        collection.add_pairs(sequential=4)
    matched = collection.run().matched
    if matched or not (work / "model").is_dir():
        given = GivenPoses(photos.poses, photos.cameras)
        with collection.store as store:
            reconstruct(store, work / "model", poses=given, threads=1, overwrite=True)


def pose_errors(pose: Pose, cam_from_world: np.ndarray) -> tuple[float, float]:
    """Distance of the centre, and degrees of the turn, from the true pose (4, 4); infinite without a pose."""
    if not pose.ok:
        return float("inf"), float("inf")
    turn = pose.cam_from_world[:3, :3] @ cam_from_world[:3, :3].T
    sine = np.linalg.norm([turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]]) / 2
    angle = np.degrees(np.arctan2(sine, (np.trace(turn) - 1) / 2))
    return float(np.linalg.norm(pose.centre - np.linalg.inv(cam_from_world)[:3, 3])), float(angle)


@dataclass(frozen=True)
class MapSizeTime:
    """Medians over the photos, in seconds, unless said otherwise."""

    images: int  # of the map
    seconds: float  # of a photo, wall clock
    cpu_seconds: float
    retrieval: float  # of them, for comparing its global descriptors
    longest: float  # wall clock, of the slowest photo


def time_localization(
    photos: PosedPhotos,
    names: Sequence[str],
    work: Path,
    sizes: Sequence[int],
    config: LocalizationConfig | None = None,
) -> list[MapSizeTime]:
    """Localise photos in the map of a folder, with as many other images in its index as each size asks for.

    Other images are unit vectors at random among the global descriptors; they are compared like all, and
    less similar than the map's own, as images of other places are.

    Args:
        photos: with poses and cameras.
        names: of the photos to localise; the first is done once more before, which is not timed.
        work: folder of `measure_localization`, with a run and a model.
        sizes: images of the maps.
        config: of the localisation.
    """
    found = []
    with Map.open(work / "model", run_dir=work / "run", config=config) as place:
        for size in sizes:
            localizer, rows = with_distractors(place.localizer, size), []
            for name in (names[0], *names):
                start, cpu = perf_counter(), process_time()
                pose = localizer.localize(place.query(photos.folder / name, photos.cameras[name]))
                seconds = perf_counter() - start
                rows.append((seconds, process_time() - cpu, pose.seconds.get("retrieve", 0.0)))
            medians = np.median(rows[1:], axis=0).tolist()
            found.append(MapSizeTime(len(localizer.rows), *medians, max(row[0] for row in rows[1:])))
    return found


def with_distractors(localizer: Localizer, images: int, seed: int = 0) -> Localizer:
    """A localizer whose index has as many images, those beyond its own simulated."""
    index = localizer.index
    more = images - len(index.table)
    if more <= 0:
        return localizer
    made = np.random.default_rng(seed).standard_normal((more, index.table.shape[1]), np.float32)
    made /= np.linalg.norm(made, axis=1, keepdims=True)
    table = np.concatenate([index.table, made.astype(np.float16)])
    rows = np.concatenate([localizer.rows, np.zeros(more, np.int64)])
    return replace(localizer, index=RetrievalIndex(index.vocabulary, table, index.kind), rows=rows)
