"""Drawings: lines join the right pixels, colours mean what the legend says, files come out whole."""

import itertools
import re
import sys

import numpy as np
import PIL.Image
import pytest

from matcher.alignment.find import Detections
from matcher.errors import ImageError, UsageError
from matcher.geometry import upright_size, upright_to_stored
from matcher.images import read_image
from matcher.loading import load
from matcher.result import Result
from matcher.sequence.keyframe_map import ClosedTrajectory
from matcher.types import Features, Matches, TwoViewGeometry
from matcher.viz.drawings import draw_instances, draw_matches, figure_pixels, header_height


def grey(width=400, height=300):
    return np.full((height, width), 60, np.uint8)


def below(pixels):
    return pixels[header_height(pixels.shape[1]) :]


def body(figure):
    """(H, W, 3) the rendered figure below its header."""
    return below(figure_pixels(figure))


def coloured(pixels):
    """(H, W) bool: pixels that are neither grey nor white."""
    return pixels.max(axis=2).astype(int) - pixels.min(axis=2) > 40


def test_a_line_joins_the_two_points():
    # 400x300 is shown at twice its size; images start at x = 0 and 812, stored p at 2·(p + 0.5) - 0.5.
    pixels = body(draw_matches(grey(), grey(), np.array([[50.0, 100.0]]), np.array([[350.0, 100.0]])))
    assert pixels.shape == (600, 1612, 3) and pixels.dtype == np.uint8
    rows, columns = np.nonzero(coloured(pixels))
    assert abs(rows.mean() - 200.5) < 0.6
    assert abs(columns.min() - 100.5) <= 3 and abs(columns.max() - (812 + 700.5)) <= 3
    ends = np.array([[50.0, 100.0]]), np.array([[50.0, 200.0]])
    rows, columns = np.nonzero(coloured(body(draw_matches(grey(), grey(), *ends, stacked=True))))
    assert abs(columns.mean() - (80 + 100.5)) < 0.6
    assert abs(rows.min() - 200.5) <= 3 and abs(rows.max() - (612 + 400.5)) <= 3


@pytest.mark.parametrize("orientation", [4, 6])
def test_points_of_a_turned_image_land_on_its_upright_view(tmp_path, orientation):
    stored = (400, 300)
    upright = upright_size(stored, orientation)
    target = np.array([[upright[0] - 41.0, 30.0]])  # near the upper right corner as one sees it
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    PIL.Image.fromarray(grey()).save(tmp_path / "turned.png", exif=exif)
    image = read_image(tmp_path / "turned.png", resize=200)
    points = upright_to_stored(target, stored, orientation)
    found = coloured(body(draw_matches(image, grey(800, 800), points, np.array([[0.0, 0.0]]))))
    x, y = 2 * (target[0] + 0.5) - 0.5 + (0, (800 - upright[1] * 2) / 2)
    assert found[round(y) - 1 : round(y) + 2, round(x) - 1 : round(x) + 2].any()
    assert not found[:, : round(x) - 6].any()  # the line starts there and goes right


def test_colours_tell_inliers_confidence_and_errors():
    points0, points1 = np.array([[50.0, 60.0], [50.0, 240.0]]), np.array([[350.0, 60.0], [350.0, 240.0]])
    verified = body(draw_matches(grey(), grey(), points0, points1, inliers=np.array([True, False])))
    good, bad = (half[coloured(half)].astype(int) for half in (verified[:300], verified[300:]))
    assert (good[:, 1] - good[:, 0]).mean() > -40 and (bad[:, 0] - bad[:, 1]).mean() > 40  # yellow, vermilion
    assert len(good) > 1.5 * len(bad)  # outliers are thinner
    plain = body(draw_matches(grey(), grey(), points0, points1))  # without geometry nothing is an outlier
    assert np.array_equal(plain[:300], verified[:300]) and not np.array_equal(plain[300:], verified[300:])
    views = [body(draw_matches(grey(), grey(), *[points0[:1]] * 2, scores=np.array([s]))) for s in (1, 0.05)]
    sure, unsure = (view[coloured(view)][:, 0].mean() for view in views)
    assert sure > unsure + 60
    errors = np.array([0.0, 40.0])
    view = body(draw_matches(grey(), grey(), points0, points1, errors=errors, colour_by="error"))
    right, wrong = (half[coloured(half)].astype(int) for half in (view[:300], view[300:]))
    assert (right[:, 2] - right[:, 0]).mean() > 40 and (wrong[:, 0] - wrong[:, 2]).mean() > 40


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (grey(), np.full((300, 400, 3), (200, 40, 40), np.uint8)),  # grey with colour
        (grey().astype(np.uint16) * 257, grey(20, 1000).astype(np.float32) / 255),
    ],
)
def test_any_pair_makes_an_image_with_a_legible_header(first, second):
    point, good = np.zeros((1, 2)), np.ones(1, bool)
    figure = draw_matches(first, second, point, point, inliers=good, title="a $ b\nc")
    pixels = figure_pixels(figure)
    header = header_height(pixels.shape[1])
    assert pixels.shape[1] >= 960 and header < pixels.shape[0] <= header + 800
    assert header / pixels.shape[1] >= 0.05 and pixels[:header].min() < 100  # the title is there
    boxes = [text.get_window_extent() for text in figure.texts[1:] if text.get_text()]
    boxes.sort(key=lambda box: box.x0)
    assert len(boxes) > 2 and all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))
    assert body(draw_matches(first, second, np.zeros((0, 2)), np.zeros((0, 2)))).min() < 250


