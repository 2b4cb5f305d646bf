"""A collection of images: open, add images and pairs, run, read, export, reconstruct."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Unpack

from matcher.collection import pairlists, runner
from matcher.collection.engines import Workers, batch_size, start_engine
from matcher.collection.hloc_features import find_source
from matcher.collection.pair_choice import PairChoice, default_choice, requested_choice
from matcher.collection.pair_finding import chosen_pairs
from matcher.collection.pairlists import PairFault
from matcher.collection.planning import ImageChanges, add_pairs, refresh_images
from matcher.collection.reverification import check_cameras, verify_again
from matcher.collection.run_folder import check_writable, delete_store
from matcher.collection.runner import OnProgress, RunReport
from matcher.collection.selection import Selection
from matcher.collection.settings import (
    Setup,
    build,
    describe,
    parse_shard,
    refuse_changes,
    stored_setup,
)
from matcher.collection.sources import FeatureSource, check_masks
from matcher.collection.store import Store
from matcher.collection.stored_run import StoredRun
from matcher.collection.workers import Engine
from matcher.collection.writer import Writer
from matcher.data.camera import Camera, as_camera
from matcher.errors import UsageError
from matcher.options import LoadOptions
from matcher.presets import DEFAULT_PRESET


class Collection(StoredRun):
    """Images and pairs in a store on disk; see `open`.

    >>> import matcher, numpy as np, pathlib, PIL.Image
    >>> pathlib.Path("photos").mkdir()
    >>> scene = np.random.default_rng(0).integers(0, 255, (240, 340), dtype=np.uint8)
    >>> for number in range(2):
    ...     PIL.Image.fromarray(scene[:, number : number + 320]).save(f"photos/{number}.png")
    >>> collection = matcher.Collection.open("run", preset="nearest", max_keypoints=200)
    >>> _ = collection.add_images("photos"), collection.add_pairs(exhaustive=True), collection.run()
    >>> [(pair.name0, pair.name1, len(pair.matches) > 50) for pair in collection]
    [('0.png', '1.png', True)]

    Results are on disk, so an interrupted run continues where it stopped. A script needs no
    `if __name__ == "__main__"` guard: worker processes do not import it.
    """

    def __init__(self, run_dir: Path, setup: Callable[[FeatureSource], Setup], workers: Workers) -> None:
        """Use `open`."""
        super().__init__(run_dir)
        self.workers = workers
        self._setup_of = setup
        self._setup: Setup | None = None

    @classmethod
    def open(
        cls,
        run_dir: str | Path,
        *,
        preset: str = DEFAULT_PRESET,
        camera: Camera | None = None,
        shard: str | None = None,
        tiles: int | None = None,
        workers: Workers | int | None = None,
        **options: Unpack[LoadOptions],
    ) -> Collection:
        """Open an existing run, or prepare a new one that the first `add_images` creates.

            >>> from matcher import Collection
            >>> Collection.open("no-such-run", preset="nearest")
            Collection('no-such-run', no images yet)

        Args:
            run_dir: folder of the store.
            preset: a name in `PRESETS`; not a detector-free one (loftr-…), whose keypoints differ from pair
                to pair.
            camera: camera of every image without one from `set_cameras`, for exports; needed for essential
                geometry.
            shard: "i/n", i from 1 to n: match only part i of n of the pairs in this store.
            tiles: keypoints of an image, found by tiles at full resolution; `max_keypoints` are those of a
                tile then, and pairs are matched window by window (`matcher.tiling.shared.by_tiles`).
            workers: number of worker processes or a `Workers`; None: one per core or GPU, 0: this process.
            options: as for `matcher.load`.

        Raises:
            UsageError: an unknown option or value.
        """
        part = parse_shard(shard)
        given = {name: value for name, value in options.items() if value is not None}
        for name in ("weights", "frontend_weights"):
            if isinstance(given.get(name), Path):
                given[name] = given[name].absolute()
        means = workers if isinstance(workers, Workers) else Workers(count=workers)
        common = None if camera is None else as_camera(camera)
        setup = partial(Setup, preset=preset, options=given, camera=common, shard=part, tiles=tiles)
        return cls(Path(run_dir), setup, means)

    @classmethod
    def reopen(
        cls, run_dir: str | Path, *, workers: Workers | int | None = None, **options: Unpack[LoadOptions]
    ) -> Collection:
        """Open an existing run with the settings that it was made with.

        Args:
            run_dir: folder of the store.
            workers: as in `open`.
            options: weights, frontend_weights, device: what the run does not hold.

        Raises:
            UsageError: there is no run.
            IntegrityError: it is damaged, or was made by another version.
        """
        with Store.open(run_dir) as store:
            settings = store.settings
        given = {"precision": settings["precision"]}
        given |= {name: value for name, value in options.items() if value is not None}
        means = workers if isinstance(workers, Workers) else Workers(count=workers)
        return cls(Path(run_dir), lambda source: stored_setup(settings, source, given), means)

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
        """Add the images below a folder; an image whose content has changed is processed again.

        Args:
            folder: the image folder.
            masks: folder of mask images, black where keypoints are not allowed; a mask has the name of its
                image, with .png appended or in place of the suffix if it differs.
            features: HDF5 file with existing keypoints and descriptors in hloc's layout, used instead of a
                front end.
            include: names, folders or globs of the images to take; `@FILE` is a list (see `Selection`).
            exclude: the same, for images to leave out.
            restart: delete the contents of the store first.

        Returns:
            What is new, what has changed and what is gone.

        Raises:
            UsageError: no such folder, no images, no mask for any of them, a pattern that matches nothing,
                settings that differ from the store's, or another run is writing it.
            IntegrityError: the store or the weights are damaged.
        """
        selection = Selection.parse(include, exclude)
        source = find_source(Path(folder), masks, features, selection)
        masked = check_masks(source)  # before anything is created
        setup = self._setup_of(source)
        settings = describe(setup, build(setup))
        check_writable(self.run_dir)
        if restart:
            delete_store(self.run_dir)
        Store.create_if_absent(self.run_dir, settings, folder)
        with Writer(self.run_dir) as writer:
            refuse_changes(self.run_dir, writer.store.settings, settings)
            self._setup = setup
            return refresh_images(writer, source, masked)

    def set_cameras(self, cameras: Mapping[str, Camera]) -> int:
        """Set the cameras of images by name, in stored pixels, for essential geometry and exports.

        With geometry "essential", finished pairs of images whose camera changes are verified again in this
        process, from the stored matches; features and matches are kept.

        Returns:
            The number of pairs that were verified again.

        Raises:
            UsageError: a name that the run does not have, no camera, or another run is writing the store.
        """
        wanted = {name: as_camera(camera, f"the camera of {name}") for name, camera in cameras.items()}
        with Writer(self.run_dir) as writer, writer.transaction():
            changed = [name for name in wanted if writer.store.image(name).camera != wanted[name]]
            for name in changed:
                writer.put_camera(name, wanted[name])
            return verify_again(writer, changed)

    def suggest_pairs(self, **limits: int) -> PairChoice | None:
        """Suggest pairs for images that have none: chosen as in the run so far, else by the number of images.

        Args:
            limits: as of `default_choice`: `exhaustive_up_to` images every pair is matched (50), in larger
                collections each image is paired with `neighbours` similar ones (20), of which `preemptive`
                keeps those whose strongest keypoints agree.

        Returns:
            An argument for `add_pairs`, or None if every image has a pair. Its method is "names" or "file" if
            the run's pairs came from a list: then only the user can choose further pairs.
        """
        with self.store as store:
            if not store.unpaired():
                return None
            before, counts = store.pair_choice, store.counts()
        if before is None and counts.pairs:
            return PairChoice("names")  # by a version that did not keep it
        if before is None or before.by_default:
            images = len(self._ready().source.names()[0])
            return default_choice(images, **limits)
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
        on_fault: Callable[[PairFault], None] | None = None,
        on_progress: OnProgress | None = None,
    ) -> tuple[int, int]:
        """Add pairs, chosen in exactly one way; finished pairs stay finished.

        Args:
            pairs: an iterable of two image names each, or the result of `suggest_pairs`.
            file: a pair list, two names per line (see `pairlists`).
            exhaustive: pair all images with each other.
            sequential: pair each image with this many that follow it in natural order of the names.
            similar: pair each image with this many most similar ones; extracts features first.
            preemptive: of these, and of those taken nearby, the pairs whose strongest keypoints agree.
            nearby: pair each image with this many nearest ones, by the GPS positions of their EXIF headers.
            on_fault: called for every line of `file` that yields no pair.
            on_progress: called with the progress of the extraction and of the choice.

        Returns:
            The number of pairs (of this shard), and how many of them are new.

        Raises:
            UsageError: not exactly one way, a name that is not in the run, or no `add_images` before.
        """
        counts = dict(sequential=sequential, similar=similar, preemptive=preemptive, nearby=nearby)
        choice = requested_choice(pairs, file, exhaustive, **counts)
        setup = self._ready()
        if choice.needs_features:
            self.extract(everything=True, on_progress=on_progress)
        with Writer(self.run_dir) as writer:
            if choice.method == "names":
                found = pairs
            elif choice.method == "file":
                names = sorted(writer.store.names().values())
                found = pairlists.read_pairs(file, names, on_fault)
            else:
                names = self._selected(writer.store, choice)
                found = chosen_pairs(choice, names, writer.store, setup, on_progress or _silent)
            added = add_pairs(writer, found, setup.shard)
            writer.set_pair_choice(choice)
            return added

    def extract(self, *, everything: bool = False, on_progress: OnProgress | None = None) -> int:
        """Extract the images of waiting pairs, or all; returns the number processed; errors as of `run`."""
        with Writer(self.run_dir) as writer, closing(self._start()) as engine:
            check_cameras(writer.store, self._ready().camera)
            how = {"everything": everything, "on_progress": on_progress or _silent}
            how["batch"] = batch_size(self._ready(), self.workers)
            return runner.extract(writer, engine, self._ready().source, **how)

    def run(
        self,
        *,
        retry_failed: bool = False,
        everything: bool = False,
        on_progress: OnProgress | None = None,
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
        setup, on_progress = self._ready(), on_progress or _silent
        with Writer(self.run_dir) as writer:
            check_cameras(writer.store, setup.camera)
            if retry_failed:
                with writer.transaction():
                    writer.retry_failed()
            with closing(self._start()) as engine:
                how = {"batch": batch_size(setup, self.workers), "on_progress": on_progress}
                extracted = runner.extract(writer, engine, setup.source, everything=everything, **how)
                matched = runner.match(writer, engine, **how)
                return RunReport(extracted, matched, engine.crashes, writer.store.counts())

    def _start(self) -> Engine:
        return start_engine(self.run_dir, self._ready(), self.workers)

    def _ready(self) -> Setup:
        if self._setup is None:
            raise UsageError("add the images first: collection.add_images(FOLDER)")
        return self._setup

    def _selected(self, store: Store, choice: PairChoice) -> list[str]:
        """The names that `add_images` found, with features where those are compared; others get no pairs."""
        found, anyone = set(self._ready().source.names()[0]), not choice.needs_features
        return sorted(i.name for i in store.images() if i.name in found and (anyone or i.status == "done"))


def _silent(_: runner.StageProgress) -> None:
    pass
