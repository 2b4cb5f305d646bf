"""One self-contained HTML file that shows why two images matched: no network, no library, from disk."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from matcher.config import NetworkConfig, to_dict
from matcher.errors import counted
from matcher.files import check_output, write_output
from matcher.geometry import resize_points, stored_to_upright
from matcher.match.adaptivity import confidence_threshold
from matcher.pipeline import ImageInput, Mask, Pipeline
from matcher.result import Result
from matcher.types import MATCHED, UNMATCHED, Features, Image, Matches, TwoViewGeometry
from matcher.verify.verdict import repeated_groups, verdict_of

if TYPE_CHECKING:
    from matcher.explain.explain import Attention, Candidates, Explanation, LayerReport


def build_page(title: str, scripts: Sequence[str], body: str, data: dict[str, Any]) -> bytes:
    """A page of one file, UTF-8: its style, script and data inside, and a policy that allows nothing else.

    The scripts, files beside this one, run one after another, read the data and fill the body. Foreign names
    belong into the data, which the script shows as text, or the title, which is escaped.
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
ENLARGED = 20  # ellipses of uncertainty: a tenth of a pixel could not be seen
_ENTROPY_STEP = 16  # of entropies: sixteenths of a nat


def pair_data(
    images: Sequence[Image],
    keypoints: Sequence[np.ndarray],
    matches: Matches,
    geometry: TwoViewGeometry,
    origin: Sequence[tuple[str, str]],
    covariances: Sequence[np.ndarray | None] = (None, None),
    features0: Features | None = None,
    answers: Sequence[tuple[np.ndarray, np.ndarray]] = (),
) -> dict[str, Any]:
    """A pair without reasons, as a store keeps it.

    `images` at the size in which they are shown or larger; `keypoints` (N, 2) in stored pixels, `covariances`
    (N, 2, 2) of them, NaN or None where they are not refined; `origin` is the last table, what and value;
    `features0` show what looks alike where most matches are of that; `answers` as of `draw_answers`.
    """
    from matcher.viz.drawings import draw_answers, figure_pixels

    geometry, groups = geometry.without_rejected(), np.full(len(matches), -1)
    repeated = (geometry.rejected or geometry).repetition
    if features0 is not None and repeated is not None and repeated.repetitive:
        groups = repeated_groups(features0)[matches.indices[:, 0]]
    inliers = geometry.inliers | (geometry.status == "not_estimated")
    rows = (matches.indices, matches.scores, inliers, groups)
    pairs = zip(*(values.tolist() for values in rows), strict=True)
    sides = zip(images, keypoints, matches.indices.T, covariances, strict=True)
    return {
        "chosen": None,
        "said": said(matches, geometry, [image.size for image in images]),
        "images": [_shown_image(*side) for side in sides],
        "enlarged": ENLARGED,
        "matches": [[i, j, round(score, 4), *more] for (i, j), score, *more in pairs],
        "answers": _jpeg(figure_pixels(draw_answers(answers))) if answers else None,
        "layers": [],
        "origin": [
            *origin,
            ("geometry", f"{geometry.kind}: {geometry.status}" + ", planar" * geometry.planar),
        ],
    }


def said(matches: Matches, geometry: TwoViewGeometry, sizes: Sequence[tuple[int, int]]) -> str:
    """What was found, in a sentence or two for anybody."""
    text = f"{counted(len(matches), 'point')} of one image found again in the other"
    verdict = verdict_of(matches, geometry.rejected or geometry, *sizes)
    inliers = int(geometry.inliers.sum())
    if geometry.status in ("ambiguous", "degenerate") and geometry.verified:
        text += f", {inliers} of them on one plane ({geometry.status}: no pose follows)"
    elif geometry.status != "not_estimated":
        place = "as one scene seen from two places would have it"
        how = "but not" if verdict is None or verdict.word == "not" else "too few of them"
        text += f", {f'{inliers} of them' if geometry.verified else how} {place}"
    return f"{text}." if verdict is None else f"{text}: {verdict}."


