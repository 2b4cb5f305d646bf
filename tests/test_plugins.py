"""Parts of one's own in a pipeline, and presets that other packages add."""

import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from random_front_end import FRONT_ENDS, random_parameters, texture

import matcher
from matcher import Collection, Features, Image, IntegrityError, Matches, Pipeline, UsageError
from matcher.cli import main
from matcher.config import ExtractorConfig, PipelineConfig
from matcher.extract.front_end import resolve
from matcher.match.network import MatchingNetwork
from matcher.presets import PRESETS, configure, plugin_names
from matcher.weights.files import save_front_end, save_model


class Corners:
    """A toy front end: corners, each described by the pixels around it."""

    def __call__(self, images: list[Image]) -> list[Features]:
        return [self.find(image) for image in images]

    def find(self, image: Image) -> Features:
        grey = image.pixels if image.pixels.ndim == 2 else cv2.cvtColor(image.pixels, cv2.COLOR_RGB2GRAY)
        points = cv2.goodFeaturesToTrack(grey, 300, 0.01, 7)
        points = np.zeros((0, 2)) if points is None else points[:, 0]
        patches = [cv2.getRectSubPix(grey, (15, 15), tuple(map(float, p))).ravel() for p in points]
        values = np.array(patches, dtype=np.float32).reshape(len(points), 225)
        values -= values.mean(axis=1, keepdims=True)
        values /= np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-6)
        return Features.from_image(image, points, values, kind="corners")


class MostAlike:
    """A toy matcher: mutual nearest neighbours by correlation."""

    def __call__(self, features0: Features, features1: Features) -> list[Matches]:
        return [self.match(*pair) for pair in zip(features0.unstack(), features1.unstack(), strict=True)]

    def match(self, features0: Features, features1: Features) -> Matches:
        if 0 in (len(features0), len(features1)):
            return Matches.from_indices([], features0.keypoints, features1.keypoints, [])
        alike = (features0.descriptors @ features1.descriptors.T).numpy()
        best = alike.argmax(1)
        rows = np.flatnonzero((alike.argmax(0)[best] == np.arange(len(best))) & (alike.max(1) > 0.8))
        pairs = np.column_stack([rows, best[rows]])
        return Matches.from_indices(pairs, features0.keypoints, features1.keypoints, alike[rows, best[rows]])


@pytest.fixture
def shifted(views) -> tuple[np.ndarray, np.ndarray]:
    picture = cv2.cvtColor(cv2.imread(str(views[0])), cv2.COLOR_BGR2RGB)
    return picture[:-8, :-12], picture[8:, 12:]


@pytest.mark.parametrize(
    "parts", [{"extractor": Corners(), "matcher": MostAlike()}, {"matcher": MostAlike()}]
)
def test_parts_of_ones_own_work_alone_and_together(parts, shifted):
    pipeline = Pipeline(**parts)
    result = pipeline.match(*shifted)
    assert len(result.matches) > 100
    assert np.abs(np.median(result.points0 - result.points1, axis=0) - [12, 8]).max() < 0.5
    assert result.geometry.verified and result.preset == "custom" and result.layers == 0
    features = [pipeline.extract(picture) for picture in shifted]
    again = pipeline.match_features(*features)
    np.testing.assert_array_equal(again.indices, result.matches.indices)
    refined = pipeline.refine(*shifted, again)
    np.testing.assert_array_equal(pipeline.verify(*features, refined).inliers, result.inliers)
    assert len(pipeline.match(np.zeros((50, 60), np.uint8), shifted[0]).matches) == 0
    assert "custom" not in repr(pipeline) and "Pipeline(extractor=" in repr(pipeline)


def test_parts_that_cannot_be_used_are_refused_by_name(shifted):
    for part in ("extractor", "matcher", "estimator"):
        with pytest.raises(UsageError, match=f"{part} .*must return"):
            Pipeline(**{part: lambda *given, **options: None}).match(*shifted)
        with pytest.raises(UsageError, match=rf"{part} .*'hybrid'.*matcher\.load"):
            Pipeline(**{part: "hybrid"})
    with pytest.raises(UsageError, match="MostAlike is a class"):
        Pipeline(matcher=MostAlike)
    far = Matches(np.array([[99999, 1]]), *np.zeros((2, 1, 2), np.float32), np.ones(1, np.float32))
    with pytest.raises(UsageError, match="beyond"):
        Pipeline(matcher=lambda *sides: [far]).match(*shifted)


