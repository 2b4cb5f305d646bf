"""Fitting a trained matcher's projection of descriptors to another front end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from matcher.config import ExtractorConfig
from matcher.data.image import Image
from matcher.errors import UsageError
from matcher.extract.feature_network import FeatureNetwork
from matcher.extract.learned import BORDER, NMS_RADIUS, candidates, refine
from matcher.extract.shared import grey
from matcher.lab.pairs.textures import PhotoSet
from matcher.match.network.model import MatchingNetwork
from matcher.match.steering import steered
from matcher.match.turns import TURNS
from matcher.torch_engine import build_extractor

PHOTOS, POINTS = 60, 800  # photos, and keypoints of each
SEED = 7


@torch.no_grad()
def fit_projection(model: MatchingNetwork, before: str, now: str, photos: Sequence[Path]) -> float:
    """Change the projection so that descriptors of a new front end give the tokens of the old one.

    Least squares over keypoints of the new front end in photos, with the descriptors of both, in all four
    rotations by 90 degrees.

    Args:
        model: its `project` is replaced in place.
        before: weights file of the front end that the matcher was trained for; empty: the shipped one.
        now: weights file of the new front end; empty: the shipped one.
        photos: in which keypoints are detected.

    Returns:
        The share of the tokens' variance that the fit explains, on held-out photos.

    Raises:
        IntegrityError: a weights file is absent, damaged, or of another front end.
        UsageError: the network has no projection, or no photo can be read.
    """
    if not isinstance(model.project, torch.nn.Linear):
        raise UsageError("start_front_end: this network does not project descriptors; remove it")
    old, new = _network(before), _network(now)
    drawn = PhotoSet(photos).draw(min(PHOTOS, len(photos)), np.random.default_rng(SEED)).values()
    descriptors = [_descriptors(old, new, photo) for photo in drawn]
    tokens = [model.project(olds) for olds, _ in descriptors]
    kept = max(1, len(descriptors) * 4 // 5)
    inputs = torch.cat([_with_one(news) for _, news in descriptors[:kept]])
    solution = torch.linalg.lstsq(inputs.double(), torch.cat(tokens[:kept]).double()).solution.float()
    model.project.weight.copy_(solution[:-1].T)
    model.project.bias.copy_(solution[-1])
    held_out = slice(kept, None) if kept < len(descriptors) else slice(None)
    target = torch.cat(tokens[held_out])
    error = target - torch.cat([model.project(news) for _, news in descriptors[held_out]])
    return float(1 - error.square().sum() / (target - target.mean(0)).square().sum())


def _network(weights: str) -> FeatureNetwork:
    return build_extractor(ExtractorConfig(kind="learned"), weights or None, precision="float32").network


def _descriptors(old: FeatureNetwork, new: FeatureNetwork, photo: np.ndarray) -> tuple[Tensor, Tensor]:
    """Descriptors (4N, 64) of the new front end's keypoints by both networks, in each rotation."""
    image = Image(photo, photo.shape[1::-1])
    pixels = grey(image, torch.device("cpu"))
    (_, olds), (logits, news) = old(pixels), new(pixels)
    y, x = candidates(logits, NMS_RADIUS, BORDER)[0].nonzero().T
    best = logits[0, y, x].topk(min(POINTS, len(x))).indices
    points = refine(logits, torch.stack([x, y], dim=-1)[None, best])
    pair = old.describe(olds, points), new.describe(news, points)
    turns = torch.arange(TURNS)
    return tuple(steered(found.expand(TURNS, -1, -1), turns).flatten(0, 1) for found in pair)


def _with_one(values: Tensor) -> Tensor:
    return torch.cat([values, values.new_ones(len(values), 1)], dim=1)
