"""Promise 5: a pipe or device in place of a file is not waited for, and nothing is written through a link."""

import json
import os
import resource
import signal
import time
from pathlib import Path

import pytest
from collection_runs import QUICK, photos
from hostile_runs import small_run

from matcher.cli import main
from matcher.errors import UsageError
from matcher.files import whole_folder
from matcher.kernels import loader as trusted

pytestmark = pytest.mark.promise(5)
SECONDS = 5.0


@pytest.fixture(autouse=True)
def bounded():
    """A test that waits for a pipe, or reads without end, ends as a failure instead of never."""

    def late(*_: object) -> None:
        raise AssertionError("it waits")

    signals, limits = signal.signal(signal.SIGALRM, late), resource.getrlimit(resource.RLIMIT_AS)
    if (held := Path("/proc/self/statm")).exists():
        pages = int(held.read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (5 << 30), limits[1]))
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, signals)
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    photos(folder / "photos", 2)
    small_run(folder / "run")
    return folder


def said(capfd, code: int, wanted: tuple[int, ...] = (2, 5)) -> str:
    errors = capfd.readouterr().err
    assert code in wanted and "Traceback" not in errors and "internal error" not in errors, errors
    return errors


KINDS = {
    "a pipe": os.mkfifo,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "sixty gigabytes": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 60 << 30),
}
PHOTOS, MADE = "{photos}", "{made}"
INPUTS = {
    "weights": ("w.safetensors", ["match", "{a}", "{b}", "--weights"]),
    "a checkpoint": ("w.pth", ["weights", "import", "--preset", "loftr-outdoor"]),
    "weights of a front end": ("w.safetensors", ["match", "{a}", "{b}", "--frontend-weights"]),
    "a pair list": ("pairs.txt", ["collection", PHOTOS, "--run", MADE, *QUICK, "--workers", "0", "--pairs"]),
    "a list of images": ("names.txt", ["collection", PHOTOS, "--run", MADE, *QUICK, "--include", "@"]),
    "poses": ("poses.txt", ["sfm", "{run}", "--out", MADE, "--poses"]),
    "a model": ("model", ["sfm", PHOTOS, "--out", MADE, "--continue"]),
    "a trajectory": ("true.tum", ["track", PHOTOS, "--camera", "99,99,99,80", *QUICK, "--ground-truth"]),
    "a recipe": ("recipe.toml", ["train", "--photos", PHOTOS, "--recipe"]),
}


CASES = [(name, "a pipe") for name in INPUTS]
CASES += [(name, kind) for name in ("weights", "poses", "a recipe") for kind in [*KINDS][1:]]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_an_input_that_is_no_file_is_refused(folder, tmp_path, capfd, name, kind):
    file, command = INPUTS[name]
    path, (a, b) = tmp_path / file, sorted((folder / "photos").iterdir())
    KINDS[kind](path)
    places = {"photos": folder / "photos", "run": folder / "run", "made": tmp_path / "made", "a": a, "b": b}
    words, begun = [word.format(**places) for word in command], time.process_time()
    words += [words.pop() + str(path)] if words[-1] == "@" else [str(path)]
    assert file in said(capfd, main(words)).replace("\n", "")
    assert time.process_time() - begun < SECONDS


OUTPUTS = {
    "matches": ("out.npz", ["match", "{a}", "{b}", *QUICK, "--output"]),
    "a plot": ("out.png", ["match", "{a}", "{b}", *QUICK, "--plot"]),
    "an export": ("out.npz", ["export", "{run}", "--to", "npz"]),
    "a report": ("out.html", ["report", "{run}", "--output"]),
    "a log": ("out.log", ["status", "{run}", "--log"]),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_that_is_a_pipe_is_not_opened(folder, tmp_path, capfd, name):
    file, command = OUTPUTS[name]
    path, (a, b) = tmp_path / file, sorted((folder / "photos").iterdir())
    os.mkfifo(path)
    words = [word.format(run=folder / "run", a=a, b=b) for word in command]
    assert file in said(capfd, main([*words, str(path)])).replace("\n", "")
    assert path.is_fifo()


def test_a_pipe_in_the_cache_is_not_waited_for(tmp_path):
    """Who may write there could stop every command."""
    tmp_path.chmod(0o777)
    os.mkfifo(tmp_path / "kept.bin")
    with pytest.warns(UserWarning, match="not used: .*others"):
        assert trusted.load(tmp_path / "kept.bin") is None
    tmp_path.chmod(0o755)
    with pytest.warns(UserWarning, match="not used: .*is a pipe"):
        assert trusted.load(tmp_path / "kept.bin") is None


@pytest.mark.parametrize("place", ["report.html", "report_pairs/00001.html"])
def test_a_report_does_not_wait_for_a_pipe_in_the_run(tmp_path, capfd, place):
    run = small_run(tmp_path / "run")
    (run / place).parent.mkdir(exist_ok=True)
    os.mkfifo(run / place)
    assert Path(place).name in said(capfd, main(["report", str(run)])).replace("\n", "")


@pytest.mark.parametrize("target", ["../outside", "report_pairs"])
def test_a_report_writes_no_pages_through_a_link(tmp_path, capfd, target):
    """The folder of its pages is in the run, which may be anybody's; they went to where the link led."""
    run, outside = small_run(tmp_path / "run"), tmp_path / "outside"
    outside.mkdir()
    (run / "report_pairs").symlink_to(target)
    assert "is a file or a link" in said(capfd, main(["report", str(run)])).replace("\n", "")
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("listed", [["old/precious"], "[" * 100_000, None])
def test_an_overwritten_folder_reaches_nothing_through_its_links(tmp_path, listed):
    """What an earlier export wrote is deleted with it; a stranger's list may name files behind a link."""
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir(), outside.mkdir()
    (outside / "precious").write_text("keep me")
    (folder / "old").symlink_to(outside)
    if listed is None:
        os.mkfifo(folder / ".matcher-files.json")
    else:
        text = listed if isinstance(listed, str) else json.dumps(listed)
        (folder / ".matcher-files.json").write_text(text)
    with whole_folder(folder, overwrite=True) as part:
        (part / "new").write_text("new")
    assert (outside / "precious").read_text() == "keep me" and (folder / "new").exists()
    with pytest.raises(UsageError, match="is a link"), whole_folder(folder, overwrite=True) as part:
        (part / "old").mkdir()
        (part / "old" / "precious").write_text("new")
    assert [path.read_text() for path in outside.iterdir()] == ["keep me"]
