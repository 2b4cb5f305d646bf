"""The pairs that a choice makes of a run's images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from matcher.collection.pair_choice import PairChoice
from matcher.collection.pairlists import exhaustive, sequential
from matcher.collection.runner import OnProgress, StageProgress
from matcher.collection.settings import Setup, build
from matcher.collection.store import Store


def chosen_pairs(
    choice: PairChoice, names: Sequence[str], store: Store, setup: Setup, on_progress: OnProgress
) -> Iterable[tuple[str, str]]:
    """The pairs of images for a choice that is no list.

    Args:
        choice: the method.
        names: the images; for methods that compare features, those that have some.
        store: of the run.
        setup: of the run, for methods that match.
        on_progress: called with the progress of those.

    Raises:
        UsageError: "nearby" with fewer than two images whose header has a position.
    """
    if choice.method == "exhaustive":
        return exhaustive(names)
    if choice.method == "sequential":
        return sequential(names, choice.neighbours)
    from matcher.collection.nearby import nearby_pairs, positions_of

    folder = store.image_folder
    if choice.method == "nearby":
        return nearby_pairs(positions_of(names, folder), choice.neighbours)
    from matcher.match.retrieval import similar_pairs

    if choice.method == "similar":
        return similar_pairs(names, store.features, choice.neighbours)
    return _preemptive(choice.neighbours, names, store, setup, on_progress)


def _preemptive(
    neighbours: int, names: Sequence[str], store: Store, setup: Setup, on_progress: OnProgress
) -> list[tuple[str, str]]:
    """Candidates by looks and, where photos say it, by position, of which those that agree are chosen."""
    from matcher.collection.nearby import nearby_pairs, positions_of
    from matcher.collection.preemptive import candidate_pairs, preemptive_pairs

    positions = positions_of(names, store.image_folder)
    near = nearby_pairs(positions, neighbours) if len(positions) > 1 else []
    known = _paired(store)
    candidates = [
        pair
        for pair in candidate_pairs(names, store.features, neighbours, near)
        if frozenset(pair) not in known
    ]

    def report(done: int, total: int) -> None:
        on_progress(StageProgress("choose", done, 0, total))

    partners = Counter(name for pair in known for name in pair)
    return preemptive_pairs(candidates, store.features, build(setup), partners=partners, on_progress=report)


def _paired(store: Store) -> set[frozenset[str]]:
    """The pairs that the run has, finished or waiting."""
    names = store.names()
    tables = " UNION ".join(f"SELECT image0, image1 FROM {table}" for table in ("pairs", "failed", "waiting"))
    return {frozenset((names[first], names[second])) for first, second in store.rows(tables)}
