"""Our SuperGlue is the one of the literature: the same random parameters give the same matches."""

from dataclasses import replace

import peers
import pytest
import torch
from parity import as_table, assert_same, assert_telling, imported, partners, random_pairs, run

from matcher.types import Features


@pytest.fixture(scope="module")
def peer():
    return peers.decisive_superglue(peers.transformers_superglue(matching_threshold=0.0))


def mutual(plan: torch.Tensor) -> dict[tuple[int, int], float]:
    """Entries of (N, M) log probabilities that are the best of their row and of their column."""
    best = (plan == plan.amax(1, keepdim=True)) & (plan == plan.amax(0, keepdim=True))
    index = best.nonzero()
    return as_table(index, plan[best].exp())


def arrays(pairs):
    """Keypoints (B, 2, N, 2), descriptors, scores and mask of pairs, all padded to the largest."""
    stacked = Features.stack([features for pair in pairs for features in pair])
    columns = [getattr(stacked, name) for name in ("keypoints", "descriptors", "scores")]
    return [x.unflatten(0, (len(pairs), 2)) for x in (*columns, stacked.mask.int())]


def tables(peer, pairs):
    """What transformers' own batch of padded pairs gives."""
    *columns, mask = arrays(pairs)
    with torch.no_grad():
        matches, scores, *_ = peer._match_image_pair(*columns, 480, 640, mask=mask)
    matches, scores = (x.reshape(len(pairs), 2, -1)[:, 0] for x in (matches, scores))
    return [partners(m[: len(p[0])], s) for m, s, p in zip(matches, scores, pairs, strict=True)]


def as_deep(matcher, peer):
    """Our matcher with as many Sinkhorn iterations as its peer."""
    config = matcher.model.config
    assignment = replace(config.assignment, max_iterations=peer.config.sinkhorn_iterations)
    matcher.model.config = replace(config, assignment=assignment)
    return matcher


@pytest.mark.parametrize("layout", ["official", "transformers"])
def test_superglue_is_transformers(layout, peer, tmp_path):
    """Unequal counts, one pair at a time and four together, against the peer's blocks without padding."""
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
    assert len(pairs[0][0]) == len(pairs[0][1])
    assert mutual(peers.superglue_plan(peer, *pairs[0])) == pytest.approx(
        tables(peer, pairs[:1])[0], abs=1e-5
    )


def test_padding_in_transformers_only_delays_its_sinkhorn(peer, tmp_path, monkeypatch):
    """Its padded batch of unequal pairs comes to our matches as the iterations go on."""
    pairs = random_pairs("superpoint", 256, [(40, 40), (30, 45), (25, 12), (1, 20)])
    ours = imported(peers.official_superglue_names(peer), "superglue-outdoor", tmp_path, 0.0)
    apart = []
    for iterations in (10, 2000):
        monkeypatch.setattr(peer.config, "sinkhorn_iterations", iterations)
        found, expected = run(as_deep(ours, peer), pairs, 4), tables(peer, pairs)
        gaps = []
        for matches, theirs in zip(found, expected, strict=True):
            table = as_table(matches.indices, matches.scores)
            gaps += [abs(table[pair] - theirs[pair]) for pair in table.keys() & theirs.keys()]
            if iterations == 2000:
                assert_same(matches, theirs)
        apart.append(max(gaps))
    assert apart[0] > 1e-3 > 1e-4 > apart[1]
