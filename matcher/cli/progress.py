"""Progress of long commands: bars on a terminal, lines elsewhere; on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

from matcher.cli.messages import say, wants_progress

if TYPE_CHECKING:
    from rich.progress import Progress

    from matcher.collection.runner import StageProgress

_LINE_SECONDS = 10.0  # between two lines where there is no terminal
_DOING = {"extract": "extracting images", "choose": "comparing images", "match": "matching pairs"}


@contextmanager
def stage_progress() -> Iterator[Callable[[StageProgress], None]]:
    """A callback for the `on_progress` of `Collection.run`."""
    progress = _terminal_progress("{task.fields[rate]}")
    if progress is None:
        yield ProgressLines(say)
        return
    with progress as bars:
        tasks: dict[str, tuple[int, float]] = {}

        def update(now: StageProgress) -> None:
            if now.done == 0 or now.stage not in tasks:
                task = bars.add_task(_DOING[now.stage], total=now.total, rate="")
                tasks[now.stage] = (task, monotonic())
            task, start = tasks[now.stage]
            rate = _rate(now.done / max(monotonic() - start, 1e-9))
            failed = f", {now.failed} failed" if now.failed else ""
            bars.update(task, completed=now.done, total=now.total, rate=f"{rate}{failed}")

        yield update


@contextmanager
def pair_progress(name: str) -> Iterator[Callable[[int, int], object]]:
    """A callback for the `progress` of an evaluation of the set `name`: pairs done, and their total."""
    progress = _terminal_progress(transient=True)
    if progress is None:
        yield lambda done, total: _say_pairs(name, done, total)
        return
    with progress as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _say_pairs(name: str, done: int, total: int) -> None:
    """A line for every tenth of the pairs."""
    if done == total or (done * 10) // total > ((done - 1) * 10) // total:
        say(f"{name}: {done} of {total} pairs")


def _terminal_progress(*texts: str, transient: bool = False) -> Progress | None:
    """Bars with these texts before the remaining time; None without a terminal or with `-q`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not (console.is_terminal and wants_progress()):
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *map(TextColumn, texts))
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=transient)


class ProgressLines:
    """Progress as lines: the first, the last, and one every ten seconds."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = monotonic) -> None:
        self._say, self._clock = say, clock
        self._stage, self._start, self._last = "", 0.0, 0.0

    def __call__(self, now: StageProgress) -> None:
        """Print the progress if a line is due."""
        time = self._clock()
        if now.stage != self._stage or now.done == 0:
            self._stage, self._start, self._last = now.stage, time, time
            self._say(f"{_DOING[now.stage]}: {now.total}")
        elif now.done == now.total or time - self._last >= _LINE_SECONDS:
            self._last = time
            elapsed = time - self._start
            rate = now.done / max(elapsed, 1e-9)
            left = (now.total - now.done) / rate if rate else 0.0
            times = (
                f"{_duration(max(left, 1))} left" if now.done < now.total else f"done in {_duration(elapsed)}"
            )
            self._say(
                f"{_DOING[now.stage]}: {now.done} of {now.total}, {now.failed} failed, {_rate(rate)}, {times}"
            )


def _rate(each_second: float) -> str:
    return f"{each_second:.1f}/s" if each_second >= 1 else f"{60 * each_second:.1f}/min"


def _duration(seconds: float) -> str:
    if seconds < 9.95:
        return f"{max(seconds, 0.1):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
    )
