"""Promise 7: only requests of the page itself reach it, and uploads are bounded in size and number."""

import asyncio

import pytest

from matcher.serve.server import MOST_FILES, _Counted, admitting, from_own_page

pytestmark = pytest.mark.promise(7)
HOST = (b"host", b"127.0.0.1:7860")


def status_of(folder, headers, *, method="GET", path="/", kind="http", most=1000) -> object:
    sent = []

    async def page(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "method": method, "path": path, "headers": headers}
    asyncio.run(admitting(page, folder, most)(scope, None, send))
    return sent[0].get("status", sent[0]["type"])


@pytest.mark.parametrize(
    ("headers", "right"),
    [
        ([HOST], True),
        ([HOST, (b"origin", b"http://127.0.0.1:7860")], True),
        ([HOST, (b"sec-fetch-site", b"same-origin")], True),
        ([HOST, (b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"navigate")], True),  # a link
        ([HOST, (b"origin", b"http://evil.example")], False),
        ([HOST, (b"origin", b"http://127.0.0.1:9999")], False),
        ([HOST, (b"Origin", b"null")], False),
        ([HOST, (b"origin", b"https://127.0.0.1:7860")], False),
        ([HOST, (b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"no-cors")], False),
        ([HOST, (b"sec-fetch-site", b"same-site")], False),
    ],
)
def test_requests_of_other_sites_are_refused(tmp_path, headers, right):
    assert from_own_page(headers) == right
    assert status_of(tmp_path, headers) == (200 if right else 403)
    assert status_of(tmp_path, headers, kind="websocket") == (200 if right else "websocket.close")


def test_uploads_are_bounded(tmp_path):
    def upload(length: bytes | None) -> object:
        headers = [HOST] if length is None else [HOST, (b"content-length", length)]
        return status_of(tmp_path, headers, method="POST", path="/gradio_api/upload")

    assert upload(b"900") == 200 and upload(b"1001") == 413
    assert upload(None) == 411 and upload(b"many") == 411
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "earlier.png").write_bytes(bytes(500))
    assert upload(b"400") == 200 and upload(b"600") == 413


def test_files_are_bounded_in_number(tmp_path):
    """Within one upload, also where the header of a file arrives in two pieces, and in the folder."""
    pieces = [b'x; FileName="a"', b"; filena", b'me="b"; filename="c"', b"rest"]

    def taken(most: int) -> list[str]:
        messages = iter([{"type": "http.request", "body": piece} for piece in pieces])

        async def receive():
            return next(messages)

        async def all_of_it():
            counting = _Counted(receive, most)
            return [(await counting())["type"] for _ in pieces]

        return asyncio.run(all_of_it())

    assert taken(3) == ["http.request"] * 4
    assert taken(2) == ["http.request", "http.request", "http.disconnect", "http.disconnect"]
    for number in range(MOST_FILES):
        (tmp_path / str(number)).touch()
    headers = [HOST, (b"content-length", b"5")]
    assert status_of(tmp_path, headers, method="POST", path="/gradio_api/upload") == 413
