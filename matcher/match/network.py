"""The attentional matcher: features of two images, layer by layer, to a soft assignment and to matches.

    tokens → layer → state after each layer → pairs that stop, points that are dropped → assignment → matches

`MatchingNetwork.run` is the one loop over the layers: matching, training, explanation and export consume it.
On a CPU pairs go one after the other without padding; on a GPU together, padded, with a mask.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matcher.attention import mapped
from matcher.config import CalibrationConfig, MatchingPolicy, NetworkConfig, Precision
from matcher.errors import UsageError
from matcher.match.adaptivity import Decision, confidence_threshold, decide
from matcher.match.blocks import Layer, folded
from matcher.match.calibration import calibrated, credible_matches
from matcher.match.consensus import ROUGH_ITERATIONS, SETTLED, Consensus, agreement, soft_matches
from matcher.match.loftr import Backbone, Refinement, folded_backbone
from matcher.match.nearest import check_features
from matcher.match.position import (
    CorrespondenceGuidance,
    Points,
    build_position,
    encoded,
    normalise_positions,
    position_inputs,
)
from matcher.match.sinkhorn import Assignment, AssignmentHead, Potentials, assign, sinkhorn
from matcher.match.steering import STEERABLE_KIND, aligned, try_other_turns, turned_by
from matcher.types import Features, Matches, converted, to_numpy

MOST_SCORES = 2**28  # of the pairs that a GPU runs together; a score takes some twenty bytes on the way
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_config(config: NetworkConfig) -> None:
    """Refuse combinations that make no network, by a `UsageError` that names the setting."""
    position, context, assignment, policy = config.position, config.context, config.assignment, config.policy
    backbone, refinement, above = config.backbone, config.refinement, context.scale_logits_above
    plain, transport = position.kind not in ("rotary", "mlp"), assignment.kind != "dual_softmax"
    whole = context.heads >= 1 and context.dim % (2 * context.heads) == 0 < context.dim
    fine = refinement is None or backbone is None or refinement.context.dim == backbone.widths[0]
    coarse = backbone is None or config.descriptor_dim == backbone.widths[-1]
    ends, same = policy.early_exit or policy.pruning, config.descriptor_dim == context.dim
    located, every = position.inputs[:1] == ("xy",), assignment.every_layer
    dustbin = assignment.dustbin != ("none" if transport else "learned")
    rules = [
        (position.inputs or plain, f"position.kind {position.kind!r} needs position.inputs, 'xy' at least"),
        (located or not config.guided, "guided needs position.inputs that begin with 'xy'"),
        (0 < position.extent < math.inf, "position.extent must be a number above 0"),
        (context.depth >= 1, "context.depth must be at least 1"),
        (whole, "context.dim must be a multiple of twice context.heads"),
        (above is None or context.attention == "softmax", "scale_logits_above needs attention 'softmax'"),
        (above is None or above >= 2, "context.scale_logits_above must be at least 2"),
        (config.project or same, "without project, descriptor_dim must be context.dim"),
        (coarse, "descriptor_dim must be the last of backbone.widths"),
        (fine, "refinement.context.dim must be the first of backbone.widths"),
        (transport or not assignment.consensus, "consensus needs assignment.kind 'sinkhorn'"),
        (assignment.temperature > 0, "assignment.temperature must be above 0"),
        (dustbin, f"{assignment.kind} does not go with assignment.dustbin {assignment.dustbin!r}"),
        (every or not config.match_probability, "match_probability needs assignment.every_layer"),
        (every or not ends, "without assignment.every_layer switch early_exit and pruning off"),
        (assignment.dustbin == "point" or not policy.pruning, "without dustbin 'point' switch pruning off"),
        (0 <= policy.match_threshold <= 1, "policy.match_threshold must be from 0 to 1"),
    ]
    for kept, rule in rules:
        if not kept:
            raise UsageError(f"network configuration: {rule}")


# The run, and what it yields after each layer: tokens, what is decided, and assignments on demand.


@dataclass(frozen=True, eq=False)
class Tokens:
    """The points of B pairs that are still running; those of both images are one sequence, image 0 first."""

    x: Tensor  # (B, N+M, dim)
    n: int  # N
    index: np.ndarray  # (B, N+M) int64, the input point each token is
    positions: Tensor  # (B, N+M, 2) normalised positions
    rotations: Tensor | None  # (B, N+M, 2, head_dim) that turn queries and keys
    pairs: tuple[int, ...]  # which input pair each entry is
    valid: np.ndarray  # (B, N+M) bool; what is not valid is padding
    totals: np.ndarray  # (B, 2) points of image 0 and of image 1 before any was dropped
    mask: Tensor | None = None  # the same where the network runs; None: all are, as where B is 1
    predicted: Tensor | None = None  # (B, N+M, 2) positions of partners as the last layer predicts them

    @property
    def masks(self) -> tuple[Tensor | None, Tensor | None]:
        """`mask` of either image."""
        return (None, None) if self.mask is None else (self.mask[:, : self.n], self.mask[:, self.n :])

    @property
    def points(self) -> Points:
        """The points of both images."""
        return Points(self.x, self.positions, self.predicted)

    def counts(self) -> list[list[int]]:
        """Valid points of image 0 and of image 1, for each pair."""
        return np.stack([part.sum(1) for part in np.split(self.valid, [self.n], axis=1)], axis=1).tolist()

    def take(self, entries: Sequence[int], keep: np.ndarray) -> Tokens:
        """Some entries of the batch, and of their points those that `keep` (B, N+M) marks."""
        entries = list(entries)
        keep = keep[entries]
        if len(keep) == len(self.x) and bool(keep.all()):
            return self
        sides = np.split(keep, [self.n], axis=1)
        most = [int(side.sum(1).max()) for side in sides]
        # Marked points first, in their order.
        orders = [np.argsort(~s, axis=1, kind="stable")[:, :m] for s, m in zip(sides, most, strict=True)]
        order = np.concatenate([orders[0], orders[1] + self.n], axis=1)
        valid, index = (np.take_along_axis(each, order, 1) for each in (keep, self.index[entries]))
        places = np.stack(np.broadcast_arrays(np.array(entries)[:, None], order))
        (rows, order), columns = torch.from_numpy(places).to(self.x.device), {}
        for name in ("x", "positions", "rotations", "predicted"):
            column = getattr(self, name)
            columns[name] = None if column is None else column[rows, order]
        columns["mask"] = None if valid.all() else torch.from_numpy(valid).to(self.x.device)
        columns |= dict(index=index, valid=valid, totals=self.totals[entries])
        return replace(self, n=most[0], pairs=tuple(self.pairs[e] for e in entries), **columns)


@dataclass(frozen=True, eq=False)
class Prediction:
    """The network's output for pairs that stop at the same layer."""

    tokens: Tokens  # whose points the rows and columns of the assignment are
    assignment: Assignment
    layers_run: int