@dataclass(frozen=True)
class AlikeConfig:
    """The configuration of a matcher without a network, as the recipe in matcher/README.md adds one."""

    least: float = 0.8


def test_a_matcher_of_another_configuration_is_that_of_a_preset(shifted, monkeypatch, capfd):
    config = PipelineConfig(AlikeConfig())
    monkeypatch.setitem(PRESETS, "alike", config)
    assert Pipeline(matcher=MostAlike(), config=config).match(*shifted).layers == 0
    assert main(["presets"]) == 0 and "AlikeConfig(least=0.8)" in capfd.readouterr().out
    assert configure(config, {"max_keypoints": 9}).matcher == config.matcher
    for options in ({"weights": "hybrid"}, {"ratio": 0.9}, {"match_threshold": 0.9}, {"engine": "onnx"}):
        with pytest.raises(UsageError, match=f"{next(iter(options))}.*(leave it out|use engine 'torch')"):
            matcher.load("alike", **options)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Puts a distribution with presets on the path: `package(name, module's source, {preset: function})`."""

    def add(name: str, source: str, presets: dict[str, str]) -> None:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        info = tmp_path / f"{name}-2.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.1\n")
        lines = "".join(f"{preset} = {name}:{function}\n" for preset, function in presets.items())
        (info / "entry_points.txt").write_text(f"[matcher.presets]\n{lines}")

    monkeypatch.syspath_prepend(str(tmp_path))
    return add


GOOD = """
    from matcher import Pipeline
    def few(max_keypoints=50, geometry="homography"):
        from matcher import load
        return load("nearest", max_keypoints=max_keypoints, geometry=geometry)
    def plain(max_keypoints=300):
        return few(max_keypoints, "fundamental")
    def wrong():
        return 3
    constant = 5
    def failing():
        raise ValueError("no grid")
"""


def test_a_package_adds_a_preset(package, shifted, capfd):
    package("toy_presets", GOOD, {"few": "few", "wrong": "wrong", "constant": "constant", "nearest": "wrong"})
    package("more_presets", GOOD, {"grid": "failing"})
    package("broken_presets", "raise OSError('no licence')", {"broken": "anything"})
    assert plugin_names() == ["broken", "constant", "few", "grid", "nearest", "wrong"]
    assert main(["presets"]) == 0
    assert "few                      added by toy_presets 2.1" in capfd.readouterr().out
    assert "toy_presets" not in sys.modules and "broken_presets" not in sys.modules  # names cost no import
    pipeline = matcher.load("few")
    assert (pipeline.preset, pipeline.package) == ("few", "toy_presets 2.1")
    assert pipeline.config.estimation.kind == "homography"
    assert len(matcher.load("few", max_keypoints=20).extract(shifted[0])) == 20
    assert matcher.load("nearest").package is None  # a preset of ours keeps its name
    assert main(["presets", "--show", "grid"]) == 2 and "a function of more_" in capfd.readouterr().err
    for preset, options, said in (
        ("few", {"precision": "float32"}, r"'few' of toy_presets 2\.1 does not take .*'precision'"),
        ("few", {"colour": 3}, "unknown option 'colour'"),
        ("wrong", {}, r"must return a matcher\.Pipeline, not int"),
        ("grid", {}, r"'grid' of more_presets 2\.1 fails \(ValueError: no grid\)"),
        ("constant", {}, "is not a function"),
        ("broken", {}, r"of broken_presets 2\.1 cannot be loaded \(OSError: no licence\)"),
        ("fwe", {}, "unknown preset 'fwe', did you mean 'few'"),
    ):
        with pytest.raises(UsageError, match=said):
            matcher.load(preset, **options)


def test_options_that_nobody_gave_are_not_those_of_a_packages_preset(package, shifted, monkeypatch, tmp_path):
    package("toy_presets", GOOD, {"plain": "plain"})
    assert matcher.stitch(shifted, "plain").model == "translation"
    for number, picture in enumerate(shifted):
        cv2.imwrite(str(tmp_path / f"{number}.png"), picture)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the worker
    run = Collection.open(tmp_path / "run", preset="plain", workers=1)
    run.add_images(tmp_path)
    run.add_pairs(exhaustive=True)
    run.run()
    assert len(list(run)) == 1


# --- Every system as a user has it: front end and network from files, images in, matches out.


LEARNED = [name for name in PRESETS if name.startswith(("superglue-", "lightglue-")) and "dedode" not in name]


def front_end_file(kind: str, folder: Path, variant: str | None = None) -> Path | None:
    """A front end's random parameters as a converted file; SIFT has none."""
    if kind == "sift":
        return None
    front_end, path = FRONT_ENDS[kind], folder / f"{kind}.safetensors"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = front_end.build(resolve(ExtractorConfig(kind=kind, variant=variant), front_end.published))
    random_parameters(network)
    save_front_end(network, kind, path)
    return path


