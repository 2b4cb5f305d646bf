"""Commands for a few images: `match`, `explain`, `align`, `find` and `stitch`."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import typer

import matcher
from matcher.cli.options import Count, Share, check_outputs, expand_images, loading, parse_camera
from matcher.cli.output import PARTIAL, ProgressLines, complain, detail, say, show
from matcher.errors import ImageError, UsageError, counted
from matcher.files import check_folder, write_output
from matcher.viz import PLOT_SUFFIXES


def match(
    image0: Path,
    image1: Path,
    /,
    given: loading(),
    camera0: str | None = None,
    camera1: str | None = None,
    mask0: Path | None = None,
    mask1: Path | None = None,
    budget_ms: float | None = None,
    tiles: bool = False,
    output: Path | None = None,
    plot: Path | None = None,
    ellipses: bool = False,
    overwrite: bool = False,
    json_: bool = False,
    fail_if_unmatched: bool = False,
    fail_below: Share | None = None,
) -> int:
    """Match two images and verify the matches.

    Points are (x, y) in pixels of the stored image, without its EXIF orientation; the centre of the first
    pixel is (0, 0). With --geometry, the estimated matrix is printed too.

    Args:
        camera0, camera1 (fx,fy,cx,cy|MODEL,w,h,…|FILE): Intrinsics in stored pixels; --camera0 is of both
            images of one size. Without them, --geometry essential takes focal lengths from EXIF headers.
            {CAMERAS}
        budget_ms (MS): Choose keypoints, layers and passes to fit this time, once measured.
        tiles: For large images: find keypoints by tiles at full resolution, by default 20000 per image.
        output (FILE.npz|.json|.csv): Save keypoints, matches and geometry; as .csv the matches alone.
        plot (FILE.png|.svg|…): Save a plot of the matches.
        ellipses: Draw the uncertainty of points in the plot, enlarged.
        fail_if_unmatched: Exit with code 4 if no matches are found, their geometry cannot be verified, or it
            is not even likely that the images show the same.
        fail_below (PROBABILITY): Exit with code 4 if the images show the same place with less than this
            probability.
    """
    from matcher.result import DATA_SUFFIXES
    from matcher.verify.verdict import SAME

    outputs = [(output, DATA_SUFFIXES), (plot, PLOT_SUFFIXES)]
    check_outputs(outputs, (image0, image1, mask0, mask1), overwrite=overwrite)
    if ellipses and plot is None:
        raise typer.BadParameter("--ellipses draws into a plot: add --plot FILE")
    if fail_below is not None and given.get("geometry") == "none":
        raise typer.BadParameter("without a geometry there is no probability to --fail-below; leave one out")
    cameras, has_stated = _cameras(image0, image1, camera0, camera1, given)
    # With tiles, keypoints are those of the whole image; the first pass has the preset's.
    sizes = {"max_keypoints": given.pop("max_keypoints")} if tiles and "max_keypoints" in given else {}
    pipeline = matcher.load(**given)
    pipeline = matcher.tiled(pipeline, **sizes) if tiles else pipeline
    how = dict(mask0=mask0, mask1=mask1, budget_ms=budget_ms, **cameras)
    result = pipeline.match(image0, image1, **how)
    if output is not None:
        result.save(output, overwrite=True)  # check_outputs has refused files of others
    if plot is not None:
        images = pipeline.read(result.path0), pipeline.read(result.path1)
        result.plot(plot, *images, ellipses=ellipses, overwrite=True)
    source = result.weights
    detail(f"weights: {'none' if source is None else f'{source.name}, sha256 {source.sha256}'}")
    if json_:
        show(json.dumps(result.to_dict(), allow_nan=False), always=True)
    else:
        show(result.summary())
        if has_stated and pipeline.config.estimation.kind == "fundamental":
            show("both files state their focal lengths: --geometry essential gives a pose and is misled less")
        with suppress(OSError, ValueError, IndexError):  # where the system does not say when we began
            ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
            running = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
            show(f"{running:.2f} s in all, with starting and loading")
        if "geometry" in given and result.geometry.verified:
            show(matrix_text(result.geometry), always=True)
        for path in filter(None, (output, plot)):
            show(f"wrote {path}")
    probability = 0.0 if result.verdict is None else result.verdict.probability
    unlikely = probability < (SAME if fail_below is None else fail_below)
    denied = result.geometry.status != "not_estimated" and (unlikely or not result.geometry.verified)
    failed = fail_if_unmatched and (denied or not len(result.matches))
    return PARTIAL if failed or (unlikely and fail_below is not None) else 0


def _cameras(
    image0: Path, image1: Path, camera0: str | None, camera1: str | None, given: dict[str, Any]
) -> tuple[dict[str, Any], bool]:
    """Both cameras as told or, for essential geometry, as the headers of both files state them; and whether
    these do and none was told."""
    from matcher.image_files import read_camera

    found = {"camera0": parse_camera(camera0, "--camera0"), "camera1": parse_camera(camera1, "--camera1")}
    if any(found.values()) or None in (stated := [read_camera(image0), read_camera(image1)]):
        return found, False
    if given.get("geometry") == "essential":
        found = dict(zip(found, stated, strict=True))
        focals = " and ".join(f"{camera.fx:.0f}" for camera in stated)
        say(f"cameras from the files' EXIF headers: focal lengths of {focals} pixels")
    return found, True


def matrix_text(geometry: matcher.TwoViewGeometry) -> str:
    """The estimated matrices and poses, with numbers that `numpy.loadtxt` reads."""
    if geometry.kind == "homographies":
        counts = [int((geometry.planes == plane).sum()) for plane in range(len(geometry.matrices))]
        headings = [f"homography of {count} inliers, x1 ~ H x0:" for count in counts]
        parts = list(zip(headings, geometry.matrices, strict=True))
    elif geometry.kind == "homography":
        parts = [("homography, x1 ~ H x0:", geometry.matrix)]
    elif geometry.matrix is None:
        parts = [("homography of the plane, x1 ~ H x0:", geometry.homography)]
        heading = "cam1_from_cam0 that the plane allows, translation of length 1:"
        parts += [(heading, pose) for pose in geometry.alternatives]
    else:
        parts = [(f"{geometry.kind} matrix, x1ᵀ M x0 = 0:", geometry.matrix)]
        if geometry.cam1_from_cam0 is not None:
            parts.append(("cam1_from_cam0, translation of length 1:", geometry.cam1_from_cam0))
    return "\n".join(_matrix(heading, matrix) for heading, matrix in parts)


def _matrix(heading: str, rows: Any) -> str:
    return "\n".join([f"# {heading}", *(" ".join(f"{value: .10g}" for value in row) for row in rows)])


def explain(
    image0: Path,
    image1: Path,
    /,
    output: Path,
    given: loading("engine", further_passes="no-further-passes"),
    point: str | None = None,
    camera0: str | None = None,
    camera1: str | None = None,
    mask0: Path | None = None,
    mask1: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Match two images in one pass and write a report that explains each match: attention, exit, pruning.

    The report is a single HTML file that works offline. With --further-passes it also says what came of all
    passes.

    Args:
        output (FILE.html): Report to create.
        point (x,y): Show the keypoint nearest to this pixel of IMAGE0 first.
        camera0, camera1 (fx,fy,cx,cy|MODEL,w,h,…|FILE): Intrinsics for --geometry essential, as of `match`.
    """
    from matcher.explain.report import write_report

    try:
        x, y = (None, None) if point is None else map(float, point.split(","))
    except ValueError:
        raise UsageError(f"--point must be two numbers with a comma between, not {point!r}") from None
    check_outputs([(output, (".html",))], (image0, image1, mask0, mask1), overwrite=overwrite)
    cameras, _ = _cameras(image0, image1, camera0, camera1, given)
    pipeline = matcher.load(**{"further_passes": False, **given})
    how = dict(mask0=mask0, mask1=mask1, overwrite=overwrite, **cameras)
    result = write_report(pipeline, image0, image1, output, None if x is None else (x, y), **how)
    show(f"{result.heading()}; wrote {output}")


