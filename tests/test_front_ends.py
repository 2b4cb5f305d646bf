"""Every front end behind `Features`: conventions, masks, sizes, shifts, with random parameters."""

import cv2
import numpy as np
import pytest
import torch
from random_front_end import build, random_parameters, same, share_found, texture, whole
from torch import nn

from matcher.config import ExtractorConfig
from matcher.extract.extractor import SiftExtractor
from matcher.geometry import UPRIGHT, resize_points, turn_angles, upright_to_stored
from matcher.types import Image

SIZES = {"disk": 128, "aliked": 128, "xfeat": 64, "dedodeb": 256, "keynet": 128, "doghardnet": 128}
SIZES |= {"learned": 64, "superpoint": 256, "sift": 128}
KINDS = list(SIZES)
FRAMED = ("keynet", "doghardnet")
ORIENTED = (*FRAMED, "sift")


@pytest.fixture(scope="module")
def extractors():
    """One of each kind, filled once."""
    made = {kind: build(kind, max_keypoints=120) for kind in KINDS if kind != "sift"}
    return made | {"sift": SiftExtractor(ExtractorConfig(max_keypoints=120))}


@pytest.fixture
def picture(rng) -> np.ndarray:
    """Its sides are no multiples of what any network needs."""
    return texture(rng, 124, 92)


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_complete_and_the_same_twice(extractors, picture, kind):
    state = torch.random.get_rng_state()
    first, second = extractors[kind]([whole(picture)]), extractors[kind]([whole(picture)])
    assert torch.equal(state, torch.random.get_rng_state())
    (features,) = first
    assert same(features, second[0])
    assert 5 < len(features) <= 120
    assert features.kind == kind
    assert features.descriptors.shape == (len(features), SIZES[kind])
    assert features.descriptors.dtype == features.scores.dtype == torch.float32
    if kind != "dedodeb":  # whose descriptors the matchers take as they are
        torch.testing.assert_close(features.descriptors.norm(dim=1), torch.ones(len(features)))
    assert bool((features.scores.diff() <= 0).all())
    assert features.size.tolist() == [124, 92]
    for name in ("scales", "orientations", "affine_frames"):
        assert (getattr(features, name) is not None) == (kind in (FRAMED if "frames" in name else ORIENTED))
    assert not features.descriptors.requires_grad
    # Tensors born in inference mode could never be trained on.
    assert not any(getattr(features, name).is_inference() for name in ("keypoints", "descriptors", "scores"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(101, 75), (1, 1)])
def test_odd_and_tiny_images_are_padded_and_cropped(extractors, rng, kind, size):
    pixels = texture(rng, *size) if min(size) > 1 else np.full((1, 1, 3), 9, np.uint8)
    (features,) = extractors[kind]([whole(pixels)])
    assert features.size.tolist() == list(size)
    assert features.descriptors.shape[1] == SIZES[kind]
    assert bool((features.keypoints >= -0.5).all())
    assert bool((features.keypoints <= torch.tensor(size) - 0.5).all())
    if min(size) > 64:
        assert len(features) > 5


