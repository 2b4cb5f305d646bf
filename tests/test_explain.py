"""Explaining a pair: the same matches, the network's own weights, fates that add up; HTML reports."""

import json
import re
from dataclasses import replace

import cv2
import numpy as np
import PIL.Image
import pytest
import torch
from browser import browser, needs_browser
from collection_runs import QUICK, photos
from command import run as command
from random_matcher import CONFIG, matcher_with, pair

from matcher.collection.collection import Collection
from matcher.collection.store import Store
from matcher.config import ContextConfig
from matcher.errors import UsageError
from matcher.explain.explain import explain
from matcher.explain.report import write_report
from matcher.loading import load
from matcher.match.network import AttentionMatcher, MatchingNetwork
from matcher.presets import PRESETS
from matcher.types import MATCHED, UNMATCHED, Features

pytestmark = pytest.mark.usefixtures("compiled")


GUIDED = {"guided": True, "assignment": replace(CONFIG.assignment, consensus=2)}
FORM = {"attention": "linear", "sequential_cross": True, "shared_qk": False}
LINEAR = {"context": ContextConfig(dim=48, heads=2, depth=3, **FORM)}
ADDITIVE = {"context": ContextConfig(dim=48, heads=2, depth=2, attention="additive")}


@pytest.mark.parametrize(
    ("changes", "counts"), [({}, (60, 50)), (GUIDED, (60, 50)), (LINEAR, (0, 9)), (ADDITIVE, (1, 1))]
)
def test_the_matches_are_those_of_the_normal_path(changes, counts):
    matcher = matcher_with(config=replace(CONFIG, **changes))
    sides = pair(*counts, 1)
    batch = [Features.stack([f]) for f in sides]
    before = matcher(*batch)[0]
    record = explain(matcher, *sides, range(min(3, counts[0])), range(min(2, counts[1])))
    after = matcher(*batch)[0]
    for matches in (before, after):
        assert np.array_equal(record.matches, matches.indices)
        assert np.array_equal(record.scores, matches.scores)
    assert len(record.layers) == before.layers_run
    for fate, kept in zip(record.fates, (before.kept0, before.kept1), strict=True):
        assert (fate <= 0).sum() == kept and (fate == MATCHED).sum() == len(before)
        assert set(fate[fate > 0]) <= set(range(1, before.layers_run + 1)) and not (fate < UNMATCHED).any()
    for flow in record.rollout:
        np.testing.assert_allclose(flow.sum(1), 1, atol=1e-3)


@pytest.mark.parametrize("changes", [GUIDED, LINEAR])
def test_recorded_attention_makes_the_message_that_the_network_passes_on(changes):
    matcher, sides = matcher_with(False, False, config=replace(CONFIG, **changes)), pair(30, 20, 3)
    layer = matcher.model.layers[0]
    record = explain(matcher, *sides, [4], [7], strongest=30)
    model, seen, attention = matcher.model, [], layer.self_block.attention
    hook = layer.self_block.ffn.register_forward_hook(lambda _, given, __: seen.append(given[1][0]))
    with torch.inference_mode():
        tokens = model.tokens(*(Features.stack([f]) for f in sides))
        layer.self_block(tokens.x, (tokens.n, tokens.x.shape[1] - tokens.n), tokens.rotations, None)
        values = attention.project(tokens.x)[0, :, -1]
    hook.remove()
    (message,) = seen
    for side, (asked, start) in enumerate(((4, 0), (7, 30))):
        attention = record.layers[0].self_attention[side]
        points, weights = attention.points[0], attention.weights[0]
        for head in range(2):
            alive = points[head] >= 0
            chosen = torch.from_numpy(weights[head][alive]) @ values[points[head][alive] + start, head]
            torch.testing.assert_close(
                chosen, message[asked + start, head * 24 : head * 24 + 24], atol=1e-4, rtol=1e-3
            )
            p = weights[head][weights[head] > 0]
            assert attention.entropy[0, head] == pytest.approx(-(p * np.log(p)).sum(), abs=1e-3)


@pytest.mark.parametrize("changes", [GUIDED, LINEAR])
def test_rollout_is_the_product_of_the_mean_weights(changes):
    matcher, sides = matcher_with(False, False, config=replace(CONFIG, **changes)), pair(12, 9, 3)
    record = explain(matcher, *sides, range(12), range(9), strongest=12, traced=([4], []))
    known = np.eye(21)
    for layer in record.layers:
        for attended, shift in ((layer.self_attention, (0, 12)), (layer.cross_attention, (12, 0))):
            step = np.eye(21) / 2
            for side, attention in enumerate(attended):
                for row in range(len(attention.points)):
                    for points, weights in zip(attention.points[row], attention.weights[row], strict=True):
                        heard = points >= 0
                        share = weights[heard] / 2 / len(attention.points[row])
                        np.add.at(step[row + 12 * side], points[heard] + shift[side], share)
            known = step @ known
    assert not any(len(points) for layer in record.layers for points in layer.pruned)
    assert record.traced[0].tolist() == [4] and len(record.traced[1]) == len(record.rollout[1]) == 0
    np.testing.assert_allclose(record.rollout[0][0], known[4], atol=1e-4)


