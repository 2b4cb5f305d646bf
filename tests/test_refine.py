"""Refinement of matches on textures that are known between the pixels, so that the truth is exact."""

from dataclasses import replace

import cv2
import numpy as np
import PIL.Image
import pytest
from rendered_texture import AFFINE, SIZE, Texture, move

import matcher
from matcher.config import RefineConfig
from matcher.refine import ImagePyramid, refine_image_pair, refine_matches
from matcher.types import REFINEMENTS, Matches


def grid(start=30, stop=165, step=13):
    return np.stack(np.meshgrid(*[np.arange(start, stop, step) + 0.3] * 2), axis=-1).reshape(-1, 2)


def matches_of(points0, points1):
    count = len(points0)
    indices = np.repeat(np.arange(count)[:, None], 2, axis=1)
    points0, points1 = (np.asarray(p, np.float32) for p in (points0, points1))
    return Matches(indices, points0, points1, np.ones(count, np.float32))


def image(values, mask=None):
    pixels = np.rint(np.clip(values, 0, 255)).astype(np.uint8)
    return matcher.Image(pixels, pixels.shape[::-1], mask=mask)


def picture(values, mask=None):
    return ImagePyramid.of(image(values, mask))


def refined(image0, image1, points0, points1, config=None):
    sides = [side if isinstance(side, ImagePyramid) else picture(side) for side in (image0, image1)]
    return refine_matches(*sides, matches_of(points0, points1), config or RefineConfig())


def errors(found, affine=AFFINE):
    return np.linalg.norm(found.points1 - move(found.points0.astype(float), affine), axis=1)


def shaken(points, deviation=0.6, seed=1):
    return points + np.random.default_rng(seed).normal(0, deviation, points.shape)


@pytest.fixture(scope="module")
def views():
    texture = Texture()
    return texture.image(), texture.image(AFFINE)


def test_matches_are_found_to_a_fraction_of_a_pixel(views):
    points0 = grid()
    found = refined(*views, points0, shaken(move(points0)))
    assert found.refinement.accepted.mean() > 0.95
    assert np.median(errors(found)) < 0.05
    assert np.percentile(errors(found)[found.refinement.accepted], 95) < 0.2
    assert np.array_equal(found.points0, points0.astype(np.float32))
    assert (found.refinement.correlations[found.refinement.accepted] > 0.97).all()


def test_swapped_images_give_the_same_pairs(views):
    points0 = grid()
    points1 = shaken(move(points0))
    found, back = refined(*views, points0, points1), refined(*views[::-1], points1, points0)
    both = found.refinement.accepted & back.refinement.accepted
    assert both.mean() > 0.9
    # One moves the point of image 1, the other that of image 0: along the map both moves are opposite.
    there = found.points1 - points1
    here = (points0 - back.points1) @ AFFINE[:, :2].T
    assert np.percentile(np.linalg.norm(there - here, axis=1)[both], 95) < 0.1


def test_gain_bias_a_gradient_of_shading_and_blur_are_modelled():
    (y, x), texture, points0 = np.mgrid[:SIZE, :SIZE], Texture(shortest=8.0), grid()
    blurred = cv2.GaussianBlur(texture.image(AFFINE), (0, 0), 1.2)
    lit = 0.6 * texture.image(AFFINE) + 35 + 0.25 * x - 0.15 * y
    for image1 in (blurred, lit):
        found = refined(texture.image(), image1, points0, shaken(move(points0)))
        assert found.refinement.accepted.mean() > 0.95
        assert np.median(errors(found)) < 0.1


def test_an_occluding_surface_pulls_no_match(views):
    """A strip before the surface moves by 6 pixels more than the surface and covers a quarter of windows."""
    front, edge = Texture(seed=7), np.arange(40, 160, 4) + 0.3
    near = AFFINE + np.array([[0, 0, 6.0], [0, 0, 0]])
    strip = np.abs(np.mgrid[:SIZE, :SIZE][1] - 100) < 10
    back = cv2.warpAffine(strip.astype(np.uint8), near, (SIZE, SIZE)) > 0
    image0, image1 = np.where(strip, front.image(), views[0]), np.where(back, front.image(near), views[1])
    every = grid()
    beside = np.stack([np.full(len(edge), 86.0), edge], axis=1)  # 3 of 15 columns are the strip's
    far = every[np.abs(every[:, 0] - 100) > 22]
    points0 = np.concatenate([beside, far])
    found = refined(image0, image1, points0, shaken(move(points0), 0.4))
    error, accepted = errors(found)[: len(edge)], found.refinement.accepted[: len(edge)]
    assert accepted.mean() > 0.7
    assert np.median(error[accepted]) < 0.1


