"""Pairs made on the device that trains; the CPU is a device, too."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from simulated_gpu import simulated_gpu, waits
from training_data import write_photos, write_views

from matcher.config import AssignmentConfig, ContextConfig, NetworkConfig, PositionConfig
from matcher.errors import UsageError
from matcher.evaluate.folders import SourceShares
from matcher.evaluate.posed import (
    HIDDEN,
    UNKNOWN,
    VISIBLE_STATE,
    DensePair,
    dominant_turn,
    find_sets,
    read_view,
    sparse_positions,
)
from matcher.extract.learned import Architecture, FeatureNetwork
from matcher.match.network import MatchingNetwork
from matcher.match.steering import quarter_turns, turned_by
from matcher.train.cached_pairs import IGNORED, CorrespondingView, check_recipe, label_partners
from matcher.train.front_end_training import FrontEndTrainer, keypoints_of, labelled, train_front_end
from matcher.train.losses import other_of_pair
from matcher.train.matcher_training import RunOptions, Trainer, train
from matcher.train.recipe import (
    BatchRecipe,
    FrontEndRecipe,
    JointRecipe,
    KeypointRecipe,
    OptimiserRecipe,
    PairRecipe,
    Recipe,
    SmallScene,
    SourceRecipe,
)
from matcher.train.views import (
    DeviceImageSampler,
    DeviceSampler,
    DeviceViews,
    Draws,
    Transferred,
    _compressed,
    _curved,
    _rotations,
    capture,
    draw_framings,
    interleaved,
    load_views,
    overlap,
    partners,
    project,
    quarter_turns_of,
    render,
    transfer,
)
from matcher.types import UNMATCHED
from matcher.weights.files import load_model, save_front_end, save_model

CPU = torch.device("cpu")
RECIPE = Recipe(
    name="tiny",
    pairs_on_device=True,
    network=NetworkConfig(
        kind="learned",
        descriptor_dim=64,
        context=ContextConfig(dim=32, heads=2, depth=2),
        position=PositionConfig(inputs=("xy",)),
        guided=True,
        assignment=AssignmentConfig(consensus=1),
    ),
    sources=SourceRecipe(planes=1.0, relief=0.0, rendered=1.0, width=160, height=128),
    pair=PairRecipe(points=(32, 48), points_per_batch=512, crop_share=0.0, turned_share=0.0),
    optimiser=OptimiserRecipe(steps=4, warmup_steps=1, confidence_steps=2, inner_layers=1),
    validate_every=4,
    save_every=1,
    validation_scenes=2,
    validation_pairs=2,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Photos, and two sets of three views of walls whose depth has a hole."""
    root = tmp_path_factory.mktemp("device")
    for number, place in enumerate(("hall", "yard")):
        write_views(root / "views" / place, number)
    (write_photos(root / "photos", 6) / "broken.png").write_text("text")
    return root


@pytest.fixture(scope="module")
def views(root) -> DeviceViews:
    return load_views(sorted((root / "photos").iterdir()), {"rendered": root / "views"}, CPU)


def test_views_are_loaded_with_their_pairs_and_unreadable_photos_are_counted(root):
    lines = []
    views = load_views(sorted((root / "photos").iterdir()), {"rendered": root / "views"}, CPU, lines.append)
    assert len(views) == 12 and list(views.photos) == list(range(6))
    assert [table.min() for table in views.pairs["rendered"]] == [6, 9]
    assert len(set(views.scenes.tolist())) == 8  # each photo is one
    assert views.images.shape[1:] == (240, 320)
    assert views.sizes[0].tolist() == [160, 120] and not views.images[0, 120:].any()
    assert (views.inverse_depth[0, 60:] == -1).all() and (views.inverse_depth[0, :60, :80] == 0).all()
    assert lines == [
        "skipped 1 photos that cannot be read",
        "6 photos and 6 views with depth in the memory of the device",
    ]
    with pytest.raises(UsageError, match="none of the 1 photos"):
        load_views([root / "photos" / "broken.png"], {}, CPU)


