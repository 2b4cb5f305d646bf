"""Recipes: what they hold, what is refused, and the folder of a run that belongs to one."""

import json
from dataclasses import replace

import pytest
from training_data import BOTH, SIFT, with_steps

from matcher.config import to_dict
from matcher.errors import IntegrityError, UsageError
from matcher.files import write_output
from matcher.train.recipe import enlarged, limited, read_recipe, shipped_recipe
from matcher.train.run import claim_folder
from matcher.weights.files import load_model


@pytest.mark.parametrize("name", ["hybrid", "hybrid-learned", "learned"])
def test_shipped_recipes_train_what_is_shipped(name):
    recipe = read_recipe(shipped_recipe(name))
    assert recipe.name == name and recipe.front_end.train == (name == "learned")
    shipped = load_model(recipe.matcher.name)[0].config
    assert replace(shipped, policy=recipe.matcher.network.policy) == recipe.matcher.network


FRONT = "[front_end]\ntrain = true\n[matcher.network]\nkind='learned'\ndescriptor_dim=64\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stepz = 3", "unknown key stepz"),
        ("[optimiser]\nminutes = -1.0", "optimiser.minutes"),
        ("[matcher]\ntrain = false", "matcher.train, front_end.train"),
        ("[matcher]\nname = '../up'", "matcher.name"),
        ("[matcher.network.context]\ndim = 30\nheads = 4", "context.dim 30"),
        (FRONT, "pair.pairs: at least 1"),
        (FRONT.replace("true", "true\ndescribed = 500") + "[pair]\npairs = 2", "front_end.described"),
        (FRONT + f"[front_end.network]\nwidths = {[2] * 5000}\ndepths = {[2] * 5000}", "at most 6"),
        ("a = [", "TOML"),
        ("a = 1\n" * 9000, "larger than 32 kB"),
    ],
)
def test_a_recipe_that_cannot_be_used_is_refused_by_name(tmp_path, text, words):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(UsageError, match=r"bad\.toml") as refused:
        read_recipe(tmp_path / "bad.toml")
    assert words in str(refused.value)


def test_steps_bound_every_stage_and_batches_are_scaled():
    recipe = replace(BOTH, optimiser=replace(BOTH.optimiser, minutes=1.0), validation_pairs=100)
    short = limited(recipe, 3)
    assert (short.optimiser.steps, short.optimiser.minutes, short.matcher.confidence_steps) == (3, 0.0, 3)
    assert short.validation_pairs == 6
    large = enlarged(recipe, 4).pair
    assert (large.pairs, large.points_per_batch) == (8, 1024)


def test_a_folder_belongs_to_one_recipe_and_its_photos(tmp_path):
    photos = [tmp_path / "a.jpg", tmp_path / "b.jpg"]
    for photo in photos:
        photo.touch()
    run = claim_folder(tmp_path / "run", SIFT, photos)
    assert run == claim_folder(tmp_path / "run", SIFT, photos)
    assert run != claim_folder(tmp_path / "other", SIFT, photos[:1])
    with pytest.raises(UsageError, match=r"optimiser\.steps 6 → 7"):
        claim_folder(tmp_path / "run", with_steps(SIFT, 7), photos)
    with pytest.raises(UsageError, match="other photos"):
        claim_folder(tmp_path / "run", SIFT, photos[:1])
    note = tmp_path / "run" / "recipe.json"
    assert json.loads(note.read_text())["recipe"] == json.loads(json.dumps(to_dict(SIFT)))
    for text in ("{}", "{", "[]"):
        note.write_text(text)
        with pytest.raises(IntegrityError, match=r"recipe\.json"):
            claim_folder(tmp_path / "run", SIFT, photos)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="no run can be kept there"):
        claim_folder(tmp_path / "file", SIFT, photos)


def test_a_folder_of_other_files_is_no_place_for_a_run(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(b"a")
    with pytest.raises(UsageError, match=r"a\.jpg"):
        claim_folder(tmp_path / "photos", SIFT, [])
    assert [file.name for file in (tmp_path / "photos").iterdir()] == ["a.jpg"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".DS_Store").touch()
    write_output(tmp_path / "empty" / "log.html", b"<p>")  # our own log of a run that did not begin
    claim_folder(tmp_path / "empty", SIFT, [])
