"""In words: when a pair stops early, and which points are dropped; both rules that networks may have."""

from __future__ import annotations

from matcher.config import NetworkConfig
from matcher.match.network.adaptivity import confidence_threshold


def sureness(config: NetworkConfig) -> list[float]:
    """Confidence above which a point counts as sure, after each layer but the last."""
    depth = config.context.depth
    return [confidence_threshold(layer, depth) for layer in range(depth - 1)]


def rules(config: NetworkConfig) -> tuple[str, str]:
    """When a pair stops, and which points are dropped: a sentence each."""
    policy = config.policy
    stop, drop = "All layers run: early exit is off.", "No point is dropped: pruning is off."
    if policy.early_exit:
        share = f"{100 * policy.exit_share:g} %"
        enough = f"more than {share} of its points, dropped ones too, are sure of their assignment"
        if config.match_probability:
            enough = f"{share} of the matches to be expected are sure of their partner"
        stop = f"A pair stops when {enough}."
    if policy.pruning:
        sure = " and that is sure of its assignment"
        if not policy.prune_confident_only:
            sure = ", sure of its assignment or not"
        limit = f"{partner_words(config)} is at most {policy.prune_matchability:g}"
        drop = f"A point is dropped whose {limit}{sure}."
    return stop, drop


def partner_words(config: NetworkConfig) -> str:
    """What the first of `LayerReport.reasons` is: predicted by heads of its own, or the dustbin's logit."""
    return "predicted probability of a partner" if config.match_probability else "matchability"
