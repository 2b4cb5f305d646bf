"""A folder of pictures → sets as `stored` reads them: posed pictures, verified depth, pairs that agree."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np

from matcher.lab.pairs.labelling.agreement import agreeing, choose_pairs
from matcher.lab.pairs.labelling.poses import MIN_IMAGES, PlacedPicture, place_pictures
from matcher.lab.pairs.labelling.stereo import choose_neighbours, sweep
from matcher.lab.pairs.posed import PosedView

UNITS = 8000  # of the 16-bit depth at a set's median depth
PATCH = 2  # pixels about a point that are taken to be as far away
DONE = "DONE"
Log = Callable[[str], None]


def label_views(pictures: Path, out: Path, work: Path, log: Log = print) -> list[Path]:
    """Make the sets of a folder of pictures, one for each model of at least four pictures; what an earlier
    call has finished stays.

    Args:
        pictures: folder of one place.
        out: folder of the largest model's set; others beside it are named `out`-1, `out`-2, …
        work: for what is computed on the way; it may be deleted afterwards.
        log: receives lines on progress.

    Returns:
        The folders of sets with at least one pair.

    Raises:
        UsageError: no pictures.
        ImportError: pycolmap is not installed.
    """
    if (out / DONE).exists():
        return [folder for folder in sorted(out.parent.glob(f"{out.name}*")) if (folder / DONE).exists()]
    models = [model for model in place_pictures(pictures, work) if len(model) >= MIN_IMAGES]
    log(f"{out.name}: models of {[len(model) for model in models]} pictures")
    made = []
    for number, model in reversed(list(enumerate(models))):
        folder = out if number == 0 else out.with_name(f"{out.name}-{number}")
        if _label(model, folder, work / f"depth{number}", log):
            made.append(folder)
    return made


def _label(pictures: Sequence[PlacedPicture], out: Path, work: Path, log: Log) -> bool:
    scale = 1 / float(np.median(np.concatenate([picture.depths for picture in pictures])))
    pictures = [_rescaled(picture, scale * UNITS / 1000) for picture in pictures]
    neighbours = choose_neighbours(pictures)
    work.mkdir(parents=True, exist_ok=True)
    views = []
    for picture, others in zip(pictures, neighbours, strict=True):
        path = work / f"{picture.name}.npy"
        if not path.exists():
            np.save(path, sweep(picture, [pictures[j] for j in others]))
        grey = cv2.cvtColor(picture.pixels, cv2.COLOR_BGR2GRAY)
        views.append(PosedView(grey, np.load(path), picture.K, picture.cam_from_world))
    views = agreeing(views, neighbours)
    views = [_with_points(view, picture) for view, picture in zip(views, pictures, strict=True)]
    known = np.mean([(view.inverse_depth > 0).mean() for view in views])
    pairs = choose_pairs(views)
    log(f"{out.name}: {len(views)} pictures, depth known for {known:.0%}, {len(pairs)} pairs agree")
    shutil.rmtree(out, ignore_errors=True)
    if pairs:
        _write(pictures, views, pairs, out)
    return bool(pairs)


def _rescaled(picture: PlacedPicture, scale: float) -> PlacedPicture:
    """The picture in a world `scale` times as large."""
    pose = picture.cam_from_world.copy()
    pose[:3, 3] *= scale
    return replace(picture, cam_from_world=pose, depths=picture.depths * scale)


def _with_points(view: PosedView, picture: PlacedPicture) -> PosedView:
    """The view with the depth of the points that it shows, on a small patch each, where it is unknown."""
    inverse = view.inverse_depth.copy()
    height, width = inverse.shape
    for (x, y), depth in zip(picture.positions, picture.depths, strict=True):
        column, row = round(x), round(y)
        if depth > 0 and PATCH <= column < width - PATCH and PATCH <= row < height - PATCH:
            patch = inverse[row - PATCH : row + PATCH + 1, column - PATCH : column + PATCH + 1]
            patch[patch == 0] = 1 / depth
    return replace(view, inverse_depth=inverse)


def _write(
    pictures: Sequence[PlacedPicture],
    views: Sequence[PosedView],
    pairs: Sequence[tuple[int, int, float]],
    out: Path,
) -> None:
    out.mkdir(parents=True)
    rows = []
    for picture, view in zip(pictures, views, strict=True):
        quality = [cv2.IMWRITE_JPEG_QUALITY, 96]
        cv2.imwrite(str(out / f"{picture.name}.jpg"), picture.pixels, quality)
        inverse = view.inverse_depth
        depth = np.divide(1000, inverse, out=np.zeros_like(inverse), where=inverse > 0)
        depth = np.where(depth < 65535, np.rint(depth), 0).astype(np.uint16)
        cv2.imwrite(str(out / f"{picture.name}_depth.png"), depth)
        rows.append(
            {
                "image": f"{picture.name}.jpg",
                "depth": f"{picture.name}_depth.png",
                "group": 0,
                "K": picture.K.tolist(),
                "E": picture.cam_from_world.tolist(),
            }
        )
    (out / "pairs.json").write_text(json.dumps(pairs), encoding="utf-8")
    content = json.dumps({"depth_step": 1, "views": rows})
    (out / "cameras.json").write_text(content, encoding="utf-8")
    (out / DONE).touch()
