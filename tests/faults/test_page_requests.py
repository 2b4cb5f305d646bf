"""Promise 7, raw requests to the page as it runs: other sites, large and many uploads, files of others."""

import http.client
import json
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
from served_page import served

pytestmark = pytest.mark.promise(7)
BOUNDARY = "x7x"
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def host(folder):
    pytest.importorskip("gradio", reason="gradio (the extra `app`) is not installed")
    with served(folder) as address:
        yield urlsplit(address).netloc


def ask(host: str, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    """Status and body of an answer."""
    connection = http.client.HTTPConnection(host, timeout=30)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, given)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def form(*files: bytes) -> bytes:
    """A multipart body."""
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="files"; filename="{n}.png"\r\n\r\n'.encode()
        + data
        + b"\r\n"
        for n, data in enumerate(files)
    ]
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def upload(host: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    return ask(host, "POST", "/gradio_api/upload", body, **FORM, **headers)


def held(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Host": "evil.example"}])
def test_other_sites_cannot_send_anything(host, folder, headers):
    before = len(held(folder))
    assert upload(host, form(b"x"), **headers)[0] in (400, 403)
    data = json.dumps({"data": [], "fn_index": 0, "session_hash": "a"}).encode()
    assert ask(host, "POST", "/gradio_api/queue/join", data, **headers)[0] in (400, 403)
    assert len(held(folder)) == before


def test_an_upload_is_kept_in_the_folder_and_one_too_large_is_not(host, folder):
    status, body = upload(host, form(b"small"))
    assert status == 200
    (kept,) = json.loads(body)
    assert folder in Path(kept).parents and Path(kept).read_bytes() == b"small"
    before = len(held(folder))
    assert upload(host, form(bytes(2 << 20)))[0] >= 400
    assert upload(host, form(bytes(50 << 20)))[0] == 413
    assert len(held(folder)) == before
    assert ask(host, "POST", "/gradio_api/upload", None, **FORM, Transfer_Encoding="chunked")[0] == 411


@pytest.mark.parametrize("name", ["../../evil.png", "/tmp/evil.png", "..\\evil.png", "a\x00b.png", "a" * 400])
def test_names_of_uploads_do_not_leave_the_folder(host, folder, name):
    body = form(b"name").replace(b'"0.png"', f'"{name}"'.encode())
    status, answer = upload(host, body)
    if status == 200:
        (kept,) = json.loads(answer)
        assert folder in Path(kept).resolve().parents
    assert not list(folder.glob("evil*")) and not Path("/tmp/evil.png").exists()


@pytest.mark.parametrize(
    "wanted", ["/etc/passwd", str(Path(__file__)), "pyproject.toml", "../../etc/passwd", "/proc/self/environ"]
)
def test_files_elsewhere_are_not_served(host, folder, wanted):
    for name in (wanted, quote(wanted, safe=""), f"{folder}/../../..{wanted}"):
        for path in ("/gradio_api/file=", "/file=", "/gradio_api/file/", "/static/", "/assets/"):
            assert ask(host, "GET", path + quote(name, safe="/%"))[0] >= 400, path + name


def press(host: str, session: str, *values: object) -> bytes:
    """What the page answers when its button is pressed with such values, and the rest as it stands."""
    rest = [None, None, None, None, "nearest", "fundamental", 0, 0, 64, 0, "", "", False]
    body = {"data": [*values, *rest[len(values) :]], "fn_index": 0, "session_hash": session}
    kind = {"Content_Type": "application/json"}
    assert ask(host, "POST", "/gradio_api/queue/join", json.dumps(body).encode(), **kind)[0] == 200
    return ask(host, "GET", f"/gradio_api/queue/data?session_hash={session}")[1]


def test_only_uploads_are_read(host, folder, views, tmp_path):
    """Of a mounted page gradio copied any file of this machine that a request named, and served the copy."""
    (tmp_path / "secret.txt").write_text("a secret")
    before, meta = held(folder), {"meta": {"_type": "gradio.FileData"}}
    named = (*map(str, views), str(tmp_path / "secret.txt"), "/etc/passwd", f"{folder}/../secret.txt", "", 7)
    for number, path in enumerate((*named, "http://93.184.216.34/a.png", "https://elsewhere.example/a.png")):
        file = {"path": path, "url": path, **meta}
        for place in range(3):  # both photos, a mask, and what is no file at all
            values = [[file, file], [None, None, file], [None, None, None, None, {"deep": [file]}]][place]
            said = press(host, f"s{number}{place}", *values)
            assert b"process_completed" in said and b'"success":true' not in said, (path, said)
    assert held(folder) == before
    status, body = upload(host, form(*(view.read_bytes() for view in views)))
    uploads = [{"path": path, **meta} for path in json.loads(body)]
    assert status == 200 and b'"success":true' in press(host, "uploaded", *uploads)


def test_a_wrong_file_is_named_once_without_its_folder(host, folder, views):
    _, body = upload(host, form(b"no picture", views[1].read_bytes()))
    files = [{"path": path, "meta": {"_type": "gradio.FileData"}} for path in json.loads(body)]
    for values, named in ((files, "0.png"), ((files[1], files[1], *"  ", "nearest", "essential"), "camera")):
        values = [value if value != " " else None for value in values]
        said = press(host, f"wrong{named}", *values).decode()
        (line,) = [line for line in said.splitlines() if '"process_completed"' in line]
        data = json.loads(line.removeprefix("data:"))["output"]["data"]
        assert named in data[0] and str(folder) not in data[0] and data[1] is None and data[5] == ""
