"""Promise 4 for programs and the command line: what is given wrongly is a `UsageError` that names it."""

import json
import struct

import numpy as np
import pytest
import torch
from fuzzing import examples, seeded
from hypothesis import given
from hypothesis import strategies as st

import matcher
from matcher.cameras import as_camera
from matcher.cli import main
from matcher.collection.pairs import read_pairs
from matcher.errors import MatcherError, UsageError
from matcher.sequence.trajectory import read_poses
from matcher.types import Features
from matcher.weights.files import load_model, save_model

pytestmark = pytest.mark.promise(4)


@pytest.fixture(scope="module")
def nearest():
    return matcher.load("nearest", max_keypoints=50, device="cpu")


def features(count: int = 5, size: tuple[int, int] = (64, 48)) -> Features:
    rng = np.random.default_rng(count)
    descriptors = rng.random((count, 128)).astype(np.float32)
    descriptors /= np.linalg.norm(descriptors, axis=1, keepdims=True)
    return Features(rng.uniform(0, 40, (count, 2)), descriptors, size=size)


WRONG_PAIRS = {
    "nothing": lambda f: None,
    "a generator": lambda f: ((f, f) for _ in range(2)),
    "triples": lambda f: [(f, f, f)],
    "singles": lambda f: [(f,)],
    "bare features": lambda f: [f],
    "features": lambda f: f,
    "text": lambda f: "ab",
    "texts": lambda f: ["ab"],
    "pairs of text": lambda f: [("a", "b")],
    "pairs with nothing": lambda f: [(f, None)],
    "arrays": lambda f: [(f.keypoints, f.keypoints)],
    "a table": lambda f: {0: (f, f)},
    "numbers": lambda f: 7,
}


@pytest.mark.parametrize("name", WRONG_PAIRS)
def test_pairs_of_features_that_are_none(nearest, name):
    with pytest.raises(UsageError, match="Features"):
        nearest.match_features_batch(WRONG_PAIRS[name](features()))


def test_pairs_of_features_that_are_some(nearest):
    assert nearest.match_features_batch([]) == []
    assert len(nearest.match_features_batch([(features(), features()), [features(), features(7)]])) == 2
    with pytest.raises(UsageError, match="Features"):
        nearest.match_features(features(), None)


NUMBERS = ("x", None, True, np.nan, np.inf, -1, 0, 1e-300, 1e300, [1], b"1")


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_numbers_that_no_tracker_can_use(nearest, views, tried, value):
    for name in ("baseline", "budget_ms", "epipolar_window"):
        if value is not None:
            with pytest.raises(UsageError, match=name):
                matcher.Tracker(nearest, **{name: value})
    if value is not None:
        with pytest.raises(UsageError, match="budget_ms"):
            nearest.match(*views, budget_ms=value)
        with pytest.raises(UsageError, match="camera"):
            as_camera([500, "x" if value in (True, b"1") else value, 3, 4])
    tried(5)


