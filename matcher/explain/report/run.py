"""The page of a run: pair graph, match counts, tracks, failures, weakest pairs; pages of pairs beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from matcher.collection.records import StoredImage, StoredPair
from matcher.collection.store import Store
from matcher.collection.tracks import tracks_of
from matcher.data.images import limit_for, read_image
from matcher.errors import ImageError, UsageError
from matcher.explain.report.graph import lay_out
from matcher.explain.report.page import build_page
from matcher.explain.report.pair import BODY, SCRIPTS, pair_data
from matcher.explain.report.statistics import BINS, PairRow, RunStatistics, collect_statistics
from matcher.files import check_output, refuse_foreign, write_output

PAGES = 20  # default number of pair pages
_TRACKED = 5_000_000  # verified matches whose tracks are joined, some seconds a million
_ROWS = 500  # of a table
_NODES, _EDGES = 400, 4000  # of the graph: what a page shows legibly and at once
_SIDE = 1024  # pixels, longer side of an image
_RUN_BODY = (
    '<p id="summary"></p><div id="tables"></div><h2>Pair graph</h2><div id="controls"></div>'
    '<p id="info"></p><canvas id="graph" width="960" height="640"></canvas><p id="legend"></p>'
    '<div id="details"></div><div id="rows"></div>'
)


@dataclass(frozen=True)
class RunPages:
    """What was written."""

    index: Path
    pages: int  # of pairs
    left_out: tuple[str, ...]  # pairs that have no page, and why


def write_run_report(
    run_dir: str | Path, path: str | Path | None = None, *, pages: int = PAGES, overwrite: bool = False
) -> RunPages:
    """Write the page of a run and, in a folder beside it, pages of its weakest pairs.

    Each file appears whole or not at all.

    Args:
        run_dir: of the store, which is only read.
        path: .html; `report.html` in the run's folder when absent.
        pages: pairs that get a page of their own, the weakest first; their images are read again.
        overwrite: replace files that no earlier report wrote.

    Raises:
        UsageError: no run there, an output that cannot be written, or a negative number of pages.
        IntegrityError: the store is damaged.
    """
    run_dir = Path(run_dir)
    if pages < 0:
        raise UsageError(f"the number of pages must not be negative, got {pages}")
    with Store.open(run_dir) as store:
        path = run_dir / "report.html" if path is None else path
        path = check_output(path, (".html",), overwrite=overwrite)
        found = collect_statistics(store.pairs(), max(_ROWS, pages), _EDGES)
        folder = path.with_name(f"{path.stem}_pairs")
        links, left_out = _write_pairs(store, found.weakest[:pages], folder, path.name, overwrite)
        data = _run_data(store, found, links, left_out)
    write_output(path, build_page(f"matcher: {run_dir.name}", ("elements.js", "run.js"), _RUN_BODY, data))
    return RunPages(path, len(links), tuple(left_out))


def _write_pairs(
    store: Store, rows: Sequence[PairRow], folder: Path, index: str, overwrite: bool
) -> tuple[dict[tuple[str, str], str], list[str]]:
    """A page for each of these pairs: links to them from the index, and what has no page and why."""
    links: dict[tuple[str, str], str] = {}
    left_out: list[str] = []
    if not rows:
        return links, left_out
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):  # a link may lead anywhere
        raise UsageError(f"{folder} is a file or a link; move it away, or name another file for the page")
    folder.mkdir(exist_ok=True)
    wanted = {(row.name0, row.name1): number for number, row in enumerate(rows, 1)}
    images = {image.name: image for image in store.images()}
    for pair in store.pairs():
        names = (pair.name0, pair.name1)
        if names not in wanted:
            continue
        page = folder / f"{wanted[names]:05d}.html"
        refuse_foreign(page, overwrite=overwrite)
        try:
            write_output(page, _pair_page(store, pair, [images[name] for name in names], index))
            links[names] = f"{quote(folder.name)}/{page.name}"
        except ImageError as error:
            left_out.append(f"{pair.name0} and {pair.name1}: {error}")
    return links, left_out


def _pair_page(store: Store, pair: StoredPair, images: Sequence[StoredImage], index: str) -> bytes:
    """The page of one pair, with its images as they are on disk now."""
    settings, shown = store.settings, []
    for image in images:
        upright = settings.get("upright", True)
        pixels = read_image(image.path, resize=_SIDE, upright=upright, max_pixels=limit_for(image.size))
        if pixels.size != image.size:
            raise ImageError(f"{image.path}: its size has changed since the run; run it again")
        shown.append(pixels)
    origin = [
        ("run", str(store.folder)),
        ("preset", str(settings.get("preset"))),
        ("weights", f"sha256 {settings['weights']}" if settings.get("weights") else "none"),
        ("image 0", str(images[0].path)),
        ("image 1", str(images[1].path)),
        ("seconds", f"{pair.seconds:.3f}"),
        (
            "attention, exit and pruning",
            "a run does not keep them: `matcher explain IMAGE0 IMAGE1 --output FILE.html` shows them",
        ),
    ]
    keypoints = [store.keypoints(image.name) for image in images]
    refined = [store.refined_keypoints(image.name) for image in images]
    covariances = [
        None if side is None else np.where(side.refined[:, None, None], side.covariances, np.nan)
        for side in refined
    ]
    data = pair_data(shown, keypoints, pair.matches, pair.geometry, origin, covariances)
    return build_page(f"{pair.name0} and {pair.name1}", SCRIPTS, BODY, {**data, "back": f"../{quote(index)}"})


def _run_data(
    store: Store, found: RunStatistics, links: dict[tuple[str, str], str], left_out: Sequence[str]
) -> dict[str, Any]:
    """All that the page shows, ready for JSON."""
    counts, settings, images = store.counts(), store.settings, store.images()
    failed = [[f"{pair.name0} and {pair.name1}", pair.reason] for pair in islice(store.failed(), _ROWS)]
    lost = [[image.name, image.reason] for image in images if image.status == "failed"]
    estimation = settings.get("config", {}).get("estimation", {})
    return {
        "folder": str(store.image_folder),
        "run": str(store.folder),
        "origin": [
            ["images of", str(store.image_folder)],
            ["preset", str(settings.get("preset"))],
            ["weights, sha256", settings.get("weights") or "none"],
            ["geometry", str(estimation.get("kind"))],
        ],
        "counts": [
            ["images", counts.images_done, counts.images_failed, counts.images_waiting],
            ["pairs", counts.pairs_done, counts.pairs_failed, counts.pairs_waiting],
        ],
        "seconds": round(found.seconds, 1),
        "statuses": sorted(found.statuses.items()),
        "bins": list(BINS),
        "histograms": [
            [counter[number] for number in range(len(BINS))] for counter in (found.matches, found.inliers)
        ],
        "tracks": _tracks(store, found),
        "graph": _graph(found, images),
        "weakest": [_cells(row, links) for row in found.weakest],
        "alone": [
            [image.name, image.count, found.tried[image.name], found.degree[image.name]]
            for image in sorted(images, key=lambda i: (found.degree[i.name], i.name))
            if image.status == "done"
        ][:_ROWS],
        "failures": {
            "images": [counts.images_failed, lost[:_ROWS]],
            "pairs": [counts.pairs_failed, failed],
            "pages": [len(left_out), [[text, ""] for text in left_out[:_ROWS]]],
        },
    }


def _tracks(store: Store, found: RunStatistics) -> dict[str, Any] | None:
    """Lengths of the tracks that the verified matches make; None for a run too large to hold in memory."""
    if found.verified_matches > _TRACKED:
        return None
    tracks = tracks_of(store)
    lengths = Counter(tracks.lengths.tolist())
    return {
        "count": len(tracks),
        "mean": round(tracks.mean_length, 2),
        "conflicts": tracks.conflicts,
        "lengths": sorted(lengths.items()),
    }


def _cells(row: PairRow, links: dict[tuple[str, str], str]) -> list[Any]:
    link = links.get((row.name0, row.name1))
    return [row.name0, row.name1, row.matches, row.inliers, row.status, round(row.seconds, 3), link]


def _graph(found: RunStatistics, images: Sequence[StoredImage]) -> dict[str, Any]:
    """Images with most partners and the strongest pairs between them, with positions on a unit square."""
    by_degree = sorted(images, key=lambda image: (-found.degree[image.name], image.name))[:_NODES]
    nodes = sorted(image.name for image in by_degree)
    number = {name: index for index, name in enumerate(nodes)}
    rows = [row for row in found.strongest if row.name0 in number and row.name1 in number]
    edges = np.array([[number[row.name0], number[row.name1]] for row in rows], np.int64).reshape(-1, 2)
    inliers = np.array([row.inliers for row in rows], np.float64)
    positions = lay_out(len(nodes), edges, np.sqrt(np.maximum(inliers, 1)))
    status = {image.name: image.status for image in images}
    return {
        "nodes": [
            [name, *np.round(position, 4).tolist(), status[name], found.degree[name]]
            for name, position in zip(nodes, positions, strict=True)
        ],
        "edges": [[*map(int, edge), row.inliers, row.matches] for edge, row in zip(edges, rows, strict=True)],
        "images": len(images),
        "pairs": sum(found.degree.values()) // 2,
    }
