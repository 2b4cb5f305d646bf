"""Control points and aligned GeoTIFFs: rasters of known coordinates, made of scikit-image's photographs."""

import os
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from command import run

import matcher
from matcher.alignment.rasters import georeference, open_raster
from matcher.errors import ImageError, UsageError

rasterio = pytest.importorskip("rasterio")
data = pytest.importorskip("skimage.data")

QUICK = ("--max-keypoints", 1024)
METRES, EAST, NORTH = 0.5, 500_000.0, 5_400_000.0
LOCAL = "+proj=tmerc +lat_0=52 +lon_0=13.1 +k=1 +x_0=0 +y_0=0 +ellps=GRS80 +units=m +no_defs"
TURNED = cv2.getRotationMatrix2D((256, 256), 20, 0.9)  # from pixels of the map's picture to the photo's
BACK = np.vstack([cv2.invertAffineTransform(TURNED), [0, 0, 1]])


def scene() -> np.ndarray:
    """(512, 512) uint8 that stands for the ground: gravel with a photograph on it."""
    ground = data.gravel().copy()
    ground[60:440, 80:460] = cv2.resize(cv2.cvtColor(data.coffee(), cv2.COLOR_RGB2GRAY), (380, 380))
    return ground


def write_tiff(path: Path, bands: np.ndarray, crs: str | None = "EPSG:32633", **more) -> Path:
    """A GeoTIFF of half-metre pixels."""
    form = dict(zip(("count", "height", "width"), bands.shape, strict=True)) | {"dtype": bands.dtype}
    form |= {"transform": rasterio.transform.from_origin(EAST, NORTH, METRES, METRES)} | more
    with rasterio.open(path, "w", driver="GTiff", crs=crs, **form) as file:
        file.write(bands)
    return path


@pytest.fixture
def pair(tmp_path) -> tuple[Path, Path]:
    """A turned, smaller photo, and the map: 16 bit, five bands, in other light."""
    ground = scene()
    photo = cv2.warpAffine(ground, TURNED, (512, 512))
    cv2.imwrite(str(tmp_path / "photo.png"), photo)
    bright = (ground.astype(np.float64) ** 0.8 * 180 + 500).astype(np.uint16)
    return tmp_path / "photo.png", write_tiff(tmp_path / "ortho.tif", np.stack([bright] * 5))


def truth(pixel: np.ndarray, map_from_photo: np.ndarray) -> np.ndarray:
    """Map coordinates of corners-based pixels (K, 2) of the photo."""
    at = cv2.perspectiveTransform(pixel[None] - 0.5, map_from_photo)[0] + 0.5
    return at * (METRES, -METRES) + (EAST, NORTH)


@pytest.mark.parametrize(("share", "crs"), [(1, "EPSG:32633"), (2e-6, "EPSG:4326"), (1, LOCAL)])
def test_control_points_lie_where_the_map_has_them(pair, tmp_path, capfd, share, crs):
    with rasterio.open(pair[1]) as file:
        write_tiff(pair[1], file.read(), crs, transform=rasterio.Affine.scale(share) @ file.transform)
    files = [tmp_path / name for name in ("a.csv", "a.points", "a.txt")]
    for file in files * 2:  # what it wrote it may replace
        assert run("align", *pair, "--gcp", file, "--preset", "nearest-learned", "--max-keypoints", 1024) == 0
    said = capfd.readouterr().out
    assert "residuals: median" in said and "[" not in said
    rows = np.loadtxt(files[0], delimiter=",", skiprows=1)
    off = np.linalg.norm(rows[:, 2:4] / share - truth(rows[:, :2], BACK), axis=1)
    assert len(off) > 20 and np.median(off) < 0.3 * METRES
    assert 0.01 * METRES < np.median(rows[:, 4] / share) < METRES
    head, header, first, *_ = files[1].read_text().splitlines()
    assert head == f"#CRS: {open_raster(pair[1]).crs}" and header.startswith("mapX,mapY,sourceX,sourceY,")
    x, y, column, line = map(float, first.split(",")[:4])
    there = truth(np.array([[column, -line]]), BACK)
    np.testing.assert_allclose(np.array([[x, y]]) / share, there, atol=2 * METRES)
    head, first, *_ = files[2].read_text().splitlines()
    assert head == crs and first.split()[2] == "NaN" and first.split()[5] == "photo.png"


