"""What is measured: a pipeline for each preset, weights file, front-end file and published implementation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from matcher.config import NearestConfig
from matcher.errors import IntegrityError, UsageError
from matcher.loading import load
from matcher.pipeline import Pipeline
from matcher.presets import PRESETS, find_plugin, find_preset, from_file
from matcher.weights.files import read_header

BASELINE = "nearest"
SHIPPED = "shipped"


@dataclass(frozen=True, eq=False)
class Method:
    """A row of the table: a pipeline and its name."""

    name: str
    pipeline: Pipeline


@dataclass(frozen=True)
class MethodOptions:
    """What all methods of an evaluation have in common."""

    common: Mapping[str, Any] = field(default_factory=dict)  # options of `load` for every preset
    network: Mapping[str, Any] = field(default_factory=dict)  # and for those that are asked for
    full_depth: bool = False  # also measure each network without early exit and pruning

    def methods(self, title: str, preset: str, asked: bool = True, **files: Any) -> Iterator[Method]:
        """The method itself and, where asked for, the same at full depth; a baseline has fewer options."""
        network = self.network if asked else {"precision": self.network.get("precision")}
        given = {**self.common, **files, **network}
        yield Method(title, load(preset, **given))
        if self.full_depth and asked:
            yield Method(f"{title}, full depth", load(preset, **given, early_exit=False, pruning=False))


def build_methods(
    presets: Sequence[str], weights: Sequence[Path], front_ends: Sequence[str], options: MethodOptions
) -> list[Method]:
    """A method for every combination of preset, weights file and front-end file.

    `nearest`, and nearest neighbours on the same keypoints, come first and are always measured. Without files
    the presets' own are used; among `front_ends`, "shipped" is the preset's own. `UsageError`: an unknown
    preset, or options or files that it cannot use; `IntegrityError`: weights that cannot be read.
    """
    kinds, found = {"sift", *map(_front_end_kind, presets)}, {}
    nearest = [name for name, config in PRESETS.items() if isinstance(config.matcher, NearestConfig)]
    for name in dict.fromkeys([*(n for n in nearest if PRESETS[n].extractor.kind in kinds), *presets]):
        asked = name in presets
        of_front_end = front_ends if asked or _front_end_kind(name) == "learned" else ()
        for file, front_end in product((weights if asked else ()) or [None], of_front_end or [None]):
            title = name if file is None else f"{name} {_short(file, weights)}"
            if front_end == SHIPPED:
                title, front_end = f"{title} with the shipped front end", None
            elif front_end is not None:
                title += f" with {_short(Path(front_end), [Path(each) for each in front_ends])}"
            made = options.methods(title, name, asked, weights=file, frontend_weights=front_end)
            found |= {each.name: each for each in made}
    return list(found.values())


def compared_methods(
    compared: Sequence[str], preset: str, weights: Path | None, front_end: str | None, options: MethodOptions
) -> list[Method]:
    """Exactly the methods that are to be compared; the first is the baseline of the others.

    They are presets, files of a matcher's weights, or files of a front end's weights, used with `preset`;
    "shipped" is `preset` with its own files. `weights` and `front_end` are for every method that names none.
    `UsageError`: fewer than two different methods, or neither a preset nor a file; `IntegrityError`: weights
    that cannot be read.
    """
    if len(set(compared)) < max(2, len(compared)):
        raise UsageError("--compare needs at least two different presets or weights files; repeat the option")
    paths, methods = [Path(text) for text in compared], []
    for text, path in zip(compared, paths, strict=True):
        name, given = preset, {"weights": weights, "frontend_weights": front_end}
        if text in PRESETS or text.endswith(".toml") or find_plugin(text):
            name = title = text
        elif text == SHIPPED:
            title = f"{preset} shipped"
        else:
            title = f"{preset} {_short(path, paths)}"
            given[_option_for(path)] = path
        methods += options.methods(title, name, **given)
    return methods


def _front_end_kind(preset: str) -> str | None:
    """The kind of a preset's front end; None where another package adds it."""
    preset, given = from_file(preset, {})
    if "frontend" in given:
        return given["frontend"]
    return None if preset not in PRESETS and find_plugin(preset) else find_preset(preset).extractor.kind


def _option_for(path: Path) -> str:
    """The option of `load` that a weights file is for, by its header."""
    if not path.is_file():
        raise UsageError(f"--compare {path}: neither a preset nor a file; see `matcher presets`")
    try:
        return "frontend_weights" if "frontend" in read_header(path.read_bytes()) else "weights"
    except (OSError, IntegrityError) as error:
        raise IntegrityError(f"{path}: {error}; give a weights file written by `matcher train`") from error


def _short(file: Path, files: Sequence[Path]) -> str:
    """The file's stem, or its whole path if another file has the same stem."""
    return file.stem if sum(other.stem == file.stem for other in files) == 1 else str(file)
