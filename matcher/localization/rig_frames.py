"""Photos by the cameras of a rig: those of one moment are localised together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from matcher.data.camera import Camera
from matcher.data.rig_config import RigCamera, RigConfig
from matcher.errors import ImageError, UsageError
from matcher.localization.localizer import Query
from matcher.localization.map import Map
from matcher.localization.pose import Pose
from matcher.localization.rig import check_rig, localize_rig


def localize_frames(
    place: Map,
    photos: Mapping[str, Path],
    rig: RigConfig,
    cameras: Mapping[str, Camera],
    masks: Mapping[str, Path] | None = None,
) -> Iterator[tuple[str, Pose | ImageError]]:
    """The pose of each photo, those of one moment together, those of no rig alone.

    Args:
        place: the map, in the units of the rig's poses.
        photos: path by name; the names of those of one moment differ in the prefix of their camera only.
        rig: see `read_rig_config`.
        cameras: by name; others are those of the rig's file, or of a picture of the map with their prefix.
        masks: by name, of photos that have one.

    Returns:
        Names with a pose, or with why a photo cannot be read.

    Raises:
        UsageError: names that do not fit the rig, cameras whose relative poses or intrinsics are not known.
    """
    if not rig.known:
        raise UsageError(
            f"{rig.source} does not say how its cameras are fixed to each other: give cam_from_rig_rotation "
            "and cam_from_rig_translation, or take the rig_config.json of a model that was made of a rig"
        )
    frames = rig.frames(photos)
    known = {**_intrinsics(place, rig, photos), **cameras}
    for frame in frames:
        if absent := [name for name in frame if name not in known]:
            raise UsageError(
                f"the intrinsics of {absent[0]} are not known: give them in {rig.source} or as a camera"
            )
    for frame in frames:
        yield from _together(place, photos, frame, known, masks or {})
    together = {name for frame in frames for name in frame}
    for name, path in photos.items():
        if name not in together:
            yield name, _alone(place, path, known.get(name), (masks or {}).get(name))


def _together(
    place: Map,
    photos: Mapping[str, Path],
    frame: Mapping[str, RigCamera],
    cameras: Mapping[str, Camera],
    masks: Mapping[str, Path],
) -> Iterator[tuple[str, Pose | ImageError]]:
    queries: dict[str, Query] = {}
    for name in frame:
        try:
            queries[name] = place.query(photos[name], cameras[name], mask=masks.get(name))
        except ImageError as error:
            yield name, error
    if len(queries) == 1:
        ((name, query),) = queries.items()
        yield name, place.localizer.localize(query)
    elif queries:
        fixed = check_rig(list(queries.values()), [frame[name].cam_from_rig for name in queries])
        yield from zip(queries, localize_rig(place.localizer, list(queries.values()), fixed), strict=True)


def _alone(place: Map, path: Path, camera: Camera | None, mask: Path | None) -> Pose | ImageError:
    try:
        return place.localize(path, camera, mask=mask)
    except ImageError as error:
        return error


def _intrinsics(place: Map, rig: RigConfig, names: Mapping[str, Path]) -> dict[str, Camera]:
    """By name of photo, from the rig's file, else from a picture of the map with the same prefix."""
    of_map = {}
    for name, camera in zip(place.names, place.model.cameras, strict=True):
        if (mounted := rig.camera_of(name)) is not None:
            of_map[mounted.prefix] = replace(camera, size=None)
    of_rig = {**of_map, **rig.intrinsics()}
    mounted = {name: rig.camera_of(name) for name in names}
    return {name: of_rig[each.prefix] for name, each in mounted.items() if each and each.prefix in of_rig}
