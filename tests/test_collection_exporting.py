"""Exports: what other programs read is what the store holds, pixel origins and all, or a readable refusal."""

import csv
import json
import os
from dataclasses import replace

import numpy as np
import PIL.Image
import pytest
from collection_scene import CAMERA, SIZE, MemoryStore, renamed, synthetic_store

from matcher.cameras import Camera
from matcher.collection.schema import StoredImage
from matcher.collection.tracks import tracks_of
from matcher.errors import UsageError
from matcher.export.colmap import CameraChoice, group_cameras
from matcher.export.formats import export
from matcher.files import whole_folder


@pytest.fixture
def store(rng):
    return synthetic_store(rng, count=4, points=60)[0]


def test_colmap_has_keypoints_matches_and_geometries(store, tmp_path):
    pycolmap = pytest.importorskip("pycolmap")
    photo(tmp_path, "ring/001.jpg", gps={1: "S", 2: (40.0, 30.0, 0.0), 3: "E", 4: (20.0, 0.0, 0.0), 6: 99.0})
    store.image_folder = tmp_path
    export(store, "colmap", tmp_path / "out.db")
    with pycolmap.Database.open(tmp_path / "out.db") as database:
        (prior,) = database.read_all_pose_priors()
        ids = {image.name: image.image_id for image in database.read_all_images()}
        written = {name: database.read_keypoints(number) for name, number in ids.items()}
        (camera,) = database.read_all_cameras()
        ends = [(ids[pair.name0], ids[pair.name1]) for pair in store.pairs()]
        found = [(database.read_matches(*e), database.read_two_view_geometry(*e)) for e in ends]
    assert prior.corr_data_id.id == ids["ring/001.jpg"] and prior.position.tolist() == [-40.5, 20, 99]
    for name, points in written.items():  # its pixels have their origin in the corner
        np.testing.assert_array_equal(points, store.keypoints(name) + np.float32(0.5))
    assert camera.model.name == "PINHOLE" and (camera.width, camera.height) == SIZE
    np.testing.assert_allclose(camera.params, [900, 900, 512, 384])
    assert camera.has_prior_focal_length
    for pair, (matches, verified) in zip(store.pairs(), found, strict=True):
        np.testing.assert_array_equal(matches, pair.matches.indices)
        inliers = pair.matches.indices[pair.geometry.inliers]
        np.testing.assert_array_equal(verified.inlier_matches, inliers)
        assert verified.config == 3  # uncalibrated
        # The fundamental matrix holds between the points as COLMAP has them.
        ends = zip((pair.name0, pair.name1), inliers.T, strict=True)
        lifted0, lifted1 = (np.column_stack([written[name][rows], np.ones(len(rows))]) for name, rows in ends)
        lines = lifted0 @ verified.F.T
        distance = np.abs((lines * lifted1).sum(1)) / np.linalg.norm(lines[:, :2], axis=1)
        assert np.median(distance) < 1


@pytest.mark.parametrize(("kind", "config"), [("homography", 6), ("essential", 2)])
def test_other_geometries_reach_colmap(store, tmp_path, kind, config):
    pycolmap = pytest.importorskip("pycolmap")
    T = np.eye(4)
    T[:3, 3] = [0, 0.6, 0.8]
    matrix = np.array([[1.0, 0.1, 20], [0, 1, 5], [0, 1e-4, 1]])
    other = {"kind": kind, "matrix": matrix, "cam1_from_cam0": T}
    pairs = [replace(p, geometry=replace(p.geometry, **other)) for p in store.pairs()]
    pairs[0] = replace(pairs[0], geometry=replace(pairs[0].geometry, status="low_inliers"))
    changed = MemoryStore(list(store.images()), store._keypoints, pairs)
    assert export(changed, "colmap", tmp_path / "out.db").verified == 5
    with pycolmap.Database.open(tmp_path / "out.db") as database:
        assert database.num_verified_image_pairs() == 5 and database.num_matched_image_pairs() == 6
        verified = database.read_two_view_geometry(2, 3)
        assert verified.config == config
        if kind == "homography":  # stored (0, 0) goes to (20, 5), as COLMAP has it (0.5, 0.5) to (20.5, 5.5)
            moved = verified.H @ [0.5, 0.5, 1]
            np.testing.assert_allclose(moved[:2] / moved[2], [20.5, 5.5])
        else:
            np.testing.assert_allclose(verified.cam2_from_cam1.translation, T[:3, 3])


