"""Matches read off log probabilities, as ONNX operations: the same steps as `matcher.match.nearest`."""

from __future__ import annotations

import math

import numpy as np

from matcher.onnx.builder import Builder, Value


def best_of_both(g: Builder, log_scores: Value, *, dustbins: bool) -> tuple[Value, Value, Value]:
    """Each point's best, its column, and whether it is the column's best too, of equal rows the first.

    Args:
        g: that is written.
        log_scores: (N, M), none of them 0.
        dustbins: the last row and column are theirs, with entries far below all others; they are no points.
    """
    best, partner = g.maximum(log_scores, 1), g.ArgMax(log_scores, axis=1, keepdims=0)
    if dustbins:
        best, partner = (g.slice(each, 0, 0, -1) for each in (best, partner))
    top = g.Equal(best, g.Gather(g.maximum(log_scores, 0), partner, axis=0))
    rows = g.size(best, 0)
    here = g.range(rows)
    none = g.Expand(rows, g.size(log_scores, 1))
    first = g.ScatterElements(none, partner, g.Where(top, here, rows), axis=0, reduction="min")
    return best, partner, g.Equal(g.Gather(first, partner, axis=0), here)


def mutual_matches(
    g: Builder, log_scores: Value, threshold: float, doubles_at: float, *, dustbins: bool
) -> tuple[Value, Value]:
    """Mutual best entries of (N, M) log probabilities above a threshold, best first.

    Args:
        g: that is written.
        log_scores, dustbins: as `best_of_both` takes them.
        threshold: of the probability.
        doubles_at: expected matches at which the threshold is twice as high; 0: it is the same for all.

    Returns:
        Rows and columns (K, 2) int64 and probabilities (K,).
    """
    best, partner, mutual = best_of_both(g, log_scores, dustbins=dustbins)
    least = np.float32(math.log(threshold) if threshold > 0 else -math.inf)
    kept = g.Squeeze(g.NonZero(mutual & (best > least)), [0])
    probabilities = g.Min(g.Exp(g.Gather(best, kept, axis=0)), 1.0)
    probabilities, order = g.TopK(probabilities, g.size(kept, 0), outputs=2, axis=0)
    rows = g.Gather(kept, order, axis=0)
    if doubles_at:
        expected = g.total(probabilities, 0)
        credible = probabilities > g.Max(expected + doubles_at, 0.0) * threshold / expected
        count = g.Unsqueeze(g.total(g.integer(credible), 0), [0])
        rows, probabilities = g.slice(rows, 0, 0, count), g.slice(probabilities, 0, 0, count)
    pairs = [g.Unsqueeze(each, [1]) for each in (rows, g.Gather(partner, rows, axis=0))]
    return g.Concat(*pairs, axis=1), probabilities
