"""Matching on a GPU, simulated and, where there is one, real: what it finds, and how often it waits."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
import random_matcher
import torch
from random_matcher import WITH_MATCH_PROBABILITY, pair, random_model
from simulated_gpu import SimulatedEvent, captures, on_cpu, simulated_gpu, waits
from training_data import TINY, random_batch

import matcher
from matcher.benchmark import rows as device_rows
from matcher.benchmark.report import run_benchmark
from matcher.benchmark.timing import Stopwatch
from matcher.cli import main
from matcher.errors import UsageError
from matcher.images import read_image
from matcher.match import gpu as matching
from matcher.match import steering as other_turns
from matcher.match.network import AttentionMatcher, MatchingNetwork
from matcher.presets import PRESETS
from matcher.train.matcher_training import Trainer
from matcher.types import Features, Matches

COUNTS = [(100, 90), (64, 64), (40, 120), (7, 3)]
DUAL = replace(
    random_matcher.CONFIG, assignment=replace(random_matcher.CONFIG.assignment, kind="dual_softmax")
)
GUIDED = replace(
    WITH_MATCH_PROBABILITY,
    guided=True,
    assignment=replace(WITH_MATCH_PROBABILITY.assignment, consensus=2),
)
SUPERGLUE = replace(
    PRESETS["superglue-outdoor"].matcher,
    kind="sift",
    descriptor_dim=32,
    context=replace(PRESETS["superglue-outdoor"].matcher.context, dim=32, heads=2, depth=3),
    policy=replace(PRESETS["superglue-outdoor"].matcher.policy, match_threshold=0.001),
)
NETWORKS = {
    "confidence": random_matcher.CONFIG,
    "match probability": WITH_MATCH_PROBABILITY,
    "dual softmax": DUAL,
    "guided": GUIDED,
}


def untrained_superglue() -> MatchingNetwork:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MatchingNetwork(SUPERGLUE).eval()


def pairs() -> list[tuple[Features, Features]]:
    return [pair(*counts, seed) for seed, counts in enumerate(COUNTS)]


def together(given: list[tuple[Features, Features]]) -> tuple[Features, Features]:
    return tuple(Features.stack(side) for side in zip(*given, strict=True))


def indices(matches: Matches) -> set[tuple[int, int]]:
    return {*map(tuple, matches.indices.tolist())}


def on_the_cpu(model, given) -> list[Matches]:
    """Each pair by itself."""
    with on_cpu():
        found = AttentionMatcher(model, precision="float32")
        return [found(*together([each]))[0] for each in given]


@pytest.mark.parametrize(("early_exit", "pruning"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_batch_has_the_matches_of_the_cpu_and_is_waited_for_once(gpu, name, early_exit, pruning):
    config = NETWORKS[name]
    model = random_model(config=config).with_policy(
        replace(config.policy, match_threshold=0.01, early_exit=early_exit, pruning=pruning)
    )
    expected = on_the_cpu(model, pairs())
    ours, batch = AttentionMatcher(model, device="cuda", precision="float32"), together(pairs())
    with waits() as waited:
        found = ours(*batch)
    assert len(waited) == 1, waited
    assert sum(map(len, expected)) > (10 if early_exit else 0)
    for here, there in zip(expected, found, strict=True):
        assert indices(here) == indices(there)
        assert (here.layers_run, here.kept0, here.kept1) == (there.layers_run, there.kept0, there.kept1)
        assert np.abs(np.sort(here.scores) - np.sort(there.scores)).max(initial=0) < 1e-3
        order = [x.indices[:, 0].argsort() for x in (here, there)]
        assert np.array_equal(here.points1[order[0]], there.points1[order[1]])


@pytest.mark.parametrize("name", NETWORKS)
def test_padding_is_not_matched_at_any_threshold(gpu, name):
    policy = replace(NETWORKS[name].policy, match_threshold=0.0, early_exit=False, pruning=False)
    model = random_model(config=NETWORKS[name]).with_policy(policy)
    ours = AttentionMatcher(model, device="cuda", precision="float32")
    found = ours(*together([pair(40, 50, seed) for seed in range(3)]))
    assert min(map(len, found)) > 0
    assert all((each.indices < [40, 50]).all() for each in found)


def test_a_network_of_superglue_has_the_matches_of_the_cpu(gpu):
    model = untrained_superglue()
    expected = on_the_cpu(model, pairs())
    with waits() as waited:
        found = AttentionMatcher(model, device="cuda", precision="float32")(*together(pairs()))
    assert len(waited) == 1, waited
    assert sum(map(len, expected)) > 10
    assert list(map(indices, expected)) == list(map(indices, found))


@pytest.mark.parametrize("late", [0, 3, 10_000])
def test_matches_do_not_depend_on_when_a_decision_arrives(gpu, late, monkeypatch):
    """The program learns sooner or later that all pairs are done; what it queued meanwhile is no matter."""
    monkeypatch.setattr(SimulatedEvent, "late", late)
    ours = AttentionMatcher(random_model(config=GUIDED), device="cuda", precision="float32")
    if late == 0 and gpu == "simulated":
        layers = []
        ours.model.layers[-1].register_forward_hook(lambda *_: layers.append(1))
        given = pair(64, 64, 2)
        assert ours(*together([given]))[0].layers_run == 1 and not layers  # the rest is spared
    found = ours(*together(pairs()))
    expected = on_the_cpu(random_model(config=GUIDED), pairs())
    assert list(map(indices, found)) == list(map(indices, expected))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("preset", ["hybrid", "hybrid-learned"])
def test_half_precision_has_the_matches_of_float32(gpu, preset, precision, views, shipped_weights):
    exact = matcher.load(preset, device="cpu", precision="float32", max_keypoints=256, second_pass=False)
    with on_cpu():
        features = [exact.extract(view) for view in views]
        matches = exact.match_features(*features)
    expected = indices(matches)
    sure = {*map(tuple, matches.indices[matches.scores > 0.6].tolist())}
    ours = matcher.load(preset, device="cuda", precision=precision, max_keypoints=256, second_pass=False)
    found = indices(ours.match_features(*features))
    # Contested matches are decided by rounding, which differs from processor to processor.
    assert len(expected & found) >= 0.92 * max(len(expected), len(found)) > 60
    assert len(sure & found) >= 0.97 * len(sure) > 40


def test_what_needs_float32_has_it_in_half_precision(gpu):
    """Positions, scores, consensus and Sinkhorn; projections and attention do not."""
    ours = AttentionMatcher(random_model(config=GUIDED), device="cuda", precision="float16")
    seen = {}
    transport = matching.PairRun.begin_transport

    def scores(run) -> None:
        seen.update(scores=run.corrected.dtype, positions=run.positions.dtype, tokens=run.x.dtype)
        transport(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matching.PairRun, "begin_transport", scores)
        ours(*together(pairs()))
    assert set(seen.values()) == {torch.float32}
    assert ours.model.layers[0].self_block.weight.dtype == torch.float16


@pytest.mark.parametrize("preset", ["hybrid", "hybrid-learned", "nearest-learned"])
def test_presets_extract_and_match_with_one_wait_each(gpu, preset, views, shipped_weights):
    options = {"precision": "float32", "max_keypoints": 256, "second_pass": preset == "hybrid-learned"}
    if preset != "hybrid-learned":
        del options["second_pass"]
    cpu, ours = (matcher.load(preset, device=device, **options) for device in ("cpu", "cuda"))
    images = [ours.read(view) for view in views]
    with on_cpu():
        expected = cpu.extractor(images)
    with waits() as waited:
        features = ours.extractor(images)
    assert len(waited) == (0 if preset == "hybrid" else 1), waited  # SIFT runs on the CPU
    least = 1.0 if gpu == "simulated" else 0.97
    for here, there in zip(expected, features, strict=True):
        nearest = (here.keypoints[:, None] - there.keypoints).norm(dim=2).amin(1)
        assert float((nearest < 0.1).float().mean()) >= least
        assert there.keypoints.device.type == there.descriptors.device.type == "cpu"
    with waits() as waited:
        found = indices(ours.match_features(*expected))
    assert len(waited) == 1, waited
    with on_cpu():
        same = indices(cpu.match_features(*expected))
    assert len(found & same) >= 0.99 * max(len(found), len(same)) > 50


@pytest.mark.parametrize("probed", [768, 96])
def test_rotated_and_unlike_images_are_turned_as_on_the_cpu(gpu, views, shipped_weights, monkeypatch, probed):
    """Descriptors are compared without reading; a pair with few matches is tried at every turn."""
    monkeypatch.setattr(other_turns, "PROBED", probed)
    options = {"precision": "float32", "max_keypoints": 192, "second_pass": False}
    cpu, ours = (matcher.load("hybrid-learned", device=device, **options) for device in ("cpu", "cuda"))
    image = read_image(views[0], resize=400).pixels
    turned = [np.ascontiguousarray(np.rot90(image, turns)) for turns in (1, 2)]
    noise = np.random.default_rng(1).integers(0, 255, image.shape, dtype=np.uint8)
    with on_cpu():
        first = cpu.extract(image)
        others = [cpu.extract(other) for other in (*turned, noise)]
        batch = [(first, other) for other in others]
        expected = [cpu.match_features(*each) for each in batch]
    with waits() as waited:
        found = ours.match_features_batch(batch)
    assert len(waited) == 4, waited  # again for each other turn of the noise
    for here, there in zip(expected[:2], found, strict=False):
        assert len(indices(here) & indices(there)) >= 0.99 * len(here) > 60
    batch = [Features.stack([first]), Features.stack([others[0]])]
    views_of = [pipe.matcher.matched_view(*batch) for pipe in (cpu, ours)]
    assert torch.equal(views_of[0].view_orientation, views_of[1].view_orientation.cpu())


def test_masks_limit_points_on_a_gpu_too(gpu, views):
    pixels = read_image(views[0], resize=480).pixels
    mask = np.zeros(pixels.shape[:2], np.uint8)
    mask[:, : pixels.shape[1] // 2] = 1
    ours = matcher.load("nearest-learned", device="cuda", precision="float32", max_keypoints=200)
    points = ours.extract(pixels, mask).keypoints
    assert len(points) > 20 and points[:, 0].max() <= pixels.shape[1] // 2


def test_plain_pictures_have_no_points_and_no_matches(gpu, shipped_weights):
    ours = matcher.load("hybrid-learned", device="cuda", max_keypoints=100, second_pass=False)
    plain = np.full((96, 128), 127, np.uint8)
    features = ours.extract(plain)
    assert len(features) == 0
    assert len(ours.match_features(features, features)) == 0


def test_features_on_the_device_are_taken_as_they_are(gpu):
    model = random_model(config=GUIDED)
    batch = together(pairs())
    ours = AttentionMatcher(model, device="cuda", precision="float32")
    expected = ours(*batch)
    there = [features.to("cuda") for features in batch]
    with waits() as waited:
        found = ours(*there)
    assert len(waited) == 1, waited
    for here, other in zip(expected, found, strict=True):
        assert np.array_equal(here.indices, other.indices) and np.array_equal(here.points0, other.points0)


def test_descriptors_that_do_not_fit_are_refused_wherever_they_lie(gpu):
    ours = AttentionMatcher(random_model(), device="cuda", precision="float32")
    first, second = together(pairs()[:1])
    wrong = first.with_valid(descriptors=7 * first.descriptors)
    for given in (wrong, wrong.to("cuda")):
        with pytest.raises(UsageError, match="norm 1"):
            ours(given, second.to(given.mask.device))
    with pytest.raises(UsageError, match="cannot pair"):
        ours(*together(pairs()[:2])[:1], second)


def test_equal_runs_give_equal_matches(gpu):
    ours = AttentionMatcher(random_model(config=GUIDED), device="cuda", precision="bfloat16")
    first, second = (ours(*together(pairs())) for _ in range(2))
    for here, there in zip(first, second, strict=True):
        assert np.array_equal(here.indices, there.indices) and np.array_equal(here.scores, there.scores)


def test_large_batches_are_matched_in_groups_and_read_once(gpu, monkeypatch):
    ours = AttentionMatcher(random_model(config=GUIDED), device="cuda", precision="float32")
    expected = ours(*together(pairs()))
    monkeypatch.setattr(matching, "MOST_SCORES", 2 * 129**2)
    with waits() as waited:
        found = ours(*together(pairs()))
    assert len(waited) == 1, waited
    assert list(map(indices, expected)) == list(map(indices, found))


def test_memory_grows_with_a_group_not_with_the_batch(gpu, monkeypatch):
    if gpu == "simulated":
        pytest.skip("memory is that of a real device")
    ours = AttentionMatcher(random_model(config=GUIDED), device="cuda", precision="float32")
    monkeypatch.setattr(matching, "MOST_SCORES", 4 * 1025**2)
    peaks = []
    for count in (4, 24):
        batch = together([pair(1000, 1000, 1)] * count)
        ours(*batch)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ours(*batch)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 1.5 * peaks[0] < 4 * 60 * 1025**2


@pytest.mark.slow
def test_a_pipeline_with_further_passes_runs(gpu, views, shipped_weights):
    ours = matcher.load(device="cuda", max_keypoints=128)
    dark = 255 - read_image(views[1], resize=480).pixels
    result = ours.match(views[0], dark)
    assert len(result.matches) > 0 and len(result.passes) > 1


def test_a_tracker_runs(gpu, views, shipped_weights):
    tracker = matcher.Tracker("hybrid-learned", device="cuda", max_keypoints=128)
    frames = [tracker.push(read_image(view, resize=480).pixels) for view in views]
    assert (frames[1].track_lengths == 2).sum() > 30


def test_captured_graphs_have_the_matches_of_queued_stages(gpu):
    """The first run of a size is queued, the second captured and replayed, the others replayed."""
    model, batches = random_model(config=GUIDED), [together([pair(60, 50, seed)]) for seed in range(4)]
    queued = AttentionMatcher(model, device="cuda", precision="float32")
    expected = [indices(queued(*batch)[0]) for batch in batches]
    graphs = AttentionMatcher(model, device="cuda", precision="float32", cuda_graphs=True)
    for batch, wanted in zip(batches, expected, strict=True):
        assert indices(graphs(*batch)[0]) == wanted
    with waits() as waited:
        assert indices(graphs(*batches[0])[0]) == expected[0]
    assert len(waited) == 1, waited
    assert len(set(map(frozenset, expected))) == len(batches)
    other = together([pair(100, 90, 7)] * 2)
    for _ in range(3):
        found = graphs(*other)
        assert indices(found[0]) == indices(found[1]) == indices(queued(*other)[0])


def test_graphs_are_captured_on_their_own_device_whatever_other_threads_do():
    """torch's own stream for captures is of the device that was captured on first."""
    with simulated_gpu():
        graphs = AttentionMatcher(random_model(), device="cuda:0", precision="float32", cuda_graphs=True)
        captures.clear()
        for _ in range(2):
            graphs(*together([pair(50, 50, 0)]))
    own = torch.device("cuda:0")
    assert captures and set(captures) == {(own, own, "thread_local")}