def test_no_step_waits_for_a_gpu_before_its_loss_is_read(root, tmp_path):
    """Once constants are there, what is drawn by the processor is all that is uploaded, without waiting."""
    save_model(MatchingNetwork(RECIPE.network), tmp_path / "random.safetensors")
    joint = FrontEndRecipe(
        trains="front end",
        pairs_on_device=True,
        scene=SmallScene(width=160, height=128),
        sources=SourceShares(planes=1.0, relief=0.0, rendered=1.0),
        batch=BatchRecipe(pairs=2, turned_share=0.5),
        optimiser=KeypointRecipe(points=40, described=30),
        matcher=JointRecipe(start=str(tmp_path / "random.safetensors"), points=(48,), points_per_batch=96),
    )
    with simulated_gpu(), torch.no_grad():
        cuda = torch.device("cuda")
        views = load_views(sorted((root / "photos").iterdir()), {"rendered": root / "views"}, cuda)
        for sampler, trainer in (
            (DeviceSampler(views, RECIPE, cuda), Trainer(RECIPE, cuda)),
            (DeviceImageSampler(views, joint, cuda), FrontEndTrainer(joint, cuda)),
        ):
            assert trainer.loss(sampler.batch(0)).isfinite()
            with waits() as waited:
                loss = trainer.loss(sampler.batch(1))
            assert not len(waited), waited
            assert {line.split(":")[0] for line in waited.uploads} == {"lab/train/on_device/small.py"}
            assert waited.uploads.total() <= 2
            assert loss.isfinite()


def test_rotations_are_the_exponentials_of_their_vectors():
    axes = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    axes[0], axes[1] = 0.0, 1e-9
    x, y, z = axes.unbind(1)
    nothing = torch.zeros_like(x)
    cross = torch.stack([nothing, -z, y, z, nothing, -x, -y, x, nothing], dim=1).view(-1, 3, 3)
    torch.testing.assert_close(_rotations(axes), torch.linalg.matrix_exp(cross), rtol=0, atol=1e-12)


def test_sets_of_one_scene_are_one_scene(tmp_path):
    for name in ("castle_1", "castle-2", "hut"):
        write_views(tmp_path / name, 0)
    assert len(set(load_views([], {"real": tmp_path}, CPU).scenes.tolist())) == 2


def test_points_are_transferred_as_by_the_dense_code(root, views):
    stored = find_sets(root / "views")[0]
    rng = np.random.default_rng(0)
    points = rng.uniform(0, (319, 239), (400, 2)).astype(np.float32)
    for i, j in ((0, 1), (2, 0)):
        expected = sparse_positions(*(read_view(stored, n).grey() for n in (i, j)), points)
        first, second = (torch.tensor([6 + n]) for n in (i, j))
        found = transfer(views, first, second, torch.from_numpy(points)[None])
        visible = expected[:, 0] >= 0
        assert visible.sum() > 200 and (expected == HIDDEN).any() and (expected == UNKNOWN).any()
        # At the border of the hole every second pixel of depth is too few to agree on.
        same = (found.states[0] == VISIBLE_STATE).numpy() == visible
        assert same.mean() > 0.98
        both = same & visible
        assert np.abs(found.positions[0].numpy()[both] - expected[both]).max() < 0.05
    probes = torch.from_numpy(points)[None]
    assert overlap(views, torch.tensor([6]), torch.tensor([7]), probes) > 0.8


def test_a_photo_shows_the_same_at_corresponding_pixels_of_both_images(views):
    photos = torch.arange(4)
    framings = draw_framings(
        views, photos, photos, torch.ones(4, dtype=torch.bool), (160, 128), Draws(1, CPU)
    )
    image0, image1 = (render(views, photos, framing, (160, 128)) for framing in framings)
    y, x = torch.meshgrid(torch.arange(8, 120, 4), torch.arange(8, 152, 4), indexing="ij")
    points = torch.stack([x, y], 2).view(1, -1, 2).float().expand(4, -1, -1)
    there, _ = project((framings[1] @ torch.linalg.inv(framings[0])).float(), points)
    inside = ((there > 4) & (there < torch.tensor([155, 123]))).all(2)
    assert inside.float().mean() > 0.2
    size = torch.tensor([160, 128])
    values = [
        torch.nn.functional.grid_sample(image, ((2 * where + 1) / size - 1).unsqueeze(1), align_corners=False)
        for image, where in ((image0, points), (image1, there))
    ]
    values = [value[:, 0, 0][inside] for value in values]
    assert torch.corrcoef(torch.stack(values))[0, 1] > 0.9
    assert image0.min() >= 0 and image0.max() <= 1 and not torch.equal(image0, image1)