@pytest.mark.parametrize("paletted", [False, True])
def test_the_photo_is_written_on_the_grid_of_the_map(pair, tmp_path, paletted):
    if not paletted:  # 16 bits, and larger than what is matched
        photo = cv2.resize(cv2.imread(str(pair[0]), 0), (1536, 1536), interpolation=cv2.INTER_CUBIC)
        cv2.imwrite(str(pair[0]), photo.astype(np.uint16) * 16)
    else:  # whose numbers say nothing of the grey values
        pair, numbers = (tmp_path / "photo.tif", pair[1]), np.random.default_rng(0).permutation(256)
        write_tiff(pair[0], numbers[cv2.imread(str(tmp_path / "photo.png"), 0)][None].astype(np.uint8))
        with rasterio.open(pair[0], "r+") as file:
            file.write_colormap(1, {number: (grey,) * 3 for grey, number in enumerate(numbers.tolist())})
    found = georeference(*pair, "nearest-learned", max_keypoints=1024)
    with rasterio.open(found.save_raster(tmp_path / "aligned.tif")) as file, rasterio.open(pair[1]) as ground:
        assert (file.transform, file.crs, file.shape) == (ground.transform, ground.crs, ground.shape)
        covered = file.read_masks(1) > 0
        assert 0.6 < covered.mean() <= 1
        inner = cv2.erode(covered.astype(np.uint8), np.ones((9, 9))) > 0
        off = np.abs(file.read(1) / (1 if paletted else 16) - scene())[inner]
        assert np.median(off) < 8  # grey values


@pytest.mark.parametrize("nodata", [-9999, np.nan, None])
def test_no_data_stay_no_data_and_spoil_no_neighbour(pair, tmp_path, nodata):
    heights = cv2.imread(str(pair[0]), 0).astype(np.float32) / 4 + 50
    heights[150:230, 300:420] = nodata or np.nan
    dem = write_tiff(tmp_path / "dem.tif", heights[None], nodata=nodata)
    found = georeference(dem, pair[1], "nearest-learned", max_keypoints=1024)
    with rasterio.open(found.save_raster(tmp_path / "aligned.tif")) as file:
        heights, covered = file.read(1), file.read_masks(1) > 0
    np.testing.assert_equal(file.nodata, nodata)
    np.testing.assert_array_equal(heights[~covered], np.float32(nodata or 0))
    assert heights[covered].min() >= 49.9 and covered.mean() > 0.5


def test_a_picture_tells_others_of_its_transparency(tmp_path):
    ground = scene().astype(np.uint16) * 257
    with rasterio.open(matcher.align(ground[:, :300], ground, "nearest").save(tmp_path / "w.tif")) as file:
        assert file.colorinterp[3].name == "alpha" and file.dtypes[3] == "uint16"


