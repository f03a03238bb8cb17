# SPDX-License-Identifier: Apache-2.0
"""The site, as a browser 1280 pixels wide shows it: it builds strictly, no block of code is cut off, pictures come first."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest

from benchmarks import pictures
from benchmarks.source_hash import ROOT
from tests import browser

OPERATORS = tuple(sorted(p.stem for p in (ROOT / "docs" / "operators").glob("*.md")))
# A fenced block scrolls in its code, not in its pre; and what is folded has no width until it is unfolded.
CUT_OFF = """(() => {
    document.querySelectorAll('details').forEach(d => { d.open = true });
    const blocks = [...document.querySelectorAll('pre, pre code')];
    const cut = blocks.filter(b => b.scrollWidth > b.clientWidth && getComputedStyle(b).display !== 'inline');
    const longest = text => text.split('\\n').reduce((a, b) => b.length > a.length ? b : a, '');
    const root = document.documentElement;
    return {overflow: root.scrollWidth - root.clientWidth, blocks: blocks.length, cut: cut.map(b => longest(b.textContent))};
})()"""
OPENING = """[...document.querySelector('article').children].map(element => {
    const image = element.querySelector('img');
    return {
        tag: element.tagName,
        text: element.textContent,
        image: image && {wide: image.naturalWidth, shown: image.clientWidth, alt: image.alt, src: image.src},
    };
}).slice(0, 5)"""


def build(to: pathlib.Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Builds the pages of the checkout, or what ``options`` ask for."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", *options, "--site-dir", str(to)]
    env = {"PATH": "", "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Builds the site once, strictly."""
    pytest.importorskip("mkdocs")
    to = tmp_path_factory.mktemp("site")
    done = build(to)
    assert done.returncode == 0, done.stderr
    return to


def asked(script: str, pages: Iterable[pathlib.Path]) -> dict[str, Any]:
    """Returns the script's answer in each page, by the page's file."""
    with browser.opened("about:blank", width=1280) as shown:
        answers = {}
        for page in pages:
            shown.go(page.as_uri())
            answers[page.as_posix()] = shown.evaluate(script)
        return answers


def test_the_site_builds_strictly(site: pathlib.Path) -> None:
    page = (site / "operators" / "mhc" / "index.html").read_text()
    assert 'id="mhc_inductor.mhc_pre"' in page, "the API comes from the docstrings"
    assert (site / "benchmarks" / "results" / "mhc.png").exists()


def test_the_notebook_is_a_page_with_its_outputs(site: pathlib.Path) -> None:
    page = (site / "notebooks" / "first_steps" / "index.html").read_text()
    assert (
        "largest relative difference of 11 tensors" in page and len(re.findall('<img[^>]*="data:image/png', page)) == 2
    )
    assert 'href="../../profiling/"' in page, "links between pages"


def test_no_block_of_code_is_wider_than_its_column(site: pathlib.Path) -> None:
    found = asked(CUT_OFF, sorted(site.rglob("index.html")))
    assert len(found) > 30 and sum(of["blocks"] for of in found.values()) > 200
    assert {page: of for page, of in found.items() if of["overflow"] or of["cut"]} == {}


WIDE = "x" * 150
PLANTED = {
    "indented or fenced": f"<pre><code>{WIDE}</code></pre>",
    "without code": f'<pre style="overflow: auto">{WIDE}</pre>',
    "folded": f"<details><pre><code>{WIDE}</code></pre></details>",
}


@pytest.mark.parametrize("html", PLANTED.values(), ids=PLANTED)
def test_a_wide_block_is_found(html: str, site: pathlib.Path) -> None:
    found = planted(site, html)
    assert found["cut"] and {*found["cut"]} == {WIDE}
    assert planted(site, html.replace(WIDE, WIDE[:80]))["cut"] == []


def test_a_wide_page_is_found(site: pathlib.Path) -> None:
    assert planted(site, '<div style="width: 1300px">x</div>')["overflow"] > 20


def planted(site: pathlib.Path, html: str) -> dict[str, Any]:
    """Returns what is found where a page of the site has ``html`` in its article."""
    page = site / "compile" / "planted.html"
    text = (site / "compile" / "index.html").read_text()
    page.write_text(text.replace("</article>", f"{html}</article>"))
    return asked(CUT_OFF, [page])[page.as_posix()]


@pytest.mark.parametrize("name", OPERATORS)
def test_a_page_of_an_operator_opens_with_its_picture(name: str, site: pathlib.Path) -> None:
    """After the title and what the operator is: the picture, loaded and as wide as the column, and its figures."""
    (opening,) = asked(OPENING, [site / "operators" / name / "index.html"]).values()
    assert [element["tag"] for element in opening] == ["H1", "P", "P", "UL", "P"]
    picture = opening[2]["image"]
    assert picture["wide"] >= picture["shown"] > 900 and "torch.compile" in picture["alt"]
    (of,) = [n for n in pictures.PICTURES if picture["src"].endswith(f"/{n}.png")]
    drawn = pictures.picture(of)
    assert opening[3]["text"].strip().split("\n") == [str(group) for group in drawn.groups]
    assert drawn.measured in opening[4]["text"]
