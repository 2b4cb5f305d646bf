"""A few images matched in memory: tracks agree all the way round, and the panorama is the scene."""

import io
from itertools import product
from pathlib import Path

import cv2
import numpy as np
import PIL.Image
import pytest

import matcher
from matcher.cli import main
from matcher.geometry import warp_points

ROOT = Path(__file__).resolve().parent.parent
QUICK = {"geometry": "homography", "max_keypoints": 500}


@pytest.fixture(scope="module")
def scene() -> np.ndarray:
    view = cv2.imread(str(ROOT / "assets" / "view0.jpg"))[..., ::-1]
    return np.ascontiguousarray(cv2.resize(view, (480, 360), interpolation=cv2.INTER_AREA))


def shown(scene, x, y, degrees, gain=1.0) -> tuple[np.ndarray, np.ndarray]:
    """240 x 200 pixels around a point of the scene, turned; and scene → image."""
    matrix = np.vstack([cv2.getRotationMatrix2D((x, y), -degrees, 1), [0, 0, 1]])
    matrix[:2, 2] += (120 - x, 100 - y)
    image = cv2.warpPerspective(scene, matrix, (240, 200), borderMode=cv2.BORDER_CONSTANT)
    return np.clip(image * gain, 0, 255).astype(np.uint8), matrix


@pytest.fixture(scope="module")
def crops(scene):
    return [shown(scene, 150, 170, 8), shown(scene, 220, 160, -25), shown(scene, 320, 190, 12, 0.9)]


def test_tracks_join_the_same_point_in_all_images(crops):
    images, maps = zip(*crops, strict=True)
    found = matcher.match_set(iter(images), "nearest", **QUICK)
    assert found.names == ("image 0", "image 1", "image 2") and found.groups() == [[0, 1, 2]]
    table = found.tracks.table()
    assert len(np.unique(table[:, :2], axis=0)) == len(table), "a track has one keypoint of an image"
    for first, second in ((0, 1), (1, 2), (0, 2)):
        points = found.points(first, second)
        truth = warp_points(points[0], maps[second] @ np.linalg.inv(maps[first]))
        assert np.mean(np.linalg.norm(truth - points[1], axis=1) < 2) > 0.95
    assert len(found.matches(0, 1)) > 50


class Numbered:
    """A front end that finds the same points of a scene in every picture, each at a place of its own."""

    def __call__(self, images):
        spots = np.stack(np.meshgrid(np.arange(10), np.arange(6)), -1).reshape(-1, 2) * 20.0
        found = []
        for image in images:
            number = int(image.pixels[0, 0])
            described = np.full((60, 1), number, np.float32)
            found.append(matcher.Features.from_image(image, spots + 2 * number, described, kind="own"))
        return found


def in_order(features0, features1):
    """Matches of points of one number, but for images 1 and 3, between which they are shifted."""
    pair = features0, features1
    shift = 10 * ({int(features.descriptors[0, 0, 0]) for features in pair} == {1, 3})
    indices = np.column_stack([np.arange(60 - shift), np.arange(shift, 60)])
    ends = (np.asarray(f.keypoints[0])[side] for f, side in zip(pair, indices.T, strict=True))
    return [matcher.Matches(indices, *ends, np.ones(len(indices), np.float32))]


def all_agree(points0, points1, **_):
    return matcher.TwoViewGeometry("homography", "ok", np.ones(len(points0), bool), np.eye(3))


def test_a_pair_that_others_contradict_is_rejected_and_named():
    images = [np.full((120, 200), number, np.uint8) for number in range(5)]
    pipeline = matcher.Pipeline(Numbered(), in_order, all_agree)
    found = matcher.match_set(images, pipeline)
    assert found.tracks.contradicted == (("image 1", "image 3"),)
    assert [ends for ends, (_, geometry) in found.pairs.items() if not geometry.verified] == [(1, 3)]
    assert found.groups() == [[0, 1, 2, 3, 4]] and len(found.tracks) == 60
    assert (found.tracks.lengths == 5).all()


