"""The layout of the page, made of gradio components. Nothing is fetched from or sent to other machines."""

from __future__ import annotations

import html
import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import gradio as gr
import numpy as np
from gradio.utils import get_upload_folder

from matcher.arrays import to_numpy
from matcher.config import GeometryKind
from matcher.errors import MatcherError, UsageError
from matcher.explain.report import report_page
from matcher.files import write_whole
from matcher.loading import load, with_estimation
from matcher.match.network import AttentionMatcher
from matcher.pipeline import Pipeline
from matcher.presets import DEFAULT_PRESET, PRESETS
from matcher.result import Result
from matcher.viz.drawings import draw_matches, figure_pixels

if TYPE_CHECKING:
    from gradio.themes import Base


# --- matching: What the page does with two photos, apart from its layout.

_KEPT = 2  # pipelines in memory; each holds a network


@dataclass(frozen=True)
class Choices:
    """What a user may set."""

    preset: str = DEFAULT_PRESET
    threshold: float | None = None  # minimum score of a match; here and below, None means the preset's value
    max_keypoints: int | None = None  # per image
    resize: int | None = None  # pixels, longer side
    geometry: GeometryKind = "fundamental"
    max_error: float | None = None  # pixels of the resized image, of an inlier


@dataclass(frozen=True, eq=False)
class Answer:
    """What the page shows."""

    pipeline: Pipeline
    result: Result
    drawing: np.ndarray  # (H, W, 3) uint8, the matches drawn
    report: bytes | None  # HTML; None where the preset has no network to explain


@dataclass(eq=False)
class Matching:
    """Pipelines by what was chosen; one pair is matched at a time."""

    device: str = "auto"
    max_pixels: int | None = None
    _pipelines: OrderedDict[Choices, Pipeline] = field(default_factory=OrderedDict)
    _busy: Lock = field(default_factory=Lock)

    def answer(
        self,
        image0: Path,
        image1: Path,
        choices: Choices,
        *,
        mask0: Path | None = None,
        mask1: Path | None = None,
        explained: bool = True,
    ) -> Answer:
        """Match two photos, with or without a mask of each.

        Raises:
            ImageError: an image cannot be read.
            UsageError: choices that contradict each other.
            IntegrityError: weights that are not installed; the message explains how to get them.
        """
        with self._busy:
            pipeline = self._pipeline(choices)
            images = pipeline.read(image0), pipeline.read(image1)
            result = pipeline.match(image0, image1, mask0=mask0, mask1=mask1)
            explainable = explained and isinstance(pipeline.matcher, AttentionMatcher)
            report = report_page(pipeline, images, result) if explainable else None
        verified = result.geometry.status != "not_estimated"
        figure = draw_matches(
            *images,
            result.points0,
            result.points1,
            scores=result.scores,
            inliers=result.geometry.inliers if verified else None,
            keypoints0=to_numpy(result.features0.keypoints),
            keypoints1=to_numpy(result.features1.keypoints),
        )
        return Answer(pipeline, result, figure_pixels(figure), report)

    def _pipeline(self, choices: Choices) -> Pipeline:
        if choices not in self._pipelines:
            self._pipelines[choices] = self._load(choices)
        self._pipelines.move_to_end(choices)
        while len(self._pipelines) > _KEPT:
            self._pipelines.popitem(last=False)
        return self._pipelines[choices]

    def _load(self, choices: Choices) -> Pipeline:
        pipeline = load(
            choices.preset,
            device=self.device,
            match_threshold=choices.threshold,
            max_keypoints=choices.max_keypoints,
            resize=choices.resize,
            geometry=choices.geometry,
            max_pixels=self.max_pixels,
        )
        if choices.max_error is None:
            return pipeline
        if not choices.max_error > 0:
            raise UsageError(f"the inlier threshold must be above 0 pixels, not {choices.max_error:g}")
        name = "max_reprojection_error" if choices.geometry.startswith("homograph") else "max_epipolar_error"
        return with_estimation(pipeline, replace(pipeline.config.estimation, **{name: choices.max_error}))


def geometry_rows(result: Result) -> list[list[Any]]:
    """What and value, for a table: status, inliers and the matrix row by row."""
    geometry = result.geometry
    rows: list[list[Any]] = [
        ["geometry", geometry.kind],
        ["status", geometry.status],
        ["inliers", int(geometry.inliers.sum())],
    ]
    for number, line in enumerate([] if geometry.matrix is None else geometry.matrix, 1):
        rows.append([f"matrix, row {number}", "  ".join(f"{value:.6g}" for value in line)])
    return rows


# --- uploads: Only files that were uploaded are read: gradio leaves that to applications that are mounted,
# as ours is.


class UploadsOnly(gr.Blocks):
    """A page whose events take no file but one in the folder of its uploads.

    Of a mounted page gradio checks no path: a request that names any file of this machine has it copied to
    where it is served, and one that names an address has it fetched.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.has_launched = True  # else gradio makes none of its own checks

    async def preprocess_data(self, block_fn: Any, inputs: list, *arguments: Any, **options: Any) -> Any:
        """What gradio makes of the inputs of an event.

        Raises:
            gradio.Error: one of them names a file elsewhere.
        """
        folder = os.path.realpath(get_upload_folder())
        for path in _paths(inputs):
            if not isinstance(path, str) or not os.path.realpath(path).startswith(folder + os.sep):
                raise gr.Error("Only files that were uploaded to this page are read.", print_exception=False)
        return await super().preprocess_data(block_fn, inputs, *arguments, **options)


def _paths(value: Any) -> Iterator[Any]:
    """All values of `path`, at any depth."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            if "path" in each:
                yield each["path"]
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each


