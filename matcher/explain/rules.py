"""The rules of early exit and pruning in words, for both kinds of networks."""

from __future__ import annotations

from matcher.config import NetworkConfig
from matcher.match.rules import confidence_threshold


def confidence_thresholds(config: NetworkConfig) -> list[float]:
    """Confidence above which a point counts as confident, after each layer but the last."""
    depth = config.context.depth
    return [confidence_threshold(layer, depth) for layer in range(depth - 1)]


def rules(config: NetworkConfig) -> tuple[str, str]:
    """When a pair exits and which points are pruned: a sentence each."""
    policy = config.policy
    stop, drop = "All layers run: early exit is off.", "No point is pruned: pruning is off."
    if policy.early_exit:
        share = f"{100 * policy.exit_share:g} %"
        enough = f"more than {share} of its points, including pruned ones, are confident of their assignment"
        if config.match_probability:
            enough = f"{share} of the expected matches are confident"
        stop = f"A pair stops when {enough}."
    if policy.pruning:
        sure = " and it is confident of its assignment"
        if not policy.prune_confident_only:
            sure = ", whether it is confident or not"
        limit = f"{partner_words(config)} is at most {policy.prune_matchability:g}"
        drop = f"A point is pruned if its {limit}{sure}."
    return stop, drop


def partner_words(config: NetworkConfig) -> str:
    """What the first of `LayerReport.reasons` is: predicted by heads of its own, or the dustbin's logit."""
    return "predicted probability of a partner" if config.match_probability else "matchability"
