"""Commands for many images: `collection`, `status`, `merge`, `report`, `export`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from matcher.cli.options import (
    CAMERA_FORMS,
    CAMERA_HELP,
    Masks,
    Overwrite,
    RunArgument,
    argument,
    option,
    parse_camera,
)
from matcher.cli.output import PARTIAL, ProgressLines, complain, say, show
from matcher.errors import IntegrityError, UsageError, counted

if TYPE_CHECKING:
    from matcher.collection.collection import Collection
    from matcher.collection.sources import PairChoice
    from matcher.collection.store import Store
    from matcher.export.colmap import CameraChoice

_LISTED = 5  # failures that are printed

# How pairs are chosen: the options of `collection` and `sfm`.
PairFile = option(
    Path | None, "--pairs", metavar="FILE", help="Match the pairs listed in FILE, two names per line."
)
Exhaustive = option(bool, "--exhaustive", help="Match every pair of images.")
Sequential = option(int | None, metavar="K", min=1, help="Match each image with the next K by name.")
Similar = option(int | None, metavar="K", min=1, help="Match each image with the K most similar ones.")
Preemptive = option(
    int | None,
    metavar="K",
    min=1,
    help="Of each image's K most similar ones, match those whose strongest keypoints agree.",
)
Nearby = option(
    int | None,
    metavar="K",
    min=1,
    help="Match each photo with the K nearest ones, by the GPS positions of their EXIF headers.",
)
# Which images, and what is known of them.
Include = option(
    list[str] | None,
    metavar="PATTERN",
    help="Use only these images: a name, FOLDER/, a glob or @LIST.txt; repeatable.",
)
Exclude = option(
    list[str] | None,
    metavar="PATTERN",
    help="Leave these images out; same patterns as --include; repeatable.",
)
FeaturesFile = option(
    Path | None,
    metavar="FILE.h5",
    help="Use existing keypoints and descriptors, in hloc's HDF5 layout.",
)
Tiles = option(
    bool,
    "--tiles",
    help="For large photos: find keypoints by tiles at full resolution, by default 20000 per photo.",
)
WorkerCount = option(
    int | None,
    metavar="N",
    min=0,
    help="Worker processes; by default one per core or GPU. 0 uses this process.",
)
Restart = option(bool, "--restart", help="Delete the contents of RUN_DIR and start over.")
GivenCamera = option(
    str | None,
    metavar=CAMERA_FORMS,
    help=f"Known intrinsics of the photos, in stored pixels; they are not refined. {CAMERA_HELP}",
)
CameraModel = option(
    str,
    metavar="MODEL",
    help="COLMAP camera model where --camera is not given, such as PINHOLE, RADIAL or OPENCV.",
)
Cameras = option(
    Literal["auto", "single", "each"],
    help="Photos that share a camera: those with the same size, folder and EXIF (auto), all (single) or "
    "none (each).",
)
GivenRig = option(
    Path | None,
    metavar="FILE",
    help="Cameras that are fixed to each other, as COLMAP's rig_config.json; pictures of one moment are "
    "named alike after the prefix of their camera.",
)


def collection(
    images: argument(Path, "IMAGES", "Folder of images."),
    run: option(Path, metavar="RUN_DIR", help="Folder for the results; it can be continued."),
    given: Annotated[dict[str, Any], ("further_passes", "engine"), {}],
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
    camera: option(
        str | None,
        metavar=CAMERA_FORMS,
        help="Intrinsics of every image in pixels, for --geometry essential and exports.",
    ) = None,
    workers: WorkerCount = None,
    threads: option(
        int | None, metavar="N", min=1, help="Threads per worker; by default cores / workers."
    ) = None,
    engine: option(
        Literal["torch", "onnx", "ray", "local"] | None,
        help="Library that runs front end and networks, in local processes; ray: torch on a Ray cluster.  "
        "[default: the one that is installed]",
    ) = None,
    shard: option(
        str | None, metavar="i/n", help="Match only part i of n; join the parts with `matcher merge`."
    ) = None,
    restart: Restart = False,
    retry_failed: option(bool, "--retry-failed", help="Retry images and pairs that failed before.") = False,
    descriptors: option(
        bool, "--descriptors", help="Extract every image, even those whose descriptors were deleted."
    ) = False,
) -> int:
    """Match the images of a folder: extract every image once, match every pair once, verify the geometry.

    Choose the pairs with --pairs, --exhaustive, --sequential, --similar, --preemptive or --nearby. By
    default, up to 50 images are matched exhaustively; in a larger folder, each image is matched with the 20
    most similar ones. Finished work stays in RUN_DIR: run the same command again to continue after an
    interruption, or to match images that were added or changed.
    """
    from matcher.collection.collection import Collection
    from matcher.collection.schema import DATABASE
    from matcher.collection.workers import Workers

    counts = dict(sequential=sequential, similar=similar, preemptive=preemptive, nearby=nearby)
    choice = choose_pairs(pairs, exhaustive, **counts)
    if given.get("geometry") == "essential" and camera is None and not (run / DATABASE).exists():
        raise UsageError("--geometry essential needs --camera fx,fy,cx,cy, in pixels of the stored images")
    if engine is not None:
        given["engine"] = "onnx" if engine == "onnx" else "torch"
    opened = Collection.open(
        run,
        shard=shard,
        workers=Workers("ray" if engine == "ray" else "local", workers, threads),
        camera=parse_camera(camera, "--camera"),
        **(with_tiles(given) if tiles else given),
    )
    sources = dict(masks=masks, features=features, include=include or (), exclude=exclude or ())
    enter_images(opened, images, restart=restart, **sources)
    return match_pairs(opened, choice, {}, retry_failed=retry_failed, everything=descriptors)


def status(
    run: RunArgument,
    check: option(bool, "--check", help="Read all stored data and check it for damage.") = False,
    tracks: option(
        bool, "--tracks", help="Build tracks from the verified matches and print their statistics."
    ) = False,
) -> int:
    """Print the progress of a run and what failed, also while it is running."""
    return show_status(run, check=check, tracks=tracks)


def merge(
    runs: argument(list[Path], "RUN_DIR...", "Folders of the runs to join."),
    into: option(Path, metavar="RUN_DIR", help="Run to create or to add to."),
    descriptors: option(
        bool, "--descriptors", help="Also copy descriptors, which are needed to match more pairs."
    ) = False,
) -> int:
    """Join the runs of the parts of a collection (--shard) into one run."""
    from matcher.collection.collection import merge as join

    join(runs, into, descriptors=descriptors, on_report=say)
    return show_status(into)


def export(
    run: RunArgument,
    out: argument(Path, "OUT", "File or folder to create."),
    to: option(
        Literal["colmap", "hloc", "npz", "openmvg", "kapture"],
        help="Format. colmap writes a .db file and npz a .npz file; most formats fill a folder.",
    ),
    camera: GivenCamera = None,
    camera_model: CameraModel = "SIMPLE_RADIAL",
    cameras: Cameras = "auto",
    rig: GivenRig = None,
    overwrite: Overwrite = False,
) -> int:
    """Export the keypoints and matches of a run to the files of another program."""
    from matcher.collection.store import Store
    from matcher.export.formats import FORMATS
    from matcher.export.formats import export as write

    asked = FORMATS[to].has_cameras or camera is not None or rig is not None  # others refuse what is asked
    choice = camera_choice(camera, camera_model, cameras, rig) if asked else None
    with Store.open(run) as store:
        report = write(store, to, out, choice, overwrite=overwrite)
    for line in report.lines():
        show(line)
    show(f"wrote {out}")
    return PARTIAL if report.left_out else 0


def report(
    run: RunArgument,
    output: option(
        Path | None, metavar="FILE.html", help="Page to create; by default RUN_DIR/report.html."
    ) = None,
    pages: option(int, metavar="N", min=0, help="Number of weakest pairs that get a page of their own.") = 20,
    overwrite: Overwrite = False,
) -> None:
    """Write an HTML report of a run: pair graph, match counts, tracks, failures and weakest pairs."""
    from matcher.explain.run_report import write_run_report

    written = write_run_report(run, output, pages=pages, overwrite=overwrite)
    show(f"wrote {written.index} and pages of {written.pages} pairs")
    for text in written.left_out[:_LISTED]:
        complain(f"no page for {text}")
    if len(written.left_out) > _LISTED:
        complain(f"and {len(written.left_out) - _LISTED} more; the page lists them")


# What `collection` and `sfm` share: the steps from images to matched pairs.


def with_tiles(given: dict[str, Any]) -> dict[str, Any]:
    """The options with keypoints by tiles: --max-keypoints are those of a photo, not of a tile."""
    rest = {name: value for name, value in given.items() if name != "max_keypoints"}
    return {**rest, "tiles": given.get("max_keypoints", 20_000)}


def choose_pairs(pairs: Path | None, exhaustive: bool, **counts: int | None) -> dict[str, Any]:
    """How pairs are chosen, as arguments of `Collection.add_pairs`; empty without an option."""
    choice = dict(file=pairs, exhaustive=exhaustive or None, **counts)
    choice = {name: value for name, value in choice.items() if value is not None}
    if len(choice) > 1:
        others = ", ".join(f"--{name}" for name in counts)
        raise typer.BadParameter(f"give one of --pairs, --exhaustive, {others}")
    return choice


def camera_choice(
    camera: str | None, camera_model: str, cameras: Literal["auto", "single", "each"], rig: Path | None
) -> CameraChoice:
    """The camera choice that the options describe; `UsageError` where a camera or a rig cannot be read."""
    from matcher.cameras import Camera, parse_cameras, read_rig_config
    from matcher.export.colmap import CameraChoice

    fixed = None if rig is None else read_rig_config(rig)
    found = None if camera is None else parse_cameras(camera, "--camera")
    if found is None or isinstance(found, Camera):
        return CameraChoice(found, cameras, camera_model, rig=fixed)
    return CameraChoice(None, cameras, camera_model, known=found, rig=fixed)


def enter_images(opened: Collection, images: Path, **how: Any) -> None:
    """Add the images of a folder (`how`: arguments of `Collection.add_images`) and report changes."""
    changes = opened.add_images(images, **how)
    if changes.masked is not None:
        say(f"{changes.masked} of {changes.images} images have a mask")
    if changes.changed:
        have = "have" if changes.changed > 1 else "has"
        say(f"{counted(changes.changed, 'image')} {have} changed and will be extracted and matched again")
    if changes.gone:
        say(
            f"no longer in {images}, or not selected: {counted(changes.gone, 'image')} of the run; existing "
            "matches are kept (--restart deletes them)"
        )
    if changes.unusable:
        some = ", ".join(changes.unusable[:_LISTED])
        count = counted(len(changes.unusable), "file")
        say(f"left out because their names cannot be stored: {count}: {some}")


def match_pairs(opened: Collection, choice: dict[str, Any], limits: dict[str, int], **how: bool) -> int:
    """Add pairs, match all that are waiting, and print a summary.

    Returns:
        The exit code.

    Raises:
        UsageError: the run holds no pair, and a list names none or there is one image.
    """
    if not choice and (suggested := opened.suggest_pairs(**limits)) is not None:
        say(suggestion(suggested, opened.counts().images))
        choice = {"pairs": suggested} if suggested.arguments() else {}
    from matcher.collection.pairs import FaultTally

    update = ProgressLines().stage
    if choice:
        faults = FaultTally()
        total, new = opened.add_pairs(**choice, on_fault=faults, on_progress=update)
        say(f"{counted(total, 'pair')}{f', {total - new} of them known' if total > new else ''}")
        for line in faults.lines():
            say(f"{choice['file']}: {line}")
        _refuse_none(opened, choice, total)
    done = opened.run(on_progress=update, **how)
    code = show_status(opened.run_dir)
    if done.crashes:
        died = counted(done.crashes, "worker process", "worker processes")
        say(f"{died} crashed and had to be replaced; the interrupted work was tried again")
        code = PARTIAL
    return code


def _refuse_none(opened: Collection, choice: dict[str, Any], total: int) -> None:
    """`UsageError` where a run has no pair and is not a part of another."""
    with opened.store as store:
        counts, part = store.counts(), store.settings.get("shard")
    if total or counts.pairs or part is not None:
        return
    if counts.images < 2:
        raise UsageError(f"there is nothing to match with {counted(counts.images, 'image')}; add others")
    if "file" in choice:
        raise UsageError(
            f"{choice['file']} names no pair of these images: it needs two names a line, separated by a space"
        )


def suggestion(choice: PairChoice, images: int) -> str:
    """Why these pairs were chosen, for the user."""
    if not choice.arguments():
        return (
            "some images have no pair, and this run took its pairs from a list: use --pairs, --exhaustive, "
            "--sequential, --similar, --preemptive or --nearby to match them"
        )
    chosen = f"--{choice.method}" if choice.neighbours is None else f"--{choice.method} {choice.neighbours}"
    if not choice.by_default:
        return f"new images are paired like the others: {chosen}"
    what = "exhaustively" if choice.neighbours is None else "each with the most similar ones"
    what += ", where the strongest keypoints agree" if choice.method == "preemptive" else ""
    return f"no pairs were chosen, so the {images} images are matched {what} ({chosen})"


def show_status(run: Path, *, check: bool = False, tracks: bool = False) -> int:
    """Print the state of a run and return the matching exit code."""
    from matcher.collection.store import Store
    from matcher.collection.tracks import tracks_of

    with Store.open(run) as store:
        counts, settings = store.counts(), store.settings
        show(f"{run}: {settings.get('preset', 'a run')}, images of {store.image_folder}")
        show(
            f"images: {counts.images_done} done, {counts.images_failed} failed, "
            f"{counts.images_waiting} waiting"
        )
        lost = {image.name: image.reason for image in store.images() if image.status == "failed"}
        for name, reason in list(lost.items())[:_LISTED]:
            show(f"  failed: {name}: {reason}")
        show(f"pairs: {counts.pairs_done} done, {counts.pairs_failed} failed, {counts.pairs_waiting} waiting")
        for line in _failed_pairs(store, set(lost)):
            show(f"  failed: {line}")
        if tracks:
            found = tracks_of(store)
            longest = int(found.lengths.max()) if len(found) else 0
            show(
                f"tracks: {len(found)}, of {found.mean_length:.2f} images on average and {longest} at most; "
                f"{found.conflicts} matches contradict others"
            )
        if check:
            if faults := store.check():
                raise IntegrityError(f"{run} is damaged: {'; '.join(faults[:_LISTED])}")
            show("nothing is damaged")
    return PARTIAL if counts.images_failed or counts.pairs_failed else 0


def _failed_pairs(store: Store, lost: set[str]) -> list[str]:
    """One line per reason for failure; one for all pairs with a failed image."""
    first, counts = {}, Counter()
    for pair in store.failed():
        reason = "one of them has failed" if lost & {pair.name0, pair.name1} else pair.reason
        first.setdefault(reason, f"{pair.name0} and {pair.name1}")
        counts[reason] += 1
    others = {reason: f" and {counted(n - 1, 'other pair')}" if n > 1 else "" for reason, n in counts.items()}
    return [f"{first[reason]}{others[reason]}: {reason}" for reason, _ in counts.most_common(_LISTED)]
