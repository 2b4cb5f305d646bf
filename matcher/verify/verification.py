"""The geometry of matches between the features of two images, by any estimator."""

from __future__ import annotations

from matcher.config import GeometryKind
from matcher.data.camera import Camera, cameras_of_pair
from matcher.data.features import Features
from matcher.data.matches import Matches, TwoViewGeometry
from matcher.data.protocols import Estimator
from matcher.verify.thresholds import threshold_scale


def verify_matches(
    estimator: Estimator,
    kind: GeometryKind,
    features0: Features,
    features1: Features,
    matches: Matches,
    camera0: Camera | None = None,
    camera1: Camera | None = None,
) -> TwoViewGeometry:
    """What `Pipeline.verify` does, by an estimator of a kind of geometry.

    Raises:
        UsageError: cameras without essential geometry, or it without them, or of another image size.
    """
    cameras = cameras_of_pair(kind, camera0, camera1, (features0.image_size, features1.image_size))
    known = matches.covariances
    takes_it = known is not None and getattr(estimator, "takes_covariances", False)
    return estimator(
        matches.points0,
        matches.points1,
        cameras=cameras,
        scores=matches.prior_scores,
        thresholds_scale=threshold_scale(features0.scale.tolist(), features1.scale.tolist(), kind),
        **({"covariances": known} if takes_it else {}),
    )
