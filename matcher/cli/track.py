"""`matcher track`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from matcher.cli import options
from matcher.cli.exits import PARTIAL
from matcher.cli.messages import show
from matcher.cli.track_maps import (
    LoadedMap,
    Lookup,
    LoopTimes,
    MapFolder,
    Threads,
    finish_in_map,
    finish_map,
    is_unfinished,
    kept_if_full,
    keyframe_map,
    leave_a_core,
    maps_of,
    save_map,
    sparse_map_of,
)
from matcher.cli.tracked import as_object, summary_of, title_of

if TYPE_CHECKING:
    from matcher.data.camera import Camera
    from matcher.sequence.log import TrackingLog
    from matcher.sequence.recording import Recording
    from matcher.sequence.tracker import Tracker

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
    from matcher.cli.following import follow
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
    from matcher.sequence.trajectory import read_poses

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
            from matcher.sequence.recording import Recording

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
    from matcher.sequence.trajectory import write_trajectory

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