@dataclass(frozen=True, eq=False)
class LayerState:
    """The pairs still running after one layer; everything but the tokens is computed once, when asked for."""

    network: MatchingNetwork
    policy: MatchingPolicy
    layer: int  # 0 is the first
    before: Tokens  # what the layer took
    tokens: Tokens  # what it gave, before any point is dropped

    @property
    def is_last(self) -> bool:
        """Whether this is the network's last layer, where every pair stops."""
        return self.layer == len(self.network.layers) - 1

    @cached_property
    def _probabilities(self) -> np.ndarray:
        """(1 or 2, B, N+M) of having a partner and, where there are heads for it, of knowing it.

        A GPU is waited for here, once a layer.
        """
        found = self.network.decision_logits(self.tokens.x, self.layer).sigmoid()
        return np.moveaxis(to_numpy(found), -1, 0)

    @property
    def match_probabilities(self) -> np.ndarray:
        """(B, N+M) probability that a point has a partner."""
        return self._probabilities[0]

    @property
    def confidences(self) -> np.ndarray | None:
        """(B, N+M) probability that the last layer would not change a point's partner; None without heads."""
        return self._probabilities[1] if self.layer < len(self.network.confidence) else None

    @property
    def confident(self) -> np.ndarray | None:
        """(B, N+M) bool: points whose confidence is above this layer's threshold; None without heads."""
        if self.confidences is None:
            return None
        return self.confidences > confidence_threshold(self.layer, len(self.network.layers))

    @cached_property
    def decision(self) -> Decision | None:
        """Which pairs stop here, and which points are dropped; None where nothing is to be decided."""
        if self.is_last or not (self.policy.early_exit or self.policy.pruning):
            return None
        predicted = self.network.config.match_probability
        tokens, known = self.tokens, (self.confident, self.match_probabilities)
        return decide(tokens.valid, *known, tokens.totals.sum(1), self.policy, predicted=predicted)

    @property
    def exiting(self) -> tuple[int, ...]:
        """Entries of the batch that stop here."""
        if self.decision is None:
            return tuple(range(len(self.tokens.pairs))) if self.is_last else ()
        return tuple(np.flatnonzero(self.decision.stops).tolist())

    @property
    def dropped(self) -> np.ndarray:
        """(B, N+M) bool: points that neither go on nor take part in the assignment of a pair that stops."""
        if self.decision is None:
            return ~self.tokens.valid
        stops, assigned, kept = self.decision
        return ~np.where(stops[:, None], assigned, kept)

    @cached_property
    def remaining(self) -> Tokens | None:
        """What the next layer takes; None where no pair goes on."""
        if self.decision is None:
            return None if self.is_last else self.tokens
        staying = np.flatnonzero(~self.decision.stops).tolist()
        tokens = replace(self.tokens, predicted=None)  # the next layer predicts again
        return tokens.take(staying, self.decision.kept) if staying else None

    def assign(self, entries: Sequence[int] | None = None) -> Prediction:
        """Assignments of some pairs, of those that stop here by default, as if the network ended here."""
        entries, tokens = self.exiting if entries is None else entries, self.tokens
        if self.decision is not None or len(entries) < len(tokens.pairs):
            keep = tokens.valid if self.decision is None else self.decision.assigned
            tokens = replace(tokens, rotations=None).take(entries, keep)
        return self.network.assign(tokens, self.layer)