def test_bad_arguments_are_named():
    for points1, options, named in (
        (np.zeros((3, 2)), {}, "length"),
        (np.full((2, 2), np.nan), {}, "finite"),
        (np.zeros((2, 2)), {"colour_by": "error"}, "errors"),
        (np.zeros((2, 2)), {"colour_by": "repeats"}, "groups"),
    ):
        with pytest.raises(UsageError, match=named):
            draw_matches(grey(), grey(), np.zeros((2, 2)), points1, **options)


@pytest.mark.parametrize(("suffix", "magic"), [(".JPEG", b"\xff\xd8"), (".svg", b"<?xml")])
def test_a_result_is_drawn_the_same_every_time_and_replaces_its_own(tmp_path, suffix, magic):
    PIL.Image.fromarray(grey()).save(tmp_path / "a.png")
    points = np.random.default_rng(0).uniform(5, (394, 294), (30, 2))
    features = Features(points, np.zeros((30, 4)), size=(400, 300))
    matches = Matches(np.stack([np.arange(30)] * 2, 1), points, points, np.linspace(1, 0.2, 30))
    result = Result(features, features, matches, TwoViewGeometry("fundamental", "ok", np.ones(30, bool)))
    assert "30 inliers (fundamental), unsure (0.88)" in repr(result)
    path, again = tmp_path / f"plot{suffix}", tmp_path / f"again{suffix}"
    path.write_text("old")
    with pytest.raises(UsageError, match="overwrite"):
        result.plot(path, grey(), grey())
    assert result.plot(path, grey(), grey(), overwrite=True) == path
    result.plot(path, tmp_path / "a.png", read_image(grey()), title="demo")
    result.plot(again, tmp_path / "a.png", grey(), title="demo")
    assert path.read_bytes() == again.read_bytes() and path.read_bytes().startswith(magic)
    assert result.plot(image0=grey(), image1=grey()).size == (1612, 600 + header_height(1612))
    for name, images, fault in (
        ("absent/plot.png", (grey(), grey()), UsageError),
        ("plot.gif", (grey(), grey()), UsageError),
        ("new.png", (grey(), grey(300, 400)), UsageError),
        ("new.png", (tmp_path / "missing.jpg", grey()), ImageError),
    ):
        with pytest.raises(fault):
            result.plot(tmp_path / name, *images)
    assert len(list(tmp_path.iterdir())) == 3


def test_instances_and_the_corner_of_the_template_are_seen_whole():
    corners = np.array([[100, 100], [200, 100], [200, 150], [100, 150]], float)
    figure = draw_instances(grey(100, 50), grey(), [corners])
    texts = " ".join(text.get_text() for text in figure.texts)
    assert "1 instance" in texts and "first corner" in texts
    dots = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert len(dots) == 2 and all(5 < dot.get_xdata()[0] < 1606 for dot in dots)
    none = draw_instances(grey(100, 50), grey(), [])
    assert "first corner" not in " ".join(text.get_text() for text in none.texts)


def test_ellipses_show_the_uncertainty_of_points_enlarged():
    points = np.array([[100.0, 150.0], [300.0, 150.0]])
    covariances = np.array([[[0.25, 0], [0, 0.01]], [[4.0, 0], [0, 4.0]]])
    pair = grey(), grey(), points, points
    plain, drawn = (body(draw_matches(*pair, covariances=given)) for given in (None, covariances))
    differs = (plain.astype(int) - drawn).any(axis=2)
    half = differs.shape[1] // 2
    assert not differs[:, : half - 20].any()  # they are those of image 1
    rows, columns = np.nonzero(differs[:, half : half + half // 2])
    assert np.ptp(columns) > 3 * np.ptp(rows) > 0


def test_answers_lie_side_by_side_below_and_groups_have_colours():
    ends, turned = np.array([[50.0, 100.0], [300.0, 200.0], [350.0, 50.0]]), np.eye(4)
    turned[0, 3] = 1.0
    cloud = np.random.default_rng(0).uniform((-1, -1, 4), (1, 1, 5), (50, 3))
    groups = np.array([0, 0, -1])
    plain = figure_pixels(draw_matches(grey(), grey(), ends, ends, planes=groups, colour_by="repeats"))
    how = {"planes": groups, "colour_by": "repeats", "answers": [(np.eye(4), cloud), (turned, cloud)]}
    figure = draw_matches(grey(), grey(), ends, ends, **how)
    both = figure_pixels(figure)
    assert np.abs(both[: len(plain)].astype(int) - plain).mean() < 1
    below, middle = both[len(plain) :], both.shape[1] // 2
    assert coloured(below[:, :middle]).any() and coloured(below[:, middle:]).any()
    assert [axes.get_title()[:11] for axes in figure.axes[1:]] == ["pose 1 of 2", "pose 2 of 2"]
    lines = figure.axes[0].collections[2].get_colors()
    assert (lines[:2, :3] != 1).any() and np.allclose(sorted(lines.tolist())[-1][:3], 1)


def test_what_draws_without_matplotlib_says_what_to_install(monkeypatch):
    closed = ClosedTrajectory(*np.zeros((4, 0, 4, 4)), (), None)
    found = Detections((), (400, 300), read_image(grey()))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if re.fullmatch(r"matcher\..*(plot|drawings)", name)]:
        monkeypatch.delitem(sys.modules, name)
    for plot in (load("nearest").match(grey(), grey()).plot, found.plot, closed.plot, closed.record):
        with pytest.raises(UsageError, match="pip install 'matplotlib>="):
            plot("plot.png")