def test_partners_are_those_of_the_labels_on_the_processor():
    rng = np.random.default_rng(4)
    sides, keypoints = [], [rng.uniform(0, 60, (40, 2)).astype(np.float32) for _ in range(2)]
    for side in (0, 1):
        found = keypoints[side] + rng.normal(0, 1.5, (40, 2)).astype(np.float32)
        states = rng.choice([1, 1, 1, 0, -1], 40).astype(np.int8)
        found[states != VISIBLE_STATE] = np.nan
        sides.append((found, states))
    # Descriptors are all alike, so that distances decide.
    described = np.tile(np.eye(1, 64, dtype=np.int8) * 127, (40, 1))
    nothing = np.zeros(40, np.float32)
    old = [
        CorrespondingView(
            points, nothing, nothing, described, np.zeros((0, 0), np.uint8), np.zeros((0, 3, 3)), (64, 64),
            kind="learned", corresponding=found, states=states,
        )
        for points, (found, states) in zip(keypoints, sides, strict=True)
    ]  # fmt: skip
    expected = label_partners(*old, PairRecipe())
    new = [
        Transferred(torch.from_numpy(f)[None], torch.from_numpy(s.astype(np.int64))[None]) for f, s in sides
    ]
    points = [torch.from_numpy(p)[None] for p in keypoints]
    partner0, partner1 = partners(*points, *new, PairRecipe())
    assert partner0[0].tolist() == expected.partner0.tolist()
    assert partner1[0].tolist() == expected.partner1.tolist()
    assert (partner0 >= 0).sum() > 3 and (partner0 == IGNORED).any() and (partner0 == -1).any()


@pytest.mark.parametrize("turns", range(4))
def test_the_turn_of_image_1_is_that_which_undoes_its_rotation(turns):
    points = torch.rand(1, 20, 2, generator=torch.Generator().manual_seed(turns)) * 100
    found = points
    for _ in range(turns):  # image 1 is image 0 rotated clockwise: the right edge becomes the lower one
        found = torch.stack([100 - found[..., 1], found[..., 0]], 2)
    assert quarter_turns_of(points, found).tolist() == [-turns % 4]
    found[:, 5:] = torch.nan
    assert quarter_turns_of(points, found).tolist() == [0]  # too few points to tell


def test_compression_keeps_images_at_best_quality_and_removes_detail_at_the_worst():
    images = torch.rand(2, 1, 64, 48, generator=torch.Generator().manual_seed(0))
    best, worst = (_compressed(images, torch.full((2, 1, 1, 1), q)) for q in (100.0, 10.0))
    assert (best - images).abs().max() < 0.02
    assert 0.05 < (worst - images).abs().mean() < 0.5
    captured = capture(images, torch.tensor([True, False]), Draws(0, CPU))
    assert captured.min() >= 0 and captured.max() <= 1 and captured.shape == images.shape
    assert torch.allclose(captured * 255, (captured * 255).round(), atol=1e-3)


def test_a_batch_is_the_same_again_and_its_matches_look_alike(views):
    recipe = replace(RECIPE, pair=replace(RECIPE.pair, points=(96,), points_per_batch=2304, negative_share=0))
    sampler = DeviceSampler(views, recipe, CPU)
    first, again = sampler.batch(3), sampler.batch(3)
    assert len(first) == 12 and first.turns_known
    assert torch.equal(first.partner0, again.partner0)
    assert torch.equal(first.features1.descriptors, again.features1.descriptors)
    assert not torch.equal(first.partner0, sampler.batch(4).partner0)
    pair, row = (first.partner0 >= 0).nonzero(as_tuple=True)
    column = first.partner0[pair, row]
    assert len(pair) > 100 and torch.equal(first.partner1[pair, column], row)
    similarity = (first.features0.descriptors @ first.features1.descriptors.mT).float()
    alike = similarity[pair, row, column]
    assert alike.mean() > similarity.mean() + 0.3
    positions = first.corresponding0[pair, row]
    error = (positions - first.features1.keypoints[pair, column]).norm(dim=1)
    known = error.isfinite()  # elsewhere the position in image 0 decided
    assert known.float().mean() > 0.9 and error[known].max() < 6