def network_file(preset: str, folder: Path) -> Path:
    """An untrained network of the preset, two layers deep, which matches like nearest neighbours."""
    config, path = PRESETS[preset].matcher, folder / f"{preset}.safetensors"
    shallow = replace(config, context=replace(config.context, depth=2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_model(MatchingNetwork(shallow), path, dtype="float32")
    return path


@pytest.fixture
def pictures(rng) -> tuple[np.ndarray, np.ndarray]:
    """Two cuts of one texture, 16 pixels apart."""
    whole = texture(rng, 208, 160, sigma=1.5)
    return np.ascontiguousarray(whole[:, :192]), np.ascontiguousarray(whole[:, 16:])


@pytest.mark.parametrize("preset", LEARNED)
def test_a_preset_builds_and_runs(preset, tmp_path, pictures):
    kind = PRESETS[preset].extractor.kind
    options = {"weights": network_file(preset, tmp_path), "frontend_weights": front_end_file(kind, tmp_path)}
    with pytest.raises(UsageError, match=f"{kind} features"):
        matcher.load(preset, weights=options["weights"], frontend="sift" if kind != "sift" else "keynet")
    options |= {"precision": "float32", "max_keypoints": 150, "match_threshold": 0.0}
    pipeline = matcher.load(preset, **options, device="cpu")
    assert pipeline.layers == 2
    result = pipeline.match(*pictures)
    assert result.features0.kind == result.features1.kind == kind
    assert len(result.features0.keypoints) > 20 and len(result.matches) > 8
    assert np.isfinite(result.scores).all()
    assert result.geometry.status in ("ok", "low_inliers", "degenerate", "no_model", "too_few")
    again = pipeline.match_features(result.features0, result.features1)
    assert np.array_equal(again.indices, result.matches.indices)


@pytest.mark.parametrize("kind", ["disk", "superpoint-open", "keynet"])
def test_any_front_end_goes_with_nearest(kind, tmp_path, pictures, monkeypatch):
    path = front_end_file(kind, tmp_path)
    pipeline = matcher.load("nearest", frontend=kind, frontend_weights=path, max_keypoints=150, device="cpu")
    result = pipeline.match(*pictures)
    assert result.features0.kind == kind
    assert len(result.matches) > 8
    with pytest.raises(IntegrityError, match=f"absent.safetensors is absent.*weights fetch {kind}"):
        matcher.load("nearest", frontend=kind, frontend_weights=tmp_path / "absent.safetensors")
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path))
    with pytest.raises(IntegrityError, match=f"`matcher weights fetch {kind}"):
        matcher.load("nearest", frontend=kind)
    preset = next(name for name in LEARNED if PRESETS[name].extractor.kind in kind)
    with pytest.warns(UserWarning, match="`matcher weights fetch "):  # it matches features of other programs
        matcher.load(preset, weights=network_file(preset, tmp_path), device="cpu")
    with pytest.raises(IntegrityError, match=f"{kind}.safetensors holds parameters of .* {kind}, not"):
        matcher.load("nearest-learned", frontend_weights=path)
