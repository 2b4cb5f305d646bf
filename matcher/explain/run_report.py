"""The page of a run: pair graph, match counts, tracks, failures, weakest pairs; pages of pairs beside it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import cv2
import numpy as np

from matcher.collection.schema import StoredImage, StoredPair, common_camera
from matcher.collection.store import Store
from matcher.collection.tracks import tracks_of
from matcher.errors import ImageError, IntegrityError, UsageError
from matcher.explain.report import BODY, SCRIPTS, build_page, jpeg, pair_data
from matcher.files import check_output, refuse_foreign, write_output
from matcher.images import limit_for, read_image
from matcher.sfm.models import SUMMARY, read_summary
from matcher.verify.adjustment import plane_answers
from matcher.verify.overlay import CommonOverlay

PAGES = 20  # default number of pair pages
BINS = (0, 1, 10, 20, 50, 100, 200, 500, 1000, 2000)  # least count of each bin of a histogram
_ROWS = 500  # of a table
_EXPLAIN = "`matcher explain IMAGE0 IMAGE1 --output FILE.html`"
_CONTRADICTED = "other pairs say that it is another place: in no track, model or export"
_BODY = (
    '<p id="summary"></p><div id="tables"></div><h2>Pair graph</h2><div id="controls"></div>'
    '<p id="info"></p><canvas id="graph" width="960" height="640"></canvas><p id="legend"></p>'
    '<div id="details"></div><div id="rows"></div>'
)


def write_run_report(
    run_dir: str | Path, path: str | Path | None = None, *, pages: int = PAGES, overwrite: bool = False
) -> tuple[Path, int, list[str]]:
    """Write the page of a run and, in a folder beside it, pages of its `pages` weakest pairs, whose images
    are read again. Each file appears whole or not at all.

    `path` is .html, by default `report.html` in the run's folder; `overwrite`: also replace files that no
    earlier report wrote. Returns the page, how many pairs have one, and which of the weakest have none and
    why. Raises `UsageError`: no run there, an output that cannot be written, or a negative number of pages;
    `IntegrityError`: the store is damaged.
    """
    run_dir = Path(run_dir)
    if pages < 0:
        raise UsageError(f"the number of pages must not be negative, got {pages}")
    with Store.open(run_dir) as store:
        path = check_output(path or run_dir / "report.html", (".html",), overwrite=overwrite)
        sizes = {image.name: image.size for image in store.images()}
        rows = sorted(PairRow.of(pair, sizes) for pair in store.pairs())
        links, left_out = _write_pairs(store, rows[:pages], path, overwrite)
        counts, settings, images = store.counts(), store.settings, store.images()
        failed = [[f"{a} and {b}", reason] for a, b, reason in islice(store.failed(), _ROWS)]
        lost = [[image.name, image.reason] for image in images if image.status == "failed"]
        tried = Counter(name for row in rows for name in (row.name0, row.name1))
        degree = Counter(name for row in rows if row.verified for name in (row.name0, row.name1))
        tracks, gone = None, ()
        if sum(row.inliers for row in rows if row.verified) <= 5_000_000:  # more would not fit into memory
            joined = tracks_of(store)
            gone = joined.contradicted
            tracks = {
                "count": len(joined),
                "mean": round(joined.mean_length, 2),
                "conflicts": joined.conflicts,
                "lengths": sorted(Counter(joined.lengths.tolist()).items()),
            }
        # Models beside the run that were made from it, each as a link to its plot.
        run, folder, reconstructions = store.folder.resolve(), path.parent.resolve(), []
        for model in sorted(summary.parent for summary in run.parent.glob(f"*/{SUMMARY}")):
            named = read_summary(model).get("run")
            if isinstance(named, str) and os.path.normpath(model / named) == str(run):
                place = Path(os.path.relpath(model / "reconstruction.png", folder))
                link = {"text": str(model), "link": quote(place.as_posix())}
                reconstructions.append(["reconstruction", link])
        alone = sorted(images, key=lambda image: (degree[image.name], image.name))
        done = [image for image in alone if image.status == "done"][:_ROWS]
        data = {
            "folder": str(store.image_folder),
            "run": str(store.folder),
            "origin": [
                ["images of", str(store.image_folder)],
                ["preset", str(settings.get("preset"))],
                ["weights, sha256", settings.get("weights") or "none"],
                ["geometry", str(settings.get("config", {}).get("estimation", {}).get("kind"))],
                *reconstructions,
            ],
            "counts": [
                ["images", counts.images_done, counts.images_failed, counts.images_waiting],
                ["pairs", counts.pairs_done, counts.pairs_failed, counts.pairs_waiting],
            ],
            "seconds": round(sum(row.seconds for row in rows), 1),
            "statuses": sorted(Counter((row.status, row.verified) for row in rows).items()),
            "bins": list(BINS),
            "histograms": [
                np.histogram([getattr(row, name) for row in rows], [*BINS, np.inf])[0].tolist()
                for name in ("matches", "inliers")
            ],
            "tracks": tracks,
            "overlays": [_shown_overlay(overlay, images) for overlay in store.overlays],
            "graph": _graph([row for row in rows[::-1] if row.verified][:4000], degree, images),
            "weakest": [
                [*names, r.matches, r.inliers, r.words, r.probability, round(r.seconds, 3), links.get(names)]
                for r in rows[: max(_ROWS, len(links) + len(left_out))]
                for names in [(r.name0, r.name1)]
            ],
            "alone": [[image.name, image.count, tried[image.name], degree[image.name]] for image in done],
            "failures": {
                "images": [counts.images_failed, lost[:_ROWS]],
                "pairs": [counts.pairs_failed, failed],
                "contradicted": [len(gone), [[f"{a} and {b}", _CONTRADICTED] for a, b in gone[:_ROWS]]],
                "pages": [len(left_out), [[text, ""] for text in left_out[:_ROWS]]],
            },
        }
    write_output(path, build_page(f"matcher: {run_dir.name}", ("elements.js", "run.js"), _BODY, data))
    return path, len(links), left_out


class PairRow(NamedTuple):
    """A pair without its matches; the weakest is the least."""

    verified: bool  # a geometry was found, or none was asked for
    inliers: int  # matches, where no geometry was asked for
    matches: int
    name0: str
    name1: str
    status: str
    seconds: float
    probability: float | None  # of the same place
    words: str  # the status, and what else is said of the geometry

    @classmethod
    def of(cls, pair: StoredPair, sizes: Mapping[str, tuple[int, int]]) -> PairRow:
        """Of a pair in a store, whose images have these (width, height)."""
        status, matches, inliers = pair.geometry.status, len(pair.matches), int(pair.geometry.inliers.sum())
        free = status == "not_estimated"
        verified = matches > 0 if free else pair.geometry.verified
        row = verified, matches if free else inliers, matches, pair.name0, pair.name1, status, pair.seconds
        return cls(*row, pair.probability(sizes), pair.geometry.described)


def _write_pairs(
    store: Store, rows: Sequence[PairRow], index: Path, overwrite: bool
) -> tuple[dict[tuple[str, str], str], list[str]]:
    """A page for each of these pairs: links to them from the index, and what has no page and why."""
    links: dict[tuple[str, str], str] = {}
    left_out: list[str] = []
    if not rows:
        return links, left_out
    folder = index.with_name(f"{index.stem}_pairs")
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):  # a link may lead anywhere
        raise UsageError(f"{folder} is a file or a link; move it away, or name another file for the page")
    folder.mkdir(exist_ok=True)
    wanted = {(row.name0, row.name1): number for number, row in enumerate(rows, 1)}
    images = {image.name: image for image in store.images()}
    for pair in store.pairs():
        if (names := (pair.name0, pair.name1)) not in wanted:
            continue
        page = folder / f"{wanted[names]:05d}.html"
        refuse_foreign(page, overwrite=overwrite)
        try:
            data = _pair_data(store, pair, [images[name] for name in names])
        except ImageError as error:
            left_out.append(f"{pair.name0} and {pair.name1}: {error}")
            continue
        data["back"] = f"../{quote(index.name)}"
        write_output(page, build_page(f"{pair.name0} and {pair.name1}", SCRIPTS, BODY, data))
        links[names] = f"{quote(folder.name)}/{page.name}"
    return links, left_out


def _pair_data(store: Store, pair: StoredPair, images: Sequence[StoredImage]) -> dict[str, Any]:
    """The data of one pair's page, with its images as they are on disk now."""
    settings, shown, covariances, features0 = store.settings, [], [], None
    for image in images:
        how = dict(upright=settings.get("upright", True), max_pixels=limit_for(image.size))
        shown.append(read_image(image.path, resize=1024, **how))
        if shown[-1].size != image.size:
            raise ImageError(f"{image.path}: its size has changed since the run; run it again")
        side = store.refined_keypoints(image.name)
        covariances.append(side and np.where(side.refined[:, None, None], side.covariances, np.nan))
    origin = [
        ("run", str(store.folder)),
        ("preset", str(settings.get("preset"))),
        ("weights", f"sha256 {settings['weights']}" if settings.get("weights") else "none"),
        ("image 0", str(images[0].path)),
        ("image 1", str(images[1].path)),
        ("seconds", f"{pair.seconds:.3f}"),
        ("attention, exit and pruning", f"a run does not keep them: {_EXPLAIN} shows them"),
    ]
    with suppress(IntegrityError):  # descriptors may have been deleted
        features0 = store.features(images[0].name)
    cameras = tuple(image.camera or common_camera(settings) for image in images)
    ends = pair.matches.points0, pair.matches.points1
    answers = plane_answers(*ends, pair.geometry, None if None in cameras else cameras)
    given = [store.keypoints(image.name) for image in images], pair.matches, pair.geometry, origin
    return pair_data(shown, *given, covariances, features0, answers)


