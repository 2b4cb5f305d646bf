"""What the page of a pair shows, ready for JSON: images, keypoints, matches and, if explanation, why."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from matcher.config import NetworkConfig
from matcher.data.geometry import resize_points, stored_to_upright
from matcher.data.image import Image
from matcher.data.matches import MATCHED, UNMATCHED, Matches, TwoViewGeometry
from matcher.explain.rules import confidence_thresholds, partner_words, rules

if TYPE_CHECKING:  # these load torch, which the page of a run does without
    from matcher.explain.attention import Attention
    from matcher.explain.explain import Explanation
    from matcher.explain.layers import LayerReport

SCRIPTS = ("elements.js", "page.js", "reasons.js")
STRONGEST = 4  # attended points kept for each point, layer and head
SOURCES = 12  # points of the rollout kept for each point
BODY = (
    '<div id="controls"></div><canvas id="view"></canvas><p id="info">Click a keypoint.</p>'
    '<div id="details"></div><p id="legend"></p><div id="tables"></div>'
)
_SIDE = 1024  # pixels, longer side of an image in the report
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
        "images": [_shown_image(*side) for side in sides],
        "enlarged": ENLARGED,
        "matches": [[i, j, round(score, 4), inner] for (i, j), score, inner in pairs],
        "layers": [],
        "origin": [[*row] for row in (*origin, ("geometry", f"{geometry.kind}: {geometry.status}"))],
    }


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
    data |= {
        "wide": kind == "<u4",
        "heads": config.context.heads,
        "strongest": STRONGEST,
        "origins": min(SOURCES, sum(counts)),
        "entropyStep": _ENTROPY_STEP,
        "layers": [_layer(layer, kind) for layer in explanation.layers],
        "depth": config.context.depth,
        "threshold": config.policy.match_threshold,
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
    factor = min(1.0, _SIDE / max(height, width))
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
