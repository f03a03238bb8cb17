# SPDX-License-Identifier: Apache-2.0
"""Tables, verdicts and pictures of runs, made from their JSON alone.

A family has a :class:`Table` for each list of its result, and a function for each picture; the rest is here.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from . import running

Result = dict[str, Any]
Row = dict[str, Any]
OURS = "mhc_inductor"
NOT_COMPLETE = "this run is not complete: a part of it failed, or its budget of seconds was spent before its last cell"
SEPARATELY = "measured separately, 2026-11-21"
"""How peers' times are labelled that another run of ours measured: their authors published none of them."""
WHAT = {"fwd": "forward", "fb": "forward + backward"}
COLOURS = {
    f"{OURS}, ops": "#1b7837",
    f"{OURS}, compiled": "#7fbf7b",
    f"{OURS}, ops, from block indices": "#7fbf7b",
    f"{OURS}, ops, one after the other": "#a6dba0",
    "TransformerEngine": "#4575b4",
    "the authors' CUDA": "#4575b4",
    "TileKernels": "#91bfdb",
    "Liger": "#fc8d59",
    "flash-linear-attention": "#fc8d59",
    "torch.compile": "#b2abd2",
    "gather + SDPA": "#b2abd2",
    "dense SDPA with a mask": "#b2abd2",
    "dense causal SDPA (cuDNN)": "#bdbdbd",
    "Python loop": "#bdbdbd",
    "eager": "#bdbdbd",
}
"""Colours of pictures, by implementation or by what its name begins with."""

# ---- cells


