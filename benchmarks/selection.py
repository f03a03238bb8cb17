# SPDX-License-Identifier: Apache-2.0
"""The selection-attention benchmark: its rows, how one run measures them, its tables and pictures.

The variants of a case take turns; long calls get fewer rounds. A failing variant is recorded in its row.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import statistics
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import mhc_inductor

from . import attention, report, running, selection_layer, timing
from . import selection_cases as cases
from . import selection_peers as peers
from .accuracy import relative
from .attention import Named
from .report import Result, Row, Table
from .selection_cases import Case, Shape, make_case
from .variants import Variant

GPU_PARTS = ("speed", "crossing", "errors", "memory", "layers")
CPU_PARTS = ("cpu", "cpu_dense")
PARTS = (*GPU_PARTS, *CPU_PARTS)
LAYER_ROUNDS, CPU_DENSE_ROUNDS = 8, 5
SAMPLED, CHECKED, CPU_CHECKED = 384, 48, 16
TIMES = {
    cases.DENSE: "times_dense",
    cases.FLA: "times_fla",
    cases.GATHER: "times_gather",
    cases.MASKED: "times_masked",
}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ERRORS = (
    (cases.C1, "corr", BF16, 1.0),
    (cases.C1, "rand", BF16, 1.0),
    (cases.C2, "corr", BF16, 1.0),
    (cases.DECODE, "corr", BF16, 1.0),
    (cases.TOKENS, "tokens", BF16, 1.0),
    (cases.C1, "corr", F16, 1.0),
    (cases.C1, "corr", BF16, 24.0),
    (cases.C1, "corr", F16, 24.0),
    (cases.C1, "corr", F32, 1.0),
)
"""Cases whose errors are measured: shape, selection, dtype, and the logits' standard deviation."""
GRADIENT_ERRORS = ((BF16, 1.0), (F16, 1.0), (F16, 24.0), (F32, 1.0))


@dataclasses.dataclass
class Settings(running.Settings):
    parts: tuple[str, ...] = GPU_PARTS
    rounds: int = 40
    budget_s: float = 140.0
    cpu_parts = CPU_PARTS


