"""The residual pyramid that describes an image without a detector (LoFTR, Sun et al. 2021, section 3.1).

Deep residual learning after He et al. 2016, top-down merging after Lin et al. 2017. Parameters:

- `stem.conv`, `stem.norm`: 7×7, to 1/2.
- `stages.{s}.{b}.first`, `.second` and, where the stride is 2, `.skip`, each with `conv` and `norm`: two
  blocks b per stage s, at 1/2, 1/4, 1/8 (the published layer1, layer2, layer3, with conv1 and bn1, conv2 and
  bn2, downsample.0 and downsample.1).
- `laterals.{s}`: 1×1 (layer1_outconv, layer2_outconv, layer3_outconv).
- `merges.{s}.inner.conv`, `.inner.norm` and `.outer`: 3×3 over a stage and what lies above it, for stages 0
  and 1 (layer1_outconv2 and layer2_outconv2, their members 0, 1 and 3).

Convolutions have no bias. Images of any size are taken: at the right and lower edge, as at the others,
every convolution meets zeros and nothing is cut off, so a side of W pixels gives ⌈W/8⌉ cells and all of them
lie on the image. Kernels are centred: cell i looks at pixel 8i and around it.
"""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matcher.config import BackboneConfig


class ConvNorm(nn.Module):
    """A convolution without bias, then batch normalisation."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) → (B, outputs, ⌈H/stride⌉, ⌈W/stride⌉)."""
        return self.norm(self.conv(x))

    def fuse(self) -> None:
        """Fold the normalisation, as it is in evaluation, into the convolution; for `fuse_backbone`."""
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
        self.laterals = nn.ModuleList(
            nn.Conv2d(inputs, outputs, 1, bias=False)
            for inputs, outputs in zip(widths, (*widths[1:], widths[-1]), strict=True)
        )
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
def fuse_backbone(backbone: Backbone, dtype: torch.dtype) -> Backbone:
    """A frozen copy for inference in `dtype`, its normalisations folded into its convolutions."""
    fused = copy.deepcopy(backbone).eval().requires_grad_(False)
    for part in list(fused.modules()):
        if isinstance(part, ConvNorm):
            part.fuse()
    return fused.to(dtype=dtype, memory_format=torch.channels_last)
