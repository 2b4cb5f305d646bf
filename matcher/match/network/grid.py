"""Matching without a detector, as a front end: every cell of a regular grid is a keypoint.

LoFTR (Sun et al. 2021). Pixel convention: cell i looks at pixel 8i and around it, and the published networks
were trained with the point 8i in pixels whose centres lie at +0.5. In ours, where the first pixel's centre is
(0, 0), that point is 8i − 0.5.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from matcher.data.features import Features
from matcher.data.image import Image
from matcher.match.network.backbone import Backbone


class GridExtractor:
    """Cells with descriptors, position on the grid and a finer map; `affine_frames` are their sides."""

    def __init__(self, backbone: Backbone, kind: str = "loftr") -> None:
        """Keep the network, which runs where its parameters lie.

        Args:
            backbone: in evaluation mode; it belongs to the matcher, whose weights hold its parameters.
            kind: what the features are called.
        """
        self.backbone = backbone
        self.kind = kind

    @torch.no_grad()
    def __call__(self, images: Sequence[Image]) -> list[Features]:
        """Features of each image in stored pixels, on the CPU, cells row by row, within the mask only."""
        return [self._extract(image) for image in images]

    def _extract(self, image: Image) -> Features:
        pixels = torch.from_numpy(np.ascontiguousarray(image.grey())).to(
            self.backbone.stem.conv.weight.device
        )
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
