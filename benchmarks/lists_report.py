# SPDX-License-Identifier: Apache-2.0
"""Tables and the picture of a run of attention over lists of keys, made from its JSON alone."""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from . import lists_targets as targets
from .mhc_report import OURS, Result, Section, _title, _yes, document, facts, is_ours, sections_of
from .selection_report import _WHAT, _time, _timed, _times, _tokens, determinism_section, errors_of, verdict

Points = Sequence[tuple[int, float]]
WRONG = 0.05
"""A relative error against fp64 above which an output in bf16 is not the formula's."""
TIMES = {
    targets.DENSE_MASKED: "times_masked",
    targets.DENSE_ALL: "times_dense",
    targets.GATHER: "times_gather",
    targets.RANGES: "times_ranges",
    targets.TILELANG: "times_tilelang",
    targets.ATTN_GYM: "times_attn_gym",
}
"""How many times as long each peer takes, by its name, in the op's row."""


def _sizes(row: Result) -> list[str]:
    queries = f"{row['B']} x {row['S']}" if row["B"] > 1 else str(row["S"])
    widths = f"{row['Dk']} / {row['Dv']}" + (" in K" if row["shared"] else "")
    return [row["case"], queries, str(row["S_kv"]), str(row["h"]), widths, str(row["n"])]


_SIZES = ["case", "S", "S_kv", "heads", "Dk / Dv", "n"]


def _speed_row(r: Result) -> list[str]:
    time, quartiles, note = _timed(r)
    rate = f"{r['tflops']:.0f}" if "tflops" in r else ""
    verdicts = [_time(r.get("bar_us")), _time(r.get("goal_us")), verdict(r)]
    note = "; ".join(filter(None, (note, r.get("published", ""))))
    return [*_sizes(r), _WHAT[r["what"]], _title(r), time, quartiles, rate, *verdicts, note]


def speed_section(result: Result) -> Section:
    headings = [*_SIZES, "", "implementation", "time", "quartiles", "TFLOP/s", "bar", "goal", "", "note"]
    return "Speed: uniform random causal keys, sorted", headings, [_speed_row(r) for r in result["rows"]]


def _wrong(row: Result) -> str:
    """Returns a note on outputs that are not those of the formula."""
    of = [name for name in ("o", "dq") if not float(row.get(f"{name}_error", 0)) < WRONG]
    return f"**wrong {', '.join(of)}**" if of else ""


def peers_section(result: Result) -> Section:
    rows = []
    for r in result["peers"]:
        ours = next((o for o in result["peers"] if is_ours(o) and (o["case"], o["what"]) == (r["case"], r["what"])), r)
        time, quartiles, note = _timed(r)
        note = "; ".join(filter(None, (note, _wrong(r))))
        times = "" if r is ours else _times(ours, TIMES.get(r["variant"], ""))
        rows.append([*_sizes(r), _WHAT[r["what"]], _title(r), time, quartiles, times, note])
    headings = [*_SIZES, "", "implementation", "time", "quartiles", "x", "note"]
    return f"Other implementations (x: how many times as long as {OURS} next to them)", headings, rows


def errors_section(result: Result) -> Section:
    rows = []
    for c in result["errors"]:
        rows += [[c["case"], c["of"], c["dtype"], str(c["S"]), str(c["n"]), *figures] for figures in errors_of(c)]
    headings = ["case", "compared", "dtype", "S", "n", "tensor", "error", "dense SDPA's", "bar", ""]
    title = "Relative errors against fp64, and those of dense SDPA with a mask in the same dtype on the same lists"
    return title, headings, rows


def memory_section(result: Result) -> Section:
    rows = [
        [*_sizes(r), _WHAT[r["what"]], f"{r['peak_above_mb']:.0f}", f"{r['outputs_mb']:.0f}"] for r in result["memory"]
    ]
    return "Peak memory beyond inputs and outputs", [*_SIZES, "", "peak, MB", "outputs, MB"], rows


# ---- the crossing


def _of(rows: Iterable[Result], **where: Any) -> list[Result]:
    return [r for r in rows if "median_us" in r and all(r[k] == v for k, v in where.items())]


def places(result: Result) -> list[tuple[str, str, int]]:
    """Returns (case, what, tokens) of every part of the crossing."""
    found = {(r["case"], r["what"], r["S"]) for r in result["crossing"]}
    return sorted(found, key=lambda p: (p[0], p[1] == "fb", p[2]))


def curve(result: Result, case: str, what: str, tokens: int) -> tuple[list[tuple[int, float]], Result | None]:
    """Returns the op's times by length of the lists, in µs, and the fastest dense row."""
    rows = _of(result["crossing"], case=case, what=what, S=tokens)
    dense = [r for r in rows if not is_ours(r)]
    points = sorted((r["n"], r["median_us"]) for r in rows if is_ours(r))
    return points, min(dense, key=lambda r: r["median_us"], default=None)


def break_even(points: Points, dense: float) -> float | None:
    """Returns the length up to which lists are faster than dense attention, interpolated logarithmically.

    None if no measured length is faster. If all are, the last one.
    """
    if not points or points[0][1] >= dense:
        return None
    for (n0, t0), (n1, t1) in itertools.pairwise(points):
        if t1 >= dense:
            share = math.log(dense / t0) / math.log(t1 / t0)
            return math.exp(math.log(n0) + share * math.log(n1 / n0))
    return float(points[-1][0])