def test_hloc_files_read_in_its_layout(store, tmp_path):
    h5py = pytest.importorskip("h5py")
    export(store, "hloc", tmp_path / "out")
    listed = [tuple(line.split()) for line in (tmp_path / "out" / "pairs.txt").read_text().splitlines()]
    assert listed == [(pair.name0, pair.name1) for pair in store.pairs()]
    with h5py.File(tmp_path / "out" / "features.h5") as features:
        for image in store.images():
            group = features[image.name]
            np.testing.assert_array_equal(group["keypoints"][()], store.keypoints(image.name))
            assert group["keypoints"].dtype == np.float32 and group["keypoints"].attrs["uncertainty"] == 1
            assert group["descriptors"].shape == (8, image.count)  # a column a keypoint
            assert group["image_size"][()].tolist() == list(SIZE)
            assert group["scores"].shape == group["scales"].shape == (image.count,)
    with h5py.File(tmp_path / "out" / "matches.h5") as matches:
        for pair in store.pairs():
            group = matches["-".join(pair.name0.split("/")) + "/" + "-".join(pair.name1.split("/"))]
            found = group["matches0"][()]
            index0 = np.flatnonzero(found >= 0)
            got = dict(zip(index0.tolist(), found[index0].tolist(), strict=True))
            assert got == dict(pair.matches.indices.tolist()) and found.dtype == np.int16
            scores = group["matching_scores0"][()][pair.matches.indices[:, 0]]
            np.testing.assert_allclose(scores, pair.matches.scores, atol=1e-3)


