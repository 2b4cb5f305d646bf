"""One self-contained HTML file that shows why two images matched: no network, no library, from disk."""

from __future__ import annotations

import base64
import hashlib
import heapq
import html
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import cv2
import numpy as np

from matcher.collection.schema import StoredImage, StoredPair
from matcher.collection.store import Store
from matcher.collection.tracks import tracks_of
from matcher.config import NetworkConfig, to_dict
from matcher.errors import ImageError, UsageError
from matcher.explain.explain import (
    confidence_thresholds,
    explain,
    nearest_keypoint,
    network_of,
    partner_words,
    rules,
)
from matcher.files import check_output, refuse_foreign, write_output
from matcher.geometry import resize_points, stored_to_upright
from matcher.images import limit_for, read_image
from matcher.match.network import AttentionMatcher
from matcher.pipeline import ImageInput, Mask, Pipeline
from matcher.result import Result
from matcher.sfm.models import SUMMARY, read_summary
from matcher.types import MATCHED, UNMATCHED, Image, Matches, TwoViewGeometry
from matcher.verify.verdict import verdict_of

if TYPE_CHECKING:
    from matcher.explain.explain import Attention, Candidates, Explanation, LayerReport


# --- Where images lie in the graph of a run


def lay_out(count: int, edges: np.ndarray, weights: np.ndarray, rounds: int = 150) -> np.ndarray:
    """Lay out a graph by springs and repulsion (Fruchterman and Reingold 1991).

    Args:
        count: nodes n.
        edges: (E, 2) int64 of them.
        weights: (E,) above 0; heavier edges are shorter.
        rounds: steps, which become smaller and smaller.

    Returns:
        (n, 2) positions in [0, 1]², the same every time; they start on a ring in the order of the nodes.
    """
    turn = 2 * np.pi * np.arange(count) / max(1, count)
    positions = 0.5 + 0.4 * np.stack([np.sin(turn), -np.cos(turn)], axis=1)
    if count < 3 or not len(edges):
        return positions
    rest = 0.9 / np.sqrt(count)
    pull = weights / weights.max()
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
    low, high = positions.min(0), positions.max(0)
    return (positions - low) / np.maximum(high - low, 1e-9).max() + (
        1 - (high - low) / (high - low).max()
    ) / 2


# --- Any page


def build_page(title: str, scripts: Sequence[str], body: str, data: dict[str, Any]) -> bytes:
    """A page of one file, UTF-8: its style, script and data inside, and a policy that allows nothing else.

    Args:
        title: plain text; it is escaped.
        scripts: names of files beside this one, run one after another; they read the data and fill the body.
        body: HTML, ours and not made of foreign names.
        data: ready for JSON; foreign names belong here, and the script shows them as text.
    """
    style, *parts = (Path(__file__).with_name(name).read_text("utf-8") for name in ("page.css", *scripts))
    code = "".join(parts)
    allowed = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (code, style)]
    policy = (
        "default-src 'none'; img-src data:; script-src 'sha256-{}'; style-src 'sha256-{}'; base-uri 'none'; "
        "form-action 'none'"
    ).format(*allowed)
    # No "<" of a name may end the element that holds the data.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">'
        f'<meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
        f"<style>{style}</style><h1>{html.escape(title)}</h1>{body}"
        f'<script type="application/json" id="data">{text}</script><script>{code}</script></html>'
    )
    return page.encode("utf-8", "replace")  # a name that is no Unicode


# --- The page of a pair

SCRIPTS = ("elements.js", "page.js", "reasons.js")
STRONGEST = 4  # attended points kept for each point, layer and head
SOURCES = 12  # points of the rollout kept for each point
BODY = (
    '<p id="said"></p><div id="controls"></div><canvas id="view"></canvas><p id="info"></p>'
    '<div id="details"></div><p id="legend"></p><div id="tables"></div>'
)
_SIDE_PAIR = 1024  # pixels, longer side of an image in the report
ENLARGED = 20  # ellipses of uncertainty: a tenth of a pixel could not be seen
_BINS = 20  # of the histogram of confidences
_ENTROPY_STEP = 16  # of entropies: sixteenths of a nat


