"""A browser without a window, driven over the WebDriver protocol (w3.org/TR/webdriver2) with plain HTTP."""

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="Debian's chromium and chromium-driver are not installed"
)
_FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
_QUIET = ["--disable-background-networking", "--disable-component-update", "--hide-scrollbars"]
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """One session; methods raise `AssertionError` with the driver's words where it refuses."""

    def __init__(self, address: str, width: int, height: int):
        self._address = address
        options = {"binary": CHROMIUM, "args": [*_FLAGS, *_QUIET, f"--window-size={width},{height}"]}
        wanted = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}
        self._session = f"/session/{self._call('POST', '/session', {'capabilities': wanted})['sessionId']}"

    def _call(self, method: str, path: str, body: object = None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def _do(self, path: str, body: object = None):
        return self._call("POST", self._session + path, {} if body is None else body)

    def open(self, url: str) -> None:
        self._do("/url", {"url": url})

    def run(self, script: str, *arguments: object):
        """What a function body returns in the page; it runs beside the page's policy, as a debugger does."""
        return self._do("/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def wait(self, script: str, seconds: float = 60.0):
        """What the function body returns as soon as it is true."""
        until = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < until, f"waited {seconds} s for {script}: {self.text('body')[:800]}"
            time.sleep(0.1)
        return value

    def find(self, selector: str) -> list[dict]:
        return self._do("/elements", {"using": "css selector", "value": selector})

    def click(self, selector: str, at: tuple[float, float] | None = None) -> None:
        """A real click on the first such element, or at CSS pixels from the upper left of the window."""
        if at is None:
            self._do(f"/element/{self.find(selector)[0][_ELEMENT]}/click")
            return
        x, y = (round(value) for value in at)
        presses = [{"type": kind, "button": 0} for kind in ("pointerDown", "pointerUp")]
        steps = [{"type": "pointerMove", "x": x, "y": y}, *presses]
        mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": steps}
        self._do("/actions", {"actions": [mouse]})

    def upload(self, element: dict, path) -> None:
        self._do(f"/element/{element[_ELEMENT]}/value", {"text": str(path)})

    def fill(self, selector: str, text: str) -> None:
        """Type over what a field holds."""
        element = f"/element/{self.find(selector)[0][_ELEMENT]}"
        self._do(f"{element}/clear")
        self._do(f"{element}/value", {"text": f"{text}\ue004"})  # a tab, so that the field is left

    def screenshot(self, path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", self._session + "/screenshot")))

    def complaints(self) -> list[str]:
        """What the page's console says of errors, refused content among them."""
        rows = self._do("/se/log", {"type": "browser"})
        return [row["message"] for row in rows if row["level"] == "SEVERE"]

    def close(self) -> None:
        self._call("DELETE", self._session)


@contextmanager
def browser(width: int = 1280, height: int = 1000):
    """A browser that is gone afterwards."""
    driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        started = next(line for line in driver.stdout if "successfully on port" in line)
        port = started.split("port ")[1].strip(" .\n")
        session = Browser(f"http://127.0.0.1:{port}", width, height)
        try:
            yield session
        finally:
            session.close()
    finally:
        driver.terminate()
        driver.wait()
