import dataclasses
import itertools
import time

import numpy as np
import PIL.Image
import pytest

from matcher.errors import ImageError, UsageError
from matcher.geometry import upright_size, upright_to_stored
from matcher.images import image_from_array, read_image
from matcher.result import Result
from matcher.types import MATCHED, UNMATCHED, Features, Matches, TwoViewGeometry
from matcher.viz.drawings import (
    draw_fates,
    draw_matches,
    figure_pixels,
    header_height,
    match_errors,
    save_figure,
)
from matcher.viz.overlays import draw_epipolar_lines, draw_overlay
from matcher.viz.plots import (
    draw_attention,
    draw_confidences,
    draw_decisions,
    draw_entropies,
    draw_marginal_errors,
)

MISSING = np.zeros((0, 2))


def grey(width=400, height=300, value=60):
    return np.full((height, width), value, np.uint8)


def body(figure):
    """(H, W, 3) the rendered figure below its header."""
    return below(figure_pixels(figure))


def below(pixels):
    return pixels[header_height(pixels.shape[1]) :]


def coloured(pixels):
    """(H, W) bool: pixels that are neither grey nor white."""
    return pixels.max(axis=2).astype(int) - pixels.min(axis=2) > 40


def make_result(points0, points1, size0, size1, status="ok", inliers=None, exif=1):
    count = len(points0)

    def features(points, size, orientation):
        return Features(points, np.zeros((count, 4)), size=size, exif_orientation=np.asarray(orientation))

    matches = Matches(np.stack([np.arange(count)] * 2, 1), points0, points1, np.linspace(1, 0.2, count))
    inliers = np.ones(count, bool) if inliers is None else inliers
    geometry = TwoViewGeometry("fundamental", status, inliers)
    return Result(features(points0, size0, exif), features(points1, size1, 1), matches, geometry)


def grid_points(count, size, seed=0):
    return np.random.default_rng(seed).uniform(5, np.array(size) - 6, (count, 2))


def test_line_joins_the_two_points():
    # 400x300 is shown at twice its size; images start at x = 0 and 812, stored p at 2·(p + 0.5) - 0.5.
    pixels = body(draw_matches(grey(), grey(), np.array([[50.0, 100.0]]), np.array([[350.0, 100.0]])))
    assert pixels.shape == (600, 1612, 3) and pixels.dtype == np.uint8
    rows, columns = np.nonzero(coloured(pixels))
    assert abs(rows.mean() - 200.5) < 0.6
    assert abs(columns.min() - 100.5) <= 3 and abs(columns.max() - (812 + 700.5)) <= 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_points_of_a_turned_image_land_on_its_upright_view(tmp_path, orientation):
    stored = (400, 300)
    upright = upright_size(stored, orientation)
    target = np.array([[upright[0] - 41.0, 30.0]])  # near the upper right corner as one sees it
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    PIL.Image.fromarray(grey()).save(tmp_path / "turned.png", exif=exif)
    image = read_image(tmp_path / "turned.png", resize=200)
    points = upright_to_stored(target, stored, orientation)
    pixels = body(draw_matches(image, grey(800, 800), points, np.array([[0.0, 0.0]])))
    scale = 800 / 400
    top = (800 - upright[1] * scale) / 2
    x, y = scale * (target[0] + 0.5) - 0.5 + (0, top)
    found = coloured(pixels)
    assert found[round(y) - 1 : round(y) + 2, round(x) - 1 : round(x) + 2].any()
    assert not found[:, : round(x) - 6].any()  # the line starts there and goes right


def test_inliers_and_outliers_differ_and_without_geometry_nothing_is_an_outlier():
    points0, points1 = np.array([[50.0, 60.0], [50.0, 240.0]]), np.array([[350.0, 60.0], [350.0, 240.0]])
    verified = body(draw_matches(grey(), grey(), points0, points1, inliers=np.array([True, False])))
    good, bad = (half[coloured(half)].astype(int) for half in (verified[:300], verified[300:]))
    assert (good[:, 1] - good[:, 0]).mean() > -40  # yellow
    assert (bad[:, 0] - bad[:, 1]).mean() > 40  # vermilion
    assert len(good) > 1.5 * len(bad)  # outliers are thinner
    plain = body(draw_matches(grey(), grey(), points0, points1))
    assert np.array_equal(plain[:300], verified[:300])
    assert not np.array_equal(plain[300:], verified[300:])


