"""A real headless Chromium, driven over its DevTools protocol with what Prefect already installs (websockets).

with Browser(tmp_path) as browser:
    browser.open("http://127.0.0.1:4200")
    browser.click("Quick run")
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_SECONDS = 60.0
# The innermost visible element that shows exactly this text.
BY_TEXT = """
    ((text) => [...document.querySelectorAll('button, a, label, span, div, p, h1, h2, h3, h4, li, td, legend, summary')]
        .filter((e) => (e.innerText || '').trim() === text && e.getClientRects().length)
        .sort((a, b) => a.querySelectorAll('*').length - b.querySelectorAll('*').length)[0])
"""


class Browser:
    """One page. Everything waits until it is possible, and fails with what the page shows where it never is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count(1)

    def __enter__(self) -> Browser:
        assert CHROMIUM
        profile = self._folder / "profile"
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--window-size=1400,2400",
        ]
        options += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "--no-first-run", "about:blank"]
        self._process = subprocess.Popen([CHROMIUM, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port_file = profile / "DevToolsActivePort"
        self._until(lambda: port_file.is_file() and bool(port_file.read_text().strip()), "Chromium's port")
        port = port_file.read_text().split()[0]
        pages: list[dict[str, Any]] = []

        def there() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                pages[:] = [p for p in httpx.get(f"http://127.0.0.1:{port}/json").json() if p["type"] == "page"]
            return bool(pages)

        self._until(there, "a page")
        self._socket: ClientConnection = connect(pages[0]["webSocketDebuggerUrl"], max_size=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait(timeout=20)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its answer."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer: dict[str, Any] = json.loads(self._socket.recv(timeout=PATIENCE_SECONDS))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def script(self, expression: str) -> Any:
        """What a JavaScript expression gives, as JSON."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self._until(lambda: self.script("document.readyState === 'complete'"), f"the page {url}")

    def address(self) -> str:
        return str(self.script("location.href"))

    def text(self) -> str:
        return str(self.script("document.body ? document.body.innerText : ''"))

    def wait_for(self, text: str) -> None:
        """Until the page shows this text."""
        self._until(lambda: text in self.text(), f"“{text}”")

    def wait_until(self, expression: str) -> None:
        """Until a JavaScript expression is true."""
        self._until(lambda: bool(self.script(expression)), expression)

    def click(self, text: str) -> None:
        """A real click into the middle of what shows exactly this text."""
        self.click_on(f"{BY_TEXT}({json.dumps(text)})")

    def click_on(self, element: str) -> None:
        """A real click into the middle of the element that a JavaScript expression gives."""
        self.wait_until(f"!!({element})")
        self.script(f"({element}).scrollIntoView({{block: 'center'}})")
        time.sleep(0.2)  # until it has come to rest
        box = self.script(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])(({element}).getBoundingClientRect())"
        )
        where = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, **where)

    def type_over(self, element: str, text: str) -> None:
        """Replace what stands in a field by typing."""
        self.click_on(element)
        self.script(f"({element}).select()")
        self.send("Input.insertText", text=text)

    def submit(self) -> None:
        """Click on Submit until the form is left. A server on SQLite that is too busy for a moment (503) is told by the
        page as "Oops", and a person clicks again."""
        form = self.address()
        self.click("Submit")
        for _ in range(3):
            self._until(lambda: self.address() != form or "Oops" in self.text(), "what becomes of the form")
            if self.address() != form:
                return
            self.click("Close")
            time.sleep(2)
            self.click("Submit")
        self._until(lambda: self.address() != form, "the end of the form")

    def picture(self, path: Path) -> None:
        import base64

        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def _until(self, what: Callable[[], Any], told: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not what():
            shown = "" if told.startswith(("Chromium", "a page")) else self.text()
            assert time.monotonic() < deadline, f"{told} never came. The page shows:\n{shown[-3000:]}"
            time.sleep(0.2)
