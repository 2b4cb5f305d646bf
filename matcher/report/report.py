"""One self-contained HTML file that shows why two pictures matched: no network, no library, from disk."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from matcher.config import to_dict
from matcher.explain.attention import Attention
from matcher.explain.explain import Explanation, explain, nearest_keypoint
from matcher.files import check_output, write_whole
from matcher.geometry import resize_points, stored_to_upright
from matcher.network.inference import AttentionMatcher
from matcher.pipeline import Pipeline
from matcher.types import Image, Result, UsageError

_SIDE = 1024  # pixels, longer side of a picture in the report
_STRONGEST = 4  # attended points kept for each point, layer and head
_BUDGET = 1_800_000  # bytes of attention before base64 makes them a third more


def write_report(
    pipeline: Pipeline, image0: Path, image1: Path, path: str | Path, point: tuple[float, float] | None = None
) -> Result:
    """Match two pictures and write the report; the file appears whole or not at all.

    Args:
        pipeline: one with a network.
        image0, image1: pictures.
        path: .html; an existing file is replaced.
        point: stored pixels of image 0; its nearest keypoint is shown when the report opens.

    Raises:
        UsageError: no network, another suffix, a folder that is absent, a point outside image 0.
        ImageError: a picture cannot be read.
    """
    path = check_output(path, (".html",))
    if not isinstance(pipeline.matcher, AttentionMatcher):
        raise UsageError(f"preset {pipeline.preset!r} has no network to explain; choose one that has")
    images = pipeline.read(image0), pipeline.read(image1)
    result = pipeline.match(image0, image1)
    chosen = None if point is None else nearest_keypoint(result.features0, point)
    asked = _asked(pipeline, result, chosen)
    features = (result.features0, result.features1)
    told = explain(pipeline.matcher, *features, *asked, strongest=_STRONGEST, with_rollout=False)
    write_whole(path, _page(_data(pipeline, images, result, told, chosen)).encode())
    return result


def _asked(pipeline: Pipeline, result: Result, chosen: int | None) -> list[list[int]]:
    """Points whose attention fits the budget: the chosen one, then the matched ones, then the others."""
    context = pipeline.matcher.model.config.context
    limit = _BUDGET // (context.depth * 2 * context.heads * _STRONGEST * 3) // 2
    asked = []
    for side, features in enumerate((result.features0, result.features1)):
        first = [] if chosen is None or side else [chosen]
        order = dict.fromkeys([*first, *result.matches.indices[:, side].tolist(), *range(len(features))])
        asked.append(list(order)[:limit])
    return asked


def _data(
    pipeline: Pipeline, images: tuple[Image, Image], result: Result, told: Explanation, chosen: int | None
) -> dict[str, Any]:
    """All that the page shows, ready for JSON."""
    geometry, source = result.geometry, pipeline.weights
    verified = geometry.status != "not_estimated"
    inliers = geometry.inliers.tolist() if verified else [True] * len(result.matches)
    pairs = zip(result.matches.indices.tolist(), result.scores.tolist(), inliers, strict=True)
    sides = zip(images, (result.features0, result.features1), told.fates, told.asked, (0, 1), strict=True)
    return {
        "chosen": chosen,
        "images": [
            {
                **_picture(image, features.keypoints.cpu().numpy()),
                "fates": fates.tolist(),
                "asked": asked.tolist(),
                "heard": [
                    [_packed(layer.within[side]), _packed(layer.across[side])] for layer in told.layers
                ],
            }
            for image, features, fates, asked, side in sides
        ],
        "matches": [[i, j, round(score, 4), inner] for (i, j), score, inner in pairs],
        "heads": pipeline.matcher.model.config.context.heads,
        "strongest": _STRONGEST,
        "layers": [_layer(number, layer) for number, layer in enumerate(told.layers, 1)],
        "geometry": f"{geometry.kind}: {geometry.status}",
        "seconds": {name: round(value, 3) for name, value in result.seconds.items()},
        "preset": pipeline.preset,
        "weights": "none" if source is None else f"{source.name}, sha256 {source.sha256}",
        "configuration": to_dict(pipeline.config),
    }


def _picture(image: Image, keypoints: np.ndarray) -> dict[str, Any]:
    """A JPEG of the upright picture, and the keypoints in its pixels."""
    height, width = image.pixels.shape[:2]
    factor = min(1.0, _SIDE / max(height, width))
    shape = (max(1, round(width * factor)), max(1, round(height * factor)))
    shown = cv2.resize(image.pixels, shape, interpolation=cv2.INTER_AREA)
    shown = cv2.cvtColor(shown, cv2.COLOR_RGB2BGR) if shown.ndim == 3 else shown
    jpeg = cv2.imencode(".jpg", shown, [cv2.IMWRITE_JPEG_QUALITY, 80])[1].tobytes()
    upright = resize_points(stored_to_upright(keypoints, image.size, image.orientation), image.scale)
    places = resize_points(upright, (shape[0] / width, shape[1] / height))
    return {
        "name": str(image.path),
        "size": shape,
        "jpeg": "data:image/jpeg;base64," + base64.b64encode(jpeg).decode(),
        "points": np.round(places, 1).tolist(),
    }


def _packed(attention: Attention) -> list[str]:
    """Attended points as little-endian uint16 (65535: none) and weights in 255ths, in base64."""
    points = np.where(attention.points < 0, 65535, attention.points).astype("<u2")
    weights = np.round(attention.weights * 255).clip(0, 255).astype(np.uint8)
    return [base64.b64encode(array.tobytes()).decode() for array in (points, weights)]


def _layer(number: int, layer: Any) -> list[str]:
    sure = "–" if layer.confident is None else f"{layer.confident:.0%}"
    alone = " / ".join(f"{share:.0%}" for share in layer.unmatched)
    pruned = " / ".join(str(len(points)) for points in layer.pruned)
    counts = [number, len(layer.matches), layer.appeared, layer.vanished]
    return [*map(str, counts), sure, alone, pruned, "yes" if layer.exited else ""]


def _page(data: dict[str, Any]) -> str:
    """The page; its policy allows its own script and style, by their hashes, and pictures inside the file."""
    style, script = (Path(__file__).with_name(f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    allowed = [
        "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"
        for text in (script, style)
    ]
    policy = f"default-src 'none'; img-src data:; script-src {allowed[0]}; style-src {allowed[1]}"
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    title = html.escape(" and ".join(Path(image["name"]).name for image in data["images"]))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">'
        f"<title>{title}</title><style>{style}</style><h1>{title}</h1>"
        f'<div id="controls"></div><canvas id="view"></canvas><p id="info">Click a keypoint.</p>'
        f'<div id="tables"></div><script type="application/json" id="data">{text}</script>'
        f"<script>{script}</script></html>"
    )
