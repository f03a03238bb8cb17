# SPDX-License-Identifier: Apache-2.0
"""The selection-attention benchmark: its rows, and how one run measures them.

Times are medians of CUDA-graph replays with the L2 flushed before each replay. The variants of a case take turns; long
calls get fewer rounds. A failing variant is recorded in its row.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import torch

import mhc_inductor

from . import accuracy, running, selection_cpu, selection_layer, selection_warm, timing
from . import selection_cases as cases
from . import selection_peers as peers
from . import selection_targets as targets
from .running import CPU_NOTICE
from .selection_cases import Case, make_case
from .selection_report import plot, plot_crossing, table
from .selection_targets import Shape
from .variants import Clock, Variant, measure

GPU_PARTS = ("speed", "crossing", "errors", "memory", "layers")
CPU_PARTS = ("cpu", "cpu_dense")
PARTS = (*GPU_PARTS, *CPU_PARTS)
ROUNDS, LAYER_ROUNDS = 40, 8
SAMPLED, CHECKED = 384, 48
TIMES = {
    targets.DENSE: "times_dense",
    targets.FLA: "times_fla",
    targets.GATHER: "times_gather",
    targets.MASKED: "times_masked",
}
LISTS = ("rows", "crossing", "errors", "determinism", "memory", "layers", "cpu", "cpu_dense", "cpu_errors")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@dataclasses.dataclass
class Settings:
    """Settings of one run. ``small``: use tiny shapes; ``warm``: first compile in parallel processes."""

    device: str = "auto"
    parts: tuple[str, ...] = GPU_PARTS
    rounds: int = ROUNDS
    peers: bool = True
    warm: bool = True
    budget_s: float = 140.0
    seed: int | None = None
    small: bool = False

    def resolve(self) -> torch.device:
        return running.device_of(self.device, gpu=not set(self.parts) <= set(CPU_PARTS))


class Run(running.PartRun[Settings]):
    operator, notice, unit, lists = "selection", CPU_NOTICE, "microseconds", LISTS

    def __init__(
        self, settings: Settings, save: Callable[[dict[str, Any]], None], report: Callable[[str], None]
    ) -> None:
        super().__init__(settings, save, report)
        self.result["seconds_of"] = {}
        self.dense_us: dict[tuple[str, str], float] = {}
        try:
            peers.fla_module()
            self.fla: str | None = peers.fla_version()
        except Exception as e:  # it also needs a Triton and a driver that it supports
            self.fla = None
            self.result["skipped"][targets.FLA] = running.message(e)

    def recorded(self) -> dict[str, Any]:
        return {
            "parts": list(self.s.parts),
            "seed": self.seed,
            "budget_s": self.s.budget_s,
            "small": self.s.small,
            "threads": torch.get_num_threads(),
        }

    @property
    def bars_apply(self) -> bool:
        return super().bars_apply and not self.s.small

    def shape(self, shape: Shape) -> Shape:
        return shape.small() if self.s.small else shape

    def run(self) -> dict[str, Any]:
        if self.gpu and self.s.warm and not self.s.small:
            self.report("compiling side by side")
            found = selection_warm.warm(self.s.peers and self.fla is not None)
            self.result["settings"]["compiled_first"] = dataclasses.asdict(found)
        return super().run()

    def part(self, name: str) -> None:
        begun = time.monotonic()
        super().part(name)
        self.result["seconds_of"][name] = round(time.monotonic() - begun, 1)

    # ---- variants

    def ours(self, case: Case, what: str) -> Variant:
        def build() -> Callable[[], Any]:
            if what == "fwd":
                return lambda: cases.forward(case)
            leaves = case.leaves()
            return lambda: cases.both(case, leaves)

        return Variant(what, "ops", build)

    def from_blocks(self, case: Case) -> Variant:
        """Returns the forward from block indices; the same call makes the ranges from them."""
        shape, chosen = case.shape, case.blocks
        assert chosen is not None

        def call() -> Any:
            ranges = mhc_inductor.blocks_to_ranges(chosen, shape.block, shape.length)
            return cases.forward(dataclasses.replace(case, ranges=ranges))

        return Variant("fwd", "ops, from block indices", lambda: call)

    def dense(self, case: Case, what: str) -> Variant:
        def build() -> Callable[[], Any]:
            call, variant.note = peers.dense(case, what)
            return call

        variant = Variant(what, targets.DENSE, build)
        return variant

    def fla_selected(self, case: Case, what: str) -> Variant:
        return Variant(
            what, f"{targets.FLA} {self.fla}", lambda: peers.fla_selected(case, what), "selected branch alone"
        )

    def whats(self, shape: Shape) -> tuple[str, ...]:
        return ("fwd",) if shape.decodes and not shape.tokens else ("fwd", "fb")

    # ---- running

    def time(self, case: Case, found: list[Variant], rows: list[dict[str, Any]]) -> None:
        """Builds, times and checks the variants of one case; appends their rows."""
        made = [self.header(case, v) for v in found]
        measure(
            Clock(self.device, self.flush, self.s.rounds),
            found,
            made,
            lambda row, t: self.add_figures(case, row, t),
            lambda row, got: self.checked(case, row, got),
            lambda text: self.report(f"{case.shape.name} {case.select}: {text}"),
        )
        self.compare(case, made)
        rows.extend(made)

    def header(self, case: Case, v: Variant | selection_cpu.Call) -> dict[str, Any]:
        s = case.shape
        row: dict[str, Any] = {"case": s.name, "select": case.select, "what": v.what, "variant": v.variant}
        row |= {"B": s.batch, "S": s.queries, "S_kv": s.length, "G": s.groups, "h": s.heads, "D": s.dim}
        return row | {"ranges": case.ranges.shape[-2], "dtype": str(case.q.dtype).removeprefix("torch.")}

    def add_figures(self, case: Case, row: dict[str, Any], t: timing.Timing) -> None:
        """Adds to a row its times, and the bars if it has any."""
        row |= t.as_json()
        row["median_ms"] = round(row["median_us"] / 1e3, 6)
        target = targets.target(case.shape.name, row["what"], case.select)
        if target is None or row["variant"] != "ops" or self.s.small:
            return
        row |= {"bar_us": target.bar, "goal_us": target.goal, "measured_separately_us": target.peers}
        if self.bars_apply:
            row["met_bar"] = row["median_us"] <= target.bar
            row["met_goal"] = None if target.goal is None else row["median_us"] <= target.goal

    def checked(self, case: Case, row: dict[str, Any], got: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Checks that outputs are finite; for our op and flash-linear-attention compares sampled queries with fp64."""
        found: dict[str, Any] = {"finite": all(bool(t.isfinite().all()) for k, t in got.items() if k != "lse")}
        if row["variant"].split(",")[0] == "ops":
            at = cases.sample(case.shape, CHECKED, self.device)
            found["o_error"] = cases.relative(cases.picked(case, got, at)["o"], cases.exact(case, at)["o"])
        elif row["variant"].startswith(targets.FLA):
            at = cases.sample(case.shape, CHECKED, self.device)
            o = got["o"][:, at].flatten(0, 1).unflatten(1, (case.shape.groups, -1))
            found["o_error"] = cases.relative(o, cases.exact(case, at)["o"])
        return found

    def compare(self, case: Case, made: list[dict[str, Any]]) -> None:
        """Adds to our rows the ratio to the dense row of the same shape, which is measured once."""
        key = case.shape.name
        for r in made:
            if r["variant"] == targets.DENSE and "median_us" in r:
                self.dense_us[key, r["what"]] = r["median_us"]
        for r in made:
            if r["variant"] != "ops" or "median_us" not in r:
                continue
            peer_times = {x["variant"]: x["median_us"] for x in made if x["what"] == r["what"] and "median_us" in x}
            peer_times.setdefault(targets.DENSE, self.dense_us.get((key, r["what"])))
            for peer, us in peer_times.items():
                name = next((short for start, short in TIMES.items() if peer.startswith(start)), None)
                if name is not None and us is not None:
                    r[name] = round(us / r["median_us"], 3)

    # ---- parts

    def speed(self) -> None:
        """Measures the shapes that have bars, a few thousand tokens, and single keys."""
        for shape in map(self.shape, (targets.C1, targets.C2, targets.C3, targets.DECODE)):
            for select in cases.SELECTS:
                self.case(shape, select, with_dense=select == "corr", with_fla=select == "corr")
        for shape in map(self.shape, targets.SHORT):
            self.case(shape, "corr", with_dense=True)
        for shape in map(self.shape, (targets.TOKENS, targets.TOKENS_DECODE)):
            case = make_case(shape, "tokens", self.device)
            variants = []
            for what in self.whats(shape):
                variants.append(self.ours(case, what))
                variants.append(Variant(what, targets.GATHER, lambda w=what, c=case: peers.gather(c, w)))
            self.time(case, variants, self.result["rows"])
        for r in self.result["rows"]:
            # A ratio within one run counts on any GPU.
            if "times_gather" in r and self.gpu and not self.s.small:
                r["met_bar"] = r["times_gather"] >= 1.0
        self.save(self.result)

    def case(self, shape: Shape, select: str, *, with_dense: bool = False, with_fla: bool = False) -> None:
        case = make_case(shape, select, self.device)
        variants = []
        for what in self.whats(shape):
            variants.append(self.ours(case, what))
            if with_dense:
                variants.append(self.dense(case, what))
            if with_fla and self.s.peers and self.fla is not None and peers.fla_offers(case) is None:
                variants.append(self.fla_selected(case, what))
        if with_fla:
            variants.append(self.from_blocks(case))
        self.time(case, variants, self.result["rows"])
        if select == "corr" and shape.name == targets.C1.name:
            self.result["union"] = union_sizes(case)

    def crossing(self) -> None:
        """Measures op and dense attention by length for both group sizes, to find where the op overtakes."""
        known = {(r["S"], r["h"], r["what"], r["variant"]): r for r in self.result["rows"] if r["select"] == "corr"}
        for heads, groups in targets.CROSSING_HEADS.items():
            for length in targets.CROSSING_LENGTHS:
                shape = self.shape(Shape(f"{length // 1024}K, {heads} heads a group", length, groups, heads))
                rows = [known.get((length, heads, w, v)) for w in ("fwd", "fb") for v in ("ops", targets.DENSE)]
                if all(r is not None and "median_us" in r for r in rows):
                    self.result["crossing"] += rows
                    continue
                if self.spent:
                    self.result["skipped"][f"crossing at {shape.name}"] = running.SPENT
                    continue
                case = make_case(shape, "corr", self.device)
                variants = [v for w in ("fwd", "fb") for v in (self.ours(case, w), self.dense(case, w))]
                self.time(case, variants, self.result["crossing"])
        self.save(self.result)

    def errors(self) -> None:
        """Measures errors (sampled queries; all gradients of small shapes) next to dense SDPA's, and determinism."""
        c1, c2, decode, tokens = map(self.shape, (targets.C1, targets.C2, targets.DECODE, targets.TOKENS))
        for shape, select, dtype, std in (
            (c1, "corr", BF16, 1.0),
            (c1, "rand", BF16, 1.0),
            (c2, "corr", BF16, 1.0),
            (decode, "corr", BF16, 1.0),
            (tokens, "tokens", BF16, 1.0),
            (c1, "corr", F16, 1.0),
            (c1, "corr", BF16, 24.0),
            (c1, "corr", F16, 24.0),
            (c1, "corr", F32, 1.0),
        ):
            self.report(f"errors: {shape.name} {select} {dtype} {std:g}")
            case = make_case(shape, select, self.device, dtype=dtype, std=std)
            at = cases.sample(shape, SAMPLED, self.device)
            got, want = cases.picked(case, cases.forward(case), at), cases.exact(case, at)
            self.record(case, std, got, want, cases.dense_masked(case, at), len(at) * shape.batch)
            running.free(self.device)
        for shape in map(self.shape, targets.GRADIENTS):
            for dtype, std in ((BF16, 1.0), (F16, 1.0), (F16, 24.0), (F32, 1.0)):
                self.report(f"errors: {shape.name} {dtype} {std:g}")
                case = make_case(shape, "corr", self.device, dtype=dtype, std=std)
                got, want = cases.both(case, case.leaves()), cases.masked_gradients(case, torch.float64)
                self.record(case, std, got, want, cases.masked_gradients(case, dtype), shape.queries)
                running.free(self.device)
        self.determinism(c1)

    def record(
        self,
        case: Case,
        std: float,
        got: cases.Named,
        want: cases.Named,
        dense: cases.Named,
        queries: int,
        to: str = "errors",
    ) -> None:
        row: dict[str, Any] = {"case": case.shape.name, "select": case.select, "logits_std": std, "queries": queries}
        row["dtype"] = str(case.q.dtype).removeprefix("torch.")
        row["errors"] = {}
        for name, value in got.items():
            entry: dict[str, Any] = {"relative": cases.relative(value, want[name])}
            if name in dense:
                entry["dense"] = cases.relative(dense[name], want[name])
                entry["bar"] = targets.ERROR_FACTOR * entry["dense"]
                entry["met"] = entry["relative"] <= entry["bar"]
            row["errors"][name] = entry
        self.result[to].append(row)

    def determinism(self, shape: Shape) -> None:
        """Checks o, lse and gradients for equal bits in two runs."""
        case = make_case(shape, "corr", self.device)
        runs = [cases.forward(case) | cases.both(case, case.leaves()) for _ in range(2)]
        differ = [k for k in runs[0] if not accuracy.same_bits(runs[0][k], runs[1][k])]
        self.result["determinism"].append({"case": shape.name, "differ": differ, "met": not differ})

    def memory(self) -> None:
        """Measures a training step's peak at c1, inputs included, relative to Q, K, V, O and their gradients."""
        if not self.gpu:
            self.result["skipped"]["memory"] = "peak memory is read from a GPU's allocator"
            return
        case = make_case(self.shape(targets.C1), "corr", self.device)
        leaves = case.leaves()
        cases.both(case, leaves)
        running.free(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        out = cases.both(case, leaves)
        torch.cuda.synchronize(self.device)
        given = sum(t.nbytes for t in (*leaves, case.dout, case.ranges))
        peak = torch.cuda.max_memory_allocated(self.device) - before + given
        least = sum(t.nbytes for t in (*leaves, case.dout, *out.values()))
        ratio = peak / least
        self.result["memory"].append(
            {
                "case": case.shape.name,
                "peak_mb": round(peak / 1e6, 1),
                "tensors_mb": round(least / 1e6, 1),
                "ratio": round(ratio, 4),
                "bar": targets.MEMORY_FACTOR,
                "met": ratio <= targets.MEMORY_FACTOR,
            }
        )

    def layers(self) -> None:
        """Measures a whole layer and a dense one, and the parts of the layer's forward."""
        selection_layer.measure(self)

    @property
    def layer_rounds(self) -> int:
        return min(self.s.rounds, LAYER_ROUNDS)

    def cpu(self) -> None:
        """Measures the op and dense SDPA with a boolean mask on two threads."""
        before = torch.get_num_threads()
        torch.set_num_threads(targets.CPU_THREADS)
        try:
            for shape in map(self.shape, targets.CPU_SHAPES):
                case = make_case(shape, "corr", self.device, dtype=F32)
                variants = []
                for what in self.whats(shape):
                    variants.append(self.ours(case, what))
                    variants.append(Variant(what, targets.MASKED, lambda w=what, c=case: peers.masked(c, w)))
                self.time(case, variants, self.result["cpu"])
        finally:
            torch.set_num_threads(before)

    def cpu_dense(self) -> None:
        """Measures the op next to dense causal SDPA by length on two threads, and errors against fp64."""
        selection_cpu.measure(self)


def union_sizes(case: Case) -> dict[str, float]:
    """Returns the mean number of blocks that 1, 4 and 16 neighbouring queries select together."""
    assert case.blocks is not None
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


def write(result: dict[str, Any], path: pathlib.Path) -> None:
    """Writes the JSON and, next to it, the table and the pictures."""
    running.save(result, path)
    stored = json.loads(path.read_text())
    path.with_suffix(".md").write_text(table(stored))
    plot(stored, path.with_suffix(".png"))
    plot_crossing(stored, path.with_name(f"{path.stem}-crossing.png"))
