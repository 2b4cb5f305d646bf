"""A collection of images: open, add images and pairs, run, read, export, merge; `match_set`, in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations, islice
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np

from matcher.cameras import CameraInput, as_camera
from matcher.collection import schema, sources, tracks, workers
from matcher.collection.pairs import OnFault, chosen_pairs, read_pairs
from matcher.collection.schema import DONE, WAITING, Counts, StoredPair
from matcher.collection.settings import Setup, build, describe, parse_shard, refuse_changes, stored_setup
from matcher.collection.sources import FeatureSource, PairChoice, Selection
from matcher.collection.store import EncodedPair, Store, Writer, gone, names_in
from matcher.collection.tracks import Edge, PairMatches, Tracks
from matcher.collection.workers import OnProgress, RunReport, Stages, Workers
from matcher.config import GRID_KIND, EstimationConfig, from_dict
from matcher.errors import ImageError, UsageError, counted, few
from matcher.images import find_images
from matcher.loading import devices, open_pipeline
from matcher.pipeline import ImageInput, Mask, Pipeline
from matcher.presets import DEFAULT_PRESET, LoadOptions, from_file, refuse_further_passes
from matcher.types import Features, Matches, TwoViewGeometry, to_numpy
from matcher.verify.adjustment import threshold_scale
from matcher.verify.estimation import RobustEstimator
from matcher.verify.overlay import without_common_overlays
from matcher.verify.repetition import beside_overlay
from matcher.verify.verdict import NOT, judged, reject_improbable

if TYPE_CHECKING:
    from matcher.export.colmap import CameraChoice, ExportReport
    from matcher.sfm.reconstruct import MappingOptions, Reconstruction


_OTHER_SETTINGS = "Use another folder, or match everything again with restart=True"


@dataclass(frozen=True)
class ImageChanges:
    """What differs between the images of a folder and those of a store."""

    new: int = 0
    changed: int = 0  # extracted and matched again
    gone: int = 0  # in the store, but no longer in the folder or not selected; their matches are kept
    unusable: tuple[str, ...] = ()  # file names that no store can hold
    images: int = 0  # that were found
    masked: int | None = None  # of them, those with a mask; None where no masks were given


class Collection:
    """Images and pairs in a store on disk; see `open`.

    >>> import matcher, numpy as np, pathlib, PIL.Image
    >>> pathlib.Path("photos").mkdir()
    >>> scene = np.random.default_rng(0).integers(0, 255, (240, 340), dtype=np.uint8)
    >>> for number in range(2):
    ...     PIL.Image.fromarray(scene[:, number : number + 320]).save(f"photos/{number}.png")
    >>> collection = matcher.Collection.open("run", preset="nearest", max_keypoints=200, workers=0)
    >>> _ = collection.add_images("photos"), collection.add_pairs(exhaustive=True), collection.run()
    >>> [(pair.name0, pair.name1, len(pair.matches) > 50) for pair in collection]
    [('0.png', '1.png', True)]

    Results are on disk, so an interrupted run continues where it stopped. A script needs no
    `if __name__ == "__main__"` guard: worker processes do not import it.

    Raises, where it reads: `UsageError` where there is no run, `IntegrityError` where it is damaged.
    """

    def __init__(
        self, run_dir: str | Path, setup: Callable[[FeatureSource], Setup], workers: Workers | int | None
    ) -> None:
        self.run_dir = Path(run_dir)
        self.workers = workers if isinstance(workers, Workers) else Workers(count=workers)
        self._setup_of = setup
        self._setup: Setup | None = None

    @classmethod
    def open(
        cls,
        run_dir: str | Path,
        *,
        preset: str = DEFAULT_PRESET,
        camera: CameraInput | None = None,
        shard: str | None = None,
        tiles: int | None = None,
        workers: Workers | int | None = None,
        **options: Unpack[LoadOptions],
    ) -> Collection:
        """Open an existing run, or prepare a new one that the first `add_images` creates.

        Args:
            run_dir: folder of the store.
            preset: as for `matcher.load`, but not a detector-free one (loftr-…), whose keypoints differ from
                pair to pair.
            camera: camera of every image without one from `set_cameras`, for exports; needed for essential
                geometry.
            shard: "i/n", i from 1 to n: match only part i of n of the pairs in this store.
            tiles: keypoints of an image, found by tiles at full resolution; `max_keypoints` are those of a
                tile then, and pairs are matched window by window (`matcher.tiling.by_tiles`).
            workers: number of worker processes or a `Workers`; None: one per core or GPU, 0: this process.
            options: as for `matcher.load`.

        Raises:
            UsageError: an unknown option or value.
        """
        part = parse_shard(shard)
        preset, given = from_file(preset, options)
        for name in ("weights", "frontend_weights"):
            if isinstance(given.get(name), Path):
                given[name] = given[name].absolute()
        common = None if camera is None else as_camera(camera)
        setup = partial(Setup, preset=preset, options=given, camera=common, shard=part, tiles=tiles)
        return cls(run_dir, setup, workers)

    @classmethod
    def reopen(
        cls, run_dir: str | Path, *, workers: Workers | int | None = None, **options: Unpack[LoadOptions]
    ) -> Collection:
        """Open an existing run with the settings that it was made with.

        `options` are what it does not hold: weights, frontend_weights, device.

        Raises:
            UsageError: there is no run.
            IntegrityError: it is damaged, or was made by another version.
        """
        with Store.open(run_dir) as store:
            settings = store.settings
        given = {"precision": settings.get("precision")}
        given |= {name: value for name, value in options.items() if value is not None}
        return cls(run_dir, lambda source: stored_setup(settings, source, given), workers)

    @property
    def store(self) -> Store:
        """The reading side, newly opened; close it after use (`with collection.store as store`)."""
        return Store.open(self.run_dir)

    def check(self, source: FeatureSource, *, restart: bool = False) -> None:
        """Refuse, as `add_images` would, options that cannot be used or settings that are not the store's."""
        settings = describe(setup := self._setup_of(source), build(setup))
        if not restart and (self.run_dir / schema.DATABASE).exists():
            with self.store as store:
                refuse_changes(self.run_dir, store.settings, settings, _OTHER_SETTINGS)

    def add_images(
        self,
        folder: str | Path,
        *,
        masks: str | Path | None = None,
        features: str | Path | None = None,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        restart: bool = False,
    ) -> ImageChanges:
        """Add the images below a folder; an image whose content has changed is processed again. Returns what
        is new, what has changed and what is gone.

        Args:
            masks: folder of mask images, black where keypoints are not allowed; a mask has the name of its
                image, with .png appended or in place of the suffix if it differs.
            features: HDF5 file with existing keypoints and descriptors in hloc's layout, used instead of a
                front end.
            include: names, folders or globs of the images to take; `@FILE` is a list (see `Selection`).
            exclude: the same, for images to leave out.
            restart: delete the contents of the store first.

        Raises:
            UsageError: no such folder, no images, no mask for any of them, a pattern that matches nothing,
                settings that differ from the store's, or another run is writing it.
            IntegrityError: the store or the weights are damaged.
        """
        known = frozenset() if restart else names_in(self.run_dir)
        selection = replace(Selection.parse(include, exclude), known=known)
        source, names, unusable, masked = sources.find_source(Path(folder), masks, features, selection)
        setup = self._setup_of(source)
        settings = describe(setup, build(setup))
        if restart or not (self.run_dir / schema.DATABASE).exists():
            Store.create(self.run_dir, settings, folder, restart=restart).close()
        with Writer(self.run_dir) as writer:
            refuse_changes(self.run_dir, writer.settings, settings, _OTHER_SETTINGS)
            self._setup = setup
            rows = writer.execute("SELECT name, status, stamp, sha256 FROM images")
            known, changed, touched = {name: row for name, *row in rows}, [], []
            for name in names:
                status, old_stamp, old_digest = known.get(name, (WAITING, "", ""))
                if status == WAITING or (stamp := source.stamp(name)) == old_stamp:
                    continue
                digest = ""
                with suppress(ImageError):
                    digest = source.digest(name)
                if digest == old_digest and status == DONE:
                    touched.append((stamp, name))
                else:
                    changed.append(name)
            new = [name for name in names if name not in known]
            with writer.transaction():
                writer.add_images(new)
                writer.execute_many("UPDATE images SET stamp = ? WHERE name = ?", touched)
                if changed:
                    writer.forget(changed)
                    if not writer.counts().images_done:  # what lies over all of them is to be found anew
                        writer.set_meta("overlays", "[]")
                writer.set_meta("image_folder", str(source.folder.absolute()))
            gone = len(known.keys() - set(names))
            return ImageChanges(len(new), len(changed), gone, tuple(unusable), len(names), masked)

    def set_cameras(self, cameras: Mapping[str, CameraInput]) -> int:
        """Set the cameras of images by name, in stored pixels, for essential geometry and exports.

        With geometry "essential", finished pairs of images whose camera changes are verified again in this
        process, from the stored matches; returns how many. `UsageError`: a name that the run does not have,
        no camera, or another run is writing the store.
        """
        wanted = {name: as_camera(camera, f"the camera of {name}") for name, camera in cameras.items()}
        with Writer(self.run_dir) as writer, writer.transaction():
            changed = {name for name in wanted if writer.image(name).camera != wanted[name]}
            for name in changed:
                writer.put_camera(name, wanted[name])
            config = _estimation_of(writer)
            if config.kind != "essential" or not changed:
                return 0
            images = {image.name: image for image in writer.images()}
            # Failed pairs, which may have lacked a camera, are matched again.
            writer.wait_again("failed", ", ".join(str(images[name].number) for name in changed))
            estimator, common, rows = RobustEstimator(config), schema.common_camera(writer.settings), []
            for pair in writer.pairs(changed):
                ends, matches = (pair.name0, pair.name1), pair.matches
                known = tuple(images[name].camera or common for name in ends)
                scale = threshold_scale(*map(writer.scale, ends), config.kind)
                points, scores = (matches.points0, matches.points1), matches.scores
                geometry = estimator(*points, cameras=known, scores=scores, thresholds_scale=scale)
                sizes = [images[name].size for name in ends]
                geometry = judged(geometry, matches, *sizes, lambda *_, own=pair.geometry.repetition: own)
                geometry = reject_improbable(geometry, matches, *sizes, least=NOT)
                data = schema.encode_pair(matches, geometry, *map(writer.keypoints, ends))
                rows.append(EncodedPair(*(images[name].number for name in ends), pair.seconds, data))
            writer.put_pairs(rows)
            return len(rows)

    def suggest_pairs(self, **limits: int) -> PairChoice | None:
        """Suggest pairs for images that have none: chosen as in the run so far, else by the number of images.

        With up to `exhaustive_up_to` images (50) every pair is matched; in larger collections each image is
        paired with `neighbours` similar ones (20), of which `preemptive` keeps those whose strongest
        keypoints agree. Returns an argument for `add_pairs`, or None if every image has a pair. Its method is
        "names" or "file" if the run's pairs came from a list: then only the user can choose further pairs.
        """
        with self.store as store:
            if not store.unpaired():
                return None
            before = store.pair_choice
        if before is None or before.by_default:
            return sources.default_choice(len(self._ready().source.names()[0]), **limits)
        return before

    def add_pairs(
        self,
        pairs: Iterable[tuple[str, str]] | PairChoice | None = None,
        *,
        file: str | Path | None = None,
        exhaustive: bool = False,
        sequential: int | None = None,
        similar: int | None = None,
        preemptive: int | None = None,
        nearby: int | None = None,
        of: Iterable[str] | None = None,
        on_fault: OnFault = lambda *_: None,
        on_progress: OnProgress | None = None,
    ) -> tuple[int, int]:
        """Add pairs, chosen in exactly one way; finished pairs stay finished. Returns the number of pairs (of
        this shard), and how many of them are new.

        Args:
            pairs: an iterable of two image names each, or the result of `suggest_pairs`.
            file: a pair list, two names per line (see `matcher.collection.pairs`).
            exhaustive: pair all images with each other.
            sequential: pair each image with this many that follow it in natural order of the names.
            similar: pair each image with this many most similar ones; extracts features first.
            preemptive: of these, and of those taken nearby, the pairs whose strongest keypoints agree.
            nearby: pair each image with this many nearest ones, by the GPS positions of their EXIF headers.
            of: names of images; of the pairs, only those with one of them are added. None: all.
            on_fault: called with every line of `file` that yields no pair, or is taken with a warning: its
                number, what is wrong, and the text.
            on_progress: called with the progress of the extraction and of the choice.

        Raises:
            UsageError: not exactly one way, a name that is not in the run, or no `add_images` before.
        """
        counts = dict(sequential=sequential, similar=similar, preemptive=preemptive, nearby=nearby)
        given = {"exhaustive": exhaustive or None, "names": pairs, "file": file, **counts}
        given = {method: value for method, value in given.items() if value is not None}
        if len(given) != 1:
            ways = ", ".join(f"{method}=K" for method in counts)
            raise UsageError(f"pairs come from exactly one of: names, a file, exhaustive, {ways}")
        ((method, value),) = given.items()
        if method in counts and value < 1:
            raise UsageError(f"{method} pairs need at least 1 neighbour of each image, not {value}")
        choice = value
        if not isinstance(value, PairChoice):
            choice = PairChoice(method, value if method in counts else None)
        elif value.from_list:
            raise UsageError("the pairs of this run came from a list; list those of the new images as well")
        setup, wanted = self._ready(), None if of is None else set(of)
        if choice.needs_features:
            self.extract(everything=True, on_progress=on_progress)
        with Writer(self.run_dir) as writer:
            if choice.method == "names":
                found = pairs
            elif choice.method == "file":
                names = sorted(writer.names().values())
                found = read_pairs(file, names, on_fault, folder=writer.image_folder)
            else:  # images that `add_images` did not find, or without features to compare, get no pairs
                present = set(setup.source.names()[0])
                status = {image.name: image.status for image in writer.images()}
                names = [name for name in sorted(status) if name in present]
                if choice.needs_features:
                    names = [name for name in names if status[name] == "done"]
                found = chosen_pairs(choice, names, writer, setup, on_progress or (lambda _: None), wanted)
            if wanted is not None:
                found = (pair for pair in found if not wanted.isdisjoint(pair))
            added = workers.add_pairs(writer, found, setup.shard)
            writer.set_meta("pair_choice", schema.to_json(asdict(choice)))
            return added

    def extract(self, *, everything: bool = False, on_progress: OnProgress | None = None) -> int:
        """Extract the images of waiting pairs, or all; returns the number processed; errors as of `run`."""
        with self._stages(on_progress) as stages:
            return stages.extract(everything=everything)

    def run(
        self, *, retry_failed: bool = False, everything: bool = False, on_progress: OnProgress | None = None
    ) -> RunReport:
        """Extract and match everything that is waiting, in worker processes.

        Args:
            retry_failed: retry images and pairs that failed before.
            everything: also extract images without a pair, and descriptors that were deleted.
            on_progress: called with the progress, at most a few times a second.

        Raises:
            ImageError: no image can be used.
            UsageError: essential geometry without any camera, another run is writing, or no `add_images`.
            OSError: the disk is full; committed results are kept, and the next run continues.
        """
        with self._stages(on_progress) as stages:
            if retry_failed:
                with stages.writer.transaction():
                    stages.writer.retry_failed()
            done = stages.extract(everything=everything), stages.match()
            return RunReport(*done, stages.engine.crashes, stages.writer.counts())

    @contextmanager
    def _stages(self, on_progress: OnProgress | None) -> Iterator[Stages]:
        setup = self._ready()
        with Writer(self.run_dir) as writer:
            essential = _estimation_of(writer).kind == "essential"
            # Else pairs without one fail with that reason.
            if essential and setup.camera is None and all(one.camera is None for one in writer.images()):
                raise UsageError("geometry 'essential' needs cameras: give camera=fx,fy,cx,cy or set_cameras")
            with closing(workers.start_engine(self.run_dir, setup, self.workers)) as engine:
                batch = self.workers.batch or (1 if devices(setup.options) == ["cpu"] else 8)
                yield Stages(writer, engine, setup.source, batch, on_progress or (lambda _: None))

    def _ready(self) -> Setup:
        if self._setup is None:
            raise UsageError("add the images first: collection.add_images(FOLDER)")
        return self._setup

    def counts(self) -> Counts:
        """Progress of the run."""
        with self.store as store:
            return store.counts()

    def tracks(self, *, min_length: int = 2) -> Tracks:
        """Keypoints of `min_length` images or more (at least 2) that show one point of the scene."""
        with self.store as store:
            return tracks.tracks_of(store, min_length=min_length)

    def __iter__(self) -> Iterator[StoredPair]:
        """Finished pairs, one after another."""
        with self.store as store:
            yield from store.pairs()

    def __repr__(self) -> str:
        return f"Collection({str(self.run_dir)!r})"

    def export(
        self, form: str, out: str | Path, *, cameras: CameraChoice | None = None, overwrite: bool = False
    ) -> ExportReport:
        """Export the run for another program; returns what was written and what was left out.

        Args:
            form: "colmap", "hloc", "npz", "openmvg", "kapture" or "csv" (a line a pair).
            out: file (colmap: .db, npz, csv: by their names) or folder to create.
            cameras: which images share a camera, and what is known of it (colmap, openmvg, kapture); None
                takes them from the run, from EXIF, or guesses.
            overwrite: replace an existing file, or write into a folder that holds files; without it only an
                `.npz` or `.csv` that an earlier export wrote is replaced.

        Raises:
            UsageError: an unknown format, an output that exists or cannot be written, names or cameras that
                the format cannot hold.
            OSError: the disk is full.
        """
        from matcher.export.formats import export

        with self.store as store:
            return export(store, form, out, cameras, overwrite=overwrite)

    def reconstruct(
        self,
        out: str | Path,
        *,
        cameras: CameraChoice | None = None,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        **options: Unpack[MappingOptions],
    ) -> Reconstruction:
        """Reconstruct cameras and 3D points from the verified matches with COLMAP; needs pycolmap. Returns
        the models, largest first: poses `cam_from_world` (3, 4) by image name, cameras, numbers.

        Args:
            out: folder to create: COLMAP models, points as PLY, a plot, statistics as JSON.
            cameras: as in `export`; given ones are kept as they are by the incremental mapper.
            include, exclude: as in `add_images`.
            options: mapper, min_images, threads, seed, overwrite; see `matcher.sfm.reconstruct.reconstruct`.

        Raises:
            UsageError: pycolmap is absent, `out` exists, or fewer than two images have features.
            ReconstructionError: no model was found, or COLMAP's process ended early.
        """
        from matcher.sfm.reconstruct import reconstruct

        selection = Selection.parse(include, exclude)
        with self.store as store:
            only = selection.apply(image.name for image in store.images())
            return reconstruct(store, out, choice=cameras, only=only, **options)


