"""The attentional matcher: it composes the blocks that a configuration names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matcher.config import AssignmentConfig, ContextConfig, NetworkConfig, PositionConfig
from matcher.data.features import Features
from matcher.errors import UsageError
from matcher.match.assignment import assign, dual_softmax, plan
from matcher.match.mutual import drop_unmatched
from matcher.match.network.adaptivity import (
    Tokens,
    confidence_threshold,
    hopeful,
    ready_pairs,
    ready_prospects,
    worthwhile,
)
from matcher.match.network.backbone import Backbone
from matcher.match.network.consensus import Consensus, mutual_links, stayed
from matcher.match.network.context import Layer
from matcher.match.network.guidance import Guidance, Side
from matcher.match.network.head import AssignmentHead
from matcher.match.network.packed import Layout, interleave
from matcher.match.network.position import MlpPosition, RotaryPosition, SinePosition, normalise_positions
from matcher.match.network.prepared import linear
from matcher.match.network.refinement import Refinement
from matcher.match.network.validate import check_config
from matcher.match.prediction import Assignment, PairPrediction, Prediction
from matcher.match.sinkhorn import Potentials, sinkhorn
from matcher.match.steering import aligned

TOGETHER = 1024  # tokens of a batch that run at once on a processor; one pair may have more
SETTLED = 0.85  # share of the links that a round of consensus left as they were, which makes it the last
ROUGH_ITERATIONS = 7  # of Sinkhorn between rounds of consensus


class Model(nn.Module):
    """Features of two pictures → a soft assignment of their points.

    1. turn picture 1 to fit picture 0 where descriptors can be turned, and project descriptors; 2. alternate
    self- and cross-attention, positions turning the queries and keys; 3. after each layer decide per pair
    whether to stop and which points to drop; 4. assign.
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        dim, depth = config.context.dim, config.context.depth
        check_config(config)
        self.config = config
        self.backbone = None if config.backbone is None else Backbone(config.backbone)
        self.project = nn.Linear(config.descriptor_dim, dim) if config.project else nn.Identity()
        self.position = build_position(config.position, config.context)
        self.guidance = Guidance(dim, depth, config.position.inputs) if config.guided else None
        self.layers = nn.ModuleList(Layer(config.context) for _ in range(depth))
        number = depth if config.assignment.every_layer else 1
        self.heads = nn.ModuleList(build_head(config.assignment, dim) for _ in range(number))
        self.confidence = nn.ModuleList(nn.Linear(dim, 1) for _ in range(number - 1))
        inner = number - 1 if config.adaptivity.prospects else 0
        self.prospect = nn.ModuleList(nn.Linear(dim, 1) for _ in range(inner))
        self.consensus = Consensus() if config.assignment.consensus else None
        self.fine = None if config.refinement is None else Refinement(config.refinement, dim)
        self._start_at_nearest_neighbour()

    @torch.no_grad()
    def _start_at_nearest_neighbour(self) -> None:
        """Untrained, scores are inner products of standardised descriptors, sharp enough, at every layer."""
        dim = self.config.context.dim
        if self.config.project:
            nn.init.orthogonal_(self.project.weight, gain=dim**0.5)
            nn.init.zeros_(self.project.bias)
        for head in self.heads if self.config.assignment.project else ():
            nn.init.orthogonal_(head.projection.weight, gain=(15 / dim**0.5) ** 0.5)
            nn.init.zeros_(head.projection.bias)
            if self.config.assignment.dustbin == "point":
                nn.init.zeros_(head.matchability.weight)
                nn.init.zeros_(head.matchability.bias)

    @torch.no_grad()
    def standardise(self, descriptors: Tensor) -> None:
        """Shift and scale the projection so that `descriptors` (T, D) give tokens of mean 0, variance 1."""
        mean = descriptors.mean(0)
        self.project.weight /= ((descriptors - mean) @ self.project.weight.t()).std()
        self.project.bias.copy_(-self.project.weight @ mean)

    def check(self, features: Features) -> None:
        """Refuse features of another front end or size by name.

        Raises:
            UsageError: kind or descriptor size does not fit, or the features are not a batch.
        """
        config, size = self.config, features.descriptors.shape[-1]
        if features.keypoints.dim() != 3:
            raise UsageError("the network takes batches, keypoints (B, N, 2): Features.stack([features])")
        if features.kind not in ("any", config.kind):
            raise UsageError(
                f"this matcher takes {config.kind} features, not {features.kind}; load a preset for "
                f"{features.kind} features, or the front end {config.kind}"
            )
        if size != config.descriptor_dim:
            raise UsageError(f"this matcher takes {config.descriptor_dim}-d descriptors, not {size}-d")
        needed = ["cells", "grid"] if config.assignment.border else []
        needed += ["cells", "frames", "maps"] if config.refinement else []
        if absent := [name for name in needed if getattr(features, name) is None]:
            raise UsageError(f"this matcher needs Features.{absent[0]}, which its own front end gives")

    def tokens(self, features0: Features, features1: Features, *, align: bool = True) -> Tokens:
        """The valid points of B pairs as packed tokens, descriptors turned to fit; raises as `check` does."""
        for features in (features0, features1):
            self.check(features)
        if features0.mask.shape[0] != features1.mask.shape[0]:
            raise UsageError(f"{features0.mask.shape[0]} images cannot pair with {features1.mask.shape[0]}")
        if align:
            features1 = aligned(features0, features1, self.config.kind)
        masks = (features0.mask, features1.mask)
        counts = tuple(zip(*(m.sum(1).tolist() for m in masks), strict=True))
        columns = []
        for features, mask in zip((features0, features1), masks, strict=True):
            index = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
            values = [features.descriptors, index, normalise_positions(features)]
            if self.position is not None:
                values.append(self.position(features))
            if self.guidance is not None:
                values.append(self.guidance.inputs(features))
            columns.append([[v[m] for v, m in zip(value, mask, strict=True)] for value in values])
        descriptors, index, places, *codes = (interleave(a, b) for a, b in zip(*columns, strict=True))
        x, turns = self._project(descriptors), None
        if self.guidance is not None:
            x = self.guidance.begin(x, codes.pop())
        if self.config.position.kind == "rotary":
            turns = codes[0]
        elif codes:
            x = x + codes[0]
        return Tokens(x, turns, index, Layout(counts), tuple(range(len(counts))), places)

    def _project(self, descriptors: Tensor) -> Tensor:
        if not self.config.project:
            return descriptors.float()
        return linear(
            descriptors.to(self.project.weight.dtype), self.project.weight, self.project.bias
        ).float()

    def states(self, tokens: Tokens) -> Iterator[Tokens]:
        """Tokens after each layer, all layers, nothing dropped: what training looks at."""
        for depth in range(len(self.layers)):
            tokens = self._advance(tokens, depth)
            yield tokens

    def _advance(self, tokens: Tokens, depth: int) -> Tokens:
        x = self.layers[depth](tokens.x, tokens.turns, tokens.layout)
        if self.guidance is None:
            return replace(tokens, x=x)
        x, stated = self.guidance(x, depth)
        return replace(tokens, x=x, stated=stated)

    def scores(self, side0: Side, side1: Side, depth: int) -> Tensor:
        """Scores with dustbins (…, N+1, M+1), float32, of points after layer `depth`."""
        head = self.heads[depth if self.config.assignment.every_layer else 0]
        scores = head(side0.x, side1.x)
        if self.guidance is not None:
            agreement = self.guidance.agreement(side0, side1, depth)
            if scores.requires_grad or agreement.requires_grad:
                return scores + F.pad(agreement, (0, 1, 0, 1))
            scores[..., :-1, :-1] += agreement
        return scores

    def forward(self, features0: Features, features1: Features, *, align: bool = True) -> Prediction:
        """Assignments of B pairs (both arguments batched), with early exit and pruning as configured."""
        tokens = self.tokens(features0, features1, align=align)
        totals = [n + m for n, m in tokens.layout.counts]
        found: dict[int, PairPrediction] = {}
        for together in _groups(tokens):
            self._run(together, totals, found)
        return Prediction(tuple(found[pair] for pair in range(len(totals))))

    def _run(self, tokens: Tokens, totals: list[int], found: dict[int, PairPrediction]) -> None:
        """All layers of some pairs, whose assignments go to `found`."""
        last = len(self.layers) - 1
        for depth in range(len(self.layers)):
            tokens = self._advance(tokens, depth)
            if depth == last:
                found |= self._assign(tokens, depth)
                break
            tokens = self._adapt(tokens, totals, depth, found)
            if not tokens.pairs:
                break

    def _adapt(
        self, tokens: Tokens, totals: list[int], depth: int, found: dict[int, PairPrediction]
    ) -> Tokens:
        """Let sure pairs leave (their assignment goes to `found`) and drop points that cannot match."""
        config = self.config.adaptivity
        if not (config.early_exit or config.pruning):
            return tokens
        confident = self.confidences(tokens.x, depth) > confidence_threshold(depth, len(self.layers))
        matchable = self.matchabilities(tokens.x, depth)
        keep, leaving = hopeful(matchable, confident, config), []
        if config.early_exit and config.prospects:
            leaving = ready_prospects(tokens, confident, matchable, config)
        elif config.early_exit:
            leaving = ready_pairs(tokens, confident, totals, config)
        if leaving:  # with prospects they leave without the points that have none; LightGlue's keep all
            last = keep if config.prospects else torch.ones_like(keep)
            found |= self._assign(tokens.keep(last, leaving), depth)
        staying = [entry for entry in range(len(tokens.pairs)) if entry not in leaving]
        if not staying:
            return tokens.keep(confident, staying)
        keep = worthwhile(keep, tokens.layout, config.least_pruned)
        if leaving or not bool(keep.all()):
            return tokens.keep(keep, staying)
        return tokens

    def confidences(self, x: Tensor, depth: int) -> Tensor:
        """(T,) probability that the last layer would not change a point's partner any more."""
        head = self.confidence[depth]
        return head(x.to(head.weight.dtype)).squeeze(-1).float().sigmoid()

    def matchabilities(self, x: Tensor, depth: int) -> Tensor:
        """(T,) probability of a partner: by the heads for it, or by the dustbin (LightGlue, eq. 12)."""
        if not self.config.adaptivity.prospects:
            return self.heads[depth].logits(x).sigmoid()
        return self.prospect[depth](x.float()).squeeze(-1).sigmoid()

    def _assign(self, tokens: Tokens, depth: int) -> dict[int, PairPrediction]:
        found = {}
        for pair, sides, index in zip(
            tokens.pairs, split_sides(tokens), tokens.layout.split(tokens.index), strict=True
        ):
            side0, side1 = (Side(*(None if x is None else x.unsqueeze(0) for x in s)) for s in sides)
            scores = self.scores(side0, side1, depth)
            assignment = self._transport(*self._heard(scores, side0.places, side1.places))
            kept = () if self.fine is None else (side.x for side in sides)
            found[pair] = PairPrediction(assignment, *index, depth + 1, *kept)
        return found

    def _heard(self, scores: Tensor, places0: Tensor, places1: Tensor) -> tuple[Tensor, Potentials | None]:
        """Scores after the rounds of consensus, and potentials to begin with: each assignment goes on from
        the one before, so between the rounds a few iterations are enough. With early exit the rounds end when
        the last one has changed little."""
        heard, found, before, empty = scores, None, None, 1 in scores.shape[1:]
        enough = SETTLED if self.config.adaptivity.early_exit else 1.0
        for _ in range(0 if empty else self.config.assignment.consensus):
            found = sinkhorn(heard, max_iterations=ROUGH_ITERATIONS, start=found)
            links = mutual_links(plan(heard, found).log_scores)
            if before is not None and stayed(before, links[0]) > enough:
                break
            heard, before = self.consensus(scores, places0, places1, links), links[0]
        return heard, found

    def _transport(self, scores: Tensor, start: Potentials | None) -> Assignment:
        config = self.config.assignment
        if config.kind == "dual_softmax":
            assignment = dual_softmax(scores)
        else:
            assignment = assign(
                scores, max_iterations=config.max_iterations, tolerance=config.tolerance, start=start
            )
        return drop_unmatched(assignment) if config.drop_unmatched else assignment


