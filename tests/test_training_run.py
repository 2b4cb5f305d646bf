"""Whole runs, small: what they write, how they resume, what bad input says; a run's first parameters."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_data import (
    BOTH,
    FRONT_END,
    KINDS,
    LEARNED,
    SIFT,
    TINY_TOML,
    from_sources,
    with_steps,
    write_photos,
    write_views,
)

import matcher
from matcher.cli import main
from matcher.config import ExtractorConfig
from matcher.errors import IntegrityError, UsageError
from matcher.extract.learned import Architecture, FeatureNetwork, folded
from matcher.files import write_output
from matcher.torch_engine import build_extractor
from matcher.train.pairs import Describer
from matcher.train.recipe import Recipe, find_recipe, read_recipe
from matcher.train.run import RunOptions, claim_folder, train
from matcher.train.trainer import Batch, Trainer, batch_maker, validate
from matcher.train.views import load_views
from matcher.weights.files import load_model, read_header, save_front_end, save_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A folder with photos, one of them broken, a recipe, and stored views."""
    folder = tmp_path_factory.mktemp("training")
    write_photos(folder / "photos", 10)
    write_views(folder / "views" / "hall", 0)
    (folder / "photos" / "broken.jpg").write_text("text")
    (folder / "tiny.toml").write_text(TINY_TOML)
    return folder


@pytest.fixture(scope="module")
def finished(root):
    """Unbroken runs by the kind of recipe: the weights file, the log, and the rows that a plot would get."""

    @cache
    def run(kind: str):
        lines, plotted = [], []
        where, kept = options(root, f"whole {kind}"), lambda rows: plotted.append([dict(row) for row in rows])
        return train(KINDS[kind], where, lines.append, on_validation=kept), lines, plotted

    return run


def options(root: Path, name: str) -> RunOptions:
    return RunOptions(root / "photos", None, root / "runs" / name)


def stopping(after: int):
    """A function that asks to stop when it is called for that time."""
    return iter([False] * (after - 1) + [True]).__next__


