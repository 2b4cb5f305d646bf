"""Promise 5 for maps of a sequence's keyframes that others give, loaded by a tracker or by a command.

Every file of one may be absent, damaged, something else than a file, or say what is not so.
"""

import os
import shutil
import time
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import safetensors.numpy
from command import run
from hostile_runs import EDITS, edit
from sequence_walls import BASELINE, make_walls, picture
from sequence_walls import CAMERA as CAMERA_TEXT

import matcher
from matcher.collection.schema import sealed
from matcher.collection.store import Store, Writer
from matcher.errors import IntegrityError, UsageError

pytest.importorskip("pycolmap")
pytestmark = pytest.mark.promise(5)
CAMERA = matcher.Camera(*map(float, CAMERA_TEXT.split(",")), size=(320, 240))
FAST = {"max_keypoints": 200}
SECONDS = 5.0
RUN, SPARSE, SUMMARY = "model-run", "model/sparse/0", "model/summary.json"
DESCRIPTORS = f"{RUN}/descriptors.db"


@pytest.fixture(scope="module")
def walls():
    return make_walls()


@pytest.fixture(scope="module")
def sound(walls, tmp_path_factory) -> Path:
    """The folder of a map that a stereo tracker made, whose index is there."""
    folder = tmp_path_factory.mktemp("sound") / "map"
    keyframes = matcher.KeyframeMap(folder, CAMERA, "nearest", **FAST)
    tracker = matcher.Tracker("nearest", CAMERA, baseline=BASELINE, keyframe_map=keyframes, **FAST)
    for number in range(8):
        x = 0.18 * number
        tracker.push_stereo(picture(walls, x), picture(walls, x + BASELINE))
    tracker.save_map()
    matcher.Map.open(folder / "model").close()
    return folder


@pytest.fixture
def folder(sound, tmp_path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "given" / "map"))


def loaded(folder: Path, walls) -> tuple[str, np.ndarray | None]:
    """What is said of a map that a tracker loads, and the pose of a frame in it; in time."""
    tracker = matcher.Tracker("nearest", CAMERA, baseline=BASELINE, **FAST)
    begun, pose = time.process_time(), None
    try:
        tracker.load_map(folder)
        pose = tracker.push_stereo(picture(walls, 0.4), picture(walls, 0.4 + BASELINE)).map_from_cam
        said = tracker.problem or ""
    except (IntegrityError, UsageError) as error:
        said = str(error)
    tracker.unload_map()
    assert time.process_time() - begun < SECONDS
    return said, pose


def right(pose: np.ndarray | None) -> bool:
    return pose is not None and bool(np.allclose(pose[:3, 3], [0.4, 0, 0], atol=0.05))


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
INDEX = f"{RUN}/retrieval.safetensors"
SPARED = ("loops.json", "trajectory.tum", INDEX, "model/database.db", "frames/000000.png")


@pytest.mark.parametrize("name", NEEDED)
def test_a_needed_file_that_is_damaged_or_something_else(sound, tmp_path, walls, name):
    for fault in (Path.unlink, cut, pipe, link, other_bytes):
        folder = Path(shutil.copytree(sound, tmp_path / fault.__name__))
        fault(folder / name)
        said, pose = loaded(folder, walls)
        assert said and pose is None, fault


@pytest.mark.parametrize("fault", [cut, pipe, other_bytes])
def test_what_a_map_can_do_without_changes_nothing(folder, walls, fault):
    """Its index is made again; a keyframe's image only makes keypoints more exact."""
    for name in SPARED:
        if fault is not pipe or not name.startswith(RUN):  # a run holds its files itself
            fault(folder / name)
    for place in (folder, folder / "model", folder / RUN, folder / SPARSE):  # files that no map has
        (place / "pycolmap.py").write_text("raise SystemExit('run')")
        os.mkfifo(place / "pipe")
    said, pose = loaded(folder, walls)
    assert said == "" and pose is not None and np.allclose(pose[:3, 3], [0.4, 0, 0], atol=0.05)


SUMMARIES = [b"", b"[" * 100_000, b"\xff\xfe{", b'{"run": 7}', b'{"run": "a\\u0000b"}', b'{"run": "\\ud800"}']
SUMMARIES += [b'{"run": "' + text + b'"}' for text in (b"x/" * 9000, b"/dev", b" " * 30_000_000)]


def test_a_summary_that_says_something_else(folder, walls, tried):
    """The run beside the model is taken, or its absence is said."""
    for text in SUMMARIES:
        (folder / SUMMARY).write_bytes(text)
        said, pose = loaded(folder, walls)
        assert "RUN_DIR" in said or (said == "" and pose is not None)
        tried()


def test_descriptors_that_are_not_finite(folder, walls, value=np.nan):
    """With right checksums, as a stranger can write them; the index is made of them too."""
    with Store.open(folder / RUN) as store:
        counts = {number: store.image(name).count for number, name in store.names().items()}
    with Writer(folder / RUN) as writer, writer.transaction():
        for number, count in counts.items():
            record = safetensors.numpy.save({"descriptors": np.full((count, 128), value, np.float16)})
            writer.put_descriptors(number, sealed(record))
    (folder / RUN / "retrieval.safetensors").unlink()
    said, pose = loaded(folder, walls)
    assert "damaged" in said and pose is None


@pytest.mark.parametrize("name", ["../../evil.png", "a\x00b.png", "000000.png\x1b[2J"])
def test_names_of_a_model_that_leave_the_folder(folder, walls, name):
    path = folder / SPARSE / "images.bin"
    path.write_bytes(path.read_bytes().replace(b"000000.png\0", name.encode() + b"\0", 1))
    said, pose = loaded(folder, walls)
    assert said and pose is None and "\x1b" not in said and "\n" not in said


COMMANDS = {
    "a cut store": lambda folder: cut(folder / RUN / "run.db"),
    "a recursive view": lambda folder: edit(folder / RUN, *EDITS["a view without end"]),
    "a pipe for points": lambda folder: pipe(folder / SPARSE / "points3D.bin"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_commands_end_with_a_clear_error(folder, walls, tmp_path, capfd, tried, name):
    COMMANDS[name](folder)
    (tmp_path / "frames").mkdir()
    for number in range(3):
        PIL.Image.fromarray(picture(walls, 0.4 + 0.05 * number)).save(tmp_path / "frames" / f"{number}.png")
    frames, fast = (tmp_path / "frames", "--camera", CAMERA_TEXT), ("--preset", "nearest")
    more = ("--max-keypoints", 200, "--load-map", folder, "--output", tmp_path / "t.tum")
    for command in (
        ("localize", folder / "model", *frames, "--output", tmp_path / "p.txt"),
        ("track", *frames, *fast, *more),
    ):
        begun = time.process_time()
        assert run(*command) in (2, 4, 5), command
        assert time.process_time() - begun < SECONDS
        errors = capfd.readouterr().err
        assert errors and "internal error" not in errors and "Traceback" not in errors, (command, errors)
        tried()
