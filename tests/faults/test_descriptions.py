"""Promise 4 for what people write by hand or with other programs: recipes, cameras, poses, trajectories."""

import json
import time

import numpy as np
import pytest
from fuzzing import examples, seeded
from hypothesis import given
from hypothesis import strategies as st

from matcher.cameras import Camera, read_cameras
from matcher.errors import UsageError
from matcher.poses import read_named_poses
from matcher.sequence.trajectory import read_poses
from matcher.train.recipe import read_recipe, shipped_recipe

pytestmark = pytest.mark.promise(4)
SECONDS = 5.0  # for a megabyte

NUMBERS = ("0", "1", "-1", "0.5", "1e308", "nan", "inf", "-inf", "x", "0x1", "1_0", "9" * 400, "9" * 5000)
WORDS = st.sampled_from([*NUMBERS, "PINHOLE", "OPENCV", "FOV", "a.jpg", "#", "\0", "é", "640", "480"])
LINES = st.lists(st.lists(WORDS, max_size=12).map(" ".join) | st.text(max_size=20), max_size=4)


@examples(150, 10_000)
def test_camera_lists_of_any_text(tmp_path, tried, examples):
    path = tmp_path / "cameras.txt"
    right = st.sampled_from(["PINHOLE 640 480", "SIMPLE_RADIAL 640 480", "a.jpg PINHOLE 640 480"])
    mostly = st.tuples(right, st.lists(WORDS, max_size=6)).map(lambda both: f"{both[0]} {' '.join(both[1])}")

    @seeded(examples)
    @given(LINES | st.lists(mostly, max_size=3))
    def check(lines):
        tried()
        path.write_text("\n".join(lines), encoding="utf-8", errors="replace")
        try:
            found = read_cameras(path)
            found = {"": found} if isinstance(found, Camera) else found
        except UsageError as error:
            assert "cameras.txt" in str(error)
        else:
            assert all(np.isfinite(camera.params).all() and min(camera.size) > 0 for camera in found.values())

    check()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 10**400) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
ROW = st.fixed_dictionaries(
    {"cam_from_world": VALUES | st.just(np.eye(4)[:3].tolist())},
    optional={"camera": VALUES | st.just({"model": "PINHOLE", "params": [5, 5, 3, 3], "size": [6, 6]})},
)
# A camera of another model, or with a value that is none, beside a right pose.
CAMERAS = st.fixed_dictionaries({"model": WORDS, "params": VALUES, "size": VALUES | st.just([6, 6])})
POSED = CAMERAS.map(lambda camera: {"cam_from_world": np.eye(4).tolist(), "camera": camera})


@pytest.mark.parametrize("name", ["poses.json", "poses.txt", "images.txt"])
@examples(100, 10_000)
def test_named_poses_of_any_text(tmp_path, tried, name, examples):
    tables = st.dictionaries(st.text(max_size=5), ROW | POSED | VALUES, max_size=3)
    rows = st.lists(st.lists(st.sampled_from(NUMBERS), min_size=7, max_size=10).map("a ".join), max_size=4)
    texts = (tables | VALUES).map(json.dumps) if name.endswith(".json") else (LINES | rows).map("\n".join)

    @seeded(examples)
    @given(texts)
    def check(text):
        tried()
        (tmp_path / name).write_text(text, encoding="utf-8", errors="replace")
        try:
            poses, _ = read_named_poses(tmp_path / name)
        except UsageError as error:
            assert name in str(error)
        else:
            assert all(np.allclose(p[:3, :3] @ p[:3, :3].T, np.eye(3), atol=0.1) for p in poses.values())

    check()


@examples(150, 10_000)
def test_recipes_with_lines_changed(tmp_path, tried, examples):
    right = shipped_recipe("hybrid").read_text("utf-8").splitlines()
    value = st.sampled_from(
        [
            *NUMBERS,
            "true",
            '"x"',
            "[]",
            "{}",
            "[[1]]",
            "1979-05-27",
            "[" * 9000,
            "{a=" * 9000,
            '"../../x"',
            "",
        ]
    )
    change = st.tuples(st.integers(0, len(right) - 1), value)

    @seeded(examples)
    @given(st.lists(change, min_size=1, max_size=3), st.text(max_size=6))
    def check(changes, more):
        tried()
        lines = [*right, more]
        for place, text in changes:
            lines[place] = f"{lines[place].partition('=')[0]}= {text}"
        (tmp_path / "recipe.toml").write_text("\n".join(lines), encoding="utf-8", errors="replace")
        try:
            read_recipe(tmp_path / "recipe.toml")
        except UsageError as error:
            assert "recipe.toml" in str(error)

    check()


MEGABYTE = 10**6
LONG = {
    "brackets": b"[" * MEGABYTE,
    "objects": b'{"a":' * (MEGABYTE // 5),
    "one number": b"9" * MEGABYTE,
    "digits": b"1 " * (MEGABYTE // 2),
    "short lines": b"1\n" * (MEGABYTE // 2),
    "empty lines": b"\n" * MEGABYTE,
    "comments": b"#\n" * (MEGABYTE // 2),
    "one comment": b"#" * MEGABYTE,
    "dots": b"a." * (MEGABYTE // 2) + b"a = 1",
    "tables": b"".join(b"[a%d]\n" % number for number in range(MEGABYTE // 10)),
    "quotes": b'"' * MEGABYTE,
    "backslashes": b'"' + b"\\" * MEGABYTE,
    "poses": b"a 1 0 0 0 0 0 0\n" * (MEGABYTE // 16),
    "trajectory": b"0 0 0 0 0 0 0 1\n" * (MEGABYTE // 16),
    "zeros": bytes(MEGABYTE),
}


@pytest.mark.parametrize("name", LONG)
def test_a_megabyte_of_text_is_read_or_refused_soon(tmp_path, tried, name):
    readers = (
        *((read_recipe, "a.toml"), (read_cameras, "a.txt"), (read_poses, "a.tum")),
        *((read_named_poses, "a.json"), (read_named_poses, "a.txt"), (read_named_poses, "images.txt")),
    )
    for reader, file in readers:
        (tmp_path / file).write_bytes(LONG[name])
        begun = time.process_time()
        try:
            reader(tmp_path / file)
        except UsageError as error:
            assert file in str(error)
        assert time.process_time() - begun < SECONDS, (name, file)
        tried()
