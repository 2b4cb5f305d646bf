"""A network with random weights that attends, exits and prunes, and features that it can match."""

from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import nn

from matcher.config import ContextConfig, MatchingPolicy, NetworkConfig
from matcher.match.network import AttentionMatcher, MatchingNetwork
from matcher.types import Features, Matches

CONFIG = NetworkConfig(
    descriptor_dim=32,
    context=ContextConfig(dim=48, heads=2, depth=5, scale_logits_above=40),
    policy=MatchingPolicy(exit_share=0.6, prune_matchability=0.2),
)


WITH_MATCH_PROBABILITY = replace(
    CONFIG,
    match_probability=True,
    policy=MatchingPolicy(exit_share=0.85, prune_matchability=0.35, prune_confident_only=False),
)


@torch.no_grad()
def random_model(seed: int = 3, config: NetworkConfig = CONFIG) -> MatchingNetwork:
    """Weights far from their start, where the blocks would change nothing and nobody would be confident."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MatchingNetwork(config)
        dim = config.context.dim
        for layer in model.layers:
            for block in (layer.self_block, layer.cross_block):
                nn.init.normal_(block.attention.qkv.weight, std=1.5 / dim**0.5)
                nn.init.normal_(block.ffn.narrow.weight, std=0.3 / dim**0.5)
                nn.init.normal_(block.ffn.narrow.bias, std=0.1)
        for head in model.heads:
            nn.init.normal_(head.matchability.weight, std=2 / dim**0.5)
        for confidence in model.confidence:
            nn.init.normal_(confidence.weight, std=3 / dim**0.5)
            nn.init.constant_(confidence.bias, 1.0)
        for head in model.match_probability:
            nn.init.normal_(head.weight, std=2 / dim**0.5)
    return model.eval()


@cache
def matcher_with(
    early_exit: bool = True, pruning: bool = True, precision: str = "float32", config: NetworkConfig = CONFIG
) -> AttentionMatcher:
    """The random network, deciding as asked."""
    model = random_model(config=config)
    policy = replace(config.policy, early_exit=early_exit, pruning=pruning)
    return AttentionMatcher(model.with_policy(policy), precision=precision)


def as_table(matches: Matches) -> dict[tuple[int, int], float]:
    """Score by the indices of both points."""
    return dict(zip(map(tuple, matches.indices.tolist()), matches.scores.tolist(), strict=True))


def pair(count0: int, count1: int, seed: int, noise: float = 0.2) -> tuple[Features, Features]:
    """Two images of one scene; the points that both see are noisy and shuffled copies of each other."""
    rng = np.random.default_rng(seed)
    total = max(count0, count1) * 5 // 4
    # A direction that all points of the pair share makes pairs differ in how sure the network is.
    points = rng.normal(size=(total, 32)) + 1.5 * rng.normal(size=32)
    places = rng.uniform(0, [640, 480], (total, 2))
    sides = []
    for count in (count0, count1):
        order = rng.permutation(total)[:count]
        descriptors = points[order] + noise * rng.normal(size=(count, 32))
        sides.append(
            Features(
                keypoints=places[order] + rng.normal(size=(count, 2)),
                descriptors=(descriptors / np.linalg.norm(descriptors, axis=1, keepdims=True)).astype(
                    np.float32
                ),
                size=(640, 480),
                scales=rng.uniform(3, 30, count),
                orientations=rng.uniform(-3, 3, count),
                kind="sift",
            )
        )
    return sides[0], sides[1]
