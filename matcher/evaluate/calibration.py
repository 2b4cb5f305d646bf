"""Whether probabilities are what they say: reliability diagrams and the expected calibration error.

Guo et al., On Calibration of Modern Neural Networks, ICML 2017, section 2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import combinations
from pathlib import Path
from time import process_time
from typing import Any, Literal

import numpy as np

from matcher.cameras import Camera
from matcher.config import NetworkConfig, PipelineConfig
from matcher.errors import ImageError, UsageError
from matcher.evaluate.folders import FRAME_GAPS, distant_frames, read_kitti
from matcher.evaluate.measure import auc, corner_error, corresponding_points, pose_error, reprojection_errors
from matcher.evaluate.protocols import (
    CorrespondencePair,
    DepthPair,
    HomographyPair,
    Pair,
    PairImage,
    PairSet,
    PosePair,
    UnrelatedPair,
    reproject,
)
from matcher.evaluate.run import Method
from matcher.evaluate.synthetic import synthetic_set, unrelated_set, zoomed_set
from matcher.images import find_images
from matcher.loading import build_pipeline, load
from matcher.match.calibration import (
    evidence as matching_evidence,
)
from matcher.match.calibration import (
    geometry_evidence,
    judges_matches,
    probabilities,
    refinement_evidence,
)
from matcher.match.network import AttentionMatcher
from matcher.passes.views import LocalMatcher
from matcher.pipeline import Pipeline
from matcher.presets import find_preset
from matcher.result import Result
from matcher.types import Extractor, Features, Image, Matches, TwoViewGeometry
from matcher.verify.verdict import EVIDENCE, NOT, SAME, evidence, probability, verdict_of

# --- calibration: Whether probabilities are what they say: reliability diagrams and the expected
# calibration error.

BINS = 10
CORRECT = 3.0  # pixels of the resized images


@dataclass(frozen=True, eq=False)
class Reliability:
    """Predictions in bins of equal width; a bin without any is NaN."""

    confidence: np.ndarray  # (BINS,) mean probability
    accuracy: np.ndarray  # (BINS,) share that is right
    count: np.ndarray  # (BINS,) int64

    @property
    def error(self) -> float:
        """Expected calibration error: the mean distance of both, weighted by the counts; NaN without any."""
        total = self.count.sum()
        if not total:
            return float("nan")
        return float(np.nansum(np.abs(self.confidence - self.accuracy) * self.count) / total)


@dataclass(eq=False)
class Predictions:
    """What a method said on the pairs of a set, and what is true."""

    scores: list[np.ndarray] = field(default_factory=list)  # of matches that can be judged
    correct: list[np.ndarray] = field(default_factory=list)  # bool, of these matches
    verdicts: list[float] = field(default_factory=list)  # probabilities of the same place, one a pair

    def reliability(self) -> Reliability:
        """Of the match probabilities."""
        nothing = np.zeros(0)
        return reliability(
            np.concatenate([nothing, *self.scores]), np.concatenate([nothing, *self.correct]).astype(bool)
        )


def reliability(probabilities: np.ndarray, right: np.ndarray) -> Reliability:
    """How often predictions of each probability are right.

    Args:
        probabilities: (K,) in [0, 1].
        right: (K,) bool.
    """
    index = np.minimum((np.asarray(probabilities) * BINS).astype(int), BINS - 1)
    count = np.bincount(index, minlength=BINS)
    with np.errstate(invalid="ignore"):
        confidence = np.bincount(index, weights=probabilities, minlength=BINS) / count
        accuracy = np.bincount(index, weights=np.asarray(right, dtype=np.float64), minlength=BINS) / count
    return Reliability(confidence, accuracy, count)


def calibration_error(probabilities: np.ndarray, right: np.ndarray) -> float:
    """Expected calibration error of predictions (K,), of which those in `right` (K,) are true."""
    return reliability(probabilities, right).error


def predictions(
    pair_set: PairSet,
    methods: Sequence[Method],
    *,
    progress: Callable[[int, int], None] | None = None,
    skipped: list[str] | None = None,
) -> dict[str, Predictions]:
    """The match probabilities and verdicts of every method on a set.

    Args:
        pair_set: pairs whose matches can be judged one by one, or unrelated ones.
        methods: rows of the table.
        progress: called after every pair with the number of pairs done and their total.
        skipped: receives the reason for each pair that could not be read.

    Raises:
        UsageError: a set with poses or sparse labels only.
        ImageError: no pair could be read.
    """
    if pair_set.protocol == "pose" or _without_labels(pair_set):
        raise UsageError(
            f"{pair_set.name}: its ground truth does not tell of single matches whether they are right; "
            "calibration needs homographies, depth or dense labels"
        )
    found = {method.name: Predictions() for method in methods}
    failures = []
    for index in range(len(pair_set)):
        try:
            pair = pair_set.pairs[index]
            for method in methods:
                _add(found[method.name], pair, method.pipeline.match(*as_inputs(pair)))
        except ImageError as error:
            failures.append(error)
        if progress is not None:
            progress(index + 1, len(pair_set))
    if len(failures) == len(pair_set):
        raise failures[0]
    if skipped is not None:
        skipped += map(str, failures)
    return found


def _without_labels(pair_set: PairSet) -> bool:
    for index in range(len(pair_set)):
        with suppress(ImageError):  # of the first that can be read
            first = pair_set.pairs[index]
            return isinstance(first, CorrespondencePair) and not first.dense
    return False


def as_inputs(pair: Pair) -> list[Path | np.ndarray]:
    """Both images of a pair, as `Pipeline.match` takes them."""
    return [s.path if s.pixels is None else s.pixels for s in (pair.image0, pair.image1)]


def _add(found: Predictions, pair: Pair, result: Result) -> None:
    scales = (float(f.scale.prod().sqrt()) for f in (result.features0, result.features1))
    errors = match_errors(pair, result.matches, *scales)
    known = ~np.isnan(errors)
    found.scores.append(result.scores[known])
    found.correct.append(errors[known] < CORRECT)
    if result.verdict is not None:
        found.verdicts.append(result.verdict.probability)


def match_errors(pair: Pair, matches: Matches, scale0: float, scale1: float) -> np.ndarray:
    """(K,) errors of matches in pixels of the resized images, NaN where the ground truth cannot tell.

    Every match of unrelated images is infinitely wrong. `scale0` and `scale1` are resized / stored size.
    """
    points0, points1 = (p.astype(np.float64) for p in (matches.points0, matches.points1))
    if isinstance(pair, HomographyPair):
        return reprojection_errors(points0, points1, pair.H_1_from_0, scale0, scale1)
    if isinstance(pair, DepthPair):
        expected, _ = reproject(points0, pair.view0, pair.view1)
    elif isinstance(pair, CorrespondencePair):
        expected = corresponding_points(pair, points0)
    else:
        return np.full(len(points0), np.inf)
    return np.linalg.norm(expected - points1, axis=1) * scale1


def as_object(
    pair_set: PairSet, found: dict[str, Predictions], skipped: Sequence[str] = ()
) -> dict[str, Any]:
    """Reliability and verdicts as plain values for `json.dumps`; `skipped`: pairs that could not be read."""
    rows = []
    for name, said in found.items():
        measured = said.reliability()
        verdicts = np.array(said.verdicts)
        rows.append(
            {
                "name": name,
                "matches": int(measured.count.sum()),
                "expected_calibration_error": _plain(measured.error),
                "confidence": [_plain(value) for value in measured.confidence],
                "accuracy": [_plain(value) for value in measured.accuracy],
                "count": measured.count.tolist(),
                "verdicts": {
                    "same": int((verdicts >= 0.9).sum()),
                    "unsure": int(((verdicts > 0.1) & (verdicts < 0.9)).sum()),
                    "not": int((verdicts <= 0.1).sum()),
                },
            }
        )
    pairs = len(pair_set) - len(skipped)
    found = {"set": pair_set.name, "pairs": pairs, "correct_px": CORRECT, "rows": rows}
    return found | ({"skipped": list(skipped)} if skipped else {})


def as_markdown(found: dict[str, Any]) -> str:
    """Markdown of what `as_object` returned."""
    edges = [f"{i / BINS:.1f}-{(i + 1) / BINS:.1f}" for i in range(BINS)]
    lines = [
        f"## {found['set']}: calibration",
        "",
        f"{found['pairs']} pairs. For each bin of probability, the share of matches within "
        f"{found['correct_px']:g} px; the expected calibration error is the mean distance of both. "
        "Verdicts are numbers of pairs.",
        "",
        f"| | matches | expected calibration error | {' | '.join(edges)} | same | unsure | not |",
        f"|{' --- |' * (BINS + 6)}",
    ]
    for row in found["rows"]:
        shares = ["–" if value is None else f"{value:.2f}" for value in row["accuracy"]]
        error = row["expected_calibration_error"]
        cells = [row["name"], str(row["matches"]), "–" if error is None else f"{error:.3f}", *shares]
        lines.append(f"| {' | '.join([*cells, *map(str, row['verdicts'].values())])} |")
    return "\n".join(lines) + "\n"


def _plain(value: float) -> float | None:
    return round(float(value), 6) if np.isfinite(value) else None


# --- verdicts: The model behind `Result.verdict`: its training pairs, its fit, and how well its
# probabilities hold.

_RIDGE = 1e-3  # weight of the squared coefficients, for pairs that are told apart perfectly
_STEPS = 50
_NEIGHBOURS = 3  # images on within which two of a sequence show the same place


def training_pairs(
    photos: Path, count: int, multiview: Path | None = None, seed: int = 0
) -> Iterator[tuple[Pair, bool]]:
    """Pairs, each with whether it shows the same place.

    Same: `count` warps of photos, a quarter as many zooms, and neighbouring views of each multi-view scene.
    Not: `count` unrelated photos, half as many photos of one source (which may look alike), and views of
    different scenes.

    Args:
        photos: folder of photos, in folders by source.
        count: how many of the first kinds.
        multiview: folder of scenes, each with its views below.
        seed: of everything that is drawn.
    """
    paths = find_images(photos)
    yield from ((pair, True) for pair in synthetic_set(paths, count=count, seed=seed).pairs)
    yield from ((pair, True) for pair in zoomed_set(paths, count=max(1, count // 4), seed=seed).pairs)
    yield from ((pair, False) for pair in unrelated_set(paths, count=count, seed=seed).pairs)
    rng = np.random.default_rng([seed, 1])
    sources = [group for group in _by_folder_verdicts(paths) if len(group) > 1]
    sizes = np.array([len(group) for group in sources], dtype=np.float64)
    for _ in range(count // 2):
        group = sources[rng.choice(len(sources), p=sizes / sizes.sum())]
        yield _unlabelled(*(group[i] for i in rng.choice(len(group), 2, replace=False))), False
    if multiview is None:
        return
    scenes = [find_images(folder) for folder in sorted(multiview.iterdir()) if folder.is_dir()]
    for _ in range(count // 4):
        scene, other = (scenes[i] for i in rng.choice(len(scenes), 2, replace=False))
        first = int(rng.integers(len(scene) - 1))
        second = min(first + int(rng.integers(1, _NEIGHBOURS + 1)), len(scene) - 1)
        yield _unlabelled(scene[first], scene[second]), True
        yield _unlabelled(scene[first], other[rng.integers(len(other))]), False


def gather(
    photos: Path, count: int, preset: str, multiview: Path | None = None, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Evidence (P, E) of the training pairs, matched by a preset, and which show the same place (P,)."""
    pipeline = load(preset)
    rows = [
        (pair_evidence(pipeline, pair), same) for pair, same in training_pairs(photos, count, multiview, seed)
    ]
    return np.stack([row for row, _ in rows]), np.array([same for _, same in rows])


