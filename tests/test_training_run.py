"""Whole runs, small: what they write, how they resume, and what bad input says."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from training_data import TINY, with_steps, write_photos

from matcher.cli import main
from matcher.cli.laboratory import enlarged, limited
from matcher.config import ALL_LAYERS, to_dict
from matcher.errors import IntegrityError, MatcherError, UsageError
from matcher.evaluate.protocols import split_photos
from matcher.files import write_output
from matcher.train.cached_pairs import check_recipe, read_recipe, shipped_recipe
from matcher.train.matcher_training import RunOptions, train
from matcher.train.matcher_training import _cached_pairs as cached_pairs
from matcher.train.recipe import FrontEndRecipe, Recipe, claim_folder, fingerprint
from matcher.weights.files import load_model, read_header

TINY_TOML = """
name = "tiny"
validate_every = 3
validation_scenes = 6
validation_pairs = 8
save_every = 2
network.context = {dim = 32, heads = 2, depth = 2}
network.guided = true
network.assignment.consensus = 1
scene = {scenes = 6, views = 3, width = 160, height = 120, max_keypoints = 160}
pair = {points = [32], points_per_batch = 256}
optimiser = {steps = 6, warmup_steps = 2, confidence_steps = 4, inner_layers = 1}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with photos, a recipe, and the views of `TINY` made by the first run in it."""
    folder = tmp_path_factory.mktemp("training")
    write_photos(folder / "photos", 10)
    (folder / "photos" / "broken.jpg").write_text("text")
    (folder / "tiny.toml").write_text(TINY_TOML)
    return folder


@pytest.fixture(autouse=True)
def one_cache(root, monkeypatch):
    """Views are rendered once for all runs."""
    monkeypatch.setenv("MATCHER_CACHE", str(root / "cache"))


@pytest.fixture(scope="module")
def finished(root):
    """The unbroken run: its folder, its log lines and the rows that a plot would get."""
    lines, plotted = [], []
    weights = train(
        TINY,
        options(root, "whole"),
        lines.append,
        on_validation=lambda rows: plotted.append([dict(row) for row in rows]),
    )
    return weights, lines, plotted


def options(root: Path, name: str) -> RunOptions:
    return RunOptions(root / "photos", None, root / "runs" / name, views=root / "cache" / "views")


def tensors(weights: Path) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in load_model(weights)[0].state_dict().items()}


def arguments(root: Path, name: str, *more: str) -> list[str]:
    given = {"--recipe": root / "tiny.toml", "--photos": root / "photos", "--run": root / "runs" / name}
    return ["train", *(str(part) for pair in given.items() for part in pair), *more]


def test_the_recipe_in_toml_is_the_recipe_of_the_tests(root):
    assert read_recipe(root / "tiny.toml") == TINY


def test_a_run_writes_weights_that_load(finished):
    weights, lines, _ = finished
    model, _, name = load_model(weights)
    assert name == "tiny"
    assert replace(model.config, policy=TINY.network.policy) == TINY.network  # the policy is the preset's
    assert lines[0] == "10 photos to train on, 1 to validate on"
    assert lines[-2] == f"wrote {weights}"
    assert lines[-1].startswith("rendered views (")
    assert any(line.startswith("step 6 loss ") for line in lines)


def test_a_run_logs_loss_and_validation(finished):
    weights, lines, plotted = finished
    rows = [json.loads(line) for line in (weights.parent / "log.jsonl").read_text().splitlines()]
    assert [(row["step"], "loss" in row, "f1" in row) for row in rows] == [
        (3, False, True),
        (6, True, False),
        (6, False, True),
    ]
    assert rows[-1]["pairs"] == 24
    assert rows[0]["seconds"] <= rows[-1]["seconds"]
    assert plotted[-1] == rows
    assert len(plotted) == 2
    assert sum("validation: precision" in line for line in lines) == 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_recipe_alone_decides_the_batch(root, device):
    workers = SimpleNamespace(cache=SimpleNamespace(ready=lambda: [0, 1]), log_unreadable=None)
    assert cached_pairs(workers, None, TINY, device).sampler.recipe == TINY.pair


def test_batch_scale_is_part_of_the_recipe(root, finished):
    """What a run trains with is in its folder and in its weights file; another scale is another run."""
    assert main(arguments(root, "scaled", "--batch-scale", "3", "--steps", "1")) == 0
    folder = root / "runs" / "scaled"
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["pairs"] == 3 * 24 // 6
    expected = 3 * TINY.pair.points_per_batch
    note = json.loads((folder / "recipe.json").read_text())
    assert note["recipe"]["pair"]["points_per_batch"] == expected
    header = json.loads(read_header((folder / "tiny.safetensors").read_bytes())["training"])
    assert header["recipe"]["pair"]["points_per_batch"] == expected
    assert main(arguments(root, "scaled", "--steps", "1")) == 2


def test_batch_scale_of_a_front_end():
    recipe = FrontEndRecipe(trains="front end")
    assert enlarged(recipe, 4).batch.pairs == 4 * recipe.batch.pairs


def test_unreadable_photos_are_counted_in_the_log(root, finished):
    found = [line for line in finished[1] if "cannot be read" in line]
    assert found == ["skipped 1 photos that cannot be read: broken.jpg"]


@pytest.mark.parametrize("steps", [1, 3, 6, 8])
def test_a_run_stopped_and_continued_gives_the_same_weights(root, finished, steps, tmp_path):
    """After 6 steps it stops in the second stage. All views are there already, as the cache is shared."""
    asked, lines = [], []

    def stopped() -> bool:
        asked.append(None)
        return len(asked) >= steps + 6  # the validation views ask six times

    where = options(root, f"stopped{steps}")
    assert train(TINY, where, lines.append, stopped=stopped) is None
    assert "the same command continues" in lines[-2]
    weights = train(TINY, where, lines.append)
    expected, found = tensors(finished[0]), tensors(weights)
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    steps_logged = [
        json.loads(line)["step"] for line in (where.folder / "log.jsonl").read_text().splitlines()
    ]
    assert steps_logged[-2:] == [6, 6]
    assert steps_logged == sorted(steps_logged)


def test_a_run_whose_time_is_over_is_finished(root, finished):
    """After its first step it has taken longer; the same command then trains no further."""
    timed = replace(TINY, optimiser=replace(TINY.optimiser, steps=1000, minutes=1e-6))
    where, lines = options(root, "timed"), []
    weights = train(timed, where, lines.append)
    rows = [json.loads(line) for line in (where.folder / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 1]
    assert "f1" in rows[-1]
    first = tensors(weights)
    assert train(timed, where, lines.append) == weights
    assert (where.folder / "log.jsonl").read_text().count("\n") == 2
    assert all(np.array_equal(first[name], value) for name, value in tensors(weights).items())


def test_a_log_that_ran_ahead_of_its_checkpoint_is_cut_back(root, finished):
    where = options(root, "ahead")
    train(TINY, where, lambda line: None)
    with (where.folder / "log.jsonl").open("a") as lines:
        lines.write('{"step": 9}\n{"st')
    train(TINY, where, lambda line: None)
    assert len((where.folder / "log.jsonl").read_text().splitlines()) == 3


def test_training_and_validation_photos_are_kept_apart(root, tmp_path):
    own = write_photos(tmp_path / "photos", 4)
    write_photos(own / "val", 2, seed=1)
    both = RunOptions(own, own / "val", tmp_path / "run")
    training, held_out = split_photos(both.photos, both.validation_photos, TINY.seed)
    assert (len(training), len(held_out)) == (4, 2)
    assert not {*training} & {*held_out}
    with pytest.raises(UsageError, match="every photo is also one to validate on"):
        split_photos(own / "val", own / "val", TINY.seed)


def test_a_run_whose_loss_is_never_finite_ends(root, finished):
    broken = replace(TINY.optimiser, learning_rate=1e30, muon_rate=0.0, steps=100, warmup_steps=1)
    lines = []
    with pytest.raises(MatcherError, match=r"not finite in 51 steps; lower optimiser\.learning_rate"):
        train(replace(TINY, optimiser=broken, validate_every=200), options(root, "nan"), lines.append)


def test_a_folder_belongs_to_one_recipe(tmp_path):
    claim_folder(tmp_path / "run", TINY)
    claim_folder(tmp_path / "run", TINY)
    with pytest.raises(UsageError, match=r"another recipe \(optimiser\.steps 6 → 7\); give another --run"):
        claim_folder(tmp_path / "run", with_steps(TINY, 7))
    note = tmp_path / "run" / "recipe.json"
    kept = note.read_text()
    note.write_text(kept.replace(json.loads(kept)["fingerprint"], "0" * 16))
    with pytest.raises(IntegrityError, match=r"recipe\.json was changed: its fingerprint"):
        claim_folder(tmp_path / "run", TINY)
    note.write_text("{")
    with pytest.raises(IntegrityError, match=r"recipe\.json is damaged"):
        claim_folder(tmp_path / "run", TINY)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="no run can be kept there"):
        claim_folder(tmp_path / "file", TINY)


def test_a_folder_of_other_files_is_no_place_for_a_run(tmp_path):
    (tmp_path / "photos").mkdir()
    for name in ("b.jpg", "a.jpg", ".hidden"):
        (tmp_path / "photos" / name).write_bytes(name.encode())
    with pytest.raises(UsageError, match=r"holds a\.jpg and 1 more, but no training run.*--run"):
        claim_folder(tmp_path / "photos", TINY)
    assert {file.name for file in (tmp_path / "photos").iterdir()} == {"a.jpg", "b.jpg", ".hidden"}
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".DS_Store").touch()
    write_output(tmp_path / "empty" / "log.html", b"<p>")
    claim_folder(tmp_path / "empty", TINY)
    assert (tmp_path / "empty" / "recipe.json").is_file()


def test_a_lost_best_network_is_named(root, finished):
    where = options(root, "lost")
    train(TINY, where, lambda line: None)
    (where.folder / "best.pt").unlink()
    with pytest.raises(IntegrityError, match=r"best\.pt is absent"):
        train(TINY, where, lambda line: None)


def test_the_shipped_recipe_is_read_and_unchanged_by_a_round_trip():
    recipe = read_recipe(shipped_recipe("hybrid"))
    assert recipe.name == "hybrid"
    assert fingerprint(recipe) == fingerprint(replace(recipe))
    assert fingerprint(recipe) != fingerprint(Recipe(name="other"))
    assert "optimiser" in to_dict(recipe)
    with pytest.raises(UsageError, match="--recipe"):
        shipped_recipe("absent")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stepz = 3", "unknown key stepz; known keys: name"),
        ("[optimiser]\nlr = 3", "unknown key lr"),
        ("[optimiser]\nminutes = -1.0", "optimiser.minutes: 0 or above"),
        ("start_layers = [0]", "start_layers: only with start"),
        ('start = "hybrid"\nstart_layers = [1, 0]', "start_layers: rising numbers from 0"),
        ("[optimiser]\nfrozen_layers = 2", "optimiser.frozen_layers: only with start"),
        ("[optimiser]\nfrozen_layers = 6", "optimiser.frozen_layers: from 0 to the last but one"),
        ("[optimiser]\nminutes = inf", "optimiser.minutes: 0 or above"),
        ('[optimiser]\nsteps = "many"', "optimiser.steps: expected int, got 'many'"),
        ("[scene]\nviews = true", "scene.views: expected int"),
        ("[scene]\nviews = 1", "scene.scenes, scene.views: at least 2"),
        ("[pair]\npoints = []", "pair.points"),
        ("[pair]\npoints = [4096]", "pair.points"),
        ("[pair]\nnegative_share = 1.5", "pair.negative_share: between 0 and 1"),
        ("[network.context]\ndim = 30\nheads = 4", "context.dim 30"),
        ("network.project = false\nnetwork.context.dim = 64", "descriptor_dim must be context.dim"),
        ("[network.assignment]\nevery_layer = false", "need assignment.every_layer"),
        ("[network]\ndescriptor_dim = 64", "network.descriptor_dim: 128 for network.kind sift"),
        ("[network]\nkind = 'disk'", "network.kind: sift or learned"),
        ("[network]\nbackbone = {}", "dense networks cannot be trained"),
        ("name = '../up'", "name: must be a plain file name"),
        ("a = [", "not a TOML file"),
    ],
)
def test_a_recipe_that_cannot_be_used_is_exit_2(root, tmp_path, capsys, text, words):
    recipe = tmp_path / "bad.toml"
    recipe.write_text(text)
    code = main(
        ["train", "--recipe", str(recipe), "--photos", str(root / "photos"), "--run", str(tmp_path / "r")]
    )
    assert code == 2
    assert words in capsys.readouterr().err


def test_folders_without_photos_are_exit_2(root, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for folder, words in (("empty", "no images here"), ("absent", "no such folder")):
        photos = ["--photos", str(tmp_path / folder), "--run", str(tmp_path / "run")]
        assert main(["train", "--recipe", str(root / "tiny.toml"), *photos]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_photos_none_of_which_can_be_read_are_exit_2(root, tmp_path, capsys):
    for number in range(3):
        (tmp_path / f"{number}.jpg").write_text("text")
    code = main(
        [
            "train",
            "--recipe",
            str(root / "tiny.toml"),
            "--photos",
            str(tmp_path),
            "--run",
            str(tmp_path / "r"),
        ]
    )
    assert code == 2
    assert "can be read" in capsys.readouterr().err


def test_other_steps_in_the_same_folder_are_exit_2(root, finished, capsys):
    assert main(arguments(root, "whole", "--steps", "9")) == 2
    assert "optimiser.steps 6 → 9" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_exit_5(root, finished, tmp_path, capsys):
    claim_folder(root / "runs" / "damaged", TINY)
    (root / "runs" / "damaged" / "checkpoint.pt").write_bytes(b"PK\x03\x04 cut")
    assert main(arguments(root, "damaged")) == 5
    error = capsys.readouterr().err
    assert "checkpoint.pt is damaged" in error
    assert "delete" in error


def test_a_full_disk_is_exit_6_and_keeps_the_checkpoint(root, finished, monkeypatch, capsys):
    written = []

    def fsync(number: int) -> None:
        written.append(number)
        if len(written) > 5:  # recipe, log, checkpoint of step 2, best network, curve
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("matcher.files.os.fsync", fsync)
    assert main(arguments(root, "full")) == 6
    error = capsys.readouterr().err
    assert "No space left on device" in error
    assert "the last good one is kept" in error
    monkeypatch.undo()
    monkeypatch.setenv("MATCHER_CACHE", str(root / "cache"))
    assert main(arguments(root, "full")) == 0
    assert "resumed at step" in capsys.readouterr().out


def test_the_command_draws_the_curve(root, finished, capsys):
    assert main(arguments(root, "drawn", "--steps", "6", "--threads", "1")) == 0
    picture = (root / "runs" / "drawn" / "curve.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert "wrote" in capsys.readouterr().out


def test_steps_bound_every_stage_and_nothing_is_left_behind(root, finished, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = ["--recipe", root / "tiny.toml", "--photos", root / "photos", "--steps", "2"]
    assert main(["train", *map(str, given)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny"]
    run = tmp_path / "runs" / "tiny"
    recipe = json.loads((run / "recipe.json").read_text())["recipe"]
    assert (recipe["optimiser"]["steps"], recipe["optimiser"]["confidence_steps"]) == (2, 2)
    assert torch.load(run / "confidence.pt", weights_only=True)["done"] == 2
    assert f"are kept in {root / 'cache' / 'views'} for later runs" in capsys.readouterr().out


def test_steps_of_a_front_end_are_its_only_ones():
    recipe = read_recipe(shipped_recipe("learned"))
    recipe = limited(replace(recipe, optimiser=replace(recipe.optimiser, minutes=1.0)), 3)
    assert (recipe.optimiser.steps, recipe.optimiser.minutes) == (3, 0.0)
    assert recipe.matcher.confidence_steps == 3  # and those of the heads are as few


def test_batches_of_a_front_end_grow_with_what_is_matched_of_them():
    recipe = read_recipe(shipped_recipe("learned"))
    larger = enlarged(recipe, 3)
    assert larger.batch.pairs == 3 * recipe.batch.pairs
    assert larger.matcher.points_per_batch == 3 * recipe.matcher.points_per_batch > 0


def started(root: Path, name: str) -> tuple[subprocess.Popen, Path]:
    """A run of many steps as a process of its own, once it has written a checkpoint."""
    command = [
        sys.executable,
        "-m",
        "matcher",
        *arguments(root, name, "--steps", "100000", "--threads", "1"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    checkpoint = root / "runs" / name / "checkpoint.pt"
    deadline = time.monotonic() + 60
    while not checkpoint.exists():
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process, checkpoint


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_ends_the_run(root, finished, number, code):
    process, checkpoint = started(root, f"signal{code}")
    before = checkpoint.stat().st_mtime_ns
    process.send_signal(number)
    error = process.communicate(timeout=60)[1].decode()
    assert process.returncode == code, error
    assert checkpoint.stat().st_mtime_ns > before
    assert "Traceback" not in error


def test_a_killed_run_leaves_a_whole_checkpoint(root, finished):
    process, _ = started(root, "killed")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    lines: list[str] = []
    asked: list[None] = []

    def stopped() -> bool:
        asked.append(None)
        return len(asked) > 6

    assert train(with_steps(TINY, 100000), options(root, "killed"), lines.append, stopped=stopped) is None
    assert any(line.startswith("resumed at step") for line in lines)


def test_a_network_with_one_head_and_no_projection_is_trained_to_its_end(root, tmp_path):
    """Neither has the second stage heads to train, nor the first step a projection to standardise."""
    context = replace(TINY.network.context, dim=128)
    assignment = replace(TINY.network.assignment, every_layer=False)
    network = replace(TINY.network, project=False, context=context, assignment=assignment, policy=ALL_LAYERS)
    recipe = replace(TINY, name="bare", network=network)
    weights = train(recipe, options(root, "bare"), lambda line: None)
    model, _, _ = load_model(weights)
    assert model.config == network
    assert len(model.heads) == 1 and not len(model.confidence)


@pytest.mark.parametrize(
    "on", [{"early_exit": True, "pruning": False}, {"early_exit": False, "pruning": True}]
)
def test_exit_and_pruning_without_heads_are_refused_before_any_step(root, on):
    assignment = replace(TINY.network.assignment, every_layer=False)
    network = replace(TINY.network, assignment=assignment, policy=replace(ALL_LAYERS, **on))
    with pytest.raises(UsageError, match=r"early exit and pruning need assignment\.every_layer"):
        train(replace(TINY, network=network), options(root, "refused"), lambda line: None)
    assert not (root / "runs" / "refused").exists()


def test_stored_views_are_asked_for_and_refused_at_once(root, tmp_path):
    """A worker found that they were missing, and training went on without them."""
    mixed = replace(TINY, sources=replace(TINY.sources, share=0.5, pairs=20, relief=0.0, real=1.0))
    with pytest.raises(UsageError, match=r"sources\.real: the recipe needs stored views"):
        train(mixed, options(root, "without"), print)
    with pytest.raises(UsageError, match="no views here"):
        train(mixed, replace(options(root, "empty"), real=tmp_path), print)
    with pytest.raises(UsageError, match=r"sources\.real: the recipe has no share of the views in"):
        train(TINY, replace(options(root, "useless"), real=tmp_path), print)


def test_photos_that_were_held_out_stay_held_out(root, tmp_path):
    photos = sorted(path for path in (root / "photos").iterdir() if path.name != "broken.jpg")
    claim_folder(tmp_path / "run", TINY, photos[:2])
    claim_folder(tmp_path / "run", TINY, photos[:2])
    with pytest.raises(UsageError, match="validated on other photos"):
        claim_folder(tmp_path / "run", TINY, photos[1:3])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient_clip": -1.0}, "gradient_clip: above 0"),
        ({"gradient_clip": 0.0}, "gradient_clip: above 0"),
        ({"unrolled_iterations": 0}, "unrolled_iterations: at least 1"),
        ({"inner_layers": -1}, "inner_layers: 0 or above"),
        ({"weight_decay": -0.1}, "weight_decay: 0 or above"),
        ({"learning_rate": float("inf")}, "learning_rate: above 0"),
        ({"start_share": 0.5}, "start_share: only with start"),
    ],
)
def test_values_that_invert_or_disable_training_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        check_recipe(replace(TINY, optimiser=replace(TINY.optimiser, **changes)))


def test_shares_of_sources_are_checked():
    for sources in ({"share": 0.5, "pairs": 4, "relief": -1.0}, {"real": 0.5}):
        with pytest.raises(UsageError, match="sources"):
            check_recipe(replace(TINY, sources=replace(TINY.sources, **sources)))
