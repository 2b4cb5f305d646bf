"""From a folder of photos to weights files: what `matcher train` does, its loop, and the folder of a run."""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from matcher.collection.schema import lock
from matcher.collection.settings import differences
from matcher.errors import IntegrityError, MatcherError, UsageError, duration
from matcher.files import is_ours, write_whole
from matcher.processes import keep_freed_memory
from matcher.torch_engine import resolve_device
from matcher.train.pairs import Describer, made_ahead
from matcher.train.recipe import Recipe, SourceRecipe, check_recipe
from matcher.train.trainer import (
    Batch,
    HeadTrainer,
    LogRow,
    Networks,
    Stage,
    Trainer,
    batch_maker,
    finished,
    validate,
)
from matcher.train.views import Log, counted, load_views, split_photos, stored_folders
from matcher.weights.files import save_front_end, save_model


@dataclass(frozen=True)
class RunOptions:
    """Folders and device of a run."""

    photos: Path
    validation_photos: Path | None  # None: a tenth of the photos is held out
    folder: Path  # checkpoint, log and weights
    device: str = "cpu"
    rendered: Path | None = None  # folders of stored views, for recipes with a share of them
    real: Path | None = None


def train(
    recipe: Recipe,
    options: RunOptions,
    log: Log,
    *,
    stopped: Callable[[], bool] = lambda: False,
    on_validation: Callable[[Sequence[LogRow]], None] = lambda rows: None,
) -> Path | None:
    """Train until the recipe's steps are done, from the last checkpoint if the folder has one.

    Gives the weights file of the parameters with the best validation (of the front end, if one is trained;
    the matcher's lies beside it), or None where `stopped`, called after every step, ended the run.
    `on_validation` receives all rows of the log so far.
    """
    check_recipe(recipe)
    # Before anything is made.
    device = resolve_device(options.device)
    stored = stored_folders(vars(recipe.sources), options.rendered, options.real)
    training, held_out = split_photos(options.photos, options.validation_photos, recipe.seed)
    log(f"{len(training)} photos to train on, {len(held_out)} to validate on")
    views = [path for folder in stored.values() for path in sorted(folder.rglob("cameras.json"))]
    keep_freed_memory(everything=True)
    trainer = Trainer(recipe, device)
    describer = None if recipe.front_end.train else Describer(recipe, device)
    run = claim_folder(options.folder, recipe, [*training, *views], held_out)
    with closing(lock(options.folder)):
        batches: list[Batch] = []  # made when they are first needed

        def scores(networks: Networks) -> LogRow:
            if not batches:
                # Single pairs; photos in space replace stored views, none of which are held out.
                given, count = recipe.sources, recipe.validation_pairs
                sources = SourceRecipe(given.planes, given.spaces + given.rendered + given.real)
                points = (max(recipe.pair.points),)
                pair = replace(recipe.pair, pairs=1, points=points, dropout=0.0, negative_share=0.0)
                ours = replace(recipe, seed=recipe.seed + 1, sources=sources, pair=pair)
                make = batch_maker(ours, load_views(ours, held_out, {}, device, count, log), describer)
                batches.extend(counted(map(make, range(count)), count, "pairs to validate on", log))
            return validate(networks, counted(batches, len(batches), "validation", log), recipe)

        loop = Loop(trainer, scores, options.folder, run, log, stopped, on_validation)
        loop.resume(trainer)
        most = recipe.optimiser.steps * recipe.pairs_of(min(recipe.pair.points))
        views = load_views(recipe, training, stored, device, most, log)
        make = batch_maker(recipe, views, describer)
        if not loop.run(trainer, made_ahead(make, trainer.progress.step, trainer.steps, device)):
            return None
        with fitting(best := options.folder / "best.pt"):
            trainer.average.load_state_dict(load_state(best))
        networks = finished(trainer.average, recipe)
        if networks.matcher is not None and len(networks.matcher.confidence):
            heads, others = HeadTrainer(recipe, networks), 10_000_000  # for other batches
            loop.resume(heads)
            done = others + heads.progress.step
            if not loop.run(heads, made_ahead(make, done, others + heads.steps, device)):
                return None
        return loop.write(networks)


