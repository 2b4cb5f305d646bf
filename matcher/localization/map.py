"""A reconstruction to come back to: similar images of a photo, matches with their points, a pose.

A photo, or the pictures of a rig, is a `Query`; its pose is tried with ever more images until it is sure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, Unpack

import numpy as np

from matcher.cameras import Camera, CameraInput, RigConfig, as_camera, camera_of_each, focal_of_film
from matcher.collection.pairs import COLUMNS, MISSING, NOT_ASKED, read_pairs
from matcher.collection.settings import differences, feature_settings, stored_pipeline
from matcher.collection.sources import HlocFeatures, NameTable, Photos
from matcher.collection.store import Store
from matcher.collection.tracks import ImagePyramids
from matcher.config import PipelineConfig, from_dict
from matcher.errors import ImageError, UsageError, counted
from matcher.export.colmap import CameraChoice, known_cameras, read_exif
from matcher.geometry import check_poses
from matcher.images import ImageInput
from matcher.localization.pose import (
    Estimates,
    Judgement,
    Matches3d,
    Pose,
    any_camera,
    check_ambiguous,
    check_camera,
    check_focal,
    check_rig_pose,
    estimate_poses,
    judge,
    refine_poses,
)
from matcher.localization.sparse_map import LocalizationConfig, SparseMap, open_index, read_sparse_map
from matcher.pipeline import Mask
from matcher.presets import PRESETS, LoadOptions, configure
from matcher.refine import ImagePyramid, refine_matches
from matcher.sfm.models import find_model, find_run, is_model, read_georegistration, read_summary
from matcher.types import Features, Matches, strongest, strongest_rows, to_numpy


@dataclass(eq=False)
class Query:
    """A photo on its way through the stages."""

    features: Features
    camera: Camera | None = None  # of its size; None: to be found
    path: Path | None = None
    pyramid: ImagePyramid | None = None
    cam_from_rig: np.ndarray | None = None  # (4, 4)
    partners: Sequence[str] | None = None  # the map's images to match it with; None: similar ones
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add what passes to a stage's seconds."""
        start = perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + perf_counter() - start


class Correspondences:
    """Matches of a photo with the points of a map, through the tracks of the images it is matched with."""

    def __init__(self, model: SparseMap, query: Query, max_error: float) -> None:
        """`max_error`: of an inlier, pixels of the resized photo."""
        self.model, self.query = model, query
        self.positions = to_numpy(query.features.keypoints).astype(np.float64)
        self.max_error = max_error / float(np.sqrt(np.prod(query.features.scale.tolist())))
        self.rows: dict[int, np.ndarray] = {}  # of each image, as in `Matches3d.table`
        self.scores = [np.zeros(0)]

    def add(self, image: int, matches: Matches) -> None:
        """The matches of a map image (image 0) with the photo (image 1)."""
        theirs, ours = matches.indices.reshape(-1, 2).T
        points = self.model.points[image][theirs]
        columns = ours, points, np.full(len(ours), image), theirs
        self.rows[image] = np.column_stack(columns)[points >= 0].astype(np.int64)
        self.scores.append(np.asarray(matches.scores[points >= 0], dtype=np.float64))

    def matches(self) -> Matches3d:
        """Each pair of keypoint and point once, by its best score."""
        rows = np.concatenate([np.zeros((0, 4), np.int64), *self.rows.values()])
        rows = rows[np.argsort(-np.concatenate(self.scores), kind="stable")]
        rows = rows[np.sort(np.unique(rows[:, :2], axis=0, return_index=True)[1])]
        points = self.positions[rows[:, 0]], self.model.xyz[rows[:, 1]]
        return Matches3d(*points, rows, self.max_error, self.query.cam_from_rig)


class Attempt(NamedTuple):
    """The pose of all pictures from the images of one cluster; lists have an item for each picture."""

    found: list[Correspondences]
    matches: list[Matches3d]
    estimates: Estimates | None
    verdict: Judgement


