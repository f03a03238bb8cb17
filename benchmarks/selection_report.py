# SPDX-License-Identifier: Apache-2.0
"""Tables and pictures of a selection-attention run, made from its JSON alone."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterator

from . import selection_targets as targets
from .mhc_report import OURS, Result, Section, _error, _number, _title, _us, _yes, document, facts, is_ours, sections_of
from .targets import SEPARATELY

_WHAT = {"fwd": "forward", "fb": "forward + backward"}


def _time(us: float | None) -> str:
    """Formats a time: microseconds below a thousand, milliseconds above, seconds from one on."""
    if us is None:
        return ""
    if us >= 999.5e3:
        return f"{us / 1e6:.3g} s"
    return f"{_us(us)} µs" if us < 1000 else f"{us / 1000:.3g} ms"


def verdict(row: Result) -> str:
    """Returns the best target that a row with a bar reached: its goal, its bar, or neither."""
    if row.get("met_bar") is None:
        return ""
    return "goal met" if row["met_bar"] and row.get("met_goal") else _yes(row["met_bar"])


def _shape(row: Result) -> list[str]:
    size = f"{row['B']} x {row['S']}" if row["B"] > 1 else str(row["S"])
    return [row["case"], row["select"], size, str(row["S_kv"]), f"{row['G']} x {row['h']}", _WHAT[row["what"]]]


def _timed(row: Result) -> list[str]:
    if "median_us" not in row:
        return [_error(row), "", ""]
    notes = [row["note"]] if row.get("note") else []
    notes += ["called, not replayed"] if row.get("captured") is False else []
    notes += [] if row.get("finite", True) else ["**not finite**"]
    notes += [f"**not checked**: {_error(row)}"] if "error" in row else []
    return [_time(row["median_us"]), f"{_time(row['q1_us'])} to {_time(row['q3_us'])}", "; ".join(notes)]


def _times(row: Result, key: str) -> str:
    return f"{row[key]:.2f}" if key in row else ""


def speed_section(result: Result) -> Section:
    rows = []
    for r in result["rows"]:
        time, quartiles, note = _timed(r)
        separate = "; ".join(f"{name} {_time(us)}" for name, us in r.get("measured_separately_us", {}).items())
        verdicts = [_time(r.get("bar_us")), _time(r.get("goal_us")), verdict(r)]
        others = [_times(r, k) for k in ("times_dense", "times_fla", "times_gather")]
        note = "; ".join(filter(None, (note, separate and f"{SEPARATELY}: {separate}")))
        rows.append([*_shape(r), _title(r), time, quartiles, *verdicts, *others, note])
    headings = ["case", "selection", "S", "S_kv", "G x h", "", "implementation", "time", "quartiles", "bar", "goal", ""]
    headings += ["x dense", "x fla", "x gather", "note"]
    return "Speed: bf16, D = 128 (x dense: how many times faster than dense attention of the same run)", headings, rows


def crossing_section(result: Result) -> Section:
    rows = []
    for r in result["crossing"]:
        if is_ours(r):
            dense = next((d for d in result["crossing"] if _same(d, r) and d["variant"] == targets.DENSE), None)
            other = _time(dense.get("median_us")) if dense else ""
            rows.append([str(r["S"]), str(r["h"]), _WHAT[r["what"]], _timed(r)[0], other, _times(r, "times_dense")])
    rows.sort(key=lambda row: (row[2], int(row[1]), int(row[0])))
    headings = ["tokens", "heads a group", "", OURS, targets.DENSE, "x dense"]
    return "Where sparse passes dense: corr, 16 blocks of 64 a query", headings, rows


def _same(a: Result, b: Result) -> bool:
    return all(a[k] == b[k] for k in ("S", "h", "what"))


def errors_of(found: Result) -> Iterator[list[str]]:
    """Yields, for each tensor, its name, its error, dense SDPA's, the bar, and whether it is met."""
    for name, e in found["errors"].items():
        figures = [f"{_number(e[k]):.3g}" if k in e else "" for k in ("relative", "dense", "bar")]
        yield [name, *figures, _yes(e.get("met"))]


def errors_section(result: Result) -> Section:
    rows = []
    for c in result["errors"]:
        start = [c["case"], c["select"], c["dtype"], f"{c['logits_std']:g}", str(c["queries"])]
        rows += [[*start, *figures] for figures in errors_of(c)]
    headings = ["case", "selection", "dtype", "logits' std", "queries", "tensor", "error", "dense SDPA's", "bar", ""]
    title = "Relative errors against fp64, and those of dense SDPA with a mask in the same dtype on the same selection"
    return title, headings, rows


def determinism_section(result: Result) -> Section:
    rows = [[d["case"], ", ".join(d["differ"]) or "none", _yes(d["met"])] for d in result["determinism"]]
    return "Equal bits in two runs", ["case", "tensors that differ", ""], rows


