"""Training of the front end: batches, losses, steps and a whole small run."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from training_data import write_photos, write_views

from matcher.cli import main
from matcher.config import ExtractorConfig
from matcher.errors import IntegrityError, UsageError
from matcher.evaluate.folders import SourceShares, build_mixture
from matcher.evaluate.posed import HIDDEN, VISIBLE_STATE, DensePair, dominant_turn, quarter_turned, transfer
from matcher.evaluate.protocols import PhotoSet
from matcher.evaluate.synthetic import NOTHING, View, plane_positions
from matcher.extract.learned import DESCRIPTOR_DIM, Architecture, FeatureNetwork, architecture_of, folded
from matcher.geometry import warp_points
from matcher.images import find_images
from matcher.torch_engine import build_extractor
from matcher.train import losses
from matcher.train.cached_pairs import read_recipe, shipped_recipe
from matcher.train.front_end_training import FrontEndTrainer, mean_of, strongest, train_front_end
from matcher.train.matcher_training import RunOptions
from matcher.train.recipe import BatchRecipe, FrontEndRecipe, KeypointRecipe, SmallScene
from matcher.train.views import BatchSampler
from matcher.types import Image
from matcher.weights.files import save_front_end

CPU = torch.device("cpu")
TINY = FrontEndRecipe(
    trains="front end",
    name="small",
    scene=SmallScene(width=96, height=64),
    batch=BatchRecipe(pairs=2),
    optimiser=KeypointRecipe(steps=4, warmup_steps=2, points=60, described=40),
    validate_every=2,
    validation_pairs=2,
    validation_points=80,
    save_every=2,
)
TINY_TOML = """
trains = "front end"
name = "small"
scene = {width = 96, height = 64}
batch.pairs = 2
optimiser = {steps = 4, warmup_steps = 2, points = 60, described = 40}
validate_every = 2
validation_pairs = 2
validation_points = 80
save_every = 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("keypoints")
    write_photos(root / "photos", 8)
    (root / "photos" / "broken.jpg").write_text("text")
    (root / "small.toml").write_text(TINY_TOML)
    return root


@pytest.fixture(scope="module")
def sampler(folder) -> BatchSampler:
    return sampler_of(folder, TINY)


def sampler_of(folder: Path, recipe: FrontEndRecipe) -> BatchSampler:
    photos = PhotoSet(find_images(folder / "photos"), colour=True)
    return BatchSampler(build_mixture(photos, recipe.sources.shares(), scene=recipe.scene), recipe)


def flat(homography: np.ndarray, height: int = 60, width: int = 80) -> View:
    return View(np.zeros((height, width), np.uint8), np.zeros((height, width), np.uint8), homography[None])


def test_positions_follow_the_homographies(rng):
    first = np.eye(3)
    second = np.array([[0.9, -0.1, 7], [0.12, 1.1, -3], [1e-3, 5e-4, 1]])
    positions = plane_positions(flat(first), flat(second))
    corners = rng.integers(0, (80, 60), (200, 2))
    expected = warp_points(corners.astype(float), second)
    inside = ((expected >= 0) & (expected <= (79, 59))).all(1)
    found = positions[:, corners[:, 1], corners[:, 0]].T
    np.testing.assert_allclose(found[inside], expected[inside], atol=1e-3)
    assert inside.any() and not inside.all()
    assert bool((found[~inside] == HIDDEN).all())


@pytest.mark.parametrize("turns", range(4))
def test_a_rotated_pair_keeps_its_correspondences(rng, turns):
    pixels = rng.integers(0, 256, (64, 64)).astype(np.uint8)
    H = np.array([[1.1, 0, 3], [0, 0.9, -2], [0, 0, 1.0]])
    view = flat(np.eye(3), 64, 64), flat(H, 64, 64)
    known = plane_positions(*view), plane_positions(*view[::-1])
    pair = quarter_turned(DensePair(pixels, pixels, *known), turns)
    assert (turns == 0) == np.array_equal(pair.pixels1, pixels)
    assert dominant_turn(pair) == turns and dominant_turn(pair.swapped()) == -turns % 4
    y, x = np.nonzero(pair.positions0[0] >= 0)
    transferred = pair.positions0[:, y, x].T
    back, state = transfer(transferred, pair.positions1)
    certain = state == VISIBLE_STATE
    assert certain.mean() > 0.8
    np.testing.assert_allclose(back[certain], np.column_stack([x, y])[certain], atol=0.1)
    # Clockwise, as y points down: what was on the right comes to the bottom.
    if turns == 1:
        assert bool((pair.pixels1[-1] == pixels[::-1, -1]).all())


