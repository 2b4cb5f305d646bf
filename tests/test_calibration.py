"""Match probabilities are calibrated alike in both engines, and again when a geometry is known."""

from dataclasses import astuple, replace
from pathlib import Path
from runpy import run_path

import cv2
import numpy as np
import pytest

import matcher
from matcher.config import CalibrationConfig, RefinedCalibrationConfig, VerifiedCalibrationConfig
from matcher.evaluate.run import reliability
from matcher.match.calibration import (
    calibrated,
    calibrated_by_geometry,
    geometry_regressors,
    refinement_regressors,
    regressors,
    with_prior_scores,
)
from matcher.types import Features, Matches, MatchRefinement, Repetition, TwoViewGeometry
from matcher.verify.overlay import common_overlay, on_overlay, without_overlay
from matcher.verify.repetition import repetition
from matcher.verify.verdict import reject_improbable, surest, verdict_of

FIT = run_path(Path(__file__).parent.parent / "scripts" / "fit.py")
REFINED = RefinedCalibrationConfig(
    offset=0.5, slope=0.8, refined=1.5, variance_slope=-0.5, further_passes=-0.7
)
VERIFIED = VerifiedCalibrationConfig(offset=-1.5, slope=0.5, inlier=2.0, share_slope=0.4)
CONFIG = CalibrationConfig(offset=0.9, slope=0.75, share_slope=0.8, refined=REFINED)
WITH_GEOMETRY = replace(CONFIG, refined=None, verified=VERIFIED)


def test_the_order_stays_and_fewer_partners_make_matches_less_probable():
    scores = np.linspace(1, 0, 50, dtype=np.float32)
    assert calibrated(scores, (5, 5), None) is scores and calibrated(scores[:0], (5, 5), CONFIG).shape == (0,)
    many, few = (calibrated(scores, (count, 4000), CONFIG) for count in (60, 600))
    assert many.dtype == np.float32 and (many >= few).all() and (many[1:-1] > few[1:-1] + 1e-4).any()
    for found in (many, few):
        assert (np.diff(found) <= 0).all() and found[0] <= 1 and found[-1] >= 0


def refined_matches(rng: np.random.Generator, count: int = 300) -> Matches:
    """Matches with random scores, two thirds of them refined, with variances from .001 to 1."""
    points = rng.uniform(0, 500, (2, count, 2)).astype(np.float32)
    variance = 10 ** rng.uniform(-3, 0, count)
    covariances = (variance[:, None, None] * np.diag([1.0, 0.5])).astype(np.float32)
    status = np.where(rng.uniform(size=count) < 2 / 3, 0, 5).astype(np.uint8)
    scores = rng.uniform(0.05, 0.99, count).astype(np.float32)
    refinement = MatchRefinement(status, covariances, np.ones(count, np.float32))
    return Matches(np.tile(np.arange(count), (2, 1)).T, *points, scores, refinement=refinement)


def verified_matches(rng: np.random.Generator, share: float) -> tuple[Matches, TwoViewGeometry]:
    """Matches with random scores of which a share are inliers."""
    matches = refined_matches(rng)
    inliers = rng.uniform(size=len(matches)) < share
    return matches, TwoViewGeometry("fundamental", "ok", inliers, np.eye(3))


def judged(stage: str, rng: np.random.Generator):
    """A pair whose matches are right as often as the calibration of a stage says."""
    if stage == "network":
        scores, counts = np.sort(rng.uniform(0.05, 0.99, 300))[::-1], (int(rng.integers(300, 2000)),) * 2
        true, values = calibrated(scores, counts, CONFIG), regressors(scores, counts)
    elif stage == "refinement":
        matches, further = refined_matches(rng), bool(rng.integers(2))
        scores = matches.scores
        true = with_prior_scores(matches, (1.0, 1.0), CONFIG, further).prior_scores
        values = refinement_regressors(matches, (1.0, 1.0), further)
    else:
        matches, geometry = verified_matches(rng, rng.uniform(0.05, 0.95))
        scores, values = matches.scores, geometry_regressors(matches, geometry)
        true = calibrated_by_geometry(matches, geometry, WITH_GEOMETRY).scores
    known = rng.uniform(size=len(scores)) < 0.9
    return FIT["JudgedPair"](scores, values, known, rng.uniform(size=len(scores)) < true)