def align(
    image0: Path,
    image1: Path,
    /,
    given: loading("geometry"),
    model: Literal["homography", "affine", "similarity"] = "homography",
    mask0: Path | None = None,
    mask1: Path | None = None,
    output: Path | None = None,
    blend: Path | None = None,
    checkerboard: Path | None = None,
    difference: Path | None = None,
    gcp: Path | None = None,
    overwrite: bool = False,
    json_: bool = False,
    fail_below: Share | None = None,
) -> int:
    """Bring IMAGE0 onto IMAGE1 and save it as IMAGE1 shows it.

    Right where the scene is flat or far away, or where the camera only turned. Images are those after EXIF
    orientation, at the full size of IMAGE1. If the two cannot be aligned, nothing is written and the exit
    code is 4.

    Args:
        model: How IMAGE0 may be moved; similarity: turn, one scale and shift.
        output (FILE.png|.jpg|.tif): Save IMAGE0 as IMAGE1 shows it.
        blend (FILE.png|.jpg|.tif): Save both as one: IMAGE0 red, IMAGE1 blue, grey if they agree.
        checkerboard (FILE.png|.jpg|.tif): Save a checkerboard of IMAGE0 and IMAGE1.
        difference (FILE.png|.jpg|.tif): Save the absolute difference of the two.
        gcp (FILE.points|.txt|.csv): Save control points of IMAGE0 on the map of IMAGE1, a GeoTIFF, for QGIS,
            OpenDroneMap or GDAL; --output FILE.tif is then a GeoTIFF. Needs rasterio for TIFFs.
    """
    from matcher.alignment import rasters
    from matcher.alignment.align import PICTURE_FORMATS

    wanted = {"warped": output, "blend": blend, "checkerboard": checkerboard, "difference": difference}
    outputs = [(path, PICTURE_FORMATS) for path in wanted.values()]
    if gcp is not None:
        if any((blend, checkerboard, difference, mask0, mask1, json_)):
            raise UsageError("--gcp goes with --output FILE.tif, not with other pictures, masks or --json")
        outputs = [(gcp, rasters.POINT_FORMATS), (output, rasters.RASTER_FORMATS)]
        if output is not None and image1.suffix.lower() not in rasters.RASTER_FORMATS:
            raise UsageError(f"{image1} is no GeoTIFF, on whose grid --output could lie: leave --output out")
    check_outputs(outputs, (image0, image1, mask0, mask1), overwrite=overwrite)  # so these may be replaced
    if gcp is not None:
        laid = rasters.georeference(image0, image1, model=model, **given)
        found, said = laid.alignment, laid.summary()
        savers = [(gcp, laid.save_points), (output, laid.save_raster)]
        if found.found and laid.rasters[1].map_from_pixel is None:
            complain(
                f"warning: {image1} has no coordinates, so that the points are among its pixels; for those "
                "of a map, make it a GeoTIFF (a world file counts only beside a TIFF)"
            )
    else:
        found = matcher.align(image0, image1, model=model, mask0=mask0, mask1=mask1, **given)
        said = found.summary()
        savers = [(path, partial(found.save, view=view)) for view, path in wanted.items()]
    written = [save(path, overwrite=True) for path, save in savers if found.found and path is not None]
    if json_:
        show(json.dumps(found.to_dict(), allow_nan=False), always=True)
    elif not found.found:
        *lines, last = said.splitlines()
        show("\n".join(lines))
        complain(last + ("; nothing was written" if any(path for path, _ in outputs) else ""))
    else:
        show(said)
        if gcp is None:
            show(_matrix(f"{found.model}, x1 ~ H x0, stored pixels:", found.matrix), always=True)
        for path in written:
            show(f"wrote {path}")
        if gcp is None and output in written and rasters.is_placed(image1):
            show(f"{image1} has map coordinates: --gcp FILE.csv --output FILE.tif would keep them")
    unlike = fail_below is not None and found.agreeing < fail_below
    return PARTIAL if unlike or not found.found else 0


