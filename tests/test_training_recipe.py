"""Recipes: what they hold, what is refused, and the folder of a run that belongs to one."""

import json
from dataclasses import replace

import pytest
from training_data import BOTH, KINDS, SIFT, with_steps

from matcher.config import to_dict
from matcher.errors import IntegrityError, UsageError
from matcher.files import write_output
from matcher.train.loop import claim_folder, locked
from matcher.train.recipe import (
    Recipe,
    check_recipe,
    enlarged,
    fingerprint,
    limited,
    read_recipe,
    shipped_recipe,
)
from matcher.weights.files import load_model


@pytest.mark.parametrize("name", ["hybrid", "hybrid-learned", "learned"])
def test_shipped_recipes_train_what_is_shipped(name):
    recipe = read_recipe(shipped_recipe(name))
    assert recipe.name == name and recipe.front_end.train == (name == "learned")
    shipped = load_model(recipe.matcher.name)[0].config
    assert replace(shipped, policy=recipe.matcher.network.policy) == recipe.matcher.network


def test_the_default_recipe_needs_nothing_but_photos():
    shares = read_recipe(shipped_recipe("hybrid-learned")).sources.shares()
    assert not shares["rendered"] and not shares["real"]
    with pytest.raises(UsageError, match="--recipe"):
        shipped_recipe("absent")


@pytest.mark.parametrize("recipe", KINDS.values(), ids=KINDS)
def test_recipes_of_every_kind_can_be_trained(recipe):
    check_recipe(recipe)
    assert fingerprint(recipe) == fingerprint(replace(recipe)) != fingerprint(Recipe())


def test_a_table_that_names_one_key_keeps_the_others(tmp_path):
    (tmp_path / "a.toml").write_text("[pair]\nwidth = 320\n")
    assert read_recipe(tmp_path / "a.toml") == replace(Recipe(), pair=replace(Recipe().pair, width=320))


FRONT = "[front_end]\ntrain = true\n[matcher.network]\nkind='learned'\ndescriptor_dim=64\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stepz = 3", "unknown key stepz"),
        ("[optimiser]\nlr = 3", "unknown key lr"),
        ("[optimiser]\nminutes = -1.0", "optimiser.minutes"),
        ("[optimiser]\nminutes = inf", "optimiser.minutes"),
        ("[optimiser]\nlearning_rate = inf", "optimiser.learning_rate"),
        ("[optimiser]\ngradient_clip = 0", "optimiser.gradient_clip"),
        ('[optimiser]\nsteps = "many"', "optimiser.steps"),
        ("[optimiser]\nsteps = 0", "optimiser.steps"),
        ("[optimiser]\nstart_share = 0.5", "start_share"),
        ("[sources]\nplanes = -1", "sources"),
        ("[sources]\nplanes = 0\nspaces = 0", "sources"),
        ("[pair]\npoints = []", "pair.points"),
        ("[pair]\npoints = [40960]", "pair.points"),
        ("[pair]\nwidth = 150", "pair.width"),
        ("[pair]\nnegative_share = 1.5", "pair.negative_share"),
        ("[pair]\nmatch_distance = 5.0", "pair.match_distance"),
        ("[pair]\nmax_tilt = 90.0", "pair.max_tilt"),
        ("[matcher]\ntrain = false", "matcher.train, front_end.train"),
        ("[matcher]\nname = '../up'", "matcher.name"),
        ("[matcher]\nkept_shares = [0.5]", "matcher.kept_shares"),
        ("[matcher]\nkept_shares = [1.0, 0.5]", "matcher.kept_shares"),
        ("[matcher]\nmuon_rate = -1", "matcher"),
        ("[matcher]\nsinkhorn_iterations = -1", "matcher"),
        ("[matcher.network.context]\ndim = 30\nheads = 4", "context.dim 30"),
        ("[matcher.network]\nproject = false\ncontext.dim = 64", "descriptor_dim must be context.dim"),
        ("[matcher.network.assignment]\nevery_layer = false", "assignment.every_layer"),
        ("[matcher.network]\ndescriptor_dim = 64", "matcher.network.descriptor_dim: 128"),
        ("[matcher.network]\nkind = 'disk'", "matcher.network.kind"),
        ("[matcher.network]\nbackbone = {}", "dense networks"),
        (FRONT, "pair.pairs: at least 1"),
        ("[front_end]\ntrain = true", "front_end.train: only where"),
        (FRONT + "[pair]\npairs = 2\nwidth = 656", "multiples of 32"),
        (FRONT.replace("true", "true\ndescribed = 500") + "[pair]\npairs = 2", "front_end.described"),
        (FRONT + "[front_end.network]\nwidths = [16, 32]", "as many widths as depths"),
        (FRONT + "[front_end.network]\nhidden = 5000", "at most 4096"),
        (FRONT + f"[front_end.network]\nwidths = {[2] * 5000}\ndepths = {[2] * 5000}", "at most 6"),
        ("a = [", "TOML"),
        ("a = 1\n" * 9000, "cannot read"),
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
    claim_folder(tmp_path / "run", SIFT, "photos")
    claim_folder(tmp_path / "run", SIFT, "photos")
    with pytest.raises(UsageError, match=r"optimiser\.steps 6 → 7"):
        claim_folder(tmp_path / "run", with_steps(SIFT, 7), "photos")
    with pytest.raises(UsageError, match="other photos"):
        claim_folder(tmp_path / "run", SIFT, "others")
    note = tmp_path / "run" / "recipe.json"
    kept = note.read_text()
    assert json.loads(kept)["recipe"] == json.loads(json.dumps(to_dict(SIFT)))
    for text in (kept.replace(json.loads(kept)["fingerprint"], "0" * 16), "{", "[]"):
        note.write_text(text)
        with pytest.raises(IntegrityError, match=r"recipe\.json"):
            claim_folder(tmp_path / "run", SIFT, "photos")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="no run can be kept there"):
        claim_folder(tmp_path / "file", SIFT, "photos")


def test_a_folder_of_other_files_is_no_place_for_a_run(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(b"a")
    with pytest.raises(UsageError, match=r"a\.jpg"):
        claim_folder(tmp_path / "photos", SIFT, "")
    assert [file.name for file in (tmp_path / "photos").iterdir()] == ["a.jpg"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".DS_Store").touch()
    write_output(tmp_path / "empty" / "log.html", b"<p>")  # our own log of a run that did not begin
    claim_folder(tmp_path / "empty", SIFT, "")


def test_one_process_trains_in_a_folder(tmp_path):
    with locked(tmp_path), pytest.raises(UsageError, match="another process"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass
