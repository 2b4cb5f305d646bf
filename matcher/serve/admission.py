"""Which requests reach the page: those of the page itself, and no more uploads than its folder may hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_SITES = (b"same-origin", b"none")  # Sec-Fetch-Site of the page's own requests, and of an address typed in


def admitting(app: Callable, folder: Path, most_bytes: int) -> Callable:
    """An ASGI application that answers only requests of its own page, and refuses uploads beyond a limit.

    Args:
        app: the application behind it.
        folder: where uploads are kept.
        most_bytes: what the folder may hold, a new upload included.
    """

    async def answer(scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] in ("http", "websocket") and not from_own_page(scope["headers"]):
            return await _refuse(scope, send, 403, b"requests of other sites are refused")
        if scope["type"] == "http" and scope["method"] == "POST" and "upload" in scope["path"]:
            wanted = dict(scope["headers"]).get(b"content-length", b"")
            if not wanted.isdigit():
                return await _refuse(scope, send, 411, b"an upload must say its length")
            if int(wanted) + _held(folder) > most_bytes:
                return await _refuse(scope, send, 413, b"no more uploads: start the page again")
        await app(scope, receive, send)

    return answer


def from_own_page(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether a request's headers are those of this page, or of a program that names no site at all."""
    given = {name.lower(): value for name, value in headers}
    host, origin = given.get(b"host", b""), given.get(b"origin")
    if origin is not None and origin != b"http://" + host:
        return False
    return given.get(b"sec-fetch-mode") == b"navigate" or given.get(b"sec-fetch-site", b"none") in _SITES


def _held(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


async def _refuse(scope: dict, send: Callable, status: int, reason: bytes) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(reason)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": reason})