def _shown_overlay(overlay: CommonOverlay, images: Sequence[StoredImage]) -> tuple[str, str]:
    """What is known of an overlay, and its place on an image that can be read, dark elsewhere."""
    mask = np.ascontiguousarray(overlay.mask)
    how = dict(resize=None, upright=False, max_pixels=limit_for(overlay.size))
    shown = mask.astype(np.uint8) * 255
    for image in [image for image in images if image.size == overlay.size]:
        with suppress(ImageError):
            pixels = read_image(image.path, **how).pixels
            shown = cv2.resize(pixels, mask.shape[::-1], interpolation=cv2.INTER_AREA)
            shown[~mask] //= 4
            break
    return "{} x {}: on {:.0%} of the picture".format(*overlay.size, mask.mean()), jpeg(shown)


def _graph(strongest: list[PairRow], degree: Counter, images: Sequence[StoredImage]) -> dict[str, Any]:
    """Images with most partners and the strongest pairs between them, with positions on a unit square."""
    shown = sorted(images, key=lambda image: (-degree[image.name], image.name))[:400]
    nodes = sorted(shown, key=lambda image: image.name)
    number = {image.name: index for index, image in enumerate(nodes)}
    rows = [row for row in strongest if row.name0 in number and row.name1 in number]
    edges = np.array([[number[row.name0], number[row.name1]] for row in rows], np.int64).reshape(-1, 2)
    inliers = np.array([row.inliers for row in rows], np.float64)
    positions = np.round(lay_out(len(nodes), edges, np.sqrt(np.maximum(inliers, 1))), 4).tolist()
    return {
        "nodes": [
            [image.name, *position, image.status, degree[image.name]]
            for image, position in zip(nodes, positions, strict=True)
        ],
        "edges": [[*map(int, edge), row.inliers, row.matches] for edge, row in zip(edges, rows, strict=True)],
        "images": len(images),
        "pairs": sum(degree.values()) // 2,
    }


