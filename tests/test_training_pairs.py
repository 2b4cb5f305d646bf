"""Pairs made on the device that trains, the CPU too; losses by hand and on padded batches."""

import json
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor
from training_data import LEARNED, SIFT, from_sources, random_batch, write_photos, write_views

from matcher.config import ALL_LAYERS
from matcher.errors import IntegrityError, UsageError
from matcher.evaluate.folders import find_stored_sets
from matcher.match.network import MatchingNetwork
from matcher.match.position import normalise_positions
from matcher.match.sinkhorn import log_assignment
from matcher.train.losses import (
    assignment_loss,
    description_loss,
    head_loss,
    matchability_loss,
    matching_loss,
)
from matcher.train.pairs import (
    IGNORED,
    Describer,
    Draws,
    ImagePairs,
    Keypoints,
    PairBatch,
    PairSampler,
    labelled,
    other_of_pair,
)
from matcher.train.views import HIDDEN, UNKNOWN, VISIBLE, DeviceViews, load_views, split_photos
from matcher.types import UNMATCHED

CPU = torch.device("cpu")
EVERYTHING = from_sources(LEARNED, planes=1.0, spaces=1.0, rendered=1.0)
PLANES = from_sources(LEARNED, planes=1.0)
PLANES = replace(PLANES, pair=replace(PLANES.pair, negative_share=0.0, turned_share=0.0))


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Photos, and two sets of three views of walls whose depth has a hole."""
    root = tmp_path_factory.mktemp("pairs")
    for number, place in enumerate(("hall", "yard")):
        write_views(root / "views" / place, number)
    (write_photos(root / "photos", 6) / "broken.png").write_text("text")
    return root


@pytest.fixture(scope="module")
def views(root) -> DeviceViews:
    photos = sorted((root / "photos").iterdir())
    return load_views(EVERYTHING, photos, {"rendered": root / "views"}, CPU, 30)


# --- Views.


def test_views_are_loaded_with_their_pairs_and_unreadable_photos_are_counted(root):
    lines = []
    photos = sorted((root / "photos").iterdir())
    views = load_views(EVERYTHING, photos, {"rendered": root / "views"}, CPU, 30, lines.append)
    assert views.photos == 6 and len(views.images) == 6 + 2 * 4 + 6
    assert [table.min() for table in views.pairs["rendered"]] == [14, 17]
    assert [table.tolist()[0] for table in views.pairs["spaces"]] == [[6, 7], [10, 11]]
    assert len(set(views.scenes.tolist())) == 6 + 2 + 2  # each photo is one
    assert sorted(set(map(tuple, views.sizes.int().tolist()))) == [(160, 120), (160, 128), (320, 240)]
    assert not views.images[0, 120:].any() and (views.inverse_depth[-1] >= 0).all()
    assert any("1 photos that cannot be read: broken.png" in line for line in lines)
    with pytest.raises(UsageError, match="none of the 1 photos"):
        load_views(PLANES, [root / "photos" / "broken.png"], {}, CPU, 9)


def test_sets_of_one_scene_are_one_scene_and_damaged_ones_are_named(tmp_path):
    for name in ("castle_1", "castle-2", "hut"):
        write_views(tmp_path / name, 0)
    real = from_sources(LEARNED, real=1.0)
    assert len(set(load_views(real, [], {"real": tmp_path}, CPU, 9).scenes.tolist())) == 2
    cameras = tmp_path / "hut" / "cameras.json"
    small = np.full((12, 16), 3000, np.uint16)  # of 8 bits, in colour, of another size, none
    for depth in (np.uint8(np.zeros((120, 160))), np.stack([small] * 3, axis=2), small, None):
        data = b"" if depth is None else cv2.imencode(".png", depth)[1].tobytes()
        (tmp_path / "hut" / "0_depth.png").write_bytes(data)
        with pytest.raises(IntegrityError, match="hut"):
            load_views(real, [], {"real": tmp_path}, CPU, 9)
    (tmp_path / "hut" / "pairs.json").write_text("[[0, 7]]")
    with pytest.raises(IntegrityError, match=r"pairs\.json"):
        find_stored_sets(tmp_path)
    (tmp_path / "hut" / "pairs.json").write_text("[[0, 1, 0.5]]")
    assert [len(each.pairs) for each in find_stored_sets(tmp_path)] == [3, 3, 1]
    told = json.loads(cameras.read_text())
    wrong = {"K": [5], "E": np.zeros((4, 4)).tolist(), "image": 5, "depth": None}
    rows = [{"views": [{**view, key: value} for view in told["views"]]} for key, value in wrong.items()]
    faults = {"views": [{}]}, {"depth_step": 0}, *rows
    for damaged in ({"views": []}, *(told | fault for fault in faults)):
        cameras.write_text(json.dumps(damaged))
        with pytest.raises(IntegrityError, match=r"cameras\.json"):
            find_stored_sets(tmp_path)


def test_photos_to_train_on_and_to_validate_on_are_kept_apart(tmp_path):
    own = write_photos(tmp_path / "photos", 4)
    write_photos(own / "val", 2, seed=1)
    training, held_out = split_photos(own, own / "val", 0)
    assert (len(training), len(held_out)) == (4, 2) and not {*training} & {*held_out}
    training, held_out = split_photos(own, None, 0)
    assert (len(training), len(held_out)) == (5, 1) and not {*training} & {*held_out}
    assert split_photos(own, None, 0) == (training, held_out)
    with pytest.raises(UsageError, match="every photo is also one to validate on"):
        split_photos(own / "val", own / "val", 0)
    with pytest.raises(UsageError, match="fewer than two"):
        split_photos(write_photos(tmp_path / "one", 1), None, 0)


# --- Where points lie.


def test_points_are_transferred_by_depth_and_pose(views):
    points = torch.from_numpy(np.random.default_rng(0).uniform(0, (319, 239), (400, 2)).astype(np.float32))
    for i, j in ((0, 1), (2, 0)):
        found = views.transfer(torch.tensor([14 + i]), torch.tensor([14 + j]), points[None])
        # The wall is 3 m away, the cameras .3 m apart, and the focal length 300 pixels.
        expected = points - torch.tensor([30.0 * (j - i), 0])
        visible, states = found.states[0] == VISIBLE, found.states[0]
        torch.testing.assert_close(found.positions[0][visible], expected[visible], atol=0.1, rtol=0)
        inside = (expected >= 0).all(1) & (expected <= torch.tensor([319, 239])).all(1)
        hole = (points[:, 1] < 16) & (states != HIDDEN)
        assert visible[inside & (points[:, 1] > 24)].all() and (states[~inside & ~hole] != VISIBLE).all()
        assert (states[inside & hole] == UNKNOWN).all() and (states == HIDDEN).any() and hole.any()


@pytest.mark.parametrize("source", ["planes", "spaces", "rendered"])
def test_images_show_the_same_at_corresponding_pixels(views, source):
    recipe = from_sources(LEARNED, **{source: 1.0})
    recipe = replace(recipe, pair=replace(recipe.pair, negative_share=0.0, turned_share=0.5, max_tilt=50.0))
    sampler = PairSampler(views, recipe)
    pairs, again = sampler.batch(8, 1), sampler.batch(8, 1)
    assert torch.equal(pairs.images, again.images) and pairs.images.shape == (16, 1, 128, 160)
    assert not torch.equal(pairs.images, sampler.batch(8, 2).images)
    y, x = torch.meshgrid(torch.arange(128), torch.arange(160), indexing="ij")
    points = torch.stack([x, y], dim=2).flatten(0, 1).float().expand(16, -1, -1)
    found, states = pairs.transfer(points)
    visible = states == VISIBLE
    back, seen = pairs.transfer(other_of_pair(found.nan_to_num(0.0)))
    back, both = other_of_pair(back), other_of_pair(seen == VISIBLE) & visible
    assert found[visible].isfinite().all() and found[~visible].isnan().all() and visible.float().mean() > 0.2
    assert (back - points).norm(dim=2)[both].median() < 0.3
    others, size, alike = other_of_pair(pairs.images), torch.tensor([160, 128]), []
    for here, there, own, other in zip(visible, found, pairs.images, others, strict=True):
        if here.sum() > 2000:
            at = ((2 * there[here] + 1) / size - 1).view(1, 1, -1, 2)
            shown = torch.nn.functional.grid_sample(other[None], at, align_corners=False)[0, 0, 0]
            values = torch.stack([own.flatten()[here], shown])
            if values.std(1).min() > 0.05:
                alike.append(float(torch.corrcoef(values)[0, 1].abs() > 0.5))
    assert len(alike) >= 6 and np.mean(alike) > 0.7  # but for tone curves, blur and noise


# --- Keypoints and their partners.


def shown_apart(dx: float) -> ImagePairs:
    """One pair of which image 1 shows image 0 moved to the right."""
    views = DeviceViews(
        torch.zeros(1, 64, 64, dtype=torch.uint8),
        torch.zeros(1, 32, 32),
        torch.tensor([[64.0, 64.0]]),
        torch.eye(3, dtype=torch.float64)[None],
        torch.eye(4, dtype=torch.float64)[None],
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(1, dtype=torch.bool),
        {},
        1,
    )
    framings = torch.eye(3, dtype=torch.float64).repeat(2, 1, 1)
    framings[1, 0, 2] = dx
    flat, nothing = torch.ones(1, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    images = torch.zeros(2, 1, 64, 64)
    return ImagePairs(views, nothing, flat, ~flat, framings, images, nothing[:1])


def keypoints(*sides: list) -> Keypoints:
    points = torch.tensor(sides, dtype=torch.float32)
    rng = torch.Generator().manual_seed(0)
    described = torch.nn.functional.normalize(torch.randn(*points.shape[:2], 64, generator=rng), dim=2)
    return Keypoints(points, described, torch.ones(points.shape[:2], dtype=torch.bool))


def test_partners_are_found_by_their_positions():
    mine = [[20, 20], [30, 30], [40, 40], [62, 30]]
    theirs = [[50, 40], [31, 20.5], [43.5, 30], [2, 30]]
    known = labelled(keypoints(mine, theirs), shown_apart(10.0), LEARNED)
    # Matched, 3.5 px apart, matched, out of sight.
    assert known.partner0[0].tolist() == [1, IGNORED, 0, UNMATCHED]
    assert known.partner1[0].tolist() == [2, 0, IGNORED, UNMATCHED]
    torch.testing.assert_close(known.corresponding0[0, 0], torch.tensor([30.0, 20.0]))
    assert known.corresponding0[0, 3].isnan().all()


@pytest.mark.parametrize("recipe", [SIFT, LEARNED], ids=["sift", "learned"])
def test_matches_of_a_batch_look_alike_and_lie_where_they_should(views, recipe):
    planes = replace(PLANES, pair=replace(PLANES.pair, turned_share=0.5))
    pairs = PairSampler(views, planes).batch(12, 3)
    describer = Describer(recipe, CPU)
    some, points, again = (describer(pairs.images, 96, Draws(1, CPU), share) for share in (0.9, 0.2, 0.2))
    assert torch.equal(points.positions, again.positions) and points.positions.shape == (24, 96, 2)
    assert some.valid.sum() < points.valid.sum()
    known = labelled(points, pairs, recipe)
    pair, row = (known.partner0 >= 0).nonzero(as_tuple=True)
    column = known.partner0[pair, row]
    assert len(pair) > 100 and torch.equal(known.partner1[pair, column], row)
    similarity = (known.features0.descriptors @ known.features1.descriptors.mT).float()
    assert similarity[pair, row, column].mean() > similarity.mean() + 0.2
    error = (known.corresponding0[pair, row] - known.features1.keypoints[pair, column]).norm(dim=1)
    assert error[error.isfinite()].max() < 6 and error.isfinite().float().mean() > 0.9
    assert (known.partner0[~known.features0.mask] == IGNORED).all()
    if recipe is LEARNED:  # image 1 is matched as image 0 stands
        positions = [normalise_positions(side) for side in (known.features0, known.features1)]
        kept = ~pairs.unrelated[pair]
        ours, theirs = positions[0][pair, row][kept], positions[1][pair, column][kept]
        assert torch.corrcoef(torch.stack([ours.flatten(), theirs.flatten()]))[0, 1] > 0.5


# --- Losses by hand, against converged and fully unrolled Sinkhorn, and on padded batches.


def test_the_loss_is_the_mean_log_likelihood_of_the_ground_truth():
    scores = 3 * torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(4))
    scores[:, -1, -1] = 0
    partner0 = torch.tensor([[2, UNMATCHED, IGNORED]])
    partner1 = torch.tensor([[UNMATCHED, IGNORED, 0, UNMATCHED]])
    log_p = log_assignment(scores, 200, 3)[0]
    expected = -0.5 * (log_p[0, 2] + 0.5 * (log_p[1, -1] + (log_p[-1, 0] + log_p[-1, 3]) / 2))
    torch.testing.assert_close(assignment_loss(log_p[None], partner0, partner1), expected)
    ignored = torch.full((1, 3), IGNORED), torch.full((1, 4), IGNORED)
    assert assignment_loss(log_p[None], *ignored) == 0 and matchability_loss(scores, *ignored) == 0


# --- Layers of a network.


def network(seed: int = 0, **changes: object) -> MatchingNetwork:
    torch.manual_seed(seed)
    model = MatchingNetwork(replace(SIFT.matcher.network, policy=ALL_LAYERS, **changes))
    with torch.no_grad():  # no parameter at its special initial value
        for value in model.parameters():
            value += 0.05 * torch.randn(value.shape)
    return model


def padded(batch: PairBatch, more: int) -> PairBatch:
    """The same pairs with further keypoints that do not exist."""

    def longer(values: Tensor, fill: float) -> Tensor:
        shape = (len(values), more, *values.shape[2:])
        return torch.cat([values, values.new_full(shape, fill)], dim=1)

    sides = [
        side.with_valid(
            keypoints=longer(side.keypoints, 7.0),
            descriptors=longer(side.descriptors, 0.1),
            scores=longer(side.scores, 1.0),
            scales=longer(side.scales, 2.0),
            orientations=longer(side.orientations, 0.3),
            mask=longer(side.mask, False),
        )
        for side in (batch.features0, batch.features1)
    ]
    partners = (longer(partner, IGNORED) for partner in (batch.partner0, batch.partner1))
    there = (longer(place, torch.nan) for place in (batch.corresponding0, batch.corresponding1))
    return PairBatch(*sides, *partners, *there)


def test_keypoints_that_do_not_exist_change_no_loss():
    model, batch = network(), random_batch(np.random.default_rng(3))
    recipe, losses, gradients = SIFT.matcher, [], []
    for one in (batch, padded(batch, 5)):
        model.zero_grad()
        loss = matching_loss(model, one, recipe, torch.Generator().manual_seed(1))
        loss.backward()
        losses.append(loss.detach())
        gradients.append(torch.cat([p.grad.flatten() for p in model.layers.parameters()]))
    torch.testing.assert_close(losses[0], losses[1], rtol=0.02, atol=0)  # few iterations of Sinkhorn
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99
    heads = [head_loss(model, one, recipe).detach() for one in (batch, padded(batch, 5))]
    torch.testing.assert_close(*heads, rtol=0.02, atol=0)


def test_heads_learn_alone_and_dropping_teaches_those_for_pruning():
    model, batch = network(), random_batch(np.random.default_rng(2))
    head_loss(model, batch, SIFT.matcher).backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    heads = ("confidence.0", "match_probability.0")
    assert with_gradient == {f"{head}.{part}" for head in heads for part in ("weight", "bias")}
    model.zero_grad()
    recipe = replace(SIFT.matcher, kept_shares=(1.0, 0.999))
    for seed in range(4):
        matching_loss(model, batch, recipe, torch.Generator().manual_seed(seed)).backward()
    assert model.match_probability[0].weight.grad.any() and model.confidence[0].weight.grad is None


# --- Keypoints.


def described(own: Tensor, corresponding: Tensor, spacing: float = 20.0) -> tuple[Keypoints, Tensor, Tensor]:
    points = torch.arange(5.0)[None, :, None].expand(2, 5, 2) * spacing
    return Keypoints(points, own, torch.ones(2, 5, dtype=torch.bool)), points, corresponding


def test_description_loss_wants_each_descriptor_at_its_position():
    values = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0)).expand(2, 5, 8)
    own = torch.nn.functional.normalize(values, dim=-1)  # the same in both images
    valid, chosen, scale = torch.ones(2, 5, dtype=torch.bool), torch.arange(5), torch.tensor(20.0)
    right = description_loss(*described(own, own), chosen, valid, scale)
    wrong = description_loss(*described(own, own.roll(1, 1)), chosen, valid, scale)
    assert right < 0.5 < wrong
    crowded = described(own, own.roll(1, 1), spacing=0.1)  # nearer points need not differ
    assert float(description_loss(*crowded, chosen, valid, scale)) == pytest.approx(0, abs=1e-5)
    assert float(description_loss(*described(own, own), chosen, ~valid, scale)) == 0
