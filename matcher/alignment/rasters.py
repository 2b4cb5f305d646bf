"""Rasters with map coordinates: control points for QGIS, GDAL and OpenDroneMap, and aligned GeoTIFFs.

A GeoTIFF of any number of bands and bits is matched as a smaller picture of itself, and warped by tiles. GDAL
counts pixels from the corner of the first one, (0, 0); its centre is (0.5, 0.5).
"""

from __future__ import annotations

import math
import warnings
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import cv2
import numpy as np
from PIL.TiffImagePlugin import TiffImageFile

from matcher.alignment.align import Alignment, align
from matcher.config import PlanarModel
from matcher.errors import ImageError, UsageError, optional
from matcher.files import add_mark, check_output, whole_file, write_output
from matcher.geometry import FROM_CORNER, inside, warp_points
from matcher.images import read_image
from matcher.presets import DEFAULT_PRESET, LoadOptions
from matcher.viz.overlays import resizing

if TYPE_CHECKING:
    from rasterio.io import DatasetReader, DatasetWriter
    from rasterio.windows import Window

POINT_FORMATS = (".csv", ".points", ".txt")
RASTER_FORMATS = (".tif", ".tiff")
PREVIEW = 4096  # pixels; longer side of what is matched
STRETCH = (1, 99)  # percentiles of a band that become black and white
TILE = 1024  # pixels; side of what is warped at a time
CELLS = 8  # a side of the grid over image 0 in whose cells the best points are control points


@dataclass(frozen=True, eq=False)
class Raster:
    """A picture that is matched, and how its pixels lie on the map."""

    path: Path
    size: tuple[int, int]  # of the file
    preview: np.ndarray | Path  # (H, W) or (H, W, 3) uint8, or the file itself
    mask: np.ndarray | None  # (H, W) bool of the preview: where there are data
    crs: str | None  # as "EPSG:32633" or WKT
    map_from_pixel: np.ndarray | None  # (3, 3), of pixels whose first one has its centre at (0, 0)

    @property
    def file_from_preview(self) -> np.ndarray:
        """(3, 3) from pixels of what is matched to those of the file."""
        if isinstance(self.preview, Path):
            return np.eye(3)
        return resizing(tuple(np.divide(self.size, self.preview.shape[1::-1])))


def open_raster(path: str | Path) -> Raster:
    """A GeoTIFF by rasterio, any other picture as `read_image` reads it, or `ImageError`."""
    path = Path(path)
    if path.suffix.lower() not in RASTER_FORMATS:
        return Raster(path, read_image(path).size, path, None, None, None)
    with _dataset(path) as data:
        share = min(1.0, PREVIEW / max(data.width, data.height))
        shape = tuple(max(1, round(side * share)) for side in (data.height, data.width))
        pixels = _read(data, [1, 2, 3] if data.count >= 3 else [1], out_shape=shape)
        mask = (data.dataset_mask(out_shape=shape) > 0) & np.isfinite(pixels).any(axis=0)
        preview = np.dstack([_stretched(band, mask) for band in pixels]).squeeze()
        placed = None if data.transform.is_identity else np.array(data.transform).reshape(3, 3) @ FROM_CORNER
        crs = None if placed is None else data.crs
        crs = crs and (crs.to_string() if crs.to_epsg() else crs.to_wkt())
        return Raster(path, (data.width, data.height), preview, mask, crs or None, placed)


def is_placed(path: Path) -> bool:
    """Whether a picture is a TIFF with map coordinates; without rasterio."""
    with suppress(OSError, SyntaxError), TiffImageFile(path) as image:
        return not {33922, 34264}.isdisjoint(image.tag_v2)  # GeoTIFF's tie points, transformation
    return False


def _dataset(path: Path) -> DatasetReader:
    """A TIFF open to be read; no other driver of GDAL is tried, so that a file cannot name other files."""
    with optional():
        import rasterio
    try:
        return rasterio.open(path, driver="GTiff")
    except rasterio.errors.RasterioIOError as error:
        raise ImageError(f"{path}: not a TIFF that GDAL can read ({error})") from error