def test_points_without_a_match_name_their_candidates_and_what_beat_them():
    """Of the last layer that a point lived through; that of the matched ones is their match."""
    matcher, sides = matcher_with(False, False, config=replace(CONFIG, **GUIDED)), pair(60, 50, 1)
    record = explain(matcher, *sides)
    for side, found in enumerate(record.candidates):
        for alone, rows in found.values():
            shares = [share for _, share, _, _ in rows]
            assert shares == sorted(shares, reverse=True)
            assert max(shares) <= 1 + 1e-5 and 0 <= alone <= 1 + 1e-5
            assert all(best >= share - 1e-6 for _, share, _, best in rows)
        for match, score in zip(record.matches.tolist(), record.scores.tolist(), strict=True):
            partner, share, rival, _ = found[match[side]][1][0]
            assert (partner, rival) == (match[1 - side], match[side])
            assert share == pytest.approx(score, abs=1e-5)
        for point in np.flatnonzero(record.fates[side] == UNMATCHED).tolist():
            _, share, rival, _ = found[point][1][0]
            assert rival != point or share <= CONFIG.policy.match_threshold + 1e-6
    pruned = explain(matcher_with(), *pair(80, 70, 2))
    for side, fates in enumerate(pruned.fates):
        for point in np.flatnonzero(fates > 0):
            assert fates[point] <= len(pruned.layers)
            assert pruned.candidates[side][point][1]


# --- Reports of a pair and of a run, in a browser.


ODD = "<img src=x onerror=alert(1)>&amp;.png"


def data_of(path):
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text("utf-8"), re.S)[1])


# --- A pair


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
    text = report[0].read_text("utf-8")
    text = text.replace("</html>", "<script>view.dataset.foreign = 1</script></html>")
    (tmp_path / "changed.html").write_text(text, "utf-8")
    with browser() as page:
        page.open((tmp_path / "changed.html").as_uri())
        page.wait("return document.body.dataset.ready")
        assert page.run("return view.dataset.foreign ?? null") is None
        assert any("Content Security Policy" in text for text in page.complaints())


@needs_browser
def test_a_pair_without_a_match_makes_a_page(pictures, pipeline, tmp_path):
    (tmp_path / "odd.png").write_bytes(cv2.imencode(".png", np.full((200, 300), 90, np.uint8))[1].tobytes())
    result = write_report(pipeline, pictures[0], tmp_path / "odd.png", tmp_path / "odd.html")
    assert len(result.matches) == 0
    with browser() as page:
        page.open((tmp_path / "odd.html").as_uri())
        page.wait("return document.body.dataset.ready")
        assert "Click a point" in page.text("#info") and page.complaints() == []


def test_an_image_without_a_keypoint_makes_a_page(pictures, pipeline, tmp_path):
    PIL.Image.new("RGB", (300, 200), (90, 90, 90)).save(tmp_path / "blank.png")
    for first in (pictures[0], tmp_path / "blank.png"):
        with (tmp_path / "blank.png").open("rb") as opened:
            write_report(pipeline, first, opened, tmp_path / f"{first.stem}.html")
        assert (tmp_path / f"{first.stem}.html").stat().st_size > 10_000


def test_bad_requests_leave_nothing(pictures, pipeline, tmp_path):
    for matching, name, point in (
        (load("nearest", device="cpu"), "a.html", None),  # it has no network
        (pipeline, "a.html", (4000.0, 1.0)),
        (pipeline, "a.txt", None),
    ):
        with pytest.raises(UsageError):
            write_report(matching, *pictures, tmp_path / name, point)
    for odd in (("--point", "here"), ("--geometry", "essential")):  # which lacks a camera
        assert command("explain", *pictures, "--output", tmp_path / "a.html", *odd) == 2
    assert list(tmp_path.iterdir()) == []
    known = ("--geometry", "essential", "--camera0", "500,500,199.5,179.5")
    assert command("explain", *pictures, "--output", tmp_path / "a.html", *known) == 0
    assert data_of(tmp_path / "a.html")["origin"][-1][1].startswith("essential: ok")


