"""The engine on ONNX Runtime does what torch does, also where torch cannot be imported."""

import copy
import json
import os
import pickle
import subprocess
import sys
import venv
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from random_matcher import CONFIG, as_table, random_model

import matcher
from matcher.cli import main
from matcher.config import ExtractorConfig
from matcher.errors import IntegrityError, UsageError
from matcher.images import read_image
from matcher.match.network import AttentionMatcher
from matcher.presets import PRESETS
from matcher.torch_engine import build_extractor
from matcher.types import Features, Matches
from matcher.weights.files import find_weights, load_model, read_manifest, weights_bytes

pytest.importorskip("onnxruntime")
from matcher.onnx_engine import GRAPHS, OnnxExtractor, OnnxMatcher, devices, graph_key, read_network

ROOT = Path(__file__).resolve().parent.parent
SIZE = (320, 256)
WITHOUT_TORCH = """
import sys
absent = {"torch", "kornia", "onnx", "onnxscript"}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
sys.meta_path.insert(0, Absent())
"""


def shared(first: Matches, second: Matches) -> tuple[int, int, float]:
    """How many matches both have, how many either has, and by how much scores differ at most."""
    a, b = as_table(first), as_table(second)
    both = a.keys() & b.keys()
    return len(both), len(a.keys() | b.keys()), max((abs(a[k] - b[k]) for k in both), default=0.0)


def engines(preset: str, **policy) -> tuple:
    """Matchers of torch and of ONNX Runtime for a preset."""
    policy = replace(PRESETS[preset].matcher.policy, **policy)
    network = load_model(preset)[0].with_policy(policy)
    theirs = OnnxMatcher(*read_network(find_weights(preset)), policy)
    return AttentionMatcher(network, precision="float32"), theirs


@pytest.mark.parametrize(("preset", "policy"), [("hybrid-learned", {"early_exit": False}), ("hybrid", {})])
def test_a_network_finds_the_same_matches_as_in_torch(shipped_weights, views, preset, policy, monkeypatch):
    monkeypatch.setenv("MATCHER_COMPILED", "0")  # kernels assign by the best candidates only
    ours, theirs = engines(preset, **policy)
    sides = [matcher.load(preset, max_keypoints=300).extract(view) for view in views]
    together, every, apart_most = 0, 0, []
    for n, m in ((300, 300), (300, 170), (120, 119), (1, 30), (30, 1), (1, 1)):
        few = [side.select(np.arange(count)) for side, count in zip(sides, (n, m), strict=True)]
        pair = [Features.stack([side]) for side in few]
        (a,), (b,) = ours(*pair), theirs(*pair)
        both, either, apart = shared(a, b)
        together, every = together + both, every + either
        apart_most.append(apart)
        # The engine ends where an image has no points left, torch at the next exit.
        assert a.layers_run == b.layers_run or min(n, m) == 1
    assert together >= 0.99 * every > 100, (together, every)
    # More where rounding decides whether a round of consensus is the last.
    assert np.median(apart_most) < 1e-3


def test_a_pair_is_matched_the_same_in_any_batch(shipped_weights, views):
    _, onnx = engines("hybrid-learned")
    sides = [matcher.load("hybrid-learned", max_keypoints=200).extract(view) for view in views]
    few, nothing = (side.select(np.arange(count)) for side, count in zip(sides, (60, 0), strict=True))
    batch = [Features.stack([sides[0], few, few]), Features.stack([sides[1], sides[1], nothing])]
    first, second, empty = onnx(*batch)
    (alone,) = onnx(Features.stack([few]), Features.stack([sides[1]]))
    np.testing.assert_array_equal(alone.indices, second.indices)
    np.testing.assert_allclose(alone.scores, second.scores, atol=1e-6)
    assert len(first) > 50 and len(empty) == 0


def test_an_exported_matcher_takes_any_number_of_points():
    """The program that becomes the graph, of one layer and one round of consensus."""
    export = pytest.importorskip("matcher.export_onnx")
    few = {"context": replace(CONFIG.context, depth=1), "assignment": replace(CONFIG.assignment, consensus=1)}
    config = replace(CONFIG, **few)
    pair, (given, varying, _) = (
        export.Pair(random_model(config=config).requires_grad_(False)),
        export.example(config),
    )
    program = torch.export.export(pair, given, dynamic_shapes=varying, strict=False).module()
    for counts in ((7, 5), (40, 90)):
        other = export.example(config, counts)[0]
        torch.testing.assert_close(program(*other), pair(*other), atol=1e-4, rtol=1e-4)
        assert (pair(*other)[1] > 0).any()


