# SPDX-License-Identifier: Apache-2.0
"""The benchmark of index scores and of the keys that they choose: its rows, and how one run measures them.

Times are medians of CUDA-graph replays with the L2 flushed before each replay; a peer's call above ``LONG_US`` is
timed once, on the host's clock. A failing variant is recorded in its row. The result is written after every case.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import torch

from . import accuracy, running, timing
from . import index_cases as cases
from . import index_targets as targets
from .index_cases import Case, make_case
from .index_report import table
from .index_targets import BOTH, COMPILE, LOSS, SCORES, TORCH_TOPK, Shape
from .running import CPU_NOTICE
from .variants import Clock, Variant, measure

__all__ = ["PARTS", "Run", "Settings", "table", "write"]
PARTS = ("speed", "errors", "memory")
QUICK_PARTS = ("speed", "errors")
ROUNDS = 20
LONG_US = 200e3
SAMPLED = 48
LISTS = ("rows", "errors", "determinism", "memory")


@dataclasses.dataclass
class Settings:
    """Settings of one run. ``small``: use tiny shapes."""

    device: str = "auto"
    parts: tuple[str, ...] = PARTS
    peers: bool = True
    rounds: int = ROUNDS
    budget_s: float = 50.0
    seed: int | None = None
    small: bool = False

    def resolve(self) -> torch.device:
        return running.device_of(self.device)


class Run(running.PartRun[Settings]):
    operator, notice, unit, lists = "index", CPU_NOTICE, "microseconds", LISTS

    def __init__(
        self, settings: Settings, save: Callable[[dict[str, Any]], None], report: Callable[[str], None]
    ) -> None:
        # A CPU tries the run out; its times say nothing at any shape.
        settings.small = settings.small or settings.resolve().type != "cuda"
        super().__init__(settings, save, report)

    def recorded(self) -> dict[str, Any]:
        kept: dict[str, Any] = {"parts": list(self.s.parts), "peers": self.s.peers, "seed": self.seed}
        return kept | {"budget_s": self.s.budget_s, "small": self.s.small, "threads": torch.get_num_threads()}

    @property
    def bars_apply(self) -> bool:
        return super().bars_apply and not self.s.small

    def sized(self, shape: Shape) -> Shape:
        return shape.small() if self.s.small else shape

    # ---- running

    def time(self, case: Case, found: list[Variant]) -> None:
        """Builds, times and checks variants of one case; appends their rows and writes the result."""
        made = [{**dataclasses.asdict(case.shape), "what": v.what, "variant": v.variant} for v in found]
        measure(
            Clock(self.device, self.flush, self.s.rounds, LONG_US),
            found,
            made,
            lambda row, t: self.add_figures(case.shape, row, t),
            lambda row, got: {"finite": written(got)},
            lambda text: self.report(f"{case.shape.name}: {text}"),
        )
        self.result["rows"].extend(made)
        self.save(self.result)

    def add_figures(self, shape: Shape, row: dict[str, Any], t: timing.Timing) -> None:
        """Adds to a row its times and rate, and the bars if it has any."""
        row |= t.as_json()
        row["median_ms"] = round(row["median_us"] / 1e3, 6)
        if self.gpu and row["what"] == SCORES:
            pairs = shape.tokens * (shape.tokens + 1) // 2
            row["tflops"] = round(2 * pairs * shape.heads * shape.dim / row["median_us"] / 1e6, 1)
        target = targets.TARGETS.get((shape.name, row["what"]))
        if target is None or row["variant"] != "ops" or self.s.small:
            return
        row |= {"bar_us": target.bar, "goal_us": target.goal}
        if self.bars_apply:
            row |= {"met_bar": row["median_us"] <= target.bar, "met_goal": row["median_us"] <= target.goal}

    # ---- parts

    def speed(self) -> None:
        """Measures scores, choice and both, next to ``torch.topk`` and the compiled formula."""
        for shape in map(self.sized, targets.SHAPES):
            self.speed_of(make_case(shape, self.device))
            self.compare(shape.name)

    def speed_of(self, case: Case) -> None:
        self.time(case, [Variant(SCORES, "ops", lambda: lambda: cases.scores(case))])
        given = cases.scores(case)
        both = Variant(BOTH, "ops", lambda: lambda: cases.chosen(case))
        library = Variant("top-k", TORCH_TOPK, lambda: lambda: given.topk(case.shape.topk, -1))
        self.time(case, [both, library])
        if has_loss(case.shape):
            args = cases.loss_arguments(case)
            self.time(case, [Variant(LOSS, "ops", lambda: lambda: cases.trained(args))])
            del args
        for what in (SCORES, BOTH) if self.s.peers else ():
            if self.spent:
                self.result["skipped"][f"{COMPILE}, {case.shape.name}"] = running.SPENT
            else:
                self.time(case, [self.compiled(case, what)])

    def compiled(self, case: Case, what: str) -> Variant:
        return Variant(what, COMPILE, lambda: cases.compiled(case, what))

    def compare(self, name: str) -> None:
        """Adds how many times as long the compiled formula takes, and what choosing adds to the scores."""
        of = {(r["what"], r["variant"]): r for r in self.result["rows"] if r["name"] == name and "median_us" in r}
        for what in (SCORES, BOTH):
            if (what, "ops") in of and (what, COMPILE) in of:
                ours = of[what, "ops"]
                ours["times_compiled"] = round(of[what, COMPILE]["median_us"] / ours["median_us"], 3)
        if (SCORES, "ops") in of and (BOTH, "ops") in of:
            both = of[BOTH, "ops"]
            both["beyond_scores_us"] = round(both["median_us"] - of[SCORES, "ops"]["median_us"], 3)

    def errors(self) -> None:
        """Compares scores and choices of sampled queries with fp64, next to the plain formula; checks equal bits."""
        for shape in map(self.sized, targets.SHAPES):
            self.report(f"errors: {shape.name}")
            case = make_case(shape, self.device)
            at = cases.sample_of(shape.tokens, SAMPLED, self.device)
            want = cases.exact(case, at)
            outs: list[dict[str, torch.Tensor]]
            outs = [{"scores": cases.scores(case), "chosen": cases.chosen(case)} for _ in range(2)]
            error = cases.score_error(outs[0]["scores"][0, at], want)
            plain = cases.score_error(self.plain(case, at), want)
            wrong = cases.wrongly_chosen(outs[0]["chosen"][0, at], want, targets.RELATIVE_BAR)
            found = {
                "relative": error,
                "plain": plain,
                "bar": targets.RELATIVE_BAR,
                "met": error <= targets.RELATIVE_BAR,
            }
            row: dict[str, Any] = {"name": shape.name, "queries": len(at), "errors": {"scores": found}}
            if has_loss(shape):
                row["errors"]["loss"] = self.loss_errors(case, at, outs)
            row |= {"wrongly_chosen": wrong, "met": wrong == 0 and all(e["met"] for e in row["errors"].values())}
            self.result["errors"].append(row)
            differ = [k for k in outs[0] if not accuracy.same_bits(outs[0][k], outs[1][k])]
            self.result["determinism"].append({"case": shape.name, "differ": differ, "met": not differ})
            del outs
            self.tidy()
            self.save(self.result)

    def loss_errors(self, case: Case, at: torch.Tensor, outs: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
        """Compares the losses of the queries ``at`` with fp64; adds all outputs of two calls to ``outs``."""
        args = cases.loss_arguments(case)
        for out in outs:
            out.update(zip(("loss", "dscores", "dq", "dk", "dw"), cases.trained(args), strict=True))
        want = cases.loss_of(args, at, torch.float64)
        error, plain = (
            cases.relative(x, want) for x in (outs[0]["loss"][0, at], cases.loss_of(args, at, torch.float32))
        )
        return {
            "relative": error,
            "plain": plain,
            "bar": targets.RELATIVE_BAR,
            "met": error <= targets.RELATIVE_BAR,
        }

    def plain(self, case: Case, at: torch.Tensor) -> torch.Tensor:
        """Returns the models' formula in fp32 for the queries ``at``, ``[n, T]``."""
        x = torch.einsum("shd,td->sht", case.q[0, at].float(), case.k[0].float())
        total = ((x * case.scale).relu() * case.w[0, at, :, None]).sum(1)
        keys = torch.arange(case.shape.tokens, device=total.device)
        return total.masked_fill(keys > at[:, None], float("-inf"))

    def memory(self) -> None:
        """Measures the peaks of one choice, at ``LONG`` too, and of a loss, beyond inputs and outputs."""
        if not self.gpu:
            self.result["skipped"]["memory"] = "peak memory is read from a GPU's allocator"
            return
        for shape in map(self.sized, (targets.SHAPES[0], targets.LONG)):
            case = make_case(shape, self.device)
            cases.chosen(dataclasses.replace(case, **first_queries(case)))
            self.result["memory"].append(self.memory_of(shape, functools.partial(cases.chosen, case)))
            del case
            self.tidy()
        shape = self.sized(targets.SHAPES[0])
        args = cases.loss_arguments(make_case(shape, self.device))
        cases.trained(args)  # compiles the kernels
        row = self.memory_of(shape, functools.partial(cases.trained, args))
        self.result["memory"].append(row | {"name": f"{shape.name}, {LOSS}"})

    def memory_of(self, shape: Shape, call: Callable[[], Any]) -> dict[str, Any]:
        start = time.perf_counter()
        found = running.peak_memory(call, self.device, targets.MEMORY_BAR_MB)
        row = {**dataclasses.asdict(shape), **found, "seconds": round(time.perf_counter() - start, 3)}
        row |= {"bar_mb": round(targets.MEMORY_BAR_MB, 1), "goal_mb": round(targets.MEMORY_GOAL_MB, 1)}
        return row | {"met_goal": found["peak_above_mb"] <= targets.MEMORY_GOAL_MB}


def has_loss(shape: Shape) -> bool:
    """Returns whether the loss is measured at a shape."""
    return (shape.name, LOSS) in targets.TARGETS


def written(outputs: Any) -> bool:
    """Returns whether no element keeps what ``run_poisoned`` filled the outputs with."""
    return all(not bool((t.isnan() if t.is_floating_point() else t == -7).any()) for t in timing.tensors(outputs))


def first_queries(case: Case, count: int = 256) -> dict[str, torch.Tensor]:
    """Returns the inputs that a smaller call has, which compiles the kernels."""
    return {"q": case.q[:, :count], "w": case.w[:, :count], "limit": case.limit[:, :count]}


def write(result: dict[str, Any], path: pathlib.Path) -> None:
    """Writes the JSON and, next to it, the table."""
    running.save(result, path)
    path.with_suffix(".md").write_text(table(json.loads(path.read_text())))