def us(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def time(value: float | None) -> str:
    """Formats a time: microseconds below a thousand, milliseconds above, seconds from one on."""
    if value is None:
        return ""
    if value >= 999.5e3:
        return f"{value / 1e6:.3g} s"
    return f"{us(value)} µs" if value < 1000 else f"{value / 1000:.3g} ms"


def tokens(n: int) -> str:
    return f"{n // 1024}K" if n % 1024 == 0 else str(n)


def yes(value: bool | None) -> str:
    return "" if value is None else "met" if value else "**not met**"


def verdict(row: Row) -> str:
    """Returns the best target that a row with a bar reached: its goal, its bar, or neither."""
    if row.get("met_bar") is None:
        return ""
    return "goal met" if row["met_bar"] and row.get("met_goal") else yes(row["met_bar"])


def error(row: Row) -> str:
    """Returns why a row has no time: its reason, if one is known, or the first line of what failed."""
    if "reason" in row:
        return str(row["reason"])
    return "failed: " + row["error"].splitlines()[0].replace("|", "/")[:80]


def is_ours(row: Row) -> bool:
    return row["variant"].split(",")[0] in ("ops", "compiled")


def title(row: Row) -> str:
    return f"{OURS}, {row['variant']}" if is_ours(row) else row["variant"]


def timed(row: Row, form: Callable[[float | None], str] = time) -> list[str]:
    """Returns the median and the quartiles of a row, or why there are none."""
    if "median_us" not in row:
        return [error(row), ""]
    return [form(row["median_us"]), f"{form(row['q1_us'])} to {form(row['q3_us'])}"]


def note(row: Row) -> str:
    """Returns what is to be known of a row's time, and what its table has ``also`` to say."""
    notes = [row.get("note", ""), "called, not replayed" if row.get("captured") is False else ""]
    notes.append("" if row.get("finite", True) else "**not finite**")
    notes.append(f"**not checked**: {error(row)}" if "error" in row else "")
    return "; ".join(filter(None, (*(notes if "median_us" in row else ()), row.get("also", ""))))


def each_error(row: Row) -> list[Row]:
    """Returns a row for each tensor that a row has an error of."""
    return [{k: v for k, v in row.items() if k != "errors"} | {"tensor": k} | e for k, e in row["errors"].items()]


def _verdict_us(row: Row, key: str) -> str:
    return f"{us(row.get(f'{key}_us'))} {yes(row.get(f'met_{key}'))}".strip()


FIELDS: dict[str, Callable[[Row], str]] = {
    "kind": lambda r: WHAT[r["what"]],
    "title": title,
    "time": lambda r: timed(r)[0],
    "quartiles": lambda r: timed(r)[1],
    "us": lambda r: timed(r, us)[0],
    "us_quartiles": lambda r: timed(r, us)[1],
    "us_bar": lambda r: _verdict_us(r, "bar"),
    "us_goal": lambda r: _verdict_us(r, "goal"),
    "verdict": verdict,
    "yes": lambda r: yes(r.get("met")),
    "yes_bar": lambda r: yes(r.get("met_bar")),
    "yes_goal": lambda r: yes(r.get("met_goal")),
    "note": note,
    "peak": lambda r: error(r) if "error" in r else f"{r['peak_above_mb']:.1f}",
    "peak_bar": lambda r: "" if "error" in r else f"{r['bar_mb']:.0f}",
    "sequences": lambda r: f"{r['B']} x {r['S']}" if r["B"] > 1 else str(r["S"]),
    "in_k": lambda r: " in K" if r["shared"] else "",
    "unequal": lambda r: ", ".join(r["differ"]) or "none",
    "sizes": lambda r: "x".join(map(str, r["shape"])),
}
"""What a cell may say of a row, in addition to the row's own fields."""

# ---- tables


class _Value:
    """A value in a cell: nothing if there is none; ``us`` and ``time`` are formats of microseconds; a dict is counts."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __format__(self, form: str) -> str:
        if form in ("us", "time"):
            return us(self.value) if form == "us" else time(self.value)
        if isinstance(self.value, dict):
            return ", ".join(f"{n} {name}" for name, n in self.value.items()) or "none"
        if self.value is None or not form:
            return "" if self.value is None else str(self.value)
        return format(float(self.value) if isinstance(self.value, str) else self.value, form)  # "nan", "inf"


@dataclasses.dataclass
class _Fields:
    row: Row

    def __getitem__(self, key: str) -> _Value:
        return _Value(FIELDS[key](self.row) if key in FIELDS else self.row.get(key))


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a list of rows: its title, its headings and its cells, with | between them.

    A cell is a format string of the fields of a row. ``each`` returns the rows that one row of the list stands for.
    """

    title: str | Callable[[Result], str]
    headings: str
    cells: str
    each: Callable[[Row], list[Row]] = lambda row: [row]

    def markdown(self, rows: Iterable[Row]) -> str:
        """Returns the table of rows, nothing if there is none."""
        cells = self.cells.split("|")
        lines = [[cell.format_map(_Fields(r)).strip() for cell in cells] for row in rows for r in self.each(row)]
        return markdown(self.headings.split("|"), lines) if lines else ""

    def section(self, result: Result, rows: Iterable[Row]) -> str:
        """Returns the table below its title, nothing if there are no rows."""
        return section(self.title(result) if callable(self.title) else self.title, self.markdown(rows))


def determinism(sizes: str) -> Table:
    """Returns the table of checks for equal bits."""
    return Table("Equal bits", f"check|{sizes}|tensors that differ|", "{check}|{sizes}|{unequal}|{yes}")


TWO_RUNS = Table("Equal bits in two runs", "case|tensors that differ|", "{case}|{unequal}|{yes}")
ERROR = "{tensor}|{relative:.3g}|{dense:.3g}|{bar:.3g}|{yes}"
"""Cells of an error next to that of dense attention."""


def markdown(headings: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "| " + " | ".join("---" for _ in headings) + " |"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def section(title: str, text: str) -> str:
    return f"## {title}\n\n{text}" if text else ""


Makers = Mapping[str, "Table | Callable[[Result], str]"]


def sections_of(result: Result, makers: Makers) -> Iterator[str]:
    """Yields a section for each non-empty list of the result, in the order of ``makers``."""
    for part, make in makers.items():
        if result.get(part):
            yield make.section(result, result[part]) if isinstance(make, Table) else make(result)


def outputs_section(rows: Iterable[Row], where: str, fine: str) -> str:
    """Returns a section with the timed outputs that miss a bar against fp64, or ``fine`` if none does; nothing without errors."""
    checked = [r for r in rows if "errors" in r]
    missed = ((r, [k for k, e in r["errors"].items() if not e["met"]]) for r in checked)
    bad = [f"- {r['what']} {r['variant']} at {where.format_map(r)}: {', '.join(names)}" for r, names in missed if names]
    return section("Outputs of the timed calls", "\n".join(bad) or fine) if checked else ""


def document(title: str, lines: Iterable[str], *parts: str) -> str:
    """Returns a page of Markdown: the title, a list of ``lines``, and the parts that are not empty."""
    return "\n\n".join(filter(None, [f"# {title}", "\n".join(f"- {line}" for line in lines), *parts])) + "\n"


def commit_of(result: Result) -> str:
    """Returns the commit that a run was made at, and whether the tree differed from it."""
    return (result["commit"] or "unknown")[:12] + (" with local changes" if result["dirty"] else "")


def sources_of(result: Result) -> str:
    """Returns the first digits of the hash of a run's kernel sources."""
    return (result["kernel_sources_sha256"] or "?")[:12]


def facts(result: Result) -> list[str]:
    """Returns the lines above the tables: device, versions, commit, bandwidth, notices."""
    v, d = result["versions"], result["device"]
    lines = [
        f"{d['name']}, torch {v['torch']}, triton {v['triton']}, Python {v['python']}, driver {v['driver']}",
        f"commit {commit_of(result)}, sources {sources_of(result)}, {result['date']}",
    ]
    if "copy" in result:
        c = result["copy"]
        lines.append(
            f"a copy of {c['bytes'] / 2e9:.2f} GB moves {c['tb_per_s']:.2f} TB/s here; floors are bytes over "
            f"4.3 TB/s; the smallest graph takes {us(c['smallest_graph_us'])} µs"
        )
    if result.get("notice"):
        lines.insert(0, result["notice"])
    lines += [f"skipped: {name}: {why}" for name, why in result.get("skipped", {}).items()]
    if not result.get("complete"):
        lines.append("this run did not come to its end" if "seconds" not in result else NOT_COMPLETE)
    return lines


def timing_of(result: Result) -> str:
    return f"{result['settings']['timing']}; medians"


def writer(table: Callable[[Result], str], **plots: Callable[[Result, pathlib.Path], None]) -> Callable[..., None]:
    """Returns ``write(result, path)``: it writes the JSON and, next to it, the table and the pictures.

    A picture called ``plot`` gets the path's name, another also its own. Without matplotlib there are none.
    """

    def write(result: Result, path: pathlib.Path) -> None:
        running.save(result, path)
        stored = json.loads(path.read_text())
        path.with_suffix(".md").write_text(table(stored))
        try:
            for name, draw in plots.items():
                draw(stored, path.with_name(path.stem + ("" if name == "plot" else f"-{name}") + ".png"))
        except ImportError as e:
            print(f"no picture: {e}")

    return write


# ---- pictures


@dataclasses.dataclass(frozen=True)
class Bar:
    """A bar of a picture: the implementation, its time, the least that its bytes allow, and if another run measured it."""

    name: str
    us: float
    floor: float = 0.0
    separate: bool = False
    label: str = ""


def colour(name: str) -> str:
    begins = next((c for known, c in COLOURS.items() if name.startswith(known)), "#dddddd")
    return COLOURS.get(name, begins)


def bars(rows: Iterable[Row], prefix: bool = False) -> list[Bar]:
    """Returns the bars of rows of one case: ours first, then the others by time.

    A time of this run replaces a separate one of the same name or, with ``prefix``, of a name that begins so.
    """
    of = [r for r in rows if "median_us" in r]
    found = [(r, Bar(title(r), r["median_us"], r.get("floor_us", 0.0))) for r in of]
    others = {b.name: b for r, b in found if not is_ours(r)}
    measured = [*others]
    for r in of:
        for peer, us in r.get("measured_separately_us", {}).items():
            if not any(name.startswith(peer) if prefix else name == peer for name in measured):
                others[peer] = Bar(peer, us, r.get("floor_us", 0.0), True)
    return [b for r, b in found if is_ours(r)] + sorted(others.values(), key=lambda b: b.us)


def pyplot() -> Any:
    """Returns matplotlib's pyplot, which draws into files. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def finish(figure: Any, name: str, path: pathlib.Path, notice: str | None, above: float | None = None) -> None:
    figure.suptitle(f"{name}\n{notice}" if notice else name, fontsize=11)
    figure.tight_layout(**({} if above is None else {"rect": (0, above / figure.get_figheight(), 1, 1)}))
    figure.savefig(path, dpi=150)
    pyplot().close(figure)


def plain(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)


def height(groups: Iterable[Sequence[Bar]]) -> float:
    """Returns the height of groups of bars, in bars."""
    return sum(len(group) + 1.6 for group in groups if group)


def draw_bars(
    axis: Any,
    groups: Mapping[str, Sequence[Bar]],
    lines: float,
    start: float = 0.0,
    length: Callable[[Bar], float] = lambda b: b.us,
    said: Callable[[Bar], str] = lambda b: f" {us(b.us)}",
    **style: Any,
) -> None:
    """Draws groups of bars below each other, each with its title; ``lines`` is the height of the picture in bars."""
    y, ticks = 0.0, {}
    for name, group in groups.items():
        if not group:
            continue
        axis.text(start, y, name, fontsize=9, fontweight="bold", va="center")
        y += 1
        for b in group:
            hatch = "////" if b.separate else ""
            axis.barh(y, length(b), 0.82, color=colour(b.name), hatch=hatch, edgecolor="white", linewidth=0)
            weight = "bold" if OURS in b.name else "normal"
            at = length(b) + (1 if style else 0)
            axis.text(at, y, said(b), fontsize=8, va="center", fontweight=weight, **style)
            ticks[y] = b.label or b.name
            y += 1
        y += 0.6
    axis.set_yticks([*ticks], [*ticks.values()], fontsize=8.5 if style else 8)
    axis.set_ylim(lines - 0.4, -0.8)
    plain(axis)


def plot_times(
    result: Result,
    path: pathlib.Path,
    name: str,
    drawn: Mapping[str, Mapping[str, Sequence[Bar]]],
    xlabel: str,
    said: Callable[[Bar], str],
    longest: float,
    width: float,
    further: Callable[[Any], None] | None = None,
) -> None:
    """Draws bars of times on a logarithmic scale, forward and forward + backward next to each other.

    The scale ends at ``longest`` times the longest. ``further`` draws another axis; each is ``width`` inches wide.
    """
    every = [b for groups in drawn.values() for group in groups.values() for b in group]
    edges = (min(b.us for b in every) / 2, longest * max(b.us for b in every))
    lines, columns = max(height(groups.values()) for groups in drawn.values()), 3 if further else 2
    figure, axes = pyplot().subplots(1, columns, figsize=(width * columns, 2.0 + 0.2 * lines), squeeze=False)
    for axis, (what, groups) in zip(axes[0], drawn.items(), strict=False):
        draw_bars(axis, {f" {title}": group for title, group in groups.items()}, lines, edges[0], said=said)
        axis.set_xscale("log")
        axis.set_xlim(*edges)
        axis.set_title(WHAT[what], loc="left", fontsize=10)
        axis.set_xlabel(xlabel, fontsize=9)
    if further:
        further(axes[0][2])
    separate = f"\nhatched: {SEPARATELY}, NVIDIA H200" if any(b.separate for b in every) else ""
    finish(figure, name + separate, path, result["notice"])


def draw_curves(axis: Any, name: str, xlabel: str, ticks: Mapping[int, str]) -> None:
    """Finishes an axis of curves, both scales logarithmic."""
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks([*ticks], [*ticks.values()])
    axis.set_title(name, loc="left", fontsize=10)
    axis.set_xlabel(xlabel, fontsize=9)
    axis.legend(frameon=False, fontsize=8)
    axis.grid(alpha=0.25)
    plain(axis)
