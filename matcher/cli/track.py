"""`matcher track`: keypoints, poses and maps of frames in order."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matcher
from matcher.cli.options import Count, check_outputs, loading, parse_camera
from matcher.cli.output import PARTIAL, complain, exit_code_of, say, show, whole_step
from matcher.errors import ImageError, IntegrityError, UsageError, few
from matcher.files import write_output
from matcher.viz import PLOT_SUFFIXES

if TYPE_CHECKING:
    from matcher.sequence.capture import FrameSource
    from matcher.sequence.keyframe_map import ClosedTrajectory
    from matcher.sequence.plot import Recording
    from matcher.sequence.trajectory import TrackingLog

SUFFIXES = (".npz", ".tum", ".kitti", ".rrd")


def track(
    source: str,
    /,
    # Between neighbouring frames, matches of low probability give wrong tracks: the threshold is higher.
    given: loading("geometry", "further_passes", match_threshold=0.2),
    camera: str | None = None,
    right: Path | None = None,
    masks: Path | None = None,
    baseline: float | None = None,
    epipolar_window: float | None = None,
    budget_ms: float | None = None,
    fps: float | None = None,
    frames: Count | None = None,
    output: list[Path] | None = None,
    ground_truth: Path | None = None,
    bridged: bool = False,
    plot: Path | None = None,
    map_: Path | None = None,
    load_map: Path | None = None,
    show_: bool = False,
    threads: Count | None = None,
    overwrite: bool = False,
    json_: bool = False,
) -> int:
    """Track keypoints through a video, a folder of frames or a live camera; with --camera, estimate poses.

    Trajectories hold world_from_cam, a line per frame: t x y z qx qy qz qw (.tum) or 12 numbers (.kitti). A
    live camera runs until Ctrl-C. An interrupted --map DIR is finished by `matcher track DIR --map DIR`.
    If frames cannot be read or most get no measured pose, the exit code is 4.

    Args:
        source (VIDEO|FOLDER|CAMERA_INDEX): Video file, folder of frames, or index of a live camera.
        camera (fx,fy,cx,cy|MODEL,w,h,…|FILE): Intrinsics in stored pixels; needed for poses. {CAMERAS}
        right (DIR): Folder of the right images of rectified stereo pairs.
        masks (FILE|DIR): A mask for all frames, or masks named like them.
        baseline (METRES): Distance between the two stereo cameras; by default as KITTI's calib.txt, given as
            --camera, says.
        epipolar_window (PX): Largest row difference of a stereo match.
        budget_ms (MS): Choose keypoints and layers to fit this time per frame.
        fps (FPS): Frame rate of a folder; by default from the times in its file names or in times.txt,
            timestamps.txt, data.csv or rgb.txt there or beside it, else 10.
        frames (N): Stop after N frames.
        output (FILE.npz|.tum|.kitti|.rrd): Save tracks (.npz), a trajectory (.tum, .kitti) or a rerun
            recording (.rrd; with --map also of the path before and after loops, DIR/trajectory.rrd);
            repeatable.
        ground_truth (FILE): Ground-truth poses in KITTI or TUM format to compare with.
        bridged: Also write poses that were not measured, where tracking was lost: the motion before,
            extrapolated. A comment in the file lists them.
        plot (FILE.png|.jpg|.pdf): Save a plot of the trajectory.
        map_ (DIR): Folder to create for a map of the keyframes, with loops closed; `matcher localize
            DIR/model PHOTOS` and --load-map DIR then localise in it. Needs the sfm extra.
        load_map (DIR): Map of an earlier run, or a model: trajectories, plots and ground truth are then in
            its coordinates. Tracking waits while a keyframe is localised.
        show_: Show the tracking live in the rerun viewer.
    """
    asked, outputs = {**locals()}, output or []
    from matcher.cameras import read_baseline
    from matcher.export.colmap import import_pycolmap
    from matcher.sequence.capture import open_frames
    from matcher.sequence.keyframe_map import KEPT
    from matcher.sequence.trajectory import read_poses

    if plot or map_ or show_ or any(path.suffix.lower() == ".rrd" for path in outputs):
        from matcher.sequence.plot import Recording  # which imports matplotlib

    if map_ is not None and os.path.realpath(source) == os.path.realpath(map_):
        return _finish_map(map_, asked)
    # All that can be refused is refused before any work.
    pinhole = parse_camera(camera, "--camera")
    trajectory = next((path for path in outputs if path.suffix.lower() in (".tum", ".kitti")), None)
    if right is not None and baseline is None and camera is not None:
        baseline = read_baseline(Path(camera).expanduser(), Path(source), right)
        if baseline is not None:
            say(f"the baseline is {baseline:.6g}, by {camera}")
    if right is not None and baseline is None:
        raise UsageError("--right needs --baseline METRES, the distance of the cameras of rectified pairs")
    if right is None and (baseline is not None or epipolar_window is not None):
        name = "--epipolar-window" if baseline is None else "--baseline"
        raise UsageError(f"{name} needs --right, the folder of the right images of rectified pairs")
    if bridged and trajectory is None:
        raise UsageError("--bridged needs a trajectory to write them to: --output FILE.tum or .kitti")
    of_poses = {"--right": right, "--ground-truth": ground_truth, "--plot": plot, "a trajectory": trajectory}
    for name, value in (of_poses | {"--map": map_, "--load-map": load_map}).items():
        if value is not None and camera is None:
            raise UsageError(f"{name} needs poses, and poses need --camera fx,fy,cx,cy")
    check_outputs([*((path, SUFFIXES) for path in outputs), (plot, PLOT_SUFFIXES)], overwrite=overwrite)
    truth, keyframes = None if ground_truth is None else read_poses(ground_truth), None
    if map_ is not None:
        if (map_ / KEPT).is_file() and not overwrite:
            raise UsageError(
                f"{map_} holds the keyframes of a run that was interrupted: `matcher track {map_} --map "
                f"{map_}` makes the map of them, and --overwrite starts anew"
            )
        import_pycolmap()
        options = {name: value for name, value in given.items() if name != "match_threshold"}
        keyframes = matcher.KeyframeMap(map_, pinhole, overwrite=overwrite, **options)
    frames_in = open_frames(source, right, fps, masks)
    for note in frames_in.notes:
        complain(note)
    numbers = None if truth is None or truth[0] is not None else _true_rows(frames_in, len(truth[1]))
    how = dict(camera=pinhole, baseline=baseline, budget_ms=budget_ms, epipolar_window=epipolar_window)
    tracker = matcher.Tracker(keyframe_map=keyframes, **how, **given)
    try:
        if load_map is not None:
            tracker.load_map(load_map)
        with ExitStack() as stack:  # of recordings, which appear only if all goes well
            paths = [*(path for path in outputs if path.suffix.lower() == ".rrd"), *[None] * show_]
            place = stack.enter_context(matcher.Map.open(load_map)) if load_map and paths else None
            model = None if place is None else place.model
            recordings = [stack.enter_context(Recording(path, model)) for path in paths]
            log, failures, ended = _follow(frames_in, tracker, frames, recordings)
        if tracker.problem is not None:
            complain(f"in the map: {tracker.problem}")
        log.in_map = load_map is not None
        log.map_poses |= tracker.late_poses_in_map()
        failures += _finish(log, tracker, asked, truth, numbers)
    except BaseException:  # a full disk, or no pose in the map
        if keyframes is not None and keyframes.folder.is_dir():
            _say_kept(keyframes)
        raise
    finally:
        tracker.unload_map()
    if keyframes is not None and ended is not None:  # asked to end at once, so the map is made later
        _say_kept(keyframes)
    elif keyframes is not None:
        closed = _closed(keyframes, tracker.save_map)
        if any(path.suffix.lower() == ".rrd" for path in outputs):
            say(f"wrote {closed.record(keyframes.folder / 'trajectory.rrd', overwrite=True)}")
    return ended if ended is not None else PARTIAL if failures else 0


def _follow(
    source: FrameSource, tracker: matcher.Tracker, limit: int | None, recordings: list[Recording]
) -> tuple[TrackingLog, int, int | None]:
    """Push every frame; one that cannot be read counts as dropped. Ctrl-C ends the source, not the run.

    Returns what was tracked, frames that could not be read, and the exit code where tracking was ended.
    """
    from matcher.sequence.trajectory import TrackingLog

    log, failures, ended = TrackingLog(), 0, None
    try:
        for shot in source:
            if shot.image is None:
                complain(f"{shot.name}: no image, or no right one of this name; the frame is skipped")
            with whole_step():  # a frame is in all that is kept, or in nothing
                try:
                    if shot.right is None:
                        result = tracker.push(shot.image, shot.timestamp, mask=shot.mask)
                    else:
                        result = tracker.push_stereo(shot.image, shot.right, shot.timestamp, mask=shot.mask)
                except (ImageError, UsageError) as error:
                    if isinstance(error, UsageError) and not len(log):  # a mask of them all, or an option
                        raise
                    complain(f"{error}; the frame is skipped")
                    failures += 1
                    result = tracker.push(None, shot.timestamp)
                log.add(result, shot.name)
                for recording in recordings:
                    recording.add(result, None if result.passed_over else tracker.pipeline.read(shot.image))
            if limit is not None and len(log) >= limit:
                break
    except KeyboardInterrupt:
        say("stopped")
    except SystemExit as stop:  # SIGTERM
        say("terminated")
        ended = int(stop.code or 0)
    except OSError as error:  # a full disk ends tracking, and what was tracked is written all the same
        ended = exit_code_of(error)
    if source.problem is not None:
        complain(str(source.problem))
        failures += 1
    if not any(log.counts().get(status) for status in ("first", "tracked", "lost", "blank")):
        if ended is not None:
            sys.exit(ended)
        raise ImageError(f"{source.name}: no frame could be read")
    return log, failures, ended


def _true_rows(source: FrameSource, count: int) -> list[int] | None:
    """Rows, in a file of `count` true poses without times, of the frames; None: they are in order."""
    numbers = source.numbers
    if numbers is not None and len(set(numbers)) == len(numbers) and max(numbers) < count:
        return numbers
    if source.count not in (None, count):
        complain(
            f"--ground-truth has {count} poses without times, {source.name} {source.count} frames: the first "
            "pose is taken for the first frame, and so on; name frames by their rows, from 0, or give TUM's"
        )
    return None


def _finish(
    log: TrackingLog,
    tracker: matcher.Tracker,
    asked: Mapping[str, Any],
    truth: tuple[Any, Any] | None,
    numbers: list[int] | None,
) -> int:
    """Measure, write and print; `asked`: all parameters of the command. How many outputs failed: one does not
    keep others from being made."""
    outputs, plot, stereo = asked["output"] or [], asked["plot"], asked["right"] is not None
    rows, _, poses = log.trajectory()
    compared, failed, unwritten = None, 0, []
    why = log.why_no_poses(tracker.camera)
    for path in (path for path in outputs if path.suffix.lower() == ".npz"):
        write_output(path, log.as_npz())
    trajectories = [path for path in outputs if path.suffix.lower() in (".tum", ".kitti")]
    if (trajectories or plot is not None) and not len(rows):
        if not log.in_map:
            why = why or "are the images black or blurred?"
            raise ImageError(f"no frame has a pose, so there is no trajectory; {why}")
        if tracker.problem is not None:
            raise IntegrityError("no frame has a pose in the map, since what is written above went wrong")
        raise ImageError(
            f"no frame has a pose in the map, and {tracker.localized_in_map} were localised: is it of "
            "another place, --camera a wrong one, or did one camera move too little to say the map's unit?"
        )
    for path in trajectories:
        try:
            log.write(path, bridged=asked["bridged"])
        except UsageError as error:  # KITTI's lines where a frame has no pose
            complain(str(error))
            unwritten.append(path)
    try:
        if truth is not None:
            compared = log.compared_with(*truth, with_scale=not stereo, numbers=numbers)
    except UsageError as error:
        complain(f"--ground-truth: {error}")
        failed = 1
    failed += len(unwritten) + (why is not None or (log.in_map and not len(rows)))
    choice, segments = tracker.choice, [] if compared is None else compared[2]
    bridged = len(log.trajectory(bridged=True)[0]) - len(rows)
    if breaks := log.breaks():
        unit = "" if stereo else ", in a unit of length of their own"
        again = log.breaks(back=True)
        back = f"; from frame {few(again)} on they are again relative to the first" if again else ""
        complain(
            f"tracking was lost before frame {few(breaks)}: from there on poses are relative to an "
            f"extrapolated one{unit}, and parts of the path may lie apart{back}"
        )
    if why is not None:
        complain(f"most frames have no measured pose: {why}")
    times = tracker.latency().items()
    facts = {
        "preset": tracker.pipeline.preset,
        "frames": len(log),
        "statuses": log.counts(),
        "poses": len(rows),
        "bridged": bridged,
        "breaks": breaks,
        **({"in_map": True} if log.in_map else {}),
        "mean_track_length": round(log.mean_track_length(), 3),
        "choice": None if choice is None else {**vars(choice), "text": str(choice)},
        "milliseconds": {stage: {key: round(row[key], 2) for key in row} for stage, row in times},
        "segments": None if compared is None else [vars(error) for error in segments],
    }
    if plot is not None:
        from matcher.sequence.plot import plot_trajectory

        found, true = (poses, None) if compared is None else compared[:2]
        whole = len(found) == len(poses)
        marked = log.keyframe_rows() if whole else []
        lost = [row for row, frame in enumerate(rows.tolist()) if whole and frame in breaks]
        unit = "m" if stereo or compared is not None else "first baselines"
        errors = ", ".join(
            f"{100 * e.translation:.2f} % and {e.rotation:.4f} °/m over {e.length:.0f} m" for e in segments
        )
        title = f"{facts['preset']}, {len(rows)} of {len(log)} frames" + (f": {errors}" if errors else "")
        plot_trajectory(plot, found, true, keyframes=marked, breaks=lost, unit=unit, title=title)
    if asked["json_"]:
        show(json.dumps(facts, allow_nan=False), always=True)
        return failed
    statuses = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in log.counts().items())
    extrapolated = f", {bridged} with an extrapolated one" if bridged else ""
    show(f"{len(log)} frames ({statuses}), {len(rows)} with a measured pose{extrapolated}")
    show(f"mean length of tracks over two or more frames: {log.mean_track_length():.2f} frames")
    if log.in_map:
        show(f"{len(rows)} of {len(log)} frames have a pose in the map")
    if choice is not None:
        show(str(choice))
    for e in segments:
        errors = f"{100 * e.translation:.2f} % translation, {e.rotation:.4f} degrees per metre"
        lost = f" ({e.left_out} more are left out, as tracking was lost within)" if e.left_out else ""
        show(f"{e.count} segments of {e.length:.0f} m: {errors}{lost}")
    for stage, row in times:
        show(f"{stage:8}{row['p50']:8.1f} ms median{row['p95']:8.1f} ms 95th percentile")
    for path in filter(None, (*outputs, plot)):
        if path not in unwritten:
            show(f"wrote {path}")
    return failed


# --- The map that the command makes.


def _closed(keyframes: matcher.KeyframeMap, close: Callable[[], ClosedTrajectory]) -> ClosedTrajectory:
    """Make the map of the keyframes and say what it says; they are kept where that is interrupted."""
    try:
        closed = close()
    except (KeyboardInterrupt, SystemExit):
        _say_kept(keyframes)
        raise
    moved = closed.moved()
    loops = f"{len(closed.loops)} pairs of keyframes close loops" if closed.loops else "no loop was found"
    if closed.alike:
        loops += f", {closed.alike} pairs only look alike and are left out, as the path says"
    loops += "" if closed.problem is None else f" ({closed.problem})"
    say(
        f"map of the keyframes: {closed.folder}; {loops}; poses moved by {moved.mean():.3f} on average, "
        f"{moved.max():.3f} at most ({closed.folder.parent / 'trajectory.tum'})"
    )
    if closed.left_out:
        complain(
            f"the map is without {len(closed.left_out)} frames ({few(closed.left_out)}): tracking was lost "
            "between them and the rest, and no keyframes show one place; track both with views in between"
        )
    return closed


def _say_kept(keyframes: matcher.KeyframeMap) -> None:
    folder = keyframes.folder
    again = f"`matcher track {folder} --map {folder}`"
    try:
        frames, count = keyframes.keep()
    except OSError as error:
        complain(
            f"{folder}: the last poses and keyframes could not be kept there ({error}); make room, and "
            f"{again} makes a map of those before, if any were kept"
        )
        return
    if frames:
        complain(f"kept in {folder}: {frames} poses and {count} keyframes, without a map: {again} makes it")


def _finish_map(folder: Path, asked: Mapping[str, Any]) -> int:
    """Make the map of the keyframes that an interrupted run kept; `asked`: all parameters of the command."""
    keyframes = matcher.KeyframeMap.resume(folder)
    idle = {**asked, **asked["given"], "source": None, "map_": None, "threads": None, "given": None}
    typed = [name for name, value in idle.items() if value not in (None, False, [])]
    if given := sorted(f"--{name.strip('_').replace('_', '-')}" for name in typed):
        raise UsageError(
            f"{folder} is finished with the camera and options that it was begun with: leave out "
            f"{', '.join(given)}"
        )
    _closed(keyframes, keyframes.finish)
    return 0
