"""`matcher align` and `matcher find`: maps of the plane and templates are recovered, and drawn."""

import io
import json

import cv2
import numpy as np
import PIL.Image
import pytest
from command import run

import matcher
from matcher.config import EstimationConfig
from matcher.geometry import warp_points
from matcher.verify.estimation import RobustEstimator

pytestmark = pytest.mark.usefixtures("compiled")

PLANAR = EstimationConfig(kind="homography")
SIMILARITY = np.vstack([cv2.getRotationMatrix2D((0, 0), -25, 0.8), [0, 0, 1]])
SIMILARITY[:2, 2] = 90, 10
AFFINE = np.array([[0.9, 0.2, 20.0], [-0.1, 1.2, 15], [0, 0, 1]])
HOMOGRAPHY = np.array([[0.9, 0.1, 30.0], [-0.05, 1.0, 20], [2e-4, 1e-4, 1]])


@pytest.fixture
def pair(views, tmp_path):
    """A view and its warp, as files, and the pixels."""
    pixels = cv2.resize(cv2.imread(str(views[0])), (400, 300), interpolation=cv2.INTER_AREA)
    moved = cv2.warpPerspective(pixels, HOMOGRAPHY, (400, 300))
    paths = tmp_path / "a.png", tmp_path / "b.png"
    for path, image in zip(paths, (pixels, moved), strict=True):
        PIL.Image.fromarray(image).save(path)
    return paths, pixels, moved


@pytest.mark.parametrize(("model", "true"), [("similarity", SIMILARITY), ("affine", AFFINE)])
def test_a_map_is_recovered_among_outliers(rng, model, true):
    points0 = rng.uniform(0, 1000, (300, 2))
    points1 = warp_points(points0, true) + rng.normal(0, 0.5, (300, 2))
    points1[200:] = rng.uniform(0, 1000, (100, 2))
    found = RobustEstimator(PLANAR, planar=model)(points0, points1, thresholds_scale=1.5)
    assert found.status == "ok" and found.inliers[:200].mean() > 0.98 and found.inliers[200:].sum() < 5
    corners = np.array([[0.0, 0], [1000, 0], [1000, 1000], [0, 1000]])
    assert np.abs(warp_points(corners, found.matrix) - warp_points(corners, true)).max() < 1.5


def test_a_similarity_does_not_mirror(rng):
    points = rng.uniform(0, 1000, (100, 2))
    mirrored = points * [-1, 1] + [1000, 0]
    assert RobustEstimator(PLANAR, planar="affine")(points, mirrored).status == "ok"
    assert RobustEstimator(PLANAR, planar="similarity")(points, mirrored).status == "low_inliers"


def test_the_aligned_image_is_the_other_one(pair):
    (a, b), _, moved = pair
    files = (io.BytesIO(path.read_bytes()) for path in (a, b))
    found = matcher.align(*files, "nearest", max_keypoints=500)
    picture = found.image()
    assert found.found and picture.shape == (*moved.shape[:2], 4) and found.error < 0.5
    inner = cv2.erode(picture[..., 3], np.ones((9, 9))) > 0
    assert inner.mean() > 0.5
    assert np.abs(picture[..., :3].astype(int) - moved)[inner].mean() < 4
    board = found.image("checkerboard")
    assert np.abs(board.astype(int) - moved)[inner].mean() < 12 and board.shape == moved.shape
    with pytest.raises(matcher.UsageError, match="unknown view 'sideways'"):
        found.image("sideways")


def test_orientations_of_both_files_are_respected(pair, tmp_path):
    (_, b), pixels, moved = pair
    turned = tmp_path / "turned.png"
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a viewer
    PIL.Image.fromarray(np.rot90(pixels)).save(turned, exif=exif)
    found = matcher.align(turned, b, "nearest", max_keypoints=500)
    at = [warp_points(np.array([[10.0, 20.0]]), matrix) for matrix in (found.matrix_upright, HOMOGRAPHY)]
    np.testing.assert_allclose(*at, atol=1)
    as_stored = matcher.align(turned, b, "nearest", max_keypoints=500, upright=False)
    assert int(as_stored.result.features0.matched_orientation) == 1
    np.testing.assert_allclose(as_stored.matrix, found.matrix, rtol=0.05, atol=1)
    inner = cv2.erode((picture := found.image())[..., 3], np.ones((9, 9))) > 0
    assert np.abs(picture[..., :3].astype(int) - moved)[inner].mean() < 5