@pytest.mark.parametrize("size", [(75, 101), (17, 33)])
def test_the_front_end_finds_the_same_keypoints(views, size):
    config = ExtractorConfig(kind="learned", max_keypoints=80)
    image = read_image(views[0])
    image = image.resized(size[1] / image.pixels.shape[1])
    mask = np.ones(image.pixels.shape[:2], bool)
    mask[:, :9] = False
    for one in (image, replace(image, mask=mask)):
        ours = build_extractor(config, precision="float32")([one])[0]
        theirs = OnnxExtractor(config)([one])[0]
        assert len(ours) == len(theirs) >= 3
        np.testing.assert_allclose(ours.keypoints, theirs.keypoints, atol=0.01)
        np.testing.assert_allclose(ours.scores, theirs.scores, atol=1e-4)
        np.testing.assert_allclose(ours.descriptors, theirs.descriptors, atol=1e-3)
    assert len(OnnxExtractor(config).limited(3)([image])[0]) == 3
    part = pytest.importorskip("matcher.export_onnx")  # for other programs, which mask the margin alone
    margin, wanted = [(0, -side % 32) for side in mask.shape], OnnxExtractor(config)([image])[0].keypoints
    grey = torch.from_numpy(np.pad(image.grey(), margin, mode="edge"))[None, None] / 255
    inside = torch.from_numpy(np.pad(mask | True, margin))
    found = part.InnerFrontEnd(*part.trained_front_end(config)).eval()(grey, inside, torch.tensor([80]))[0]
    np.testing.assert_allclose(image.to_stored(found.detach().numpy()), wanted, atol=0.05)


def test_graphs_are_of_the_shipped_weights_and_hold_none(shipped_weights):
    """The arrays come from weights files that are checked by their hash."""
    onnx = pytest.importorskip("onnx")
    for name in ("hybrid-learned", "hybrid", "learned"):
        described = json.loads((GRAPHS / name / "graph.json").read_text())
        file = weights_bytes(name)
        assert file.sha256 == read_manifest()[name].sha256
        if name != "learned":
            config, arrays = read_network(file)
            assert {k: list(v.shape) for k, v in arrays.items()} == described["shapes"]
            config = replace(config, policy=PRESETS[name].matcher.policy)
            assert graph_key(config) == described["settings"]["network"]
        for path in (GRAPHS / name).glob("*.onnx"):
            model = onnx.load(path, load_external_data=False)
            outside = [a for a in model.graph.initializer if a.data_location == onnx.TensorProto.EXTERNAL]
            assert outside and all(a.name.startswith("network.") for a in outside)
            assert {each.value for a in outside for each in a.external_data} == {"weights"}
            assert path.stat().st_size < 4e5


def test_the_engine_gives_the_result_of_torch(views):
    options = {"max_keypoints": 300, "further_passes": False, "refine": False, "precision": "float32"}
    pipelines = [matcher.load("hybrid-learned", engine=name, **options) for name in ("torch", "onnx")]
    ours, theirs = (pipeline.match(*views) for pipeline in pipelines)
    for again in (copy.deepcopy(pipelines[1]), pickle.loads(pickle.dumps(pipelines[1]))):
        np.testing.assert_array_equal(again.match(*views).points1, theirs.points1)
    both, either, _ = shared(ours.matches, theirs.matches)
    assert both >= 0.95 * either > 50  # a keypoint at the limit may be another
    assert ours.geometry.status == theirs.geometry.status == "ok" and ours.weights == theirs.weights


def test_what_the_engine_does_not_have_is_refused():
    for given, message in (
        ({"device": "cuda"}, "runs on the CPU"),
        ({"precision": "bfloat16"}, "computes in float32"),
        ({"frontend": "disk"}, "front ends sift and learned"),
        ({"engine": "tensorrt"}, "engine must be one of torch, onnx"),
        ({"weights": "learned"}, r"learned.* is a front end.*frontend_weights"),
        ({"preset": "loftr-outdoor"}, "LoFTR"),
    ):
        with pytest.raises(UsageError, match=message):
            matcher.load(**{"preset": "hybrid-learned", "engine": "onnx", **given})
    assert devices("auto") == ["cpu"]


