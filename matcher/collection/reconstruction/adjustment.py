"""Bundle adjustment of a model in which some cameras are known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def adjust(pycolmap: Any, model: Any, fixed_cameras: Iterable[int], threads: int) -> None:
    """Adjust all registered images, points and cameras of a model, in place.

    Args:
        pycolmap: the module.
        model: a reconstruction.
        fixed_cameras: numbers of those that are not refined.
        threads: −1: all.
    """
    images = [model.image(number) for number in model.reg_image_ids()]
    config, options = pycolmap.BundleAdjustmentConfig(), pycolmap.BundleAdjustmentOptions()
    options.print_summary = False
    options.refine_sensor_from_rig = False
    options.ceres.solver_options.num_threads = threads
    for image in images:
        config.add_image(image.image_id)
    for number in set(fixed_cameras) & {image.camera_id for image in images}:
        config.set_constant_cam_intrinsics(number)
    config.fix_gauge(pycolmap.BundleAdjustmentGauge.TWO_CAMS_FROM_WORLD)
    pycolmap.create_default_bundle_adjuster(options, config, model).solve()
