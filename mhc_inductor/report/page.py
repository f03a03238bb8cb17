# SPDX-License-Identifier: Apache-2.0
"""The page of a report: one HTML file without scripts or pictures from elsewhere, and the same in a notebook."""

from __future__ import annotations

import dataclasses
import linecache
from collections import Counter
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Any

from mhc_inductor.peaks import MEMORY, PRODUCT_FLOPS
from mhc_inductor.report.findings import Cost, NearMiss, Routed, module_name

if TYPE_CHECKING:
    from mhc_inductor.report import Report

_AROUND = 2
"""How many lines of code are shown before and after a finding's own."""

_STYLE = """
.mhc { color-scheme: light dark; --fg: light-dark(#1f2328, #e6edf3); --bg: light-dark(#fff, #0d1117);
  --soft: light-dark(#f6f8fa, #161b22); --line: light-dark(#d1d9e0, #3d444d); --dim: light-dark(#59636e, #9198a1);
  --good: light-dark(#116329, #56d364); --fuse: light-dark(#0550ae, #79c0ff); --miss: light-dark(#7d4e00, #e3b341);
  --bad: light-dark(#b3261e, #ff8a80); color: var(--fg); background: var(--bg); font: 15px/1.5 system-ui, sans-serif;
  max-width: 76rem; margin: 0 auto; padding: 1rem; }
.mhc h1 { font-size: 1.4rem; margin: 0 0 .3rem } .mhc p { margin: .3rem 0 }
.mhc .dim { color: var(--dim) } .mhc code, .mhc pre { font: 13px/1.5 ui-monospace, monospace }
.mhc .totals { display: flex; flex-wrap: wrap; gap: .6rem; margin: .8rem 0 }
.mhc .totals div { background: var(--soft); border: 1px solid var(--line); border-radius: 6px; padding: .4rem .9rem }
.mhc .totals b { display: block; font-size: 1.3rem }
.mhc input { width: 100%; box-sizing: border-box; font: inherit; padding: .4rem .6rem; color: inherit;
  background: var(--soft); border: 1px solid var(--line); border-radius: 6px; margin: .4rem 0 }
.mhc details { border-left: 2px solid var(--line); margin: .25rem 0 .25rem .4rem; padding-left: .7rem }
.mhc summary { cursor: pointer; overflow-wrap: anywhere } .mhc summary:hover { background: var(--soft) }
.mhc .routed > summary b { color: var(--good) } .mhc .fused > summary b { color: var(--fuse) }
.mhc .missed > summary b { color: var(--miss) } .mhc .problem b { color: var(--bad) }
.mhc dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem .9rem; margin: .4rem 0 }
.mhc dt { color: var(--dim) } .mhc dd { margin: 0; overflow-wrap: anywhere; min-width: 0 }
.mhc pre { background: var(--soft); border: 1px solid var(--line); border-radius: 6px; padding: .4rem .6rem;
  margin: .3rem 0; overflow-x: auto; white-space: pre } .mhc pre mark { background: none; color: inherit; font-weight: 700 }
.mhc pre { max-width: 100% } .mhc [hidden] { display: none }
"""
_SEARCH = """
(function (input) {
  var page = input.closest(".mhc"), nodes = Array.from(page.querySelectorAll("details")).reverse();
  function look() {
    var word = input.value.trim().toLowerCase(), n = 0;
    nodes.forEach(function (d) {
      var leaf = d.hasAttribute("data-leaf");
      var seen = leaf ? d.dataset.words.indexOf(word) >= 0 : d.querySelector("details[data-leaf]:not([hidden])") !== null;
      d.hidden = !seen;
      if (leaf && seen) n += 1;
      if (!leaf) d.open = true;
    });
    page.querySelector("output").textContent = n + (n === 1 ? " finding" : " findings");
  }
  input.addEventListener("input", look);
  if (page.dataset.whole && location.hash.indexOf("#search=") === 0) input.value = decodeURIComponent(location.hash.slice(8));
  look();
})(document.currentScript.previousElementSibling.querySelector("input"));
"""

Finding = Routed | NearMiss


def whole(report: Report) -> str:
    """Returns the report as an HTML document. ``#search=word`` at the end of its address searches for a word."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>mhc_inductor: what became of the model</title>'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        "<style>body { margin: 0; background: light-dark(#fff, #0d1117) }</style></head>"
        f"<body>{part(report, whole=True)}</body></html>\n"
    )


def part(report: Report, *, whole: bool = False) -> str:
    """Returns the report as HTML that can stand in another page, such as a notebook's."""
    found: list[Finding] = [*report.routed, *report.fused, *report.near_misses]
    mark = ' data-whole="1"' if whole else ""
    problems = "".join(f'<p class="problem"><b>problem</b> {escape(p)}</p>' for p in report.problems)
    return (
        f'<style>{_STYLE}</style><div class="mhc"{mark}><h1>What became of the model</h1>{_totals(report)}'
        '<input type="search" placeholder="Search: an op, a module, a file, a kernel, a reason" aria-label="Search">'
        f'<output class="dim"></output>{problems}{_tree(found).html() or "<p>No formula was found.</p>"}'
        f'<p class="dim">{escape(_explained(report))}</p></div><script>{_SEARCH}</script>'
    )


