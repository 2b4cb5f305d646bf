"""The page of a run: what one pass counts, where images lie, the page itself, from disk in a browser."""

import json
import re

import cv2
import numpy as np
import pytest
from browser import browser, needs_browser
from collection_runs import QUICK, photos

from matcher.cli import main
from matcher.collection.collection import Collection
from matcher.collection.schema import StoredPair
from matcher.collection.store import Store
from matcher.explain.run_report import BINS, bin_of, collect_statistics
from matcher.types import Matches, TwoViewGeometry

ODD = "<img src=x onerror=alert(1)>&amp;.png"


def page_data(path):
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text("utf-8"), re.S)[1])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Five views of one plane, one with an odd name, one of something else, a file that is no image."""
    folder = tmp_path_factory.mktemp("run")
    names = photos(folder / "photos", 5)
    (folder / "photos" / names[0]).rename(folder / "photos" / ODD)
    noise = np.random.default_rng(1).integers(0, 255, (160, 200), np.uint8)
    cv2.imwrite(str(folder / "photos" / "noise.png"), noise)
    (folder / "photos" / "broken.jpg").write_bytes(b"\xff\xd8\xff no image")
    given = [
        "collection",
        str(folder / "photos"),
        "--run",
        str(folder / "run"),
        "--exhaustive",
        "--workers",
        "0",
    ]
    assert main([*given, *QUICK]) == 4
    return folder / "run"


@pytest.fixture(scope="module")
def written(run):
    assert main(["report", str(run), "--pages", "3"]) == 0
    return run / "report.html"


def test_the_page_counts_what_the_store_holds(run, written):
    data = page_data(written)
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
    sound = {(p.name0, p.name1) for p in pairs if p.geometry.status == "ok"}
    nodes = [node[0] for node in data["graph"]["nodes"]]
    assert {(nodes[a], nodes[b]) for a, b, *_ in data["graph"]["edges"]} == sound and len(sound) == 10
    assert dict((name, degree) for name, *_, degree in data["graph"]["nodes"])["noise.png"] == 0
    tracks = Collection.open(run).tracks()
    assert data["tracks"]["count"] == len(tracks) and data["tracks"]["conflicts"] == tracks.conflicts
    assert sum(length * count for length, count in data["tracks"]["lengths"]) == len(tracks.images)
    assert data["failures"]["images"][0] == 1 and data["failures"]["images"][1][0][0] == "broken.jpg"
    assert data["failures"]["pairs"][0] == counts.pairs_failed > 0


def test_names_are_escaped_and_nothing_is_fetched(run, written):
    for page in (written, *sorted((run / "report_pairs").iterdir())):
        text = page.read_text("utf-8")
        assert "<img" not in text and "http:" not in text and "https:" not in text
        assert "default-src 'none'" in text.replace("&#x27;", "'")
    assert len(list((run / "report_pairs").iterdir())) == 3


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
        page.click("#weakest a")
        page.wait("return location.pathname.includes('report_pairs') && document.body.dataset.ready")
        assert "Click a point" in page.text("#info") and page.complaints() == []
        page.click("#controls a")
        page.wait("return location.pathname.endsWith('report.html') && document.body.dataset.ready")


def test_a_page_names_the_reconstructions_of_its_run(run):
    model = run.parent / "model"
    model.mkdir()
    for other, named in (("../run", True), ("../another", False)):
        (model / "summary.json").write_text(json.dumps({"run": other}))
        assert main(["report", str(run), "--pages", "0"]) == 0
        rows = page_data(run / "report.html")["origin"]
        link = {"text": str(model), "link": "../model/reconstruction.png"}
        assert (["reconstruction", link] in rows) == named


def stored(number, inliers, matches, status="ok"):
    index = np.stack([np.arange(matches)] * 2, 1)
    points = np.zeros((matches, 2), np.float32)
    found = Matches(index, points, points, np.ones(matches, np.float32))
    return StoredPair(
        f"{number}",
        f"{number + 1}",
        found,
        TwoViewGeometry("fundamental", status, np.arange(matches) < inliers),
        0.5,
    )


def test_one_pass_keeps_the_worst_and_the_best():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 300, 200)
    pairs = [stored(n, int(c), int(c) + 5, "ok" if c > 15 else "too_few") for n, c in enumerate(counts)]
    found = collect_statistics(iter(pairs), 20, 30)
    assert [row.inliers for row in found.weakest] == sorted(counts)[:20]
    assert [row.inliers for row in found.strongest] == sorted(counts)[::-1][:30]
    assert found.pairs == 200 and found.seconds == 100.0
    assert found.statuses["ok"] == (counts > 15).sum() and sum(found.inliers.values()) == 200
    assert sum(found.degree.values()) == 2 * (counts > 15).sum() and found.tried["3"] == 2
    assert (
        collect_statistics(iter(pairs), 0, 0).weakest == []
        and collect_statistics(iter(()), 5, 5).strongest == []
    )
    assert [BINS[bin_of(count)] for count in (0, 1, 9, 10, 1999, 10**6)] == [0, 1, 1, 10, 1000, 2000]
    free = collect_statistics(iter([stored(0, 0, 7, "not_estimated")]), 1, 1)
    assert free.strongest[0].inliers == 7
