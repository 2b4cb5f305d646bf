"""Attention as building blocks: score functions, masks and heads; the matching network is built on them.

These score functions take queries (…, N, d), keys (…, M, d) and values (…, M, d) and give (…, N, d):

- `scaled_dot_product`: softmax attention, masked and causal (Vaswani et al. 2017)
- `linear_attention`: in O(N + M) time and memory (Katharopoulos et al. 2020)
- `AdditiveAttention`: a learned comparison of sums (Bahdanau et al. 2015)
- `GeneralAttention`: a learned bilinear form (Luong et al. 2015)

`MultiHeadAttention` projects tokens, runs one of them in every head and joins the heads again.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matcher.errors import UsageError
from matcher.kernels.calls import attend, takes
from matcher.types import converted


def scaled_dot_product(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False
) -> Tensor:
    """softmax(q kᵀ / √d) v (Vaswani et al. 2017, eq. 1) of q (…, N, d), k and v (…, M, d) → (…, N, d).

    `mask` is broadcast to (…, N, M): bool, True = may attend, or numbers added to the scores (−inf: not);
    with `causal` row i attends to columns 0 … i only. Rows that may attend to nothing become zeros.

    >>> x = torch.eye(3)
    >>> scaled_dot_product(x, x, x, causal=True)[0]
    tensor([1., 0., 0.])
    >>> scaled_dot_product(x, x, x, torch.tensor([False, False, False]))[0]
    tensor([0., 0., 0.])
    """
    _refuse_misfits(q, k, v, mask=mask)
    if mask is not None or causal:
        # The stock kernel gives NaN to rows without a column: they attend to all, and then become zero.
        bias = additive_mask(q, k, mask, causal=causal)
        empty = (bias == -torch.inf).all(-1, keepdim=True)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(empty, 0.0))
        return out.masked_fill(empty, 0.0)
    if q.device.type == "cpu" and torch.is_grad_enabled() and q.requires_grad:
        # On CPUs the stock kernel's backward pass takes twice the time of these matrix products.
        return whole(q, k, v)
    if torch.compiler.is_compiling():  # which knows nothing of other kernels
        return F.scaled_dot_product_attention(q, k, v)
    given = (x.transpose(-2, -3) for x in (q, k, v))
    if by_kernel(q, k, v) and (found := attend(*given)) is not None:
        return found.unflatten(-1, (-1, q.shape[-1])).transpose(-2, -3)
    if q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16):
        return half_on_cpu(q, k, v)
    return F.scaled_dot_product_attention(q, k, v)


def _refuse_misfits(q: Tensor, k: Tensor, v: Tensor, width: int | None = None, mask: object = None) -> None:
    """`UsageError` unless all are tensors, (…, N, width), (…, M, width), (…, M, any) of one batch."""
    if torch.compiler.is_compiling():
        return
    if mask is not None and not isinstance(mask, Tensor):
        raise UsageError(f"a mask is a tensor, not {type(mask).__name__}: torch.as_tensor makes one")
    given = [tuple(x.shape) if isinstance(x, Tensor) else () for x in (q, k, v)]
    try:
        np.broadcast_shapes(*(shape[:-2] for shape in given))  # torch's imports much
        fits = given[0][-1] == given[1][-1] == (width or given[0][-1]) and given[1][-2] == given[2][-2]
    except (IndexError, ValueError):
        fits = False
    if not fits:
        found = (str(shape) if shape else type(x).__name__ for x, shape in zip((q, k, v), given, strict=True))
        wanted = f"queries (…, N, {width or 'd'}), keys (…, M, {width or 'd'}) and values (…, M, d)"
        raise UsageError(f"attention takes {wanted}, tensors of one batch, not {', '.join(found)}")


def by_kernel(*given: Tensor) -> bool:
    """Whether the compiled kernel attends to such tensors (…, heads, N, d); matrix units are faster."""
    if torch.compiler.is_compiling():
        return False
    units = given[0].dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    return not units and all(map(takes, given))


def whole(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q kᵀ / √d + mask) v by whole matrix products."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    return torch.softmax(scores if mask is None else scores.add_(mask), dim=-1) @ v


def half_on_cpu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / √d) v in half precision: stock on matrix units, else in blocks."""
    rows, columns = q.shape[-2], k.shape[-2]
    alike = k.shape == v.shape and (*q.shape[:-2], q.shape[-1]) == (*k.shape[:-2], k.shape[-1])
    if not rows or not columns or not alike:  # else the shape of the queries tells every place
        return whole(q, k, v)
    q, k, v = (F.pad(x, (0, 0, 0, even_size(x.shape[-2]) - x.shape[-2])) for x in (q, k, v))
    mask = None
    if k.shape[-2] > columns:
        mask = q.new_zeros((1,) * (q.dim() - 1) + (k.shape[-2],))
        mask[..., columns:] = -torch.inf
    if q.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[..., :rows, :]
    return _blocked(q, k, v, mask)[..., :rows, :]