def test_confidence_changes_the_colour():
    point = np.array([[50.0, 60.0]])
    views = [body(draw_matches(grey(), grey(), point, point, scores=np.array([s]))) for s in (1.0, 0.05)]
    sure, unsure = (view[coloured(view)][:, 0].mean() for view in views)
    assert sure > unsure + 60


def test_thousands_of_lines_leave_the_image_visible_and_take_less_than_a_second():
    points0, points1 = grid_points(2000, (400, 300)), grid_points(2000, (400, 300), seed=1)
    inliers = np.arange(2000) % 3 > 0
    every = dict(inliers=inliers, keypoints0=points0, keypoints1=points1)
    spent = []
    for _ in range(3):  # one may be slow beside other tests
        start = time.process_time()
        pixels = figure_pixels(draw_matches(grey(), grey(), points0, points1, **every))
        spent.append(time.process_time() - start)
    assert min(spent) < 1.0
    assert coloured(below(pixels)).mean() < 0.5


def test_drawn_lines_are_spread_over_the_image():
    crowd = grid_points(300, (60, 60))
    lone = np.array([[380.0, 280.0]])
    points, scores = np.concatenate([crowd, lone]), np.concatenate([np.full(300, 0.9), [0.1]])
    figure = draw_matches(grey(), grey(), points, points, scores=scores, max_lines=8)
    lines = figure.axes[0].collections[-2].get_segments()
    assert len(lines) == 8
    assert any(abs(line[0] - (760.5, 560.5)).max() < 1 for line in lines)


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_line_limit(limit):
    points = grid_points(40, (400, 300))
    figure = draw_matches(grey(), grey(), points, points, inliers=np.arange(40) < 20, max_lines=limit)
    drawn = sum(len(c.get_segments()) for c in figure.axes[0].collections if hasattr(c, "get_segments"))
    assert drawn == 2 * limit + limit // 4  # inliers have a dark line below


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (grey(), np.full((300, 400, 3), (200, 40, 40), np.uint8)),  # grey with colour
        (grey(1000, 20), grey(20, 1000)),
        (grey(1, 1), grey(2500, 2000)),
        (grey().astype(np.uint16) * 257, grey().astype(np.float32) / 255),
    ],
)
@pytest.mark.parametrize("count", [0, 1])
def test_any_pair_makes_an_image(first, second, count):
    point = np.zeros((count, 2))
    pixels = figure_pixels(
        draw_matches(
            first, second, point, point, inliers=np.ones(count, bool), keypoints0=MISSING, title="a $ b\nc"
        )
    )
    header = header_height(pixels.shape[1])
    assert pixels.shape[1] >= 960 and header < pixels.shape[0] <= header + 800
    assert pixels[header:].min() < 250
    assert pixels[:header].min() < 100  # the title is there


def test_bad_arguments_are_named():
    two, three = np.zeros((2, 2)), np.zeros((3, 2))
    with pytest.raises(UsageError, match="one length"):
        draw_matches(grey(), grey(), two, three)
    with pytest.raises(UsageError, match="scores"):
        draw_matches(grey(), grey(), two, two, scores=np.ones(3))
    with pytest.raises(UsageError, match="points1"):
        draw_matches(grey(), grey(), two, np.zeros(2))
    with pytest.raises(UsageError, match="finite"):
        draw_matches(grey(), grey(), two, two + np.nan)
    with pytest.raises(UsageError, match="max_lines"):
        draw_matches(grey(), grey(), two, two, max_lines=-1)


@pytest.mark.parametrize(
    ("suffix", "magic"),
    [
        (".png", b"\x89PNG"),
        (".jpg", b"\xff\xd8"),
        (".JPEG", b"\xff\xd8"),
        (".pdf", b"%PDF"),
        (".svg", b"<?xml"),
    ],
)
def test_plot_result_writes_each_format_and_nothing_else(tmp_path, suffix, magic):
    points = grid_points(30, (400, 300))
    path = tmp_path / f"plot{suffix}"
    path.write_text("old")
    result = make_result(points, points, (400, 300), (400, 300))
    with pytest.raises(UsageError, match="overwrite=True"):
        result.plot(path, grey(), grey())
    assert result.plot(path, grey(), grey(), overwrite=True) == path
    assert result.plot(path, grey(), grey()) == path  # our own is replaced
    assert path.read_bytes().startswith(magic)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_plot_result_reads_files_and_is_deterministic(tmp_path):
    PIL.Image.fromarray(grey()).save(tmp_path / "a.png")
    points = grid_points(30, (400, 300))
    result = make_result(points, points, (400, 300), (400, 300))
    for name in ("one.pdf", "two.pdf", "one.png", "two.png", "one.svg", "two.svg"):
        result.plot(tmp_path / name, tmp_path / "a.png", image_from_array(grey()), title="demo")
    for suffix in ("pdf", "png", "svg"):
        assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"two.{suffix}").read_bytes()


