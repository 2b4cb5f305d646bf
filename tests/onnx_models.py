"""Networks in ONNX Runtime beside the same networks in torch."""

from collections.abc import Sequence

import numpy as np

from matcher.match.network import AttentionMatcher, MatchingNetwork
from matcher.onnx.matching import OnnxMatcher
from matcher.onnx.trained import Trained
from matcher.types import Features, Matches

Pairs = Sequence[tuple[Features, Features]]


def trained_of(model: MatchingNetwork) -> Trained:
    """The network as what is read from a weights file."""
    arrays = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    return Trained(model.config, arrays, "random", "")


def by_both(model: MatchingNetwork, pairs: Pairs) -> list[tuple[Matches, Matches]]:
    """Matches of one batch of pairs by torch and by ONNX Runtime."""
    sides = [Features.stack(side) for side in zip(*pairs, strict=True)]
    ours = AttentionMatcher(model, precision="float32")(*sides)
    return list(zip(ours, OnnxMatcher(trained_of(model))(*sides), strict=True))


def shared(first: Matches, second: Matches) -> tuple[int, int, np.ndarray]:
    """How many matches both have, how many either has, and how much the scores of those of both differ."""
    found = [
        dict(zip(map(tuple, m.indices.tolist()), m.scores.tolist(), strict=True)) for m in (first, second)
    ]
    both = found[0].keys() & found[1].keys()
    return (
        len(both),
        len(found[0].keys() | found[1].keys()),
        np.array([found[0][k] - found[1][k] for k in both]),
    )
