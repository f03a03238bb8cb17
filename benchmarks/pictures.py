# SPDX-License-Identifier: Apache-2.0
"""Pictures of results: what an operator takes, and what it saves, next to what is used without it.

Each picture holds its own figures, so that a test sees whether they are those of the results.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from . import index_cases, report
from .e79_cases import AUTHORS, MEMORY_SHAPE
from .mhc_cases import COMPILE
from .pages import RESULTS, Results, _by_variant, _measured, _row, _short, read
from .report import SEPARATELY
from .selection_cases import DENSE, FLA

OURS = "this package"
SEPARATE, COMPUTED = f"* {SEPARATELY}", "hatched: computed, not measured"
FIGURES = "Description"
"""The text in a picture's file that holds what was drawn."""
LONGEST = 30.0
"""Bars of more times the length of ours are cut off."""


@dataclasses.dataclass(frozen=True)
class Bar:
    """A figure, and how it was found if not in the run that the others are of."""

    name: str
    value: float
    found: str = ""

    def __str__(self) -> str:
        return f"{self.name}{'*' if self.found == SEPARATE else ''}"


@dataclasses.dataclass(frozen=True)
class Group:
    """What is compared: bars, ours first. ``floor`` is the least that anything could take."""

    title: str
    unit: str
    bars: Sequence[Bar]
    floor: float | None = None

    def times(self, bar: Bar) -> float:
        return bar.value / self.bars[0].value

    def written(self, bar: Bar) -> str:
        """Returns a figure with its unit and, of others, how many times ours it is."""
        return f"{_short(bar.value)} {self.unit}" + ("" if bar is self.bars[0] else f" ({self.times(bar):.3g} x)")

    def __str__(self) -> str:
        ours, *others = self.bars
        said = [f"{b} {self.written(b)}" for b in others]
        return f"{self.title}: {self.written(ours)}; {', '.join(said)}."


@dataclasses.dataclass(frozen=True)
class Picture:
    """Groups, and the device, versions and commits that they were measured with."""

    groups: Sequence[Group]
    measured: str

    def notes(self) -> list[str]:
        """Returns what marks in the picture mean."""
        found = dict.fromkeys(b.found for g in self.groups for b in g.bars if b.found)
        return [*found, *(["dashed: every byte moved once"] if any(g.floor for g in self.groups) else [])]

    def peers(self) -> list[str]:
        return [*dict.fromkeys(b.name for g in self.groups for b in g.bars[1:])]

    def figures(self) -> str:
        """Returns all that is drawn, as JSON."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)


# ---- what is drawn


def _whole_model(results: Results, file: str, unit: str, title: str, **where: str) -> Group:
    of = {"ms": "median_ms", "GiB": "peak_gib"}[unit]
    values = [_row(results(file)["rows"], variant=v, **where)[of] for v in ("mhc_inductor", COMPILE)]
    return Group(title, unit, [Bar(OURS, values[0]), Bar(COMPILE, values[1])])


def _mhc_ops(results: Results) -> Group:
    ours, compiled = (_row(results("mhc")["rows"], what="fb", dim=4096, variant=v) for v in ("ops", COMPILE))
    peer = Bar("TileKernels", ours["measured_separately_us"]["TileKernels"], SEPARATE)
    bars = [Bar(OURS, ours["median_us"]), peer, Bar(COMPILE, compiled["median_us"])]
    return Group("mHC, forward and backward, 8192 tokens, D = 4096", "µs", bars, ours["floor_us"])


def _e79_scan(results: Results, what: str, title: str, **peers: str) -> Group:
    ours = _row(results("e79")["rows"], what=what, n=64, variant="ops")
    others = [
        Bar(name.replace("_", " "), ours["measured_separately_us"][peer], SEPARATE) for name, peer in peers.items()
    ]
    return Group(title, "µs", [Bar(OURS, ours["median_us"]), *others])


def _selection_blocks(results: Results) -> Group:
    times = _by_variant(results("selection")["rows"], "c1", "fb")
    bars = [Bar(OURS, times["ops"]), Bar("dense, cuDNN", times[DENSE]), Bar(FLA, times[FLA])]
    return Group("Selection attention, forward and backward, 16384 tokens", "ms", bars)


def overview(results: Results) -> Iterator[Group]:
    case = "deepseek_v4-2x2048-training"
    yield _whole_model(results, "sparse_models", "ms", "DeepSeek-V4, training step", case=case)
    yield _mhc_ops(results)
    yield _e79_scan(results, "fb", "E79, one step, forward and backward, n = 64", **{"authors' CUDA": AUTHORS})
    yield _selection_blocks(results)


def mhc(results: Results) -> Iterator[Group]:
    yield _mhc_ops(results)
    yield _whole_model(results, "deepseek_v4", "ms", "DeepSeek-V4, training step", part="training")
    yield _whole_model(results, "deepseek_v4", "GiB", "Peak memory of this step", part="training")


def e79(results: Results) -> Iterator[Group]:
    n, batch, steps = MEMORY_SHAPE
    loop = {"torch.compile of the loop": "torch.compile of the loop"}
    yield _e79_scan(results, "fwd", "E79, one step, forward, n = 64", **{"authors' CUDA": AUTHORS}, **loop)
    python = {"Python loop": "Python loop"}
    yield _e79_scan(
        results, "fb", "One step, forward and backward", **{"authors' CUDA, wrong gradients": AUTHORS}, **python
    )
    ours = _row(results("e79")["memory"], variant="ops", n=n, B=batch, T=steps)
    kept = Bar("states that a loop keeps", 8 * n * n * batch * steps / 1e6, COMPUTED)
    title = f"Memory of training beyond inputs and outputs, {steps} steps of {batch} sequences"
    yield Group(title, "MB", [Bar(OURS, ours["peak_above_mb"]), kept])


def selection(results: Results) -> Iterator[Group]:
    case = "deepseek_v32-1x16384-training"
    yield _selection_blocks(results)
    title = "Lists of keys and their index: DeepSeek-V3.2, training step, 16384 tokens"
    yield _whole_model(results, "sparse_models", "ms", title, case=case)
    yield _whole_model(results, "sparse_models", "GiB", "Peak memory of this step", case=case)


def index(results: Results) -> Iterator[Group]:
    long, find = index_cases.LONG, index_cases.BOTH
    for shape in index_cases.SHAPES:
        ours, compiled = (
            _row(results("index")["rows"], name=shape.name, what=find, variant=v) for v in ("ops", index_cases.COMPILE)
        )
        title = f"The best {shape.topk} of {shape.tokens} keys for each query, {shape.heads} heads"
        yield Group(title, "ms", [Bar(OURS, ours["median_ms"]), Bar(COMPILE, compiled["median_ms"])])
    ours = _row(results("index")["memory"], name=long.name)
    scores = Bar("all scores, fp32", 4 * long.tokens**2 / 1e9, COMPUTED)
    title = f"Memory beyond inputs and output, {long.tokens} queries and keys"
    yield Group(title, "GB", [Bar(OURS, ours["peak_above_mb"] / 1e3), scores])


PICTURES: Mapping[str, tuple[Callable[[Results], Iterator[Group]], tuple[str, ...]]] = {
    "overview": (overview, ("sparse_models", "mhc", "e79", "selection")),
    "operator-mhc": (mhc, ("mhc", "deepseek_v4")),
    "operator-e79": (e79, ("e79",)),
    "operator-selection": (selection, ("selection", "sparse_models")),
    "operator-index": (index, ("index",)),
}
"""By the name of its file: the groups of a picture, and the results that they are of."""


def picture(name: str, results: Results = read) -> Picture:
    groups, files = PICTURES[name]
    cards: dict[str, list[str]] = {}
    for file in files:
        card, _, commit = _measured(results(file)).rpartition(", ")
        cards.setdefault(card, []).append(commit)
    measured = (f"{card}, {' and '.join(dict.fromkeys(commits))}" for card, commits in cards.items())
    return Picture([*groups(results)], "; ".join(measured))


def path(name: str, folder: pathlib.Path = RESULTS) -> pathlib.Path:
    return folder / f"{name}.png"


def block(name: str, results: Results) -> str:
    """Returns a page's picture, and its figures in words."""
    of = picture(name, results)
    alt = f"Bars: time and memory of {OURS} next to {', '.join(of.peers())}"
    image = f"![{alt}](../../benchmarks/results/{name}.png)"
    notes = "\n".join(f"{note[0].upper()}{note[1:]}." for note in (*of.notes(), of.measured))
    figures = "\n".join(f"- {group}" for group in of.groups)
    return "\n\n".join([image, *(text.replace("*", "\\*") for text in (figures, notes))])