def add_reasons(data: dict[str, Any], explanation: Explanation, config: NetworkConfig) -> None:
    """Add to `pair_data` the network's explanation of the pair."""
    from matcher.explain.explain import partner_words, rules

    counts = [len(image["points"]) for image in data["images"]]
    kind, depth = "<u2" if sum(counts) < 2**16 - 1 else "<u4", config.context.depth
    for side, image in enumerate(data["images"]):
        shares = explanation.rollout[side]
        best = np.argsort(-shares, axis=1, kind="stable")[:, :SOURCES]
        weights = np.take_along_axis(shares, best, axis=1)
        largest = weights.max(axis=1, initial=1e-9)
        # The explanation runs without compiled kernels, which round otherwise in bfloat16: which points are
        # matched is what the pipeline says.
        fates = np.where(explanation.fates[side] == MATCHED, UNMATCHED, explanation.fates[side])
        fates[[match[side] for match in data["matches"]]] = MATCHED
        image |= {
            "fates": fates.tolist(),
            "asked": explanation.asked[side].tolist(),
            "attention": [
                [_packed(layer.self_attention[side], kind), _packed(layer.cross_attention[side], kind)]
                for layer in explanation.layers
            ],
            "traced": explanation.traced[side].tolist(),
            "sources": [_base64(best.astype(kind)), _bytes(weights / largest[:, None] * 255)],
            "largest": np.round(largest, 5).tolist(),
            "reasons": {
                str(point): np.round(why.astype(float), 6).tolist()
                for layer in explanation.layers
                for point, why in zip(layer.pruned[side].tolist(), layer.reasons[side], strict=True)
            },
            "candidates": _candidates(explanation.candidates[side], fates),
        }
    data |= {
        "wide": kind == "<u4",
        "heads": config.context.heads,
        "strongest": STRONGEST,
        "origins": min(SOURCES, sum(counts)),
        "entropyStep": _ENTROPY_STEP,
        "layers": [_layer(layer, kind) for layer in explanation.layers],
        "depth": depth,
        "threshold": config.policy.match_threshold,
        "unmatchedKnown": config.assignment.dustbin != "none",
        "tolerance": config.assignment.tolerance,
        "marginal": [float(f"{error:.3g}") for error in explanation.layers[-1].marginal_errors],
        "rules": rules(config),
        "partner": partner_words(config),
        "confident": [confidence_threshold(layer, depth) for layer in range(depth - 1)],
    }


def _candidates(found: Candidates, fates: np.ndarray) -> dict[str, list]:
    """Of each unmatched point: how likely no partner is, and candidates, each with its own best point."""
    columns = found.points, found.probabilities, found.rivals, found.rival_probabilities
    told = {}
    for point in np.flatnonzero(fates != MATCHED).tolist():
        rows = zip(*(column[point].tolist() for column in columns), strict=True)
        known = [[j, round(p, 3), i, round(q, 3)] for j, p, i, q in rows if j >= 0]
        told[str(point)] = [round(float(found.unmatched[point]), 3), known]
    return told


def _shown_image(
    image: Image, keypoints: np.ndarray, matched: np.ndarray, covariances: np.ndarray | None
) -> dict[str, Any]:
    """A JPEG of the upright image, and the keypoints and their ellipses of uncertainty in its pixels."""
    height, width = image.pixels.shape[:2]
    factor = min(1.0, 1024 / max(height, width))
    shape = (max(1, round(width * factor)), max(1, round(height * factor)))
    shown = cv2.resize(image.pixels, shape, interpolation=cv2.INTER_AREA)
    upright = resize_points(stored_to_upright(keypoints, image.size, image.orientation), image.scale)
    positions = resize_points(upright, (shape[0] / width, shape[1] / height))
    fates = np.full(len(keypoints), UNMATCHED)
    fates[matched] = MATCHED
    return {
        "name": str(image.path),
        "size": shape,
        "jpeg": _jpeg(shown),
        "points": np.round(positions.astype(float), 1).tolist(),
        "fates": fates.tolist(),
        "ellipses": _ellipses(image, covariances, matched, (shape[0] / width, shape[1] / height)),
        "asked": [],
        "traced": [],
    }