def written(weights: Path) -> dict[str, torch.Tensor]:
    """The parameters of all weights files of a run."""
    files = {path.stem: load_file(path) for path in weights.parent.glob("*.safetensors")}
    return {f"{stem}.{name}": value for stem, values in files.items() for name, value in values.items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def arguments(root: Path, name: str, *more: str) -> list[str]:
    given = {"--recipe": root / "tiny.toml", "--photos": root / "photos", "--run": root / "runs" / name}
    return ["train", *(str(part) for pair in given.items() for part in pair), *more]


# --- Runs of every kind.


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_writes_weights_that_load_and_a_log(root, finished, kind):
    weights, lines, plotted = finished(kind)
    recipe = KINDS[kind]
    assert weights.stem == recipe.name and lines[0] == "10 photos to train on, 1 to validate on"
    assert any("1 photos that cannot be read: broken.jpg" in line for line in lines)
    names = [recipe.front_end.name] * recipe.front_end.train + [recipe.matcher.name] * recipe.matcher.train
    assert lines[-len(names) :] == [f"wrote {weights.with_name(name)}.safetensors" for name in names]
    assert any(line.startswith("step 1 of 6 loss ") and line.endswith("left") for line in lines)
    rows = [json.loads(line) for line in (weights.parent / "log.jsonl").read_text().splitlines()]
    assert rows == plotted[-1] and [row["step"] for row in rows if "f1" in row] == [3, 6]
    assert ("repeatability" in rows[-1]) == recipe.front_end.train
    assert rows[-1]["pairs"] == 6 * recipe.pairs_of(32) and rows[0]["seconds"] <= rows[-1]["seconds"]
    header = json.loads(read_header(weights.read_bytes())["training"])
    assert header["recipe"]["optimiser"]["steps"] == 6 and {"f1"} <= header["validation"].keys()
    if recipe.matcher.train:
        model, _, name = load_model(weights.with_name(f"{recipe.matcher.name}.safetensors"))
        network = recipe.matcher.network
        assert name == "tiny" and replace(model.config, policy=network.policy) == network
    if recipe.front_end.train:
        photo, files = root / "photos" / "00.png", {"frontend_weights": weights}
        if recipe.matcher.train:
            files["weights"] = weights.with_name("tiny.safetensors")
            result = matcher.load("hybrid-learned", **files, further_passes=False).match(photo, photo)
            assert len(result.features0) > 0
        extractor = build_extractor(ExtractorConfig(kind="learned"), weights, precision="float32")
        assert extractor.network.sizes == recipe.front_end.network


@pytest.mark.parametrize(("kind", "step"), [("sift", 3), ("both", 7)])
def test_a_run_stopped_and_continued_gives_the_same_weights(root, finished, kind, step):
    """After the sixth step it stops in the last stage."""
    where, lines = options(root, f"stopped {kind} {step}"), []
    assert train(KINDS[kind], where, lines.append, stopped=stopping(step)) is None
    assert lines[-1].endswith("the same command continues")
    weights = train(KINDS[kind], where, lines.append)
    assert any(line.startswith("resumed at step") for line in lines)
    assert same(written(finished(kind)[0]), written(weights))
    steps = [json.loads(line)["step"] for line in (where.folder / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and steps[-1] == 6


def test_a_run_uses_stored_views_and_both_networks_of_its_start(root, finished):
    """What was trained before is the start; with all of its share it is the result, too."""
    weights, _, _ = finished("both")
    recipe = from_sources(BOTH, planes=1.0, rendered=1.0)
    recipe = replace(
        recipe,
        front_end=replace(recipe.front_end, start=str(weights)),
        matcher=replace(recipe.matcher, start=str(weights.with_name("tiny.safetensors")), confidence_steps=0),
        optimiser=replace(recipe.optimiser, start_share=1.0, steps=2),
    )
    where, lines = replace(options(root, "again"), rendered=root / "views"), []
    found = written(train(recipe, where, lines.append))
    before = written(weights)
    for name, value in found.items():
        torch.testing.assert_close(value, before[name], atol=2e-3, rtol=1e-2, msg=name)
    with pytest.raises(UsageError, match=r"sources\.rendered"):
        train(recipe, options(root, "without"), print)


# --- The command.


def test_the_command_trains_scales_batches_and_draws_the_curve(root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = [*("--recipe", root / "tiny.toml", "--photos", root / "photos"), "--steps", 2, "--batch-scale", 3]
    assert main(["train", *map(str, given), "--threads", "1"]) == 0
    run = tmp_path / "runs" / "tiny"
    assert [path.name for path in tmp_path.iterdir()] == ["runs"] and "wrote" in capsys.readouterr().out
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["pairs"] == 3 * 4 * 2
    recipe = json.loads((run / "recipe.json").read_text())["recipe"]
    assert (recipe["optimiser"]["steps"], recipe["matcher"]["confidence_steps"]) == (2, 2)
    assert recipe["pair"]["points_per_batch"] == 3 * 256
    assert torch.load(run / "confidence.pt", weights_only=True)["progress"]["step"] == 2
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert main(["train", *map(str, given[:-2])]) == 2  # another batch is another run


def test_folders_and_recipes_that_cannot_be_used_are_exit_2(root, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "0.jpg").write_text("text")
    for folder, words in (("empty", "no images"), ("absent", "no such folder"), ("text", "can be read")):
        given = ["--photos", str(tmp_path / folder), "--run", str(tmp_path / "run")]
        assert main(["train", "--recipe", str(root / "tiny.toml"), *given]) == 2
        assert words in capsys.readouterr().err
    assert main(arguments(root, "unread", "--validation", str(tmp_path / "text"))) == 2
    assert "text: none of the 1 photos" in capsys.readouterr().err
    (tmp_path / "typo.toml").write_text(TINY_TOML + "start = 'hibrid'")
    assert main(["train", "--recipe", str(tmp_path / "typo.toml"), *arguments(root, "typo")[3:]]) == 5
    assert not any(place.exists() for place in (tmp_path / "run", *(root / "runs").glob("[tu]*")))
    (root / "runs" / "folder" / "recipe.json").mkdir(parents=True)
    assert main(arguments(root, "folder")) == 2 and "recipe.json: " in capsys.readouterr().err


def test_a_full_disk_is_exit_6_and_keeps_the_checkpoint(root, monkeypatch, capsys):
    calls = []

    def fsync(number: int) -> None:
        calls.append(number)
        if len(calls) > 5:  # recipe, log, checkpoint of step 2, best network, curve
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fsync)
    assert main(arguments(root, "full")) == 6
    error = capsys.readouterr().err
    assert "No space left on device" in error and "the last good one is kept" in error
    assert torch.load(root / "runs" / "full" / "checkpoint.pt", weights_only=True)["progress"]["step"] == 2


def test_a_signal_saves_and_ends_the_run(root, capsys):
    checkpoint = root / "runs" / "signal" / "checkpoint.pt"

    def interrupt() -> None:
        while not checkpoint.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    assert main(arguments(root, "signal", "--steps", "100000")) == 143
    said = capsys.readouterr()
    stopped = int(said.out.split("stopped at step ")[1].split(";")[0])
    assert torch.load(checkpoint, weights_only=True)["progress"]["step"] == stopped > 2
    assert "Traceback" not in said.err


def test_a_killed_run_continues_and_two_never_share_a_folder(root):
    where = options(root, "killed")
    command = [sys.executable, "-m", "matcher", *arguments(root, "killed", "--steps", "100000")]
    process = subprocess.Popen([*command, "--threads", "1"], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (where.folder / "checkpoint.pt").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    recipe, lines = with_steps(from_sources(SIFT, planes=1.0), 100000), []
    with pytest.raises(UsageError, match="another run"):
        train(recipe, where, lines.append)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    assert train(recipe, where, lines.append, stopped=stopping(1)) is None
    assert any(line.startswith("resumed at step") for line in lines)


# --- Steps.


def batches(root: Path, recipe: Recipe, count: int) -> list[Batch]:
    photos = sorted((root / "photos").glob("0*.png"))
    describer = None if recipe.front_end.train else Describer(recipe, CPU)
    return list(map(batch_maker(recipe, load_views(recipe, photos, {}, CPU, 20), describer), range(count)))


def test_images_of_few_keypoints_are_validated(root):
    recipe = replace(SIFT, pair=replace(SIFT.pair, points=(204,)))
    trainer, (batch,) = Trainer(recipe, CPU), batches(root, recipe, 1)
    assert not batch.keypoints.valid.all() and "f1" in validate(trainer.average, [batch], recipe)


def test_the_loss_falls_on_one_batch(root):
    recipe = replace(BOTH, pair=replace(BOTH.pair, negative_share=0.0, turned_share=0.0))
    recipe = replace(recipe, matcher=replace(recipe.matcher, kept_shares=(1.0,)))
    trainer, (batch,) = Trainer(with_steps(recipe, 15), CPU), batches(root, recipe, 1)
    losses = [trainer.step(batch) for _ in range(15)]
    assert np.mean(losses[-3:]) < 0.9 * np.mean(losses[:2])
    assert (trainer.progress.step, trainer.progress.skipped) == (15, 0)


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(root):
    trainer, (first, second) = Trainer(SIFT, CPU), batches(root, SIFT, 2)
    trainer.step(first)
    before = [{k: v.clone() for k, v in n.state_dict().items()} for n in (trainer.model, trainer.average)]
    trainer.model.matcher.project.weight.register_hook(lambda grad: grad * np.inf)
    assert np.isnan(trainer.step(second))
    assert same(before[0], trainer.model.state_dict()) and same(before[1], trainer.average.state_dict())
    assert (trainer.progress.skipped, trainer.progress.step) == (1, 2)


def test_checkpoints_that_are_damaged_or_of_another_run_are_refused(root, tmp_path):
    held_out, recipe = write_photos(tmp_path / "held out", 2), with_steps(SIFT, 100)
    where = replace(options(root, "refused"), validation_photos=held_out)
    assert train(recipe, where, [].append, stopped=stopping(1)) is None
    checkpoint, note = where.folder / "checkpoint.pt", where.folder / "recipe.json"
    whole = checkpoint.read_bytes()
    state = torch.load(checkpoint, weights_only=True)
    checkpoint.write_bytes(whole[: len(whole) // 2])
    for _ in range(2):
        with pytest.raises(IntegrityError, match=r"checkpoint\.pt .*delete"):
            train(recipe, where, [].append)
        torch.save({**state, "model": {}}, checkpoint)
    checkpoint.write_bytes(whole)
    (held_out / "00.png").unlink()
    with pytest.raises(UsageError, match="other photos"):
        train(recipe, where, [].append)
    note.unlink()  # edited to say what is held out now
    claim_folder(tmp_path / "edited", recipe, sorted((root / "photos").iterdir()), [held_out / "01.png"])
    (tmp_path / "edited" / "recipe.json").rename(note)
    with pytest.raises(UsageError, match=r"checkpoint\.pt .*other photos"):
        train(recipe, where, [].append)


# --- What a run starts from.


def sized(depth: int = 2, dim: int = 32, **changes: object) -> Recipe:
    network = SIFT.matcher.network
    network = replace(network, context=replace(network.context, depth=depth, dim=dim))
    return replace(SIFT, matcher=replace(SIFT.matcher, network=network, **changes))


def test_starts_that_do_not_fit_are_refused(tmp_path):
    save_model(Trainer(sized(3), CPU).average.matcher, tmp_path / "deep.safetensors")
    for dim, start, raised in ((32, "deep", UsageError), (64, "gone", IntegrityError)):
        with pytest.raises(raised, match=start):
            Trainer(sized(2, dim, start=str(tmp_path / f"{start}.safetensors")), CPU)
    other = replace(LEARNED, matcher=replace(LEARNED.matcher, start=str(tmp_path / "deep.safetensors")))
    with pytest.raises(UsageError, match="keypoints of sift"):
        Trainer(other, CPU)


def test_a_front_end_goes_on_from_a_smaller_file(root, tmp_path):
    torch.manual_seed(1)
    small = FeatureNetwork(FRONT_END.front_end.network)
    save_front_end(small, "learned", tmp_path / "small.safetensors")
    sizes = Architecture((8, 8, 16, 24), (1, 1, 1, 1), 24)
    front_end = replace(FRONT_END.front_end, start=str(tmp_path / "small.safetensors"), network=sizes)
    still = replace(FRONT_END.optimiser, learning_rate=1e-12)
    recipe = replace(FRONT_END, front_end=replace(front_end, weight_decay=0.0), optimiser=still)
    trainer, (batch,) = Trainer(recipe, CPU), batches(root, recipe, 1)
    trainer.step(batch)
    with torch.no_grad():
        expected = small.eval()(batch.pairs.images)[0]
        found = trainer.model.front_end.train()(batch.pairs.images)[0]
        frozen = folded(trainer.model.front_end)(batch.pairs.images)[0]
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    assert frozen.isfinite().all()


# --- Recipes, and the folder of a run that belongs to one.


@pytest.mark.parametrize("name", ["hybrid", "hybrid-learned", "learned"])
def test_find_recipes_train_what_is_shipped(name):
    recipe = read_recipe(find_recipe(name))
    assert recipe.name == name and recipe.front_end.train == (name == "learned")
    shipped = load_model(recipe.matcher.name)[0].config
    assert replace(shipped, policy=recipe.matcher.network.policy) == recipe.matcher.network


FRONT = "[front_end]\ntrain = true\n[matcher.network]\nkind='learned'\ndescriptor_dim=64\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stepz = 3", "unknown key stepz"),
        ("[optimiser]\nminutes = -1.0", "optimiser.minutes"),
        ("seed = 18446744073709551616", "seed"),
        ("[pair]\nwidth = 16000000", "pair.width"),
        ("[matcher]\ntrain = false", "matcher.train, front_end.train"),
        ("[matcher]\nname = '../up'", "matcher.name"),
        ("[matcher.network.context]\ndim = 30\nheads = 4", "context.dim"),
        ("[matcher.network.context]\ndim = 0", "context.dim"),
        ("[matcher.network.assignment]\ntemperature = -1.0", "assignment.temperature"),
        ("[matcher.network.assignment]\nborder = 2", "assignment.border"),
        ("[matcher.network.position]\nkind = 'sine'", "position.kind"),
        ("[matcher.network.policy]\npruning = false", "network.policy"),
        ("[pair]\npairs = 1\nnegative_share = 0.1", "pair.negative_share"),
        (FRONT.replace("train = true", "start = ''"), "front_end.start"),
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


def test_a_folder_belongs_to_one_recipe_and_its_photos(tmp_path):
    photos = sorted(write_photos(tmp_path / "photos", 2).iterdir())
    run = claim_folder(tmp_path / "run", SIFT, photos, photos)
    assert run == claim_folder(tmp_path / "run", SIFT, photos, photos)
    assert run != claim_folder(tmp_path / "other", SIFT, photos, photos[:1])
    with pytest.raises(UsageError, match=r"optimiser\.steps: 6 .* 7 now"):
        claim_folder(tmp_path / "run", with_steps(SIFT, 7), photos, photos)
    for training, held_out in ((photos, photos[:1]), (photos[:1], photos)):
        with pytest.raises(UsageError, match="other photos"):
            claim_folder(tmp_path / "run", SIFT, training, held_out)
    note = tmp_path / "run" / "recipe.json"
    assert json.loads(note.read_text())["recipe"] == json.loads(json.dumps(asdict(SIFT)))
    for text in ("{}", "{", "[]"):
        note.write_text(text)
        with pytest.raises(IntegrityError, match=r"recipe\.json"):
            claim_folder(tmp_path / "run", SIFT, photos, photos)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="no run can be kept there"):
        claim_folder(tmp_path / "file", SIFT, photos, photos)


def test_a_folder_of_other_files_is_no_place_for_a_run(tmp_path):
    write_photos(tmp_path / "photos", 1)
    with pytest.raises(UsageError, match=r"00\.png"):
        claim_folder(tmp_path / "photos", SIFT, [], [])
    assert [file.name for file in (tmp_path / "photos").iterdir()] == ["00.png"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".DS_Store").touch()
    write_output(tmp_path / "empty" / "log.html", b"<p>")  # our own log of a run that did not begin
    claim_folder(tmp_path / "empty", SIFT, [], [])