def _palette(data: DatasetReader) -> np.ndarray | None:
    """(N, 3) uint8 colours of a raster whose values are numbers of these."""
    if data.colorinterp[0].name != "palette":
        return None
    return np.array([colour[:3] for _, colour in sorted(data.colormap(1).items())], np.uint8)


def _read(data: DatasetReader, bands: list[int], out_shape: tuple[int, int], **part: Window) -> np.ndarray:
    """(bands, h, w) of this size; colours of a palette as three bands."""
    from rasterio.enums import Resampling

    how = Resampling.average if (palette := _palette(data)) is None else Resampling.nearest
    pixels = data.read(bands, out_shape=(len(bands), *out_shape), resampling=how, **part)
    return pixels if palette is None else np.moveaxis(palette[pixels[0]], -1, 0)


def _stretched(band: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """A band of any type as uint8."""
    if band.dtype == np.uint8:
        return band
    valid = band[mask & np.isfinite(band)]
    low, high = np.percentile(valid, STRETCH) if valid.size else (0, 1)
    scaled = (np.nan_to_num(band.astype(np.float64)) - low) / max(float(high - low), 1e-12)
    return (scaled.clip(0, 1) * 255).round().astype(np.uint8)


def georeference(
    image0: str | Path,
    image1: str | Path,
    preset: str = DEFAULT_PRESET,
    *,
    model: PlanarModel = "homography",
    **options: Unpack[LoadOptions],
) -> Georeferenced:
    """Match a picture, or a TIFF whose coordinates are not trusted, with a GeoTIFF, and say where its points
    lie on the map of that, or among its pixels where it has no coordinates.

    Options and errors are those of `matcher.align`, and a `UsageError` where rasterio is missing.
    """
    raster0, raster1 = open_raster(image0), open_raster(image1)
    masks = {"mask0": raster0.mask, "mask1": raster1.mask}
    found = align(raster0.preview, raster1.preview, preset, model=model, **masks, **options)
    kept = found.inliers
    sides = ((found.result.points0, raster0), (found.result.points1, raster1))
    points = [warp_points(side[kept].astype(np.float64), raster.file_from_preview) for side, raster in sides]
    matrix = found.matrix
    if matrix is not None:
        matrix = raster1.file_from_preview @ matrix @ np.linalg.inv(raster0.file_from_preview)
        matrix = matrix / matrix[2, 2]
    return Georeferenced(found, (raster0, raster1), matrix, *points, found.result.scores[kept])


@dataclass(frozen=True, eq=False)
class Georeferenced:
    """What `georeference` found: points of both files, and the map from one to the other."""

    alignment: Alignment  # in pixels of what was matched
    rasters: tuple[Raster, Raster]
    matrix: np.ndarray | None  # (3, 3) from pixels of image 0 to those of image 1, both of the files
    points0: np.ndarray  # (K, 2) float64 inliers, pixels of the files
    points1: np.ndarray
    scores: np.ndarray  # (K,)

    @property
    def on_map(self) -> np.ndarray:
        """(K, 2) where the points lie: map coordinates, or pixels of image 1 from its corner, y upwards."""
        placed = self.rasters[1].map_from_pixel
        return (self.points1 + 0.5) * (1, -1) if placed is None else warp_points(self.points1, placed)

    @property
    def residuals(self) -> np.ndarray:
        """(K, 2) where the transformation puts the points, less where they lie, in units of `on_map`."""
        placed = self.rasters[1].map_from_pixel
        off = warp_points(self.points0, self.matrix) - self.points1
        return off * (1, -1) if placed is None else off @ placed[:2, :2].T

    def summary(self) -> str:
        """How many points agree, and how well, in the units of the map."""
        found = self.alignment
        if not found.found:
            return found.summary()
        length = np.linalg.norm(self.residuals, axis=1)
        crs, placed = self.rasters[1].crs, self.rasters[1].map_from_pixel
        name = "the map" if crs is None or "[" in crs else crs  # WKT would be half a page
        unit = "pixels" if placed is None else f"units of {name}"
        median, rms = np.median(length), math.sqrt((length**2).mean())
        fit = (
            f"{len(length)} of {len(found.inliers)} points agree on one {found.model}; "
            f"residuals: median {median:.3g}, root mean square {rms:.3g} {unit}"
        )
        return "\n".join([str(found.result.verdict), fit, *found.cautions])

    def save_points(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write control points: .points of QGIS's georeferencer, OpenDroneMap's .txt, or .csv; `UsageError`:
        nothing was found, another suffix, a foreign file, or .txt without coordinates."""
        path = check_output(path, POINT_FORMATS, overwrite=overwrite)
        if not self.alignment.found:
            raise UsageError("the images are not aligned, so there are no control points")
        raster0, raster1 = self.rasters
        # Of each cell of a grid over image 0, the most probable point.
        cell = (self.points0 / raster0.size * CELLS).astype(int).clip(0, CELLS - 1) @ (1, CELLS)
        best = np.argsort(-self.scores, kind="stable")
        kept = np.sort(best[np.unique(cell[best], return_index=True)[1]])
        places, corners, off = self.on_map[kept], (self.points0 + 0.5)[kept], self.residuals[kept]
        lengths, crs = np.linalg.norm(off, axis=1), raster1.crs
        if path.suffix.lower() == ".txt":
            if crs is not None and "[" in crs:  # it reads no WKT
                from rasterio.crs import CRS

                crs = CRS.from_wkt(crs).to_proj4().replace("=True", "")
            if not crs:
                none = "none" if raster1.crs is None else "none that it reads"
                raise UsageError(f"{path}: OpenDroneMap needs coordinates, and {raster1.path} has {none}")
            how = f"%.12g %.12g NaN %.3f %.3f {raster0.path.name.replace('%', '%%')}"
            head, table = [crs], [places, corners]
        elif path.suffix.lower() == ".points":
            head = [] if crs is None else [f"#CRS: {crs}"]
            head.append("mapX,mapY,sourceX,sourceY,enable,dX,dY,residual")
            sources = corners * (1, -1)
            if raster0.map_from_pixel is not None:  # then QGIS counts in the layer's coordinates
                sources = warp_points(self.points0[kept], raster0.map_from_pixel)
            how, table = "%.10f,%.10f,%.10f,%.10f,1,%.10f,%.10f,%.10f", [places, sources, off, lengths]
        else:
            head = ["pixel,line,map_x,map_y,residual,score"]
            how, table = "%.6f,%.6f,%.12g,%.12g,%.6g,%.4f", [corners, places, lengths, self.scores[kept]]
        lines = [*head, *(how % tuple(row) for row in np.column_stack(table).tolist())]
        write_output(path, "".join(f"{line}\n" for line in lines).encode("utf-8"))
        return path

    def save_raster(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write image 0 on the grid of image 1 as GeoTIFF: its own bands and type, image 1's coordinates;
        `UsageError`: nothing was found, another suffix, or a foreign file."""
        path = check_output(path, RASTER_FORMATS, overwrite=overwrite)
        if not self.alignment.found:
            raise UsageError("the images are not aligned, so there is nothing to write")
        backward = np.linalg.inv(self.matrix)
        backward /= backward[2, 2]
        with whole_file(path) as part, ExitStack() as stack:
            grid = stack.enter_context(_dataset(self.rasters[1].path))
            import rasterio
            from rasterio.windows import Window

            unplaced = rasterio.errors.NotGeoreferencedWarning  # as the map may be
            stack.enter_context(warnings.catch_warnings(action="ignore", category=unplaced))
            source = _bands(self.rasters[0].path, stack)
            profile = {
                "driver": "GTiff", "width": grid.width, "height": grid.height, "count": source.count,
                "dtype": source.dtypes[0], "crs": grid.crs, "transform": grid.transform, "tiled": True,
                "nodata": source.nodata, "compress": "deflate", "BIGTIFF": "IF_SAFER",
            }  # fmt: skip
            if _palette(source) is not None:
                profile |= {"count": 3, "dtype": "uint8", "nodata": None}
            stack.enter_context(rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True))
            stack.callback(add_mark, part)  # once the raster is closed
            out = stack.enter_context(rasterio.open(part, "w", **profile))
            for top, left in product(range(0, grid.height, TILE), range(0, grid.width, TILE)):
                window = Window(left, top, min(TILE, grid.width - left), min(TILE, grid.height - top))
                tile, covered = _tile(source, backward, window, out)
                out.write(tile, window=window)
                out.write_mask(covered, window=window)
        return path


def _bands(path: Path, stack: ExitStack) -> DatasetReader:
    """A TIFF, whose bands are read in parts, or an ordinary picture as stored, held in memory as one."""
    if path.suffix.lower() in RASTER_FORMATS:
        return stack.enter_context(_dataset(path))
    import rasterio

    pixels = read_image(path, resize=None, upright=False, deep=True).pixels
    bands = pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)
    count, height, width = bands.shape
    profile = {"driver": "GTiff", "count": count, "height": height, "width": width, "dtype": bands.dtype}
    memory = stack.enter_context(rasterio.MemoryFile())
    with memory.open(**profile) as file:
        file.write(bands)
    return stack.enter_context(memory.open())