def test_some_pairs_are_turned(folder):
    scene, shape = SmallScene(width=64, height=64), BatchRecipe(pairs=8, turned_share=0.7)
    batch = sampler_of(folder, replace(TINY, scene=scene, batch=shape)).batch(0)
    assert batch.turns[::2].tolist() == [0] * 8
    assert 0 < int((batch.turns[1::2] > 0).sum()) < 8


def test_occluded_pixels_are_hidden():
    view, other = flat(np.eye(3)), flat(np.eye(3))
    other.labels[:, :40] = NOTHING
    positions = plane_positions(view, other)
    assert bool((positions[:, :, :40] == HIDDEN).all())
    assert bool((positions[0, :, 40:] == np.arange(40, 80)).all())


def test_batches_repeat_and_differ(sampler):
    first, again, other = sampler.batch(3), sampler.batch(3), sampler.batch(4)
    assert torch.equal(first.pixels, again.pixels) and torch.equal(first.positions, again.positions)
    assert not torch.equal(first.pixels, other.pixels)
    assert first.pixels.shape == (4, 1, 64, 96) and first.positions.shape == (4, 2, 64, 96)
    assert len(first) == 2
    prepared = list(sampler.batches(3, 5, readers=2))
    assert torch.equal(prepared[0].pixels, first.pixels) and torch.equal(prepared[1].pixels, other.pixels)


def test_a_run_trains_on_relief_and_stored_views(folder, tmp_path):
    write_views(tmp_path / "views" / "place_1", 1)
    recipe = replace(TINY, sources=SourceShares(planes=0.0, relief=1.0, real=1.0), validation_pairs=1)
    options = RunOptions(folder / "photos", None, tmp_path / "run", real=tmp_path / "views")
    assert train_front_end(recipe, options, lambda line: None).exists()
    with pytest.raises(UsageError, match=r"sources\.rendered"):
        train_front_end(
            replace(recipe, sources=SourceShares(rendered=1.0)),
            RunOptions(folder / "photos", None, tmp_path / "other"),
            lambda line: None,
        )


def test_positions_of_a_pair_are_inverse(sampler):
    batch = sampler.batch(0)
    points = torch.stack(torch.meshgrid(torch.arange(8.0, 88), torch.arange(8.0, 56), indexing="xy"), -1)
    points = points.reshape(1, -1, 2).repeat(len(batch.pixels), 1, 1)
    transferred, visible = batch.transfer(points)
    back, again = batch.transfer(losses.other_of_pair(transferred))
    both = losses.other_of_pair(again) & visible
    error = (losses.other_of_pair(back) - points).norm(dim=-1)[both]
    assert both.any()
    assert float(error.median()) < 0.05


def test_other_of_pair_swaps_the_images_of_each_pair():
    assert losses.other_of_pair(torch.arange(6)).tolist() == [1, 0, 3, 2, 5, 4]


def described(
    own: torch.Tensor, corresponding: torch.Tensor, spacing: float = 20.0
) -> losses.DescribedKeypoints:
    points = torch.arange(5.0)[None, :, None].expand(2, 5, 2) * spacing
    return losses.DescribedKeypoints(own, corresponding, points, points, torch.ones(2, 5, dtype=torch.bool))


def random_descriptors(seed: int) -> torch.Tensor:
    values = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(values, dim=-1)


def test_description_loss_wants_each_descriptor_at_its_position():
    own = random_descriptors(0)
    own = own[:1].expand(2, 5, 8)  # the same in both images
    valid, chosen = torch.ones(2, 5, dtype=torch.bool), torch.arange(5)
    scale = torch.tensor(20.0)
    right = losses.description_loss(described(own, own), chosen, valid, scale, 4.0)
    wrong = losses.description_loss(described(own, own.roll(1, 1)), chosen, valid, scale, 4.0)
    assert right < 0.5 < wrong
    crowded = described(own, own.roll(1, 1), spacing=1.0)
    assert float(losses.description_loss(crowded, chosen, valid, scale, 40.0)) == pytest.approx(0, abs=1e-5)
    assert float(losses.description_loss(described(own, own), chosen, ~valid, scale, 4.0)) == 0


