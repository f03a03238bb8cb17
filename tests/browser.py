# SPDX-License-Identifier: Apache-2.0
"""Opens pages in a headless Chromium, over the DevTools protocol on a pipe. ``python -m tests.browser`` prints its path.

``dump`` answers most questions; ``opened`` keeps the page, for scripts and screenshots::

    seen = dump(path.as_uri() + "#search=attn", width=1280, dark=True)
    with opened(path.as_uri()) as page:
        page.evaluate("document.querySelector('input').value")
        page.screenshot(tmp_path / "page.png")

The browser reaches this machine only: every other host fails to resolve.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = f"no browser: install Debian's package chromium, or put one of {', '.join(NAMES)} on PATH"
SECONDS = 60.0
"""Seconds that the browser gets for an answer."""
OPTIONS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # root needs it, and the pages are the tests' own
    "--disable-gpu",
    "--disable-dev-shm-usage",  # containers often have 64 MB of it
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",  # a vertical one would take 15 pixels off the width
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1",
)
# Pages fill themselves and load late parts after the event "load": two frames, and timers of up to a fifth of a second.
SETTLE = "new Promise(done => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(() => done())), 200))"


def find() -> str | None:
    """Returns the path of a Chromium or Chrome on ``PATH``, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def require() -> str:
    """Returns ``find()``, or skips the test where there is none."""
    import pytest

    return find() or pytest.skip(MISSING)


class Dump(NamedTuple):
    """A page after its scripts ran."""

    dom: str
    """The document as HTML."""
    errors: list[str]
    """Uncaught exceptions, ``console.error``, and what the browser reports as errors, such as failed requests."""
    requests: list[str]
    """The URL of every request except the page itself and ``data:`` and ``blob:`` URLs. Over http, a page whose head
    links no icon has the browser's own request for ``/favicon.ico``."""
    overflow: int
    """Pixels that the page is wider than the window: 0 if nothing scrolls sideways."""


class Page:
    """A page in a browser. ``errors`` and ``requests`` are those of ``Dump``, up to the last call."""

    def __init__(self, send: IO[bytes], receive: IO[bytes], log: pathlib.Path) -> None:
        self._send, self._receive, self._log = send, receive, log
        self._buffer = b""
        self._last = 0
        self._session: dict[str, str] = {}
        self._loaded = False
        self._document = ""
        self.errors: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Returns the answer to a command of the DevTools protocol. Raises RuntimeError if the browser refuses it."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params, **self._session}
        with contextlib.suppress(BrokenPipeError):  # it ended: reading says so, with its log
            self._send.write(json.dumps(message).encode() + b"\0")
            self._send.flush()
        while (answer := self._next()).get("id") != self._last:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, url: str, width: int, height: int, dark: bool) -> None:
        """Opens ``url`` and waits until it has loaded and settled."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.go(url)
        self.evaluate(SETTLE)

    def go(self, url: str) -> None:
        """Opens ``url`` in place of the page, and waits for the event "load". Earlier errors and requests stay."""
        self._loaded = False
        self._document = url.partition("#")[0]
        failed = self.call("Page.navigate", url=url).get("errorText")
        if failed:
            raise RuntimeError(f"{url}: {failed}")
        while not self._loaded:
            self._note(self._next())

    def evaluate(self, script: str) -> Any:
        """Returns the value of a JavaScript expression, or what its promise resolves to. Raises what it throws."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(_thrown(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def screenshot(self, path: pathlib.Path, whole: bool = True) -> None:
        """Writes a PNG of the ``whole`` page, or of what the window shows."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def dump(self) -> Dump:
        """Returns what the page holds now."""
        dom = self.evaluate("document.documentElement.outerHTML")
        overflow = self.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        return Dump(dom, self.errors, self.requests, overflow)

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._receive], [], [], max(0.0, until - time.monotonic()))
            read = os.read(self._receive.fileno(), 1 << 16) if ready else b""
            if not read:
                what = "ended" if ready else f"gave no answer for {SECONDS:.0f} s"
                raise RuntimeError(f"the browser {what}:\n{self._log.read_text()[-2000:]}")
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self._request(params["request"]["url"])
        elif method == "Network.webSocketCreated":
            self._request(params["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(_thrown(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            said = (str(arg.get("value", arg.get("description"))) for arg in params["args"])
            self.errors.append("console: " + " ".join(said))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}".rstrip())

    def _request(self, url: str) -> None:
        if url != self._document and not url.startswith(("data:", "blob:")):
            self.requests.append(url)


def _thrown(details: dict[str, Any]) -> str:
    return str(details.get("exception", {}).get("description") or details["text"])


@contextlib.contextmanager
def opened(url: str, width: int = 1280, height: int = 800, dark: bool = False) -> Iterator[Page]:
    """Opens ``url`` in a new browser, which ends with the block. Skips the test where there is no browser.

    Args:
        url: A ``file:`` URL (``path.as_uri()``) or one of this machine, with or without a fragment.
        width: The window's width in pixels.
        height: Its height.
        dark: Whether the page sees ``prefers-color-scheme: dark``.

    Raises:
        RuntimeError: The browser ends, does not answer, or cannot open ``url``.
    """
    browser = require()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        log = pathlib.Path(home, "log")
        # The browser reads commands from descriptor 3 and answers on 4.
        command = ["sh", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null', "sh", browser, *OPTIONS]
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [*command, f"--user-data-dir={home}/profile"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        assert process.stdin and process.stdout
        try:
            page = Page(process.stdin, process.stdout, log)
            page.open(url, width, height, dark)
            yield page
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def dump(url: str, width: int = 1280, height: int = 800, dark: bool = False) -> Dump:
    """Returns ``url`` after its scripts ran, opened as ``opened`` does."""
    with opened(url, width, height, dark) as page:
        return page.dump()


if __name__ == "__main__":
    print(find() or sys.exit(MISSING))