def find(
    template: Path,
    images: list[Path],
    /,
    given: loading("geometry", "further_passes", resize=4096),
    template_mask: Path | None = None,
    masks: Path | None = None,
    max_instances: Count = 20,
    output: Path | None = None,
    plot: Path | None = None,
    overwrite: bool = False,
    json_: bool = False,
    fail_if_unmatched: bool = False,
) -> int:
    """Find a flat TEMPLATE in images: several instances, at any scale and turn; if there is none, a negative
    of it, such as a dark theme's.

    Corners are (x, y) in pixels of the stored image, clockwise from the template's first pixel; the angle is
    in degrees, clockwise. --max-keypoints is of the template and of each window of 1024 pixels.

    Args:
        template (TEMPLATE): Image of what to look for.
        template_mask (FILE): Mask image; black pixels yield no keypoints.
        max_instances (N): Find at most N instances per image.
        output (FILE.json): Save the instances of all images.
        plot (FILE.png|.svg|…|DIR): Save a drawing; of several images, to a folder.
        fail_if_unmatched: Exit with code 4 if no image shows the template.
    """
    from matcher.images import find_masks

    paths = list(expand_images(images).values())
    names = [path.name for path in paths]
    masked = {} if masks is None else find_masks(masks, names, str(paths[0].parent))
    if plot is None or plot.suffix.lower() in PLOT_SUFFIXES:
        plots = {} if plot is None else {paths[0]: plot}
        if plots and len(paths) > 1:
            raise UsageError(f"--plot {plot} is one file, but there are {len(paths)} images; name a folder")
    else:
        plots = {path: plot / f"{path.stem}.png" for path in paths}
        if len(set(plots.values())) < len(plots):
            raise UsageError("images of one name in several folders: draw them one folder at a time")
        if plot.suffix and not plot.is_dir():
            kinds = ", ".join(PLOT_SUFFIXES)
            raise UsageError(f"--plot {plot}: name a file ({kinds}), or a folder, made first if it has a dot")
        check_folder(plot, overwrite=True)
        plot.mkdir(exist_ok=True)
    outputs = [(output, (".json",)), *((path, PLOT_SUFFIXES) for path in plots.values())]
    check_outputs(outputs, [template, *paths, template_mask, *masked.values()], overwrite=overwrite)
    how = dict(template_mask=template_mask, max_instances=max_instances)
    finder, found = matcher.TemplateFinder(template, **how, **given), []
    for path in paths:
        try:
            update = partial(ProgressLines(announced=False), f"windows of {path.name}")
            found.append(detections := finder.find(path, masked.get(path.name), on_progress=update))
        except ImageError as error:
            complain(str(error))
            continue
        if path in plots:
            detections.plot(plots[path], overwrite=True)  # check_outputs has refused files of others
        if json_:
            continue
        count = counted(len(detections), "instance") if detections else "no match: the template was not found"
        count += " of its negative (inverted tones)" * detections.inverted
        count += ", but its mirror image; flip it and search again" * detections.mirrored
        show(f"{detections.path}  {count}  {detections.seconds:.2f} s", always=bool(detections))
        for number, instance in enumerate(detections, 1):
            x, y = instance.corners.mean(axis=0)
            place = f"centre {x:.1f}, {y:.1f}, scale {instance.scale:.3f}, angle {instance.angle:.1f}"
            show(f"  {number}: {place}, {instance.evidence}", always=True)
    report = {"template": str(template), "images": [detections.to_dict() for detections in found]}
    text = json.dumps(report, allow_nan=False)
    if output is not None:
        write_output(output, text.encode())
    if json_:
        show(text, always=True)
    for path in () if json_ else filter(None, (output, found and plot)):
        show(f"wrote {path}")
    unmatched = fail_if_unmatched and not any(len(detections) for detections in found)
    return PARTIAL if len(found) < len(paths) or unmatched else 0