def pair_data(
    images: Sequence[Image],
    keypoints: Sequence[np.ndarray],
    matches: Matches,
    geometry: TwoViewGeometry,
    origin: Sequence[tuple[str, str]],
    covariances: Sequence[np.ndarray | None] = (None, None),
) -> dict[str, Any]:
    """A pair without reasons, as a store keeps it.

    Args:
        images: both images, at the size in which they are shown or larger.
        keypoints: (N, 2) and (M, 2), stored pixels.
        matches, geometry: of the pair.
        origin: rows of the last table, what and value.
        covariances: of the keypoints of each image, (N, 2, 2) stored pixels², NaN where they are not refined;
            None: none is.
    """
    verified = geometry.status != "not_estimated"
    inliers = geometry.inliers.tolist() if verified else [True] * len(matches)
    pairs = zip(matches.indices.tolist(), matches.scores.tolist(), inliers, strict=True)
    sides = zip(images, keypoints, matches.indices.T, covariances, strict=True)
    return {
        "chosen": None,
        "said": said(matches, geometry, [image.size for image in images]),
        "images": [_shown_image(*side) for side in sides],
        "enlarged": ENLARGED,
        "matches": [[i, j, round(score, 4), inner] for (i, j), score, inner in pairs],
        "layers": [],
        "origin": [[*row] for row in (*origin, ("geometry", f"{geometry.kind}: {geometry.status}"))],
    }


def said(matches: Matches, geometry: TwoViewGeometry, sizes: Sequence[tuple[int, int]]) -> str:
    """What was found, in a sentence or two for anybody."""
    text = (
        f"{len(matches)} {'point' if len(matches) == 1 else 'points'} of one image found again in the other"
    )
    if geometry.status == "ok":
        text += f", {int(geometry.inliers.sum())} of them as one scene seen from two places would have it"
    elif geometry.status != "not_estimated":
        text += ", but not as one scene seen from two places would have it"
    verdict = verdict_of(matches, geometry.rejected or geometry, *sizes)
    return f"{text}." if verdict is None else f"{text}: {verdict}."


def add_reasons(data: dict[str, Any], explanation: Explanation, config: NetworkConfig) -> None:
    """Add to `pair_data` the network's explanation of the pair."""
    counts = [len(image["points"]) for image in data["images"]]
    kind = "<u2" if sum(counts) < 2**16 - 1 else "<u4"
    for side, image in enumerate(data["images"]):
        shares = explanation.rollout[side]
        best = np.argsort(-shares, axis=1, kind="stable")[:, :SOURCES]
        weights = np.take_along_axis(shares, best, axis=1)
        largest = weights.max(axis=1, initial=1e-9)
        image |= {
            "fates": _fates(explanation.fates[side], [match[side] for match in data["matches"]]),
            "asked": explanation.asked[side].tolist(),
            "attention": [
                [_packed(layer.self_attention[side], kind), _packed(layer.cross_attention[side], kind)]
                for layer in explanation.layers
            ],
            "traced": explanation.traced[side].tolist(),
            "sources": [_base64(best.astype(kind)), _bytes(weights / largest[:, None] * 255)],
            "largest": np.round(largest, 5).tolist(),
            "reasons": {
                str(point): np.round(why, 6).tolist()
                for layer in explanation.layers
                for point, why in zip(
                    layer.pruned[side].tolist(), layer.reasons[side].astype(float), strict=True
                )
            },
        }
        image["candidates"] = _candidates(explanation.candidates[side], image["fates"])
    data |= {
        "wide": kind == "<u4",
        "heads": config.context.heads,
        "strongest": STRONGEST,
        "origins": min(SOURCES, sum(counts)),
        "entropyStep": _ENTROPY_STEP,
        "layers": [_layer(layer, kind) for layer in explanation.layers],
        "depth": config.context.depth,
        "threshold": config.policy.match_threshold,
        "unmatchedKnown": config.assignment.dustbin != "none",
        "tolerance": config.assignment.tolerance,
        "marginal": [float(f"{error:.3g}") for error in explanation.layers[-1].marginal_errors],
        "rules": rules(config),
        "partner": partner_words(config),
        "confident": confidence_thresholds(config),
    }


def _fates(fates: np.ndarray, matched: list[int]) -> list[int]:
    """Those of a network's explanation, but which points are matched is what the pipeline says.

    The explanation runs without compiled kernels, which round otherwise in bfloat16.
    """
    found = np.where(fates == MATCHED, UNMATCHED, fates)
    found[matched] = MATCHED
    return found.tolist()


