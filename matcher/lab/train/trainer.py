"""The first stage: assignment at every layer, one batch a step, with a moving average of the parameters."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from matcher.errors import UsageError
from matcher.lab.train.labelled_layers import Pruning, labelled_layers
from matcher.lab.train.labels import PairBatch
from matcher.lab.train.matching_loss import matching_loss
from matcher.lab.train.optimisers import build_optimisers
from matcher.lab.train.recipe import Recipe
from matcher.lab.train.stage import Stage
from matcher.lab.train.start_layers import chosen, deepened, layer_of
from matcher.match.network.model import MatchingNetwork
from matcher.weights.files import load_model

_INNER_HEADS = ("confidence", "match_probability")


class Trainer(Stage[MatchingNetwork, PairBatch]):
    """Trains the matching network: assignment at every layer."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            model = MatchingNetwork(recipe.network)
        self._projects = bool(recipe.start) and continue_from(model, recipe.start, recipe.start_layers)
        frozen, share = recipe.optimiser.frozen_layers, recipe.optimiser.start_share
        if (frozen or share) and not self._projects:
            raise UsageError(
                f"optimiser.{'frozen_layers' if frozen else 'start_share'}: the start is of another kind of "
                "front end, whose projection is learned anew; leave it 0"
            )
        freeze(model, frozen)
        model.to(device)
        optimisers = build_optimisers(model, recipe.optimiser)
        rates = (1.0, recipe.optimiser.muon_rate)[: len(optimisers)]
        super().__init__(recipe, recipe.optimiser, model, optimisers, device, rates)

    def step(self, batch: PairBatch) -> float:
        """As `Stage.step`; before the first one, a random projection is scaled to the descriptors."""
        if self.progress.step == 0 and not self._projects:
            self._standardise(batch)
        return super().step(batch)

    def _standardise(self, batch: PairBatch) -> None:
        """Scale the projection to tokens of mean 0 and variance 1."""
        descriptors = torch.cat([batch.features0.descriptors, batch.features1.descriptors], dim=1)
        self.model.standardise(descriptors.to(self.device).flatten(0, 1))
        self.average.load_state_dict(self.model.state_dict())

    def loss(self, batch: PairBatch) -> Tensor:
        """As `matching_loss`; random choices depend on the step only."""
        rng = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.progress.step)
        recipe = self.recipe.optimiser
        pruning = Pruning.drawn(recipe.kept_shares, len(self.model.layers), rng)
        layers = labelled_layers(self.model, batch, self.device, pruning)
        return matching_loss(self.model, layers, recipe, rng)


def freeze(model: MatchingNetwork, layers: int) -> None:
    """Let the first layers of a network, and all before them, keep their parameters; their heads for exit and
    pruning, which change nothing else, do not."""
    for name, parameter in model.named_parameters() if layers else ():
        layer = layer_of(name)
        ahead = layer < layers if layer is not None else not name.startswith("consensus.")
        parameter.requires_grad_(not ahead or name.startswith(_INNER_HEADS))


def continue_from(model: MatchingNetwork, start: str, layers: Sequence[int] = ()) -> bool:
    """Load trained parameters into a network.

    Heads for exit and pruning that the file lacks keep their values; so do the input projections if the file
    is for another front end. Layers that it lacks begin without effect.

    Args:
        model: a network of the same architecture as the file, or of more layers.
        start: a shipped name or the path of a weights file.
        layers: of the file, that are used, in this order; all if empty.

    Returns:
        Whether the projection of descriptors was loaded.

    Raises:
        IntegrityError: no such weights, or a damaged file.
        UsageError: the weights are of another architecture.
    """
    trained, _, name = load_model(start)
    wanted, found = model.state_dict(), trained.state_dict()
    other_front_end = trained.config.kind != model.config.kind
    if other_front_end:
        found = _for_another_front_end(wanted, found)
    before, depth = (network.config.context.depth for network in (trained, model))
    if layers:
        if max(layers) >= before:
            raise UsageError(f"start_layers: the weights {name} have {before} layers, the first is 0")
        found, before = chosen(found, layers), len(layers)
    if before < depth and trained.config.assignment.every_layer:
        found = deepened(found, before, depth)
    found = {key: value for key, value in found.items() if key in wanted or not key.startswith(_INNER_HEADS)}
    different = [key for key in wanted.keys() ^ found.keys() if not key.startswith(_INNER_HEADS)]
    different += [key for key in wanted.keys() & found.keys() if wanted[key].shape != found[key].shape]
    if different:
        raise UsageError(
            f"start: the weights {name} are of another network than the recipe's ({len(different)} tensors "
            f"differ, such as {min(different)}); make [network] the same, or remove start"
        )
    model.load_state_dict({**wanted, **found})
    return not other_front_end


@torch.no_grad()
def blend_with_start(
    model: MatchingNetwork, start: str, share: float, *, projection: bool = True, layers: Sequence[int] = ()
) -> None:
    """Interpolate between initial and trained parameters, to recover accuracy outside the training data.

    WiSE-FT (Wortsman et al. 2022).

    Args:
        model: the trained network; changed in place.
        start: a shipped name or the path of a weights file.
        share: weight of the initial parameters, 0 to 1.
        projection: whether to interpolate that of descriptors too; not if it was fitted to another front end.
        layers: as `continue_from`.

    Raises:
        IntegrityError, UsageError: as `continue_from`.
    """
    before = copy.deepcopy(model)
    if not continue_from(before, start, layers):
        raise UsageError("optimiser.start_share: the start is of another front end")
    for (name, value), first in zip(model.named_parameters(), before.parameters(), strict=True):
        if projection or not name.startswith("project."):
            value.lerp_(first.to(value.device), share)


def _for_another_front_end(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Trained tensors with the projection of `wanted` and only the input columns that both networks have."""
    kept = {}
    for key, value in found.items():
        ours = wanted.get(key, value)
        if key.startswith("project."):
            kept[key] = ours
        elif value.shape != ours.shape and value.shape[:-1] == ours.shape[:-1]:
            kept[key] = value[..., : ours.shape[-1]]
        else:
            kept[key] = value
    return kept