def memory_section(result: Result) -> Section:
    rows = [
        [
            r["case"],
            f"{r['peak_mb']:.0f}",
            f"{r['tensors_mb']:.0f}",
            f"{r['ratio']:.3f}",
            f"{r['bar']:g}",
            _yes(r["met"]),
        ]
        for r in result["memory"]
    ]
    headings = ["case", "peak, MB", "Q, K, V, O and gradients, MB", "ratio", "bar", ""]
    return "Peak memory of a training step, its inputs included", headings, rows


def layers_section(result: Result) -> Section:
    rows = []
    for r in result["layers"]:
        time, quartiles, _ = _timed(r)
        memory = f"{r['peak_above_mb']:.0f}" if "peak_above_mb" in r else ""
        heads = f"{r['heads']} in {r['groups']}"
        rows.append([str(r["tokens"]), str(r["dim"]), heads, r["variant"], r["what"], time, quartiles, memory])
    headings = ["tokens", "width", "heads", "layer", "", "time", "quartiles", "peak above inputs and outputs, MB"]
    return "A whole layer, projections included, eager: D = 128, 16 blocks of 64, window 512", headings, rows


def cpu_section(result: Result) -> Section:
    rows = []
    for r in result["cpu"]:
        time, quartiles, note = _timed(r)
        rows.append([*_shape(r), str(r["D"]), r["dtype"], _title(r), time, quartiles, _times(r, "times_masked"), note])
    headings = ["case", "selection", "S", "S_kv", "G x h", "", "D", "dtype", "implementation", "time", "quartiles"]
    return f"On a CPU, {targets.CPU_THREADS} threads", [*headings, "x masked", "note"], rows


def cpu_dense_section(result: Result) -> Section:
    rows = []
    for r in result["cpu_dense"]:
        time, quartiles, _ = _timed(r)
        error = f"{_number(r['o_error']):.1e}" if "o_error" in r else ""
        shape = [r["case"], str(r["S"]), f"{r['G']} x {r['h']}", str(r["D"]), r["dtype"], _WHAT[r["what"]], r["select"]]
        rows.append([*shape, _title(r), time, quartiles, _times(r, "times_dense"), error])
    headings = ["case", "tokens", "G x h", "D", "dtype", "", "selection", "implementation", "time", "quartiles"]
    title = (
        f"On a CPU next to dense attention, {targets.CPU_THREADS} threads (x dense: the median of the rounds' ratios)"
    )
    return title, [*headings, "x dense", "error of o"], rows


def cpu_errors_section(result: Result) -> Section:
    _, headings, rows = errors_section({"errors": result["cpu_errors"]})
    title = "Relative errors against fp64 on a CPU, and those of dense SDPA with a mask in the same dtype"
    return title, headings, rows


_SECTIONS = {
    "rows": speed_section,
    "crossing": crossing_section,
    "errors": errors_section,
    "determinism": determinism_section,
    "memory": memory_section,
    "layers": layers_section,
    "cpu": cpu_section,
    "cpu_dense": cpu_dense_section,
    "cpu_errors": cpu_errors_section,
}


def sections(result: Result) -> Iterator[Section]:
    return sections_of(result, _SECTIONS)


def table(result: Result) -> str:
    """Returns the whole run as Markdown."""
    lines = [*facts(result), f"{result['settings']['timing']}; medians"]
    if "union" in result:
        sizes = ", ".join(f"{n}: {count:g}" for n, count in result["union"].items())
        lines.append(f"blocks that neighbouring queries select together at c1, corr, by their number: {sizes}")
    return document("Selection attention", lines, sections(result))


# ---- the pictures

_COLOURS = {"ops": "#1b7837", "ops, from block indices": "#7fbf7b"}
_PEER_COLOURS = {targets.DENSE: "#bdbdbd", targets.FLA: "#fc8d59", targets.GATHER: "#b2abd2", targets.MASKED: "#b2abd2"}


def _colour(variant: str) -> str:
    known = next((c for name, c in _PEER_COLOURS.items() if variant.startswith(name)), "#dddddd")
    return _COLOURS.get(variant, known)


def bars(rows: list[Result], case: str, what: str) -> list[tuple[str, str, bool, float]]:
    """Returns ``(label, colour, measured in this run, µs)`` of a case: ours by selection, then the others by time."""
    of = [r for r in rows if (r["case"], r["what"]) == (case, what) and "median_us" in r]
    own = [(f"{_title(r)}, {r['select']}", _colour(r["variant"]), True, r["median_us"]) for r in of if is_ours(r)]
    known = [r["variant"] for r in of if not is_ours(r)]
    peers = [(r["variant"], _colour(r["variant"]), True, r["median_us"]) for r in of if not is_ours(r)]
    for name, us in next((r["measured_separately_us"] for r in of if "measured_separately_us" in r), {}).items():
        # A time of this run replaces a separate one.
        if not any(v.startswith(name) for v in known):
            peers.append((name, _colour(name), False, us))
    return own + sorted(peers, key=lambda b: b[3])