def test_keypoints_that_are_not_supervised_are_negatives():
    own = random_descriptors(0)[:1].expand(2, 5, 8)
    chosen, valid, scale = torch.arange(2), torch.ones(2, 2, dtype=torch.bool), torch.tensor(20.0)
    repeated = torch.cat([own[:, :4], own[:, :1]], dim=1)  # the last keypoint has the first one's descriptor
    apart = losses.description_loss(described(own, own), chosen, valid, scale, 4.0)
    confused = losses.description_loss(described(repeated, repeated), chosen, valid, scale, 4.0)
    assert confused > apart + 0.5
    absent = described(repeated, repeated)
    absent.valid[:, 4] = False
    assert losses.description_loss(absent, chosen, valid, scale, 4.0) < apart + 0.1


def test_refinement_and_reliability_by_hand():
    corresponding = torch.tensor([[[1.0, 2.0], [5.0, 5.0]]])
    others = torch.tensor([[[5.0, 8.0], [1.0, 4.0]]])
    nearest, counted = torch.tensor([[1, 0]]), torch.tensor([[True, False]])
    assert float(losses.refinement_loss(corresponding, others, nearest, counted)) == pytest.approx(2 - 0.125)
    found, visible = torch.tensor([[True, False, True]]), torch.tensor([[True, True, False]])
    expected = np.mean([np.log1p(np.exp(-2.0)), np.log1p(np.exp(-1.0))])
    logits = torch.tensor([[2.0, -1.0, 9.0]])
    assert float(losses.reliability_loss(logits, found, visible)) == pytest.approx(expected, rel=1e-5)


def test_the_strongest_points_are_peaks_away_from_the_edge():
    logits = torch.full((1, 40, 50), -1.0)
    logits[0, 20, 30], logits[0, 21, 31], logits[0, 10, 10], logits[0, 1, 1] = 5, 4, 3, 9
    points, held = strongest(logits + torch.linspace(0, 1e-3, 2000).view(1, 40, 50), 3)
    assert points[0, :2].tolist() == [[30, 20], [10, 10]]
    assert held.tolist() == [[True, True, False]]  # the ramp's own peak lies on the edge


def test_the_loss_falls_on_one_batch(sampler):
    trainer = FrontEndTrainer(replace(TINY, optimiser=replace(TINY.optimiser, steps=40)), CPU)
    batch = sampler.batch(0)
    values = [trainer.step(batch) for _ in range(40)]
    assert np.mean(values[-4:]) < 0.75 * np.mean(values[:3])
    assert trainer.progress.pairs == 80


def test_a_resumed_trainer_equals_an_unbroken_one(sampler, tmp_path):
    unbroken, first, second = (FrontEndTrainer(TINY, CPU) for _ in range(3))
    for step in range(4):
        unbroken.step(sampler.batch(step))
    for step in range(2):
        first.step(sampler.batch(step))
    first.save(tmp_path / "checkpoint.pt")
    second.resume(tmp_path / "checkpoint.pt")
    for step in range(2, 4):
        second.step(sampler.batch(step))
    for expected, found in ((unbroken.model, second.model), (unbroken.average, second.average)):
        for name, value in expected.state_dict().items():
            assert torch.equal(value, found.state_dict()[name]), name


def test_training_goes_on_from_a_weights_file(sampler, tmp_path):
    first = FrontEndTrainer(TINY, CPU)
    for step in range(4):
        first.step(sampler.batch(step))
    save_front_end(folded(first.average.network), "learned", tmp_path / "first.safetensors")
    still = replace(TINY.optimiser, learning_rate=1e-12, weight_decay=0.0)
    second = FrontEndTrainer(replace(TINY, start=str(tmp_path / "first.safetensors"), optimiser=still), CPU)
    second.step(sampler.batch(4))
    pixels = sampler.batch(4).pixels
    with torch.no_grad():
        expected = folded(first.average.network)(pixels)[0]
        found = second.model.network.train()(pixels)[0]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


SMALLER = Architecture(widths=(16, 32, 64, 128), depths=(2, 2, 3, 3), hidden=256)
LARGER = Architecture(widths=(16, 32, 64, 128, 24), depths=(2, 2, 3, 3, 1), hidden=260)


