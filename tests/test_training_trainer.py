"""The two trainers: schedule, moving average, skipped steps, resumption."""

import errno
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from training_data import TINY, random_batch, with_steps

from matcher.config import PositionConfig
from matcher.errors import IntegrityError, UsageError
from matcher.match.network import MatchingNetwork
from matcher.train.losses import labelled_layers
from matcher.train.matcher_training import ConfidenceTrainer, Trainer, layer_of
from matcher.train.optimisers import build_optimisers, learning_rate_share
from matcher.train.recipe import OptimiserRecipe, Recipe
from matcher.weights.files import save_model

CPU = torch.device("cpu")
HEADS = ("confidence", "match_probability")  # of exit and pruning
FORESEEING = replace(TINY, network=replace(TINY.network, match_probability=True))


def batches(count: int) -> list:
    return [random_batch(np.random.default_rng([7, step])) for step in range(count)]


def parameters(trainer: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in (*trainer.model.parameters(), *trainer.average.parameters())]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_loss_falls_on_one_batch():
    trainer = Trainer(with_steps(TINY, 60), CPU)
    batch = random_batch(np.random.default_rng(1))
    losses = [trainer.step(batch) for _ in range(60)]
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:3])
    assert trainer.progress.step == 60
    assert trainer.progress.pairs == 180


def test_a_resumed_run_equals_an_unbroken_one(tmp_path):
    unbroken = Trainer(TINY, CPU)
    for batch in batches(6):
        unbroken.step(batch)
    first = Trainer(TINY, CPU)
    for batch in batches(3):
        first.step(batch)
    first.save(tmp_path / "checkpoint.pt")
    second = Trainer(TINY, CPU)
    second.resume(tmp_path / "checkpoint.pt")
    for batch in batches(6)[3:]:
        second.step(batch)
    assert same(parameters(unbroken), parameters(second))
    assert not same(parameters(unbroken), parameters(first))
    assert second.progress == unbroken.progress


def test_building_a_trainer_leaves_the_callers_random_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    Trainer(TINY, CPU)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(broken, monkeypatch):
    trainer = Trainer(TINY, CPU)
    trainer.step(batches(1)[0])
    before = parameters(trainer)
    if broken == "loss":
        monkeypatch.setattr(trainer, "loss", lambda batch: torch.tensor(math.nan, requires_grad=True))
    else:
        trainer.model.project.weight.register_hook(lambda grad: grad * math.inf)
    assert math.isnan(trainer.step(batches(2)[1]))
    assert same(parameters(trainer), before)
    assert (trainer.progress.skipped, trainer.progress.step) == (1, 2)


