"""The export formats by name, and all but COLMAP's: NumPy, hloc, OpenMVG, kapture."""

from __future__ import annotations

import csv
import json
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from matcher.cameras import CAMERA_MODELS
from matcher.collection.sources import HLOC_OPTIONAL
from matcher.collection.store import Store
from matcher.errors import UsageError, optional, unknown_name
from matcher.export import colmap
from matcher.export.colmap import HALF_PIXEL, CameraChoice, ExportedRun, ExportReport
from matcher.files import MARK, check_folder, check_output, whole_file, whole_folder
from matcher.types import to_numpy


class Format(NamedTuple):
    """How a run is exported to another program."""

    write: Callable[..., None]  # the run, to a temporary file or folder, with cameras
    suffixes: tuple[str, ...] = ()  # of a file; a format without is a folder
    has_cameras: bool = False


def export(
    store: Store, form: str, out: str | Path, choice: CameraChoice | None = None, *, overwrite: bool = False
) -> ExportReport:
    """Export a run, opened, as `Collection.export` does; the output is complete or absent. A database is
    never replaced, since COLMAP adds to it."""
    out = Path(out)
    if form not in FORMATS:
        raise UsageError(unknown_name("format", form, FORMATS))
    kind = FORMATS[form]
    if choice is not None and not kind.has_cameras:
        others = ", ".join(name for name, known in FORMATS.items() if known.has_cameras)
        raise UsageError(f"{form} stores no cameras; leave them out, or export to one of {others}")
    if choice is not None and choice.rig is not None and form != "colmap":
        raise UsageError(f"{form} is written without rigs; leave it out, or export to colmap")
    if kind.suffixes:
        check_output(out, kind.suffixes, overwrite=overwrite)
    else:
        check_folder(out, overwrite=overwrite)
    if form == "colmap":  # which also tells a full disk, that COLMAP hides
        return colmap.write_colmap(store, out, choice)
    # Headers of photos say what is known of cameras, and the programs that take these open the photos.
    kept = () if kind.has_cameras else {image.name for image in store.images()}
    run = ExportedRun(store, out, kept=kept)
    with whole_file(out) if kind.suffixes else whole_folder(out, overwrite=overwrite) as part:
        kind.write(run, part, choice)
    return run.report


# NumPy: one archive of a whole run, written in a stream, as a collection need not fit in memory.

_ROWS = {  # of the arrays that may be large: type and shape
    "keypoints": (np.float32, 2),
    "covariances": (np.float32, 3),
    "matches": (np.int32, 2),
    "scores": (np.float32,),
    "inliers": (np.bool_,),
    "matrices": (np.float64, 3, 3),
    "cam1_from_cam0": (np.float64, 4, 4),
    "pairs": (np.int32, 2),
    "probabilities": (np.float32,),
}


def write_npz(run: ExportedRun, part: Path, _: None) -> None:
    """An `.npz` to be opened with `np.load`; image i has the rows offsets[i] … offsets[i + 1].

    Images: `names` (I,), `sizes` (I, 2) width and height, `keypoints` (ΣN, 2) float32 with `keypoint_offsets`
    (I + 1,), and of a run that was refined their `covariances` (ΣN, 3), xx, xy and yy. Pairs: `pairs` (P, 2)
    into names, `match_offsets` (P + 1,), `matches` (ΣK, 2) int32 into the keypoints of either image, `scores`
    (ΣK,) float32, `inliers` (ΣK,) bool, `kinds`, `statuses` (P,) of the geometries, `probabilities` (P,) of
    the same place, `matrices` (P, 3, 3) F, H or E and `cam1_from_cam0` (P, 4, 4) of essential ones, else NaN.
    """
    number = {name: index for index, name in enumerate(run.names)}
    kinds, statuses, lengths, rows = [], [], [0], Counter()
    with tempfile.TemporaryDirectory(dir=part.parent, prefix=".npz-") as spool:
        with ExitStack() as stack:
            files = {name: stack.enter_context(Path(spool, name).open("wb")) for name in _ROWS}

            def put(name: str, values: object) -> None:
                kind, *shape = _ROWS[name]
                values = np.full(shape, np.nan) if values is None else values
                block = np.ascontiguousarray(values, kind).reshape(-1, *shape)
                rows[name] += len(block)
                files[name].write(block.tobytes())

            for name in run.names:
                put("keypoints", run.keypoints(name))
                if (refined := run.store.refined_keypoints(name)) is not None:
                    put("covariances", refined.covariances.reshape(-1, 4)[:, [0, 1, 3]])
            for pair in run.pairs():
                matches, geometry = pair.matches, pair.geometry
                kinds.append(geometry.kind)
                statuses.append(geometry.status)
                lengths.append(len(matches))
                put("matches", matches.indices)
                put("scores", matches.scores)
                put("inliers", geometry.inliers)
                put("matrices", geometry.matrix)
                put("cam1_from_cam0", geometry.cam1_from_cam0)
                put("pairs", (number[pair.name0], number[pair.name1]))
                put("probabilities", pair.probability(run.sizes))
        arrays = {
            name: np.memmap(Path(spool, name), kind, "r", shape=(rows[name], *shape))
            if rows[name]
            else np.zeros((0, *shape), kind)
            for name, (kind, *shape) in _ROWS.items()
        }
        if rows["covariances"] != rows["keypoints"]:
            del arrays["covariances"]
        with part.open("wb") as file:
            np.savez(
                file,
                **arrays,
                names=np.array(run.names),
                sizes=np.array([image.size for image in run.images], dtype=np.int32),
                kinds=np.array(kinds, dtype=np.str_),
                statuses=np.array(statuses, dtype=np.str_),
                keypoint_offsets=np.cumsum([0, *(image.count for image in run.images)], dtype=np.int64),
                match_offsets=np.cumsum(lengths, dtype=np.int64),
            )
        with zipfile.ZipFile(part, "a") as archive:
            archive.comment = MARK


