"""Commands for many images: `collection`, `status`, `merge`, `report`, `export`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from heapq import nlargest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

import matcher
from matcher.cli.options import Count, Natural, loading, parse_camera
from matcher.cli.output import PARTIAL, ProgressLines, complain, say, show
from matcher.errors import IntegrityError, UsageError, counted, few

if TYPE_CHECKING:
    from matcher.collection.collection import Collection
    from matcher.collection.sources import PairChoice
    from matcher.export.colmap import CameraChoice

_LISTED = 5  # failures that are printed


@dataclass(frozen=True)
class PairOptions:
    """How `collection` and `sfm` choose pairs.

    Args:
        pairs (FILE): Match the pairs listed in FILE, two names per line.
        exhaustive: Match every pair of images.
        sequential (K): Match each image with the next K by name.
        similar (K): Match each image with the K most similar ones.
        preemptive (K): Of each image's K most similar ones, match those whose strongest keypoints agree.
        nearby (K): Match each photo with the K nearest ones, by the GPS positions of their EXIF headers.
    """

    pairs: Path | None = None
    exhaustive: bool = False
    sequential: Count | None = None
    similar: Count | None = None
    preemptive: Count | None = None
    nearby: Count | None = None

    def chosen(self) -> dict[str, Any]:
        """As arguments of `Collection.add_pairs`; empty without an option."""
        found = {name: value for name, value in vars(self).items() if value not in (None, False)}
        if len(found) > 1:
            raise typer.BadParameter(f"give one of {', '.join(f'--{name}' for name in vars(self))}")
        return {"file" if name == "pairs" else name: value for name, value in found.items()}


@dataclass(frozen=True)
class ImageOptions:
    """Which images `collection` and `sfm` take, and what is known of them.

    Args:
        include (PATTERN): Use only these images: a name, FOLDER/, a glob or @LIST.txt; repeatable.
        exclude (PATTERN): Leave these images out; same patterns as --include; repeatable.
        features (FILE.h5): Use existing keypoints and descriptors, in hloc's HDF5 layout.
        tiles: For large photos: find keypoints by tiles at full resolution, by default 20000 per photo.
        workers (N): Worker processes; by default one per core or GPU. 0 uses this process.
        restart: Delete the contents of RUN_DIR and start over.
    """

    include: list[str] | None = None
    exclude: list[str] | None = None
    features: Path | None = None
    masks: Path | None = None
    tiles: bool = False
    workers: Natural | None = None
    restart: bool = False

    @property
    def selection(self) -> dict[str, Any]:
        """As arguments of `Selection.parse`."""
        return dict(include=self.include or (), exclude=self.exclude or ())

    def opened(self, run: Path, given: dict[str, Any], **how: Any) -> Collection:
        """The run, opened with `how` and the options of `matcher.load`."""
        if self.tiles:  # then --max-keypoints are those of a photo, not of a tile
            given = given | {"tiles": given.get("max_keypoints", 20_000), "max_keypoints": None}
        return matcher.Collection.open(run, **how, **given)

    def enter(self, images: Path, opened: Collection) -> int:
        """Add the images of a folder to the run; an exit code, which tells of images that it cannot hold."""
        how = dict(masks=self.masks, features=self.features, restart=self.restart, **self.selection)
        changes = opened.add_images(images, **how)
        if changes.masked is not None:
            say(f"{changes.masked} of {changes.images} images have a mask")
        if changes.changed:
            changed = counted(changes.changed, "image has", "images have")
            with opened.store as store:
                known = "; without --restart their overlay is still that of before" * bool(store.overlays)
            say(f"{changed} changed and will be extracted and matched again{known}")
        if changes.gone:
            other = counted(changes.gone, "image")
            say(f"not in {images}, or not selected: {other} of the run, kept there without --restart")
        if changes.unusable:
            count, some = counted(len(changes.unusable), "file"), few(changes.unusable)
            complain(f"left out because their names cannot be stored: {count}: {some}")
        return PARTIAL if changes.unusable else 0


@dataclass(frozen=True)
class CameraOptions:
    """The cameras that `sfm` and `export` write.

    Args:
        camera (fx,fy,cx,cy|MODEL,w,h,…|FILE): Known intrinsics of the photos, in stored pixels; they are not
            refined. {CAMERAS}
        camera_model (MODEL): COLMAP camera model where --camera is not given, such as PINHOLE, RADIAL or
            OPENCV.
        cameras: Photos that share a camera: those with the same size, folder and EXIF (auto), all (single) or
            none (each).
        rig (FILE): Cameras that are fixed to each other, as COLMAP's rig_config.json; pictures of one moment
            are named alike after the prefix of their camera.
    """

    camera: str | None = None
    camera_model: str = "SIMPLE_RADIAL"
    cameras: Literal["auto", "single", "each"] = "auto"
    rig: Path | None = None

    def choice(self) -> CameraChoice:
        """The camera choice described; `UsageError` where a camera or a rig cannot be read."""
        from matcher.cameras import parse_cameras, read_rig_config
        from matcher.export.colmap import CameraChoice

        fixed = None if self.rig is None else read_rig_config(self.rig)
        found = None if self.camera is None else parse_cameras(self.camera, "--camera")
        known = {"known": found, "source": self.camera} if isinstance(found, dict) else {"camera": found}
        return CameraChoice(sharing=self.cameras, model=self.camera_model, rig=fixed, **known)

    def say_lacking(self, choice: CameraChoice, names: list[str]) -> None:
        """Say how many photos have no camera in the file that was given."""
        lacking = [name for name in names if name not in choice.known]
        if choice.known and choice.rig is None and lacking:
            count = f"{len(lacking)} of {len(names)} photos"
            say(f"{count} have no camera in {self.camera}, such as {lacking[0]}")


def collection(
    images: Path,
    /,
    run: Path,
    given: loading("further_passes", "engine"),
    pairing: PairOptions,
    sources: ImageOptions,
    camera: str | None = None,
    threads: Count | None = None,
    engine: Literal["torch", "onnx", "ray", "local"] | None = None,
    shard: str | None = None,
    retry_failed: bool = False,
    descriptors: bool = False,
) -> int:
    """Match the images of a folder: extract every image once, match every pair once, verify the geometry.

    Choose the pairs with --pairs, --exhaustive, --sequential, --similar, --preemptive or --nearby. By
    default, up to 50 images are matched exhaustively; in a larger folder, each image is matched with the 20
    most similar ones. Finished work stays in RUN_DIR: run the same command again to continue after an
    interruption, or to match images that were added or changed.

    Args:
        images (IMAGES): Folder of images.
        run (RUN_DIR): Folder for the results; it can be continued.
        camera (fx,fy,cx,cy|MODEL,w,h,…|FILE): Intrinsics of every image in stored pixels, for --geometry
            essential and exports. {CAMERAS}
        threads (N): Threads per worker; by default cores / workers.
        engine: Library that runs front end and networks, in local processes; ray: torch on a Ray
            cluster.  [default: the one that is installed]
        shard (i/n): Match only part i of n; join the parts with `matcher merge`.
        retry_failed: Retry images and pairs that failed before.
        descriptors: Extract every image, even those whose descriptors were deleted.
    """
    from matcher.collection.schema import DATABASE
    from matcher.collection.workers import Workers

    choice = pairing.chosen()
    if given.get("geometry") == "essential" and camera is None and not (run / DATABASE).exists():
        raise UsageError("--geometry essential needs --camera fx,fy,cx,cy, in pixels of the stored images")
    if engine is not None:
        given["engine"] = "onnx" if engine == "onnx" else "torch"
    workers = Workers("ray" if engine == "ray" else "local", sources.workers, threads)
    opened = sources.opened(run, given, shard=shard, workers=workers, camera=parse_camera(camera, "--camera"))
    code = sources.enter(images, opened)
    return max(code, match_pairs(opened, choice, {}, retry_failed=retry_failed, everything=descriptors))


def status(run: Path, /, check: bool = False, tracks: bool = False) -> int:
    """Print the progress of a run and what failed, also while it is running.

    Args:
        check: Read all stored data, check it for damage, and count the pairs by verdict and by geometry.
        tracks: Build tracks from the verified matches and print their statistics.
    """
    from matcher.collection.store import Store, gone
    from matcher.collection.tracks import tracks_of
    from matcher.verify.verdict import Verdict

    with Store.open(run) as store:
        counts, settings = store.counts(), store.settings
        show(f"{run}: {settings.get('preset', 'a run')}, images of {store.image_folder}")
        lost = {image.name: image.reason for image in store.images() if image.status == "failed"}
        alone = [image.name for image in store.unpaired() if image.status == "waiting"]
        done, failed, waiting = counts.images_done, counts.images_failed, counts.images_waiting
        show(f"images: {done} done, {failed} failed, {waiting} waiting")
        left = "no longer in the folder, so left out of models and of exports with cameras"
        for what, names in (("of these in no pair so far", alone), (left, sorted(gone(store) - lost.keys()))):
            if names:
                show(f"  {what}: {counted(len(names), 'image')}: {few(names)}")
        for name, reason in list(lost.items())[:_LISTED]:
            show(f"  failed: {name}: {reason}")
        for overlay in store.overlays:
            size, share = "{} x {}".format(*overlay.size), overlay.mask.mean()
            show(f"  an overlay lies on {share:.0%} of most images of {size}: its keypoints are left out")
        show(f"pairs: {counts.pairs_done} done, {counts.pairs_failed} failed, {counts.pairs_waiting} waiting")
        lacking: dict[str, list[str]] = {}  # by reason, one of which is for all pairs of failed images
        for name0, name1, reason in store.failed():
            reason = "one of them has failed" if lost.keys() & {name0, name1} else reason
            lacking.setdefault(reason, []).append(f"{name0} and {name1}")
        for reason, pairs in nlargest(_LISTED, lacking.items(), key=lambda item: len(item[1])):
            others = f" and {counted(len(pairs) - 1, 'other pair')}" if len(pairs) > 1 else ""
            show(f"  failed: {pairs[0]}{others}: {reason}")
        if tracks:
            found = tracks_of(store)
            longest = int(found.lengths.max()) if len(found) else 0
            show(
                f"tracks: {len(found)}, of {found.mean_length:.2f} images on average and {longest} at most; "
                f"{found.conflicts} matches contradict others"
            )
            for first, second in found.contradicted[:_LISTED]:
                show(f"  left out, as other pairs contradict it: {first} and {second}")
        if check:
            if faults := store.check():
                raise IntegrityError(f"{run} is damaged: {'; '.join(faults[:_LISTED])}")
            sizes = {image.name: image.size for image in store.images()}
            found = [(pair.probability(sizes), pair.geometry.described) for pair in store.pairs()]
            words = Counter(Verdict(likely).word for likely, _ in found if likely is not None)
            likely = f"{words['same']} likely, {words['unsure']} unsure, {words['not']} unlikely"
            show("nothing is damaged" + f"; pairs that show one place: {likely}" * bool(words))
            kinds = Counter(kind for _, kind in found).most_common()
            show(f"geometries of pairs: {'; '.join(f'{count} {kind}' for kind, count in kinds) or 'none'}")
    return PARTIAL if counts.images_failed or counts.pairs_failed else 0


def merge(runs: list[Path], /, into: Path, descriptors: bool = False) -> int:
    """Join the runs of the parts of a collection (--shard) into one run.

    Args:
        runs (RUN_DIR...): Folders of the runs to join.
        into (RUN_DIR): Run to create or to add to.
        descriptors: Also copy descriptors, which are needed to match more pairs.
    """
    from matcher.collection.collection import merge as join

    join(runs, into, descriptors=descriptors, on_report=say)
    return status(into)


def export(
    run: Path,
    out: Path,
    /,
    to: Literal["colmap", "hloc", "npz", "openmvg", "kapture", "csv"],
    intrinsics: CameraOptions,
    overwrite: bool = False,
) -> int:
    """Export the keypoints and matches of a run to the files of another program.

    Args:
        out (OUT): File or folder to create.
        to: Format. colmap writes a .db file, npz .npz and csv, a list of pairs, .csv; others fill a folder.
    """
    from matcher.collection.store import Store
    from matcher.export.formats import FORMATS
    from matcher.export.formats import export as write

    asked = FORMATS[to].has_cameras or intrinsics != CameraOptions()
    choice = intrinsics.choice() if asked else None  # formats without cameras refuse what is asked
    with Store.open(run) as store:
        report = write(store, to, out, choice, overwrite=overwrite)
        if choice is not None:
            intrinsics.say_lacking(choice, [image.name for image in store.images()])
    for line in report.lines():
        show(line)
    show(f"wrote {out}")
    return PARTIAL if report.left_out else 0


def report(run: Path, /, output: Path | None = None, pages: Natural = 20, overwrite: bool = False) -> int:
    """Write an HTML report of a run: pair graph, match counts, tracks, failures and weakest pairs.

    Args:
        output (FILE.html): Page to create; by default RUN_DIR/report.html.
        pages (N): Number of weakest pairs that get a page of their own.
    """
    from matcher.explain.run_report import write_run_report

    index, count, left_out = write_run_report(run, output, pages=pages, overwrite=overwrite)
    show(f"wrote {index} and pages of {count} pairs")
    for text in left_out[:_LISTED]:
        complain(f"no page for {text}")
    if len(left_out) > _LISTED:
        complain(f"and {len(left_out) - _LISTED} more; the page lists them")
    return PARTIAL if left_out else 0


def match_pairs(opened: Collection, choice: dict[str, Any], limits: dict[str, int], **how: bool) -> int:
    """Add pairs, match all that are waiting, and print a summary; the exit code.

    `UsageError`: the run holds no pair, and a list names none or there is one image.
    """
    if not choice and (suggested := opened.suggest_pairs(**limits)) is not None:
        say(suggestion(suggested, opened.counts().images))
        choice = {} if suggested.from_list else {"pairs": suggested}
    from matcher.collection.pairs import FaultTally

    update = ProgressLines().stage
    if choice:
        faults = FaultTally()
        total, new = opened.add_pairs(**choice, on_fault=faults, on_progress=update)
        say(f"{counted(total, 'pair')}{f', {total - new} of them known' if total > new else ''}")
        for line in faults.lines():
            say(f"{choice['file']}: {line}")
        counts = opened.counts()
        with opened.store as store:
            part = store.settings.get("shard")
        if not (total or counts.pairs or part is not None):
            if counts.images < 2:
                have = counted(counts.images, "image")
                raise UsageError(f"there is nothing to match with {have}; add others")
            if "file" in choice:
                raise UsageError(
                    f"{choice['file']} names no pair of these images: it needs two of their names a line, as "
                    "they are below their folder, separated by a space"
                )
    done = opened.run(on_progress=update, **how)
    code = status(opened.run_dir)
    if done.crashes:
        died = counted(done.crashes, "worker process", "worker processes")
        say(f"{died} crashed and had to be replaced; the interrupted work was tried again")
        code = PARTIAL
    return code


def suggestion(choice: PairChoice, images: int) -> str:
    """Why these pairs were chosen, for the user."""
    if choice.from_list:
        return (
            "some images have no pair, and this run took its pairs from a list: use --pairs, --exhaustive, "
            "--sequential, --similar, --preemptive or --nearby to match them"
        )
    chosen = f"--{choice.method}" if choice.neighbours is None else f"--{choice.method} {choice.neighbours}"
    if not choice.by_default:
        return f"new images are paired like the others: {chosen}"
    what = "exhaustively" if choice.neighbours is None else "each with the most similar ones"
    what += ", where the strongest keypoints agree" if choice.method == "preemptive" else ""
    return f"no pairs were chosen: {counted(images, 'image is', 'images are')} matched {what} ({chosen})"
