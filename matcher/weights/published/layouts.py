"""What a table of a published checkpoint's names is, and the orders that its channels may lie in."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Order = Callable[
    [int, int], Tensor
]  # (channels, heads) → for each channel of ours, which one of theirs it is
_LEAF = r"(?:\.(?:weight|bias|running_mean|running_var|num_batches_tracked))?"
# Name in a template: (a, b) is a·n + b.
_NUMBERS = {"n": (1, 0), "even": (2, 0), "odd": (2, 1), "first": (3, 0), "second": (3, 1)}


class TensorRule(NamedTuple):
    """One line of a table: a module, or a lone parameter, of ours and what makes it.

    Weights, biases and running statistics follow their module. `{n}` is a number of ours, the other braces
    are what theirs has for it, as in `_NUMBERS`.
    """

    ours: str
    theirs: str  # names joined by " + " when several tensors, one below the other, are one of ours
    rows: Order | None = None  # order of the output channels
    columns: Order | None = None  # order of a weight's input channels
    copy: str = ""  # a tensor that must repeat the first of `theirs`


class TensorSource(NamedTuple):
    """Which tensors of theirs, one below the other, make a parameter of ours."""

    names: tuple[str, ...]
    copy: str = ""
    rows: Order | None = None
    columns: Order | None = None


@dataclass(frozen=True)
class CheckpointLayout:
    """How one implementation names and orders the parameters of a system."""

    system: str
    name: str
    rows: tuple[TensorRule, ...]
    renames: tuple[tuple[str, str], ...] = ()  # regular expressions that make newer names old ones
    ignored: tuple[str, ...] = ()  # beginnings of names that are no parameters of this network

    def tidy(self, name: str) -> str:
        """A name of theirs as the table has it."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def coverage(self, names: Iterable[str]) -> int:
        """How many of these names the table knows."""
        known = [part for row in self.rows for part in _parts(row)]
        pattern = re.compile("|".join(f"(?:{_expression(part)})" for part in known))
        return sum(pattern.fullmatch(self.tidy(name)) is not None for name in names)

    def find(self, ours: str) -> TensorSource:
        """What makes a parameter of ours; a tensor of the same name when no row knows it."""
        for row in self.rows:
            pattern = re.escape(row.ours).replace(re.escape("{n}"), "(?P<n>[0-9]+)")
            if match := re.fullmatch(f"{pattern}(?P<leaf>{_LEAF})", ours):
                n = int(match.groupdict().get("n", 0))
                numbers = {key: a * n + b for key, (a, b) in _NUMBERS.items()}
                names = tuple(part.format(**numbers) + match["leaf"] for part in row.theirs.split(" + "))
                copy = row.copy.format(**numbers) + match["leaf"] if row.copy else ""
                return TensorSource(names, copy, row.rows, row.columns)
        return TensorSource((ours,))


def _parts(row: TensorRule) -> list[str]:
    return [*row.theirs.split(" + "), *([row.copy] if row.copy else [])]


def _expression(theirs: str) -> str:
    return re.sub(r"\\{\w+\\}", "[0-9]+", re.escape(theirs)) + _LEAF


def _halves(width: int) -> Tensor:
    """Neighbouring channels that turn together, (0, 1), (2, 3), …, as ours: c with c + width/2."""
    return torch.arange(width).view(-1, 2).t().flatten()


def interleaved_rotary(channels: int, heads: int) -> Tensor:
    """LightGlue's fused projection, rows (head, channel, q k v) → ours, q k v of whole heads, halves."""
    index = torch.arange(channels).view(heads, -1, 3).permute(2, 0, 1)  # (3, heads, width)
    return torch.cat([index[:2, :, _halves(index.shape[2])].flatten(), index[2].flatten()])


def stacked_rotary(channels: int, heads: int) -> Tensor:
    """As `interleaved_rotary`, of q, k and v that are already apart."""
    index = torch.arange(channels).view(3, heads, -1)
    return torch.cat([index[:2, :, _halves(index.shape[2])].flatten(), index[2].flatten()])


def fast_heads(channels: int, heads: int) -> Tensor:
    """SuperGlue's q, k and v, in which channel d of head h lies at d·heads + h → whole heads."""
    return torch.arange(channels).view(3, -1, heads).transpose(1, 2).flatten()


def fast_heads_merged(channels: int, heads: int) -> Tensor:
    """As `fast_heads`, of the single vector that comes out of attention."""
    return torch.arange(channels).view(-1, heads).t().flatten()