class Map(AbstractContextManager):
    """Images with poses, the points that they see, and their features; `open` reads one.

        >>> import matcher
        >>> matcher.Map.open("no-such-folder")
        Traceback (most recent call last):
            ...
        matcher.errors.UsageError: no-such-folder is not a folder; a map is what `matcher sfm` writes

    What localises a photo are the points, their observations, the features in the run's store, and, for
    keypoints exact to a fraction of a pixel, the images where they still are.
    """

    def __init__(self, folder: Path, store: Store, config: LocalizationConfig, options: LoadOptions) -> None:
        self.model = model = read_sparse_map(folder, store)  # images, poses and points as arrays
        self.config, self._store, settings = config, store, store.settings
        recorded, own = read_summary(folder).get("features"), feature_settings(settings)
        if isinstance(recorded, dict) and (
            found := differences(recorded, own, ("in the model", "in the run"))
        ):
            raise UsageError(
                f"{folder} was made from other features than those of the run {store.folder} "
                f"({'; '.join(found[:3])}): name the run of this model, or triangulate its poses with these "
                f"features by `matcher sfm {store.folder} --poses {folder} --out NEW_MODEL`"
            )
        # Whether a front end found the features, which else are from a file.
        photos, self._extracted = Photos(store.image_folder), settings["source"]["kind"] == "photos"
        sizes = {key: options[key] for key in ("max_keypoints", "resize") if options.get(key) is not None}
        if sizes and self._extracted and settings["preset"] in PRESETS:
            changed = configure(from_dict(PipelineConfig, settings["config"]), sizes)
            settings = {**settings, "config": asdict(changed)}
            options = {name: value for name, value in options.items() if name not in sizes}
        source = photos if self._extracted else HlocFeatures(store.image_folder, store.folder)
        self.pipeline = stored_pipeline(settings, source, options)
        digests = {image.name: image.sha256 for image in store.images() if image.status == "done"}
        # Digests of masked images are those of both files, and the masks may be gone.
        known = self._extracted and not settings["source"].get("masks")
        self._index = open_index(store.folder, list(digests), list(digests.values()), store.features)
        self._row_of = {name: row for row, name in enumerate(model.names)}
        # The row in `model` of each image of the index, or −1.
        self._rows = np.array([self._row_of.get(name, -1) for name in digests], dtype=np.int64)
        self._features = lru_cache(256)(store.features)
        self._pyramids = ImagePyramids(
            [store.image_folder / name for name in model.names],
            [camera.size for camera in model.cameras],
            [1 / float(np.sqrt(np.prod(store.scale(name)))) for name in model.names],
            lambda row: known and photos.digest(model.names[row]) != digests[model.names[row]],
        )
        # Images of the map on which keypoints should have been refined, and whose files are gone.
        self.absent: set[str] = set()
        # Where on Earth it is, if known: "origin" is latitude, longitude and altitude of (0, 0, 0); poses are
        # in metres, x east, y north, z up.
        self.georegistration = read_georegistration(folder)

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
            return cls(folder, store, config or LocalizationConfig(), options)
        except BaseException:
            store.close()
            raise

    def close(self) -> None:
        """Close the run's store; the map cannot be used afterwards."""
        self._store.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def names(self) -> tuple[str, ...]:
        """The map's images."""
        return self.model.names

    def image_path(self, name: str) -> Path:
        """Where an image of the map was when its features were found."""
        return self._store.image_folder / name

    def localize(
        self,
        image: ImageInput | Features,
        camera: CameraInput | None = None,
        *,
        mask: Mask | None = None,
        partners: Iterable[str] | None = None,
    ) -> Pose:
        """Where a photo was taken, or why that is not known (`Pose.status`, `Pose.reason`).

        The photo is compared with all images of the map by global descriptors; it is matched with the most
        similar ones, first those that see the same points, until the pose is sure.

        Args:
            image: a path, an `Image`, a PIL image, an array, or features of the map's front end.
            camera: as `Camera`, four numbers fx, fy, cx, cy in stored pixels, or a matrix K; None: from EXIF,
                from the map's images of that size, or estimated with the pose.
            mask: not zero where keypoints may lie, as in `Pipeline.match`.
            partners: names of the map's images to match it with, in place of similar ones.

        Raises:
            ImageError: the image cannot be read.
            UsageError: a camera or a mask of another size, a mask beside features, features of another front
                end, or a partner that the map lacks.
        """
        query = self.query(image, camera, mask=mask)
        query.partners = None if partners is None else list(dict.fromkeys(partners))
        return self.poses_of([query])[0]

    def localize_rig(
        self,
        images: Sequence[ImageInput | Features],
        cam_from_rig: Sequence[np.ndarray],
        cameras: CameraInput | Sequence[CameraInput],
        *,
        masks: Sequence[Mask | None] | None = None,
    ) -> list[Pose]:
        """Where pictures with known relative poses were taken: a rig, a stereo pair, the last frames.

        All have one status and poses by one of the rig; pictures with few matches of their own profit most.

        Args:
            images: R of them, each as in `localize`.
            cam_from_rig: R poses (4, 4) in the map's units; one of them may be the identity.
            cameras: one for all, or one for each, as in `localize`.
            masks: one for each, as in `localize`; None for pictures without one.

        Raises:
            ImageError, UsageError: as in `localize`, and for another number of poses, cameras or masks.
        """
        each = camera_of_each(cameras, len(images))
        if masks is not None and len(masks) != len(images):
            raise UsageError(f"masks must be one for each of the {len(images)} pictures, not {len(masks)}")
        given = zip(images, each, [None] * len(images) if masks is None else masks, strict=True)
        queries = [self.query(image, camera, mask=mask) for image, camera, mask in given]
        return self.poses_of(queries, np.asarray(cam_from_rig, dtype=np.float64))

    def query(
        self, image: ImageInput | Features, camera: CameraInput | None = None, *, mask: Mask | None = None
    ) -> Query:
        """A photo ready to be localised; arguments and errors as in `localize`."""
        if isinstance(image, Features):
            if mask is not None:
                raise UsageError("masks only affect the extraction of keypoints; leave it away with features")
            query = Query(image)
        elif not self._extracted:
            raise UsageError("this map's features are from a file: give Features, or `--features FILE`")
        else:
            start = perf_counter()
            pixels = self.pipeline.read(image, mask)
            read = perf_counter()
            (features,) = self.pipeline.features_of([pixels])
            seconds = {"read": read - start, "extract": perf_counter() - read}
            query = Query(features, path=pixels.path and Path(pixels.path), seconds=seconds)
            if self.config.refine and self.pipeline.config.refine is not None:
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
        return f"Map({len(self.names)} images, {len(self.model.xyz)} points, {self.pipeline.preset})"

    def poses_of(self, queries: list[Query], cam_from_rig: object = None) -> list[Pose]:
        """The pose of a photo, or of R pictures at relative poses (R, 4, 4); one status for all."""
        if cam_from_rig is not None:
            try:
                fixed = np.asarray(cam_from_rig, dtype=np.float64)
                if fixed.shape != (len(queries), 4, 4) or (fixed[:, 3] != [0, 0, 0, 1]).any():
                    raise ValueError(f"it must be a pose (4, 4) of each of {len(queries)} pictures")
                check_poses(fixed)
            except ValueError as error:
                raise UsageError(f"cam_from_rig: {error}") from error
            if any(query.camera is None for query in queries):
                raise UsageError("the pictures of a rig need their cameras")
            queries = [replace(each, cam_from_rig=pose) for each, pose in zip(queries, fixed, strict=True)]
        keypoints = sum(len(query.features) for query in queries)
        best, why = None, ("no_keypoints", f"the photo has {keypoints} keypoints")
        if keypoints >= self.config.min_inliers:
            best = self._correspond(queries)
            why = "no_similar_image", "no image of the map is like it, or listed for it"
        if best is None:
            return [Pose(*why, seconds={**q.seconds, "total": sum(q.seconds.values())}) for q in queries]
        if best.verdict.status == "ok":
            with queries[0].timed("refine"):
                best = self._refined(queries, best)
            with queries[0].timed("pose"):
                best = best._replace(verdict=self._checked(queries, best))
        return [self._pose(number, query, best) for number, query in enumerate(queries)]

    def _correspond(self, queries: list[Query]) -> Attempt | None:
        """Match with similar images, or partners, until a pose is sure; the best attempt of all clusters. The
        first batch of images is matched with all keypoints. Where that is not enough, the others are matched
        so only if their strongest keypoints match, the best ones first."""
        config, best, first, todo = self.config, None, True, []
        # Images of the run that are not in the map may be among the most similar.
        asked = config.neighbours + int((self._rows < 0).sum())
        for query in queries:
            if absent := [name for name in query.partners or () if name not in self._row_of]:
                raise UsageError(f"{absent[0]} is no image of the map")
            with query.timed("retrieve"):
                if query.partners is None:
                    nearest = self._rows[self._index.similar(query.features, asked)]
                    todo.append(nearest[nearest >= 0][: config.neighbours].tolist())
                else:
                    todo.append([self._row_of[name] for name in query.partners])
        similar = list(dict.fromkeys(row for rows in todo for row in rows))
        for cluster in _covisibility_clusters(self.model, similar):
            found = [Correspondences(self.model, query, config.max_error) for query in queries]
            # A picture of a rig that is like none of the cluster may yet show something of it.
            left = [[row for row in rows if row in cluster] or (cluster if first else []) for rows in todo]
            while any(left):
                for known, rows in zip(found, left, strict=True):
                    images, ours = rows[: config.batch], known.query.features
                    if not (images and len(ours)):
                        continue
                    with known.query.timed("match"):
                        pairs = [(self._features(self.names[image]), ours) for image in images]
                        for each in zip(images, self.pipeline.match_features_batch(pairs), strict=True):
                            known.add(*each)
                left = [rows[config.batch :] for rows in left]
                with queries[0].timed("pose"):
                    attempt = self._attempt(found)
                if best is None or _count(attempt.estimates) > _count(best.estimates):
                    best = attempt
                if attempt.verdict.status == "ok" and _count(attempt.estimates) >= config.enough_inliers:
                    return attempt
                if first:
                    first = False
                    todo = [self._likely(k.query, [n for n in similar if n not in k.rows]) for k in found]
                    left = [[row for row in rows if row in cluster] for rows in todo]
        return best

    def _likely(self, query: Query, images: list[int]) -> list[int]:
        """Those worth matching with all keypoints, best first; all where there is no network to spare. Most
        similar images of a photo that is hard to localise do not show its place, which a network finds out
        last. With a few hundred keypoints that costs a third or less (preemptive matching, Wu 2013)."""
        config = self.config
        if not (images and len(query.features) and config.preemptive_keypoints and self.pipeline.layers):
            return images
        with query.timed("match"):
            ours = strongest(query.features, config.preemptive_keypoints)
            whole = [self._features(self.model.names[image]) for image in images]
            rows = [strongest_rows(each, config.preemptive_keypoints) for each in whole]
            pairs = [(each.select(row), ours) for each, row in zip(whole, rows, strict=True)]
            found = zip(images, rows, self.pipeline.match_features_batch(pairs), strict=True)
            counts = [
                int((self.model.points[image][row[matches.indices.reshape(-1, 2)[:, 0]]] >= 0).sum())
                for image, row, matches in found
            ]
        order = np.argsort(-np.array(counts, dtype=np.int64), kind="stable")
        return [images[index] for index in order if counts[index] >= config.preemptive_matches]

    def _attempt(self, found: list[Correspondences]) -> Attempt:
        """The pose from all correspondences so far; of an unknown camera, that which most agree with."""
        config, queries = self.config, [each.query for each in found]
        matches, query, seed = [each.matches() for each in found], queries[0], config.seed
        if query.camera is not None:
            estimates = estimate_poses(matches, [query.camera for query in queries], seed=seed)
            verdict = judge(estimates, matches, config, focal_known=True)
            for number, (query, own) in enumerate(zip(queries, matches, strict=True)):
                if verdict.status in ("too_few_matches", "wrong_camera"):
                    break
                if reason := check_camera(estimates and estimates[number], own, query.camera, config):
                    verdict = verdict._replace(status="wrong_camera", reason=_named(queries, number) + reason)
            return Attempt(found, matches, estimates, verdict)
        # The most credible first: of its EXIF, the most frequent known one of its size, any.
        best, verdict, size = None, None, query.features.image_size
        cameras = []
        if query.path is not None and (focal := read_exif(query.path).focal_35mm):
            cameras.append(any_camera(size, focal_of_film(focal, size)))
        if same := [camera for camera in self.model.cameras if camera.size == size]:
            cameras.append(max(same, key=same.count))
        for camera in [*cameras, None]:
            if camera is None and verdict is not None and verdict.status == "ok":
                break
            if camera is None:
                estimates = estimate_poses(matches, [any_camera(size)], focal_known=False, seed=seed)
            elif (estimates := estimate_poses(matches, [camera], seed=seed)) is not None:
                # A free focal length makes the distance uncertain, and the map's cameras are calibrated well:
                # one of those changes only if clearly more matches agree.
                freed = refine_poses(estimates, refine_focal=True)
                least = _count(estimates) * (1.1 if camera in self.model.cameras else 0.9)
                estimates = freed if _count(freed) > least else estimates
            if verdict is None or _count(estimates) > _count(best):
                best, verdict = estimates, judge(estimates, matches, config, focal_known=False)
        return Attempt(found, matches, best, verdict)

    def _refined(self, queries: list[Query], before: Attempt) -> Attempt:
        """The pose from keypoints moved to where the photo looks most like the map's images, if there is one.
        Where the pose then fails, and without images, it is the one before."""
        if all(query.pyramid is None for query in queries):
            return before
        start = []
        for query, estimate in zip(queries, before.estimates, strict=True):
            table, moved = estimate.matches.table, estimate.matches.points2d.copy()
            of = np.where(estimate.inliers & (query.pyramid is not None), table[:, 2], -1)
            for image in np.unique(of[of >= 0]).tolist():
                if not self.image_path(self.names[image]).is_file():
                    self.absent.add(self.names[image])
                    continue
                rows = np.flatnonzero(of == image)
                indices = table[rows][:, [3, 0]]
                ends = self.model.keypoints[image][indices[:, 0]], moved[rows]
                ends = (end.astype(np.float32) for end in ends)
                pairs = Matches(indices, *ends, np.ones(len(rows), np.float32))
                both = self._pyramids(image), query.pyramid
                refined = refine_matches(*both, pairs, self.pipeline.config.refine)
                accepted = refined.refinement.accepted
                moved[rows[accepted]] = refined.points1[accepted]
            start.append(replace(estimate, matches=replace(estimate.matches, points2d=moved)))
        known, matches = queries[0].camera is not None, [each.matches for each in start]
        fixed = known or start[0].camera in self.model.cameras
        estimates = refine_poses(start, refine_focal=not fixed)
        verdict = judge(estimates, matches, self.config, focal_known=known)
        return Attempt(before.found, matches, estimates, verdict) if verdict.status == "ok" else before

    def _checked(self, queries: list[Query], accepted: Attempt) -> Judgement:
        """The verdict, against it where another pose or another focal length fits the matches too."""
        _, _, estimates, verdict = accepted
        if reason := check_ambiguous(estimates, self.config):
            return verdict._replace(status="ambiguous", reason=reason)
        for number, estimate in enumerate(estimates if queries[0].camera is not None else ()):
            if len(queries) > 1 and (reason := check_rig_pose(estimate, self.config)):
                return verdict._replace(status="wrong_rig", reason=_named(queries, number) + reason)
            alone = judge([estimate], [estimate.matches], self.config, focal_known=True)
            if alone.status == "ok" and (reason := check_focal(estimate)):
                return verdict._replace(status="wrong_camera", reason=_named(queries, number) + reason)
        return verdict

    def _pose(self, number: int, query: Query, attempt: Attempt) -> Pose:
        """What is returned of a picture; a pose that is refused is not."""
        found, matches, verdict = attempt.found[number], attempt.matches[number], attempt.verdict
        estimate = attempt.estimates and attempt.estimates[number]
        inliers = estimate.inliers if estimate else np.zeros(len(matches), bool)
        accepted, reason = (estimate, "") if verdict.status == "ok" else (None, verdict.reason)
        if accepted is None and found.rows:
            nearest = self.names[next(iter(found.rows))]
            reason += f"; the most similar of the map's {len(self.names)} images is {nearest}"
        agree = set(map(tuple, matches.table[inliers][:, :2].tolist()))
        shown = {
            self.names[image]: sum(map(agree.__contains__, map(tuple, rows[:, :2].tolist())))
            for image, rows in found.rows.items()
        }
        return Pose(
            status=verdict.status,
            reason=reason,
            cam_from_world=accepted and accepted.cam_from_world,
            camera=accepted.camera if accepted else query.camera,
            points2d=matches.points2d,
            points3d=matches.points3d,
            point_ids=self.model.ids[matches.table[:, 1]],
            inliers=inliers,
            covariance=accepted and accepted.covariance,
            images=dict(sorted(shown.items(), key=lambda item: -item[1])),
            log10_false_alarms=verdict.log10_false_alarms,
            seconds={**query.seconds, "total": sum(query.seconds.values())},
        )


