"""Promise 7, the page that one can click: refusals, closed to others, one visit in a browser."""

import io
import json
import re
import signal
import socket
import urllib.request

import numpy as np
import PIL.Image
import pytest
from browser import browser, needs_browser
from served_page import served

from matcher.cli import main
from matcher.errors import ImageError, UsageError
from matcher.serve.server import HOST

pytest.importorskip("gradio", reason="gradio (the extra `app`) is not installed")
from matcher.serve.page import Choices, Matching, geometry_rows

pytestmark = pytest.mark.promise(7)


def test_a_pair_is_answered(views):
    matching, choices = Matching("cpu"), Choices("nearest", max_keypoints=512, max_error=2.0)
    answer = matching.answer(*views, choices)
    assert answer.report is None and answer.drawing.shape[1] > 900
    assert len(answer.result.features0) <= 512
    assert answer.pipeline.config.estimation.max_epipolar_error == 2.0
    rows = dict(geometry_rows(answer.result))
    assert rows["status"] == "ok" and rows["inliers"] == answer.result.geometry.inliers.sum()
    assert sum(name.startswith("matrix") for name in rows) == 3
    assert (
        matching.answer(*views, Choices("nearest", max_keypoints=512, max_error=2.0)).pipeline
        is answer.pipeline
    )


def test_further_passes_have_the_chosen_threshold_too(shipped_weights):
    pipeline = Matching("cpu").pipeline(Choices(max_keypoints=64, max_error=0.5))
    assert (
        pipeline.config.estimation.max_epipolar_error == pipeline.passes.estimation.max_epipolar_error == 0.5
    )


def test_the_report_is_made_of_the_same_matches(views, shipped_weights):
    answer = Matching("cpu").answer(*views, Choices(max_keypoints=128, geometry="none"))
    assert answer.report.startswith(b"<!doctype html>") and b"Content-Security-Policy" in answer.report
    assert ["inliers", 0] in geometry_rows(answer.result)
    assert Matching("cpu").answer(*views, Choices(max_keypoints=64), explained=False).report is None


def test_bad_choices_and_images_are_named(views, tmp_path):
    matching, text = Matching("cpu"), tmp_path / "text.jpg"
    text.write_text("no picture")
    for images, choices, fault, named in (
        ((views[0], text), Choices("nearest"), ImageError, r"text\.jpg"),
        (views, Choices("nearest", max_error=-1.0), UsageError, "above 0"),
        (views, Choices("nearest", threshold=3.0), UsageError, "0 to 1"),
        (views, Choices("nearest", geometry="essential"), UsageError, "camera"),
    ):
        with pytest.raises(fault, match=named):
            matching.answer(*images, choices)


def test_a_taken_port_is_passed_over_and_a_bad_one_named(capsys):
    from matcher.serve.server import _listen

    with _listen(0) as taken:
        number = taken.getsockname()[1]
        with _listen(number) as other:
            assert other.getsockname()[0] == HOST and number < other.getsockname()[1] < number + 20
    with pytest.raises(UsageError, match="port"):
        _listen(70000)
    assert main(["serve", "--port", "-1"]) == 2
    capsys.readouterr()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with served(tmp_path_factory.mktemp("temporary")) as address:
        yield address


def test_the_page_answers_this_machine_only(address):
    with urllib.request.urlopen(address) as answer:
        assert "default-src 'self'" in answer.headers["content-security-policy"]
    request = urllib.request.Request(address, headers={"Host": "elsewhere.example"})
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request)
    port = int(address.rsplit(":", 1)[1])
    own = socket.gethostbyname(socket.gethostname())
    if not own.startswith("127."):
        with pytest.raises(OSError, match=r"."):
            socket.create_connection((own, port), timeout=2).close()


@pytest.mark.parametrize("end", ["SIGTERM", "SIGHUP"])
def test_nothing_is_kept_when_the_terminal_is_closed(tmp_path, end):
    with served(tmp_path, getattr(signal, end)) as address:
        urllib.request.urlopen(address).close()
        assert list(tmp_path.iterdir())


def masked(page, folder, photo, matches):
    """Upload a mask that is black on the left of the first photo: fewer matches."""
    with PIL.Image.open(photo) as view:
        mask = np.full((view.height, view.width), 255, np.uint8)
    mask[:, : mask.shape[1] // 2] = 0
    PIL.Image.fromarray(mask).save(folder / "half.png")
    before = page.run("return document.querySelector('#counts textarea').value")
    page.run("[...document.querySelectorAll('button')].find(b => b.innerText.includes('Masks')).click()")
    page.wait("return document.querySelector('#mask0 input[type=file]')")
    page.upload(page.find("#mask0 input[type=file]")[0], folder / "half.png")
    page.wait("return document.querySelector('#mask0').innerText.includes('half')")
    page.click("#match")
    page.wait(f"return document.querySelector('#counts textarea').value !== {json.dumps(before)}", 120)
    counts = page.run("return document.querySelector('#counts textarea').value")
    assert 5 < int(re.search(r"(\d+) matches \(hybrid", counts)[1]) < matches


@needs_browser
def test_a_visit(address, views, tmp_path, shipped_weights):
    """Two photos, the button, the counts, the image, the report, the file; a photo too large is refused."""
    with browser(1280, 1800) as page:
        page.open(address)
        page.wait("return document.querySelectorAll('input[type=file]').length >= 2", 120)
        page.wait("return document.querySelector('#match')")
        page.click("#match")
        page.wait("return document.body.innerText.includes('Choose two photos first')")
        for side, view in enumerate(views):
            page.upload(page.find(f"#photo{side} input[type=file]")[0], view)
            page.wait(f"return document.querySelector('#photo{side}').innerText.includes('{view.stem}')")
        page.fill("#keypoints input", "256")
        page.click("#match")
        page.wait("return document.querySelector('#counts textarea')?.value", 240)
        counts = page.run("return document.querySelector('#counts textarea').value")
        matches = int(re.search(r"(\d+) matches \(hybrid", counts)[1])
        assert counts.count(" 256 keypoints") == 2
        assert matches > 50 and "are inliers of one fundamental matrix" in counts
        page.wait("return document.querySelector('#drawing img')?.naturalWidth > 900")
        frame = page.wait("return document.querySelector('#explanation iframe')?.srcdoc")
        assert "Content-Security-Policy" in frame and frame.count('"Image 0"') == 0
        assert "matrix, row 3" in page.text("#geometry")
        link = page.wait("return document.querySelector('#npz a[href]')?.href")
        with urllib.request.urlopen(link) as answer:
            arrays = np.load(io.BytesIO(answer.read()))
        assert len(arrays["indices"]) == matches and arrays["matrix"].shape == (3, 3)
        page.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 50_000
        assert [text for text in page.complaints() if "Content Security Policy" in text] == []
        masked(page, tmp_path, views[0], matches)
        large = tmp_path / "large.png"
        large.write_bytes(bytes(3 * 2**20))
        page.open(address)
        page.wait("return document.querySelectorAll('input[type=file]').length >= 2", 120)
        page.upload(page.find("#photo0 input[type=file]")[0], large)
        page.wait("return /size|large|limit|exceed/i.test(document.body.innerText)")
        assert not page.run("return document.querySelector('#photo0 a[href]')")
