"""The mapping itself, run in a child process: COLMAP ends the process on bad input."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from matcher.collection.reconstruction.georegistration import georegister

RESULT = "result.json"
CLOUD = "cloud.npz"  # points (P, 3) and colours (P, 3) of the largest model
_MOVED = 0.05  # of the scene's size, by which a camera may have moved and still say where the world is
_ALIGNED = 3  # cameras, at least, that say so


def main() -> None:
    """Read the job (JSON) from standard input, map, write models, `RESULT` and `CLOUD` into its output.

    Job: `database`, `images` (folder that only colours are taken from; it may be absent), `output` (an
    existing folder), `mapper` (incremental, global, or triangulate for points only), `poses` (None, or those
    to start from: name → cam_from_world (3, 4)), `positions` (name → latitude, longitude, altitude),
    `fixed_cameras` (numbers of those that are not refined), `min_images` of a model, `threads` (−1: all),
    `seed`, `verify` (run COLMAP's geometric verification first).
    """
    # An interrupt reaches the whole group; the parent ends this process, which must not print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = json.load(sys.stdin)
    import pycolmap

    pycolmap.logging.minloglevel = pycolmap.logging.WARNING.value
    pycolmap.set_random_seed(job["seed"])
    if job["verify"]:
        pycolmap.geometric_verification(job["database"])
    models = _map(pycolmap, job)
    output = Path(job["output"])
    described = []
    ordered = sorted(models.values(), key=lambda model: -model.num_reg_images())
    for number, model in enumerate(ordered):
        folder = output / "sparse" / str(number)
        folder.mkdir(parents=True)
        place = georegister(pycolmap, model, job["positions"])
        model.write_binary(str(folder))
        described.append(_described(model) | {"georegistration": place})
    if ordered:
        ordered[0].export_PLY(str(output / "points.ply"))
        _write_cloud(ordered[0], output / CLOUD)
    (output / RESULT).write_text(json.dumps(described), encoding="utf-8")


def _map(pycolmap: Any, job: dict[str, Any]) -> dict[int, Any]:
    work = Path(job["output"]) / "work"
    work.mkdir()
    images = job["images"] if Path(job["images"]).is_dir() else str(work)
    arguments = (job["database"], images, str(work))
    if job["mapper"] == "global":
        options = pycolmap.GlobalPipelineOptions()
        _set_common(options, job)
        return pycolmap.global_mapping(*arguments, options)
    options = pycolmap.IncrementalPipelineOptions()
    _set_common(options, job)
    options.constant_cameras = set(job["fixed_cameras"])
    if job["poses"] is None:
        return pycolmap.incremental_mapping(*arguments, options)
    start = pycolmap.triangulate_points(_posed(pycolmap, job, options), *arguments, options=options)
    if job["mapper"] == "triangulate":
        return {0: start}
    return _continued(pycolmap, start, arguments, options)


def _posed(pycolmap: Any, job: dict[str, Any], options: Any) -> Any:
    """The images of the database that have a given pose, as a model without points."""
    model = pycolmap.Reconstruction()
    with pycolmap.Database.open(job["database"]) as database:
        for camera in database.read_all_cameras():
            model.add_camera_with_trivial_rig(camera)
        for image in database.read_all_images():
            if (pose := job["poses"].get(image.name)) is not None:
                matrix = np.array(pose, dtype=np.float64)
                rigid = pycolmap.Rigid3d(pycolmap.Rotation3d(matrix[:, :3]), matrix[:, 3])
                model.add_image_with_trivial_frame(image, rigid)
    return model


def _continued(pycolmap: Any, start: Any, arguments: tuple[Any, ...], options: Any) -> dict[int, Any]:
    """The model with the other images registered, in the same world coordinates."""
    folder = Path(arguments[2]) / "start"
    folder.mkdir()
    start.write_binary(str(folder))
    models = pycolmap.incremental_mapping(*arguments, options, input_path=str(folder))
    names = [start.image(number).name for number in start.reg_image_ids()]
    centres = np.array([start.image(number).projection_center() for number in start.reg_image_ids()])
    size = float(np.linalg.norm(np.ptp(centres, axis=0)))
    for model in models.values():
        # Bundle adjustment may move, turn and scale the world a little.
        ransac = pycolmap.RANSACOptions(max_error=max(_MOVED * size, 1e-9), random_seed=0)
        back = pycolmap.align_reconstruction_to_locations(model, names, centres, _ALIGNED, ransac)
        if back is not None:
            model.transform(back)
    return models


def _set_common(options: Any, job: dict[str, Any]) -> None:
    options.num_threads = job["threads"]
    options.random_seed = job["seed"]
    options.min_model_size = job["min_images"]


def _write_cloud(model: Any, path: Path) -> None:
    points = model.points3D.values()
    np.savez(
        path,
        points=np.array([point.xyz for point in points], dtype=np.float64).reshape(-1, 3),
        colours=np.array([point.color for point in points], dtype=np.uint8).reshape(-1, 3),
    )


def _described(model: Any) -> dict[str, Any]:
    """Statistics of a model for the summary, and the data for its plot."""
    registered = [model.image(number) for number in model.reg_image_ids()]
    poses = {image.name: image.cam_from_world().matrix().tolist() for image in registered}
    return {
        "registered": len(registered),
        "points": model.num_points3D(),
        "observations": model.compute_num_observations(),
        "mean_track_length": model.compute_mean_track_length(),
        "mean_reprojection_error": model.compute_mean_reprojection_error(),
        "cam_from_world": poses,
        "cameras": {
            image.name: {"model": camera.model.name, "size": [camera.width, camera.height]}
            | {"params": camera.params.tolist()}
            for image in registered
            for camera in [model.camera(image.camera_id)]
        },
    }


if __name__ == "__main__":
    main()
