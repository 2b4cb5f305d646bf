"""Early exit and pruning as masks, by the rules of `matcher.match.adaptivity`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor, nn

from matcher.config import MatchingPolicy, NetworkConfig
from matcher.match.adaptivity import keep_mask
from matcher.match.blocks import Layout, exponentials, raised
from matcher.match.consensus import ROUGH_ITERATIONS, SETTLED, agreements, mutual_soft_matches
from matcher.match.context import Tokens
from matcher.match.nearest import MutualBest, mutual_best, unlike_norms
from matcher.match.position import Side, normalise_positions
from matcher.match.sinkhorn import dual_softmax
from matcher.match.steering import (
    CERTAIN,
    COMPARED,
    DECISIVE,
    FEW,
    MIN_DISTANCE,
    MIN_GAIN,
    NEGLIGIBLE,
    STEERABLE,
    TURNS,
    confidence_threshold,
    turned_by,
)
from matcher.types import Features

# --- decisions: Early exit and pruning as masks, by the rules of `matcher.match.adaptivity`.


class LayerDecision(NamedTuple):
    """What happens to pairs and points after a layer."""

    stops: Tensor  # (B,) bool
    live: Tensor  # (B, P) bool, the points that go on, or are assigned where the pair stops


def decide_masked(
    live: Tensor,
    confident: Tensor,
    probability: Tensor,
    totals: Tensor,
    policy: MatchingPolicy,
    *,
    predicted: bool,
) -> LayerDecision:
    """Which pairs stop after a layer, and which points stay.

    Args:
        live: (B, P) bool, points of both images that were not dropped.
        confident: (B, P) bool.
        probability: (B, P) of a partner.
        totals: (B,) points of each pair before any pruning.
        policy: with exit and pruning.
        predicted: whether heads of their own predict `probability`.
    """
    keep = keep_mask(probability, confident, policy)
    stops = torch.zeros_like(live[:, 0])
    if policy.early_exit and predicted:
        expected = (probability.double() * live).sum(1)
        open_ = (torch.where(confident, 0.0, probability).double() * live).sum(1)
        stops = open_ < (1 - policy.exit_share) * expected + NEGLIGIBLE
    elif policy.early_exit:
        stops = (~confident & live).sum(1) < (1 - policy.exit_share) * totals.double()
    spared = (keep & live).sum(1) > (1 - policy.min_pruned_share) * live.sum(1).double()
    kept = keep | spared[:, None]
    assigned = keep if predicted else torch.ones_like(keep)
    return LayerDecision(stops, live & torch.where(stops[:, None], assigned, kept))


# --- heads: Scores of pairs that stopped at different layers: each by the heads of its own layer.


class LayerHeads:
    """The assignment heads of all layers, and their guidance, as tables where each pair finds its own."""

    def __init__(self, network: nn.Module) -> None:
        """Copy the parameters of a `MatchingNetwork` with a head for every layer."""
        heads, guidance = network.heads, network.guidance
        self.head, self.guidance = heads[0], guidance
        self.projection = _table_heads([head.projection for head in heads])
        self.matchability = _table_heads([getattr(head, "matchability", None) for head in heads])
        self.confidence = None if guidance is None else _table_heads(list(guidance.confidence))
        self.wave_weights = None if guidance is None else torch.stack(list(guidance.weight)).detach()

    def scores(self, side0: Side, side1: Side, layers: Tensor) -> Tensor:
        """(B, N+1, M+1) float32 with dustbins, as `MatchingNetwork.scores` of the last `layers` (B,)."""
        compared0, compared1 = (self._compared(side.x, layers) for side in (side0, side1))
        bins0, bins1 = (self._dustbins(side.x, layers) for side in (side0, side1))
        if self.guidance is not None:
            weights = [self._wave_weights(side.x, layers) for side in (side0, side1)]
            more0, more1 = self.guidance.weighted_factors(side0, side1, *weights)
            compared0 = torch.cat([compared0, more0], dim=-1)
            compared1 = torch.cat([compared1, more1], dim=-1)
        return bordered(compared0, compared1, bins0, bins1, self._corner(bins1))

    def _compared(self, x: Tensor, layers: Tensor) -> Tensor:
        projected = x if self.projection is None else _mapped(x, self.projection, layers)
        return projected.float() / self.head.divisor

    def _dustbins(self, x: Tensor, layers: Tensor) -> Tensor:
        if self.matchability is None:
            return self.head.dustbin.float().expand(x.shape[:2])
        return -_mapped(x, self.matchability, layers)[..., 0]

    def _corner(self, bins: Tensor) -> Tensor:
        return bins.new_zeros(()) if self.matchability is not None else self.head.dustbin.float()

    def _wave_weights(self, x: Tensor, layers: Tensor) -> Tensor:
        confidence = 2 * _mapped(x.float(), self.confidence, layers).sigmoid()
        return confidence * self.wave_weights[layers].repeat(1, 2)[:, None]


def _table_heads(layers: list[nn.Linear | None]) -> tuple[Tensor, Tensor] | None:
    """Weights (D, outputs, inputs) and biases (D, outputs) of one map in all layers."""
    if layers[0] is None:
        return None
    weights, biases = ([getattr(layer, part) for layer in layers] for part in ("weight", "bias"))
    return torch.stack(weights).detach(), torch.stack(biases).detach()


def _mapped(x: Tensor, table: tuple[Tensor, Tensor], layers: Tensor) -> Tensor:
    """x (B, N, inputs) by the map of each pair's layer (B,) → (B, N, outputs), float32."""
    weight, bias = (values[layers] for values in table)
    return torch.baddbmm(bias[:, None], x.to(weight.dtype), weight.mT).float()


