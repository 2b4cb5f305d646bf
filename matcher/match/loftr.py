"""Matching without a detector (LoFTR, Sun et al. 2021): the cells of a regular grid are the keypoints."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matcher.config import BackboneConfig, RefinementConfig
from matcher.match.blocks import Layer
from matcher.types import Features, Image


class ConvNorm(nn.Module):
    """A convolution without bias, then batch normalisation."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) → (B, outputs, ⌈H/stride⌉, ⌈W/stride⌉)."""
        return self.norm(self.conv(x))

    def fold(self) -> None:
        """Make the normalisation, as it is in evaluation, part of the convolution."""
        norm, conv = self.norm, self.conv
        gain = norm.weight / (norm.running_var + norm.eps).sqrt()
        conv.weight = nn.Parameter(conv.weight * gain[:, None, None, None], requires_grad=False)
        conv.bias = nn.Parameter(norm.bias - gain * norm.running_mean, requires_grad=False)
        self.norm = nn.Identity()


class Residual(nn.Module):
    """Two 3×3 convolutions beside a skip (He et al. 2016, figure 2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = ConvNorm(inputs, outputs, 3, stride)
        self.second = ConvNorm(outputs, outputs, 3)
        self.skip = ConvNorm(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) → (B, outputs, ⌈H/stride⌉, ⌈W/stride⌉)."""
        return self.second(torch.relu_(self.first(x))).add_(self.skip(x)).relu_()


class Merge(nn.Module):
    """A stage joined with the coarser map above it, smoothed."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inner = ConvNorm(inputs, inputs, 3)
        self.outer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)

    def forward(self, lateral: Tensor, above: Tensor) -> Tensor:
        """(B, inputs, H, W) and (B, inputs, ⌈H/2⌉, ⌈W/2⌉) → (B, outputs, H, W)."""
        height, width = lateral.shape[-2:]
        # Corners on corners, as the weights were trained; a map is one longer than an odd side needs.
        raised = F.interpolate(above, scale_factor=2.0, mode="bilinear", align_corners=True)
        joint = self.inner(raised[..., :height, :width].add_(lateral))
        return self.outer(F.leaky_relu_(joint))


class Backbone(nn.Module):
    """Grey images → a coarse map, one vector per cell, and a fine one."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        widths = config.widths
        self.stem = ConvNorm(1, widths[0], 7, 2)
        self.stages = nn.ModuleList(
            nn.Sequential(Residual(inputs, outputs, 1 if stage == 0 else 2), Residual(outputs, outputs, 1))
            for stage, (inputs, outputs) in enumerate(zip((widths[0], *widths), widths, strict=False))
        )
        ends = zip(widths, (*widths[1:], widths[-1]), strict=True)
        self.laterals = nn.ModuleList(nn.Conv2d(inputs, outputs, 1, bias=False) for inputs, outputs in ends)
        self.merges = nn.ModuleList(Merge(inputs, outputs) for outputs, inputs in pairwise(widths))

    @property
    def stride(self) -> int:
        """Pixels from one cell of the coarse map to the next."""
        return 2 ** len(self.stages)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Grey pixels (B, 1, H, W) in [0, 1] → (B, C, ⌈H/8⌉, ⌈W/8⌉) and (B, c, ⌈H/2⌉, ⌈W/2⌉), float32."""
        x, levels = torch.relu_(self.stem(pixels.to(self.stem.conv.weight.dtype))), []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        coarse = fine = self.laterals[-1](levels.pop())
        for level in range(len(levels) - 1, -1, -1):
            fine = self.merges[level](self.laterals[level](levels[level]), fine)
        return coarse.float(), fine.float()


@torch.no_grad()
def folded_backbone(backbone: Backbone, dtype: torch.dtype) -> Backbone:
    """A frozen copy for inference in `dtype`, its normalisations folded into its convolutions."""
    backbone = copy.deepcopy(backbone).eval().requires_grad_(False)
    for part in list(backbone.modules()):
        if isinstance(part, ConvNorm):
            part.fold()
    # Convolutions are faster where the channels lie side by side.
    return backbone.to(dtype=dtype, memory_format=torch.channels_last)


# Matches of cells, moved to a fraction of a pixel (section 3.4).


class Refinement(nn.Module):
    """A window of the fine map around either cell, attention between the two, and the expected position.

    Its parameters are `reduce` and `merge` (the published fine_preprocess.down_proj and merge_feat) and
    `layers.{n}` (loftr_fine), which are those of the context.
    """

    def __init__(self, config: RefinementConfig, coarse_dim: int) -> None:
        super().__init__()
        dim = config.context.dim
        self.config = config
        self.reduce = nn.Linear(coarse_dim, dim)
        self.merge = nn.Linear(2 * dim, dim)
        self.layers = nn.ModuleList(Layer(config.context) for _ in range(config.context.depth))

    def forward(
        self, states: tuple[Tensor, Tensor], maps: tuple[Tensor, Tensor], cells: tuple[Tensor, Tensor]
    ) -> Tensor:
        """(K, 2) xy offsets from image 1's cells, in cells of the coarse grid, to what image 0's cells show.

        Of K matches of one pair: the matched cells' `states` after the context, (K, coarse_dim), fine `maps`
        (C, h, w), and `cells` (K, 2), column and row, of either image.
        """
        size = self.config.window**2
        if not len(cells[0]):
            return cells[0].new_zeros(0, 2)
        windows = [self._window(*side) for side in zip(states, maps, cells, strict=True)]
        tokens = torch.cat(windows, dim=1)
        for layer in self.layers:
            tokens = layer(tokens, size)
        first, second = tokens.split(size, dim=1)
        similarity = second @ first[:, size // 2, :, None] / tokens.shape[-1] ** 0.5
        steps = torch.cartesian_prod(self._steps(tokens), self._steps(tokens)).flip(-1)
        return similarity.squeeze(-1).softmax(dim=-1) @ steps / self.config.stride

    def _steps(self, like: Tensor) -> Tensor:
        side = self.config.window
        return torch.arange(side, device=like.device, dtype=like.dtype) - side // 2

    def _window(self, states: Tensor, fine: Tensor, cells: Tensor) -> Tensor:
        """(K, window², dim) what lies around cells on the map, zeros beyond it, with the cells' states."""
        x, y = (cells * self.config.stride).unsqueeze(-1).add(self._steps(cells)).long().unbind(1)
        height, width = fine.shape[-2:]
        inside = ((y >= 0) & (y < height)).unsqueeze(2) & ((x >= 0) & (x < width)).unsqueeze(1)
        taken = fine[:, y.clamp(0, height - 1).unsqueeze(2), x.clamp(0, width - 1).unsqueeze(1)]
        window = (taken * inside).permute(1, 2, 3, 0).flatten(1, 2)
        state = self.reduce(states).unsqueeze(1).expand(-1, window.shape[1], -1)
        return self.merge(torch.cat([window, state], dim=-1))


