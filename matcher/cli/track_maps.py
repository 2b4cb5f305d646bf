"""`matcher track` with maps: one that it makes, and one that it is localised in."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from matcher.cli.messages import complain, say
from matcher.cli.options import DEFAULT_PRESET, limit_threads
from matcher.cli.tracked import closing_of

if TYPE_CHECKING:
    from matcher.data.camera import Camera
    from matcher.localization.sparse_map import SparseMap
    from matcher.sequence.keyframe_map import KeyframeMap
    from matcher.sequence.log import TrackingLog
    from matcher.sequence.recording import Recording
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
    Literal["background", "inline"] | None,
    typer.Option(
        "--lookup",
        help="Where frames are localised in --load-map: beside tracking, or while it waits.  [default: "
        "background]",
    ),
]

_ALWAYS = {"preset": DEFAULT_PRESET, "device": "auto", "upright": True}  # where nothing is given
_NAMED = {"rate": "fps", "show_live": "show", "as_json": "json", "match_threshold": "threshold"}
_FINISHING = {"source", "map_dir", "threads", "given"}  # what the command needs to finish a map

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
    budget_ms: float | None,
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
    when = loops or _default_loops(budget_ms)
    return KeyframeMap(folder, camera, loops=when, overwrite=overwrite, **options)


def _default_loops(budget_ms: float | None) -> str:
    return "end" if budget_ms is None else "background"


def leave_a_core(
    folder: Path | None,
    loops: str | None,
    load_map: Path | None,
    lookup: str | None,
    *,
    budget_ms: float | None,
    engine: str | None,
) -> None:
    """Where a process will work on a map beside tracking, see that it has a core; before torch is imported.

    The tracker does so frame by frame; ONNX Runtime keeps the number of threads that it begins with. A number
    that the user gave is kept, and what it does is said.
    """
    from matcher.threads import compute_threads, threads_are_given, usable_cores

    mapped = folder is not None and (loops or _default_loops(budget_ms)) == "background"
    if not mapped and (load_map is None or lookup == "inline"):
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
def maps_of(tracker: Tracker, load_map: Path | None, lookup: str | None) -> Iterator[None]:
    """Load a map where one is given; end what runs beside tracking."""
    from matcher.errors import UsageError

    if load_map is None and lookup is not None:
        raise UsageError("--lookup needs --load-map DIR, the map in which frames are localised")
    if load_map is not None and tracker.camera is None:
        raise UsageError("--load-map needs poses, and poses need --camera fx,fy,cx,cy")
    try:
        if load_map is not None:
            tracker.load_map(load_map, timing=lookup or "background")
        yield
        if tracker.problem is not None:
            complain(f"beside tracking: {tracker.problem}")
    finally:
        tracker.unload_map()
        if tracker.keyframe_map is not None:
            tracker.keyframe_map.close()


def sparse_map_of(folder: Path) -> SparseMap:
    """Images, poses and points of a map that is loaded; errors as of `Map.open`."""
    from matcher.localization.map import Map

    with Map.open(folder) as place:
        return place.model


def finish_in_map(
    tracker: Tracker, log: TrackingLog, recordings: Sequence[Recording], *, in_map: bool, wait: bool
) -> None:
    """Wait for frames that are still to be localised, and take their poses in; Ctrl-C keeps what is known."""
    if wait and (waiting := tracker.waiting_in_map):
        say(f"waiting until up to {waiting} more frames are localised in the map; Ctrl-C ends that")
    try:
        if wait:
            tracker.finish_in_map()
    except KeyboardInterrupt:
        say("stopped waiting for the map")
    late = tracker.late_poses_in_map()
    log.complete(late)
    for recording in recordings:
        recording.complete(late)
    log.in_map = in_map
    log.localized, log.problem = tracker.localized_in_map, tracker.problem


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


@contextmanager
def kept_if_full(tracker: Tracker) -> Iterator[None]:
    """Where other outputs cannot be written, keyframes and their poses are kept."""
    try:
        yield
    except OSError:
        if tracker.keyframe_map is not None:
            _say_kept(tracker.keyframe_map)
        raise


def _say_kept(keyframes: KeyframeMap) -> None:
    from matcher.sequence.kept_frames import KEPT

    try:
        frames, count = keyframes.keep()
    except OSError as error:
        complain(
            f"{keyframes.folder}: the last poses and keyframes could not be kept there ({error}); make room, "
            f"and if {keyframes.folder / KEPT} exists, `matcher track {keyframes.folder} --map "
            f"{keyframes.folder}` makes a map of those before"
        )
        return
    complain(
        f"kept in {keyframes.folder}: {frames} poses and {count} keyframes, without a map: `matcher track "
        f"{keyframes.folder} --map {keyframes.folder}` makes it"
    )


def is_unfinished(source: str, folder: Path | None) -> bool:
    """Whether the source is a map that a run left unfinished, to be finished.

    Raises:
        UsageError: it is the map that is to be made, and nothing is left to do in it or nothing was kept.
    """
    from matcher.errors import UsageError
    from matcher.sequence.kept_frames import KEPT
    from matcher.sequence.pose_graph import MODEL

    if folder is None or os.path.realpath(source) != os.path.realpath(folder):
        return False
    if not (folder / KEPT).is_file():
        raise UsageError(
            f"{folder} is finished: `matcher localize {folder / MODEL} PHOTOS` and --load-map {folder} use it"
            if (folder / MODEL).is_dir()
            else f"{folder} holds no unfinished map (no {KEPT}): track the frames again, into another folder"
        )
    return True


def finish_map(folder: Path, asked: Mapping[str, Any]) -> int:
    """Make the map of the keyframes that an interrupted run kept; `asked`: all parameters of the command."""
    from matcher.errors import UsageError
    from matcher.sequence.keyframe_map import KeyframeMap

    others = {name: value for name, value in asked.items() if name not in _FINISHING} | asked["given"]
    named = {_NAMED.get(name, name): value for name, value in others.items() if value != _ALWAYS.get(name)}
    idle = [f"--{name.replace('_', '-')}" for name in sorted(named) if named[name] not in (None, False, [])]
    if idle:
        raise UsageError(
            f"{folder} is finished with the camera and the options that it was begun with: leave out "
            f"{', '.join(idle)}"
        )
    keyframes = KeyframeMap.resume(folder)
    try:
        say(closing_of(keyframes.finish()))
    except (KeyboardInterrupt, SystemExit):
        _say_kept(keyframes)
        raise
    return 0
