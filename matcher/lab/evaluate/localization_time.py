"""How long localising a photo takes in maps of any size, the large ones simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, process_time

import numpy as np

from matcher.lab.pairs.posed_photos import PosedPhotos
from matcher.localization.localizer import Localizer
from matcher.localization.map import Map
from matcher.localization.retrieval_index import RetrievalIndex
from matcher.localization.settings import LocalizationConfig


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
