"""ONNX graphs of our networks do in ONNX Runtime what the networks do in torch."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx_models import by_both, shared, trained_of
from random_matcher import CONFIG, WITH_MATCH_PROBABILITY, pair, random_model
from real_pairs import fifty_pairs

import matcher
from matcher.cli import main
from matcher.config import (
    AssignmentConfig,
    ContextConfig,
    ExtractorConfig,
    MatchingPolicy,
    PositionConfig,
    RefineConfig,
)
from matcher.errors import IntegrityError, UsageError
from matcher.extract.learned import Architecture, grown
from matcher.images import read_image
from matcher.match.network import MatchingNetwork
from matcher.match.steering import TURNS, best_turn, quarter_turns, turned
from matcher.onnx import engine, runtime
from matcher.onnx.builder import Builder
from matcher.onnx.export import export_preset
from matcher.onnx.extractor import OnnxExtractor
from matcher.onnx.matching import OnnxMatcher
from matcher.onnx.models import network_model
from matcher.onnx.refinement import refinement_model
from matcher.onnx.runtime import Model
from matcher.onnx.trained import trained_network
from matcher.presets import PRESETS
from matcher.torch_engine import build_extractor
from matcher.types import Features
from matcher.weights.files import save_front_end

COUNTS = [(60, 45), (45, 60), (50, 50), (1, 30), (30, 1), (1, 1), (0, 20), (20, 0), (0, 0)]
SUPERGLUE = replace(
    CONFIG,
    position=PositionConfig(kind="mlp", inputs=("xy", "score"), extent=0.7, hidden=(8, 16)),
    context=ContextConfig(dim=48, heads=4, depth=3, shared_qk=False, norm="batch", activation="relu"),
    assignment=AssignmentConfig(dustbin="learned", every_layer=False, tolerance=None),
    policy=MatchingPolicy(match_threshold=0.0, early_exit=False, pruning=False),
)
ORIENTED = PositionConfig(inputs=("xy", "raw_sigma", "raw_orientation", "raw_counterclockwise", "frame"))
OURS = replace(
    WITH_MATCH_PROBABILITY,
    guided=True,
    assignment=AssignmentConfig(consensus=2),
    policy=replace(
        WITH_MATCH_PROBABILITY.policy, match_threshold=0.0, prune_matchability=0.05, exit_share=0.6
    ),
)
CASES = {
    "hybrid": OURS,
    "hybrid, all layers": replace(OURS, policy=replace(OURS.policy, early_exit=False, pruning=False)),
    "lightglue": replace(
        CONFIG,
        assignment=AssignmentConfig(kind="dual_softmax"),
        policy=replace(CONFIG.policy, match_threshold=1e-6, threshold_doubles_at=0.5),
    ),
    "lightglue, oriented": replace(
        CONFIG, position=ORIENTED, assignment=AssignmentConfig(kind="dual_softmax")
    ),
    "superglue": SUPERGLUE,
}


def in_frames(features: Features, rng: np.random.Generator) -> Features:
    return replace(features, affine_frames=rng.normal(size=(len(features), 2, 2)))


@torch.no_grad()
def superglue() -> MatchingNetwork:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MatchingNetwork(SUPERGLUE).eval()
        for name, parameter in model.named_parameters():
            if "narrow" in name or "position.out" in name:
                torch.nn.init.normal_(parameter, std=0.05)
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm1d):
                module.running_var.uniform_(0.5, 2.0)
                module.running_mean.normal_(std=0.2)
    return model


@pytest.mark.parametrize("name", CASES)
def test_a_network_finds_the_same_matches_as_in_torch(name, rng):
    model = superglue() if name == "superglue" else random_model(config=CASES[name])
    pairs = [
        tuple(in_frames(features, rng) for features in pair(*counts, seed=seed))
        for seed, counts in enumerate(COUNTS)
    ]
    together = every = 0
    layers = set()
    for ours, theirs in by_both(model, pairs):
        both, either, apart = shared(ours, theirs)
        together, every = together + both, every + either
        assert np.abs(apart).max(initial=0.0) < 1e-4
        if min(ours.kept0, ours.kept1) > 1:
            assert (ours.layers_run, ours.kept0, ours.kept1) == (
                theirs.layers_run,
                theirs.kept0,
                theirs.kept1,
            )
            layers.add(ours.layers_run)
    assert together == every > 20, (together, every)
    if name == "hybrid":
        assert len(layers) > 1


def test_a_pair_is_matched_the_same_in_any_batch():
    matcher = OnnxMatcher(trained_of(random_model(config=OURS)))
    pairs = [pair(40, 30, seed=1), pair(12, 50, seed=2)]
    batch = matcher(*(Features.stack(side) for side in zip(*pairs, strict=True)))
    for sides, together in zip(pairs, batch, strict=True):
        (alone,) = matcher(*(Features.stack([side]) for side in sides))
        np.testing.assert_array_equal(alone.indices, together.indices)
        np.testing.assert_allclose(alone.scores, together.scores, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("numbers", ["float32", "float16", "int8"])
def test_a_file_is_valid_and_smaller_in_fewer_digits(numbers, fused):
    trained = trained_of(random_model(config=OURS))
    data = network_model(trained, numbers=numbers, fused_attention=fused)
    if not fused:  # the fused operator is in no standard
        onnx.checker.check_model(onnx.load_from_string(data), full_check=True)
    whole = network_model(trained)
    assert numbers == "float32" or len(data) < 0.85 * len(whole)
    sides = pair(40, 40, seed=5, noise=0.05)
    given = {}
    for number, side in enumerate(sides):
        one = Features.stack([side]).numpy()
        names = {"keypoints": "keypoints", "descriptors": "descriptors", "mask": "mask", "size": "size"}
        names |= {"orientation": "exif_orientation", "scales": "scales", "angles": "orientations"}
        given |= {f"{name}{number}": one[field] for name, field in names.items()}
    wanted, found = (
        {tuple(row) for row in Model(each)(**given)["matches"][0].tolist() if row[0] >= 0}
        for each in (whole, data)
    )
    assert len(wanted & found) >= 0.8 * len(wanted) > 5


def transposed_into_products(graph: onnx.GraphProto) -> list[str]:
    """Products of float64 that take a transposed matrix, in a graph and those inside it."""
    kinds = {each.name: each.type.tensor_type.elem_type for each in graph.value_info}
    turned = {name for node in graph.node if node.op_type == "Transpose" for name in node.output}
    turned |= {node.output[0] for node in graph.node if node.op_type == "Cast" and node.input[0] in turned}
    found = []
    for node in graph.node:
        if node.op_type == "MatMul" and kinds.get(node.output[0]) == onnx.TensorProto.DOUBLE:
            found += [name for name in node.input if name in turned]
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                found += transposed_into_products(attribute.g)
    return found


def test_the_oldest_runtime_can_join_products_with_transposing():
    """ONNX Runtime 1.17 joins them and has no such product of float64: it would refuse the file."""
    turned = Builder("turned")
    matrix = turned.double(turned.input("matrix", "float32", "N", "M"))
    turned.output("product", turned.real(matrix @ turned.Transpose(matrix, perm=[1, 0])), "float32")
    files = [turned.encode({}), network_model(trained_of(random_model(config=OURS)))]
    files.append(refinement_model(RefineConfig()))
    found = [
        len(transposed_into_products(onnx.shape_inference.infer_shapes(onnx.load_from_string(data)).graph))
        for data in files
    ]
    assert found == [1, 0, 0]


def larger_front_end(path: Path) -> Path:
    """The shipped front end with a coarser map and wider ones, of which all matter."""
    shipped = build_extractor(ExtractorConfig(kind="learned"), precision="float32").network
    network = grown(shipped, Architecture((16, 32, 72, 128, 192, 24), (2, 2, 3, 4, 4, 2)))
    generator = torch.Generator().manual_seed(0)
    for name in ("lift.4.weight", "descriptor.0.weight"):
        value = network.state_dict()[name]
        value += 0.05 * torch.randn(value.shape, generator=generator)
    save_front_end(network, "learned", path)
    return path


@pytest.mark.parametrize("size", [(64, 96), (75, 101), (17, 33)])
@pytest.mark.parametrize("larger", [False, True])
def test_the_front_end_finds_the_same_keypoints(views, size, larger, tmp_path):
    weights = larger_front_end(tmp_path / "larger.safetensors") if larger else None
    config = ExtractorConfig(kind="learned", max_keypoints=80)
    image = read_image(views[0])
    image = image.resized(size[1] / image.pixels.shape[1])
    mask = np.ones(image.pixels.shape[:2], bool)
    mask[:, :9] = False
    for one in (image, replace(image, mask=mask)):
        ours = build_extractor(config, weights, precision="float32")([one])[0]
        theirs = OnnxExtractor(config, weights)([one])[0]
        assert len(ours) == len(theirs)
        np.testing.assert_allclose(ours.keypoints, theirs.keypoints, atol=0.01)
        np.testing.assert_allclose(ours.scores, theirs.scores, atol=1e-4)
        np.testing.assert_allclose(ours.descriptors, theirs.descriptors, atol=1e-3)
        assert theirs.kind == "learned"
    assert len(ours) >= 3 and len(OnnxExtractor(config).limited(3)([image])[0]) == 3


def steerable(count: int, turn: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    values = rng.normal(size=(count, 64)).astype(np.float32)
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    return values, turned(values, turn)


@pytest.mark.parametrize("turn", range(TURNS))
@pytest.mark.parametrize("count", [30, 500])
def test_quarter_turns_are_found_alike_by_torch_numpy_and_onnx(turn, count, rng):
    from matcher.onnx.steering import quarter_turns as write

    first, second = steerable(count, turn, rng)
    second = second + 0.05 * rng.normal(size=second.shape).astype(np.float32)
    places = rng.uniform(0, 100, (count, 2))
    batch = [
        Features.stack([Features(places, each, size=(100, 100), kind="learned")]) for each in (first, second)
    ]
    wanted = -turn % TURNS
    graph = Builder("turns")
    inputs = [graph.input(name, "float32", name, 64) for name in ("a", "b")]
    graph.output("turns", write(graph, *inputs), "int64")
    assert best_turn(first, second) == wanted
    assert quarter_turns(*(features.to("cpu") for features in batch)) == [wanted]
    assert Model(graph.encode({}))(a=first, b=second)["turns"] == wanted


def test_a_model_names_what_goes_in_and_comes_out():
    graph = Builder("two")
    for name in ("first", "second"):
        graph.output(f"{name} again", graph.Identity(graph.input(name, "float32", "count")), "float32")
    model = Model(graph.encode({}))
    assert (model.inputs, model.outputs) == (["first", "second"], ["first again", "second again"])


def test_a_preset_is_exported_and_replaced_only_if_it_is_ours(tmp_path, capsys):
    assert main(["weights", "export", "hybrid-learned", "--onnx", str(tmp_path / "models")]) == 0
    assert "hybrid-learned.onnx" in capsys.readouterr().out
    files = sorted((tmp_path / "models").iterdir())
    assert [file.name for file in files] == ["hybrid-learned.onnx", "learned.onnx", "refine.onnx"]
    assert Model(files[1].read_bytes()).outputs == ["keypoints", "scores", "descriptors"]
    assert main(["weights", "export", "hybrid-learned", "--onnx", str(tmp_path / "models")]) == 0
    files[1].write_bytes(b"something else")
    assert main(["weights", "export", "hybrid-learned", "--onnx", str(tmp_path / "models")]) == 2
    assert "learned.onnx exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("preset", "message"),
    [("nearest", "nothing to export"), ("loftr-indoor", "cannot be written as ONNX")],
)
def test_what_cannot_be_exported_is_said(preset, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        export_preset(preset, PRESETS[preset], tmp_path)


@pytest.mark.parametrize(
    ("preset", "given", "message"),
    [
        ("nearest-learned", {"weights": "absent.safetensors"}, "so weights has no effect"),
        ("hybrid", {"frontend_weights": "absent.safetensors"}, "so frontend_weights has no effect"),
    ],
)
def test_weights_that_are_not_exported_are_refused(preset, given, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        export_preset(preset, PRESETS[preset], tmp_path / "models", **given)
    assert not (tmp_path / "models").exists()


def test_a_preset_without_its_weights_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path))
    with pytest.raises(IntegrityError, match="matcher weights fetch lightglue-superpoint"):
        export_preset("lightglue-superpoint", PRESETS["lightglue-superpoint"], tmp_path / "models")


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "models").write_text("")
    with pytest.raises(UsageError, match="cannot be made a folder"):
        export_preset("hybrid-learned", PRESETS["hybrid-learned"], tmp_path / "models")


@pytest.mark.parametrize(
    ("preset", "code", "message"),
    [
        ("lightglue-superpoint", 5, "matcher weights fetch lightglue-superpoint"),
        ("loftr-indoor", 2, "cannot be written as ONNX"),
        ("hybrid-learned", 2, "cannot be written"),
        ("hybrid", 2, "onnxruntime 1.9.0 is too old"),
    ],
    ids=["absent weights", "not to be exported", "a folder without rights", "an old runtime"],
)
def test_the_command_line_says_what_is_wrong(preset, code, message, tmp_path, monkeypatch, capsys, views):
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path / "cache"))
    command = ["weights", "export", preset, "--onnx", str(tmp_path)]
    if preset == "hybrid-learned":
        monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    if preset == "hybrid":  # the exporter needs none; the engine does
        monkeypatch.setattr(runtime.onnxruntime, "__version__", "1.9.0")
        command = ["match", *map(str, views), "--preset", "hybrid", "--engine", "onnx"]
    assert main(command) == code
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said and not list(tmp_path.glob("*.onnx"))


def test_absent_arrays_are_named():
    trained = trained_of(random_model(config=OURS))
    fewer = {name: array for name, array in trained.arrays.items() if name != "consensus.out.bias"}
    with pytest.raises(IntegrityError, match=r"consensus\.out\.bias"):
        network_model(trained._replace(arrays=fewer))


def test_an_old_runtime_is_refused():
    with pytest.raises(UsageError, match=r"onnxruntime 1\.16\.3 is too old; install at least version 1\.17"):
        Model(b"", "1.16.3")
    assert runtime.LEAST_VERSION == (1, 17)


def test_sessions_treat_the_smallest_numbers_as_zero_and_callers_threads_stay_as_they_are():
    # Sharp softmaxes are full of such numbers, with which attention takes four times as long.
    code = """