def test_a_front_end_whose_coarsest_map_does_not_divide_the_images_is_used(views, tmp_path):
    save_front_end(
        FeatureNetwork(Architecture((8,) * 6, (1,) * 6, 16)), "learned", tmp_path / "six.safetensors"
    )
    batch = DeviceSampler(views, replace(RECIPE, front_end=str(tmp_path / "six.safetensors")), CPU).batch(0)
    points = torch.cat([batch.features0.keypoints, batch.features1.keypoints])
    assert points.min() >= 0 and (points.amax((0, 1)) <= torch.tensor([159, 127])).all()
    assert torch.allclose(batch.features0.descriptors.float().norm(dim=2), torch.ones(1), atol=1e-3)


def test_unrelated_pairs_have_no_partners_and_upright_pairs_no_turn(views):
    recipe = replace(RECIPE, pair=replace(RECIPE.pair, negative_share=1.0))
    batch = DeviceSampler(views, recipe, CPU).batch(0)
    assert (batch.partner0 == -1).all(1).float().mean() > 0.4  # neighbours of one scene stay related
    upright = DeviceSampler(views, RECIPE, CPU).batch(1)
    found = quarter_turns(turned_by(upright.features0, 0), upright.features1)
    assert (found == 0).float().mean() > 0.7


def test_images_of_different_scenes_show_nothing_of_each_other(views):
    recipe = replace(FRONT_END, batch=BatchRecipe(pairs=12, negative_share=1.0))
    batch = DeviceImageSampler(views, recipe, CPU).batch(0)
    assert batch.pairs.unrelated.float().mean() > 0.4  # neighbours of one scene stay related
    apart = interleaved(batch.pairs.unrelated, batch.pairs.unrelated)
    points = torch.cartesian_prod(torch.arange(8, 160, 16), torch.arange(8, 128, 16)).float()
    points = points.expand(24, -1, -1)
    positions, visible = batch.transfer(points)
    assert not visible[apart].any() and batch.surely_hidden(points)[apart].all()
    assert positions.isfinite().all()
    found = keypoints_of(FeatureNetwork().eval(), batch, 30)
    pairs = labelled(found, batch, 30)
    for partner, valid in ((pairs.partner0, found.valid[0::2]), (pairs.partner1, found.valid[1::2])):
        assert (partner[batch.pairs.unrelated][valid[batch.pairs.unrelated]] == UNMATCHED).all()
    scenes = views.scenes[torch.stack([batch.pairs.first, batch.pairs.second])]
    assert torch.equal(scenes[0] != scenes[1], batch.pairs.unrelated)
    with pytest.raises(UsageError, match=r"batch\.negative_share: only with pairs_on_device"):
        check_recipe(replace(recipe, pairs_on_device=False, batch=BatchRecipe(negative_share=0.1)))


FRONT_END = FrontEndRecipe(
    trains="front end",
    name="tiny",
    start="learned",
    pairs_on_device=True,
    scene=SmallScene(width=160, height=128),
    sources=SourceShares(planes=1.0, relief=0.0, rendered=1.0),
    batch=BatchRecipe(pairs=6, turned_share=0.5),
    optimiser=KeypointRecipe(steps=2, warmup_steps=1, points=40, described=30),
    validate_every=2,
    validation_pairs=2,
    validation_points=60,
)


