"""Promise 7: only requests of the page itself reach it, and uploads are bounded in size."""

import asyncio
import sys

import pytest

from matcher.cli import main
from matcher.errors import UsageError
from matcher.serve.server import admitting, build_app, room_in

pytestmark = pytest.mark.promise(7)
HOST = (b"host", b"127.0.0.1:7860")


def status_of(folder, headers, *, upload=False, kind="http", times=1) -> object:
    """The status of the first answer to requests made at once of a page that holds 1000 bytes of uploads."""
    sent = []

    async def page(scope, receive, send):
        await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive():
        return {"type": "http.request", "body": b""}

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "method": "POST" if upload else "GET", "path": "/upload", "headers": headers}
    admit = admitting(page, folder, lambda: room_in(folder, 1000))

    async def together():
        await asyncio.gather(*(admit(scope, receive, send) for _ in range(times)))

    asyncio.run(together())
    return sent[0].get("status", sent[0]["type"])


@pytest.mark.parametrize(
    ("headers", "right"),
    [
        ([HOST], True),
        ([HOST, (b"origin", b"http://127.0.0.1:7860")], True),
        ([HOST, (b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"navigate")], True),  # a link
        ([HOST, (b"origin", b"http://evil.example")], False),
        ([HOST, (b"origin", b"https://127.0.0.1:7860")], False),
        ([HOST, (b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"no-cors")], False),
    ],
)
def test_requests_of_other_sites_are_refused(tmp_path, headers, right):
    assert status_of(tmp_path, headers) == (200 if right else 403)
    assert status_of(tmp_path, headers, kind="websocket") == (200 if right else "websocket.close")


def test_uploads_are_bounded_together(tmp_path):
    def upload(length: bytes, times: int = 1) -> object:
        return status_of(tmp_path, [HOST, (b"content-length", length)], upload=True, times=times)

    assert upload(b"900") == 200 and upload(b"1001") == upload(b"900", 2) == 413
    assert upload(b"") == 411 and upload(b"many") == 411
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "earlier.png").write_bytes(bytes(500))
    assert upload(b"400") == 200 and upload(b"600") == 413


def test_without_gradio_the_message_says_what_to_install(monkeypatch, tmp_path, capsys):
    for name in [name for name in sys.modules if name.startswith("matcher.serve.page")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(UsageError, match=r"pip install .*gradio"):
        build_app(tmp_path, "cpu", 50)
    assert main(["serve", "--port", "0"]) == 2
    assert "gradio" in capsys.readouterr().err