def write_csv(run: ExportedRun, part: Path, _: None) -> None:
    """A line for each matched pair, also one that others contradict; `probability` is of the same place,
    `planar` and `repetitive` are 1 or 0."""
    with part.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        names = ("name0", "name1", "matches", "inliers", "status", "probability", "planar", "repetitive")
        lines.writerow(names)
        for pair in run.pairs(every=True):
            counts = len(pair.matches), pair.geometry.inliers.sum(), pair.geometry.status
            words = int(pair.geometry.planar), int(pair.geometry.repetitive)
            lines.writerow((pair.name0, pair.name1, *counts, pair.probability(run.sizes), *words))


# The HDF5 files of hloc (Sarlin et al. 2019): features.h5, matches.h5 and pairs.txt. Pixels as ours: the
# centre of the first one is (0, 0); hloc adds the half pixel when it imports into COLMAP.


def write_hloc(run: ExportedRun, part: Path, _: None) -> None:
    """A folder with hloc's three files; every match is written, verified or not, as hloc verifies itself."""
    with optional():
        import h5py

    counts = {image.name: image.count for image in run.images}
    run.refuse_names(lambda name: len(name.split()) != 1, "hold spaces, at which hloc splits pairs.txt")
    run.refuse_collisions(lambda name: name.replace("/", "-"), "in matches.h5, where / becomes -")
    with h5py.File(part / "features.h5", "w", libver="latest") as file:
        for image in run.images:
            group = file.create_group(image.name)
            points = group.create_dataset("keypoints", data=run.keypoints(image.name))
            points.attrs["uncertainty"] = 1.0  # pixels, as hloc has it at the photo's resolution
            group.create_dataset("image_size", data=np.array(image.size))
            if (features := run.features(image.name)) is None:
                continue
            descriptors = np.ascontiguousarray(to_numpy(features.descriptors).T)
            group.create_dataset("descriptors", data=descriptors)
            for theirs, ours in HLOC_OPTIONAL.items():
                if (values := getattr(features, ours)) is not None:
                    group.create_dataset(theirs, data=to_numpy(values))
    with (
        h5py.File(part / "matches.h5", "w", libver="latest") as file,
        (part / "pairs.txt").open("w", encoding="utf-8") as lines,
    ):
        for pair in run.pairs():
            key = "/".join(name.replace("/", "-") for name in (pair.name0, pair.name1))
            group, indices = file.create_group(key), pair.matches.indices
            # Beyond 32,767 keypoints hloc's int16 would wrap; its reader takes int32 as well.
            wide = indices[:, 1].max(initial=0) > 32_767
            matches0 = np.full(counts[pair.name0], -1, np.int32 if wide else np.int16)
            scores0 = np.zeros(counts[pair.name0], np.float16)
            matches0[indices[:, 0]], scores0[indices[:, 0]] = indices[:, 1], pair.matches.scores
            group.create_dataset("matches0", data=matches0)
            group.create_dataset("matching_scores0", data=scores0)
            lines.write(f"{pair.name0} {pair.name1}\n")


