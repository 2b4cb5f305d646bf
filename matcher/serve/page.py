"""The page for two photos, made of gradio components. Nothing is fetched from or sent to other machines."""

from __future__ import annotations

import html
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

import gradio as gr
import numpy as np
from gradio.utils import get_upload_folder

from matcher.cameras import Camera, as_camera
from matcher.errors import MatcherError, UsageError
from matcher.explain.report import report_page
from matcher.files import write_whole
from matcher.images import read_image
from matcher.loading import load, with_estimation
from matcher.match.network import AttentionMatcher
from matcher.pipeline import Pipeline
from matcher.presets import DEFAULT_PRESET, PRESETS
from matcher.result import Result
from matcher.viz.drawings import draw_matches, figure_pixels
from matcher.weights.files import read_catalogue

_NOTHING = (None, [], None, None, "")  # to show, where only words are
# What a user may set, in the order of the page
_CHOICES = ("preset", "geometry", "match_threshold", "max_error", "max_keypoints", "resize")
_GEOMETRIES = {
    "any scene (fundamental matrix)": "fundamental",
    "any scene, with known cameras (essential matrix)": "essential",
    "one plane (homography)": "homography",
    "several planes (homographies)": "homographies",
    "none": "none",
}


class Matching:
    """Pipelines by what was chosen; one pair is matched at a time."""

    def __init__(self, device: str = "auto") -> None:
        self._busy = Lock()
        self.pipeline = lru_cache(maxsize=2)(partial(_load, device=device))  # each holds a network

    def answer(
        self, image0: Path, image1: Path, choices: dict[str, Any], *, explained: bool = True, **given: Any
    ) -> tuple[Result, np.ndarray, bytes | None]:
        """Match two photos: the result, its drawing (H, W, 3) uint8, and a report as HTML, None where the
        preset has no network to explain. `choices` are options of `matcher.load` and the `max_error` of an
        inlier, pixels of the resized image, `given` masks and cameras, as `Pipeline.match` takes them."""
        with self._busy:
            pipeline = self.pipeline(**choices)
            images = pipeline.read(image0), pipeline.read(image1)
            result = pipeline.match(image0, image1, **given)
            explainable = explained and isinstance(pipeline.matcher, AttentionMatcher)
            report = report_page(pipeline, images, result) if explainable else None
        how = dict(result.drawing(), title=result.heading())
        drawn = draw_matches(*images, result.points0, result.points1, **how)
        return result, figure_pixels(drawn), report


def _load(*, max_error: float | None = None, **options: Any) -> Pipeline:
    if max_error is not None and not max_error > 0:
        raise UsageError(f"the largest error of an inlier is above 0 pixels, not {max_error:g}")
    pipeline = load(**options)
    if max_error is None:
        return pipeline
    estimation = pipeline.config.estimation
    name = "max_reprojection_error" if estimation.kind.startswith("homograph") else "max_epipolar_error"
    return with_estimation(pipeline, replace(estimation, **{name: max_error}))


def geometry_rows(result: Result) -> list[list[Any]]:
    """What and value, for a table: status, inliers and the matrix row by row."""
    geometry, inliers = result.geometry, int(result.geometry.inliers.sum())
    status = geometry.described + geometry.likelier
    rows: list[list[Any]] = [["geometry", geometry.kind], ["status", status], ["inliers", inliers]]
    for number, line in enumerate([] if geometry.matrix is None else geometry.matrix, 1):
        rows.append([f"matrix, row {number}", "  ".join(f"{value:.6g}" for value in line)])
    for place, pose in enumerate(geometry.alternatives if geometry.status == "ambiguous" else ()):
        lines = ["  ".join(f"{value:.4g}" for value in line) for line in pose[:3]]
        rows += [[f"pose {place + 1}, row {number}", line] for number, line in enumerate(lines, 1)]
    return rows