def test_the_average_follows_the_formula():
    trainer = Trainer(replace(TINY, optimiser=replace(TINY.optimiser, average_decay=0.3)), CPU)
    trainer.step(batches(1)[0])
    mean = [p.detach().clone() for p in trainer.average.parameters()]
    for step, batch in enumerate(batches(4)[1:], start=1):
        trainer.step(batch)
        decay = min(0.3, (1 + step) / (10 + step))
        mean = [decay * m + (1 - decay) * p for m, p in zip(mean, trainer.model.parameters(), strict=True)]
    for expected, found in zip(mean, trainer.average.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def test_the_learning_rate_warms_up_and_falls():
    recipe = OptimiserRecipe(steps=1000, warmup_steps=100, hold_share=0.6, final_share=0.02)
    share = [learning_rate_share(recipe, step) for step in range(1001)]
    assert share[0] == pytest.approx(0.01, rel=1e-3)
    assert share[99:601] == [pytest.approx(1.0)] * 502
    assert share[800] == pytest.approx(0.5)
    assert share[1000] == pytest.approx(0.02)
    assert (np.diff(share[600:990]) < 0).all()


def test_the_learning_rate_falls_with_the_time_too():
    recipe = OptimiserRecipe(steps=1000, minutes=2.0, warmup_steps=1, hold_share=0.5, final_share=0.02)
    share = [learning_rate_share(recipe, 10, seconds) for seconds in (0, 60, 90, 120, 500)]
    assert share == pytest.approx([1.0, 1.0, 0.5, 0.02, 0.02])
    # Whichever end is nearer decides.
    assert learning_rate_share(recipe, 750, 0) == pytest.approx(0.5)
    assert learning_rate_share(recipe, 750, 108) == pytest.approx(0.2)
    assert learning_rate_share(replace(recipe, minutes=0.0), 750, 1e9) == pytest.approx(0.5)


def test_a_run_ends_when_its_minutes_are_over():
    timed = replace(TINY.optimiser, steps=1000, minutes=1.0)
    trainer = Trainer(replace(TINY, optimiser=timed), CPU)
    trainer.step(batches(1)[0])
    assert not trainer.finished
    trainer.progress.seconds = 60.0
    assert trainer.finished


def test_every_parameter_but_the_heads_of_exit_and_pruning_is_trained_once():
    model = Trainer(FORESEEING, CPU).model
    optimisers = build_optimisers(model, TINY.optimiser)
    chosen = [id(p) for o in optimisers for group in o.param_groups for p in group["params"]]
    expected = [id(p) for name, p in model.named_parameters() if not name.startswith(HEADS)]
    assert sorted(chosen) == sorted(expected)
    assert len(optimisers) == 2
    assert len(build_optimisers(model, replace(TINY.optimiser, muon_rate=0.0))) == 1


def test_muon_needs_a_pytorch_that_has_it(monkeypatch):
    model = Trainer(TINY, CPU).model
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(UsageError, match="muon_rate needs PyTorch"):
        build_optimisers(model, TINY.optimiser)


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    path, trainer = tmp_path / "checkpoint.pt", Trainer(TINY, CPU)
    trainer.step(batches(1)[0])
    trainer.save(path)
    trainer.step(batches(2)[1])

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("matcher.files.os.fsync", full)
    with pytest.raises(OSError, match="the last good one is kept") as caught:
        trainer.save(path)
    assert caught.value.errno == errno.ENOSPC
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]
    again = Trainer(TINY, CPU)
    again.resume(path)
    assert again.progress.step == 1


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "other"])
def test_a_damaged_checkpoint_names_the_file_and_the_remedy(tmp_path, damage):
    path, trainer = tmp_path / "checkpoint.pt", Trainer(TINY, CPU)
    trainer.save(path)
    whole = path.read_bytes()
    path.write_bytes(
        {"cut": whole[: len(whole) // 2], "text": b"hello", "empty": b"", "other": whole}[damage]
    )
    if damage == "other":
        torch.save({"step": 3}, path)
    with pytest.raises(IntegrityError, match=r"checkpoint\.pt .*delete"):
        Trainer(TINY, CPU).resume(path)


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path):
    Trainer(TINY, CPU).save(tmp_path / "checkpoint.pt")
    with pytest.raises(UsageError, match="another recipe"):
        Trainer(with_steps(TINY, 7), CPU).resume(tmp_path / "checkpoint.pt")


def test_confidence_heads_learn_and_leave_the_rest_alone(tmp_path):
    recipe = replace(TINY.optimiser, confidence_steps=30)
    model = Trainer(FORESEEING, CPU).average
    before = {name: value.clone() for name, value in model.state_dict().items()}
    heads = ConfidenceTrainer(model, recipe, CPU)
    losses = [heads.step(random_batch(np.random.default_rng(3))) for _ in range(20)]
    assert losses[-1] < losses[0]
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {
        f"{head}.0.{part}" for head in ("confidence", "match_probability") for part in ("weight", "bias")
    }

    heads.save(tmp_path / "confidence.pt")
    again = ConfidenceTrainer(Trainer(FORESEEING, CPU).average, recipe, CPU)
    again.resume(tmp_path / "confidence.pt")
    last = random_batch(np.random.default_rng(4))
    assert again.step(last) == heads.step(last)
    assert torch.equal(again.model.confidence[0].weight, heads.model.confidence[0].weight)
    assert torch.equal(again.model.match_probability[0].weight, heads.model.match_probability[0].weight)


def test_training_continues_from_given_weights(tmp_path):
    first = Trainer(TINY, CPU)
    first.step(batches(1)[0])
    save_model(first.average, tmp_path / "first.safetensors", dtype=torch.float32)
    second = Trainer(replace(FORESEEING, start=str(tmp_path / "first.safetensors")), CPU)
    assert len(second.model.match_probability)
    trained = first.average.state_dict()
    for network in (second.model, second.average):
        found = network.state_dict()
        assert all(torch.equal(found[name], value) for name, value in trained.items())
    fresh = Trainer(TINY, CPU)
    assert not torch.equal(fresh.model.project.weight, second.model.project.weight)
    second.step(batches(1)[0])  # which would standardise the projection of a network that starts anew
    assert (second.model.project.weight - first.average.project.weight).abs().max() < 0.01


def deep(depth: int, recipe: Recipe = FORESEEING) -> Recipe:
    network = recipe.network
    return replace(recipe, network=replace(network, context=replace(network.context, depth=depth)))


def disturbed(model: MatchingNetwork) -> MatchingNetwork:
    """With no parameter at its special initial value, such as the zeros that silence new layers."""
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in model.parameters():
            value += 0.05 * torch.randn(value.shape, generator=rng)
    return model


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 3), (3, 6)])
def test_a_deeper_network_begins_with_what_its_start_computes(tmp_path, before, after):
    small = disturbed(Trainer(deep(before), CPU).average)
    save_model(small, tmp_path / "small.safetensors", dtype=torch.float32)
    recipe = replace(deep(after), start=str(tmp_path / "small.safetensors"))
    trainer = Trainer(recipe, CPU)
    batch = random_batch(np.random.default_rng(2))
    found = [labelled_layers(model, batch, CPU, align=False)[-1].sides for model in (small, trainer.model)]
    scores = [
        model.scores(*sides, len(model.layers) - 1)
        for model, sides in zip((small, trainer.model), found, strict=True)
    ]
    torch.testing.assert_close(scores[0], scores[1])
    assert len(trainer.model.confidence) == len(trainer.model.match_probability) == after - 1
    values = [value.clone() for value in trainer.model.layers[before - 1].parameters()]
    for one in batches(2):
        trainer.step(one)
    changed = [
        not torch.equal(old, new)
        for old, new in zip(values, trainer.model.layers[before - 1].parameters(), strict=True)
    ]
    assert any(changed)


