"""Promise 4: what a program, a command line or a file gives wrongly is a `UsageError` that names it."""

import json
import struct
import time

import numpy as np
import pytest
import torch
from command import run
from fuzzing import examples, seeded
from hypothesis import given
from hypothesis import strategies as st
from random_collection import features

import matcher
from matcher.cameras import Camera, as_camera, read_cameras, read_named_poses
from matcher.cli import main
from matcher.collection.pairs import read_pairs
from matcher.errors import MatcherError, UsageError
from matcher.sequence.trajectory import read_poses
from matcher.train.recipe import find_recipe, read_recipe
from matcher.types import Features
from matcher.weights.files import load_model, save_model

pytestmark = pytest.mark.promise(4)


@pytest.fixture(scope="module")
def nearest():
    return matcher.load("nearest", max_keypoints=50, device="cpu")


def test_pairs_of_features(nearest, rng):
    one, other = features(rng, 5), features(rng, 7)
    for wrong in (None, 7, [(one, one, one)], [(one, None)], {0: (one, one)}):
        with pytest.raises(UsageError, match="Features"):
            nearest.match_features_batch(wrong)
    assert nearest.match_features_batch([]) == []
    assert len(nearest.match_features_batch([(one, one), [one, other]])) == 2


@pytest.mark.parametrize("value", ["x", True, np.nan, 0, 1e300, [1]], ids=repr)
def test_numbers_that_nobody_can_use(nearest, views, value):
    for name in ("baseline", "budget_ms", "epipolar_window"):
        with pytest.raises(UsageError, match=name):
            matcher.Tracker(nearest, **{name: value})
    with pytest.raises(UsageError, match="budget_ms"):
        nearest.match(*views, budget_ms=value)
    with pytest.raises(UsageError, match="camera"):
        as_camera([500, "x" if value is True else value, 3, 4])


SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
FILLED = st.sampled_from([0.0, 1.0, -1.0, 1e30, np.nan, np.inf, 255.0])
TYPES = st.sampled_from(["f4", "f8", "f2", "u1", "i8", "?", "c8", "U3", "O", ">f4"])
ARRAYS = st.one_of(
    st.none(),
    st.text(max_size=3),
    st.builds(lambda shape, value, dtype: np.full(shape, value).astype(dtype), SHAPES, FILLED, TYPES),
    st.builds(lambda n: torch.zeros(n, 2), st.integers(0, 4)),
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@examples(150, 20_000)
def test_features_of_any_arrays(nearest, examples):
    @seeded(examples)
    @given(ARRAYS, ARRAYS, ARRAYS, ARRAYS, st.text(max_size=4))
    def check(points, descriptors, scores, size, kind):
        try:
            made = Features(points, descriptors, scores, size, kind=kind)
            found = nearest.match_features(made, made)
        except UsageError:
            return
        assert made.keypoints.isfinite().all() and made.descriptors.isfinite().all()
        assert np.isfinite(found.scores).all() and (found.indices < len(made)).all()

    check()


# --- Files that people or other programs write

NUMBERS = ("0", "1", "-1", "0.5", "1e308", "nan", "inf", "x", "0x1", "1_0", "9" * 400, "9" * 5000)
WORDS = st.sampled_from([*NUMBERS, "PINHOLE", "OPENCV", "FOV", "a.jpg", "#", "\0", "é", "640", "480"])
LINES = st.lists(st.lists(WORDS, max_size=12).map(" ".join) | st.text(max_size=20), max_size=4)
CAMERA_LINES = st.tuples(
    st.sampled_from(["PINHOLE 640 480", "SIMPLE_RADIAL 640 480", "a.jpg PINHOLE 640 480"]),
    st.lists(WORDS, max_size=6),
).map(lambda both: f"{both[0]} {' '.join(both[1])}")
POSE_LINES = st.lists(st.lists(st.sampled_from(NUMBERS), min_size=7, max_size=13).map(" ".join), max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 10**400) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
CAMERAS = st.fixed_dictionaries({"model": WORDS, "params": VALUES, "size": VALUES | st.just([6, 6])})
POSED = st.fixed_dictionaries(
    {"cam_from_world": VALUES | st.just(np.eye(4)[:3].tolist())}, optional={"camera": VALUES | CAMERAS}
)
TABLES = st.dictionaries(st.text(max_size=5), POSED | VALUES, max_size=3)
RECIPE = find_recipe("hybrid").read_text("utf-8").splitlines()
CHANGED = st.sampled_from(
    [*NUMBERS, "true", '"x"', "[]", "{}", "[[1]]", "1979-05-27", "[" * 9000, "{a=" * 9000, '"../../x"', ""]
)


def recipe(changes) -> str:
    lines = list(RECIPE)
    for place, text in changes:
        lines[place] = f"{lines[place].partition('=')[0]}= {text}"
    return "\n".join(lines)


def are_poses(poses) -> bool:
    return all(np.allclose(p[:3, :3] @ p[:3, :3].T, np.eye(3), atol=0.1) for p in poses)


def are_cameras(found) -> bool:
    cameras = [found] if isinstance(found, Camera) else found.values()
    return all(np.isfinite(camera.params).all() and min(camera.size) > 0 for camera in cameras)


TEXTS = {  # of which file: its reader, texts, and whether what was read is right
    "cameras.txt": (read_cameras, (LINES | st.lists(CAMERA_LINES, max_size=3)).map("\n".join), are_cameras),
    "poses.tum": (read_poses, (LINES | POSE_LINES).map("\n".join), lambda found: are_poses(found[1])),
    "poses.json": (read_named_poses, (TABLES | VALUES).map(json.dumps), lambda f: are_poses(f[0].values())),
    "poses.txt": (
        read_named_poses,
        (LINES | POSE_LINES.map(lambda rows: [f"a {row}" for row in rows])).map("\n".join),
        lambda found: are_poses(found[0].values()),
    ),
    "recipe.toml": (
        read_recipe,
        st.lists(st.tuples(st.integers(0, len(RECIPE) - 1), CHANGED), min_size=1, max_size=3).map(recipe),
        lambda found: found.name,
    ),
}


@pytest.mark.parametrize("name", TEXTS)
@examples(120, 10_000)
def test_any_text_is_read_or_refused(tmp_path, name, examples):
    reader, texts, is_right = TEXTS[name]

    @seeded(examples)
    @given(texts)
    def check(text):
        (tmp_path / name).write_text(text, encoding="utf-8", errors="replace")
        try:
            found = reader(tmp_path / name)
        except UsageError as error:
            assert name in str(error)
        else:
            assert is_right(found)

    check()


MEGABYTE = 10**6
LONG = {
    "brackets": b"[" * MEGABYTE,
    "one number": b"9" * MEGABYTE,
    "tables": b"".join(b"[a%d]\n" % number for number in range(MEGABYTE // 10)),
    "poses": b"a 1 0 0 0 0 0 0\n" * (MEGABYTE // 16),
    "zeros": bytes(MEGABYTE),
}


@pytest.mark.parametrize("name", LONG)
def test_a_megabyte_of_text_is_read_or_refused_soon(tmp_path, name):
    for file, (reader, *_) in TEXTS.items():
        (tmp_path / file).write_bytes(LONG[name])
        begun = time.process_time()
        try:
            reader(tmp_path / file)
        except UsageError as error:
            assert file in str(error)
        assert time.process_time() - begun < 5.0, (name, file)


@examples(200, 20_000)
def test_pair_lists_of_any_bytes(tmp_path, examples):
    names = ["a.jpg", "b.jpg", "sub/c d.jpg", "../e.jpg"]
    words = st.lists(st.sampled_from([*names, "x", "/etc/passwd", "\0"]), max_size=4)
    line = st.binary(max_size=30) | words.map(" ".join).map(str.encode)

    @seeded(examples)
    @given(st.lists(line, max_size=8), st.sampled_from([b"\n", b"\r\n", b"\r"]))
    def check(lines, end):
        (tmp_path / "pairs.txt").write_bytes(end.join(lines))
        try:
            found = list(read_pairs(tmp_path / "pairs.txt", names))
        except UsageError:
            return
        assert all(a in names and b in names and a != b for a, b in found)
        assert len({frozenset(pair) for pair in found}) == len(found)

    check()


@examples(100, 6_000)
def test_weights_files_of_any_bytes(small_model, tmp_path, capfd, examples):
    save_model(small_model, tmp_path / "small.safetensors")
    whole = (tmp_path / "small.safetensors").read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    names = st.sampled_from([name for name in header if name != "__metadata__"])
    facts = st.sampled_from(sorted(header["__metadata__"]))
    value = st.sampled_from([None, [], {}, -1, 2**62, "F64", [0, 2**60], [-1, 4], "x" * 99, [[]], 1e300])

    def with_header(changed: dict) -> bytes:
        text = json.dumps(changed).encode()
        return struct.pack("<Q", len(text)) + text + whole[8 + length :]

    def changed(part: str, key: str, found: object) -> bytes:
        return with_header({**header, part: {**header[part], key: found}})

    altered = st.one_of(
        st.integers(0, len(whole) - 1).map(lambda end: whole[:end]),
        st.integers(0, 2**64 - 1).map(lambda said: struct.pack("<Q", said) + whole[8:]),
        st.binary(max_size=200),
        st.builds(changed, st.just("__metadata__"), facts, st.text()),
        st.builds(changed, names, st.sampled_from(["dtype", "shape", "data_offsets"]), value),
    )

    @seeded(examples)
    @given(altered)
    def check(data):
        (tmp_path / "x.safetensors").write_bytes(data)
        try:
            load_model(tmp_path / "x.safetensors")
        except MatcherError as error:
            assert "x.safetensors" in str(error)

    check()
    config = json.loads(header["__metadata__"]["config"])
    for fault in ("[" * 100_000, json.dumps({**config, "position": {**config["position"], "extent": -1.0}})):
        (tmp_path / "x.safetensors").write_bytes(changed("__metadata__", "config", fault))
        assert run("match", "a.png", "b.png", "--weights", tmp_path / "x.safetensors") == 5
        assert "internal error" not in capfd.readouterr().err


COMMAND = st.sampled_from(
    [
        *("match", "status", "export", "presets", "weights", "report", "merge", "find", "align", "track"),
        *("--preset", "nearest", "hybrid", "--max-keypoints", "-1", "0", "x", "1e999", "--resize", "--to"),
        *("colmap", "--output", "/nowhere/x.npz", "--run", "--threshold", "nan", "--help", "--", ""),
        *("absent.jpg", "../../etc/passwd", "--camera", "1,2,3", "--json", "--pairs", "--geometry", "-v"),
        "\x1b[2J",
    ]
)


@examples(40, 3_000)
def test_command_lines_of_any_words(tmp_path, monkeypatch, capfd, examples):
    monkeypatch.chdir(tmp_path)

    @seeded(examples)
    @given(st.lists(COMMAND, min_size=1, max_size=7))
    def check(words):
        code = main(words)
        errors = capfd.readouterr().err
        assert code in (0, 2, 3, 5), (words, errors)
        assert "internal error" not in errors and "Traceback" not in errors, (words, errors)

    check()
    assert list(tmp_path.iterdir()) == []