def test_graphs_are_not_refilled_with_features_that_say_more(gpu):
    """Orientations that only the second pair of images has were not looked at, those of the first kept."""
    model = random_model(config=GUIDED)
    queued, graphs = (
        AttentionMatcher(model, device="cuda", precision="float32", cuda_graphs=by_graph)
        for by_graph in (False, True)
    )
    plain = together([pair(60, 50, 0)])
    turned = tuple(f.with_valid(view_orientation=torch.full_like(f.exif_orientation, 6)) for f in plain)
    expected = [indices(queued(*batch)[0]) for batch in (plain, turned)]
    for _ in range(3):
        for batch, wanted in zip((plain, turned), expected, strict=True):
            assert indices(graphs(*batch)[0]) == wanted
    assert len(graphs._padded._captured) == 2


def test_graphs_are_kept_for_a_few_sizes(gpu, monkeypatch):
    monkeypatch.setattr(matching, "GRAPHS_KEPT", 2)
    graphs = AttentionMatcher(random_model(), device="cuda", precision="float32", cuda_graphs=True)
    for count in (50, 100, 150):
        for _ in range(2):
            graphs(*together([pair(count, count, 0)]))
    assert [key[0] for key in graphs._padded._captured] == [(2, 128), (2, 192)]


def test_a_stage_that_waits_cannot_be_captured(gpu):
    """So nothing that waits can come into a stage unnoticed."""
    graphs = AttentionMatcher(random_model(), device="cuda", precision="float32", cuda_graphs=True)
    begin = matching.PairRun.begin

    def reads(run, *, align: bool) -> None:
        begin(run, align=align)
        run.totals.tolist()

    graphs(*together(pairs()[:1]))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="captur"):
        patch.setattr(matching.PairRun, "begin", reads)
        graphs(*together(pairs()[:1]))