@dataclass
class Loop:
    """A trainer, its folder and its callbacks."""

    trainer: Trainer
    validate: Callable[[Networks], LogRow]  # the best parameters have the highest "f1"
    folder: Path
    fingerprint: str  # of the run, which checkpoints belong to
    log: Log
    stopped: Callable[[], bool]
    on_validation: Callable[[Sequence[LogRow]], None]

    def resume(self, stage: Stage) -> None:
        """Continue from the folder's checkpoint, if there is one; the log is truncated to it."""
        if (path := self.folder / stage.file).exists():
            state = load_state(path)
            if state.get("run") != self.fingerprint:
                raise UsageError(f"{path} is of another recipe, or other photos; give another --run")
            with fitting(path):
                stage.restore(state)
            self.log(f"resumed at {stage.name}step {stage.progress.step}")
        lines = "".join(json.dumps(row) + "\n" for row in self.trainer.progress.history)
        write_whole(self.folder / "log.jsonl", lines.encode())

    def run(self, stage: Stage, batches: Iterator[Batch]) -> bool:
        """One step per batch until the stage is done, with checkpoints; the trainer is validated, and its
        best averaged parameters (by F1) kept. False where the caller stopped it."""
        recipe, progress, losses = self.trainer.recipe, stage.progress, []
        if stage.share == 1:
            return True
        first, main = progress.step, stage is self.trainer
        started = reported = saved = time.perf_counter()
        for batch in batches:
            losses.append(stage.step(batch))
            now = time.perf_counter()
            progress.seconds += now - started
            if progress.skipped > 50:  # it will not recover
                raise MatcherError(f"{progress.skipped} losses are not finite; lower optimiser.learning_rate")
            last = (done := stage.share) == 1
            if now - reported > 10 or last or progress.step == first + 1:
                finite = [loss for loss in losses if math.isfinite(loss)]
                mean = sum(finite) / len(finite) if finite else math.nan
                skipped = f", {progress.skipped} steps skipped" if progress.skipped else ""
                left = f", {duration(progress.seconds * (1 - done) / done)} left" if not last else ""
                rate = progress.pairs / max(progress.seconds, 1e-9)
                steps = f"{stage.name}step {progress.step} of {stage.steps}"
                self.log(f"{steps} loss {mean:.4f} {rate:.1f} pairs/s{skipped}{left}")
                if finite and main:
                    self._record({"loss": mean})
                losses, reported = [], now
            if main and (progress.step % recipe.validate_every == 0 or last):
                scores = self.validate(self.trainer.average)
                self._record(scores)
                words = " ".join(f"{name} {value:.3f}" for name, value in scores.items())
                self.log(f"step {progress.step} validation: {words}")
                if scores["f1"] > progress.best:
                    progress.best = scores["f1"]
                    save_state(self.folder / "best.pt", self.trainer.average.state_dict())
                self.on_validation(progress.history)
            stopping = self.stopped()
            if progress.step % recipe.save_every == 0 or now - saved > 300 or last or stopping:
                save_state(self.folder / stage.file, stage.state() | {"run": self.fingerprint})
                saved = now
            if stopping:
                self.log(f"stopped at {stage.name}step {progress.step}; the same command continues")
                return False
            if last:
                break
            started = time.perf_counter()
        return True

    def _record(self, values: LogRow) -> None:
        """Append a row to the history and to its file."""
        progress = self.trainer.progress
        row = {"step": progress.step, "pairs": progress.pairs, "seconds": round(progress.seconds, 1)} | values
        progress.history.append(row)
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")

    def write(self, networks: Networks) -> Path:
        """Write the weights files; returns the front end's if one was trained, else the matcher's."""
        recipe, written = self.trainer.recipe, []
        validations = [row for row in self.trainer.progress.history if "f1" in row]
        summary = {"recipe": asdict(recipe), "validation": self.validate(networks), "history": validations}
        header = {"training": json.dumps(summary)}
        networks = networks.cpu()
        if networks.front_end is not None:
            written.append(self.folder / f"{recipe.front_end.name}.safetensors")
            save_front_end(networks.front_end, "learned", written[-1], header, "float16")
        if networks.matcher is not None:
            written.append(self.folder / f"{recipe.matcher.name}.safetensors")
            save_model(networks.matcher, written[-1], header)
        for path in written:
            self.log(f"wrote {path}")
        return written[0]


def claim_folder(folder: Path, recipe: Recipe, training: Sequence[Path], held_out: Sequence[Path]) -> str:
    """Make the folder of a run, or check that it belongs to this recipe, is trained on these files and
    validated on those; gives a fingerprint of the recipe, names and sizes, which checkpoints carry."""

    def digest(text: str) -> str:
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]

    def listed(files: Sequence[Path]) -> str:
        return digest("\n".join(f"{file.parent.name}/{file.name} {file.stat().st_size}" for file in files))

    run = {"recipe": asdict(recipe), "training": listed(training), "held_out": listed(held_out)}
    run = json.loads(json.dumps(run))
    note = folder / "recipe.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not note.exists():
            strange = [file for file in sorted(folder.iterdir()) if file.name[0] != "." and not is_ours(file)]
            if strange:
                raise UsageError(f"{folder} holds {strange[0].name}, but no run; give another --run")
            write_whole(note, json.dumps(run, indent=1).encode())
        stored = json.loads(note.read_text(encoding="utf-8"))
        changes = ", ".join(differences(stored["recipe"], run["recipe"]))
        used = ("trained", "training"), ("validated", "held_out")
        others = [said for said, key in used if stored[key] != run[key]]
    except UsageError:  # a ValueError, too
        raise
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise UsageError(f"{folder}: no run can be kept there ({error.strerror}); give another") from error
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{note} is damaged; restore it or delete the run folder") from error
    if changes:
        raise UsageError(f"{folder} holds a run of another recipe ({changes}); give another --run")
    if others:
        raise UsageError(f"{folder}: a run {others[0]} on other photos; give those, or another --run")
    return digest(json.dumps(run, sort_keys=True))


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint, whole or not at all."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    try:
        write_whole(path, buffer.getvalue())
    except OSError as error:
        left = "the last good one is kept" if path.exists() else "there was none before"
        raise OSError(error.errno, f"{error.strerror}: this checkpoint is lost, {left}", str(path)) from error


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """`IntegrityError` where a checkpoint is of another network."""
    try:
        yield
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise IntegrityError(f"{path} does not fit this network ({reason}); delete it") from error


def load_state(path: Path) -> dict[str, Any]:
    """Read a checkpoint, its tensors on the CPU."""
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, TypeError, ValueError, LookupError, EOFError, pickle.PickleError) as error:
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        remedy = "restore a copy of it, or delete the run folder to start again"
        raise IntegrityError(f"{path} is absent or damaged ({reason}): {remedy}") from error
