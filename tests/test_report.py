"""The HTML report: what it holds, that it is closed to the network, and that it works in a browser."""

import json
import re
import shutil
import subprocess
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch

from matcher.cli import main
from matcher.network.inference import AttentionMatcher
from matcher.network.model import Model
from matcher.pipeline import load
from matcher.presets import PRESETS
from matcher.report.report import write_report
from matcher.types import UsageError

BROWSER = shutil.which("chromium")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    scene = cv2.resize(rng.integers(0, 255, (60, 80), np.uint8), (480, 360), interpolation=cv2.INTER_CUBIC)
    paths = [folder / "one <b>&amp;.png", folder / "two.png"]
    for path, picture in zip(paths, (scene[:, :400], scene[:, 60:460]), strict=True):
        path.write_bytes(cv2.imencode(".png", picture)[1].tobytes())
    return paths


@pytest.fixture(scope="module")
def pipeline():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model(PRESETS["hybrid"].matcher)
    near = load("nearest", max_keypoints=200, device="cpu")
    config = replace(near.config, matcher=model.config)
    return replace(near, matcher=AttentionMatcher(model, precision="float32"), config=config)


@pytest.fixture(scope="module")
def report(pictures, pipeline, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    return path, write_report(pipeline, *pictures, path, (200.0, 150.0))


def test_the_report_holds_the_matches_and_escapes_names(report, pictures):
    path, result = report
    page = path.read_text("utf-8")
    assert "<b>" not in page and "http:" not in page and "https:" not in page
    assert "default-src 'none'" in page.replace("&#x27;", "'")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    assert [tuple(match[:2]) for match in data["matches"]] == [tuple(m) for m in result.matches.indices]
    assert [image["name"] for image in data["images"]] == [str(path) for path in pictures]
    assert len(data["layers"]) == result.matches.layers_run and len(result.matches) > 20
    assert len(data["images"][0]["points"]) == len(result.features0)


def shown_info(page, folder) -> str:
    """What the page says of the chosen keypoint, in a browser without a window."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    run = subprocess.run(
        [BROWSER, *flags, "--virtual-time-budget=4000", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return re.search(r'<p id="info">(.*?)</p>', run.stdout)[1]


@pytest.mark.skipif(BROWSER is None, reason="Debian's chromium is not installed")
def test_a_browser_shows_the_match_of_the_chosen_keypoint(report, tmp_path):
    path, result = report
    info = shown_info(path, tmp_path)
    chosen = int(re.match(r"keypoint (\d+) of image 0: ", info)[1])
    partners = dict(result.matches.indices.tolist())
    if chosen in partners:
        assert f"matched to keypoint {partners[chosen]} of image 1" in info
    else:
        assert "without a partner" in info or "pruned" in info
    assert "strongest weight" in info or "pruned" in info


@pytest.mark.skipif(BROWSER is None, reason="Debian's chromium is not installed")
def test_a_click_on_a_keypoint_shows_its_match(report, tmp_path):
    path, result = report
    i, j = result.matches.indices[3].tolist()
    click = (
        "<script>setTimeout(() => { const box = view.getBoundingClientRect(), s = box.width / view.width;"
        f"const [x, y] = at(1, {j}); view.dispatchEvent(new MouseEvent('click', "
        "{ clientX: box.left + x * s, clientY: box.top + y * s })); }, 1000)</script>"
    )
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", path.read_text("utf-8"))
    clicked = tmp_path / "clicked.html"
    clicked.write_text(page.replace("</html>", click + "</html>"), "utf-8")
    assert f"keypoint {j} of image 1: matched to keypoint {i} of image 0" in shown_info(clicked, tmp_path)


def test_bad_requests_are_named(pictures, pipeline, tmp_path, capsys):
    with pytest.raises(UsageError, match="no network"):
        write_report(load("nearest", device="cpu"), *pictures, tmp_path / "a.html")
    with pytest.raises(UsageError, match="outside"):
        write_report(pipeline, *pictures, tmp_path / "a.html", (4000.0, 1.0))
    with pytest.raises(UsageError, match=r"\.html"):
        write_report(pipeline, *pictures, tmp_path / "a.txt")
    out = ["--output", str(tmp_path / "a.html")]
    assert main(["explain", *map(str, pictures), *out, "--point", "here"]) == 2
    assert "--point" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
