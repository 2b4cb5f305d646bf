"""Random pairs of images, and our matchers with the parameters of another implementation."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import peers
import pytest
import torch

from matcher.match.network import AttentionMatcher
from matcher.presets import find_preset
from matcher.types import Features, Matches
from matcher.weights.conversion import import_checkpoint
from matcher.weights.files import load_model

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
    model = model.with_policy(policy)
    return AttentionMatcher(model, precision="float32")


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


def assert_same(ours: Matches, theirs: Table) -> None:
    """The same matches, scores within 1e-4."""
    assert as_table(ours.indices, ours.scores) == pytest.approx(theirs, abs=1e-4, rel=0)


def assert_telling(found: list[Matches]) -> None:
    """Scores near 0 or 1 alone would agree whatever the network does: there are many, and some of each."""
    scores = np.concatenate([matches.scores for matches in found])
    assert len(scores) > 60
    assert ((scores > 0.02) & (scores < 0.7)).sum() > 8
    assert (scores > 0.5).sum() > 20


def as_lightglue(features: Features, patch: float = 1.0) -> dict[str, torch.Tensor]:
    """One image as the published LightGlue of its front end takes it.

    Scales are what they would be if the image had been resized to 1024 pixels on its longer side, as it
    was in training: for SIFT those of COLMAP, half of OpenCV's diameters, with directions in (−π, π]; for
    DoG-HardNet diameters, with directions counterclockwise in [0, 2π). KeyNet's frames are given as they are.

    Args:
        features: of an image of `SIZE`.
        patch: sides of described patches per diameter, where an implementation wants patches.
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
        found |= {"scales": diameters * patch, "oris": (2 * torch.pi - angles) % (2 * torch.pi)}
    if features.kind == "keynet":
        found["lafs"] = torch.cat([features.affine_frames, features.keypoints.unsqueeze(-1)], dim=-1)[None]
    return found


def lightglue_matches(peer: torch.nn.Module, pair: Pair, patch: float = 1.0) -> Table:
    """What a LightGlue of the published calling convention makes of one pair."""
    with torch.no_grad():
        theirs = peer({f"image{i}": as_lightglue(pair[i], patch) for i in (0, 1)})
    return as_table(theirs["matches"][0], theirs["scores"][0])
