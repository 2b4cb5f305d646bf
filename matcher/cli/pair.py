"""Commands for a few images: `match`, `explain`, `align`, `find` and `stitch`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from matcher.cli.options import (
    CAMERA_FORMS,
    AsJson,
    First,
    Given,
    MaskFile,
    Masks,
    Overwrite,
    Second,
    argument,
    check_outputs,
    expand_images,
    option,
    parse_camera,
)
from matcher.cli.output import PARTIAL, complain, detail, say, seconds_running, show
from matcher.errors import ImageError, UsageError, counted

if TYPE_CHECKING:
    from matcher.alignment.find import Detections
    from matcher.cameras import Camera
    from matcher.result import Result

CameraText = option(
    str | None,
    metavar=CAMERA_FORMS,
    help="Intrinsics in stored pixels; --camera0 is of both images of one size. Without them, --geometry "
    "essential takes focal lengths from EXIF headers.",
)
Picture = "FILE.png|.jpg|.tif"


def match(
    image0: First,
    image1: Second,
    given: Given,
    camera0: CameraText = None,
    camera1: CameraText = None,
    mask0: MaskFile = None,
    mask1: MaskFile = None,
    budget_ms: option(
        float | None,
        metavar="MS",
        help="Choose keypoints, layers and passes to fit this time, once measured.",
    ) = None,
    tiles: option(
        bool,
        "--tiles",
        help="For large images: find keypoints by tiles at full resolution, by default 20000 per image.",
    ) = False,
    output: option(
        Path | None,
        metavar="FILE.npz|.json|.csv",
        help="Save keypoints, matches and geometry; as .csv the matches alone.",
    ) = None,
    plot: option(Path | None, metavar="FILE.png|.svg|…", help="Save a plot of the matches.") = None,
    ellipses: option(
        bool, "--ellipses", help="Draw the uncertainty of points in the plot, enlarged."
    ) = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    fail_if_unmatched: option(
        bool,
        "--fail-if-unmatched",
        help="Exit with code 4 if no matches are found, their geometry cannot be verified, or it is not even "
        "likely that the images show the same.",
    ) = False,
    fail_below: option(
        float | None,
        metavar="PROBABILITY",
        min=0,
        max=1,
        help="Exit with code 4 if the images show the same place with less than this probability.",
    ) = None,
) -> int:
    """Match two images and verify the matches.

    Points are (x, y) in pixels of the stored image, without its EXIF orientation; the centre of the first
    pixel is (0, 0). With --geometry, the estimated matrix is printed too.
    """
    from matcher.loading import load
    from matcher.result import DATA_SUFFIXES

    outputs = [(output, DATA_SUFFIXES), (plot, _plot_suffixes() if plot else ())]
    check_outputs(outputs, (image0, image1, mask0, mask1), overwrite=overwrite)
    if ellipses and plot is None:
        raise typer.BadParameter("--ellipses draws into a plot: add --plot FILE")
    cameras = {"camera0": parse_camera(camera0, "--camera0"), "camera1": parse_camera(camera1, "--camera1")}
    stated = _stated_cameras(image0, image1) if cameras["camera0"] is cameras["camera1"] is None else None
    if given.get("geometry") == "essential" and stated is not None:
        cameras = dict(zip(cameras, stated, strict=True))
        focals = " and ".join(f"{camera.fx:.0f}" for camera in stated)
        say(f"cameras from the files' EXIF headers: focal lengths of {focals} pixels")
    if tiles:
        from matcher.tiling import MAX_KEYPOINTS, tiled

        most = given.pop("max_keypoints", MAX_KEYPOINTS)  # of the image; the first pass has the preset's
        pipeline = tiled(load(**given), most)
    else:
        pipeline = load(**given)
    result = pipeline.match(image0, image1, mask0=mask0, mask1=mask1, budget_ms=budget_ms, **cameras)
    if output is not None:
        result.save(output, overwrite=True)  # check_outputs has refused files of others
    if plot is not None:
        images = pipeline.read(result.path0), pipeline.read(result.path1)
        result.plot(plot, *images, title=result.heading(), ellipses=ellipses, overwrite=True)
    source = result.weights
    detail(f"weights: {'none' if source is None else f'{source.name}, sha256 {source.sha256}'}")
    if as_json:
        show(json.dumps(result.to_dict(), allow_nan=False), always=True)
    else:
        show(result.summary())
        if stated is not None and pipeline.config.estimation.kind == "fundamental":
            show(
                "both files state their focal lengths: --geometry essential takes them as cameras, gives the "
                "relative pose, and is harder to mislead by planes and repeated patterns"
            )
        if (running := seconds_running()) is not None:
            show(f"{running:.2f} s in all, with starting and loading")
        if "geometry" in given and result.geometry.verified:
            show(matrix_text(result), always=True)
        for path in filter(None, (output, plot)):
            show(f"wrote {path}")
    return PARTIAL if _is_failure(result, fail_if_unmatched, fail_below) else 0


def _stated_cameras(image0: Path, image1: Path) -> tuple[Camera, Camera] | None:
    """The cameras of the focal lengths that both files state; None where one of them states none."""
    from matcher.image_files import read_camera

    found = read_camera(image0), read_camera(image1)
    return None if None in found else found


def _is_failure(result: Result, fail_if_unmatched: bool, fail_below: float | None) -> bool:
    """Whether the options make an exit code other than 0 of this result."""
    from matcher.verify.verdict import SAME

    probability = 1.0 if result.verdict is None else result.verdict.probability
    if fail_below is not None and probability < fail_below:
        return True
    geometry = result.geometry
    verified = (geometry.verified or geometry.status == "not_estimated") and len(result.matches) > 0
    return fail_if_unmatched and not (verified and probability >= (SAME if fail_below is None else 0))


def matrix_text(result: Result) -> str:
    """The estimated matrix, and the pose of an essential one, with numbers that `numpy.loadtxt` reads."""
    geometry, rows = result.geometry, []
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
    for heading, matrix in parts:
        rows += [f"# {heading}", *(" ".join(f"{value: .10g}" for value in row) for row in matrix)]
    return "\n".join(rows)


def explain(
    image0: First,
    image1: Second,
    output: Annotated[Path, typer.Option(metavar="FILE.html", help="Report to create.", show_default=False)],
    given: Annotated[dict[str, Any], ("engine",), {"further_passes": "no-further-passes"}],
    point: option(
        str | None, metavar="x,y", help="Show the keypoint nearest to this pixel of IMAGE0 first."
    ) = None,
    mask0: MaskFile = None,
    mask1: MaskFile = None,
    overwrite: Overwrite = False,
) -> None:
    """Match two images in one pass and write a report that explains each match: attention, exit, pruning.

    The report is a single HTML file that works offline. With --further-passes it also says what came of all
    passes.
    """
    from matcher.explain.report import write_report
    from matcher.loading import load

    try:
        position = None if point is None else tuple(float(part) for part in point.split(","))
    except ValueError:
        position = ()
    if position is not None and len(position) != 2:
        raise UsageError(f"--point must be two numbers with a comma between, not {point!r}")
    check_outputs([(output, (".html",))], (image0, image1, mask0, mask1), overwrite=overwrite)
    masks = {"mask0": mask0, "mask1": mask1}
    pipeline = load(**{"further_passes": False, **given})
    result = write_report(pipeline, image0, image1, output, position, **masks, overwrite=overwrite)
    matches, inliers = len(result.matches), int(result.geometry.inliers.sum())
    show(f"{counted(matches, 'match', 'matches')}, {counted(inliers, 'inlier')}; wrote {output}")


def align(
    image0: First,
    image1: Second,
    given: Annotated[dict[str, Any], ("geometry",), {}],
    model: option(
        Literal["homography", "affine", "similarity"],
        help="How IMAGE0 may be moved; similarity: turn, one scale and shift.",
    ) = "homography",
    mask0: MaskFile = None,
    mask1: MaskFile = None,
    output: option(Path | None, metavar=Picture, help="Save IMAGE0 as IMAGE1 shows it.") = None,
    blend: option(
        Path | None,
        metavar=Picture,
        help="Save both as one: IMAGE0 red, IMAGE1 blue, grey if they agree.",
    ) = None,
    checkerboard: option(
        Path | None, metavar=Picture, help="Save a checkerboard of IMAGE0 and IMAGE1."
    ) = None,
    difference: option(Path | None, metavar=Picture, help="Save the absolute difference of the two.") = None,
    gcp: option(
        Path | None,
        metavar="FILE.points|.txt|.csv",
        help="Save control points of IMAGE0 on the map of IMAGE1, a GeoTIFF, for QGIS, OpenDroneMap or GDAL; "
        "--output FILE.tif is then a GeoTIFF. Needs rasterio for TIFFs.",
    ) = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    fail_below: option(
        float | None,
        metavar="SHARE",
        min=0,
        max=1,
        help="Exit with code 4 if a smaller share of the matches agrees, as in scenes with depth.",
    ) = None,
) -> int:
    """Bring IMAGE0 onto IMAGE1 and save it as IMAGE1 shows it.

    Right where the scene is flat or far away, or where the camera only turned. Images are those after EXIF
    orientation, at the full size of IMAGE1. If the two cannot be aligned, nothing is written and the exit
    code is 4.
    """
    from matcher.alignment import align as alignment

    if gcp is not None:
        if any((blend, checkerboard, difference, mask0, mask1, as_json)):
            raise UsageError("--gcp goes with --output FILE.tif, not with other pictures, masks or --json")
        return _georeference(image0, image1, gcp, output, model, given, overwrite=overwrite, least=fail_below)
    wanted = {"warped": output, "blend": blend, "checkerboard": checkerboard, "difference": difference}
    suffixes, inputs = tuple(alignment.PICTURE_FORMATS), (image0, image1, mask0, mask1)
    check_outputs([(path, suffixes) for path in wanted.values()], inputs, overwrite=overwrite)
    found = alignment.align(image0, image1, model=model, mask0=mask0, mask1=mask1, **given)
    outputs = {view: path for view, path in wanted.items() if path is not None}
    for view, path in outputs.items() if found.found else ():
        found.save(path, view, overwrite=True)  # check_outputs has refused files of others
    *lines, last = found.summary().splitlines()
    if as_json:
        show(json.dumps(found.to_dict(), allow_nan=False), always=True)
    elif not found.found:
        show("\n".join(lines))
        complain(last + ("; nothing was written" if outputs else ""))
    else:
        show("\n".join([*lines, last]))
        rows = [" ".join(f"{value: .10g}" for value in row) for row in found.matrix]
        show("\n".join([f"# {found.model}, x1 ~ H x0, stored pixels:", *rows]), always=True)
        for path in outputs.values():
            show(f"wrote {path}")
    unlike = fail_below is not None and found.agreeing < fail_below
    return PARTIAL if unlike or not found.found else 0


def _georeference(
    image0: Path,
    image1: Path,
    gcp: Path,
    output: Path | None,
    model: Literal["homography", "affine", "similarity"],
    given: dict[str, Any],
    *,
    overwrite: bool,
    least: float | None,
) -> int:
    from matcher.alignment import rasters

    outputs = [(gcp, rasters.POINT_FORMATS), (output, rasters.RASTER_FORMATS)]
    check_outputs(outputs, (image0, image1), overwrite=overwrite)
    found = rasters.georeference(image0, image1, model=model, **given)
    if not found.alignment.found:
        complain(found.summary() + "; nothing was written")
        return PARTIAL
    show(found.summary())
    show(f"wrote {found.save_points(gcp, overwrite=True)}")
    if output is not None:
        show(f"wrote {found.save_raster(output, overwrite=True)}")
    return PARTIAL if least is not None and found.alignment.agreeing < least else 0


def find(
    template: argument(Path, "TEMPLATE", "Image of what to look for."),
    images: argument(list[Path], "IMAGES...", "Images, or folders of images."),
    given: Annotated[dict[str, Any], ("geometry", "further_passes"), {"resize": 4096}],
    template_mask: MaskFile = None,
    masks: Masks = None,
    max_instances: option(int, metavar="N", min=1, help="Find at most N instances per image.") = 20,
    output: option(Path | None, metavar="FILE.json", help="Save the instances of all images.") = None,
    plot: option(
        Path | None,
        metavar="FILE.png|.svg|…|DIR",
        help="Save a drawing; of several images, to a folder.",
    ) = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    fail_if_unmatched: option(
        bool, "--fail-if-unmatched", help="Exit with code 4 if no image shows the template."
    ) = False,
) -> int:
    """Find a flat TEMPLATE in images: several instances, at any scale and turn.

    Corners are (x, y) in pixels of the stored image, clockwise from the template's first pixel; the angle is
    in degrees, clockwise. --max-keypoints is of the template and of each window of 1024 pixels.
    """
    from matcher.alignment.find import TemplateFinder
    from matcher.files import write_output
    from matcher.images import find_masks

    paths = list(expand_images(images).values())
    masked: dict[str, Path] = {}
    if masks is not None:
        masked = find_masks(masks, [path.name for path in paths], str(paths[0].parent))
    plots = {} if plot is None else _drawings(paths, plot)
    outputs = [(output, (".json",)), *((path, _plot_suffixes()) for path in plots.values())]
    check_outputs(outputs, [template, *paths, template_mask, *masked.values()], overwrite=overwrite)
    finder = TemplateFinder(template, template_mask=template_mask, max_instances=max_instances, **given)
    found = []
    for path in paths:
        try:
            found.append(detections := finder.find(path, masked.get(path.name)))
        except ImageError as error:
            complain(str(error))
            continue
        if path in plots:
            detections.plot(plots[path], overwrite=True)  # check_outputs has refused files of others
        if not as_json:
            show(_instances(detections))
    report = {"template": str(template), "images": [detections.to_dict() for detections in found]}
    text = json.dumps(report, allow_nan=False)
    if output is not None:
        write_output(output, text.encode())
    if as_json:
        show(text, always=True)
    unmatched = fail_if_unmatched and not any(len(detections) for detections in found)
    return PARTIAL if len(found) < len(paths) or unmatched else 0


def stitch(
    images: argument(list[Path], "IMAGES...", "Images, or folders of images."),
    output: option(Path, metavar=Picture, help="Picture to create."),
    given: Annotated[dict[str, Any], ("geometry",), {}],
    projection: option(
        Literal["auto", "plane", "cylindrical", "spherical"],
        help="Surface of the picture; auto: a plane up to 70 degrees of view, else a sphere.",
    ) = "auto",
    model: option(
        Literal["auto", "translation", "similarity", "homography"],
        help="How images move on a plane; auto: the simplest that explains the matches.",
    ) = "auto",
    crop: option(bool, "--crop", help="Cut off what no image covers.") = False,
    overwrite: Overwrite = False,
) -> int:
    """Join overlapping photos of a flat scene, or of any scene from one viewpoint, to one picture.

    Images that overlap with none of the others are left out; then the exit code is 4.
    """
    from matcher.alignment.align import PICTURE_FORMATS, SCENE_WITH_DEPTH
    from matcher.alignment.stitch import stitch as run

    paths = list(expand_images(images).values())
    check_outputs([(output, tuple(PICTURE_FORMATS))], paths, overwrite=overwrite)
    preset = given.pop("preset")
    made = run(paths, preset, projection=projection, model=model, crop=crop, **given)
    made.save(output, overwrite=True)  # check_outputs has refused files of others
    lost = [path for number, path in enumerate(paths) if number not in made.used]
    for path in lost:
        complain(f"{path}: overlaps with none of the others and is left out")
    height, width = made.pixels.shape[:2]
    how = f"{made.projection}{f', {made.model}' if made.model else ''}"
    show(f"wrote {output}: {len(made.used)} of {len(paths)} images, {width} x {height} pixels ({how})")
    if made.agreeing < SCENE_WITH_DEPTH:
        complain(
            f"warning: only {made.agreeing:.0%} of the matches agree with it: the scene has depth and the "
            "camera moved, and what lies nearer or farther is doubled or cut"
        )
    return PARTIAL if lost else 0


def _plot_suffixes() -> tuple[str, ...]:
    from matcher.viz.drawings import PLOT_SUFFIXES  # which imports matplotlib

    return PLOT_SUFFIXES


def _drawings(images: list[Path], plot: Path) -> dict[Path, Path]:
    """The drawing of each image: one file, or files in a folder."""
    if plot.suffix.lower() in _plot_suffixes():
        if len(images) > 1:
            raise UsageError(f"--plot {plot} is one file, but there are {len(images)} images; name a folder")
        return {images[0]: plot}
    plots = {path: plot / f"{path.stem}.png" for path in images}
    if len(set(plots.values())) < len(plots):
        raise UsageError("images of one name in several folders: draw them one folder at a time")
    plot.mkdir(exist_ok=True)
    return plots


def _instances(found: Detections) -> str:
    """The instances of one image as lines."""
    count = {0: "no match: the template was not found", 1: "1 instance"}
    lines = [f"{found.path}  {count.get(len(found), f'{len(found)} instances')}  {found.seconds:.2f} s"]
    for number, instance in enumerate(found, 1):
        x, y = instance.corners.mean(axis=0)
        lines.append(
            f"  {number}: centre {x:.1f}, {y:.1f}, scale {instance.scale:.3f}, angle {instance.angle:.1f}, "
            f"{instance.inliers} inliers"
        )
    return "\n".join(lines)