import threading
import numpy as np
from matcher.onnx.builder import Builder
from matcher.onnx.runtime import Model
from matcher.onnx.trained import trained_network
graph = Builder("scaled")
graph.output("y", graph.input("x", "float32", "N") * 0.5, "float32", "N")
tiny = np.full(4, 1e-39, np.float32)
found = []
def run():
    model = Model(graph.encode({}))
    found.append(model(x=tiny)["y"])
    found.append(tiny * np.float32(0.5))
run()
other = threading.Thread(target=run)
other.start()
other.join()
assert [bool(each.any()) for each in found] == [False, True, False, True], found
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": "cuda"}, "runs on the CPU"),
        ({"precision": "bfloat16"}, "computes in float32"),
        ({"frontend": "disk"}, "front ends sift and learned"),
        ({"engine": "tensorrt"}, "engine must be one of torch, onnx"),
    ],
)
def test_what_the_engine_does_not_have_is_refused(given, message):
    import matcher

    with pytest.raises(UsageError, match=message):
        matcher.load("hybrid-learned", **{"engine": "onnx", **given})
    assert engine.devices("auto") == ["cpu"]


def test_the_engine_gives_the_result_of_torch(views):
    import matcher

    options = {"max_keypoints": 300, "second_pass": False, "refine": False, "precision": "float32"}
    results = [
        matcher.load("hybrid-learned", engine=name, **options).match(*views) for name in ("torch", "onnx")
    ]
    both, either, _ = shared(*(result.matches for result in results))
    assert both >= 0.98 * either > 50
    assert results[1].geometry.status == results[0].geometry.status == "ok"
    assert results[1].weights == results[0].weights


