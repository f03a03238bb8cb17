# SPDX-License-Identifier: Apache-2.0
"""Tables and the picture of a run, made from its JSON alone."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from . import targets

Result = dict[str, Any]
OURS = "mhc_inductor"
NOT_COMPLETE = "this run is not complete: a part of it failed, or its budget of seconds was spent before its last cell"
_ROW_NAMES = {
    "pre": "pre",
    "post": "post",
    "fb": "forward + backward",
    "post_pre": "post fused with pre",
    "post_pre_fb": "post fused with pre: forward + backward",
    "single_pass": "single pass (V4.1)",
    "single_pass_fb": "single pass (V4.1): forward + backward",
    "npu_pre": "npu_mhc_pre: pre",
    "npu_fb": "npu_mhc_pre: forward + backward",
}


def _us(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _yes(value: bool | None) -> str:
    return "" if value is None else "met" if value else "**not met**"


def _error(row: Result) -> str:
    """Returns why a row has no time: its reason, if one is known, or the first line of what failed."""
    if "reason" in row:
        return str(row["reason"])
    return "failed: " + row["error"].splitlines()[0].replace("|", "/")[:80]


def markdown(headings: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "| " + " | ".join("---" for _ in headings) + " |"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def is_ours(row: Result) -> bool:
    return row["variant"].split(",")[0] in ("ops", "compiled")


def _title(row: Result) -> str:
    return f"{OURS}, {row['variant']}" if is_ours(row) else row["variant"]


Section = tuple[str, list[str], list[list[str]]]


def sections_of(result: Result, makers: Mapping[str, Callable[[Result], Section]]) -> Iterator[Section]:
    """Yields a section for each non-empty list of the result, in the order of ``makers``."""
    for part, make in makers.items():
        if result.get(part):
            yield make(result)


def outputs_section(bad: list[str], fine: str) -> str:
    """Returns a section with the timed outputs that miss a bar, or ``fine`` if none does."""
    return "## Outputs of the timed calls\n\n" + ("\n".join(f"- {b}" for b in bad) if bad else fine)


def document(title: str, lines: list[str], sections: Iterable[Section], *further: str) -> str:
    """Returns a run as Markdown: a list of ``lines``, the sections' tables, then ``further`` verbatim."""
    parts = [f"# {title} benchmark", "\n".join(f"- {line}" for line in lines)]
    parts += [f"## {name}\n\n{markdown(headings, rows)}" for name, headings, rows in sections]
    return "\n\n".join([*parts, *further]) + "\n"


def speed_section(result: Result) -> Section:
    headings = [
        "D",
        "",
        "implementation",
        "time, µs",
        "quartiles",
        "floor, µs",
        "x floor",
        "bar",
        "goal",
        "best peer",
    ]
    rows = []
    for r in result["rows"]:
        line = [str(r["dim"]), _ROW_NAMES[r["what"]], _title(r)]
        if "error" in r and "median_us" not in r:
            rows.append([*line, _error(r), "", _us(r["floor_us"]), "", "", "", ""])
            continue
        line += [_us(r["median_us"]), f"{_us(r['q1_us'])} to {_us(r['q3_us'])}", _us(r["floor_us"])]
        line.append(f"{r['ratio_to_floor']:.2f}")
        if is_ours(r) and r.get("bar_us") is not None:
            verdicts = [("bar", "met_bar"), ("goal", "met_goal"), ("best_peer", "not_slower_than_best_peer")]
            line += [f"{_us(r[k + '_us'])} {_yes(r.get(met))}".rstrip() for k, met in verdicts]
            line[-1] = f"{r['best_peer']} {line[-1]}" if r["best_peer"] else ""
        else:
            line += ["", "", ""]
        rows.append(line)
    tokens = sorted({r["tokens"] for r in result["rows"]})
    return f"Speed: {', '.join(map(str, tokens))} tokens, n = 4, bf16 x, fp32 phi", headings, rows


def decode_section(result: Result) -> Section:
    rows = [
        [str(r["tokens"]), r["what"], _title(r), _us(r.get("median_us")) or _error(r), _us(r["floor_us"])]
        for r in result["decode"]
    ]
    dims = sorted({r["dim"] for r in result["decode"]})
    title = f"Decoding, D = {', '.join(map(str, dims))} (a chain: mean of calls in one graph, caches warm)"
    if result["device"]["type"] == "cuda":
        title += f"; {targets.DECODE_PEERS}"
    return title, ["tokens", "", "implementation", "time, µs", "floor, µs"], rows


