"""Promise 5 for maps of others: COLMAP's models, the index beside a run, maps of a sequence's keyframes."""

import json
import os
import shutil
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from fuzzing import examples, seeded
from hypothesis import given
from hypothesis import strategies as st
from random_collection import features as random_features
from safetensors.numpy import load, save
from sequence_walls import BASELINE, WALLS, map_of_pairs, pair

import matcher
from matcher.collection.schema import INDEX, sealed
from matcher.collection.store import Store, Writer
from matcher.errors import IntegrityError, UsageError
from matcher.localization.sparse_map import RetrievalIndex, open_index
from matcher.sfm.models import check_numbers, read_given_poses, read_model
from matcher.types import Features

pycolmap = pytest.importorskip("pycolmap")
pytestmark = pytest.mark.promise(5)
FILES = ("cameras", "frames", "images", "points3D", "rigs")
SECONDS = 5.0


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A model of five images and twenty points, binary and as text."""
    options = pycolmap.SyntheticDatasetOptions()
    options.num_rigs, options.num_cameras_per_rig, options.num_frames_per_rig = 1, 1, 5
    options.num_points3D, options.num_points2D_without_point3D = 20, 2
    pycolmap.set_random_seed(1)
    made, folder = pycolmap.synthesize_dataset(options), tmp_path_factory.mktemp("models")
    for kind in ("bin", "txt"):
        (folder / kind).mkdir()
    made.write_binary(str(folder / "bin"))
    made.write_text(str(folder / "txt"))
    return folder


@pytest.fixture
def model(sound, tmp_path) -> Path:
    return Path(shutil.copytree(sound / "bin", tmp_path / "model"))


def test_the_sound_models_are_read(sound):
    for kind in ("bin", "txt"):
        assert len(read_given_poses(sound / kind).cam_from_world) == 5


@pytest.mark.parametrize("name", FILES)
def test_a_model_whose_files_do_not_hold_what_they_promise(model, name):
    """COLMAP itself never ends on most of those that are cut short."""
    path, begun = model / f"{name}.bin", time.process_time()
    data = path.read_bytes()
    counts = [2**64 - 1, 2**40, 10**6, *([6] if name != "points3D" else [])]
    damaged = [data[: len(data) * part // 24] for part in range(0, 24, 3)] + [data + b"\0"]
    for changed in (*damaged, *(struct.pack("<Q", count) + data[8:] for count in counts)):
        path.write_bytes(changed)
        with pytest.raises(IntegrityError, match=rf"{name}\.bin"):
            read_model(model)
    assert time.process_time() - begun < SECONDS
    path.unlink()
    os.mkfifo(path)  # which is not waited for
    with pytest.raises(IntegrityError, match=rf"{name}\.bin"):
        read_model(model)


def put(path: Path, at: int, value: float) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into("<d", data, at, value)
    path.write_bytes(data)


@pytest.mark.parametrize("value", [float("nan"), 1e308, -1e13])
def test_poses_and_points_with_which_nothing_can_be_computed(model, value):
    put(model / "frames.bin", 8 + 8 + 32, value)  # after count, id, rig and quaternion
    with pytest.raises(IntegrityError, match="damaged"):
        read_given_poses(model)
    check_numbers(model, "a point", np.array([[1e12, 0.0, -1e12]]))
    with pytest.raises(IntegrityError, match="a point"):
        check_numbers(model, "a point", np.array([[0.0, value, 1.0]]))


@pytest.mark.parametrize("value", [float("nan"), -1.0, 0.0, 1e308])
def test_a_camera_that_is_none_is_named_with_its_model(model, value):
    put(model / "cameras.bin", 8 + 24, value)  # after count, id, model and size
    fault = UsageError if np.isfinite(value) else IntegrityError
    with pytest.raises(fault, match=rf"{model}.*camera 1"):
        read_given_poses(model)


def test_two_images_of_one_name(model):
    data = (model / "images.bin").read_bytes()
    first, second = b"frame000000", b"frame000001"
    assert first in data and second in data
    (model / "images.bin").write_bytes(data.replace(second, first))
    with pytest.raises(IntegrityError, match="frame000000"):
        read_model(model)


@pytest.mark.parametrize("kind", ["bin", "txt"])
@examples(15, 2_500)
def test_models_with_pieces_changed(sound, tmp_path, kind, examples):
    """Another model, or a clear error; never the end of this process."""
    wholes = {name: (sound / kind / f"{name}.{kind}").read_bytes() for name in FILES}
    shutil.copytree(sound / kind, tmp_path / "model")
    piece = st.tuples(st.integers(0, 10**4), st.binary(max_size=9), st.integers(0, 9))

    @seeded(examples)
    @given(st.sampled_from(FILES), st.lists(piece, min_size=1, max_size=3))
    def check(name, changes):
        changed = bytearray(wholes[name])
        for place, new, gone in changes:
            start = place % (len(changed) + 1)
            changed[start : start + gone] = new
        path, begun = tmp_path / "model" / f"{name}.{kind}", time.process_time()
        path.write_bytes(changed)
        try:
            found = read_given_poses(tmp_path / "model")
        except (IntegrityError, UsageError):
            pass
        else:
            assert all(np.isfinite(pose).all() for pose in found.cam_from_world.values())
        assert time.process_time() - begun < SECONDS
        path.write_bytes(wholes[name])

    check()


def features(name: str) -> Features:
    return random_features(np.random.default_rng(len(name)), 40)


NAMES, DIGESTS = ["a.jpg", "bb.jpg", "ccc.jpg"], ["0", "1", "2"]
WRONG_ARRAYS = {
    "a table of fewer images": lambda a: {"table": a["table"][:1]},
    "a table that is not finite": lambda a: {"table": np.full_like(a["table"], np.nan)},
    "words of one row": lambda a: {"words": a["words"][0]},
    "targets out of the table": lambda a: {"target": a["target"] + 10**9},
    "targets that are fractions": lambda a: {"target": a["target"] + 0.5},
    "other signs": lambda a: {"sign": a["sign"] * 7},
}


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> tuple[bytes, RetrievalIndex]:
    folder = tmp_path_factory.mktemp("index")
    found = open_index(folder, NAMES, DIGESTS, features)
    return (folder / INDEX).read_bytes(), found


@pytest.mark.parametrize("name", WRONG_ARRAYS)
def test_an_index_that_is_none_is_made_again(index, tmp_path, name):
    data, right = index
    arrays, about = load(data), json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    changed = {**arrays, **WRONG_ARRAYS[name](arrays)}
    (tmp_path / INDEX).write_bytes(save({key: np.ascontiguousarray(a) for key, a in changed.items()}, about))
    found = open_index(tmp_path, NAMES, DIGESTS, features)
    assert np.array_equal(found.table, right.table) and found.kind == right.kind
    kept = load((tmp_path / INDEX).read_bytes())
    assert all(np.array_equal(kept[key], array) for key, array in arrays.items())


def test_an_index_of_any_bytes_is_made_again(index, tmp_path):
    data, right = index
    rng = np.random.default_rng(5)
    for _ in range(20):
        changed = bytearray(data)
        for place in rng.integers(0, min(len(data), 4000), 3):
            changed[place] ^= 1 << rng.integers(8)
        (tmp_path / INDEX).write_bytes(changed[: rng.integers(len(data)) if rng.random() < 0.3 else None])
        found = open_index(tmp_path, NAMES, DIGESTS, features)
        assert found.table.shape == right.table.shape and np.isfinite(found.table).all()


# --- Maps of a sequence's keyframes: every file may be absent, damaged, no file, or say what is not so.


FAST = {"max_keypoints": 200}
RUN, SPARSE, SUMMARY = "model-run", "model/sparse/0", "model/summary.json"
DESCRIPTORS = f"{RUN}/descriptors.db"


@pytest.fixture(scope="module")
def saved_map(tmp_path_factory) -> Path:
    """The folder of a map whose index is there."""
    folder = tmp_path_factory.mktemp("sound") / "map"
    map_of_pairs(folder, **FAST)
    matcher.Map.open(folder / "model").close()
    return folder


@pytest.fixture
def folder(saved_map, tmp_path) -> Path:
    return Path(shutil.copytree(saved_map, tmp_path / "given" / "map"))


def loaded(folder: Path) -> tuple[str, np.ndarray | None]:
    """What is said of a map that a tracker loads, and the pose of a frame in it; in time."""
    tracker = matcher.Tracker("nearest", WALLS, baseline=BASELINE, **FAST)
    begun, pose = time.process_time(), None
    try:
        tracker.load_map(folder)
        pose = tracker.push_stereo(*pair(0.4)).map_from_cam
        said = tracker.problem or ""
    except (IntegrityError, UsageError) as error:
        said = str(error)
    tracker.unload_map()
    assert time.process_time() - begun < SECONDS
    return said, pose


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def other_bytes(path: Path) -> None:
    path.write_bytes(np.random.default_rng(3).bytes(5000))


NEEDED = (f"{RUN}/run.db", DESCRIPTORS, *(f"{SPARSE}/{n}.bin" for n in ("cameras", "images", "points3D")))
SPARED = ("loops.json", "trajectory.tum", f"{RUN}/{INDEX}", "model/database.db", "frames/000000.png")


@pytest.mark.parametrize("name", NEEDED)
def test_a_needed_file_that_is_damaged_or_something_else(saved_map, tmp_path, name):
    for fault in (Path.unlink, cut, pipe, link, other_bytes):
        folder = Path(shutil.copytree(saved_map, tmp_path / fault.__name__))
        fault(folder / name)
        said, pose = loaded(folder)
        assert said and pose is None, fault


@pytest.mark.parametrize("fault", [cut, pipe, other_bytes])
def test_what_a_map_can_do_without_changes_nothing(folder, fault):
    """Its index is made again; a keyframe's image only makes keypoints more exact."""
    for name in SPARED:
        if fault is not pipe or not name.startswith(RUN):  # a run holds its files itself
            fault(folder / name)
    for place in (folder, folder / "model", folder / RUN, folder / SPARSE):  # files that no map has
        (place / "pycolmap.py").write_text("raise SystemExit('run')")
        os.mkfifo(place / "pipe")
    said, pose = loaded(folder)
    assert said == "" and pose is not None and np.allclose(pose[:3, 3], [0.4, 0, 0], atol=0.05)


