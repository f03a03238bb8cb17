# SPDX-License-Identifier: Apache-2.0
"""The E79 benchmark: its rows, how one run measures them, its tables and its picture.

Times are microseconds per time step: the time of a call divided by T. The variants of a group take turns. The Python
loop is called instead of replayed, because its launches are its cost. What exceeds the run's budget of seconds is
skipped, and the result says so.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mhc_inductor.ops.e79 import segment_length

from . import accuracy, report, running, timing, variants
from . import e79_cases as cases
from .e79_cases import Case, make_case
from .report import Result, Row, Table, us, yes
from .routing import summary, watched
from .variants import Variant, chained

GPU_PARTS = ("speed", "batch", "further", "decode", "memory", "accuracy", "determinism")
CPU_PARTS = ("cpu", "rollup")
PARTS = (*GPU_PARTS, *CPU_PARTS)
DECODE_CHAIN = 20
LOOP_STEPS = 64
ACCURACY_STEPS, ACCURACY_BATCH = 128, 4
SMALL_SIZES, SMALL_BATCH, SMALL_STEPS = (6,), 3, 5


@dataclasses.dataclass
class Settings(running.Settings):
    parts: tuple[str, ...] = GPU_PARTS
    rounds: int = 40
    budget_s: float = 90.0
    cpu_parts = CPU_PARTS


class Run(variants.Run):
    operator, unit, alike = "e79", "microseconds a time step", True
    lists = ("rows", "batch", "further", "decode", "memory", "accuracy", "determinism", "cpu", "rollup")
    how = f"{running.REPLAYED}; the Python loop is called, not replayed"

    @property
    def sizes(self) -> tuple[int, ...]:
        return SMALL_SIZES if self.s.small else cases.SIZES

    def some_sizes(self) -> tuple[int, ...]:
        """Returns the n for the parts that do not run at every n."""
        return tuple(n for n in self.sizes if n in cases.BATCH_SIZES) or self.sizes

    def case(self, n: int, batch: int = cases.BATCH, steps: int = cases.STEPS, **kwargs: Any) -> Case:
        if self.s.small:
            batch, steps = min(batch, SMALL_BATCH), min(steps, SMALL_STEPS)
        return make_case(n, batch, steps, self.device, **kwargs)

    # ---- variants

    def ours(self, case: Case, compiled: bool, whats: tuple[str, ...] = ("fwd", "fb")) -> Iterator[Variant]:
        """Yields variants of the public function: eager (the op launches) and compiled, forward and with gradients."""
        checks = self.checks(case)
        for what in whats:
            for variant in ("ops", "compiled") if compiled and self.s.compiled else ("ops",):
                build = lambda w=what, v=variant: cases.call(self.scan(v == "compiled"), case, w)  # noqa: E731
                yield Variant(what, variant, build, case=case, check=checks[what])

    def scan(self, compiled: bool) -> cases.Scan:
        if not compiled:
            return cases.SCAN
        if self.spent:
            raise TimeoutError(f"the run's budget of {self.s.budget_s:g} s was spent before this was compiled")
        return torch.compile(cases.SCAN, backend="mhc_inductor", dynamic=False, fullgraph=True)

    def checks(self, case: Case) -> dict[str, Callable[[Any], Row]]:
        """Returns checks of the first and last sequence's results against the fp64 loop, which runs once."""
        pick = sorted({0, case.sizes[1] - 1})
        few = case.sequences(pick)

        @functools.cache
        def loops(full: bool) -> list[Any]:
            return [cases.exact(few, full, d) for d in (torch.float64, torch.float32)]

        def check(got: dict[str, torch.Tensor], full: bool) -> Row:
            # The gradient of a fixed bias is a sum over all sequences, so the accuracy part checks it.
            cut = {k: cases.picked(k, t, pick) for k, t in got.items() if t.dim() == 3}
            return cases.compare(cut, *loops(full))

        return {"fwd": lambda got: check(got, False), "fb": lambda got: check(got, True)}

    def eager_loop(self, case: Case) -> Iterator[Variant]:
        """Yields the eager Python loop over a few steps; its time per step does not depend on T."""
        for what in ("fwd", "fb"):
            build = lambda w=what: cases.call(cases.loop, case, w)  # noqa: E731
            yield Variant(what, cases.EAGER, build, case=case, capture=False)

    # ---- running

    def time(self, found: list[Variant], to: str) -> None:
        """Builds, times and checks the variants of one group; appends their rows."""
        sizes = ", ".join(f"n = {n}, B = {b}, T = {t}" for n, b, t in dict.fromkeys(v.case.sizes for v in found))
        self.timed(to, sizes, found, _header, self.add_figures)

    def add_figures(self, row: Row, t: timing.Timing) -> None:
        """Adds to a row the call's times divided by T, and the bars if it has any."""
        row |= t.over(row["T"]).as_json()
        record = (row["B"], row["T"], row["dtype"], row["bias"]) == (cases.BATCH, cases.STEPS, "float32", "fixed")
        self.add_bars(row, cases.TARGETS.get((row["what"], row["n"])) if record else None, ("ops", "compiled"))

    # ---- parts

    def speed(self) -> None:
        """Measures the shape that the bars are stated for, at every n."""
        for n in self.sizes:
            case = self.case(n)
            variants = list(self.ours(case, True))
            if n == self.some_sizes()[0]:
                variants += self.eager_loop(case.first(min(LOOP_STEPS, case.sizes[2])))
            self.time(variants, "rows")
            self.tidy()

    def batch(self) -> None:
        """Measures the time by B, which should be flat up to one sequence per multiprocessor."""
        for n in self.some_sizes():
            group = [v for b in cases.BATCHES for v in self.ours(self.case(n, b), False)]
            self.time([dataclasses.replace(v, check=None) for v in group], "batch")

    def further(self) -> None:
        """Measures the dtypes and bias modes that have no bars."""
        for kwargs in cases.FURTHER:
            self.time(list(self.ours(self.case(self.some_sizes()[0], **kwargs), False)), "further")

    def decode(self) -> None:
        """Measures one step from given states: a single call, and a chain of calls that pass on their states."""

        def chain(v: Variant) -> Variant:
            return chained(
                v, DECODE_CHAIN, lambda: cases.chain(self.scan(v.variant == "compiled"), v.case, DECODE_CHAIN)
            )

        for n in self.some_sizes():
            for batch in (1, cases.BATCH):
                case = self.case(n, batch, 1, states=True)
                cold = list(self.ours(case, True, ("fwd",)))
                self.time(cold + [chain(v) for v in cold if self.gpu], "decode")
            self.tidy()

    def memory(self) -> None:
        """Measures the peak memory of forward + backward above inputs and outputs, in MB (10^6 bytes)."""
        case = self.case(*cases.MEMORY_SHAPE)
        n, batch, steps = case.sizes
        for variant in ("ops", "compiled") if self.s.compiled else ("ops",):
            row: Row = {"variant": variant, "n": n, "B": batch, "T": steps, "bar_mb": cases.PEAK_BAR_MB}
            segment = segment_length(n, batch, steps)
            row |= {"segment": segment, "formula_mb": round(cases.stated_mb(n, batch, steps, segment), 2)}
            self.peak(row, lambda v=variant: cases.call(self.scan(v == "compiled"), case, "fb"))

    def accuracy(self) -> None:
        """Measures the errors of out, S, M and each gradient against fp64: worst bias mode, every n, fp32 and bf16."""
        for n in self.sizes:
            self.report(f"accuracy, n = {n}")
            for dtype in (torch.float32, torch.bfloat16):
                self.result["accuracy"].append(self.worst(n, dtype))

    def worst(self, n: int, dtype: torch.dtype) -> Row:
        found: dict[str, Row] = {}
        for bias in cases.BIASES:
            of = {"bias": bias, "dtype": dtype, "states": True, "ups": cases.OUTPUTS}
            case = self.case(n, ACCURACY_BATCH, ACCURACY_STEPS, **of)
            got = cases.both(cases.SCAN, case.leaves())
            want, loops = (cases.exact(case, True, d) for d in (torch.float64, torch.float32))
            for name, entry in cases.compare(got, want, loops).items():
                kept = found.get(name)
                # Written so that a NaN counts as the worst.
                if kept is None or not entry["relative"] / entry["bar"] <= kept["relative"] / kept["bar"]:
                    found[name] = entry | {"bias": bias}
        _, batch, steps = case.sizes
        return {"n": n, "B": batch, "T": steps, "dtype": str(dtype).removeprefix("torch."), "errors": found}

    def determinism(self) -> None:
        """Checks for equal bits in two runs and, on a GPU, of a sequence alone and in the whole batch."""
        for n in self.some_sizes():
            case = self.case(n, ups=cases.OUTPUTS, states=True)
            first, second = (cases.both(cases.SCAN, case.leaves()) for _ in range(2))
            checks = {"two runs": (first, second)}
            if self.gpu:
                at = case.sizes[1] // 2
                # Gradients that are sums over the batch have no sequence alone.
                one = {k: cases.picked(k, t, [at]) for k, t in first.items() if t.dim() == 3}
                checks["one sequence alone"] = one, cases.both(cases.SCAN, case.sequences([at]).leaves())
            self.equal_bits(checks, list(case.sizes))

    def cpu(self) -> None:
        """Measures the op and the loop on two threads."""
        n, batch, steps = cases.CPU_SHAPE
        with running.threads(cases.CPU_THREADS):
            case = self.case(n if n in self.sizes else self.some_sizes()[0], batch, steps)
            self.time([*self.ours(case, True), *self.eager_loop(case)], "cpu")
        eager = {r["what"]: r["median_us"] for r in self.result["cpu"] if r["variant"] == cases.EAGER}
        for r in self.result["cpu"]:
            if "median_us" in r and r["what"] in eager:
                r["speedup"] = round(eager[r["what"]] / r["median_us"], 3)
                bars_apply = case.sizes == cases.CPU_SHAPE and r["what"] == "fwd"
                if bars_apply and r["variant"] != cases.EAGER:
                    r |= {"bar_speedup": cases.CPU_SPEEDUP_BAR, "met_bar": r["speedup"] >= cases.CPU_SPEEDUP_BAR}

    def rollup(self) -> None:
        """Measures compiling a Python loop with the plugin, which rolls it up."""
        n, batch = cases.ROLLUP_SHAPE
        for steps in cases.ROLLUP_STEPS[: 1 if self.s.small else None]:
            self.report(f"compiling a loop of {steps} steps")
            self.result["rollup"].append(rolled_up(self.case(n, batch, steps)))