def test_images_show_the_same_at_corresponding_pixels_however_they_are_turned(views):
    sampler = DeviceImageSampler(views, FRONT_END, CPU)
    batch, again = sampler.batch(1), sampler.batch(1)
    assert torch.equal(batch.pixels, again.pixels) and batch.pixels.shape == (12, 1, 128, 160)
    assert not batch.turns[0::2].any() and batch.turns[1::2].any()
    y, x = torch.meshgrid(torch.arange(128.0), torch.arange(160.0), indexing="ij")
    points = torch.stack([x, y], dim=2).flatten(0, 1).expand(12, -1, -1)
    found, visible = batch.transfer(points)
    assert torch.equal(found, again.transfer(points)[0])
    back, both = batch.transfer(other_of_pair(found))
    back, both = other_of_pair(back), other_of_pair(both) & visible
    size = torch.tensor([160, 128])
    dense = found.where(visible.unsqueeze(2), HIDDEN).mT.unflatten(2, (128, 160)).numpy()
    compared = 0
    for number, (here, there) in enumerate(zip(visible, found, strict=True)):
        if number % 2:
            shown = DensePair(*np.zeros((2, 128, 160), np.uint8), *dense[number - 1 : number + 1])
            assert int(batch.turns[number]) == dominant_turn(shown)
        if here.sum() < 2000:
            continue
        grid = ((2 * there[here] + 1) / size - 1).view(1, 1, -1, 2)
        other = torch.nn.functional.grid_sample(batch.pixels[number ^ 1][None], grid, align_corners=False)[
            0, 0, 0
        ]
        values = torch.stack([batch.pixels[number, 0].flatten()[here], other])
        if values.std(1).min() > 0.05:
            compared += torch.corrcoef(values)[0, 1].abs() > 0.6
        # There and back again is the same pixel.
        assert (back[number] - points[number]).norm(dim=1)[both[number]].median() < 0.5
    assert compared >= 6


def test_points_are_surely_hidden_where_nothing_around_them_is_visible(views):
    batch = DeviceImageSampler(views, FRONT_END, CPU).batch(1)
    y, x = torch.meshgrid(torch.arange(4.0, 124), torch.arange(4.0, 156), indexing="ij")
    points = torch.stack([x, y], dim=2).flatten(0, 1).expand(12, -1, -1)
    hidden = batch.surely_hidden(points)
    assert 0.02 < hidden.float().mean() < 0.9
    for shift in torch.tensor([[0, 0], [3, -3], [-3, 0], [0, 3]]):
        _, visible = batch.transfer(points + shift)
        assert not (visible & hidden).any()


def test_the_first_pairs_of_a_batch_are_the_same_ones(views):
    batch = DeviceImageSampler(views, FRONT_END, CPU).batch(1)
    fewer = batch.first(2)
    assert len(fewer) == 2 and torch.equal(fewer.pixels, batch.pixels[:4])
    assert torch.equal(fewer.turns, batch.turns[:4]) and torch.equal(
        interleaved(*fewer.pairs.images.chunk(2)), fewer.pixels
    )
    points = torch.rand(12, 40, 2) * torch.tensor([159.0, 127.0])
    for few, all_of_them in zip(fewer.transfer(points[:4]), batch.transfer(points), strict=True):
        assert torch.equal(few, all_of_them[:4])
    assert torch.equal(fewer.surely_hidden(points[:4]), batch.surely_hidden(points)[:4])


def test_gradients_of_transferred_points_are_finite_and_those_of_the_homography(views):
    recipe = replace(FRONT_END, sources=SourceShares(planes=1.0, relief=0.0))
    batch = DeviceImageSampler(views, recipe, CPU).batch(1)
    points = (torch.rand(12, 40, 2) * torch.tensor([159.0, 127.0])).requires_grad_()
    found, visible = batch.transfer(points)
    found.sum().backward()
    assert points.grad.isfinite().all() and not points.grad[~visible].any()
    moved, _ = batch.transfer(points.detach() + 0.01)
    change = (moved - found).sum(2) / 0.01
    steady = visible & (change.abs() < 10)
    assert steady.any() and torch.allclose(points.grad.sum(2)[steady], change[steady], atol=0.1)


@pytest.mark.parametrize("sampler", [DeviceImageSampler, DeviceSampler])
def test_the_next_batch_is_made_while_one_is_trained_on(views, sampler):
    recipe = FRONT_END if sampler is DeviceImageSampler else RECIPE
    sampler = sampler(views, recipe, CPU)
    threads, made = threading.active_count(), sampler.batches(2, 5)
    first = next(made)
    assert threading.active_count() == threads + 1
    batches = [first, *made]
    assert len(batches) == 3 and threading.active_count() == threads
    for step, batch in enumerate(batches, start=2):
        again = sampler.batch(step)
        if recipe is FRONT_END:
            assert torch.equal(batch.pixels, again.pixels)
        else:
            assert torch.equal(batch.features0.keypoints, again.features0.keypoints)
    assert list(sampler.batches(3, 3)) == []