@pytest.mark.parametrize(
    ("form", "names", "message"),
    [
        ("hloc", ["a-b.jpg", "a/b.jpg", "c.jpg", "d.jpg"], r"a-b\.jpg = a/b\.jpg"),
        ("openmvg", ["a/1.jpg", "b/1.png", "c.jpg", "d.jpg"], r"a/1\.jpg = b/1\.png"),
    ],
)
def test_names_that_a_format_cannot_hold_are_refused(store, tmp_path, form, names, message):
    if form == "hloc":
        pytest.importorskip("h5py")
    with pytest.raises(UsageError, match=message):
        export(renamed(store, names), form, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_npz_holds_everything(store, tmp_path):
    report = export(store, "npz", tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as data:
        names = data["names"].tolist()
        for index, name in enumerate(names):
            start, end = data["keypoint_offsets"][index : index + 2]
            np.testing.assert_array_equal(data["keypoints"][start:end], store.keypoints(name))
        for index, pair in enumerate(store.pairs()):
            start, end = data["match_offsets"][index : index + 2]
            assert [names[i] for i in data["pairs"][index]] == [pair.name0, pair.name1]
            np.testing.assert_array_equal(data["matches"][start:end], pair.matches.indices)
            np.testing.assert_array_equal(data["scores"][start:end], pair.matches.scores)
            np.testing.assert_array_equal(data["inliers"][start:end], pair.geometry.inliers)
            np.testing.assert_array_equal(data["matrices"][index], pair.geometry.matrix)
        assert np.isnan(data["cam1_from_cam0"]).all() and set(data["statuses"]) == {"ok"}
        assert len(data["matches"]) == report.matches and (data["probabilities"] > 0.2).all()
        assert data["sizes"].tolist() == [list(SIZE)] * 4


def intrinsics_of(folder):
    scene = json.loads((folder / "sfm_data.json").read_text())
    (intrinsic,) = (item["value"]["ptr_wrapper"]["data"] for item in scene["intrinsics"])
    return intrinsic


def test_openmvg_files(store, tmp_path):
    export(store, "openmvg", tmp_path / "out")
    scene = json.loads((tmp_path / "out" / "sfm_data.json").read_text())
    views = [view["value"]["ptr_wrapper"]["data"] for view in scene["views"]]
    names, intrinsic = [v["local_path"] + v["filename"] for v in views], intrinsics_of(tmp_path / "out")
    assert names[1] == "ring/001.jpg" and views[1]["id_view"] == 1
    assert intrinsic["principal_point"] == [511.5, 383.5] and intrinsic["focal_length"] == 900
    regions = np.loadtxt(tmp_path / "out" / "002.feat")
    np.testing.assert_allclose(regions[:, :2], store.keypoints("ring/002.jpg"), rtol=1e-6)
    assert (regions[:, 2] == 2).all()  # a radius; the store has diameters
    for kind in ("putative", "f"):
        words = iter(map(int, (tmp_path / "out" / f"matches.{kind}.txt").read_text().split()))
        for pair in store.pairs():
            assert [names[next(words)] for _ in range(2)] == [pair.name0, pair.name1]
            rows = [[next(words), next(words)] for _ in range(next(words))]
            kept = pair.geometry.inliers if kind == "f" else slice(None)
            assert rows == pair.matches.indices[kept].tolist()
        assert next(words, None) is None


def test_kapture_files(store, tmp_path):
    report = export(store, "kapture", tmp_path / "out")
    sensors = (tmp_path / "out" / "sensors" / "sensors.txt").read_text().splitlines()
    assert sensors[0] == "# kapture format: 1.1"
    assert sensors[2] == "cam0, , camera, PINHOLE, 1024, 768, 900.0, 900.0, 512.0, 384.0"
    records = (tmp_path / "out" / "sensors" / "records_camera.txt").read_text().splitlines()
    assert records[3] == "1, cam0, ring/001.jpg"
    folder = tmp_path / "out" / "reconstruction"
    assert "sift, float32, 2" in (folder / "keypoints" / "sift" / "keypoints.txt").read_text()
    points = np.fromfile(folder / "keypoints" / "sift" / "ring" / "001.jpg.kpt", "<f4").reshape(-1, 2)
    np.testing.assert_allclose(points - 0.5, store.keypoints("ring/001.jpg"), atol=1e-4)
    assert "sift, float32, 8, sift, L2" in (folder / "descriptors" / "sift" / "descriptors.txt").read_text()
    pair = next(store.pairs())
    path = folder / "matches" / "sift" / f"{pair.name0}.overlapping" / f"{pair.name1}.matches"
    rows = np.fromfile(path, "<f8").reshape(-1, 3)
    np.testing.assert_array_equal(rows[:, :2], pair.matches.indices)
    np.testing.assert_allclose(rows[:, 2], pair.matches.scores)
    assert "records_data" in report.notes[-1]


def photo(folder, name, size=(60, 40), **tags):
    exif = PIL.Image.Exif()
    exif[0x010F], exif[0x8825] = tags.pop("make", "Maker"), tags.pop("gps", {})
    exif.get_ifd(0x8769).update({0x920A: tags.pop("focal", 8.0), 0xA405: tags.pop("focal_35mm", 28)})
    (folder / name).parent.mkdir(exist_ok=True, parents=True)
    PIL.Image.new("RGB", size).save(folder / name, exif=exif)
    return StoredImage(name, folder / name, "", size, 0, None, "done", "")


def test_photos_share_a_camera_by_size_folder_and_exif(tmp_path):
    same = [photo(tmp_path, "a.jpg"), photo(tmp_path, "b.jpg")]
    other = [
        photo(tmp_path, "c.jpg", focal=12.0),
        photo(tmp_path, "d.jpg", size=(40, 60)),
        photo(tmp_path, "sub/e.jpg"),
        replace(same[0], name="f.jpg", path=tmp_path / "absent.jpg"),
    ]
    groups = group_cameras([*same, *other], CameraChoice())
    assert [[image.name for image in group] for _, group in groups] == [
        ["a.jpg", "b.jpg"],
        *([image.name] for image in other),
    ]
    exact, guessed = groups[0][0], groups[-1][0]
    assert exact.params[0] == pytest.approx(28 / np.hypot(36, 24) * np.hypot(60, 40)) and exact.focal_known
    assert guessed.params == (72.0, 30.0, 20.0, 0.0) and not guessed.focal_known and not guessed.given
    assert len(group_cameras(same, CameraChoice(sharing="each"))) == 2
    with pytest.raises(UsageError, match="40x60"):
        group_cameras([*same, *other], CameraChoice(sharing="single"))


def test_cameras_are_written_as_they_are_or_refused(store, tmp_path):
    camera = Camera(900, 900, 511.5, 383.5, SIZE, "SIMPLE_RADIAL", (0.05,))
    ((exported, _),) = group_cameras(list(store.images()), CameraChoice(camera=camera))
    assert (exported.model, exported.params) == ("SIMPLE_RADIAL", (900, 512, 384, 0.05))
    full = (0.1, 0.2, 0.003, 0.004, 0.05, 0, 0)
    lenses = (
        ("SIMPLE_RADIAL", (0.05,), "disto_k3", [0.05, 0, 0]),
        ("FULL_OPENCV", (*full, 0), "disto_t2", [0.1, 0.2, 0.05, 0.003, 0.004]),
        ("RADIAL_FISHEYE", full[:2], "fisheye", [0.1, 0.2, 0, 0]),
    )
    for model, lens, name, written in lenses:
        choice = CameraChoice(camera=Camera(900, 900, 511.5, 383.5, SIZE, model, lens))
        export(store, "openmvg", tmp_path / model, choice)
        assert intrinsics_of(tmp_path / model)[name] == written
    others = ("FULL_OPENCV", 900, (*full, 0.1)), ("FOV", 900, (0.8,)), ("PINHOLE", 450, ())
    for model, fy, lens in (*others, ("THIN_PRISM_FISHEYE", 900, (*full, 0))):
        choice = CameraChoice(camera=Camera(900, fy, 511.5, 383.5, SIZE, model, lens))
        with pytest.raises(UsageError, match=rf"ring/000\.jpg.*{model}.* {fy}"):
            export(store, "openmvg", tmp_path / "out", choice)


def test_given_cameras_and_those_of_a_model(tmp_path):
    images = [photo(tmp_path, "a.jpg"), photo(tmp_path, "b.jpg")]
    given = CameraChoice(camera=Camera(50, 51, 29.5, 19.5))
    ((camera, group),) = group_cameras(images, given)
    assert camera.params == (50, 51, 30, 20) and camera.given and len(group) == 2
    stored = [replace(images[0], camera=given.camera), images[1]]
    assert [camera.given for camera, _ in group_cameras(stored, CameraChoice())] == [True, False]
    known = dict.fromkeys(("a.jpg", "b.jpg"), given.camera)
    for same in (given.camera, None):
        ((camera, _),) = group_cameras(images, CameraChoice(same, known=known, refine_known=True))
        assert camera.given == (same is not None)  # those of a model that is continued are refined
    with pytest.raises(UsageError, match="a line of its size"):
        group_cameras(images, replace(given, known={"a.jpg": replace(CAMERA, size=(640, 480))}))
    for wrong in (
        lambda: CameraChoice(model="fisheye"),
        lambda: CameraChoice(sharing="some"),
        lambda: group_cameras(images, replace(given, model="OPENCV")),
        lambda: group_cameras(images, CameraChoice(camera=replace(CAMERA, size=(640, 480)))),
    ):
        with pytest.raises(UsageError):
            wrong()


def test_a_pair_that_others_contradict_is_named_and_in_no_track_and_no_export(rng, tmp_path):
    store = synthetic_store(rng, count=6, points=300, wrong=0.1)[0]
    assert not tracks_of(store).contradicted
    first, *pairs = store.pairs()
    indices = np.column_stack([first.matches.indices[:, 0], np.roll(first.matches.indices[:, 1], 9)])
    geometry = replace(first.geometry, inliers=np.ones(len(indices), bool))
    wrong = replace(first, matches=replace(first.matches, indices=indices), geometry=geometry)
    changed = MemoryStore(list(store.images()), store._keypoints, [wrong, *pairs])
    assert tracks_of(changed).contradicted == ((first.name0, first.name1),)
    left = MemoryStore(list(store.images()), store._keypoints, pairs)
    np.testing.assert_array_equal(tracks_of(changed).keypoints, tracks_of(left).keypoints)
    report = export(changed, "npz", tmp_path / "out.npz")
    assert report.pairs == len(pairs) and not report.left_out  # it is no failure
    assert any({first.name0, first.name1} <= set(note.replace(",", "").split()) for note in report.notes)
    assert export(changed, "csv", tmp_path / "out.csv").pairs == len(pairs) + 1  # a list of pairs has all
    head, *rows = csv.reader((tmp_path / "out.csv").read_text("utf-8").splitlines())
    assert " ".join(head) == "name0 name1 matches inliers status probability planar repetitive"
    assert rows[0][:5] == [first.name0, first.name1, *[str(len(indices))] * 2, "ok"]
    assert 0.9 < float(rows[-1][5]) <= 1 and rows[-1][6:] == ["0", "0"]


def test_what_an_export_leaves_out_or_refuses(store, tmp_path):
    images = list(store.images())
    images[3] = replace(images[3], status="failed", reason="cut short")
    good, *pairs = [p for p in store.pairs() if images[3].name not in (p.name0, p.name1)]
    matches = replace(good.matches.select(np.arange(2)), indices=np.array([[0, 1], [0, 2]]))
    twice = replace(good, matches=matches, geometry=replace(good.geometry, inliers=np.ones(2, bool)))
    changed = MemoryStore(images, store._keypoints, [twice, *pairs])
    report = export(changed, "npz", tmp_path / "out.npz")
    assert (report.images, report.pairs) == (3, 2) and any(images[3].name in note for note in report.notes)
    assert len(report.left_out) == 1 and good.name0 in report.left_out[0]  # it would crash its reader
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for form, out in (("npz", "out.txt"), ("npz", "none/out.npz"), ("kapture", "full"), ("abc", "out")):
        with pytest.raises(UsageError):
            export(store, form, tmp_path / out)
    with pytest.raises(UsageError):
        export(MemoryStore(images[3:], {}, []), "npz", tmp_path / "empty.npz")


@pytest.mark.skipif(os.name != "posix", reason="folders cannot be locked")
def test_what_a_killed_program_left_is_removed_and_what_another_writes_stays(tmp_path):
    out = tmp_path / "model"
    with whole_folder(out):
        (running,) = tmp_path.iterdir()
        os.utime(running, (0, 0))
        with whole_folder(out, overwrite=True) as second:  # as another program would
            assert running.is_dir() and second != running
    killed = tmp_path / ".model.0123abcd.part"
    killed.mkdir()
    os.utime(killed, (0, 0))
    with whole_folder(out, overwrite=True):
        assert not killed.exists()
