"""Front ends with random parameters, and images to try them on."""

from dataclasses import replace

import cv2
import numpy as np
import torch
from torch import nn

from matcher.config import ExtractorConfig
from matcher.extract import kornia_adapters as kornia
from matcher.extract import learned, superpoint
from matcher.extract.front_end import Fill, LearnedExtractor
from matcher.types import Features, Image

FRONT_ENDS = {**learned.FRONT_ENDS, **superpoint.FRONT_ENDS, **kornia.FRONT_ENDS}


def random_parameters(network: nn.Module, _: ExtractorConfig | None = None, seed: int = 3) -> None:
    """Weights that keep the spread of what passes through them; the caller's generator does not notice."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in network.state_dict().items():
        if name.endswith("running_var"):
            value.uniform_(0.5, 1.5, generator=generator)
        elif value.dtype == torch.int64:
            value.zero_()
        elif value.dim() > 1:
            value.normal_(0, (2 / value[0].numel()) ** 0.5, generator=generator)
        elif name.endswith("weight"):
            value.uniform_(0.9, 1.1, generator=generator)
        else:
            value.normal_(0, 0.05, generator=generator)
    # DeDoDe's random logits would otherwise leave all probability to one pixel, and ALIKED's be 0 or 1.
    for name, value in network.state_dict().items():
        if (name.startswith("detector.decoder") and "out_conv" in name) or name.startswith("score_head.6"):
            value.mul_(0.01)


def build(kind: str, fill: Fill = random_parameters, **settings) -> LearnedExtractor:
    settings = {"max_keypoints": 300, **settings}
    return LearnedExtractor(ExtractorConfig(kind=kind, **settings), FRONT_ENDS[kind], fill)


def texture(rng: np.random.Generator, width: int = 160, height: int = 128, sigma: float = 1.2) -> np.ndarray:
    """Smooth noise over the whole range of grey."""
    noise = cv2.GaussianBlur(rng.standard_normal((height, width)), (0, 0), sigma)
    return cv2.normalize(noise, None, 0, 255, cv2.NORM_MINMAX).astype(np.uint8)


def whole(pixels: np.ndarray, mask: np.ndarray | None = None, **changes) -> Image:
    """An image as stored, neither resized nor turned, but for changes."""
    return replace(Image(pixels, (pixels.shape[1], pixels.shape[0]), mask=mask), **changes)


def share_found(points: torch.Tensor, others: torch.Tensor, pixels: float) -> float:
    """Share of the points (N, 2) that have one of the others within so many pixels."""
    return float(((points[:, None] - others).norm(dim=2).amin(dim=1) <= pixels).float().mean())


def same(features0: Features, features1: Features) -> bool:
    return all(
        torch.equal(getattr(features0, name), getattr(features1, name))
        for name in ("keypoints", "descriptors", "scores")
    )
