"""What `matcher collection` and `matcher sfm` share: options, and the steps from images to matched pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from matcher.cli.exits import PARTIAL
from matcher.cli.messages import say, show
from matcher.cli.progress import stage_progress

if TYPE_CHECKING:
    from matcher.collection.collection import Collection
    from matcher.collection.pair_choice import PairChoice
    from matcher.collection.reconstruction.more_pairs import MorePairs
    from matcher.collection.runner import StageProgress
    from matcher.collection.store import Store

_SHOWN = 5  # failures that are printed
_TILED_KEYPOINTS = 20_000  # of a photo, by tiles

PairFile = Annotated[
    Path | None,
    typer.Option("--pairs", metavar="FILE", help="Match the pairs listed in FILE, two names per line."),
]
Exhaustive = Annotated[bool, typer.Option("--exhaustive", help="Match every pair of images.")]
Sequential = Annotated[
    int | None,
    typer.Option("--sequential", metavar="K", min=1, help="Match each image with the next K by name."),
]
Similar = Annotated[
    int | None,
    typer.Option("--similar", metavar="K", min=1, help="Match each image with the K most similar ones."),
]
Preemptive = Annotated[
    int | None,
    typer.Option(
        "--preemptive",
        metavar="K",
        min=1,
        help="Of each image's K most similar ones, match those whose strongest keypoints agree.",
    ),
]
Nearby = Annotated[
    int | None,
    typer.Option(
        "--nearby",
        metavar="K",
        min=1,
        help="Match each photo with the K nearest ones, by the GPS positions of their EXIF headers.",
    ),
]
Tiles = Annotated[
    bool,
    typer.Option(
        "--tiles",
        help="For large photos: find keypoints by tiles at full resolution, by default 20000 per photo.",
    ),
]
FeaturesFile = Annotated[
    Path | None,
    typer.Option(
        "--features", metavar="FILE.h5", help="Use existing keypoints and descriptors, in hloc's HDF5 layout."
    ),
]
Masks = Annotated[
    Path | None,
    typer.Option(
        "--masks", metavar="DIR", help="Masks named like the images; black pixels yield no keypoints."
    ),
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        metavar="PATTERN",
        help="Use only these images: a name, FOLDER/, a glob or @LIST.txt; repeatable.",
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude", metavar="PATTERN", help="Leave these images out; same patterns as --include; repeatable."
    ),
]
WorkerCount = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        min=0,
        help="Worker processes; by default one per core or GPU. 0 uses this process.",
    ),
]
Restart = Annotated[bool, typer.Option("--restart", help="Delete the contents of RUN_DIR and start over.")]


def with_tiles(given: dict[str, Any]) -> dict[str, Any]:
    """The options with keypoints by tiles: --max-keypoints are those of a photo, not of a tile."""
    rest = {name: value for name, value in given.items() if name != "max_keypoints"}
    return {**rest, "tiles": given.get("max_keypoints", _TILED_KEYPOINTS)}


def choose_pairs(pairs: Path | None, exhaustive: bool, **counts: int | None) -> dict[str, Any]:
    """How pairs are chosen, as arguments of `Collection.add_pairs`; empty without an option."""
    choice = dict(file=pairs, exhaustive=exhaustive or None, **counts)
    choice = {name: value for name, value in choice.items() if value is not None}
    if len(choice) > 1:
        others = ", ".join(f"--{name}" for name in counts)
        raise typer.BadParameter(f"give one of --pairs, --exhaustive, {others}")
    return choice


def enter_images(opened: Collection, images: Path, **how: Any) -> None:
    """Add the images of a folder (`how`: arguments of `Collection.add_images`) and report changes."""
    changes = opened.add_images(images, **how)
    if changes.masked is not None:
        say(f"{changes.masked} of {changes.images} images have a mask")
    if changes.changed:
        have = "have" if changes.changed > 1 else "has"
        say(f"{_count(changes.changed, 'image')} {have} changed and will be extracted and matched again")
    if changes.gone:
        say(
            f"no longer in {images}, or not selected: {_count(changes.gone, 'image')} of the run; existing "
            "matches are kept (--restart deletes them)"
        )
    if changes.unusable:
        some = ", ".join(changes.unusable[:_SHOWN])
        say(f"left out because their names cannot be stored: {_count(len(changes.unusable), 'file')}: {some}")


def is_run(source: Path) -> bool:
    """Whether a folder holds a store rather than photos."""
    from matcher.collection.schema import DATABASE

    return (source / DATABASE).is_file()


def apart_from(out: Path, run: Path) -> Path:
    """The folder of a run; `UsageError` where it is that of the model."""
    from matcher.errors import UsageError

    if run.resolve() == out.resolve():
        raise UsageError(f"--run and --out are one folder, {out}; name another one for the run")
    return run


def match_pairs(opened: Collection, choice: dict[str, Any], limits: dict[str, int], **how: bool) -> int:
    """Add pairs, match all that are waiting, and print a summary.

    Args:
        opened: a collection with its images.
        choice: from `choose_pairs`; if empty, as in the run so far, or by the number of images.
        limits: on that number, as arguments of `Collection.suggest_pairs`.
        how: arguments of `Collection.run`.

    Returns:
        The exit code.

    Raises:
        UsageError: the run holds no pair, and a list names none or there is one image.
    """
    with stage_progress() as update:
        _enter_pairs(opened, choice or _suggested(opened, limits), update)
        report = opened.run(on_progress=update, **how)
    code = show_status(opened.run_dir)
    if report.crashes:
        died = _count(report.crashes, "worker process", "worker processes")
        say(f"{died} crashed and had to be replaced; the interrupted work was tried again")
        code = PARTIAL
    return code


@contextmanager
def further_pairs(opened: Collection) -> Iterator[MorePairs]:
    """What matches more pairs of a run where preemptive matching was too sparing, and says so."""
    from matcher.collection.reconstruction.more_pairs import MorePairs

    with stage_progress() as update:
        yield MorePairs(opened, on_round=say_round, on_progress=update)


def say_round(images: int, pairs: int) -> None:
    """Say that more pairs are matched because some images have no pose."""
    lack = f"{_count(images, 'image')} {'have' if images > 1 else 'has'} no pose"
    say(f"{lack}: {_count(pairs, 'more pair')} matched, then all is mapped again")


def _suggested(opened: Collection, limits: dict[str, int]) -> dict[str, Any]:
    """Pairs for images that have none, chosen without an option."""
    suggested = opened.suggest_pairs(**limits)
    if suggested is None:
        return {}
    say(suggestion(suggested, opened.counts().images))
    return {"pairs": suggested} if suggested.arguments() else {}


def _option_of(choice: PairChoice) -> str:
    """The option that makes this choice."""
    return f"--{choice.method}" if choice.neighbours is None else f"--{choice.method} {choice.neighbours}"


def suggestion(choice: PairChoice, images: int) -> str:
    """Why these pairs were chosen, for the user."""
    if not choice.arguments():
        return (
            "some images have no pair, and this run took its pairs from a list: use --pairs, --exhaustive, "
            "--sequential, --similar, --preemptive or --nearby to match them"
        )
    if not choice.by_default:
        return f"new images are paired like the others: {_option_of(choice)}"
    what = "exhaustively" if choice.neighbours is None else "each with the most similar ones"
    what += ", where the strongest keypoints agree" if choice.method == "preemptive" else ""
    return f"no pairs were chosen, so the {images} images are matched {what} ({_option_of(choice)})"


def _enter_pairs(opened: Collection, choice: dict[str, Any], update: Callable[[StageProgress], None]) -> None:
    from matcher.collection.pairlists import FaultTally

    if not choice:
        return
    faults = FaultTally()
    total, new = opened.add_pairs(**choice, on_fault=faults, on_progress=update)
    known = f", {total - new} of them already in the run" if total > new else ""
    say(f"{_count(total, 'pair')}{known}")
    for line in faults.lines():
        say(f"{choice['file']}: {line}")
    if total == 0:
        _refuse_nothing(opened, choice)


def _refuse_nothing(opened: Collection, choice: dict[str, Any]) -> None:
    """`UsageError` where a run has no pair and a list names none; a part of the pairs may have none."""
    from matcher.collection.store import Store
    from matcher.errors import UsageError

    with Store.open(opened.run_dir) as store:
        counts, part = store.counts(), store.settings.get("shard")
    if counts.pairs or part is not None:
        return
    if counts.images < 2:
        raise UsageError(f"there is nothing to match with {_count(counts.images, 'image')}; add others")
    if "file" in choice:
        raise UsageError(
            f"{choice['file']} names no pair of these images: it needs two names a line, separated by a space"
        )


def show_status(run: Path, *, check: bool = False, tracks: bool = False) -> int:
    """Print the state of a run and return the matching exit code."""
    from matcher.collection.store import Store
    from matcher.errors import IntegrityError

    with Store.open(run) as store:
        counts, settings = store.counts(), store.settings
        show(f"{run}: {settings.get('preset', 'a run')}, images of {store.image_folder}")
        show(
            f"images: {counts.images_done} done, {counts.images_failed} failed, "
            f"{counts.images_waiting} waiting"
        )
        lost = {image.name: image.reason for image in store.images() if image.status == "failed"}
        for name, reason in list(lost.items())[:_SHOWN]:
            show(f"  failed: {name}: {reason}")
        show(f"pairs: {counts.pairs_done} done, {counts.pairs_failed} failed, {counts.pairs_waiting} waiting")
        for line in _failed_pairs(store, set(lost)):
            show(f"  failed: {line}")
        if tracks:
            show(_track_line(store))
        if check:
            faults = store.check()
            if faults:
                raise IntegrityError(f"{run} is damaged: {'; '.join(faults[:_SHOWN])}")
            show("nothing is damaged")
    return PARTIAL if counts.images_failed or counts.pairs_failed else 0


def _failed_pairs(store: Store, lost: set[str]) -> list[str]:
    """One line per reason for failure; one for all pairs with a failed image."""
    with_lost, first, counts = 0, {}, Counter()
    for pair in store.failed():
        if lost & {pair.name0, pair.name1}:
            with_lost += 1
        else:
            first.setdefault(pair.reason, f"{pair.name0} and {pair.name1}")
            counts[pair.reason] += 1
    lines = [f"{_count(with_lost, 'pair')} with a failed image"] if with_lost else []
    for reason, count in counts.most_common(_SHOWN):
        others = f" and {_count(count - 1, 'other pair')}" if count > 1 else ""
        lines.append(f"{first[reason]}{others}: {reason}")
    return lines


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _track_line(store: Store) -> str:
    from matcher.collection.tracks import tracks_of

    tracks = tracks_of(store)
    longest = int(tracks.lengths.max()) if len(tracks) else 0
    return (
        f"tracks: {len(tracks)}, of {tracks.mean_length:.2f} images on average and {longest} at most; "
        f"{tracks.conflicts} matches contradict others"
    )
