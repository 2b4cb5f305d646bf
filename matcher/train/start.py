"""Trained parameters that a training starts from, and its end moves back towards."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn

from matcher.errors import UsageError
from matcher.extract.learned import FeatureNetwork, folded, grown
from matcher.match.network import MatchingNetwork
from matcher.train.keypoints import front_end
from matcher.train.recipe import FrontEndRecipe, MatcherRecipe, Recipe
from matcher.weights.files import load_model

INNER_HEADS = ("confidence", "match_probability")


class Networks(nn.Module):
    """What is trained: a front end, a matcher, or both; and the scale of similarities, needed in training."""

    def __init__(self, front_end: FeatureNetwork | None, matcher: MatchingNetwork | None) -> None:
        super().__init__()
        self.front_end, self.matcher = front_end, matcher
        self.log_scale = nn.Parameter(torch.tensor(math.log(20.0)))


def build_networks(recipe: Recipe) -> tuple[Networks, FeatureNetwork | None, bool]:
    """The networks of a recipe with the parameters that they start from.

    Returns:
        The networks; the front end that the trained one starts from, whose batch normalisation has to be
        restored from images; whether the matcher's projection has to be scaled to descriptors.

    Raises:
        IntegrityError: weights to start from are absent, damaged, or of another network.
        UsageError: they are of another architecture, or larger than the recipe's, or have no heads that the
            recipe needs.
    """
    detector, matcher, start, projects = None, None, None, True
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        if recipe.front_end.train:
            detector = FeatureNetwork(recipe.front_end.network, normalised=True)
            start = start_of_front_end(recipe.front_end) if recipe.front_end.start else None
        if recipe.matcher.train:
            matcher = MatchingNetwork(recipe.matcher.network)
            projects = bool(recipe.matcher.start) and continue_from(matcher, recipe.matcher.start)
    if recipe.optimiser.start_share and not projects:
        raise UsageError(
            "optimiser.start_share: the start is of another kind of front end, whose projection is learned "
            "anew; leave it 0"
        )
    if matcher is not None:
        matcher.confidence.requires_grad_(False)
        matcher.match_probability.requires_grad_(recipe.matcher.prunes)
    return Networks(detector, matcher), start, not projects


def start_of_front_end(recipe: FrontEndRecipe) -> FeatureNetwork:
    """The front end that a recipe starts from, grown to its sizes; `UsageError` where it is larger."""
    network = front_end(recipe.start, precision="float32")
    if not recipe.network.contains(network.sizes):
        raise UsageError(
            f"front_end.network: {recipe.network} is smaller than that of {recipe.start}, {network.sizes}"
        )
    return grown(network, recipe.network)


def continue_from(model: MatchingNetwork, start: str) -> bool:
    """Load trained parameters into a network.

    Heads for exit and pruning that the file lacks keep their values; so do the input projections if the file
    is for another front end.

    Args:
        model: a network of the same architecture as the file.
        start: a shipped name or the path of a weights file.

    Returns:
        Whether the projection of descriptors was loaded.

    Raises:
        IntegrityError: no such weights, or a damaged file.
        UsageError: the weights are of another architecture.
    """
    trained, _, name = load_model(start)
    wanted, found = model.state_dict(), trained.state_dict()
    same_front_end = trained.config.kind == model.config.kind
    if not same_front_end:  # the projection is ours, and only inputs that both networks have are taken over
        for key, value in found.items():
            if key.startswith("project."):
                found[key] = wanted.get(key, value)
            elif key in wanted and value.shape != wanted[key].shape and value.ndim:
                found[key] = value[..., : wanted[key].shape[-1]]
    found = {key: value for key, value in found.items() if key in wanted or not key.startswith(INNER_HEADS)}
    different = [key for key in wanted.keys() ^ found.keys() if not key.startswith(INNER_HEADS)]
    different += [key for key in wanted.keys() & found.keys() if wanted[key].shape != found[key].shape]
    if different:
        raise UsageError(
            f"matcher.start: the weights {name} are of another network than the recipe's ({len(different)} "
            f"tensors differ, such as {min(different)}); make [matcher.network] the same, or remove start"
        )
    model.load_state_dict({**wanted, **found})
    return same_front_end


@torch.no_grad()
def finished(networks: Networks, recipe: Recipe) -> Networks:
    """The networks as they are written: batch normalisation folded, and a share of the initial parameters.

    The share (WiSE-FT, Wortsman et al. 2022) recovers accuracy outside the training data.
    """
    share, device, starts = recipe.optimiser.start_share, networks.log_scale.device, []
    if networks.front_end is not None:
        networks.front_end = folded(networks.front_end).to(device)
        if share:
            starts.append((networks.front_end, start_of_front_end(recipe.front_end)))
    if share and networks.matcher is not None:
        start = copy.deepcopy(networks.matcher)
        continue_from(start, recipe.matcher.start)
        starts.append((networks.matcher, start))
    for network, start in starts:
        for ours, theirs in zip(network.parameters(), start.parameters(), strict=True):
            ours.lerp_(theirs.to(ours), share)
    return networks


def optimisers_of(networks: Networks, recipe: Recipe) -> tuple[list[torch.optim.Optimizer], list[float]]:
    """AdamW for everything, and Muon (Jordan et al. 2024) for the matrices of the matcher's layers if the
    recipe asks for it; and the learning rate of each, relative to the recipe's.

    The heads for early exit are left out, and those for pruning, unless the recipe drops points by them.

    Raises:
        UsageError: the recipe asks for Muon, which this PyTorch lacks.
    """
    optimisers: list[torch.optim.Optimizer] = []
    rates: list[float] = []

    def add(parameters: list[nn.Parameter], weight_decay: float, rate: float) -> None:
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimisers.append(torch.optim.AdamW(groups))
        rates.append(rate)

    if networks.front_end is not None:
        trained = [*networks.front_end.parameters(), networks.log_scale]
        add(trained, recipe.front_end.weight_decay, 1.0)
    if networks.matcher is not None:
        matcher: MatcherRecipe = recipe.matcher
        if matcher.muon_rate and not hasattr(torch.optim, "Muon"):
            raise UsageError(
                f"matcher.muon_rate needs PyTorch 2.9 or later, this is {torch.__version__}; set it to 0"
            )
        layers = networks.matcher.layers.parameters() if matcher.muon_rate else ()
        matrices = {id(p): p for p in layers if p.ndim == 2}
        rest = [p for p in networks.matcher.parameters() if p.requires_grad and id(p) not in matrices]
        add(rest, matcher.weight_decay, matcher.learning_rate)
        if matrices:
            adjust = {"weight_decay": matcher.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
            optimisers.append(torch.optim.Muon(list(matrices.values()), **adjust))
            rates.append(matcher.learning_rate * matcher.muon_rate)
    return optimisers, rates
