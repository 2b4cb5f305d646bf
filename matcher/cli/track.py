"""`matcher track`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from matcher.cli import options
from matcher.cli.options import DEFAULT_PRESET, PARTIAL, complain, limit_threads, say, show

if TYPE_CHECKING:
    from matcher.cameras import Camera
    from matcher.localization.sparse_map import SparseMap
    from matcher.sequence.capture import TrackingLog
    from matcher.sequence.keyframe_map import KeyframeMap
    from matcher.sequence.loops import ClosedTrajectory
    from matcher.sequence.plot import Recording
    from matcher.sequence.tracker import Tracker


# --- tracked: What `matcher track` prints.


def as_object(
    log: TrackingLog, tracker: Tracker, poses: int, compared: tuple[Any, Any, Any] | None
) -> dict[str, Any]:
    """What `--json` prints."""
    choice = tracker.choice
    return {
        "preset": tracker.pipeline.preset,
        "frames": len(log),
        "statuses": log.counts(),
        "poses": poses,
        **({"in_map": True} if log.in_map else {}),
        "mean_track_length": round(log.mean_track_length(), 3),
        "choice": None if choice is None else {**vars(choice), "text": str(choice)},
        "milliseconds": {
            stage: {name: round(value, 2) for name, value in row.items()}
            for stage, row in tracker.latency().items()
        },
        "segments": None if compared is None else [vars(error) for error in compared[2]],
    }


def title_of(found: dict[str, Any]) -> str:
    """The line above a plot."""
    errors = ", ".join(
        f"{100 * e['translation']:.2f} % and {e['rotation']:.4f} °/m over {e['length']:.0f} m"
        for e in found["segments"] or []
    )
    return f"{found['preset']}, {found['frames']} frames" + (f": {errors}" if errors else "")


def summary_of(found: dict[str, Any]) -> str:
    """The same as readable lines."""
    statuses = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in found["statuses"].items())
    lines = [
        f"{found['frames']} frames ({statuses}), {found['poses']} with a pose",
        f"mean length of tracks over two or more frames: {found['mean_track_length']:.2f} frames",
    ]
    if found.get("in_map"):
        lines.append(f"{found['poses']} of {found['frames']} frames have a pose in the map")
    if found["choice"]:
        lines.append(found["choice"]["text"])
    lines += [
        f"{e['count']} segments of {e['length']:.0f} m: {100 * e['translation']:.2f} % translation, "
        f"{e['rotation']:.4f} degrees per metre"
        for e in found["segments"] or []
    ]
    lines += [
        f"{stage:8}{row['p50']:8.1f} ms median{row['p95']:8.1f} ms 95th percentile"
        for stage, row in found["milliseconds"].items()
    ]
    return "\n".join(lines)


def closing_of(closed: ClosedTrajectory) -> str:
    """What the map of the keyframes says, in a line."""
    moved = closed.moved()
    loops = f"{len(closed.loops)} pairs of keyframes close loops" if closed.loops else "no loop was found"
    if closed.alike:
        loops += f", {closed.alike} pairs only look alike and are left out, as the path says"
    loops += "" if closed.problem is None else f" ({closed.problem})"
    return (
        f"map of the keyframes: {closed.folder}; {loops}; poses moved by {moved.mean():.3f} on average, "
        f"{moved.max():.3f} at most ({closed.folder.parent / 'trajectory.tum'})"
    )


# --- track_maps: `matcher track` with maps: one that it makes, and one that it is localised in.

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
    from matcher.sequence.frames import KEPT

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
    from matcher.export.colmap import import_pycolmap
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
    from matcher.processes import compute_threads, threads_are_given, usable_cores

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
    from matcher.sequence.frames import KEPT

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
    from matcher.sequence.frames import KEPT
    from matcher.sequence.loops import MODEL

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


# --- track: `matcher track`.

SUFFIXES = (".npz", ".tum", ".kitti", ".rrd")

Where = Annotated[
    str,
    typer.Argument(
        metavar="VIDEO|FOLDER|CAMERA_INDEX",
        show_default=False,
        help="Video file, folder of frames, or index of a live camera.",
    ),
]
CameraText = Annotated[
    str | None, typer.Option(metavar="fx,fy,cx,cy", help="Intrinsics in stored pixels; needed for poses.")
]
Right = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of the right images of rectified stereo pairs.")
]
MaskFiles = Annotated[
    Path | None,
    typer.Option("--masks", metavar="FILE|DIR", help="A mask for all frames, or masks named like them."),
]
Baseline = Annotated[
    float | None, typer.Option(metavar="METRES", help="Distance between the two stereo cameras.")
]
Window = Annotated[float | None, typer.Option(metavar="PX", help="Largest row difference of a stereo match.")]
Budget = Annotated[
    float | None, typer.Option(metavar="MS", help="Choose keypoints and layers to fit this time per frame.")
]
Rate = Annotated[
    float | None,
    typer.Option(
        "--fps",
        metavar="FPS",
        help="Frame rate of a folder; by default from the timestamps in its file names, else 10.",
    ),
]
Frames = Annotated[int | None, typer.Option("--frames", metavar="N", min=1, help="Stop after N frames.")]
Outputs = Annotated[
    list[Path] | None,
    typer.Option(
        "--output",
        metavar="FILE.npz|.tum|.kitti|.rrd",
        help="Save tracks (.npz), a trajectory (.tum, .kitti) or a rerun recording (.rrd; with --map also of "
        "the path before and after loops, DIR/trajectory.rrd); repeatable.",
    ),
]
Truth = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Ground-truth poses in KITTI or TUM format to compare with."),
]
Plot = Annotated[
    Path | None, typer.Option(metavar="FILE.png|.jpg|.pdf", help="Save a plot of the trajectory.")
]
Show = Annotated[bool, typer.Option("--show", help="Show the tracking live in the rerun viewer.")]

# Between neighbouring frames, matches of low probability give wrong tracks: the threshold is higher.
TrackerOptions = Annotated[dict[str, Any], ("geometry", "second_pass"), {"threshold": 0.2}]


def track(
    source: Where,
    given: TrackerOptions,
    camera: CameraText = None,
    right: Right = None,
    masks: MaskFiles = None,
    baseline: Baseline = None,
    epipolar_window: Window = None,
    budget_ms: Budget = None,
    rate: Rate = None,
    frames: Frames = None,
    output: Outputs = None,
    ground_truth: Truth = None,
    plot: Plot = None,
    map_dir: MapFolder = None,
    loops: LoopTimes = None,
    load_map: LoadedMap = None,
    lookup: Lookup = None,
    show_live: Show = False,
    threads: Threads = None,
    overwrite: options.Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> int:
    """Track keypoints through a video, a folder of frames or a live camera; with --camera, estimate poses.

    Trajectories hold world_from_cam, a line per frame: t x y z qx qy qz qw (.tum) or 12 numbers (.kitti). A
    live camera runs until Ctrl-C. An interrupted --map DIR is finished by `matcher track DIR --map DIR`.
    """
    asked = {**locals()}
    options.limit_threads(threads)
    leave_a_core(map_dir, loops, load_map, lookup, budget_ms=budget_ms, engine=given.get("engine"))
    from matcher.cli.collection import follow
    from matcher.sequence.capture import open_frames
    from matcher.sequence.tracker import Tracker

    if is_unfinished(source, map_dir):
        return finish_map(map_dir, asked)
    pinhole = options.parse_camera(camera, "--camera")
    truth = _check(output or [], plot, ground_truth, pinhole, right, baseline, epipolar_window, overwrite)
    keyframes = keyframe_map(map_dir, pinhole, given, loops=loops, budget_ms=budget_ms, overwrite=overwrite)
    frames_in = open_frames(source, right, rate, masks)
    how = dict(camera=pinhole, baseline=baseline, budget_ms=budget_ms, epipolar_window=epipolar_window)
    tracker = Tracker(keyframe_map=keyframes, **how, **given)
    with maps_of(tracker, load_map, lookup), _recordings(output or [], show_live, load_map) as recordings:
        log, failures, ended = follow(frames_in, tracker, frames, right is not None, recordings)
        finish_in_map(tracker, log, recordings, in_map=load_map is not None, wait=ended is None)
    with kept_if_full(tracker):
        code = _finish(log, tracker, failures, truth, right is not None, output or [], plot, as_json)
    save_map(tracker, terminated=ended is not None, outputs=output or [])
    return code if ended is None else ended


def _check(
    outputs: list[Path],
    plot: Path | None,
    truth: Path | None,
    camera: Camera | None,
    right: Path | None,
    baseline: float | None,
    epipolar_window: float | None,
    overwrite: bool,
) -> tuple[Any, Any] | None:
    """The true poses; refuses, before any work, outputs that cannot be written and options without others."""
    from matcher.errors import UsageError
    from matcher.files import check_output
    from matcher.sequence.capture import read_poses

    for path in outputs:
        check_output(path, SUFFIXES, overwrite=overwrite)
    if plot is not None:
        from matcher.sequence.plot import PLOT_SUFFIXES

        check_output(plot, PLOT_SUFFIXES, overwrite=overwrite)
    if epipolar_window is not None and right is None:
        raise UsageError("--epipolar-window is of rectified pairs: give --right and --baseline, too")
    if (right is None) != (baseline is None):
        raise UsageError(
            "--right and --baseline must be given together: rectified pairs and the cameras' distance"
        )
    needing = {"--right": right, "--ground-truth": truth, "--plot": plot}
    trajectories = (path for path in outputs if path.suffix.lower() in (".tum", ".kitti"))
    needing["a trajectory"] = next(trajectories, None)
    for name, value in needing.items():
        if value is not None and camera is None:
            raise UsageError(f"{name} needs poses, and poses need --camera fx,fy,cx,cy")
    return None if truth is None else read_poses(truth)


@contextmanager
def _recordings(outputs: list[Path], show: bool, load_map: Path | None) -> Iterator[list[Recording]]:
    """Recordings that are written or shown, with the loaded map; files appear only if all goes well."""
    paths: list[Path | None] = [path for path in outputs if path.suffix.lower() == ".rrd"]
    paths += [None] if show else []
    recordings: list[Recording] = []
    try:
        if paths:
            from matcher.sequence.plot import Recording

            loaded = None if load_map is None else sparse_map_of(load_map)
            recordings += [Recording(path, loaded) for path in paths]
        yield recordings
    except BaseException:
        for recording in recordings:
            recording.discard()
        raise
    for recording in recordings:
        recording.close()


def _finish(
    log: TrackingLog,
    tracker: Tracker,
    failures: int,
    truth: tuple[Any, Any] | None,
    stereo: bool,
    outputs: list[Path],
    plot: Path | None,
    as_json: bool,
) -> int:
    """Measure, write and print; the exit code."""
    import json

    from matcher.files import write_output
    from matcher.sequence.capture import write_trajectory

    rows, stamps, poses = log.trajectory()
    compared = None if truth is None else log.compared_with(*truth, with_scale=not stereo)
    for path in outputs:
        if path.suffix.lower() == ".npz":
            write_output(path, log.as_npz())
        elif path.suffix.lower() != ".rrd":
            _need_poses(log, poses)
            write_trajectory(path, stamps, poses, frames=len(log))
    found = as_object(log, tracker, len(rows), compared)
    if plot is not None:
        _draw(plot, log, compared, poses, stereo, title_of(found))
    if as_json:
        show(json.dumps(found, allow_nan=False), always=True)
    else:
        show(summary_of(found))
        for path in [*outputs, *([plot] if plot is not None else [])]:
            show(f"wrote {path}")
    return PARTIAL if failures else 0


def _draw(
    path: Path, log: TrackingLog, compared: tuple[Any, Any, Any] | None, poses: Any, stereo: bool, title: str
) -> None:
    from matcher.sequence.plot import plot_trajectory

    _need_poses(log, poses)
    found, true = (poses, None) if compared is None else compared[:2]
    marked = log.keyframe_rows() if len(found) == len(poses) else []
    unit = "m" if stereo or compared is not None else "first baselines"
    plot_trajectory(path, found, true, keyframes=marked, unit=unit, title=title)


def _need_poses(log: TrackingLog, poses: Any) -> None:
    from matcher.errors import ImageError, IntegrityError

    if len(poses) > 0:
        return
    if log.in_map and log.problem is not None:
        raise IntegrityError("no frame has a pose in the map, since what is written above went wrong")
    if log.in_map and log.localized:
        raise ImageError(
            f"too few frames were localised ({log.localized}) or too near each other to say the map's unit: "
            "give more frames, of a camera that moves further, or stereo pairs (--right)"
        )
    if log.in_map:
        raise ImageError("no frame has a pose in the map: is it of another place, or --camera a wrong one?")
    raise ImageError("no frame has a pose, so there is no trajectory; are the images black or blurred?")
