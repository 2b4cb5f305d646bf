"""Reference implementations (networks of kornia and transformers, plain Sinkhorn) and inputs for them.

The networks have random parameters; `with_parameters` builds ours with the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from matcher.config import Precision
from matcher.data.features import Features
from matcher.errors import UsageError, install_command
from matcher.match.network.inference import AttentionMatcher
from matcher.match.network.model import MatchingNetwork
from matcher.match.sinkhorn import log_masses
from matcher.presets import find_preset
from matcher.weights.published.conversion import SYSTEMS, choose_layout, convert

SIZE = (1024, 768)  # of the images that random keypoints belong to
_PREFIX = "transformers."  # of kornia's LightGlue; the published file has the block's name first


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A module with random parameters in evaluation mode; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().eval().requires_grad_(False)


def kornia_lightglue() -> nn.Module:
    """kornia's LightGlue for SuperPoint, without early exit and pruning."""
    from kornia.feature.lightglue import LightGlue

    settings = {"depth_confidence": -1, "width_confidence": -1, "filter_threshold": 0.0}
    return seeded(lambda: LightGlue(features=None, **settings))


def lightglue_tensors(network: nn.Module) -> dict[str, Tensor]:
    """The parameters of kornia's LightGlue under the names of the published files."""
    tensors = {}
    for name, value in network.state_dict().items():
        if name.startswith(_PREFIX):
            layer, block, rest = name.removeprefix(_PREFIX).split(".", 2)
            name = f"{block}.{layer}.{rest}"
        if name != "confidence_thresholds":
            tensors[name] = value
    return tensors


def transformers_superglue() -> nn.Module:
    """transformers' SuperGlue.

    Raises:
        UsageError: transformers is not installed.
    """
    try:
        from transformers import SuperGlueConfig, SuperGlueForKeypointMatching
    except ImportError as error:
        raise UsageError(
            f"SuperGlue is compared with transformers, which is not installed: {install_command('benchmark')}"
        ) from error
    return seeded(lambda: SuperGlueForKeypointMatching(SuperGlueConfig(matching_threshold=0.0)))


def kornia_loftr() -> nn.Module:
    """kornia's LoFTR with the settings of the outdoor checkpoint."""
    from kornia.feature.loftr.loftr import LoFTR, default_cfg

    coarse = {**default_cfg["coarse"], "temp_bug_fix": False}
    match_coarse = {**default_cfg["match_coarse"], "thr": 0.0}
    config = {**default_cfg, "coarse": coarse, "match_coarse": match_coarse}
    return seeded(lambda: LoFTR(pretrained=None, config=config))


def with_parameters(
    tensors: dict[str, Tensor],
    preset: str,
    device: torch.device,
    precision: Precision,
    *,
    cuda_graphs: bool = False,
    **policy: bool,
) -> AttentionMatcher:
    """`network_with` in inference."""
    network = network_with(tensors, preset, **policy)
    return AttentionMatcher(network, device=device, precision=precision, cuda_graphs=cuda_graphs)


def network_with(tensors: dict[str, Tensor], preset: str, **policy: bool) -> MatchingNetwork:
    """Our network of a preset with the parameters of a reference, given under their published names.

    The match threshold is 0, as in the references: random parameters give low match probabilities.
    """
    config = find_preset(preset).matcher
    config = replace(config, policy=replace(config.policy, match_threshold=0.0, **policy))
    model = seeded(lambda: MatchingNetwork(config))
    system = next(system for start, system in SYSTEMS.items() if preset.startswith(start))
    layout = choose_layout(tensors, system)
    model.load_state_dict(convert(tensors, model.state_dict(), layout, config.context.heads))
    return model


def random_features(count: int, width: int = 256, seed: int = 0, kind: str = "superpoint") -> Features:
    """Uniformly random keypoints with random unit descriptors."""
    rng = np.random.default_rng(seed)
    descriptors = rng.normal(size=(count, width))
    descriptors /= np.linalg.norm(descriptors, axis=1, keepdims=True)
    return Features(
        keypoints=(rng.random((count, 2)) * (np.array(SIZE) - 1)).astype(np.float32),
        descriptors=descriptors.astype(np.float32),
        scores=rng.random(count).astype(np.float32),
        size=np.array(SIZE, np.float32),
        scales=rng.uniform(2, 20, count).astype(np.float32),
        orientations=rng.uniform(-3, 3, count).astype(np.float32),
        kind=kind,
    )


def random_batch(count: int, batch: int, device: torch.device, seed: int = 0) -> Features:
    """A batch of `batch` images with `count` keypoints each."""
    return Features.stack([random_features(count, seed=batch * seed + b) for b in range(batch)]).to(device)


def noise_image(width: int, height: int, seed: int = 0) -> np.ndarray:
    """(height, width) uint8 of smooth noise."""
    import cv2

    noise = cv2.GaussianBlur(np.random.default_rng(seed).standard_normal((height, width)), (0, 0), 2.0)
    return cv2.normalize(noise, None, 0, 255, cv2.NORM_MINMAX).astype(np.uint8)


def naive_sinkhorn(scores: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Potentials u (B, N+1) and v (B, M+1) by alternating log-sum-exp over rows and columns.

    The textbook form of the algorithm (Cuturi 2013) in the log domain, differentiable, for comparison.

    Args:
        scores: (B, N+1, M+1) with the dustbins last.
        iterations: of a row and a column update each.
    """
    log_mu, log_nu = log_masses(scores)
    u, v = torch.zeros_like(log_mu), torch.zeros_like(log_nu)
    for _ in range(iterations):
        u = log_mu - torch.logsumexp(scores + v.unsqueeze(1), dim=2)
        v = log_nu - torch.logsumexp(scores + u.unsqueeze(2), dim=1)
    return u, v