# --- page: The layout of the page, made of gradio components. Nothing is fetched from or sent to other
# machines.

_GEOMETRIES = ["fundamental", "homography", "homographies", "none"]  # essential needs cameras


def build_page(matching: Matching, folder: Path) -> gr.Blocks:
    """The page.

    Args:
        matching: what does the work.
        folder: where files to be downloaded are kept while the page runs.
    """

    def press(
        file0: str | None, file1: str | None, mask0: str | None, mask1: str | None, *values: Any
    ) -> tuple:
        if not (file0 and file1):
            raise _refusal("Choose two photos first.")
        *numbers, explained = values
        masks = {"mask0": Path(mask0) if mask0 else None, "mask1": Path(mask1) if mask1 else None}
        try:
            answer = matching.answer(
                Path(file0), Path(file1), _choices(*numbers), **masks, explained=explained
            )
        except MatcherError as error:
            raise _refusal(html.escape(str(error))) from None
        result, own = answer.result, tempfile.mkdtemp(dir=folder)  # earlier answers keep their downloads
        arrays, report = (Path(own, name) for name in ("matches.npz", "report.html"))
        write_whole(arrays, result.to_bytes(".npz"))
        if answer.report is not None:
            write_whole(report, answer.report)
        return (
            _without_folders(result.summary(), file0, file1),
            answer.drawing,
            geometry_rows(result),
            str(arrays),
            None if answer.report is None else str(report),
            _frame(answer.report),
        )

    with UploadsOnly(title="matcher", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        gr.Markdown("## matcher\nChoose two photos and press Match. They stay on this machine.")
        files = _files()
        inputs = _inputs()
        button = gr.Button("Match", variant="primary", elem_id="match")
        shown = _outputs()
        button.click(
            press,
            [*files, *inputs],
            shown,
            concurrency_limit=1,
            api_visibility="private",
            show_progress="full",
        )
    return page


def _files() -> list:
    with gr.Row():
        photos = [_file(f"Photo {side}", f"photo{side}") for side in (0, 1)]
    with gr.Accordion("Masks: black pixels yield no keypoints", open=False), gr.Row():
        return photos + [_file(f"Mask {side}", f"mask{side}") for side in (0, 1)]


def _file(label: str, name: str) -> gr.File:
    return gr.File(label=label, type="filepath", height=120, elem_id=name)


def _inputs() -> list:
    with gr.Row():
        preset = gr.Dropdown(list(PRESETS), value=DEFAULT_PRESET, label="Preset")
        geometry = gr.Dropdown(_GEOMETRIES, value="fundamental", label="Geometry")
    with gr.Row():
        own = "0 uses the preset's value"
        threshold = gr.Number(0, minimum=0, label="Match threshold, 0 to 1", info=own, elem_id="threshold")
        error = gr.Number(0, minimum=0, label="Inlier threshold, px", info=own, elem_id="error")
        keypoints = gr.Number(
            0, minimum=0, label="Keypoints per image", info=own, precision=0, elem_id="keypoints"
        )
        resize = gr.Number(
            0, minimum=0, label="Resize: longer side, px", info=own, precision=0, elem_id="resize"
        )
    explained = gr.Checkbox(True, label="Explain the matches (attention, early exit, pruning)")
    return [preset, geometry, threshold, error, keypoints, resize, explained]


def _outputs() -> list:
    summary = gr.Textbox(label="Summary", lines=5, elem_id="counts", interactive=False)
    drawing = gr.Image(
        show_label=False,
        format="png",
        interactive=False,
        buttons=["download", "fullscreen"],
        elem_id="drawing",
    )
    with gr.Row():
        geometry = gr.Dataframe(
            headers=["quantity", "value"], label="Geometry", interactive=False, elem_id="geometry", wrap=True
        )
        with gr.Column():
            arrays = gr.File(label="Keypoints, matches and geometry (.npz)", elem_id="npz", interactive=False)
            report = gr.File(label="Report (.html)", elem_id="report", interactive=False)
    return [summary, drawing, geometry, arrays, report, gr.HTML(elem_id="explanation")]


def _choices(
    preset: str,
    geometry: str,
    threshold: float | None,
    error: float | None,
    keypoints: int | None,
    resize: int | None,
) -> Choices:
    return Choices(preset, threshold or None, keypoints or None, resize or None, geometry, error or None)


def _without_folders(text: str, *files: str) -> str:
    """Show file names as the user gave them, without the folders of the uploads."""
    for file in files:
        text = text.replace(file, Path(file).name)
    return text


def _refusal(text: str) -> gr.Error:
    """An error message that stays long enough to be read."""
    return gr.Error(text, duration=20, print_exception=False)


def _frame(report: bytes | None) -> str:
    """The report inside the page, in a frame that may run its own script and do nothing else."""
    if report is None:
        return "<p>No explanation: it was not requested, or this preset has no network to explain.</p>"
    text = html.escape(report.decode())
    style = "width: 100%; height: 1400px; border: 1px solid #ccc"
    return f'<iframe title="report" sandbox="allow-scripts" style="{style}" srcdoc="{text}"></iframe>'


def plain_theme() -> Base:
    """A theme with the system's fonts."""
    return gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