def even_size(count: int) -> int:
    """This number of points or a little more: oneDNN compiles products in half precision for every number of
    rows, which takes as long as a dozen of them, and keeps more than half a megabyte of each."""
    step = 64 * (1 if count <= 512 else 2 if count <= 2048 else 4)
    return -(-count // step) * step


def _blocked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Matrix products of blocks in the cache: without matrix units twice as fast as the stock kernel."""
    leading = q.shape[:-2]
    if leading.numel() * q.shape[-2] * k.shape[-2] <= 2**19:
        return whole(q, k, v, mask)
    mask = None if mask is None else mask.reshape(-1)
    out = torch.empty_like(q)  # dense, in q's order of axes
    for head in product(*map(range, leading)):
        for rows in range(0, q.shape[-2], 512):
            block = (*head, slice(rows, rows + 512))
            out[block] = whole(q[block], k[head], v[head], mask)
    return out


def additive_mask(q: Tensor, k: Tensor, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
    """What is added to the scores of q (…, N, d) and k (…, M, d): 0, −inf or the numbers of `mask`, broadcast
    to (…, N, M), in the dtype of q; `mask` and `causal` as in `scaled_dot_product`. `UsageError`: a mask of
    integers, or of another shape.

    >>> additive_mask(torch.zeros(2, 1), torch.zeros(2, 1), causal=True)
    tensor([[0., -inf],
            [0., 0.]])
    """
    bias = q.new_zeros(1, 1)
    if causal:
        rows, columns = q.shape[-2], k.shape[-2]
        later = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(1)
        bias = q.new_zeros(rows, columns).masked_fill(later, -torch.inf)
    if mask is None:
        return bias
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise UsageError(f"a mask is bool, True = may attend, or floats added to scores, not {mask.dtype}")
    scores = (*torch.broadcast_shapes(q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-2])
    try:
        mask.expand(scores)
    except RuntimeError:
        raise UsageError(f"a mask {tuple(mask.shape)} is not broadcast to scores {scores}") from None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    return bias + mask


def _weighted(scores: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """softmax(scores + bias) v; zeros for rows without a column."""
    if bias is None:
        return torch.softmax(scores, dim=-1) @ v
    empty = (bias == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores + bias.masked_fill(empty, 0.0), dim=-1)
    return weights.masked_fill(empty, 0.0) @ v


def linear_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """φ(q) (φ(k)ᵀ v) / φ(q) Σφ(k) with φ = elu + 1, in O(N + M) memory (Katharopoulos et al. 2020, eq. 7), of
    q (…, N, d), k and v (…, M, d), and `mask` (…, M) bool, True = the column may be attended to;
    `UsageError`: a mask of another type or shape.

    >>> x = torch.ones(4, 2)
    >>> linear_attention(x, x, torch.arange(4.0).unsqueeze(1), torch.tensor([True, False, False, True]))[0]
    tensor([1.5000])
    """
    _refuse_misfits(q, k, v, mask=mask)
    if mask is not None:
        columns = (*torch.broadcast_shapes(q.shape[:-2], k.shape[:-2]), k.shape[-2])
        try:
            mask.expand(columns)
        except RuntimeError:
            raise UsageError(f"a mask {tuple(mask.shape)} is not broadcast to columns {columns}") from None
        if mask.dtype != torch.bool:
            raise UsageError(f"a mask of linear attention is bool, True = may attend, not {mask.dtype}")
    if not k.shape[-2]:
        return (q @ k.transpose(-1, -2)) @ v  # zeros
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

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """(…, N, d), (…, M, d), (…, M, d) → (…, N, d); `bias` (…, N, M) is added to the scores."""
        _refuse_misfits(q, k, v)
        joint = torch.tanh(self.query(q).unsqueeze(-2) + self.key(k).unsqueeze(-3))
        return _weighted(self.score(joint).squeeze(-1), v, bias)


class GeneralAttention(nn.Module):
    """softmax(q W kᵀ) v (Luong et al. 2015, eq. 8, "general")."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.form = nn.Linear(width, width, bias=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """(…, N, d), (…, M, d), (…, M, d) → (…, N, d); `bias` (…, N, M) is added to the scores."""
        _refuse_misfits(q, k, v)
        return _weighted(self.form(q) @ k.transpose(-1, -2), v, bias)


Kernel = Callable[..., Tensor]  # queries, keys, values, and what restricts them


def build_attention(name: str, width: int) -> Kernel:
    """The score function softmax, linear, additive or general, for heads of `width` channels; `UsageError`:
    another name."""
    fixed = {"softmax": scaled_dot_product, "linear": linear_attention}
    learned = {"additive": AdditiveAttention, "general": GeneralAttention}
    if name not in fixed | learned:
        raise UsageError(f"attention {name!r} is not one of {', '.join(fixed | learned)}")
    return fixed[name] if name in fixed else learned[name](width)


def mapped(layer: nn.Module, x: Tensor) -> Tensor:
    """A linear map of x (…, inputs) in the precision of its weights → (…, outputs); `nn.Identity` is none."""
    if isinstance(layer, nn.Identity) or torch.is_autocast_enabled(x.device.type):
        return layer(x)
    x = converted(x, layer.weight.dtype)
    return layer(x) if torch.is_grad_enabled() else linear(x, layer.weight, layer.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (…, T, inputs) weightᵀ + bias → (…, T, outputs), on a CPU in half precision with `missing_rows`."""
    if not (missing := missing_rows(x.shape[-2], weight)):
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, missing)), weight, bias)[..., : x.shape[-2], :]