def _covisibility_clusters(model: SparseMap, images: list[int]) -> list[list[int]]:
    """The images in groups connected by ten common points (hloc, Sarlin et al. 2019), the largest first."""

    def near(first: int, second: int) -> bool:
        return np.count_nonzero(np.intersect1d(model.points[first], model.points[second]) >= 0) >= 10

    groups: list[list[int]] = []
    for image in images:
        joined = [group for group in groups if any(near(image, other) for other in group)]
        apart = [group for group in groups if group not in joined]
        groups = [*apart, [row for row in images if row == image or any(row in group for group in joined)]]
    return sorted(groups, key=lambda group: (-len(group), images.index(group[0])))


def _named(queries: list[Query], number: int) -> str:
    """Which picture of a rig is spoken of."""
    if len(queries) == 1:
        return ""
    path = queries[number].path
    return f"in picture {number} " if path is None else f"in {path.parent.name}/{path.name} "


def _count(estimates: Estimates | None) -> int:
    return sum(int(each.inliers.sum()) for each in estimates or ())


def read_partners(
    path: str | Path,
    photos: Mapping[str, Path],
    place: Map,
    on_report: Callable[[str], None],
    most: int | None = None,
) -> dict[str, list[str]]:
    """The map's images, the first `most`, to match each photo with, from a pair list such as hloc's of a
    retrieval: a line names a photo, then an image of the map. `UsageError`: it does not, or all are of other
    photos; `on_report` is called with a line of text if some are."""
    form, others = "a line names one of the photos, then an image of the map", []

    def refuse(line: int, kind: str, text: str) -> None:
        if kind in (MISSING, COLUMNS):
            raise UsageError(f"{path}, line {line}: {text!r} is none; {form}")
        others.extend([text] * (kind == NOT_ASKED))

    found: dict[str, list[str]] = {name: [] for name in photos}
    known, (name, first) = NameTable(place.names, place.image_path(".")), next(iter(photos.items()))
    folder = first.parents[name.count("/")]  # that names are below
    for name, image in read_pairs(path, found, refuse, folder=folder, partners=known):
        found[name].append(image)
    if others and not any(found.values()):
        raise UsageError(f"{path} names none of the photos, such as {next(iter(photos))}; {form}")
    if others:
        on_report(f"{path}: {counted(len(others), 'line')} of other photos passed over, such as {others[0]}")
    return {name: images[:most] for name, images in found.items()}