SUMMARIES = [b"", b"[" * 100_000, b"\xff\xfe{", b'{"run": 7}', b'{"run": "a\\u0000b"}', b'{"run": "\\ud800"}']
SUMMARIES += [b'{"run": "' + text + b'"}' for text in (b"x/" * 9000, b"/dev", b" " * 30_000_000)]


def test_a_summary_that_says_something_else(folder):
    """The run beside the model is taken, or its absence is said."""
    for text in SUMMARIES:
        (folder / SUMMARY).write_bytes(text)
        said, pose = loaded(folder)
        assert "RUN_DIR" in said or (said == "" and pose is not None)


def test_descriptors_that_are_not_finite(folder, value=np.nan):
    """With right checksums, as a stranger can write them; the index is made of them too."""
    with Store.open(folder / RUN) as store:
        counts = {number: store.image(name).count for number, name in store.names().items()}
    with Writer(folder / RUN) as writer, writer.transaction():
        for number, count in counts.items():
            record = safetensors.numpy.save({"descriptors": np.full((count, 128), value, np.float16)})
            writer.put_descriptors(number, sealed(record))
    (folder / RUN / "retrieval.safetensors").unlink()
    said, pose = loaded(folder)
    assert "damaged" in said and pose is None


@pytest.mark.parametrize("name", ["../../evil.png", "a\x00b.png", "000000.png\x1b[2J"])
def test_names_of_a_model_that_leave_the_folder(folder, name):
    path = folder / SPARSE / "images.bin"
    path.write_bytes(path.read_bytes().replace(b"000000.png\0", name.encode() + b"\0", 1))
    said, pose = loaded(folder)
    assert said and pose is None and "\x1b" not in said and "\n" not in said