# ---- drawing


def draw(of: Picture, to: pathlib.Path) -> None:
    """Draws bars as multiples of ours: times in green, memory in blue. Raises ImportError without matplotlib."""
    pyplot = report.pyplot()
    longest = max(g.times(b) for g in of.groups for b in g.bars if g.times(b) <= LONGEST)
    lines = sum(len(g.bars) + 1.5 for g in of.groups)
    figure, axis = pyplot.subplots(figsize=(8.5, 1.0 + 0.26 * lines))
    y, ticks = 0.0, {}
    for group in of.groups:
        axis.text(0, y, group.title, fontsize=10.5, fontweight="bold", va="center")
        for bar in group.bars:
            y += 1
            _bar(axis, y, group, bar, longest)
            ticks[y] = str(bar)
        if group.floor:
            at = y - len(group.bars) + 1
            axis.plot([group.floor / group.bars[0].value] * 2, [at - 0.4, at + 0.4], "k--", linewidth=1.2)
        y += 1.5
    axis.set_yticks([*ticks], [*ticks.values()], fontsize=10)
    axis.set_ylim(y - 0.6, -0.8)
    axis.set_xlim(0, 1.25 * longest)
    axis.tick_params(left=False)
    axis.locator_params("x", integer=True)
    axis.set_xlabel("\n".join([f"multiples of {OURS}; shorter is better", "; ".join(of.notes())]).strip(), fontsize=9)
    report.plain(axis)
    axis.set_title(f"One {of.measured}", fontsize=9, loc="left", color="#555555")
    figure.tight_layout()
    figure.savefig(to, dpi=200, bbox_inches="tight", metadata={FIGURES: of.figures()})
    pyplot.close(figure)


def _bar(axis: Any, y: float, group: Group, bar: Bar, longest: float) -> None:
    """Draws one bar, which two white strokes cut where it is too long, and writes its figure."""
    times = group.times(bar)
    length = min(times, 1.1 * longest)
    colour = "#bdbdbd" if bar.name != OURS else "#1b7837" if group.unit in ("µs", "ms") else "#2166ac"
    hatch = "////" if bar.found == COMPUTED else ""
    axis.barh(y, length, 0.8, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
    for cut in (0.94, 0.96) if length < times else ():
        axis.plot([(cut - 0.004) * length, (cut + 0.004) * length], [y + 0.45, y - 0.45], "w-", linewidth=2)
    weight = "bold" if bar.name == OURS else "normal"
    axis.text(length + 0.01 * longest, y, group.written(bar), fontsize=10, va="center", fontweight=weight)
