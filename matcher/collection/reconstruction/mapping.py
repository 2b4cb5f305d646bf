"""The mapping itself, run in a child process: COLMAP ends the process on bad input."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

RESULT = "result.json"
CLOUD = "cloud.npz"  # points (P, 3) and colours (P, 3) of the largest model


def main() -> None:
    """Read the job (JSON) from standard input, map, write models, `RESULT` and `CLOUD` into its output.

    Job: `database`, `images` (folder that only colours are taken from; it may be absent), `output` (an
    existing folder), `mapper` (incremental or global), `fixed_cameras` (numbers of those that are not
    refined), `min_images` of a model, `threads` (−1: all), `seed`, `verify` (run COLMAP's geometric
    verification first).
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
        model.write_binary(str(folder))
        described.append(_described(model))
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
    return pycolmap.incremental_mapping(*arguments, options)


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