@pytest.mark.parametrize(
    ("name", "argument"), [("mine.onnx", "weights"), ("mine.safetensors", "frontend_weights")]
)
def test_a_graph_of_somebody_is_no_weights_file(tmp_path, name, argument):
    path = tmp_path / name
    path.write_bytes((GRAPHS / "learned" / "front_end.onnx").read_bytes())
    with pytest.raises((IntegrityError, UsageError), match="mine"):
        pipe = matcher.load("hybrid-learned", engine="onnx", device="cpu", **{argument: path})
        pipe.extract(np.zeros((64, 64), np.uint8))  # a front end is read when it is needed


def without_torch(code: str, folder: Path) -> subprocess.CompletedProcess:
    (home := folder / "home").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(home)}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    command = [sys.executable, "-c", WITHOUT_TORCH + code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert not list(home.rglob("*")) and "telemetry" not in done.stderr
    return done


def test_the_main_job_runs_where_torch_cannot_be_imported(views, tmp_path):
    done = without_torch(
        f"""
from matcher.cli import main
views = {[str(view) for view in views]!r}
assert main(["match", *views, "--max-keypoints", "256", "--output", "m.npz"]) == 0
assert not {{"torch", "onnx", "kornia"}} & set(sys.modules)
for asked in (["--engine", "torch"], ["--preset", "superglue-outdoor"]):
    assert main(["match", *views, *asked]) == 2
assert main(["weights", "export", "hybrid-learned", "--onnx", "models"]) == 2
""",
        tmp_path,
    )
    assert "inliers of one fundamental matrix" in done.stdout
    assert "once torch is installed: pip install 'torch>=2.6'" in done.stderr and "onnxscript" in done.stderr
    assert len(np.load(tmp_path / "m.npz")["points0"]) > 50


@pytest.mark.slow
def test_other_commands_run_where_torch_cannot_be_imported(views, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    for view in views:
        small = cv2.resize(cv2.imread(str(view)), SIZE, interpolation=cv2.INTER_AREA)
        cv2.imwrite(str(photos / f"{Path(view).stem}.png"), small)
    cv2.imwrite(str(tmp_path / "part.png"), small[40:200, 60:260])
    done = without_torch(
        """
from matcher.cli import main
options = ["--engine", "onnx", "--max-keypoints", "200"]
views = sorted(map(str, __import__("pathlib").Path("photos").iterdir()))
absent.add("matplotlib")
assert main(["match", *views[:2], *options, "--plot", "m.png"]) == 2
assert main(["collection", "photos", "--run", "run", *options, "--workers", "0"]) == 0
assert main(["report", "run"]) == 0
absent.remove("matplotlib")
assert main(["match", *views[:2], *options, "--plot", "m.png"]) == 0
assert main(["align", *views[:2], *options, "--output", "a.png"]) == 0
assert main(["find", "part.png", views[-1], *options, "--output", "f.json"]) == 0
assert main(["track", "photos", *options]) == 0
assert not {"torch", "onnx", "kornia"} & set(sys.modules)
""",
        tmp_path,
    )
    assert "1 instance" in done.stdout and "pip install 'matplotlib" in done.stderr
    for name in ("m.png", "a.png", "f.json", "run/report.html"):
        assert (tmp_path / name).stat().st_size > 100


@pytest.mark.slow
def test_the_small_distribution_matches_without_torch(views, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "check": True}
    subprocess.run([python, "-m", "pip", "install", "-q", ROOT / "scripts" / "lite"], **run)
    program = tmp_path / "venv" / "bin" / "matcher"
    done = subprocess.run([program, "match", *views, "--max-keypoints", "512"], **run)
    assert "inliers of one fundamental matrix" in done.stdout
    assert "torch" not in subprocess.run([python, "-m", "pip", "list"], **run).stdout


@pytest.mark.parametrize(
    ("preset", "given", "message"),
    [
        ("nearest", [], "nothing to export"),
        ("loftr-indoor", [], "matcher weights fetch loftr-indoor"),
        ("hybrid-learned", ["--opencv", "100x64"], "multiples of 32"),
    ],
)
def test_what_cannot_be_exported_is_said(preset, given, message, tmp_path, monkeypatch, capsys):
    pytest.importorskip("onnxscript")
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path / "cache"))
    assert main(["weights", "export", preset, "--onnx", str(tmp_path / "models"), *given]) in (2, 5)
    assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.onnx"))