def test_turned_images_are_found_by_their_turn(views):
    photos = replace(FRONT_END, sources=SourceShares(planes=1.0, relief=0.0))
    batch = DeviceImageSampler(
        views, replace(photos, batch=BatchRecipe(pairs=24, turned_share=1.0)), CPU
    ).batch(0)
    assert (batch.turns[1::2] > 0).float().mean() > 0.7  # those whose camera rolled back are upright
    upright = DeviceImageSampler(views, replace(photos, batch=BatchRecipe(pairs=24)), CPU).batch(0)
    assert (upright.turns == 0).float().mean() > 0.8


def test_a_front_end_is_trained_on_pairs_of_the_device(root, monkeypatch):
    monkeypatch.setenv("MATCHER_CACHE", str(root / "cache"))
    options = RunOptions(root / "photos", None, root / "front", rendered=root / "views")
    lines: list[str] = []
    assert train_front_end(FRONT_END, options, lines.append).exists()
    assert any("views with depth in the memory of the device" in line for line in lines)
    with pytest.raises(UsageError, match="leave out `--view-workers`"):
        train_front_end(FRONT_END, replace(options, view_workers=2), lines.append)
    with pytest.raises(UsageError, match=r"sources\.relief: 0 where pairs_on_device"):
        check_recipe(replace(FRONT_END, sources=SourceShares()))


def test_a_tone_curve_goes_through_its_knots():
    images = torch.linspace(0, 1, 7).view(1, 1, 1, 7)
    knots = torch.tensor([[0.1, 0.9, 0.3, 0.3, 0.0, 1.0, 0.5]])
    torch.testing.assert_close(_curved(images, knots)[0, 0, 0], knots[0])
    torch.testing.assert_close(_curved(images[..., :1] + 1 / 12, knots).item(), 0.5)


def test_a_run_on_the_device_is_resumed_to_the_same_weights(root, monkeypatch):
    monkeypatch.setenv("MATCHER_CACHE", str(root / "cache"))

    def options(name: str) -> RunOptions:
        return RunOptions(root / "photos", None, root / name, rendered=root / "views")

    weights, steps = train(RECIPE, options("whole"), lambda line: None), []
    assert weights is not None

    def stopped() -> bool:
        steps.append(1)
        return len(steps) == 8  # some calls come while validation views are rendered

    while (resumed := train(RECIPE, options("parts"), lambda line: None, stopped=stopped)) is None:
        pass
    assert len(steps) > 8
    networks = [load_model(path)[0].state_dict() for path in (weights, resumed)]
    assert all(torch.equal(value, networks[1][key]) for key, value in networks[0].items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": replace(RECIPE.sources, relief=1.0)}, "sources.relief: 0 where"),
        ({"sources": replace(RECIPE.sources, share=0.5)}, "sources.share: 0 where"),
        ({"sources": replace(RECIPE.sources, width=150)}, "multiples of 16"),
        ({"sources": SourceRecipe(relief=0.0)}, "at least one above 0"),
        ({"pair": replace(RECIPE.pair, turned_share=0.5)}, "pair.turned_share: 0 where"),
        ({"network": NetworkConfig()}, "only where network.kind is learned"),
        ({"sources": replace(RECIPE.sources, real=1.0)}, r"sources\.real: the recipe needs stored views"),
    ],
)
def test_what_the_device_cannot_make_is_refused(root, changes, message, tmp_path):
    options = RunOptions(root / "photos", None, tmp_path / "run", rendered=root / "views")
    with pytest.raises(UsageError, match=message):
        train(replace(RECIPE, **changes), options, lambda line: None)


def test_processes_that_would_have_nothing_to_render_are_refused(root, tmp_path):
    options = RunOptions(root / "photos", None, tmp_path / "run", rendered=root / "views", view_workers=2)
    with pytest.raises(UsageError, match="leave out `--view-workers`"):
        train(RECIPE, options, lambda line: None)
