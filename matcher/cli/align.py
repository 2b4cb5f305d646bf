"""`matcher align`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from matcher.cli import options
from matcher.cli.collection import Masks
from matcher.cli.match import First, MaskFile, Second
from matcher.cli.options import PARTIAL, complain, show

if TYPE_CHECKING:
    from matcher.alignment.align import Alignment
    from matcher.alignment.find import Detections


# --- align: `matcher align`.

Model = Annotated[
    Literal["homography", "affine", "similarity"],
    typer.Option("--model", help="How IMAGE0 may be moved; similarity: turn, one scale and shift."),
]
Warped = Annotated[
    Path | None, typer.Option(metavar="FILE.png|.jpg|.tif", help="Save IMAGE0 as IMAGE1 shows it.")
]
Blend = Annotated[
    Path | None,
    typer.Option(metavar="FILE.png|…", help="Save both as one: IMAGE0 red, IMAGE1 blue, grey if they agree."),
]
Board = Annotated[
    Path | None, typer.Option(metavar="FILE.png|…", help="Save a checkerboard of IMAGE0 and IMAGE1.")
]
Difference = Annotated[
    Path | None, typer.Option(metavar="FILE.png|…", help="Save the absolute difference of the two.")
]
AlignOptions = Annotated[dict[str, Any], ("geometry",), {}]


def align(
    image0: First,
    image1: Second,
    given: AlignOptions,
    model: Model = "homography",
    mask0: MaskFile = None,
    mask1: MaskFile = None,
    output: Warped = None,
    blend: Blend = None,
    checkerboard: Board = None,
    difference: Difference = None,
    overwrite: options.Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> int:
    """Bring IMAGE0 onto IMAGE1 and save it as IMAGE1 shows it.

    Right where the scene is flat or far away, or where the camera only turned. Images are those after EXIF
    orientation, at the full size of IMAGE1. If the two cannot be aligned, nothing is written and the exit
    code is 4.
    """
    import json

    from matcher.alignment.align import PICTURE_FORMATS
    from matcher.alignment.align import align as run
    from matcher.cli.match import check_each

    wanted = {"warped": output, "blend": blend, "checkerboard": checkerboard, "difference": difference}
    outputs = {view: path for view, path in wanted.items() if path is not None}
    inputs = (image0, image1, mask0, mask1)
    check_each([(path, tuple(PICTURE_FORMATS)) for path in outputs.values()], inputs, overwrite=overwrite)
    found = run(image0, image1, model=model, mask0=mask0, mask1=mask1, **given)
    if found.found:
        for view, path in outputs.items():
            found.save(path, view, overwrite=True)  # check_each has refused files of others
    if as_json:
        show(json.dumps(found.to_dict(), allow_nan=False), always=True)
    else:
        _show(found, outputs)
    return 0 if found.found else PARTIAL


def _show(found: Alignment, outputs: dict[str, Path]) -> None:
    """The summary, and the matrix or what was not written."""
    lines = found.summary().splitlines()
    if not found.found:
        show("\n".join(lines[:-1]))
        complain(lines[-1] + ("; nothing was written" if outputs else ""))
        return
    show("\n".join(lines))
    rows = [" ".join(f"{value: .10g}" for value in row) for row in found.matrix]
    show("\n".join([f"# {found.model}, x1 ~ H x0, stored pixels:", *rows]), always=True)
    for path in outputs.values():
        show(f"wrote {path}")


# --- find: `matcher find`.

Template = Annotated[
    Path, typer.Argument(metavar="TEMPLATE", show_default=False, help="Image of what to look for.")
]
Images = Annotated[
    list[Path], typer.Argument(metavar="IMAGES...", show_default=False, help="Images, or folders of images.")
]
TemplateMask = Annotated[
    Path | None,
    typer.Option("--template-mask", metavar="FILE", help="Mask image; black pixels yield no keypoints."),
]
Most = Annotated[
    int, typer.Option("--max-instances", metavar="N", min=1, help="Find at most N instances per image.")
]
Output = Annotated[Path | None, typer.Option(metavar="FILE.json", help="Save the instances of all images.")]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE.png|.svg|…|DIR", help="Save a drawing; of several images, to a folder."),
]
FindOptions = Annotated[dict[str, Any], ("geometry", "second_pass"), {"resize": 4096}]


def find(
    template: Template,
    images: Images,
    given: FindOptions,
    template_mask: TemplateMask = None,
    masks: Masks = None,
    max_instances: Most = 20,
    output: Output = None,
    plot: Plot = None,
    overwrite: options.Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    fail_if_unmatched: Annotated[
        bool, typer.Option("--fail-if-unmatched", help="Exit with code 4 if no image shows the template.")
    ] = False,
) -> int:
    """Find a flat TEMPLATE in images: several instances, at any scale and turn.

    Corners are (x, y) in pixels of the stored image, clockwise from the template's first pixel; the angle is
    in degrees, clockwise. --max-keypoints is of the template and of each window of 1024 pixels.
    """
    import json

    from matcher.alignment.find import TemplateFinder
    from matcher.errors import ImageError
    from matcher.files import write_output

    paths = _expand(images)
    masked = _find_masks(paths, masks)
    plots = _check(paths, [template, *paths, template_mask, *masked.values()], output, plot, overwrite)
    finder = TemplateFinder(template, template_mask=template_mask, max_instances=max_instances, **given)
    found = []
    for path in paths:
        try:
            found.append(detections := finder.find(path, masked.get(path)))
        except ImageError as error:
            complain(str(error))
            continue
        if path in plots:
            detections.plot(plots[path], overwrite=True)  # _check has refused files of others
        if not as_json:
            show(_summary(detections))
    report = {"template": str(template), "images": [detections.to_dict() for detections in found]}
    text = json.dumps(report, allow_nan=False)
    if output is not None:
        write_output(output, text.encode())
    if as_json:
        show(text, always=True)
    unmatched = fail_if_unmatched and not any(len(detections) for detections in found)
    return PARTIAL if len(found) < len(paths) or unmatched else 0


def _expand(images: list[Path]) -> list[Path]:
    """The images, with folders replaced by what is in them."""
    from matcher.images import find_images

    listed = [path for given in images for path in (find_images(given) if given.is_dir() else [given])]
    return list(dict.fromkeys(listed))


def _find_masks(images: list[Path], folder: Path | None) -> dict[Path, Path]:
    """The mask of each image that has one."""
    from matcher.images import find_masks

    if folder is None:
        return {}
    found = find_masks(folder, [path.name for path in images], str(images[0].parent))
    return {path: found[path.name] for path in images if path.name in found}


def _check(
    images: list[Path], inputs: list[Path | None], output: Path | None, plot: Path | None, overwrite: bool
) -> dict[Path, Path]:
    """Refuse outputs that cannot be written; the drawing of each image."""
    from matcher.cli.match import check_each
    from matcher.errors import UsageError

    plots: dict[Path, Path] = {}
    outputs: list[tuple[Path, tuple[str, ...]]] = [] if output is None else [(output, (".json",))]
    if plot is not None:
        from matcher.viz.drawings import PLOT_SUFFIXES

        if plot.suffix.lower() in PLOT_SUFFIXES:
            if len(images) > 1:
                raise UsageError(
                    f"--plot {plot} is one file, but there are {len(images)} images; name a folder"
                )
            plots = {images[0]: plot}
        else:
            plots = {path: plot / f"{path.stem}.png" for path in images}
            if len(set(plots.values())) < len(plots):
                raise UsageError("images of one name in several folders: draw them one folder at a time")
            plot.mkdir(exist_ok=True)
        outputs += [(path, PLOT_SUFFIXES) for path in plots.values()]
    check_each(outputs, inputs, overwrite=overwrite)
    return plots


def _summary(found: Detections) -> str:
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