def bordered(left: Tensor, right: Tensor, bins0: Tensor, bins1: Tensor, corner: Tensor) -> Tensor:
    """Products of (B, N, D), (B, M, D) with the scores of dustbins (B, N), (B, M) and of their corner ()."""
    scores = left.new_empty(len(left), left.shape[1] + 1, right.shape[1] + 1)
    scores[:, :-1, :-1] = left @ right.mT
    scores[:, :-1, -1], scores[:, -1, :-1], scores[:, -1, -1] = bins0, bins1, corner
    return scores


# --- transport: Optimal transport of a batch of pairs as `matcher.match.sinkhorn` solves it, without
# reading anything.

TOGETHER = 8  # iterations between absorptions
DEAD = -1e4  # score of points that take no part
_LIMIT = 1e30  # of a scale


class Transport:
    """The problems of a batch: scores (B, L, L) with the dustbins last, of images of equally long tables.

    Its tensors stay where they are while it iterates, so the iterations can be a CUDA graph.
    """

    def __init__(self, live0: Tensor, live1: Tensor) -> None:
        """Set the masses, 1 for each live point of (B, L-1), and for a dustbin those of the other image."""
        counts = live0.sum(1, keepdim=True), live1.sum(1, keepdim=True)
        self.mass0 = torch.cat([live0, counts[1]], dim=1).float()
        self.mass1 = torch.cat([live1, counts[0]], dim=1).float()

    def begin(
        self, scores: Tensor, start: tuple[Tensor, Tensor] | None, tolerance: float | None, most: int
    ) -> None:
        """Prepare at most `most` iterations and do the first.

        Args:
            scores: (B, L, L), `DEAD` where a point takes no part.
            start: potentials (B, L), (B, L) to begin with.
            tolerance: of the rows' error, at which a pair stops; None: never.
            most: iterations.
        """
        self.tolerance, self.most = tolerance, most
        first, second = self.mass0, self.mass1
        self.turned = None
        if tolerance is not None:
            self.turned = self._columns_first(scores)
            scores = torch.where(self.turned[:, None, None], scores.mT, scores)
            first, second = _exchanged(self.turned, first, second)
            start = start and _exchanged(self.turned, *start)
        self.scores, self.rows, self.columns = scores, first, second
        v = torch.zeros_like(second) if start is None else start[1]
        self.u = _where_live(first, first.log() - torch.logsumexp(scores + v[:, None], 2))
        self.v = _where_live(second, second.log() - torch.logsumexp(scores + self.u[:, :, None], 1))
        self.a, self.b = torch.ones_like(first), torch.ones_like(second)
        self.kernel = self._absorbed()
        self.iterations = torch.ones_like(scores[:, 0, 0], dtype=torch.int64)
        self.done = torch.zeros_like(self.iterations, dtype=torch.bool)

    def _columns_first(self, scores: Tensor) -> Tensor:
        """(B,) whether the columns come first, in a way that does not depend on which image is called 0."""
        bins0 = (scores[:, :-1, -1] * (self.mass0[:, :-1] > 0)).sum(1)
        bins1 = (scores[:, -1, :-1] * (self.mass1[:, :-1] > 0)).sum(1)
        last0, last1 = self.mass0[:, -1], self.mass1[:, -1]
        return torch.where(last0 == last1, bins1 < bins0, last0 < last1)

    def _absorbed(self) -> Tensor:
        return exponentials(self.scores + self.u[:, :, None] + self.v[:, None])

    def iterate(self, count: int = TOGETHER) -> None:
        """So many further iterations of the pairs that have not stopped."""
        for _ in range(count):
            a = _scale(self.rows, torch.bmm(self.kernel, self.b[:, :, None])[:, :, 0])
            b = _scale(self.columns, torch.bmm(a[:, None], self.kernel)[:, 0])
            if self.tolerance is not None:
                self.done |= self._error(self.a / a) <= self.tolerance
            going = ~self.done & (self.iterations < self.most)
            torch.where(going[:, None], a, self.a, out=self.a)
            torch.where(going[:, None], b, self.b, out=self.b)
            self.iterations += going

    def _error(self, ratios: Tensor) -> Tensor:
        """(B,) as `matcher.match.sinkhorn.row_error`, of the ratios (B, L) of live rows."""
        errors = torch.where(self.rows > 0, (ratios - 1).abs(), 0.0)
        points = (self.rows[:, :-1] > 0).sum(1).clamp_min(1)
        return torch.maximum(errors[:, :-1].norm(dim=1) / points.sqrt(), errors[:, -1])

    def absorb(self) -> None:
        """Move the scales into the potentials."""
        self._move_scales()
        self.kernel.copy_(self._absorbed())

    def _move_scales(self) -> None:
        self.u.add_(_where_live(self.rows, self.a.log()))
        self.v.add_(_where_live(self.columns, self.b.log()))
        self.a.fill_(1.0)
        self.b.fill_(1.0)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Potentials (B, L), (B, L) of the scores as they were given, 0 at points that take no part."""
        self._move_scales()
        found = (self.u, self.v)
        return found if self.turned is None else _exchanged(self.turned, *found)


def _where_live(mass: Tensor, values: Tensor) -> Tensor:
    return torch.where(mass > 0, values, 0.0)


def _scale(mass: Tensor, sums: Tensor) -> Tensor:
    """What makes the sums the masses, 0 where there is no mass, within what float32 holds."""
    return torch.where(mass > 0, (mass / sums).clamp(1 / _LIMIT, _LIMIT).nan_to_num(1.0), 0.0)


def _exchanged(which: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """(B, L), (B, L), one for the other in the pairs of `which` (B,)."""
    which = which[:, None]
    return torch.where(which, second, first), torch.where(which, first, second)


# --- turning: Quarter turns of steerable descriptors as `matcher.match.steering` chooses them; nothing is
# read.


def best_turns(both: Features) -> Tensor:
    """(B,) int64 clockwise quarter turns of image 1 that fit image 0 best; features of `paired` images."""
    descriptors = both.descriptors.float().unflatten(0, (-1, 2))
    valid = both.mask.unflatten(0, (-1, 2))
    few = _evidence_of_turns(descriptors, valid, FEW)
    sure = few[0] > CERTAIN * valid[:, 0, :FEW].sum(1)
    found = _chosen(few)
    if both.mask.shape[1] > FEW:
        few[0] += MIN_GAIN
        best, second = few.topk(2, dim=0).values
        many = _chosen(_evidence_of_turns(descriptors, valid, COMPARED))
        found = torch.where(best <= DECISIVE * second, many, found)
    return torch.where(sure, 0, found)


def _chosen(evidence: Tensor) -> Tensor:
    """The turn of most evidence (T, B), with a margin for none."""
    return torch.cat([evidence[:1] + MIN_GAIN, evidence[1:]]).argmax(0)


def _evidence_of_turns(descriptors: Tensor, valid: Tensor, strongest: int) -> Tensor:
    """(T, B) of descriptors (B, 2, N, D): see `matcher.match.steering.turn_evidence`."""
    own, others = descriptors[:, :, :strongest].unbind(1)
    valid0, valid1 = valid[:, :, :strongest].unbind(1)
    padding = ~(valid0[:, :, None] & valid1[:, None])
    groups = others.unflatten(-1, (TURNS, -1))
    turned = [groups.roll(turn, dims=2).flatten(-2) for turn in range(TURNS)]
    return torch.stack([_evidence(own @ each.mT, padding, valid0) for each in turned])


def _evidence(similarity: Tensor, padding: Tensor, valid: Tensor) -> Tensor:
    """(B,) from similarities (B, N, M); those of padding do not count."""
    similarity = similarity.masked_fill(padding, -1.0)
    best0, column = similarity.max(2)
    best1 = similarity.amax(1)
    second0 = similarity.masked_fill(similarity == best0[:, :, None], -1.0).amax(2)
    second1 = similarity.masked_fill(similarity == best1[:, None], -1.0).amax(1).gather(1, column)
    mutual = (best0 == best1.gather(1, column)) & valid
    ratio = (1 - best0) / (1 - torch.maximum(second0, second1)).clamp(min=MIN_DISTANCE)
    return ((1 - ratio).clamp(min=0) ** 2).mul(mutual).sum(1)


def turned(both: Features, turns: Tensor) -> Features:
    """Features of `paired` images after turns (B,) of image 1."""
    return turned_by(both, torch.stack([torch.zeros_like(turns), turns], dim=1).flatten())


# --- run: One batch of pairs through the network, in stages that read nothing.

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


# --- stages: Stages of a run on a device: queued one by one, or captured once as CUDA graphs and replayed.

Stage = Callable[[], None]


class Queued:
    """Stages that are queued as they come."""

    def run(self, name: str, stage: Stage) -> None:
        """Queue what the stage does."""
        stage()

    def end_run(self) -> None:
        """All stages of a run were queued."""


class Captured:
    """Stages that are graphs, which replay at the cost of one call each.

    Raises:
        RuntimeError: from a stage that waits for the device; such a stage cannot be captured.
    """

    def __init__(self, device: torch.device) -> None:
        """Capture on a stream of that device: torch's own is of the device that was captured on first."""
        self._stream = torch.cuda.Stream(device)
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._pool: object | None = None
        self._warm = False

    def run(self, name: str, stage: Stage) -> None:
        """Replay the stage of that name, which is captured in the second run; in the first it only runs."""
        if not self._warm:  # libraries choose their kernels when they are first called, which no graph may do
            stage()
            return
        if name not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            # Other threads may extract features meanwhile, which allocates memory.
            kept = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
            with torch.cuda.graph(graph, **kept):
                stage()
            self._graphs[name] = graph
            self._pool = graph.pool()
        self._graphs[name].replay()

    def end_run(self) -> None:
        """All stages of a run were queued."""
        self._warm = True