def agreement(ours: list[dict], theirs: list[dict]) -> tuple[int, float, float]:
    """Of two runs over the same pairs: matches, the share that both have, that of scores within 1e-4."""
    every = sum(len(a.keys() | b.keys()) for a, b in zip(ours, theirs, strict=True))
    apart = np.array(
        [abs(a[k] - b[k]) for a, b in zip(ours, theirs, strict=True) for k in a.keys() & b.keys()]
    )
    return every, len(apart) / every, np.mean(apart < 1e-4)


def scores_by_points(found, numbers=(None, None)) -> dict[tuple[int, int], float]:
    """Scores by keypoints of both sides, with other numbers of these where given."""
    sides = (np.asarray(found.indices).T, numbers)
    ends = (index if number is None else number[index] for index, number in zip(*sides, strict=True))
    return dict(zip(zip(*(end.tolist() for end in ends), strict=True), found.scores.tolist(), strict=True))


@pytest.mark.slow
def test_fifty_real_pairs_match_as_in_torch(monkeypatch, capsys):
    """The front end alone, the matcher alone on the same features, and both together.

    Of two pixels beside each other whose scores differ by rounding, the higher one is a keypoint; both are
    where they are equal. Pairs with such a photo have other scores; their matches are compared as well.
    """
    # The compiled kernels assign points by their best candidates only, which changes scores.
    monkeypatch.setenv("MATCHER_COMPILED", "0")
    options = {"max_keypoints": 1024, "second_pass": False, "refine": False, "precision": "float32"}
    torch_, onnx_ = (matcher.load("hybrid-learned", engine=name, **options) for name in ("torch", "onnx"))
    alone, whole, near, same, alike = ([], []), ([], []), [], [], []
    for photos in fifty_pairs():
        sides = [[pipe.extract(str(photo)) for photo in photos] for pipe in (torch_, onnx_)]
        numbers, same_points = [], []  # of ONNX Runtime's keypoints among torch's, and whether each has one
        for ours, theirs in zip(*sides, strict=True):
            away = np.abs(np.asarray(ours.keypoints)[:, None] - np.asarray(theirs.keypoints)).max(axis=2)
            numbers.append(np.where(away.min(axis=0) < 0.01, away.argmin(axis=0), -1))
            near.append(away.min(axis=1) < 0.01)
            same_points.append(max(away.min(axis=0).max(), away.min(axis=1).max()) < 0.01)
            products = np.asarray(ours.descriptors) * np.asarray(theirs.descriptors)[away.argmin(axis=1)]
            same.append(products.sum(axis=1))
        for run, pipe, features in zip(alone, (torch_, onnx_), (sides[0], sides[0]), strict=True):
            run += [scores_by_points(pipe.match_features(*ends)) for ends in pairwise(features)]
        whole[0].extend(alone[0][-len(photos) + 1 :])
        alike += [all(ends) for ends in pairwise(same_points)]
        for ends, number in zip(pairwise(sides[1]), pairwise(numbers), strict=True):
            whole[1].append(scores_by_points(onnx_.match_features(*ends), number))
    near, same = np.concatenate(near), np.concatenate(same)
    with capsys.disabled():
        print(
            f"\nkeypoints within .01 px: {np.mean(near):.4%} of {len(near)}, the others are not in both;"
            f" least cosine of descriptors {same[near].min():.7f}"
        )
        for name, runs in (("the matcher alone", alone), ("with the front end", whole)):
            every, together, scores = agreement(*runs)
            print(f"{name}: {together:.4%} of {every} matches, {scores:.4%} of the scores within 1e-4")
        same_keypoints = [
            [pair for pair, is_same in zip(run, alike, strict=True) if is_same] for run in whole
        ]
        scores_alike = agreement(*same_keypoints)[2]
        print(f"in the {sum(alike)} pairs with the same keypoints {scores_alike:.4%} of the scores")
    assert np.mean(near) >= 0.999  # of two equal scores at the limit, either may be kept
    assert agreement(*alone)[2] >= 0.999 and scores_alike >= 0.999 and sum(alike) >= 46
    for runs in (alone, whole):
        every, together, _ = agreement(*runs)
        assert together >= 0.999 and every > 10000


