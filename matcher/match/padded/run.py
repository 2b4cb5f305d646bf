"""One batch of pairs through the network, in stages that read nothing."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor, nn

from matcher.data.features import Features
from matcher.match.assignment import dual_softmax
from matcher.match.features import unlike_norms
from matcher.match.mutual import mutual_best
from matcher.match.network.assigning import ROUGH_ITERATIONS, SETTLED
from matcher.match.network.blocks import raised
from matcher.match.network.consensus import agreements, mutual_soft_matches
from matcher.match.network.correspondence import Side
from matcher.match.network.packed import Layout
from matcher.match.network.position import normalise_positions
from matcher.match.network.tokens import Tokens
from matcher.match.padded.decisions import decide_masked
from matcher.match.padded.heads import LayerHeads
from matcher.match.padded.transport import DEAD, TOGETHER, Transport
from matcher.match.padded.turning import best_turns, turned
from matcher.match.rules import confidence_threshold
from matcher.match.turns import STEERABLE

ROUGH_TOLERANCE = 1e-2  # of the rows between rounds of consensus


class PairRun:
    """The state of B pairs whose features are tables of one length.

    Tensors that a stage changes stay where they are. T = 2·B·length tokens.
    """

    def __init__(self, network: nn.Module, heads: LayerHeads | None, given: Features, *, full: bool) -> None:
        """Keep what the stages need; nothing is computed yet.

        Args:
            network: a `MatchingNetwork` for inference.
            heads: of it, needed where pairs stop at different layers.
            given: features of `paired` images on the device.
            full: whether every image has as many points as the tables are long.
        """
        self.network, self.heads, self.given, self.full = network, heads, given, full
        images, self.length = given.mask.shape
        self.batch = images // 2
        device = given.mask.device
        self.turns = torch.zeros(self.batch, dtype=torch.int64, device=device)

    def refill(self, given: Features) -> None:
        """Take other features of the same shapes."""
        for name in (f.name for f in fields(given) if f.name != "kind"):
            if (value := getattr(given, name)) is not None:
                getattr(self.given, name).copy_(value)

    # --- the layers

    def begin(self, *, align: bool) -> None:
        """Turn the descriptors to fit, unless `turns` say how already, and make tokens of the features."""
        given, network = self.given, self.network
        if network.config.kind == STEERABLE:
            if align:
                self.turns.copy_(best_turns(given))
            given = turned(given, self.turns)
        self.positions = normalise_positions(given)
        self.x = network.projected(given.descriptors.flatten(0, 1)).float()
        if network.guidance is not None:
            self.x = network.guidance.begin(self.x, network.guidance.inputs(given).flatten(0, 1))
        self.rotations = None
        if network.position is not None:
            code = network.position(given).flatten(0, 1)
            if network.config.position.kind == "rotary":
                self.rotations = code
            else:
                self.x = self.x + code
        self.live = given.mask.clone()
        self.totals = given.mask.view(self.batch, -1).sum(1)
        self.done = torch.zeros_like(self.totals, dtype=torch.bool)
        self.layers = torch.full_like(self.totals, len(network.layers))
        self.predicted = None if network.guidance is None else torch.zeros_like(self.positions.flatten(0, 1))

    def layer(self, depth: int) -> None:
        """One layer of the pairs that have not stopped, and the decision which do."""
        tokens = Tokens(self.x, self.rotations, self.live, self._layout(depth), (), self.positions)
        after = self.network.advance(tokens, depth)
        self._go_on(self.x, after.x)
        if self.predicted is not None:
            self._go_on(self.predicted, after.predicted)
        policy, last = self.network.config.policy, depth == len(self.network.layers) - 1
        if last or not (policy.early_exit or policy.pruning):
            return
        probability = self.network.match_probabilities(self.x, depth)
        confident = self.network.confidences(self.x, depth) > confidence_threshold(
            depth, len(self.network.layers)
        )
        decided = decide_masked(
            *(each.view(self.batch, -1) for each in (self.live, confident, probability)),
            self.totals,
            policy,
            predicted=self.network.config.match_probability,
        )
        live = self.live.view(self.batch, -1)
        torch.where(self.done[:, None], live, decided.live, out=live)
        self.layers.masked_fill_(decided.stops & ~self.done, depth + 1)
        self.done |= decided.stops

    def _layout(self, depth: int) -> Layout:
        masked = not self.full or (depth > 0 and self.network.config.policy.pruning)
        return Layout(((self.length, self.length),) * self.batch, self.live if masked else None)

    def _go_on(self, state: Tensor, after: Tensor) -> None:
        """The state after a layer, but for pairs that have stopped."""
        if not self.network.config.policy.early_exit:
            state.copy_(after)
            return
        state, after = (x.view(self.batch, -1) for x in (state, after))
        torch.where(self.done[:, None], state, after, out=state)

    # --- the assignment

    def score(self) -> None:
        """Scores with dustbins of every pair, by the heads of the layer at which it stopped."""
        side0, side1 = self._sides()
        if self.heads is None:
            scores = self.network.scores(side0, side1, len(self.network.layers) - 1)
        else:
            scores = self.heads.scores(side0, side1, self.layers - 1)
        self.live0, self.live1 = self.live.unflatten(0, (-1, 2)).unbind(1)
        scores[:, :-1].masked_fill_(~self.live0[:, :, None], DEAD)
        scores[:, :, :-1].masked_fill_(~self.live1[:, None], DEAD)
        self.scores = self.corrected = scores
        self.transport, self.found, self.matches = Transport(self.live0, self.live1), None, None
        self.settled = torch.zeros_like(self.done)

    def _sides(self) -> tuple[Side, Side]:
        columns = [x for x in (self.x, self.positions, self.predicted) if x is not None]
        columns = [x.view(self.batch, 2, self.length, -1) for x in columns]
        return Side(*(x[:, 0] for x in columns)), Side(*(x[:, 1] for x in columns))

    def consensus_round(self) -> None:
        """A rough assignment, and scores that its matches correct; pairs whose matches stay are settled."""
        self.transport.begin(self.corrected, self.found, ROUGH_TOLERANCE, ROUGH_ITERATIONS)
        self.transport.iterate(ROUGH_ITERATIONS - 1)
        found = self.transport.finish()
        if self.found is not None:
            found = tuple(_kept(self.settled, *each) for each in zip(self.found, found, strict=True))
        before, self.found = self.matches, found
        self.matches = mutual_soft_matches(raised(self.corrected, *found)[:, :-1, :-1])
        if before is not None and self.network.config.policy.early_exit:
            self.settled |= agreements(before[0], self.matches[0]) > SETTLED
        side0, side1 = self._sides()
        updated = self.network.consensus(self.scores, side0.positions, side1.positions, self.matches)
        self.corrected = updated if before is None else _kept(self.settled, self.corrected, updated)

    def begin_transport(self) -> None:
        """The first of the last iterations."""
        config = self.network.config.assignment
        self.transport.begin(self.corrected, self.found, config.tolerance, config.max_iterations)

    def continue_transport(self) -> None:
        """Some more of them."""
        self.transport.iterate(TOGETHER)
        self.transport.absorb()

    def read_off(self) -> None:
        """What is to be read, (B, …) int32: numbers of the pair, then of every point, see `PairBest`."""
        if self.network.config.assignment.kind == "dual_softmax":
            log_scores = dual_softmax(self.scores).log_scores
        else:
            log_scores = raised(self.corrected, *self.transport.finish())[:, :-1, :-1]
        best, partners, mutual = mutual_best(log_scores)
        mutual = mutual & self.live0 & self.live1.gather(1, partners)  # padding may be its own best partner
        points = self.given.mask.unflatten(0, (-1, 2)).sum(2)
        kept = self.live.unflatten(0, (-1, 2)).sum(2)
        unlike = unlike_norms(self.network.config.kind, self.given).view(self.batch, 2).any(1)
        numbers = torch.stack(
            [self.layers, self.turns, unlike.long(), *points.unbind(1), *kept.unbind(1)], dim=1
        )
        columns = [numbers, torch.where(mutual, partners, -1)]
        floats = torch.cat([best, self.given.keypoints.reshape(self.batch, -1)], dim=1)
        self.packed = torch.cat([*(column.int() for column in columns), floats.view(torch.int32)], dim=1)


def _kept(which: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """(B, …) old in the pairs of `which` (B,), else new."""
    return torch.where(which.view(-1, *[1] * (old.dim() - 1)), old, new)
