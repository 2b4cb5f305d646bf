"""Images of a map worth matching with all keypoints, found by matching the strongest few first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from matcher.data.features import Features
from matcher.data.strongest import strongest, strongest_rows
from matcher.localization.sparse_map import SparseMap
from matcher.pipeline import Pipeline


def likely_images(
    pipeline: Pipeline,
    model: SparseMap,
    features: Callable[[str], Features],
    photo: Features,
    images: Sequence[int],
    *,
    keypoints: int,
    least: int,
) -> list[int]:
    """Those of whose points enough match a photo's strongest keypoints, the ones with most first.

    Most similar images of a photo that is hard to localise do not show its place. A network finds that out
    last: it uses all layers, and tries another turn. With a few hundred keypoints that costs a third or less
    (preemptive matching, Wu 2013).

    Args:
        pipeline: of the map.
        model: the map.
        features: of an image by name.
        photo: its features.
        images: rows of the model.
        keypoints: of the photo and of each image.
        least: matches with points of an image that is kept.
    """
    ours = strongest(photo, keypoints)
    theirs, rows = [], []
    for image in images:
        whole = features(model.names[image])
        rows.append(strongest_rows(whole, keypoints))
        theirs.append(whole.select(rows[-1]))
    found = pipeline.match_features_batch([(each, ours) for each in theirs])
    counts = [
        int(np.count_nonzero(model.points[image][row[matches.indices[:, 0]]] >= 0)) if len(matches) else 0
        for image, row, matches in zip(images, rows, found, strict=True)
    ]
    order = np.argsort(-np.array(counts, dtype=np.int64), kind="stable")
    return [images[index] for index in order if counts[index] >= least]