def test_the_command_writes_all_views_and_prints_the_matrix(pair, tmp_path, capfd):
    (a, b), pixels, moved = pair
    cv2.imwrite(str(a), pixels.astype(np.uint16)[..., ::-1] * 16)  # 12 bits, which are black among 16
    files = {name: tmp_path / f"{name}.png" for name in ("output", "blend", "checkerboard", "difference")}
    asked = [text for name, path in files.items() for text in (f"--{name}", path)]
    quick = ("--preset", "nearest", "--max-keypoints", 500, "--model", "affine")
    assert run("align", a, b, *asked, *quick) == 0
    text = capfd.readouterr().out
    assert "inliers of one affine map" in text and "# affine, x1 ~ H x0" in text
    assert all(PIL.Image.open(path).size == (400, 300) for path in files.values())
    warped, blend, _, difference = (cv2.imread(str(path), -1) for path in files.values())
    inner = cv2.erode(np.uint8(warped[..., 3] == 65535), np.ones((9, 9))) > 0
    assert np.abs(warped[..., 2::-1] / 16 - moved)[inner].mean() < 20
    assert difference.dtype == np.uint16 and difference[inner].mean() < 20 * 16
    assert blend.dtype == np.uint8 and np.ptp(blend[inner].astype(int), axis=1).mean() < 20
    assert run("align", a, b, *quick, "--output", tmp_path / "a.jpg") == 0
    assert "0 to 4095" in capfd.readouterr().err and cv2.imread(str(tmp_path / "a.jpg")).max() > 99
    assert run("align", a, b, *quick, "--gcp", tmp_path / "gcp.points") == 0
    assert "b.png has no coordinates" in capfd.readouterr().err
    assert run("align", a, b, *quick, "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert found["model"] == "affine" and found["status"] == "ok" and len(found["matrix"]) == 3


def test_nothing_is_overwritten_and_no_match_is_said(pair, tmp_path, capfd):
    (a, b), _, _ = pair
    quick = ("--preset", "nearest", "--max-keypoints", 200)
    assert run("align", a, b, "--output", a.with_name("d.png"), "--blend", a.with_name("d.png"), *quick) == 2
    assert run("align", a, b, "--output", a, "--overwrite", *quick) == 2
    assert "is an input" in capfd.readouterr().err
    noise, out = tmp_path / "noise.png", tmp_path / "out.png"
    cv2.imwrite(str(noise), np.random.default_rng(0).integers(0, 255, (200, 200), dtype=np.uint8))
    assert run("align", a, noise, "--output", out, *quick) == 4
    assert "not aligned" in capfd.readouterr().err and not out.exists()
    with pytest.raises(matcher.UsageError, match="not aligned"):
        matcher.align(a, noise, "nearest", max_keypoints=200).image()


def test_a_mirrored_print_is_called_so_as_match_calls_it(views):
    photo = cv2.resize(cv2.imread(str(views[0])), (320, 240), interpolation=cv2.INTER_AREA)
    flipped = np.ascontiguousarray(photo[:, ::-1])
    said = matcher.load(max_keypoints=256).match(flipped, photo)
    found = matcher.align(flipped, photo, model="similarity", max_keypoints=256)
    assert said.geometry.status == found.status == "mirrored" and "flip it" in found.to_dict()["reason"]
    assert said.verdict == found.result.verdict and found.agreeing == 0


def test_a_scene_with_depth_is_told_of(capfd, tmp_path):
    """Three parts of a picture move differently: one is aligned, and most of the matches disagree."""
    scene = cv2.GaussianBlur(np.random.default_rng(5).integers(0, 255, (400, 600), np.uint8), (0, 0), 2)
    parts = zip((0, 200, 400), (9, -14, 31), strict=True)
    moved = np.concatenate([np.roll(scene[:, x : x + 200], shift, axis=0) for x, shift in parts], axis=1)
    found = matcher.align(scene, moved, "nearest", max_keypoints=800)
    assert found.found and found.agreeing < 0.5 and "no plane" in found.summary()
    cv2.imwrite(str(tmp_path / "0.png"), scene)
    cv2.imwrite(str(tmp_path / "1.png"), moved)
    command = ("align", tmp_path / "0.png", tmp_path / "1.png", "--preset", "nearest")
    for more, code in (((), 0), (("--gcp", tmp_path / "a.csv"), 0), (("--fail-below", 0.5), 4)):
        assert run(*command, *more) == code and "no plane" in capfd.readouterr().out


# --- `matcher find`: every instance of a template is found, at its scale and turn, and nothing else.


# Centre in the image, scale and turn in degrees of what is pasted.
POSES = [(150, 150, 0.6, 0), (430, 140, 0.8, 130), (330, 390, 1.4, -60)]
QUICK = ("--preset", "nearest", "--max-keypoints", 600)


@pytest.fixture(scope="module")
def template() -> np.ndarray:
    """Coloured spots of many sizes, which no two places share."""
    rng = np.random.default_rng(4)
    canvas = np.full((180, 220, 3), 128, np.uint8)
    for _ in range(260):
        centre, colour = rng.integers(0, (220, 180)).tolist(), rng.integers(0, 255, 3).tolist()
        cv2.circle(canvas, centre, int(rng.integers(2, 16)), colour, -1, cv2.LINE_AA)
    return canvas


def pose_matrix(x, y, scale, degrees, size=(220, 180)) -> np.ndarray:
    """(3, 3) template → image, for a template of so many pixels."""
    middle = (size[0] - 1) / 2, (size[1] - 1) / 2
    matrix = np.vstack([cv2.getRotationMatrix2D(middle, -degrees, scale), [0, 0, 1]])
    matrix[:2, 2] += np.subtract((x, y), middle)
    return matrix


def paste(image: np.ndarray, template: np.ndarray, pose) -> None:
    height, width = template.shape[:2]
    matrix, size = pose_matrix(*pose, (width, height))[:2], image.shape[1::-1]
    cover = cv2.warpAffine(np.full((height, width), 255, np.uint8), matrix, size) > 127
    smooth = cv2.GaussianBlur(template, (0, 0), 0.4 / pose[2]) if pose[2] < 1 else template
    image[cover] = cv2.warpAffine(smooth, matrix, size)[cover]


@pytest.fixture(scope="module")
def scene(template) -> np.ndarray:
    """The template three times on a background of its own."""
    coarse = np.random.default_rng(5).integers(60, 200, (30, 36, 3), dtype=np.uint8)
    canvas = cv2.resize(coarse, (600, 560), interpolation=cv2.INTER_CUBIC)
    for pose in POSES:
        paste(canvas, template, pose)
    return canvas


def true_corners(pose) -> np.ndarray:
    return warp_points(np.array([[0, 0], [220, 0], [220, 180], [0, 180]]) - 0.5, pose_matrix(*pose))


def test_a_part_of_a_facade_does_not_show_its_mirror_image(views, shipped_weights):
    half = cv2.resize(cv2.imread(str(views[0])), None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA)
    found = matcher.find(np.ascontiguousarray(half[50:175, 50:200][:, ::-1]), half)
    assert len(found) == 0 and found.mirrored


def test_every_instance_and_nothing_else_is_found_at_its_scale_and_turn(template, scene):
    found = matcher.find(template, scene, "nearest", max_keypoints=600)
    assert len(found) == len(POSES) and found.size == (600, 560)
    for pose in POSES:
        (one,) = [one for one in found if np.abs(one.corners - true_corners(pose)).max() < 2.5]
        assert abs(one.scale - pose[2]) < 0.02 and abs(one.angle - pose[3]) < 1
        assert one.inliers == 0 and one.evidence == f"correlation {one.share:.2f}" and one.share > 0.9
    negatives = matcher.find(255 - template, scene, "nearest", max_keypoints=600)
    assert negatives.inverted and not found.inverted and len(negatives) == len(POSES)
    assert np.abs(np.sort(centres(negatives), axis=0) - np.sort(centres(found), axis=0)).max() < 2
    other = matcher.find(np.ascontiguousarray(template[::-1]), scene, "nearest", max_keypoints=600)
    assert len(other) == 0 and other.mirrored and not (negatives.mirrored or found.mirrored)
    disc = cv2.circle(np.zeros(template.shape[:2], np.uint8), (110, 90), 80, 1, -1)
    alone = np.where(disc[..., None] > 0, template, 200)[::-1]
    alone = np.pad(alone, ((90, 90), (90, 90), (0, 0)), constant_values=200)
    other = matcher.find(template, alone, "nearest", template_mask=disc, max_keypoints=600)
    assert len(other) == 0 and other.mirrored
    large = np.full((600, 2400, 3), 90, np.uint8)
    paste(large, template, (2200, 300, 0.3, 0))  # a pipeline's own 1024 pixels would leave 28 of it
    assert len(matcher.find(template, large, matcher.load("nearest", max_keypoints=600))) == 1


def test_a_plain_logo_is_found_at_half_its_size_and_a_small_one_from_the_side(views):
    logo, (scene, *_) = np.full((200, 200, 3), (30, 80, 200), np.uint8), map(cv2.imread, map(str, views))
    cv2.putText(logo, "ACME", (15, 105), cv2.FONT_HERSHEY_DUPLEX, 2.0, (255, 255, 255), 4, cv2.LINE_AA)
    cv2.line(logo, (20, 140), (180, 150), (255, 200, 0), 10, cv2.LINE_AA)
    scene[200:300, 300:400] = cv2.resize(logo, (100, 100), interpolation=cv2.INTER_AREA)
    (found,) = matcher.find(logo, scene[:400, :550])
    assert np.abs(found.corners - [[300, 200], [400, 200], [400, 300], [300, 300]]).max() < 3
    sign = cv2.circle(np.full_like(logo, 40), (100, 100), 80, (60, 90, 220), -1, cv2.LINE_AA)
    cv2.putText(sign, "STOP", (25, 120), cv2.FONT_HERSHEY_DUPLEX, 1.4, (255, 255, 255), 6, cv2.LINE_AA)
    sign = cv2.resize(sign, (60, 60), interpolation=cv2.INTER_AREA)
    scene[200:260, 300:342] = cv2.resize(sign, (42, 60), interpolation=cv2.INTER_AREA)
    (found,) = matcher.find(sign, scene[:400, :550], "nearest", max_keypoints=600)
    assert np.abs(found.corners - [[300, 200], [342, 200], [342, 260], [300, 260]]).max() < 3


def test_at_most_so_many_are_found_and_masks_hide_the_others(template, scene):
    finder, told = matcher.TemplateFinder(template, "nearest", max_keypoints=600, max_instances=1), []
    assert len(finder.find(scene, on_progress=lambda *progress: told.append(progress))) == 1
    assert told[0][0] == 0 and told[-1] == (told[0][1], told[0][1]) and len(told) == told[0][1] + 1
    mask = np.zeros(scene.shape[:2], np.uint8)
    mask[:280, 300:] = 255
    (one,) = matcher.find(template, scene, "nearest", max_keypoints=600, mask=mask)
    assert np.abs(one.corners - true_corners(POSES[1])).max() < 2.5
    shape = cv2.ellipse(np.zeros((180, 220), np.uint8), (110, 90), (100, 80), 0, 0, 360, 255, -1)
    other = np.where(shape[..., None] > 0, template, 0)
    found = matcher.find(other, scene, "nearest", max_keypoints=600, template_mask=shape)
    assert all(min(np.abs(one.corners - true_corners(pose)).max() for one in found) < 3 for pose in POSES)


def test_corners_are_of_the_stored_image(template, scene, tmp_path):
    exif = PIL.Image.Exif()
    exif[0x0112] = 8
    path = tmp_path / "turned.png"
    PIL.Image.fromarray(np.rot90(scene, -1)).save(path, exif=exif)
    found = matcher.find(template, path, "nearest", max_keypoints=600)
    assert len(found) == 3 and found.size == (560, 600)
    stored = true_corners(POSES[1])[:, ::-1] * (-1, 1) + (559, 0)  # as rot90(…, −1) moves pixels
    assert min(np.abs(one.corners - stored).max() for one in found) < 2.5


def test_the_command_draws_saves_and_prints(template, scene, tmp_path, capfd):
    PIL.Image.fromarray(template).save(tmp_path / "template.png")
    (tmp_path / "images").mkdir()
    PIL.Image.fromarray(scene).save(tmp_path / "images" / "scene.png")
    PIL.Image.fromarray(scene[300:, :150]).save(tmp_path / "images" / "empty.png")
    given = ("find", tmp_path / "template.png", tmp_path / "images", *QUICK)
    drawings, saved = tmp_path / "drawings", tmp_path / "found.json"
    assert run(*given, "--plot", drawings, "--output", saved) == 0
    text = capfd.readouterr().out
    assert "3 instances" in text and "no match" in text and f"wrote {drawings}" in text
    assert sorted(path.name for path in drawings.iterdir()) == ["empty.png", "scene.png"]
    images = {len(image["instances"]): image for image in json.loads(saved.read_text())["images"]}
    assert set(images) == {0, 3} and len(images[3]["instances"][0]["corners"]) == 4
    assert run(*given, "-q") == 0 and capfd.readouterr().out.count("scene.png  3 instances") == 1
    assert run(*given, "--plot", tmp_path / "one.png") == 2
    assert "name a folder" in capfd.readouterr().err
    (tmp_path / "file").touch()
    for name, said in (("no/folder", "no folder"), ("file", "is a file"), ("a.txt", ".png")):
        assert run(*given, "--plot", tmp_path / name) == 2 and said in capfd.readouterr().err


def test_exit_codes_tell_what_was_not_found_or_read(template, tmp_path, capfd):
    names = [tmp_path / name for name in ("template.png", "blank.png", "broken.png", "mine.json")]
    PIL.Image.fromarray(template).save(names[0])
    PIL.Image.fromarray(np.full((200, 200), 90, np.uint8)).save(names[1])
    names[2].write_bytes(names[0].read_bytes()[:2000])
    names[3].write_text("mine")
    assert run("find", names[0], names[1], *QUICK) == 0
    assert run("find", names[0], names[1], *QUICK, "--fail-if-unmatched") == 4
    assert run("find", names[0], names[2], names[1], *QUICK) == 4
    assert "broken.png" in capfd.readouterr().err
    assert run("find", names[0], names[1], *QUICK, "--output", names[3]) == 2
    assert run("find", names[1], names[0], *QUICK) == 2
    assert "0 keypoints" in capfd.readouterr().err and names[3].read_text() == "mine"
    PIL.Image.new("L", (32, 25), 200).save(names[1])  # too plain, whatever its size
    assert run("find", names[1], names[0], *QUICK) == 2 and "plain" in capfd.readouterr().err


def centres(found) -> list[np.ndarray]:
    return [instance.corners.mean(axis=0) for instance in found]


def icon(kind: int) -> np.ndarray:
    """A drawn icon of 32 pixels."""
    drawn = np.full((32, 32, 3), 240, np.uint8)
    if kind == 0:
        cv2.rectangle(drawn, (4, 8), (27, 23), (40, 80, 160), -1)
        cv2.line(drawn, (4, 8), (15, 17), (255, 255, 255), 2)
        cv2.line(drawn, (27, 8), (15, 17), (255, 255, 255), 2)
    else:
        cv2.circle(drawn, (16, 16), 11, (160, 60, 40), -1)
        cv2.rectangle(drawn, (14, 8), (18, 24), (255, 255, 255), -1)
    return drawn


def test_icons_are_found_and_not_mistaken():
    scale, screen = 0.75, np.full((600, 900, 3), 250, np.uint8)
    for row in range(12):
        cv2.putText(screen, f"Row {row} of the table", (60, 60 + 40 * row), 0, 0.6, (60, 60, 60), 1)
    side = round(32 * scale)
    places = [(420, 40), (420, 240), (700, 420)]
    for x, y in places:
        screen[y : y + side, x : x + side] = cv2.resize(icon(0), (side, side), interpolation=cv2.INTER_AREA)
    screen[300 : 300 + side, 600 : 600 + side] = cv2.resize(icon(1), (side, side))
    screen[500 : 500 + side, 200 : 200 + side] = 160 + 0.35 * screen[40 : 40 + side, 420 : 420 + side]
    screen[560:562, 100:700] = 60
    found = matcher.find(icon(0), screen)
    assert len(found) == 3
    for middle in np.array(places) + (side - 1) / 2:
        assert min(np.abs(centre - middle).max() for centre in centres(found)) < 1.5
    left = np.arange(900) + np.zeros((600, 1)) < 600
    drawn = []
    for order in (1, -1):
        given = icon(0)[..., ::order], screen[..., ::order]
        found = matcher.find(*given, mask=left, bgr=order < 0)
        drawn.append(found.plot(image=given[1]))
        assert len(found) == 2 and drawn[-1].mode == "RGB"
    np.testing.assert_array_equal(*drawn)
    assert len(matcher.find(icon(1), screen)) == 1 and not matcher.find(icon(1), screen[:290]).instances
    for line in (screen[556:566, 300:360], screen[540:561, 300:330]):  # it fits anywhere along itself
        with pytest.raises(matcher.UsageError, match="direction"):
            matcher.find(line, screen)
    assert all("correlation" in repr(one) and "0 inliers" not in repr(one) for one in found)


def test_a_label_with_another_digit_is_another_label():
    def label(number: int) -> np.ndarray:
        drawn = np.full((24, 110, 3), 245, np.uint8)
        return cv2.putText(drawn, f"Order {number}", (4, 17), 0, 0.5, (30, 30, 30), 1, cv2.LINE_AA)

    screen = np.full((280, 400, 3), 245, np.uint8)
    for row, number in enumerate((4711, 4712, 4771, 4711, 1711)):
        screen[20 + 50 * row : 44 + 50 * row, 90:200] = label(number)
    found = matcher.find(label(4711), screen)
    assert sorted(round(y) for _, y in centres(found)) == [32, 182]
    assert len(matcher.find(label(4717), screen)) == 0
