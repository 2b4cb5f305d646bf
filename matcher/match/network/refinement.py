"""Matches of cells, moved to a fraction of a pixel (LoFTR, Sun et al. 2021, section 3.4)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from matcher.config import RefinementConfig
from matcher.match.network.context import build_layer
from matcher.match.network.packed import Layout


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
        self.layers = nn.ModuleList(build_layer(config.context) for _ in range(config.context.depth))

    def forward(
        self, states: tuple[Tensor, Tensor], maps: tuple[Tensor, Tensor], cells: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Where in image 1 the centre of image 0's window lies, K matches of one pair.

        Args:
            states: of the matched cells in image 0 and 1 after the context, (K, coarse_dim) each.
            maps: fine, (C, h, w) of either image.
            cells: column and row, (K, 2) each.

        Returns:
            (K, 2) xy offsets from image 1's cells, in cells of the coarse grid.
        """
        count, size = len(cells[0]), self.config.window**2
        if not count:
            return cells[0].new_zeros(0, 2)
        windows = [self._window(*side) for side in zip(states, maps, cells, strict=True)]
        tokens = torch.stack(windows, dim=1).flatten(0, 2)
        layout = Layout(((size, size),) * count)
        for layer in self.layers:
            tokens = layer(tokens, None, layout)
        first, second = tokens.view(count, 2, size, -1).unbind(1)
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
