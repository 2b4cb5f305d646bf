"""What a program gives as pairs of features, checked before they are stacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matcher.data.features import Features
from matcher.errors import UsageError


def checked_pairs(pairs: Any) -> Sequence[tuple[Features, Features]]:
    """The pairs, if each is two `Features` of one image.

    Raises:
        UsageError: no list or tuple, an entry that is no pair of `Features`, or a batch.
    """
    if not isinstance(pairs, (list, tuple)):
        raise UsageError(f"pairs must be a list of pairs of Features, not {type(pairs).__name__}")
    for number, pair in enumerate(pairs):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            what = f"{len(pair)} of them" if isinstance(pair, (list, tuple)) else type(pair).__name__
            raise UsageError(f"pairs[{number}] must be two Features, not {what}")
        for features in pair:
            if not isinstance(features, Features):
                raise UsageError(f"pairs[{number}] must be two Features, not {type(features).__name__}")
            if features.keypoints.ndim != 2:
                raise UsageError(
                    "features of one image each are needed, keypoints (N, 2); take a batch apart by unstack()"
                )
    return pairs


def one_for_each(found: Any, kind: type, count: int, role: str, part: object) -> list[Any]:
    """What a part of a pipeline, perhaps a user's own, returned for `count` images or pairs, as a list.

    Raises:
        UsageError: there is not one object of this kind for each.
    """
    listed = list(found)
    if len(listed) != count or not all(isinstance(each, kind) for each in listed):
        what = {"extractor": "image", "matcher": "pair"}[role]
        name = type(part).__name__
        raise UsageError(f"the {role} {name} must return a list with one {kind.__name__} for every {what}")
    return listed
