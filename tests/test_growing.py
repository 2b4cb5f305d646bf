"""Models that grow: photos are added in the model's coordinates, and an interruption loses nothing."""

import errno
import json
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pycolmap
import pytest
from collection_scene import centres, render_photos

import matcher
from matcher.cli import main
from matcher.cli.sfm import summary_lines
from matcher.collection.store import Store
from matcher.errors import UsageError
from matcher.export.output import ExportReport
from matcher.poses import write_named_poses
from matcher.sfm import growing, mapping_process, reconstruct
from matcher.sfm.growing import continue_model
from matcher.sfm.mapping import georegister, similarity
from matcher.sfm.models import SparseModel
from matcher.sfm.reconstruct import Reconstruction, read_given_poses

pytest.importorskip("pycolmap")
FAST = ("--preset", "nearest", "--max-keypoints", "600", "--workers", "0", "--threads", "1")
NEW = ("photo1.png", "photo4.png")


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model of four photos, and two more photos in a folder beside them."""
    folder = tmp_path_factory.mktemp("grow")
    poses = render_photos(folder / "photos", count=6)
    (folder / "later").mkdir()
    for name in NEW:
        (folder / "photos" / name).rename(folder / "later" / name)
    camera = ("--camera", "528,528,239.5,179.5")
    assert run("sfm", folder / "photos", "--out", folder / "model", *FAST, *camera) == 0
    (folder / "later").rename(folder / "photos" / "later")
    return folder, poses


def test_photos_are_added_in_the_coordinates_of_the_model(made, tmp_path, monkeypatch, capfd):
    folder, _ = made
    before = read_given_poses(folder / "model").cam_from_world

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    arguments = ("sfm", folder / "photos" / "later", "--continue", folder / "model", "--workers", 0)
    with monkeypatch.context() as patch:  # after the matching, before the mapping
        patch.setattr(growing, "reconstruct", interrupted)
        assert run(*arguments, "--out", tmp_path / "grown") == 130
    collection = matcher.Collection.open(folder / "model-run", preset="nearest")
    matched = collection.counts().pairs_done
    assert matched == 15 and not (tmp_path / "grown").exists()

    assert run(*arguments, "--out", tmp_path / "grown", "--threads", 1) == 0
    assert "registered images: 6 of 6" in capfd.readouterr().out
    assert collection.counts().pairs_done == matched
    after = read_given_poses(tmp_path / "grown").cam_from_world
    assert sorted(set(after) - set(before)) == [f"later/{name}" for name in NEW]
    size = np.ptp([np.linalg.inv(pose)[:3, 3] for pose in before.values()], axis=0).max()
    for name, pose in before.items():
        moved = np.linalg.inv(pose)[:3, 3] - np.linalg.inv(after[name])[:3, 3]
        assert np.linalg.norm(moved) < 0.01 * size
    summary = json.loads((tmp_path / "grown" / "summary.json").read_text())
    assert summary["models"][0]["mean_reprojection_error"] < 1
    assert sorted(read_given_poses(folder / "model").cam_from_world) == sorted(before)  # as it was
    with matcher.Map.open(tmp_path / "grown") as place:
        assert len(place.names) == 6
    with pytest.raises(UsageError, match="has all 2 photos"):
        continue_model(tmp_path / "grown", folder / "photos" / "later", tmp_path / "again")


def test_a_model_on_earth_stays_there_when_photos_are_added(tmp_path, capfd):
    """In metres of the same origin, whatever the headers of the new photos say; maps and poses say so too."""
    poses = render_photos(tmp_path / "photos", count=6)
    metres = 6 * centres(poses)
    for number, (east, north, up) in enumerate(metres):
        degrees = (40 + north / 111_034, 20 + east / 85_394)  # of about that length there
        exif = PIL.Image.Exif()
        values = [(value + 0.0005 * (number == 4), 0.0, 0.0) for value in degrees]  # one header is 70 m off
        exif[0x8825] = {1: "N", 2: values[0], 3: "E", 4: values[1], 5: b"\0", 6: 100 + up}
        with PIL.Image.open(path := tmp_path / "photos" / f"photo{number}.png") as photo:
            photo.save(path, exif=exif)
    (tmp_path / "photos" / "later").mkdir()
    (tmp_path / "photos" / NEW[1]).rename(later := tmp_path / "photos" / "later" / NEW[1])
    first, grown = tmp_path / "model", tmp_path / "grown"
    assert run("sfm", tmp_path / "photos", "--out", first, *FAST, "--exclude", "later/") == 0
    assert "5 positions agree" in capfd.readouterr().out
    added = ("sfm", later.parent, "--continue", first, "--out", grown, "--workers", 0, "--threads", 1)
    assert run(*added) == 0
    assert "5 positions agree" in capfd.readouterr().out
    before, after = read_given_poses(first), read_given_poses(grown)
    assert len(after.cam_from_world) == 6
    assert after.georegistration["origin"] == before.georegistration["origin"]
    with matcher.Map.open(grown) as place:
        assert place.georegistration == after.georegistration
    photo0 = np.linalg.inv(before.cam_from_world["photo0.png"])[:3, 3]
    for name, number in (("photo0.png", 0), ("later/photo4.png", 4), ("photo5.png", 5)):
        centre = np.linalg.inv(after.cam_from_world[name])[:3, 3]
        np.testing.assert_allclose(centre - photo0, metres[number] - metres[0], atol=1.5)


@pytest.mark.parametrize(
    ("positions", "reason"),
    [
        ([(i * 20.0, 0.0) for i in range(6)], "they lie on one line"),
        ([(i * 0.5, i * i * 0.5) for i in range(6)], "they lie within 15 m"),
        ([(20.0, 0.0), (0.0, 20.0)], "they are 2, and 4 are needed"),
        ([], None),
    ],
)
def test_positions_that_do_not_place_a_model_are_said(positions, reason):
    names = [f"photo{number}.png" for number in range(6)]
    model = SimpleNamespace(
        reg_image_ids=lambda: range(6), image=lambda number: SimpleNamespace(name=names[number])
    )
    degrees = [(40 + north / 111_034, 20 + east / 85_394, 100.0) for east, north in positions]
    place, why = georegister(pycolmap, model, dict(zip(names, degrees, strict=False)))
    assert place is None and (why or "").startswith(reason or "") and (why is None) == (reason is None)
    shape = dict(cam_from_world=dict.fromkeys(names), cameras={}, points=9, observations=30)
    made = SparseModel(**shape, mean_track_length=3.0, mean_reprojection_error=0.5, positions_unused=why)
    report = Reconstruction(Path("model"), (made,), 6, ExportReport(Path("model")))
    assert any(f"not used, since {reason}" in line for line in summary_lines(report, None)) == bool(reason)


@pytest.mark.parametrize("line", [True, False])
def test_a_world_that_has_moved_is_brought_back(line):
    """Also from cameras on a line, which do not say how the world is turned about it."""
    rng = np.random.default_rng(0)
    turns = np.linalg.qr(rng.normal(size=(9, 3, 3)))[0]
    turns *= np.linalg.det(turns)[:, None, None]
    centres = np.arange(9.0)[:, None] * [1.0, 0.2, 0] if line else rng.normal(size=(9, 3))
    turn, scale, shift = turns[8], 2.5, np.array([4.0, -1, 7])

    def poses(turns, centres):
        return np.concatenate([turns, -turns @ centres[:, :, None]], axis=2)

    moved = poses(turns[:8] @ turn.T, (centres[:8] @ turn.T * scale + shift))
    moved[3] = poses(turns[5:6], centres[:1] + 9)[0]  # one camera is somewhere else now
    found = similarity(moved, poses(turns[:8], centres[:8]))
    assert found[0] == pytest.approx(1 / scale, rel=1e-6)
    np.testing.assert_allclose(found[1], turn.T, atol=1e-6)
    np.testing.assert_allclose(found[2], -turn.T @ shift / scale, atol=1e-6)


def test_a_full_disk_leaves_the_model(made, tmp_path, monkeypatch):
    folder, _ = made

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr("matcher.sfm.reconstruct.write_colmap", full)
    how = {"how": {"workers": 0}}
    with pytest.raises(OSError, match="disk is full"):
        continue_model(folder / "model", folder / "photos" / "later", tmp_path / "grown", **how)
    assert list(tmp_path.iterdir()) == []
    assert len(read_given_poses(folder / "model").cam_from_world) == 4


def test_a_disk_that_is_full_while_colmap_maps_is_named(made, tmp_path, monkeypatch, capfd):
    """COLMAP's own words are "No registered database factory succeeded"."""
    folder, _ = made

    def fails(part, *_):
        (part / "database.db").mkdir()  # which cannot be opened, as where there is no room for a database
        return reconstruct.ExportReport(part, images=6, matches=1)

    def mapped(*free):
        with monkeypatch.context() as patch:
            patch.setattr(reconstruct, "write_colmap", lambda _, out, *__: fails(out.parent))
            if free:
                usage = namedtuple("usage", "free")(*free)
                patch.setattr(mapping_process.shutil, "disk_usage", lambda _: usage)
            code = run("sfm", folder / "model-run", "--out", tmp_path / "out")
        return code, capfd.readouterr().err

    code, said = mapped()
    assert code == 4 and "COLMAP's process ended early" in said
    code, said = mapped(4096)
    assert code == 6 and "the disk is full" in said and "COLMAP" not in said
    assert list(tmp_path.iterdir()) == []