@pytest.mark.parametrize(
    ("stage", "numbers", "within"),
    [
        ("network", astuple(CONFIG)[:3], 0.15),
        ("refinement", astuple(REFINED), 0.12),
        ("geometry", astuple(VERIFIED), 0.12),
    ],
)
def test_the_fit_finds_the_calibration_that_made_the_matches(stage, numbers, within):
    rng = np.random.default_rng(3)
    pairs, others = ([judged(stage, rng) for _ in range(80)] for _ in range(2))
    fitted = FIT["fitted_calibration"]([(pairs[:40], 1.0), (pairs[40:], 3.0)])
    np.testing.assert_allclose(fitted, numbers, atol=within)
    after, before = (FIT["error_under"](others, each) for each in (fitted, None))
    assert after < 0.03 < before


def test_both_engines_calibrate(views):
    pytest.importorskip("onnxruntime")
    options = {"max_keypoints": 256, "resize": 400, "further_passes": False}
    engine = matcher.load(**options, precision="float32", device="cpu")
    features = [engine.extract(view) for view in views]
    tables = [
        {tuple(indices): score for indices, score in zip(found.indices.tolist(), found.scores, strict=True)}
        for found in (
            each.match_features(*features) for each in (engine, matcher.load(**options, engine="onnx"))
        )
    ]
    common = tables[0].keys() & tables[1].keys()
    assert len(common) > 0.98 * len(tables[0])
    assert np.median([abs(tables[0][pair] - tables[1][pair]) for pair in common]) < 1e-3
    policy = replace(engine.config.matcher.policy, calibration=None)
    raw = replace(engine, matcher=engine.matcher.with_policy(policy)).match_features(*features)
    assert abs(raw.scores - engine.match_features(*features).scores).max() > 0.01


def test_a_more_exact_place_makes_a_refined_match_weigh_more():
    matches = refined_matches(np.random.default_rng(0))
    level = replace(matches, scores=np.full(len(matches), 0.5, np.float32))
    weighed = with_prior_scores(level, (1.0, 1.0), CONFIG)
    found = weighed.prior_scores
    np.testing.assert_array_equal(weighed.scores, level.scores)
    accepted, variance = matches.refinement.accepted, matches.covariances[:, 0, 0]
    order = np.argsort(variance[accepted])
    assert (np.diff(found[accepted][order]) <= 0).all() and np.ptp(found[accepted]) > 0.3
    assert np.ptp(found[~accepted]) == 0 and found[~accepted][0] < np.median(found[accepted])
    assert (with_prior_scores(level, (1.0, 1.0), CONFIG, True).prior_scores < found).all()


def test_inliers_and_matches_among_many_of_them_are_more_probable():
    matches, geometry = verified_matches(np.random.default_rng(4), 0.8)
    level = replace(matches, scores=np.full(len(matches), 0.5, np.float32))
    found = calibrated_by_geometry(level, geometry, WITH_GEOMETRY)
    assert found.scores[geometry.inliers].min() > found.scores[~geometry.inliers].max() + 0.3
    np.testing.assert_array_equal(found.prior_scores, level.scores)
    few = replace(geometry, inliers=geometry.inliers & (np.arange(len(matches)) < 40))
    fewer = calibrated_by_geometry(level, few, WITH_GEOMETRY)
    assert (fewer.scores[few.inliers] < found.scores[few.inliers]).all()
    refused = calibrated_by_geometry(level, replace(geometry, status="low_inliers"), WITH_GEOMETRY)
    assert (refused.scores < fewer.scores).all()
    plane = replace(geometry, status="degenerate", matrix=None, homography=np.eye(3))  # others may lie off it
    on_it = calibrated_by_geometry(level, plane, WITH_GEOMETRY).scores
    np.testing.assert_array_equal(on_it, np.where(geometry.inliers, found.scores, level.scores))


