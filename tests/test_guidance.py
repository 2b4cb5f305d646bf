"""Guided tokens: their positions, predicted correspondences, and what scores gain where these agree."""

import torch

from matcher.match.position import CorrespondenceGuidance, Side


def seeded_guidance(dim: int = 16, depth: int = 2) -> CorrespondenceGuidance:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        guidance = CorrespondenceGuidance(dim, depth)
        with torch.no_grad():
            for parameter in guidance.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape))
    return guidance


def test_agreement_is_the_sum_of_cosines_of_both_sides() -> None:
    guidance, rng = seeded_guidance(), torch.Generator().manual_seed(1)
    sides = [
        Side(*(torch.randn(n, c, generator=rng) * s for c, s in ((16, 1.0), (2, 0.5), (2, 0.5))))
        for n in (5, 4)
    ]
    left, right = guidance.factors(*sides, depth=1)
    found = left @ right.T
    omega, weight = guidance.frequencies.weight.double(), guidance.weight[1].double()
    confidences = [2 * guidance.confidence[1](side.x).sigmoid().double().squeeze(1) for side in sides]
    for i in range(5):
        for j in range(4):
            there = (
                weight * torch.cos(omega @ (sides[0].predicted[i] - sides[1].positions[j]).double())
            ).sum()
            back = (
                weight * torch.cos(omega @ (sides[1].predicted[j] - sides[0].positions[i]).double())
            ).sum()
            expected = confidences[0][i] * there + confidences[1][j] * back
            assert torch.isclose(found[i, j].double(), expected, atol=1e-4)


def test_no_gradient_flows_through_the_encoding_of_a_prediction() -> None:
    guidance = seeded_guidance()
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(2), requires_grad=True)
    moved, predicted = guidance(x, 0)
    moved.sum().backward(retain_graph=True)
    assert guidance.predict[0].weight.grad is None
    predicted.sum().backward()
    assert guidance.predict[0].weight.grad.abs().sum() > 0
