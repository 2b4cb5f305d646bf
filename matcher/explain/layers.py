"""What was known after one layer: matches, confidence, points without a partner, and who was dropped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from matcher.config import NetworkConfig
from matcher.explain.attention import Attention
from matcher.match.mutual import mutual_matches
from matcher.match.network.adaptivity import Tokens, confidence_threshold, keep_mask
from matcher.match.network.correspondence import Side
from matcher.match.network.model import MatchingNetwork, split_sides
from matcher.match.prediction import PairPrediction
from matcher.match.sinkhorn import columns_first, log_masses, row_error


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
    pruned: tuple[np.ndarray, np.ndarray]  # input points dropped after this layer
    # (P, 2) of those: probability of a partner (matchability, or what the heads for it predict), confidence
    reasons: tuple[np.ndarray, np.ndarray]


def layer_report(
    model: MatchingNetwork,
    tokens: Tokens,
    after: Tokens,
    depth: int,
    attended: list[Attention],
    known: np.ndarray,
    total: int,
    final: PairPrediction | None,
    inner: tuple[Tensor, Tensor] | None,
) -> LayerReport:
    """What one layer did to `tokens`.

    Args:
        model: the network.
        tokens: after the layer.
        after: those that stay.
        depth: of the layer, 0 the first.
        attended: by the asked points, in the order of `attention.attention_inputs`.
        known: (K, 2) matches before the layer.
        total: points of both pictures before any pruning.
        final: the assignment, if the pair stopped here.
        inner: (N,), (M,) bool, input points that may have a partner; None where all may.
    """
    config = model.config
    sure = model.confidences(tokens.x, depth) if depth < len(model.confidence) else None
    pair = final or model._assign(_match_candidates(model, tokens, depth, sure), depth)[0]
    matches, scores = _matched(pair, config, inner)
    now, before = ({tuple(m) for m in found.tolist()} for found in (matches, known))
    alone = (pair.assignment.log_unmatched0, pair.assignment.log_unmatched1)
    gone = _gone(tokens, after, final)
    dropped, reasons = _dropped(model, tokens, gone, depth, sure)
    certain, expected = exit_certainty(model, tokens, depth, total, sure)
    return LayerReport(
        self_attention=(attended[0], attended[1]),
        cross_attention=(attended[2], attended[3]),
        matches=matches,
        scores=scores,
        appeared=len(now - before),
        vanished=len(before - now),
        unmatched=(None, None) if config.assignment.dustbin == "none" else _means(alone),
        certain=certain,
        expected=expected,
        confidences=None if sure is None else sure.cpu().numpy(),
        marginal_errors=() if final is None else _marginal_errors(model, tokens.keep(~gone, [0]), depth),
        exited=final is not None and depth < len(model.layers) - 1,
        pruned=dropped,
        reasons=reasons,
    )


def _matched(
    pair: PairPrediction, config: NetworkConfig, inner: tuple[Tensor, Tensor] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Matches (K, 2) int64 and their scores (K,) if the network stopped here."""
    local, scores = mutual_matches(
        pair.assignment.log_scores[0], config.policy.match_threshold, config.policy.threshold_doubles_at
    )
    index = torch.stack([pair.index0[local[:, 0]], pair.index1[local[:, 1]]], dim=1)
    if inner is not None:
        allowed = inner[0][index[:, 0]] & inner[1][index[:, 1]]
        index, scores = index[allowed], scores[allowed]
    return index.cpu().numpy(), scores.cpu().numpy()


def _means(log_shares: tuple[Tensor, Tensor]) -> tuple[float, float]:
    return tuple(float(x.exp().mean()) if x.numel() else 0.0 for x in log_shares)


def exit_certainty(
    model: MatchingNetwork, tokens: Tokens, depth: int, total: int, sure: Tensor | None
) -> tuple[float | None, float | None]:
    """The share that early exit compares with `exit_share`, and the matches that the pair may expect.

    Without heads that predict partners: the share of points that are sure, dropped ones counted as sure
    (`adaptivity.ready_by_confidence`). With them: the share of the expected matches whose points are sure
    (`adaptivity.ready_by_match_probability`), since points without a partner are sure of that from the start.
    """
    if sure is None:
        return None, None
    doubtful = sure <= confidence_threshold(depth, len(model.layers))
    if not model.config.match_probability:
        return (1 - float(doubtful.sum()) / total if total else None), None
    probabilities = model.match_probabilities(tokens.x, depth)
    expected = float(probabilities.sum())
    return (1 - float(probabilities[doubtful].sum()) / expected if expected else None), expected / 2


def _match_candidates(model: MatchingNetwork, tokens: Tokens, depth: int, sure: Tensor | None) -> Tokens:
    """The points that would be assigned if the pair stopped here."""
    policy = model.config.policy
    if sure is None or not model.config.match_probability:
        return tokens
    confident = sure > confidence_threshold(depth, len(model.layers))
    return tokens.keep(keep_mask(model.match_probabilities(tokens.x, depth), confident, policy), [0])


def _gone(tokens: Tokens, after: Tokens, final: PairPrediction | None) -> Tensor:
    """(T,) bool: points that neither stay nor take part in the final assignment."""
    kept = after.layout.split(after.index)[0] if final is None else (final.index0, final.index1)
    index = tokens.layout.split(tokens.index)[0]
    return torch.cat([~torch.isin(i, k) for i, k in zip(index, kept, strict=True)])


def _dropped(
    model: MatchingNetwork, tokens: Tokens, gone: Tensor, depth: int, sure: Tensor | None
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Input points of either picture that a layer dropped, and why (see `LayerReport.reasons`)."""
    n = tokens.layout.counts[0][0]
    why = tokens.x.new_zeros(len(gone), 2)
    if gone.any():
        why = torch.stack([model.match_probabilities(tokens.x, depth), sure], dim=1)
    sides = (slice(None, n), slice(n, None))
    return (
        tuple(tokens.index[at][gone[at]].cpu().numpy() for at in sides),
        tuple(why[at][gone[at]].cpu().numpy() for at in sides),
    )


def _marginal_errors(model: MatchingNetwork, tokens: Tokens, depth: int) -> tuple[float, ...]:
    """Relative error of the rows after each iteration, in the order in which `sinkhorn` updates."""
    config = model.config.assignment
    if config.kind != "sinkhorn" or 0 in tokens.layout.counts[0]:
        return ()
    side0, side1 = (Side(*(None if x is None else x.unsqueeze(0) for x in s)) for s in split_sides(tokens)[0])
    scores, start = model.with_consensus(model.scores(side0, side1, depth), side0.positions, side1.positions)
    (log_mu,), (log_nu,) = log_masses(scores.float())
    scores = scores[0].float()
    u, v = (torch.zeros_like(log_mu), torch.zeros_like(log_nu)) if start is None else (start.u[0], start.v[0])
    if config.tolerance is not None and columns_first(scores, log_mu, log_nu):
        scores, log_mu, log_nu, v = scores.t(), log_nu, log_mu, u
    rows, errors = torch.logsumexp(scores + v, dim=1), []
    while len(errors) < config.max_iterations:
        u = log_mu - rows
        v = log_nu - torch.logsumexp(scores + u[:, None], dim=0)
        rows = torch.logsumexp(scores + v, dim=1)
        errors.append(row_error((u + rows - log_mu).exp()))
        if config.tolerance is not None and errors[-1] <= config.tolerance:
            break
    return tuple(errors)
