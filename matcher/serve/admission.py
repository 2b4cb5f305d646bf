"""Which requests reach the page: those of the page itself, and no more uploads than its folder may hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

MOST_FILES = 400  # that the folder may hold
_PART = b"filename="  # once for each file of an upload
_SITES = (b"same-origin", b"none")  # Sec-Fetch-Site of the page's own requests, and of an address typed in


def admitting(app: Callable, folder: Path, most_bytes: int) -> Callable:
    """An ASGI application that answers only requests of its own page, and refuses uploads beyond a limit.

    Args:
        app: the application behind it.
        folder: where uploads are kept.
        most_bytes: what the folder may hold, a new upload included; `MOST_FILES` is how many files.
    """

    async def answer(scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] in ("http", "websocket") and not from_own_page(scope["headers"]):
            return await _refuse(scope, send, 403, b"requests of other sites are refused")
        if scope["type"] == "http" and scope["method"] == "POST" and "upload" in scope["path"]:
            wanted = dict(scope["headers"]).get(b"content-length", b"")
            if not wanted.isdigit():
                return await _refuse(scope, send, 411, b"an upload must say its length")
            count, held = _held(folder)
            if int(wanted) + held > most_bytes or count >= MOST_FILES:
                return await _refuse(scope, send, 413, b"no more uploads: start the page again")
            return await _bounded(app, scope, _Counted(receive, MOST_FILES - count), send)
        await app(scope, receive, send)

    return answer


def from_own_page(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether a request's headers are those of this page, or of a program that names no site at all."""
    given = {name.lower(): value for name, value in headers}
    host, origin = given.get(b"host", b""), given.get(b"origin")
    if origin is not None and origin != b"http://" + host:
        return False
    return given.get(b"sec-fetch-mode") == b"navigate" or given.get(b"sec-fetch-site", b"none") in _SITES


def _held(folder: Path) -> tuple[int, int]:
    """How many files a folder holds, and their bytes."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return len(sizes), sum(sizes)


async def _bounded(app: Callable, scope: dict, receive: _Counted, send: Callable) -> None:
    """Pass an upload on; where it holds too many files, it is refused."""
    kept = []

    async def hold(message: dict) -> None:
        kept.append(message)

    try:
        await app(scope, receive, hold)
    except Exception:
        if not receive.exceeded:
            raise
    if receive.exceeded:
        return await _refuse(scope, send, 413, b"too many files: start the page again")
    for message in kept:
        await send(message)


class _Counted:
    """A body that ends, as if the browser had left, at the first file above so many."""

    def __init__(self, receive: Callable, most: int) -> None:
        self._receive, self._most = receive, most
        self._seen, self._tail = 0, b""
        self.exceeded = False

    async def __call__(self) -> dict:
        message = await self._receive()
        if message["type"] == "http.request":
            body = self._tail + message.get("body", b"").lower()
            self._seen, self._tail = self._seen + body.count(_PART), body[1 - len(_PART) :]
            self.exceeded = self._seen > self._most
        return {"type": "http.disconnect"} if self.exceeded else message


async def _refuse(scope: dict, send: Callable, status: int, reason: bytes) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(reason)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": reason})
