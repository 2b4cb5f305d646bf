"""A matcher trained along with the front end: labels, gradients, and a whole small run."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from training_data import write_photos

import matcher
from matcher.config import AssignmentConfig, ContextConfig, NetworkConfig, PositionConfig
from matcher.errors import UsageError
from matcher.evaluate.folders import build_mixture
from matcher.evaluate.posed import HIDDEN, UNKNOWN, DensePair, quarter_turned
from matcher.evaluate.protocols import PhotoSet
from matcher.images import find_images
from matcher.match.network import MatchingNetwork
from matcher.match.position import normalise_positions
from matcher.train.cached_pairs import IGNORED, check_recipe
from matcher.train.front_end_training import (
    BatchKeypoints,
    FrontEndTrainer,
    keypoints_of,
    labelled,
    load_matcher,
    match_scores,
    train_front_end,
)
from matcher.train.matcher_training import RunOptions
from matcher.train.recipe import BatchRecipe, FrontEndRecipe, JointRecipe, KeypointRecipe, SmallScene
from matcher.train.views import BatchSampler, DenseBatch
from matcher.types import UNMATCHED
from matcher.weights.files import load_model, save_model

CPU = torch.device("cpu")
SIDE = 64
NETWORK = NetworkConfig(
    kind="learned",
    descriptor_dim=64,
    position=PositionConfig(inputs=("xy",)),
    context=ContextConfig(dim=32, heads=2, depth=2),
    guided=True,
    assignment=AssignmentConfig(consensus=1),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("joint")
    write_photos(root / "photos", 6)
    torch.manual_seed(0)
    save_model(MatchingNetwork(NETWORK), root / "random.safetensors")
    return root


@pytest.fixture(scope="module")
def recipe(folder) -> FrontEndRecipe:
    return FrontEndRecipe(
        trains="front end",
        name="small",
        scene=SmallScene(width=SIDE, height=SIDE),
        batch=BatchRecipe(pairs=2, turned_share=0.5),
        optimiser=KeypointRecipe(steps=4, warmup_steps=2, points=40, described=30),
        matcher=JointRecipe(start=str(folder / "random.safetensors"), name="matches", points=(24, 32)),
        validate_every=2,
        validation_pairs=2,
        validation_points=60,
        save_every=2,
    )


@pytest.fixture(scope="module")
def sampler(folder, recipe) -> BatchSampler:
    photos = PhotoSet(find_images(folder / "photos"), colour=True)
    return BatchSampler(build_mixture(photos, recipe.sources.shares(), scene=recipe.scene), recipe)


def shifted(turns: int = 0) -> DenseBatch:
    """One pair: image 1 shows image 0 moved 10 px to the right, and is then turned; of image 0 the left edge
    of what leaves the image is hidden, and ten rows are unknown."""
    y, x = np.mgrid[:SIDE, :SIDE].astype(np.float32)
    forward, backward = np.stack([x + 10, y]), np.stack([x - 10, y])
    forward[:, :, SIDE - 10 :] = HIDDEN
    backward[:, :, :10] = HIDDEN
    forward[:, :10] = UNKNOWN
    pixels = np.zeros((SIDE, SIDE), np.uint8)
    pair = quarter_turned(DensePair(pixels, pixels, forward, backward), turns)
    positions = torch.from_numpy(np.stack([pair.positions0, pair.positions1]))
    return DenseBatch(torch.zeros(2, 1, SIDE, SIDE), torch.tensor([0, turns]), positions)


def keypoints(batch: DenseBatch, points0: list, points1: list) -> BatchKeypoints:
    """Keypoints of image 1 are given as it was before it was turned."""
    points = torch.tensor([points0, points1], dtype=torch.float32)
    for _ in range(int(batch.turns[1])):
        points[1] = torch.stack([SIDE - 1 - points[1, :, 1], points[1, :, 0]], dim=1)
    corresponding, visible = batch.transfer(points)
    descriptors = torch.nn.functional.normalize(
        torch.randn(2, len(points0), 64, generator=torch.Generator().manual_seed(0)), dim=2
    )
    return BatchKeypoints(points, descriptors, corresponding, visible, torch.ones(2, len(points0)) > 0)


@pytest.mark.parametrize("turns", range(4))
def test_partners_are_found_by_their_positions(turns):
    batch = shifted(turns)
    mine = [[20, 20], [30, 30], [40, 40], [62, 30], [20, 2], [53.5, 50]]
    theirs = [[50, 40], [31, 20.5], [43.5, 30], [2, 30], [30, 2], [60, 60]]
    pairs = labelled(keypoints(batch, mine, theirs), batch, 6)
    # Matched, 3.5 px apart, matched, out of sight, known in one direction only, hidden beside a contour.
    assert pairs.partner0[0].tolist() == [1, IGNORED, 0, UNMATCHED, 4, IGNORED]
    assert pairs.partner1[0].tolist() == [2, 0, IGNORED, UNMATCHED, 4, UNMATCHED]


def test_contours_and_absent_keypoints_are_ignored():
    batch = shifted()
    points = keypoints(batch, [[20, 20], [55, 30], [20, 5]], [[45, 45], [8, 30], [10, 60]])
    pairs = labelled(replace(points, valid=torch.tensor([[True] * 3, [False, True, True]])), batch, 3)
    assert pairs.partner0[0].tolist() == [UNMATCHED, IGNORED, IGNORED]
    assert pairs.partner1[0].tolist() == [IGNORED, IGNORED, UNMATCHED]


@pytest.mark.parametrize("turns", range(4))
def test_a_turned_image_is_matched_as_the_other_one_stands(turns):
    upright, batch = shifted(), shifted(turns)
    points = [[20, 20], [30, 30], [40, 41]], [[30, 20], [40, 30], [50, 41]]
    expected = labelled(keypoints(upright, *points), upright, 3)
    pairs = labelled(keypoints(batch, *points), batch, 3)
    for side in ("features0", "features1"):
        positions = (normalise_positions(getattr(each, side)) for each in (pairs, expected))
        torch.testing.assert_close(*positions)
    assert torch.equal(pairs.partner0, expected.partner0)


def test_the_loss_of_the_matcher_reaches_the_descriptors(sampler, recipe):
    alone = replace(recipe.optimiser, description_weight=0.0, reliability_weight=0.0, refinement_weight=0.0)
    trainer = FrontEndTrainer(replace(recipe, optimiser=alone), CPU)
    trainer.loss(sampler.batch(0)).backward()
    network, ours = trainer.model.network, trainer.model.matcher
    assert any(p.grad is not None and float(p.grad.abs().max()) > 0 for p in network.parameters())
    assert float(ours.project.weight.grad.abs().max()) > 0
    assert all(
        p.grad is None for heads in (ours.confidence, ours.match_probability) for p in heads.parameters()
    )


def test_the_matcher_learns_at_its_own_rate(sampler, recipe):
    trainer = FrontEndTrainer(recipe, CPU)
    trainer.step(sampler.batch(0))
    front_end, matching = (o.param_groups[0]["lr"] for o in trainer.optimisers)
    assert matching == pytest.approx(0.25 * front_end)


def test_the_loss_falls_on_one_batch(sampler, recipe):
    trainer = FrontEndTrainer(replace(recipe, optimiser=replace(recipe.optimiser, steps=40)), CPU)
    batch = sampler.batch(0)
    values = [trainer.step(batch) for _ in range(40)]
    assert np.mean(values[-4:]) < 0.8 * np.mean(values[:3])


def test_matches_are_scored_where_their_partner_is_known(sampler, recipe):
    trainer, batch = FrontEndTrainer(recipe, CPU), sampler.batch(1)
    pairs = labelled(keypoints_of(trainer.average.network, batch, 30), batch, 30)
    scores = match_scores(trainer.average.matcher, [pairs], CPU)
    assert set(scores) == {"precision", "recall", "f1"} and all(0 <= x <= 1 for x in scores.values())
    nothing = replace(pairs, partner0=torch.full_like(pairs.partner0, IGNORED))
    nothing = replace(nothing, partner1=torch.full_like(pairs.partner1, IGNORED))
    assert match_scores(trainer.average.matcher, [nothing], CPU)["f1"] == 0


def test_a_run_writes_both_and_continues(folder, recipe, tmp_path):
    lines: list[str] = []

    def options(name: str) -> RunOptions:
        return RunOptions(folder / "photos", None, tmp_path / name)

    asked: list[None] = []

    def stopped() -> bool:
        asked.append(None)
        return len(asked) == 3

    weights = train_front_end(recipe, options("whole"), lines.append)
    matching = weights.with_name("matches.safetensors")
    assert lines[-2:] == [f"wrote {weights}", f"wrote {matching}"]
    rows = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert {"repeatability", "precision", "recall", "f1"} <= set(rows[-1])
    assert train_front_end(recipe, options("broken"), lines.append, stopped=stopped) is None
    train_front_end(recipe, options("broken"), lines.append)
    first, again = (load_model(tmp_path / name / "matches.safetensors")[0] for name in ("whole", "broken"))
    before = load_model(folder / "random.safetensors")[0].state_dict()
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert not torch.equal(first.project.weight, before["project.weight"])
    files = {"weights": matching, "frontend_weights": weights}
    photo = find_images(folder / "photos")[0]
    result = matcher.load("hybrid-learned", **files, second_pass=False).match(photo, photo)
    assert len(result.features0) > 0


def test_the_start_has_its_share_of_both(folder, recipe, tmp_path):
    torch.manual_seed(3)
    start = {"start": "learned", "optimiser": replace(recipe.optimiser, start_share=1.0)}
    train_front_end(
        replace(recipe, **start), RunOptions(folder / "photos", None, tmp_path / "run"), lambda line: None
    )
    written = load_model(tmp_path / "run" / "matches.safetensors")[0].state_dict()
    for name, value in load_model(folder / "random.safetensors")[0].state_dict().items():
        torch.testing.assert_close(written[name], value, atol=1e-3, rtol=1e-2, msg=name)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"points": (24, 9999)}, r"matcher\.points: at least 1, at most one to 100 pixels"),
        ({"points": ()}, r"matcher\.points"),
        ({"weight": 0.0}, r"matcher\.weight, matcher\.learning_rate: above 0"),
        ({"name": "small"}, r"matcher\.name: .* another than name"),
        ({"name": "a/b"}, r"matcher\.name"),
        ({"points_per_batch": -1}, r"matcher\.points_per_batch: 0 or above"),
        ({"muon_rate": -1.0}, r"matcher\.muon_rate: 0 or above"),
        ({"confidence_steps": -1}, r"matcher\.confidence_steps: 0 or above"),
        ({"gradient": -1.0}, r"matcher\.gradient"),
        ({"kept_shares": ()}, r"matcher\.kept_shares"),
        ({"kept_shares": (1.0, 1.5)}, r"matcher\.kept_shares"),
        ({"kept_shares": (0.5,)}, r"matcher\.kept_shares: .* 1 among them"),
        ({"start": ""}, r"matcher: only with matcher\.start"),
    ],
)
def test_impossible_values_are_refused(recipe, change, complaint):
    with pytest.raises(UsageError, match=complaint):
        check_recipe(replace(recipe, matcher=replace(recipe.matcher, **change)))


def test_a_matcher_of_other_keypoints_is_refused():
    with pytest.raises(UsageError, match=r"matcher\.start: hybrid matches the keypoints of sift"):
        load_matcher(JointRecipe(start="hybrid"))
    assert load_matcher(JointRecipe()) is None


def test_heads_for_pruning_learn_along_where_points_are_dropped(sampler, recipe):
    random, start = load_matcher(recipe.matcher), recipe.matcher.start + ".foreseeing.safetensors"
    save_model(MatchingNetwork(replace(random.config, match_probability=True)), start)
    joint = replace(recipe.matcher, start=start, kept_shares=(1.0, 0.5), points_per_batch=64)
    trainer = FrontEndTrainer(replace(recipe, matcher=joint), CPU)
    before = [p.detach().clone() for p in trainer.model.matcher.match_probability.parameters()]
    for number in range(4):
        assert np.isfinite(trainer.step(sampler.batch(number)))
    after = list(trainer.model.matcher.match_probability.parameters())
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    with pytest.raises(UsageError, match=r"matcher\.kept_shares: .* has no heads for pruning"):
        load_matcher(replace(joint, start=recipe.matcher.start))


def test_the_heads_for_early_exit_are_trained_in_the_end(folder, recipe, tmp_path):
    random, start = load_matcher(recipe.matcher), tmp_path / "two.safetensors"
    config = replace(random.config, context=replace(random.config.context, depth=2))
    torch.manual_seed(4)
    save_model(MatchingNetwork(config), start)
    before = load_model(start)[0].state_dict()
    joint = replace(recipe.matcher, start=str(start), confidence_steps=3)
    found, lines = {}, []
    for name, matching in (("without", replace(joint, confidence_steps=0)), ("with", joint)):
        options = RunOptions(folder / "photos", None, tmp_path / name)
        train_front_end(replace(recipe, matcher=matching), options, lines.append)
        found[name] = load_model(tmp_path / name / "matches.safetensors")[0].state_dict()
    heads = {name for name in before if name.startswith("confidence.")}
    assert heads and all(torch.equal(found["without"][name], before[name].half().float()) for name in heads)
    assert not any(torch.equal(found["with"][name], found["without"][name]) for name in heads)
    rest = found["with"].keys() - heads - {n for n in before if n.startswith("match_probability.")}
    assert all(torch.equal(found["with"][name], found["without"][name]) for name in rest)
    # Stopped during that stage, it goes on from there.
    stopping = iter([False] * recipe.optimiser.steps + [True])
    options = RunOptions(folder / "photos", None, tmp_path / "stopped")
    again = replace(recipe, matcher=joint)
    assert train_front_end(again, options, lines.append, stopped=lambda: next(stopping)) is None
    assert lines[-1] == "stopped at confidence step 1; the same command continues"
    train_front_end(again, options, lines.append)
    resumed = load_model(tmp_path / "stopped" / "matches.safetensors")[0].state_dict()
    assert all(torch.equal(resumed[name], found["with"][name]) for name in resumed)


def test_heads_for_early_exit_that_are_absent_are_not_trained_in_silence(recipe):
    random, start = load_matcher(recipe.matcher), recipe.matcher.start + ".single.safetensors"
    config = replace(random.config, context=replace(random.config.context, depth=1))
    save_model(MatchingNetwork(config), start)
    with pytest.raises(UsageError, match=r"matcher\.confidence_steps: .* has no heads for early exit"):
        load_matcher(replace(recipe.matcher, start=start, confidence_steps=1))


def test_more_points_can_be_matched_than_the_losses_of_keypoints_see(sampler, recipe):
    batch, few = sampler.batch(0), recipe.optimiser.points // 2
    joint = replace(recipe.matcher, points=(recipe.optimiser.points,), weight=1e-6)
    optimiser = replace(recipe.optimiser, points=few, described=few)
    losses = [
        FrontEndTrainer(replace(recipe, optimiser=optimiser, matcher=chosen), CPU).loss(batch)
        for chosen in (joint, replace(joint, points=(few,)))
    ]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)  # but for the matcher's, which weighs nothing
    alone = replace(optimiser, description_weight=0.0, reliability_weight=0.0, refinement_weight=0.0)
    counts = (recipe.optimiser.points, few)
    matched = [
        FrontEndTrainer(
            replace(recipe, optimiser=alone, matcher=replace(joint, weight=1.0, points=(count,))), CPU
        ).loss(batch)
        for count in counts
    ]
    assert abs(float(matched[0].detach() - matched[1].detach())) > 1e-3


def test_muon_trains_the_matrices_of_the_layers(sampler, recipe):
    trainer = FrontEndTrainer(replace(recipe, matcher=replace(recipe.matcher, muon_rate=2.0)), CPU)
    assert [type(optimiser).__name__ for optimiser in trainer.optimisers] == ["AdamW", "AdamW", "Muon"]
    trainer.step(sampler.batch(0))
    rates = [optimiser.param_groups[0]["lr"] for optimiser in trainer.optimisers]
    share = recipe.matcher.learning_rate
    assert rates == pytest.approx([rates[0], share * rates[0], 2 * share * rates[0]])


def test_a_part_of_the_batch_is_matched_and_a_part_of_the_gradient_reaches_the_descriptors(sampler, recipe):
    alone = replace(recipe.optimiser, description_weight=0.0, reliability_weight=0.0, refinement_weight=0.0)
    batch, found = sampler.batch(0), {}
    positions = batch.positions.clone()
    positions[2:] = HIDDEN  # of the second pair, which is not matched
    for gradient in (0.0, 0.5, 1.0):
        joint = replace(recipe.matcher, gradient=gradient, points_per_batch=64)
        trainer = FrontEndTrainer(replace(recipe, optimiser=alone, matcher=joint), CPU)
        loss = trainer.loss(batch)
        assert torch.equal(loss, trainer.loss(replace(batch, positions=positions)))
        loss.backward()
        found[gradient] = [
            None if p.grad is None else p.grad.clone() for p in trainer.model.network.descriptor.parameters()
        ]
    assert all(g is None or not g.any() for g in found[0.0])
    for half, whole in zip(found[0.5], found[1.0], strict=True):
        assert whole.any()
        torch.testing.assert_close(2 * half, whole, rtol=1e-3, atol=1e-6)
    everything = FrontEndTrainer(replace(recipe, optimiser=alone), CPU)
    assert not torch.equal(everything.loss(batch), everything.loss(replace(batch, positions=positions)))