def test_a_pair_is_calibrated_again_after_verification_and_best_first(views):
    whole = matcher.load(max_keypoints=256, resize=400, device="cpu", further_passes=False)
    before = replace(whole, matcher=FIT["uncalibrated"]("hybrid-learned", "geometry").matcher)
    found, plain = whole.match(*views), before.match(*views)
    assert (np.diff(found.scores) <= 0).all() and found.geometry.inliers.sum() > 50
    again = calibrated_by_geometry(plain.matches, plain.geometry, whole.matcher.calibration)
    order = np.argsort(-again.scores, kind="stable")
    np.testing.assert_allclose(again.scores[order], found.scores, atol=1e-6)
    np.testing.assert_array_equal(found.points0, plain.points0[order])
    assert abs(np.sort(found.scores) - np.sort(plain.scores)).max() > 0.02


# --- Verdicts.


SIZE = (640, 480)


def pair_of(inliers: int, outliers: int, width: float = 600) -> tuple:
    """Matches and geometry; the inliers span `width` pixels."""
    rng = np.random.default_rng(0)
    count = inliers + outliers
    points = rng.uniform([0, 0], [width, width * 0.75], (count, 2))
    indices = np.repeat(np.arange(count)[:, None], 2, axis=1)
    matches = Matches.from_indices(indices, points, points, np.full(count, 0.7))
    return matches, TwoViewGeometry("fundamental", "ok", np.arange(count) < inliers), SIZE, SIZE


def test_the_verdict_follows_the_evidence():
    assert verdict_of(*pair_of(400, 50)).word == "same"
    assert verdict_of(*pair_of(0, 3)).word == "not"
    assert verdict_of(*pair_of(12, 20, width=100)).word == "not"
    probabilities = [verdict_of(*pair_of(count, 40)).probability for count in (10, 40, 160)]
    assert probabilities == sorted(probabilities) and probabilities[0] < probabilities[2] - 0.5
    spread = [verdict_of(*pair_of(40, 20, width=width)).probability for width in (60, 600)]
    assert spread[0] < spread[1] - 0.1


def test_inliers_that_are_improbable_count_little():
    matches, *rest = pair_of(110, 60)
    doubtful = replace(matches, scores=np.full(len(matches), 0.05, np.float32))
    assert verdict_of(matches, *rest).probability > 0.9
    assert verdict_of(doubtful, *rest).probability < 0.5
    assert verdict_of(replace(matches, scores=np.full(len(matches), np.nan)), *rest).word == "not"


@pytest.mark.parametrize(
    ("inliers", "probability", "accepted"),
    [
        (70, 0.47, {"fundamental", "essential", "homography", "homographies"}),
        (60, 0.43, {"essential", "homography", "homographies"}),
        (35, 0.25, {"homography", "homographies"}),
        (20, 0.12, set()),
    ],
)
def test_what_is_accepted_depends_on_how_much_a_match_can_contradict(inliers, probability, accepted):
    matches, geometry, *sizes = pair_of(inliers, 2 * inliers, width=300)
    assert verdict_of(matches, geometry, *sizes).probability == pytest.approx(probability, abs=0.04)
    kinds = ("fundamental", "essential", "homography", "homographies")
    found = {kind: reject_improbable(replace(geometry, kind=kind), matches, *sizes) for kind in kinds}
    assert {kind for kind in kinds if found[kind].status == "ok"} == accepted