def _header(v: Variant) -> Row:
    n, batch, steps = v.case.sizes
    return {"n": n, "B": batch, "T": steps, "dtype": str(v.case.kvqm.dtype).removeprefix("torch."), "bias": v.case.bias}


def rolled_up(case: Case) -> Row:
    """Compiles the loop of ``case`` with gradients and cold caches; returns seconds, what was routed, and the error."""
    n, batch, steps = case.sizes
    row: Row = {"n": n, "B": batch, "T": steps}
    leaves = case.leaves()
    ours = torch._dynamo.lookup_backend("mhc_inductor")

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        # Dynamo has unrolled the loop by now.
        row.update(dynamo_s=time.perf_counter() - start, nodes=len(gm.graph.nodes))
        return ours(gm, example_inputs)

    torch.compiler.reset()
    with watched() as reports, torch._inductor.config.patch(force_disable_caches=True):
        start = time.perf_counter()
        got = cases.both(torch.compile(cases.loop, backend=backend, dynamic=False), leaves)
        row["compile_s"] = time.perf_counter() - start
    found = summary(reports)
    row |= {"routed": found["routed"], "pass_s": found["seconds"]}
    start = time.perf_counter()
    want = cases.both(cases.loop, leaves)
    row["loop_call_s"] = time.perf_counter() - start
    row["worst_difference"] = max(accuracy.relative(got[k], want[k]) for k in want)
    torch.compiler.reset()
    return row