_NEW = 1 << 31  # cereal's mark of an object that is written for the first time
_PLAIN = 1 << 30  # cereal's mark of an object of the declared type itself


def write_openmvg(run: ExportedRun, part: Path, choice: CameraChoice | None) -> None:
    """OpenMVG's `sfm_data.json`, `*.feat`, `image_describer.json`, putative and verified matches; no
    descriptors, which its SfM does not need. Cameras are of its models radial (k3), Brown and fisheye."""
    stems = {name: PurePosixPath(name).stem for name in run.names}
    run.refuse_collisions(stems.get, "file of regions, which OpenMVG names without folder and ending")
    numbers = {name: number for number, name in enumerate(run.names)}
    cameras = colmap.group_cameras(run.images, choice)
    camera_of = {image.name: number for number, (_, group) in enumerate(cameras) for image in group}
    views = []
    for number, image in enumerate(run.images):
        folder, file = str(PurePosixPath(image.name).parent), PurePosixPath(image.name).name
        data = {"local_path": "" if folder == "." else f"{folder}/", "filename": file}
        data |= {"width": image.size[0], "height": image.size[1], "id_view": number, "id_pose": number}
        data["id_intrinsic"] = camera_of[image.name]
        views.append({"key": number, "value": _pointer(None, _PLAIN, data, number + 1)})
    intrinsics, models = [], {}
    for number, (camera, group) in enumerate(cameras):
        focals = CAMERA_MODELS[camera.model][0]
        fx, fy, lens = camera.params[0], camera.params[focals - 1], camera.params[focals + 2 :]
        found = _openmvg_lens(camera.model, lens)
        # It has one focal length: two may differ by half a pixel at the border of the image.
        if found is None or abs(fx - fy) / (fx + fy) * max(camera.size) > 1:
            raise UsageError(
                f"openmvg has no cameras like that of {group[0].name}, {camera.model} with focal lengths "
                f"{fx:g} and {fy:g}: undistort the photos to square pixels, or export to colmap or kapture"
            )
        name, of_lens, values = found
        data = {"width": camera.size[0], "height": camera.size[1], "focal_length": (fx + fy) / 2}
        data["principal_point"] = [value - HALF_PIXEL for value in camera.params[focals : focals + 2]]
        data[of_lens] = values
        # The name of a model is written once, and later ones refer to it by its number.
        new = None if name in models else name
        reference = models.setdefault(name, len(models) + 1) + (0 if new is None else _NEW)
        value = _pointer(new, reference, data, len(views) + 1 + number)
        intrinsics.append({"key": number, "value": value})
    scene = {"sfm_data_version": "0.3", "root_path": str(run.store.image_folder), "views": views}
    scene |= {"intrinsics": intrinsics, "extrinsics": [], "structure": [], "control_points": []}
    describer = {"regions_type": _pointer("SIFT_Regions", _PLAIN, {}, 1)}
    (part / "sfm_data.json").write_text(json.dumps(scene, indent=1), encoding="utf-8")
    (part / "image_describer.json").write_text(json.dumps(describer, indent=1), encoding="utf-8")
    for image in run.images:  # a line per keypoint: x, y, scale (a radius), direction in radians
        rows = np.column_stack([run.keypoints(image.name), np.tile([1.0, 0.0], (image.count, 1))])
        if (found := run.features(image.name)) is not None:
            rows[:, 2] = 1.0 if found.scales is None else to_numpy(found.scales) / 2
            rows[:, 3] = 0.0 if found.orientations is None else to_numpy(found.orientations)
        np.savetxt(part / f"{stems[image.name]}.feat", rows, fmt="%.8g")
    for pair in run.pairs():
        written = {"putative": pair.matches.indices}
        if pair.geometry.verified:  # of fundamental, essential or homography the first letter
            written[pair.geometry.kind[0]] = pair.matches.indices[pair.geometry.inliers]
        for kind, indices in written.items():
            with (part / f"matches.{kind}.txt").open("a", encoding="ascii") as file:
                file.write(f"{numbers[pair.name0]} {numbers[pair.name1]}\n{len(indices)}\n")
                file.writelines(f"{i} {j}\n" for i, j in indices.tolist())


