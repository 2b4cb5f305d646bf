"""The engine on ONNX Runtime: SIFT, our front end and networks of keypoints, on the CPU, without torch.

The graphs in `matcher/graphs` are the networks' modules as `scripts/build_graphs.py` exports them,
without their weights, which come from the weights files. A matcher is a graph for its beginning, one for a
layer and one for the heads of a layer; the loop over the layers, in which pairs stop and points are
dropped, is here.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from matcher.config import (
    GRID_KIND,
    CalibrationConfig,
    ExtractorConfig,
    MatchingPolicy,
    NearestConfig,
    NetworkConfig,
    PipelineConfig,
    architecture,
    resolve,
)
from matcher.errors import IntegrityError, UsageError, install_command, is_installed
from matcher.extract.extractor import SiftExtractor
from matcher.match.adaptivity import confidence_threshold, decide
from matcher.match.calibration import calibrated, credible_matches
from matcher.match.nearest import NearestMatcher, check_features, needed_fields
from matcher.match.steering import STEERABLE_KIND, TURNED_EXIF, best_turn, try_other_turns, turned
from matcher.pipeline import Learned, policy_of, refuse_for_grid
from matcher.processes import compute_threads
from matcher.result import WeightsSource
from matcher.types import Features, Image, Matches
from matcher.weights import files

Arrays = Mapping[str, np.ndarray]
GRAPHS = Path(__file__).with_name("graphs")


@dataclass(frozen=True)
class ExportedNetwork:
    """An exported network: its parameters' shapes by name, the bytes of its graphs, and what they are for."""

    shapes: Mapping[str, Sequence[int]]
    parts: Mapping[str, bytes]
    settings: Mapping[str, Any]

    @staticmethod
    def read(folder: Path) -> ExportedNetwork:
        """From a folder of `matcher/graphs`."""
        described = json.loads((folder / "graph.json").read_text(encoding="utf-8"))
        parts = {file.stem: file.read_bytes() for file in folder.glob("*.onnx")}
        return ExportedNetwork(described["shapes"], parts, described["settings"])


def build(config: PipelineConfig, given: Mapping[str, Any]) -> Learned:
    """Extractor and matcher of a configuration; `UsageError`: a device, precision, front end or network that
    this engine does not have; `IntegrityError`: weights that are absent or damaged."""
    version = onnxruntime.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < (1, 17):  # the first with the operators
        raise UsageError(f"onnxruntime {version} is too old: {install_command('onnxruntime')}")
    devices(given.get("device", "auto"))
    precision = given.get("precision", "auto")
    if precision not in ("auto", "float32"):
        raise UsageError(f"engine 'onnx' computes in float32, not in {precision}; leave precision out")
    if config.extractor.kind == GRID_KIND:
        refuse_for_grid(given)
        raise UsageError("engine 'onnx' has no network that matches the cells of a grid (LoFTR)")
    kind, weights = config.extractor.kind, given.get("frontend_weights")
    if kind not in ("sift", STEERABLE_KIND):
        raise UsageError(f"engine 'onnx' has the front ends sift and learned, not {kind}; {_otherwise()}")
    if kind == "sift" and weights is not None:
        raise UsageError("the front end sift has no weights; leave frontend_weights out")
    own = config.extractor
    extractor = SiftExtractor(own) if kind == "sift" else OnnxExtractor(own, weights)
    if isinstance(config.matcher, NearestConfig):
        return extractor, NearestMatcher(config.matcher), config, None
    if not isinstance(config.matcher, NetworkConfig):
        name = type(config.matcher).__name__
        raise UsageError(f"engine 'onnx' has no matcher of a {name}; {_otherwise()}")
    file = files.find_weights(given.get("weights") or config.weights)
    matcher = OnnxMatcher(*read_network(file), policy_of(config, given))
    return extractor, matcher, replace(config, matcher=matcher.config), WeightsSource(file.name, file.sha256)


def _otherwise() -> str:
    how = "" if is_installed("torch") else f", once torch is installed: {install_command('torch')}"
    return f"use engine 'torch'{how}"