def up_to(points: Points, dense: Result | None) -> str:
    """Returns the text of :func:`break_even`."""
    if dense is None:
        return ""
    at = break_even(points, dense["median_us"])
    if at is None:
        return "none"
    return f"all, to {points[-1][0]}" if at == points[-1][0] else f"{at:,.0f}"


def crossing_section(result: Result) -> Section:
    counts = sorted({r["n"] for r in result["crossing"] if is_ours(r)})
    rows = []
    for case, what, tokens in places(result):
        points, dense = curve(result, case, what, tokens)
        times = dict(points)
        name = "" if dense is None else f"{dense['variant']}; {dense.get('note', '')}".strip("; ")
        cells = [_time(times.get(n)) for n in counts]
        cells += ["" if dense is None else _time(dense["median_us"]), name, up_to(points, dense)]
        rows.append([case, _WHAT[what], str(tokens), *cells])
    for r in result["crossing"]:
        if "median_us" not in r:
            name = _title(r) + (f", n = {r['n']}" if is_ours(r) else "")
            cells = [""] * len(counts) + [_timed(r)[0], name, ""]
            rows.append([r["case"], _WHAT[r["what"]], str(r["S"]), *cells])
    headings = ["case", "", "tokens", *(f"n = {n}" for n in counts), "dense", "by", "lists are faster up to n"]
    return f"{OURS} by the length of the lists, next to the fastest dense causal attention", headings, rows


_SECTIONS = {
    "rows": speed_section,
    "peers": peers_section,
    "errors": errors_section,
    "determinism": determinism_section,
    "memory": memory_section,
    "crossing": crossing_section,
}


def sections(result: Result) -> Iterator[Section]:
    return sections_of(result, _SECTIONS)


def part_of(result: Result, part: str) -> Result:
    """Returns the run that a part is of: what names its device, versions and commit."""
    found: Result = result.get("origins", {}).get(part, result)
    return found


def _origins(result: Result) -> list[str]:
    """Returns a line for each other run that parts are of, and for a run that this one went on from."""
    of: dict[str, list[str]] = {}
    for part, origin in result.get("origins", {}).items():
        of.setdefault("; ".join(facts(origin | {"complete": True})), []).append(part)
    lines = [f"of another run: {', '.join(parts)}: {line}" for line, parts in of.items()]
    return lines + [f"went on from the run of {date}" for date in result.get("resumed", ())]


def table(result: Result) -> str:
    """Returns the whole run as Markdown."""
    lines = [*facts(result), *_origins(result), f"{result['settings']['timing']}; medians"]
    known = {r["case"] for r in result["rows"]}
    lines += [f"{name}: {meaning}" for name, meaning in targets.MEANINGS.items() if name in known]
    lines.append("TFLOP/s: 2 products of every listed pair forward, 7 forward and backward")
    missed = [f"{r['case']}, {_WHAT[r['what']]}" for r in result["rows"] if r.get("met_bar") is False]
    if missed:
        lines.append(f"bars that are {_yes(False)}: {'; '.join(missed)}")
    return document("Attention over lists of keys", lines, sections(result))


# ---- the picture

_COLOURS = ("#7fbf7b", "#1b7837", "#00441b", "#762a83", "#9970ab")


def plot(result: Result, path: pathlib.Path) -> None:
    """Plots times by length of the lists, dense attention as horizontal lines; writes no file if nothing was timed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = places(result)
    if not any(curve(result, *place)[0] for place in found):
        return
    names = sorted({case for case, _, _ in found})
    figure, axes = pyplot.subplots(len(names), 2, figsize=(11, 1.2 + 3.6 * len(names)), squeeze=False)
    for line, case in zip(axes, names, strict=True):
        for axis, what in zip(line, _WHAT, strict=True):
            _draw(axis, result, case, what, [t for c, w, t in found if (c, w) == (case, what)])
    heads = max(r["h"] for r in result["crossing"])
    device = part_of(result, "crossing")["device"]["name"]
    title = f"Attention over lists of keys on {device}, {heads} heads (dashed: dense causal attention)"
    figure.suptitle(title + (f"\n{result['notice']}" if result["notice"] else ""), fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw(axis: Any, result: Result, case: str, what: str, tokens: list[int]) -> None:
    ticks: set[int] = set()
    for colour, length in zip(_COLOURS, tokens, strict=False):
        points, dense = curve(result, case, what, length)
        ticks |= {n for n, _ in points}
        if points:
            x, y = zip(*points, strict=True)
            label = f"{_tokens(length)} tokens"
            axis.plot(x, [us / 1e3 for us in y], "o-", color=colour, label=label, markersize=4)
        if dense is not None:
            axis.axhline(dense["median_us"] / 1e3, color=colour, linewidth=1, linestyle="--")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sorted(ticks), [str(n) for n in sorted(ticks)])
    axis.set_title(f"{_WHAT[what]}, {case}, ms", loc="left", fontsize=10)
    axis.set_xlabel("keys a query", fontsize=9)
    axis.legend(frameon=False, fontsize=8)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
