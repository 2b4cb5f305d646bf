"""Clusters of images that see common points: similar images of several places are localised apart."""

from __future__ import annotations

from collections.abc import Sequence

from matcher.localization.sparse_map import SparseMap

MIN_SHARED = 10  # points that connect two images


def covisibility_clusters(model: SparseMap, images: Sequence[int]) -> list[list[int]]:
    """The images in groups connected by common points, as in hloc (Sarlin et al. 2019).

    Args:
        model: the map.
        images: rows, most similar first; images between them do not connect them.

    Returns:
        The groups, the one with most images first, each in the order given.
    """
    groups: list[list[int]] = []
    for image in images:
        joined, apart = [image], []
        for group in groups:
            if any(model.shared(image, other) >= MIN_SHARED for other in group):
                joined += group
            else:
                apart.append(group)
        groups = [*apart, joined]
    rank = {image: place for place, image in enumerate(images)}
    ordered = [sorted(group, key=rank.__getitem__) for group in groups]
    return sorted(ordered, key=lambda group: (-len(group), rank[group[0]]))
