"""Other implementations with random parameters, and files of theirs in the layouts that are published.

Nothing is downloaded. Every peer is drawn from a seed by its own class; biases, norms and running statistics,
which start as zeros and ones, are drawn too, so that none of them can be forgotten unnoticed.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from matcher.types import Features

Tensors = dict[str, Tensor]

# What kornia's LightGlue is given for each preset, beside its own defaults.
_KORNIA_LIGHTGLUE = {
    "lightglue-superpoint": {},
    "lightglue-disk": {"input_dim": 128},
    "lightglue-aliked": {"input_dim": 128},
    "lightglue-sift": {"input_dim": 128, "add_scale_ori": True},
    "lightglue-doghardnet": {"input_dim": 128, "add_scale_ori": True, "scale_coef": 1 / 6},
    "lightglue-keynet": {"input_dim": 128, "add_laf": True},
    "lightglue-dedodeb": {},
    "lightglue-dedodeg": {},
    "lightglue-xfeat": {"input_dim": 64, "descriptor_dim": 96, "n_layers": 6, "num_heads": 1},
}


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A module of random parameters in evaluation mode; the caller's generator does not notice."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        module = build().eval()
        for name, value in module.state_dict().items():
            if name.endswith("running_var"):
                value.uniform_(0.5, 2.0)
            elif name.endswith("running_mean") or (value.dim() == 1 and name.endswith("bias")):
                value.normal_(std=0.1)
            elif value.dim() == 1 and name.endswith("weight"):  # norms
                value.uniform_(0.7, 1.3)
    return module


def kornia_lightglue(preset: str = "lightglue-superpoint", seed: int = 0, **settings) -> nn.Module:
    """kornia's LightGlue; `depth_confidence` and `width_confidence` −1 turn exit and pruning off."""
    lightglue = pytest.importorskip("kornia.feature.lightglue")
    settings = {**_KORNIA_LIGHTGLUE[preset], "flash": False, **settings}
    return seeded(lambda: lightglue.LightGlue(features=None, **settings), seed)


@torch.no_grad()
def decisive(
    projections: list[nn.Module], added: list[nn.Module], gain: float = 10.0, damp: float = 0.3
) -> None:
    """Make random layers find the points that look alike, with scores from 0 to 1.

    Similarities are products of `projections`; `added` are the last maps of what is added to the tokens,
    damped, so that these still tell who they are.
    """
    generator = torch.Generator().manual_seed(1)
    for projection in projections:
        nn.init.orthogonal_(projection.weight, gain=gain, generator=generator)
    for layer in added:
        layer.weight.mul_(damp)
        layer.bias.mul_(damp)


def decisive_lightglue(model: nn.Module) -> nn.Module:
    """A LightGlue of the official names whose scores tell something."""
    blocks = [block for layer in model.transformers for block in (layer.self_attn, layer.cross_attn)]
    decisive([head.final_proj for head in model.log_assignment], [block.ffn[3] for block in blocks])
    if hasattr(model.input_proj, "weight"):
        decisive([model.input_proj], [], gain=1.0)
    for head in model.log_assignment:
        nn.init.constant_(head.matchability.bias, 2.0)
    return model


def decisive_superglue(model: nn.Module) -> nn.Module:
    """transformers' SuperGlue whose scores tell something."""
    added = [layer.mlp[-1] for layer in model.gnn.layers]
    decisive([model.final_projection.final_proj], [model.keypoint_encoder.encoder[-1], *added])
    nn.init.constant_(model.bin_score, 3.0)
    return model


def transformers_lightglue(seed: int = 0, **settings) -> nn.Module:
    """transformers' LightGlue on SuperPoint; cross-attention has one projection twice, as published."""
    transformers = pytest.importorskip("transformers")
    off = {"depth_confidence": -1.0, "width_confidence": -1.0}
    config = transformers.LightGlueConfig(attn_implementation="eager", **off, **settings)
    model = seeded(lambda: transformers.LightGlueForKeypointMatching(config), seed)
    for layer in model.transformer_layers:
        layer.cross_attention.k_proj.load_state_dict(layer.cross_attention.q_proj.state_dict())
    return model


def transformers_superglue(seed: int = 0, **settings) -> nn.Module:
    """transformers' SuperGlue on SuperPoint."""
    transformers = pytest.importorskip("transformers")
    config = transformers.SuperGlueConfig(attn_implementation="eager", **settings)
    model = seeded(lambda: transformers.SuperGlueForKeypointMatching(config), seed)
    with torch.no_grad():
        model.bin_score.fill_(1.7)
    return model


@torch.no_grad()
def superglue_plan(model: nn.Module, features0: Features, features1: Features) -> Tensor:
    """(N, M) log probabilities of one pair by transformers' blocks, as the paper has them: nothing is padded.

    Its own way to take images with unequal numbers of points is to pad both. The padding attends to nothing
    and matches nothing, but it has mass, so that Sinkhorn's iterations start from other dustbins.
    """
    superglue = pytest.importorskip("transformers.models.superglue.modeling_superglue")
    states = []
    for features in (features0, features1):
        width, height = features.size.int().tolist()
        places = superglue.normalize_keypoints(features.keypoints[None], height, width)
        states.append(features.descriptors[None] + model.keypoint_encoder(places, features.scores[None])[0])
    for layer, kind in zip(model.gnn.layers, model.gnn.layers_types, strict=True):
        sources = states[::-1] if kind == "cross" else (None, None)
        changes = [layer(x, encoder_hidden_states=y)[0] for x, y in zip(states, sources, strict=True)]
        states = [x + change for x, change in zip(states, changes, strict=True)]
    first, second = (model.final_projection(x) for x in states)
    scores = first @ second.transpose(1, 2) / model.config.hidden_size**0.5
    iterations = model.config.sinkhorn_iterations
    return superglue.log_optimal_transport(scores, model.bin_score, iterations)[0, :-1, :-1]


