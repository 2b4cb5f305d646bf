"""How well photos are localised in a map of others of the same place, made with true poses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from matcher.cameras import Camera
from matcher.collection.collection import Collection
from matcher.evaluate.multiview import PosedPhotos
from matcher.localization.localizer import Localizer
from matcher.localization.map import Map
from matcher.localization.pose import Pose
from matcher.localization.sparse_map import LocalizationConfig, RetrievalIndex
from matcher.sfm.models import GivenPoses
from matcher.sfm.reconstruct import reconstruct

# --- localization: How well photos are localised in a map of others of the same place, made with true
# poses.

THRESHOLDS = ((0.05, 5.0), (0.1, 10.0), (0.25, 10.0))  # metres, degrees; of indoor localisation
_SIMILAR, _NEXT = 12, 4  # images that each one of the map is matched with, by their looks and by their order


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
        shifts = np.array([row.shift for row in self.photos])
        angles = np.array([row.angle for row in self.photos])
        counts = Counter(row.pose.status for row in self.photos)
        shares = ", ".join(f"{100 * self.within(*pair):.1f} %" for pair in THRESHOLDS)
        seconds, cpu = (np.median(column) for column in zip(*self._times(), strict=True))
        lines = [
            f"{self.title}: {len(self.photos)} photos in a map of {self.images} images, {self.points} points",
            f"within 0.05 and 5°, 0.1 and 10°, 0.25 and 10°: {shares}",
            f"median error {np.median(shifts):.4f} ({100 * np.median(shifts) / self.extent:.3f} % of the "
            f"extent), {np.median(angles):.3f}°; largest {shifts.max():.4f}, {angles.max():.3f}°",
            "; ".join(f"{name} {count}" for name, count in counts.most_common()),
            f"median time of a photo {seconds:.3f} s, {cpu:.3f} s of CPU",
        ]
        if self.elsewhere:
            accepted = sum(pose.ok for pose in self.elsewhere)
            reasons = Counter(pose.status for pose in self.elsewhere)
            said = ", ".join(f"{name} {count}" for name, count in reasons.most_common())
            lines.append(f"photos of other places: {accepted} of {len(self.elsewhere)} accepted ({said})")
        return lines

    def _times(self) -> list[tuple[float, float]]:
        return [(row.seconds, row.cpu_seconds) for row in self.photos]


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
            camera = photos.cameras[name] if cameras_known else None
            row = _localized(place, photos.folder / name, name, camera, photos.poses[name])
            rows.append(row)
            say(f"{name}: {row.pose!r}, off by {row.shift:.4f} and {row.angle:.3f}°")
        for path in elsewhere:
            refused.append(place.localize(path))
            say(f"{path.name}: {refused[-1]!r}")
        found = LocalizationReport(
            f"{photos.title}, {preset}",
            len(place.names),
            len(place.model.xyz),
            tuple(rows),
            tuple(refused),
            photos.extent(),
        )
    return found


def make_map(
    photos: PosedPhotos, names: Sequence[str], work: Path, preset: str, options: dict[str, Any]
) -> None:
    """A run of these photos and a model with their true poses, unless both are there."""
    work.mkdir(parents=True, exist_ok=True)
    collection = Collection.open(work / "run", preset=preset, workers=0, **options)
    collection.add_images(photos.folder, include=list(names))
    if len(names) <= _SIMILAR + 1:
        collection.add_pairs(exhaustive=True)
    else:
        collection.add_pairs(similar=_SIMILAR)
        collection.add_pairs(sequential=_NEXT)
    matched = collection.run().matched
    if matched or not (work / "model").is_dir():
        given = GivenPoses(photos.poses, photos.cameras)
        with collection.store as store:
            reconstruct(store, work / "model", poses=given, threads=1, overwrite=True)


def _localized(place: Map, path: Path, name: str, camera: Camera | None, truth: np.ndarray) -> LocalizedPhoto:
    start, cpu = perf_counter(), process_time()
    pose = place.localize(path, camera)
    seconds, cpu = perf_counter() - start, process_time() - cpu
    shift, angle = pose_errors(pose, truth)
    return LocalizedPhoto(name, pose, shift, angle, seconds, cpu)


def pose_errors(pose: Pose, cam_from_world: np.ndarray) -> tuple[float, float]:
    """Distance of the centre, and degrees of the turn, from the true pose (4, 4); infinite without a pose."""
    if not pose.ok:
        return float("inf"), float("inf")
    turn = pose.cam_from_world[:3, :3] @ cam_from_world[:3, :3].T
    sine = np.linalg.norm([turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]]) / 2
    angle = np.degrees(np.arctan2(sine, (np.trace(turn) - 1) / 2))
    return float(np.linalg.norm(pose.centre - np.linalg.inv(cam_from_world)[:3, 3])), float(angle)


# --- localization_time: How long localising a photo takes in maps of any size, the large ones simulated.


@dataclass(frozen=True)
class MapSizeTime:
    """Medians over the photos, in seconds, unless said otherwise."""

    images: int  # of the map
    seconds: float  # of a photo, wall clock
    cpu_seconds: float
    retrieval: float  # of them, for comparing its global descriptors
    all_images: float  # CPU seconds that matching it with every image would take
    longest: float  # wall clock, of the slowest photo

    def line(self) -> str:
        """Ready to print."""
        share = self.cpu_seconds / self.all_images
        return (
            f"{self.images} images: {self.seconds:.3f} s a photo, at most {self.longest:.3f}; "
            f"{self.cpu_seconds:.3f} s of CPU (retrieval {self.retrieval:.3f} s), {share:.4f} of matching it "
            f"with all ({self.all_images:.1f} s of CPU)"
        )


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
    with Map.open(work / "model", run_dir=work / "run", config=config) as place:
        one = _pair_seconds(place, photos, names[0])
        found = []
        for size in sizes:
            localizer = enlarged(place.localizer, size)
            rows = [_timed(place, localizer, photos, name) for name in (names[0], *names)][1:]
            seconds, cpu, retrieval = np.median(rows, axis=0).tolist()
            longest = max(row[0] for row in rows)
            found.append(MapSizeTime(len(localizer.rows), seconds, cpu, retrieval, one * size, longest))
        return found


def enlarged(localizer: Localizer, images: int, seed: int = 0) -> Localizer:
    """A localizer whose index has as many images, those beyond its own simulated."""
    index = localizer.index
    more = images - len(index.table)
    if more <= 0:
        return localizer
    rng = np.random.default_rng(seed)
    table = np.zeros((images, index.table.shape[1]), np.float16)
    table[: len(index.table)] = index.table
    for row in range(len(index.table), images):
        values = rng.standard_normal(table.shape[1], np.float32)
        table[row] = values / np.linalg.norm(values)
    rows = np.concatenate([localizer.rows, np.zeros(more, np.int64)])
    return replace(localizer, index=RetrievalIndex(index.vocabulary, table, index.kind), rows=rows)


def _timed(place: Map, localizer: Localizer, photos: PosedPhotos, name: str) -> tuple[float, float, float]:
    start, cpu = perf_counter(), process_time()
    pose = localizer.localize(place.query(photos.folder / name, photos.cameras[name]))
    return perf_counter() - start, process_time() - cpu, pose.seconds.get("retrieve", 0.0)


def _pair_seconds(place: Map, photos: PosedPhotos, name: str) -> float:
    """CPU seconds of matching a photo with an image of the map, the median of a few."""
    query = place.query(photos.folder / name, photos.cameras[name]).features
    spent = []
    for other in place.names[::8][:8]:
        features = place.localizer.features(other)
        start = process_time()
        place.localizer.pipeline.match_features(query, features)
        spent.append(process_time() - start)
    return float(np.median(spent))
