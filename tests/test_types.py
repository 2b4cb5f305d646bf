"""Features from users' arrays: what is taken, how it is kept, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from matcher.errors import UsageError
from matcher.types import Features


def arrays(count: int = 6, dim: int = 8, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "keypoints": rng.uniform(0, 100, (count, 2)).astype(np.float32),
        "descriptors": rng.normal(size=(count, dim)).astype(np.float32),
        "scores": rng.uniform(size=count).astype(np.float32),
        "size": np.array([100, 80], np.float32),
        "scales": rng.uniform(1, 9, count).astype(np.float32),
        "orientations": rng.uniform(-3, 3, count).astype(np.float32),
        "mask": np.ones(count, bool),
    }


def assert_same(first: Features, second: Features) -> None:
    assert first.kind == second.kind
    ours, theirs = first.numpy(), second.numpy()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name])


def test_defaults() -> None:
    features = Features([[1, 2], [3, 4]], [[1, 0], [0, 1]], size=(10, 20))
    assert features.keypoints.dtype == features.descriptors.dtype == features.size.dtype == torch.float32
    assert features.scores.tolist() == [1, 1] and features.mask.tolist() == [True, True]
    assert features.exif_orientation.shape == () and features.exif_orientation == 1
    assert features.scales is None and features.orientations is None and len(features) == 2
    assert_same(Features(**arrays()), Features(**{k: torch.from_numpy(v) for k, v in arrays().items()}))


def test_read_only_arrays_are_copied_and_descriptors_become_floats() -> None:
    values = arrays()
    for value in values.values():
        value.flags.writeable = False
    features = Features(**values)  # torch would warn of tensors on memory that may not be written
    features.keypoints[0, 0] = -7
    assert values["keypoints"][0, 0] != -7
    for dtype in (np.uint8, np.uint64, np.float16, bool):
        features = Features(**(arrays() | {"descriptors": np.ones((6, 8), dtype)}))
        assert features.descriptors.is_floating_point() and features.descriptors.eq(1).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keypoints", np.zeros((6, 3))),
        ("descriptors", np.zeros((5, 8))),
        ("scores", ["a"] * 6),
        ("size", (0, 80)),
        ("exif_orientation", 9),
        ("keypoints", np.full((6, 2), np.nan)),
        ("descriptors", np.full((6, 8), np.inf)),
    ],
)
def test_impossible_values_are_refused(name: str, value) -> None:
    with pytest.raises(UsageError, match=rf"Features.*{name}"):
        Features(**(arrays() | {name: value}))
    with pytest.raises(UsageError, match="size"):  # it is never guessed
        Features(np.zeros((3, 2)), np.zeros((3, 4)))


def test_stack_and_unstack_round_trip() -> None:
    items = [Features(**arrays(n, seed=n), exif_orientation=1 + n % 8, kind="sift") for n in (4, 0, 7, 1)]
    batch = Features.stack(items)
    assert batch.keypoints.shape == (4, 7, 2)
    assert batch.exif_orientation.tolist() == [5, 1, 8, 2]
    assert batch.mask.sum(1).tolist() == [4, 0, 7, 1]
    assert batch.descriptors[~batch.mask].eq(0).all()
    for item, back in zip(items, batch.unstack(), strict=True):
        assert_same(item, back)
    mask = np.array([True, False, True, True, False, True])
    features = Features(**(arrays() | {"mask": mask}))
    batch = Features.stack([features, Features(**arrays(8))])
    assert batch.mask[0].tolist() == [*mask.tolist(), False, False]
    assert_same(batch.unstack()[0], features.select(torch.from_numpy(mask)))


def test_stack_of_optional_columns_and_what_does_not_belong_together() -> None:
    full, bare = Features(**arrays()), Features(**{k: v for k, v in arrays().items() if k != "scales"})
    batch = Features.stack([full, bare])
    assert batch.scales is None and batch.orientations is not None
    sift = Features(**arrays(), kind="sift")
    for items in ([sift, full], [sift, Features(**arrays(dim=4), kind="sift")], []):
        with pytest.raises(UsageError):
            Features.stack(items)


def test_scale_and_view() -> None:
    features = Features(**arrays(), exif_orientation=6, scale=(0.5, 0.25))
    assert features.scale.tolist() == [0.5, 0.25]
    assert features.view_orientation is None and features.matched_orientation == 6
    turned = replace(features, view_orientation=3)
    assert turned.matched_orientation == 3 and turned.exif_orientation == 6
    assert Features(**arrays()).scale.tolist() == [1, 1]
    batch = Features.stack([features, turned])
    assert batch.view_orientation.tolist() == [6, 3]
    assert batch.scale.tolist() == [[0.5, 0.25]] * 2
    assert Features.stack([features, features]).view_orientation is None
