"""One self-contained HTML file that shows why two images matched: no network, no library, from disk."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from matcher.config import NetworkConfig
from matcher.errors import UsageError, counted
from matcher.files import check_output, write_output
from matcher.geometry import resize_points
from matcher.images import read_once
from matcher.match.adaptivity import confidence_threshold
from matcher.pipeline import ImageInput, Pipeline
from matcher.result import Result, agreement
from matcher.types import MATCHED, UNMATCHED, Features, Image, Matches, TwoViewGeometry
from matcher.verify.repetition import repeated_groups
from matcher.verify.verdict import verdict_of

if TYPE_CHECKING:
    from matcher.explain.explain import Attention, Explanation


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
    '<p id="said"></p><div id="controls"></div><div class="wide"><canvas id="view"></canvas></div>'
    '<p id="info"></p><div id="details"></div><p id="legend"></p><div id="tables"></div>'
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
    drawn = None
    if answers:
        from matcher.viz.drawings import draw_answers, figure_pixels  # which import matplotlib

        drawn = jpeg(figure_pixels(draw_answers(answers)))
    geometry, groups = geometry.without_rejected(), np.full(len(matches), -1)
    if features0 is not None and geometry.repetitive:
        groups = repeated_groups(features0)[matches.indices[:, 0]]
    inliers = geometry.inliers | (geometry.status == "not_estimated")
    rows = (matches.indices, matches.scores, inliers, groups)
    pairs = zip(*(values.tolist() for values in rows), strict=True)
    sides = []
    for image, found, matched, each in zip(images, keypoints, matches.indices.T, covariances, strict=True):
        height, width = image.pixels.shape[:2]
        ratio = min(1.0, 1024 / max(height, width))
        shape = (max(1, round(width * ratio)), max(1, round(height * ratio)))
        factor, ellipses = (shape[0] / width, shape[1] / height), []
        shown = {"points": found, "overlay": matches.overlay[:, len(sides)]}
        for name, points in shown.items():
            shown[name] = np.round(resize_points(image.from_stored(points), factor), 1).tolist()
        fates = np.full(len(found), UNMATCHED)
        fates[matched] = MATCHED
        if each is not None:  # which, both radii, enlarged, and angle in radians
            points = np.unique(matched[np.isfinite(each[matched]).all(axis=(1, 2))])
            to_shown = np.diag(factor) @ np.linalg.inv(image.axes_to_stored)
            values, axes = np.linalg.eigh(to_shown @ each[points].astype(np.float64) @ to_shown.T)
            radii = ENLARGED * np.sqrt(values.clip(0))
            angles = np.arctan2(axes[:, 1, 1], axes[:, 0, 1])
            columns = (points, *np.round((radii[:, 1], radii[:, 0]), 2), np.round(angles, 3))
            ellipses = [list(row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        side = {
            "name": str(image.path),
            "size": shape,
            "jpeg": jpeg(cv2.resize(image.pixels, shape, interpolation=cv2.INTER_AREA)),
            **shown,
            "fates": fates.tolist(),
            "ellipses": ellipses,
        }
        sides.append(side | {"asked": [], "traced": []})
    return {
        "chosen": None,
        "said": said(matches, geometry, [image.size for image in images]),
        "images": sides,
        "enlarged": ENLARGED,
        "matches": [[i, j, round(score, 4), *more] for (i, j), score, *more in pairs],
        "answers": drawn,
        "layers": [],
        "origin": [*origin, ("geometry", f"{geometry.kind}: {geometry.described}")],
    }


def said(matches: Matches, geometry: TwoViewGeometry, sizes: Sequence[tuple[int, int]]) -> str:
    """What was found, in a sentence or two."""
    verdict = verdict_of(matches, geometry.rejected or geometry, *sizes)
    count = counted(len(matches), "match", "matches")
    count += f" without {len(matches.overlay)} of an overlay on both" * bool(len(matches.overlay))
    found = agreement(matches, geometry, verdict).removeprefix("no match: ")
    return f"{'; '.join(filter(None, (count, found, verdict and str(verdict))))}."


def add_reasons(data: dict[str, Any], explanation: Explanation, config: NetworkConfig) -> None:
    """Add to `pair_data` the network's explanation of the pair."""
    from matcher.match.sinkhorn import CHECKED  # torch, which pages without an explanation do without

    counts = [len(image["points"]) for image in data["images"]]
    kind, depth = "<u2" if sum(counts) < 2**16 - 1 else "<u4", config.context.depth

    def packed(attention: Attention) -> list[str]:
        """Attended points (all bits set: none), roots of the weights in 255ths, entropies in steps."""
        points = np.where(attention.points < 0, np.iinfo(kind[1:]).max, attention.points)
        roots = _bytes(np.sqrt(attention.weights) * 255)
        return [_base64(points.astype(kind)), roots, _bytes(attention.entropy * _ENTROPY_STEP)]

    for side, image in enumerate(data["images"]):
        shares = explanation.rollout[side]
        best = np.argsort(-shares, axis=1, kind="stable")[:, :SOURCES]
        weights = np.take_along_axis(shares, best, axis=1)
        largest = weights.max(axis=1, initial=1e-9)
        # The explanation runs without compiled kernels, which round otherwise in bfloat16: which points are
        # matched is what the pipeline says.
        fates = np.where(explanation.fates[side] == MATCHED, UNMATCHED, explanation.fates[side])
        fates[[match[side] for match in data["matches"]]] = MATCHED
        candidates = {}  # of each unmatched point
        for point in np.flatnonzero(fates != MATCHED).tolist():
            alone, known = explanation.candidates[side].get(point, (1.0, ()))
            known = [[j, round(p, 3), i, round(q, 3)] for j, p, i, q in known]
            candidates[str(point)] = [round(alone, 3), known]
        image |= {
            "fates": fates.tolist(),
            "asked": explanation.asked[side].tolist(),
            "attention": [
                [packed(layer.self_attention[side]), packed(layer.cross_attention[side])]
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
            "candidates": candidates,
        }
    layers = []
    for layer in explanation.layers:
        # A row of the table, the matches as they were, and a histogram of the points' confidences.
        row = [len(layer.matches), layer.appeared, layer.vanished, layer.certain, layer.expected]
        row += [layer.unmatched, [len(points) for points in layer.pruned], layer.exited]
        sure = layer.confidences
        sure = None if sure is None else np.histogram(sure, np.linspace(0, 1, 21))[0].tolist()
        then = {"matches": _base64(layer.matches.astype(kind)), "scores": _bytes(layer.scores * 255)}
        layers.append({"row": row, **then, "confidences": sure})
    data |= {
        "wide": kind == "<u4",
        "strongest": STRONGEST,
        "origins": min(SOURCES, sum(counts)),
        "entropyStep": _ENTROPY_STEP,
        "layers": layers,
        "looks": CHECKED,
        "marginal": [
            float(f"{error:.3g}") for error in explanation.layers[-1].marginal_errors if math.isfinite(error)
        ],
        "confident": [confidence_threshold(layer, depth) for layer in range(depth - 1)],
    }


def jpeg(pixels: np.ndarray) -> str:
    """A grey or RGB image as an address that holds it."""
    pixels = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR) if pixels.ndim == 3 else pixels
    coded = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, 80])[1]
    return f"data:image/jpeg;base64,{_base64(coded)}"