def stitch(
    images: list[Path],
    /,
    output: Path,
    given: loading("geometry", "further_passes"),
    projection: Literal["auto", "plane", "cylindrical", "spherical"] = "auto",
    model: Literal["auto", "translation", "similarity", "homography"] = "auto",
    crop: bool = False,
    overwrite: bool = False,
    fail_below: Share | None = None,
) -> int:
    """Join overlapping photos of a flat scene, or of any scene from one viewpoint, to one picture.

    Images that overlap with none of the others are left out; then the exit code is 4.

    Args:
        output (FILE.png|.jpg|.tif): Picture to create.
        projection: Surface of the picture; auto: a plane up to 70 degrees of view, else a sphere.
        model: How images move on a plane; auto: the simplest that explains the matches.
        crop: Cut off what no image covers.
    """
    from matcher.alignment.align import PICTURE_FORMATS, SCENE_WITH_DEPTH

    paths = list(expand_images(images).values())
    check_outputs([(output, PICTURE_FORMATS)], paths, overwrite=overwrite)
    made = matcher.stitch(paths, projection=projection, model=model, crop=crop, **given)
    made.save(output, overwrite=True)  # check_outputs has refused files of others
    lost = [path for number, path in enumerate(paths) if number not in made.used]
    for path in lost:
        complain(f"{path}: overlaps with none of the others and is left out")
    height, width = made.pixels.shape[:2]
    how = f"{made.projection}{f', {made.model}' if made.model else ''}"
    show(f"wrote {output}: {len(made.used)} of {len(paths)} images, {width} x {height} pixels ({how})")
    if made.agreeing < SCENE_WITH_DEPTH:
        why = "the scene has depth and the camera moved, and what lies nearer or farther is doubled or cut"
        if model not in ("auto", "homography"):
            why = f"the images move otherwise than by --model {model} (leave it out), or the scene has depth"
        share = f"only {made.agreeing:.0%} of the matches agree with it"
        complain(f"warning: {share}: {why}, or the images only look alike")
    unlike = fail_below is not None and made.agreeing < fail_below
    return PARTIAL if lost or unlike else 0
