# SPDX-License-Identifier: Apache-2.0
"""The benchmark of selection attention over lists of keys: its rows, and how one run measures them.

Times are medians of CUDA-graph replays with the L2 flushed before each replay; a peer's call above ``LONG_US`` is
timed once, on the host's clock. A failing variant is recorded in its row. The result is written after every case.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import torch

from . import accuracy, lists_warm, running, timing
from . import lists_cases as cases
from . import lists_peers as peers
from . import lists_targets as targets
from .lists_cases import Case, make_case
from .lists_report import plot, table
from .lists_targets import Shape
from .running import CPU_NOTICE
from .variants import Clock, Variant, measure

__all__ = ["PARTS", "Run", "Settings", "table", "write"]
PARTS = ("speed", "errors", "memory", "crossing", "peers")
QUICK_PARTS = ("speed", "errors")
ROUNDS, QUICK_ROUNDS = 20, 8
LONG_US = 200e3
SAMPLED, CHECKED = 32, 8
SPENT = "the run's budget of seconds was spent"
TIMES = {
    targets.DENSE_MASKED: "times_masked",
    targets.DENSE_ALL: "times_dense",
    targets.GATHER: "times_gather",
    targets.RANGES: "times_ranges",
}
OTHER_KEYS = (targets.DENSE_ALL, targets.DENSE_CAUSAL, targets.PLAIN)
"""Peers that attend to all keys, not to those of the lists."""
LISTS = ("rows", "errors", "determinism", "memory", "crossing")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NARROW_AND_FULL = {"A": (BF16, F16, F32), "D": (BF16, F16, F32)}
"""Dtypes in which gradients are compared with fp64; bf16 alone elsewhere."""


@dataclasses.dataclass
class Settings:
    """Settings of one run. ``small``: use tiny shapes; ``warm``: first compile in parallel processes."""

    device: str = "auto"
    parts: tuple[str, ...] = PARTS
    shapes: tuple[str, ...] = tuple(targets.SHAPES)
    rounds: int = ROUNDS
    warm: bool = True
    budget_s: float = 200.0
    seed: int | None = None
    small: bool = False

    def resolve(self) -> torch.device:
        return running.device_of(self.device)


class Run(running.PartRun[Settings]):
    operator, notice, unit, lists = "lists", CPU_NOTICE, "microseconds", LISTS

    def __init__(
        self, settings: Settings, save: Callable[[dict[str, Any]], None], report: Callable[[str], None]
    ) -> None:
        # A CPU tries the run out; its times say nothing at any shape.
        settings.small = settings.small or settings.resolve().type != "cuda"
        super().__init__(settings, save, report)
        self.result["seconds_of"] = {}
        self.result["skipped"][targets.FLA] = targets.NO_FLA

    def recorded(self) -> dict[str, Any]:
        kept = {"parts": list(self.s.parts), "shapes": list(self.s.shapes), "seed": self.seed}
        return kept | {"budget_s": self.s.budget_s, "small": self.s.small, "threads": torch.get_num_threads()}

    @property
    def bars_apply(self) -> bool:
        return super().bars_apply and not self.s.small

    @property
    def shapes(self) -> list[Shape]:
        return [self.sized(targets.SHAPES[name]) for name in self.s.shapes]

    def sized(self, shape: Shape) -> Shape:
        return shape.small() if self.s.small else shape

    def run(self) -> dict[str, Any]:
        if self.gpu and self.s.warm and not self.s.small:
            self.report("compiling side by side")
            found = lists_warm.warm(self.s.shapes, self.s.parts)
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

    def noted(self, name: str, make: Callable[[Case, str], tuple[peers.Call, str]], case: Case, what: str) -> Variant:
        """Returns a variant whose note ``make`` gives, when it is built."""

        def build() -> Callable[[], Any]:
            call, variant.note = make(case, what)
            return call

        variant = Variant(what, name, build)
        return variant

    def peers_of(self, case: Case, what: str) -> list[Variant]:
        found = [
            Variant(what, targets.RANGES, lambda: peers.ranges(case, what)),
            Variant(what, targets.GATHER, lambda: peers.compiled_gather(case, what)),
            self.noted(targets.DENSE_MASKED, peers.masked, case, what),
        ]
        if case.shape.dim <= 256 and case.shape.dim == case.shape.v_dim and not case.shape.sink:
            found.append(self.noted(targets.DENSE_ALL, peers.unmasked, case, what))
        return found

    def whats(self, shape: Shape) -> tuple[str, ...]:
        return ("fwd",) if shape.decodes else ("fwd", "fb")

    # ---- running

    def time(self, case: Case, found: list[Variant], rows: list[dict[str, Any]], pairs: int) -> None:
        """Builds, times and checks variants of one case; appends their rows and writes the result."""
        made = [cases.case_values(case) | {"what": v.what, "variant": v.variant} for v in found]
        for row in made:
            if row["variant"] in OTHER_KEYS:
                row["n"] = row["S_kv"]
        at = cases.sample_of(case.shape.queries, CHECKED, self.device)
        want = cases.exact(case, at)

        def check(row: dict[str, Any], got: cases.Named) -> dict[str, Any]:
            added: dict[str, Any] = {"finite": all(bool(t.isfinite().all()) for k, t in got.items() if k != "lse")}
            if row["variant"] in OTHER_KEYS:
                return added
            errors = {n: cases.relative(t, want[n]) for n, t in cases.picked(got, at).items() if n != "lse"}
            return added | {f"{n}_error": e for n, e in errors.items()}

        clock = Clock(self.device, self.flush, self.s.rounds, LONG_US)
        name = f"{case.shape.name}, {case.shape.entries} keys: "
        measure(
            clock,
            found,
            made,
            lambda row, t: self.add_figures(case.shape, row, t, pairs),
            check,
            lambda text: self.report(name + text),
        )
        rows.extend(made)
        self.save(self.result)

    def add_figures(self, shape: Shape, row: dict[str, Any], t: timing.Timing, pairs: int) -> None:
        """Adds to a row its times and rate, and the bars if it has any."""
        row |= t.as_json()
        row["median_ms"] = round(row["median_us"] / 1e3, 6)
        if row["variant"] in OTHER_KEYS or not self.gpu:
            return
        row["tflops"] = round(targets.operations(shape, pairs, row["what"]) / row["median_us"] / 1e6, 1)
        key = (shape.name, row["what"])
        if row["variant"] != "ops" or self.s.small:
            return
        if key in targets.PUBLISHED:
            row["published"] = targets.PUBLISHED[key]
        if key in targets.TARGETS:
            target = targets.TARGETS[key]
            row |= {"bar_us": target.bar, "goal_us": target.goal}
            if self.bars_apply:
                row |= {"met_bar": row["median_us"] <= target.bar, "met_goal": row["median_us"] <= target.goal}

    # ---- parts

    def speed(self) -> None:
        """Measures the op at the shapes that have bars."""
        for shape in self.shapes:
            case = make_case(shape, self.device)
            found = [self.ours(case, what) for what in self.whats(shape)]
            self.time(case, found, self.result["rows"], case.pairs)

    def peers(self) -> None:
        """Measures the other implementations at the same shapes, and adds to the op's rows how many times they take."""
        for shape in self.shapes:
            case = make_case(shape, self.device)
            # One at a time: several would not fit into memory together.
            for v in [v for what in self.whats(shape) for v in self.peers_of(case, what)]:
                if self.spent:
                    self.result["skipped"][f"{v.variant}, {shape.name}, {v.what}"] = SPENT
                else:
                    self.time(case, [v], self.result["rows"], case.pairs)
            self.compare(shape.name)

    def compare(self, name: str) -> None:
        """Adds to the op's rows of one case how many times as long each peer takes."""
        timed = [r for r in self.result["rows"] if r["case"] == name and "median_us" in r]
        for r in timed:
            if r["variant"] == "ops":
                for peer in timed:
                    if peer["what"] == r["what"] and peer["variant"] in TIMES:
                        r[TIMES[peer["variant"]]] = round(peer["median_us"] / r["median_us"], 3)
        self.save(self.result)

    def crossing(self) -> None:
        """Measures the op by the length of the lists next to dense causal attention, by tokens, for both widths."""
        lengths, counts = targets.CROSSING_LENGTHS, targets.CROSSING_LISTS
        if self.s.small:
            lengths, counts = (32, 64), (4, 16)
        for width, kind in targets.WIDTHS.items():
            for length in lengths:
                if self.spent:
                    self.result["skipped"][f"crossing, D = {width}, {length}"] = SPENT
                    continue
                name = f"D = {width}, {'V = K' if kind.shared else 'K and V apart'}"
                self.crossing_at(name, self.sized(kind), length, counts)

    def crossing_at(self, name: str, kind: Shape, length: int, counts: tuple[int, ...]) -> None:
        rows = self.result["crossing"]
        for count in counts:
            case = make_case(kind.of(length, length, count, name=name), self.device)
            self.time(case, [self.ours(case, what) for what in ("fwd", "fb")], rows, case.pairs)
        for what in ("fwd", "fb"):
            for v in self.dense(case, what):
                self.time(case, [v], rows, 0)

    def dense(self, case: Case, what: str) -> list[Variant]:
        """Returns dense causal attention by SDPA and, where no fast SDPA takes the width, by torch.compile."""
        found = []
        if case.shape.shared:
            found.append(Variant(what, targets.PLAIN, lambda: peers.compiled_causal(case, what)))
        if not case.shape.shared or case.shape.queries <= targets.LONGEST_WIDE_SDPA:
            found.append(self.noted(targets.DENSE_CAUSAL, peers.unmasked, case, what))
        return found

    def errors(self) -> None:
        """Measures errors next to dense SDPA's (o and dq of sampled queries; all gradients of less), and equal bits."""
        for shape in self.shapes:
            self.report(f"errors: {shape.name}")
            case = make_case(shape, self.device)
            at = cases.sample_of(shape.queries, SAMPLED, self.device)
            runs = [cases.forward(case) | cases.both(case, case.leaves()) for _ in range(2)]
            differ = [k for k in runs[0] if not accuracy.same_bits(runs[0][k], runs[1][k])]
            self.result["determinism"].append({"case": shape.name, "differ": differ, "met": not differ})
            got, want = cases.picked(runs[0], at), cases.exact(case, at)
            self.record(case, "sampled queries", got, want, cases.dense_sampled(case, at))
            del runs
            self.tidy()
            if shape.decodes:
                continue
            for dtype in NARROW_AND_FULL.get(shape.name, (BF16,)):
                self.report(f"errors: {shape.name}, gradients, {dtype}")
                less = make_case(shape if self.s.small else shape.for_gradients(), self.device, dtype=dtype)
                got, want = cases.both(less, less.leaves()), cases.dense_gradients(less, torch.float64)
                self.record(less, "all gradients", got, want, cases.dense_gradients(less, dtype))
                self.tidy()
            self.save(self.result)

    def record(self, case: Case, of: str, got: cases.Named, want: cases.Named, dense: cases.Named) -> None:
        errors: dict[str, Any] = {}
        for name, value in got.items():
            entry: dict[str, Any] = {"relative": cases.relative(value, want[name])}
            if name in dense:
                entry["dense"] = cases.relative(dense[name], want[name])
                entry["bar"] = targets.ERROR_FACTOR * entry["dense"]
                entry["met"] = entry["relative"] <= entry["bar"]
            errors[name] = entry
        self.result["errors"].append({**cases.case_values(case), "of": of, "errors": errors})

    def memory(self) -> None:
        """Measures the op's peak memory beyond its inputs and outputs."""
        if not self.gpu:
            self.result["skipped"]["memory"] = "peak memory is read from a GPU's allocator"
            return
        for shape in self.shapes:
            case = make_case(shape, self.device)
            for what in self.whats(shape):
                call = self.ours(case, what).build()
                call()
                found = running.peak_memory(call, self.device, float("inf"))
                del found["met_bar"]  # there is no bar
                self.result["memory"].append({**cases.case_values(case), "what": what, **found})
            self.tidy()


def write(result: dict[str, Any], path: pathlib.Path) -> None:
    """Writes the JSON and, next to it, the table and the picture."""
    running.save(result, path)
    stored = json.loads(path.read_text())
    path.with_suffix(".md").write_text(table(stored))
    plot(stored, path.with_suffix(".png"))