def test_cameras_that_were_given_stay_where_photos_are_added(made, tmp_path):
    folder, _ = made
    copied = tmp_path / "model"
    shutil.copytree(folder / "model", copied)
    summary = json.loads((copied / "summary.json").read_text())
    assert summary.pop("cameras_given") is True
    arguments = ("sfm", folder / "photos", "--workers", 0, "--threads", 1)
    grow = (*arguments, "--continue", folder / "model")
    assert run(*grow, "--out", tmp_path / "kept") == 0
    kept = read_given_poses(tmp_path / "kept")
    found = {name: camera.fx for name, camera in kept.cameras.items()}
    assert {focal for name, focal in found.items() if not name.startswith("later/")} == {528}
    assert {focal for name, focal in found.items() if name.startswith("later/")} != {528}  # of another folder
    assert not kept.keeps_cameras
    assert run(*grow, "--camera", "528,528,239.5,179.5", "--out", tmp_path / "same") == 0
    same = read_given_poses(tmp_path / "same")
    assert same.keeps_cameras and {camera.fx for camera in same.cameras.values()} == {528}
    summary["run"] = str(folder / "model-run")
    (copied / "summary.json").write_text(json.dumps(summary))  # of a model whose camera was refined
    assert run(*arguments, "--continue", copied, "--out", tmp_path / "refined") == 0
    assert {camera.fx for camera in read_given_poses(tmp_path / "refined").cameras.values()} != {528}


