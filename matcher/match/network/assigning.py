"""From the states of two images to their assignment, with rounds of consensus where the network has them.

Without gradients on a CPU only the candidates of every point are assigned, by the compiled kernels; what the
other scores weigh is counted (`match/candidates.py`). Without kernels all scores are assigned.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from matcher.config import AssignmentConfig
from matcher.kernels.candidates import have_candidates
from matcher.match.assignment import assigned, plan
from matcher.match.candidates import CandidateAssignment, Candidates, candidates_of
from matcher.match.network.consensus import SoftMatches, agreement, mutual_soft_matches, soft_matches
from matcher.match.network.correspondence import Side
from matcher.match.prediction import Assignment
from matcher.match.sinkhorn import Potentials, sinkhorn

SETTLED = 0.85  # share of the matches that a round of consensus left unchanged, which makes it the last
ROUGH_ITERATIONS = 7  # of Sinkhorn between rounds of consensus


def assign_all(
    network: nn.Module, side0: Side, side1: Side, depth: int, *, record_errors: bool = False
) -> Assignment:
    """The assignment of one pair (B = 1) after layer `depth`, of all its scores."""
    scores = network.scores(side0, side1, depth)
    scores, start = _with_consensus(network, scores, side0.positions, side1.positions)
    return assigned(scores, network.config.assignment, start, record_errors=record_errors)


def _with_consensus(
    network: nn.Module, scores: Tensor, positions0: Tensor, positions1: Tensor
) -> tuple[Tensor, Potentials | None]:
    """Scores after the rounds of consensus, and potentials to begin with.

    Each assignment goes on from the one before, so between the rounds a few iterations are enough. With early
    exit the rounds end when the last one has changed little.
    """
    corrected, found, before, empty = scores, None, None, 1 in scores.shape[1:]
    for _ in range(0 if empty else network.config.assignment.consensus):
        found = sinkhorn(corrected, max_iterations=ROUGH_ITERATIONS, start=found)
        matches = mutual_soft_matches(plan(corrected, found).log_scores)
        if _settled(network, before, matches[0]):
            break
        corrected, before = network.consensus(scores, positions0, positions1, matches), matches[0]
    return corrected, found


def assign_candidates(network: nn.Module, side0: Side, side1: Side, depth: int) -> CandidateAssignment | None:
    """As `assign_all`, by candidates; None for other kinds of assignment and where no kernel is there."""
    config = network.config.assignment
    if 0 in (side0.x.shape[1], side1.x.shape[1]) or not (_by_transport(config) and have_candidates(side0.x)):
        return None
    first = _candidates(network, side0, side1, depth)
    candidates, found, before = first, None, None
    for _ in range(config.consensus):
        found = candidates.sinkhorn(ROUGH_ITERATIONS, config.tolerance, found)
        matches = soft_matches(candidates.mutual_best(found), side1.x.shape[1])
        if _settled(network, before, matches[0]):
            break
        candidates = network.consensus.on_candidates(first, side0.positions, side1.positions, matches)
        before = matches[0]
    found = candidates.sinkhorn(config.max_iterations, config.tolerance, found)
    return CandidateAssignment(candidates, found)


def _by_transport(config: AssignmentConfig) -> bool:
    return (
        config.kind == "sinkhorn"
        and config.dustbin != "none"
        and config.tolerance is not None
        and not config.drop_unmatched
    )


def _candidates(network: nn.Module, side0: Side, side1: Side, depth: int) -> Candidates:
    head = network.heads[depth if network.config.assignment.every_layer else 0]
    left, right = head.compared(side0.x, side1.x)
    if network.guidance is not None:
        more = network.guidance.factors(side0, side1, depth)
        left, right = (torch.cat(pair, dim=-1) for pair in zip((left, right), more, strict=True))
    bins0, bins1, corner = head.dustbins(side0.x, side1.x)
    return candidates_of(left[0], right[0], bins0[0], bins1[0], float(corner))


def _settled(network: nn.Module, before: SoftMatches | None, after: SoftMatches) -> bool:
    if before is None or not network.config.policy.early_exit:
        return False
    return agreement(before, after) > SETTLED