# ---- tables


def _apart(r: Row) -> list[Row]:
    peers = "; ".join(f"{name} {us(t)}" for name, t in r.get("measured_separately_us", {}).items())
    return [r | {"apart": peers}]


def _speedup(r: Row) -> list[Row]:
    bar = f"{r['bar_speedup']:g} x {yes(r['met_bar'])}" if "bar_speedup" in r else ""
    return [r | {"of_loop": f"{r['speedup']:.2f} x" if "speedup" in r else "", "bar": bar}]


def _plain(title: str) -> Table:
    headings = "n|B|T|dtype|bias||implementation|time, µs a step|quartiles"
    return Table(title, headings, "{n}|{B}|{T}|{dtype}|{bias}|{kind}|{title}|{us}|{us_quartiles}")


_TIMES = "n|B|T||implementation|time, µs a step|quartiles"
_CELLS = "{n}|{B}|{T}|{kind}|{title}|{us}|{us_quartiles}"
TABLES: report.Makers = {
    "rows": Table(
        "Speed: fp32, zero initial states, fixed biases",
        f"{_TIMES}|bar|goal|{report.SEPARATELY}",
        f"{_CELLS}|{{us_bar}}|{{us_goal}}|{{apart}}",
        _apart,
    ),
    "batch": _plain(f"The batch: flat up to one sequence a multiprocessor ({cases.FLAT_UP_TO} on an H200)"),
    "further": _plain("Other dtypes and bias modes"),
    "decode": _plain("Decoding: one step from given states (a chain: mean of calls in one graph)"),
    "memory": Table(
        "Peak memory of forward + backward above inputs and outputs",
        "variant|n|B|T|MB|by the formula, MB|bar|",
        "{variant}|{n}|{B}|{T}|{peak}|{formula_mb:.1f}|{peak_bar}|{yes_bar}",
    ),
    "accuracy": Table(
        "Relative errors against fp64, the worst of every bias mode",
        "n|B|T|dtype|tensor|error|fp32 loop's|bar|worst bias|",
        "{n}|{B}|{T}|{dtype}|{tensor}|{relative:.2g}|{loop:.2g}|{bar:.2g}|{bias}|{yes}",
        report.each_error,
    ),
    "determinism": report.determinism("n x B x T"),
    "cpu": Table(
        f"On a CPU, {cases.CPU_THREADS} threads", f"{_TIMES}|of the loop|bar", _CELLS + "|{of_loop}|{bar}", _speedup
    ),
    "rollup": Table(
        "A Python loop compiled with gradients, cold",
        "n|B|T|nodes|compile, s|of it Dynamo, s|the pass, s|a call of the loop, s|routed|largest difference",
        "{n}|{B}|{T}|{nodes:,}|{compile_s:.1f}|{dynamo_s:.1f}|{pass_s:.1f}|{loop_call_s:.1f}|{ops}|{worst_difference:.1g}",
        lambda r: [r | {"ops": ", ".join(f"{count} {op}" for op, count in r["routed"].items()) or "nothing"}],
    ),
}