def test_results_have_a_verdict(views):
    pipeline = matcher.load(max_keypoints=512, resize=480, device="cpu", further_passes=False)
    same = pipeline.match(*views)
    assert same.verdict.word == "same" and "the images show the same place" in same.summary()
    assert same.to_dict()["verdict"]["word"] == "same"
    noise = np.random.default_rng(0).integers(0, 256, (240, 320), dtype=np.uint8)
    other = pipeline.match(views[0], cv2.GaussianBlur(noise, (0, 0), 2))
    assert other.verdict.word == "not"
    assert matcher.load("nearest", geometry="none", max_keypoints=50).match(noise, noise).verdict is None
    doubtful = replace(same.matches, scores=np.full(len(same.matches), 0.0005, np.float32), prior=None)
    unknown = replace(same.geometry, repetition=None)
    denied = pipeline.calibrated(replace(same, matches=doubtful, geometry=unknown))
    assert denied.verdict.word == "not" and denied.geometry.rejected.inliers.sum() > 30
    assert denied.geometry.status == "low_inliers" and "no match: " in denied.summary()
    unlike = replace(unknown, repetition=Repetition(1.0, 1.0, differing=1.0))
    doubted = pipeline.calibrated(replace(same, geometry=unlike))
    assert doubted.verdict.differing and doubted.verdict.word == "not" and doubted.geometry.verified
    assert 0 < doubted.scores.max() <= doubted.verdict.probability


def test_calibrated_predictions_have_no_error():
    rng = np.random.default_rng(1)
    said = rng.uniform(size=20_000)
    right = rng.uniform(size=20_000) < said
    assert reliability(said, right).error < 0.02
    assert reliability(said, right & (said < 0)).error == pytest.approx(0.5, abs=0.01)
    found = reliability(np.array([0.05, 0.95, 1.0]), np.array([False, True, False]))
    assert found.count.tolist() == [1, *[0] * 8, 2] and found.accuracy[-1] == 0.5
    assert np.isnan(reliability(np.zeros(0), np.zeros(0, bool)).error)


# --- What is no evidence for one place: what repeats, and what lies over both pictures.


def features(points, descriptors, kind="learned"):
    units = (descriptors / np.linalg.norm(descriptors, axis=1, keepdims=True)).astype(np.float32)
    return Features(points, units, size=SIZE, kind=kind)


def walls(rng, things, the_same, kind="learned"):
    """Two images of walls papered with a motif of 20 keypoints, and `things` keypoints that do not repeat.

    Those of one wall are matched, as are all of the paper, if both images show it.
    """
    motif, offsets = rng.normal(size=(20, 64)), rng.uniform(0, 60, (20, 2))
    corners = np.stack(np.meshgrid(np.arange(0, 600, 80), np.arange(0, 440, 80)), -1).reshape(-1, 2)
    paper = (corners[:, None] + offsets).reshape(-1, 2)
    beside = rng.uniform(0, (600, 440), (things, 2))
    own = [rng.normal(size=(things, 64))] * 2 if the_same else rng.normal(size=(2, things, 64))
    sides = []
    for unique in own:
        descriptors = np.concatenate([np.tile(motif, (len(corners), 1)), unique])
        noise = rng.normal(0, 0.05, descriptors.shape)
        sides.append(features(np.concatenate([paper, beside]), descriptors + noise, kind))
    count = len(paper) + (things if the_same else 0)
    indices = np.repeat(np.arange(count)[:, None], 2, axis=1)
    matches = Matches.from_indices(indices, *(side.keypoints for side in sides), np.full(count, 0.9))
    return *sides, matches


def verdict(rng, *wall):
    *sides, matches = walls(rng, *wall)
    inliers = np.ones(len(matches), bool)
    found = repetition(*sides, matches, inliers)
    geometry = TwoViewGeometry("fundamental", "ok", inliers, np.eye(3), repetition=found)
    return found, verdict_of(matches, geometry, SIZE, SIZE)


@pytest.mark.parametrize("kind", ["learned", "sift"])
def test_another_wall_with_the_same_paper_and_the_same_wall(rng, kind):
    found, said = verdict(rng, 150, False, kind)
    assert found.repetitive and found.found < 0.5
    assert said.repetitive and said.probability < 0.2 and "repetitive" in str(said)
    found, said = verdict(rng, 150, True, kind)
    assert found.repetitive and found.found > 0.9 and said.word == "same"
    found, said = verdict(rng, 0, True, kind)  # paper alone cannot be told apart
    assert found.unrepeated < 0.1 and said.word != "same"


