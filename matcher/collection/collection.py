"""A collection of images as an object: open, add images, add pairs, run, read, export."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Unpack

from matcher.collection import pairlists, runner, schema
from matcher.collection.descriptors import file_path
from matcher.collection.engines import Workers, batch_size, start_engine
from matcher.collection.locking import StoreLock
from matcher.collection.pairlists import PairFault
from matcher.collection.planning import Changes, add_pairs, refresh_images
from matcher.collection.records import Counts, StoredPair
from matcher.collection.runner import OnProgress, RunReport
from matcher.collection.settings import Setup, build, describe, parse_shard, refuse_changes
from matcher.collection.sources import FeatureSource, Photos
from matcher.collection.store import Store, check_writable
from matcher.collection.workers import Engine
from matcher.collection.writer import Writer
from matcher.data.camera import Camera
from matcher.errors import UsageError
from matcher.presets import DEFAULT_PRESET, LoadOptions


class Collection:
    """Images and pairs in a store; see `open`.

        collection = matcher.Collection.open("run", max_keypoints=4096)
        collection.add_images("photos")
        collection.add_pairs(sequential=10)
        collection.run()
        for pair in collection:
            pair.name0, pair.name1, pair.matches, pair.geometry

    Results are on disk, so a run that was interrupted goes on where it was. A script needs no guard
    (`if __name__ == "__main__"`): workers do not import it.
    """

    def __init__(self, run_dir: Path, setup: Callable[[FeatureSource], Setup], workers: Workers) -> None:
        """Use `open`."""
        self.run_dir = run_dir
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
        workers: Workers | int | None = None,
        **options: Unpack[LoadOptions],
    ) -> Collection:
        """A run that exists, or one that the first `add_images` makes.

        Args:
            run_dir: folder of the store.
            preset: a name in `PRESETS`; one with keypoints of its own for each image.
            camera: of every image that has none of its own, for essential geometry.
            shard: "i/n", to match only part i of n of the pairs in this store.
            workers: what does the work, or the number of processes; None is one a core or GPU, 0 this one.
            options: as of `matcher.load`.

        Raises:
            UsageError: an unknown option or value.
        """
        part = parse_shard(shard)
        given = {name: value for name, value in options.items() if value is not None}
        for name in ("weights", "frontend_weights"):
            if isinstance(given.get(name), Path):
                given[name] = given[name].absolute()
        means = workers if isinstance(workers, Workers) else Workers(count=workers)
        return cls(Path(run_dir), lambda source: Setup(source, preset, given, camera, part), means)

    def add_images(
        self,
        folder: str | Path,
        *,
        masks: str | Path | None = None,
        features: str | Path | None = None,
        restart: bool = False,
    ) -> Changes:
        """Enter the images of a folder and its folders; a changed one is done again with its pairs.

        Args:
            folder: of the images.
            masks: folder of images that are not black where keypoints may lie, called as those they are of.
            features: keypoints and descriptors made elsewhere, in hloc's HDF5 layout, used instead of a front
                end.
            restart: throw away what the store holds.

        Returns:
            What is new and what has changed.

        Raises:
            UsageError: no folder, settings other than those of the store, another run writes it.
            IntegrityError: the store or the weights are damaged.
        """
        source: FeatureSource = Photos(Path(folder), None if masks is None else Path(masks))
        if features is not None:
            from matcher.collection.hloc_features import HlocFeatures

            if masks is not None:
                raise UsageError("masks are for extracting features; --features brings them ready-made")
            source = HlocFeatures(Path(folder), Path(features))
        if not source.names()[0]:  # said before anything is made
            raise UsageError(f"{folder} holds no images")
        setup = self._setup_of(source)
        settings = describe(setup, build(setup))
        check_writable(self.run_dir)
        if restart:
            clear(self.run_dir)
        if not (self.run_dir / schema.DATABASE).exists():
            Store.create(self.run_dir, settings, folder).close()
        with Writer(self.run_dir) as writer:
            refuse_changes(self.run_dir, writer.store.settings, settings)
            self._setup = setup
            return refresh_images(writer, source)

    def set_cameras(self, cameras: dict[str, Camera]) -> None:
        """Cameras of images by their names; they are used by essential geometry and by exports."""
        with Writer(self.run_dir) as writer, writer.transaction():
            for name, camera in cameras.items():
                if writer.store.image(name).camera != camera:
                    writer.put_camera(name, camera)
                    if writer.store.settings["config"]["estimation"]["kind"] == "essential":
                        writer.forget([name])

    def add_pairs(
        self,
        pairs: Iterable[tuple[str, str]] | None = None,
        *,
        file: str | Path | None = None,
        exhaustive: bool = False,
        sequential: int | None = None,
        similar: int | None = None,
        on_fault: Callable[[PairFault], None] | None = None,
        on_progress: OnProgress | None = None,
    ) -> tuple[int, int]:
        """Enter pairs in exactly one way; those that are finished stay finished.

        Args:
            pairs: names of images, as a stream.
            file: a pair list, two names a line.
            exhaustive: all pairs of the images.
            sequential: each image with so many that follow it by name.
            similar: each image with so many that look like it; extracts first.
            on_fault: told of the lines of `file` that give no pair.
            on_progress: progress of the extraction.

        Returns:
            Pairs (of this shard), and how many are new.

        Raises:
            UsageError: not exactly one way, a name that the run does not have, no `add_images` before.
        """
        given = [exhaustive, *(choice is not None for choice in (pairs, file, sequential, similar))]
        if sum(given) != 1:
            raise UsageError("pairs come from one of: names, a file, every pair, neighbours, similar images")
        setup = self._ready()
        if similar is not None:
            self.extract(everything=True, on_progress=on_progress)
        with Writer(self.run_dir) as writer:
            names = sorted(writer.store.names().values())
            if file is not None:
                pairs = pairlists.read_pairs(file, names, on_fault)
            elif exhaustive:
                pairs = pairlists.exhaustive(names)
            elif sequential is not None:
                pairs = pairlists.sequential(names, sequential)
            elif similar is not None:
                pairs = _pair_similar(writer.store, similar)
            return add_pairs(writer, pairs, setup.shard)

    def extract(self, *, everything: bool = False, on_progress: OnProgress | None = None) -> int:
        """Features of the images whose pairs wait, or of all; how many images were read."""
        with Writer(self.run_dir) as writer, closing(self._start()) as engine:
            source = self._ready().source
            return runner.extract(
                writer, engine, source, everything=everything, on_progress=on_progress or _silent
            )

    def run(
        self, *, retry_failed: bool = False, everything: bool = False, on_progress: OnProgress | None = None
    ) -> RunReport:
        """Extract and match what waits, in worker processes.

        Args:
            retry_failed: try images and pairs again that failed before.
            everything: extract also images that are in no pair, and descriptors that were deleted.
            on_progress: called with the progress, at most a few times a second.

        Raises:
            ImageError: no image at all can be used.
            UsageError: another run writes the store, no `add_images` before.
            OSError: the disk is full; what was committed stays, and the next run goes on.
        """
        setup, on_progress = self._ready(), on_progress or _silent
        with Writer(self.run_dir) as writer:
            if retry_failed:
                with writer.transaction():
                    writer.retry_failed()
            with closing(self._start()) as engine:
                extracted = runner.extract(
                    writer, engine, setup.source, everything=everything, on_progress=on_progress
                )
                matched = runner.match(
                    writer, engine, batch=batch_size(setup, self.workers), on_progress=on_progress
                )
                return RunReport(extracted, matched, engine.crashes, writer.store.counts())

    @property
    def store(self) -> Store:
        """The reading side, opened anew; close it after use (`with collection.store as store`)."""
        return Store.open(self.run_dir)

    def counts(self) -> Counts:
        """How far the run has come."""
        with self.store as store:
            return store.counts()

    def __iter__(self) -> Iterator[StoredPair]:
        """Finished pairs, one after another."""
        with self.store as store:
            yield from store.pairs()

    def export(self, form: str, out: str | Path) -> Any:
        """Write what another program reads: "colmap", "hloc", "npz", "openmvg" or "kapture".

        Args:
            form: name of the format.
            out: file or folder to be made.

        Returns:
            The report of the exporter: what was written and what was left out.

        Raises:
            UsageError: an unknown format, an output that cannot be written, names it cannot hold.
        """
        from matcher.collection.exporting.formats import export

        with self.store as store:
            return export(store, form, out)

    def _start(self) -> Engine:
        return start_engine(self.run_dir, self._ready(), self.workers)

    def _ready(self) -> Setup:
        if self._setup is None:
            raise UsageError("say first where the images are: collection.add_images(FOLDER)")
        return self._setup


def _pair_similar(store: Store, k: int) -> Iterable[tuple[str, str]]:
    """Each image with the `k` that look most like it, by a descriptor aggregated from its local ones."""
    from matcher.match.retrieval import similar_pairs

    names = [image.name for image in store.images() if image.status == "done"]
    return similar_pairs(names, store.features, k)


def clear(run_dir: Path) -> None:
    """Delete a store's own files and leave all others.

    Raises:
        UsageError: a run is writing it, or `run.db` is a database of something else.
    """
    if not schema.is_store(run_dir / schema.DATABASE):
        raise UsageError(
            f"{run_dir / schema.DATABASE} is no store of a matcher run, so --restart does not delete it: "
            "move it away, or name another folder (--run)"
        )
    lock = StoreLock(run_dir)
    try:
        for suffix in ("-wal", "-shm", "-journal", ""):
            (run_dir / f"{schema.DATABASE}{suffix}").unlink(missing_ok=True)
        for path in run_dir.glob(file_path(run_dir, 0).name.replace("00000", "[0-9]*")):
            path.unlink()
    finally:
        lock.release()


def _silent(_: runner.StageProgress) -> None:
    pass
