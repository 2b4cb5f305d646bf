"""Verifies finished pairs again, from the stored matches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from matcher.collection.encoding import checksum, common_camera, encode_pair
from matcher.collection.store import Store
from matcher.collection.writer import EncodedPair, Writer
from matcher.config import EstimationConfig
from matcher.config_tables import from_dict
from matcher.data.camera import Camera
from matcher.errors import UsageError
from matcher.verify.estimation import RobustEstimator
from matcher.verify.thresholds import threshold_scale
from matcher.verify.verdict import NOT, reject_improbable

_PAIRS = "SELECT image0, image1 FROM {table} WHERE image0 IN ({ids}) OR image1 IN ({ids})"


def verify_again(writer: Writer, names: Iterable[str]) -> int:
    """Verify the finished pairs of images whose cameras have changed; their features and matches stay.

    Failed pairs, which may have lacked a camera, are matched again. If the run's geometry uses no
    cameras, nothing is done. To be called inside a transaction, so that a camera is never stored
    beside a geometry that was estimated with another.

    Returns:
        How many pairs were verified.
    """
    store = writer.store
    settings = store.settings
    config = estimation_of(settings)
    numbers = [writer.number(name) for name in names]
    if config.kind != "essential" or not numbers:
        return 0
    ids = ", ".join(map(str, numbers))
    writer.let_failed_pairs_wait(writer.execute(_PAIRS.format(table="failed", ids=ids)))
    verification = _Verification(store, RobustEstimator(config), common_camera(settings))
    pairs = writer.execute(_PAIRS.format(table="pairs", ids=ids))
    for image0, image1 in pairs:
        writer.put_pairs([verification.pair(image0, image1)])
    return len(pairs)


def estimation_of(settings: Mapping[str, Any]) -> EstimationConfig:
    """How the run of these settings estimates geometry.

    Raises:
        UsageError: they do not say, or not as this version does.
    """
    values = settings.get("config", {}).get("estimation")
    if values is None:
        raise UsageError("the settings of the run do not say how its geometry was estimated; match it again")
    return from_dict(EstimationConfig, values)


def check_cameras(store: Store, common: Camera | None) -> None:
    """Refuse a run that could not verify any pair, before any work.

    Args:
        store: the run.
        common: the camera of every image without its own.

    Raises:
        UsageError: essential geometry, and no image has a camera.
    """
    if estimation_of(store.settings).kind != "essential" or common is not None:
        return
    if any(image.camera is not None for image in store.images()):
        return  # pairs of images without one fail with that reason
    raise UsageError(
        "geometry 'essential' needs the camera of every image, and none is known: give "
        "camera=fx,fy,cx,cy for all, or one for each with Collection.set_cameras"
    )


class _Verification:
    """Reads a finished pair and encodes it again with a new geometry."""

    def __init__(self, store: Store, estimator: RobustEstimator, camera: Camera | None) -> None:
        self._store, self._estimator, self._camera = store, estimator, camera
        self._names = store.names()
        self._scales: dict[int, tuple[Any, ...]] = {
            row[0]: row[1:] for row in store.rows("SELECT id, scale_x, scale_y FROM images")
        }

    def pair(self, image0: int, image1: int) -> EncodedPair:
        """The pair as it is to be written."""
        found = self._store.pair(self._names[image0], self._names[image1])
        images = [self._store.image(name) for name in (found.name0, found.name1)]
        cameras = [image.camera or self._camera for image in images]
        matches = found.matches
        geometry = self._estimator(
            matches.points0,
            matches.points1,
            cameras=(cameras[0], cameras[1]),
            scores=matches.scores,
            covariances=matches.covariances,
            thresholds_scale=threshold_scale(
                self._scales[image0], self._scales[image1], self._estimator.config.kind
            ),
        )
        geometry = reject_improbable(geometry, matches, *(image.size for image in images), least=NOT)
        keypoints = (self._store.keypoints(found.name0), self._store.keypoints(found.name1))
        data = encode_pair(matches, geometry, *keypoints)
        return EncodedPair(image0, image1, found.seconds, checksum(data), data)
