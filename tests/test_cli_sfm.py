"""`matcher sfm` and `matcher export`, from rendered photos to files that other programs read."""

import json

import numpy as np
import pytest
from collection_scene import aligned, centres, render_photos
from command import run

import matcher
from matcher import tiling as extraction

pycolmap = pytest.importorskip("pycolmap")
FAST = ("--preset", "nearest", "--max-keypoints", "1500", "--workers", "0", "--threads", "1")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Photos, their poses, and what `matcher sfm` made of them."""
    folder = tmp_path_factory.mktemp("made")
    poses = render_photos(folder / "photos")
    (folder / "photos" / "broken.jpg").write_bytes(b"no image")
    code = run("sfm", folder / "photos", "--out", folder / "model", *FAST)
    return folder, poses, code


def test_from_photos_to_a_model(made):
    folder, poses, code = made
    assert code == 4  # one photo could not be read
    model = pycolmap.Reconstruction(str(folder / "model" / "sparse" / "0"))
    found = {image.name: image.projection_center() for image in model.images.values()}
    assert sorted(found) == [f"photo{i}.png" for i in range(5)]
    truth = centres(poses)
    error = np.linalg.norm(aligned(np.array([found[name] for name in sorted(found)]), truth) - truth, axis=1)
    assert error.max() < 0.02 * np.linalg.norm(truth[0] - truth[-1])
    assert model.compute_mean_reprojection_error() < 1
    colours = np.array([point.color for point in model.points3D.values()])
    assert colours.std() > 10  # they are those of the photos
    with matcher.Collection.open(folder / "model-run").store as store:
        extractor = store.settings["config"]["extractor"]
    assert (extractor["max_keypoints"], extractor["resize"], extractor["keep"]) == (1500, 2048, "largest")


def test_keypoints_by_tiles_make_a_model(made, tmp_path, monkeypatch):
    folder, _, _ = made
    monkeypatch.setattr(extraction, "TILE", 300)
    photos = ("sfm", folder / "photos", "--out", tmp_path / "model")
    assert run(*photos, *FAST, "--tiles", "--exclude", "broken.jpg") == 0
    model = pycolmap.Reconstruction(str(tmp_path / "model" / "sparse" / "0"))
    assert model.num_reg_images() == 5 and model.compute_mean_reprojection_error() < 1
    with matcher.Collection.open(tmp_path / "model-run").store as store:
        extractor = store.settings["config"]["extractor"]
    assert (extractor["tiles"], extractor["resize"], extractor["max_keypoints"]) == (1500, None, 2048)
    assert run("sfm", tmp_path / "model-run", "--out", tmp_path / "again", "--tiles") == 2


def test_statistics_are_printed_and_written(made, capfd):
    folder, _, _ = made
    code = run("sfm", folder / "model-run", "--out", folder / "again", "--threads", 1, "--mapper", "global")
    printed = capfd.readouterr().out
    assert code == 0 and "registered images: 5 of 5" in printed and "1 images failed in the run" in printed
    assert "mean track length:" in printed and "px of the stored image\n" in printed
    (summary,) = json.loads((folder / "again" / "summary.json").read_text())["models"]
    assert f"points: {summary['points']}, " in printed
    assert (folder / "again" / "reconstruction.png").stat().st_size > 10_000


def test_a_run_is_exported(made, tmp_path, capfd):
    out = tmp_path / "a.npz"
    assert run("export", made[0] / "model-run", "--to", "npz", out) == 0
    printed = capfd.readouterr().out
    assert "5 images with " in printed and "10 pairs (" in printed and f"wrote {out}" in printed
    assert len(np.load(out)["pairs"]) == 10


def test_mistakes_have_a_message_and_a_code(made, tmp_path, capfd):
    folder, _, _ = made
    done, photos = folder / "model-run", folder / "photos"
    for arguments, printed in (
        (("sfm", done, "--out", folder / "model"), "not an empty folder"),
        (("sfm", done, "--out", tmp_path / "m", "--resize", 100), "already matched"),
        (("sfm", done, "--out", tmp_path / "m", "--camera", "1,2"), "--camera must be"),
        (("sfm", photos, "--out", tmp_path / "no" / "m"), "no folder"),
        (("sfm", tmp_path / "none", "--out", tmp_path / "m"), "none"),
        (("export", tmp_path, "--to", "npz", tmp_path / "a.npz"), "holds no run"),
        (("export", done, "--to", "npz", tmp_path / "a.txt"), "must end in .npz"),
        (("export", done, "--to", "npz", tmp_path / "a.npz", "--camera", "1,1,1,1"), "no cameras"),
        (("export", done, "--to", "abc", tmp_path / "a.npz"), "abc"),
    ):
        assert run(*arguments) == 2, arguments
        error = capfd.readouterr().err
        assert printed in error and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_too_little_to_reconstruct(tmp_path, capfd):
    render_photos(tmp_path / "photos", count=2, size=(120, 90))
    photos, out = tmp_path / "photos", tmp_path / "model"
    few = ("--max-keypoints", 20, "--keep", "strongest")
    assert run("sfm", photos, "--out", out, *FAST[:2], "--workers", 0, *few) == 4
    assert "COLMAP found no pair to begin with" in capfd.readouterr().err
    assert not out.exists()


def test_a_dry_run_checks_and_writes_nothing(made, tmp_path, capfd):
    folder, _, _ = made
    photos, model = folder / "photos", tmp_path / "model"
    assert run("sfm", photos, "--out", model, *FAST, "--exclude", "photo0*", "--dry-run") == 0
    printed = capfd.readouterr().out
    assert "images: 5" in printed and "--exhaustive" in printed and f"create {model}" in printed
    assert run("sfm", photos, "--out", model, *FAST, "--sequential", 2, "--dry-run") == 0
    assert "--sequential 2" in capfd.readouterr().out
    assert run("sfm", folder / "model-run", "--out", model, "--dry-run", "--include", "photo[012]*") == 0
    printed = capfd.readouterr().out
    assert "images: 3 of 6" in printed and "pairs: 10 matched" in printed
    assert run("sfm", photos, "--out", model, *FAST, "--masks", tmp_path, "--dry-run") == 2
    assert run("sfm", photos, "--out", folder / "model", *FAST, "--dry-run") == 2
    assert list(tmp_path.iterdir()) == []


def test_features_of_elsewhere(made, tmp_path, capfd):
    pytest.importorskip("h5py")
    folder, _, _ = made
    assert run("export", folder / "model-run", "--to", "hloc", tmp_path / "hloc") == 0
    given = ("--out", tmp_path / "model", "--features", tmp_path / "hloc" / "features.h5", *FAST[:2])
    given = (*given, "--workers", 0, "--threads", 1)
    assert run("sfm", folder / "photos", *given) == 0
    assert "registered images: 5 of 5" in capfd.readouterr().out
    assert run("sfm", folder / "photos", *given, "--overwrite", "--threshold", 0.3) == 2
    assert "--restart" in capfd.readouterr().err


def test_the_object_reconstructs_and_exports_with_a_choice_of_cameras(made, tmp_path):
    from matcher.export.colmap import CameraChoice

    folder, _, _ = made
    collection = matcher.Collection.open(folder / "model-run")
    choice = CameraChoice(model="SIMPLE_PINHOLE", sharing="single")
    result = collection.reconstruct(tmp_path / "model", cameras=choice, include=["photo[0123]*"], threads=1)
    assert result.largest.registered == result.images == 4
    assert {camera["model"] for camera in result.largest.cameras.values()} == {"SIMPLE_PINHOLE"}
    collection.export("colmap", tmp_path / "a.db", cameras=choice)
    with pycolmap.Database.open(tmp_path / "a.db") as database:
        assert database.num_cameras() == 1
    with pytest.raises(matcher.UsageError, match="unknown option 'max_images'"):
        collection.reconstruct(tmp_path / "other", max_images=3)
    with pytest.raises(matcher.UsageError, match="at least two photos"):
        collection.reconstruct(tmp_path / "other", include=["photo0.png"])
    with pytest.raises(matcher.UsageError, match="no cameras"):
        collection.export("npz", tmp_path / "a.npz", cameras=choice)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.db", "model"]


def test_pairs_of_many_photos_are_proposed(made, tmp_path, capfd):
    """All pairs of many photos take hours on a processor, and nothing said how to be quicker."""
    folder, _, _ = made
    (tmp_path / "photos").mkdir()
    for number in range(14):
        (tmp_path / "photos" / f"{number}.png").symlink_to(folder / "photos" / f"photo{number % 5}.png")
    quick = ("--preset", "nearest", "--workers", 0, "--threads", 1)
    assert run("sfm", tmp_path / "photos", "--out", tmp_path / "model", *quick, "--dry-run") == 0
    assert "--preemptive 30" in capfd.readouterr().out