def _tile(
    source: DatasetReader, backward: np.ndarray, window: Window, result: DatasetWriter
) -> tuple[np.ndarray, np.ndarray]:
    """(bands, h, w) of a window of the result, and (h, w) bool where there are data."""
    from rasterio.windows import Window

    height, width, size = int(window.height), int(window.width), (source.width, source.height)
    dtype, nodata = np.dtype(result.dtypes[0]), result.nodata or 0
    x, y = np.meshgrid(np.arange(width) + window.col_off, np.arange(height) + window.row_off)
    at = warp_points(np.stack([x, y], axis=-1).reshape(-1, 2).astype(np.float64), backward)
    within, found = inside(at, size), np.zeros((result.count, height, width), dtype)
    within = within.reshape(height, width)
    if not within.any():  # all beyond the edge, or the horizon
        return np.full_like(found, nodata), within
    known = at[within.ravel()]
    low = np.maximum(np.floor(known.min(0)).astype(int) - 2, 0)
    high = np.minimum(np.ceil(known.max(0)).astype(int) + 3, size)
    step = max(1, math.ceil((high - low).max() / (2 * TILE)))  # large parts are read smaller
    part, shape = Window(*low, *(high - low)), tuple(-(-side // step) for side in (high - low)[::-1].tolist())
    piece = _read(source, list(source.indexes), shape, window=part)
    valid = (source.dataset_mask(window=part, out_shape=shape) > 0) & np.isfinite(piece).any(axis=0)
    piece[:, ~valid] = 0
    local = np.nan_to_num((at - low + 0.5) * (np.array(shape[::-1]) / (high - low)) - 0.5, nan=-1)
    local = local.astype(np.float32).reshape(height, width, 2)
    native = dtype in (np.uint8, np.uint16, np.int16, np.float32)  # which OpenCV resamples
    for band, pixels in enumerate(piece if native else piece.astype(np.float64)):
        warped = cv2.remap(pixels, local, None, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
        found[band] = np.rint(warped) if dtype.kind in "iu" else warped
    # Where nothing of what is no data has come in
    seen = cv2.remap(valid.astype(np.float32), local, None, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    covered = within & (seen > 1 - 1e-6)
    found[:, ~covered] = nodata
    return found, covered
