"""Checks before an export: an index out of range would crash the program that reads it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from matcher.collection.encoding import common_camera
from matcher.collection.exporting.output import ExportReport
from matcher.errors import UsageError

if TYPE_CHECKING:
    from matcher.collection.records import StoredImage, StoredPair
    from matcher.collection.store import Store

_SHOWN = 5  # names in a message


def begin_export(
    store: Store, out: Path, *, utf8: str | None = None, only: Collection[str] | None = None
) -> tuple[ExportReport, list[StoredImage]]:
    """The report of an export, which counts what is left out, and the images that have features, by name.

    An image without a camera of its own has that of the run, with which its pairs were verified.

    Args:
        store: the run.
        out: what is to be written.
        utf8: where the format holds names as UTF-8; None: names may be anything.
        only: names of the images to export; all when absent.

    Raises:
        UsageError: there is no image, or a name is not UTF-8 and must be.
    """
    report = ExportReport(out)
    images = sorted(store.images(), key=lambda image: image.name)
    if only is not None:
        report.excluded = {image.name for image in images}.difference(only)
        images = [image for image in images if image.name not in report.excluded]
    done = [image for image in images if image.status == "done"]
    for status in ("failed", "waiting"):
        names = [image.name for image in images if image.status == status]
        if names:
            report.notes.append(f"{len(names)} images {status} in the run are not written: {_few(names)}")
    if not done:
        raise UsageError(
            "the run has no image with features; finish it first: `matcher collection … --run …`"
        )
    if utf8 is not None:
        refuse_names((image.name for image in done), _not_utf8, f"are not UTF-8, which {utf8} needs")
    common = common_camera(store.settings)
    done = [replace(image, camera=image.camera or common) for image in done]
    report.images = len(done)
    report.keypoints = sum(image.count for image in done)
    return report, done


def valid_keypoints(store: Store, image: StoredImage) -> np.ndarray:
    """(N, 2) float32 keypoints in stored pixels, all finite; refined ones if the run was refined.

    Raises:
        UsageError: their number differs from the store's, or they are not finite.
    """
    refined = store.refined_keypoints(image.name)
    points = store.keypoints(image.name) if refined is None else refined.keypoints
    points = np.ascontiguousarray(points, dtype=np.float32)
    if points.shape != (image.count, 2) or not np.isfinite(points).all():
        raise UsageError(
            f"{image.name}: its {image.count} keypoints are damaged; restore the run from a copy, or "
            "delete it and match again"
        )
    return points


def valid_pairs(store: Store, images: Iterable[StoredImage], report: ExportReport) -> Iterator[StoredPair]:
    """The pairs of those images whose every index is valid, with name0 before name1; others are left out."""
    counts = {image.name: image.count for image in images}
    for pair in store.pairs():
        if report.excluded & {pair.name0, pair.name1} or (pair.name0, pair.name1) in report.without:
            continue
        fault = _pair_fault(pair, counts)
        if fault is not None:
            report.left_out.append(f"the pair {pair.name0} {pair.name1}: {fault}")
            continue
        report.pairs += 1
        report.matches += len(pair.matches)
        report.verified += pair.geometry.status == "ok"
        yield pair


def _pair_fault(pair: StoredPair, counts: dict[str, int]) -> str | None:
    for name in (pair.name0, pair.name1):
        if name not in counts:
            return f"{name} has no features"
    if pair.name0 >= pair.name1:
        return "its images are not in order"
    indices = np.asarray(pair.matches.indices)
    if indices.ndim != 2 or indices.shape[1] != 2 or indices.dtype.kind not in "iu":
        return f"its indices have shape {indices.shape} and type {indices.dtype}"
    if len(indices) == 0:
        return None
    for side, name in enumerate((pair.name0, pair.name1)):
        column = indices[:, side]
        if column.min() < 0 or column.max() >= counts[name]:
            return f"a match refers to a keypoint beyond the {counts[name]} of {name}"
        if len(np.unique(column)) != len(column):
            return f"a keypoint of {name} is matched twice"
    if np.shape(pair.geometry.inliers) != (len(indices),):
        return "its inliers and matches differ in number"
    return None


def refuse_names(names: Iterable[str], bad: Callable[[str], bool], reason: str) -> None:
    """Refuse an export whose format cannot hold some of the names.

    Raises:
        UsageError: there are such names; the message lists the first.
    """
    found = [name for name in names if bad(name)]
    if found:
        raise UsageError(f"{len(found)} names {reason}; rename them: {_few(found)}")


def refuse_collisions(names: Iterable[str], key: Callable[[str], str], reason: str) -> None:
    """Refuse an export whose format would give one key to several names.

    Raises:
        UsageError: there are such names; the message lists the first groups.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(key(name), []).append(name)
    found = [" = ".join(group) for group in groups.values() if len(group) > 1]
    if found:
        raise UsageError(f"{len(found)} groups of names become one {reason}; rename them: {_few(found)}")


def _not_utf8(name: str) -> bool:
    """Whether a file name holds bytes that are no UTF-8."""
    return any("\ud800" <= c <= "\udfff" for c in name)


def _few(names: list[str]) -> str:
    shown = [name.encode("utf-8", "backslashreplace").decode() for name in names[:_SHOWN]]
    return ", ".join(shown) + (", …" if len(names) > _SHOWN else "")
