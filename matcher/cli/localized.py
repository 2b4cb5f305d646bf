"""The poses of photos, written and printed, for `matcher localize`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matcher.cli.messages import complain, show

if TYPE_CHECKING:
    import numpy as np

    from matcher.localization.map import Map
    from matcher.localization.pose import Pose


def write_poses(output: Path, found: dict[str, Pose], where: dict[str, Any]) -> None:
    """The poses that were found, in the format that the name asks for; JSON says `where` the map is."""
    from matcher.data.named_poses import write_named_poses
    from matcher.errors import UsageError

    poses, facts = _accepted(found), details(found)
    if output.suffix.lower() == ".kitti" and len(poses) < len(found):
        kept = output.with_suffix(".json")
        write_named_poses(kept, poses, facts, **where)
        raise UsageError(
            f"{output}: KITTI's lines have no names, and {len(found) - len(poses)} photos have no pose; the "
            f"poses are in {kept}, or use .tum or .txt"
        )
    write_named_poses(output, poses, facts, **where)
    show(f"wrote {output}")


def show_poses(
    found: dict[str, Pose], where: dict[str, Any], *, model: Path, count: int, as_json: bool
) -> None:
    """Print all that is known of the photos as JSON, or how many of `count` have a pose."""
    if as_json:
        rows = {"model": str(model), **where, "poses": details(found)}
        show(json.dumps(rows, allow_nan=False), always=True)
    else:
        show(f"{sum(pose.ok for pose in found.values())} of {count} photos have a pose")


def say_absent(place: Map) -> None:
    """Say how many pictures of the map were missing where keypoints should have been refined on them."""
    if place.absent:
        first = place.image_path(place.absent[0])
        complain(
            f"{len(place.absent)} pictures of the map are gone, such as {first}: poses are less exact, "
            "since keypoints were not refined on them; put them back, or give --no-refine"
        )


@contextmanager
def kept_poses(output: Path | None, found: dict[str, Pose], count: int) -> Iterator[None]:
    """Where the work is ended early, by an interrupt or a full disk for a drawing, write the poses so far."""
    from matcher.data.named_poses import write_named_poses

    try:
        yield
    except BaseException:
        if output is not None and found:
            kept = output.with_suffix(".json") if output.suffix.lower() == ".kitti" else output
            with suppress(OSError):
                write_named_poses(kept, _accepted(found), details(found))
                complain(f"ended after {len(found)} of {count} photos, whose poses are in {kept}")
        raise


def _accepted(found: dict[str, Pose]) -> dict[str, np.ndarray]:
    return {name: pose.cam_from_world for name, pose in found.items() if pose.ok}


def details(found: dict[str, Pose]) -> dict[str, dict[str, Any]]:
    """All that is known of each photo, for JSON."""
    return {name: pose.to_dict() for name, pose in found.items()}


def line_of(name: str, pose: Pose) -> str:
    """The pose of a photo, or why it has none, as a line to print."""
    if not pose.ok:
        return f"{name}: no pose ({pose.reason})"
    x, y, z = pose.centre
    seen = f"{pose.num_inliers} of {len(pose.inliers)} matches with {len(pose.images)} images"
    return f"{name}: at {x:.3f} {y:.3f} {z:.3f}, {seen}, {pose.seconds['total']:.2f} s"
