"""Promise 5 for ONNX: only graphs that are written here from weights are run; files of others are refused."""

import shutil

import numpy as np
import pytest
from collection_runs import photos

import matcher
from matcher.errors import IntegrityError, MatcherError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.promise(5)


@pytest.fixture
def hostile(tmp_path):
    """A valid graph whose only array lies outside its folder."""
    outside, folder = tmp_path / "outside.bin", tmp_path / "models"
    folder.mkdir()
    outside.write_bytes(bytes(16))
    array = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[4])
    array.data_location = onnx.TensorProto.EXTERNAL
    array.external_data.add(key="location", value="../outside.bin")
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [4])
    node = onnx.helper.make_node("Identity", ["w"], ["y"])
    graph = onnx.helper.make_graph([node], "hostile", [], [output], [array])
    path = folder / "graph.onnx"
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())
    return path


@pytest.mark.parametrize("suffix", [".onnx", ".safetensors", ".pt"])
@pytest.mark.parametrize("argument", ["weights", "frontend_weights"])
@pytest.mark.parametrize("engine", ["onnx", "torch"])
def test_a_graph_is_no_weights_file(hostile, monkeypatch, suffix, argument, engine):
    from matcher.onnx import runtime

    def never(data, *arguments, **options):
        assert data != hostile.read_bytes(), "the graph of somebody else was loaded"
        return session(data, *arguments, **options)

    session = runtime.onnxruntime.InferenceSession
    monkeypatch.setattr(runtime.onnxruntime, "InferenceSession", never)
    path = shutil.copy(hostile, hostile.with_name(f"mine{suffix}"))
    with pytest.raises(MatcherError, match="mine") as caught:
        pipe = matcher.load("hybrid-learned", engine=engine, device="cpu", **{argument: path})
        pipe.extract(np.zeros((64, 64), np.uint8))  # a front end is read when it is needed
    assert isinstance(caught.value, IntegrityError | matcher.UsageError)


def test_our_graphs_hold_all_their_arrays(tmp_path, monkeypatch, tried):
    """ONNX Runtime gets bytes, never a path, and they name no other file."""
    from matcher.onnx import runtime

    session, given = runtime.onnxruntime.InferenceSession, []

    def noted(data, *arguments, **options):
        given.append(data)
        return session(data, *arguments, **options)

    monkeypatch.setattr(runtime.onnxruntime, "InferenceSession", noted)
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path / "cache"))  # nothing is kept from before
    names = photos(tmp_path, 2)
    pipe = matcher.load("hybrid-learned", engine="onnx", max_keypoints=64)
    pipe.match(*(tmp_path / name for name in names))
    assert len(given) >= 2
    for data in given:
        assert isinstance(data, bytes)
        arrays = onnx.load_model_from_string(data).graph.initializer
        assert len(arrays) > 10
        assert all(each.data_location == onnx.TensorProto.DEFAULT for each in arrays)
        tried()
