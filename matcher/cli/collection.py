"""`matcher collection`, `matcher status` and `matcher merge`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from matcher.cli import options
from matcher.cli.exits import PARTIAL
from matcher.cli.loading import Given
from matcher.cli.messages import say, show, wants_progress

if TYPE_CHECKING:
    from matcher.collection.collection import Collection
    from matcher.collection.runner import StageProgress

_LINE_SECONDS = 10.0  # between two lines where there is no terminal
_DOING = {"extract": "extracting images", "match": "matching pairs"}
_SHOWN = 5

RunDir = Annotated[Path, typer.Option("--run", metavar="RUN_DIR", help="Where results are kept.")]
PairFile = Annotated[Path | None, typer.Option("--pairs", metavar="FILE", help="Two names a line.")]
Exhaustive = Annotated[bool, typer.Option("--exhaustive", help="Every pair of images.")]
Sequential = Annotated[
    int | None, typer.Option("--sequential", metavar="K", min=1, help="Each with the K next by name.")
]
Similar = Annotated[
    int | None, typer.Option("--similar", metavar="K", min=1, help="Each with the K that look most like it.")
]
FeaturesFile = Annotated[
    Path | None,
    typer.Option("--features", metavar="FILE.h5", help="Keypoints made elsewhere, in hloc's layout."),
]
Masks = Annotated[
    Path | None,
    typer.Option("--masks", metavar="DIR", help="Images, called alike, not black where to look."),
]
WorkerCount = Annotated[
    int | None,
    typer.Option("--workers", min=0, help="Processes; default: one a core or GPU. 0: only this one."),
]
Threads = Annotated[int | None, typer.Option(min=1, help="Of each worker; default: cores / workers.")]
Shard = Annotated[str | None, typer.Option(metavar="i/n", help="Only part i of n; `matcher merge` joins.")]
EngineChoice = Annotated[
    Literal["local", "ray"], typer.Option("--engine", help="Processes of this machine, or a Ray cluster.")
]
CameraText = Annotated[
    str | None, typer.Option(metavar="fx,fy,cx,cy", help="Of every image, in pixels; for essential.")
]
Restart = Annotated[bool, typer.Option("--restart", help="Throw away what RUN_DIR holds.")]
RetryFailed = Annotated[bool, typer.Option("--retry-failed", help="Try again what failed before.")]
Descriptors = Annotated[
    bool, typer.Option("--descriptors", help="Extract every image, also where descriptors were deleted.")
]


def collection(
    images: Annotated[Path, typer.Argument(metavar="IMAGES", show_default=False, help="Folder of images.")],
    run: RunDir,
    given: Given,
    pairs: PairFile = None,
    exhaustive: Exhaustive = False,
    sequential: Sequential = None,
    similar: Similar = None,
    features: FeaturesFile = None,
    masks: Masks = None,
    camera: CameraText = None,
    workers: WorkerCount = None,
    threads: Threads = None,
    engine: EngineChoice = "local",
    shard: Shard = None,
    restart: Restart = False,
    retry_failed: RetryFailed = False,
    descriptors: Descriptors = False,
) -> int:
    """Match the images of a folder: features once an image, every pair once, geometry verified.

    What is finished stays in RUN_DIR, so an interrupted run goes on where it was; a changed image is done
    anew with its pairs. Without --pairs, --exhaustive, --sequential or --similar, what still waits is done.
    """
    from matcher.collection.collection import Collection
    from matcher.collection.engines import Workers

    choice = choose_pairs(pairs, exhaustive, sequential, similar)
    means = dict(workers=Workers(engine, workers, threads), camera=options.parse_camera(camera, "--camera"))
    opened = Collection.open(run, shard=shard, **means, **given)
    enter_images(opened, images, masks, features, restart)
    return match_pairs(opened, choice, retry_failed=retry_failed, everything=descriptors)


def choose_pairs(
    pairs: Path | None, exhaustive: bool, sequential: int | None, similar: int | None
) -> dict[str, Any]:
    """The way of choosing pairs that was asked for, as `Collection.add_pairs` takes it; empty without any."""
    choice = dict(file=pairs, exhaustive=exhaustive or None, sequential=sequential, similar=similar)
    choice = {name: value for name, value in choice.items() if value is not None}
    if len(choice) > 1:
        raise typer.BadParameter("give one of --pairs, --exhaustive, --sequential and --similar")
    return choice


def match_pairs(opened: Collection, choice: dict[str, Any], **how: bool) -> int:
    """Enter the chosen pairs, match what waits, say how it went; the exit code."""
    with _progress() as tell:
        _enter_pairs(opened, choice, tell)
        report = opened.run(on_progress=tell, **how)
    _show(opened.run_dir)
    if report.crashes:
        say(f"{report.crashes} worker processes died and were replaced; what they were at was tried again")
    return 0 if report.all_well else PARTIAL


def enter_images(
    opened: Collection,
    images: Path,
    masks: Path | None = None,
    features: Path | None = None,
    restart: bool = False,
) -> None:
    """Enter the images of a folder and say what has changed."""
    changes = opened.add_images(images, masks=masks, features=features, restart=restart)
    if changes.changed:
        say(f"{changes.changed} images have changed and are done again with their pairs")
    if changes.gone:
        say(f"{changes.gone} images of the run are no longer in {images}; what was matched stays")
    if changes.odd:
        say(f"{len(changes.odd)} files are left out for their names: {', '.join(changes.odd[:_SHOWN])}")


def _enter_pairs(opened: Collection, choice: dict[str, Any], tell: Callable[[StageProgress], None]) -> None:
    from matcher.collection.pairlists import FaultTally

    if not choice:
        return
    faults = FaultTally()
    total, new = opened.add_pairs(**choice, on_fault=faults, on_progress=tell)
    say(f"{total} pairs, {total - new} of them in the run already")
    for line in faults.lines():
        say(f"{choice['file']}: {line}")


def status(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False)],
    check: Annotated[bool, typer.Option("--check", help="Read everything and look for damage.")] = False,
) -> int:
    """Say how far a run has come and what failed; also while it is going on."""
    return _show(run, check=check)


def merge(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", show_default=False)],
    into: Annotated[
        Path, typer.Option("--into", metavar="RUN_DIR", help="The run that is made or added to.")
    ],
    descriptors: Annotated[
        bool, typer.Option("--descriptors", help="Copy descriptor files too; more pairs need them.")
    ] = False,
) -> int:
    """Join runs of parts of one collection (--shard) to one run."""
    from matcher.collection.merging import merge as join

    join(runs, into, descriptors=descriptors, on_report=say)
    return _show(into)


def _show(run: Path, *, check: bool = False) -> int:
    """Print the state of a run; the exit code that fits it."""
    from matcher.collection.store import Store
    from matcher.errors import IntegrityError

    with Store.open(run) as store:
        counts, settings = store.counts(), store.settings
        failed = ((f"{pair.name0} and {pair.name1}", pair.reason) for pair in store.failed())
        show(f"{run}: {settings.get('preset', 'a run')}, images of {store.image_folder}")
        lost = ((image.name, image.reason) for image in store.images() if image.status == "failed")
        for what, done, bad, waiting, reasons in (
            ("images", counts.images_done, counts.images_failed, counts.images_waiting, lost),
            ("pairs", counts.pairs_done, counts.pairs_failed, counts.pairs_waiting, failed),
        ):
            show(f"{what}: {done} done, {bad} failed, {waiting} waiting")
            for (name, reason), _ in zip(reasons, range(_SHOWN), strict=False):
                show(f"  failed: {name}: {reason}")
        if check:
            faults = store.check()
            if faults:
                raise IntegrityError(f"{run} is damaged: {'; '.join(faults[:_SHOWN])}")
            show("nothing is damaged")
    return PARTIAL if counts.images_failed or counts.pairs_failed else 0


@contextmanager
def _progress() -> Iterator[Callable[[StageProgress], None]]:
    """Bars on a terminal, a line now and then elsewhere; on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not (console.is_terminal and wants_progress()):
        yield ProgressLines(say)
        return
    rate = TextColumn("{task.fields[rate]}")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        rate,
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, tuple[int, float]] = {}

        def tell(now: StageProgress) -> None:
            if now.done == 0 or now.stage not in tasks:
                task = bars.add_task(_DOING[now.stage], total=now.total, rate="")
                tasks[now.stage] = (task, monotonic())
            task, start = tasks[now.stage]
            rate = _rate(now.done / max(monotonic() - start, 1e-9))
            failed = f", {now.failed} failed" if now.failed else ""
            bars.update(task, completed=now.done, total=now.total, rate=f"{rate}{failed}")

        yield tell


class ProgressLines:
    """Progress as lines: the first, the last, and one every ten seconds."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = monotonic) -> None:
        self._say, self._clock = say, clock
        self._stage, self._start, self._last = "", 0.0, 0.0

    def __call__(self, now: StageProgress) -> None:
        """Say how far it is, if it is time."""
        time = self._clock()
        if now.stage != self._stage or now.done == 0:
            self._stage, self._start, self._last = now.stage, time, time
            self._say(f"{_DOING[now.stage]}: {now.total}")
        elif now.done == now.total or time - self._last >= _LINE_SECONDS:
            self._last = time
            rate = now.done / max(time - self._start, 1e-9)
            left = (now.total - now.done) / rate if rate else 0.0
            self._say(
                f"{_DOING[now.stage]}: {now.done} of {now.total}, {now.failed} failed, {_rate(rate)}, "
                f"{_duration(left)} left"
            )


def _rate(each_second: float) -> str:
    return f"{each_second:.1f}/s" if each_second >= 1 else f"{60 * each_second:.1f}/min"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
    )
