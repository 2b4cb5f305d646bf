"""Our LightGlue is the one of the literature: the same random parameters give the same matches."""

from dataclasses import replace

import peers
import pytest
import torch
from parity import (
    as_lightglue,
    as_table,
    assert_same,
    assert_telling,
    imported,
    lightglue_matches,
    partners,
    random_pairs,
    run,
)

from matcher.config import MatchingPolicy
from matcher.types import Features

WIDTHS = {
    "lightglue-superpoint": 256,
    "lightglue-disk": 128,
    "lightglue-sift": 128,
    "lightglue-doghardnet": 128,
    "lightglue-keynet": 128,
    "lightglue-xfeat": 64,
}
PATCH = {"lightglue-doghardnet": 6.0}  # kornia wants the scale of the described patch there
OFF = {"depth_confidence": -1, "width_confidence": -1}
NEVER = {"early_exit": False, "pruning": False}


@pytest.mark.parametrize("preset", WIDTHS)
def test_lightglue_is_kornias(preset, tmp_path):
    peer = peers.decisive_lightglue(peers.kornia_lightglue(preset, filter_threshold=0.0, **OFF))
    ours = imported(peers.old_lightglue_names(peer), preset, tmp_path, 0.0, **NEVER)
    pairs = random_pairs(preset.split("-")[1], WIDTHS[preset])
    expected = [lightglue_matches(peer, pair, PATCH.get(preset, 1.0)) for pair in pairs]
    for batch in (1, 4):
        found = run(ours, pairs, batch)
        for matches, theirs in zip(found, expected, strict=True):
            assert_same(matches, theirs)
        assert_telling(found)


@torch.no_grad()
def make_adaptive(peer, seed: int) -> None:
    """Heads that doubt at first and grow sure, and that find some points unmatchable."""
    generator = torch.Generator().manual_seed(seed)
    for depth, head in enumerate(peer.token_confidence):
        head.token[0].weight.normal_(std=1.0, generator=generator)
        head.token[0].bias.fill_(0.5 * depth - 0.5)
    for head in peer.log_assignment:
        head.matchability.weight.normal_(std=2.0, generator=generator)
        head.matchability.bias.fill_(1.0)


# Preset, seed, layers that run, most points kept
ADAPTIVE = [("lightglue-superpoint", 2, 3, 1.0), ("lightglue-sift", 3, 6, 0.7)]


@pytest.mark.parametrize(("preset", "seed", "stop", "share"), ADAPTIVE)
def test_lightglue_with_exit_and_pruning_is_kornias(preset, seed, stop, share, tmp_path):
    on = {"depth_confidence": 0.95, "width_confidence": 0.99}
    peer = peers.decisive_lightglue(peers.kornia_lightglue(preset, filter_threshold=1e-3, **on))
    make_adaptive(peer, seed)
    ours = imported(peers.old_lightglue_names(peer), preset, tmp_path, 1e-3)
    assert replace(ours.model.config.policy, match_threshold=0.1) == MatchingPolicy()
    pairs = random_pairs(preset.split("-")[1], WIDTHS[preset], [(120, 120), (90, 140), (61, 40)])
    found, kept = run(ours, pairs, 3), 0
    for pair, matches in zip(pairs, found, strict=True):
        with torch.no_grad():
            theirs = peer({f"image{i}": as_lightglue(pair[i]) for i in (0, 1)})
        assert matches.layers_run == int(theirs["stop"]) == stop
        assert_same(matches, as_table(theirs["matches"][0], theirs["scores"][0]))
        for side, count in enumerate((matches.kept0, matches.kept1)):
            assert count == int((theirs[f"prune{side}"] == stop).sum())
            kept += count
    assert kept < share * sum(len(features) for pair in pairs for features in pair)
    assert_telling(found)


def padded(pair):
    """Keypoints (1, 2, N, 2), descriptors, mask of a pair, padded."""
    stacked = Features.stack(pair)
    return (
        *(getattr(stacked, name)[None] for name in ("keypoints", "descriptors")),
        stacked.mask[None].int(),
    )


def test_lightglue_is_transformers(tmp_path):
    peer = peers.transformers_lightglue(filter_threshold=0.0)
    blocks = [block for layer in peer.transformer_layers for block in (layer.self_mlp, layer.cross_mlp)]
    heads = peer.match_assignment_layers
    peers.decisive([head.final_projection for head in heads], [block.fc2 for block in blocks])
    for head in heads:
        torch.nn.init.constant_(head.matchability.bias, 2.0)
    ours = imported(peer.state_dict(), "lightglue-superpoint", tmp_path, 0.0, **NEVER)
    pairs = random_pairs("superpoint", 256)
    found = run(ours, pairs, 4)
    for pair, matches in zip(pairs, found, strict=True):
        keypoints, descriptors, mask = padded(pair)
        with torch.no_grad():
            partner, scores, *_ = peer._match_image_pair(keypoints, descriptors, 480, 640, mask=mask)
        partner, scores = (x.flatten(0, -2)[0][: len(pair[0])] for x in (partner, scores))
        assert_same(matches, partners(partner, scores))
    assert_telling(found)
