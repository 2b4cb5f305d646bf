"""Which images and pairs take part, what is said when nothing was chosen, and what is refused at once."""

import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
from collection_runs import QUICK, contents, photos

from matcher.cameras import Camera
from matcher.cli import main
from matcher.cli.runs import suggestion
from matcher.collection.collection import Collection
from matcher.collection.sources import PairChoice, Selection, default_choice
from matcher.collection.store import Store
from matcher.errors import UsageError

NEAR, FAR = Camera(200, 200, 99.5, 79.5), Camera(900, 900, 99.5, 79.5)


def test_a_run_without_any_pair_is_an_error(tmp_path, capfd):
    photos(tmp_path / "photos", 3)
    for name, text, printed in (
        (
            "list.csv",
            "view 00.png|view 01.png\n",
            "list.csv names no pair of these images: it needs two",
        ),
        ("empty.txt", "", "names no pair"),
    ):
        (tmp_path / name).write_text(text)
        given = ("--pairs", tmp_path / name, "--run", tmp_path / name[:4], *QUICK, "--workers", "0")
        assert main(["collection", str(tmp_path / "photos"), *map(str, given)]) == 2
        assert printed in capfd.readouterr().err
    one = ("--exhaustive", "--include", "view 00.png", "--run", tmp_path / "one", *QUICK, "--workers", "0")
    assert main(["collection", str(tmp_path / "photos"), *map(str, one)]) == 2
    assert "nothing to match with 1 image; add others" in capfd.readouterr().err


def collect(folder: Path, run_dir: Path, *more: object) -> int:
    given = ("collection", folder, "--run", run_dir, *QUICK, "--workers", 0, *more)
    return main([str(argument) for argument in given])


def opened(run_dir: Path, **options) -> Collection:
    wanted = {"preset": "nearest", "max_keypoints": 150, "device": "cpu", "workers": 0, **options}
    return Collection.open(run_dir, **wanted)


@pytest.fixture
def folder(tmp_path) -> Path:
    photos(tmp_path / "photos", 4)
    return tmp_path / "photos"


def pairs_of(run_dir: Path) -> set[tuple[str, str]]:
    return {(pair.name0[5:7], pair.name1[5:7]) for pair in opened(run_dir)}


def test_cameras_that_change_leave_features_and_matches(folder, tmp_path):
    """`set_cameras` once deleted the features of the images, and with them the matches of their pairs."""
    found = opened(tmp_path / "run", geometry="essential", camera=NEAR)
    found.add_images(folder)
    found.add_pairs(exhaustive=True)
    assert found.run().all_well
    before = {(pair.name0, pair.name1): pair for pair in found}
    kept = {key: value for key, value in contents(tmp_path / "run").items() if key[0] != "pair"}
    again = Collection.open(tmp_path / "run")
    assert again.set_cameras({"view 00.png": FAR}) == 3
    assert again.set_cameras({"view 00.png": FAR}) == 0  # it is that camera already
    after = {(pair.name0, pair.name1): pair for pair in found}
    assert {k: v for k, v in contents(tmp_path / "run").items() if k[0] != "pair"} == kept
    assert found.counts().pairs_waiting == found.counts().images_waiting == 0
    for names, pair in after.items():
        assert np.array_equal(pair.matches.indices, before[names].matches.indices)
        assert np.array_equal(pair.matches.scores, before[names].matches.scores)
    changed = {names for names in after if not same_geometry(after[names], before[names])}
    assert changed and all("view 00.png" in names for names in changed)
    fresh = opened(tmp_path / "fresh", geometry="essential", camera=NEAR)
    fresh.add_images(folder)
    fresh.set_cameras({"view 00.png": FAR})
    fresh.add_pairs(exhaustive=True)
    fresh.run()
    for pair in fresh:
        assert same_geometry(pair, after[pair.name0, pair.name1]), "as if the camera had been known before"


def same_geometry(pair, other) -> bool:
    poses = [side.geometry.cam1_from_cam0 for side in (pair, other)]
    alike = np.array_equal(*poses) if all(pose is not None for pose in poses) else poses[0] is poses[1]
    return alike and np.array_equal(pair.geometry.inliers, other.geometry.inliers)


def test_a_camera_that_arrives_late_lets_failed_pairs_wait(folder, tmp_path):
    found = opened(tmp_path / "run", geometry="essential")
    found.add_images(folder)
    found.set_cameras({"view 00.png": NEAR})
    found.add_pairs(exhaustive=True)
    assert found.run().counts.pairs_failed == 6
    assert found.set_cameras({f"view 0{n}.png": NEAR for n in (1, 2, 3)}) == 0
    assert (found.counts().pairs_failed, found.counts().pairs_waiting) == (0, 6)
    report = found.run()
    assert (report.extracted, report.matched, report.all_well) == (0, 6, True)


