"""Benchmarks of collections: reconstructions against known poses and COLMAP's features; workers."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from matcher.collection.collection import Collection
from matcher.collection.engines import Workers
from matcher.collection.exporting.cameras import HALF_PIXEL
from matcher.collection.exporting.colmap import import_pycolmap
from matcher.collection.exporting.hloc import FEATURES, MATCHES, PAIRS, import_h5py, pair_key
from matcher.collection.reconstruction.reconstruct import DATABASE, reconstruct
from matcher.errors import UsageError
from matcher.processes import child_command, child_environment


def measure_reconstruction(
    folder: Path, work: Path, options: Mapping[str, Any], *, threads: int = 1, seed: int = 0
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Reconstruct one scene in four ways from equally many keypoints, and yield a title and metrics of each.

    With `reconstruct`; with pycolmap from the COLMAP export; with pycolmap from the hloc export, read as hloc
    does and verified by COLMAP; and with COLMAP's own SIFT and matcher. All pairs are matched.

    Args:
        folder: `images` of one camera, and `poses.json`: a list of `image` and `C`, the camera's centre (3).
        work: folder of runs and models; pairs that are matched there already are not matched again.
        options: of `Collection.open`, with `resize` and `max_keypoints`.
        threads: of COLMAP's mapper; with one thread the model is reproducible.
        seed: of COLMAP.

    Raises:
        UsageError: files are absent, or pycolmap or h5py is not installed.
    """
    pycolmap, photos = import_pycolmap(), folder / "images"
    ground_truth = _read_centres(folder / "poses.json")
    import_h5py()
    pycolmap.logging.minloglevel = pycolmap.logging.WARNING.value
    work.mkdir(parents=True, exist_ok=True)
    collection = Collection.open(work / "run", **options)
    collection.add_images(photos)
    collection.add_pairs(exhaustive=True)
    collection.run()
    for old in ("model", "hloc"):
        shutil.rmtree(work / old, ignore_errors=True)
    with collection.store as store:
        reconstruct(store, work / "model", threads=threads, seed=seed)
    model = pycolmap.Reconstruction(work / "model" / "sparse" / "0")
    yield "matcher sfm", _metrics(model, work / "model" / DATABASE, ground_truth)
    collection.export("colmap", work / "colmap.db")
    collection.export("hloc", work / "hloc")
    with pycolmap.Database.open(work / "model" / DATABASE) as database:
        (camera,) = database.read_all_cameras()
    database_from_hloc(work / "hloc", work / "hloc.db", camera)
    database_by_colmap(photos, work / "sift.db", options["max_keypoints"], options["resize"])
    for title, name in (
        ("export --to colmap, pycolmap", "colmap.db"),
        ("export --to hloc, h5py, pycolmap", "hloc.db"),
        ("COLMAP's SIFT and matcher", "sift.db"),
    ):
        mapping = pycolmap.IncrementalPipelineOptions(num_threads=threads, random_seed=seed)
        (work / "maps").mkdir(exist_ok=True)
        models = pycolmap.incremental_mapping(work / name, photos, work / "maps", mapping).values()
        yield title, _metrics(max(models, key=lambda one: one.num_reg_images()), work / name, ground_truth)


def database_from_hloc(folder: Path, path: Path, camera: Any) -> None:
    """A COLMAP database from hloc's files, as hloc makes it: half a pixel is added, and COLMAP verifies.

    Args:
        folder: with hloc's three files.
        path: of the database; an existing one is replaced.
        camera: of all images, a `pycolmap.Camera`.
    """
    pycolmap, h5py = import_pycolmap(), import_h5py()
    path.unlink(missing_ok=True)
    listed = [line.split() for line in (folder / PAIRS).read_text(encoding="utf-8").splitlines()]
    with (
        h5py.File(folder / FEATURES) as features,
        h5py.File(folder / MATCHES) as matches,
        pycolmap.Database.open(path) as database,
        pycolmap.DatabaseTransaction(database),
    ):
        camera_id, numbers = database.write_camera(camera), {}
        for name in sorted({name for pair in listed for name in pair}):
            numbers[name] = database.write_image(pycolmap.Image(name=name, camera_id=camera_id))
            points = features[name]["keypoints"][()].astype(np.float32) + np.float32(HALF_PIXEL)
            database.write_keypoints(numbers[name], points)
        for name0, name1 in listed:
            matches0 = matches[pair_key(name0, name1)]["matches0"][()]
            index0 = np.flatnonzero(matches0 >= 0)
            found = np.column_stack([index0, matches0[index0]]).astype(np.uint32)
            database.write_matches(numbers[name0], numbers[name1], found)
    pycolmap.geometric_verification(path)