def memory_section(result: Result) -> Section:
    rows = [
        [r["variant"], str(r["dim"]), _error(r), "", ""]
        if "error" in r
        else [
            r["variant"],
            str(r["dim"]),
            f"{r['peak_above_mb']:.1f}",
            f"{r['bar_mb']:.0f}",
            _yes(r["met_bar"]),
        ]
        for r in result["memory"]
    ]
    title = "Peak memory of forward + backward above inputs and outputs"
    return title, ["variant", "D", "MB", "bar", ""], rows


def _number(value: Any) -> float:
    return float(value)  # NaN and infinity are stored as strings


def accuracy_section(result: Result) -> Section:
    rows = []
    for c in result["accuracy"]:
        plain = c["errors"].get("plain formula", {})
        for kind, errors in c["errors"].items():
            if kind == "plain formula":
                continue
            if isinstance(errors.get("error"), str):
                rows.append([c["case"], kind, _error(errors), "", "", "", ""])
                continue
            for name, e in errors.items():
                key = "absolute" if "absolute" in e else "relative"
                plain_error = plain.get(name, {}).get(key)
                shown = "" if plain_error is None else f"{_number(plain_error):.2g}"
                bar = _number(e["bar_absolute" if key == "absolute" else "bar"])
                rows.append(
                    [
                        c["case"],
                        kind,
                        name,
                        f"{_number(e[key]):.2g} {key}",
                        shown,
                        f"{bar:.2g}",
                        _yes(e["met"]),
                    ]
                )
    title = "Errors against fp64 (bf16 outputs are held to one rounding, dx of pre and post to two)"
    return title, ["case", "", "tensor", "error", "plain formula's", "bar", ""], rows


def determinism_section(result: Result) -> Section:
    rows = [
        [d["check"], "x".join(map(str, d["shape"])), ", ".join(d["differ"]) or "none", _yes(d["met"])]
        for d in result["determinism"]
    ]
    return "Equal bits", ["check", "shape", "tensors that differ", ""], rows


_SECTIONS = {
    "rows": speed_section,
    "decode": decode_section,
    "memory": memory_section,
    "accuracy": accuracy_section,
    "determinism": determinism_section,
}


def sections(result: Result) -> Iterator[Section]:
    return sections_of(result, _SECTIONS)


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
            f"4.3 TB/s; the smallest graph takes {_us(c['smallest_graph_us'])} µs"
        )
    if result.get("notice"):
        lines.insert(0, result["notice"])
    lines += [f"skipped: {name}: {why}" for name, why in result.get("skipped", {}).items()]
    if not result.get("complete"):
        lines.append("this run did not come to its end" if "seconds" not in result else NOT_COMPLETE)
    return lines


def wrong_outputs(result: Result) -> list[str]:
    """Returns a line for each timed row whose outputs miss a bar against fp64."""
    bad = []
    for r in [*result["rows"], *result["decode"]]:
        names = [k for k, e in r.get("errors", {}).items() if not e["met"]]
        if names:
            bad.append(f"{r['what']} {r['variant']} at {r['tokens']} tokens, D = {r['dim']}: {', '.join(names)}")
    return bad


def table(result: Result) -> str:
    """Returns the whole run as Markdown."""
    end = []
    if any(is_ours(r) and "errors" in r for r in result["rows"]):
        fine = "Outputs of every timed row of ours meet their bars against fp64."
        end = [outputs_section(wrong_outputs(result), fine)]
    return document(result["operator"], facts(result), sections(result), *end)


# ---- the picture

_COLOURS = {
    f"{OURS}, ops": "#1b7837",
    f"{OURS}, compiled": "#7fbf7b",
    f"{OURS}, ops, one after the other": "#a6dba0",
    "TransformerEngine": "#4575b4",
    "TileKernels": "#91bfdb",
    "Liger": "#fc8d59",
    "torch.compile": "#b2abd2",
    "eager": "#bdbdbd",
}
SEPARATE, MEASURED = targets.SEPARATELY, "this run"