def _estimation_of(store: Store) -> EstimationConfig:
    values = store.settings.get("config", {}).get("estimation")
    if values is None:
        raise UsageError("the settings of the run do not say how its geometry was estimated; match it again")
    return from_dict(EstimationConfig, values)


def merge(
    runs: Sequence[Path], into: Path, *, descriptors: bool = False, on_report: Callable[[str], None]
) -> None:
    """Add the contents of `runs`, such as shards, which have the same settings, to `into`, which is created
    if missing; with `descriptors` where further pairs are to be matched. `on_report` is called with a line
    about each run.

    A finished pair replaces a failed one, and that replaces a waiting one. If two runs found different
    keypoints in an image (on machines that round differently), the first run's are kept, and the other run's
    pairs with this image are matched again. `UsageError`: settings or an image's content differ.
    """
    same = "Only runs with the same settings can be joined"
    if any(os.path.realpath(run) == os.path.realpath(into) for run in runs):
        raise UsageError(f"{into} is one of the runs to join; join them into another folder")
    with ExitStack() as stack:
        stores = [stack.enter_context(Store.open(run)) for run in runs]
        wanted = {**stores[0].settings, "shard": None}
        for store in stores:
            refuse_changes(store.folder, {**store.settings, "shard": None}, wanted, same)
        there = [stack.enter_context(Store.open(into))] if (into / schema.DATABASE).exists() else []
        seen: dict[str, tuple[str, Path]] = {}
        for store in [*there, *stores]:  # before anything is written
            for image in store.images():
                if image.status != "done":
                    continue
                store.keypoints(image.name)  # raises where they are damaged
                first, folder = seen.setdefault(image.name, (image.sha256, store.folder))
                if first != image.sha256:
                    other = f"in {folder} and another in {store.folder}: do the older run again"
                    raise UsageError(f"{image.name} is one image {other}, then join them")
        if not there:
            Store.create(into, wanted, stores[0].image_folder).close()
        writer = stack.enter_context(Writer(into))
        refuse_changes(into, writer.settings, wanted, same)
        overlays = {each.size: each for store in [*stores[::-1], writer] for each in store.overlays}
        with writer.transaction():
            writer.set_meta("overlays", schema.encode_overlays(overlays.values()))
        for store in stores:
            with writer.transaction():
                on_report(_join(writer, store, descriptors))
        others = sorted({str(store.image_folder) for store in stores} - {str(writer.image_folder)})
        if others and (lost := gone(writer)):
            lost = f"{counted(len(lost), 'image is', 'images are')} not in {writer.image_folder}"
            on_report(f"{lost}, where the joined run looks, but perhaps in {few(others)}: put them there")
        parts = [parse_shard(store.settings.get("shard")) for store in stores]
        if not (there or None in parts):  # either may hold what the others lack
            for n in sorted({n for _, n in parts}):
                absent = (f"{i}/{n}" for i in range(1, n + 1) if (i, n) not in parts)
                if some := list(islice(absent, 5)):
                    more = ", …" if any(absent) else ""
                    on_report(f"not among these runs: {', '.join(some)}{more} (--shard)")