def test_what_is_a_little_alike_does_not_outvote_what_is_like_nothing(rng):
    """Corners of like windows, found in another façade, whose posters are not."""
    sides = list(walls(rng, 60, False)[:2])
    unit = rng.normal(size=(64, 150))
    unit /= np.linalg.norm(unit, axis=0)
    corners, places = sides[0].descriptors[:150] * 0.8 + 0.6 * unit.T, rng.uniform(0, (600, 440), (150, 2))
    paper = len(sides[0]) - 60
    sides = [
        features(np.concatenate([side.keypoints, places]), np.concatenate([side.descriptors, corners]))
        for side in sides
    ]
    found = np.r_[:paper, paper + 60 : paper + 210]
    matches = Matches.from_indices(
        np.repeat(found[:, None], 2, axis=1), *(side.keypoints for side in sides), np.full(len(found), 0.9)
    )
    assert repetition(*sides, matches, np.ones(len(found), bool)).found < 0.5


@pytest.mark.parametrize("the_same", [True, False])
def test_matches_of_further_passes_count_as_those_of_the_keypoints_there(rng, the_same):
    *sides, matches = walls(rng, 150, the_same)
    inliers = np.ones(len(matches), bool)
    further = replace(matches, indices=matches.indices + [len(side) for side in sides])
    found, wanted = (repetition(*sides, each, inliers) for each in (further, matches))
    assert found == pytest.approx(wanted, abs=0.02)


def test_inliers_that_lie_where_their_neighbours_foretell(rng):
    """A surface agrees locally; matches along epipolar lines agree on the geometry alone."""
    points, inliers = rng.uniform(0, SIZE, (120, 2)), np.ones(120, bool)

    def said(moved: np.ndarray, unrepeated: float, kind: str = "fundamental") -> float:
        matches = Matches.from_indices(np.c_[:120, :120], points, moved, np.full(120, 0.05))
        repeated = Repetition(unrepeated, 1.0)
        return verdict_of(
            matches, TwoViewGeometry(kind, "ok", inliers, repetition=repeated), SIZE, SIZE
        ).probability

    surface = points * 0.9 + [20, 10] + rng.normal(0, 0.3, points.shape)
    scattered = points + rng.uniform(-80, 80, (120, 1)) * [1, 0]
    assert said(surface, 1.0) > said(scattered, 1.0) + 0.1
    assert said(surface, 0.25) == pytest.approx(said(scattered, 0.25), abs=0.05)
    assert said(surface, 1.0, "homography") == pytest.approx(said(scattered, 1.0), abs=0.05)


@pytest.mark.parametrize("kind", ["fundamental", "homography"])
def test_a_mirrored_picture_is_neither_used_nor_called_another_place(rng, kind):
    points = rng.uniform(0, (640, 480), (200, 2))
    mirrored = points * [-1, 1] + [639, 0] + rng.normal(0, 0.3, points.shape)
    side0, side1 = (features(each, rng.normal(size=(200, 64))) for each in (points, mirrored))
    indices = np.repeat(np.arange(200)[:, None], 2, axis=1)
    matches = Matches.from_indices(indices, points, mirrored, np.full(200, 0.9))
    geometry = matcher.load("nearest", geometry=kind).verify(side0, side1, matches)
    assert geometry.status == "mirrored" and not geometry.verified
    assert verdict_of(matches, geometry, SIZE, SIZE).word == "unsure"


