"""Which pairs a run matches by default: as in the run so far, or by the number of images."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from matcher.collection.encoding import DamagedError, parse_json
from matcher.errors import UsageError

PairMethod = Literal["names", "file", "exhaustive", "sequential", "similar", "preemptive", "nearby"]
EXHAUSTIVE_UP_TO = 50  # images; 1,225 pairs
NEIGHBOURS = 20  # most similar images of each, in a larger collection
_FROM_FEATURES = ("similar", "preemptive")


@dataclass(frozen=True)
class PairChoice:
    """How pairs were chosen; stored, so that images added later are paired in the same way."""

    method: PairMethod
    neighbours: int | None = None  # of the methods that have a number of them
    by_default: bool = False  # not requested by the user

    def arguments(self) -> dict[str, Any]:
        """The same as arguments of `Collection.add_pairs`; empty if pairs came from a list."""
        if self.method in ("names", "file"):
            return {}
        return {self.method: True if self.neighbours is None else self.neighbours}

    @property
    def needs_features(self) -> bool:
        """Whether images must be extracted before their pairs can be chosen."""
        return self.method in _FROM_FEATURES

    def to_json(self) -> str:
        """As the store keeps it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PairChoice:
        """The inverse of `to_json`.

        Raises:
            DamagedError: it is not what `to_json` makes.
        """
        values = parse_json(text, "the choice of pairs")
        right = (
            isinstance(values, dict)
            and {"method"} <= set(values) <= {field.name for field in fields(cls)}
            and values["method"] in get_args(PairMethod)
            and isinstance(values.get("by_default", False), bool)
            and (values.get("neighbours") is None or is_count(values["neighbours"]))
        )
        if not right:
            raise DamagedError(f"the choice of pairs is {ascii(values)[:80]}")
        return cls(**values)


def is_count(value: Any) -> bool:
    """Whether a value is a number of neighbours."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def requested_choice(
    pairs: Iterable[tuple[str, str]] | PairChoice | None,
    file: object | None,
    exhaustive: bool,
    **neighbours: int | None,
) -> PairChoice:
    """The choice that the arguments of `Collection.add_pairs` make; `neighbours`: those that are numbers.

    Raises:
        UsageError: not exactly one of them was given.
    """
    counts = {method: count for method, count in neighbours.items() if count is not None}
    if sum([exhaustive, pairs is not None, file is not None, *(1 for _ in counts)]) != 1:
        raise UsageError(
            "pairs come from exactly one of: names, a file, exhaustive, "
            + ", ".join(f"{method}=K" for method in neighbours)
        )
    if isinstance(pairs, PairChoice):
        if pairs.method in ("names", "file"):
            raise UsageError("the pairs of this run came from a list; list those of the new images as well")
        return pairs
    if counts:
        ((method, count),) = counts.items()
        return PairChoice(method, count)
    return PairChoice("exhaustive" if exhaustive else "names" if file is None else "file")


def default_choice(
    images: int,
    *,
    exhaustive_up_to: int = EXHAUSTIVE_UP_TO,
    neighbours: int = NEIGHBOURS,
    preemptive: bool = False,
) -> PairChoice:
    """Every pair of a small collection, the most similar images of each in a larger one.

    Args:
        images: of the collection.
        exhaustive_up_to: images of which every pair is matched.
        neighbours: similar images of each, in a collection of more.
        preemptive: of these, only those whose strongest keypoints agree.
    """
    if images <= exhaustive_up_to:
        return PairChoice("exhaustive", by_default=True)
    return PairChoice("preemptive" if preemptive else "similar", neighbours, by_default=True)
