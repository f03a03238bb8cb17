# SPDX-License-Identifier: Apache-2.0
"""The page that a report is saved as, in a headless browser: whole, searchable, readable in dark and light."""

from __future__ import annotations

import pathlib
import re

import pytest
import torch
from test_explain import FOUND, Plain, layer, streams
from torch import nn

from mhc_inductor.explanation import explain
from mhc_inductor.report import Cost, NearMiss, Report, Routed
from mhc_inductor.routing.operators.selection.profit import MEMORY, PRODUCT_FLOPS
from tests import browser

COLOURS = (
    "['.mhc', '.mhc .dim', '.mhc .missed > summary b'].map(n => getComputedStyle(document.querySelector(n)).color)"
)
GROUND = "getComputedStyle(document.querySelector('.mhc')).backgroundColor"
SHOWN = "[...document.querySelectorAll('details[data-leaf]')].filter(d => d.checkVisibility()).map(d => d.innerText)"


class Two(nn.Module):
    """A layer that is routed and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Plain(), Plain(dim=-2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    torch._dynamo.reset()
    report = explain(Two().eval(), streams(), verify=True)
    return report.save(tmp_path_factory.mktemp("page") / "report.html")


def test_a_saved_page_is_whole(saved: pathlib.Path) -> None:
    seen = browser.dump(saved.as_uri())
    assert (seen.errors, seen.requests, seen.overflow) == ([], [], 0)
    assert browser.dump(saved.as_uri(), width=420).overflow == 0, "a narrow window does not scroll sideways"
    text = saved.read_text()
    for part in (
        "layers.0",
        "layers.1",
        "Plain",
        "mhc_pre",
        "test_explain.py:",
        "x: float32 [2, 5, 4, 16]",
        "least time",
    ):
        assert part in text, part
    assert re.search(r"<mark> *\d+ .*h_in = \(pre.unsqueeze\(-1\) \* x\).sum\(-2\)</mark>", text), (
        "the line, with its code"
    )
    assert re.search(r"<dt>relative error</dt><dd>\d(\.\d)?e-\d+</dd>", text), "the verified error"
    assert "-2" in text and "why not" in text


def test_a_word_is_searched_for(saved: pathlib.Path) -> None:
    with browser.opened(saved.as_uri()) as page:
        every = page.evaluate(SHOWN)
        page.evaluate(
            "(i => { i.value = 'MHC_post'; i.dispatchEvent(new Event('input')) })(document.querySelector('input'))"
        )
        some = page.evaluate(SHOWN)
        assert 0 < len(some) < len(every) and all("mhc_post" in text for text in some)
        assert page.evaluate("document.querySelector('output').textContent").startswith(f"{len(some)} finding")
    with browser.opened(saved.as_uri() + "#search=nowhere") as page:
        assert (
            page.evaluate(SHOWN) == [] and page.evaluate("document.querySelector('output').textContent") == "0 findings"
        )


@pytest.mark.parametrize("dark", [False, True])
def test_text_is_readable_in_dark_and_light(saved: pathlib.Path, dark: bool) -> None:
    with browser.opened(saved.as_uri(), dark=dark) as page:
        ground = _luminance(page.evaluate(GROUND))
        assert (ground < 0.2) is dark
        for colour in page.evaluate(COLOURS):
            light, deep = sorted((_luminance(colour), ground), reverse=True)
            assert (light + 0.05) / (deep + 0.05) >= 4.5, f"{colour}: below the contrast that WCAG asks for"


def _luminance(colour: str) -> float:
    parts = [int(p) / 255 for p in re.findall(r"\d+", colour)[:3]]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_what_a_model_names_is_text(tmp_path: pathlib.Path) -> None:
    evil = "</pre><script>document.title = 'evil'</script>\"><img src=x onerror=alert(1)>"
    found = Report(
        [Routed("mhc_pre", f"m.py:3, in f: {evil}", evil, (evil,), modules=((evil, evil),), cost=Cost((evil,)))],
        [NearMiss("mhc_pre", evil, evil, evil)],
        problems=[evil],
    )
    with browser.opened(found.save(tmp_path / "r.html").as_uri()) as page:
        assert page.evaluate("document.title") == "mhc_inductor: what became of the model"
        assert page.evaluate("document.querySelectorAll('img').length") == 0
        assert page.errors == [] and len(page.evaluate(SHOWN)) == 2


def test_a_notebook_shows_the_same(tmp_path: pathlib.Path) -> None:
    """Twice in one page, as in two cells: each searches its own findings, and the page's style stays."""
    cell = FOUND._repr_html_()
    file = tmp_path / "notebook.html"
    file.write_text(f"<!doctype html><body><p id=mine>text</p>{cell}<hr>{cell}</body>")
    with browser.opened(file.as_uri() + "#search=nowhere") as page:
        each = "[...document.querySelectorAll('.mhc')].map(m => m.querySelectorAll('details[data-leaf]:not([hidden])').length)"
        assert page.evaluate(each) == [4, 4], "a notebook's address is not the report's"
        page.evaluate(
            "(i => { i.value = 'sinkhorn'; i.dispatchEvent(new Event('input')) })(document.querySelector('input'))"
        )
        assert page.evaluate(each) == [1, 4] and page.errors == []
        assert page.evaluate("getComputedStyle(document.querySelector('#mine')).maxWidth") == "none"


def test_findings_stand_in_their_modules_and_alike_ones_share_a_row() -> None:
    routed = [Routed("mhc_pre", "m.py:3", modules=layer(i)) for i in (0, 0, 1)]
    html = Report(routed)._repr_html_()
    assert html.count("data-leaf data-words") == 2 and "2 × mhc_pre" in html
    assert html.index("model.layers.0.attn") < html.index("2 × mhc_pre") < html.index("model.layers.1.attn")
    assert "No formula was found" in Report()._repr_html_()


def test_the_least_time_is_that_of_bytes_or_products() -> None:
    for cost, said in (
        (Cost(bytes=int(MEMORY / 1e5), flops=1), "10 µs"),
        (Cost(bytes=1, flops=int(PRODUCT_FLOPS / 1e2)), "10 ms"),
        (Cost(bytes=1, times=(3e-3, 1.5e-3)), "formula 3 ms, op 1.5 ms: 2.00 times as fast"),
        (Cost(note="not measured: no compiler"), "not measured: no compiler"),
    ):
        assert said in Report([Routed("mhc_pre", "m.py:3", cost=cost)])._repr_html_()


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(OSError):
        Report().save(tmp_path / "none" / "report.html")