def table(result: Result) -> str:
    """Returns the whole run as Markdown."""
    lines = [*report.facts(result), f"{report.timing_of(result)}; times are {result['unit']}"]
    fine = "Outputs of every timed row that was compared with the fp64 loop meet their bars."
    rows = [r for part in ("rows", "further", "decode", "cpu") for r in result[part]]
    end = report.outputs_section(rows, "n = {n}, B = {B}, T = {T}", fine)
    return report.document("E79 benchmark", lines, *report.sections_of(result, TABLES), end)


# ---- the picture


def bars(result: Result, what: str, n: int) -> list[report.Bar]:
    """Returns the bars of a size: ours first, then the others by time."""
    return report.bars(r for r in (*result["rows"], *result["cpu"]) if (r["what"], r["n"]) == (what, n))


def plot(result: Result, path: pathlib.Path) -> None:
    """Plots microseconds per step by n (logarithmic) and by batch; writes no file if nothing was timed."""
    every = [*result["rows"], *result["cpu"]]
    sizes = sorted({r["n"] for r in every if "median_us" in r})
    if not sizes:
        return
    drawn = {w: {f"n = {n}": bars(result, w, n) for n in sizes} for w in report.WHAT}
    batch = [r for r in result["batch"] if "median_us" in r]
    sizes_of = f"B = {every[0]['B']}, T = {every[0]['T']}"
    name = f"E79 scan on {result['device']['name']}, {sizes_of}, fp32, fixed biases (shorter is faster)"
    further = functools.partial(_flatness, rows=batch) if batch else None
    report.plot_times(result, path, name, drawn, "µs a time step", lambda b: f" {us(b.us)}", 4, 5.2, further)


def _flatness(axis: Any, rows: Sequence[Row]) -> None:
    """Plots microseconds per step over the batch, one line per n and kind."""
    for n in sorted({r["n"] for r in rows}):
        for what, style in zip(report.WHAT, ("o-", "s--"), strict=True):
            of = sorted((r["B"], r["median_us"]) for r in rows if (r["n"], r["what"]) == (n, what))
            axis.plot(*zip(*of, strict=True), style, label=f"n = {n}, {report.WHAT[what]}", markersize=4)
    axis.axvline(cases.FLAT_UP_TO, color="#999999", linewidth=1, linestyle=":")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("sequences (B); dotted: multiprocessors of an H200", fontsize=9)
    axis.set_title("µs a time step by batch", loc="left", fontsize=10)
    axis.legend(frameon=False, fontsize=8)
    report.plain(axis)


write = report.writer(table, plot=plot)
