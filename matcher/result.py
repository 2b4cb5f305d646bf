"""Everything known of one matched pair, and how it is saved and drawn."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image

from matcher.cameras import Camera
from matcher.config import EstimationConfig
from matcher.errors import UsageError, counted, optional
from matcher.files import check_output, write_output
from matcher.geometry import stored_to_upright
from matcher.images import ImageInput, limit_for, read_image
from matcher.passes import PassReport
from matcher.types import REFINEMENTS, Features, Matches, TwoViewGeometry, to_numpy
from matcher.verify.adjustment import plane_answers
from matcher.verify.repetition import repeated_groups
from matcher.verify.verdict import MIRRORED, Verdict, verdict_of

if TYPE_CHECKING:
    from matcher.budget import Choice
    from matcher.viz.drawings import ColourBy


DATA_SUFFIXES = (".npz", ".json", ".csv")
_REASONS = {
    "too_few": "too few matches to estimate it",
    "degenerate": "the points do not determine it",
    "no_model": "no model was found",
    "low_inliers": "too few of them agree",
}
_PLANAR = {
    "degenerate": "as they lie on one plane or the views only rotate, which fixes no more",
    "ambiguous": "as they lie on one plane, several poses fit and too little off it tells them apart",
}


@dataclass(frozen=True)
class WeightsSource:
    """Which file a network's parameters came from."""

    name: str
    sha256: str


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """Everything known of one matched pair.

    Points are in *stored* pixels: those of the file before its EXIF orientation is applied. `cv2.imread` and
    most viewers apply it; for what they show, use `points0_upright` and `points1_upright`.

    >>> import matcher, numpy as np
    >>> image = np.random.default_rng(0).integers(0, 255, (240, 320), dtype=np.uint8)
    >>> result = matcher.load("nearest", max_keypoints=100).match(image, image)
    >>> result.points0.shape == result.points1.shape == (len(result.matches), 2)
    True
    >>> sorted(result.to_dict())[:3]
    ['budget', 'geometry', 'image0']
    """

    features0: Features
    features1: Features
    matches: Matches
    geometry: TwoViewGeometry
    path0: Path | None = None
    path1: Path | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # read, extract, match, verify, total
    preset: str = "custom"
    weights: WeightsSource | None = None  # of the network; None without one
    layers: int = 0  # depth of the network; `matches.layers_run`: how many of them ran
    passes: tuple[PassReport, ...] = ()  # all of them, where others followed the first one
    first: Result | None = None  # of the first pass alone, where others followed it
    budget: Choice | None = None  # what a time budget led to
    cameras: tuple[Camera, Camera] | None = None  # that a pose was estimated with
    bgr: bool = False  # whether arrays were matched as BGR; those that `plot` is given are, too

    @property
    def points0(self) -> np.ndarray:
        """(K, 2) float32 matched points of image 0, stored pixels."""
        return self.matches.points0

    @property
    def points1(self) -> np.ndarray:
        """(K, 2) float32 matched points of image 1, stored pixels."""
        return self.matches.points1

    @property
    def points0_upright(self) -> np.ndarray:
        """(K, 2) float32 matched points of image 0, in pixels of the photo after EXIF rotation."""
        return _upright(self.points0, self.features0)

    @property
    def points1_upright(self) -> np.ndarray:
        """(K, 2) float32 matched points of image 1, in pixels of the photo after EXIF rotation."""
        return _upright(self.points1, self.features1)

    @property
    def scores(self) -> np.ndarray:
        """(K,) float32 in [0, 1]: match probabilities; of the presets without a network they only rank."""
        return self.matches.scores

    @property
    def verdict(self) -> Verdict | None:
        """Whether the images show the same place, with a probability; None without geometry, or where one of
        them has fewer keypoints than a geometry needs, and so shows nothing."""
        if min(len(self.features0), len(self.features1)) < EstimationConfig.min_inliers:
            return None
        estimated = self.geometry.rejected or self.geometry
        return verdict_of(self.matches, estimated, self.features0.image_size, self.features1.image_size)

    @property
    def inliers(self) -> np.ndarray:
        """(K,) bool: matches that agree with the geometry; none where there is no geometry."""
        return self.geometry.inliers

    def __repr__(self) -> str:
        names = [path.name if path else "array" for path in (self.path0, self.path1)]
        return f"Result({' and '.join(names)}: {self.heading()})"

    def to_dict(self) -> dict[str, Any]:
        """Counts, geometry and seconds, ready for `json.dumps`; `matcher match --json` prints it."""
        verdict, refinement = self.verdict, self.matches.refinement
        (width0, height0), (width1, height1) = self.features0.image_size, self.features1.image_size
        return {
            "preset": self.preset,
            "weights": None if self.weights is None else vars(self.weights),
            "image0": {"path": self.path0 and str(self.path0), "width": width0, "height": height0},
            "image1": {"path": self.path1 and str(self.path1), "width": width1, "height": height1},
            "keypoints0": len(self.features0),
            "keypoints1": len(self.features1),
            "matches": len(self.matches),
            "overlay": len(self.matches.overlay),
            "layers_run": self.matches.layers_run,
            "layers": self.layers,
            "refinement": None if refinement is None else refinement.counts(),
            "passes": [{**vars(one), "seconds": round(one.seconds, 6)} for one in self.passes],
            "budget": None if self.budget is None else vars(self.budget),
            "kept0": self.matches.kept0,
            "kept1": self.matches.kept1,
            "geometry": self.geometry.to_dict(),
            "verdict": verdict and {"word": verdict.word, **vars(verdict)},
            "seconds": {stage: round(value, 6) for stage, value in self.seconds.items()},
        }

    def summary(self) -> str:
        """Some lines for a person: images, matches, inliers and times."""
        lines = self.image_lines()
        depth = f", {self.matches.layers_run} of {self.layers} layers" if self.layers else ""
        lines.append(f"{counted(len(self.matches), 'match', 'matches')} ({self.preset}{depth})")
        if self.budget is not None:
            lines.append(str(self.budget))
        if self.passes:
            found = ", ".join(f"{one.name} {one.matches}" for one in self.passes)
            lines.append(f"{len(self.passes)} passes, because too few matches of the first agreed: {found}")
        if left_out := len(self.matches.overlay):
            lines.append(f"{left_out} matches are of a stamp, logo or frame over both: left out (overlay)")
        lines.append(self._found())
        if self.verdict is not None:
            lines.append(str(self.verdict))
        if stages := ", ".join(f"{name} {s:.2f}" for name, s in self.seconds.items() if name != "total"):
            lines.append(f"{self.seconds['total']:.2f} s ({stages})")
        return "\n".join(filter(None, lines))

    def _found(self) -> str:
        """What was found, in one sentence."""
        for side, features in enumerate(() if len(self.matches) else (self.features0, self.features1)):
            seen = to_numpy(features.size * features.scale).round().astype(int).tolist()
            for (width, height), how in ((features.image_size, ""), (seen, " after resizing")):
                if min(width, height) < 16:  # there is nothing to recognise
                    return f"no match: image {side} is too small, {width} x {height} pixels{how}"
        return agreement(self.matches, self.geometry, self.verdict)

    def image_lines(self) -> list[str]:
        """A line for each image: path, size, number of keypoints."""
        first, lines = self.first or self, []
        sides = ((self.path0, self.features0, first.features0), (self.path1, self.features1, first.features1))
        for path, features, before in sides:
            more = len(features) - len(before)  # of other sizes and parts of the image, and of other features
            further = f" and {more} matched by further passes" if more else ""
            size = "{} x {}".format(*features.image_size)
            lines.append(f"{path or 'array'}  {size}  {counted(len(before), 'keypoint')}{further}")
        return lines

    def heading(self) -> str:
        """One line, as over a drawing: preset, counts, geometry, verdict, layers, time."""
        parts = [self.preset, counted(len(self.matches), "match", "matches")]
        if (geometry := self.geometry).kind != "none":
            status = geometry.status * (geometry.status != "ok")
            kind = ", ".join(filter(None, (geometry.kind, "planar" * geometry.planar, status)))
            parts.append(f"{counted(int(self.inliers.sum()), 'inlier')} ({kind})")
        if (verdict := self.verdict) is not None:
            word = {"same": "same place", "unsure": "unsure", "not": "different places"}[verdict.word]
            why = ", repetitive" * verdict.repetitive + ", what is around differs" * verdict.differing
            parts.append(f"{word} ({verdict.probability:.2f}{why})")
        if self.layers:
            parts.append(f"{self.matches.layers_run} of {self.layers} layers")
        if "total" in self.seconds:
            parts.append(f"{self.seconds['total']:.2f} s")
        return ", ".join(parts)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """What `save` writes: keypoints, indices, points, scores, inliers, sizes, geometry and refinement.

        They are as in `Matches`, `MatchRefinement` (the status by name) and `TwoViewGeometry`; a matrix or
        pose that was not found has shape (0, 0).
        """
        geometry, refinement, found = self.geometry, self.matches.refinement, {}
        if geometry.planes is not None:
            found |= {"planes": geometry.planes, "matrices": geometry.matrices}
        if refinement is not None:
            found |= {"refinement": np.array(REFINEMENTS)[refinement.status]}
            found |= {name: getattr(refinement, name) for name in ("covariances", "correlations")}
        for name in ("matrix", "cam1_from_cam0", "homography"):
            model = getattr(geometry, name)
            found[name] = np.zeros((0, 0)) if model is None else model
        return found | {
            "keypoints0": to_numpy(self.features0.keypoints),
            "keypoints1": to_numpy(self.features1.keypoints),
            "indices": self.matches.indices,
            "points0": self.points0,
            "points1": self.points1,
            "scores": self.scores,
            "prior_scores": self.matches.prior_scores,
            "overlay": self.matches.overlay,
            "inliers": geometry.inliers,
            "geometry_kind": np.array(geometry.kind),
            "geometry_status": np.array(geometry.status),
            "alternatives": np.array(geometry.alternatives).reshape(-1, 4, 4),
            "size0": np.array(self.features0.image_size),
            "size1": np.array(self.features1.image_size),
        }

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the result to a file, which appears whole or not at all, and return its path.

        `.npz` holds `to_arrays()`; `.json` holds `to_dict()` and, under "arrays", the same arrays; `.csv` has
        a line for each match: x0, y0, x1, y1, score, inlier (1 or 0).

        Raises:
            UsageError: another suffix, a folder that is absent, or, without `overwrite`, a foreign file.
            OSError: the disk is full.
        """
        path = check_output(path, DATA_SUFFIXES, overwrite=overwrite)
        write_output(path, self.to_bytes(path.suffix.lower()))
        return path

    def to_bytes(self, suffix: str) -> bytes:
        """The content of the file that `save` writes, for ".npz", ".json" or ".csv"."""
        if suffix == ".csv":
            text = io.StringIO()
            table = np.column_stack([self.points0, self.points1, self.scores, self.inliers])
            how = ["%.3f"] * 4 + ["%.6f", "%d"]
            np.savetxt(text, table, how, delimiter=",", header="x0,y0,x1,y1,score,inlier", comments="")
            return text.getvalue().encode()
        arrays = self.to_arrays()
        if suffix == ".npz":
            buffer = io.BytesIO()
            np.savez_compressed(buffer, **arrays)
            return buffer.getvalue()
        lists = {name: array.tolist() for name, array in arrays.items()}
        return json.dumps({**self.to_dict(), "arrays": lists}, allow_nan=False).encode()

    def plot(
        self,
        path: str | Path | None = None,
        image0: ImageInput | None = None,
        image1: ImageInput | None = None,
        *,
        title: str | None = None,
        colour_by: ColourBy | None = None,
        errors: np.ndarray | None = None,
        stacked: bool = False,
        ellipses: bool = False,
        max_lines: int = 200,
        overwrite: bool = False,
    ) -> Path | PIL.Image.Image:
        """Draw the matches on both images; the path of the drawing, or a picture, which a notebook shows.

        Args:
            path: .png, .jpg, .jpeg, .pdf or .svg (lines as vectors), written whole or not at all; None: no
                file.
            image0, image1: the images; None reads `path0` and `path1` again. Give them for arrays.
            title, errors, stacked, max_lines, colour_by: as in `matcher.viz.drawings.draw_matches`; the usual
                title is `heading()`; unless one is chosen, colours show planes where several were looked for,
                groups of things that look alike where most matches are of such, else confidence.
            ellipses: draw the uncertainty of refined matches, enlarged.
            overwrite: replace an existing file even if matcher did not write it.

        Raises:
            UsageError: a file that cannot be written, no image or one of another size, no refined matches for
                ellipses, or matplotlib is not installed.
            ImageError: an image cannot be read.
        """
        with optional():
            from matcher.viz.drawings import draw_matches, save_figure

        images = []
        if ellipses and self.matches.refinement is None:
            raise UsageError("ellipses=True draws refined matches, and these were not refined (refine=False)")
        sides = ((image0, self.path0, self.features0), (image1, self.path1, self.features1))
        for index, (given, own, features) in enumerate(sides):
            if given is None and own is None:
                raise UsageError(f"image{index} was an array: give it to plot(path, image0, image1)")
            size = features.image_size
            image = read_image(own if given is None else given, max_pixels=limit_for(size), bgr=self.bgr)
            if image.size != size:
                raise UsageError(f"image{index} is {image.size}, but the result's image was {size}")
            images.append(image)
        title = self.heading() if title is None else title
        how = self.drawing() | {"title": title, "errors": errors, "stacked": stacked, "max_lines": max_lines}
        how |= {"covariances": self.matches.covariances} if ellipses else {}
        how |= {} if colour_by is None else {"colour_by": colour_by}
        figure = draw_matches(*images, self.points0, self.points1, **how)
        return save_figure(figure, path, overwrite=overwrite)

    def drawing(self) -> dict[str, Any]:
        """What `matcher.viz.drawings.draw_matches` shows of this result, as its arguments."""
        planes = self.geometry.planes
        repetitive = planes is None and self.geometry.repetitive
        return {
            "scores": self.scores,
            "inliers": None if self.geometry.status == "not_estimated" else self.inliers,
            "planes": self.repeats() if repetitive else planes,
            "colour_by": "repeats" if repetitive else "confidence" if planes is None else "planes",
            "keypoints0": to_numpy(self.features0.keypoints),
            "keypoints1": to_numpy(self.features1.keypoints),
            "answers": self.answers(),
            "overlay": self.matches.overlay,
        }

    def answers(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Each pose (4, 4) that an ambiguous plane allows, with the points (P, 3) of its inliers."""
        return plane_answers(self.points0, self.points1, self.geometry, self.cameras)

    def repeats(self) -> np.ndarray:
        """(K,) int64 group of keypoints of image 0 that look alike, of each match; −1 for those of none."""
        groups, index = repeated_groups((self.first or self).features0), self.matches.indices[:, 0]
        return np.append(groups, -1)[np.minimum(index, len(groups))]