class Outlook:
    """Whether all pairs are done, as far as is known without waiting.

    Notes are copied to the host in the background. The program looks at those that have arrived, and queues
    meanwhile what may turn out to be unnecessary; the results do not depend on it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._notes: list[tuple[Tensor, torch.cuda.Event]] = []

    def note(self, done: Tensor) -> None:
        """Send home whether all of `done` (B,) bool is true by now."""
        arrived = torch.empty((), dtype=torch.bool, pin_memory=True)
        arrived.copy_(done.all(), non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._notes.append((arrived, event))

    def all_done(self) -> bool:
        """Whether a note that has arrived says so."""
        while self._notes and self._notes[0][1].query():
            arrived, _ = self._notes.pop(0)
            if arrived:
                return True
        return False


# --- tables: Batches of features as tables of one length, both images of a pair side by side.

_PER_PAIR = ("size", "scale", "exif_orientation", "view_orientation", "grid")


def padded_length(points: int) -> int:
    """The length of the table for images of so many points.

    Steps grow with the length: at most a fifth is padding from 512 points on, and lengths are few, because
    CUDA graphs are kept for each. All are multiples of what attention kernels are fast at.
    """
    step = 64 if points <= 512 else 128 if points <= 1024 else 256 if points <= 4096 else 512
    return max(step, -(-points // step) * step)


def paired(features0: Features, features1: Features, length: int) -> Features:
    """Two batches of B images as one of 2·B images and `length` points: pair 0 image 0, pair 0 image 1, …

    Padding is zeros under a mask that is False. Fields that one side lacks are left out, as are maps.
    """
    columns: dict[str, Tensor | None] = {}
    for name in (f.name for f in fields(Features) if f.name not in ("kind", "maps")):
        sides = [getattr(features, name) for features in (features0, features1)]
        if name == "view_orientation" and any(side is not None for side in sides):
            sides = [features.matched_orientation for features in (features0, features1)]
        if any(side is None for side in sides):
            columns[name] = None
        elif name in _PER_PAIR:
            columns[name] = torch.stack(sides, dim=1).flatten(0, 1)
        else:
            columns[name] = _table_tables(*sides, length)
    return features0.with_valid(**columns, maps=None)


def _table_tables(side0: Tensor, side1: Tensor, length: int) -> Tensor:
    """(B, N, …), (B, M, …) → (2·B, length, …)."""
    out = side0.new_zeros(len(side0), 2, length, *side0.shape[2:])
    out[:, 0, : side0.shape[1]], out[:, 1, : side1.shape[1]] = side0, side1
    return out.flatten(0, 1)


def uploaded(features: Features, device: torch.device) -> Features:
    """Features on a device; what lies on the processor is copied there without waiting."""
    values = {f.name: getattr(features, f.name) for f in fields(Features) if f.name != "kind"}
    return features.with_valid(
        **{name: None if value is None else to_device(value, device) for name, value in values.items()}
    )


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, copied from memory that the device reads by itself."""
    if value.device.type == "cpu" and device.type == "cuda":
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


