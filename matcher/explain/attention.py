"""What asked points attend to: weights of every block and head, their entropy, and rollout over layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matcher.attention import Kernel, linear_attention
from matcher.match.network.context import Layer
from matcher.match.network.tokens import Tokens

_ROWS = 256  # points whose weights are held at once in a rollout


@dataclass(frozen=True, eq=False)
class Attention:
    """What the asked points of one image attend to in one block, the strongest first."""

    points: np.ndarray  # (A, H, k) int64, attended points of the source image; -1 where the point is gone
    weights: np.ndarray  # (A, H, k) float32 of a total of 1
    entropy: np.ndarray  # (A, H) float32, nats; log of the number of points if all weights are equal


class AttentionInputs(NamedTuple):
    """One image attending to itself or the other; points are numbered through both images."""

    here: Tensor  # (n,) int64 input points that attend, image 1 after image 0
    there: Tensor  # (m,) those that are attended to
    q: Tensor  # (heads, n, d)
    k: Tensor  # (heads, m, d)
    kernel: Kernel

    def weights(self, rows: Tensor) -> Tensor:
        """(heads, A, m) float32, what the score function gives each attended point, for the rows (A,)."""
        if not len(self.there):
            return self.q.new_zeros(len(self.q), len(rows), 0, dtype=torch.float32)
        if self.kernel is linear_attention:
            q, k = self._features()
            return (q[:, rows] @ k.transpose(1, 2)) / self._totals(q[:, rows], k)
        if not isinstance(self.kernel, nn.Module):  # softmax of scaled products, however it is computed
            q, k = self.q[:, rows].float(), self.k.float()
            return torch.softmax((q * q.shape[-1] ** -0.5) @ k.transpose(1, 2), dim=-1)
        # A learned score function applied to unit vectors as values gives its weights, whichever it is.
        dtype = next(self.kernel.parameters()).dtype
        units = torch.eye(len(self.there), dtype=dtype, device=self.q.device).expand(len(self.q), -1, -1)
        return self.kernel(self.q[:, rows].to(dtype), self.k.to(dtype), units).float()

    def spread(self, shares: Tensor) -> Tensor:
        """Shares (A, n) of the points that attend, handed on to those they attend to: (A, m)."""
        if self.kernel is linear_attention:  # a grid has ten thousand points: never the weights themselves
            q, k = self._features()
            summary = (shares / self._totals(q, k).transpose(1, 2)) @ q  # (heads, A, d)
            return (summary @ k.transpose(1, 2)).mean(0)
        total = shares.new_zeros(len(shares), len(self.there))
        for rows in torch.arange(len(self.here), device=shares.device).split(_ROWS):
            total += shares[:, rows] @ self.weights(rows).mean(0)
        return total

    def _features(self) -> tuple[Tensor, Tensor]:
        """φ of queries and keys, φ = elu + 1 (Katharopoulos et al. 2020, eq. 7)."""
        return F.elu(self.q.float()) + 1, F.elu(self.k.float()) + 1

    @staticmethod
    def _totals(q: Tensor, k: Tensor) -> Tensor:
        """(heads, A, 1) what the weights of each row are divided by, with the same least total."""
        return (q @ k.sum(1).unsqueeze(-1)) + 1e-6


def attention_inputs(layer: Layer, tokens: Tokens, offset: int) -> list[AttentionInputs]:
    """Queries and keys of a layer: self-attention of image 0 and 1, cross-attention of image 0 and 1."""
    ((n, _),) = tokens.layout.counts
    ids, sides = (tokens.index[:n], tokens.index[n:] + offset), (slice(None, n), slice(n, None))
    blocks = zip(
        (layer.self_block, layer.cross_block),
        layer.queries_keys(tokens.x, tokens.rotations, tokens.layout),
        strict=True,
    )
    found = []
    for cross, (block, (q, k)) in enumerate(blocks):
        q, k = q.transpose(0, 1), k.transpose(0, 1)
        for here in (0, 1):
            there = 1 - here if cross else here
            found.append(
                AttentionInputs(ids[here], ids[there], q[:, sides[here]], k[:, sides[there]], block.score)
            )
    return found


def strongest_attention(block: AttentionInputs, asked: np.ndarray, strongest: int, offset: int) -> Attention:
    """The strongest weights of the asked points (numbered through both images) that are still there."""
    heads, count = len(block.q), min(strongest, len(block.there))
    points = np.full((len(asked), heads, strongest), -1, np.int64)
    weights, entropy = np.zeros(points.shape, np.float32), np.zeros(points.shape[:2], np.float32)
    place = {point: row for row, point in enumerate(block.here.tolist())}
    alive = [i for i, point in enumerate(asked.tolist()) if point in place]
    if alive and count:
        rows = torch.tensor([place[int(asked[i])] for i in alive], device=block.q.device)
        found = block.weights(rows).transpose(0, 1)  # (A, heads, m)
        top = found.topk(count, dim=-1)
        there = block.there - offset * int(block.there[0] >= offset)
        points[alive, :, :count] = there[top.indices].cpu().numpy()
        weights[alive, :, :count] = top.values.cpu().numpy()
        entropy[alive] = torch.special.entr(found).sum(-1).cpu().numpy()
    return Attention(points, weights, entropy)


def rollout(inputs: list[list[AttentionInputs]], asked: np.ndarray, total: int) -> np.ndarray:
    """Where the information of asked points came from: the product of (I + mean over heads)/2 of all blocks.

    Abnar and Zuidema 2020, "Quantifying attention flow in transformers", section 3.
    """
    device = inputs[0][0].q.device
    rows = torch.from_numpy(asked).to(device)
    flow = torch.zeros(len(asked), total, device=device)
    flow[torch.arange(len(asked), device=device), rows] = 1.0
    for blocks in reversed(inputs) if len(asked) else ():
        for pair in (blocks[2:], blocks[:2]):
            source = flow.clone()
            for block in pair:
                if len(block.here) and len(block.there):
                    share = flow[:, block.here] / 2
                    source[:, block.here] -= share
                    source[:, block.there] += block.spread(share)
            flow = source
    return flow.cpu().numpy()