def test_arguments_that_do_not_fit_are_refused(crops):
    images = [image for image, _ in crops]
    for wrong, message in (
        ({"images": images[:1]}, "at least two"),
        ({"images": [images, images[0]]}, "not list"),
        ({"images": "absent"}, "absent: there is no such folder"),
        ({"masks": [None]}, "one for each of the 3"),
        ({"pairs": [(0, 3)]}, "0 to 2"),
        ({"geometry": "essential"}, "without cameras"),
    ):
        with pytest.raises(matcher.UsageError, match=message):
            matcher.match_set(**{"images": images, "preset": "nearest", **wrong})
    found = matcher.match_set(images[:2], matcher.load("nearest", **QUICK))
    with pytest.raises(matcher.UsageError, match="not two of the images"):
        found.matches(0, 0)


# --- Panoramas.


@pytest.fixture(scope="module")
def canvas() -> np.ndarray:
    noise = np.random.default_rng(7).uniform(0, 1, (512, 1600, 3))
    blurred = sum(cv2.GaussianBlur(noise, (0, 0), s) * s for s in (1.5, 4, 12))
    return cv2.normalize(blurred, None, 0, 255, cv2.NORM_MINMAX).astype(np.uint8)


def parts(canvas: np.ndarray) -> list[np.ndarray]:
    return [np.ascontiguousarray(canvas[:, start : start + 400]) for start in (0, 200, 368)]


@pytest.mark.parametrize("white", [255, 16383, 65535])
def test_crops_come_out_as_the_picture(canvas, rng, white, tmp_path):
    deep = np.rint(canvas * (white / 255)).astype(np.uint8 if white == 255 else np.uint16)
    views = parts(deep)
    views[1][:, 250:] += rng.integers(0, 3, (512, 150, 3), dtype=np.uint8)  # noise of the overlap
    order = 1 if white == 255 else -1  # as OpenCV has colours
    given = [view[..., ::order] for view in views]
    made = matcher.stitch(given, "nearest", max_keypoints=600, bgr=order < 0)
    assert (made.pixels.shape, made.model, made.used) == ((512, 768, 3), "translation", (0, 1, 2))
    assert made.covered.all() and made.pixels.dtype == deep.dtype
    assert np.array_equal(made.pixels[:, :400], deep[:, :400])
    assert np.abs(made.pixels.astype(int) - deep[:, :768]).max() < 4
    assert np.array_equal(cv2.imread(str(made.save(tmp_path / "a.tif")), -1)[..., ::-1], made.pixels)
    files = [tmp_path / f"{number}.tif" for number in range(3)]
    for path, view in zip(files, views, strict=True):
        PIL.Image.fromarray(np.ascontiguousarray(view[..., 1])).save(path, dpi=(300, 300))
    (tmp_path / "views").mkdir()
    files = [path.rename(tmp_path / "views" / path.name) for path in files]
    made = matcher.stitch(tmp_path / "views", "nearest", max_keypoints=600)
    aligned = matcher.align(*files[1:], "nearest", max_keypoints=600)
    for path in (made.save(tmp_path / "grey.tif"), aligned.save(tmp_path / "above.tif")):
        assert (tags := PIL.Image.open(path).tag_v2)[282] == 300 and tags[259] > 1  # compressed
    PIL.Image.open(files[2]).save(files[2], dpi=(2**32 - 1, 300))
    assert PIL.Image.open(aligned.save(tmp_path / "above.tif")).tag_v2.get(282) != 300
    assert np.array_equal(cv2.imread(str(tmp_path / "grey.tif"), -1), made.pixels[..., 0])


def test_turned_and_scaled_crops_need_a_similarity(canvas):
    turn = cv2.getRotationMatrix2D((200, 256), 12, 0.9)
    second = cv2.warpAffine(canvas[:, 200:700], turn, (420, 512), borderMode=cv2.BORDER_REFLECT)
    made = matcher.stitch([parts(canvas)[0], second], "nearest", max_keypoints=600)
    assert made.model == "similarity" and len(repr(made)) < 200
    files = (io.BytesIO(cv2.imencode(".png", each)[1]) for each in (parts(canvas)[0], second))
    cropped = matcher.stitch(list(files), "nearest", max_keypoints=600, crop=True)
    assert cropped.covered.all() and 0.4 * made.pixels.size < cropped.pixels.size < made.pixels.size


