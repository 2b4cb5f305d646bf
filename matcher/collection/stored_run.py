"""A run on disk: its contents, exports and reconstructions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from matcher.collection.records import Counts, StoredPair
from matcher.collection.selection import Selection
from matcher.collection.store import Store
from matcher.errors import MatcherError, UsageError

if TYPE_CHECKING:
    from matcher.collection.exporting.cameras import CameraChoice
    from matcher.collection.exporting.output import ExportReport
    from matcher.collection.reconstruction.reconstruct import MappingOptions, Reconstruction
    from matcher.collection.tracks import Tracks


class StoredRun:
    """The reading side of a `Collection`: pairs, tracks, exports, reconstructions; also beside a running one.

    Raises, in every method: `UsageError` where there is no run, `IntegrityError` where it is damaged.
    """

    def __init__(self, run_dir: str | Path) -> None:
        """The run in that folder."""
        self.run_dir = Path(run_dir)

    @property
    def store(self) -> Store:
        """The reading side, newly opened; close it after use (`with collection.store as store`)."""
        return Store.open(self.run_dir)

    def counts(self) -> Counts:
        """Progress of the run."""
        with self.store as store:
            return store.counts()

    def tracks(self, *, min_length: int = 2) -> Tracks:
        """Keypoints of several images that show one point of the scene, joined from the verified matches.

        Args:
            min_length: images of a track at least; 2 or more.

        Raises:
            UsageError: there is no run.
            IntegrityError: the store is damaged.
        """
        from matcher.collection.tracks import tracks_of

        with self.store as store:
            return tracks_of(store, min_length=min_length)

    def __iter__(self) -> Iterator[StoredPair]:
        """Finished pairs, one after another."""
        with self.store as store:
            yield from store.pairs()

    def __repr__(self) -> str:
        """Folder, preset, images and pairs, in one line."""
        try:
            with self.store as store:
                counts, preset = store.counts(), store.settings.get("preset")
        except UsageError:
            return f"Collection({str(self.run_dir)!r}, no images yet)"
        except (MatcherError, OSError) as error:
            return f"Collection({str(self.run_dir)!r}, unreadable: {type(error).__name__})"
        images = f"{counts.images_done} of {counts.images} images"
        pairs = f"{counts.pairs_done} of {counts.pairs} pairs"
        return f"Collection({str(self.run_dir)!r}, {preset}, {images} and {pairs} done)"

    def export(
        self,
        form: str,
        out: str | Path,
        *,
        cameras: CameraChoice | None = None,
        overwrite: bool = False,
    ) -> ExportReport:
        """Export the run for another program: "colmap", "hloc", "npz", "openmvg" or "kapture".

        Args:
            form: name of the format.
            out: file (colmap: .db, npz: .npz) or folder to create.
            cameras: which images share a camera, and what is known of it (colmap, openmvg, kapture); None
                takes them from the run, from EXIF, or guesses.
            overwrite: replace what exists; see `exporting.formats.export`.

        Returns:
            What was written and what was left out.

        Raises:
            UsageError: an unknown format, an output that exists or cannot be written, names or cameras that
                the format cannot hold.
            IntegrityError: the store is damaged.
        """
        from matcher.collection.exporting.formats import export

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
        """Reconstruct cameras and 3D points from the verified matches with COLMAP; needs pycolmap.

        Args:
            out: folder to create: COLMAP models, points as PLY, a plot, statistics as JSON.
            cameras: as in `export`; given ones are kept as they are by the incremental mapper.
            include: names, folders or globs of the images to use; all of the run when absent.
            exclude: the same, for images to leave out.
            options: mapper, min_images, threads, seed, overwrite; see `reconstruction.reconstruct`.

        Returns:
            The models, largest first: poses `cam_from_world` (3, 4) by image name, cameras, numbers.

        Raises:
            UsageError: pycolmap is absent, `out` exists, or fewer than two images have features.
            ReconstructionError: no model was found, or COLMAP's process ended early.
        """
        from matcher.collection.reconstruction.reconstruct import reconstruct

        selection = Selection.parse(include, exclude)
        with self.store as store:
            only = selection.apply(image.name for image in store.images())
            return reconstruct(store, out, choice=cameras, only=only, **options)