def bars(result: Result, what: str, dim: int) -> list[tuple[str, str, float, float]]:
    """Returns ``(implementation, source, µs, floor µs)`` of one row: ours first, then peers by time."""
    of = [r for r in result["rows"] if r["what"] == what and r["dim"] == dim]
    own = [(_title(r), MEASURED, r["median_us"], r["floor_us"]) for r in of if is_ours(r) and "median_us" in r]
    peers: dict[str, tuple[str, str, float, float]] = {}
    for r in of:
        for name, us in r.get("measured_separately_us", {}).items():
            peers[name] = (name, SEPARATE, us, r["floor_us"])
    for r in of:  # a time of this run replaces a separate one
        if not is_ours(r) and "median_us" in r:
            peers[r["variant"]] = (r["variant"], MEASURED, r["median_us"], r["floor_us"])
    return own + sorted(peers.values(), key=lambda b: b[2])


def plot(result: Result, path: pathlib.Path) -> None:
    """Plots bars of the achieved share of the memory bandwidth. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    gpu = result["device"]["type"] == "cuda"
    kinds = [k for k in _ROW_NAMES if any(r["what"] == k and "median_us" in r for r in result["rows"])]
    if not kinds:
        return
    groups = [(k, d) for k in kinds for d in sorted({r["dim"] for r in result["rows"] if r["what"] == k})]
    drawn = {g: bars(result, *g) for g in groups}
    top = max(us for g in groups for _, _, us, _ in drawn[g])
    lines = sum(len(drawn[g]) + 1.6 for g in groups)
    columns = 2 if lines > 24 else 1
    halves = _balanced(groups, drawn, columns)
    height = max(sum(len(drawn[g]) + 1.6 for g in half) for half in halves)
    figure, axes = pyplot.subplots(1, columns, figsize=(10.5 if columns == 2 else 8, 1.9 + 0.2 * height), squeeze=False)
    seen: dict[str, None] = {}
    for axis, half in zip(axes[0], halves, strict=True):
        y, ticks, labels = 0.0, [], []
        for what, dim in half:
            axis.text(
                0,
                y,
                f"{_ROW_NAMES[what].replace(': forward + backward', ': f + b')}, D = {dim}",
                fontsize=9,
                fontweight="bold",
                va="center",
            )
            y += 1
            for name, source, us, floor in drawn[what, dim]:
                share = 100 * floor / us if gpu else 100 * us / top
                hatch = "" if source == MEASURED else "////"
                axis.barh(
                    y,
                    share,
                    0.82,
                    color=_COLOURS.get(name, "#dddddd"),
                    hatch=hatch,
                    edgecolor="white",
                    linewidth=0,
                )
                times = f"{_us(us)} µs" + (f", {share:.0f} %" if gpu else "")
                axis.text(
                    share + 1,
                    y,
                    times,
                    fontsize=8,
                    va="center",
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
                    fontweight="bold" if OURS in name else "normal",
                )
                ticks.append(y)
                labels.append(name)
                seen[source] = None
                y += 1
            y += 0.6
        axis.set_yticks(ticks, labels, fontsize=8.5)
        axis.set_ylim(height - 0.4, -0.8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlim(0, 135)
        if gpu:
            axis.axvline(100, color="black", linewidth=1, linestyle="--", zorder=0)
            axis.set_xlabel("percent of the speed of memory", fontsize=9)
            axis.set_xticks(range(0, 101, 20))
        else:
            axis.set_xticks([])
    device = result["device"]["name"]
    tokens = max(r["tokens"] for r in result["rows"])
    title = f"mHC on {device}, {tokens} tokens, n = 4, bf16 x, fp32 phi" + (
        " (longer is faster)\ndashed: every byte moved once at 4.3 TB/s"
        if gpu
        else f" (longer is slower)\n{result['notice']}"
    )
    figure.suptitle(title, fontsize=11)
    legend = {
        MEASURED: Patch(facecolor="#888888", label="measured in this run"),
        SEPARATE: Patch(facecolor="#888888", hatch="////", edgecolor="white", label=f"{SEPARATE}, NVIDIA H200"),
    }
    figure.legend(handles=[legend[s] for s in seen], loc="lower center", ncols=2, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.25 / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _balanced(groups: list[Any], drawn: dict[Any, Any], columns: int) -> list[list[Any]]:
    if columns == 1:
        return [groups]
    sizes = [len(drawn[g]) + 1.6 for g in groups]
    cut = min(range(1, len(groups)), key=lambda c: max(sum(sizes[:c]), sum(sizes[c:])))
    return [groups[:cut], groups[cut:]]
