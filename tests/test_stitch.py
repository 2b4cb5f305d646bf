"""Panoramas: crops of one picture come out as the picture, turned views on a sphere."""

from pathlib import Path

import cv2
import numpy as np
import pytest

import matcher
from matcher.cli import main


@pytest.fixture(scope="module")
def scene() -> np.ndarray:
    noise = np.random.default_rng(7).uniform(0, 1, (512, 1600, 3))
    blurred = sum(cv2.GaussianBlur(noise, (0, 0), s) * s for s in (1.5, 4, 12))
    return cv2.normalize(blurred, None, 0, 255, cv2.NORM_MINMAX).astype(np.uint8)


def parts(scene: np.ndarray) -> list[np.ndarray]:
    return [np.ascontiguousarray(scene[:, start : start + 400]) for start in (0, 200, 368)]


def test_crops_come_out_as_the_picture(scene):
    made = matcher.stitch(parts(scene), "nearest", max_keypoints=600)
    assert (made.pixels.shape, made.model, made.used) == ((512, 768, 3), "translation", (0, 1, 2))
    assert made.covered.all()
    assert np.abs(made.pixels.astype(int) - scene[:, :768]).mean() < 3


def test_turned_and_scaled_crops_need_a_similarity(scene):
    turn = cv2.getRotationMatrix2D((200, 256), 12, 0.9)
    second = cv2.warpAffine(scene[:, 200:700], turn, (420, 512), borderMode=cv2.BORDER_REFLECT)
    made = matcher.stitch([parts(scene)[0], second], "nearest", max_keypoints=600)
    assert made.model == "similarity"
    cropped = matcher.stitch([parts(scene)[0], second], "nearest", max_keypoints=600, crop=True)
    assert cropped.covered.all() and 0.4 * made.pixels.size < cropped.pixels.size < made.pixels.size


def test_a_wide_view_goes_on_a_sphere(scene):
    """Five views that turn by 25 degrees each, of a cylinder papered with the scene."""
    focal, views = 300.0, []
    x, y = np.meshgrid(np.arange(400) - 200.0, np.arange(360) - 180.0)
    for yaw in np.radians([-50, -25, 0, 25, 50]):
        angle = np.arctan2(x, focal) + yaw
        height = y / np.hypot(x, focal)
        at = np.float32(800 + angle * 500), np.float32(256 + height * 380)
        views.append(cv2.remap(scene, *at, cv2.INTER_LINEAR))
    made = matcher.stitch(views, "nearest", max_keypoints=600)
    assert (made.projection, len(made.used)) == ("spherical", 5)
    height, width = made.pixels.shape[:2]
    assert 2 < width / height < 4
    with pytest.raises(matcher.UsageError):
        matcher.stitch(views, "nearest", max_keypoints=600, projection="plane", model="cubic")


def test_the_command(scene, tmp_path, capfd):
    for number, part in enumerate([*parts(scene), np.zeros((90, 90, 3), np.uint8)]):
        cv2.imwrite(str(tmp_path / f"{number}.png"), part)
    command = ["stitch", str(tmp_path), "--preset", "nearest", "--max-keypoints", "600"]
    assert main([*command, "--output", str(tmp_path / "0.png")]) == 2
    (tmp_path / "made").mkdir()
    assert main([*command, "--output", str(tmp_path / "made" / "all.png")]) == 4  # one is of nothing
    assert "3.png" in capfd.readouterr().err
    assert cv2.imread(str(tmp_path / "made" / "all.png")).shape == (512, 768, 3)


def test_a_scene_with_depth_is_no_speck_and_is_told_of(tmp_path, capfd):
    views = [str(Path(__file__).parents[1] / "assets" / f"view{n}.jpg") for n in (0, 1)]
    out = tmp_path / "all.png"
    assert main(["stitch", *views, "--max-keypoints", "1024", "--output", str(out)]) == 0
    assert "of the matches agree" in capfd.readouterr().err
    assert min(cv2.imread(str(out)).shape[:2]) >= 500
