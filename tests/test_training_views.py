"""Photos, the cache of views, and the batches drawn from it."""

from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch
from training_data import TINY, write_photos

from matcher.config import MatchingPolicy
from matcher.errors import IntegrityError, UsageError
from matcher.evaluate.protocols import PhotoSet, folder_weights, hold_out
from matcher.images import find_images
from matcher.train.cached_pairs import (
    ARRAYS,
    PairSampler,
    ViewCache,
    as_unrelated,
    choose_points,
    make_scene,
    overlap,
    reproject,
    window_centres,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_photos(tmp_path_factory.mktemp("photos"), 8)


@pytest.fixture(scope="module")
def cache(folder, tmp_path_factory):
    photos = find_images(folder)
    cache = ViewCache(tmp_path_factory.mktemp("views"), TINY, photos)
    assert list(cache.make(PhotoSet(photos), range(6))) == list(range(6))
    return cache


def test_photos_are_found_below_a_folder(tmp_path):
    write_photos(tmp_path / "a" / "b", 2)
    (tmp_path / "notes.txt").write_text("no picture")
    cv2.imwrite(str(tmp_path / "z.JPG"), np.zeros((40, 40), np.uint8))
    assert [p.name for p in find_images(tmp_path)] == ["00.png", "01.png", "z.JPG"]


def test_a_folder_without_photos_is_named(tmp_path):
    with pytest.raises(UsageError, match="no images here"):
        find_images(tmp_path)
    with pytest.raises(UsageError, match="no such folder"):
        find_images(tmp_path / "absent")


def test_held_out_photos_are_a_seeded_share(tmp_path):
    photos = find_images(write_photos(tmp_path, 30))
    kept, held = hold_out(photos, seed=3)
    assert len(held) == 3
    assert sorted([*kept, *held]) == photos
    assert (kept, held) == hold_out(photos, seed=3)
    assert held != hold_out(photos, seed=4)[1]


def test_only_photos_that_can_be_read_are_held_out(tmp_path):
    write_photos(tmp_path, 2)
    for number in range(10):
        (tmp_path / f"broken{number}.jpg").write_text("text")
    assert [p.suffix for p in hold_out(find_images(tmp_path), seed=0)[1]] == [".png"]
    (tmp_path / "00.png").unlink()
    (tmp_path / "01.png").unlink()
    with pytest.raises(UsageError, match="fewer than two can be read"):
        hold_out(find_images(tmp_path), seed=0)
    with pytest.raises(UsageError, match="fewer than two can be read"):
        hold_out(find_images(write_photos(tmp_path / "one", 1)), seed=0)


def test_large_folders_are_damped(tmp_path):
    photos = find_images(write_photos(tmp_path / "many", 9).parent) + find_images(
        write_photos(tmp_path / "few", 1)
    )
    weights = folder_weights(photos)
    assert weights.sum() == pytest.approx(1)
    assert weights[-1] == pytest.approx(3 * weights[0])


def test_unreadable_photos_are_passed_over_and_remembered(tmp_path, rng):
    write_photos(tmp_path, 3)
    (tmp_path / "broken.jpg").write_text("text")
    (tmp_path / "empty.png").touch()
    cv2.imwrite(str(tmp_path / "small.png"), np.zeros((8, 8), np.uint8))
    photos = PhotoSet(find_images(tmp_path))
    found = photos.draw(5, rng)
    assert len(found) == 3
    assert {photos.photos[n].name for n in photos.unreadable} == {"broken.jpg", "empty.png", "small.png"}
    assert photos.draw(1, rng, avoid=set(found)) == {}


def test_photos_none_of_which_can_be_read(tmp_path, rng):
    (tmp_path / "broken.jpg").write_text("text")
    with pytest.raises(UsageError, match="not one of 1 photos can be read"):
        PhotoSet(find_images(tmp_path)).draw(1, rng)


def test_a_scene_depends_on_its_number_alone(folder):
    photos = find_images(folder)
    first, again, other = (make_scene(PhotoSet(photos), TINY, scene) for scene in (4, 4, 5))
    for name in ARRAYS:
        assert all(
            np.array_equal(getattr(a, name), getattr(b, name)) for a, b in zip(first, again, strict=True)
        )
    assert not np.array_equal(first[0].keypoints, other[0].keypoints)


def test_a_scene_returns_from_disk_as_it_was_made(folder, cache):
    made = make_scene(PhotoSet(find_images(folder)), TINY, 2)
    for view, stored in zip(made, cache.read(2, range(3)), strict=True):
        assert all(np.array_equal(getattr(view, name), getattr(stored, name)) for name in ARRAYS)
        assert (stored.size, stored.photos) == (view.size, view.photos)
        assert stored.descriptors.dtype == np.uint8


def test_a_scene_takes_little_disk(cache):
    sizes = [cache.path(scene).stat().st_size for scene in cache.ready()]
    # A point takes 144 bytes, a label a byte for 16 pixels; names and headers take 300 bytes an array.
    views = TINY.scene.views * (160 * 144 + 160 * 120 // 16 + 6 * 400)
    assert max(sizes) < views + 2000


def test_scenes_that_exist_are_not_made_again(cache, monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("matcher.train.cached_pairs.make_scene", refuse)
    assert list(cache.make(PhotoSet([cache.folder]), range(6))) == list(range(6))


def test_the_cache_is_another_when_scene_seed_or_photos_change(tmp_path, folder):
    photos = find_images(folder)
    first = ViewCache(tmp_path, TINY, photos).folder
    assert ViewCache(tmp_path, TINY, photos).folder == first
    other = replace(TINY, scene=replace(TINY.scene, max_tilt=10.0))
    changed = [
        ViewCache(tmp_path, other, photos).folder,
        ViewCache(tmp_path, replace(TINY, seed=1), photos).folder,
        ViewCache(tmp_path, TINY, photos[1:]).folder,
    ]
    assert len({first, *changed}) == 4
    assert ViewCache(tmp_path, TINY, photos[1:]).folder == changed[2]
    network = replace(TINY, network=replace(TINY.network, policy=MatchingPolicy(match_threshold=0.5)))
    assert ViewCache(tmp_path, network, photos).folder == first


def test_a_damaged_scene_names_the_file_and_the_remedy(tmp_path, folder):
    photos = find_images(folder)
    cache = ViewCache(tmp_path, TINY, photos)
    list(cache.make(PhotoSet(photos), [0]))
    data = cache.path(0).read_bytes()
    for damage in (data[: len(data) // 2], b"", b"text"):
        cache.path(0).write_bytes(damage)
        with pytest.raises(IntegrityError, match=r"000000\.npz is damaged .*delete it"):
            cache.read(0, [0])


def test_batches_depend_on_seed_and_step_alone(cache):
    first = PairSampler(cache, TINY.pair, 0)
    second = PairSampler(cache, TINY.pair, 0)
    second.batch(1)
    for name in ("keypoints", "descriptors"):
        assert torch.equal(getattr(first.batch(5).features0, name), getattr(second.batch(5).features0, name))
    assert torch.equal(first.batch(5).partner0, second.batch(5).partner0)
    others = (first.batch(6), PairSampler(cache, TINY.pair, 1).batch(5))
    assert not any(torch.equal(first.batch(5).features0.keypoints, b.features0.keypoints) for b in others)


@pytest.mark.parametrize("readers", [1, 3])
def test_prepared_batches_come_in_order(cache, readers):
    sampler = PairSampler(cache, TINY.pair, 0)
    for step, batch in enumerate(sampler.batches(4, 9, readers), start=4):
        assert torch.equal(batch.features0.keypoints, sampler.batch(step).features0.keypoints)
    assert step == 8
    assert list(sampler.batches(4, 4)) == []


def test_a_batch_has_the_recipes_shape_and_some_matches(cache):
    batch = PairSampler(cache, TINY.pair, 0).batch(0)
    assert batch.features0.keypoints.shape == (4, 32, 2)
    assert batch.partner1.shape == (4, 32)
    matched = batch.partner0 >= 0
    assert matched.float().mean() > 0.05
    for pair, point in matched.nonzero().tolist():
        assert batch.partner1[pair, batch.partner0[pair, point]] == point


def test_negative_pairs_share_no_photo_and_match_nothing(cache):
    sampler = PairSampler(cache, replace(TINY.pair, negative_share=1.0), 0)
    drawn = [sampler.draw(np.random.default_rng(seed)) for seed in range(20)]
    strangers = [pair for pair in drawn if (pair[1].labels == 255).all()]
    assert strangers
    assert all(not view0.photos & view1.photos for view0, view1 in strangers)
    assert all(overlap(*pair, np.random.default_rng(0)) == 0 for pair in strangers)


def test_without_strangers_a_pair_of_one_scene_is_drawn(cache, monkeypatch):
    sampler = PairSampler(cache, replace(TINY.pair, negative_share=1.0), 0)
    monkeypatch.setattr(sampler, "_unrelated_pair", lambda *_: None)
    view0, view1 = sampler.draw(np.random.default_rng(0))
    assert view0.photos == view1.photos


def test_views_with_too_few_points_end_in_a_message(cache):
    with pytest.raises(UsageError, match="hardly any view of the photos has 1000 keypoints"):
        PairSampler(cache, replace(TINY.pair, points=(1000,)), 0).batch(0)


def test_points_are_the_strongest_or_those_of_a_window(cache):
    view = cache.read(0, [0])[0]
    quiet = replace(TINY.pair, dropout=0.0)
    strongest = choose_points(view, 20, quiet, None, np.random.default_rng(0))
    assert np.array_equal(strongest.keypoints, view.keypoints[:20])
    centre = view.keypoints[3]
    windowed = choose_points(view, 20, quiet, centre, np.random.default_rng(0))
    offset = (np.abs(view.keypoints - centre) / view.size).max(1)
    assert (np.abs(windowed.keypoints - centre) / view.size).max() <= np.sort(offset)[40]
    assert len(windowed.descriptors) == 20


def test_window_centres_are_one_place(cache):
    common = (cache.read(scene, [0, 1]) for scene in cache.ready())
    views = next(v for v in common if np.isfinite(reproject(v[0].keypoints, *v)).any(1).mean() > 0.5)
    centre0, centre1 = window_centres(*views, np.random.default_rng(0))
    np.testing.assert_allclose(reproject(centre0[None], *views)[0], centre1)
    assert centre0 in views[0].keypoints
    assert window_centres(views[0], as_unrelated(views[1]), np.random.default_rng(0)) == (None, None)
