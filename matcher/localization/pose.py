"""What localisation says of a photo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from matcher.data.camera import Camera

PoseStatus = Literal[
    "ok",
    "no_keypoints",  # the photo has too few keypoints
    "no_similar_image",  # no image of the map shares enough matches with it
    "too_few_matches",  # too few of its keypoints were matched to points of the map
    "no_model",  # no pose agrees with the matches
    "not_significant",  # so few agree that wrong matches could do so by chance
    "ambiguous",  # nearly as many of the other matches agree with another pose
    "wrong_camera",  # far more matches agree, or agree much better, with another camera
    "implausible",  # the pose cannot be: points behind the camera, or inliers in one spot
]


def _no_pixels() -> np.ndarray:
    return np.zeros((0, 2))


def _no_points() -> np.ndarray:
    return np.zeros((0, 3))


def _no_ids() -> np.ndarray:
    return np.zeros(0, np.int64)


def _no_flags() -> np.ndarray:
    return np.zeros(0, bool)


@dataclass(frozen=True, eq=False, repr=False)
class Pose:
    """Where a photo was taken, or why that is not known.

    The camera looks along +z, x to the right and y down. Without status "ok" there is no pose: a guess is
    never returned.

        >>> import matcher
        >>> refused = matcher.Pose("too_few_matches", "3 matches with points of the map")
        >>> refused.ok, refused.cam_from_world
        (False, None)
    """

    status: PoseStatus
    reason: str  # in words; empty when ok
    cam_from_world: np.ndarray | None = None  # (4, 4) float64, the map's units
    camera: Camera | None = None  # the given one, or the one whose focal length was found
    points2d: np.ndarray = field(default_factory=_no_pixels)  # (K, 2) stored pixels
    points3d: np.ndarray = field(default_factory=_no_points)  # (K, 3) their partners, world
    point_ids: np.ndarray = field(default_factory=_no_ids)  # (K,) in the COLMAP model
    inliers: np.ndarray = field(default_factory=_no_flags)  # (K,)
    # (6, 6) of a turn about the camera's axes (radians) and a shift along them (the map's units), as if the
    # points of the map were exact.
    covariance: np.ndarray | None = None
    images: Mapping[str, int] = field(default_factory=dict)  # matched with it → inliers that each shows
    log10_false_alarms: float = 0.0  # how many such poses chance would give, the lower the surer
    seconds: Mapping[str, float] = field(default_factory=dict)  # by stage

    @property
    def ok(self) -> bool:
        """Whether there is a pose."""
        return self.status == "ok"

    @property
    def num_inliers(self) -> int:
        """Matches with points of the map that agree with the pose."""
        return int(self.inliers.sum())

    @property
    def world_from_cam(self) -> np.ndarray | None:
        """(4, 4), the inverse of `cam_from_world`."""
        return None if self.cam_from_world is None else np.linalg.inv(self.cam_from_world)

    @property
    def centre(self) -> np.ndarray | None:
        """(3,) the camera's position in the world."""
        return None if self.cam_from_world is None else self.world_from_cam[:3, 3]

    def to_dict(self) -> dict[str, Any]:
        """Everything but the points, ready for JSON; the camera with COLMAP's pixel origin."""
        camera = None
        if self.camera is not None:
            model, params = self.camera.to_colmap()
            camera = {"model": model, "params": list(params), "size": list(self.camera.size or ())}
        return {
            "status": self.status,
            "reason": self.reason,
            "cam_from_world": None if self.cam_from_world is None else self.cam_from_world.tolist(),
            "camera": camera,
            "matches": len(self.inliers),
            "inliers": self.num_inliers,
            "covariance": None if self.covariance is None else self.covariance.tolist(),
            "images": dict(self.images),
            "seconds": {name: round(value, 4) for name, value in self.seconds.items()},
        }

    def __repr__(self) -> str:
        if not self.ok:
            return f"Pose({self.status}: {self.reason})"
        centre = ", ".join(f"{value:.3f}" for value in self.centre)
        return f"Pose(ok, at ({centre}), {self.num_inliers} of {len(self.inliers)} matches agree)"