def _openmvg_lens(model: str, lens: Sequence[float]) -> tuple[str, str, list[float]] | None:
    """OpenMVG's name for a model, what it calls its parameters, and these; None: it has no such lens."""
    if model in ("SIMPLE_RADIAL_FISHEYE", "RADIAL_FISHEYE", "OPENCV_FISHEYE"):
        return "fisheye", "fisheye", [*lens, 0.0, 0.0, 0.0][:4]  # θ · (1 + k1 θ² + … + k4 θ⁸)
    if model in ("OPENCV", "FULL_OPENCV") and not any(lens[5:]):
        return "pinhole_brown_t2", "disto_t2", [*lens[:2], *(*lens, 0.0)[4:5], *lens[2:4]]  # k1 k2 k3 p1 p2
    if model in ("SIMPLE_RADIAL", "RADIAL") or not (any(lens) or model.endswith("FISHEYE")):
        return "pinhole_radial_k3", "disto_k3", [*lens, 0.0, 0.0, 0.0][:3]  # x · (1 + k1 r² + k2 r⁴)
    return None


def _pointer(name: str | None, polymorphic: int, data: dict[str, Any], number: int) -> dict[str, Any]:
    named = {} if name is None else {"polymorphic_name": name}
    return {"polymorphic_id": polymorphic, **named, "ptr_wrapper": {"id": _NEW + number, "data": data}}


def write_kapture(run: ExportedRun, part: Path, choice: CameraChoice | None) -> None:
    """A kapture 1.1 folder (Humenberger et al. 2020): sensors, records, keypoints, descriptors, all matches
    and their scores. Photos are not copied: link the image folder as `sensors/records_data`."""
    run.refuse_names(lambda name: not set(",\n\r#").isdisjoint(name), "hold a comma, a line break or #")
    sensors, sensor_of = [], {}
    for number, (camera, group) in enumerate(colmap.group_cameras(run.images, choice)):
        params = ", ".join(map(repr, (*camera.size, *map(float, camera.params))))
        sensors.append(f"cam{number}, , camera, {camera.model}, {params}")
        sensor_of |= {image.name: f"cam{number}" for image in group}
    records = [f"{time}, {sensor_of[name]}, {name}" for time, name in enumerate(run.names)]
    header = "sensor_device_id, name, sensor_type, [sensor_params]+"
    _write_table(part / "sensors" / "sensors.txt", header, sensors)
    _write_table(part / "sensors" / "records_camera.txt", "timestamp, device_id, image_path", records)
    kind, folder, first = "keypoints", part / "reconstruction", run.features(run.names[0])
    if first is not None:
        kind, values = first.kind, to_numpy(first.descriptors)
        row = f"{kind}, {values.dtype}, {values.shape[-1]}, {kind}, L2"
        header = "name, dtype, dsize, keypoints_type, metric_type"
        _write_table(folder / "descriptors" / kind / "descriptors.txt", header, [row])
    row = f"{kind}, float32, 2"
    _write_table(folder / "keypoints" / kind / "keypoints.txt", "name, dtype, dsize", [row])
    for name in run.names:
        points = colmap.to_colmap(run.keypoints(name)).astype("<f4")
        _write_array(folder / "keypoints" / kind / f"{name}.kpt", points)
        if first is not None and (features := run.features(name)) is not None:
            descriptors = to_numpy(features.descriptors).astype(values.dtype)
            _write_array(folder / "descriptors" / kind / f"{name}.desc", descriptors)
    for pair in run.pairs():
        path = folder / "matches" / kind / f"{pair.name0}.overlapping" / f"{pair.name1}.matches"
        rows = np.column_stack([pair.matches.indices, pair.matches.scores])
        _write_array(path, rows.astype("<f8"))
    photos = run.report.path / "sensors" / "records_data"
    run.report.notes.append(f"link the photos: ln -s {run.store.image_folder} {photos}")


def _write_array(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.ascontiguousarray(array).tofile(path)


def _write_table(path: Path, header: str, rows: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["# kapture format: 1.1", f"# {header}", *rows, ""]), encoding="utf-8")


FORMATS = {
    "colmap": Format(colmap.write_colmap, (".db",), has_cameras=True),
    "hloc": Format(write_hloc),
    "npz": Format(write_npz, (".npz",)),
    "openmvg": Format(write_openmvg, has_cameras=True),
    "kapture": Format(write_kapture, has_cameras=True),
    "csv": Format(write_csv, (".csv",)),
}
