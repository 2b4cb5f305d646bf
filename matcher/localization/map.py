"""A reconstruction to come back to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any, Unpack

import numpy as np

from matcher.cameras import Camera, RigConfig, as_camera, camera_of_each
from matcher.collection.settings import differences, feature_settings, stored_pipeline
from matcher.collection.sources import HlocFeatures, Photos
from matcher.collection.store import Store
from matcher.collection.tracks import ImagePyramids
from matcher.config import PipelineConfig, from_dict, to_dict
from matcher.errors import ImageError, UsageError
from matcher.images import ImageInput
from matcher.localization.localizer import Localizer, Query, mounted
from matcher.localization.pose import Pose
from matcher.localization.sparse_map import LocalizationConfig, SparseMap, open_index, read_sparse_map
from matcher.pipeline import Mask
from matcher.presets import PRESETS, LoadOptions, configure
from matcher.refine import ImagePyramid
from matcher.sfm.models import find_model, find_run, is_model, read_georegistration, read_summary
from matcher.types import Features


class Map:
    """Images with poses, the points that they see, and their features; `open` reads one.

        >>> import matcher
        >>> matcher.Map.open("no-such-folder")
        Traceback (most recent call last):
            ...
        matcher.errors.UsageError: no-such-folder is not a folder; a map is what `matcher sfm` writes

    What localises a photo are the points, their observations, the features in the run's store, and, for
    keypoints exact to a fraction of a pixel, the images where they still are.
    """

    def __init__(self, store: Store, localizer: Localizer, place: dict[str, Any] | None = None) -> None:
        """Use `open`."""
        self._store = store
        self.localizer = localizer
        # Where on Earth it is, if known: "origin" is latitude, longitude and altitude of (0, 0, 0); poses are
        # in metres, x east, y north, z up.
        self.georegistration = place

    @classmethod
    def open(
        cls,
        model: str | Path,
        *,
        run_dir: str | Path | None = None,
        config: LocalizationConfig | None = None,
        **options: Unpack[LoadOptions],
    ) -> Map:
        """Open the map in a folder that `matcher sfm` or `Collection.reconstruct` wrote, or a COLMAP model.

        Args:
            model: the folder, or that of `matcher track --map`; of several models in it, the largest.
            run_dir: folder of the run with the features; by default the one that the model was made from.
                Another one must have the same features (front end, its weights and settings), and may
                match them by another network: runs of `nearest` and `hybrid` share their maps. For a model
                of another program, make both by `matcher sfm PHOTOS --poses MODEL --out NEW`, as `matcher
                localize MODEL PHOTOS --pictures DIR` does.
            config: policy: how many images a photo is matched with, when a pose is refused.
            options: of `matcher.load` that no run holds: device, precision, weights, frontend_weights; and
                max_keypoints and resize of the photos that are localised, else as of the map's images.

        Raises:
            UsageError: no model or run, a model without points, or of other features than the run's, or
                other weights than the run's.
            IntegrityError: the model or the run is damaged, or they do not belong together.
        """
        folder = Path(model)
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder; a map is what `matcher sfm` writes")
        if not is_model(folder) and (folder / "model").is_dir():  # of a map of keyframes
            folder /= "model"
        find_model(folder)  # or say that there is none, before the run is missed that it would name
        store = Store.open(find_run(folder) if run_dir is None else Path(run_dir))
        try:
            localizer = _localizer(folder, store, config or LocalizationConfig(), options)
            return cls(store, localizer, read_georegistration(folder))
        except BaseException:
            store.close()
            raise

    def close(self) -> None:
        """Close the run's store; the map cannot be used afterwards."""
        self._store.close()

    def __enter__(self) -> Map:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def model(self) -> SparseMap:
        """Images, poses and points as arrays."""
        return self.localizer.model

    @property
    def names(self) -> tuple[str, ...]:
        """The map's images."""
        return self.model.names

    @property
    def absent(self) -> tuple[str, ...]:
        """Images of the map on which keypoints should have been refined, and whose files are gone."""
        return tuple(sorted(self.localizer.absent))

    def image_path(self, name: str) -> Path:
        """Where an image of the map was when its features were found."""
        return self._store.image_folder / name

    def localize(
        self, image: ImageInput | Features, camera: Camera | None = None, *, mask: Mask | None = None
    ) -> Pose:
        """Where a photo was taken.

        The photo is compared with all images of the map by global descriptors; it is matched with the most
        similar ones, first those that see the same points, until the pose is sure.

        Args:
            image: a path, an `Image`, a PIL image, an array, or features of the map's front end.
            camera: as `Camera`, four numbers fx, fy, cx, cy in stored pixels, or a matrix K; None: from EXIF,
                from the map's images of that size, or estimated with the pose.
            mask: not zero where keypoints may lie, as in `Pipeline.match`.

        Returns:
            The pose, or why there is none (`Pose.status`, `Pose.reason`).

        Raises:
            ImageError: the image cannot be read.
            UsageError: a camera or a mask of another size, a mask beside features, or features of another
                front end.
        """
        return self.localizer.localize([self.query(image, camera, mask=mask)])[0]

    def localize_rig(
        self,
        images: Sequence[ImageInput | Features],
        cam_from_rig: Sequence[np.ndarray],
        cameras: Camera | Sequence[Camera],
        *,
        masks: Sequence[Mask | None] | None = None,
    ) -> list[Pose]:
        """Where pictures with known relative poses were taken: a rig, a stereo pair, the last frames.

        All have one pose of the rig and one status; pictures with few matches of their own profit most.

        Args:
            images: R of them, each as in `localize`.
            cam_from_rig: R poses (4, 4) in the map's units; one of them may be the identity.
            cameras: one for all, or one for each, as in `localize`.
            masks: one for each, as in `localize`; None for pictures without one.

        Returns:
            The pose of each picture.

        Raises:
            ImageError, UsageError: as in `localize`, and for another number of poses, cameras or masks.
        """
        each = camera_of_each(cameras, len(images))
        if masks is not None and len(masks) != len(images):
            raise UsageError(f"masks must be one for each of the {len(images)} pictures, not {len(masks)}")
        given = zip(images, each, [None] * len(images) if masks is None else masks, strict=True)
        queries = [self.query(image, camera, mask=mask) for image, camera, mask in given]
        return self.localizer.localize(mounted(queries, cam_from_rig))

    def query(
        self, image: ImageInput | Features, camera: Camera | None = None, *, mask: Mask | None = None
    ) -> Query:
        """A photo ready to be localised; arguments and errors as in `localize`."""
        pipeline, start = self.localizer.pipeline, perf_counter()
        if isinstance(image, Features):
            if mask is not None:
                raise UsageError("masks only affect the extraction of keypoints; leave it away with features")
            query = Query(image, None)
        elif not _extracted(self._store):
            raise UsageError(
                "this map's features come from a file, so those of a photo must be given: "
                "`matcher localize --features FILE.h5`, or localize(matcher.Features(…))"
            )
        else:
            pixels = pipeline.read(image, mask)
            read = perf_counter()
            (features,) = pipeline.features_of([pixels])
            seconds = {"read": read - start, "extract": perf_counter() - read}
            query = Query(features, None, pixels.path and Path(pixels.path), seconds=seconds)
            if self.localizer.config.refine and pipeline.config.refine is not None:
                query.pyramid = ImagePyramid.of(pixels)
        if camera is not None:
            given, size = as_camera(camera), query.features.image_size
            if given.size not in (None, size):
                name = "" if query.path is None else f"{query.path}: "
                raise UsageError(
                    f"{name}the camera is of images of {given.size[0]} x {given.size[1]} pixels, and the "
                    f"photo has {size[0]} x {size[1]}: give the camera of its own size, or none"
                )
            query.camera = replace(given, size=size)
        return query

    def __repr__(self) -> str:
        count, points = len(self.names), len(self.model.xyz)
        return f"Map({count} images, {points} points, {self.localizer.pipeline.preset})"


