"""`matcher track` with maps: one that it makes, and one that it is localised in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from matcher.cli.messages import complain, say
from matcher.cli.options import limit_threads
from matcher.cli.tracked import closing_of

if TYPE_CHECKING:
    from matcher.data.camera import Camera
    from matcher.sequence.keyframe_map import KeyframeMap
    from matcher.sequence.tracker import Tracker

MapFolder = Annotated[
    Path | None,
    typer.Option(
        "--map",
        metavar="DIR",
        help="Folder to create for a map of the keyframes, with loops closed; `matcher localize DIR/model "
        "PHOTOS` and --load-map DIR then localise in it. Needs the sfm extra.",
    ),
]
LoopTimes = Annotated[
    Literal["end", "background", "inline"] | None,
    typer.Option(
        "--loops",
        help="When loops of --map are looked for: at the end, or also before, in a process beside tracking "
        "or while it waits; by default in the background with --budget-ms, else at the end.",
    ),
]
LoadedMap = Annotated[
    Path | None,
    typer.Option(
        "--load-map",
        metavar="DIR",
        help="Map of an earlier run, or a model: trajectories, plots and ground truth are then in its "
        "coordinates.",
    ),
]
Lookup = Annotated[
    Literal["background", "inline"],
    typer.Option(
        "--lookup", help="Where frames are localised in --load-map: beside tracking, or while it waits."
    ),
]

Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        min=1,
        help="Number of CPU threads.  [default: all cores, but one while a process works on a map beside "
        "tracking]",
    ),
]


def keyframe_map(
    folder: Path | None,
    camera: Camera | None,
    given: dict[str, Any],
    *,
    loops: str | None,
    budgeted: bool,
    overwrite: bool,
) -> KeyframeMap | None:
    """What collects the keyframes of a map, where one is wanted."""
    from matcher.errors import UsageError
    from matcher.sequence.kept_frames import KEPT

    if folder is None:
        if loops is not None:
            raise UsageError("--loops needs --map DIR, the folder of the map")
        return None
    if (folder / KEPT).is_file() and not overwrite:
        raise UsageError(
            f"{folder} holds the keyframes of a run that was interrupted: `matcher track {folder} --map "
            f"{folder}` makes the map of them, and --overwrite starts anew"
        )
    if camera is None:
        raise UsageError("--map needs poses, and poses need --camera fx,fy,cx,cy")
    from matcher.collection.exporting.colmap import import_pycolmap
    from matcher.sequence.keyframe_map import KeyframeMap

    import_pycolmap()
    options = {name: value for name, value in given.items() if name != "match_threshold"}
    when = loops or _default_loops(budgeted)
    return KeyframeMap(folder, camera, loops=when, overwrite=overwrite, **options)


def _default_loops(budgeted: bool) -> str:
    return "background" if budgeted else "end"


def leave_a_core(
    folder: Path | None,
    loops: str | None,
    load_map: Path | None,
    lookup: str,
    *,
    budgeted: bool,
    engine: str | None,
) -> None:
    """Where a process will work on a map beside tracking, see that it has a core; before torch is imported.

    The tracker does so frame by frame; ONNX Runtime keeps the number of threads that it begins with. A number
    that the user gave is kept, and what it does is said.
    """
    from matcher.threads import compute_threads, threads_are_given, usable_cores

    mapped = folder is not None and (loops or _default_loops(budgeted)) == "background"
    if not mapped and (load_map is None or lookup != "background"):
        return
    cores = usable_cores()
    if not threads_are_given():
        if engine == "onnx":
            limit_threads(max(1, cores - 1))
        return
    if (given := compute_threads()) >= cores > 1:
        say(
            f"note: {given} threads on {cores} cores leave none to the process beside tracking, so single "
            f"frames may take several times as long; --threads {cores - 1} leaves it one"
        )


@contextmanager
def maps_of(tracker: Tracker, load_map: Path | None, lookup: str) -> Iterator[None]:
    """Load a map where one is given; end what runs beside tracking."""
    from matcher.errors import UsageError

    if load_map is not None and tracker.camera is None:
        raise UsageError("--load-map needs poses, and poses need --camera fx,fy,cx,cy")
    try:
        if load_map is not None:
            tracker.load_map(load_map, timing=lookup)
        yield
        if tracker.problem is not None:
            complain(f"beside tracking: {tracker.problem}")
    finally:
        tracker.unload_map()
        if tracker.keyframe_map is not None:
            tracker.keyframe_map.close()


def save_map(tracker: Tracker, *, terminated: bool, outputs: list[Path]) -> None:
    """Make the map, where one is wanted, and print what it holds; poses are kept if that is interrupted.

    `terminated`: the program was asked to end at once, so the map is left to be finished later;
    with a recording among the `outputs`, the paths before and after loops are one too, DIR/trajectory.rrd.
    """
    if tracker.keyframe_map is None:
        return
    if terminated:
        _say_kept(tracker.keyframe_map)
        return
    try:
        closed = tracker.save_map()
        say(closing_of(closed))
        if any(path.suffix.lower() == ".rrd" for path in outputs):
            say(f"wrote {closed.record(tracker.keyframe_map.folder / 'trajectory.rrd')}")
    except (KeyboardInterrupt, SystemExit):
        _say_kept(tracker.keyframe_map)
        raise


def _say_kept(keyframes: KeyframeMap) -> None:
    frames, count = keyframes.keep()
    complain(
        f"kept in {keyframes.folder}: {frames} poses and {count} keyframes, without a map: `matcher track "
        f"{keyframes.folder} --map {keyframes.folder}` makes it"
    )


def is_unfinished(source: str, folder: Path | None) -> bool:
    """Whether the source is a map that a run left unfinished, to be finished."""
    from matcher.sequence.kept_frames import KEPT

    return (
        folder is not None
        and os.path.realpath(source) == os.path.realpath(folder)
        and (folder / KEPT).is_file()
    )


def finish_map(folder: Path, others: bool) -> int:
    """Make the map of the keyframes that an interrupted run kept; `others`: options that have no use here."""
    from matcher.errors import UsageError
    from matcher.sequence.keyframe_map import KeyframeMap

    if others:
        raise UsageError(
            f"{folder} is finished with the camera and the options that it was begun with; give only --map"
        )
    keyframes = KeyframeMap.resume(folder)
    try:
        say(closing_of(keyframes.finish()))
    except (KeyboardInterrupt, SystemExit):
        _say_kept(keyframes)
        raise
    return 0