def test_graphs_are_refused_without_a_gpu(shipped_weights):
    with pytest.raises(UsageError, match="cuda_graphs needs a CUDA device"):
        matcher.load("hybrid", device="cpu", cuda_graphs=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "only",
    [
        "lightglue",
        "superglue",
        "loftr",
        "ragged",
        "memory",
        "device",
        "extraction",
        "sinkhorn",
        "adaptivity",
        "refinement",
        "one against",
    ],
)
def test_rows_of_the_benchmark_are_measured_on_a_gpu(gpu, only, views, shipped_weights):
    if only == "superglue":
        pytest.importorskip("transformers")
    report = run_benchmark(Stopwatch(torch.device("cuda"), repeats=1), views, quick=True, only=only)
    assert report.rows and report.machine.device == torch.cuda.get_device_name()
    assert all(row.ours.minimum > 0 for row in report.rows if row.unit == "ms")
    if only == "device":
        assert any("CUDA graphs" in row.work for row in report.rows)


def test_a_row_that_does_not_fit_the_memory_leaves_the_others(gpu, views, shipped_weights, monkeypatch):
    def too_large(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(device_rows, "batch_rows", too_large)
    monkeypatch.setattr(device_rows, "match_rows", lambda *_: iter([]))
    lines = []
    watch = Stopwatch(torch.device("cuda"), repeats=1)
    report = run_benchmark(watch, views, quick=True, only="device", progress=lines.append)
    assert "| device: batches | | the memory of this device is too small for it | | | |" in lines
    assert [row.work.split(",")[0] for row in report.rows] == ["front end learned"]


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_whole_table_takes_less_than_five_minutes(tmp_path):
    start = perf_counter()
    script = Path(__file__).resolve().parent.parent / "scripts" / "benchmark.py"
    subprocess.run(
        [sys.executable, script, "--device", "cuda", "--json", tmp_path / "report.json"], check=True
    )
    assert perf_counter() - start < 300


def test_one_training_step_runs_on_a_gpu(gpu):
    """In mixed precision; the loss is that of the processor to its rounding."""
    batch = random_batch(np.random.default_rng(7), pairs=2)
    losses = []
    for device in ("cpu", "cuda"):
        trainer = Trainer(TINY, torch.device(device))
        losses.append(float(trainer.step(batch)))
        assert trainer.progress.step == 1
    assert abs(losses[0] - losses[1]) < 0.1 * losses[0]


def test_the_command_line_says_that_there_is_no_gpu(views, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["match", *map(str, views), "--device", "cuda"]) == 2
    assert "'cuda' is not available on this machine; use 'auto' or 'cpu'" in capsys.readouterr().err
