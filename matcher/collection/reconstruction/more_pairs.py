"""Further pairs for a model that lacks images, where the pairs of its run were chosen sparingly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations

from matcher.collection.collection import Collection
from matcher.collection.pair_choice import PairChoice
from matcher.collection.planning import add_pairs
from matcher.collection.preemptive import BEST
from matcher.collection.runner import OnProgress
from matcher.collection.writer import Writer
from matcher.match.retrieval import similar_pairs

# Images up to which a reconstruction matches every pair, and neighbours of each image in larger collections.
EXHAUSTIVE_UP_TO, NEIGHBOURS = 100, 30

OnRound = Callable[[int, int], None]  # images without a pose, pairs that are matched now


class MorePairs:
    """Called with the images without a pose, it matches more of their pairs; see `reconstruct`.

    First the pairs of each image with the most similar others, then all in a run of up to 100 images, in a
    larger one those that the strongest keypoints were compared of.
    """

    def __init__(
        self,
        collection: Collection,
        *,
        on_round: OnRound | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """For a run whose images have been added; `on_round` is called before pairs are matched."""
        self._collection = collection
        self._on_round, self._on_progress = on_round, on_progress
        self._rounds: Iterator[Iterable[tuple[str, str]]] | None = None

    def __call__(self, without_pose: frozenset[str]) -> bool:
        """Whether there are pairs that were not matched before; they are now."""
        if self._rounds is None:
            self._rounds = self._candidates()
        for pairs in self._rounds:
            if new := self._added(pairs, without_pose):
                if self._on_round is not None:
                    self._on_round(len(without_pose), new)
                self._collection.run(on_progress=self._on_progress)
                return True
        return False

    def _candidates(self) -> Iterator[Iterable[tuple[str, str]]]:
        """The pairs of each round; none for a run whose pairs were not chosen preemptively."""
        with self._collection.store as store:
            choice = store.pair_choice
            names = sorted(image.name for image in store.images() if image.status == "done")
        if not isinstance(choice, PairChoice) or choice.method != "preemptive":
            return
        yield self._similar(names, BEST)
        everything = len(names) <= EXHAUSTIVE_UP_TO
        yield combinations(names, 2) if everything else self._similar(names, choice.neighbours or NEIGHBOURS)

    def _similar(self, names: list[str], k: int) -> list[tuple[str, str]]:
        with self._collection.store as store:
            return list(similar_pairs(names, store.features, k))

    def _added(self, pairs: Iterable[tuple[str, str]], without_pose: frozenset[str]) -> int:
        """Of these pairs, those with an image without a pose go to the run; how many are new."""
        with Writer(self._collection.run_dir) as writer:
            return add_pairs(writer, (pair for pair in pairs if without_pose & set(pair)))[1]
