"""The layout of the page, made of gradio components. Nothing is fetched from or sent to other machines."""

from __future__ import annotations

import html
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from matcher.errors import MatcherError
from matcher.files import write_whole
from matcher.presets import DEFAULT_PRESET, PRESETS
from matcher.serve.matching import Choices, Matching, geometry_rows
from matcher.serve.uploads import UploadsOnly

if TYPE_CHECKING:
    from gradio.themes import Base

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
