"""`matcher collection`, `matcher status` and `matcher merge`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from matcher.cli import options
from matcher.cli.options import PARTIAL, complain, exit_code_of, say, show, stage_progress, whole_step
from matcher.export.formats import FORMATS

if TYPE_CHECKING:
    from matcher.collection.collection import Collection
    from matcher.collection.runner import StageProgress
    from matcher.collection.sources import PairChoice
    from matcher.collection.store import Store
    from matcher.export.colmap import CameraChoice
    from matcher.sequence.capture import FrameSource, SourceFrame, TrackingLog
    from matcher.sequence.plot import Recording
    from matcher.sequence.tracker import Tracker
    from matcher.sfm.growing import MorePairs


# --- collecting: What `matcher collection` and `matcher sfm` share: options, and the steps from images to
# matched pairs.

_SHOWN_COLLECTING = 5  # failures that are printed
_TILED_KEYPOINTS = 20_000  # of a photo, by tiles

PairFile = Annotated[
    Path | None,
    typer.Option("--pairs", metavar="FILE", help="Match the pairs listed in FILE, two names per line."),
]
Exhaustive = Annotated[bool, typer.Option("--exhaustive", help="Match every pair of images.")]
Sequential = Annotated[
    int | None,
    typer.Option("--sequential", metavar="K", min=1, help="Match each image with the next K by name."),
]
Similar = Annotated[
    int | None,
    typer.Option("--similar", metavar="K", min=1, help="Match each image with the K most similar ones."),
]
Preemptive = Annotated[
    int | None,
    typer.Option(
        "--preemptive",
        metavar="K",
        min=1,
        help="Of each image's K most similar ones, match those whose strongest keypoints agree.",
    ),
]
Nearby = Annotated[
    int | None,
    typer.Option(
        "--nearby",
        metavar="K",
        min=1,
        help="Match each photo with the K nearest ones, by the GPS positions of their EXIF headers.",
    ),
]
Tiles = Annotated[
    bool,
    typer.Option(
        "--tiles",
        help="For large photos: find keypoints by tiles at full resolution, by default 20000 per photo.",
    ),
]
FeaturesFile = Annotated[
    Path | None,
    typer.Option(
        "--features", metavar="FILE.h5", help="Use existing keypoints and descriptors, in hloc's HDF5 layout."
    ),
]
Masks = Annotated[
    Path | None,
    typer.Option(
        "--masks", metavar="DIR", help="Masks named like the images; black pixels yield no keypoints."
    ),
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        metavar="PATTERN",
        help="Use only these images: a name, FOLDER/, a glob or @LIST.txt; repeatable.",
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude", metavar="PATTERN", help="Leave these images out; same patterns as --include; repeatable."
    ),
]
WorkerCount = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        min=0,
        help="Worker processes; by default one per core or GPU. 0 uses this process.",
    ),
]
Restart = Annotated[bool, typer.Option("--restart", help="Delete the contents of RUN_DIR and start over.")]


def with_tiles(given: dict[str, Any]) -> dict[str, Any]:
    """The options with keypoints by tiles: --max-keypoints are those of a photo, not of a tile."""
    rest = {name: value for name, value in given.items() if name != "max_keypoints"}
    return {**rest, "tiles": given.get("max_keypoints", _TILED_KEYPOINTS)}


def choose_pairs(pairs: Path | None, exhaustive: bool, **counts: int | None) -> dict[str, Any]:
    """How pairs are chosen, as arguments of `Collection.add_pairs`; empty without an option."""
    choice = dict(file=pairs, exhaustive=exhaustive or None, **counts)
    choice = {name: value for name, value in choice.items() if value is not None}
    if len(choice) > 1:
        others = ", ".join(f"--{name}" for name in counts)
        raise typer.BadParameter(f"give one of --pairs, --exhaustive, {others}")
    return choice


def enter_images(opened: Collection, images: Path, **how: Any) -> None:
    """Add the images of a folder (`how`: arguments of `Collection.add_images`) and report changes."""
    changes = opened.add_images(images, **how)
    if changes.masked is not None:
        say(f"{changes.masked} of {changes.images} images have a mask")
    if changes.changed:
        have = "have" if changes.changed > 1 else "has"
        say(f"{_count(changes.changed, 'image')} {have} changed and will be extracted and matched again")
    if changes.gone:
        say(
            f"no longer in {images}, or not selected: {_count(changes.gone, 'image')} of the run; existing "
            "matches are kept (--restart deletes them)"
        )
    if changes.unusable:
        some = ", ".join(changes.unusable[:_SHOWN_COLLECTING])
        say(f"left out because their names cannot be stored: {_count(len(changes.unusable), 'file')}: {some}")


def is_run(source: Path) -> bool:
    """Whether a folder holds a store rather than photos."""
    from matcher.collection.schema import DATABASE

    return (source / DATABASE).is_file()


def apart_from(out: Path, run: Path) -> Path:
    """The folder of a run; `UsageError` where it is that of the model."""
    from matcher.errors import UsageError

    if run.resolve() == out.resolve():
        raise UsageError(f"--run and --out are one folder, {out}; name another one for the run")
    return run


def match_pairs(opened: Collection, choice: dict[str, Any], limits: dict[str, int], **how: bool) -> int:
    """Add pairs, match all that are waiting, and print a summary.

    Args:
        opened: a collection with its images.
        choice: from `choose_pairs`; if empty, as in the run so far, or by the number of images.
        limits: on that number, as arguments of `Collection.suggest_pairs`.
        how: arguments of `Collection.run`.

    Returns:
        The exit code.

    Raises:
        UsageError: the run holds no pair, and a list names none or there is one image.
    """
    with stage_progress() as update:
        _enter_pairs(opened, choice or _suggested(opened, limits), update)
        report = opened.run(on_progress=update, **how)
    code = show_status(opened.run_dir)
    if report.crashes:
        died = _count(report.crashes, "worker process", "worker processes")
        say(f"{died} crashed and had to be replaced; the interrupted work was tried again")
        code = PARTIAL
    return code


@contextmanager
def further_pairs(opened: Collection) -> Iterator[MorePairs]:
    """What matches more pairs of a run where preemptive matching was too sparing, and says so."""
    from matcher.sfm.growing import MorePairs

    with stage_progress() as update:
        yield MorePairs(opened, on_round=say_round, on_progress=update)


def say_round(images: int, pairs: int) -> None:
    """Say that more pairs are matched because some images have no pose."""
    lack = f"{_count(images, 'image')} {'have' if images > 1 else 'has'} no pose"
    say(f"{lack}: {_count(pairs, 'more pair')} matched, then all is mapped again")


def _suggested(opened: Collection, limits: dict[str, int]) -> dict[str, Any]:
    """Pairs for images that have none, chosen without an option."""
    suggested = opened.suggest_pairs(**limits)
    if suggested is None:
        return {}
    say(suggestion(suggested, opened.counts().images))
    return {"pairs": suggested} if suggested.arguments() else {}


def _option_of(choice: PairChoice) -> str:
    """The option that makes this choice."""
    return f"--{choice.method}" if choice.neighbours is None else f"--{choice.method} {choice.neighbours}"


def suggestion(choice: PairChoice, images: int) -> str:
    """Why these pairs were chosen, for the user."""
    if not choice.arguments():
        return (
            "some images have no pair, and this run took its pairs from a list: use --pairs, --exhaustive, "
            "--sequential, --similar, --preemptive or --nearby to match them"
        )
    if not choice.by_default:
        return f"new images are paired like the others: {_option_of(choice)}"
    what = "exhaustively" if choice.neighbours is None else "each with the most similar ones"
    what += ", where the strongest keypoints agree" if choice.method == "preemptive" else ""
    return f"no pairs were chosen, so the {images} images are matched {what} ({_option_of(choice)})"


def _enter_pairs(opened: Collection, choice: dict[str, Any], update: Callable[[StageProgress], None]) -> None:
    from matcher.collection.pairs import FaultTally

    if not choice:
        return
    faults = FaultTally()
    total, new = opened.add_pairs(**choice, on_fault=faults, on_progress=update)
    known = f", {total - new} of them already in the run" if total > new else ""
    say(f"{_count(total, 'pair')}{known}")
    for line in faults.lines():
        say(f"{choice['file']}: {line}")
    if total == 0:
        _refuse_nothing(opened, choice)


def _refuse_nothing(opened: Collection, choice: dict[str, Any]) -> None:
    """`UsageError` where a run has no pair and a list names none; a part of the pairs may have none."""
    from matcher.collection.store import Store
    from matcher.errors import UsageError

    with Store.open(opened.run_dir) as store:
        counts, part = store.counts(), store.settings.get("shard")
    if counts.pairs or part is not None:
        return
    if counts.images < 2:
        raise UsageError(f"there is nothing to match with {_count(counts.images, 'image')}; add others")
    if "file" in choice:
        raise UsageError(
            f"{choice['file']} names no pair of these images: it needs two names a line, separated by a space"
        )


def show_status(run: Path, *, check: bool = False, tracks: bool = False) -> int:
    """Print the state of a run and return the matching exit code."""
    from matcher.collection.store import Store
    from matcher.errors import IntegrityError

    with Store.open(run) as store:
        counts, settings = store.counts(), store.settings
        show(f"{run}: {settings.get('preset', 'a run')}, images of {store.image_folder}")
        show(
            f"images: {counts.images_done} done, {counts.images_failed} failed, "
            f"{counts.images_waiting} waiting"
        )
        lost = {image.name: image.reason for image in store.images() if image.status == "failed"}
        for name, reason in list(lost.items())[:_SHOWN_COLLECTING]:
            show(f"  failed: {name}: {reason}")
        show(f"pairs: {counts.pairs_done} done, {counts.pairs_failed} failed, {counts.pairs_waiting} waiting")
        for line in _failed_pairs(store, set(lost)):
            show(f"  failed: {line}")
        if tracks:
            show(_track_line(store))
        if check:
            faults = store.check()
            if faults:
                raise IntegrityError(f"{run} is damaged: {'; '.join(faults[:_SHOWN_COLLECTING])}")
            show("nothing is damaged")
    return PARTIAL if counts.images_failed or counts.pairs_failed else 0


def _failed_pairs(store: Store, lost: set[str]) -> list[str]:
    """One line per reason for failure; one for all pairs with a failed image."""
    with_lost, first, counts = 0, {}, Counter()
    for pair in store.failed():
        if lost & {pair.name0, pair.name1}:
            with_lost += 1
        else:
            first.setdefault(pair.reason, f"{pair.name0} and {pair.name1}")
            counts[pair.reason] += 1
    lines = [f"{_count(with_lost, 'pair')} with a failed image"] if with_lost else []
    for reason, count in counts.most_common(_SHOWN_COLLECTING):
        others = f" and {_count(count - 1, 'other pair')}" if count > 1 else ""
        lines.append(f"{first[reason]}{others}: {reason}")
    return lines


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _track_line(store: Store) -> str:
    from matcher.collection.tracks import tracks_of

    tracks = tracks_of(store)
    longest = int(tracks.lengths.max()) if len(tracks) else 0
    return (
        f"tracks: {len(tracks)}, of {tracks.mean_length:.2f} images on average and {longest} at most; "
        f"{tracks.conflicts} matches contradict others"
    )


# --- collection: `matcher collection`, `matcher status` and `matcher merge`.

RunDir = Annotated[
    Path, typer.Option("--run", metavar="RUN_DIR", help="Folder for the results; it can be continued.")
]
Threads = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Threads per worker; by default cores / workers.")
]
Shard = Annotated[
    str | None,
    typer.Option(metavar="i/n", help="Match only part i of n; join the parts with `matcher merge`."),
]
EngineChoice = Annotated[
    Literal["torch", "onnx", "ray", "local"],
    typer.Option(
        "--engine",
        help="Library that runs front end and networks, in local processes; ray: torch on a Ray cluster.",
    ),
]
CameraText = Annotated[
    str | None,
    typer.Option(
        metavar="fx,fy,cx,cy",
        help="Intrinsics of every image in pixels, for --geometry essential and exports.",
    ),
]
RetryFailed = Annotated[
    bool, typer.Option("--retry-failed", help="Retry images and pairs that failed before.")
]
Descriptors = Annotated[
    bool,
    typer.Option("--descriptors", help="Extract every image, even those whose descriptors were deleted."),
]
CollectionOptions = Annotated[dict[str, Any], ("second_pass", "engine"), {}]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False, help="Folder of a run.")]


def collection(
    images: Annotated[Path, typer.Argument(metavar="IMAGES", show_default=False, help="Folder of images.")],
    run: RunDir,
    given: CollectionOptions,
    pairs: PairFile = None,
    exhaustive: Exhaustive = False,
    sequential: Sequential = None,
    similar: Similar = None,
    preemptive: Preemptive = None,
    nearby: Nearby = None,
    include: Include = None,
    exclude: Exclude = None,
    features: FeaturesFile = None,
    masks: Masks = None,
    tiles: Tiles = False,
    camera: CameraText = None,
    workers: WorkerCount = None,
    threads: Threads = None,
    engine: EngineChoice = "torch",
    shard: Shard = None,
    restart: Restart = False,
    retry_failed: RetryFailed = False,
    descriptors: Descriptors = False,
) -> int:
    """Match the images of a folder: extract every image once, match every pair once, verify the geometry.

    Choose the pairs with --pairs, --exhaustive, --sequential, --similar, --preemptive or --nearby. By
    default, up to 50 images are matched exhaustively; in a larger folder, each image is matched with the 20
    most similar ones. Finished work stays in RUN_DIR: run the same command again to continue after an
    interruption, or to match images that were added or changed.
    """
    from matcher.collection.collection import Collection
    from matcher.collection.workers import Workers

    counts = dict(sequential=sequential, similar=similar, preemptive=preemptive, nearby=nearby)
    choice = choose_pairs(pairs, exhaustive, **counts)
    pinhole = options.parse_camera(camera, "--camera")
    _check_camera(given.get("geometry"), camera, run)
    processes = engine if engine == "ray" else "local"
    means = dict(workers=Workers(processes, workers, threads), camera=pinhole)
    given["engine"] = "onnx" if engine == "onnx" else "torch"
    given = with_tiles(given) if tiles else given
    opened = Collection.open(run, shard=shard, **means, **given)
    selection = dict(include=include or (), exclude=exclude or ())
    enter_images(opened, images, masks=masks, features=features, restart=restart, **selection)
    return match_pairs(opened, choice, {}, retry_failed=retry_failed, everything=descriptors)


def _check_camera(geometry: str | None, camera: str | None, run: Path) -> None:
    """Refuse a new run that could not verify any pair; an existing run may already have cameras."""
    from matcher.collection.schema import DATABASE
    from matcher.errors import UsageError

    if geometry == "essential" and camera is None and not (run / DATABASE).exists():
        raise UsageError("--geometry essential needs --camera fx,fy,cx,cy, in pixels of the stored images")


def status(
    run: RunArgument,
    check: Annotated[
        bool, typer.Option("--check", help="Read all stored data and check it for damage.")
    ] = False,
    tracks: Annotated[
        bool,
        typer.Option("--tracks", help="Build tracks from the verified matches and print their statistics."),
    ] = False,
) -> int:
    """Print the progress of a run and what failed, also while it is running."""
    return show_status(run, check=check, tracks=tracks)


def merge(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR...", show_default=False, help="Folders of the runs to join."),
    ],
    into: Annotated[Path, typer.Option("--into", metavar="RUN_DIR", help="Run to create or to add to.")],
    descriptors: Annotated[
        bool,
        typer.Option("--descriptors", help="Also copy descriptors, which are needed to match more pairs."),
    ] = False,
) -> int:
    """Join the runs of the parts of a collection (--shard) into one run."""
    from matcher.collection.collection import merge as join

    join(runs, into, descriptors=descriptors, on_report=say)
    return show_status(into)


# --- export: `matcher export`.

GivenCamera = Annotated[
    str | None,
    typer.Option(
        "--camera",
        metavar="fx,fy,cx,cy",
        help="Known intrinsics of every photo, in stored pixels; they are not refined.",
    ),
]
CameraModel = Annotated[
    str,
    typer.Option(
        "--camera-model",
        metavar="MODEL",
        help="COLMAP camera model where --camera is not given, such as PINHOLE, RADIAL or OPENCV.",
    ),
]
Cameras = Annotated[
    Literal["auto", "single", "each"],
    typer.Option(
        "--cameras",
        help="Photos that share a camera: those with the same size, folder and EXIF (auto), all (single) or "
        "none (each).",
    ),
]

GivenRig = Annotated[
    Path | None,
    typer.Option(
        "--rig",
        metavar="FILE",
        help="Cameras that are fixed to each other, as COLMAP's rig_config.json; pictures of one moment are "
        "named alike after the prefix of their camera.",
    ),
]


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False, help="Folder of a run.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", show_default=False, help="File or folder to create.")],
    to: Annotated[
        Literal[tuple(FORMATS)],
        typer.Option(
            "--to",
            help="Format. colmap writes a .db file and npz a .npz file; most formats fill a folder.",
        ),
    ],
    camera: GivenCamera = None,
    camera_model: CameraModel = "SIMPLE_RADIAL",
    cameras: Cameras = "auto",
    rig: GivenRig = None,
    overwrite: options.Overwrite = False,
) -> int:
    """Export the keypoints and matches of a run to the files of another program."""
    from matcher.collection.store import Store
    from matcher.export.formats import export as write

    choice = None
    if FORMATS[to].has_cameras:
        choice = camera_choice(camera, camera_model, cameras, rig)
    elif rig is not None:
        raise typer.BadParameter(f"the format {to} stores no cameras", param_hint="--rig")
    elif camera is not None:
        raise typer.BadParameter(f"the format {to} stores no cameras", param_hint="--camera")
    with Store.open(run) as store:
        report = write(store, to, out, choice, overwrite=overwrite)
    for line in report.lines():
        show(line)
    show(f"wrote {out}")
    return PARTIAL if report.left_out else 0


def camera_choice(
    camera: str | None, camera_model: str, cameras: Literal["auto", "single", "each"], rig: Path | None
) -> CameraChoice:
    """The camera choice that the options describe.

    Raises:
        UsageError: the camera is not four numbers, or the file of the rig holds something else.
    """
    from matcher.cameras import read_rig_config
    from matcher.export.colmap import CameraChoice

    fixed = None if rig is None else read_rig_config(rig)
    return CameraChoice(options.parse_camera(camera, "--camera"), cameras, camera_model, rig=fixed)


# --- report: `matcher report`.

_SHOWN_REPORT = 5


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False, help="Folder of a run.")],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Page to create; by default RUN_DIR/report.html.")
    ] = None,
    pages: Annotated[
        int, typer.Option(metavar="N", min=0, help="Number of weakest pairs that get a page of their own.")
    ] = 20,
    overwrite: options.Overwrite = False,
) -> None:
    """Write an HTML report of a run: pair graph, match counts, tracks, failures and weakest pairs."""
    from matcher.explain.report import write_run_report

    written = write_run_report(run, output, pages=pages, overwrite=overwrite)
    show(f"wrote {written.index} and pages of {written.pages} pairs")
    for text in written.left_out[:_SHOWN_REPORT]:
        complain(f"no page for {text}")
    if len(written.left_out) > _SHOWN_REPORT:
        complain(f"and {len(written.left_out) - _SHOWN_REPORT} more; the page lists them")


# --- following: Frames of a source pushed to a tracker, one after the other.


def follow(
    source: FrameSource,
    tracker: Tracker,
    limit: int | None,
    stereo: bool,
    recordings: list[Recording],
) -> tuple[TrackingLog, int, int | None]:
    """Push every frame; one that cannot be read counts as dropped. Ctrl-C ends the source, not the run.

    Returns:
        What was tracked, frames that could not be read, and the exit code where tracking was ended.
    """
    from matcher.errors import ImageError
    from matcher.sequence.capture import TrackingLog

    log, failures, ended = TrackingLog(), 0, None
    try:
        for shot in source:
            with whole_step():  # a frame is in all that is kept, or in nothing
                try:
                    result = _push(tracker, shot, stereo)
                except ImageError as error:
                    complain(f"{error}; the frame is skipped")
                    failures += 1
                    result = tracker.push(None, shot.timestamp)
                log.add(result)
                for recording in recordings:
                    image = None if result.passed_over else tracker.pipeline.read(shot.image)
                    recording.add(result, image)
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


def _push(tracker: Tracker, shot: SourceFrame, stereo: bool) -> Any:
    if stereo:
        return tracker.push_stereo(shot.image, shot.right, shot.timestamp, mask=shot.mask)
    return tracker.push(shot.image, shot.timestamp, mask=shot.mask)