def missing_rows(rows: int, weight: Tensor) -> int:
    """How many rows are missing to a multiple of 64 where products are compiled (`even_size`)."""
    if weight.device.type != "cpu" or weight.dtype == torch.float32 or torch.compiler.is_compiling():
        return 0
    return -rows % 64


def merge_heads(x: Tensor) -> Tensor:
    """(…, heads, N, d) → (…, N, heads · d)."""
    return x.transpose(-2, -3).flatten(-2)


class MultiHeadAttention(nn.Module):
    """Concat(head_1 … head_h) W_O of projected queries, keys, values (Vaswani et al. 2017, section 3.2.2).

    Queries, keys and values are one linear map `qkv`, in this order; with `shared_qk` queries and keys are
    the same (LightGlue, Lindenberger et al. 2023, eq. 5). `UsageError`: `heads` that do not divide `dim`, or
    an unknown score function.

    >>> attention = MultiHeadAttention(8, heads=2, score="linear")
    >>> attention(torch.randn(5, 8)).shape  # self-attention of one sequence
    torch.Size([5, 8])
    """

    def __init__(
        self, dim: int, heads: int, score: str = "softmax", *, bias: bool = True, shared_qk: bool = False
    ) -> None:
        super().__init__()
        if heads < 1 or dim < 1 or dim % heads:
            raise UsageError(f"dim, {dim}, must be a multiple of heads, {heads}, both at least 1")
        self.heads = heads
        self.qkv = nn.Linear(dim, (2 if shared_qk else 3) * dim, bias=bias)
        self.score = build_attention(score, dim // heads)
        self.out = nn.Linear(dim, dim, bias=bias)

    def project(self, x: Tensor) -> Tensor:
        """(…, N, dim) → (…, N, 2 or 3, heads, dim / heads): queries are part 0, keys −2, values −1."""
        return mapped(self.qkv, x).unflatten(-1, (-1, self.heads, self.qkv.in_features // self.heads))

    def forward(
        self,
        x: Tensor,
        source: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x (…, N, dim) attends to source (…, M, dim), or to itself → (…, N, dim); with `weights` also what
        each row attends to, (…, heads, N, M), of sum 1.

        `mask` and `causal` are as `scaled_dot_product` takes them, for all heads. `UsageError`: either with
        linear attention, no tensors, or another width or batch.
        """
        source = x if source is None else source
        _refuse_misfits(x, source, source, self.qkv.in_features, mask=mask)
        q, parts = self.project(x)[..., 0, :, :], self.project(source)
        q, k, v = (y.transpose(-2, -3) for y in (q, parts[..., -2, :, :], parts[..., -1, :, :]))
        bias = []
        if mask is not None or causal:
            if self.score is linear_attention:
                raise UsageError("masks and causality do not go with score='linear'")
            mask = mask if mask is None or mask.dim() < 3 else mask.unsqueeze(-3)
            bias = [additive_mask(q, k, mask, causal=causal)]
        found = self.out(merge_heads(self.score(q, k, v, *bias)))
        if not weights:
            return found
        # Of unit vectors as values, every score function gives its weights.
        units = torch.eye(k.shape[-2], dtype=v.dtype, device=v.device).expand(*k.shape[:-1], -1)
        return found, self.score(q, k, units, *bias)
