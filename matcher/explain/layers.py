"""The state after one layer: matches, confidence, points without a match, and points pruned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from matcher.config import NetworkConfig
from matcher.explain.attention import Attention
from matcher.match.mutual import credible_matches
from matcher.match.network.states import LayerState
from matcher.match.prediction import PairPrediction


@dataclass(frozen=True, eq=False)
class LayerReport:
    """What was known after one layer."""

    self_attention: tuple[Attention, Attention]  # of the asked points of image 0 and 1
    cross_attention: tuple[Attention, Attention]
    matches: np.ndarray  # (K, 2) int64, input points that would match if the network stopped here
    scores: np.ndarray  # (K,) float32
    appeared: int  # matches that the layer before did not have
    vanished: int
    unmatched: tuple[float | None, float | None]  # mean probability of no partner; None without a dustbin
    certain: float | None  # what early exit compares with its share, see `exit_certainty`; None without heads
    expected: float | None  # matches to be expected in the end; None where no heads predict them
    confidences: np.ndarray | None  # (T,) float32 of the live points, image 1 after image 0
    marginal_errors: tuple[float, ...]  # Sinkhorn: relative error of the rows, iteration by iteration
    exited: bool  # the pair stopped here
    pruned: tuple[np.ndarray, np.ndarray]  # input points pruned after this layer
    # (P, 2) of those: probability of a partner (matchability, or what the heads for it predict), confidence
    reasons: tuple[np.ndarray, np.ndarray]


def layer_report(
    state: LayerState,
    attended: list[Attention],
    known: np.ndarray,
    total: int,
    inner: tuple[Tensor, Tensor] | None,
) -> tuple[LayerReport, PairPrediction]:
    """What one layer did to a single pair, and the assignment if the network stops there.

    Args:
        state: of the network's run.
        attended: by the asked points, in the order of `attention.attention_inputs`.
        known: (K, 2) matches before the layer.
        total: points of both images before any pruning.
        inner: (N,), (M,) bool, input points that may have a partner; None where all may.
    """
    config, exits = state.network.config, bool(state.exiting)
    (prediction,) = state.assign([0], record_errors=exits).values()
    matches, scores = _matched(prediction, config, inner)
    now, before = ({tuple(m) for m in found.tolist()} for found in (matches, known))
    unmatched = (prediction.assignment.log_unmatched0, prediction.assignment.log_unmatched1)
    dropped, reasons = _dropped(state)
    certain, expected = exit_certainty(state, total)
    report = LayerReport(
        self_attention=(attended[0], attended[1]),
        cross_attention=(attended[2], attended[3]),
        matches=matches,
        scores=scores,
        appeared=len(now - before),
        vanished=len(before - now),
        unmatched=(None, None) if config.assignment.dustbin == "none" else _means(unmatched),
        certain=certain,
        expected=expected,
        confidences=None if state.confidences is None else state.confidences.cpu().numpy(),
        marginal_errors=next(iter(prediction.assignment.row_errors), ()),
        exited=exits and not state.is_last,
        pruned=dropped,
        reasons=reasons,
    )
    return report, prediction


def _matched(
    pair: PairPrediction, config: NetworkConfig, inner: tuple[Tensor, Tensor] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Matches (K, 2) int64 and their scores (K,) if the network stopped here."""
    local, scores = credible_matches(
        pair.assignment.mutual_best, config.policy.match_threshold, config.policy.threshold_doubles_at
    )
    index = torch.stack([pair.index0[local[:, 0]], pair.index1[local[:, 1]]], dim=1)
    if inner is not None:
        allowed = inner[0][index[:, 0]] & inner[1][index[:, 1]]
        index, scores = index[allowed], scores[allowed]
    return index.cpu().numpy(), scores.cpu().numpy()


def _means(log_shares: tuple[Tensor, Tensor]) -> tuple[float, float]:
    return tuple(float(x.exp().mean()) if x.numel() else 0.0 for x in log_shares)


def exit_certainty(state: LayerState, total: int) -> tuple[float | None, float | None]:
    """The share that early exit compares with `exit_share`, and the number of matches to be expected.

    Without heads that predict matches: the share of points that are confident, pruned ones counted as such
    (`adaptivity.ready_by_confidence`). With them: the share of the expected matches whose points are
    confident (`adaptivity.ready_by_match_probability`): unmatched points are confident from the start.
    """
    if state.confident is None:
        return None, None
    unconfident = ~state.confident
    if not state.network.config.match_probability:
        return (1 - float(unconfident.sum()) / total if total else None), None
    expected = float(state.match_probabilities.sum())
    share = 1 - float(state.match_probabilities[unconfident].sum()) / expected if expected else None
    return share, expected / 2


def _dropped(
    state: LayerState,
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Input points of either image that a layer pruned, and why (see `LayerReport.reasons`)."""
    tokens, gone = state.tokens, state.dropped
    why = tokens.x.new_zeros(len(gone), 2)
    if gone.any():
        why = torch.stack([state.match_probabilities, state.confidences], dim=1)
    n = tokens.layout.counts[0][0]
    sides = (slice(None, n), slice(n, None))
    return (
        tuple(tokens.index[at][gone[at]].cpu().numpy() for at in sides),
        tuple(why[at][gone[at]].cpu().numpy() for at in sides),
    )