@pytest.mark.parametrize(("the_same", "repeated"), [(True, 0), (False, 0), (True, 4), (False, 4)])
def test_equal_things_before_another_wall(rng, the_same, repeated):
    """Matches of the things alone, most of them equal, or none; what is between resembles its like."""
    middles = rng.uniform(100, (540, 380), (6, 2))
    things = (middles[:, None] + rng.uniform(-30, 30, (6, 40, 2))).reshape(-1, 2)
    points = np.concatenate([things, rng.uniform(0, (640, 480), (400, 2))])
    descriptors, inliers = rng.normal(size=(640, 64)), np.ones(240, bool)
    descriptors[: 40 * repeated] = np.tile(descriptors[:40], (repeated, 1))
    other = descriptors + 0.5 * rng.normal(size=(640, 64))
    other[240:] = other[240:] + 0.5 * rng.normal(size=(400, 64)) if the_same else rng.normal(size=(400, 64))
    sides = features(points, descriptors), features(points * 0.95 + 15, other)
    matches = Matches.from_indices(np.c_[:240, :240], *(each.keypoints for each in sides), np.full(240, 0.99))
    found = repetition(*sides, matches, inliers)
    geometry = TwoViewGeometry("fundamental", "ok", inliers, np.eye(3), repetition=found)
    said = verdict_of(matches, geometry, SIZE, SIZE)
    assert (surest(geometry) < 0.1) is not the_same and found.repetitive is (repeated > 0)
    assert said.word == ("not" if not the_same else "unsure" if repeated else "same")
    assert said.differing is ("what is around the matches differs" in str(said)) is not the_same
    alien = features(sides[1].keypoints, other[:, :32], "xfeat")  # nothing is known of two kinds together
    assert repetition(sides[0], alien, matches, inliers).differing == 0


def test_so_much_is_found_around_what_repeats_that_the_place_is_certain():
    inliers, points = np.ones(300, bool), np.random.default_rng(0).uniform(0, SIZE, (300, 2))
    matches = Matches.from_indices(np.c_[:300, :300], points, points, np.ones(300))

    def said(share: float, found: float) -> float:
        repeated = Repetition(0.04, found, share)
        geometry = TwoViewGeometry("fundamental", "ok", inliers, np.eye(3), repetition=repeated)
        return verdict_of(matches, geometry, SIZE, SIZE).probability

    assert said(0.25, 0.85) < 0.9 < said(0.4, 0.85)
    assert said(0.4, 0.55) == said(0.25, 0.55) < 0.9  # repeated ones are found much more often


def test_what_does_not_repeat(rng):
    points, descriptors = rng.uniform(0, (640, 480), (300, 2)), rng.normal(size=(300, 64))
    side = features(points, descriptors)
    indices = np.repeat(np.arange(300)[:, None], 2, axis=1)
    matches, every = Matches.from_indices(indices, points, points, np.ones(300)), np.ones(300, bool)
    assert repetition(side, side, matches, every) == Repetition(1.0, 1.0)
    assert repetition(side, side, matches, ~every) is None
    absent = replace(side, descriptors=np.zeros((300, 0), np.float32))
    assert repetition(absent, side, matches, every) is None


def corners(points):
    return features(np.clip(points, 0, SIZE), np.ones((len(points), 4)))


def pair(rng, overlay, shift, matched=300):
    """Keypoints of a stamp, then of a scene that moves by `shift`, half of which are matched."""
    stamp = rng.uniform((20, 430), (250, 460), (overlay, 2))
    scene = rng.uniform((0, 0), (620, 420), (600, 2))
    points0, points1 = np.concatenate([stamp, scene]), np.concatenate([stamp, scene + shift])
    points1 += rng.normal(0, 0.2, points1.shape)
    indices, ends = np.repeat(np.arange(overlay + matched)[:, None], 2, axis=1), (points0, points1)
    return *map(corners, ends), Matches.from_indices(indices, *ends, np.ones(len(indices)))


def test_a_stamp_on_a_scene_that_moves_and_on_unrelated_pictures(rng):
    found = on_overlay(*(given := pair(rng, 60, (90.0, 15.0))))
    assert found[:60].all() and not found[60:].any()
    assert (len(kept := without_overlay(*given)), kept.overlay.shape) == (300, (60, 2, 2))
    ends = [np.asarray(side.keypoints) for side in given[:2]]
    given[2].indices[40:60] = np.c_[40:60, 59:39:-1]  # letters with like ones elsewhere on the stamp
    mixed = Matches.from_indices(given[2].indices, *ends, np.ones(360))
    near = np.linalg.norm(mixed.points1 - mixed.points0, axis=1)[40:60] < 48
    assert near.sum() > 3 and len(without_overlay(*given[:2], mixed)) == 320 - near.sum()
    features0, _, matches = pair(rng, 60, 0.0, matched=0)
    points1 = np.concatenate([matches.points1, rng.uniform((0, 0), (620, 420), (600, 2))])
    assert not len(without_overlay(features0, corners(points1), matches))