def test_along_an_edge_a_match_stays_and_the_covariance_says_so():
    y, x = np.mgrid[:SIZE, :SIZE]
    across, along = np.array([0.8, 0.6]), np.array([-0.6, 0.8])
    noise = np.random.default_rng(0).normal(0, 2, (2, SIZE, SIZE))
    offsets = np.linspace(-12, 12, 5)

    def edges(shift):
        distances = (x * across[0] + y * across[1] - 140 - 10 * offset - shift for offset in offsets)
        return 128 + sum(12 * np.tanh(distance / 1.5) for distance in distances)

    times = np.arange(-60, 61, 12)
    points0 = np.array([140 * across + o * 10 * across + t * along for o in offsets for t in times])
    points0 = points0[((points0 > 20) & (points0 < 180)).all(axis=1)]
    wrong = np.random.default_rng(3).normal(0, 0.6, (len(points0), 2))
    found = refined(edges(0) + noise[0], edges(4) + noise[1], points0, points0 + 4 * across + wrong)
    moved = found.points1 - (points0 + 4 * across + wrong)
    assert found.refinement.accepted.mean() > 0.8
    chosen = found.refinement.accepted
    left = found.points1 - (points0 + 4 * across)
    assert np.median(np.abs(left @ across)[chosen]) < 0.1
    assert np.median(np.abs(moved @ along)[chosen]) < 0.25
    assert np.percentile(np.abs(moved @ along)[chosen], 90) < 0.7  # of a deviation of 0.6 before
    spread = found.refinement.covariances[chosen]
    assert np.median(along @ spread @ along) > 0.5**2
    assert np.median(across @ spread @ across) < 0.2**2


def test_what_does_not_look_alike_keeps_its_place(views):
    other = Texture(seed=9).image()
    points0 = grid()
    points1 = move(points0)
    thermal = 128 + 100 * np.abs(np.sin((views[1] - 128) / 20))
    for image1, least in ((255 - views[1], 1.0), (thermal, 0.85), (other, 0.85)):
        found = refined(views[0], image1, points0, points1)
        kept = ~found.refinement.accepted
        assert kept.mean() >= least
        assert np.array_equal(found.points1[kept], points1.astype(np.float32)[kept])
    empty = refined(views[0], np.full((SIZE, SIZE), 90.0), points0, points1)
    assert set(empty.refinement.counts()) == {"flat"}


def test_the_covariance_is_that_of_the_errors(views):
    rng = np.random.default_rng(5)
    noisy = [view + rng.normal(0, 8, view.shape) for view in views]
    points0 = grid(step=9)
    found = refined(*noisy, points0, shaken(move(points0)))
    chosen = found.refinement.accepted
    rest = (found.points1 - move(points0))[chosen]
    inverse = np.linalg.inv(found.refinement.covariances[chosen])
    distance = np.einsum("ki,kij,kj->k", rest, inverse, rest)
    assert 0.3 < np.median(distance) < 2.5  # of a perfect covariance 1.39
    small = np.sqrt(np.linalg.eigvalsh(found.refinement.covariances[chosen])[:, 1])
    half = small < np.median(small)
    assert np.median(errors(found)[chosen][half]) < np.median(errors(found)[chosen][~half])


def test_masked_pixels_are_not_read(views):
    """A caption that stands still is laid over both images; the mask knows it."""
    rng = np.random.default_rng(2)
    caption = rng.integers(0, 255, (SIZE, 12)).astype(float)
    images, mask = [view.copy() for view in views], np.ones((SIZE, SIZE), bool)
    for image in images:
        image[:, 94:106] = caption
    mask[:, 94:106] = False
    points0 = grid()
    beside = np.abs(move(points0)[:, 0] - 100) > 9
    points0 = points0[beside & (np.abs(points0[:, 0] - 100) > 9)]
    sides = [picture(image, mask) for image in images]
    found = refined(*sides, points0, shaken(move(points0), 0.4))
    chosen = found.refinement.accepted
    assert chosen.mean() > 0.9
    assert np.percentile(errors(found)[chosen], 95) < 0.25
    hidden = refined(picture(images[0], np.zeros_like(mask)), sides[1], points0, move(points0))
    assert set(hidden.refinement.counts()) == {"outside"}


@pytest.mark.filterwarnings("error")
def test_few_absent_and_impossible_matches(views):
    none = refined(*views, np.zeros((0, 2)), np.zeros((0, 2)))
    assert len(none) == 0
    assert none.refinement.covariances.shape == (0, 2, 2)
    two = refined(*views, grid()[:2], move(grid()[:2]))
    assert two.refinement.counts() == {"no_map": 2}
    points0 = np.concatenate([grid(), [[np.nan, 5.0], [1e9, 0.0]]])
    found = refined(*views, points0, move(points0))
    assert REFINEMENTS[found.refinement.status[-2]] == "outside"
    assert not found.refinement.accepted[-2:].any()
    assert found.refinement.accepted[:-2].mean() > 0.9
    collapsed = np.repeat(grid()[:1], 20, axis=0)
    assert not refined(*views, collapsed, collapsed).refinement.accepted.any()