class Run(attention.Run):
    operator = "selection"
    lists = ("rows", "crossing", "errors", "determinism", "memory", "layers", "cpu", "cpu_dense", "cpu_errors")

    def __init__(self, settings: Settings, save: Callable[[Row], None], report: Callable[[str], None]) -> None:
        super().__init__(settings, save, report)
        self.dense_us: dict[tuple[str, str], float] = {}
        try:
            peers.fla_module()
            self.fla: str | None = peers.fla_version()
        except Exception as e:  # it also needs a Triton and a driver that it supports
            self.fla = None
            self.result["skipped"][cases.FLA] = running.message(e)

    def jobs(self) -> running.Jobs:
        return JOBS | (FLA_JOBS if self.s.peers and self.fla is not None else {})

    # ---- variants

    def variants(self, case: Case, others: Sequence[str]) -> list[Variant]:
        """Returns the op and other implementations, forward and with gradients, and then the op from blocks."""
        found = []
        for what in self.whats(case.shape):
            found.append(self.ours(case, what))
            for name in others:
                if name == cases.FLA and self.s.peers and self.fla is not None and peers.fla_takes(case):
                    build = lambda w=what: peers.fla_selected(case, w)  # noqa: E731
                    found.append(Variant(what, f"{name} {self.fla}", build, "selected branch alone"))
                elif name in peers.MAKERS:
                    found.append(self.peer(case, what, name, peers.MAKERS[name]))
        return found + ([self.from_blocks(case)] if cases.BLOCKS in others else [])

    def from_blocks(self, case: Case) -> Variant:
        """Returns the forward from block indices; the same call makes the ranges from them."""
        shape, chosen = case.shape, case.blocks

        def call() -> Any:
            ranges = mhc_inductor.blocks_to_ranges(chosen, shape.block, shape.length)
            return dataclasses.replace(case, ranges=ranges).forward()

        return Variant("fwd", cases.BLOCKS, lambda: call)

    def whats(self, shape: Shape) -> tuple[str, ...]:
        return ("fwd",) if shape.decodes and not shape.tokens else ("fwd", "fb")

    # ---- running

    def time(self, case: Case, found: list[Variant], to: str) -> None:
        """Builds, times and checks the variants of one case; appends their rows."""
        figures, check = functools.partial(self.add_figures, case), functools.partial(self.checked, case)
        made = self.timed(to, f"{case.shape.name} {case.select}", found, lambda _: _header(case), figures, check)
        self.compare(case, made)

    def add_figures(self, case: Case, row: Row, t: timing.Timing) -> None:
        """Adds to a row its times, and the bars if it has any."""
        row |= t.in_ms()
        self.add_bars(row, cases.target(case.shape.name, row["what"], case.select))

    def checked(self, case: Case, row: Row, got: Named) -> Row:
        """Checks that outputs are finite; for our op and flash-linear-attention compares sampled queries with fp64."""
        found: Row = {"finite": attention.finite(got)}
        if row["variant"].startswith(("ops", cases.FLA)):
            at = attention.sample_of(case.shape.queries, CHECKED, self.device)
            want = attention.exact(case, at)["o"]
            found["o_error"] = relative(got["o"][:, at].reshape(want.shape), want)
        return found

    def compare(self, case: Case, made: list[Row]) -> None:
        """Adds to our rows the ratio to the dense row of the same shape, which is measured once."""
        key = case.shape.name
        for r in made:
            if r["variant"] == cases.DENSE and "median_us" in r:
                self.dense_us[key, r["what"]] = r["median_us"]
        for r in made:
            if r["variant"] != "ops" or "median_us" not in r:
                continue
            peer_times = {x["variant"]: x["median_us"] for x in made if x["what"] == r["what"] and "median_us" in x}
            peer_times.setdefault(cases.DENSE, self.dense_us.get((key, r["what"])))
            for peer, us in peer_times.items():
                name = next((short for start, short in TIMES.items() if peer.startswith(start)), None)
                if name is not None and us is not None:
                    r[name] = round(us / r["median_us"], 3)
            # A ratio within one run counts on any GPU.
            if "times_gather" in r and self.gpu and not self.s.small:
                r["met_bar"] = r["times_gather"] >= 1.0

    # ---- parts

    def speed(self) -> None:
        """Measures the shapes that have bars, a few thousand tokens, and single keys, next to other implementations."""
        for shape, select, others in cases.SPEED:
            case = make_case(self.sized(shape), select, self.device)
            self.time(case, self.variants(case, others), "rows")
            if select == "corr" and shape.name == cases.C1.name:
                self.result["union"] = union_sizes(case)
        self.save(self.result)

    def crossing(self) -> None:
        """Measures op and dense attention by length for both group sizes, to find where the op overtakes."""
        known = {(r["S"], r["h"], r["what"], r["variant"]): r for r in self.result["rows"] if r["select"] == "corr"}
        for heads, groups in cases.CROSSING_HEADS.items():
            for length in cases.CROSSING_LENGTHS:
                shape = self.sized(Shape(f"{length // 1024}K, {heads} heads a group", length, groups, heads))
                rows = [known.get((length, heads, w, v)) for w in ("fwd", "fb") for v in ("ops", cases.DENSE)]
                if all(r is not None and "median_us" in r for r in rows):
                    self.result["crossing"] += rows
                elif self.spent:
                    self.result["skipped"][f"crossing at {shape.name}"] = running.SPENT
                else:
                    case = make_case(shape, "corr", self.device)
                    self.time(case, self.variants(case, (cases.DENSE,)), "crossing")
        self.save(self.result)

    def errors(self) -> None:
        """Measures errors (sampled queries; all gradients of small shapes) next to dense SDPA's, and determinism."""
        for shape, select, dtype, std in ((self.sized(s), *more) for s, *more in ERRORS):
            self.report(f"errors: {shape.name} {select} {dtype} {std:g}")
            case = make_case(shape, select, self.device, dtype=dtype, std=std)
            at = attention.sample_of(shape.queries, SAMPLED, self.device)
            self.record_sampled(_of(case, std, len(at) * shape.batch), case, case.forward(), at)
            running.free(self.device)
        for shape in map(self.sized, cases.GRADIENTS):
            for dtype, std in GRADIENT_ERRORS:
                self.report(f"errors: {shape.name} {dtype} {std:g}")
                case = make_case(shape, "corr", self.device, dtype=dtype, std=std)
                self.record_gradients("errors", _of(case, std, shape.queries), case)
                running.free(self.device)
        self.twice(make_case(self.sized(cases.C1), "corr", self.device))

    def memory(self) -> None:
        """Measures a training step's peak at c1, inputs included, relative to Q, K, V, O and their gradients."""
        case = make_case(self.sized(cases.C1), "corr", self.device)
        leaves = case.leaves()
        case.both(leaves)
        running.free(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        out = case.both(leaves)
        torch.cuda.synchronize(self.device)
        given = sum(t.nbytes for t in (*leaves.values(), case.dout, case.ranges))
        peak = torch.cuda.max_memory_allocated(self.device) - before + given
        least = sum(t.nbytes for t in (*leaves.values(), case.dout, *out.values()))
        row = {"case": case.shape.name, "peak_mb": round(peak / 1e6, 1), "tensors_mb": round(least / 1e6, 1)}
        row |= {"ratio": round(peak / least, 4), "bar": cases.MEMORY_FACTOR}
        self.result["memory"].append(row | {"met": peak / least <= cases.MEMORY_FACTOR})

    def layers(self) -> None:
        """Measures a whole layer and a dense one, and the parts of the layer's forward."""
        for size in map(self.sized, selection_layer.LAYERS):
            made = selection_layer.calls(size, self.device)
            for (what, variant), call in made.items():
                self.report(f"layer of {size.tokens} tokens: {what} {variant}")
                row: Row = {**dataclasses.asdict(size), "what": what, "variant": variant}
                self.result["layers"].append(row)
                self.layer(row, call)
                running.free(self.device)
            del made, call
            running.free(self.device)

    def layer(self, row: Row, call: Callable[[], Any]) -> None:
        try:
            ready, rounds = timing.Runnable(call, self.device), min(self.s.rounds, LAYER_ROUNDS)
            row |= timing.interleaved({"": ready}, self.device, self.flush, rounds, 2)[""].as_json()
            ready.close()
            if self.gpu and not row["what"].startswith("of"):
                row["peak_above_mb"] = running.peak_memory(call, self.device, math.inf)["peak_above_mb"]
        except Exception as e:
            row["error"] = running.message(e)

    def cpu(self) -> None:
        """Measures the op and dense SDPA with a boolean mask on two threads."""
        with running.threads(cases.CPU_THREADS):
            for shape in map(self.sized, cases.CPU_SHAPES):
                case = make_case(shape, "corr", self.device, dtype=F32)
                self.time(case, self.variants(case, (cases.MASKED,)), "cpu")

    def cpu_dense(self) -> None:
        """Measures the op next to dense causal SDPA by length on two threads, and errors against fp64."""
        with running.threads(cases.CPU_THREADS):
            for shape, dtype in cases.CPU_DENSE_SHAPES:
                self.report(f"{shape.name}, {shape.queries} tokens, {dtype}")
                self.result["cpu_dense"] += self.next_to_dense(cases.cpu_cases(self.sized(shape), dtype))
                self.save(self.result)
            for dtype in (F32, BF16):
                for case in cases.cpu_cases(self.sized(cases.CPU_GRADIENTS), dtype):
                    self.record_gradients("cpu_errors", _of(case, 1.0, case.shape.queries), case)

    def next_to_dense(self, found: list[Case]) -> list[Row]:
        """Times blocks, single keys and dense attention of one shape; returns their rows.

        A ratio is the median of the rounds' own ratios, since other work on the machine slows neighbouring calls alike.
        """
        variants = []
        for what in ("fwd", "fb") if found[0].shape.queries <= cases.CPU_LONGEST_WITH_GRADIENTS else ("fwd",):
            variants += [self.ours(case, what) for case in found]
            dense = peers.causal(found[0], what)
            variants.append(Variant(what, cases.CPU_DENSE, lambda dense=dense: dense, case=found[0]))
        calls = {str(i): types.SimpleNamespace(run=v.build()) for i, v in enumerate(variants)}
        rounds, cpu = min(CPU_DENSE_ROUNDS, self.s.rounds), torch.device("cpu")
        times = [*timing.interleaved(calls, cpu, lambda: None, rounds, 1).values()]
        of_dense = {v.what: t for v, t in zip(variants, times, strict=True) if v.variant == cases.CPU_DENSE}
        rows = []
        for v, t in zip(variants, times, strict=True):
            row = {"what": v.what, "variant": v.variant} | _header(v.case) | t.as_json()
            if v.variant == cases.CPU_DENSE:
                row["select"] = "all"
            else:
                pairs = zip(of_dense[v.what].samples_us, t.samples_us, strict=True)
                row["times_dense"] = round(statistics.median(d / s for d, s in pairs), 3)
            rows.append(row)
        for row, v in zip(rows, variants, strict=True):
            if v.variant == "ops" and v.what == "fwd":
                at = attention.sample_of(v.case.shape.queries, CPU_CHECKED, cpu)
                got, want = attention.picked(v.case.forward(), at), attention.exact(v.case, at)
                row["o_error"] = relative(got["o"], want["o"])
        return rows


def _header(case: Case) -> Row:
    s = case.shape
    row: Row = {"case": s.name, "select": case.select, "B": s.batch, "S": s.queries, "S_kv": s.length}
    row |= {"G": s.groups, "h": s.heads, "D": s.dim, "ranges": case.ranges.shape[-2]}
    return row | {"dtype": str(case.q.dtype).removeprefix("torch.")}


def _of(case: Case, std: float, queries: int) -> Row:
    row: Row = {"case": case.shape.name, "select": case.select, "logits_std": std, "queries": queries}
    return row | {"dtype": str(case.q.dtype).removeprefix("torch.")}


def union_sizes(case: Case) -> dict[str, float]:
    """Returns the mean number of blocks that 1, 4 and 16 neighbouring queries select together."""
    count = -(-case.shape.length // case.shape.block)
    chosen = torch.where(case.blocks < 0, count, case.blocks).long()
    found = {}
    for n in (1, 4, 16):
        S = case.shape.queries // n * n
        rows = chosen[0, :S].movedim(1, 0).reshape(case.shape.groups, S // n, -1)
        seen = torch.zeros(*rows.shape[:2], count + 1, dtype=torch.bool, device=rows.device)
        seen.scatter_(-1, rows, True)
        found[str(n)] = round(seen[..., :count].sum(-1).float().mean().item(), 2)
    return found


# ---- what is compiled first


class _Nothing:
    """Stands in for a kernel that another process compiles: launching it does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def compile_ours(shape: Shape, dtype: torch.dtype = BF16, gradients: bool = True, sink: bool = False) -> None:
    """Runs the op at the real shape, because launch plans depend on sizes."""
    case = make_case(shape, "corr", torch.device("cuda"), dtype=dtype, sink=sink)
    case.forward()
    if gradients:
        case.both(case.leaves())
    torch.cuda.synchronize()


def compile_fla(without: tuple[str, ...], what: str) -> None:
    """Runs flash-linear-attention without the kernels named in ``without``; its results are not used."""
    module = peers.fla_module()
    for kernel in without:
        setattr(module, f"parallel_nsa_{kernel}", _Nothing())
    peers.fla_selected(make_case(cases.C1, "corr", torch.device("cuda")), what)()
    torch.cuda.synchronize()


JOBS: running.Jobs = {
    "c1": (compile_ours, (cases.C1,)),
    "c2": (compile_ours, (cases.C2,)),
    "2K": (compile_ours, (cases.SHORT[0],)),
    "decode": (compile_ours, (cases.DECODE, BF16, False)),
    "tokens": (compile_ours, (cases.TOKENS,)),
    "fp16": (compile_ours, (cases.GRADIENTS[0], F16)),
    "fp32": (compile_ours, (cases.GRADIENTS[0], F32)),
    "sink": (compile_ours, (cases.GRADIENTS[0], BF16, True, True)),
}
FLA_JOBS: running.Jobs = {
    "fla fwd": (compile_fla, ((), "fwd")),
    "fla dq": (compile_fla, (("fwd_kernel", "bwd_kernel_dkv"), "fb")),
    "fla dkv": (compile_fla, (("fwd_kernel", "bwd_kernel_dq"), "fb")),
}

# ---- tables


def _apart(r: Row) -> list[Row]:
    separate = "; ".join(f"{name} {report.time(us)}" for name, us in r.get("measured_separately_us", {}).items())
    return [r | {"also": separate and f"{report.SEPARATELY}: {separate}"}]


def _crossing(result: Result) -> str:
    rows = []
    for r in result["crossing"]:
        if report.is_ours(r):
            same = (d for d in result["crossing"] if all(d[k] == r[k] for k in ("S", "h", "what")))
            dense = next((d for d in same if d["variant"] == cases.DENSE), {})
            times = [
                report.timed(r)[0],
                report.time(dense.get("median_us")),
                f"{r['times_dense']:.2f}" if "times_dense" in r else "",
            ]
            rows.append([str(r["S"]), str(r["h"]), report.WHAT[r["what"]], *times])
    rows.sort(key=lambda row: (row[2], int(row[1]), int(row[0])))
    headings = ["tokens", "heads a group", "", report.OURS, cases.DENSE, "x dense"]
    return report.section("Where sparse passes dense: corr, 16 blocks of 64 a query", report.markdown(headings, rows))


def _errors(title: str) -> Table:
    headings = "case|selection|dtype|logits' std|queries|tensor|error|dense SDPA's|bar|"
    cells = "{case}|{select}|{dtype}|{logits_std:g}|{queries}|" + report.ERROR
    return Table(title, headings, cells, report.each_error)


_THREADS = f"{cases.CPU_THREADS} threads"
_SIZES, _CELLS = "case|selection|S|S_kv|G x h|", "{case}|{select}|{sequences}|{S_kv}|{G} x {h}|{kind}"
TABLES: report.Makers = {
    "rows": Table(
        "Speed: bf16, D = 128 (x dense: how many times faster than dense attention of the same run)",
        f"{_SIZES}|implementation|time|quartiles|bar|goal||x dense|x fla|x gather|note",
        _CELLS + "|{title}|{time}|{quartiles}|{bar_us:time}|{goal_us:time}|{verdict}"
        "|{times_dense:.2f}|{times_fla:.2f}|{times_gather:.2f}|{note}",
        _apart,
    ),
    "crossing": _crossing,
    "errors": _errors(
        "Relative errors against fp64, and those of dense SDPA with a mask in the same dtype on the same selection"
    ),
    "determinism": report.TWO_RUNS,
    "memory": Table(
        "Peak memory of a training step, its inputs included",
        "case|peak, MB|Q, K, V, O and gradients, MB|ratio|bar|",
        "{case}|{peak_mb:.0f}|{tensors_mb:.0f}|{ratio:.3f}|{bar:g}|{yes}",
    ),
    "layers": Table(
        "A whole layer, projections included, eager: D = 128, 16 blocks of 64, window 512",
        "tokens|width|heads|layer||time|quartiles|peak above inputs and outputs, MB",
        "{tokens}|{dim}|{heads} in {groups}|{variant}|{what}|{time}|{quartiles}|{peak_above_mb:.0f}",
    ),
    "cpu": Table(
        f"On a CPU, {_THREADS}",
        f"{_SIZES}|D|dtype|implementation|time|quartiles|x masked|note",
        _CELLS + "|{D}|{dtype}|{title}|{time}|{quartiles}|{times_masked:.2f}|{note}",
    ),
    "cpu_dense": Table(
        f"On a CPU next to dense attention, {_THREADS} (x dense: the median of the rounds' ratios)",
        "case|tokens|G x h|D|dtype||selection|implementation|time|quartiles|x dense|error of o",
        "{case}|{S}|{G} x {h}|{D}|{dtype}|{kind}|{select}|{title}|{time}|{quartiles}|{times_dense:.2f}|{o_error:.1e}",
    ),
    "cpu_errors": _errors(
        "Relative errors against fp64 on a CPU, and those of dense SDPA with a mask in the same dtype"
    ),
}


def table(result: Result) -> str:
    """Returns the whole run as Markdown."""
    lines = [*report.facts(result), report.timing_of(result)]
    if "union" in result:
        sizes = ", ".join(f"{n}: {count:g}" for n, count in result["union"].items())
        lines.append(f"blocks that neighbouring queries select together at c1, corr, by their number: {sizes}")
    return report.document("Selection attention benchmark", lines, *report.sections_of(result, TABLES))


# ---- the pictures


def bars(rows: list[Row], case: str, what: str) -> Iterator[report.Bar]:
    """Yields the bars of a case: ours by selection, then the others by time."""
    of = [r for r in rows if (r["case"], r["what"]) == (case, what)]
    selects = iter([r["select"] for r in of if report.is_ours(r) and "median_us" in r])
    for b in report.bars(of, prefix=True):
        yield dataclasses.replace(b, label=f"{b.name}, {next(selects)}") if b.name.startswith(report.OURS) else b


def plot(result: Result, path: pathlib.Path) -> None:
    """Plots times by case (logarithmic), forward and forward + backward; writes no file if nothing was timed."""
    rows = [*result["rows"], *result["cpu"]]
    names = list(dict.fromkeys(r["case"] for r in rows if "median_us" in r))
    if not names:
        return
    drawn = {w: {n: [*bars(rows, n, w)] for n in names} for w in report.WHAT}
    name = f"Selection attention on {result['device']['name']} (shorter is faster)"
    report.plot_times(result, path, name, drawn, "µs", lambda b: f" {report.time(b.us)}", 6, 6.5)


def crossings(points: dict[str, list[tuple[int, float]]]) -> float | None:
    """Returns the length from which the op stays faster, interpolated logarithmically; None if it never does."""
    ours, dense = (dict(points[k]) for k in ("ops", cases.DENSE))
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
    pyplot = report.pyplot()
    rows = [r for r in result["crossing"] if "median_us" in r]
    if not rows:
        return
    heads = sorted({r["h"] for r in rows})
    ticks = {n: report.tokens(n) for n in sorted({r["S"] for r in rows})}
    figure, axes = pyplot.subplots(len(heads), 2, figsize=(11, 1.2 + 3.4 * len(heads)), squeeze=False)
    for line, h in zip(axes, heads, strict=True):
        for axis, what in zip(line, report.WHAT, strict=True):
            _draw_crossing(axis, [r for r in rows if (r["h"], r["what"]) == (h, what)])
            groups = next(r["G"] for r in rows if r["h"] == h)
            name = f"{report.WHAT[what]}, {groups} groups of {h} heads, ms"
            report.draw_curves(axis, name, "tokens", ticks)
    name = f"16 selected blocks of 64 against dense causal attention on {result['device']['name']}"
    report.finish(figure, name, path, result["notice"])


def _draw_crossing(axis: Any, rows: list[Row]) -> None:
    points = {}
    for variant, style in (("ops", "o-"), (cases.DENSE, "s--")):
        points[variant] = of = sorted((r["S"], r["median_us"] / 1e3) for r in rows if r["variant"] == variant)
        if of:
            name = f"{report.OURS}, ops" if variant == "ops" else variant
            label = f"{report.OURS}, corr" if variant == "ops" else variant
            axis.plot(*zip(*of, strict=True), style, color=report.colour(name), label=label, markersize=4)
    at = crossings(points)
    if at is not None:
        axis.axvline(at, color="#999999", linewidth=1, linestyle=":")
        start = at == min(n for n, _ in points["ops"])
        label = " sparse is faster throughout" if start else f" sparse is faster from {at:,.0f}"
        axis.text(at, 0.04, label, transform=axis.get_xaxis_transform(), fontsize=8)


write = report.writer(table, plot=plot, crossing=plot_crossing)