def devices(name: str) -> list[str]:
    """The CPU, which "auto" and "cpu" stand for; `UsageError`: another device."""
    if name not in ("auto", "cpu"):
        raise UsageError(f"engine 'onnx' runs on the CPU, not on {name}; leave it out or {_otherwise()}")
    return ["cpu"]


def read_network(file: Any) -> tuple[NetworkConfig, Arrays]:
    """Configuration and parameters of a weights file; `IntegrityError`: damaged, or no network's."""
    try:
        return files.network_config(file.data), files.read_arrays(file.data)
    except IntegrityError as error:
        raise IntegrityError(f"{file.path} {error}: {file.remedy}") from error


@cache
def _thread(process: int) -> ThreadPoolExecutor:
    """The thread of a process in which all sessions are made and run; it does not outlive a fork.

    Sharp softmaxes give numbers below 10⁻³⁸, with which a processor takes many times as long unless its
    thread treats them as zero. ONNX Runtime sets that for the thread that creates the first session of a
    process, so that other threads of a program stay as they are.
    """
    return ThreadPoolExecutor(1, thread_name_prefix=f"onnxruntime-{process}")


class Graph:
    """A part of a network with its weights, ready to run in the thread of sessions."""

    def __init__(self, data: bytes, weights: Arrays) -> None:
        """Make a session of a graph and the arrays outside it, beside what the caller does next."""
        self._parts = data, weights
        self._made: Future = _thread(os.getpid()).submit(_session, data, dict(weights))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._parts  # a copy or pickle makes a session of its own

    def __call__(self, **arrays: np.ndarray) -> dict[str, np.ndarray]:
        """Outputs by name, of inputs by name; those that the graph does not have are passed over."""
        session = self._made.result()[0]
        given = {port.name: np.ascontiguousarray(arrays[port.name]) for port in session.get_inputs()}
        found = _thread(os.getpid()).submit(session.run, None, given).result()
        return dict(zip((port.name for port in session.get_outputs()), found, strict=True))


def _session(data: bytes, weights: dict[str, np.ndarray]) -> tuple[onnxruntime.InferenceSession, list]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    options.intra_op_num_threads = compute_threads()
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(a)) for a in weights.values()]
    options.add_external_initializers(list(weights), values)
    # Version 1.17 fuses transposed products of float64, but cannot compute them.
    kept = {"providers": ["CPUExecutionProvider"], "disabled_optimizers": ["MatmulTransposeFusion"]}
    return onnxruntime.InferenceSession(data, options, **kept), values


class OnnxExtractor:
    """The front end `learned`, whose graph is loaded at the first call."""

    def __init__(self, config: ExtractorConfig, weights: str | Path | None = None) -> None:
        """Settings that are None become the published ones, weights the shipped ones; `UsageError`: a setting
        that this front end does not have, or a value out of range."""
        settings = ExportedNetwork.read(GRAPHS / "learned").settings
        published = {name: settings[name] for name in ("score_threshold", "nms_radius")}
        self.config, self.weights = resolve(config, published), weights
        for name, value in published.items():
            if getattr(self.config, name) != value:
                raise UsageError(f"the graph of this front end has {name} {value}; leave it out")

    @cached_property
    def graph(self) -> Graph:
        """With its parameters; `IntegrityError`: they are absent or damaged; `UsageError`: of other sizes."""
        path = Path(self.weights) if self.weights is not None else files.locate_front_end(self.config)
        data = files.front_end_bytes(path, self.config.kind)
        try:
            arrays = files.read_arrays(data)
        except IntegrityError as error:
            raise IntegrityError(f"{path} {error}") from error
        exported = ExportedNetwork.read(GRAPHS / "learned")
        if {name: list(array.shape) for name, array in arrays.items()} != exported.shapes:
            raise UsageError(f"{path} is of a front end of other sizes, which only engine 'torch' has")
        self.stride, self.border = exported.settings["stride"], exported.settings["border"]
        weights = {f"network.{name}": array for name, array in arrays.items()}
        return Graph(exported.parts["front_end"], weights)

    def limited(self, max_keypoints: int) -> OnnxExtractor:
        """The same with another number of keypoints; the graph is shared."""
        _ = self.graph
        changed = copy.copy(self)
        changed.config = replace(self.config, max_keypoints=max_keypoints)
        return changed

    def __call__(self, images: Sequence[Image]) -> list[Features]:
        """Features of each image in stored pixels, strongest first; errors as of `graph`."""
        graph, config, features = self.graph, self.config, []
        for image in images:
            grey = image.grey()
            inside = np.zeros(grey.shape, bool)
            inner = tuple(slice(self.border, max(side - self.border, 0)) for side in grey.shape)
            inside[inner] = True if image.mask is None else image.mask[inner]
            margin = [(0, -side % self.stride) for side in grey.shape]
            values = np.pad(grey, margin, mode="edge")[None, None].astype(np.float32) / np.float32(255)
            most = np.array([config.max_keypoints])
            found = graph(image=values, mask=np.pad(inside, margin), max_keypoints=most)
            points = image.to_stored(found.pop("keypoints").astype(np.float64)).astype(np.float32)
            features.append(Features(points, **found, kind=config.kind, **image.features_fields()))
        return features