def test_a_network_grows_from_a_smaller_file_and_is_written_whole(folder, tmp_path):
    first = random_front_end(tmp_path / "small.safetensors", 1, SMALLER)
    recipe = replace(TINY, start=str(tmp_path / "small.safetensors"), network=LARGER)
    weights = train_front_end(recipe, RunOptions(folder / "photos", None, tmp_path / "run"), [].append)
    written = parameters_of(weights)
    assert architecture_of({name: value.shape for name, value in written.items()}) == LARGER
    assert written["lift.3.weight"].abs().sum() > 0  # began with 0
    assert not torch.equal(written["points.weight"], first["points.weight"])


def test_a_network_does_not_shrink(tmp_path):
    save_front_end(FeatureNetwork(LARGER), "learned", tmp_path / "large.safetensors")
    with pytest.raises(
        UsageError, match=r"64 128, .* is smaller than .*large\.safetensors, widths 16 32 64 128 24"
    ):
        FrontEndTrainer(replace(TINY, start=str(tmp_path / "large.safetensors"), network=SMALLER), CPU)


def test_a_small_and_a_large_start_have_a_mean_and_their_share(folder, tmp_path):
    save_front_end(FeatureNetwork(LARGER), "learned", tmp_path / "large.safetensors")
    random_front_end(tmp_path / "small.safetensors", 1, SMALLER)
    start = [str(tmp_path / f"{name}.safetensors") for name in ("small", "large")]
    mean = mean_of(start, LARGER).state_dict()
    recipe = replace(TINY, start=start[0], start_also=(start[1],), network=LARGER)
    recipe = replace(recipe, optimiser=replace(TINY.optimiser, start_share=1.0))
    weights = train_front_end(recipe, RunOptions(folder / "photos", None, tmp_path / "run"), [].append)
    for name, value in parameters_of(weights).items():
        torch.testing.assert_close(value, mean[name], atol=1e-3, rtol=1e-2, msg=name)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("widths = [16, 32]", "as many widths as depths"),
        ("widths = [16, 32, 64, 128, 192]\ndepths = [2, 2, 3, 4, 0]", "sizes of at least 1"),
        ("widths = [9, 9, 9, 9, 9, 9]\ndepths = [1, 1, 1, 1, 1, 1]", "multiples of 64"),
        ("hidden = 5000", "at most 4096"),
        (f"widths = {[2] * 5000}\ndepths = {[2] * 5000}", "at most 6"),
        ("doubt = 3", "unknown key doubt"),
    ],
)
def test_sizes_that_no_network_has_are_refused(tmp_path, network, message):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"{TINY_TOML}\n[network]\n{network}\n")
    with pytest.raises(UsageError, match=message):
        read_recipe(recipe)


def random_front_end(path: Path, seed: int, sizes: Architecture = Architecture()) -> dict[str, torch.Tensor]:
    """Writes a front end of random parameters; returns them."""
    torch.manual_seed(seed)
    save_front_end(FeatureNetwork(sizes), "learned", path)
    return parameters_of(path)


def parameters_of(path: Path) -> dict[str, torch.Tensor]:
    network = build_extractor(ExtractorConfig(kind="learned"), path, precision="float32").network
    return network.state_dict()


def test_training_starts_from_the_mean_of_several_files(tmp_path):
    each = [random_front_end(tmp_path / f"{seed}.safetensors", seed) for seed in range(3)]
    mean = mean_of([str(tmp_path / f"{seed}.safetensors") for seed in range(3)], Architecture())
    for name, value in mean.state_dict().items():
        torch.testing.assert_close(value, sum(one[name] for one in each) / 3, msg=name)


def test_the_start_has_its_share_of_the_result(folder, tmp_path):
    first, second = (random_front_end(tmp_path / f"{seed}.safetensors", seed) for seed in (1, 2))
    start = {"start": str(tmp_path / "1.safetensors"), "start_also": (str(tmp_path / "2.safetensors"),)}
    blended = replace(TINY, **start, optimiser=replace(TINY.optimiser, start_share=1.0))
    weights = train_front_end(blended, RunOptions(folder / "photos", None, tmp_path / "run"), [].append)
    for name, value in parameters_of(weights).items():
        torch.testing.assert_close(value, (first[name] + second[name]) / 2, atol=1e-3, rtol=1e-2, msg=name)


