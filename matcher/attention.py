"""Attention as building blocks: score functions, masks and heads.

Multi-head (Vaswani et al. 2017), masked and causal, additive (Bahdanau et al. 2015), general (Luong et
al. 2015) and linear attention (Katharopoulos et al. 2020); the matching network is built on them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matcher.kernels.processor import half_on_processor, whole


def scaled_dot_product(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False
) -> Tensor:
    """softmax(q kᵀ / √d) v (Vaswani et al. 2017, eq. 1).

    Args:
        q: (…, N, d). k, v: (…, M, d).
        mask: broadcast to (…, N, M); bool, True = may attend, or numbers added to the scores (−inf: not)
        causal: row i attends to columns 0 … i only.

    Returns:
        (…, N, d); zeros for rows that may attend to nothing.
    """
    if mask is not None or causal:
        return _masked(q, k, v, allowed(q, k, mask, causal))
    if q.device.type == "cpu" and torch.is_grad_enabled() and q.requires_grad:
        # On CPUs the stock kernel's backward pass takes twice the time of these matrix products.
        return whole(q, k, v)
    if q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16):
        return half_on_processor(q, k, v)
    return F.scaled_dot_product_attention(q, k, v)


def allowed(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """An additive mask (…, N, M) from a boolean or additive one and causality."""
    rows, columns = q.shape[-2], k.shape[-2]
    bias = q.new_zeros(rows, columns)
    if causal:
        later = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(1)
        bias = bias.masked_fill(later, -torch.inf)
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    return bias + mask


def _masked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) + bias
    weights = torch.softmax(scores, dim=-1).masked_fill((bias == -torch.inf).all(-1, keepdim=True), 0.0)
    return weights @ v


def linear_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """φ(q) (φ(k)ᵀ v) / φ(q) Σφ(k) with φ = elu + 1, in O(N + M) memory (Katharopoulos et al. 2020, eq. 7).

    Args:
        q: (…, N, d). k, v: (…, M, d).
        mask: (…, M) bool, True = the column may be attended to.
    """
    # Dense heads: the products take two thirds of the time that they take on strided ones.
    q, k, v = (x.contiguous() for x in (q, k, v))
    q, k = F.elu(q).add_(1), F.elu(k).add_(1)
    if mask is not None:
        k = k * mask.unsqueeze(-1)
    # Means instead of sums, so that half precision does not overflow.
    summary = k.transpose(-1, -2) @ (v / k.shape[-2])
    least = max(1e-6 / k.shape[-2], torch.finfo(q.dtype).tiny)
    return (q @ summary) / (q @ k.mean(-2, keepdim=True).transpose(-1, -2) + least)


class AdditiveAttention(nn.Module):
    """softmax(wᵀ tanh(W_q q + W_k k)) v (Bahdanau et al. 2015, appendix A.1.2); O(N·M·d) memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(…, N, d), (…, M, d), (…, M, d) → (…, N, d)."""
        joint = torch.tanh(self.query(q).unsqueeze(-2) + self.key(k).unsqueeze(-3))
        return torch.softmax(self.score(joint).squeeze(-1), dim=-1) @ v


class GeneralAttention(nn.Module):
    """softmax(q W kᵀ) v (Luong et al. 2015, eq. 8, "general")."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.form = nn.Linear(width, width, bias=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(…, N, d), (…, M, d), (…, M, d) → (…, N, d)."""
        return torch.softmax(self.form(q) @ k.transpose(-1, -2), dim=-1) @ v


Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]


def build_attention(name: str, width: int) -> Kernel:
    """The score function that a configuration names, for heads of `width` channels."""
    learned = {"additive": AdditiveAttention, "general": GeneralAttention}
    if name in learned:
        return learned[name](width)
    return {"softmax": scaled_dot_product, "linear": linear_attention}[name]


class MultiHeadAttention(nn.Module):
    """Concat(head_1 … head_h) W_O of projected queries, keys, values (Vaswani et al. 2017, section 3.2.2)."""

    def __init__(self, dim: int, heads: int, attention: str = "softmax") -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.attention = build_attention(attention, dim // heads)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        """x (B, N, dim) listens to source (B, M, dim) → (B, N, dim)."""
        q, k, v = (
            project(y).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for project, y in ((self.query, x), (self.key, source), (self.value, source))
        )
        return self.out(self.attention(q, k, v).transpose(-2, -3).flatten(-2))