class OnnxMatcher:
    """A network in inference: features of B pairs → mutual matches above the threshold, best first."""

    device, precision = "cpu", "float32"

    def __init__(self, config: NetworkConfig, arrays: Arrays, policy: MatchingPolicy) -> None:
        """Load the graphs of a network with these parameters; `UsageError`: it has none; `IntegrityError`:
        arrays that they ask for are absent or misshaped."""
        self.config, self._arrays = replace(config, policy=policy), arrays
        every = map(ExportedNetwork.read, sorted(GRAPHS.iterdir()))
        key = graph_key(self.config)
        self._exported = next((each for each in every if each.settings.get("network") == key), None)
        if self._exported is None:
            raise UsageError(f"engine 'onnx' has the networks of our own presets alone; {_otherwise()}")
        wanted = {name: tuple(shape) for name, shape in self._exported.shapes.items()}
        if strange := [n for n, shape in wanted.items() if n not in arrays or arrays[n].shape != shape]:
            what = ", ".join(strange[:8])
            raise IntegrityError(f"the weights do not hold what their configuration asks for: {what}")
        self._begin = self._graph("begin", 0)
        self._steps = [self._graph("step", layer) for layer in range(config.context.depth)]
        self._heads: dict[int, Graph] = {}

    @property
    def calibration(self) -> CalibrationConfig | None:
        """Of the match probabilities."""
        return self.config.policy.calibration

    def _graph(self, part: str, layer: int) -> Graph:
        """That of a part with its arrays by their names in it, where every layer is the first.

        The last layer has no heads for exit and pruning, whose outputs are not looked at there.
        """
        found = {}
        for name in self._exported.settings["weights"][part]:
            own = re.sub(r"^(.*?)\.0(?=\.|$)", rf"\1.{layer}", name)
            if name.startswith("heads") and not self.config.assignment.every_layer:
                own = name
            if not re.match(r"layers|heads|confidence|match_probability|guidance\.\w+\.0", name):
                own = name
            found[f"network.{name}"] = self._arrays.get(own, self._arrays[name] * 0)
        return Graph(self._exported.parts[part], found)

    def __call__(self, features0: Features, features1: Features) -> list[Matches]:
        """Matches of every pair of the batch (features stacked along a leading axis B); `UsageError`:
        features of another front end or descriptor size."""
        check_features(self.config, features0, features1)
        sides = [self._points(features) for features in (features0, features1)]
        return [self._match(*pair) for pair in zip(*sides, strict=True)]

    def _points(self, features: Features) -> list[dict[str, np.ndarray]]:
        """The valid points of every image of a batch, by the names of the graph's inputs."""
        values, views = features.numpy(), np.asarray(features.matched_orientation)
        names = needed_fields(self.config)
        if missing := [name for name in names if name not in values]:
            raise UsageError(f"this matcher needs {missing[0]} of the keypoints: Features({missing[0]}=…)")
        return [
            {name: values[name][b][mask] for name in ("keypoints", "descriptors", *names)}
            | {"size": values["size"][b], "matched_orientation": views[b], "index": np.flatnonzero(mask)}
            for b, mask in enumerate(values["mask"])
        ]

    def _match(self, side0: dict[str, np.ndarray], side1: dict[str, np.ndarray]) -> Matches:
        """One pair, image 1 in the view in which it has the most matches."""
        counts = [len(side["index"]) for side in (side0, side1)]
        if self.config.kind != STEERABLE_KIND or not all(counts):
            return self._found(side0, side1)

        def turned_by(side: dict[str, np.ndarray], turns: int) -> dict[str, np.ndarray]:
            """An image after clockwise quarter turns."""
            view = int(side["matched_orientation"])
            for _ in range(turns):
                view = TURNED_EXIF[view]
            descriptors = turned(side["descriptors"], turns)
            return side | {"descriptors": descriptors, "matched_orientation": np.int64(view)}

        def again(pairs: Sequence[int], turn: int, strongest: int | None) -> list[Matches]:
            """Matches of the first points of both images, which are their strongest."""
            whole = ("size", "matched_orientation")
            first0, first1 = (
                {name: value if name in whole else value[:strongest] for name, value in side.items()}
                for side in (side0, side1)
            )
            return [self._found(first0, turned_by(first1, turn)) for _ in pairs]

        side1 = turned_by(side1, best_turn(side0["descriptors"], side1["descriptors"]))
        found = [self._found(side0, side1)]
        enough = self.config.policy.other_turns_below * min(counts)
        try_other_turns(found, [enough], [max(counts)], again)
        return found[0]

    def _found(self, *sides: dict[str, np.ndarray]) -> Matches:
        """One pair as it is: the loop over the layers, in which points are dropped and it may stop."""
        index, layers = [np.arange(len(side["index"])) for side in sides], 0
        local, scores, counts = np.zeros((0, 2), np.int64), np.zeros(0, np.float32), [*map(len, index)]
        depth, policy, last = self.config.context.depth, self.config.policy, not all(counts)
        if not last:
            given = {name: [side[name][None] for side in sides] for name in sides[0]}
            found = self._begin(**_ports(given))
            tokens = {name: [each[:, : counts[0]], each[:, counts[0] :]] for name, each in found.items()}
        while not last:
            found, layers, n = self._steps[layers](**_ports(tokens)), layers + 1, len(index[0])
            tokens |= {name: [each[:, :n], each[:, n:]] for name, each in found.items() if each.ndim == 3}
            last = layers == depth
            if not last and (policy.early_exit or policy.pruning) and "confidence" in found:
                confident = found["confidence"] > confidence_threshold(layers - 1, depth)
                known = np.ones_like(confident), confident, found["probability"], np.array([sum(counts)])
                decision = decide(*known, policy, predicted=self.config.match_probability)
                last = bool(decision.stops[0])
                keep = (decision.assigned if last else decision.kept)[0]
                index = [i[k] for i, k in zip(index, (keep[:n], keep[n:]), strict=True)]
                tokens = {name: [a[:, keep[:n]], b[:, keep[n:]]] for name, (a, b) in tokens.items()}
            last = last or not all(map(len, index))
        if layers and all(map(len, index)):
            if layers not in self._heads:
                self._heads[layers] = self._graph("assign", layers - 1)
            best = self._heads[layers](**_ports(tokens), exits=np.array([policy.early_exit]))
            rows = (best[name][0] for name in ("best", "partner", "mutual"))
            local, scores = credible_matches(*rows, policy.match_threshold, policy.threshold_doubles_at)
        ends = [i[k] for i, k in zip(index, local.T, strict=True)]
        indices = np.stack([side["index"][end] for side, end in zip(sides, ends, strict=True)], 1)
        points = (side["keypoints"][end] for side, end in zip(sides, ends, strict=True))
        scores = calibrated(scores, counts, policy.calibration)
        return Matches(indices, *points, scores, layers, *map(len, index))


def _ports(tokens: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    return {f"{name}{k}": value for name, both in tokens.items() for k, value in enumerate(both)}


def graph_key(config: NetworkConfig) -> dict[str, Any]:
    """What the graphs of a network depend on, as JSON has it."""
    key = {**architecture(config), "prune_confident_only": config.policy.prune_confident_only}
    return json.loads(json.dumps(key))