@pytest.mark.slow
def test_fifty_real_pairs_keep_most_matches_in_fewer_digits(capsys):
    pipeline = matcher.load("hybrid-learned", engine="onnx", max_keypoints=1024, second_pass=False)
    trained = trained_network("hybrid-learned", pipeline.config.matcher.policy)
    runs = {numbers: [] for numbers in ("float32", "float16", "int8")}
    networks = {numbers: OnnxMatcher(trained, numbers) for numbers in runs}
    times = {numbers: [] for numbers in runs}
    for photos in fifty_pairs():
        features = [Features.stack([pipeline.extract(str(photo))]) for photo in photos]
        for sides in pairwise(features):
            for numbers, network in networks.items():
                start = time.process_time()
                runs[numbers].append(scores_by_points(network(*sides)[0]))
                times[numbers].append(time.process_time() - start)
    whole, every = runs["float32"], sum(map(len, runs["float32"]))
    for numbers, least in (("float16", 0.999), ("int8", 0.97)):
        pairs = list(zip(whole, runs[numbers], strict=True))
        apart = np.array([abs(a[k] - b[k]) for a, b in pairs for k in a.keys() & b.keys()])
        median = np.median(times["float32"])
        ratio = np.median(np.divide(times[numbers], times["float32"]))
        with capsys.disabled():
            print(
                f"\n{numbers}: {len(apart) / every:.3%} of {every} matches;"
                f" 99 % of the scores differ by less than {np.percentile(apart, 99):.2g};"
                f" CPU time {ratio:.2f} of float32's, of which a pair takes {median * 1000:.0f} ms"
            )
        assert len(apart) / every > least and every > 10000