def database_by_colmap(photos: Path, path: Path, max_keypoints: int, resize: int) -> None:
    """A database of COLMAP's own SIFT, its exhaustive matcher and its verification, with one camera."""
    pycolmap = import_pycolmap()
    path.unlink(missing_ok=True)
    pycolmap.set_random_seed(0)
    extraction = pycolmap.FeatureExtractionOptions()
    extraction.max_image_size = resize
    extraction.sift.max_num_features = max_keypoints
    mode = pycolmap.CameraMode.SINGLE
    pycolmap.extract_features(path, photos, camera_mode=mode, extraction_options=extraction)
    pycolmap.match_exhaustive(path)


def _read_centres(path: Path) -> dict[str, np.ndarray]:
    try:
        return {Path(row["image"]).name: np.array(row["C"], float) for row in json.loads(path.read_text())}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: not a list of images and camera centres ({error})") from error


def _metrics(model: Any, database: Path, ground_truth: Mapping[str, np.ndarray]) -> dict[str, Any]:
    with import_pycolmap().Database.open(database) as features:
        images, keypoints = features.num_images(), features.num_keypoints()
    estimated = {image.name: image.projection_center() for image in model.images.values() if image.has_pose}
    names = sorted(set(estimated) & set(ground_truth))
    centres = np.array([ground_truth[name] for name in names])
    error = aligned(np.array([estimated[name] for name in names]), centres) - centres
    widest = np.linalg.norm(centres[:, None] - centres[None], axis=2).max()
    tracks = [point.track.elements for point in model.points3D.values()]
    lengths = np.array([len(track) for track in tracks])
    distinct = np.array([len({element.image_id for element in track}) for track in tracks])
    return {
        "registered": model.num_reg_images(),
        "images": images,
        "keypoints": keypoints / images,
        "points": len(lengths),
        "observations": int(lengths.sum()),
        "mean_track_length": float(lengths.mean()),  # as COLMAP counts: an image may be in a track twice
        "mean_images": float(distinct.mean()),
        "tracks_of": {str(n): int((distinct == n).sum()) for n in np.unique(distinct)},  # by number of images
        "mean_reprojection_error": model.compute_mean_reprojection_error(),  # stored pixels
        "worst_centre": float(np.linalg.norm(error, axis=1).max() / widest),  # of the largest distance
    }


def aligned(points: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Points (N, 3) after the similarity transform that best aligns them with `target` (Umeyama 1991)."""
    mean0, mean1 = points.mean(axis=0), target.mean(axis=0)
    centred0, centred1 = points - mean0, target - mean1
    u, d, vt = np.linalg.svd(centred1.T @ centred0)
    signs = np.array([1, 1, np.sign(np.linalg.det(u @ vt))])
    scale = (d * signs).sum() / np.square(centred0).sum()
    return scale * centred0 @ (u @ np.diag(signs) @ vt).T + mean1


def measure_workers(
    folder: Path,
    work: Path,
    options: Mapping[str, Any],
    arrangements: Mapping[str, Workers],
    *,
    neighbours: int = 12,
) -> Iterator[tuple[str, dict[str, float]]]:
    """Measure how fast pairs of a folder are matched from stored features, by processes and threads.

    Args:
        folder: of the images.
        work: folder of the runs; features that are stored there already are not extracted again.
        options: of `Collection.open`.
        arrangements: title → which processes, and how many threads each has.
        neighbours: number of images, following by name, that each image is matched with.

    Yields:
        A title, and `pairs`, `seconds` including the start of the workers, `pairs_per_second` over that time,
        and `steady`, the rate after the first commit (NaN if there was only one).
    """
    extracted = Collection.open(work / "features", workers=0, **options)
    extracted.add_images(folder)
    extracted.extract(everything=True)
    extracted.add_pairs(sequential=neighbours)
    for title, means in arrangements.items():
        run = work / "timed"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(work / "features", run)
        arguments = [str(folder), str(run), json.dumps(asdict(means)), json.dumps(dict(options))]
        command = child_command("matcher.lab.benchmark.timed_run", *arguments)
        pipes = {"stdout": subprocess.PIPE, "text": True}
        ended = subprocess.run(command, env=child_environment(means.threads), **pipes, check=True)
        pairs, seconds, steady = map(float, ended.stdout.split())
        yield (
            title,
            {"pairs": pairs, "seconds": seconds, "pairs_per_second": pairs / seconds, "steady": steady},
        )