@pytest.mark.parametrize("kind", KINDS)
def test_black_images_and_masks(extractors, picture, kind):
    mask = np.zeros(picture.shape, bool)
    mask[17:80, 10:80] = True
    shown = picture, cv2.merge([picture] * 3), np.zeros((66, 70), np.uint8)
    masked, blind = extractors[kind]([whole(picture, each) for each in (mask, mask & False)])
    grey, coloured, black = extractors[kind](list(map(whole, shown)))
    assert same(grey, coloured) and len(blind) == 0
    assert blind.descriptors.shape == (0, SIZES[kind])
    x, y = masked.keypoints.round().long().T
    assert len(masked) > 5
    assert bool(torch.from_numpy(mask)[y, x].all())
    # DeDoDe takes the best pixels however little they say; DoG and XFeat need a maximum, and the rest may
    # find one where convolutions meet the edge.
    if kind in ("dedodeb", "doghardnet", "xfeat", "sift"):
        assert len(black) == (120 if kind == "dedodeb" else 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("orientation", [6, 2])
def test_points_return_to_stored_pixels_on_both_axes(extractors, picture, kind, orientation):
    (plain,) = extractors[kind]([whole(picture)])
    upright = (248, 276)  # of which 124 x 92 is the half and the third
    stored = upright if orientation < 5 else upright[::-1]
    (found,) = extractors[kind]([Image(picture, stored, (0.5, 1 / 3), orientation)])
    expected = upright_to_stored(resize_points(plain.keypoints.double().numpy(), (2, 3)), stored, orientation)
    np.testing.assert_allclose(found.keypoints, expected, atol=1e-3)
    assert found.size.tolist() == list(stored)
    assert int(found.exif_orientation) == orientation
    assert torch.equal(found.descriptors, plain.descriptors)
    if kind in ORIENTED:
        turn = UPRIGHT[orientation].T @ np.diag([2, 3] if kind in FRAMED else [1, 1])
        if kind in FRAMED:
            frames = turn @ plain.affine_frames.double().numpy()
            np.testing.assert_allclose(found.affine_frames, frames, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(found.scales, plain.scales * 6**0.5, rtol=1e-4)
        turned = turn_angles(plain.orientations.double().numpy(), turn)
        difference = np.angle(np.exp(1j * (found.orientations.numpy() - turned)))
        np.testing.assert_allclose(difference, 0, atol=1e-4)


def full_resolution_only(network: nn.Module, _=None) -> None:
    """ALIKED enlarges its coarse maps corner to corner, so their positions depend on the image's size."""
    random_parameters(network)
    for layer in (network.conv2, network.conv3, network.conv4):
        nn.init.zeros_(layer.weight)


# kind, pixels to the right and down, pixels that a point may be off, share of the points that must be within
SHIFTS = [
    ("disk", (16, 32), 0.0, 0.9),  # its instance norms see the edge move against the content
    ("aliked", (32, 64), 1e-3, 1.0),
    ("xfeat", (32, 64), 0.0, 1.0),
    ("dedodeb", (8, 8), 0.0, 0.8),  # as far as 250 pixels its coarsest layers see the edge
    ("keynet", (16, 32), 0.0, 0.8),
    ("doghardnet", (16, 32), 0.25, 0.9),  # octaves are not exactly twice as large as the next
    ("learned", (32, 32), 1.0, 0.6),
    ("superpoint", (8, 16), 0.0, 1.0),
    ("superpoint-open", (8, 16), 0.0, 1.0),
]


@pytest.mark.parametrize(("kind", "shift", "pixels", "share"), SHIFTS)
def test_a_shift_by_whole_strides_shifts_the_points_by_as_much(extractors, rng, kind, shift, pixels, share):
    side = 168 if kind == "dedodeb" else 192
    patch = texture(rng, 64, 64)
    images = []
    for x, y in ((48, 48), (48 + shift[0], 48 + shift[1])):
        canvas, mask = np.full((side, side), 128, np.uint8), np.zeros((side, side), bool)
        canvas[y : y + 64, x : x + 64] = patch
        mask[y : y + 64, x : x + 64] = True
        images.append(whole(canvas, mask))
    if kind == "aliked":
        extractor = build(kind, full_resolution_only, score_threshold=0.0)
    else:
        extractor = extractors.get(kind) or build(kind)
    first, second = extractor(images)
    if kind == "keynet":  # only of the level of the image's own size is this a shift by whole pixels
        first, second = (f.select((f.scales - 22 / 6).abs() < 0.01) for f in (first, second))
    if kind.startswith("superpoint"):
        assert len(first) == len(second) > 30
    assert len(first) > 5
    assert share_found(first.keypoints + torch.tensor(shift), second.keypoints, pixels) >= share


@pytest.mark.parametrize("sigma", [2.5, 6.0])
def test_a_blob_has_the_place_and_the_diameter_that_opencv_finds(sigma):
    centre = np.array([80.3, 60.6])
    y, x = np.mgrid[:128, :160]
    pixels = np.exp(-((x - centre[0]) ** 2 + (y - centre[1]) ** 2) / (2 * sigma**2))
    grey = np.rint(pixels * 255).astype(np.uint8)
    (features,) = build("doghardnet", max_keypoints=5)([whole(grey)])
    theirs = cv2.SIFT_create(enable_precise_upscale=True).detect(grey)[0]
    np.testing.assert_allclose(features.keypoints[0], theirs.pt, atol=0.05)
    np.testing.assert_allclose(features.keypoints[0], centre, atol=0.05)
    assert float(features.scales[0]) == pytest.approx(theirs.size, rel=0.02)