# --- matching: Pairs matched on a GPU: queued in groups, read once.

MOST_SCORES = 2**28  # of the pairs that are matched together; a score takes some twenty bytes on the way
GRAPHS_KEPT = 8  # sizes whose graphs are kept


class PairBest(NamedTuple):
    """What was read of one pair; on the processor."""

    layers_run: int
    turns: int  # quarter turns of image 1
    unlike: bool  # descriptors that the network was not trained on
    points0: int
    points1: int
    kept0: int  # points that were not dropped
    kept1: int
    best: MutualBest  # B = 1, of the points of image 0
    keypoints0: Tensor  # (N, 2) float32
    keypoints1: Tensor  # (M, 2)


def suits(config: NetworkConfig, device: torch.device) -> bool:
    """Whether networks of this configuration run padded there."""
    plain = config.refinement is None and not (config.assignment.border or config.assignment.drop_unmatched)
    return device.type == "cuda" and config.context.attention == "softmax" and plain


@dataclass
class PaddedNetwork:
    """A network for inference, run on a GPU for batches of features."""

    network: nn.Module  # `MatchingNetwork`
    device: torch.device
    graphs: bool = False  # capture the stages of each size once, and replay them

    def __post_init__(self) -> None:
        varied = self.network.config.policy.early_exit and len(self.network.heads) > 1
        self.heads = LayerHeads(self.network) if varied else None
        self._captured: OrderedDict[tuple, tuple[PairRun, Captured]] = OrderedDict()
        self._lock = Lock()

    def __call__(
        self, features0: Features, features1: Features, turns: Tensor | None = None
    ) -> list[PairBest]:
        """The best partners in all pairs; the program waits for the device once.

        Args:
            features0, features1: batches, on the processor or on the device.
            turns: (B,) int64 clockwise quarter turns of image 1; chosen where descriptors can turn if absent.
        """
        length = padded_length(max(len(features0), len(features1)))
        packed = []
        # Where this is another device than the program's current one, streams and graphs are of this one.
        with self._lock, torch.cuda.device(self.device):
            for part in _groups(len(features0.mask), length):
                both = paired(features0.entries(part), features1.entries(part), length)
                full = both.mask.device.type == "cpu" and bool(both.mask.all())
                given = None if turns is None else turns[part]
                packed.append(self._queue(both, given, full))
            read = torch.cat(packed).cpu()  # the one wait
        return [_unpacked(row, length) for row in read]

    def _queue(self, both: Features, turns: Tensor | None, full: bool) -> Tensor:
        """Queue the run of a group; what is to be read, as `PairRun.read_off` makes it."""
        given = tuple(f.name for f in fields(both) if getattr(both, f.name) is not None)
        key = (tuple(both.mask.shape), full, turns is None, both.descriptors.dtype, given)
        if not self.graphs:
            run, stages = PairRun(self.network, self.heads, uploaded(both, self.device), full=full), Queued()
        elif key in self._captured:
            self._captured.move_to_end(key)
            run, stages = self._captured[key]
            run.refill(uploaded(both, self.device))
        else:
            run = PairRun(self.network, self.heads, uploaded(both, self.device), full=full)
            stages = Captured(self.device)
            self._captured[key] = run, stages
            if len(self._captured) > GRAPHS_KEPT:
                self._captured.popitem(last=False)
        if turns is not None:
            run.turns.copy_(turns, non_blocking=True)
        self._queue_stages(run, stages, align=turns is None)
        return run.packed.clone()

    def _queue_stages(self, run: PairRun, stages: Queued | Captured, *, align: bool) -> None:
        config = self.network.config
        stages.run("begin", lambda: run.begin(align=align))
        outlook = Outlook(self.device)
        for depth in range(len(self.network.layers)):
            stages.run(f"layer {depth}", lambda d=depth: run.layer(d))
            if config.policy.early_exit:
                if outlook.all_done():
                    break
                outlook.note(run.done)
        stages.run("score", run.score)
        if config.assignment.kind == "sinkhorn":
            for number in range(config.assignment.consensus):
                stages.run(f"consensus {number}", run.consensus_round)
            stages.run("begin transport", run.begin_transport)
            self._queue_transport(run, stages)
        stages.run("read off", run.read_off)
        stages.end_run()

    def _queue_transport(self, run: PairRun, stages: Queued | Captured) -> None:
        """All iterations that are allowed, or until it is known that all pairs have converged."""
        assignment, outlook = self.network.config.assignment, Outlook(self.device)
        for _ in range(0, assignment.max_iterations - 1, TOGETHER):
            stages.run("transport", run.continue_transport)
            if assignment.tolerance is not None:
                if outlook.all_done():
                    break
                outlook.note(run.transport.done)


def _groups(pairs: int, length: int) -> Iterator[slice]:
    """Pairs whose scores fit `MOST_SCORES`, in order."""
    step = max(1, MOST_SCORES // (length + 1) ** 2)
    for start in range(0, pairs, step):
        yield slice(start, min(start + step, pairs))


def _unpacked(row: Tensor, length: int) -> PairBest:
    numbers, partners, best, keypoints = row.split([7, length, length, 4 * length])
    layers, turns, unlike, *counts = numbers.tolist()
    best = best.view(torch.float32)
    found = MutualBest(best[None], partners.long()[None], (partners >= 0)[None])
    return PairBest(
        layers, turns, bool(unlike), *counts, found, *keypoints.view(torch.float32).view(2, -1, 2)
    )
