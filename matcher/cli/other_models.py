"""`matcher localize --pictures`: the map of a model that another program made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matcher.cli import options
from matcher.cli.messages import results_as_notices, say


def map_of(model: Path, pictures: Path, run: Path | None, loading: dict[str, Any]) -> Path:
    """The folder of our map of a COLMAP model, beside it; made where there is none, with all poses kept.

    Args:
        model: of any program.
        pictures: the folder that its images lie in.
        run: where features and matches of the pictures are kept; None: beside the map.
        loading: options of `matcher.load`.

    Raises:
        UsageError: the model has a run of its own, or a map was made from other poses; as of `matcher sfm`.
    """
    from matcher.cli.sfm import sfm
    from matcher.collection.reconstruction.growing import find_run
    from matcher.errors import UsageError

    try:
        own = find_run(model)
    except UsageError:
        made = model.resolve().with_name(f"{model.resolve().name}-map")
    else:
        raise UsageError(f"{model} has features of its pictures in {own}: leave --pictures out")
    if made.exists():
        _check_same(made, model)
        return made
    say(f"{model}: its map is made from {pictures}, with the model's poses, and kept in {made}")
    given = {name: value for name, value in loading.items() if value is not None}
    with results_as_notices():
        sfm(pictures, made, {"preset": options.DEFAULT_PRESET, "upright": True, **given}, run, poses=model)
    return made


def _check_same(made: Path, model: Path) -> None:
    """Refuse a map whose poses are not, or no longer, those of the model."""
    import numpy as np

    from matcher.collection.reconstruction.given_poses import read_given_poses
    from matcher.errors import UsageError

    kept, poses = (read_given_poses(each).cam_from_world for each in (made, model))
    if any(name not in poses or not np.allclose(pose, poses[name]) for name, pose in kept.items()):
        raise UsageError(
            f"{made} was not made from the poses that {model} has now: delete it, and it is made again"
        )
    say(f"{made} is the map of {len(kept)} of the {len(poses)} pictures of {model}")
