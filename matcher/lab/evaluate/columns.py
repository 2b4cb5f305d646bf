"""The columns of the tables: for each protocol, which metrics are reported and how they are averaged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from matcher.lab.evaluate.bootstrap import Statistic, mean, median
from matcher.lab.evaluate.metrics import auc


@dataclass(frozen=True)
class Column:
    """A metric and the statistic over pairs that summarises it."""

    title: str
    key: str  # of the metric in `measure_pair`
    statistic: Statistic = mean
    digits: int = 3
    headline: bool = False  # reported with its interval, in the comparison with the baseline, and by group


@dataclass(frozen=True)
class _AucUpTo:
    """The area under the cumulative curve of errors up to a threshold."""

    threshold: float

    def __call__(self, values: np.ndarray) -> np.ndarray:
        return auc(values, self.threshold)


_COST = (
    Column("matches", "matches", digits=0),
    Column("layers", "layers", digits=2),
    Column("keypoints kept", "kept", digits=2),
    Column("passes", "passes", digits=2),
    Column("ms", "milliseconds", median, digits=1),
)
_STATUS = "`accepted` is the share of pairs whose geometry has status ok in a result; AUC counts all"
_MATCHES = (
    Column("precision@1 px", "precision1"),
    Column("precision@3 px", "precision3", headline=True),
    Column("recall@1 px", "recall1"),
    Column("recall@3 px", "recall3", headline=True),
)
_ACCEPTED = Column("accepted", "accepted")
_POSE = (
    Column("AUC@5°", "error", _AucUpTo(5), headline=True),
    Column("AUC@10°", "error", _AucUpTo(10), headline=True),
    Column("AUC@20°", "error", _AucUpTo(20), headline=True),
)
COLUMNS: dict[str, tuple[Column, ...]] = {
    "homography": (
        Column("AUC@1 px", "error", _AucUpTo(1), headline=True),
        Column("AUC@3 px", "error", _AucUpTo(3), headline=True),
        Column("AUC@5 px", "error", _AucUpTo(5), headline=True),
        Column("AUC@10 px", "error", _AucUpTo(10), headline=True),
        *_MATCHES,
        Column("correct@3 px", "correct", digits=0),
        Column("error of correct matches, px", "residual", digits=2),
        Column("repeatability@3 px", "repeatability"),
        _ACCEPTED,
        *_COST,
    ),
    "pose": (
        *_POSE,
        Column("epipolar precision@1 px", "precision1"),
        Column("epipolar precision@3 px", "precision3", headline=True),
        _ACCEPTED,
        *_COST,
    ),
    "depth": (
        *_POSE,
        Column("precision@3 px", "precision3", headline=True),
        Column("recall@3 px", "recall3", headline=True),
        Column("correct@3 px", "correct", digits=0),
        Column("precision@10 px", "precision10"),
        Column("correct@10 px", "correct10", digits=0),
        _ACCEPTED,
        *_COST,
    ),
    "correspondences": (
        *_MATCHES,
        Column("labels@3 px", "labels3", headline=True),
        Column("mAA@10 px", "labels10", headline=True),
        *_COST,
    ),
    "unrelated": (
        Column("matches, median", "matches", median, digits=1, headline=True),
        Column("accepted", "accepted", headline=True),
        *_COST,
    ),
}
MEANING = {
    "homography": "AUC is that of the mean corner error in image 1. Precision and recall use the mean "
    "reprojection error of both directions. Ground-truth matches are mutual nearest keypoints under the "
    "ground truth; one counts as found if either of its keypoints has a correct match, as detectors may put "
    "several keypoints at one position. Repeatability is the share of covisible keypoints that are "
    "detected in the other image within 3 px. The oracle returns all ground-truth matches within 3 px; a "
    "method that keeps only the most accurate matches can exceed its AUC on easy views. " + _STATUS,
    "pose": "AUC is that of max(rotation error, translation direction error), the sign of the translation "
    "ignored. Precision uses the symmetric epipolar distance. " + _STATUS,
    "depth": "AUC is that of max(rotation error, translation direction error), the sign of the translation "
    "ignored. Precision and recall use the reprojection error in image 1: matches of points that are "
    "occluded in image 1 are wrong; matches of points with unknown depth or at depth edges are not counted. "
    "`correct` is the number of correct matches. " + _STATUS,
    "correspondences": "Matches of unlabelled pixels are not counted; with sparse labels, precision and "
    "recall are undefined. `labels` is the share of labelled points within 3 px of the epipolar lines of the "
    "estimated fundamental matrix; mAA@10 px is its mean over 1, 2, … 10 px, as WxBS reports it",
    "unrelated": "The images show different things, so every match is wrong. `accepted` is the share of "
    "pairs whose estimated geometry has status ok",
}