def pair_evidence(pipeline: Pipeline, pair: Pair) -> np.ndarray:
    """The evidence of one pair."""
    sources = (pair.image0, pair.image1)
    result = pipeline.match(*(s.path if s.pixels is None else s.pixels for s in sources))
    sizes = (features.image_size for features in (result.features0, result.features1))
    return evidence(result.matches, result.geometry, *sizes)


def fit(values: np.ndarray, same: np.ndarray) -> np.ndarray:
    """Bias and coefficients (E + 1,) of the logistic regression of `same` (P,) on `values` (P, E).

    Both classes weigh the same.
    """
    return logistic_regression(values, same, np.where(same, 0.5 / same.mean(), 0.5 / (1 - same.mean())))


def logistic_regression(values: np.ndarray, same: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Bias and coefficients (E + 1,) of the regression of `same` (P,) on `values` (P, E), by Newton's method.

    Coefficients of the standardised evidence are drawn to zero a little; `weight` (P,) has a mean of about 1.
    """
    mean, deviation = values.mean(axis=0), values.std(axis=0) + 1e-9
    design = np.column_stack([np.ones(len(values)), (values - mean) / deviation])
    ridge = np.diag([0.0, *np.full(values.shape[1], _RIDGE * len(values))])
    found = np.zeros(design.shape[1])
    for _ in range(_STEPS):
        probability = 1 / (1 + np.exp(-np.clip(design @ found, -30, 30)))
        gradient = design.T @ (weight * (probability - same)) + ridge @ found
        curvature = design.T @ (design * (weight * probability * (1 - probability))[:, None]) + ridge
        found -= np.linalg.solve(curvature + 1e-9 * np.eye(len(found)), gradient)
    coefficients = found[1:] / deviation
    return np.array([found[0] - coefficients @ mean, *coefficients])


def report(values: np.ndarray, same: np.ndarray, coefficients: np.ndarray) -> str:
    """The model as it stands in the library, and how it does on these pairs."""
    logits = coefficients[0] + values @ coefficients[1:]
    probability = 1 / (1 + np.exp(-np.clip(logits, -50, 50)))
    rows = zip(("bias", *EVIDENCE), coefficients, strict=True)
    return "\n".join(
        [
            f"COEFFICIENTS = ({', '.join(f'{value:.3f}' for value in coefficients)})",
            *(f"  {name}: {value:.3f}" for name, value in rows),
            f"{len(same)} pairs, {int(same.sum())} of the same place",
            f"called the same (p >= 0.9): {(probability[same] >= 0.9).mean():.3f} of these, "
            f"{(probability[~same] >= 0.9).mean():.4f} of the others",
            f"called different (p <= 0.1): {(probability[same] <= 0.1).mean():.4f} of these, "
            f"{(probability[~same] <= 0.1).mean():.3f} of the others",
            f"expected calibration error {calibration_error(probability, same):.3f}",
        ]
    )


def _by_folder_verdicts(paths: list[Path]) -> list[list[Path]]:
    folders: dict[Path, list[Path]] = {}
    for path in paths:
        folders.setdefault(path.parent, []).append(path)
    return list(folders.values())


def _unlabelled(path0: Path, path1: Path) -> UnrelatedPair:
    """Two files without ground truth."""
    return UnrelatedPair(f"{path0.name} {path1.name}", "", PairImage(path0), PairImage(path1))


# --- recalibration: The fit of `matcher.match.calibration` on sets whose matches can be judged one by one.

# What a network gives, the prior scores of refined matches, and the probabilities given a geometry.
Stage = Literal["network", "refinement", "geometry"]
_FEW = 50  # judged matches; a pair with fewer weighs less


@dataclass(frozen=True, eq=False)
class JudgedPair:
    """What is known of the matches of a pair before calibration, and which of them are right."""

    scores: np.ndarray  # (K,) of all matches, before this calibration
    evidence: np.ndarray  # (K, E) what the calibration goes by
    known: np.ndarray  # (K,) bool: the ground truth can tell
    right: np.ndarray  # (K,) bool

    def rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Evidence (J, E), right (J,) and weights (J,) of the J judged matches; a pair weighs 1 at most."""
        judged = int(self.known.sum())
        weight = min(1.0, judged / _FEW) / max(1, judged)
        return self.evidence[self.known], self.right[self.known], np.full(judged, weight)


def uncalibrated(preset: str, stage: Stage = "network") -> Pipeline:
    """A preset without the calibration of a stage and of those after it.

    At the first stage it is one pass, whose scores are what the network gives; else the whole preset.
    Geometry needs the numbers of refinement before it.

    Raises:
        UsageError: a preset without a network, or without the calibration that a later stage adds to.
    """
    pipeline = load(preset, second_pass=False) if stage == "network" else load(preset)
    config = pipeline.config.matcher
    if not isinstance(config, NetworkConfig) or not isinstance(pipeline.matcher, AttentionMatcher):
        raise UsageError(f"the preset {preset!r} has no network whose probabilities could be calibrated")
    calibration = config.policy.calibration
    if stage != "network" and calibration is None:
        raise UsageError(f"the scores of {preset!r} are not calibrated before {stage}: calibrate these first")
    kept = None
    if stage != "network":
        refined = calibration.refined if stage == "geometry" else None
        kept = replace(calibration, refined=refined, verified=None)
    policy = replace(config.policy, calibration=kept)
    return replace(pipeline, matcher=pipeline.matcher.adjusted(policy=policy))


def judge(pipeline: Pipeline, pair_set: PairSet, stage: Stage = "network") -> list[JudgedPair]:
    """The matches of every pair of a set that has any; `pipeline` is that of `uncalibrated` at this stage.

    For geometry without the pairs whose geometry says nothing about single matches.
    """
    found = []
    for index in range(len(pair_set)):
        pair = pair_set.pairs[index]
        result = pipeline.match(*as_inputs(pair))
        sides = (result.features0, result.features1)
        errors = match_errors(pair, result.matches, *(float(f.scale.prod().sqrt()) for f in sides))
        if not len(errors) or (stage == "geometry" and not judges_matches(result.geometry)):
            continue
        known = ~np.isnan(errors)
        right = known & (errors < CORRECT)
        found.append(JudgedPair(result.scores, _evidence(result, stage), known, right))
    return found


def _evidence(result: Result, stage: Stage) -> np.ndarray:
    """(K, E) what the calibration of a stage goes by."""
    if stage == "refinement":
        scale, several = result.features1.scale.tolist(), len(result.passes) > 1
        return refinement_evidence(result.matches, scale, several)
    if stage == "geometry":
        return geometry_evidence(result.matches, result.geometry)
    return matching_evidence(result.scores, (len(result.features0), len(result.features1)))


def fit_calibration(sets: Sequence[tuple[Sequence[JudgedPair], float]]) -> np.ndarray:
    """The calibration under which the matches of all sets are most likely, each set with its weight.

    Returns:
        (1 + E,) the offset and the coefficients of the pairs' evidence, in two decimals: the numbers of the
        configuration of a stage, as `CalibrationConfig`.
    """
    values, right, weights = [], [], []
    for pairs, share in sets:
        columns = [np.concatenate(column) for column in zip(*(pair.rows() for pair in pairs), strict=True)]
        values.append(columns[0])
        right.append(columns[1])
        weights.append(share * columns[2] / columns[2].sum())
    weight = np.concatenate(weights)
    found = logistic_regression(np.concatenate(values), np.concatenate(right), weight / weight.mean())
    return np.round(np.asarray(found, dtype=np.float64), 2)


def errors_of(pairs: Sequence[JudgedPair], numbers: np.ndarray | None) -> float:
    """Expected calibration error of a set under a calibration of `fit_calibration`, or without one."""

    def scores(pair: JudgedPair) -> np.ndarray:
        return pair.scores if numbers is None else probabilities(numbers[0] + pair.evidence @ numbers[1:])

    found = [scores(pair)[pair.known] for pair in pairs]
    return calibration_error(np.concatenate(found), np.concatenate([p.right[p.known] for p in pairs]))


# --- verdict_trial: A trial of `Result.verdict` on pairs that it was not fitted on: unrelated photos,
# lookalikes and warps.

UNRELATED, LOOKALIKES, SCENES = "photos of different sources", "photos of one source", "scenes"
DISTANT, NEIGHBOURS = "distant frames of a street", "neighbouring frames"
WARPS = "warps of levels 1 to 3"
RELATED = (WARPS, NEIGHBOURS)  # the kinds whose pairs show the same place
_FEWEST = 20  # photos of a source from which pairs of photos that look alike are drawn
_DISTANT = 40.0  # metres between frames that count as distant
_KEPT = 400  # images whose features are kept in memory
_Z = 1.645  # one-sided 95 %


@dataclass(frozen=True)
class TrialPair:
    """A pair and its kind."""

    kind: str
    pair: Pair

    @property
    def same(self) -> bool:
        """Whether it shows the same place."""
        return self.kind in RELATED


@dataclass(frozen=True)
class TrialSize:
    """How many pairs of each kind a trial draws, at most."""

    unrelated: int = 3000
    lookalikes: int = 300
    related: int = 300


@dataclass(eq=False)
class KindResult:
    """The verdicts on the pairs of a kind."""

    kind: str
    probabilities: list[float] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """Names of the pairs that are called the opposite of what they are."""
        at = np.asarray(self.probabilities)
        wrong = at <= NOT if self.kind in RELATED else at >= SAME
        return [self.names[i] for i in np.flatnonzero(wrong)]

    def row(self) -> list[str]:
        """Kind, pairs, called same, unsure, called different, and the upper bound on the share of errors."""
        at = np.asarray(self.probabilities)
        same, different = int((at >= SAME).sum()), int((at <= NOT).sum())
        bound = upper_bound(len(self.wrong), len(at))
        counts = (len(at), same, len(at) - same - different, different)
        return [self.kind, *map(str, counts), f"{bound:.4f}"]


def upper_bound(wrong: int, total: int) -> float:
    """The share of errors that is not exceeded with a confidence of 95 % (Wilson's score interval)."""
    if not total:
        return 1.0
    share, z2 = wrong / total, _Z * _Z / total
    spread = _Z * np.sqrt(share * (1 - share) / total + z2 / (4 * total))
    return float((share + z2 / 2 + spread) / (1 + z2))


def trial_pairs(data: Path, counts: TrialSize, seed: int = 0) -> Iterator[TrialPair]:
    """The pairs of the trial, kind by kind; none was used for the fit.

    Args:
        data: holds `photos/val` in folders by source, `multiview/*/SCENE` and `bench/kitti_mini`. Photos of a
            source with many photos are lookalikes, such as façades of one city, and so are frames of a street
            that are 40 m apart or more, although the far end of the street may be seen in both.
        counts: pairs of a kind.
        seed: of everything that is drawn.

    Raises:
        UsageError: a folder is absent.
    """
    rng = np.random.default_rng(seed)
    photos = find_images(data / "photos" / "val")
    sources = _by_folder_verdict_trial(photos)
    pairs = [(a, b) for a, b in combinations(photos, 2) if a.parent != b.parent]
    yield from _drawn(UNRELATED, pairs, counts.unrelated, rng)
    alike = [pair for group in sources if len(group) >= _FEWEST for pair in combinations(group, 2)]
    yield from _drawn(LOOKALIKES, alike, counts.lookalikes, rng)
    scenes = [_views(folder) for folder in sorted(data.glob("multiview/*/*")) if folder.is_dir()]
    if len(scenes) < 2:
        raise UsageError(f"{data / 'multiview'}: pairs of different scenes need at least two scenes")
    between = [_two_scenes(scenes, rng) for _ in range(counts.lookalikes)]
    yield from _drawn(SCENES, between, counts.lookalikes, rng)
    street = data / "bench" / "kitti_mini"
    yield from _drawn(DISTANT, distant_frames(street, _DISTANT), counts.lookalikes, rng)
    frames = read_kitti(street)
    nearest = [pair for pair in frames.pairs if pair.group == f"gap {FRAME_GAPS[0]}"]
    yield from (TrialPair(NEIGHBOURS, pair) for pair in nearest[: counts.related])
    if counts.related:
        warps = synthetic_set(photos, count=counts.related, levels=(1, 2, 3), seed=seed)
        yield from (TrialPair(WARPS, pair) for pair in warps.pairs)


def try_verdicts(
    pipeline: Pipeline,
    pairs: Iterable[TrialPair],
    progress: Callable[[KindResult], None] | None = None,
    known: Findings | None = None,
) -> list[KindResult]:
    """The verdicts of a pipeline on the pairs, by kind.

    Features of an image are computed once for all its pairs, so that thousands of pairs take less time.

    Args:
        pipeline: estimates a geometry, without which there is no verdict.
        pairs: those of a kind follow each other.
        progress: called with the kind's results so far after each pair.
        known: evidence of earlier pairs, which are not matched again; that of the others is added.
    """
    pipeline, found = with_kept_features(pipeline), {}
    known = Findings() if known is None else known
    for each in pairs:
        values = known.get(each)
        if values is None:
            values = pair_evidence(pipeline, each.pair)
            known.add(each, values)
        kind = found.setdefault(each.kind, KindResult(each.kind))
        kind.probabilities.append(probability(values))
        kind.names.append(each.pair.name)
        if progress is not None:
            progress(kind)
    return list(found.values())


class Findings:
    """Evidence of pairs, kept in a file of JSON lines, so that a long trial can be continued.

    The verdict takes no part in matching, so the same evidence serves other coefficients.

    Args:
        path: of the file, which need not exist; None keeps nothing.

    Raises:
        UsageError: the file holds something else.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._known = path, {}
        if path is None or not path.exists():
            return
        lines = path.read_text().split("\n")
        if lines[-1]:  # the line that was being written
            path.write_text("".join(f"{line}\n" for line in lines[:-1]))
        for number, line in enumerate(lines[:-1], 1):
            try:
                row = json.loads(line)
                values = np.array(row["evidence"], dtype=np.float64)
                self._known[row["kind"], row["name"]] = values.reshape(len(EVIDENCE))
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(f"{path}: line {number} holds no evidence of a pair") from error

    def get(self, one: TrialPair) -> np.ndarray | None:
        """The evidence of a pair, if it is known."""
        return self._known.get((one.kind, one.pair.name))

    def add(self, one: TrialPair, values: np.ndarray) -> None:
        """Keep the evidence of a pair."""
        self._known[one.kind, one.pair.name] = values
        if self._path is not None:
            row = {"kind": one.kind, "name": one.pair.name, "evidence": values.tolist()}
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")


@dataclass(eq=False)
class KeptFeatures:
    """An extractor that remembers the features of the images it saw last."""

    extractor: Extractor
    kept: dict[bytes, Features] = field(default_factory=dict)

    def __call__(self, images: Sequence[Image]) -> list[Features]:
        """Features of each image, computed or remembered."""
        return [self._one(image) for image in images]

    def _one(self, image: Image) -> Features:
        if image.mask is not None:
            return self.extractor([image])[0]
        known = repr((image.pixels.shape, image.size, image.orientation)).encode()
        key = blake2b(image.pixels.tobytes() + known, digest_size=16).digest()
        found = self.kept.pop(key, None)
        if found is None:
            found = self.extractor([image])[0]
            while len(self.kept) >= _KEPT:
                del self.kept[next(iter(self.kept))]
        self.kept[key] = found
        return found


def with_kept_features(pipeline: Pipeline) -> Pipeline:
    """The same pipeline; its front ends remember features."""
    extractor, passes = KeptFeatures(pipeline.extractor), pipeline.passes
    if passes is not None:
        own = LocalMatcher(extractor, passes.own.matcher)
        other = None if passes.other is None else _remembering(passes.other)
        passes = replace(passes, own=own, other=other)
    return replace(pipeline, extractor=extractor, passes=passes)


def _remembering(load: Callable[[], LocalMatcher]) -> Callable[[], LocalMatcher]:
    loaded: list[LocalMatcher] = []

    def again() -> LocalMatcher:
        if not loaded:
            other = load()
            loaded.append(LocalMatcher(KeptFeatures(other.extractor), other.matcher))
        return loaded[0]

    return again


def as_markdown_verdict_trial(found: Sequence[KindResult]) -> str:
    """A table of the verdicts, and the names of wrong ones below it."""
    header = ["pairs", "number", "called same", "unsure", "called different", "error rate below (95 %)"]
    rows = [header, ["---"] * len(header), *(kind.row() for kind in found)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines += [f"wrong, {kind.kind}: {name}" for kind in found for name in kind.wrong]
    return "\n".join(lines) + "\n"


def _drawn(
    kind: str, pairs: list[tuple[Path, Path]], count: int, rng: np.random.Generator
) -> Iterator[TrialPair]:
    for i in rng.permutation(len(pairs))[:count].tolist():
        path0, path1 = pairs[i]
        name = f"{path0.parent.name}/{path0.name} {path1.parent.name}/{path1.name}"
        yield TrialPair(kind, UnrelatedPair(name, "", PairImage(path0), PairImage(path1)))


def _two_scenes(scenes: list[list[Path]], rng: np.random.Generator) -> tuple[Path, Path]:
    chosen = (scenes[i] for i in rng.choice(len(scenes), 2, replace=False))
    return tuple(scene[rng.integers(len(scene))] for scene in chosen)


def _views(scene: Path) -> list[Path]:
    """The photos of a scene, without its depth maps."""
    found = [path for path in find_images(scene) if not path.stem.endswith("_depth")]
    return [path for path in found if path.relative_to(scene).parts[0] != "depth"]


def _by_folder_verdict_trial(paths: list[Path]) -> list[list[Path]]:
    folders: dict[Path, list[Path]] = {}
    for path in paths:
        folders.setdefault(path.parent, []).append(path)
    return list(folders.values())


# --- accepted: Accuracy of the geometry in a result, by the least verdict at which several passes accept
# it.

LEAST = (0.5, 0.4, 0.32, 0.2, 0.1, 0.0)  # probabilities of the same place
THRESHOLDS = {"pose": (5, 10, 20), "depth": (5, 10, 20), "homography": (3, 5, 10)}  # degrees; pixels


@dataclass(frozen=True)
class JudgedGeometry:
    """The geometry of one result before it is accepted or rejected."""

    error: float  # degrees, or pixels of the resized image 1; infinite where none was found
    probability: float  # the verdict; 1 after a single pass, which accepts any verdict

    def error_at(self, least: float) -> float:
        """The error where geometries of less than this probability are rejected."""
        return self.error if self.probability >= least else float("inf")


def judge_set(pair_set: PairSet, pipeline: Pipeline) -> list[JudgedGeometry]:
    """Match every pair of a set of poses or homographies.

    Args:
        pair_set: the pairs.
        pipeline: estimates the kind of geometry that the set has.

    Raises:
        UsageError: a set whose ground truth is neither poses nor homographies.
        ImageError: an image cannot be read.
    """
    if pair_set.protocol not in THRESHOLDS:
        raise UsageError(f"{pair_set.name}: its ground truth is neither poses nor homographies")
    return [_judged(pair, pipeline) for pair in pair_set.pairs]


def _judged(pair: Pair, pipeline: Pipeline) -> JudgedGeometry:
    cameras: dict[str, Camera] = {}
    if isinstance(pair, PosePair):
        cameras = {"camera0": Camera.from_K(pair.K0), "camera1": Camera.from_K(pair.K1)}
    result = pipeline.match(*as_inputs(pair), **cameras)
    geometry, probability = before_rejection(result, pipeline, cameras)
    if geometry.status != "ok":
        return JudgedGeometry(float("inf"), 0.0)
    if isinstance(pair, HomographyPair):
        scale1 = float(result.features1.scale.prod().sqrt())
        size0 = result.features0.image_size
        return JudgedGeometry(corner_error(geometry.matrix, pair.H_1_from_0, size0, scale1), probability)
    return JudgedGeometry(max(pose_error(geometry.cam1_from_cam0, pair.cam1_from_cam0)), probability)


def before_rejection(
    result: Result, pipeline: Pipeline, cameras: dict[str, Camera]
) -> tuple[TwoViewGeometry, float]:
    """The geometry of a result as it was estimated, and the probability that decides about it."""
    if len(result.passes) <= 1:
        return result.geometry, 1.0
    features = result.features0, result.features1
    geometry = pipeline.verify(*features, result.matches, **cameras)
    verdict = verdict_of(result.matches, geometry, *(side.image_size for side in features))
    return geometry, 0.0 if verdict is None else verdict.probability


def accuracy(judged: Sequence[JudgedGeometry], least: float, thresholds: Sequence[float]) -> list[float]:
    """AUC at each threshold where results of less than a probability are rejected."""
    errors = np.array([each.error_at(least) for each in judged])
    return [float(auc(errors, threshold)) for threshold in thresholds]


def most_probable(pairs: Iterable[TrialPair], pipeline: Pipeline) -> dict[str, list[float]]:
    """By kind, the probabilities of the geometries of pairs, the largest first.

    Args:
        pairs: of different places, without cameras.
        pipeline: as it is; its kind of geometry must need no cameras.
    """
    found: dict[str, list[float]] = {}
    for each in pairs:
        result = pipeline.match(*as_inputs(each.pair))
        found.setdefault(each.kind, []).append(before_rejection(result, pipeline, {})[1])
    return {kind: sorted(values, reverse=True) for kind, values in found.items()}


def as_markdown_accepted(name: str, judged: Sequence[JudgedGeometry], thresholds: Sequence[float]) -> str:
    """A table: the share of results that are accepted and their AUC, by the least probability."""
    header = ["least probability", "accepted", *(f"AUC@{threshold}" for threshold in thresholds)]
    rows = [[f"{name} ({len(judged)})", *header[1:]], ["---"] * len(header)]
    for least in LEAST:
        accepted = np.mean([np.isfinite(each.error_at(least)) for each in judged])
        figures = accuracy(judged, least, thresholds)
        rows.append([f"{least:g}", f"{accepted:.2f}", *(f"{value:.3f}" for value in figures)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


# --- parts: A preset with one of its parts switched off, and what its decisions cost on pairs that need no
# more.

ALL = "all parts"
_REPEATS = 5  # of each timing, of which the median counts


_PASSES = {  # of `RetryConfig`, by what is switched off
    "other scales": ("scale",),
    "gradient images": ("gradients",),
    "second front end": ("features",),
    "vertical tilts": ("tilt_y", "tilt_y_turned"),
    "horizontal tilts": ("tilt_x",),
    "common region": ("region",),
}
PARTS = ("working size", "further passes", *_PASSES, "calibration")


def _without(config: PipelineConfig, part: str) -> PipelineConfig:
    if part == "working size":
        return replace(config, extractor=config.extractor.of_size(config.extractor.resize))
    if part == "further passes":
        return replace(config, second_pass=None)
    if part == "calibration":
        policy = replace(config.matcher.policy, calibration=None)
        return replace(config, matcher=replace(config.matcher, policy=policy))
    left = tuple(name for name in config.second_pass.passes if name not in _PASSES[part])
    return replace(config, second_pass=replace(config.second_pass, passes=left))


def without_each(preset: str, options: Mapping[str, Any]) -> list[Method]:
    """The preset whole, and without each of `PARTS`.

    Args:
        preset: with a network and further passes.
        options: of `load` that no configuration holds (device, precision).

    Raises:
        UsageError: a preset that lacks these parts.
        IntegrityError: weights that are absent or damaged.
    """
    config = find_preset(preset)
    if config.second_pass is None or not isinstance(config.matcher, NetworkConfig):
        raise UsageError(f"{preset} has no further passes to be switched off; use hybrid-learned")
    changed = {ALL: config, **{f"without {part}": _without(config, part) for part in PARTS}}
    return [Method(name, build_pipeline(preset, each, options)) for name, each in changed.items()]


@dataclass(frozen=True)
class DecisionTime:
    """CPU milliseconds a pair, medians over the pairs for which one pass was enough."""

    pairs: int
    whole: float  # read, extract, match, refine and verify, decisions included
    size: float  # choosing the working size of both images
    further: float  # deciding that no further pass is needed

    @property
    def share(self) -> float:
        """Of the time without decisions that the decisions add."""
        decisions = self.size + self.further
        return decisions / (self.whole - decisions)


def decision_time(pipeline: Pipeline, pairs: Sequence[Pair]) -> DecisionTime:
    """What the decisions cost where the first pass is confident.

    Raises:
        UsageError: no such pair.
    """
    rows = [row for pair in pairs if (row := _decision_of(pipeline, as_inputs(pair))) is not None]
    if not rows:
        raise UsageError("one pass is enough for none of these pairs")
    return DecisionTime(len(rows), *np.median(rows, axis=0).tolist())


def _decision_of(pipeline: Pipeline, inputs: Sequence[Any]) -> tuple[float, float, float] | None:
    result = pipeline.match(*inputs)
    if len(result.passes) > 1:
        return None
    extractor = replace(pipeline.config.extractor, soft_resize=None)
    fixed = replace(pipeline, config=replace(pipeline.config, extractor=extractor))
    images, features = [pipeline.read(each) for each in inputs], (result.features0, result.features1)

    def further() -> None:
        pipeline.passes(images, (), features, result.matches, result.geometry)

    chosen = _milliseconds(lambda: [pipeline.read(each) for each in inputs])
    size = max(0.0, chosen - _milliseconds(lambda: [fixed.read(each) for each in inputs]))
    return _milliseconds(lambda: pipeline.match(*inputs)), size, _milliseconds(further)


def _milliseconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS):
        start = process_time()
        work()
        times.append(1e3 * (process_time() - start))
    return float(np.median(times))