def test_a_wide_view_goes_on_a_sphere(canvas):
    """Five views that turn by 25 degrees each, of a cylinder papered with the canvas."""
    focal, views = 300.0, []
    x, y = np.meshgrid(np.arange(400) - 200.0, np.arange(360) - 180.0)
    for yaw in np.radians([-50, -25, 0, 25, 50]):
        angle = np.arctan2(x, focal) + yaw
        height = y / np.hypot(x, focal)
        at = np.float32(800 + angle * 500), np.float32(256 + height * 380)
        views.append(cv2.remap(canvas, *at, cv2.INTER_LINEAR))
    made = matcher.stitch(views, "nearest", max_keypoints=600)
    assert (made.projection, len(made.used)) == ("spherical", 5)
    height, width = made.pixels.shape[:2]
    assert 2 < width / height < 4 and made.agreeing > 0.9
    assert matcher.stitch(views, "nearest", max_keypoints=600, model="similarity").projection == "plane"
    with pytest.raises(matcher.UsageError):
        matcher.stitch(views, "nearest", max_keypoints=600, projection="plane", model="cubic")
    around = [np.ascontiguousarray(np.roll(canvas, -200 * i, axis=1)[:360, :400]) for i in range(8)]
    with pytest.raises(matcher.ImageError, match="spherical"):  # a flat loop, which no camera sees
        matcher.stitch(around, "nearest", max_keypoints=800, projection="spherical")


def test_the_command(canvas, tmp_path, capfd):
    for number, part in enumerate([*parts(canvas), np.zeros((90, 90, 3), np.uint8)]):
        cv2.imwrite(str(tmp_path / f"{number}.png"), part)
    command = ["stitch", str(tmp_path), "--preset", "nearest", "--max-keypoints", "600"]
    assert main([*command, "--output", str(tmp_path / "0.png")]) == 2
    (tmp_path / "made").mkdir()
    assert main([*command, "--output", str(tmp_path / "made" / "all.png")]) == 4  # one is of nothing
    assert "3.png" in capfd.readouterr().err
    for pair, code, said in (((0, 3), 4, "no two"), ((0, 0), 2, "0.png")):
        given = [str(tmp_path / f"{number}.png") for number in pair]
        assert main(["stitch", *given, *command[2:], "--output", str(tmp_path / "none.png")]) == code
        assert said in capfd.readouterr().err
    assert cv2.imread(str(tmp_path / "made" / "all.png")).shape == (512, 768, 3)


def test_a_model_that_does_not_fit_is_told_of(canvas, tmp_path, capfd):
    views = [str(tmp_path / name) for name in ("0.png", "1.png")]
    for path, part in zip(views, (parts(canvas)[0], parts(canvas)[1][::-1, ::-1]), strict=True):
        cv2.imwrite(path, part)
    command = ["stitch", *views, "--preset", "nearest", "--overwrite"]
    command += ["--output", views[0] + ".png", "--model"]
    assert main([*command, "similarity"]) == 0
    assert "warning" not in capfd.readouterr().err
    assert main([*command, "translation"]) == 4
    assert "of the matches agree" in capfd.readouterr().err
    assert main([*command, "translation", "--projection", "spherical"]) == 2
    assert "--model translation" in capfd.readouterr().err


def test_a_scene_with_depth_is_no_speck_and_is_told_of(views, tmp_path, capfd):
    out = tmp_path / "all.png"
    command = ["stitch", *map(str, views), "--max-keypoints", "1024", "--output", str(out)]
    assert main(command) == 0 and "of the matches agree" in capfd.readouterr().err
    assert main([*command, "--fail-below", "0.5"]) == 4
    assert min(cv2.imread(str(out)).shape[:2]) >= 500


def test_pages_of_like_print_do_not_make_a_picture(rng):
    """Different words in the same letters: some lines agree by chance."""
    pages = [np.full((900, 700), 255, np.uint8) for _ in range(2)]
    for page, y in product(pages, range(40, 900, 26)):
        words = " ".join("".join(rng.choice(list("abdeghnoprstu"), rng.integers(3, 9))) for _ in range(9))
        cv2.putText(page, words, (30, y), cv2.FONT_HERSHEY_COMPLEX, 0.6, 0, 1, cv2.LINE_AA)
    with pytest.raises(matcher.ImageError, match="no two"):
        matcher.stitch(pages)
    for model in ("homography", "similarity"):
        found = matcher.align(*pages, model=model, further_passes=False)
        assert found.to_dict()["verdict"]["word"] == "not" and "different places" in found.summary()
        assert not found.found and (rejected := found.result.geometry.rejected).repetition is not None
        assert found.to_dict()["inliers"] == rejected.inliers.sum() > 0 and found.error > 0