def _join(writer: Writer, store: Store, descriptors: bool) -> str:
    names, differing, again = store.names(), set(), []
    writer.add_images(sorted(names.values()))
    ours = {number: writer.image(name).number for number, name in names.items()}
    columns = "status, reason, sha256, stamp, camera, width, height, count, scale_x, scale_y, exif, kind"
    for number, *row in store.rows(f"SELECT id, {columns} FROM images"):
        ((status,),) = writer.execute("SELECT status FROM images WHERE id = ?", ours[number])
        if status != DONE and (row[0] == DONE or row[0] > status):
            marks = ", ".join("?" * len(row))
            writer.execute(f"UPDATE images SET ({columns}) = ({marks}) WHERE id = ?", *row, ours[number])
            if descriptors and (record := store.record(number)) is not None:
                schema.unsealed(record, f"{store.folder}: the descriptors of {names[number]}")
                writer.put_descriptors(ours[number], record)
    for number, data in store.rows("SELECT image, data FROM keypoints"):
        writer.execute("INSERT OR IGNORE INTO keypoints VALUES (?, ?)", ours[number], data)
        if writer.execute("SELECT 1 FROM keypoints WHERE image = ? AND data != ?", ours[number], data):
            differing.add(number)

    def finished() -> Iterator[tuple]:
        for first, second, *rest in store.rows("SELECT image0, image1, seconds, data FROM pairs"):
            if differing.isdisjoint((first, second)):
                yield ours[first], ours[second], *rest
            else:
                again.append((ours[first], ours[second]))

    sql = "INSERT OR IGNORE INTO pairs (image0, image1, seconds, data) VALUES (?, ?, ?, ?)"
    joined = writer.execute_many(sql, finished())
    failed = ((ours[a], ours[b], reason) for a, b, reason in store.rows("SELECT * FROM failed"))
    writer.execute_many("INSERT OR REPLACE INTO failed VALUES (?, ?, ?)", failed)
    again += [(ours[a], ours[b]) for a, b in store.rows("SELECT image0, image1 FROM waiting")]
    writer.execute_many("INSERT OR IGNORE INTO waiting VALUES (?, ?)", again)
    # What is finished has not failed, and neither waits.
    writer.expire_refined()
    writer.execute("DELETE FROM failed WHERE (image0, image1) IN (SELECT image0, image1 FROM pairs)")
    known = "SELECT image0, image1 FROM pairs UNION ALL SELECT image0, image1 FROM failed"
    writer.execute(f"DELETE FROM waiting WHERE (image0, image1) IN ({known})")
    more = f"; keypoints of {len(differing)} images differ" if differing else ""
    others = {each.size for each in writer.overlays} - {each.size for each in store.overlays}
    for size in sorted(others.intersection(image.size for image in store.images())):
        more += "; its images of {} x {} keep keypoints on the overlay of other runs".format(*size)
    return f"{store.folder}: {joined} pairs joined{more}"