def lay_out(count: int, edges: np.ndarray, weights: np.ndarray, rounds: int = 150) -> np.ndarray:
    """Lay out a graph by springs and repulsion (Fruchterman and Reingold 1991): (count, 2) in [0, 1]².

    `edges` (E, 2) int64, `weights` (E,) above 0: heavier ones are shorter. The same every time: nodes start
    on a ring in their order, and steps become smaller.
    """
    turn = 2 * np.pi * np.arange(count) / max(1, count)
    positions = 0.5 + 0.4 * np.stack([np.sin(turn), -np.cos(turn)], axis=1)
    if count < 3 or not len(edges):
        return positions
    rest, pull = 0.9 / np.sqrt(count), weights / weights.max()
    for step in np.linspace(0.1, 0.002, rounds):
        apart = positions[:, None] - positions[None]
        square = np.maximum((apart**2).sum(-1), 1e-6)
        force = (apart * (rest**2 / square)[..., None]).sum(1)
        along = positions[edges[:, 0]] - positions[edges[:, 1]]
        drawn = along * (pull * np.linalg.norm(along, axis=1) / rest)[:, None]
        np.add.at(force, edges[:, 0], -drawn)
        np.add.at(force, edges[:, 1], drawn)
        force += (0.5 - positions) * 0.3  # parts that no edge joins stay on the page
        length = np.maximum(np.linalg.norm(force, axis=1, keepdims=True), 1e-9)
        positions = positions + force / length * np.minimum(length, step)
    low, extent = positions.min(0), np.ptp(positions, axis=0)
    return (positions - low) / max(extent.max(), 1e-9) + (1 - extent / extent.max()) / 2