def _extracted(store: Store) -> bool:
    """Whether a front end found the features of a run, which else are from a file."""
    return store.settings["source"]["kind"] == "photos"


def _localizer(folder: Path, store: Store, config: LocalizationConfig, options: LoadOptions) -> Localizer:
    model = read_sparse_map(folder, store)
    recorded, own = read_summary(folder).get("features"), feature_settings(store.settings)
    if isinstance(recorded, dict) and (found := differences(recorded, own, ("in the model", "in the run"))):
        raise UsageError(
            f"{folder} was made from other features than those of the run {store.folder} "
            f"({'; '.join(found[:3])}): name the run of this model, or triangulate its poses with these "
            f"features by `matcher sfm {store.folder} --poses {folder} --out NEW_MODEL`"
        )
    photos, settings, extracted = Photos(store.image_folder), store.settings, _extracted(store)
    sizes = {name: options[name] for name in ("max_keypoints", "resize") if options.get(name) is not None}
    if sizes and extracted and settings["preset"] in PRESETS:
        changed = configure(from_dict(PipelineConfig, settings["config"]), sizes)
        settings = {**settings, "config": to_dict(changed)}
        options = {name: value for name, value in options.items() if name not in sizes}
    source = photos if extracted else HlocFeatures(store.image_folder, store.folder)
    digests = {image.name: image.sha256 for image in store.images() if image.status == "done"}
    # Digests of masked images are those of both files, and the masks may be gone.
    known = extracted and not settings["source"].get("masks")
    place = {name: row for row, name in enumerate(model.names)}
    return Localizer(
        model=model,
        pipeline=stored_pipeline(settings, source, options),
        index=open_index(store.folder, list(digests), list(digests.values()), store.features),
        rows=np.array([place.get(name, -1) for name in digests], dtype=np.int64),
        features=lru_cache(256)(store.features),
        images=ImagePyramids(
            [store.image_folder / name for name in model.names],
            [camera.size for camera in model.cameras],
            [1 / float(np.sqrt(np.prod(store.scale(name)))) for name in model.names],
            lambda row: known and photos.digest(model.names[row]) != digests[model.names[row]],
        ),
        path=lambda name: store.image_folder / name,
        absent=set(),
        config=config,
    )