# --- A run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Five views of one plane, one with an odd name, one of something else, a file that is no image."""
    folder = tmp_path_factory.mktemp("run")
    names = photos(folder / "photos", 5)
    (folder / "photos" / names[0]).rename(folder / "photos" / ODD)
    noise = np.random.default_rng(1).integers(0, 255, (160, 200), np.uint8)
    cv2.imwrite(str(folder / "photos" / "noise.png"), noise)
    (folder / "photos" / "broken.jpg").write_bytes(b"\xff\xd8\xff no image")
    given = (folder / "photos", "--run", folder / "run", "--exhaustive", "--workers", 0, *QUICK)
    assert command("collection", *given) == 4
    return folder / "run"


@pytest.fixture(scope="module")
def written(run):
    assert command("report", run, "--pages", 3) == 0
    return run / "report.html"


def test_the_page_counts_what_the_store_holds(run, written):
    data = data_of(written)
    with Store.open(run) as store:
        counts, pairs = store.counts(), list(store.pairs())
    assert data["counts"] == [
        ["images", counts.images_done, counts.images_failed, counts.images_waiting],
        ["pairs", counts.pairs_done, counts.pairs_failed, counts.pairs_waiting],
    ]
    assert sum(count for _, count in data["statuses"]) == len(pairs) == 15
    assert [sum(histogram) for histogram in data["histograms"]] == [15, 15]
    inliers = {(p.name0, p.name1): int(p.geometry.inliers.sum()) for p in pairs}
    assert {(row[0], row[1]): row[3] for row in data["weakest"]} == inliers
    planar = {(p.name0, p.name1) for p in pairs if p.geometry.planar}  # views of one plane
    assert planar == {(row[0], row[1]) for row in data["weakest"] if row[4].endswith(", planar")} != set()
    likely = {(row[0], row[1]) for row in data["weakest"] if row[5] > 0.5}
    sound = {(p.name0, p.name1) for p in pairs if p.geometry.verified}
    nodes = [node[0] for node in data["graph"]["nodes"]]
    assert {(nodes[a], nodes[b]) for a, b, *_ in data["graph"]["edges"]} == sound == likely
    assert len(likely) == 10
    assert dict((name, degree) for name, *_, degree in data["graph"]["nodes"])["noise.png"] == 0
    tracks = Collection.open(run).tracks()
    assert data["tracks"]["count"] == len(tracks) and data["tracks"]["conflicts"] == tracks.conflicts
    assert sum(length * count for length, count in data["tracks"]["lengths"]) == len(tracks.images)
    assert data["failures"]["images"][0] == 1 and data["failures"]["images"][1][0][0] == "broken.jpg"
    assert data["failures"]["pairs"][0] == counts.pairs_failed > 0


def test_names_are_escaped_and_nothing_is_fetched(run, written):
    pages = [written, *(run / "report_pairs").iterdir()]
    assert len(pages) == 4
    for page in pages:
        text = page.read_text("utf-8")
        assert "<img" not in text and "http:" not in text and "https:" not in text
        assert "default-src 'none'" in text.replace("&#x27;", "'")


@needs_browser
def test_a_browser_shows_the_graph_and_follows_a_link(run, written, tmp_path):
    with browser() as page:
        page.open(written.as_uri())
        page.wait("return document.body.dataset.ready")
        assert "15 pairs were matched" in page.text("#summary")
        place = page.run(
            "const [x, y] = at(nodes.findIndex(node => node[0] === arguments[0]));"
            "graph.scrollIntoView(); const now = graph.getBoundingClientRect();"
            "return [now.left + x, now.top + y]",
            ODD,
        )
        page.click("#graph", at=place)
        assert page.text("#info") == f"{ODD}: 4 verified pairs"
        assert page.run("return document.querySelectorAll('img').length") == 0
        page.screenshot(tmp_path / "run.png")
        assert "nearest" in page.text("#tables") and ODD in page.text("#weakest")
        assert "broken.jpg" in page.text("#failed-images")
        assert len(page.find("#weakest a")) == 3 and page.complaints() == []
        for last in (True, False):  # the pairs of the other place, sorted by the probability of the same
            page.click("#weakest th:nth-child(6)")
            assert ("noise.png" not in page.text("#weakest tr:last-child")) == last
        page.click("#weakest a")
        page.wait("return location.pathname.includes('report_pairs') && document.body.dataset.ready")
        assert "Click a point" in page.text("#info") and page.complaints() == []
        page.click("#controls a")
        page.wait("return location.pathname.endsWith('report.html') && document.body.dataset.ready")


def test_bad_requests_are_refused(run, tmp_path):
    (tmp_path / "page_pairs").write_text("in the way")
    for arguments in (
        (tmp_path,),
        (run, "--output", tmp_path / "page.txt"),
        (run, "--pages", -1),
        (run, "--output", tmp_path / "page.html"),
    ):
        assert command("report", *arguments) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["page_pairs"]