ARRAYS = st.one_of(
    st.none(),
    st.text(max_size=3),
    st.builds(
        lambda shape, value, dtype: np.full(shape, value).astype(dtype),
        st.lists(st.integers(0, 4), max_size=4).map(tuple),
        st.sampled_from([0.0, 1.0, -1.0, 1e30, np.nan, np.inf, 255.0]),
        st.sampled_from(["f4", "f8", "f2", "u1", "i8", "?", "c8", "U3", "O", ">f4"]),
    ),
    st.builds(lambda n: torch.zeros(n, 2), st.integers(0, 4)),
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@examples(200, 20_000)
def test_features_of_any_arrays(nearest, tried, examples):
    @seeded(examples)
    @given(ARRAYS, ARRAYS, ARRAYS, ARRAYS, st.text(max_size=4))
    def check(points, descriptors, scores, size, kind):
        tried()
        try:
            made = Features(points, descriptors, scores, size, kind=kind)
        except UsageError:
            return
        assert made.keypoints.isfinite().all() and made.descriptors.isfinite().all()
        try:
            found = nearest.match_features(made, made)
        except UsageError:
            return
        assert np.isfinite(found.scores).all() and (found.indices < len(made)).all()

    check()


@examples(300, 20_000)
def test_pair_lists_of_any_bytes(tmp_path, tried, examples):
    names = ["a.jpg", "b.jpg", "sub/c d.jpg", "../e.jpg"]
    line = st.one_of(
        st.binary(max_size=30),
        st.lists(st.sampled_from([*names, "x", "/etc/passwd", "\0"]), max_size=4).map(
            lambda words: " ".join(words).encode()
        ),
        st.lists(st.sampled_from(names), min_size=2, max_size=2).map("\t".join).map(str.encode),
    )

    @seeded(examples)
    @given(st.lists(line, max_size=8), st.sampled_from([b"\n", b"\r\n", b"\r"]))
    def check(lines, end):
        tried()
        path, faults = tmp_path / "pairs.txt", []
        path.write_bytes(end.join(lines))
        try:
            found = list(read_pairs(path, names, faults.append))
        except UsageError:
            return
        assert all(a in names and b in names and a != b for a, b in found)
        assert len({frozenset(pair) for pair in found}) == len(found)

    check()


@examples(200, 10_000)
def test_poses_of_any_text(tmp_path, tried, examples):
    number = st.sampled_from(["0", "1", "-1", "1e308", "nan", "inf", "x", "0x1", "1_0", "9" * 400])
    rows = st.lists(st.lists(number, min_size=7, max_size=13).map(" ".join), max_size=4)

    @seeded(examples)
    @given(rows | st.lists(st.text(max_size=20), max_size=4))
    def check(lines):
        tried()
        (tmp_path / "poses.txt").write_text("\n".join(lines), encoding="utf-8", errors="replace")
        try:
            _, poses = read_poses(tmp_path / "poses.txt")
        except UsageError as error:
            assert "poses.txt" in str(error)
        else:
            assert poses.shape[1:] == (4, 4) and np.isfinite(poses).all()

    check()


@examples(120, 6_000)
def test_weights_files_of_any_bytes(small_model, tmp_path, tried, examples):
    save_model(small_model, tmp_path / "small.safetensors")
    whole = (tmp_path / "small.safetensors").read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    value = st.sampled_from([None, [], {}, -1, 2**62, "F64", [0, 2**60], [-1, 4], "x" * 99, [[]], 1e300])

    @st.composite
    def files(draw):
        kind = draw(st.sampled_from(["cut", "header", "metadata", "length", "bytes"]))
        if kind == "cut":
            return whole[: draw(st.integers(0, len(whole) - 1))]
        if kind == "length":
            return struct.pack("<Q", draw(st.integers(0, 2**64 - 1))) + whole[8:]
        if kind == "bytes":
            return draw(st.binary(max_size=200))
        changed = json.loads(json.dumps(header))
        if kind == "metadata":
            entry = draw(st.sampled_from(sorted(changed["__metadata__"])))
            changed["__metadata__"][entry] = draw(st.text(max_size=20))
        else:
            name = draw(st.sampled_from(names))
            changed[name][draw(st.sampled_from(["dtype", "shape", "data_offsets"]))] = draw(value)
        text = json.dumps(changed).encode()
        return struct.pack("<Q", len(text)) + text + whole[8 + length :]

    @seeded(examples)
    @given(files())
    def check(data):
        tried()
        (tmp_path / "x.safetensors").write_bytes(data)
        try:
            load_model(tmp_path / "x.safetensors")
        except MatcherError as error:
            assert "x.safetensors" in str(error)

    check()


@pytest.mark.parametrize("fault", ["nested", "nan", "inf", "-1", "0", "10**400"])
def test_configurations_of_weights_that_no_network_has(small_model, tmp_path, capfd, fault):
    save_model(small_model, tmp_path / "small.safetensors")
    whole = (tmp_path / "small.safetensors").read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    config = json.loads(header["__metadata__"]["config"])
    if fault != "nested":
        config["position"]["extent"] = 10**400 if fault == "10**400" else float(fault)
    header["__metadata__"]["config"] = "[" * 100_000 if fault == "nested" else json.dumps(config)
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])
    assert main(["match", "a.png", "b.png", "--weights", str(tmp_path / "x.safetensors")]) == 5
    errors = capfd.readouterr().err
    assert "configuration that" in errors and "internal error" not in errors, errors


WORDS = st.sampled_from(
    [
        *("match", "status", "export", "presets", "weights", "report", "merge", "find", "align", "track"),
        *("--preset", "nearest", "hybrid", "--max-keypoints", "-1", "0", "x", "1e999", "--resize", "--to"),
        *("colmap", "--output", "/nowhere/x.npz", "--run", "--threshold", "nan", "--help", "--", ""),
        *("absent.jpg", "../../etc/passwd", "--camera", "1,2,3", "--json", "--pairs", "--geometry", "-v"),
        "\x1b[2J",
    ]
)


@examples(60, 3_000)
def test_command_lines_of_any_words(tmp_path, monkeypatch, capfd, tried, examples):
    monkeypatch.chdir(tmp_path)

    @seeded(examples)
    @given(st.lists(WORDS, min_size=1, max_size=7))
    def check(words):
        tried()
        code = main(words)
        errors = capfd.readouterr().err
        assert code in (0, 2, 3, 5), (words, errors)
        assert "internal error" not in errors and "Traceback" not in errors, (words, errors)

    check()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        "0 0 0 0 0 0 0 1e308",  # a quaternion whose square overflows is still a rotation
        *("0 0 0 0 0 0 0 0", "0 1e300 0 0 0 0 0 1", "0 0 0 0 nan 0 0 1"),
        *("2 0 0 0 0 2 0 0 0 0 2 0", "1 0 0 0 0 1 0 0 0 0 -1 0", "1 1 0 0 0 1 0 0 0 0 1 0"),
    ],
)
def test_lines_that_are_no_poses(tmp_path, line):
    (tmp_path / "poses.txt").write_text(line)
    if line.endswith("1e308"):
        assert np.allclose(read_poses(tmp_path / "poses.txt")[1], np.eye(4))
    else:
        with pytest.raises(UsageError, match=r"poses\.txt"):
            read_poses(tmp_path / "poses.txt")
