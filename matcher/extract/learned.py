"""Our own front end: a small convolutional network that detects and describes keypoints.

The score of a pixel is the logit of the probability that a point there is found again in another view of the
scene and matched by its descriptor. A point's position is the centroid of the softmax of the scores around it
(as in ALIKE, Zhao et al. 2022, section III-B), and its descriptor is made of what the maps of all resolutions
hold at that position; nothing is described that is not a point.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from matcher.config import ExtractorConfig
from matcher.data.image import Image
from matcher.extract.feature_network import FeatureNetwork
from matcher.extract.on_device import allowed_pixels, best_pixels, inner_pixels, read_together
from matcher.extract.shared import Found, FrontEnd, grey, strongest
from matcher.kernels.maps import peaks_compiled
from matcher.kernels.trials import Trial

NMS_RADIUS = 3  # pixels within which a point scores highest
SCORE_THRESHOLD = 0.004  # below it lie noise and plain surfaces; rooms with few keypoints need those above
BORDER = 4  # pixels along the edge without points
WINDOW = 5  # pixels a side, in which a point's position is refined


def peaks(logits: Tensor, radius: int) -> Tensor:
    """(B, H, W) bool: pixels that are the largest within `radius` pixels in x and y."""
    return logits == _running_maximum(_running_maximum(logits, radius).mT, radius).mT


def candidates(logits: Tensor, radius: int, border: int) -> Tensor:
    """(B, H, W) bool: peaks that are `border` pixels or more away from the edge."""
    return peaks(logits, radius) & inner_pixels(logits, border)


def _running_maximum(rows: Tensor, radius: int) -> Tensor:
    """(…, W) → the largest within `radius` columns, by windows of doubling width."""
    side = 2 * radius + 1
    rows, width = pad(rows, (radius, radius), value=-torch.inf), 1
    while width < side:
        step = min(width, side - width)
        rows, width = torch.maximum(rows[..., :-step], rows[..., step:]), width + step
    return rows


def refine(logits: Tensor, points: Tensor) -> Tensor:
    """(B, N, 2) int64 xy → float32 xy: the centroid of the softmax of the logits in each one's window."""
    offsets = torch.arange(WINDOW, device=logits.device) - WINDOW // 2
    dy, dx = (grid.flatten() for grid in torch.meshgrid(offsets, offsets, indexing="ij"))
    height, width = logits.shape[1:]
    x, y = points[..., 0, None] + dx, points[..., 1, None] + dy
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    place = y.clamp(0, height - 1) * width + x.clamp(0, width - 1)
    around = logits.flatten(1).gather(1, place.flatten(1)).view(place.shape)
    weight = around.masked_fill(~inside, -torch.inf).softmax(dim=-1)
    return points + torch.stack([(weight * dx).sum(-1), (weight * dy).sum(-1)], dim=-1)


def _build(_: ExtractorConfig) -> nn.Module:
    return FeatureNetwork()


def _find_together(network: FeatureNetwork, images: Sequence[Image], config: ExtractorConfig) -> list[Found]:
    """Points of images of one size."""
    device = network.points.weight.device
    logits, maps = network(torch.cat([grey(image, device) for image in images]))
    if device.type == "cuda":
        return _points_of_all(network, logits, maps, images, config)
    return [
        _points_of(network, logits[b : b + 1], [level[b : b + 1] for level in maps], image, config)
        for b, image in enumerate(images)
    ]


def _points_of_all(
    network: FeatureNetwork,
    logits: Tensor,
    maps: list[Tensor],
    images: Sequence[Image],
    config: ExtractorConfig,
) -> list[Found]:
    """The best points of images of one size, as many of each, so that a GPU is read only once."""
    logits = logits.contiguous()
    keep = candidates(logits, config.nms_radius, config.border) & allowed_pixels(images, logits.device)
    points, scores = best_pixels(logits.sigmoid(), keep, config.score_threshold, config.max_keypoints)
    refined = refine(logits, points)
    return read_together(refined, scores, network.describe(maps, refined), config.score_threshold)


def _points_of(
    network: FeatureNetwork, logits: Tensor, maps: list[Tensor], image: Image, config: ExtractorConfig
) -> Found:
    """The best points of one image, refined and described."""
    points = peaks_compiled(logits[0], config.nms_radius, config.border, try_peaks)
    if points is None:
        points = candidates(logits, config.nms_radius, config.border)[0].nonzero().flip(1)
    scores = logits[0, points[:, 1], points[:, 0]].sigmoid()
    found = (scores > config.score_threshold).nonzero()[:, 0]
    index = found[strongest(points[found].float(), scores[found], image, config.max_keypoints)]
    refined = refine(logits, points[None, index])
    return Found(refined[0], scores[index], network.describe(maps, refined)[0])


def try_peaks() -> Trial:
    """Peaks of a small image."""
    logits = torch.randn(240, 320, generator=torch.Generator().manual_seed(0))
    return Trial(
        lambda: peaks_compiled(logits, NMS_RADIUS, BORDER, try_peaks),
        lambda: candidates(logits[None], NMS_RADIUS, BORDER)[0].nonzero().flip(1),
        0.0,
    )


FRONT_ENDS = {
    "learned": FrontEnd(
        _build,
        None,
        {"score_threshold": SCORE_THRESHOLD, "nms_radius": NMS_RADIUS, "border": BORDER},
        _find_together,
    )
}
