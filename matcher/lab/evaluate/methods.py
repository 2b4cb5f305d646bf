"""Which methods an evaluation measures, from presets, weights files and front-end files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matcher.config import NearestConfig
from matcher.errors import IntegrityError, UsageError
from matcher.lab.evaluate.run import Method
from matcher.loading import load
from matcher.plugins import find_plugin
from matcher.presets import PRESETS, find_preset
from matcher.weights.header import read_header

SHIPPED = "shipped"
_FULL_DEPTH = {"early_exit": False, "pruning": False}


@dataclass(frozen=True)
class MethodOptions:
    """What all methods of an evaluation have in common."""

    common: Mapping[str, Any] = field(default_factory=dict)  # options of `load` for every preset
    network: Mapping[str, Any] = field(default_factory=dict)  # and for presets with a network
    full_depth: bool = False  # also measure each network without early exit and pruning


def build_methods(
    presets: Sequence[str],
    weights: Sequence[Path] = (),
    front_ends: Sequence[str] = (),
    options: MethodOptions | None = None,
) -> list[Method]:
    """A method for every combination of preset, weights file and front-end file.

    `nearest`, and nearest neighbours on the same keypoints, come first and are always measured.

    Args:
        presets: names in `PRESETS`, or of presets that other packages add.
        weights: files of the matcher's weights; without any, those of the presets.
        front_ends: files of the learned front end's weights, "shipped" for the preset's own; without any,
            those of the presets.
        options: common to all methods.

    Raises:
        UsageError: an unknown preset, or options or files that a preset cannot use.
        IntegrityError: weights that are absent, damaged or of another network.
    """
    options = options or MethodOptions()
    _refuse_useless(presets, weights, front_ends, options)
    kinds = {_front_end_of(name) for name in (*presets, "nearest")}
    nearest = [name for name in PRESETS if _is_nearest(name) and PRESETS[name].extractor.kind in kinds]
    chosen = [(name, None) for name in nearest]
    chosen += [(name, file) for name in presets if name not in nearest for file in (weights or [None])]
    methods = {}
    for name, file in chosen:
        for front_end, title in _front_ends(_front_end_of(name), front_ends):
            words = (name, "" if file is None else _short(file, weights), title)
            for method in _variants(" ".join(filter(None, words)), name, file, front_end, options):
                methods[method.name] = method
    return list(methods.values())


def _refuse_useless(
    presets: Sequence[str], weights: Sequence[Path], front_ends: Sequence[str], options: MethodOptions
) -> None:
    """`UsageError` for what no preset that was chosen has a use for."""
    networks = [name for name in presets if not _is_nearest(name)]
    threshold = options.network.get("match_threshold") is not None
    without = {"weights": weights, "full_depth": options.full_depth, "match_threshold": threshold}
    useless = [name for name, given in without.items() if given and not networks]
    if front_ends and "learned" not in map(_front_end_of, presets):
        useless.append("frontend_weights")
    if useless:
        raise UsageError(f"{', '.join(presets)}: {useless[0]} has no effect with these presets; leave it out")


def compared_methods(
    compared: Sequence[str],
    preset: str,
    weights: Path | None = None,
    front_end: str | None = None,
    options: MethodOptions | None = None,
) -> list[Method]:
    """Exactly the methods that are to be compared; the first is the baseline of the others.

    Args:
        compared: presets, files of a matcher's weights, or files of a front end's weights; "shipped" is
            `preset` with its own files.
        preset: what the files are used with.
        weights: of the matcher, for every method that does not name its own.
        front_end: file of the front end's weights, for every method that does not name its own.
        options: common to all methods.

    Raises:
        UsageError: fewer than two different methods, or neither a preset nor a file.
        IntegrityError: weights that are absent, damaged or of another network.
    """
    options = options or MethodOptions()
    if len(set(compared)) < max(2, len(compared)):
        raise UsageError("--compare needs at least two different presets or weights files; repeat the option")
    paths = [Path(text) for text in compared]
    methods = []
    for text, path in zip(compared, paths, strict=True):
        name, given = preset, {"weights": weights, "frontend_weights": front_end}
        if text in PRESETS or find_plugin(text):
            name, title = text, text
        elif text == SHIPPED:
            title = f"{preset} shipped"
        else:
            given[_kind_of_file(text)] = path
            title = f"{preset} {_short(path, paths)}"
        methods += _variants(title, name, given["weights"], given["frontend_weights"], options)
    return methods


def _variants(
    title: str, preset: str, weights: Path | None, front_end: str | Path | None, options: MethodOptions
) -> Iterator[Method]:
    """The method itself and, where asked for, the same at full depth."""
    given = {**options.common, "weights": weights, "frontend_weights": front_end}
    if not _is_nearest(preset):
        given |= options.network
    elif _front_end_of(preset) == "learned":
        given["precision"] = options.network.get("precision")
    yield Method(title, load(preset, **given))
    if options.full_depth and not _is_nearest(preset):
        yield Method(f"{title}, full depth", load(preset, **given, **_FULL_DEPTH))


def _is_nearest(preset: str) -> bool:
    return preset in PRESETS and isinstance(PRESETS[preset].matcher, NearestConfig)


def _front_end_of(preset: str) -> str | None:
    """The kind of a preset's front end; None where another package adds it."""
    return None if preset not in PRESETS and find_plugin(preset) else find_preset(preset).extractor.kind


def _front_ends(kind: str | None, files: Sequence[str]) -> list[tuple[str | None, str]]:
    """The weights files of a preset's front end, each with what it adds to the method's name."""
    if kind != "learned" or not files:
        return [(None, "")]
    paths = [Path(file) for file in files]
    return [
        (None, "with the shipped front end") if file == SHIPPED else (file, f"with {_short(path, paths)}")
        for file, path in zip(files, paths, strict=True)
    ]


def _kind_of_file(text: str) -> str:
    """The option of `load` that a weights file is for, by its header."""
    path = Path(text)
    if not path.is_file():
        raise UsageError(f"--compare {text}: neither a preset nor a file; see `matcher presets`")
    try:
        return "frontend_weights" if "frontend" in read_header(path.read_bytes()) else "weights"
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read ({error.strerror}): check the path") from error
    except IntegrityError as error:
        raise IntegrityError(f"{path} {error}: give a weights file written by `matcher train`") from error


def _short(file: Path, files: Sequence[Path]) -> str:
    """The file's stem, or its whole path if another file has the same stem."""
    return file.stem if sum(other.stem == file.stem for other in files) == 1 else str(file)