def _candidates(found: Candidates, fates: list[int]) -> dict[str, list]:
    """Of each unmatched point: how likely no partner is, and candidates, each with its own best point."""
    columns = found.points, found.probabilities, found.rivals, found.rival_probabilities
    return {
        str(point): [
            round(float(found.unmatched[point]), 3),
            [[int(j), round(float(p), 3), int(i), round(float(q), 3)] for j, p, i, q in rows if j >= 0],
        ]
        for point, fate in enumerate(fates)
        if fate != MATCHED
        for rows in [zip(*(column[point] for column in columns), strict=True)]
    }


def covariances_of(matches: Matches, count: int) -> np.ndarray | None:
    """(count, 2, 2) of the keypoints of image 1, NaN for those that were not refined; None if none was."""
    if matches.refinement is None:
        return None
    found, accepted = np.full((count, 2, 2), np.nan), matches.refinement.accepted
    found[matches.indices[accepted, 1]] = matches.refinement.covariances[accepted]
    return found


def _shown_image(
    image: Image, keypoints: np.ndarray, matched: np.ndarray, covariances: np.ndarray | None
) -> dict[str, Any]:
    """A JPEG of the upright image, and the keypoints and their ellipses of uncertainty in its pixels."""
    height, width = image.pixels.shape[:2]
    factor = min(1.0, _SIDE_PAIR / max(height, width))
    shape = (max(1, round(width * factor)), max(1, round(height * factor)))
    shown = cv2.resize(image.pixels, shape, interpolation=cv2.INTER_AREA)
    shown = cv2.cvtColor(shown, cv2.COLOR_RGB2BGR) if shown.ndim == 3 else shown
    jpeg = cv2.imencode(".jpg", shown, [cv2.IMWRITE_JPEG_QUALITY, 80])[1].tobytes()
    upright = resize_points(stored_to_upright(keypoints, image.size, image.orientation), image.scale)
    positions = resize_points(upright, (shape[0] / width, shape[1] / height))
    fates = np.full(len(keypoints), UNMATCHED)
    fates[matched] = MATCHED
    return {
        "name": str(image.path),
        "size": shape,
        "jpeg": "data:image/jpeg;base64," + base64.b64encode(jpeg).decode(),
        "points": np.round(positions.astype(float), 1).tolist(),
        "fates": fates.tolist(),
        "ellipses": _ellipses(image, covariances, matched, (shape[0] / width, shape[1] / height)),
        "asked": [],
        "traced": [],
    }


def _ellipses(
    image: Image, covariances: np.ndarray | None, matched: np.ndarray, factor: tuple[float, float]
) -> list[list[float]]:
    """Of refined and matched keypoints: which, both radii, enlarged shown pixels, and angle in radians."""
    if covariances is None:
        return []
    points = np.unique(matched[np.isfinite(covariances[matched]).all(axis=(1, 2))])
    to_shown = np.diag(factor) @ np.linalg.inv(image.axes_to_stored)
    values, axes = np.linalg.eigh(to_shown @ covariances[points].astype(np.float64) @ to_shown.T)
    radii = ENLARGED * np.sqrt(values.clip(0))
    angles = np.arctan2(axes[:, 1, 1], axes[:, 0, 1])
    rows = zip(points.tolist(), radii[:, 1].tolist(), radii[:, 0].tolist(), angles.tolist(), strict=True)
    return [[point, round(long, 2), round(short, 2), round(angle, 3)] for point, long, short, angle in rows]


def _packed(attention: Attention, kind: str) -> list[str]:
    """Attended points (all bits set: none), roots of the weights in 255ths, entropies in steps."""
    absent = np.iinfo(kind[1:]).max
    points = np.where(attention.points < 0, absent, attention.points).astype(kind)
    roots = _bytes(np.sqrt(attention.weights) * 255)
    return [_base64(points), roots, _bytes(attention.entropy * _ENTROPY_STEP)]