def plot(result: Result, path: pathlib.Path) -> None:
    """Plots times by case (logarithmic), forward and forward + backward; writes no file if nothing was timed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [*result["rows"], *result["cpu"]]
    names = list(dict.fromkeys(r["case"] for r in rows if "median_us" in r))
    if not names:
        return
    drawn = {(w, n): bars(rows, n, w) for w in _WHAT for n in names}
    lines = max(sum(len(drawn[w, n]) + 1.6 for n in names if drawn[w, n]) for w in _WHAT)
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 2.0 + 0.2 * lines), squeeze=False)
    every = [us for of in drawn.values() for *_, us in of]
    low, high = min(every) / 2, max(every) * 6
    for axis, what in zip(axes[0], _WHAT, strict=True):
        y, ticks, labels = 0.0, [], []
        for name in names:
            if not drawn[what, name]:
                continue
            axis.text(low, y, f" {name}", fontsize=9, fontweight="bold", va="center")
            y += 1
            for label, colour, measured, us in drawn[what, name]:
                hatch = "" if measured else "////"
                axis.barh(y, us, 0.82, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
                weight = "bold" if OURS in label else "normal"
                axis.text(us, y, f" {_time(us)}", fontsize=8, va="center", fontweight=weight)
                ticks.append(y)
                labels.append(label)
                y += 1
            y += 0.6
        axis.set_xscale("log")
        axis.set_xlim(low, high)
        axis.set_yticks(ticks, labels, fontsize=8)
        axis.set_ylim(lines - 0.4, -0.8)
        axis.set_title(_WHAT[what], loc="left", fontsize=10)
        axis.set_xlabel("µs", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    title = f"Selection attention on {result['device']['name']} (shorter is faster)"
    if any(not measured for of in drawn.values() for _, _, measured, _ in of):
        title += f"\nhatched: {SEPARATELY}, NVIDIA H200"
    if result["notice"]:
        title += f"\n{result['notice']}"
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def crossings(points: dict[str, list[tuple[int, float]]]) -> float | None:
    """Returns the length from which the op stays faster, interpolated logarithmically; None if it never does."""
    ours, dense = (dict(points[k]) for k in ("ops", targets.DENSE))
    lengths = sorted(ours.keys() & dense.keys())
    gain = [math.log(dense[n] / ours[n]) for n in lengths]
    if not gain or gain[-1] <= 0:
        return None
    last = max((i for i, g in enumerate(gain) if g <= 0), default=None)
    if last is None:
        return float(lengths[0])
    low, high = math.log(lengths[last]), math.log(lengths[last + 1])
    return math.exp(low + (high - low) * -gain[last] / (gain[last + 1] - gain[last]))


def plot_crossing(result: Result, path: pathlib.Path) -> None:
    """Plots sparse and dense times by sequence length, for both group sizes; writes no file if nothing was timed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [r for r in result["crossing"] if "median_us" in r]
    if not rows:
        return
    heads = sorted({r["h"] for r in rows})
    figure, axes = pyplot.subplots(len(heads), 2, figsize=(11, 1.2 + 3.4 * len(heads)), squeeze=False)
    for line, h in zip(axes, heads, strict=True):
        for axis, what in zip(line, _WHAT, strict=True):
            points: dict[str, list[tuple[int, float]]] = {}
            for variant, style in (("ops", "o-"), (targets.DENSE, "s--")):
                of = sorted(
                    (r["S"], r["median_us"] / 1e3)
                    for r in rows
                    if (r["h"], r["what"], r["variant"]) == (h, what, variant)
                )
                points[variant] = of
                if of:
                    label = f"{OURS}, corr" if variant == "ops" else variant
                    axis.plot(*zip(*of, strict=True), style, color=_colour(variant), label=label, markersize=4)
            at = crossings(points)
            if at is not None:
                axis.axvline(at, color="#999999", linewidth=1, linestyle=":")
                start = at == min(n for n, _ in points["ops"])
                label = " sparse is faster throughout" if start else f" sparse is faster from {at:,.0f}"
                axis.text(at, 0.04, label, transform=axis.get_xaxis_transform(), fontsize=8)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(sorted({r["S"] for r in rows}), [_tokens(n) for n in sorted({r["S"] for r in rows})])
            groups = next(r["G"] for r in rows if r["h"] == h)
            axis.set_title(f"{_WHAT[what]}, {groups} groups of {h} heads, ms", loc="left", fontsize=10)
            axis.set_xlabel("tokens", fontsize=9)
            axis.legend(frameon=False, fontsize=8)
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
    title = f"16 selected blocks of 64 against dense causal attention on {result['device']['name']}"
    figure.suptitle(title + (f"\n{result['notice']}" if result["notice"] else ""), fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _tokens(n: int) -> str:
    return f"{n // 1024}K" if n % 1024 == 0 else str(n)