def test_cameras_mean_nothing_to_a_fundamental_matrix(folder, tmp_path):
    found = opened(tmp_path / "run")
    found.add_images(folder)
    found.add_pairs(sequential=1)
    found.run()
    before = contents(tmp_path / "run")
    assert found.set_cameras({"view 00.png": NEAR}) == 0
    assert contents(tmp_path / "run") == before
    with pytest.raises(UsageError, match=r"no image 'x\.png'"):
        found.set_cameras({"x.png": NEAR})


def test_essential_without_cameras_is_refused_at_once(folder, tmp_path, capfd):
    """It extracted everything and then failed every pair."""
    assert collect(folder, tmp_path / "run", "--geometry", "essential", "--exhaustive") == 2
    err = capfd.readouterr().err
    assert "--camera" in err and "extracting" not in err and not (tmp_path / "run").exists()
    found = opened(tmp_path / "other", geometry="essential")
    found.add_images(folder)
    found.add_pairs(exhaustive=True)
    for attempt in (found.run, found.extract, lambda: found.add_pairs(similar=1)):
        with pytest.raises(UsageError, match="set_cameras"):
            attempt()
    assert found.counts().images_waiting == 4


def test_without_an_option_every_pair_is_matched_and_a_notice_explains_it(folder, tmp_path, capfd):
    """It printed "8 waiting, 0 done" and matched nothing."""
    assert collect(folder, tmp_path / "run") == 0
    out, err = capfd.readouterr()
    assert "pairs: 6 done, 0 failed, 0 waiting" in out
    assert "no pairs were chosen" in err and "--exhaustive" in err
    photos(folder, 6)  # two more
    assert collect(folder, tmp_path / "run") == 0
    out, err = capfd.readouterr()
    assert "pairs: 15 done" in out and "--exhaustive" in err and "matching pairs: 9 of 9" in err
    assert collect(folder, tmp_path / "run") == 0
    assert "no option" not in capfd.readouterr().err


def test_many_images_are_paired_with_similar_ones():
    assert default_choice(50) == PairChoice("exhaustive", by_default=True)
    assert default_choice(51) == PairChoice("similar", 20, by_default=True)
    assert default_choice(100, exhaustive_up_to=100, neighbours=30).method == "exhaustive"
    larger = default_choice(101, exhaustive_up_to=100, neighbours=30)
    assert larger.arguments() == {"similar": 30} and "(--similar 30)" in suggestion(larger, 101)


def test_a_default_follows_the_number_of_images(folder, tmp_path):
    found = opened(tmp_path / "run")
    found.add_images(folder)
    first = found.suggest_pairs(exhaustive_up_to=4, neighbours=2)
    assert first.method == "exhaustive" and found.add_pairs(first) == (6, 6)
    assert found.suggest_pairs() is None
    photos(folder, 5)
    found.add_images(folder)
    second = found.suggest_pairs(exhaustive_up_to=4, neighbours=2)
    assert (second.method, second.neighbours, second.by_default) == ("similar", 2, True)
    found.add_pairs(second)
    assert found.suggest_pairs() is None


def test_added_images_are_paired_as_before(folder, tmp_path, capfd):
    run_dir = tmp_path / "run"
    assert collect(folder, run_dir, "--sequential", 1) == 0
    photos(folder, 5)
    capfd.readouterr()
    assert collect(folder, run_dir) == 0
    assert "new images are paired like the others: --sequential 1" in capfd.readouterr().err
    assert pairs_of(run_dir) == {(f"0{n}", f"0{n + 1}") for n in range(4)}


def test_after_a_list_only_the_user_knows_the_pairs_of_new_images(folder, tmp_path, capfd):
    (tmp_path / "pairs.txt").write_text('"view 00.png" "view 01.png"\n')
    assert collect(folder, tmp_path / "run", "--pairs", tmp_path / "pairs.txt") == 0
    capfd.readouterr()
    assert collect(folder, tmp_path / "run") == 0
    out, err = capfd.readouterr()
    assert "some images have no pair" in err and "--exhaustive" in err and "pairs: 1 done" in out


def test_a_bad_photo_is_reported_once(folder, tmp_path, capfd):
    """There was a line for each of its pairs."""
    (folder / "view 01.png").write_text("no image")
    assert collect(folder, tmp_path / "run", "--exhaustive") == 4
    out = capfd.readouterr().out
    assert sum("view 01.png" in line for line in out.splitlines()) == 1
    assert "failed: 3 pairs with a failed image" in out


