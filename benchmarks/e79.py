# SPDX-License-Identifier: Apache-2.0
"""The E79 benchmark: its rows, and how one run measures them.

Times are microseconds per time step: the time of a call divided by T. Each is a median of CUDA-graph replays with the
L2 flushed before each replay; the variants of a group take turns. The Python loop is called instead of replayed,
because its launches are its cost. A failing variant is recorded in its row. What exceeds the run's budget of seconds is
skipped, and the result says so.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mhc_inductor.ops.e79 import segment_length

from . import accuracy, e79_cases, e79_rollup, running, timing
from . import e79_targets as targets
from .e79_cases import Case, make_case
from .e79_report import plot, table
from .running import CPU_NOTICE

GPU_PARTS = ("speed", "batch", "further", "decode", "memory", "accuracy", "determinism")
CPU_PARTS = ("cpu", "rollup")
PARTS = (*GPU_PARTS, *CPU_PARTS)
ROUNDS, CPU_ROUNDS, LOOP_ROUNDS = 40, 10, 3
DECODE_CHAIN = 20
LOOP_STEPS = 64
ACCURACY_STEPS, ACCURACY_BATCH = 128, 4
LISTS = ("rows", "batch", "further", "decode", "memory", "accuracy", "determinism", "cpu", "rollup")


@dataclasses.dataclass
class Settings:
    """Settings of one run. ``sizes``, ``batch`` and ``steps`` replace the table's n, B and T."""

    device: str = "auto"
    parts: tuple[str, ...] = GPU_PARTS
    rounds: int = ROUNDS
    compiled: bool = True
    peers: bool = False
    budget_s: float = 90.0
    seed: int | None = None
    sizes: tuple[int, ...] = targets.SIZES
    batch: int | None = None
    steps: int | None = None

    def resolve(self) -> torch.device:
        return running.device_of(self.device, gpu=not set(self.parts) <= set(CPU_PARTS))


@dataclasses.dataclass
class Variant:
    """One row to measure. ``build`` prepares and returns the call; ``check`` compares its outputs with fp64."""

    what: str
    variant: str
    case: Case
    build: Callable[[], Callable[[], Any]]
    check: Callable[[Any], dict[str, Any]] | None = None
    calls: int = 1
    capture: bool = True


