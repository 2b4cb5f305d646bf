"""A folder of photos → sets as `stored` reads them: posed images, verified depth, consistent pairs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np

from matcher.errors import UsageError
from matcher.lab.pairs.labelling.agreement import choose_pairs, keep_consistent_depth
from matcher.lab.pairs.labelling.poses import MIN_IMAGES, PosedImage, estimate_poses
from matcher.lab.pairs.labelling.stereo import choose_neighbours, sweep
from matcher.lab.pairs.posed import PosedView

UNITS = 8000  # of a 16-bit depth map at the median depth of a set
PATCH = 2  # pixels around a point that get its depth
DONE = "DONE"
Log = Callable[[str], None]


def label_views(photos: Path, out: Path, work: Path, log: Log = print) -> list[Path]:
    """Make the sets of a folder of photos, one for each model of at least four images; sets that an earlier
    call finished are kept.

    Args:
        photos: folder of photos of one scene.
        out: folder of the largest model's set; others beside it are named `out`-1, `out`-2, …
        work: folder of intermediate results; it may be deleted afterwards.
        log: receives lines on progress.

    Returns:
        The folders of sets with at least one pair.

    Raises:
        UsageError: no photos, or a folder of a set that is none.
        ImportError: pycolmap is not installed.
    """
    if (out / DONE).exists():
        return [folder for folder in sorted(out.parent.glob(f"{out.name}*")) if (folder / DONE).exists()]
    _refuse_foreign(out)
    models = [model for model in estimate_poses(photos, work) if len(model) >= MIN_IMAGES]
    log(f"{out.name}: models of {[len(model) for model in models]} images")
    made = []
    for number, model in reversed(list(enumerate(models))):
        folder = out if number == 0 else out.with_name(f"{out.name}-{number}")
        if _label(model, folder, work / f"depth{number}", log):
            made.append(folder)
    return made


def _refuse_foreign(out: Path) -> None:
    """`UsageError` for a folder that is not ours to write: it may hold somebody's photos."""
    if out.exists():
        raise UsageError(f"{out} exists and is no finished set; name another folder for the sets")


def _label(images: Sequence[PosedImage], out: Path, work: Path, log: Log) -> bool:
    scale = 1 / float(np.median(np.concatenate([image.depths for image in images])))
    images = [_rescaled(image, scale * UNITS / 1000) for image in images]
    neighbours = choose_neighbours(images)
    work.mkdir(parents=True, exist_ok=True)
    views = []
    for image, others in zip(images, neighbours, strict=True):
        path = work / f"{image.name}.npy"
        if not path.exists():
            np.save(path, sweep(image, [images[j] for j in others]))
        grey = cv2.cvtColor(image.pixels, cv2.COLOR_BGR2GRAY)
        views.append(PosedView(grey, np.load(path), image.K, image.cam_from_world))
    views = keep_consistent_depth(views, neighbours)
    views = [_with_points(view, image) for view, image in zip(views, images, strict=True)]
    known = np.mean([(view.inverse_depth > 0).mean() for view in views])
    pairs = choose_pairs(views)
    log(f"{out.name}: {len(views)} images, depth known for {known:.0%}, {len(pairs)} consistent pairs")
    if pairs:
        _refuse_foreign(out)
        part = out.with_name(f".{out.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        _write(images, views, pairs, part)
        part.rename(out)
    return bool(pairs)


def _rescaled(image: PosedImage, scale: float) -> PosedImage:
    """The image in a world `scale` times as large."""
    pose = image.cam_from_world.copy()
    pose[:3, 3] *= scale
    return replace(image, cam_from_world=pose, depths=image.depths * scale)


def _with_points(view: PosedView, image: PosedImage) -> PosedView:
    """The view with the depth of the reconstructed points, on a small patch each, where it was unknown."""
    inverse = view.inverse_depth.copy()
    height, width = inverse.shape
    for (x, y), depth in zip(image.positions, image.depths, strict=True):
        column, row = round(x), round(y)
        if depth > 0 and PATCH <= column < width - PATCH and PATCH <= row < height - PATCH:
            patch = inverse[row - PATCH : row + PATCH + 1, column - PATCH : column + PATCH + 1]
            patch[patch == 0] = 1 / depth
    return replace(view, inverse_depth=inverse)


def _write(
    images: Sequence[PosedImage],
    views: Sequence[PosedView],
    pairs: Sequence[tuple[int, int, float]],
    out: Path,
) -> None:
    out.mkdir(parents=True)
    rows = []
    for image, view in zip(images, views, strict=True):
        quality = [cv2.IMWRITE_JPEG_QUALITY, 96]
        cv2.imwrite(str(out / f"{image.name}.jpg"), image.pixels, quality)
        inverse = view.inverse_depth
        depth = np.divide(1000, inverse, out=np.zeros_like(inverse), where=inverse > 0)
        depth = np.where(depth < 65535, np.rint(depth), 0).astype(np.uint16)
        cv2.imwrite(str(out / f"{image.name}_depth.png"), depth)
        rows.append(
            {
                "image": f"{image.name}.jpg",
                "depth": f"{image.name}_depth.png",
                "group": 0,
                "K": image.K.tolist(),
                "E": image.cam_from_world.tolist(),
            }
        )
    (out / "pairs.json").write_text(json.dumps(pairs), encoding="utf-8")
    content = json.dumps({"depth_step": 1, "views": rows})
    (out / "cameras.json").write_text(content, encoding="utf-8")
    (out / DONE).touch()
