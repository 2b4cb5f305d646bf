"""Masks hold in every stage and command: no keypoint lies where a mask, or alpha, is 0."""

import numpy as np
import PIL.Image
import pytest
import torch
from collection_runs import matched
from command import run

import matcher
from matcher.explain.report import write_report

QUICK = ("--preset", "nearest", "--max-keypoints", 200)
HALF = 80  # columns of the scene that masks keep


@pytest.fixture
def files(tmp_path, rng):
    """Images 0.png and 1.png, a folder of masks of theirs, which keep the left half, and a mask of one."""
    coarse = rng.integers(0, 255, (60, 84), dtype=np.uint8)
    scene = np.asarray(PIL.Image.fromarray(coarse).resize((168, 120), PIL.Image.BICUBIC))
    mask = np.zeros((120, 160), np.uint8)
    mask[:, :HALF] = 255
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for number in range(2):
        crop = scene[:, 4 * number : 4 * number + 160]
        PIL.Image.fromarray(crop).save(tmp_path / "images" / f"{number}.png")
        PIL.Image.fromarray(mask).save(tmp_path / "masks" / f"{number}.png")
    return tmp_path


def masks_of(files) -> dict:
    return {f"mask{number}": files / "masks" / f"{number}.png" for number in range(2)}


def is_kept(points) -> bool:
    return len(points) > 20 and float(np.asarray(points)[:, 0].max()) < HALF


def images_of(files):
    return files / "images" / "0.png", files / "images" / "1.png"


def test_pairs_take_masks(files, small_weights):
    found = matcher.align(*images_of(files), "nearest", max_keypoints=200, **masks_of(files))
    assert is_kept(found.result.features0.keypoints) and is_kept(found.result.features1.keypoints)
    pipeline = matcher.load("hybrid", weights=small_weights, max_keypoints=200)
    result = write_report(pipeline, *images_of(files), files / "why.html", **masks_of(files))
    assert is_kept(result.features0.keypoints) and is_kept(result.features1.keypoints)


def test_masks_are_taken_in_every_form(files):
    pipeline, image = matcher.load("nearest", max_keypoints=200), images_of(files)[0]
    with PIL.Image.open(masks_of(files)["mask0"]) as mask:
        array = np.asarray(mask)
        arrays = array, array > 0, array / 255.0, (unknown := np.where(array, 1.0, np.nan))[..., None]
        PIL.Image.fromarray(unknown.astype(np.float32)).save(path := files / "unknown.tif")
        arrays += path.read_bytes(), path.open("rb")
        for given in (mask, mask.convert("1"), path, *arrays, torch.from_numpy(array.copy())[None, None]):
            assert is_kept(pipeline.extract(image, given).keypoints)
    refused = (image, {"mask": array}, "a mask is .* not dict"), (image, 123, "a mask is .* not int")
    for shown, wrong, named in (*refused, (matcher.read_image(image), array, "own mask")):
        with pytest.raises(matcher.UsageError, match=named):
            pipeline.extract(shown, wrong)


@pytest.mark.parametrize(
    "command",
    [
        ("match", "A", "B", "--mask0", "M0", "--mask1", "M1"),
        ("align", "A", "B", "--mask0", "M0", "--mask1", "M1"),
        ("find", "A", "IMAGES", "--template-mask", "M0", "--masks", "MASKS"),
        ("collection", "IMAGES", "--run", "RUN", "--masks", "MASKS", "--exhaustive", "--workers", 0),
    ],
    ids=lambda command: command[0],
)
def test_every_command_reads_its_masks(files, command, capfd):
    """A mask of another size is refused, so it was read; the message names its file."""
    for name in ("0.png", "1.png"):
        PIL.Image.new("L", (20, 20), 255).save(files / "masks" / name)
    paths = dict(zip(("A", "B"), images_of(files), strict=True), IMAGES=files / "images", RUN=files / "run")
    paths |= {"MASKS": files / "masks", "M0": files / "masks" / "0.png", "M1": files / "masks" / "1.png"}
    assert run(*(paths.get(word, word) for word in command), *QUICK) in (2, 3)
    assert "20 x 20" in capfd.readouterr().err


@pytest.fixture
def transparent(files):
    """The images, with the masks as their alpha."""
    for path in images_of(files):
        opaque = PIL.Image.open(path).convert("RGBA")
        opaque.putalpha(PIL.Image.open(files / "masks" / path.name))
        opaque.save(path)
    return images_of(files)


def test_transparent_pixels_are_a_mask_wherever_images_are_read(files, transparent):
    images = transparent
    found = matcher.match_set(images, "nearest", max_keypoints=200)
    assert all(is_kept(features.keypoints) for features in found.features)
    (pair,) = matched(files / "run", files / "images", max_keypoints=200)
    assert is_kept(pair.matches.points0) and is_kept(pair.matches.points1)


def test_transparency_is_ignored_where_asked_for(files, transparent, capfd):
    pipeline = matcher.load("nearest", max_keypoints=200, alpha_mask=False)
    features = pipeline.extract(transparent[0])
    assert features.keypoints[:, 0].max() > HALF
    assert is_kept(pipeline.extract(transparent[0], files / "masks" / "0.png").keypoints)
    given = ("match", *transparent, *QUICK, "--overwrite", "--output", files / "found.npz")
    assert run(*given) == 0
    assert is_kept(np.load(files / "found.npz")["keypoints0"])
    assert run(*given, "--no-alpha-mask") == 0
    assert np.load(files / "found.npz")["keypoints0"][:, 0].max() > HALF
    with pytest.raises(matcher.UsageError, match="alpha_mask must be True or False"):
        matcher.load("nearest", alpha_mask="no")