class Run(running.PartRun[Settings]):
    operator, notice, unit, lists = "e79", CPU_NOTICE, "microseconds a time step", LISTS
    how = f"{running.REPLAYED}; the Python loop is called, not replayed"

    def recorded(self) -> dict[str, Any]:
        return {
            "parts": list(self.s.parts),
            "seed": self.seed,
            "budget_s": self.s.budget_s,
            "threads": torch.get_num_threads(),
        }

    def some_sizes(self) -> tuple[int, ...]:
        """Returns the n for the parts that do not run at every n."""
        return tuple(n for n in self.s.sizes if n in targets.BATCH_SIZES) or self.s.sizes[:1]

    def case(self, n: int, batch: int = targets.BATCH, steps: int = targets.STEPS, **kwargs: Any) -> Case:
        return make_case(n, self.s.batch or batch, self.s.steps or steps, self.device, **kwargs)

    # ---- variants

    def ours(self, case: Case, compiled: bool, whats: tuple[str, ...] = ("fwd", "fb")) -> Iterator[Variant]:
        """Yields variants of the public function: eager (the op launches) and compiled, forward and with gradients."""
        checks = self.checks(case)
        for what in whats:
            for variant in ("ops", "compiled") if compiled and self.s.compiled else ("ops",):
                yield Variant(
                    what, variant, case, lambda w=what, v=variant: self.call(case, w, v == "compiled"), checks[what]
                )

    def scan(self, compiled: bool) -> e79_cases.Scan:
        if not compiled:
            return e79_cases.eager_scan()
        if self.spent:
            raise TimeoutError(f"the run's budget of {self.s.budget_s:g} s was spent before this was compiled")
        return e79_cases.compiled(e79_cases.eager_scan())

    def call(self, case: Case, what: str, compiled: bool) -> Callable[[], Any]:
        scan = self.scan(compiled)
        if what == "fwd":
            return lambda: e79_cases.forward(scan, case)
        leaves = case.leaves()
        return lambda: e79_cases.both(scan, leaves)

    def checks(self, case: Case) -> dict[str, Callable[[Any], dict[str, Any]]]:
        """Returns checks of the first and last sequence's results against the fp64 loop, which runs once."""
        pick = sorted({0, case.sizes[1] - 1})
        few = case.sequences(pick)
        known: dict[bool, list[Any]] = {}

        def check(got: dict[str, torch.Tensor], full: bool) -> dict[str, Any]:
            if full not in known:
                known[full] = [e79_cases.exact(few, full, d) for d in (torch.float64, torch.float32)]
            # The gradient of a fixed bias is a sum over all sequences, so the accuracy part checks it.
            cut = {k: e79_cases.picked(k, t, pick) for k, t in got.items() if t.dim() == 3}
            return e79_cases.compare(cut, *known[full])

        return {"fwd": lambda got: check(got, False), "fb": lambda got: check(got, True)}

    def eager_loop(self, case: Case) -> Iterator[Variant]:
        """Yields the eager Python loop over a few steps; its time per step does not depend on T."""
        steps = min(LOOP_STEPS, case.sizes[2])
        short = case.map(
            lambda k, t: t[:steps].contiguous() if k in ("kvqm", "dout") or (t.dim() == 3 and k[:2] == "b_") else t
        )
        leaves = short.leaves()
        yield Variant(
            "fwd", targets.EAGER, short, lambda: lambda: e79_cases.forward(e79_cases.loop, short), capture=False
        )
        yield Variant("fb", targets.EAGER, short, lambda: lambda: e79_cases.both(e79_cases.loop, leaves), capture=False)

    # ---- running

    def time(self, variants: list[Variant], rows: list[dict[str, Any]]) -> None:
        """Builds, times and checks the variants of one group; appends their rows."""
        ready: dict[int, timing.Runnable] = {}
        made = [self.header(v) for v in variants]
        for at, v in enumerate(variants):
            n, batch, steps = v.case.sizes
            self.report(f"preparing {v.what} {v.variant}, n = {n}, B = {batch}, T = {steps}")
            try:
                ready[at] = timing.Runnable(v.build(), self.device, v.capture)
            except Exception as e:
                made[at]["error"] = running.message(e)
        most = self.s.rounds if self.gpu else min(CPU_ROUNDS, self.s.rounds)
        for captured, rounds in ((True, most), (False, min(LOOP_ROUNDS, most))):
            # Time the slow variants separately: one round of them takes longer than all rounds of the others.
            chosen = {str(at): r for at, r in ready.items() if variants[at].capture is captured}
            for at, t in timing.interleaved(chosen, self.device, self.flush, rounds, 3 if captured else 1).items():
                self.add_figures(made[int(at)], t, variants[int(at)].calls)
        for at, r in ready.items():
            check = variants[at].check
            try:
                if check is not None:
                    made[at]["errors"] = check(r.run_poisoned())
                    made[at]["correct"] = all(e["met"] for e in made[at]["errors"].values())
            except Exception as e:
                made[at]["error"] = running.message(e)
            r.close()
        rows.extend(made)

    def header(self, v: Variant) -> dict[str, Any]:
        n, batch, steps = v.case.sizes
        row: dict[str, Any] = {"what": v.what, "variant": v.variant, "n": n, "B": batch, "T": steps}
        row |= {"dtype": str(v.case.kvqm.dtype).removeprefix("torch."), "bias": v.case.bias}
        return row

    def add_figures(self, row: dict[str, Any], t: timing.Timing, calls: int) -> None:
        """Adds to a row the call's times divided by T, and the bars if it has any."""
        row |= timing.Timing([s / (calls * row["T"]) for s in t.samples_us]).as_json()
        record = (row["B"], row["T"], row["dtype"], row["bias"]) == (targets.BATCH, targets.STEPS, "float32", "fixed")
        target = targets.TARGETS.get((row["what"], row["n"]))
        if target is None or not record or row["variant"] not in ("ops", "compiled"):
            return
        row |= {"bar_us": target.bar, "goal_us": target.goal, "measured_separately_us": target.peers}
        if self.bars_apply:
            row |= {"met_bar": row["median_us"] <= target.bar, "met_goal": row["median_us"] <= target.goal}

    def tidy(self) -> None:
        torch.compiler.reset()
        super().tidy()

    # ---- parts

    def speed(self) -> None:
        """Measures the shape that the bars are stated for, at every n."""
        for n in self.s.sizes:
            case = self.case(n)
            variants = list(self.ours(case, True))
            if n == self.some_sizes()[0]:
                variants += self.eager_loop(case)
            self.time(variants, self.result["rows"])
            self.tidy()
        if self.s.peers:
            self.result["rows"].append(self.compiled_loop())

    def batch(self) -> None:
        """Measures the time by B, which should be flat up to one sequence per multiprocessor."""
        for n in self.some_sizes():
            group = [v for b in targets.BATCHES for v in self.ours(self.case(n, b), False)]
            self.time([dataclasses.replace(v, check=None) for v in group], self.result["batch"])

    def further(self) -> None:
        """Measures the dtypes and bias modes that have no bars."""
        n = self.some_sizes()[0]
        for kwargs in ({"dtype": torch.bfloat16}, {"bias": "input"}, {"dtype": torch.bfloat16, "bias": "input"}):
            self.time(list(self.ours(self.case(n, **kwargs), False)), self.result["further"])

    def decode(self) -> None:
        """Measures one step from given states: a single call, and a chain of calls that pass on their states."""
        for n in self.some_sizes():
            for batch in (1, targets.BATCH):
                case = make_case(n, self.s.batch or batch, 1, self.device, states=True)
                cold = list(self.ours(case, True, ("fwd",)))
                chained = [
                    dataclasses.replace(
                        v,
                        variant=f"{v.variant}, chain of {DECODE_CHAIN}",
                        build=lambda v=v: _chain(self.scan(v.variant == "compiled"), v.case),
                        check=None,
                        calls=DECODE_CHAIN,
                    )
                    for v in cold
                    if self.gpu
                ]
                self.time(cold + chained, self.result["decode"])
            self.tidy()

    def memory(self) -> None:
        """Measures the peak memory of forward + backward above inputs and outputs, in MB (10^6 bytes)."""
        if not self.gpu:
            self.result["skipped"]["memory"] = "peak memory is read from a GPU's allocator"
            return
        case = self.case(*targets.MEMORY_SHAPE)
        n, batch, steps = case.sizes
        for variant in ("ops", "compiled") if self.s.compiled else ("ops",):
            row: dict[str, Any] = {"variant": variant, "n": n, "B": batch, "T": steps, "bar_mb": targets.PEAK_BAR_MB}
            segment = segment_length(n, batch, steps)
            row |= {"segment": segment, "formula_mb": round(targets.stated_mb(n, batch, steps, segment), 2)}
            self.result["memory"].append(row)
            self.report(f"memory: {variant}")
            try:
                call = self.call(case, "fb", variant == "compiled")
                call()
                row |= running.peak_memory(call, self.device, targets.PEAK_BAR_MB)
            except Exception as e:
                row["error"] = running.message(e)

    def accuracy(self) -> None:
        """Measures the errors of out, S, M and each gradient against fp64: worst bias mode, every n, fp32 and bf16."""
        steps, batch = self.s.steps or ACCURACY_STEPS, self.s.batch or ACCURACY_BATCH
        for n in self.s.sizes:
            self.report(f"accuracy, n = {n}")
            for dtype in (torch.float32, torch.bfloat16):
                self.result["accuracy"].append(self.worst(n, batch, steps, dtype))

    def worst(self, n: int, batch: int, steps: int, dtype: torch.dtype) -> dict[str, Any]:
        found: dict[str, dict[str, Any]] = {}
        for bias in e79_cases.BIASES:
            case = make_case(n, batch, steps, self.device, bias=bias, dtype=dtype, states=True, ups=e79_cases.OUTPUTS)
            got = e79_cases.both(e79_cases.eager_scan(), case.leaves())
            want, loops = (e79_cases.exact(case, True, d) for d in (torch.float64, torch.float32))
            for name, entry in e79_cases.compare(got, want, loops).items():
                kept = found.get(name)
                # Written so that a NaN counts as the worst.
                if kept is None or not entry["relative"] / entry["bar"] <= kept["relative"] / kept["bar"]:
                    found[name] = entry | {"bias": bias}
        return {
            "n": n,
            "B": batch,
            "T": steps,
            "dtype": str(dtype).removeprefix("torch."),
            "errors": found,
        }

    def determinism(self) -> None:
        """Checks for equal bits in two runs and, on a GPU, of a sequence alone and in the whole batch."""
        for n in self.some_sizes():
            case = self.case(n, ups=e79_cases.OUTPUTS, states=True)
            runs = [e79_cases.both(e79_cases.eager_scan(), case.leaves()) for _ in range(2)]
            differ = [k for k in runs[0] if not accuracy.same_bits(runs[0][k], runs[1][k])]
            shape = list(case.sizes)
            checks = [{"check": "two runs", "shape": shape, "differ": differ, "met": not differ}]
            if self.gpu:
                at = case.sizes[1] // 2
                alone = e79_cases.both(e79_cases.eager_scan(), case.sequences([at]).leaves())
                differ = []
                for name, t in runs[0].items():
                    if t.dim() == 3:  # skips gradients that are sums over the batch
                        dim = 0 if name in ("S", "M", "dS0", "dM0") else 1
                        differ += [] if accuracy.same_bits(t.narrow(dim, at, 1), alone[name]) else [name]
                checks.append({"check": "one sequence alone", "shape": shape, "differ": differ, "met": not differ})
            self.result["determinism"] += checks

    def cpu(self) -> None:
        """Measures the op and the loop on two threads."""
        n, batch, steps = targets.CPU_SHAPE
        before = torch.get_num_threads()
        torch.set_num_threads(targets.CPU_THREADS)
        try:
            case = self.case(n if n in self.s.sizes else self.some_sizes()[0], batch, steps)
            leaves = case.leaves()
            variants = list(self.ours(case, True))
            for what, call in (("fwd", e79_cases.forward), ("fb", e79_cases.both)):
                given = case if what == "fwd" else leaves
                variants.append(
                    Variant(
                        what, targets.EAGER, case, lambda c=call, g=given: lambda: c(e79_cases.loop, g), capture=False
                    )
                )
            self.time(variants, self.result["cpu"])
        finally:
            torch.set_num_threads(before)
        eager = {r["what"]: r["median_us"] for r in self.result["cpu"] if r["variant"] == targets.EAGER}
        for r in self.result["cpu"]:
            if "median_us" in r and r["what"] in eager:
                r["speedup"] = round(eager[r["what"]] / r["median_us"], 3)
                bars_apply = case.sizes == targets.CPU_SHAPE and r["what"] == "fwd"
                if bars_apply and r["variant"] != targets.EAGER:
                    r |= {"bar_speedup": targets.CPU_SPEEDUP_BAR, "met_bar": r["speedup"] >= targets.CPU_SPEEDUP_BAR}

    def rollup(self) -> None:
        """Measures compiling a Python loop with the plugin, which rolls it up."""
        n, batch = targets.ROLLUP_SHAPE
        for steps in targets.ROLLUP_STEPS if self.s.steps is None else (self.s.steps,):
            self.report(f"compiling a loop of {steps} steps")
            case = make_case(n, self.s.batch or batch, steps, self.device)
            self.result["rollup"].append(e79_rollup.measure(case))

    def compiled_loop(self) -> dict[str, Any]:
        """Measures torch.compile of the loop, forward, in its own process, which is ended if it takes too long."""
        n = self.some_sizes()[0]
        steps = min(LOOP_STEPS, self.s.steps or LOOP_STEPS)
        batch = self.s.batch or targets.BATCH
        row: dict[str, Any] = {"what": "fwd", "variant": targets.COMPILE, "n": n, "B": batch, "T": steps}
        row |= {"dtype": "float32", "bias": "fixed"}
        self.report(f"{targets.COMPILE}, T = {steps}: at most {e79_rollup.LIMIT_S:g} s")
        context = multiprocessing.get_context("spawn")
        receive, send = context.Pipe(duplex=False)
        child = context.Process(target=e79_rollup.compiled_loop, args=(n, batch, steps, str(self.device), send))
        child.start()
        try:
            if not receive.poll(e79_rollup.LIMIT_S):
                return row | {"error": f"did not compile in {e79_rollup.LIMIT_S:g} s"}
            found = receive.recv()
        except EOFError:
            return row | {"error": "its process ended"}
        finally:
            child.kill()
            child.join()
        return row | found


def _chain(scan: e79_cases.Scan, case: Case) -> Callable[[], Any]:
    kvqm, b_s, b_m, S0, M0 = case.arguments()

    def run() -> Any:
        S, M, out = S0, M0, None
        with torch.no_grad():
            for _ in range(DECODE_CHAIN):
                out, S, M = scan(kvqm, b_s, b_m, S, M)
        return out, S, M

    return run


def write(result: dict[str, Any], path: pathlib.Path) -> None:
    """Writes the JSON and, next to it, the table and the picture."""
    running.save(result, path)
    stored = json.loads(path.read_text())
    path.with_suffix(".md").write_text(table(stored))
    plot(stored, path.with_suffix(".png"))