def _jpeg(pixels: np.ndarray) -> str:
    """A grey or RGB image as an address that holds it."""
    pixels = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR) if pixels.ndim == 3 else pixels
    coded = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, 80])[1]
    return "data:image/jpeg;base64," + base64.b64encode(coded.tobytes()).decode()


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
    counts = None if sure is None else np.histogram(sure, np.linspace(0, 1, 21))[0].tolist()
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
        pipeline: one with a network; its first pass is explained.
        image0, image1, mask0, mask1: as `Pipeline.match` takes them.
        path: .html.
        point: stored pixels of image 0; its nearest keypoint is shown when the report opens.
        overwrite: replace an existing file that is no report; an earlier report is replaced in any case.

    Raises:
        UsageError: no network, a file that cannot or must not be written, a point outside image 0.
        ImageError: an image cannot be read.
    """
    path = check_output(path, (".html",), overwrite=overwrite)
    images = pipeline.read(image0), pipeline.read(image1)
    result = pipeline.match(image0, image1, mask0=mask0, mask1=mask1)
    write_output(path, report_page(pipeline, images, result, point))
    return result


def report_page(
    pipeline: Pipeline, images: tuple[Image, Image], result: Result, point: tuple[float, float] | None = None
) -> bytes:
    """The report, UTF-8, of a pair that this pipeline has read and matched; its first pass is explained.

    Raises:
        UsageError: no network, or a point outside image 0.
    """
    from matcher.explain.explain import explain, nearest_keypoint, network_of

    network, whole = network_of(pipeline), result
    result = result.first or result
    features, context = (result.features0, result.features1), network.model.config.context
    chosen = None if point is None else nearest_keypoint(features[0], point)
    # Points whose attention fits into 1.8 MB: the chosen one, then the matched ones, then the others.
    limit = 1_800_000 // (context.depth * 2 * context.heads * (STRONGEST * 3 + 1) + SOURCES * 3) // 2
    asked = []
    for side, found in enumerate(features):
        first = [] if chosen is None or side else [chosen]
        order = dict.fromkeys([*first, *result.matches.indices[:, side].tolist(), *range(len(found))])
        asked.append(list(order)[:limit])
    traced = tuple(points[:512] for points in asked)  # a rollout takes as long as attention of all
    explanation = explain(network, *features, *asked, strongest=STRONGEST, traced=traced)
    keypoints = [side.keypoints.cpu().numpy() for side in features]
    covariances, refinement = np.full((len(keypoints[1]), 2, 2), np.nan), result.matches.refinement
    if refinement is not None:
        accepted = result.matches.indices[refinement.accepted, 1]
        covariances[accepted] = refinement.covariances[refinement.accepted]
    source = pipeline.weights
    weights = "none" if source is None else f"{source.name}, sha256 {source.sha256}"
    files = [(f"image {side}", str(image.path)) for side, image in enumerate(images)]
    origin = [("preset", pipeline.preset), ("weights", weights), *files]
    shown = keypoints, result.matches, result.geometry, origin, (None, covariances)
    data = pair_data(images, *shown, result.features0, whole.answers())
    add_reasons(data, explanation, pipeline.config.matcher)
    if whole is not result:
        sizes = [image.size for image in images]
        data["said"] = (
            f"All {len(whole.passes)} passes: {said(whole.matches, whole.geometry, sizes)} The first alone, "
            f"which is explained here: {said(result.matches, result.geometry, sizes)}"
        )
    data |= {
        "chosen": chosen,
        "seconds": {name: round(value, 3) for name, value in result.seconds.items()},
        "configuration": to_dict(pipeline.config),
    }
    names = " and ".join("array" if image.path is None else Path(image.path).name for image in images)
    return build_page(names, SCRIPTS, BODY, data)