def _groups(tokens: Tokens) -> Iterator[Tokens]:
    """Pairs that run together: on a processor as many as its caches and a few allocations hold, else all.

    Large batches gain nothing there, and memory that is touched for the first time costs more than they save.
    """
    counts = [n + m for n, m in tokens.layout.counts]
    if tokens.x.device.type != "cpu" or sum(counts) <= TOGETHER or len(counts) < 2:
        yield tokens
        return
    everything = torch.ones(len(tokens.x), dtype=torch.bool)
    group: list[int] = []
    for entry, count in enumerate(counts):
        if group and sum(counts[e] for e in group) + count > TOGETHER:
            yield tokens.keep(everything, group)
            group = []
        group.append(entry)
    yield tokens.keep(everything, group)


def split_sides(tokens: Tokens) -> list[tuple[Side, Side]]:
    """The two pictures of every pair."""
    columns = [tokens.layout.split(x) for x in (tokens.x, tokens.places, tokens.stated) if x is not None]
    return [tuple(Side(*side) for side in zip(*pair, strict=True)) for pair in zip(*columns, strict=True)]


def build_position(config: PositionConfig, context: ContextConfig) -> nn.Module | None:
    """The position encoding that a configuration names."""
    if config.kind == "rotary":
        return RotaryPosition(config, context.dim // context.heads)
    added = {"mlp": MlpPosition, "sine": SinePosition}
    return added[config.kind](config, context.dim) if config.kind in added else None


def build_head(config: AssignmentConfig, dim: int) -> AssignmentHead:
    """The assignment head that a configuration names, for tokens of `dim` channels."""
    return AssignmentHead(dim, config.dustbin, project=config.project, temperature=config.temperature)
