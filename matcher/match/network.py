"""What a network's configuration must satisfy."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matcher.config import CalibrationConfig, MatchingPolicy, NetworkConfig, Precision
from matcher.errors import UsageError
from matcher.kernels.calls import linear
from matcher.match.adaptivity import LayerState, Refinement
from matcher.match.blocks import Backbone, Layout, fuse_backbone, interleave
from matcher.match.calibration import calibrated
from matcher.match.consensus import Consensus, assign_all, assign_candidates
from matcher.match.context import CrossBlock, SelfBlock, Tokens, build_layer, fuse_layer, groups, split_sides
from matcher.match.nearest import check_features, credible_matches
from matcher.match.position import CorrespondenceGuidance, Side, build_position, normalise_positions
from matcher.match.sinkhorn import PairPrediction, Prediction, build_head
from matcher.match.steering import STEERABLE, TURNS, aligned, try_other_turns, turned_by
from matcher.types import Features, Matches

if TYPE_CHECKING:
    from matcher.match.gpu import PairBest


# --- validate: What a network's configuration must satisfy.

Rules = list[tuple[bool, str]]  # what must hold, and what to say where it does not


def check_config(config: NetworkConfig) -> None:
    """Refuse combinations that make no network.

    Raises:
        UsageError: names the setting and what it must be.
    """
    for kept, rule in (*_inputs(config), *_shapes(config), *_assignment(config), *_policy(config)):
        if not kept:
            raise UsageError(f"network configuration: {rule}")


def _inputs(config: NetworkConfig) -> Rules:
    encoded = config.position.kind in ("rotary", "mlp")
    return [
        (
            bool(config.position.inputs) or not encoded,
            f"position.inputs is empty, but position.kind {config.position.kind!r} needs 'xy' at least",
        ),
        (
            config.position.inputs[:1] == ("xy",) or not config.guided,
            "guided tokens need position.inputs that begin with 'xy'",
        ),
        (0 < config.position.extent < inf, "position.extent must be a number above 0"),
    ]


def _shapes(config: NetworkConfig) -> Rules:
    context, backbone, refinement = config.context, config.backbone, config.refinement
    return [
        (context.depth >= 1, "context.depth must be at least 1"),
        (
            context.heads >= 1 and context.dim % (2 * context.heads) == 0,
            f"context.dim {context.dim} must be a multiple of twice context.heads {context.heads}",
        ),
        (
            context.scale_logits_above is None or context.attention == "softmax",
            "context.scale_logits_above goes with context.attention 'softmax'",
        ),
        (
            context.scale_logits_above is None or context.scale_logits_above >= 2,
            "context.scale_logits_above must be at least 2",
        ),
        (
            config.project or config.descriptor_dim == context.dim,
            "without project, descriptor_dim must be context.dim",
        ),
        (
            backbone is None or backbone.widths[-1] == config.descriptor_dim,
            "descriptor_dim must be the last of backbone.widths",
        ),
        (
            refinement is None or backbone is None or refinement.context.dim == backbone.widths[0],
            "refinement.context.dim must be the first of backbone.widths",
        ),
    ]


def _assignment(config: NetworkConfig) -> Rules:
    assignment = config.assignment
    return [
        (
            not (assignment.consensus and assignment.kind != "sinkhorn"),
            "assignment.consensus goes with assignment.kind 'sinkhorn'",
        ),
        (
            assignment.dustbin != ("learned" if assignment.kind == "dual_softmax" else "none"),
            f"{assignment.kind} does not go with assignment.dustbin {assignment.dustbin!r}",
        ),
        (
            assignment.every_layer or not config.match_probability,
            "match_probability heads need assignment.every_layer",
        ),
    ]


def _policy(config: NetworkConfig) -> Rules:
    assignment, policy = config.assignment, config.policy
    return [
        (
            assignment.every_layer or not (policy.early_exit or policy.pruning),
            "early exit and pruning need assignment.every_layer; switch both off (early_exit, pruning)",
        ),
        (
            assignment.dustbin == "point" or not policy.pruning,
            "pruning needs assignment.dustbin 'point'; switch it off (pruning)",
        ),
        (0 <= policy.match_threshold <= 1, "policy.match_threshold must be from 0 to 1"),
    ]


# --- model: The attentional matcher: it composes the blocks that a configuration names.


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


# --- inference: The network behind the `Matcher` protocol: precision, device, and matches read off the
# assignment.

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_precision(precision: Precision, device: torch.device) -> str:
    """What "auto" means on this device: bfloat16 where it is fast, float16 on GPUs without, else float32.

    Raises:
        UsageError: a precision that is none of these.
    """
    if precision in DTYPES:
        return precision
    if precision != "auto":
        raise UsageError(f"precision {precision!r} is not one of auto, {', '.join(DTYPES)}")
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if device.type == "cpu" and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()):
        return "bfloat16"
    return "float32"


def inference_network(
    network: MatchingNetwork, device: torch.device | str = "cpu", precision: Precision = "auto"
) -> MatchingNetwork:
    """A frozen copy of a network, fused and in the precision in which a device is fast.

    It shares nothing with `network`: training that one further changes neither, and the copy has no
    gradients.

    Args:
        network: in float32, on any device.
        device: where the copy runs.
        precision: of projections, attention and convolutions. Phases, similarities and dustbins need more
            digits than half precision has and stay in float32.

    Raises:
        UsageError: an unknown precision.
    """
    device = torch.device(device)
    dtype = DTYPES[resolve_precision(precision, device)]
    frozen = copy.deepcopy(network).eval().requires_grad_(False).to(device, torch.float32)
    frozen.layers = nn.ModuleList(fuse_layer(layer, dtype) for layer in frozen.layers)
    if frozen.backbone is not None:  # convolutions are faster where the channels lie side by side
        frozen.backbone = fuse_backbone(frozen.backbone, dtype)
    frozen.project.to(dtype)
    for layer in frozen.layers:
        for block in (layer.self_block, layer.cross_block):
            if isinstance(block, (SelfBlock, CrossBlock)):
                block.to(dtype)
    return frozen


class AttentionMatcher:
    """A network in inference: features of B pairs → mutual matches above the threshold, best first."""

    def __init__(
        self,
        model: MatchingNetwork,
        *,
        device: torch.device | str = "cpu",
        precision: Precision = "auto",
        cuda_graphs: bool = False,
    ) -> None:
        """Copy the network to where it runs.

        Args:
            model: trained.
            device: where it runs.
            precision: as `inference_network` takes it.
            cuda_graphs: on a GPU, capture the work for each size once and replay it; the memory for the last
                few sizes is kept.

        Raises:
            UsageError: an unknown precision.
        """
        self.device = torch.device(device)
        self.precision = resolve_precision(precision, self.device)
        self.cuda_graphs = cuda_graphs
        self._use(inference_network(model, self.device, self.precision))

    def _use(self, model: MatchingNetwork) -> None:
        self.model, self._padded = model, None
        if self.device.type == "cuda":
            from matcher.match.gpu import PaddedNetwork, suits

            if suits(model.config, self.device):
                self._padded = PaddedNetwork(model, self.device, self.cuda_graphs)

    @property
    def calibration(self) -> CalibrationConfig | None:
        """Of the match probabilities."""
        return self.model.config.policy.calibration

    def adjusted(
        self,
        layers: int | None = None,
        *,
        max_iterations: int | None = None,
        policy: MatchingPolicy | None = None,
    ) -> AttentionMatcher:
        """The same network cut to its first layers, or under another policy; parameters are shared.

        Args:
            layers: at most all of them, which is the default.
            max_iterations: of Sinkhorn, at most.
            policy: of thresholds, exit and pruning.

        Raises:
            UsageError: as `MatchingNetwork.first_layers` and `.with_policy`.
        """
        changed = copy.copy(self)
        depth = len(self.model.layers) if layers is None else layers
        model = self.model.first_layers(depth, max_iterations)
        changed._use(model if policy is None else model.with_policy(policy))
        return changed

    @torch.inference_mode()
    def __call__(self, features0: Features, features1: Features) -> list[Matches]:
        """Matches of every pair of the batch (features stacked along a leading axis B).

        Raises:
            UsageError: features of another front end or descriptor size.
        """
        return self._best_view(features0, features1)[1]

    @torch.inference_mode()
    def matched_view(self, features0: Features, features1: Features) -> Features:
        """`features1` of B pairs as they are matched, rotated by quarter turns where descriptors can be.

        Arguments and errors are those of a call.
        """
        return self._best_view(features0, features1)[0].to(self.device)

    def _best_view(self, features0: Features, features1: Features) -> tuple[Features, list[Matches]]:
        """Image 1 of every pair in the view in which it is matched, and the matches."""
        if self._padded is not None and 0 not in (len(features0), len(features1)):
            return self._best_view_on_gpu(features0, features1)
        features0, features1 = (f.to(self.device) for f in (features0, features1))
        if self.model.config.kind != STEERABLE or len(features0.mask) != len(features1.mask):
            return features1, self._matches(features0, features1)
        for features in (features0, features1):  # before they are compared
            self.model.check(features)
        features1 = aligned(features0, features1, STEERABLE)
        found = self._matches(features0, features1)
        counts = list(zip(*(f.mask.sum(1).tolist() for f in (features0, features1)), strict=True))
        enough = [self.model.config.policy.other_turns_below * min(pair) for pair in counts]

        def again(few: Sequence[int], turn: int, strongest: int | None) -> list[Matches]:
            some = [features.entries(few).first(strongest) for features in (features0, features1)]
            return self._matches(some[0], turned_by(some[1], turn))

        turns = try_other_turns(found, enough, [max(pair) for pair in counts], again)
        turns = torch.tensor(turns, device=self.device)
        return turned_by(features1, turns) if bool(turns.any()) else features1, found

    def _best_view_on_gpu(self, features0: Features, features1: Features) -> tuple[Features, list[Matches]]:
        """As `_best_view`; for pairs with few matches only the device is waited for again at every turn."""
        for features in (features0, features1):
            self.model.check(features, norms=features.mask.device.type == "cpu")
        check_paired(features0, features1)
        pairs = self._padded(features0, features1)
        for features in (features0, features1) if any(pair.unlike for pair in pairs) else ():
            self.model.check(features)
        found, turns = [self._read_off(pair) for pair in pairs], torch.tensor([pair.turns for pair in pairs])
        share = self.model.config.policy.other_turns_below if self.model.config.kind == STEERABLE else 0.0
        enough = [share * min(pair.points0, pair.points1) for pair in pairs]

        def again(few: Sequence[int], turn: int, strongest: int | None) -> list[Matches]:
            some = (features.entries(few).first(strongest) for features in (features0, features1))
            return [self._read_off(pair) for pair in self._padded(*some, (turns[few] + turn) % TURNS)]

        most = [max(pair.points0, pair.points1) for pair in pairs]
        turns = (turns + torch.tensor(try_other_turns(found, enough, most, again))) % TURNS
        return turned_by(features1, turns.to(features1.mask.device)) if turns.any() else features1, found

    def _read_off(self, pair: PairBest) -> Matches:
        policy = self.model.config.policy
        indices, scores = credible_matches(pair.best, policy.match_threshold, policy.threshold_doubles_at)
        return Matches(
            indices=indices.numpy(),
            points0=pair.keypoints0[indices[:, 0]].numpy(),
            points1=pair.keypoints1[indices[:, 1]].numpy(),
            scores=calibrated(scores.numpy(), (pair.points0, pair.points1), policy.calibration),
            layers_run=pair.layers_run,
            kept0=pair.kept0,
            kept1=pair.kept1,
        )

    def _matches(self, features0: Features, features1: Features) -> list[Matches]:
        prediction = self.model(features0, features1, align=False)
        return [self.read(pair, b, features0, features1) for b, pair in enumerate(prediction.pairs)]

    def read(self, pair: PairPrediction, entry: int, features0: Features, features1: Features) -> Matches:
        """Mutual matches of one pair in the indices of its input points, refined if the network does so."""
        config, sides = self.model.config, (features0, features1)
        local, scores = credible_matches(
            pair.assignment.mutual_best, config.policy.match_threshold, config.policy.threshold_doubles_at
        )
        index = torch.stack([pair.index0[local[:, 0]], pair.index1[local[:, 1]]], dim=1)
        if config.assignment.border:
            inner = [off_border(f, config.assignment.border)[entry][index[:, i]] for i, f in enumerate(sides)]
            local, scores, index = (x[inner[0] & inner[1]] for x in (local, scores, index))
        points0, points1 = (f.keypoints[entry][index[:, i]] for i, f in enumerate(sides))
        if self.model.fine is not None:
            cells = tuple(f.cells[entry][index[:, i]] for i, f in enumerate(sides))
            states = (pair.states0[local[:, 0]], pair.states1[local[:, 1]])
            offsets = self.model.fine(states, (features0.maps[entry], features1.maps[entry]), cells)
            frames = features1.affine_frames[entry][index[:, 1]]
            points1 = points1 + (frames @ offsets.unsqueeze(-1)).squeeze(-1)
        counts = [int(f.mask[entry].sum()) for f in sides]
        return Matches(
            indices=index.cpu().numpy(),
            points0=points0.cpu().numpy(),
            points1=points1.cpu().numpy(),
            scores=calibrated(scores.cpu().numpy(), counts, config.policy.calibration),
            layers_run=pair.layers_run,
            kept0=len(pair.index0),
            kept1=len(pair.index1),
        )


def off_border(features: Features, border: int) -> Tensor:
    """(…, N) bool: points that lie at least `border` cells within the grid of their front end."""
    far = features.grid.unsqueeze(-2) - border
    return ((features.cells >= border) & (features.cells < far)).all(dim=-1)