def test_a_focal_length_that_nobody_gave_is_said_beside_given_poses(made, tmp_path, capfd):
    folder, _ = made
    known = read_given_poses(folder / "model").cam_from_world
    write_named_poses(tmp_path / "poses.txt", known)
    arguments = ("sfm", folder / "model-run", "--poses", tmp_path / "poses.txt", "--threads", 1)
    assert run(*arguments, "--out", tmp_path / "guessed") == 0
    assert f"the focal length of {len(known)} photos is a guess" in capfd.readouterr().out
    assert run(*arguments, "--camera", "528,528,239.5,179.5", "--out", tmp_path / "told") == 0
    assert "is a guess" not in capfd.readouterr().out


def test_poses_are_kept_and_points_triangulated(made, tmp_path, capfd):
    folder, _ = made
    known = read_given_poses(folder / "model")
    photos, names = folder / "photos", [f"photo{i}.png" for i in (0, 2, 3, 5)]
    assert run("sfm", photos, "--poses", folder / "model", "--out", tmp_path / "points", *FAST) == 0
    assert "registered images: 4 of 4" in capfd.readouterr().out
    found = read_given_poses(tmp_path / "points")
    assert sorted(found.cam_from_world) == names
    for name in names:
        np.testing.assert_allclose(found.cam_from_world[name], known.cam_from_world[name], atol=1e-6)
        assert found.cameras[name] == known.cameras[name]
    assert json.loads((tmp_path / "points" / "summary.json").read_text())["models"][0]["points"] > 100


def test_a_changed_photo_of_the_model_is_not_taken_for_the_old_one(made, tmp_path, capfd):
    folder, _ = made
    photo = folder / "photos" / "photo0.png"
    held = photo.read_bytes()
    with Store.open(folder / "model-run") as store:
        known = store.image("photo0.png").sha256
    try:
        photo.write_bytes((folder / "photos" / "later" / NEW[0]).read_bytes())
        arguments = (folder / "photos", "--continue", folder / "model", "--out", tmp_path / "out")
        assert run("sfm", *arguments, "--workers", 0) == 5
        assert "photo0.png has changed" in capfd.readouterr().err and not (tmp_path / "out").exists()
        with Store.open(folder / "model-run") as store:
            assert store.image("photo0.png").sha256 == known  # the model still fits its run
    finally:
        photo.write_bytes(held)


def test_mistakes_name_their_remedy(made, tmp_path, capfd):
    folder, _ = made
    model, photos, out = folder / "model", folder / "photos", tmp_path / "out"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "bad.txt").write_text("no poses\n")
    for arguments, message in (
        ((tmp_path / "elsewhere", "--continue", model), "put the new photos into it"),
        ((photos, "--continue", tmp_path), "holds no COLMAP model"),
        ((photos, "--continue", model, "--poses", model), "give one of both"),
        ((photos, "--continue", model, "--max-keypoints", 5), "the settings of its run"),
        ((photos, "--continue", model, "--preset", "hybrid"), "the settings of its run"),
        ((photos, "--continue", model, "--no-upright"), "the settings of its run"),
        ((photos, "--continue", model, "--weights", "hybrid"), "no network, so --weights has no effect"),
        ((folder / "model-run", "--preset", "hybrid"), "already matched"),
        ((photos, "--poses", tmp_path / "none.txt"), "cannot be read as poses"),
        ((photos, "--poses", tmp_path / "bad.txt"), "name qw qx qy qz"),
        ((photos, "--poses", tmp_path / "path.tum"), "a trajectory has no names of images"),
        ((photos, "--poses", model, "--mapper", "global"), "without the poses that are given"),
        ((photos, "--continue", model, "--mapper", "global"), "without the poses that are given"),
        ((photos, "--poses", model, "--camera", "500,500,240,180"), "of no photo: all"),
        ((folder / "model-run", "--poses", model, "--camera", "500,500,240,180"), "of no photo: all"),
    ):
        assert run("sfm", *arguments, "--out", out) == 2, arguments
        error = capfd.readouterr().err
        assert message in error and "Traceback" not in error, error
    assert not out.exists()
