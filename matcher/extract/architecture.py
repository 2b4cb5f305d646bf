"""Sizes of our front end's network; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from matcher.errors import IntegrityError

DESCRIPTOR_DIM = 64


@dataclass(frozen=True)
class Architecture:
    """An encoder's maps, finest first, and the MLP that describes points; the shipped sizes by default."""

    widths: tuple[int, ...] = (16, 32, 64, 128, 192)  # channels of maps at 1/2, 1/4, 1/8, … of the resolution
    depths: tuple[int, ...] = (2, 2, 3, 4, 3)  # convolutions of each
    hidden: int = 384  # of the MLP

    @property
    def stride(self) -> int:
        """Pixels from one sample of the coarsest map to the next."""
        return 2 ** len(self.widths)

    def rules(self) -> list[tuple[bool, str]]:
        """Conditions on the values, each with the message for a recipe that violates it."""
        sizes = (*self.widths, *self.depths, self.hidden)
        return [
            (2 <= len(self.widths) == len(self.depths), "network: as many widths as depths, at least 2"),
            (len(self.widths) <= 6, "network.widths: at most 6"),
            (min(sizes, default=0) >= 1, "network: sizes of at least 1"),
            (max(sizes, default=0) <= 4096, "network: sizes of at most 4096"),
        ]

    def __str__(self) -> str:
        """In words."""
        widths, depths = (" ".join(map(str, each)) for each in (self.widths, self.depths))
        return f"widths {widths}, depths {depths}, hidden {self.hidden}"

    def contains(self, smaller: Architecture) -> bool:
        """Whether a network of those sizes can grow to these."""
        return self.hidden >= smaller.hidden and all(
            len(own) >= len(other) and all(a >= b for a, b in zip(own, other, strict=False))
            for own, other in ((self.widths, smaller.widths), (self.depths, smaller.depths))
        )


def shapes_of(sizes: Architecture) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the parameters of such a network, batch normalisation folded away."""
    widths, found = sizes.widths, {}
    before = 1
    for stage, (width, depth) in enumerate(zip(widths, sizes.depths, strict=True)):
        for block in range(depth):
            kernel = 5 if stage == block == 0 else 3
            found[_weight(stage, block)] = (width, before, kernel, kernel)
            before = width
    for stage, (lower, upper) in enumerate(pairwise(widths)):
        found[f"lift.{stage}.weight"] = (lower, upper, 1, 1)
    found["mix.0.weight"] = (widths[0], widths[0], 3, 3)
    found["points.weight"] = (4, widths[0], 3, 3)
    found["descriptor.0.weight"] = (sizes.hidden, sum(widths))
    found["descriptor.2.weight"] = (DESCRIPTOR_DIM, sizes.hidden)
    biases = {name.removesuffix("weight") + "bias": shape[:1] for name, shape in found.items()}
    return found | biases


def architecture_of(shapes: Mapping[str, Sequence[int]]) -> Architecture:
    """The sizes of the network whose parameters have these names and shapes.

    Raises:
        IntegrityError: there is no such network; the message reads on after the file's name.
    """
    depths: list[int] = []
    while (depth := _convolutions(shapes, len(depths))) > 0:
        depths.append(depth)
    try:
        widths = [shapes[_weight(stage, 0)][0] for stage in range(len(depths))]
        sizes = Architecture(tuple(widths), tuple(depths), shapes["descriptor.0.weight"][0])
    except (KeyError, IndexError):
        sizes = Architecture((), ())
    expected = shapes_of(sizes) if all(holds for holds, _ in sizes.rules()) else {}
    found = {name: tuple(shape) for name, shape in shapes.items()}
    if not expected or found != expected:
        strange = sorted(name for name in found | expected if found.get(name) != expected.get(name))
        raise IntegrityError(f"does not hold the tensors of our front end: {', '.join(strange[:8])}")
    return sizes


def _weight(stage: int, block: int) -> str:
    return f"encoder.{stage}.{block}.0.weight"


def _convolutions(shapes: Mapping[str, Sequence[int]], stage: int) -> int:
    """How many convolutions a map is made by."""
    depth = 0
    while _weight(stage, depth) in shapes:
        depth += 1
    return depth
