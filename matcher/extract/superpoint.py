"""SuperPoint (DeTone, Malisiewicz and Rabinovich 2018): one encoder, a point head and a descriptor head.

Pixel convention. Channel c of the point head's cell (i, j) is pixel (8j + c mod 8, 8i + c div 8), whose
centre has those integer coordinates, so points are ours as they are. Cell j of the descriptor map is centred
at 8j + 3.5. The published code, and with it every published matcher, reads descriptors at cell
(x − 3.5)(w − 1) / (8w − 4.5) of w instead of at (x − 3.5) / 8: right at the left edge, almost half a cell
short at the right one. `superpoint` reads them there, because matchers were trained so; the re-training
`superpoint-open` was published with the exact position and reads them at it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import grid_sample, max_pool2d, normalize, pixel_shuffle

from matcher.config import ExtractorConfig
from matcher.extract.front_end import Found, FrontEnd, grey, inner_pixels, padded, strongest
from matcher.types import Image

CELL = 8  # pixels a side
DESCRIPTOR_DIM = 256

_STAGES = (64, 64, 128, 128)  # two convolutions each, pooling by 2 after all but the last
_HEAD = 256


class ConvReluNorm(nn.Sequential):
    """Convolution, then ReLU, then batch normalisation; the last two where a layer has them."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, rectify: bool, normalised: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)
        self.rectify = nn.ReLU(inplace=True) if rectify else nn.Identity()
        self.norm = nn.BatchNorm2d(outputs, eps=1e-3) if normalised else nn.Identity()


class SuperPoint(nn.Module):
    """The network (section 3), with batch normalisation after each convolution where `normalised`."""

    def __init__(self, *, normalised: bool = False) -> None:
        super().__init__()
        widths = [width for width in _STAGES for _ in range(2)]
        self.encoder = nn.ModuleList(
            ConvReluNorm(inputs, outputs, 3, rectify=True, normalised=normalised)
            for inputs, outputs in zip([1, *widths], widths, strict=False)
        )
        self.points = self._head(CELL**2 + 1, normalised)
        self.descriptors = self._head(DESCRIPTOR_DIM, normalised)
        self.exact_sampling = normalised

    @staticmethod
    def _head(outputs: int, normalised: bool) -> nn.Sequential:
        return nn.Sequential(
            ConvReluNorm(_STAGES[-1], _HEAD, 3, rectify=True, normalised=normalised),
            ConvReluNorm(_HEAD, outputs, 1, rectify=False, normalised=normalised),
        )

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Grey (B, 1, H, W) in [0, 1], sides multiples of 8 → how probably pixels are points (B, H, W), and
        unit descriptors (B, 256, H/8, W/8)."""
        maps = pixels
        for index, block in enumerate(self.encoder):
            maps = block(maps)
            if index % 2 == 1 and index < len(self.encoder) - 1:
                maps = max_pool2d(maps, 2)
        # The last class says that the cell holds no point; the rest are its pixels, row by row.
        scores = pixel_shuffle(self.points(maps).softmax(dim=1)[:, :-1], CELL)[:, 0]
        return scores, normalize(self.descriptors(maps), dim=1)

    def describe(self, maps: Tensor, points: Tensor) -> Tensor:
        """Unit descriptors (N, 256) at points (N, 2) xy from the map (1, 256, h, w) of `forward`."""
        cells = maps.new_tensor([maps.shape[-1], maps.shape[-2]])
        centred = points - (CELL - 1) / 2
        if self.exact_sampling:
            position = centred / CELL
        else:
            position = centred * (cells - 1) / (CELL * cells - CELL / 2 - 0.5)
        # grid_sample counts from -1 at the outer edge of the first cell to 1 at that of the last.
        grid = (2 * position + 1) / cells - 1
        sampled = grid_sample(maps, grid[None, None], mode="bilinear", align_corners=False)
        return normalize(sampled[0, :, 0].T, dim=1)


def suppress(scores: Tensor, radius: int) -> Tensor:
    """(H, W) bool: points that are the strongest within `radius` pixels, equal neighbours included.

    In three rounds: the next finds points whose only stronger neighbours were suppressed themselves.
    """
    window = {"kernel_size": 2 * radius + 1, "stride": 1, "padding": radius}
    kept = torch.zeros_like(scores, dtype=torch.bool)
    free = torch.ones_like(kept)
    for _ in range(3):
        left = torch.where(free, scores, 0)
        kept |= (left == max_pool2d(left[None], **window)[0]) & free
        free = max_pool2d(kept[None].float(), **window)[0] == 0
    return kept


def _find(network: SuperPoint, image: Image, config: ExtractorConfig) -> Found:
    """Points of the image itself: what lies in the padding is cut off before suppression."""
    device = network.points[0].conv.weight.device
    pixels = grey([image], device)
    height, width = pixels.shape[-2:]
    maps, descriptors = network(padded(pixels, CELL))
    scores = maps[0, :height, :width]
    keep = suppress(scores, config.nms_radius) & (scores > config.score_threshold)
    y, x = (keep & inner_pixels(scores, 4)).nonzero().T
    points, scores = torch.stack([x, y], dim=-1).float(), scores[y, x]
    index = strongest(points, scores, image, config.max_keypoints)
    points = points[index]
    return Found(points, scores[index], network.describe(descriptors, points))


def _build(config: ExtractorConfig) -> nn.Module:
    return SuperPoint(normalised=config.kind == "superpoint-open")


_PUBLISHED = {"score_threshold": 0.005, "nms_radius": 4}
FRONT_ENDS = {
    "superpoint": FrontEnd(_build, _find, _PUBLISHED),
    "superpoint-open": FrontEnd(_build, _find, _PUBLISHED),
}
