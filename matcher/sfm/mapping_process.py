"""COLMAP's mapping in a process of its own, which ends with this one."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
from collections.abc import Iterable
from typing import Any

from matcher.errors import MatcherError
from matcher.processes import child_command, child_environment

# --- mapping_process: COLMAP's mapping in a process of its own, which ends with this one.

_CHILD = "matcher.sfm.mapping"
_ROOM = 1 << 20  # bytes; where fewer are left, that is why COLMAP's process ended, which does not say so
_SHOWN = 1500  # characters of COLMAP's last words


class ReconstructionError(MatcherError):
    """The matches yield no model, or COLMAP ended early; the message explains why and what may help."""

    exit_code = 4


def run_mapping(job: dict[str, Any]) -> None:
    """Run the mapping in a child process that ends with this one; `OSError` where the disk is full."""
    child = subprocess.Popen(
        child_command(_CHILD),
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        _, words = child.communicate(json.dumps(job))
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    if child.returncode != 0:
        if shutil.disk_usage(job["output"]).free < _ROOM:
            raise OSError(errno.ENOSPC, f"{job['output']}: the disk is full")
        raise ReconstructionError(
            f"COLMAP's process ended early ({_ending(child.returncode)}): {_last(words, child.returncode)}"
        )


def _ending(code: int) -> str:
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"code {code}"


def _last(words: str, code: int) -> str:
    """A Python exception is explained by its last line, a C++ crash by several."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return " | ".join(lines[-6 if code < 0 else -1 :])[-_SHOWN:] or "no message"


# --- adjustment: Bundle adjustment of a model in which some cameras are known.


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