def test_a_camera_that_stands_still_moves_a_little_or_drives_ahead_sees_far_points_at_rest(rng):
    for matched in (20, 300, 600):
        assert not on_overlay(*pair(rng, 60, 0.0, matched=matched)).any()
    features0, _, matches = pair(rng, 0, 0.0)
    points0, middle = matches.points0, np.array([320.0, 240.0])
    moved = points0 + rng.uniform(0, 6, (300, 1)) * np.array([1.0, 0.0])
    ahead = points0 + 0.03 * (points0 - middle) + np.where(np.arange(300)[:, None] < 60, 0, 6.0)
    ahead[:60] = points0[:60] + rng.uniform(0.7, 1.3, (60, 1)) * np.array([1.0, 0.0])
    for points1 in (moved, ahead):
        given = Matches(matches.indices, points0, points1.astype(np.float32), matches.scores)
        assert not on_overlay(features0, corners(points1), given).any()


@pytest.mark.parametrize("same", [False, True])
def test_a_mount_that_two_scans_have_is_an_overlay_and_the_picture_on_it_is_not(rng, same):
    places = rng.uniform(0, SIZE, (900, 2))
    within = np.all(np.abs(places / SIZE - 0.5) < 0.35, axis=1)
    moved = places @ (1.1 * cv2.Rodrigues(np.array([0, 0, 0.02]))[0][:2, :2].T) + [12, 5]
    other = np.where(within[:, None] & (not same), rng.uniform(0.2, 0.8, (900, 2)) * SIZE, moved)
    matched = np.flatnonzero(~within | same)
    index = np.repeat(matched[:, None], 2, axis=1)
    matches = Matches.from_indices(index, places, other, np.full(len(index), 0.9))
    scans = corners(places), corners(other)
    assert (on_overlay(*scans, matches) == (not same)).all()


def keypoints_of(rng, count, stamp=60, still=0, shake=0.0):
    """Keypoints of pictures 640 x 480: of a stamp, most of them found again, of a scene that stands still or
    turns a little about its middle, and of others."""
    stamp, scene = rng.uniform((20, 430), (250, 460), (stamp, 2)), rng.uniform((0, 0), (620, 420), (still, 2))
    for _ in range(count):
        turn = cv2.getRotationMatrix2D((310, 210), shake * rng.normal(), 1)
        shown = np.concatenate([stamp, scene @ turn[:, :2].T + turn[:, 2]])
        shown = shown[rng.random(len(shown)) < 0.85]
        yield np.concatenate([shown + rng.normal(0, 0.2, shown.shape), rng.uniform(0, (640, 480), (500, 2))])


def test_what_lies_over_most_pictures_of_a_camera(rng):
    given = list(keypoints_of(rng, 9))
    found = common_overlay([2 * points for points in given], (1280, 960), (0.5, 0.5))
    beside = found.beside(2 * np.concatenate(given))
    stamp = np.all(np.abs(np.concatenate(given) - (135, 445)) < (110, 15), axis=1)
    assert beside[stamp].mean() < 0.05 and beside[~stamp].mean() > 0.9
    assert 0.02 < found.mask.mean() < 0.1 and abs(found.mask.shape[0] - 480) < 3
    for other in (dict(stamp=0), dict(still=3000), dict(still=3000, shake=0.4)):
        assert common_overlay(list(keypoints_of(rng, 12, **other)), (640, 480), (1.0, 1.0)) is None
    assert common_overlay(given[:5], (640, 480), (1.0, 1.0)) is None, "too few pictures tell nothing"