class GridExtractor:
    """Cells with descriptors, position on the grid and a finer map; `affine_frames` are their sides."""

    def __init__(self, backbone: Backbone, kind: str = "loftr") -> None:
        """Keep the network, in evaluation; it belongs to the matcher, whose weights hold its parameters."""
        self.backbone = backbone
        self.kind = kind

    @torch.no_grad()
    def __call__(self, images: Sequence[Image]) -> list[Features]:
        """Features of each image in stored pixels, on the CPU, cells row by row, within the mask only."""
        return [self._extract(image) for image in images]

    def _extract(self, image: Image) -> Features:
        pixels = torch.from_numpy(np.ascontiguousarray(image.grey()))
        pixels = pixels.to(self.backbone.stem.conv.weight.device)
        coarse, fine = self.backbone(pixels[None, None].float() / 255)
        (rows, columns), stride = coarse.shape[-2:], self.backbone.stride
        cells = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), axis=-1).reshape(-1, 2)
        sides = stride * image.axes_to_stored
        features = Features(
            keypoints=image.to_stored(stride * cells - 0.5),
            descriptors=coarse[0].flatten(1).t().contiguous().cpu(),
            affine_frames=np.broadcast_to(sides, (len(cells), 2, 2)),
            cells=cells,
            grid=np.array([columns, rows]),
            maps=fine[0].cpu(),
            kind=self.kind,
            **image.features_fields(),
        )
        if image.mask is None:
            return features
        return features.select(torch.from_numpy(image.mask[stride * cells[:, 1], stride * cells[:, 0]]))
