"""`matcher weights export`: the models of a preset as files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from matcher.config import NetworkConfig, PipelineConfig
from matcher.errors import UsageError
from matcher.files import check_output, write_whole
from matcher.onnx.linear import Numbers
from matcher.onnx.models import colmap_models, extractor_model, network_model, opencv_extractor_model
from matcher.onnx.opencv import opencv_matcher
from matcher.onnx.pairs import check_exportable
from matcher.onnx.refinement import KIND as REFINEMENT
from matcher.onnx.refinement import refinement_model
from matcher.onnx.trained import trained_front_end, trained_network


class Exported(NamedTuple):
    """One written file."""

    path: Path
    bytes: int


def export_preset(
    preset: str,
    config: PipelineConfig,
    folder: str | Path,
    *,
    numbers: Numbers = "float32",
    weights: str | Path | None = None,
    frontend_weights: str | Path | None = None,
    overwrite: bool = False,
) -> list[Exported]:
    """Write a preset's front end, if it is ours, its matcher, if it is a network, and its refinement.

    Args:
        preset: its name, which the matcher's file gets; the front end's is called as the front end, that of
            the refinement `refine.onnx`.
        config: the preset's configuration, with its policy of exit, pruning and thresholds.
        folder: is made if need be.
        numbers: "float32"; "float16" or "int8" for smaller files.
        weights: of the matcher; the preset's own when absent.
        frontend_weights: of the front end; the shipped ones when absent.
        overwrite: replace files that exist.

    Raises:
        UsageError: nothing of the preset can be written as ONNX, or a file exists or cannot be written.
        IntegrityError: weights are absent or damaged.
    """
    folder = Path(folder)
    models: list[tuple[str, bytes]] = []
    if weights is not None and not isinstance(config.matcher, NetworkConfig):
        raise UsageError(f"the preset {preset} has no network, so weights has no effect; leave it out")
    if frontend_weights is not None and config.extractor.kind != "learned":
        raise UsageError(
            f"the front end of {preset} has no ONNX file, so frontend_weights has no effect; leave it out"
        )
    if isinstance(config.matcher, NetworkConfig):
        check_exportable(config.matcher)
        trained = trained_network(weights or config.weights, config.matcher.policy)
        models.append((preset, network_model(trained, numbers=numbers)))
    if config.extractor.kind == "learned":
        front_end = trained_front_end(config.extractor, frontend_weights)
        models.append((config.extractor.kind, extractor_model(front_end, numbers=numbers)))
    if not models:
        raise UsageError(
            f"the preset {preset} has no network of keypoints or matches, so there is nothing to export"
        )
    if config.refine is not None:
        models.append((REFINEMENT, refinement_model(config.refine)))
    return _write(folder, models, overwrite=overwrite)


def export_for_opencv(
    preset: str,
    config: PipelineConfig,
    folder: str | Path,
    size: tuple[int, int],
    *,
    points: int = 512,
    overwrite: bool = False,
) -> list[Exported]:
    """Write `opencv-learned.onnx` for `cv2.ALIKED` and `opencv-PRESET.onnx` for `cv2.LightGlueMatcher`.

    Args:
        preset, config, folder, overwrite: as in `export_preset`.
        size: width and height to which OpenCV resizes every image, multiples of the front end's stride (32).
        points: keypoints of an image.

    Raises:
        UsageError: a preset of another front end or without a network, a size that does not fit, or a file
            that exists or cannot be written.
        IntegrityError: weights are absent or damaged.
    """
    if config.extractor.kind != "learned" or not isinstance(config.matcher, NetworkConfig):
        raise UsageError(
            f"OpenCV's classes take our own front end with its network, hybrid-learned, not {preset}"
        )
    trained = trained_network(config.weights, config.matcher.policy)
    settings = replace(config.extractor, max_keypoints=points)
    models = [
        ("opencv-learned", opencv_extractor_model(trained_front_end(settings), size)),
        (f"opencv-{preset}", opencv_matcher(trained.config, trained.arrays, points)),
    ]
    return _write(Path(folder), models, overwrite=overwrite)


def export_for_colmap(
    preset: str,
    config: PipelineConfig,
    folder: str | Path,
    *,
    numbers: Numbers = "float32",
    weights: str | Path | None = None,
    frontend_weights: str | Path | None = None,
    overwrite: bool = False,
) -> list[Exported]:
    """Write `colmap-learned.onnx` for COLMAP's ALIKED and `colmap-PRESET.onnx` for its LightGlue.

    Args:
        preset, config, folder, numbers, weights, frontend_weights, overwrite: as in `export_preset`.

    Raises:
        UsageError: a preset of another front end or without a network, or a file that exists or cannot be
            written.
        IntegrityError: weights are absent or damaged.
    """
    if config.extractor.kind != "learned" or not isinstance(config.matcher, NetworkConfig):
        raise UsageError(f"COLMAP takes our own front end with its network, hybrid-learned, not {preset}")
    trained = trained_network(weights or config.weights, config.matcher.policy)
    front_end = trained_front_end(config.extractor, frontend_weights)
    models = colmap_models(front_end, trained, numbers=numbers)
    names = ("colmap-learned", f"colmap-{preset}")
    return _write(Path(folder), list(zip(names, models, strict=True)), overwrite=overwrite)


def _write(folder: Path, models: Sequence[tuple[str, bytes]], *, overwrite: bool) -> list[Exported]:
    paths = [folder / f"{name}.onnx" for name, _ in models]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be made a folder ({error.strerror}): name another one") from error
    for path in paths:
        check_output(path, (".onnx",), overwrite=overwrite)
    for path, (_, data) in zip(paths, models, strict=True):
        write_whole(path, data)
    return [Exported(path, len(data)) for path, (_, data) in zip(paths, models, strict=True)]
