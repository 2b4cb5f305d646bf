"""Matches of a pair and the geometry that they agree with; NumPy, K matches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from matcher.config import GeometryKind, GeometryStatus

if TYPE_CHECKING:
    import cv2

UNMATCHED = -1  # in place of a partner's index, and for keypoints without a match
MATCHED = 0  # among the fates of keypoints, beside UNMATCHED and n > 0: pruned after layer n


# What refinement did to a match: "refined", or why it was left as it was.
REFINEMENTS = ("refined", "outside", "no_map", "flat", "moved_far", "low_correlation", "not_converged")


@dataclass(frozen=True, eq=False, repr=False)
class MatchRefinement:
    """What least-squares matching on the images says of K matches (`Pipeline.refine`).

    Status 0 means that a match was refined. Otherwise it was left where it was, because

    - `outside`: half of the window around it is on no image, or masked;
    - `no_map`: the matches around it do not tell how its surroundings are deformed;
    - `flat`: there is no contrast around it;
    - `moved_far`: the windows would fit best where the match cannot be;
    - `low_correlation`: neither grey values nor gradients look alike there;
    - `not_converged`: there is no clear best place.
    """

    status: np.ndarray  # (K,) uint8, an index into `matcher.data.matches.REFINEMENTS`
    covariances: np.ndarray  # (K, 2, 2) float32 of points1, in stored pixels²; of an unrefined match a guess
    correlations: np.ndarray  # (K,) float32 of the windows, in [-1, 1]

    @property
    def accepted(self) -> np.ndarray:
        """(K,) bool: matches that were refined."""
        return self.status == 0

    def select(self, index: np.ndarray) -> MatchRefinement:
        """That of some matches, by indices or a mask."""
        return MatchRefinement(self.status[index], self.covariances[index], self.correlations[index])

    def to_arrays(self) -> dict[str, np.ndarray]:
        """What `Result.save` writes: `refinement`, the status by name, `covariances` and `correlations`."""
        names = np.array(REFINEMENTS)[self.status]
        return {"refinement": names, "covariances": self.covariances, "correlations": self.correlations}

    def counts(self) -> dict[str, int]:
        """The number of matches by status, those that occur."""
        found = np.bincount(self.status, minlength=len(REFINEMENTS)).tolist()
        return {name: count for name, count in zip(REFINEMENTS, found, strict=True) if count}

    def __repr__(self) -> str:
        counts = [f"{count} {name}" for name, count in self.counts().items()]
        return f"MatchRefinement({', '.join(counts) or 'none'})"


@dataclass(frozen=True, eq=False, repr=False)
class Matches:
    """Mutual matches of one pair, best first.

    >>> import numpy as np
    >>> from matcher import Matches
    >>> points = np.zeros((1, 2), np.float32)
    >>> Matches(np.array([[4, 7]]), points, points, np.array([0.75], np.float32))
    Matches(1 match, scores 0.75 to 0.75)
    """

    indices: np.ndarray  # (K, 2) int64 into the features of image 0 and 1
    points0: np.ndarray  # (K, 2) float32 stored pixels
    points1: np.ndarray  # (K, 2)
    # (K,) float32 in [0, 1]: the probability of being within 3 pixels where a preset is calibrated, given the
    # geometry once it is known; else what the network or the ratio test gave.
    scores: np.ndarray
    layers_run: int = 0
    kept0: int = 0  # points not pruned
    kept1: int = 0
    refinement: MatchRefinement | None = None  # None where the images were not looked at again
    prior: np.ndarray | None = None  # (K,) float32, see `prior_scores`; None: they are `scores`

    @classmethod
    def from_indices(
        cls, indices: np.ndarray, keypoints0: np.ndarray, keypoints1: np.ndarray, scores: np.ndarray
    ) -> Matches:
        """Matches from pairs of keypoint indices, sorted best first.

        >>> import numpy as np
        >>> from matcher import Matches
        >>> keypoints = np.arange(10.0).reshape(5, 2)
        >>> found = Matches.from_indices([[0, 1], [3, 2]], keypoints, keypoints, [0.5, 0.9])
        >>> found.points0.tolist(), found.scores.round(2).tolist()
        ([[6.0, 7.0], [0.0, 1.0]], [0.8999999761581421, 0.5])

        Args:
            indices: (K, 2) into keypoints0 and keypoints1; a keypoint occurs at most once on its side.
            keypoints0, keypoints1: (N, 2) and (M, 2) stored pixels, NumPy or torch.
            scores: (K,) in [0, 1].
        """
        indices = np.asarray(indices, dtype=np.int64).reshape(-1, 2)
        scores = np.asarray(scores, dtype=np.float32)
        order = np.argsort(-scores, kind="stable")
        indices, scores = indices[order], scores[order]
        keypoints0, keypoints1 = (np.asarray(k, dtype=np.float32) for k in (keypoints0, keypoints1))
        return cls(
            indices=indices,
            points0=keypoints0[indices[:, 0]],
            points1=keypoints1[indices[:, 1]],
            scores=scores,
            kept0=len(keypoints0),
            kept1=len(keypoints1),
        )

    @property
    def prior_scores(self) -> np.ndarray:
        """(K,) float32 in [0, 1] the scores from before a geometry is known, by which it weighs the matches.

        So does the verdict. They take account of refinement.
        """
        return self.scores if self.prior is None else self.prior

    @property
    def covariances(self) -> np.ndarray | None:
        """(K, 2, 2) of points1, in stored pixels², where the images were looked at again."""
        return None if self.refinement is None else self.refinement.covariances

    def __len__(self) -> int:
        """The number of matches K."""
        return len(self.indices)

    def __repr__(self) -> str:
        if not len(self):
            return "Matches(none)"
        count = "1 match" if len(self) == 1 else f"{len(self)} matches"
        layers = f", {self.layers_run} layers" if self.layers_run else ""
        return f"Matches({count}, scores {self.scores.min():.2f} to {self.scores.max():.2f}{layers})"

    def to_cv2(self) -> list[cv2.DMatch]:
        """OpenCV's matches, for `cv2.drawMatches`: query is image 0, train image 1, distance 1 − score.

        The indices are those of the features, so they fit `Features.to_cv2` of features without padding.
        """
        import cv2

        rows = zip(self.indices.tolist(), self.scores.tolist(), strict=True)
        return [cv2.DMatch(query, train, 1.0 - score) for (query, train), score in rows]


@dataclass(frozen=True, eq=False, repr=False)
class TwoViewGeometry:
    """A model of how two views relate, or the reason why there is none.

    `status` is whether to use the model:

    - `ok`: use it.
    - `low_inliers`: a model with fewer inliers than required, or no more than chance gives, also among the
      matches of several passes.
    - `too_few`, `degenerate`, `no_model`: there is none; too few distinct points, points on a line or (for
      essential) views that only rotate, or nothing that fits.
    - `not_estimated`: no geometry was requested.

    >>> import numpy as np
    >>> from matcher import TwoViewGeometry
    >>> TwoViewGeometry("homography", "too_few", np.zeros(3, bool))
    TwoViewGeometry(homography: too_few, 0 of 3 inliers)
    """

    kind: GeometryKind
    status: GeometryStatus
    inliers: np.ndarray  # (K,) bool
    # (3, 3) float64. Homography: stored pixels of image 0 → image 1. Fundamental: x1ᵀ F x0 = 0 in stored
    # pixels; essential: the same in normalised coordinates of the cameras.
    matrix: np.ndarray | None = None
    cam1_from_cam0: np.ndarray | None = None  # (4, 4) float64, unit translation; essential only
    # Of homographies only, where `matrix` is that of the plane with most inliers:
    planes: np.ndarray | None = None  # (K,) int64 index into `matrices`, −1 for outliers
    matrices: np.ndarray | None = None  # (P, 3, 3) float64, most inliers first

    def __repr__(self) -> str:
        count = int(np.count_nonzero(self.inliers))
        return f"TwoViewGeometry({self.kind}: {self.status}, {count} of {len(self.inliers)} inliers)"

    def to_dict(self) -> dict[str, Any]:
        """Kind, status, number of inliers and models as plain values, ready for `json.dumps`."""
        models = {"matrix": self.matrix, "cam1_from_cam0": self.cam1_from_cam0, "matrices": self.matrices}
        return {
            "kind": self.kind,
            "status": self.status,
            "inliers": int(np.count_nonzero(self.inliers)),
            **{name: None if model is None else model.tolist() for name, model in models.items()},
        }


def best_first(matches: Matches, geometry: TwoViewGeometry) -> tuple[Matches, TwoViewGeometry]:
    """The matches by falling score, equal ones in their order, and the geometry with their inliers."""
    order, refinement = np.argsort(-matches.scores, kind="stable"), matches.refinement
    names = ("indices", "points0", "points1", "scores")
    changes = {name: getattr(matches, name)[order] for name in names}
    if matches.prior is not None:
        changes["prior"] = matches.prior[order]
    planes = None if geometry.planes is None else geometry.planes[order]
    return (
        replace(matches, **changes, refinement=refinement and refinement.select(order)),
        replace(geometry, inliers=geometry.inliers[order], planes=planes),
    )