def test_plot_result_without_geometry_draws_no_outliers(tmp_path):
    points = grid_points(10, (400, 300))
    result = make_result(points, points, (400, 300), (400, 300), "not_estimated", np.zeros(10, bool))
    result.plot(tmp_path / "none.png", grey(), grey())
    geometry = dataclasses.replace(result.geometry, status="no_model")
    dataclasses.replace(result, geometry=geometry).plot(tmp_path / "failed.png", grey(), grey())
    none, failed = (
        below(np.asarray(PIL.Image.open(tmp_path / f"{n}.png"))[..., :3]) for n in ("none", "failed")
    )
    assert none[coloured(none)][:, 1].mean() > failed[coloured(failed)][:, 1].mean() + 30


def test_plot_result_refuses_what_it_cannot_do(tmp_path):
    points = grid_points(3, (400, 300))
    result = make_result(points, points, (400, 300), (400, 300))
    with pytest.raises(UsageError, match=r"\.png.*\.jpg.*\.pdf.*\.svg"):
        result.plot(tmp_path / "plot.gif", grey(), grey())
    with pytest.raises(UsageError, match="no folder"):
        result.plot(tmp_path / "absent" / "plot.png", grey(), grey())
    with pytest.raises(UsageError, match="image1"):
        result.plot(tmp_path / "plot.png", grey(), grey(300, 400))
    with pytest.raises(ImageError):
        result.plot(tmp_path / "plot.png", tmp_path / "missing.jpg", grey())
    assert list(tmp_path.iterdir()) == []


def test_errors_are_distances_to_the_known_geometry_and_have_their_own_colours():
    points0 = np.array([[50.0, 60.0], [50.0, 240.0]])
    points1 = points0 + np.array([[300.0, 0.0], [300.0, 40.0]])
    shift = np.array([[1.0, 0, 300], [0, 1, 0], [0, 0, 1]])
    sideways = np.array([[0.0, 0, 0], [0, 0, -1], [0, 1, 0]])  # x1' F x0 = y0 - y1: rows are epipolar lines
    errors = match_errors(points0, points1, H_1_from_0=shift)
    np.testing.assert_allclose(errors, [0, 40])
    np.testing.assert_allclose(match_errors(points0, points1, fundamental=sideways), [0, 40])
    with pytest.raises(UsageError, match="either"):
        match_errors(points0, points1)
    view = body(draw_matches(grey(), grey(), points0, points1, errors=errors, colour_by="error"))
    right, wrong = (half[coloured(half)].astype(int) for half in (view[:300], view[300:]))
    assert (right[:, 2] - right[:, 0]).mean() > 40 and (wrong[:, 0] - wrong[:, 2]).mean() > 40
    with pytest.raises(UsageError, match="needs errors"):
        draw_matches(grey(), grey(), points0, points1, colour_by="error")


def test_stacked_images_lie_above_each_other():
    point0, point1 = np.array([[50.0, 100.0]]), np.array([[50.0, 200.0]])
    pixels = body(draw_matches(grey(), grey(), point0, point1, stacked=True))
    assert pixels.shape == (1212, 960, 3)
    rows, columns = np.nonzero(coloured(pixels))
    assert abs(columns.mean() - (80 + 100.5)) < 0.6
    assert abs(rows.min() - 200.5) <= 3 and abs(rows.max() - (612 + 400.5)) <= 3


