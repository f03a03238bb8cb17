# SPDX-License-Identifier: Apache-2.0
"""The benchmark of selection attention over lists of keys: its rows, and how one run measures them.

Times are medians of CUDA-graph replays with the L2 flushed before each replay; a peer's call above ``LONG_US`` is
timed once, on the host's clock. A failing variant is recorded in its row. The result is written after every case. What
the run has no time for is a row with the reason, and the run is not complete; a later one goes on from its file.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from . import accuracy, lists_fill, lists_warm, running, timing
from . import lists_cases as cases
from . import lists_others as others
from . import lists_peers as peers
from . import lists_targets as targets
from .lists_cases import Case, make_case
from .lists_report import TIMES, plot, table
from .lists_targets import Shape
from .running import CPU_NOTICE
from .variants import Clock, Variant, measure

__all__ = ["PARTS", "Run", "Settings", "table", "write"]
PARTS = ("speed", "errors", "memory", "crossing", "peers")
QUICK_PARTS = ("speed", "errors")
ROUNDS, QUICK_ROUNDS = 20, 8
LONG_US = 200e3
SAMPLED, CHECKED = 32, 8
LISTS_OF = {
    "speed": ("rows",),
    "errors": ("errors", "determinism"),
    "memory": ("memory",),
    "crossing": ("crossing",),
    "peers": ("peers",),
}
"""The lists of the result that each part fills."""
LISTS = tuple(name for names in LISTS_OF.values() for name in names)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NARROW_AND_FULL = {"A": (BF16, F16, F32), "D": (BF16, F16, F32)}
"""Dtypes in which gradients are compared with fp64; bf16 alone elsewhere."""


PLACES = ("crossing", "peers")
"""Parts that a later run goes on with place by place; the others take seconds and are kept or made as a whole."""
Row = dict[str, Any]


@dataclasses.dataclass
class Settings:
    """Settings of one run.

    ``small``: use tiny shapes; ``warm``: first compile in parallel processes; ``budget_s``: seconds from the start,
    compiling included, after which no peer and no crossing is begun; ``earlier``: the result of a run to go on from.
    """

    device: str = "auto"
    parts: tuple[str, ...] = PARTS
    shapes: tuple[str, ...] = tuple(targets.SHAPES)
    rounds: int = ROUNDS
    warm: bool = True
    budget_s: float = 480.0
    seed: int | None = None
    small: bool = False
    earlier: dict[str, Any] | None = None

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
        self.earlier = settings.earlier or {}
        if self.earlier:
            lists_fill.same_machine(self.result, self.earlier)
            self.result["resumed"] = [*self.earlier.get("resumed", ()), self.earlier["date"]]

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
        if name in PLACES or name not in self.earlier.get("seconds_of", {}) or name in self.earlier["skipped"]:
            super().part(name)
        else:
            self.result |= {of: self.earlier[of] for of in LISTS_OF[name]}
        self.result["seconds_of"][name] = round(time.monotonic() - begun, 1)

    def place(self, part: str, wanted: list[Row], measure: Callable[[], None]) -> None:
        """Fills the ``wanted`` rows of one place of a part: as the earlier run has them, measured, or with a reason.

        A place is measured as a whole, because its rows are compared with each other.
        """
        rows = self.result[part]
        kept = [r for w in wanted if (r := _found(w, self.earlier.get(part, ()))) is not None]
        if len(kept) == len(wanted):
            rows += kept
            return
        begun = len(rows)
        if not self.spent:
            measure()
        rows += [w | {"reason": running.SPENT} for w in wanted if not _found(w, rows[begun:])]
        self.save(self.result)

    # ---- variants

    def ours(self, case: Case, what: str) -> Variant:
        def build() -> Callable[[], Any]:
            if what == "fwd":
                return lambda: cases.forward(case)
            leaves = case.leaves()
            return lambda: cases.both(case, leaves)

        return Variant(what, "ops", build)

    def variant(self, case: Case, what: str, name: str) -> Variant:
        if name == "ops":
            return self.ours(case, what)

        def build() -> Callable[[], Any]:
            call, found.note = peers.make(name, case, what)
            return call

        found = Variant(what, name, build)
        return found

    def whats(self, shape: Shape) -> tuple[str, ...]:
        return ("fwd",) if shape.decodes else ("fwd", "fb")

    # ---- running

    def time(self, case: Case, found: list[Variant], rows: list[dict[str, Any]], pairs: int) -> None:
        """Builds, times and checks variants of one case; appends their rows and writes the result."""
        made = [_header(case.shape, v.what, v.variant) for v in found]
        at = cases.sample_of(case.shape.queries, CHECKED, self.device)
        want = cases.exact(case, at)

        def check(row: dict[str, Any], got: cases.Named) -> dict[str, Any]:
            added: dict[str, Any] = {"finite": all(bool(t.isfinite().all()) for k, t in got.items() if k != "lse")}
            if row["variant"] in targets.OTHER_KEYS:
                return added
            errors = {n: cases.relative(t, want[n]) for n, t in cases.picked(got, at).items() if n != "lse"}
            return added | {f"{n}_error": e for n, e in errors.items()}

        clock = Clock(self.device, self.flush, self.s.rounds, LONG_US)
        name = f"{case.shape.name}, {case.shape.entries} keys: "
        try:
            measure(
                clock,
                found,
                made,
                lambda row, t: self.add_figures(case.shape, row, t, pairs),
                check,
                lambda text: self.report(name + text),
            )
        finally:  # what failed may have taken the device with it
            rows.extend(r for r in made if _ended(r))
            self.save(self.result)

    def add_figures(self, shape: Shape, row: dict[str, Any], t: timing.Timing, pairs: int) -> None:
        """Adds to a row its times and rate."""
        row |= t.as_json()
        row["median_ms"] = round(row["median_us"] / 1e3, 6)
        if row["variant"] in targets.OTHER_KEYS or not self.gpu:
            return
        row["tflops"] = round(targets.operations(shape, pairs, row["what"]) / row["median_us"] / 1e6, 1)

    def add_bars(self, row: dict[str, Any]) -> None:
        """Adds to a row of the op the bars that it has."""
        key = (row["case"], row["what"])
        if "median_us" not in row or not self.gpu or self.s.small:
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
        for row in self.result["rows"]:
            self.add_bars(row)

    def peers(self) -> None:
        """Measures the other implementations at the same shapes next to the op, and how many times as long they take."""
        for shape in self.shapes:
            for what in self.whats(shape):
                names = ("ops", *self.packages(shape, what), *shape.peers)
                wanted = [_header(shape, what, name) for name in names]
                self.place("peers", wanted, functools.partial(self.peers_at, shape, what, names))

    def packages(self, shape: Shape, what: str) -> list[str]:
        """Returns the other packages to measure at a shape; why one cannot be measured here goes into the result."""
        reasons = {name: others.missing(name) for name in shape.packages(what)}
        self.result["skipped"] |= {name: reason for name, reason in reasons.items() if reason}
        return [name for name, reason in reasons.items() if not reason]

    def peers_at(self, shape: Shape, what: str, names: Sequence[str]) -> None:
        case = make_case(shape, self.device)
        self.each("peers", case, what, names, case.pairs)
        self.compare(shape.name, what)

    def each(self, part: str, case: Case, what: str, names: Iterable[str], pairs: int) -> None:
        """Times variants one at a time, because several would not fit into memory together, while there is time."""
        for name in names:
            before = _found(_header(case.shape, what, name), self.earlier.get(part, ()))
            if name != "ops" and before is not None and "error" in before:
                self.result[part].append(before)  # not again: it may have ended the earlier run
            elif name == "ops" or not self.spent:
                self.time(case, [self.variant(case, what, name)], self.result[part], pairs)

    def compare(self, name: str, what: str) -> None:
        """Adds to the op's row of the peers how many times as long each of them takes."""
        timed = [r for r in self.result["peers"] if (r["case"], r["what"]) == (name, what) and "median_us" in r]
        for r in (r for r in timed if r["variant"] == "ops"):
            for peer in (p for p in timed if p["variant"] in TIMES):
                r[TIMES[peer["variant"]]] = round(peer["median_us"] / r["median_us"], 3)

    def crossing(self) -> None:
        """Measures the op by the length of the lists next to dense causal attention, by tokens, for both widths."""
        lengths, counts = targets.CROSSING_LENGTHS, targets.CROSSING_LISTS
        if self.s.small:
            lengths, counts = (32, 64), (4, 16)
        for width, kind in targets.WIDTHS.items():
            for length in lengths:
                name = f"D = {width}, {'V = K' if kind.shared else 'K and V apart'}"
                shapes = [self.sized(kind).of(length, length, count, name=name) for count in counts]
                wanted = [_header(shape, what, "ops") for shape in shapes for what in ("fwd", "fb")]
                wanted += [_header(shapes[-1], what, v) for what in ("fwd", "fb") for v in shapes[-1].dense]
                self.place("crossing", wanted, functools.partial(self.crossing_at, shapes))

    def crossing_at(self, shapes: list[Shape]) -> None:
        rows = self.result["crossing"]
        for shape in shapes:
            case = make_case(shape, self.device)
            self.time(case, [self.ours(case, what) for what in ("fwd", "fb")], rows, case.pairs)
        for what in ("fwd", "fb"):
            self.each("crossing", case, what, shapes[-1].dense, 0)

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
        self.result["errors"].append({**cases.case_values(case.shape, case.q.dtype), "of": of, "errors": errors})

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
                self.result["memory"].append({**cases.case_values(shape), "what": what, **found})
            self.tidy()


def _header(shape: Shape, what: str, variant: str) -> Row:
    """Returns what names a row."""
    row = cases.case_values(shape) | {"what": what, "variant": variant}
    return row | ({"n": row["S_kv"]} if variant in targets.OTHER_KEYS else {})


def _found(header: Row, rows: Iterable[Row]) -> Row | None:
    """Returns the row of this header that was measured or failed."""
    return next((r for r in rows if _ended(r) and header.items() <= r.items()), None)


def _ended(row: Row) -> bool:
    return "median_us" in row or "error" in row


def write(result: dict[str, Any], path: pathlib.Path) -> None:
    """Writes the JSON and, next to it, the table and the picture."""
    running.save(result, path)
    stored = json.loads(path.read_text())
    path.with_suffix(".md").write_text(table(stored))
    plot(stored, path.with_suffix(".png"))