# --- Photos by the cameras of a rig


def localize_frames(
    place: Map,
    photos: Mapping[str, Path],
    rig: RigConfig,
    cameras: Mapping[str, Camera],
    masks: Mapping[str, Path] | None = None,
) -> Iterator[tuple[str, Pose | ImageError]]:
    """The pose of each photo, those of one moment together, those of no rig alone.

    Args:
        place: the map, in the units of the rig's poses.
        photos: path by name; the names of those of one moment differ in the prefix of their camera only.
        rig: see `read_rig_config`.
        cameras: by name; others are those of the rig's file, or of a picture of the map with their prefix.
        masks: by name, of photos that have one.

    Returns:
        Names with a pose, or with why a photo cannot be read.

    Raises:
        UsageError: names that do not fit the rig, cameras whose relative poses or intrinsics are not known.
    """
    if not rig.known:
        raise UsageError(
            f"{rig.source} does not say how its cameras are fixed to each other: give cam_from_rig_rotation "
            "and cam_from_rig_translation, or take the rig_config.json of a model that was made of a rig"
        )
    frames, masks, by_prefix = rig.frames(photos), masks or {}, {}
    for name, camera in zip(place.names, place.model.cameras, strict=True):
        if (mount := rig.camera_of(name)) is not None:
            by_prefix[mount.prefix] = replace(camera, size=None)
    by_prefix |= rig.intrinsics()
    fixed = {name: mount for frame in frames for name, mount in frame.items()}
    known = {name: by_prefix.get(mount.prefix) for name, mount in fixed.items()} | cameras
    if absent := [name for name in fixed if known[name] is None]:
        raise UsageError(
            f"the intrinsics of {absent[0]} are not known: give them in {rig.source} or as a camera"
        )
    for frame in [*frames, *([name] for name in photos if name not in fixed)]:
        queries: dict[str, Query] = {}
        for name in frame:
            try:
                queries[name] = place.query(photos[name], known.get(name), mask=masks.get(name))
            except ImageError as error:
                yield name, error
        own = list(queries.values())
        if len(queries) > 1:
            own = mounted(own, [fixed[name].cam_from_rig for name in queries])
        if queries:
            yield from zip(queries, place.localizer.localize(own), strict=True)