def test_shares_of_a_start_need_one(folder, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(TINY_TOML + 'start_also = ["learned"]\n')
    with pytest.raises(UsageError, match=r"start_also, optimiser\.start_share: only with start"):
        read_recipe(recipe)


def test_absent_weights_of_a_front_end_to_start_from_are_named(tmp_path):
    with pytest.raises(IntegrityError, match=r"absent\.safetensors"):
        FrontEndTrainer(replace(TINY, start=str(tmp_path / "absent.safetensors")), CPU)


def test_a_run_writes_weights_that_find_points(folder, rng, tmp_path):
    lines: list[str] = []
    weights = train_front_end(TINY, RunOptions(folder / "photos", None, tmp_path / "run"), lines.append)
    assert lines[0] == "9 photos to train on, 1 to validate on".replace("9", "8")
    assert lines[-1] == f"wrote {weights}"
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert {"repeatability", "precision", "recall", "error", "f1"} <= set(rows[-1])
    config = ExtractorConfig(kind="learned", max_keypoints=50)
    pixels = rng.integers(0, 256, (90, 120)).astype(np.uint8)
    (features,) = build_extractor(config, weights)([Image(pixels, (120, 90))])
    assert 0 < len(features) <= 50 and features.descriptors.shape[1] == DESCRIPTOR_DIM


def test_a_run_stopped_and_continued_gives_the_same_weights(folder, tmp_path):
    def options(name: str) -> RunOptions:
        return RunOptions(folder / "photos", None, tmp_path / name)

    asked: list[None] = []

    def stopped() -> bool:
        asked.append(None)
        return len(asked) == 3

    whole = train_front_end(TINY, options("whole"), lambda line: None)
    assert train_front_end(TINY, options("broken"), lambda line: None, stopped=stopped) is None
    continued = train_front_end(TINY, options("broken"), lambda line: None)
    networks = [build_extractor(ExtractorConfig(kind="learned"), path).network for path in (whole, continued)]
    for name, value in networks[0].state_dict().items():
        assert torch.equal(value, networks[1].state_dict()[name]), name


def test_the_command_trains_a_front_end(folder, tmp_path, capsys):
    given = {"--recipe": folder / "small.toml", "--photos": folder / "photos", "--run": tmp_path / "run"}
    code = main(["train", *(str(part) for pair in given.items() for part in pair)])
    assert code == 0
    assert "step 4 validation: repeatability" in capsys.readouterr().out
    assert (tmp_path / "run" / "small.safetensors").exists()
    assert (tmp_path / "run" / "curve.png").exists()


def test_recipes_of_both_kinds_are_distinguished(folder, tmp_path):
    assert read_recipe(folder / "small.toml") == TINY
    assert isinstance(read_recipe(shipped_recipe("learned")), FrontEndRecipe)
    for change, complaint in [
        ('trains = "matcher"', "trains"),
        ('trains = "front end"\nscene = {width = 100}', "multiples of 32"),
        ('trains = "front end"\noptimiser.described = 500', "optimiser.described"),
        ('trains = "front end"\nsources.planes = -1', "sources"),
        ('trains = "front end"\nbatch.turned_share = 0.5', "square"),
        ('trains = "front end"\npair = {}', "unknown key pair"),
    ]:
        (tmp_path / "bad.toml").write_text(change)
        with pytest.raises(UsageError, match=complaint):
            read_recipe(tmp_path / "bad.toml")


def test_a_table_that_names_one_key_keeps_the_others(tmp_path):
    (tmp_path / "turned.toml").write_text('trains = "front end"\nscene.max_roll = 10.0')
    scene = read_recipe(tmp_path / "turned.toml").scene
    assert (scene.width, scene.height, scene.max_roll) == (320, 256, 10.0)


def test_weights_of_another_front_end_are_refused(tmp_path):
    network = build_extractor(ExtractorConfig(kind="superpoint")).front_end.build(
        ExtractorConfig(kind="superpoint")
    )
    save_front_end(network, "superpoint", tmp_path / "other.safetensors")
    with pytest.raises(IntegrityError, match="front end superpoint"):
        _ = build_extractor(ExtractorConfig(kind="learned"), tmp_path / "other.safetensors").network
