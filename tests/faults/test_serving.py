"""Promise 7, the page that one can click: closed to others, reads uploads alone, keeps nothing; one visit."""

import http.client
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote, urlsplit

import numpy as np
import PIL.Image
import pytest
from browser import browser, needs_browser
from command import run

from matcher.errors import ImageError, UsageError

OFFLINE = (
    "import os, signal, socket\n"
    "connect = socket.socket.connect\n"
    "def refuse(self, address):\n"
    "    if isinstance(address, tuple) and address[0] not in ('127.0.0.1', '::1', 'localhost'):\n"
    "        print('WENT OUT', address, flush=True)\n"
    "        raise OSError('offline')\n"
    "    return connect(self, address)\n"
    "socket.socket.connect = refuse\n"
    "from matcher.cli import main\n"
    "before = signal.getsignal(signal.SIGHUP)\n"
    "code = main(['serve', '--port', '0', '--device', 'cpu', '--max-upload', '1'])\n"
    "print('ended by', code, before == signal.getsignal(signal.SIGHUP), 'GRADIO_TEMP_DIR' in os.environ)"
)


@contextmanager
def served(temporary: Path, end: signal.Signals = signal.SIGINT) -> Iterator[str]:
    """Its address; it may make temporary files in that folder only, and leaves none there."""
    environment = {**os.environ, "TMPDIR": str(temporary)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([sys.executable, "-c", OFFLINE], env=environment, **pipes)
    first = process.stdout.readline()
    found = re.search(r"http://127\.0\.0\.1:\d+", first)
    assert found, first + process.stdout.read()
    yield found[0]
    with urllib.request.urlopen(f"{found[0]}/gradio_api/heartbeat/open") as page:  # as an open page does
        assert page.readline()
        process.send_signal(end)
        rest = process.communicate(timeout=20)[0]
    assert "WENT OUT" not in first + rest
    assert f"ended by {130 if end == signal.SIGINT else 143} True False" in rest  # the program goes on
    assert "Traceback" not in rest, rest
    assert [path.name for path in temporary.iterdir()] == []


pytestmark = [
    pytest.mark.promise(7),
    pytest.mark.usefixtures("compiled"),
    pytest.mark.skipif(find_spec("gradio") is None, reason="gradio (the extra `app`) is not installed"),
]
FORM = {"Content_Type": "multipart/form-data; boundary=x7x"}


# --- What the page does


@pytest.fixture
def page():
    """Imported here, because gradio takes seconds, in every process that collects the tests."""
    return import_module("matcher.serve.page")


def test_a_pair_is_answered(page, views):
    matching, choices = page.Matching("cpu"), dict(preset="nearest", max_keypoints=512, max_error=2.0)
    result, drawing, report = matching.answer(*views, choices)
    assert report is None and drawing.shape[1] > 900 and len(result.features0) <= 512
    rows = dict(page.geometry_rows(result))
    assert rows["status"].startswith("ok") and rows["inliers"] == result.geometry.inliers.sum()
    assert sum(name.startswith("matrix") for name in rows) == 3
    assert matching.pipeline(**choices).config.estimation.max_epipolar_error == 2.0
    assert matching.pipeline(**choices) is matching.pipeline(**choices)  # which is loaded once


def test_the_default_preset_explains_its_first_pass(page, views, shipped_weights):
    matching, choices = page.Matching("cpu"), dict(max_keypoints=64, resize=320, geometry="none")
    result, _, report = matching.answer(*views, choices)
    assert report.startswith(b"<!doctype html>") and b"Content-Security-Policy" in report
    assert ["inliers", 0] in page.geometry_rows(result)
    pipeline = matching.pipeline(**choices, max_error=0.5)
    passes = pipeline.passes.estimation
    assert pipeline.config.estimation.max_epipolar_error == passes.max_epipolar_error == 0.5


def test_bad_choices_and_images_are_named(page, views, tmp_path):
    text = tmp_path / "text.jpg"
    text.write_text("no picture")
    for images, choices, fault, named in (
        ((views[0], text), {}, ImageError, r"text\.jpg"),
        (views, dict(max_error=-1.0), UsageError, "above 0"),
        (views, dict(match_threshold=3.0), UsageError, "0 to 1"),
        (views, dict(geometry="essential"), UsageError, "camera"),
    ):
        with pytest.raises(fault, match=named):
            page.Matching("cpu").answer(*images, {"preset": "nearest", **choices})
    assert run("serve", "--port", -1) == 2
    assert page.camera_of("500, 500, 319.5 239.5", "camera0").cy == 239.5
    for typed in ("500, 500, 320", "a b c d"):
        with pytest.raises(UsageError, match="camera0 is four numbers"):
            page.camera_of(typed, "camera0")


# --- Requests to the page as it runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def address(folder):
    """The page; afterwards it is ended by SIGTERM and leaves nothing in the folder."""
    with served(folder, signal.SIGTERM) as address:
        yield address


def ask(address: str, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    """Status and body of an answer."""
    with closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)) as connection:
        connection.request(method, path, body, {key.replace("_", "-"): headers[key] for key in headers})
        answer = connection.getresponse()
        return answer.status, answer.read()


