import numpy as np
import pytest

from matcher.config import NearestConfig
from matcher.errors import UsageError
from matcher.match.nearest import NearestMatcher
from matcher.types import Features


def make(rng: np.random.Generator, count: int, descriptors: np.ndarray | None = None, **fields) -> Features:
    """Features of one image with random points."""
    if descriptors is None:
        descriptors = rng.normal(size=(count, 16)).astype(np.float32)
    points = rng.uniform(0, 100, size=(count, 2)).astype(np.float32)
    return Features(keypoints=points, descriptors=descriptors, size=(100, 100), **fields)


def match_one(features0: Features, features1: Features, ratio: float = 0.8):
    return NearestMatcher(NearestConfig(ratio))(Features.stack([features0]), Features.stack([features1]))[0]


def reference(
    descriptors0: np.ndarray, descriptors1: np.ndarray, ratio: float
) -> dict[tuple[int, int], float]:
    """Loops over float64 distances."""
    distances = np.linalg.norm(descriptors0[:, None].astype(np.float64) - descriptors1[None], axis=2)
    found = {}
    for i, row in enumerate(distances):
        j = int(row.argmin())
        if int(distances[:, j].argmin()) != i:
            continue
        r0 = row[j] / np.sort(row)[1]
        r1 = row[j] / np.sort(distances[:, j])[1]
        if max(r0, r1) <= ratio:
            found[i, j] = 1 - max(r0, r1)
    return found


@pytest.mark.parametrize("ratio", [0.6, 0.8, 1.0])
def test_it_equals_a_loop_over_all_distances(rng, ratio):
    base = rng.normal(size=(60, 16)).astype(np.float32)
    noisy = (base[rng.permutation(60)[:45]] + rng.normal(scale=0.6, size=(45, 16))).astype(np.float32)
    found = match_one(make(rng, 60, base), make(rng, 45, noisy), ratio)
    expected = reference(base, noisy, ratio)
    assert {tuple(pair) for pair in found.indices.tolist()} == set(expected)
    assert len(expected) > 5
    wanted = [expected[tuple(pair)] for pair in found.indices.tolist()]
    np.testing.assert_allclose(found.scores, wanted, atol=1e-5)
    assert (np.diff(found.scores) <= 0).all()


def test_swapping_the_images_swaps_the_matches(rng):
    features0, features1 = make(rng, 50), make(rng, 40)
    forth, back = match_one(features0, features1, 1.0), match_one(features1, features0, 1.0)
    assert len(forth) > 3
    assert {(i, j) for i, j in forth.indices.tolist()} == {(i, j) for j, i in back.indices.tolist()}


def test_a_padded_batch_gives_what_single_pairs_give(rng):
    pairs = [(make(rng, n), make(rng, m)) for n, m in [(40, 25), (3, 30), (0, 12), (1, 9), (7, 1), (5, 0)]]
    batch = NearestMatcher(NearestConfig(1.0))(*(Features.stack(side) for side in zip(*pairs, strict=True)))
    for pair, together in zip(pairs, batch, strict=True):
        alone = match_one(*pair, ratio=1.0)
        np.testing.assert_array_equal(together.indices, alone.indices)
        np.testing.assert_allclose(together.scores, alone.scores, atol=1e-6)
        assert (together.kept0, together.kept1) == (len(pair[0]), len(pair[1]))


def test_duplicate_descriptors_are_ambiguous(rng):
    twice = np.repeat(rng.normal(size=(1, 16)), 2, axis=0).astype(np.float32)
    others = rng.normal(size=(6, 16)).astype(np.float32)
    found = match_one(
        make(rng, 8, np.concatenate([twice, others])), make(rng, 8, np.concatenate([twice, others]))
    )
    assert sorted(found.indices[:, 0].tolist()) == list(range(2, 8))


def test_what_does_not_fit_is_refused(rng):
    with pytest.raises(UsageError, match="sift and disk"):
        match_one(make(rng, 5, kind="sift"), make(rng, 5, kind="disk"))
    with pytest.raises(UsageError, match="16 and 8"):
        match_one(make(rng, 5), make(rng, 5, np.zeros((5, 8), np.float32)))
    with pytest.raises(UsageError, match="stack the features"):
        NearestMatcher(NearestConfig())(make(rng, 5), make(rng, 5))
    with pytest.raises(UsageError, match="ratio"):
        NearestMatcher(NearestConfig(0.0))
