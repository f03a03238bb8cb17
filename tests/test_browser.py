# SPDX-License-Identifier: Apache-2.0
"""The browser that tests of pages share: what it shows, what it reports, and when ``./dev test`` installs it."""

from __future__ import annotations

import functools
import http.server
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import pytest
from PIL import Image

from benchmarks.source_hash import ROOT
from tests import browser

PAGE = """<!doctype html><meta charset="utf-8"><style>
body { margin: 0; background: rgb(255, 255, 255) }
@media (prefers-color-scheme: dark) { body { background: rgb(10, 20, 30) } }
</style><p id="out"></p>
<img src="data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7">
<script>document.getElementById("out").textContent = [innerWidth, location.hash].join(" ")</script>
"""


def page(folder: pathlib.Path, more: str = "") -> str:
    path = folder / "page.html"
    path.write_text(PAGE + more)
    return path.as_uri()


@pytest.mark.parametrize("width", [360, 1280])
def test_a_page_has_the_width_and_fragment_that_were_asked(tmp_path: pathlib.Path, width: int) -> None:
    seen = browser.dump(page(tmp_path) + "#search=word", width=width)
    assert f'<p id="out">{width} #search=word</p>' in seen.dom
    assert (seen.errors, seen.requests, seen.overflow) == ([], [], 0)


def test_a_wide_element_overflows(tmp_path: pathlib.Path) -> None:
    assert browser.dump(page(tmp_path, '<div style="width: 1300px">x</div>'), width=1280).overflow == 20


@pytest.mark.parametrize("dark", [False, True])
def test_colours_and_screenshot_follow_the_scheme(tmp_path: pathlib.Path, dark: bool) -> None:
    colour = (10, 20, 30) if dark else (255, 255, 255)
    with browser.opened(page(tmp_path, '<div style="height: 1500px"></div>'), width=640, dark=dark) as shown:
        assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == f"rgb{colour}"
        shown.screenshot(tmp_path / "page.png")
    with Image.open(tmp_path / "page.png") as image:
        assert image.width == 640 and image.height > 1500
        assert image.convert("RGB").getpixel((320, 1400)) == colour


@pytest.mark.parametrize(
    "script, error",
    [
        ("console.error('bad', 3)", "console: bad 3"),
        ("console.assert(false, 'untrue')", "console: untrue"),
        ("setTimeout(() => { throw new Error('late') }, 50)", "Error: late"),
        ("Promise.reject(new Error('unhandled'))", "Error: unhandled"),
        ("let = ", "SyntaxError"),
    ],
)
def test_errors_are_reported(tmp_path: pathlib.Path, script: str, error: str) -> None:
    (found,) = browser.dump(page(tmp_path, f"<script>{script}</script>")).errors
    assert found.startswith(error)


@pytest.mark.parametrize(
    "more, url",
    [
        ('<img src="http://example.com/x.png">', "http://example.com/x.png"),
        ('<link rel="stylesheet" href="https://example.com/x.css">', "https://example.com/x.css"),
        ("<script>setTimeout(() => fetch('http://example.com/late'), 50)</script>", "http://example.com/late"),
        ("<script>new WebSocket('ws://example.com/')</script>", "ws://example.com/"),
        ('<img src="picture.png">', "/picture.png"),
    ],
)
def test_requests_are_reported_and_fail(tmp_path: pathlib.Path, more: str, url: str) -> None:
    seen = browser.dump(page(tmp_path, more))
    assert [request.endswith(url) for request in seen.requests] == [True]
    assert any("net::ERR" in error for error in seen.errors)


