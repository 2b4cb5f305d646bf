"""The page as a server of this machine: bound to 127.0.0.1, closed to other sites, without telemetry."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from matcher.errors import UsageError, optional

HOST = "127.0.0.1"
_SITES = (b"same-origin", b"none")  # Sec-Fetch-Site of the page's own requests, and of an address typed in
# Whatever the page's own code may want, the browser asks nobody but this server.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self'; worker-src 'self' blob:; frame-src 'self' data: blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)


def room_in(folder: Path, most_bytes: int) -> int:
    """Bytes by which the files of a folder are fewer than `most_bytes`."""
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # removed just now
                most_bytes -= Path(place, name).stat().st_size
    return most_bytes


def admitting(app: Callable, folder: Path, room: Callable[[], int]) -> Callable:
    """An ASGI application that answers only requests of its own page, or of a program that names no site, and
    refuses uploads of more bytes than there is `room` for in the `folder` of all of them."""
    policy = [(b"content-security-policy", _POLICY.encode()), (b"referrer-policy", b"no-referrer")]
    under_way: list[int] = []  # bytes of uploads that are coming in

    async def uploaded(length: int, scope: dict, receive: Callable, send: Callable) -> bool:
        """Whether a form of files came, and was answered; of one that did not come whole nothing is kept."""
        answers = asyncio.Queue()
        under_way.append(length)
        try:
            await app(scope, receive, answers.put)
        except Exception:  # of any class: another form, its sender has gone, the disk is full
            return False
        finally:
            under_way.remove(length)
            for part in () if under_way else folder.glob("tmp*"):  # whole ones have another name
                part.unlink()
        while not answers.empty():
            await send(answers.get_nowait())
        return True

    async def answer(scope: dict, receive: Callable, send: Callable) -> None:
        async def marked(message: dict) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *policy]}
            await send(message)

        given, refused = {name.lower(): value for name, value in scope.get("headers", ())}, None
        visit = given.get(b"sec-fetch-mode") == b"navigate" or given.get(b"sec-fetch-site", b"none") in _SITES
        own = visit and given.get(b"origin") in (None, b"http://" + given.get(b"host", b""))
        if scope["type"] in ("http", "websocket") and not own:
            refused = 403, b"requests of other sites are refused"
        elif scope["type"] == "http" and scope["method"] == "POST" and "upload" in scope["path"]:
            wanted = given.get(b"content-length", b"")
            if not wanted.isdigit():
                refused = 411, b"an upload must say its length"
            elif int(wanted) > room() - sum(under_way):
                refused = 413, b"no more uploads: start the page again"
            elif not await uploaded(int(wanted), scope, receive, marked):
                refused = 400, b"no form of files, or no place to keep them"
        else:
            await app(scope, receive, marked)
        if refused and scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif refused:
            status, reason = refused
            headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(reason)).encode())]
            await marked({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": reason})

    return answer


def serve(
    *,
    port: int = 7860,
    device: str = "auto",
    max_megabytes: int = 50,
    on_address: Callable[[str], None] = print,
) -> None:
    """Run the page until it is interrupted, on the first free port from `port` (0: any), with networks on the
    device; `on_address` is called with its address, and larger uploads are refused. `UsageError`: gradio is
    not installed, or no port is free."""
    if not 0 <= port <= 65535:
        raise UsageError(f"a port is a number from 0 to 65535, not {port}")
    for candidate in [port] if port == 0 else range(port, min(port + 20, 65536)):
        with suppress(OSError):
            listening = socket.create_server((HOST, candidate))
            break
    else:
        raise UsageError(f"no port from {port} to {port + 19} is free; choose another port")
    hangup = getattr(signal, "SIGHUP", None)  # a terminal is closed: files go, too; Windows has none
    main = threading.current_thread() is threading.main_thread()
    with ExitStack() as stack:  # all is as before afterwards, as the caller may go on
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="matcher-"))
        stack.enter_context(listening)
        if hangup is not None and main and signal.getsignal(hangup) == signal.SIG_DFL:  # nohup ignores it
            signal.signal(hangup, lambda *_: signal.raise_signal(signal.SIGTERM))
            stack.callback(signal.signal, hangup, signal.SIG_DFL)
        # gradio reads these when it is imported.
        own = {"GRADIO_TEMP_DIR": scratch, "GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1"}
        stack.callback(os.environ.update, {name: os.environ[name] for name in own if name in os.environ})
        for name in own:
            stack.callback(os.environ.pop, name, None)
        os.environ |= own
        app = build_app(Path(scratch), device, max_megabytes)
        import uvicorn

        on_address(f"http://{HOST}:{listening.getsockname()[1]}")
        # An open page would keep it, and what is cancelled as it ends would be logged with its traceback.
        how = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": 2}  # seconds
        server, log = uvicorn.Server(uvicorn.Config(app, **how)), logging.getLogger("uvicorn.error")
        log.addFilter(quiet := lambda _: not server.should_exit)
        stack.callback(log.removeFilter, quiet)
        server.run(sockets=[listening])


def build_app(folder: Path, device: str, max_megabytes: int) -> Callable:
    """The page as an ASGI application; `folder`, of this page alone, is for files that it makes."""
    with optional():
        import gradio  # isort: skip  # first, as it brings the other
        import fastapi
        from fastapi.middleware.trustedhost import TrustedHostMiddleware

        from matcher.serve.page import Matching, build_page
    (made := folder / "made").mkdir(exist_ok=True)
    app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    room = partial(room_in, folder, 40 * max_megabytes * 2**20)
    page = build_page(Matching(device), made, room)
    page.queue(max_size=20, api_open=False)
    how = {"max_file_size": max_megabytes * 2**20, "allowed_paths": [str(made)], "server_name": HOST}
    how |= {"show_error": True, "footer_links": []}
    # Nothing that gradio adds by itself: no server of its own, no monitoring, no history, no app, no fonts.
    how |= {"ssr_mode": False, "enable_monitoring": False, "run_history": False, "pwa": False}
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    gradio.mount_gradio_app(app, page, path="/", theme=gradio.themes.Default(**fonts), **how)
    # A name that another site points at this machine is not ours (DNS rebinding).
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    return admitting(app, folder, room)