def localize_photos(
    place: Map,
    photos: Mapping[str, Path],
    rig: RigConfig | None,
    cameras: Mapping[str, Camera],
    masks: Mapping[str, Path] | None = None,
    partners: Mapping[str, Sequence[str]] | None = None,
    features: HlocFeatures | None = None,
) -> Iterator[tuple[str, Pose | ImageError]]:
    """The pose of each photo, of its `features` where they are in a file, or why it cannot be read. Photos of
    one moment are localised together, those of no rig alone. All by name; names of one moment differ in the
    prefix of their camera only. Cameras that are not given are those of the rig's file, or of a picture of
    the map with their prefix; `UsageError` where none is known."""
    if rig is not None and not rig.known:
        raise UsageError(
            f"{rig.source} does not say how its cameras are fixed to each other: give cam_from_rig_rotation "
            "and cam_from_rig_translation, or take the rig_config.json of a model that was made of a rig"
        )
    frames, masks, partners = [] if rig is None else rig.frames(photos), masks or {}, partners or {}
    of_map = zip(place.names, (replace(each, size=None) for each in place.model.cameras), strict=True)
    fixed = {name: mount for frame in frames for name, mount in frame.items()}
    camera_of = known_cameras(CameraChoice(rig=rig, known=dict(of_map)))
    known = {name: camera_of(name) for name in fixed} | cameras
    if absent := [name for name in fixed if known[name] is None]:
        raise UsageError(f"intrinsics of {absent[0]} are unknown: give them in {rig.source} or as a camera")
    for frame in [*frames, *([name] for name in photos if name not in fixed)]:
        queries: dict[str, Query] = {}
        for name in frame:
            try:
                photo = photos[name] if features is None else features.read(name, place.pipeline).features
                query = place.query(photo, known.get(name), mask=masks.get(name))
                query.path = photos[name]  # whose header may know the camera
                query.partners, queries[name] = partners.get(name), query
            except ImageError as error:
                yield name, error
        if queries:
            rigid = [fixed[name].cam_from_rig for name in queries] if len(queries) > 1 else None
            try:
                found = place.poses_of(list(queries.values()), rigid)
            except ImageError as error:  # of a picture of the map
                found = [error] * len(queries)
            yield from zip(queries, found, strict=True)
