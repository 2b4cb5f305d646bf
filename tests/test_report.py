"""The HTML report: what it holds, that it is closed to the network, and that it works in a browser."""

import base64
import json
import re
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch
from browser import browser, needs_browser

from matcher.cli import main
from matcher.errors import UsageError
from matcher.explain.report import pair_data, write_report
from matcher.loading import load
from matcher.match.network import AttentionMatcher, MatchingNetwork
from matcher.presets import PRESETS
from matcher.types import MATCHED, Image, Matches, TwoViewGeometry


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
        model = MatchingNetwork(PRESETS["hybrid"].matcher)
    near = load("nearest", max_keypoints=200, device="cpu")
    config = replace(near.config, matcher=model.config)
    return replace(near, matcher=AttentionMatcher(model, precision="float32"), config=config)


@pytest.fixture(scope="module")
def report(pictures, pipeline, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    return path, write_report(pipeline, *pictures, path, (200.0, 150.0))


def data_of(path):
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text("utf-8"), re.S)[1])


def test_the_report_holds_the_matches_and_escapes_names(report, pictures):
    path, result = report
    page, data = path.read_text("utf-8"), data_of(path)
    assert "<b>" not in page and "http:" not in page and "https:" not in page
    assert "default-src 'none'" in page.replace("&#x27;", "'")
    assert str(len(result.matches)) in data["said"] and "probability of the same place" in data["said"]
    assert [tuple(match[:2]) for match in data["matches"]] == [tuple(m) for m in result.matches.indices]
    assert [image["name"] for image in data["images"]] == [str(path) for path in pictures]
    assert len(data["layers"]) == result.matches.layers_run and len(result.matches) > 20
    assert len(data["images"][0]["points"]) == len(result.features0)
    accepted = result.matches.indices[result.matches.refinement.accepted, 1]
    assert data["images"][0]["ellipses"] == [] and len(accepted) > 20
    assert [row[0] for row in data["images"][1]["ellipses"]] == sorted(accepted.tolist())


def test_ellipses_are_covariances_in_pixels_of_the_page():
    """Stored images of 400 x 200 pixels, shown turned by EXIF orientation 6 at half their size."""
    image = Image(np.zeros((200, 100), np.uint8), (400, 200), (0.5, 0.5), orientation=6)
    points = np.array([[10.0, 20.0], [200.0, 100.0], [300.0, 50.0]], np.float32)
    matches = Matches.from_indices([[0, 1], [2, 2]], points, points, [0.9, 0.8])
    covariances = np.full((3, 2, 2), np.nan)
    covariances[[0, 1]] = np.diag([0.04, 0.01])  # longer along the stored x, which is shown as y
    geometry = TwoViewGeometry("fundamental", "not_estimated", np.zeros(2, bool))
    data = pair_data((image, image), (points, points), matches, geometry, [], (None, covariances))
    assert data["images"][0]["ellipses"] == []
    ((point, long, short, angle),) = data["images"][1]["ellipses"]
    assert (point, long, short) == (1, 0.2 * 0.5 * data["enlarged"], 0.1 * 0.5 * data["enlarged"])
    assert abs(np.sin(angle)) == pytest.approx(1)


def test_a_rejected_geometry_has_no_inliers_and_no_place():
    points = np.random.default_rng(0).uniform(0, 99, (6, 2)).astype(np.float32)
    matches = Matches.from_indices([[i, i] for i in range(6)], points, points, np.full(6, 0.5))
    geometry = TwoViewGeometry("fundamental", "low_inliers", np.arange(6) < 4, np.eye(3))
    image = Image(np.zeros((100, 100), np.uint8), (100, 100), (1.0, 1.0))
    data = pair_data((image, image), (points, points), matches, geometry, [])
    assert [match[3] for match in data["matches"]] == [False] * 6
    assert "6 points" in data["said"] and "too few of them" in data["said"]