def test_a_large_raster_of_16_bit_keeps_its_bands(tmp_path):
    """More than 4,096 pixels a side are matched as a smaller picture, and warped by tiles."""
    ground = cv2.resize(scene(), (4200, 1400), interpolation=cv2.INTER_CUBIC).astype(np.uint16) * 100
    reference = write_tiff(tmp_path / "a.tif", ground[None])
    moved = np.roll(ground, (40, 90), (0, 1))
    other = write_tiff(tmp_path / "b.tif", np.stack([moved, moved // 2]), crs=None)
    found = georeference(other, reference, "nearest-learned", model="similarity", max_keypoints=1024)
    np.testing.assert_allclose(found.matrix[:2, 2], [-90, -40], atol=3)
    points = np.loadtxt(found.save_points(tmp_path / "c.points"), delimiter=",", skiprows=2)
    x, y, *own = points[:, :4].T  # in coordinates of its own
    np.testing.assert_allclose(np.median(own, axis=1) - np.median([x, y], axis=1), [45, -20], atol=2)
    with rasterio.open(found.save_raster(tmp_path / "c.tif")) as file:
        assert (file.count, file.dtypes[0], file.shape) == (2, "uint16", (1400, 4200))
        tile = file.read(1, window=((900, 1200), (2000, 2300))).astype(float)
    assert np.median(np.abs(tile - ground[900:1200, 2000:2300])) < 600


def old_plan(photo: np.ndarray, noise: np.random.Generator) -> np.ndarray:
    """Outlines in ink on stained paper."""
    ink = cv2.GaussianBlur(cv2.Canny(cv2.bilateralFilter(photo, 9, 60, 9), 40, 110) / 255, (0, 0), 0.8)
    stains = cv2.resize(noise.standard_normal((12, 20)), ink.shape[::-1], interpolation=cv2.INTER_CUBIC)
    paper = 0.85 + 0.08 * stains + 0.03 * noise.standard_normal(ink.shape)
    return (paper * (1 - 0.8 * ink)).clip(0, 1)[..., None] * (150, 200, 225)


@pytest.mark.parametrize(
    ("drawn", "degrees", "scale", "tilt", "metres", "grey"),
    [(old_plan, 6, 0.9, 0, 1.2, 16), (None, 40, 0.7, 0.3, 0.1, 1)],
)
def test_what_an_orthophoto_is_matched_with(
    drawn: Callable, degrees: float, scale: float, tilt: float, metres: float, grey: float, tmp_path: Path
):
    """Half of the control points lie within `metres` of the truth, .9 within four times; pixels have .5 m.

    The picture on the map differs by less than `grey` values from the one put there by the truth.
    """
    photo = Path(os.environ.get("MATCHER_DATA", "absent")) / "photos/val/brighton_beach/DJI_0026_10dc80.jpg"
    if not photo.is_file():
        pytest.skip("needs MATCHER_DATA with photos/")
    ground = cv2.imread(str(photo))  # a drone's, straight down
    reference = write_tiff(tmp_path / "ortho.tif", np.moveaxis(ground, 2, 0)[::-1])
    height, width = ground.shape[:2]
    middle = np.array([[1, 0, -width / 2], [0, 1, -height / 2], [0, 0, 1]])
    turn = np.vstack([cv2.getRotationMatrix2D((0, 0), degrees, scale), [0, 0, 1]])
    view = np.array([[1, 0, 0], [0, 1, 0], [tilt / width, tilt / height / 2, 1]]) @ turn
    seen = np.linalg.inv(middle) @ view @ middle  # from pixels of the map's picture
    drawing = (ground if drawn is None else drawn(ground, np.random.default_rng(0))).astype(np.uint8)
    made = cv2.warpPerspective(drawing, seen, (width, height), borderValue=(128, 160, 180))
    cv2.imwrite(str(tmp_path / "made.png"), made)
    points, aligned, quick = tmp_path / "p.csv", tmp_path / "a.tif", ("--no-further-passes", *QUICK)
    assert run("align", tmp_path / "made.png", reference, "--gcp", points, "--output", aligned, *quick) == 0
    pixel, east_north, _ = np.split(np.loadtxt(points, delimiter=",", skiprows=1), [2, 4], axis=1)
    off = np.linalg.norm(truth(pixel, np.linalg.inv(seen)) - east_north, axis=1)
    assert len(off) >= 20
    assert np.quantile(off, 0.5) < metres and np.quantile(off, 0.9) < 4 * metres
    with rasterio.open(aligned) as file:
        assert (file.shape, file.crs) == ((height, width), "EPSG:32633")
        placed, covered = np.moveaxis(file.read()[::-1], 0, 2).astype(float), file.read_masks(1) > 0
    right = cv2.warpPerspective(made, np.linalg.inv(seen), (width, height))
    assert covered.mean() > 0.8
    assert np.abs(placed - right)[covered].mean() < grey


def test_what_cannot_be_done_is_said(pair, tmp_path, capfd):
    (tmp_path / "text.tif").write_text("no raster")
    with pytest.raises(ImageError, match=r"text\.tif"):
        open_raster(tmp_path / "text.tif")
    plain = write_tiff(tmp_path / "plain.tif", scene()[None], crs=None)
    found = georeference(pair[0], plain, "nearest-learned", max_keypoints=1024)
    assert "units of the map" in found.summary()
    with pytest.raises(UsageError, match=r"plain\.tif"):
        found.save_points(tmp_path / "gcp.txt")
    gcp, out = ("--gcp", tmp_path / "a.csv"), ("--output", tmp_path / "b.tif")
    assert run("align", *pair, *gcp, "--blend", tmp_path / "b.png") == 2
    assert run("align", pair[1], pair[0], *gcp, *out) == 2
    assert run("match", *pair) == 3 and "--gcp" in capfd.readouterr().err  # five bands
    assert run("align", pair[0], plain, *out, *QUICK) == 0 and "--gcp" in capfd.readouterr().out
    write_tiff(plain, scene()[None], crs=None, transform=None)
    assert run("align", pair[0], plain, *gcp, *out, *QUICK) == 0
    assert "equal to" not in capfd.readouterr().err