def _bytes(values: np.ndarray) -> str:
    return _base64(np.round(values).clip(0, 255).astype(np.uint8))


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def _layer(layer: LayerReport, kind: str) -> dict[str, Any]:
    """One row of the table, the matches as they were, and a histogram of the points' confidences."""
    sure = layer.confidences
    alone = " / ".join("–" if share is None else f"{share:.0%}" for share in layer.unmatched)
    counts = None if sure is None else np.histogram(sure, np.linspace(0, 1, _BINS + 1))[0].tolist()
    return {
        "row": [
            len(layer.matches),
            layer.appeared,
            layer.vanished,
            "–" if layer.certain is None else f"{layer.certain:.1%}",
            "–" if layer.expected is None else f"{layer.expected:.0f}",
            alone,
            " / ".join(str(len(points)) for points in layer.pruned),
            "exit" if layer.exited else "",
        ],
        "matches": _base64(layer.matches.astype(kind)),
        "scores": _bytes(layer.scores * 255),
        "confidences": counts,
    }


_BUDGET = 1_800_000  # bytes of attention before base64 makes them a third more
_TRACED = 512  # points of an image whose rollout is kept: it takes as long as attention of all


def write_report(
    pipeline: Pipeline,
    image0: ImageInput,
    image1: ImageInput,
    path: str | Path,
    point: tuple[float, float] | None = None,
    *,
    mask0: Mask | None = None,
    mask1: Mask | None = None,
    overwrite: bool = False,
) -> Result:
    """Match two images and write the report; the file appears whole or not at all.

    Args:
        pipeline: one with a network; its first pass alone is run and explained.
        image0, image1: images.
        path: .html.
        point: stored pixels of image 0; its nearest keypoint is shown when the report opens.
        mask0, mask1: as `Pipeline.match` takes them.
        overwrite: replace an existing file that is no report; an earlier report is replaced in any case.

    Raises:
        UsageError: no network, a file that cannot or must not be written, a point outside image 0.
        ImageError: an image cannot be read.
    """
    path = check_output(path, (".html",), overwrite=overwrite)
    images = pipeline.read(image0), pipeline.read(image1)
    result = replace(pipeline, passes=None).match(image0, image1, mask0=mask0, mask1=mask1)
    write_output(path, report_page(pipeline, images, result, point))
    return result


def report_page(
    pipeline: Pipeline, images: tuple[Image, Image], result: Result, point: tuple[float, float] | None = None
) -> bytes:
    """The report of a pair that was matched, UTF-8.

    Args:
        pipeline: the one that matched it; it has a network.
        images: as it read them.
        result: of the pair; where further passes followed the first one, that one is explained.
        point: as in `write_report`.

    Raises:
        UsageError: no network, or a point outside image 0.
    """
    network = network_of(pipeline)
    result = result.first or result
    features, config = (result.features0, result.features1), pipeline.config.matcher
    chosen = None if point is None else nearest_keypoint(features[0], point)
    asked = _asked(network, result, chosen)
    traced = tuple(points[:_TRACED] for points in asked)
    explanation = explain(network, *features, *asked, strongest=STRONGEST, traced=traced)
    keypoints = [side.keypoints.cpu().numpy() for side in features]
    covariances = (None, covariances_of(result.matches, len(keypoints[1])))
    origin = _origin(pipeline, images)
    data = pair_data(images, keypoints, result.matches, result.geometry, origin, covariances)
    add_reasons(data, explanation, config)
    data |= {
        "chosen": chosen,
        "seconds": {name: round(value, 3) for name, value in result.seconds.items()},
        "configuration": to_dict(pipeline.config),
    }
    names = " and ".join("array" if image.path is None else Path(image.path).name for image in images)
    return build_page(names, SCRIPTS, BODY, data)


def _asked(network: AttentionMatcher, result: Result, chosen: int | None) -> list[list[int]]:
    """Points whose attention fits the budget: the chosen one, then the matched ones, then the others."""
    context = network.model.config.context
    attended = context.depth * 2 * context.heads * (STRONGEST * 3 + 1)
    limit = _BUDGET // (attended + SOURCES * 3) // 2
    asked = []
    for side, features in enumerate((result.features0, result.features1)):
        first = [] if chosen is None or side else [chosen]
        order = dict.fromkeys([*first, *result.matches.indices[:, side].tolist(), *range(len(features))])
        asked.append(list(order)[:limit])
    return asked