def _bytes(values: np.ndarray) -> str:
    return _base64(np.round(values).clip(0, 255).astype(np.uint8))


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def write_report(
    pipeline: Pipeline,
    image0: ImageInput,
    image1: ImageInput,
    path: str | Path,
    point: tuple[float, float] | None = None,
    *,
    overwrite: bool = False,
    **given: Any,
) -> Result:
    """Match two images, `given` masks and cameras as `Pipeline.match` takes them, and write `report_page` as
    .html; the file appears whole or not at all, and `overwrite` lets it replace one that is no report."""
    path = check_output(path, (".html",), overwrite=overwrite)
    images = read_once(image0), read_once(image1)
    result = pipeline.match(*images, **given)
    write_output(path, report_page(pipeline, tuple(map(pipeline.read, images)), result, point))
    return result


def report_page(
    pipeline: Pipeline, images: tuple[Image, Image], result: Result, point: tuple[float, float] | None = None
) -> bytes:
    """The report, UTF-8, of a pair that this pipeline has read and matched; its first pass is explained, and
    of the keypoint nearest to a point (stored pixels of image 0) first. `UsageError`: no network, or a point
    outside image 0."""
    from matcher.explain.explain import explain, nearest_keypoint
    from matcher.match.network import AttentionMatcher  # torch, which reports of runs do without

    network, whole = pipeline.matcher, result
    if not isinstance(network, AttentionMatcher):
        raise UsageError(f"preset {pipeline.preset!r} has no network to explain; choose one that has")
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
        "configuration": asdict(pipeline.config),
    }
    names = " and ".join("array" if image.path is None else Path(image.path).name for image in images)
    return build_page(names, SCRIPTS, BODY, data)
