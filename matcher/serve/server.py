"""The page as a server of this machine: bound to 127.0.0.1, closed to other sites, without telemetry."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from matcher.errors import UsageError, install_command

_SITES = (b"same-origin", b"none")  # Sec-Fetch-Site of the page's own requests, and of an address typed in


def admitting(app: Callable, folder: Path, most_bytes: int) -> Callable:
    """An ASGI application that answers only requests of its own page, and refuses uploads beyond a limit.

    `folder` is where uploads are kept and may hold `most_bytes`, a new upload included.
    """

    async def answer(scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] in ("http", "websocket") and not from_own_page(scope["headers"]):
            return await _refuse(scope, send, 403, b"requests of other sites are refused")
        if scope["type"] == "http" and scope["method"] == "POST" and "upload" in scope["path"]:
            wanted = dict(scope["headers"]).get(b"content-length", b"")
            if not wanted.isdigit():
                return await _refuse(scope, send, 411, b"an upload must say its length")
            held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            if int(wanted) + held > most_bytes:
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


async def _refuse(scope: dict, send: Callable, status: int, reason: bytes) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(reason)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": reason})


# --- The server

HOST = "127.0.0.1"
MAX_MEGABYTES = 50  # of an upload
# Whatever the page's own code may want, the browser asks nobody but this server.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self'; worker-src 'self' blob:; frame-src 'self' data: blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)


def serve(
    *,
    port: int = 7860,
    device: str = "auto",
    max_megabytes: int = MAX_MEGABYTES,
    on_address: Callable[[str], None] = print,
) -> None:
    """Run the page until it is interrupted; `on_address` is called with its address once that is known.

    Args:
        port: the first that is tried; 0 takes any.
        device: where networks run.
        max_megabytes: larger uploads are refused.

    Raises:
        UsageError: gradio is not installed, or no port is free.
    """
    listening = _listen(port)
    server = None

    def end(*_: object) -> None:
        if server is not None:
            server.config.timeout_graceful_shutdown = 2  # seconds; a page that is open would keep it
        signal.raise_signal(signal.SIGTERM)

    hangup = getattr(signal, "SIGHUP", None)  # of a terminal that is closed; Windows has none
    main = threading.current_thread() is threading.main_thread()
    if hangup is not None and main and signal.getsignal(hangup) == signal.SIG_DFL:  # nohup ignores it
        signal.signal(hangup, end)  # so that files go with the server
    with tempfile.TemporaryDirectory(prefix="matcher-") as scratch, listening:
        # gradio reads these when it is imported.
        os.environ |= {"GRADIO_TEMP_DIR": scratch, "GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1"}
        app = build_app(Path(scratch), device, max_megabytes)
        import uvicorn

        on_address(f"http://{HOST}:{listening.getsockname()[1]}")
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        server.run(sockets=[listening])


def build_app(folder: Path, device: str = "auto", max_megabytes: int = MAX_MEGABYTES) -> Callable:
    """The page as an ASGI application; `folder`, of this page alone, is for files that it makes."""
    try:
        import fastapi
        import gradio
        import uvicorn  # noqa: F401
        from fastapi.middleware.trustedhost import TrustedHostMiddleware

        from matcher.serve.page import Matching, build_page, plain_theme
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("matcher"):
            raise
        raise UsageError(
            f"the page needs gradio and what it runs on ({error.name} is absent): "
            + install_command("gradio", "fastapi", "uvicorn")
        ) from None
    made = folder / "made"
    made.mkdir(exist_ok=True)
    app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    page = build_page(Matching(device), made)
    page.queue(max_size=20, api_open=False)
    how = {"max_file_size": max_megabytes * 2**20, "allowed_paths": [str(made)], "server_name": HOST}
    how |= {"show_error": True, "footer_links": []}
    # Nothing that gradio adds by itself: no server of its own, no monitoring, no history, no app.
    how |= {"ssr_mode": False, "enable_monitoring": False, "run_history": False, "pwa": False}
    gradio.mount_gradio_app(app, page, path="/", theme=plain_theme(), **how)
    # A name that another site points at this machine is not ours (DNS rebinding).
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    admitted = admitting(app, folder, 40 * max_megabytes * 2**20)
    headers = [(b"content-security-policy", _POLICY.encode()), (b"referrer-policy", b"no-referrer")]

    async def answer(scope: dict, receive: Callable, send: Callable) -> None:
        async def marked(message: dict) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        await admitted(scope, receive, marked)

    return answer


def _listen(port: int) -> socket.socket:
    """A socket on the first free port; `UsageError` where none is."""
    if not 0 <= port <= 65535:
        raise UsageError(f"a port is a number from 0 to 65535, not {port}")
    for candidate in [port] if port == 0 else range(port, min(port + 20, 65536)):
        with suppress(OSError):
            return socket.create_server((HOST, candidate))
    raise UsageError(f"no port from {port} to {port + 19} is free; choose another port")