def _origin(pipeline: Pipeline, images: tuple[Image, Image]) -> list[tuple[str, str]]:
    source = pipeline.weights
    return [
        ("preset", pipeline.preset),
        ("weights", "none" if source is None else f"{source.name}, sha256 {source.sha256}"),
        ("image 0", str(images[0].path)),
        ("image 1", str(images[1].path)),
    ]


# --- The page of a run

BINS = (0, 1, 10, 20, 50, 100, 200, 500, 1000, 2000)  # least count of each bin of a histogram


@dataclass(frozen=True)
class PairRow:
    """A pair without its matches."""

    verified: bool  # a geometry was found, or none was asked for
    inliers: int  # matches, where no geometry was asked for
    matches: int
    name0: str
    name1: str
    status: str
    seconds: float


@dataclass
class RunStatistics:
    """What a page shows about a run: counts, and a limited number of rows."""

    limit: int  # rows kept of the weakest pairs
    edges: int  # rows kept of the pairs with most inliers
    pairs: int = 0
    seconds: float = 0.0
    verified_matches: int = 0  # inliers of the verified pairs
    statuses: Counter = field(default_factory=Counter)
    matches: Counter = field(default_factory=Counter)  # pairs by bin
    inliers: Counter = field(default_factory=Counter)
    degree: Counter = field(default_factory=Counter)  # verified pairs of each image
    tried: Counter = field(default_factory=Counter)  # pairs of each image
    weakest: list[PairRow] = field(default_factory=list)  # the weakest first, once all are added
    strongest: list[PairRow] = field(default_factory=list)  # the strongest first


def collect_statistics(pairs: Iterable[StoredPair], limit: int, edges: int) -> RunStatistics:
    """Go once over the pairs of a run.

    Args:
        pairs: as a store gives them.
        limit, edges: how many of the weakest and of the strongest are kept.
    """
    found = RunStatistics(limit, edges)
    weakest, strongest = [], []
    for pair in pairs:
        row = _row(pair)
        found.pairs += 1
        found.seconds += pair.seconds
        found.verified_matches += row.inliers if row.verified else 0
        found.statuses[row.status] += 1
        found.matches[bin_of(row.matches)] += 1
        found.inliers[bin_of(row.inliers)] += 1
        for name in (row.name0, row.name1):
            found.tried[name] += 1
            found.degree[name] += row.verified
        rank = (row.verified, row.inliers, row.matches)
        if row.verified:
            _keep(strongest, (*rank, found.pairs, row), edges)
        _keep(weakest, (*(-value for value in rank), -found.pairs, row), limit)
    found.strongest = [row for *_, row in sorted(strongest, reverse=True)]
    found.weakest = [row for *_, row in sorted(weakest, reverse=True)]
    return found


def _row(pair: StoredPair) -> PairRow:
    status, matches = pair.geometry.status, len(pair.matches)
    free = status == "not_estimated"
    inliers = matches if free else int(pair.geometry.inliers.sum())
    verified = matches > 0 if free else status == "ok"
    return PairRow(verified, inliers, matches, pair.name0, pair.name1, status, pair.seconds)


def _keep(heap: list, item: tuple, limit: int) -> None:
    """Keep the `limit` largest items; their keys, which come first, differ."""
    if len(heap) < limit:
        heapq.heappush(heap, item)
    elif limit and item > heap[0]:
        heapq.heapreplace(heap, item)


def bin_of(count: int) -> int:
    """Which of `BINS` a count falls into."""
    return max(number for number, least in enumerate(BINS) if count >= least)


PAGES = 20  # default number of pair pages
_TRACKED = 5_000_000  # verified matches whose tracks are joined, some seconds a million
_ROWS = 500  # of a table
_NODES, _EDGES = 400, 4000  # of the graph: what a page shows legibly and at once
_SIDE_RUN = 1024  # pixels, longer side of an image
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
        pixels = read_image(image.path, resize=_SIDE_RUN, upright=upright, max_pixels=limit_for(image.size))
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
            *(["reconstruction", str(folder)] for folder in _reconstructions(store.folder)),
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


def _reconstructions(run: Path) -> list[Path]:
    """Folders beside a run whose models were made from it."""
    run, found = run.resolve(), []
    for summary in sorted(run.parent.glob(f"*/{SUMMARY}")):
        named = read_summary(summary.parent).get("run")
        if isinstance(named, str) and os.path.normpath(summary.parent / named) == str(run):
            found.append(summary.parent)
    return found


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
