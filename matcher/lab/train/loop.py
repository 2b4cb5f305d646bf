"""The steps of a run, with its log, validations and checkpoints: for the matcher and for the front end."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matcher.errors import MatcherError, UsageError
from matcher.files import cache_folder, write_whole
from matcher.lab.pairs.stored import find_sets
from matcher.lab.train.stage import Stage
from matcher.lab.train.state import save_state

MOST_SKIPPED = 50
LOG_EVERY = 20  # steps

Log = Callable[[str], None]
LogRow = dict[str, float]


@dataclass(frozen=True)
class RunOptions:
    """Folders, device and processes of a run."""

    photos: Path
    validation_photos: Path | None  # None: a tenth of the photos is held out
    folder: Path  # checkpoint, log and weights
    device: str = "cpu"
    rendered: Path | None = None  # folders of stored views, for recipes with a share of them
    real: Path | None = None
    view_workers: int = 1  # processes that render views during training
    views: Path | None = None  # folder of rendered views; None: in the user's cache (MATCHER_CACHE)

    @property
    def views_folder(self) -> Path:
        """The folder of rendered views, used by this run and later ones."""
        return cache_folder() / "views" if self.views is None else self.views

    def stored_folders(self, shares: Mapping[str, float]) -> dict[str, Path]:
        """Folders of stored views by source, of the sources that have a share.

        Raises:
            UsageError: one is missing or holds no views, or one is given that the recipe has no use for.
            IntegrityError: what one holds is damaged.
        """
        folders = {}
        for name, folder in (("rendered", self.rendered), ("real", self.real)):
            if shares[name] and folder is None:
                raise UsageError(
                    f"sources.{name}: the recipe needs stored views, but no folder of them is given: give "
                    f"--{name} DIR, or a recipe whose sources are planes and relief, which photos give"
                )
            if folder is not None and not shares[name]:
                raise UsageError(
                    f"sources.{name}: the recipe has no share of the views in {folder}; leave it out"
                )
            if shares[name]:
                find_sets(folder)  # raises at once, which a worker would do after some time
                folders[name] = folder
        return folders


class Stopped(Exception):
    """The caller asked to stop; the progress is saved."""


@dataclass
class Loop:
    """A trainer, its folder and its callbacks."""

    trainer: Stage
    validate: Callable[[], LogRow]  # of the averaged parameters; the best ones have the highest "f1"
    folder: Path
    log: Log
    stopped: Callable[[], bool]
    on_validation: Callable[[Sequence[LogRow]], None]
    on_report: Callable[[], None] = lambda: None

    def resume(self) -> None:
        """Continue from the folder's checkpoint, if there is one; the log is truncated to it."""
        checkpoint = self.folder / "checkpoint.pt"
        if checkpoint.exists():
            self.trainer.resume(checkpoint)
            self.log(f"resumed at step {self.trainer.progress.step}")
        lines = "".join(json.dumps(row) + "\n" for row in self.trainer.progress.history)
        write_whole(self.folder / "log.jsonl", lines.encode())

    def run(self, batches: Iterable) -> None:
        """One step per batch until the trainer has finished, with validations and checkpoints.

        Raises:
            Stopped: the caller asked for it.
            MatcherError: the loss was infinite or NaN in too many steps.
            OSError: the disk is full; the last good checkpoint is kept.
        """
        recipe, progress = self.trainer.recipe, self.trainer.progress
        if self.trainer.finished:
            return
        losses: list[float] = []
        started = time.perf_counter()
        for batch in batches:
            losses.append(self.trainer.step(batch))
            progress.seconds += time.perf_counter() - started
            if progress.skipped > MOST_SKIPPED:
                raise MatcherError(
                    f"the loss was not finite in {progress.skipped} steps; lower "
                    "optimiser.learning_rate in the recipe and start in another --run folder"
                )
            last = self.trainer.finished
            if progress.step % LOG_EVERY == 0 or last:
                self._report(losses)
                losses.clear()
            if progress.step % recipe.validate_every == 0 or last:
                self._validate()
            stopping = self.stopped()
            if progress.step % recipe.save_every == 0 or last or stopping:
                self.trainer.save(self.folder / "checkpoint.pt")
            if stopping:
                self.log(f"stopped at step {progress.step}; the same command continues")
                raise Stopped
            if last:
                return
            started = time.perf_counter()

    def _report(self, losses: Sequence[float]) -> None:
        """Log the mean loss since the last report."""
        progress = self.trainer.progress
        finite = [loss for loss in losses if math.isfinite(loss)]
        mean = sum(finite) / len(finite) if finite else math.nan
        skipped = f", {progress.skipped} steps skipped" if progress.skipped else ""
        rate = progress.pairs / progress.seconds
        self.log(f"step {progress.step} loss {mean:.4f} {rate:.1f} pairs/s{skipped}")
        if finite:
            self._record({"loss": mean})
        self.on_report()

    def _validate(self) -> None:
        """Validate; save the averaged parameters if they are the best so far (by F1)."""
        trainer, progress = self.trainer, self.trainer.progress
        scores = self.validate()
        self._record(scores)
        words = " ".join(f"{name} {value:.3f}" for name, value in scores.items())
        self.log(f"step {progress.step} validation: {words}")
        if scores["f1"] > progress.best:
            progress.best = scores["f1"]
            save_state(self.folder / "best.pt", trainer.average.state_dict())
        self.on_validation(progress.history)

    def _record(self, values: LogRow) -> None:
        """Append a row to the history and to its file."""
        progress = self.trainer.progress
        row = {
            "step": progress.step,
            "pairs": progress.pairs,
            "seconds": round(progress.seconds, 1),
            **values,
        }
        progress.history.append(row)
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")
