"""Pairs of other sources: made, kept, drawn, and mixed with those of planes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from training_data import TINY, write_photos

from matcher.errors import IntegrityError, UsageError
from matcher.evaluate.posed import HIDDEN_STATE, UNKNOWN_STATE, VISIBLE_STATE
from matcher.evaluate.protocols import PhotoSet
from matcher.images import find_images
from matcher.match.network import MatchingNetwork
from matcher.train.cached_pairs import (
    IGNORED,
    UNMATCHED,
    CorrespondingView,
    MixedSampler,
    PairCache,
    ViewCache,
    as_unrelated,
    correspondences,
    label_partners,
)
from matcher.train.matcher_training import RunOptions, blend_with_start, train, validate
from matcher.train.recipe import PairRecipe, SourceRecipe
from matcher.weights.files import load_model, save_model

MIXED = replace(
    TINY, sources=SourceRecipe(pairs=4, share=0.6, width=160, height=120, max_keypoints=200, planes=0.5)
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    write_photos(folder / "photos", 8)
    return folder


@pytest.fixture(scope="module")
def cache(root):
    photos = find_images(root / "photos")
    made = PairCache(root / "cache", MIXED, photos)
    assert list(made.make(made.photo_set(photos), range(4))) == [0, 1, 2, 3]
    return made


def view(points, corresponding, states, rng):
    count = len(points)
    return CorrespondingView(
        keypoints=np.float32(points),
        scales=np.ones(count, np.float32),
        angles=np.zeros(count, np.float32),
        descriptors=rng.integers(0, 256, (count, 128)).astype(np.uint8),
        labels=np.zeros((0, 0), np.uint8),
        homographies=np.zeros((0, 3, 3)),
        size=(160, 120),
        corresponding=np.float32(corresponding),
        states=np.int8(states),
    )


def test_what_is_not_known_is_neither_matched_nor_unmatched(rng):
    nowhere = [np.nan, np.nan]
    view0 = view(
        [[10, 10], [40, 40], [70, 70], [90, 90]],
        [[12, 10], nowhere, nowhere, [94, 90]],
        [VISIBLE_STATE, HIDDEN_STATE, UNKNOWN_STATE, VISIBLE_STATE],
        rng,
    )
    view1 = view(
        [[12.5, 10], [42, 40], [72, 70], [94, 91]],
        [[10.5, 10], nowhere, nowhere, nowhere],
        [VISIBLE_STATE, UNKNOWN_STATE, HIDDEN_STATE, UNKNOWN_STATE],
        rng,
    )
    partners = label_partners(view0, view1, PairRecipe())
    # The last pair is decided by view 0 alone.
    assert partners.partner0.tolist() == [0, UNMATCHED, IGNORED, 3]
    assert partners.partner1.tolist() == [0, IGNORED, UNMATCHED, 3]
    assert np.isnan(partners.corresponding0[1:3]).all() and partners.corresponding0[0].tolist() == [12, 10]
    alone = label_partners(as_unrelated(view0), as_unrelated(view1), PairRecipe())
    assert (alone.partner0 == UNMATCHED).all() and (alone.partner1 == UNMATCHED).all()


def test_pairs_are_kept_and_made_once(cache, root):
    assert cache.ready() == [0, 1, 2, 3]
    view0, _ = cache.read(2)
    assert len(view0.keypoints) > 30 and view0.kind == "sift" and view0.size == (160, 120)
    assert np.isfinite(view0.corresponding).all(1).tolist() == view0.visible.tolist()
    assert 0.05 < view0.visible.mean() < 1
    again = PairCache(root / "cache", MIXED, find_images(root / "photos"))
    assert again.folder == cache.folder and list(again.make(PhotoSet([]), range(4))) == []
    few = view0.select(np.array([3, 1]))
    assert (
        few.corresponding.tolist() == view0.corresponding[[3, 1]].tolist()
        or np.isnan(few.corresponding).any()
    )
    other = replace(MIXED, sources=replace(MIXED.sources, relief=0.1))
    assert PairCache(root / "cache", other, find_images(root / "photos")).folder != cache.folder


def test_labels_of_both_views_agree(cache):
    """A point corresponding there and back comes home."""
    for number in range(4):
        view0, view1 = cache.read(number)
        partners = label_partners(view0, view1, PairRecipe())
        rows = np.flatnonzero(partners.partner0 >= 0)
        assert (partners.partner1[partners.partner0[rows]] == rows).all()
        corresponding, known = correspondences(view0, view1)
        error = np.linalg.norm(corresponding[rows] - view1.keypoints[partners.partner0[rows]], axis=1)
        assert known[rows].mean() > 0.9 and np.nanmax(error) < 8


def test_damaged_pairs_are_named(cache):
    good = cache.path(3).read_bytes()
    cache.path(3).write_bytes(good[:100])
    with pytest.raises(IntegrityError, match="000003"):
        cache.read(3)
    cache.path(3).write_bytes(good)


def test_batches_mix_both_kinds(cache, root):
    photos = find_images(root / "photos")
    views = ViewCache(root / "cache", TINY, photos)
    assert len(list(views.make(PhotoSet(photos), range(6)))) == 6
    sampler = MixedSampler(views, cache, MIXED, 3)
    rng = np.random.default_rng(0)
    kinds = [isinstance(sampler.draw(rng)[0], CorrespondingView) for _ in range(60)]
    assert 0.3 < np.mean(kinds) < 0.9
    first, again = sampler.batch(5), sampler.batch(5)
    assert torch.equal(first.partner0, again.partner0) and len(first) == 4
    pairs = [cache.read(number) for number in range(2)]
    scores = validate(MatchingNetwork(MIXED.network), pairs, MIXED.pair)
    assert 0 <= scores["f1"] <= 1


def test_a_run_takes_both(root):
    lines = []
    weights = train(MIXED, RunOptions(root / "photos", None, root / "runs" / "mixed"), lines.append)
    assert weights.exists() and any("pairs ready" in line for line in lines)


def test_a_share_needs_pairs():
    wrong = [text for kept, text in replace(MIXED, sources=SourceRecipe(share=0.5)).rules() if not kept]
    assert wrong == ["sources.pairs: at least 2 where sources.share is above 0"]


def test_the_start_is_mixed_in(tmp_path):
    torch.manual_seed(0)
    first, found = MatchingNetwork(TINY.network), MatchingNetwork(TINY.network)
    save_model(first, tmp_path / "first.safetensors", {})
    start = {n: v.clone() for n, v in load_model(str(tmp_path / "first.safetensors"))[0].state_dict().items()}
    before = {name: value.clone() for name, value in found.state_dict().items()}
    blend_with_start(found, str(tmp_path / "first.safetensors"), 0.25)
    for name, value in found.named_parameters():
        torch.testing.assert_close(value.detach(), 0.75 * before[name] + 0.25 * start[name])
    other = MatchingNetwork(replace(TINY.network, kind="learned", descriptor_dim=64))
    with pytest.raises(UsageError, match="start"):
        blend_with_start(other, str(tmp_path / "first.safetensors"), 0.5)