def _totals(report: Report) -> str:
    kinds = (("routed", report.routed), ("fused", report.fused), ("near misses", report.near_misses))
    boxes = [f"<div><b>{len(found)}</b>{name}</div>" for name, found in kinds]
    boxes.append(f"<div><b>{len(report.problems)}</b>problems</div>")
    return f'<div class="totals">{"".join(boxes)}</div><p>{escape(report.totals())}</p>'


def _explained(report: Report) -> str:
    costs = [f.cost for f in (*report.routed, *report.fused) if f.cost is not None]
    said = (
        f"Least time: what the op's forward must move or multiply, on an H200 ({MEMORY / 1e12:.1f} TB/s, "
        f"{PRODUCT_FLOPS / 1e12:.0f} TFLOP/s). Attention over ranges counts all keys. "
    )
    if not any(c.times or c.note for c in costs):
        return said + "Nothing was measured: explain(..., measure=True) does."
    return said + (
        "Measured: the formula (for a fused op, the ops that it replaces) as Inductor compiles it, then the op, on this "
        "machine, with gradients if the graph has them."
    )


@dataclasses.dataclass
class _Module:
    """A module of the model with its findings and the modules inside."""

    name: str = ""
    kind: str = ""
    inside: dict[str, _Module] = dataclasses.field(default_factory=dict)
    found: dict[Finding, list[Finding]] = dataclasses.field(default_factory=dict)

    def all(self) -> Iterator[Finding]:
        """Yields every finding in this module and in those inside."""
        yield from (one for alike in self.found.values() for one in alike)
        for module in self.inside.values():
            yield from module.all()

    def html(self) -> str:
        """Returns the module's part of the tree."""
        findings = "".join(map(_finding, self.found.values()))
        inner = findings + "".join(module.html() for module in self.inside.values())
        if not self.name and not self.kind:
            return inner
        said = ", ".join(f"{n} {kind}" for kind, n in Counter(map(_kind, self.all())).items())
        title = f"<code>{escape(self.name)}</code> " if self.name else ""
        return f'<details open><summary>{title}{escape(self.kind)} <span class="dim">{said}</span></summary>{inner}</details>'


def _tree(found: list[Finding]) -> _Module:
    root = _Module()
    for one in found:
        at = root
        for path, kind in one.modules:
            at = at.inside.setdefault(f"{path}:{kind}", _Module(path, kind))
        at.found.setdefault(one, []).append(one)
    return root


def _kind(found: Finding) -> str:
    return "missed" if isinstance(found, NearMiss) else "fused" if found.parts else "routed"


def _finding(alike: list[Finding]) -> str:
    one, kind = alike[0], _kind(alike[0])
    place, _, code = one.source.partition(", in ")
    count = f"{len(alike)} × " if len(alike) > 1 else ""
    cost = None if isinstance(one, NearMiss) else one.cost
    rows = [*one.said(), *(_sizes(cost) if cost else ())]
    listed = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in rows if text)
    words = escape(
        " ".join([kind, one.op, module_name(one), one.source, *(text for _, text in rows)]).lower(), quote=True
    )
    return (
        f'<details class="{kind}" data-leaf data-words="{words}"><summary><b>{kind}</b> {count}{escape(one.op)} '
        f'<span class="dim">{escape(place.rpartition("/")[2])} {escape(_brief(one))}</span></summary>'
        f"<dl><dt>line</dt><dd>{escape(place)}</dd>{listed}</dl>{_code(place) or _line(code)}</details>"
    )


def _brief(one: Finding) -> str:
    if isinstance(one, NearMiss):
        return one.reason
    return "" if one.cost is None or one.cost.times is None else _measured(one.cost)


def _sizes(cost: Cost) -> Iterator[tuple[str, str]]:
    yield "tensors", ", ".join(cost.tensors)
    if cost.bytes:
        least = max(cost.bytes / MEMORY, cost.flops / PRODUCT_FLOPS)
        yield "least time", f"{_time(least)}: {cost.bytes / 1e6:.3g} MB, {cost.flops / 1e9:.3g} GFLOP"
    yield "measured", _measured(cost) if cost.times else cost.note


def _measured(cost: Cost) -> str:
    formula, op = cost.times or (0.0, 1.0)
    return f"formula {_time(formula)}, op {_time(op)}: {formula / op:.2f} times as fast"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def _code(place: str) -> str:
    """Returns the lines around a finding's own, which is marked; an empty string if the file cannot be read."""
    file, _, number = place.rpartition(":")
    lines: Any = linecache.getlines(file) if number.isdigit() else []
    if not lines:
        return ""
    at = int(number)
    shown = range(max(at - _AROUND, 1), min(at + _AROUND, len(lines)) + 1)
    text = [f"{i:5} {escape(lines[i - 1].rstrip())}" for i in shown]
    return (
        "<pre>" + "\n".join(f"<mark>{x}</mark>" if i == at else x for i, x in zip(shown, text, strict=True)) + "</pre>"
    )


def _line(code: str) -> str:
    text = code.partition(": ")[2]
    return f"<pre>{escape(text)}</pre>" if text else ""
