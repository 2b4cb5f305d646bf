"""The attentional matcher: it composes the blocks that a configuration names."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matcher.config import MatchingPolicy, NetworkConfig
from matcher.data.features import Features
from matcher.errors import UsageError
from matcher.kernels.linear import linear
from matcher.match.features import check_features
from matcher.match.network.assigning import assign_all, assign_candidates
from matcher.match.network.backbone import Backbone
from matcher.match.network.consensus import Consensus
from matcher.match.network.context import build_layer
from matcher.match.network.correspondence import CorrespondenceGuidance, Side
from matcher.match.network.head import build_head
from matcher.match.network.packed import Layout, interleave
from matcher.match.network.position import build_position, normalise_positions
from matcher.match.network.refinement import Refinement
from matcher.match.network.states import LayerState
from matcher.match.network.tokens import Tokens, groups, split_sides
from matcher.match.network.validate import check_config
from matcher.match.prediction import PairPrediction, Prediction
from matcher.match.steering import aligned


class MatchingNetwork(nn.Module):
    """Features of two images → a soft assignment of their points.

    1. Rotate the descriptors of image 1 by quarter turns to fit image 0, where they can be, and project them.
    2. Alternate self- and cross-attention; positions rotate the queries and keys.
    3. After each layer decide per pair whether to stop and which points to drop.
    4. Assign.
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        dim, depth = config.context.dim, config.context.depth
        check_config(config)
        self.config = config
        self.backbone = None if config.backbone is None else Backbone(config.backbone)
        self.project = nn.Linear(config.descriptor_dim, dim) if config.project else nn.Identity()
        self.position = build_position(config.position, config.context)
        self.guidance = CorrespondenceGuidance(dim, depth, config.position.inputs) if config.guided else None
        self.layers = nn.ModuleList(build_layer(config.context) for _ in range(depth))
        number = depth if config.assignment.every_layer else 1
        self.heads = nn.ModuleList(build_head(config.assignment, dim) for _ in range(number))
        self.confidence = nn.ModuleList(nn.Linear(dim, 1) for _ in range(number - 1))
        inner = number - 1 if config.match_probability else 0
        self.match_probability = nn.ModuleList(nn.Linear(dim, 1) for _ in range(inner))
        self.consensus = Consensus() if config.assignment.consensus else None
        self.fine = None if config.refinement is None else Refinement(config.refinement, dim)
        self._initialise_as_nearest_neighbour()

    @torch.no_grad()
    def _initialise_as_nearest_neighbour(self) -> None:
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

    def with_policy(self, policy: MatchingPolicy) -> MatchingNetwork:
        """The same network, sharing its parameters, under another policy.

        Raises:
            UsageError: its architecture has no heads for early exit or pruning.
        """
        changed = copy.copy(self)
        changed.config = replace(self.config, policy=policy)
        check_config(changed.config)
        return changed

    def first_layers(self, layers: int, max_iterations: int | None = None) -> MatchingNetwork:
        """The first layers as a network of its own, sharing their parameters.

        Args:
            layers: at most all of them.
            max_iterations: of Sinkhorn, at most; the configured number when absent.

        Raises:
            UsageError: inner layers have no heads to assign by.
        """
        config, depth = self.config, min(layers, len(self.layers))
        if depth < len(self.layers) and not config.assignment.every_layer:
            raise UsageError("only the last layer of this network gives an assignment")
        assignment = config.assignment
        if max_iterations is not None:
            limit = min(max_iterations, assignment.max_iterations)
            assignment = replace(assignment, max_iterations=limit)
        changed = copy.copy(self)
        changed._modules = dict(self._modules)
        changed.config = replace(config, context=replace(config.context, depth=depth), assignment=assignment)
        if depth < len(self.layers):
            changed.layers, changed.heads = self.layers[:depth], self.heads[:depth]
            changed.confidence = self.confidence[: depth - 1]
            changed.match_probability = self.match_probability[: depth - 1]
        return changed

    @torch.no_grad()
    def standardise(self, descriptors: Tensor) -> None:
        """Shift and scale the projection so that `descriptors` (T, D) give tokens of mean 0, variance 1.

        Without a projection nothing changes.
        """
        if not self.config.project:
            return
        mean = descriptors.mean(0)
        self.project.weight /= ((descriptors - mean) @ self.project.weight.t()).std()
        self.project.bias.copy_(-self.project.weight @ mean)

    def check(self, features: Features, *, norms: bool = True) -> None:
        """Refuse features that the network was not trained on; descriptors are looked at only for `norms`.

        Raises:
            UsageError: the kind, size or norm of the descriptors does not fit, or no batch was given.
        """
        check_features(self.config, features, norms=norms)

    def tokens(
        self, features0: Features, features1: Features, *, align: bool = True, complete: bool = False
    ) -> Tokens:
        """The valid points of B pairs as packed tokens; raises as `check` does.

        Args:
            features0, features1: batches.
            align: whether to turn descriptors to fit.
            complete: all points are valid, and their descriptors of the network's front end, so that nothing
                has to be read from a GPU.
        """
        device = next(self.parameters()).device
        features0, features1 = (f.to(device) for f in (features0, features1))
        for features in (features0, features1):
            self.check(features, norms=not complete)
        check_paired(features0, features1)
        if align:
            features1 = aligned(features0, features1, self.config.kind)
        masks = (features0.mask, features1.mask)
        most = tuple(mask.shape[1] for mask in masks)
        counts = (most,) * len(masks[0])
        if not complete:
            counts = tuple(zip(*(m.sum(1).tolist() for m in masks), strict=True))
        # A GPU is waited for wherever points are picked by a mask.
        whole = set(counts) <= {most}
        columns = []
        for features, mask in zip((features0, features1), masks, strict=True):
            index = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
            values = [features.descriptors, index, normalise_positions(features)]
            if self.position is not None:
                values.append(self.position(features))
            if self.guidance is not None:
                values.append(self.guidance.inputs(features))
            columns.append(
                [[v if whole else v[m] for v, m in zip(value, mask, strict=True)] for value in values]
            )
        descriptors, index, positions, *codes = (interleave(a, b) for a, b in zip(*columns, strict=True))
        x, rotations = self.projected(descriptors), None
        if self.guidance is not None:
            x = self.guidance.begin(x, codes.pop())
        if self.config.position.kind == "rotary":
            rotations = codes[0]
        elif codes:
            x = x + codes[0]
        return Tokens(x, rotations, index, Layout(counts), tuple(range(len(counts))), positions)

    def projected(self, descriptors: Tensor) -> Tensor:
        """Descriptors (T, D) → tokens (T, dim), float32."""
        if not self.config.project:
            return descriptors.float()
        return linear(
            descriptors.to(self.project.weight.dtype), self.project.weight, self.project.bias
        ).float()

    def run(self, tokens: Tokens, policy: MatchingPolicy | None = None) -> Iterator[LayerState]:
        """The network, layer by layer: matching, training and explanation all consume this one loop.

        A pair that stops leaves the run and so do points that are dropped, as each yielded state decides; the
        run ends with the last pair.

        Args:
            tokens: of some pairs, from `tokens`.
            policy: of exit and pruning; the network's own when absent. `ALL_LAYERS` runs all layers on all
                points.
        """
        totals = dict(zip(tokens.pairs, (n + m for n, m in tokens.layout.counts), strict=True))
        for depth in range(len(self.layers)):
            after = self.advance(tokens, depth)
            state = LayerState(self, policy or self.config.policy, depth, tokens, after, totals)
            yield state
            tokens = state.tokens if state.is_last else state.remaining
            if not tokens.pairs:
                return

    def advance(self, tokens: Tokens, depth: int) -> Tokens:
        """Tokens after layer `depth`, with the predicted correspondences of guided ones."""
        x = self.layers[depth](tokens.x, tokens.rotations, tokens.layout)
        if self.guidance is None:
            return replace(tokens, x=x)
        x, predicted = self.guidance(x, depth)
        return replace(tokens, x=x, predicted=predicted)

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
        found: dict[int, PairPrediction] = {}
        for together in groups(tokens):
            for state in self.run(together):
                found |= state.assign()
        return Prediction(tuple(found[pair] for pair in range(len(tokens.pairs))))

    def confidences(self, x: Tensor, depth: int) -> Tensor:
        """(T,) probability that the last layer would not change a point's partner any more."""
        head = self.confidence[depth]
        return head(x.to(head.weight.dtype)).squeeze(-1).float().sigmoid()

    def match_probabilities(self, x: Tensor, depth: int) -> Tensor:
        """(T,) probability of a partner: by the heads for it, or by the dustbin (LightGlue, eq. 12)."""
        if not self.config.match_probability:
            return self.heads[depth].logits(x).sigmoid()
        return self.match_probability[depth](x.float()).squeeze(-1).sigmoid()

    def assign(self, tokens: Tokens, depth: int, *, record_errors: bool = False) -> dict[int, PairPrediction]:
        """Assignments of all pairs of `tokens`, which are those after layer `depth`, by input pair."""
        found = {}
        for pair, sides, index in zip(
            tokens.pairs, split_sides(tokens), tokens.layout.split(tokens.index), strict=True
        ):
            side0, side1 = (Side(*(None if x is None else x.unsqueeze(0) for x in s)) for s in sides)
            assignment = None if record_errors else assign_candidates(self, side0, side1, depth)
            if assignment is None:
                assignment = assign_all(self, side0, side1, depth, record_errors=record_errors)
            kept = () if self.fine is None else (side.x for side in sides)
            found[pair] = PairPrediction(assignment, *index, depth + 1, *kept)
        return found


def check_paired(features0: Features, features1: Features) -> None:
    """Refuse batches of two sizes.

    Raises:
        UsageError: they have not as many images.
    """
    if features0.mask.shape[0] != features1.mask.shape[0]:
        raise UsageError(f"{features0.mask.shape[0]} images cannot pair with {features1.mask.shape[0]}")