def test_fewer_layers_than_the_start_has_are_refused(tmp_path):
    save_model(Trainer(deep(3), CPU).average, tmp_path / "deep.safetensors")
    with pytest.raises(UsageError, match=r"start: the weights deep are of another network"):
        Trainer(replace(deep(2), start=str(tmp_path / "deep.safetensors")), CPU)


def test_some_layers_of_the_start_are_used(tmp_path):
    trained = disturbed(Trainer(deep(3), CPU).average)
    save_model(trained, tmp_path / "deep.safetensors", dtype=torch.float32)
    recipe = replace(deep(2), start=str(tmp_path / "deep.safetensors"), start_layers=(0, 2))
    model = Trainer(recipe, CPU).model
    for ours, theirs in ((0, 0), (1, 2)):
        for part in ("layers", "heads"):
            values = getattr(model, part)[ours].state_dict()
            expected = getattr(trained, part)[theirs].state_dict()
            assert all(torch.equal(value, expected[name]) for name, value in values.items())
        assert torch.equal(model.guidance.predict[ours].weight, trained.guidance.predict[theirs].weight)
    assert torch.equal(model.confidence[0].weight, trained.confidence[0].weight)
    assert torch.equal(model.project.weight, trained.project.weight)


@pytest.mark.parametrize("layers", [(0, 3), (3,)])
def test_layers_that_the_start_lacks_are_refused(tmp_path, layers):
    save_model(Trainer(deep(3), CPU).average, tmp_path / "deep.safetensors")
    recipe = replace(deep(len(layers)), start=str(tmp_path / "deep.safetensors"), start_layers=layers)
    with pytest.raises(UsageError, match=r"start_layers: the weights deep have 3 layers, the first is 0"):
        Trainer(recipe, CPU)


def test_frozen_layers_keep_their_parameters(tmp_path):
    start = tmp_path / "start.safetensors"
    save_model(disturbed(Trainer(deep(4), CPU).average), start, dtype=torch.float32)
    pruned = replace(TINY.optimiser, frozen_layers=2, inner_layers=2, kept_shares=(1.0, 0.5))
    trainer = Trainer(replace(deep(4), start=str(start), optimiser=pruned), CPU)
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    for batch in batches(6):
        trainer.step(batch)
    assert trainer.progress.skipped == 0
    changed = {
        name for name, value in trainer.model.named_parameters() if not torch.equal(value, before[name])
    }
    started = {name for name in changed if not name.startswith("match_probability")}
    assert all(name.startswith("consensus.") or layer_of(name) >= 2 for name in started)
    assert {layer_of(name) for name in changed} == {None, 0, 1, 2, 3}  # heads for pruning learn along
    assert all(name in changed for name in before if name.startswith(("layers.3", "heads.3", "consensus")))


def test_no_layer_is_frozen_on_another_kind_of_front_end(tmp_path):
    save_model(Trainer(TINY, CPU).average, tmp_path / "sift.safetensors")
    network = replace(
        TINY.network, kind="learned", descriptor_dim=64, position=PositionConfig(inputs=("xy",))
    )
    recipe = replace(TINY, network=network, start=str(tmp_path / "sift.safetensors"))
    Trainer(recipe, CPU)
    with pytest.raises(UsageError, match=r"frozen_layers: the start is of another kind"):
        Trainer(replace(recipe, optimiser=replace(recipe.optimiser, frozen_layers=1)), CPU)


def test_weights_of_another_shape_to_start_from_are_refused(tmp_path):
    other = replace(TINY, network=replace(TINY.network, context=replace(TINY.network.context, dim=64)))
    save_model(Trainer(other, CPU).average, tmp_path / "other.safetensors")
    with pytest.raises(UsageError, match=r"start: the weights other are of another network.*\[network\]"):
        Trainer(replace(TINY, start=str(tmp_path / "other.safetensors")), CPU)


def test_absent_weights_to_start_from_are_named(tmp_path):
    with pytest.raises(IntegrityError, match=r"absent\.safetensors"):
        Trainer(replace(TINY, start=str(tmp_path / "absent.safetensors")), CPU)