class UploadsOnly(gr.Blocks):
    """A page whose events take no file but one in the folder of its uploads.

    Of a mounted page gradio checks no path: a request that names any file of this machine has it copied to
    where it is served, and one that names an address has it fetched.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.has_launched = True  # else gradio makes none of its own checks

    async def preprocess_data(self, block_fn: Any, inputs: list, *arguments: Any, **options: Any) -> Any:
        """What gradio makes of the inputs of an event; `gradio.Error` where one names a file elsewhere."""
        folder, waiting = os.path.realpath(get_upload_folder()) + os.sep, [inputs]
        while waiting:
            each = waiting.pop()
            if isinstance(each, dict):
                waiting += each.values()
                paths = [each["path"]] if "path" in each else []
                if not all(isinstance(p, str) and os.path.realpath(p).startswith(folder) for p in paths):
                    wrong = "Only files that were uploaded to this page are read."
                    raise gr.Error(wrong, print_exception=False)
            elif isinstance(each, list | tuple):
                waiting += each
        try:
            return await super().preprocess_data(block_fn, inputs, *arguments, **options)
        except Exception as error:  # of any class: values that the page's own fields do not give
            raise gr.Error(getattr(error, "message", str(error)), print_exception=False) from None


def camera_of(text: str, name: str) -> Camera:
    """A camera of four numbers that somebody typed; `UsageError`: anything else."""
    words = text.replace(",", " ").split()
    with suppress(ValueError):
        if len(numbers := list(map(float, words))) == 4:
            return as_camera(numbers, name)
    raise UsageError(f"{name} is four numbers in pixels, fx, fy, cx, cy, not {text[:80]!r}")


def build_page(matching: Matching, folder: Path, room: Callable[[], int]) -> gr.Blocks:
    """The page; files to be downloaded are kept in the folder for an hour, while there is room (bytes)."""
    kept = 3600  # seconds; gradio so keeps uploads and drawings

    def own_words(words: object, *files: str | None) -> str:
        """Without the folders of the uploads and an option, of which the user knows nothing."""
        text = str(words).replace(" or raise max_pixels", "")
        for file in filter(None, files):
            text = text.replace(file, Path(file).name)
        return text.replace(f"{get_upload_folder()}{os.sep}", "")

    def preview(path: str | None) -> tuple[dict, str]:
        """An upload as it will be matched, or why it will not."""
        try:
            shown, words = None if path is None else read_image(path, resize=400).pixels, ""
        except MatcherError as error:
            shown, words = None, own_words(error, path)
        return gr.update(value=shown, visible=shown is not None), words

    def press(
        file0: str | None, file1: str | None, mask0: str | None, mask1: str | None, *values: Any
    ) -> tuple:
        *choices, camera0, camera1, explained = values
        if not (file0 and file1):
            return "Choose two photos first.", *_NOTHING
        for earlier in folder.iterdir():
            if time.time() - earlier.stat().st_mtime > kept:
                shutil.rmtree(earlier, ignore_errors=True)
        if room() <= 0:
            return "No room for more answers: start the page again.", *_NOTHING
        given = {name: Path(mask) for name, mask in (("mask0", mask0), ("mask1", mask1)) if mask}
        try:
            given |= {f"camera{i}": camera_of(c, f"camera{i}") for i, c in enumerate((camera0, camera1)) if c}
            choices = {name: None if v == 0 else v for name, v in zip(_CHOICES, choices, strict=True)}
            photos = Path(file0), Path(file1)
            result, drawing, page = matching.answer(*photos, choices, explained=explained, **given)
        except MatcherError as error:
            return own_words(error, file0, file1, mask0, mask1), *_NOTHING
        own = tempfile.mkdtemp(dir=folder)  # earlier answers keep theirs
        arrays, report = (Path(own, name) for name in ("matches.npz", "report.html"))
        write_whole(arrays, result.to_bytes(".npz"))
        said, rows = own_words(result.summary(), file0, file1), geometry_rows(result)
        if page is None:
            why = "this preset has no network to explain" if explained else "it was not asked for"
            return said, drawing, rows, str(arrays), None, f"<p>No explanation: {why}.</p>"
        write_whole(report, page)
        # The report, in a frame that may run its own script and do nothing else.
        style = "width: 100%; height: 1400px; border: 1px solid #ccc"
        frame = f'<iframe title="report" sandbox="allow-scripts" style="{style}" srcdoc="{{}}"></iframe>'
        shown = frame.format(html.escape(page.decode()))
        return said, drawing, rows, str(arrays), str(report), shown

    file_of = partial(gr.File, type="filepath", height=120)
    catalogue, presets = read_catalogue(), []  # what is shown for each preset, and its name
    for name, config in PRESETS.items():
        row = catalogue.get(config.weights) if isinstance(config.weights, str) else None
        absent = row is not None and not row.is_here
        presets.append((f"{name} (to be fetched first)" if absent else name, name))
    with UploadsOnly(title="matcher", analytics_enabled=False, delete_cache=(600, kept)) as page:
        gr.Markdown("## matcher\nChoose two photos and press Match. They stay on this machine.")
        files, sides, wide = [], [], {"min_width": 240}
        hidden = {"visible": False, "show_label": False, "interactive": False, "height": 220, "buttons": []}
        with gr.Row():
            for side in (0, 1):
                with gr.Column(**wide):
                    files.append(file_of(label=f"Photo {side}", elem_id=f"photo{side}"))
                    sides.append((files[-1], gr.Image(elem_id=f"shown{side}", **hidden)))
        with gr.Accordion("Masks: black pixels yield no keypoints", open=False), gr.Row():
            files += [file_of(label=f"Mask {side}", elem_id=f"mask{side}") for side in (0, 1)]
        with gr.Row():
            preset = gr.Dropdown(presets, value=DEFAULT_PRESET, label="Method", **wide)
            kinds, title = list(_GEOMETRIES.items()), "What is photographed"
            geometry = gr.Dropdown(kinds, value="fundamental", label=title, **wide)
        own = {"minimum": 0, "info": "0: as the method has it", "min_width": 200}
        whole = {**own, "precision": 0}
        with gr.Row():
            threshold = gr.Number(0, label="Least probability of a match", elem_id="threshold", **own)
            error = gr.Number(0, label="Largest error of an inlier, pixels", elem_id="error", **own)
            keypoints = gr.Number(0, label="Most points of a photo", elem_id="keypoints", **whole)
            resize = gr.Number(0, label="Longer side after resizing, pixels", elem_id="resize", **whole)
        title = "Cameras, for the essential matrix: fx, fy, cx, cy in pixels"
        with gr.Accordion(title, open=False), gr.Row():
            cameras = [gr.Textbox(label=f"Camera {i}", elem_id=f"camera{i}", **wide) for i in (0, 1)]
        explained = gr.Checkbox(True, label="Explain the matches")
        inputs = [*files, preset, geometry, threshold, error, keypoints, resize, *cameras, explained]
        button = gr.Button("Match", variant="primary", elem_id="match")
        made = {"interactive": False}
        summary = gr.Textbox(label="What was found", lines=5, elem_id="counts", **made)
        shown = {"show_label": False, "format": "png", "buttons": ["download", "fullscreen"]}
        drawing = gr.Image(elem_id="drawing", **shown, **made)
        with gr.Row():
            headers = ["quantity", "value"]
            table = gr.Dataframe(headers=headers, label="Geometry", elem_id="geometry", wrap=True, **made)
            with gr.Column(**wide):
                arrays = gr.File(label="Keypoints, matches and geometry (.npz)", elem_id="npz", **made)
                report = gr.File(label="Report (.html)", elem_id="report", **made)
        outputs = [summary, drawing, table, arrays, report, gr.HTML(elem_id="explanation")]
        how = {"concurrency_limit": 1, "api_visibility": "private"}
        button.click(press, inputs, outputs, show_progress="full", **how)
        for file, shown in sides:
            file.change(preview, file, [shown, summary], show_progress="hidden", **how)
    return page