def test_fates_have_their_colours():
    points = np.array([[50.0, 50.0], [200.0, 50.0], [350.0, 50.0]])
    pixels = body(draw_fates(grey(), grey(), points, MISSING, [MATCHED, UNMATCHED, 3], [], layers=6)).astype(
        int
    )
    matched, unmatched, pruned = (pixels[100, round(2 * x + 0.5)] for x in points[:, 0])
    assert matched[2] > matched[0] + 80  # sky blue
    assert unmatched[0] > unmatched[2] + 80  # vermilion
    assert np.ptp(pruned) < 5  # grey
    with pytest.raises(UsageError, match="fates"):
        draw_fates(grey(), grey(), points, MISSING, [0], [], layers=6)


def board(width=480, height=360):
    rows, columns = np.indices((height, width))
    return (((rows // 20 + columns // 20) % 2) * 200 + 30).astype(np.uint8)


def test_an_overlay_by_the_right_homography_is_the_image_itself():
    shift = np.array([[1.0, 0, -50], [0, 1, 30], [0, 0, 1]])
    picture = board()
    moved = np.roll(picture, (30, -50), (0, 1))
    right, wrong = (
        body(draw_overlay(picture, moved, H)).astype(int)[70:680, 10:850] for H in (shift, np.eye(3))
    )
    whole = body(draw_overlay(moved, moved, np.eye(3))).astype(int)[70:680, 10:850]
    assert np.abs(right - whole).mean() < 4
    assert np.abs(wrong - whole).mean() > 10
    blend = body(draw_overlay(picture, moved, shift, kind="blend")).astype(int)[70:680, 10:850]
    assert np.ptp(blend, axis=2).mean() < 5
    with pytest.raises(UsageError, match="invertible"):
        draw_overlay(picture, moved, np.zeros((3, 3)))


def test_epipolar_lines_run_through_the_partners():
    sideways = np.array([[0.0, 0, 0], [0, 0, -1], [0, 1, 0]])
    points0, points1 = np.array([[50.0, 100.0]]), np.array([[300.0, 100.0]])
    figure = draw_epipolar_lines(grey(), grey(), points0, points1, sideways)
    for lines, left in zip(figure.axes[0].collections[::2], (0, 812), strict=True):
        (segment,) = lines.get_segments()
        np.testing.assert_allclose(sorted(segment[:, 0]), [left - 0.5, left + 799.5], atol=0.01)
        np.testing.assert_allclose(segment[:, 1], 200.5, atol=0.01)
    assert draw_epipolar_lines(grey(), grey(), MISSING, MISSING, sideways)


@pytest.mark.parametrize("size", [(400, 300), (300, 1000)])
@pytest.mark.parametrize("stacked", [False, True])
def test_a_header_is_as_legible_in_a_wide_image(size, stacked):
    picture, point = grey(*size), np.zeros((1, 2))
    pixels = figure_pixels(draw_matches(picture, picture, point, point, inliers=[True], stacked=stacked))
    header = pixels[: header_height(pixels.shape[1])]
    assert header.shape[0] / pixels.shape[1] >= 0.05
    ink = np.nonzero(header.min(axis=2) < 200)[0]
    assert np.ptp(ink) > 0.5 * len(header) and ink.min() > 0 and ink.max() < len(header) - 1
    texts = draw_matches(picture, picture, point, point, inliers=[True], stacked=stacked).texts
    boxes = [text.get_window_extent() for text in texts[1:] if text.get_text()]
    boxes.sort(key=lambda box: box.x0)
    assert len(boxes) > 2 and all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))


def test_dots_of_heads_lie_beside_each_other():
    heard = [(np.array([[300.0, 100.0]]), np.array([0.5]))] * 2
    figure = draw_attention(grey(), grey(), (50.0, 100.0), heard, [], names=["one", "two"])
    first, second = (c.get_offsets()[0] for c in figure.axes[0].collections[1:4:2])
    assert 8 < np.linalg.norm(first - second) < 16
    np.testing.assert_allclose((first + second) / 2, [600.5, 200.5])
    assert {"one", "two"} <= {text.get_text() for text in figure.texts}


@pytest.mark.parametrize("heads", [1, 4, 8, 12])
def test_any_number_of_heads_has_its_colours(heads):
    heard = [(np.array([[300.0, 100.0]]), np.array([0.5]))] * heads
    figure = draw_attention(grey(), grey(), (50.0, 100.0), heard, heard)
    colours = {tuple(c.get_facecolor()[0]) for c in figure.axes[0].collections[1 : 2 * heads : 2]}
    last = f"{heads}" if heads > 4 else f"head {heads}"
    assert len(colours) == heads and last in {text.get_text() for text in figure.texts}
    width = figure.get_size_inches()[0] * 100
    assert max(text.get_window_extent().x1 for text in figure.texts) < width
    assert figure_pixels(figure).shape[1] > 960


def test_plots_show_their_numbers():
    shares = {"sure": [0.5, None], "alone": [0.2, 0.3]}
    above, middle, below_ = draw_decisions([5, 7], [5, 3], [0, 1], shares, [4, 0], exited=True).axes
    assert above.lines[0].get_ydata().tolist() == [5, 7]
    assert [bar.get_height() for bar in above.patches] == [5, 3, 0, 1]
    assert middle.lines[0].get_xdata().tolist() == [1] and middle.lines[1].get_ydata().tolist() == [0.2, 0.3]
    assert [bar.get_height() for bar in below_.patches] == [4, 0]
    (axes,) = draw_confidences({"a": np.array([0.0, 0.04, 1.0]), "none": np.zeros(0)}, threshold=0.1).axes
    heights = [bar.get_height() for bar in axes.patches]
    assert heights[0] == 2 and heights[19] == 1 and sum(heights) == 3
    (axes,) = draw_marginal_errors([1.0, 0.1, 0.005], tolerance=0.01).axes
    assert axes.lines[0].get_ydata().tolist() == [1.0, 0.1, 0.005] and axes.get_yscale() == "log"
    left, right, _ = draw_entropies([[1.0, 2.0]], [[0.0, 3.0]], limit=4.0).axes
    assert [text.get_text() for text in (*left.texts, *right.texts)] == ["1.0", "2.0", "0.0", "3.0"]


def test_plots_of_nothing_and_of_bad_values(tmp_path):
    figures = [
        draw_decisions([0], [0], [0], {"sure": [None]}, [0]),
        draw_confidences({"matches": np.zeros(0)}),
        draw_marginal_errors([]),
        draw_entropies(np.zeros((1, 1)), np.zeros((1, 1)), limit=1.0),
    ]
    for figure in figures:
        assert figure_pixels(figure).shape[1] == 1000
    for suffix in (".jpg", ".pdf", ".svg"):
        assert save_figure(figures[1], tmp_path / f"plot{suffix}").stat().st_size > 1000
    with pytest.raises(UsageError, match="each layer"):
        draw_decisions([1, 2], [1], [0], {}, [0])
    with pytest.raises(UsageError, match=r"\[0, 1\]"):
        draw_confidences({"a": np.array([1.5])})
    with pytest.raises(UsageError, match="tables"):
        draw_entropies(np.zeros((2, 1)), np.zeros((1, 1)), limit=1.0)


def test_attention_joins_the_keypoint_with_what_it_attends_to_in_both_images():
    heard = [(np.array([[300.0, 100.0]]), np.array([0.9]))]
    figure = draw_attention(grey(), grey(), (50.0, 100.0), heard, heard)
    segments = [c.get_segments()[0] for c in figure.axes[0].collections if hasattr(c, "get_segments")]
    np.testing.assert_allclose([s[0] for s in segments], [[100.5, 200.5]] * 2)
    np.testing.assert_allclose([s[1] for s in segments], [[600.5, 200.5], [812 + 600.5, 200.5]])
    with pytest.raises(UsageError, match="weights"):
        draw_attention(grey(), grey(), (1, 1), [(MISSING, np.ones(1))], [])


def test_ellipses_show_the_uncertainty_of_points_enlarged():
    points = np.array([[100.0, 150.0], [300.0, 150.0]])
    covariances = np.array([[[0.25, 0], [0, 0.01]], [[4.0, 0], [0, 4.0]]])
    plain, drawn = (
        body(draw_matches(grey(), grey(), points, points, covariances=given)) for given in (None, covariances)
    )
    differs = (plain.astype(int) - drawn).any(axis=2)
    half = differs.shape[1] // 2
    assert not differs[:, : half - 20].any()  # they are those of image 1
    first = differs[:, half : half + half // 2]
    rows, columns = np.nonzero(first)
    assert np.ptp(columns) > 3 * np.ptp(rows) > 0
    with pytest.raises(UsageError, match="covariances"):
        draw_matches(grey(), grey(), points, points, covariances=covariances[:1])