def test_only_this_machine_is_reached(tmp_path: pathlib.Path) -> None:
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, form: str, *args: object) -> None:
            asked.append(f"{self.headers['Host']} {self.path}")

    with http.server.ThreadingHTTPServer(("", 0), functools.partial(Handler, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_port
        text = f'<!doctype html><link rel="icon" href="data:,"><img src="http://127.0.0.2:{port}/x.png">'
        (tmp_path / "page.html").write_text(text)
        seen = browser.dump(f"http://127.0.0.1:{port}/page.html")
        server.shutdown()
    assert seen.requests == [f"http://127.0.0.2:{port}/x.png"]
    assert asked == [f"127.0.0.1:{port} /page.html"]
    assert [error.partition(" http")[0] for error in seen.errors] == [
        "Failed to load resource: net::ERR_NAME_NOT_RESOLVED"
    ]


def test_scripts_drive_the_page_and_raise(tmp_path: pathlib.Path) -> None:
    with browser.opened(page(tmp_path)) as shown:
        shown.evaluate("document.getElementById('out').textContent = 'changed'")
        assert "changed" in shown.dump().dom
        assert shown.evaluate("Promise.resolve([1, {a: 'b'}])") == [1, {"a": "b"}]
        with pytest.raises(RuntimeError, match="ReferenceError: nothing"):
            shown.evaluate("nothing.here")


def test_an_absent_page_raises(tmp_path: pathlib.Path) -> None:
    with pytest.raises(RuntimeError, match="ERR_FILE_NOT_FOUND"):
        browser.dump((tmp_path / "absent.html").as_uri())


def test_a_browser_that_ends_raises_with_its_log(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "chromium", "echo no display >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(RuntimeError, match="ended:\nno display"):
        browser.dump(page(tmp_path))


def test_a_page_that_never_answers_raises(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser, "SECONDS", 3.0)
    with pytest.raises(RuntimeError, match="gave no answer for 3 s"):
        browser.dump(page(tmp_path, "<script>while (true) {}</script>"))


def test_without_a_browser_the_test_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert browser.find() is None
    with pytest.raises(pytest.skip.Exception, match="install Debian's package chromium"):
        browser.dump("about:blank")


def program(path: pathlib.Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


INSTALLS = {"CI": "1", "user": "0", "apt-get": "exit 0", "chromium": ""}


@pytest.mark.parametrize(
    "change, tried",
    [
        ({}, True),
        ({"CI": ""}, False),
        ({"user": "1000"}, False),
        ({"apt-get": ""}, False),
        ({"chromium": "exit 0"}, False),
    ],
)
def test_dev_installs_a_browser_in_ci_as_root(tmp_path: pathlib.Path, change: dict[str, str], tried: bool) -> None:
    assert said(tmp_path, INSTALLS | change) == ("update\ninstall chromium\n" if tried else "", "")


def test_dev_runs_the_tests_where_the_installation_fails(tmp_path: pathlib.Path) -> None:
    installed, warned = said(tmp_path, INSTALLS | {"apt-get": "exit 100"})
    assert installed == "update\n" and "without a browser" in warned


def said(folder: pathlib.Path, case: dict[str, str]) -> tuple[str, str]:
    """Runs ``install_browser`` of ``./dev`` with stand-ins on PATH; returns what apt-get was asked, and the warning."""
    text = (ROOT / "dev").read_text()
    function = text[text.index("install_browser() {") :].partition("\n}\n")[0] + "\n}\n"
    program(folder / "id", f"echo {case['user']}")
    program(folder / "python", f'exec {sys.executable} "$@"')
    asked = folder / "asked"
    asked.touch()
    if case["apt-get"]:
        words = 'for word; do case $word in -*) ;; *) printf "%s" "$space$word"; space=" " ;; esac; done'
        program(folder / "apt-get", f"{{ {words}; echo; }} >>{asked}; {case['apt-get']}")
    if case["chromium"]:
        program(folder / "chromium", case["chromium"])
    bash = shutil.which("bash")
    assert bash
    ran = subprocess.run(
        [bash, "-euo", "pipefail", "-c", function + "install_browser"],
        cwd=ROOT,
        env={"PATH": str(folder), "CI": case["CI"]},
        capture_output=True,
        text=True,
        check=True,
    )
    return asked.read_text(), ran.stderr
