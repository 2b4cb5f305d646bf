"""Outputs are whole and carry our mark; signals wait for the step that is being taken."""

import io
import json
import os
import signal
import threading
from xml.etree import ElementTree

import cv2
import numpy as np
import PIL.Image
import pytest
from matplotlib.figure import Figure

from matcher.cli.output import messages, stop_signals, whole_step
from matcher.errors import UsageError
from matcher.files import check_output, is_ours, refuse_foreign, write_output


def test_outputs_are_checked_before(tmp_path):
    assert check_output(tmp_path / "a.JSON", (".json",)) == tmp_path / "a.JSON"
    (tmp_path / "b.json").mkdir()
    wrong = {"a.txt": r"end in \.npz or \.json", "none/a.json": "make it first", "b.json": "is a folder"}
    for name, said in wrong.items():
        with pytest.raises(UsageError, match=said):
            check_output(tmp_path / name, (".npz", ".json"))


def encoded(suffix: str) -> bytes:
    """A small file of that format."""
    figure = Figure(figsize=(1, 1))
    buffer = io.BytesIO()
    if suffix == ".npz":
        np.savez_compressed(buffer, numbers=np.arange(5))
    elif suffix == ".json":
        return b'{"numbers": [0, 1]}'
    elif suffix in (".html", ".md", ".txt"):
        return b"<p>text</p>"
    else:
        figure.savefig(buffer, format=suffix[1:])
    return buffer.getvalue()


def readable(path, suffix: str) -> bool:
    """Whether the usual readers of that format still read the file."""
    if suffix == ".npz":
        return np.load(path)["numbers"].tolist() == [0, 1, 2, 3, 4]
    if suffix == ".json":
        return json.loads(path.read_text())["numbers"] == [0, 1]
    if suffix == ".svg":
        return ElementTree.parse(path).getroot().tag.endswith("svg")
    if suffix in (".png", ".jpg", ".tif"):
        PIL.Image.open(path).verify()
        return cv2.imread(str(path)) is not None
    return path.read_bytes().startswith((b"<p>text</p>", b"%PDF"))


@pytest.mark.parametrize("suffix", [".html", ".txt", ".svg", ".pdf", ".png", ".jpg", ".tif", ".npz", ".json"])
def test_only_what_carries_our_mark_is_replaced(tmp_path, suffix):
    path, data = tmp_path / f"a{suffix}", encoded(suffix)
    path.write_bytes(data)
    with pytest.raises(UsageError, match="overwrite=True"):
        check_output(path, (suffix,), overwrite=False)
    assert path.read_bytes() == data
    assert check_output(path, (suffix,), overwrite=True) == path
    write_output(path, data)
    assert is_ours(path) and readable(path, suffix)
    assert check_output(path, (suffix,), overwrite=False) == path


def test_formats_without_room_for_a_mark_are_never_taken_for_ours(tmp_path):
    qgis = b"mapX,mapY,sourceX,sourceY,enable,dX,dY,residual\n1.5,2.25,3.1,-4.7,1,0,0,0\n"
    others = {"a.tum": b"0 1 2 3 0 0 0 1\n", "b.json": b"[1]", "c.png": b"no png", "d": b"", "e.points": qgis}
    for name, data in others.items():
        write_output(tmp_path / name, data)
        assert (tmp_path / name).read_bytes() == data
        with pytest.raises(UsageError, match="exists"):
            refuse_foreign(tmp_path / name, overwrite=False)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="exists"):
        refuse_foreign(tmp_path / "link", overwrite=False)
    refuse_foreign(tmp_path / "absent", overwrite=False)


# --- Signals that end a program wait for the step that is being taken.


@pytest.fixture(autouse=True)
def handlers():
    """Those of a command: an exception each."""

    def terminate(*_):
        raise SystemExit(143)

    wanted = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: terminate}
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    yield
    assert {number: signal.signal(number, before[number]) for number in before} == wanted


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_waits_for_the_end_of_the_step_and_a_second_one_does_not(number, error):
    done = []
    with pytest.raises(error):
        for step in range(5):
            with whole_step():
                done.append(step)
                if step == 1:
                    send(number)
                done.append(step)
    assert done == [0, 0, 1, 1]
    with pytest.raises(error), whole_step():
        send(signal.SIGINT)
        done.append("after the first")
        send(number)
        done.append("after the second")
    assert done[4:] == ["after the first"]
    with pytest.raises(ValueError, match="of the step"), whole_step():
        send(number)
        raise ValueError("of the step")


def test_the_first_stops_a_run_the_second_ends_it_and_threads_without_signals_take_steps_too(capfd):
    done = []
    with pytest.raises(KeyboardInterrupt), messages(), stop_signals() as received:
        send(signal.SIGTERM)
        assert received == [signal.SIGTERM]
        send(signal.SIGINT)
    assert "stopping after this step" in capfd.readouterr().err

    def work():
        with whole_step(), stop_signals() as received:
            done.append(received)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [[]]