@dataclass(frozen=True, eq=False, repr=False)
class MatchedSet:
    """Images matched with each other, numbered as they were given; `match_set` makes one.

    >>> import matcher, numpy as np
    >>> scene = np.random.default_rng(0).integers(0, 255, (240, 400), dtype=np.uint8)
    >>> matcher.match_set([scene[:, :320], scene[:, 40:360]], "nearest", max_keypoints=300).groups()
    [[0, 1]]
    """

    names: tuple[str, ...]  # paths, or "image 3" for the array at index 3
    features: tuple[Features, ...]  # of each image, but none of what lies over most images of its size
    pairs: Mapping[tuple[int, int], tuple[Matches, TwoViewGeometry]]  # of images i < j
    tracks: Tracks  # of the inliers; its names are those above

    def matches(self, first: int, second: int) -> np.ndarray:
        """(K, 2) int64 keypoints of two images that are in one track, also where the two did not match.

        They are cycle-consistent: going on to a third image and back never leads to another keypoint.
        `UsageError`: numbers that are not of two images of the set.
        """
        if first == second or not {first, second} <= set(range(len(self.names))):
            raise UsageError(f"{first} and {second} are not two of the images 0 to {len(self.names) - 1}")
        table = self.tracks.table()
        columns = [table[table[:, 1] == image] for image in (first, second)]
        _, *rows = np.intersect1d(columns[0][:, 0], columns[1][:, 0], return_indices=True)
        return np.stack([column[row, 2] for column, row in zip(columns, rows, strict=True)], axis=1)

    def points(self, first: int, second: int) -> tuple[np.ndarray, np.ndarray]:
        """(K, 2) and (K, 2) stored pixels of `matches(first, second)`."""
        indices = self.matches(first, second).T
        ends = zip((first, second), indices, strict=True)
        return tuple(to_numpy(self.features[image].keypoints)[rows] for image, rows in ends)

    def groups(self) -> list[list[int]]:
        """The images joined by verified pairs, the largest group first; an image alone is a group."""
        group = {image: {image} for image in range(len(self.names))}
        for (first, second), (_, geometry) in self.pairs.items():
            if geometry.verified and group[first] is not group[second]:
                joined = group[first] | group[second]
                group.update(dict.fromkeys(joined, joined))
        distinct = {min(members): sorted(members) for members in group.values()}
        return sorted(distinct.values(), key=lambda members: (-len(members), members))

    def __repr__(self) -> str:
        verified = sum(geometry.verified for _, geometry in self.pairs.values())
        pairs = f"{verified} of {len(self.pairs)} pairs verified"
        return f"MatchedSet({len(self.names)} images, {pairs}, {len(self.tracks)} tracks)"


