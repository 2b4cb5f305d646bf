"""In words: when a pair stops early, and which points are dropped; both rules that networks may have."""

from __future__ import annotations

from matcher.config import NetworkConfig
from matcher.network.adaptivity import confidence_threshold


def sureness(config: NetworkConfig) -> list[float]:
    """Confidence above which a point counts as sure, after each layer but the last."""
    depth = config.context.depth
    return [confidence_threshold(layer, depth) for layer in range(depth - 1)]


def exit_rule(config: NetworkConfig) -> str:
    """One sentence."""
    adaptivity = config.adaptivity
    if not adaptivity.early_exit:
        return "All layers run: early exit is off."
    share = f"{100 * adaptivity.exit_share:g} %"
    if adaptivity.prospects:
        return f"A pair stops when {share} of the matches to be expected are sure of their partner."
    return (
        f"A pair stops when more than {share} of its points, dropped ones too, are sure of their assignment."
    )


def pruning_rule(config: NetworkConfig) -> str:
    """One sentence."""
    adaptivity = config.adaptivity
    if not adaptivity.pruning:
        return "No point is dropped: pruning is off."
    rule = f"A point is dropped whose {partner_words(config)} is at most {adaptivity.prune_matchability:g}"
    if adaptivity.prune_confident_only:
        return f"{rule} and that is sure of its assignment."
    return f"{rule}, sure of its assignment or not."


def partner_words(config: NetworkConfig) -> str:
    """What the first of `LayerReport.reasons` is: predicted by heads of its own, or the dustbin's logit."""
    return "predicted probability of a partner" if config.adaptivity.prospects else "matchability"
