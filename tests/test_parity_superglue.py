"""Our SuperGlue is the one of the literature: the same random parameters give the same matches."""

import os

import peers
import pytest
import torch
from parity import SIZE, as_table, assert_same, assert_telling, imported, partners, random_pairs, run
from test_parity import load_file

from matcher.types import Features


@pytest.fixture(scope="module")
def peer():
    return peers.decisive_superglue(peers.transformers_superglue(matching_threshold=0.0))


def mutual(plan: torch.Tensor) -> dict[tuple[int, int], float]:
    """Entries of (N, M) log probabilities that are the best of their row and of their column."""
    best = (plan == plan.amax(1, keepdim=True)) & (plan == plan.amax(0, keepdim=True))
    return as_table(best.nonzero(), plan[best].exp())


@pytest.mark.parametrize("layout", ["official", "transformers"])
def test_superglue_is_that_of_transformers(layout, peer, tmp_path):
    """Unequal counts, one pair at a time and four together, against the peer's blocks without padding.

    Its own batch pads pairs of unequal counts, and its padding has mass, which delays Sinkhorn.
    """
    tensors = peers.official_superglue_names(peer) if layout == "official" else peer.state_dict()
    ours = imported(tensors, "superglue-outdoor", tmp_path, 0.0)
    assert ours.model.config.assignment.max_iterations == peer.config.sinkhorn_iterations == 100
    pairs = random_pairs("superpoint", 256)
    expected = [mutual(peers.superglue_plan(peer, *pair)) for pair in pairs]
    for batch in (1, 4):
        found = run(ours, pairs, batch)
        for matches, theirs in zip(found, expected, strict=True):
            assert_same(matches, theirs)
        assert_telling(found)
    # With equal counts nothing is padded, and the peer as a whole says the same as its blocks.
    stacked = Features.stack(pairs[0])
    names = ("keypoints", "descriptors", "scores", "mask")
    *columns, mask = (getattr(stacked, name)[None] for name in names)
    with torch.no_grad():
        matches, scores, *_ = peer._match_image_pair(*columns, 480, 640, mask=mask.int())
    whole = partners(*(x.reshape(2, -1)[0] for x in (matches, scores)))
    assert expected[0] == pytest.approx(whole, abs=1e-5)


def test_superglue_is_the_published(peer, tmp_path, monkeypatch):
    """github.com/magicleap/SuperGluePretrainedNetwork (not for commercial use), where the reader has it.

    Its class reads its weights from beside its file when it is built; it is handed ours instead.
    """
    code = os.environ.get("MATCHER_SUPERGLUE_CODE")
    if not code:
        pytest.skip("no MATCHER_SUPERGLUE_CODE")
    tensors, module = peers.official_superglue_names(peer), load_file(code)
    monkeypatch.setattr(torch, "load", lambda *_, **__: tensors)
    published = module.SuperGlue({"weights": "outdoor", "match_threshold": 0.0}).eval()
    monkeypatch.undo()
    pairs = random_pairs("superpoint", 256)
    found = run(imported(tensors, "superglue-outdoor", tmp_path, 0.0), pairs, 4)
    for pair, matches in zip(pairs, found, strict=True):
        data = {}
        for i, features in enumerate(pair):  # descriptors (1, D, N), images for their size
            data |= {
                f"keypoints{i}": features.keypoints[None],
                f"descriptors{i}": features.descriptors.t()[None].contiguous(),
                f"scores{i}": features.scores[None],
                f"image{i}": torch.empty(1, 1, int(SIZE[1]), int(SIZE[0])),
            }
        with torch.no_grad():
            theirs = published(data)
        assert_same(matches, partners(theirs["matches0"][0], theirs["matching_scores0"][0]))
    assert_telling(found)
