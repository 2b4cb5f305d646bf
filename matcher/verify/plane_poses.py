"""The relative poses that the homography of a plane allows.

Where most matches lie on one plane, as of a wall, a floor or a poster, two poses explain these equally well
(Longuet-Higgins 1986). Samples of matches then often lead to the wrong one, and what little lies off the
plane or would be behind a camera says so only once the other one is there to compare.
"""

from __future__ import annotations

from collections.abc import Iterator

import cv2
import numpy as np

from matcher.data.camera import Camera
from matcher.verify.distances import in_front
from matcher.verify.homography import facing, sampled_homography, transfer_error
from matcher.verify.hypotheses import MatchedPoints

_LEAST_STEP = 1e-6  # length of a translation, in distances of the plane; shorter ones have no direction


def poses_of_plane(
    matched: MatchedPoints, cameras: tuple[Camera, Camera], threshold: float
) -> Iterator[np.ndarray]:
    """Poses cam1_from_cam0 (4, 4), |t| = 1, with most of a plane's matches in front of both cameras.

    Decomposed by OpenCV (Malis and Vargas 2007).

    Args:
        matched: the N matches.
        cameras: pinhole cameras of the resized images.
        threshold: pixels; how far a match may lie from its place by the homography.
    """
    homography = sampled_homography(matched, threshold)
    if homography is None:
        return
    homography = facing(homography, matched.points0)
    plane = transfer_error(*matched.sides, homography) <= threshold
    inverse = np.linalg.inv(cameras[0].K), np.linalg.inv(cameras[1].K)
    try:
        calibrated = inverse[1] @ homography @ cameras[0].K
        _, rotations, translations, _ = cv2.decomposeHomographyMat(calibrated, np.eye(3))
    except cv2.error:  # as in the other estimators: for what has no decomposition
        return
    for rotation, translation in zip(rotations, translations, strict=True):
        pose, length = np.eye(4), np.linalg.norm(translation)
        if not (_LEAST_STEP < length < np.inf and np.isfinite(rotation).all()):
            continue
        pose[:3, :3], pose[:3, 3] = rotation, translation[:, 0] / length
        if 2 * np.count_nonzero(in_front(*matched.sides, inverse, pose) & plane) > np.count_nonzero(plane):
            yield pose