def transformers_superpoint(seed: int = 0, **settings) -> nn.Module:
    """transformers' SuperPoint."""
    transformers = pytest.importorskip("transformers")
    config = transformers.SuperPointConfig(**settings)
    return seeded(lambda: transformers.SuperPointForKeypointDetection(config), seed)


def kornia_loftr(seed: int = 0, pretrained_like: str = "outdoor") -> nn.Module:
    """kornia's LoFTR, with the position code that the named checkpoint was trained with."""
    loftr = pytest.importorskip("kornia.feature.loftr.loftr")
    config = dict(loftr.default_cfg)
    config["coarse"] = {**config["coarse"], "temp_bug_fix": pretrained_like == "indoor_new"}
    return seeded(lambda: loftr.LoFTR(pretrained=None, config=config), seed)


def old_lightglue_names(model: nn.Module) -> Tensors:
    """A LightGlue of the official names → the flat names of the released files, without buffers."""
    renamed = {}
    for name, value in model.state_dict().items():
        if name == "confidence_thresholds":
            continue
        if name.startswith("transformers."):
            _, layer, block, rest = name.split(".", 3)
            name = f"{block}.{layer}.{rest}"
        renamed[name] = value
    return renamed


def official_superglue_names(model: nn.Module, heads: int = 4) -> Tensors:
    """transformers' SuperGlue → the official file: 1-d convolutions, heads the fast index of channels."""
    tensors = {}
    for name, value in model.state_dict().items():
        if name.startswith("keypoint_detector."):
            continue
        if ".attention.self." in name:
            value = value.unflatten(0, (heads, -1)).transpose(0, 1).flatten(0, 1)
        elif name.endswith("attention.output.dense.weight"):
            value = value.unflatten(1, (heads, -1)).transpose(1, 2).flatten(1, 2)
        tensors[_official_superglue_name(name)] = value.unsqueeze(-1) if value.dim() == 2 else value
    return tensors


def _official_superglue_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "keypoint_encoder":
        number = 3 * int(parts[2]) + (parts[3] == "batch_norm")
        return f"kenc.encoder.{number}.{parts[-1]}"
    if parts[0] == "gnn":
        layer, rest = ".".join(parts[:3]), ".".join(parts[3:-1])
        inside = {
            "attention.self.query": "attn.proj.0",
            "attention.self.key": "attn.proj.1",
            "attention.self.value": "attn.proj.2",
            "attention.output.dense": "attn.merge",
            "mlp.0.linear": "mlp.0",
            "mlp.0.batch_norm": "mlp.1",
            "mlp.1": "mlp.3",
        }
        return f"{layer}.{inside[rest]}.{parts[-1]}"
    return name.replace("final_projection.", "")


def official_superpoint_names(model: nn.Module) -> Tensors:
    """transformers' SuperPoint → the names of superpoint_v1.pth."""
    heads = {"conv_score_a": "convPa", "conv_score_b": "convPb"}
    heads |= {"conv_descriptor_a": "convDa", "conv_descriptor_b": "convDb"}
    tensors = {}
    for name, value in model.state_dict().items():
        parts = name.split(".")
        stem = f"conv{int(parts[2]) + 1}{parts[3][-1]}" if parts[0] == "encoder" else heads[parts[1]]
        tensors[f"{stem}.{parts[-1]}"] = value
    return tensors


def open_superpoint(seed: int = 0) -> Tensors:
    """Random tensors in the layout of superpoint_v6_from_tf.pth: convolution → ReLU → batch normalisation."""

    def block(inputs: int, outputs: int, kernel: int) -> nn.ModuleDict:
        return nn.ModuleDict({"conv": nn.Conv2d(inputs, outputs, kernel), "bn": nn.BatchNorm2d(outputs)})

    def build() -> nn.Module:
        widths = [1, 64, 64, 128, 128]
        stages = [nn.ModuleList([block(a, b, 3), block(b, b, 3)]) for a, b in pairwise(widths)]
        heads = {
            n: nn.ModuleList([block(128, 256, 3), block(256, k, 1)])
            for n, k in (("detector", 65), ("descriptor", 256))
        }
        return nn.ModuleDict({"backbone": nn.ModuleList(stages), **heads})

    return dict(seeded(build, seed).state_dict())


def write_published(tensors: Tensors, path: Path, *, shelf: str | None = None, prefix: str = "") -> Path:
    """A checkpoint file by its suffix; `shelf` is the key under which Lightning and others keep tensors."""
    named = {prefix + name: value.detach().clone().contiguous() for name, value in tensors.items()}
    if path.suffix == ".safetensors":
        save_file(named, path)
    else:
        torch.save(named if shelf is None else {"epoch": 3, shelf: named}, path)
    return path


def naive_sinkhorn(scores: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Potentials u (B, N+1) and v (B, M+1) by alternating log-sum-exp over rows and columns (Cuturi 2013).

    The dustbins of `scores` (B, N+1, M+1) come last; they have as much mass as the other image has points.
    """
    rows, columns = scores.shape[1] - 1, scores.shape[2] - 1
    log_mu, log_nu = torch.zeros(scores.shape[:2]).to(scores), torch.zeros_like(scores[:, 0])
    log_mu[:, -1], log_nu[:, -1] = math.log(columns), math.log(rows)
    u, v = torch.zeros_like(log_mu), torch.zeros_like(log_nu)
    for _ in range(iterations):
        u = log_mu - torch.logsumexp(scores + v.unsqueeze(1), dim=2)
        v = log_nu - torch.logsumexp(scores + u.unsqueeze(2), dim=1)
    return u, v