def upload(address: str, *contents: bytes, name: str = "0.png", **headers: str) -> tuple[int, bytes]:
    head = f'--x7x\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'.encode()
    body = b"".join(head + content + b"\r\n" for content in contents) + b"--x7x--\r\n"
    return ask(address, "POST", "/gradio_api/upload", body, **FORM, **headers)


def held(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_it_answers_this_machine_and_its_own_page_only(address, folder):
    with urllib.request.urlopen(address) as answer:
        assert "default-src 'self'" in answer.headers["content-security-policy"]
    before, own = len(held(folder)), socket.gethostbyname(socket.gethostname())
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
        assert upload(address, b"x", **headers)[0] in (400, 403)
        data = json.dumps({"data": [], "fn_index": 0, "session_hash": "a"}).encode()
        assert ask(address, "POST", "/gradio_api/queue/join", data, **headers)[0] in (400, 403)
    assert len(held(folder)) == before
    if not own.startswith("127."):
        with pytest.raises(OSError, match=r"."):
            socket.create_connection((own, urlsplit(address).port), timeout=2).close()


def test_uploads_stay_in_the_folder_and_large_ones_are_refused(address, folder):
    status, body = upload(address, b"small")
    (kept,) = json.loads(body)
    assert status == 200 and folder in Path(kept).parents and Path(kept).read_bytes() == b"small"
    before = len(held(folder))
    assert upload(address, bytes(2 << 20))[0] >= 400 and upload(address, bytes(50 << 20))[0] == 413
    assert ask(address, "POST", "/gradio_api/upload", None, **FORM, Transfer_Encoding="chunked")[0] == 411
    text = b'--x7x\r\nContent-Disposition: form-data; name="files"\r\n\r\nno file\r\n--x7x--\r\n'
    assert ask(address, "POST", "/gradio_api/upload", text, **FORM)[0] == 400
    cut = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
    says = {"Content-Type": FORM["Content_Type"], "Content-Length": "900000"}
    cut.request("POST", "/gradio_api/upload", text.replace(b"\r\n\r\n", b'; filename="0"\r\n\r\n'), says)
    assert any(len(held(folder)) > before or time.sleep(0.02) for _ in range(200))
    cut.close()
    assert any(len(held(folder)) == before or time.sleep(0.02) for _ in range(200))
    for name in ("../../evil.png", "/tmp/evil.png", "..\\evil.png", "a\x00b.png"):
        status, body = upload(address, b"name", name=name)
        assert status != 200 or folder in Path(json.loads(body)[0]).resolve().parents
    assert not list(folder.glob("evil*")) and not Path("/tmp/evil.png").exists()


def test_files_elsewhere_are_not_served(address, folder):
    for wanted in ("/etc/passwd", str(Path(__file__)), "../../etc/passwd"):
        for name in (wanted, quote(wanted, safe=""), f"{folder}/../../..{wanted}"):
            for path in ("/gradio_api/file=", "/file=", "/static/", "/assets/"):
                assert ask(address, "GET", path + quote(name, safe="/%"))[0] >= 400, path + name


def press(address: str, session: str, *values: object) -> str:
    """What the page answers when its button is pressed with such values, and the rest as it stands."""
    rest = [None, None, None, None, "nearest", "fundamental", 0, 0, 64, 0, "", "", False]
    body = json.dumps({"data": [*values, *rest[len(values) :]], "fn_index": 0, "session_hash": session})
    kind = {"Content_Type": "application/json"}
    assert ask(address, "POST", "/gradio_api/queue/join", body.encode(), **kind)[0] == 200
    said = ask(address, "GET", f"/gradio_api/queue/data?session_hash={session}")[1].decode()
    return next(line for line in said.splitlines() if '"process_completed"' in line).removeprefix("data:")


def test_only_uploads_are_read_and_wrong_ones_named_without_their_folder(address, folder, views, tmp_path):
    """Of a mounted page gradio copied any file of this machine that a request named, and served the copy."""
    (tmp_path / "secret.txt").write_text("a secret")
    before, meta = held(folder), {"meta": {"_type": "gradio.FileData"}}
    named = (str(views[0]), f"{folder}/../secret.txt", 7, "http://a.example/b")
    for number, path in enumerate(named):
        file = {"path": path, "url": path, **meta}
        for values in ([file, file], [*[None] * 4, {"deep": [file]}], [*[None] * 4, "nearest", "none", "x"]):
            assert '"success":true' not in press(address, f"s{number}{len(values)}", *values), path
    assert held(folder) == before
    bomb = b"P5 300000 300000 255\n0"
    _, body = upload(address, *(view.read_bytes() for view in views), bomb, b"no picture")
    *photos, bomb, text = ({"path": path, **meta} for path in json.loads(body))
    assert '"success":true' in press(address, "uploaded", *photos)
    essential = [*photos, None, None, "nearest", "essential"]
    for values, word in (([text, photos[0]], "0.png"), ([bomb, bomb], "smaller"), (essential, "camera")):
        data = json.loads(press(address, f"wrong{word}", *values))["output"]["data"]
        assert (data[1], data[5]) == (None, "") and word in data[0]
        assert not re.search(f"{folder}|max_pixels", data[0])
    (old,) = folder.glob("matcher-*/made/*")
    os.utime(old, (0, 0))  # more than an hour ago
    assert '"success":true' in press(address, "again", *photos) and not old.exists()
    (full := old.parent / "full").touch()
    os.truncate(full, 41 << 20)
    assert "again" in json.loads(press(address, "full", *photos))["output"]["data"][0]
    full.unlink()


@pytest.mark.slow  # the page above is ended by SIGTERM
@pytest.mark.parametrize("end", [each for each in signal.Signals if each.name in ("SIGINT", "SIGHUP")])
def test_nothing_is_kept_when_it_is_interrupted_or_its_terminal_closed(end, tmp_path):
    if signal.getsignal(end) == signal.SIG_IGN:
        pytest.skip("it is ignored here, and so by what is started")
    with served(tmp_path, end) as address:
        urllib.request.urlopen(address).close()
        assert list(tmp_path.iterdir())


@pytest.mark.slow
@needs_browser
def test_a_visit(address, views, tmp_path, shipped_weights):
    """Two photos, the button, the counts, the drawing, the report, the file; a mask; a photo too large."""
    counts = "return document.querySelector('#counts textarea')?.value"
    for view in views:
        PIL.Image.open(view).resize((320, 240)).save(tmp_path / view.name)
    with browser(1280, 1800) as page:
        page.open(address)
        page.wait("return document.querySelectorAll('input[type=file]').length >= 2", 120)
        page.wait("return document.querySelector('#match')")
        page.click("#match")
        page.wait(f"{counts}.includes('Choose two photos first')")
        for side, view in enumerate(views):
            page.upload(page.find(f"#photo{side} input[type=file]")[0], tmp_path / view.name)
            page.wait(f"return document.querySelector('#photo{side}').innerText.includes('{view.stem}')")
            page.wait(f"return document.querySelector('#shown{side} img')?.naturalWidth > 100")
        page.fill("#keypoints input", "128")
        page.click("#match")
        page.wait(f"{counts}.includes('matches')", 240)
        said = page.run(counts)
        matches = int(re.search(r"(\d+) matches \(hybrid", said)[1])
        assert said.count(" 128 keypoints") == 2 and matches > 30 and "are inliers of one" in said
        page.wait("return document.querySelector('#drawing img')?.naturalWidth > 900")
        frame = page.wait("return document.querySelector('#explanation iframe')?.srcdoc")
        assert "Content-Security-Policy" in frame and "matrix, row 3" in page.text("#geometry")
        link = page.wait("return document.querySelector('#npz a[href]')?.href")
        with urllib.request.urlopen(link) as answer:
            arrays = np.load(io.BytesIO(answer.read()))
        assert len(arrays["indices"]) == matches and arrays["matrix"].shape == (3, 3)
        assert [text for text in page.complaints() if "Content Security Policy" in text] == []
        mask = np.full((240, 320), 255, np.uint8)
        mask[:, :200] = 0  # a part of one picture
        PIL.Image.fromarray(mask).save(tmp_path / "half.png")
        page.run("[...document.querySelectorAll('button')].find(b => b.innerText.includes('Masks')).click()")
        page.wait("return document.querySelector('#mask0 input[type=file]')")
        page.upload(page.find("#mask0 input[type=file]")[0], tmp_path / "half.png")
        page.wait("return document.querySelector('#mask0').innerText.includes('half')")
        page.click("#match")
        page.wait(f"{counts} !== {json.dumps(said)}", 120)
        assert int(re.search(r"(\d+) match(es)? \(hybrid", page.run(counts))[1]) < matches
        (tmp_path / "large.png").write_bytes(bytes(3 * 2**20))
        page.open(address)
        page.wait("return document.querySelectorAll('input[type=file]').length >= 2", 120)
        page.upload(page.find("#photo0 input[type=file]")[0], tmp_path / "large.png")
        page.wait("return /size|large|limit|exceed/i.test(document.body.innerText)")
        assert not page.run("return document.querySelector('#photo0 a[href]')")