class MatchingNetwork(nn.Module):
    """Features of two images, image 1 turned to fit image 0, → a soft assignment of their points."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        dim, depth = config.context.dim, config.context.depth
        check_config(config)
        self.config = config
        self.backbone = None if config.backbone is None else Backbone(config.backbone)
        self.project = nn.Linear(config.descriptor_dim, dim) if config.project else nn.Identity()
        self.position = build_position(config.position, config.context)
        self.guidance = CorrespondenceGuidance(dim, depth, config.position.inputs) if config.guided else None
        self.layers = nn.ModuleList(Layer(config.context) for _ in range(depth))
        number = depth if config.assignment.every_layer else 1
        self.heads = nn.ModuleList(AssignmentHead(config.assignment, dim) for _ in range(number))
        self.confidence = nn.ModuleList(nn.Linear(dim, 1) for _ in range(number - 1))
        inner = number - 1 if config.match_probability else 0
        self.match_probability = nn.ModuleList(nn.Linear(dim, 1) for _ in range(inner))
        self.decisions = []  # `decision` after each layer, in inference
        self.consensus = Consensus() if config.assignment.consensus else None
        self.fine = None if config.refinement is None else Refinement(config.refinement, dim)
        # Untrained, scores are inner products of standardised descriptors, sharp enough, at every layer.
        if config.project:
            nn.init.orthogonal_(self.project.weight, gain=dim**0.5)
            nn.init.zeros_(self.project.bias)
        for head in self.heads if config.assignment.project else ():
            nn.init.orthogonal_(head.projection.weight, gain=(15 / dim**0.5) ** 0.5)
            nn.init.zeros_(head.projection.bias)
            if config.assignment.dustbin == "point":
                nn.init.zeros_(head.matchability.weight)
                nn.init.zeros_(head.matchability.bias)

    def with_policy(self, policy: MatchingPolicy) -> MatchingNetwork:
        """The same network, sharing parameters, under another policy; `UsageError` if it lacks the heads."""
        changed = copy.copy(self)
        changed.config = replace(self.config, policy=policy)
        check_config(changed.config)
        return changed

    def first_layers(self, layers: int, max_iterations: int | None = None) -> MatchingNetwork:
        """The first layers as a network of its own, sharing parameters, with a limit of Sinkhorn iterations;
        `UsageError`: inner layers have no heads to assign by."""
        config, depth = self.config, min(layers, len(self.layers))
        if depth < len(self.layers) and not config.assignment.every_layer:
            raise UsageError("only the last layer of this network gives an assignment")
        assignment = config.assignment
        if max_iterations is not None:
            assignment = replace(assignment, max_iterations=min(max_iterations, assignment.max_iterations))
        changed = copy.copy(self)
        changed._modules = dict(self._modules)
        changed.config = replace(config, context=replace(config.context, depth=depth), assignment=assignment)
        changed.layers, changed.heads = self.layers[:depth], self.heads[:depth]
        changed.confidence = self.confidence[: depth - 1]
        changed.match_probability = self.match_probability[: depth - 1]
        return changed

    @torch.no_grad()
    def standardise(self, descriptors: Tensor) -> None:
        """Shift and scale the projection: `descriptors` (T, D) give tokens of mean 0, variance 1."""
        if not self.config.project:
            return
        mean = descriptors.mean(0)
        self.project.weight /= ((descriptors - mean) @ self.project.weight.t()).std()
        self.project.bias.copy_(-self.project.weight @ mean)

    def aligned(self, features0: Features, features1: Features) -> Features:
        """`features1` of B pairs turned to fit `features0`, where descriptors are steerable; `UsageError`:
        features that this network does not take, or batches of two sizes."""
        check_features(self.config, features0, features1)
        return aligned(features0, features1, self.config.kind)

    def tokens(self, features0: Features, features1: Features, *, complete: bool = False) -> Tokens:
        """The valid points of B pairs, given as two batches that are checked and aligned.

        `complete`: all points are valid, so that nothing has to be read from a GPU.
        """
        device = next(self.parameters()).device
        sides = [features.to(device) for features in (features0, features1)]
        config, n = self.config.position, len(sides[0])
        x = self.projected(torch.cat([features.descriptors for features in sides], dim=1))
        codes = [encoded(config, features) for features in sides]
        codes = None if codes[0] is None else torch.cat(codes, dim=1)
        # Most encodings take the normalised positions, and what guidance takes with them: found once.
        usual = config.kind in ("rotary", "mlp") and config.extent == 0.5
        first = usual and config.inputs[0] == "xy"
        positions = codes[..., :2] if first else torch.cat([normalise_positions(f) for f in sides], dim=1)
        if self.guidance is not None:
            inputs = codes if usual else torch.cat([position_inputs(f, config.inputs) for f in sides], dim=1)
            x = self.guidance.begin(x, inputs)
        rotations = None if self.position is None else self.position(codes)
        if rotations is not None and config.kind != "rotary":
            x, rotations = x + rotations, None
        index, pairs = np.concatenate([np.arange(len(f)) for f in sides]), tuple(range(len(x)))
        valid = np.ones((len(x), len(index)), dtype=bool)
        if not complete:
            valid = to_numpy(torch.cat([features.mask for features in sides], dim=1))
        totals = np.stack([valid[:, :n].sum(1), valid[:, n:].sum(1)], axis=1)
        index = np.broadcast_to(index, valid.shape)
        return Tokens(x, n, index, positions, rotations, pairs, valid, totals).take(pairs, valid)

    def projected(self, descriptors: Tensor) -> Tensor:
        """Descriptors (…, D) → tokens (…, dim), float32."""
        return converted(mapped(self.project, descriptors), torch.float32)

    def batches(self, features0: Features, features1: Features) -> Iterator[Tokens]:
        """The tokens of pairs that run together: one on a CPU, where more gain nothing, else many, padded."""
        pairs, device = len(features0.mask), next(self.parameters()).device
        step = max(1, MOST_SCORES // ((len(features0) + 1) * (len(features1) + 1)))
        step = 1 if device.type == "cpu" else step
        for start in range(0, pairs, step):
            part = tuple(range(start, min(start + step, pairs)))
            sides = (features0, features1)
            if len(part) < pairs:
                sides = [features.entries(list(part)) for features in sides]
            yield replace(self.tokens(*sides), pairs=part)

    def run(self, tokens: Tokens, policy: MatchingPolicy | None = None) -> Iterator[LayerState]:
        """The network, layer by layer: matching, training and explanation all consume this one loop.

        A pair that stops leaves the run and so do points that are dropped, as each yielded state decides by
        `policy`, the network's own when absent; the run ends with the last pair.
        """
        policy = policy or self.config.policy
        for depth in range(len(self.layers)):
            state = LayerState(self, policy, depth, tokens, self.advance(tokens, depth))
            yield state
            tokens = state.remaining
            if tokens is None:
                return

    def advance(self, tokens: Tokens, depth: int) -> Tokens:
        """Tokens after layer `depth`, with the predicted correspondences of guided ones."""
        x = self.layers[depth](tokens.x, tokens.n, tokens.rotations, tokens.mask)
        if self.guidance is None:
            return replace(tokens, x=x)
        x, predicted = self.guidance(x, depth)
        return replace(tokens, x=x, predicted=predicted)

    def decision_logits(self, x: Tensor, depth: int) -> Tensor:
        """(…, 1 or 2) float32 log odds that a point has a partner, by heads for that or by the dustbin's
        (LightGlue, eq. 12), and, before the last layer, of its confidence that the partner stays the same."""
        return F.linear(x, *(self.decisions[depth] if depth < len(self.decisions) else self.decision(depth)))

    def decision(self, depth: int) -> tuple[Tensor, Tensor]:
        """Weight (1 or 2, dim) and bias (1 or 2,) of `decision_logits`."""
        own = self.match_probability if self.config.match_probability else None
        heads = [self.heads[depth].matchability if own is None else own[depth]]
        heads += self.confidence[depth : depth + 1]
        return tuple(torch.cat([getattr(head, name) for head in heads]) for name in ("weight", "bias"))

    def scores(self, points: Points, n: int, depth: int) -> Tensor:
        """Scores with dustbins (B, N+1, M+1), float32, of points after layer `depth`, N of image 0."""
        more = None if self.guidance is None else self.guidance.factors(points, depth)
        return self.heads[depth if self.config.assignment.every_layer else 0](points.x, n, more)

    def assign(self, tokens: Tokens, depth: int) -> Prediction:
        """Assignments of all pairs of `tokens`, which are those after layer `depth`."""
        scores = self.scores(tokens.points, tokens.n, depth)
        corrected, start = self._with_consensus(scores, tokens)
        found = assign(corrected, self.config.assignment, *tokens.masks, start=start)
        return Prediction(tokens, found, depth + 1)

    def _with_consensus(self, scores: Tensor, tokens: Tokens) -> tuple[Tensor, Potentials | None]:
        """Scores after the rounds of consensus, and potentials to begin with.

        Each assignment goes on from the one before, so a few iterations between the rounds are enough. With
        early exit a pair's rounds end when the last one has changed little.
        """
        rounds = self.config.assignment.consensus if 0 < tokens.n < tokens.x.shape[1] else 0
        corrected, found, before, settled = scores, None, None, None
        for _ in range(rounds):
            found = sinkhorn(corrected, *tokens.masks, max_iterations=ROUGH_ITERATIONS, start=found)
            matches = soft_matches(found.log_plan(corrected)[:, :-1, :-1])
            if before is not None and self.config.policy.early_exit:
                alike = agreement(before, matches) > SETTLED
                settled = alike if settled is None else settled | alike
                if bool(settled.all()):
                    break
            updated = self.consensus(scores, tokens.positions, matches)
            if settled is not None and len(scores) > 1:
                updated = torch.where(settled[:, None, None], corrected, updated)
            corrected, before = updated, matches
        return corrected, found

    def forward(self, features0: Features, features1: Features, *, align: bool = True) -> list[Prediction]:
        """Assignments of B pairs (both arguments batched), with early exit and pruning as configured.

        Pairs that run together and stop at the same layer are one `Prediction`; every pair is in one. Without
        `align` the features have been checked and image 1 turned before.
        """
        if align:
            features1 = self.aligned(features0, features1)
        states = (state for tokens in self.batches(features0, features1) for state in self.run(tokens))
        return [state.assign() for state in states if state.exiting]


# The network behind the `Matcher` protocol.


def resolve_precision(precision: Precision, device: torch.device) -> str:
    """What "auto" means on this device: bfloat16 where it is fast, float16 on GPUs without, else float32."""
    if precision in DTYPES:
        return precision
    if precision != "auto":
        raise UsageError(f"precision {precision!r} is not one of auto, {', '.join(DTYPES)}")
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if device.type == "cpu" and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()):
        return "bfloat16"
    return "float32"


def inference_network(network: MatchingNetwork, device: torch.device, dtype: torch.dtype) -> MatchingNetwork:
    """A frozen copy of a float32 network, its maps folded and in the precision in which a device is fast.

    It shares nothing with `network`: training that one further changes neither. `dtype` is that of
    projections, attention and convolutions; phases, similarities and dustbins need more digits than half
    precision has and stay in float32.
    """
    frozen = copy.deepcopy(network).eval().requires_grad_(False).to(device, torch.float32)
    frozen.layers = nn.ModuleList(folded(layer, dtype) for layer in frozen.layers)
    if frozen.backbone is not None:
        frozen.backbone = folded_backbone(frozen.backbone, dtype)
    frozen.project.to(dtype)
    if frozen.config.match_probability or frozen.config.assignment.dustbin == "point":
        frozen.decisions = [frozen.decision(depth) for depth in range(len(frozen.confidence))]
    return frozen


class AttentionMatcher:
    """A network in inference: features of B pairs → mutual matches above the threshold, best first."""

    def __init__(
        self, model: MatchingNetwork, *, device: torch.device | str = "cpu", precision: Precision = "auto"
    ) -> None:
        """Copy a trained network to where it runs; `precision` as `resolve_precision` takes it."""
        self.device = torch.device(device)
        self.precision = resolve_precision(precision, self.device)
        self.model = inference_network(model, self.device, DTYPES[self.precision])

    @property
    def calibration(self) -> CalibrationConfig | None:
        """Of the match probabilities."""
        return self.model.config.policy.calibration

    def first_layers(self, layers: int, max_iterations: int | None = None) -> AttentionMatcher:
        """The same with a network cut by `MatchingNetwork.first_layers`; parameters are shared."""
        changed = copy.copy(self)
        changed.model = self.model.first_layers(layers, max_iterations)
        return changed

    def with_policy(self, policy: MatchingPolicy) -> AttentionMatcher:
        """The same with a network under another policy, by `MatchingNetwork.with_policy`."""
        changed = copy.copy(self)
        changed.model = self.model.with_policy(policy)
        return changed

    @torch.inference_mode()
    def __call__(self, features0: Features, features1: Features) -> list[Matches]:
        """Matches of every pair of the batch (features stacked along a leading axis B); `UsageError`:
        features of another front end or descriptor size."""
        return self._match(features0, features1)[1]

    @torch.inference_mode()
    def matched_view(self, features0: Features, features1: Features) -> Features:
        """`features1` of B pairs as they are matched, rotated by quarter turns where descriptors can be."""
        return self._match(features0, features1)[0]

    def _match(self, features0: Features, features1: Features) -> tuple[Features, list[Matches]]:
        """Image 1 of every pair in the view in which it is matched, and the matches."""
        features0, features1 = (features.to(self.device) for features in (features0, features1))
        features1 = self.model.aligned(features0, features1)
        found, counts = self._matches(features0, features1)
        if self.model.config.kind != STEERABLE_KIND:
            return features1, found
        enough = [self.model.config.policy.other_turns_below * min(pair) for pair in counts]

        def again(few: Sequence[int], turn: int, strongest: int | None) -> list[Matches]:
            some = [features.entries(few, strongest) for features in (features0, features1)]
            return self._matches(some[0], turned_by(some[1], turn))[0]

        turns = try_other_turns(found, enough, [max(pair) for pair in counts], again)
        if any(turns):
            features1 = turned_by(features1, torch.tensor(turns, device=self.device))
        return features1, found

    def _matches(self, features0: Features, features1: Features) -> tuple[list[Matches], list[list[int]]]:
        """The matches of every pair, and the points of its images."""
        found, counts = [None] * len(features0.mask), [None] * len(features0.mask)
        for prediction in self.model(features0, features1, align=False):
            own = zip(self.read(prediction, features0, features1), prediction.tokens.totals, strict=True)
            for pair, (matches, points) in zip(prediction.tokens.pairs, own, strict=True):
                found[pair], counts[pair] = matches, points.tolist()
        return found, counts

    def read(self, prediction: Prediction, features0: Features, features1: Features) -> list[Matches]:
        """Mutual matches, refined if the network does so, of the pairs of a prediction of these batches."""
        tokens, policy, n = prediction.tokens, self.model.config.policy, prediction.tokens.n
        sides, best = (features0, features1), prediction.assignment.mutual_best.of_rows()
        limits = policy.match_threshold, policy.threshold_doubles_at
        keypoints = [to_numpy(features.keypoints) for features in sides]
        index, kept, found = tokens.index, tokens.counts(), []
        for entry, pair in enumerate(tokens.pairs):
            local, scores = credible_matches(*(values[entry] for values in best), *limits)
            indices = np.stack([index[entry][local[:, 0]], index[entry][n + local[:, 1]]], axis=1)
            if border := self.model.config.assignment.border:
                inner = [off_border(f, border)[pair].cpu().numpy() for f in sides]
                inside = inner[0][indices[:, 0]] & inner[1][indices[:, 1]]
                local, scores, indices = local[inside], scores[inside], indices[inside]
            points0, points1 = (keypoints[k][pair][indices[:, k]] for k in (0, 1))
            if self.model.fine is not None:  # LoFTR's fine stage moves the points of image 1
                rows, columns = torch.from_numpy(local).to(self.device).T
                states = tokens.x[entry, rows], tokens.x[entry, n + columns]
                chosen = torch.from_numpy(indices).to(self.device).T
                cells = tuple(f.cells[pair][i] for f, i in zip(sides, chosen, strict=True))
                offsets = self.model.fine(states, tuple(f.maps[pair] for f in sides), cells)
                offsets = features1.affine_frames[pair][chosen[1]] @ offsets.unsqueeze(-1)
                points1 = points1 + offsets.squeeze(-1).cpu().numpy()
            scores = calibrated(scores, tokens.totals[entry], policy.calibration)
            found.append(Matches(indices, points0, points1, scores, prediction.layers_run, *kept[entry]))
        return found


def off_border(features: Features, border: int) -> Tensor:
    """(…, N) bool: points that lie at least `border` cells within the grid of their front end."""
    far = features.grid.unsqueeze(-2) - border
    return ((features.cells >= border) & (features.cells < far)).all(dim=-1)
