"""Reconstructions from our matches against those from COLMAP's own SIFT, by the same mapper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matcher.collection.collection import Collection
from matcher.collection.exporting.cameras import CameraChoice
from matcher.collection.reconstruction.reconstruct import reconstruct
from matcher.collection.store import Store
from matcher.errors import UsageError

MIN_IMAGES = 3  # of a model


def compare_reconstructions(
    photos: Path,
    folder: Path,
    presets: Sequence[str],
    *,
    one_camera: bool = False,
    threads: int = -1,
    max_deviation: float | None = None,
    camera_model: str = "SIMPLE_RADIAL",
    **options: Any,
) -> dict[str, dict[str, float]]:
    """The largest model of each kind of features: registered images, points, track length, error.

    Every pair is matched, and COLMAP's incremental mapper has its defaults; so has COLMAP's SIFT, with up to
    8192 keypoints an image.

    Args:
        photos: a folder of photos.
        folder: a new folder for runs and models.
        presets: each is measured as `matcher sfm` uses it.
        one_camera: all photos share one; else each has its own.
        threads: of COLMAP; -1: all.
        max_deviation: of `reconstruct`, for the presets.
        camera_model: of all cameras.
        options: those of `matcher.load`.

    Raises:
        UsageError: no model was found, or the folder is not new.
    """
    if folder.exists():
        raise UsageError(f"{folder} is there already; name a new folder")
    folder.mkdir(parents=True)
    found = {"COLMAP's SIFT": _by_sift(photos, folder / "sift", one_camera, camera_model, threads)}
    choice = CameraChoice(sharing="single" if one_camera else "each", model=camera_model)
    mapping = {"threads": threads, "min_images": MIN_IMAGES, "max_deviation": max_deviation}
    for preset in presets:
        collection = Collection.open(folder / preset, preset=preset, workers=0, **options)
        collection.add_images(photos)
        collection.add_pairs(exhaustive=True)
        collection.run()
        with Store.open(folder / preset) as store:
            out = folder / f"{preset} model"
            made = reconstruct(store, out, choice=choice, **mapping).largest
        found[preset] = {
            "registered": made.registered,
            "points": made.points,
            "track_length": made.mean_track_length,
            "reprojection_error": made.mean_reprojection_error,
        }
    return found


def _by_sift(
    photos: Path, folder: Path, one_camera: bool, camera_model: str, threads: int
) -> dict[str, float]:
    import pycolmap

    folder.mkdir()
    database, seed = str(folder / "database.db"), 0
    pycolmap.logging.minloglevel = pycolmap.logging.ERROR.value
    pycolmap.set_random_seed(seed)
    extraction, matching = pycolmap.FeatureExtractionOptions(), pycolmap.FeatureMatchingOptions()
    extraction.num_threads = matching.num_threads = threads
    extraction.use_gpu = matching.use_gpu = False
    mode = pycolmap.CameraMode.SINGLE if one_camera else pycolmap.CameraMode.PER_IMAGE
    reader = pycolmap.ImageReaderOptions(camera_model=camera_model)
    pycolmap.extract_features(
        database, photos, camera_mode=mode, reader_options=reader, extraction_options=extraction
    )
    pycolmap.match_exhaustive(database, matching_options=matching)
    options = pycolmap.IncrementalPipelineOptions()
    options.num_threads, options.random_seed, options.min_model_size = threads, seed, MIN_IMAGES
    models = pycolmap.incremental_mapping(database, photos, folder, options)
    if not models:
        raise UsageError(f"COLMAP's SIFT leads to no model of {photos}")
    best = max(models.values(), key=lambda model: model.num_reg_images())
    return {
        "registered": best.num_reg_images(),
        "points": best.num_points3D(),
        "track_length": best.compute_mean_track_length(),
        "reprojection_error": best.compute_mean_reprojection_error(),
    }
