"""Which pairs a run matches by default: as in the run so far, or by the number of images."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from matcher.collection.encoding import DamagedError, parse_json
from matcher.collection.pairlists import exhaustive, sequential
from matcher.errors import UsageError

if TYPE_CHECKING:
    from matcher.data.features import Features

PairMethod = Literal["names", "file", "exhaustive", "sequential", "similar"]
EXHAUSTIVE_UP_TO = 50  # images; 1,225 pairs
NEIGHBOURS = 20  # most similar images of each, in a larger collection


@dataclass(frozen=True)
class PairChoice:
    """How pairs were chosen; stored, so that images added later are paired in the same way."""

    method: PairMethod
    neighbours: int | None = None  # of sequential and similar
    by_default: bool = False  # not requested by the user

    def arguments(self) -> dict[str, Any]:
        """The same as arguments of `Collection.add_pairs`; empty if pairs came from a list."""
        if self.method in ("names", "file"):
            return {}
        return {self.method: True if self.neighbours is None else self.neighbours}

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
    sequential: int | None,
    similar: int | None,
) -> PairChoice:
    """The choice that the arguments of `Collection.add_pairs` make.

    Raises:
        UsageError: not exactly one of them was given.
    """
    if sum([exhaustive, *(given is not None for given in (pairs, file, sequential, similar))]) != 1:
        raise UsageError("pairs come from exactly one of: names, a file, exhaustive, sequential=K, similar=K")
    if isinstance(pairs, PairChoice):
        if pairs.method in ("names", "file"):
            raise UsageError("the pairs of this run came from a list; list those of the new images as well")
        return pairs
    if sequential is not None or similar is not None:
        return PairChoice("similar" if sequential is None else "sequential", sequential or similar)
    return PairChoice("exhaustive" if exhaustive else "names" if file is None else "file")


def default_choice(
    images: int, *, exhaustive_up_to: int = EXHAUSTIVE_UP_TO, neighbours: int = NEIGHBOURS
) -> PairChoice:
    """Every pair of a small collection, the most similar images of each in a larger one.

    Args:
        images: of the collection.
        exhaustive_up_to: images of which every pair is matched.
        neighbours: similar images of each, in a collection of more.
    """
    if images <= exhaustive_up_to:
        return PairChoice("exhaustive", by_default=True)
    return PairChoice("similar", neighbours, by_default=True)


def chosen_pairs(
    choice: PairChoice, names: Sequence[str], features: Callable[[str], Features]
) -> Iterable[tuple[str, str]]:
    """The pairs of images for a choice that is no list.

    Args:
        choice: the method.
        names: the images; for "similar" those that have features.
        features: the features of an image.
    """
    if choice.method == "exhaustive":
        return exhaustive(names)
    if choice.method == "sequential":
        return sequential(names, choice.neighbours)
    from matcher.match.retrieval import similar_pairs

    return similar_pairs(names, features, choice.neighbours)
