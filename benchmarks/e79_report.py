# SPDX-License-Identifier: Apache-2.0
"""Table and picture of an E79 run, made from its JSON alone."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

from . import e79_targets as targets
from .report import (
    OURS,
    Result,
    Section,
    _error,
    _number,
    _title,
    _us,
    _yes,
    document,
    facts,
    is_ours,
    outputs_section,
    sections_of,
)
from .targets import SEPARATELY

_WHAT = {"fwd": "forward", "fb": "forward + backward"}
_STEP = "time, µs a step"


def _shape(row: Result) -> list[str]:
    return [str(row["n"]), str(row["B"]), str(row["T"])]


def _times(row: Result) -> list[str]:
    if "median_us" not in row:
        return [_error(row), ""]
    return [_us(row["median_us"]), f"{_us(row['q1_us'])} to {_us(row['q3_us'])}"]


def _verdict(row: Result, key: str) -> str:
    return f"{_us(row.get(key + '_us'))} {_yes(row.get('met_' + key))}".strip()


def speed_section(result: Result) -> Section:
    rows = []
    for r in result["rows"]:
        peers = "; ".join(f"{name} {_us(us)}" for name, us in r.get("measured_separately_us", {}).items())
        note = f"compiled in {r['compile_s']:.0f} s" if "compile_s" in r else peers
        line = [*_shape(r), _WHAT[r["what"]], _title(r), *_times(r), _verdict(r, "bar"), _verdict(r, "goal"), note]
        rows.append(line)
    headings = ["n", "B", "T", "", "implementation", _STEP, "quartiles", "bar", "goal", SEPARATELY]
    return "Speed: fp32, zero initial states, fixed biases", headings, rows


def _plain_section(title: str, rows: list[Result]) -> Section:
    headings = ["n", "B", "T", "dtype", "bias", "", "implementation", _STEP, "quartiles"]
    lines = [[*_shape(r), r["dtype"], r["bias"], _WHAT[r["what"]], _title(r), *_times(r)] for r in rows]
    return title, headings, lines


def batch_section(result: Result) -> Section:
    title = f"The batch: flat up to one sequence a multiprocessor ({targets.FLAT_UP_TO} on an H200)"
    return _plain_section(title, result["batch"])


def further_section(result: Result) -> Section:
    return _plain_section("Other dtypes and bias modes", result["further"])


def decode_section(result: Result) -> Section:
    return _plain_section(
        "Decoding: one step from given states (a chain: mean of calls in one graph)", result["decode"]
    )


def memory_section(result: Result) -> Section:
    rows = []
    for r in result["memory"]:
        if "error" in r:
            shown = [_error(r), "", ""]
        else:
            shown = [f"{r['peak_above_mb']:.1f}", f"{r['bar_mb']:.0f}", _yes(r["met_bar"])]
        stated = f"{r['formula_mb']:.1f}" if "formula_mb" in r else ""
        rows.append([r["variant"], *_shape(r), shown[0], stated, *shown[1:]])
    headings = ["variant", "n", "B", "T", "MB", "by the formula, MB", "bar", ""]
    return "Peak memory of forward + backward above inputs and outputs", headings, rows


def accuracy_section(result: Result) -> Section:
    rows = []
    for c in result["accuracy"]:
        for name, e in c["errors"].items():
            figures = [f"{_number(e[k]):.2g}" for k in ("relative", "loop", "bar")]
            rows.append([*_shape(c), c["dtype"], name, *figures, e["bias"], _yes(e["met"])])
    headings = ["n", "B", "T", "dtype", "tensor", "error", "fp32 loop's", "bar", "worst bias", ""]
    return "Relative errors against fp64, the worst of every bias mode", headings, rows


def determinism_section(result: Result) -> Section:
    rows = [
        [d["check"], "x".join(map(str, d["shape"])), ", ".join(d["differ"]) or "none", _yes(d["met"])]
        for d in result["determinism"]
    ]
    return "Equal bits", ["check", "n x B x T", "tensors that differ", ""], rows


def cpu_section(result: Result) -> Section:
    rows = []
    for r in result["cpu"]:
        speedup = f"{r['speedup']:.2f} x" if "speedup" in r else ""
        bar = f"{r['bar_speedup']:g} x {_yes(r['met_bar'])}" if "bar_speedup" in r else ""
        rows.append([*_shape(r), _WHAT[r["what"]], _title(r), *_times(r), speedup, bar])
    headings = ["n", "B", "T", "", "implementation", _STEP, "quartiles", "of the loop", "bar"]
    return f"On a CPU, {targets.CPU_THREADS} threads", headings, rows


def rollup_section(result: Result) -> Section:
    rows = []
    for r in result["rollup"]:
        routed = ", ".join(f"{count} {op}" for op, count in r["routed"].items()) or "nothing"
        seconds = [f"{r[k]:.1f}" for k in ("compile_s", "dynamo_s", "pass_s", "loop_call_s")]
        rows.append([*_shape(r), f"{r['nodes']:,}", *seconds, routed, f"{_number(r['worst_difference']):.1g}"])
    headings = [
        "n",
        "B",
        "T",
        "nodes",
        "compile, s",
        "of it Dynamo, s",
        "the pass, s",
        "a call of the loop, s",
        "routed",
    ]
    return "A Python loop compiled with gradients, cold", [*headings, "largest difference"], rows


_SECTIONS = {
    "rows": speed_section,
    "batch": batch_section,
    "further": further_section,
    "decode": decode_section,
    "memory": memory_section,
    "accuracy": accuracy_section,
    "determinism": determinism_section,
    "cpu": cpu_section,
    "rollup": rollup_section,
}


def sections(result: Result) -> Iterator[Section]:
    return sections_of(result, _SECTIONS)


def wrong_outputs(result: Result) -> list[str]:
    """Returns a line for each timed row whose outputs miss a bar against fp64."""
    bad = []
    for r in [r for part in ("rows", "further", "decode", "cpu") for r in result[part]]:
        names = [k for k, e in r.get("errors", {}).items() if not e["met"]]
        if names:
            bad.append(f"{r['what']} {r['variant']} at n = {r['n']}, B = {r['B']}, T = {r['T']}: {', '.join(names)}")
    return bad


def table(result: Result) -> str:
    """Returns the whole run as Markdown."""
    lines = [*facts(result), f"{result['settings']['timing']}; medians; times are {result['unit']}"]
    end = []
    if any("errors" in r for part in ("rows", "further", "decode", "cpu") for r in result[part]):
        fine = "Outputs of every timed row that was compared with the fp64 loop meet their bars."
        end = [outputs_section(wrong_outputs(result), fine)]
    return document("E79", lines, sections(result), *end)


# ---- the picture

_COLOURS = {
    f"{OURS}, ops": "#1b7837",
    f"{OURS}, compiled": "#7fbf7b",
    targets.AUTHORS: "#4575b4",
    targets.COMPILE: "#b2abd2",
    targets.EAGER: "#bdbdbd",
}


def bars(result: Result, what: str, n: int) -> list[tuple[str, bool, float]]:
    """Returns ``(implementation, measured in this run, µs per step)``: ours first, then the others by time."""
    of = [r for r in (*result["rows"], *result["cpu"]) if (r["what"], r["n"]) == (what, n) and "median_us" in r]
    own = [(_title(r), True, r["median_us"]) for r in of if is_ours(r)]
    peers = {name: (name, False, us) for r in of for name, us in r.get("measured_separately_us", {}).items()}
    peers |= {r["variant"]: (r["variant"], True, r["median_us"]) for r in of if not is_ours(r)}
    return own + sorted(peers.values(), key=lambda b: b[2])


def plot(result: Result, path: pathlib.Path) -> None:
    """Plots microseconds per step by n (logarithmic) and by batch; writes no file if nothing was timed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = sorted({r["n"] for r in (*result["rows"], *result["cpu"]) if "median_us" in r})
    if not sizes:
        return
    drawn = {(w, n): bars(result, w, n) for w in _WHAT for n in sizes}
    lines = max(sum(len(drawn[w, n]) + 1.6 for n in sizes) for w in _WHAT)
    batch = [r for r in result["batch"] if "median_us" in r]
    columns = 3 if batch else 2
    figure, axes = pyplot.subplots(1, columns, figsize=(5.2 * columns, 2.0 + 0.2 * lines), squeeze=False)
    low = min(us for of in drawn.values() for _, _, us in of)
    high = max(us for of in drawn.values() for _, _, us in of)
    for axis, what in zip(axes[0], _WHAT, strict=False):
        y, ticks, labels = 0.0, [], []
        for n in sizes:
            axis.text(low / 2, y, f" n = {n}", fontsize=9, fontweight="bold", va="center")
            y += 1
            for name, measured, us in drawn[what, n]:
                colour, hatch = _COLOURS.get(name, "#dddddd"), "" if measured else "////"
                axis.barh(y, us, 0.82, left=0, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
                weight = "bold" if OURS in name else "normal"
                axis.text(us, y, f" {_us(us)}", fontsize=8, va="center", fontweight=weight)
                ticks.append(y)
                labels.append(name)
                y += 1
            y += 0.6
        axis.set_xscale("log")
        axis.set_xlim(low / 2, 4 * high)
        axis.set_yticks(ticks, labels, fontsize=8)
        axis.set_ylim(lines - 0.4, -0.8)
        axis.set_title(_WHAT[what], loc="left", fontsize=10)
        axis.set_xlabel("µs a time step", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    if batch:
        _flatness(axes[0][2], batch)
    device, shape = result["device"]["name"], next(r for r in (*result["rows"], *result["cpu"]))
    title = f"E79 scan on {device}, B = {shape['B']}, T = {shape['T']}, fp32, fixed biases (shorter is faster)"
    hatched = any(not measured for of in drawn.values() for _, measured, _ in of)
    if hatched:
        title += f"\nhatched: {SEPARATELY}, NVIDIA H200"
    if result["notice"]:
        title += f"\n{result['notice']}"
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _flatness(axis: Any, rows: list[Result]) -> None:
    """Plots microseconds per step over the batch, one line per n and kind."""
    for n in sorted({r["n"] for r in rows}):
        for what, style in zip(_WHAT, ("o-", "s--"), strict=True):
            of = sorted((r["B"], r["median_us"]) for r in rows if (r["n"], r["what"]) == (n, what))
            axis.plot(*zip(*of, strict=True), style, label=f"n = {n}, {_WHAT[what]}", markersize=4)
    axis.axvline(targets.FLAT_UP_TO, color="#999999", linewidth=1, linestyle=":")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("sequences (B); dotted: multiprocessors of an H200", fontsize=9)
    axis.set_title("µs a time step by batch", loc="left", fontsize=10)
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