@needs_browser
def test_a_click_on_a_keypoint_shows_its_match_and_what_it_attends_to(report, tmp_path):
    """The page as it is, with its policy, from disk; a real click."""
    path, result = report
    i, j = result.matches.indices[3].tolist()
    with browser() as page:
        page.open(path.as_uri())
        page.wait("return document.body.dataset.ready")
        chosen = int(re.match(r"keypoint (\d+) of image 0: ", page.text("#info"))[1])
        partners = dict(result.matches.indices.tolist())
        wanted = f"matched to keypoint {partners[chosen]} of image 1" if chosen in partners else "partner"
        assert wanted in page.text("#info")
        place = page.run(
            "const box = view.getBoundingClientRect(), s = box.width / view.width;"
            "const [x, y] = at(1, arguments[0]); return [box.left + x * s, box.top + y * s]",
            j,
        )
        before = page.run("return pen.getImageData(...at(0, arguments[0]), 1, 1).data.join()", i)
        page.click("#view", at=place)
        assert f"keypoint {j} of image 1: matched to keypoint {i} of image 0" in page.text("#info")
        assert "strongest weight" in page.text("#info")
        after = page.run("return pen.getImageData(...at(0, arguments[0]), 1, 1).data.join()", i)
        assert before != after == "255,255,255,255"  # its match is highlighted
        entropy = page.run("return [...entropy.rows[1].cells].map(cell => cell.textContent)")
        assert entropy[:2] == ["1", "self"] and len(entropy) == 4
        assert all(0 <= float(x) < 6 for x in entropy[2:])
        page.click("#rollout")
        assert "% of its information" in page.text("#info")
        plain = page.run("return base.toDataURL()")
        page.click("#ellipses")
        assert page.run("return base.toDataURL()") != plain
        page.click("#lines")
        page.click("#changes")
        page.screenshot(tmp_path / "report.png")
        assert (tmp_path / "report.png").stat().st_size > 20_000
        assert page.complaints() == []


@needs_browser
def test_the_policy_lets_no_other_script_in(report, tmp_path):
    page_text = (
        report[0].read_text("utf-8").replace("</html>", "<script>view.dataset.foreign = 1</script></html>")
    )
    (tmp_path / "changed.html").write_text(page_text, "utf-8")
    with browser() as page:
        page.open((tmp_path / "changed.html").as_uri())
        page.wait("return document.body.dataset.ready")
        assert page.run("return view.dataset.foreign ?? null") is None
        assert any("Content Security Policy" in text for text in page.complaints())


def test_the_report_tells_every_layer(report):
    path, result = report
    data = data_of(path)
    depth = result.matches.layers_run
    for side, image in enumerate(data["images"]):
        matched = {match[side] for match in data["matches"]}
        assert {point for point, fate in enumerate(image["fates"]) if fate == MATCHED} == matched
        assert {int(point) for point in image["candidates"]} == set(range(len(image["points"]))) - matched
        shape = (len(image["asked"]), 2)
        for layer in image["attention"]:
            for points, weights, entropy in layer:
                assert len(unpacked(points, "<u2")) == len(unpacked(weights, "u1")) == shape[0] * shape[1] * 4
                assert len(unpacked(entropy, "u1")) == shape[0] * shape[1]
        sources, shares = image["sources"]
        assert len(unpacked(sources, "<u2")) == len(unpacked(shares, "u1")) == 12 * len(image["traced"])
        assert len(image["largest"]) == len(image["traced"]) > 20
        assert unpacked(shares, "u1").reshape(-1, 12)[:, 0].min() == 255
    assert len(data["layers"]) == depth and len(data["rules"]) == 2
    last = data["layers"][-1]
    pairs = unpacked(last["matches"], "<u2").reshape(-1, 2)
    assert sorted(map(tuple, pairs.tolist())) == sorted(tuple(m) for m in result.matches.indices.tolist())
    assert sum(data["layers"][0]["confidences"]) == sum(len(image["points"]) for image in data["images"])
    assert data["marginal"]


def unpacked(text, kind):
    return np.frombuffer(base64.b64decode(text), kind)


@pytest.mark.parametrize("second", ["blank", "tiny", "colour"])
def test_odd_pairs_make_a_page(pictures, pipeline, tmp_path, second):
    odd = {
        "blank": np.full((200, 300), 90, np.uint8),  # no keypoints, so no matches
        "tiny": cv2.resize(cv2.imread(str(pictures[1]), 0), (60, 54)),
        "colour": cv2.imread(str(pictures[1])) // np.array([1, 2, 3], np.uint8),
    }[second]
    path = tmp_path / "odd.png"
    path.write_bytes(cv2.imencode(".png", odd)[1].tobytes())
    result = write_report(pipeline, pictures[0], path, tmp_path / "odd.html")
    assert len(result.matches) == 0 if second == "blank" else len(result.features1) > 0
    if needs_browser.args[0]:
        return
    with browser() as page:
        page.open((tmp_path / "odd.html").as_uri())
        page.wait("return document.body.dataset.ready")
        assert "Click a point" in page.text("#info") and page.complaints() == []


def test_bad_requests_leave_nothing(pictures, pipeline, tmp_path):
    for matching, name, point in (
        (load("nearest", device="cpu"), "a.html", None),  # it has no network
        (pipeline, "a.html", (4000.0, 1.0)),
        (pipeline, "a.txt", None),
    ):
        with pytest.raises(UsageError):
            write_report(matching, *pictures, tmp_path / name, point)
    out = ["--output", str(tmp_path / "a.html")]
    assert main(["explain", *map(str, pictures), *out, "--point", "here"]) == 2
    assert list(tmp_path.iterdir()) == []