def match_set(
    images: Iterable[ImageInput] | str | Path,
    preset: str | Pipeline = DEFAULT_PRESET,
    *,
    masks: Iterable[Mask | None] | None = None,
    pairs: Iterable[tuple[int, int]] | None = None,
    **options: Unpack[LoadOptions],
) -> MatchedSet:
    """Match a few images with each other, in memory: panoramas, small sets. `Collection` is for many.

    Matches that agree with their pair's geometry are joined to tracks, the most probable first. Those that
    other images contradict, or that would put two keypoints of an image into one track, are left out. A pair
    of different places by its verdict is rejected (`low_inliers`), and one that others contradict as a whole;
    `tracks.contradicted` names the latter.

    >>> import matcher, numpy as np
    >>> scene = np.random.default_rng(0).integers(0, 255, (240, 400), dtype=np.uint8)
    >>> crops = [scene[:, start : start + 320] for start in (0, 40, 80)]
    >>> found = matcher.match_set(crops, "nearest", geometry="homography", max_keypoints=300)
    >>> len(found.pairs), int(found.tracks.lengths.max()), len(found.matches(0, 2)) > 100
    (3, 3, True)

    Args:
        images: at least two, as `Pipeline.match` takes them, or a folder of them.
        preset: a preset's name, with `options` of `matcher.load`; or a pipeline.
        masks: one for each image, None where there is none.
        pairs: numbers of the images to match; every pair when absent.

    Raises:
        ImageError: an image cannot be read; the message names it.
        UsageError: fewer than two images, another number of masks, pairs of no images, essential geometry, a
            preset without keypoints, and what `matcher.load` refuses.
    """
    images = find_images(Path(images)) if isinstance(images, (str, Path)) else images
    # Iterators are read once.
    images, masks, pairs = (each if each is None else list(each) for each in (images, masks, pairs))
    count = len(images)
    if count < 2:
        raise UsageError(f"a set has at least two images, not {count}")
    if masks is not None and len(masks) != count:
        raise UsageError(f"masks must be one for each of the {count} images, not {len(masks)}")
    for pair in pairs or ():
        if len(pair) != 2 or pair[0] == pair[1] or not set(pair) <= set(range(count)):
            raise UsageError(f"pairs must be of two of the images 0 to {count - 1}, not {tuple(pair)}")
    refuse_further_passes(options, "the pairs of a set share the keypoints of an image")
    pipeline = open_pipeline(preset, options)
    if pipeline.config.estimation.kind == "essential":
        raise UsageError("a set is verified without cameras; use geometry 'fundamental' or 'homography'")
    if pipeline.config.extractor.kind == GRID_KIND:
        raise UsageError("tracks join keypoints, and this preset has only the cells of a grid; use another")
    given = zip(images, masks or [None] * count, strict=True)
    features = [pipeline.features_of([pipeline.read(*one)])[0] for one in given]
    whole, features = features, without_common_overlays(features)
    overlaid = {number for number in range(count) if len(features[number]) < len(whole[number])}
    found = {}
    for first, second in combinations(range(count), 2) if pairs is None else map(sorted, pairs):
        if (first, second) not in found:
            ends = features[first], features[second]
            matches = pipeline.match_features(*ends)
            geometry, sizes = pipeline.verify(*ends, matches), (end.image_size for end in ends)
            geometry = beside_overlay(geometry) if {first, second} & overlaid else geometry
            found[first, second] = matches, reject_improbable(geometry, matches, *sizes, least=NOT)
    names: dict[str, None] = {}
    for number, image in enumerate(images):
        path = image if isinstance(image, (str, Path)) else getattr(image, "path", None)
        name = f"image {number}" if path is None else str(path)
        names[f"{name} ({number})" if name in names else name] = None
    named = tuple(names)
    keypoints, scales = ([to_numpy(getattr(one, n)) for one in features] for n in ("keypoints", "scale"))
    edges = {ends: Edge.of(*pair) for ends, pair in found.items() if pair[1].verified}
    scaled = {n: keypoints[n] * scales[n] for n in range(count)}
    gone = tracks.contradicted(edges, scaled, found.keys() - edges.keys())
    for ends in gone:
        matches, geometry = found[ends]
        found[ends] = matches, replace(geometry, status="low_inliers").without_rejected()
    usable = {ends: tracks.usable_matches(*pair) for ends, pair in found.items()}
    usable = {ends: both for ends, both in usable.items() if both is not None}
    rows_of = {ends: rows for ends, (rows, _) in usable.items()}
    right = tracks.consistent_matches(rows_of, keypoints, [float(np.sqrt(scale.prod())) for scale in scales])
    kept = [
        PairMatches(named[ends[0]], named[ends[1]], rows[right[ends]], scores[right[ends]])
        for ends, (rows, scores) in usable.items()
    ]
    joined = tracks.build_tracks(kept, {name: len(keypoints[n]) for n, name in enumerate(named)})
    conflicts = joined.conflicts + sum(int((~each).sum()) for each in right.values())
    left_out = tuple((named[first], named[second]) for first, second in gone)
    return MatchedSet(named, features, found, replace(joined, conflicts=conflicts, contradicted=left_out))
