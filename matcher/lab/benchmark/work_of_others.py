"""Work of others, done in a process of its own, which loads nothing of ours that is large.

A function prepares the work and returns the call that is timed.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import cv2

from matcher.collection.exporting.colmap import import_pycolmap
from matcher.data.images import read_image
from matcher.data.photos import find_images
from matcher.lab.benchmark.opencv_pair import Work, flann_matches, fundamental, resized, sift_matches


def pair_opencv(images: list[str], size: tuple[int, int], points: int) -> Work:
    """The same pair by OpenCV's SIFT, FLANN and MAGSAC."""
    arrays = resized(images, size)
    sift_matches(arrays, points)
    return lambda: {"matches": len(sift_matches(arrays, points)[0])}


def collection_opencv(folder: str, points: int) -> Work:
    """All pairs of a folder by FLANN and MAGSAC on SIFT found before."""
    sift, found = cv2.SIFT_create(points), []
    for path in find_images(Path(folder)):
        found.append(sift.detectAndCompute(read_image(path, resize=1024).pixels, None))

    def work() -> dict[str, Any]:
        pairs = list(combinations(found, 2))
        for (keypoints0, descriptors0), (keypoints1, descriptors1) in pairs:
            fundamental(keypoints0, keypoints1, flann_matches(descriptors0, descriptors1))
        return {"pairs": len(pairs)}

    return work


def collection_colmap(folder: str, run: str, points: int, threads: int) -> Work:
    """All pairs of a folder by COLMAP's matcher and verification, on its own SIFT found before."""
    pycolmap, database = _colmap(), Path(run) / "matched.db"
    extraction, matching = _colmap_options(pycolmap, threads)
    extraction.sift.max_num_features, extraction.max_image_size = points, 1024
    pycolmap.extract_features(database, folder, extraction_options=extraction)
    count = len(find_images(Path(folder)))

    def work() -> dict[str, Any]:
        pycolmap.match_exhaustive(database, matching_options=matching)
        return {"pairs": count * (count - 1) // 2}

    return work


def sfm_colmap(folder: str, run: str, threads: int) -> Work:
    """The same by COLMAP's own SIFT, matcher and mapper, as they are by default."""
    pycolmap, database = _colmap(), Path(run) / "mapped.db"
    extraction, matching = _colmap_options(pycolmap, threads)
    mapping = pycolmap.IncrementalPipelineOptions(num_threads=threads, random_seed=0, min_model_size=3)

    def work() -> dict[str, Any]:
        pycolmap.extract_features(database, folder, extraction_options=extraction)
        pycolmap.match_exhaustive(database, matching_options=matching)
        models = pycolmap.incremental_mapping(database, folder, run, mapping).values()
        best = max(models, key=lambda model: model.num_reg_images(), default=pycolmap.Reconstruction())
        return {
            "registered": best.num_reg_images(),
            "points": best.num_points3D(),
            "track_length": best.compute_mean_track_length(),
            "error": best.compute_mean_reprojection_error(),
        }

    return work


def _colmap() -> Any:
    pycolmap = import_pycolmap()
    pycolmap.logging.minloglevel = pycolmap.logging.ERROR.value
    pycolmap.set_random_seed(0)
    return pycolmap


def _colmap_options(pycolmap: Any, threads: int) -> tuple[Any, Any]:
    options = pycolmap.FeatureExtractionOptions(), pycolmap.FeatureMatchingOptions()
    for each in options:
        each.num_threads, each.use_gpu = threads, False
    return options