def saved(path, values, orientation=1, depth=8, size=None):
    """A file that shows the values upright."""
    samples = np.rint(np.clip(values, 0, 255) * (257 if depth == 16 else 1))
    image = PIL.Image.fromarray(samples.astype(np.uint16 if depth == 16 else np.uint8))
    if orientation == 6:
        image = image.transpose(PIL.Image.Transpose.ROTATE_90)
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    image.save(path, exif=exif)
    return path


def test_the_file_is_read_at_its_own_resolution_depth_and_orientation(tmp_path):
    """Keypoints of images four times smaller are inexact by pixels of the file."""
    texture, size = Texture(shortest=6.0, waves=40), 400
    affine = np.array([[1.02, 0.05, -6.0], [-0.04, 0.99, 9.0]])
    first = saved(tmp_path / "first.png", texture.image(size=size))
    points0 = grid(40, 350, 25)
    start = shaken(move(points0, affine), 2.0)
    pipeline = matcher.load("nearest", resize=100)
    values = texture.image(affine, size)
    for name, orientation, depth in (("plain", 1, 8), ("turned", 6, 8), ("deep", 1, 16)):
        second = saved(tmp_path / f"{name}.png", values if depth == 8 else values / 10, orientation, depth)

        def stored(points, turned=orientation == 6):
            return np.stack([points[:, 1], size - 1 - points[:, 0]], axis=1) if turned else points

        found = pipeline.refine(first, second, matches_of(points0, stored(start)))
        assert found.refinement.accepted.mean() > 0.85, name
        error = np.linalg.norm(found.points1 - stored(move(points0, affine)), axis=1)
        assert np.median(error) < 0.15, name


def test_the_pipeline_refines_unless_told_not_to(tmp_path, views):
    paths = [saved(tmp_path / f"{i}.png", view) for i, view in enumerate(views)]
    plain = matcher.load("nearest", max_keypoints=300, refine=False).match(*paths)
    better = matcher.load("nearest", max_keypoints=300).match(*paths)
    assert plain.matches.refinement is None
    assert "refine" not in plain.seconds
    assert better.seconds["refine"] > 0
    assert np.array_equal(plain.matches.indices, better.matches.indices)
    assert np.array_equal(plain.points0, better.points0)
    right = errors(plain.matches) < 3
    assert np.median(errors(better.matches)[right]) < 0.5 * np.median(errors(plain.matches)[right])
    assert matcher.PRESETS["loftr-outdoor"].refine is None
    better.save(tmp_path / "better.npz")
    with np.load(tmp_path / "better.npz") as stored:
        assert np.array_equal(stored["points1"], better.points1)
        assert np.array_equal(stored["covariances"], better.matches.refinement.covariances)
        assert stored["covariances"].shape == (len(better.matches), 2, 2)
        assert np.array_equal(stored["refinement"] == "refined", better.matches.refinement.accepted)


CURVE = np.interp(np.arange(256), np.arange(0, 256, 51), [200, 30, 200, 30, 200, 30])  # of another sensor


@pytest.mark.parametrize("curve", [CURVE, np.arange(256)[::-1]], ids=["another sensor", "negative"])
def test_where_grey_values_do_not_correlate_gradients_decide(views, curve):
    image0, image1 = image(views[0]), image(curve[image(views[1]).pixels])
    points0 = grid()
    matches = matches_of(points0, shaken(move(points0)))
    on_grey = refine_matches(ImagePyramid.of(image0), ImagePyramid.of(image1), matches, RefineConfig())
    found = refine_image_pair(image0, image1, matches, RefineConfig())
    assert on_grey.refinement.accepted.mean() < 0.3
    moved, left = found.refinement.accepted, ~found.refinement.accepted
    assert moved.mean() > 0.4
    assert np.median(errors(found)[moved]) < 0.5 * np.median(errors(on_grey)[moved])
    assert np.array_equal(found.points1[left], matches.points1[left])


def test_no_point_is_moved_out_of_its_mask(views):
    views = [image(view) for view in views]
    points0 = grid()
    matches = matches_of(points0, shaken(move(points0)))
    free = refine_image_pair(*views, matches, RefineConfig())
    mask = np.ones(views[1].pixels.shape, dtype=bool)
    before, after = matches.points1[:, 0], free.points1[:, 0]
    edge = next(x for x in range(60, 200) if ((before < x + 0.4) & (after > x + 0.6)).any())
    mask[:, edge + 1 :] = False
    found = refine_image_pair(views[0], replace(views[1], mask=mask), matches, RefineConfig())
    accepted = found.refinement.accepted
    assert accepted.sum() > 20 and (found.points1[accepted, 0] <= edge + 0.5).all()
    assert np.array_equal(found.points1[~accepted], matches.points1[~accepted])
