"""Our configurations are the systems of the literature: the same random parameters give the same matches."""

from dataclasses import replace

import numpy as np
import peers
import pytest
import torch

from matcher.checkpoints.conversion import import_checkpoint
from matcher.config import AdaptivityConfig
from matcher.network.inference import AttentionMatcher
from matcher.types import Features
from matcher.weights import load_model

SIZE = (640.0, 480.0)
COUNTS = [(200, 200), (150, 230), (61, 17), (1, 40)]


def random_features(count: int, seed: int, kind: str, width: int, like: Features | None = None) -> Features:
    """Random points; most of them noisy copies of those of `like`, so that there are matches."""
    rng = np.random.default_rng(seed)
    descriptors = rng.normal(size=(count, width))
    if like is not None:
        copied = min(count, len(like)) * 3 // 4
        descriptors[:copied] = like.descriptors[:copied].numpy() * np.sqrt(width)
        descriptors[:copied] += 0.3 * rng.normal(size=(copied, width))
    descriptors /= np.linalg.norm(descriptors, axis=1, keepdims=True)
    return Features(
        keypoints=(rng.random((count, 2)) * (np.array(SIZE) - 1)).astype(np.float32),
        descriptors=descriptors.astype(np.float32),
        scores=rng.random(count).astype(np.float32),
        size=np.array(SIZE, np.float32),
        scales=rng.uniform(2, 20, count).astype(np.float32),
        orientations=rng.uniform(0, 2 * np.pi, count).astype(np.float32),
        kind=kind,
    )


def random_pairs(kind: str, width: int) -> list[tuple[Features, Features]]:
    pairs = []
    for seed, (n, m) in enumerate(COUNTS):
        first = random_features(n, 2 * seed, kind, width)
        pairs.append((first, random_features(m, 2 * seed + 1, kind, width, like=first)))
    return pairs


def imported(tensors, preset: str, tmp_path, threshold: float, **adaptivity) -> AttentionMatcher:
    """A checkpoint of the published layout, imported by our command's function, in float32."""
    published = peers.write_published(tensors, tmp_path / "peer.pth")
    import_checkpoint(published, preset, tmp_path / "ours.safetensors")
    model, _, _ = load_model(tmp_path / "ours.safetensors")
    model.config = replace(
        model.config,
        match_threshold=threshold,
        adaptivity=replace(model.config.adaptivity, **adaptivity),
    )
    return AttentionMatcher(model, precision="float32")


def run(matcher: AttentionMatcher, pairs, batch: int):
    """Matches of all pairs, `batch` at a time."""
    found = []
    for start in range(0, len(pairs), batch):
        side0, side1 = zip(*pairs[start : start + batch], strict=True)
        found += matcher(Features.stack(side0), Features.stack(side1))
    return found


def as_table(indices, scores) -> dict[tuple[int, int], float]:
    return {(int(i), int(j)): float(s) for (i, j), s in zip(indices, scores, strict=True)}


def assert_same(ours, theirs: dict[tuple[int, int], float]) -> None:
    assert as_table(ours.indices, ours.scores) == pytest.approx(theirs, abs=1e-4, rel=0)


def as_kornia(features: Features, oriented: bool) -> dict[str, torch.Tensor]:
    found = {
        "keypoints": features.keypoints[None],
        "descriptors": features.descriptors[None],
        "image_size": features.size[None],
    }
    if oriented:
        found |= {"scales": features.scales[None], "oris": features.orientations[None]}
    return found


OFF = {"depth_confidence": -1, "width_confidence": -1}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    ("preset", "width"),
    [
        ("lightglue-superpoint", 256),
        ("lightglue-disk", 128),
        ("lightglue-sift", 128),
        ("lightglue-xfeat", 64),
    ],
)
def test_lightglue_is_kornias(preset, width, batch, tmp_path):
    peer = peers.kornia_lightglue(preset, filter_threshold=0.0, **OFF)
    kind = preset.split("-")[1]
    off = {"early_exit": False, "pruning": False}
    ours = imported(peers.old_lightglue_names(peer), preset, tmp_path, 0.0, **off)
    pairs = random_pairs(kind, width)
    total = 0
    for pair, found in zip(pairs, run(ours, pairs, batch), strict=True):
        with torch.no_grad():
            data = {f"image{i}": as_kornia(pair[i], kind == "sift") for i in (0, 1)}
            theirs = peer(data)
        assert_same(found, as_table(theirs["matches"][0], theirs["scores"][0]))
        total += len(found)
    assert total > 50


