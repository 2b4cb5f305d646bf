"""The network behind the `Matcher` protocol: precision, device, and matches read off the assignment."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from matcher.config import CalibrationConfig, MatchingPolicy, Precision
from matcher.data.features import Features
from matcher.data.matches import Matches
from matcher.errors import UsageError
from matcher.match.calibration import calibrated
from matcher.match.mutual import credible_matches
from matcher.match.network.backbone import fuse_backbone
from matcher.match.network.context import CrossBlock, SelfBlock
from matcher.match.network.fused import fuse_layer
from matcher.match.network.model import MatchingNetwork, check_paired
from matcher.match.network.other_turns import try_other_turns
from matcher.match.prediction import PairPrediction
from matcher.match.steering import aligned, turned_by
from matcher.match.turns import STEERABLE, TURNS

if TYPE_CHECKING:  # the module is for GPUs: elsewhere it is not imported
    from matcher.match.padded.matching import PairBest

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
            from matcher.match.padded.matching import PaddedNetwork, suits

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