def test_pairs_that_fail_alike_share_a_line(folder, tmp_path, capfd):
    found = opened(tmp_path / "run", geometry="essential")
    found.add_images(folder)
    found.set_cameras({"view 00.png": NEAR, "view 01.png": NEAR, "view 02.png": NEAR})
    found.add_pairs(exhaustive=True)
    found.run()
    assert main(["status", str(tmp_path / "run")]) == 4
    out = capfd.readouterr().out
    assert "view 00.png and view 03.png and 2 other pairs: geometry 'essential' needs the camera" in out


def test_masks_that_belong_to_no_image_are_refused(folder, tmp_path, capfd):
    (tmp_path / "masks").mkdir()
    assert collect(folder, tmp_path / "run", "--masks", tmp_path / "masks", "--exhaustive") == 2
    assert "holds no mask of any of the 4 images" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
    cv2.imwrite(str(tmp_path / "masks" / "view 02.png"), np.full((160, 200), 255, np.uint8))
    assert collect(folder, tmp_path / "run", "--masks", tmp_path / "masks", "--exhaustive") == 0
    assert "1 of 4 images have a mask" in capfd.readouterr().err


def test_images_are_selected_by_name_folder_glob_or_list(folder, tmp_path, capfd):
    (folder / "left").mkdir()
    shutil.copy(folder / "view 00.png", folder / "left" / "a[1].png")
    names = ["left/a[1].png", *(f"view 0{n}.png" for n in range(4))]
    for include, exclude, kept in (
        ((), (), names),
        (("view*",), (), names[1:]),
        (("left/",), (), names[:1]),
        (("view 01.png", "./view 02.png"), (), names[2:4]),
        ((), ("left/*", "view 0[01].png"), names[3:]),
    ):
        assert Selection.parse(include, exclude).apply(names) == kept
    (tmp_path / "list.txt").write_text("\ufeff# best ones\nleft/a[1].png\n\nview 03.png\n", encoding="utf-8")
    assert Selection.parse([f"@{tmp_path / 'list.txt'}"]).apply(names) == [names[0], names[4]]
    for include, message in ((["x*"], "no image is called"), (["@absent.txt"], "cannot be read")):
        with pytest.raises(UsageError, match=message):
            Selection.parse(include).apply(names)
    with pytest.raises(UsageError, match="every image is excluded"):
        Selection.parse(exclude=["*"]).apply(names)
    assert collect(folder, tmp_path / "run", "--exclude", "left/", "--exclude", "view 03.png") == 0
    with Store.open(tmp_path / "run") as store:
        assert [image.name for image in store.images()] == names[1:4]
        assert store.counts().pairs_done == 3
    capfd.readouterr()
    assert collect(folder, tmp_path / "run", "--exclude", "left/", "--exclude", "view 02.png") == 0
    assert "not selected: 1 image of the run" in capfd.readouterr().err
    assert pairs_of(tmp_path / "run") == {
        ("00", "01"),
        ("00", "02"),
        ("01", "02"),
        ("00", "03"),
        ("01", "03"),
    }


def test_a_collection_shows_itself_in_one_line(folder, tmp_path):
    found = opened(tmp_path / "run")
    assert repr(found) == f"Collection({str(tmp_path / 'run')!r}, no images yet)"
    found.add_images(folder)
    found.add_pairs(sequential=1)
    assert "nearest, 0 of 4 images and 0 of 3 pairs done)" in repr(found)
    found.run()
    assert "4 of 4 images and 3 of 3 pairs done" in repr(found)
    (tmp_path / "run" / "run.db").write_bytes(b"damaged" * 999)
    assert "unreadable" in repr(found) and "\n" not in repr(found)


def test_tracks_are_read_and_measured(folder, tmp_path, capfd):
    assert collect(folder, tmp_path / "run", "--exhaustive") == 0
    tracks = opened(tmp_path / "run").tracks()
    assert len(tracks) > 20 and tracks.lengths.max() == 4
    assert len(opened(tmp_path / "run").tracks(min_length=4)) == (tracks.lengths == 4).sum()
    assert main(["status", str(tmp_path / "run"), "--tracks"]) == 0
    assert f"tracks: {len(tracks)}, of {tracks.mean_length:.2f} images on average" in capfd.readouterr().out


def test_features_of_a_store_know_their_scale(folder, tmp_path):
    assert collect(folder, tmp_path / "run", "--sequential", 1, "--resize", 100) == 0
    with Store.open(tmp_path / "run") as store:
        assert store.features("view 00.png").scale.tolist() == pytest.approx([0.5, 0.5])
        pair = store.pair("view 01.png", "view 00.png")
        assert (pair.name0, pair.name1) == ("view 00.png", "view 01.png") and len(pair.matches) > 0
        with pytest.raises(UsageError, match="no finished pair"):
            store.pair("view 00.png", "view 03.png")