@torch.no_grad()
def make_adaptive(peer, spread: float) -> None:
    """Heads that doubt at first and grow sure, and that find some points unmatchable."""
    generator = torch.Generator().manual_seed(3)
    for depth, head in enumerate(peer.token_confidence):
        head.token[0].weight.normal_(std=spread, generator=generator)
        head.token[0].bias.fill_(0.9 * depth)
    for head in peer.log_assignment:
        head.matchability.weight.normal_(std=2 * spread, generator=generator)
        head.matchability.bias.fill_(-3.0)


@pytest.mark.parametrize(("preset", "spread"), [("lightglue-superpoint", 3.0), ("lightglue-sift", 0.2)])
def test_lightglue_with_exit_and_pruning_is_kornias(preset, spread, tmp_path):
    peer = peers.kornia_lightglue(preset, filter_threshold=1e-6, depth_confidence=0.95, width_confidence=0.99)
    make_adaptive(peer, spread)
    kind, width = preset.split("-")[1], 256 if preset.endswith("superpoint") else 128
    ours = imported(peers.old_lightglue_names(peer), preset, tmp_path, 1e-6)
    assert ours.model.config.adaptivity == AdaptivityConfig()
    pairs = random_pairs(kind, width)[:3]
    stops, kept = set(), 0
    for pair, found in zip(pairs, run(ours, pairs, 3), strict=True):
        with torch.no_grad():
            theirs = peer({f"image{i}": as_kornia(pair[i], kind == "sift") for i in (0, 1)})
        assert found.layers_run == int(theirs["stop"])
        assert_same(found, as_table(theirs["matches"][0], theirs["scores"][0]))
        stops.add(found.layers_run)
        kept += found.kept0 + found.kept1
        for side, count in enumerate((found.kept0, found.kept1)):
            assert count == int((theirs[f"prune{side}"][0] == theirs[f"prune{side}"].max()).sum())
    assert 50 < kept < 0.9 * sum(len(f) for pair in pairs for f in pair)
    assert min(stops) < 9


def pair_arrays(pair):
    """Keypoints (1, 2, N, 2), descriptors, scores, mask of a pair with equal counts."""
    both = [
        torch.stack([getattr(f, name) for f in pair])[None] for name in ("keypoints", "descriptors", "scores")
    ]
    return (*both, torch.ones(1, 2, len(pair[0]), dtype=torch.int))


def padded(pair):
    """The same for unequal counts: padded and masked."""
    stacked = Features.stack(pair)
    arrays = [getattr(stacked, name)[None] for name in ("keypoints", "descriptors", "scores")]
    return (*arrays, stacked.mask[None].int())


def partners(matches, scores) -> dict[tuple[int, int], float]:
    return {(i, int(j)): float(scores[i]) for i, j in enumerate(matches) if j >= 0}


def test_lightglue_is_transformers(tmp_path):
    peer = peers.transformers_lightglue(filter_threshold=0.0, depth_confidence=-1.0, width_confidence=-1.0)
    off = {"early_exit": False, "pruning": False}
    ours = imported(peer.state_dict(), "lightglue-superpoint", tmp_path, 0.0, **off)
    pairs = random_pairs("superpoint", 256)[:3]
    for pair, found in zip(pairs, run(ours, pairs, 3), strict=True):
        keypoints, descriptors, _, mask = padded(pair)
        with torch.no_grad():
            matches, scores, *_ = peer._match_image_pair(keypoints, descriptors, 480, 640, mask=mask)
        assert_same(found, partners(matches.flatten(0, -2)[0][: len(pair[0])], scores.flatten(0, -2)[0]))


@pytest.mark.parametrize("layout", ["official", "transformers"])
def test_superglue_is_transformers(layout, tmp_path):
    peer = peers.transformers_superglue(matching_threshold=0.0)
    tensors = peers.official_superglue_names(peer) if layout == "official" else peer.state_dict()
    ours = imported(tensors, "superglue-outdoor", tmp_path, 0.0)
    ours.model.config = replace(
        ours.model.config,
        assignment=replace(ours.model.config.assignment, max_iterations=peer.config.sinkhorn_iterations),
    )
    pairs = [pair for pair in random_pairs("superpoint", 256) if len(pair[0]) == len(pair[1])]
    for pair, found in zip(pairs, run(ours, pairs, 1), strict=True):
        keypoints, descriptors, scores, mask = pair_arrays(pair)
        with torch.no_grad():
            matches, confidence, *_ = peer._match_image_pair(
                keypoints, descriptors, scores, 480, 640, mask=mask
            )
        assert_same(found, partners(matches.flatten(0, -2)[0], confidence.flatten(0, -2)[0]))
        assert len(found) > 20