def _upright(points: np.ndarray, features: Features) -> np.ndarray:
    orientation = int(features.exif_orientation)
    return stored_to_upright(points, features.image_size, orientation).astype(np.float32)


def agreement(
    matches: Matches, geometry: TwoViewGeometry, verdict: Verdict | None, planar: str = "homography"
) -> str:
    """What the matches of a pair agree on, in one sentence, homographies by a name; empty without one."""
    kind, status, rejected = geometry.kind, geometry.status, geometry.rejected
    model = planar if kind.startswith("homograph") else f"{kind} matrix"
    if not len(matches):
        return "no match: the images share nothing that was recognised"
    if status == "mirrored":
        return f"mirrored: neighbouring matches lie the other way round in image 1: {MIRRORED}"
    inliers = int(geometry.inliers.sum())
    if geometry.verified and status != "ok":
        found = f"{inliers} are inliers of one homography (planar)"
        return f"{found}: {status}, {_PLANAR[status]}{geometry.likelier}"
    if status in _REASONS and (verdict is None or not (rejected and rejected.inliers.any())):
        return f"no match: the matches fit no {model} ({_REASONS[status]})"
    if status in _REASONS:
        agree = f"{int(rejected.inliers.sum())} agree on one {model}"
        told = f"no match: {agree}, as matches of different places may"
        return told if verdict.word == "not" else f"{agree}, which is too uncertain to be used"
    if status == "not_estimated":
        return ""
    matrices = geometry.matrices
    models = f"one {model}" if matrices is None or len(matrices) == 1 else f"{len(matrices)} homographies"
    which = f", most of them on one plane (planar{geometry.likelier})" * geometry.planar
    return f"{inliers} {'is an inlier' if inliers == 1 else 'are inliers'} of {models}{which}"
