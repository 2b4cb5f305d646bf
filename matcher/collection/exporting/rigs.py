"""Rigs in COLMAP's terms."""

from __future__ import annotations

from typing import Any

import numpy as np

from matcher.data.rig_config import RigConfig


def colmap_rigs(pycolmap: Any, rig: RigConfig) -> list[Any]:
    """`pycolmap.RigConfig` for each rig; intrinsics are the database's."""
    found = []
    for cameras in rig.rigs:
        rows = []
        for number, each in enumerate(cameras):
            row = pycolmap.RigConfigCamera()
            row.image_prefix, row.ref_sensor = each.prefix, number == 0
            if number and each.cam_from_rig is not None:
                pose = np.asarray(each.cam_from_rig, dtype=np.float64)
                row.cam_from_rig = pycolmap.Rigid3d(pycolmap.Rotation3d(pose[:3, :3]), pose[:3, 3])
            rows.append(row)
        config = pycolmap.RigConfig()
        config.cameras = rows
        found.append(config)
    return found
