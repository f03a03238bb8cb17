# SPDX-License-Identifier: Apache-2.0
"""The benchmark of index scores and of the keys that they choose: its rows, how one run measures them, its tables.

Long calls get fewer rounds; a peer's call above ``long_us`` is timed once, on the host's clock.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from . import accuracy, report, running, timing, variants
from . import index_cases as cases
from .attention import sample_of
from .index_cases import BOTH, COMPILE, LOSS, SCORES, TORCH_TOPK, Case, Shape, make_case
from .report import Result, Row, Table
from .variants import Variant

PARTS = ("speed", "errors", "memory")
QUICK = {"parts": ("speed", "errors"), "peers": False}
SAMPLED = 48


@dataclasses.dataclass
class Settings(running.Settings):
    parts: tuple[str, ...] = PARTS
    budget_s: float = 50.0


class Run(variants.Run):
    operator = "index"
    lists = ("rows", "errors", "determinism", "memory")
    long_us = 200e3

    def time(self, case: Case, found: list[Variant]) -> None:
        figures = functools.partial(self.add_figures, case.shape)
        sizes = dataclasses.asdict(case.shape)
        self.timed("rows", case.shape.name, found, lambda _: sizes, figures, lambda _, got: {"finite": written(got)})

    def add_figures(self, shape: Shape, row: Row, t: timing.Timing) -> None:
        """Adds to a row its times and rate, and the bars if it has any."""
        row |= t.in_ms()
        if self.gpu and row["what"] == SCORES:
            pairs = shape.tokens * (shape.tokens + 1) // 2
            row["tflops"] = round(2 * pairs * shape.heads * shape.dim / row["median_us"] / 1e6, 1)
        self.add_bars(row, cases.TARGETS.get((shape.name, row["what"])))

    # ---- parts

    def speed(self) -> None:
        """Measures scores, choice and both, next to ``torch.topk`` and the compiled formula."""
        for shape in map(self.sized, cases.SHAPES):
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
                self.time(case, [Variant(what, COMPILE, functools.partial(cases.compiled, case, what))])

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
        for shape in map(self.sized, cases.SHAPES):
            self.report(f"errors: {shape.name}")
            case = make_case(shape, self.device)
            at = sample_of(shape.tokens, SAMPLED, self.device)
            want = cases.exact(case, at)
            outs = [{"scores": cases.scores(case), "chosen": cases.chosen(case)} for _ in range(2)]
            plain = cases.formula(case.q[:, at], case.k, case.w[:, at], case.scale, at)[0]
            wrong = cases.wrongly_chosen(outs[0]["chosen"][0, at], want, cases.RELATIVE_BAR)
            errors = {"scores": _error(*(cases.score_error(x, want) for x in (outs[0]["scores"][0, at], plain)))}
            if has_loss(shape):
                errors["loss"] = self.loss_error(case, at, outs)
            row = {"name": shape.name, "queries": len(at), "errors": errors, "wrongly_chosen": wrong}
            self.result["errors"].append(row | {"met": wrong == 0 and all(e["met"] for e in errors.values())})
            self.result["determinism"].append({"case": shape.name, **accuracy.equal_bits(*outs)})
            del outs
            self.tidy()
            self.save(self.result)

    def loss_error(self, case: Case, at: torch.Tensor, outs: list[dict[str, torch.Tensor]]) -> Row:
        """Compares the losses of the queries ``at`` with fp64; adds all outputs of two calls to ``outs``."""
        args = cases.loss_arguments(case)
        for out in outs:
            out.update(zip(("loss", "dscores", "dq", "dk", "dw"), cases.trained(args), strict=True))
        want = cases.loss_of(args, at, torch.float64)
        plain = cases.loss_of(args, at, torch.float32)
        return _error(*(accuracy.relative(x, want) for x in (outs[0]["loss"][0, at], plain)))

    def memory(self) -> None:
        """Measures the peaks of one choice, at ``LONG`` too, and of a loss, beyond inputs and outputs."""
        for shape in map(self.sized, (cases.SHAPES[0], cases.LONG)):
            case = make_case(shape, self.device)
            few = {"q": case.q[:, :256], "w": case.w[:, :256], "limit": case.limit[:, :256]}
            cases.chosen(dataclasses.replace(case, **few))  # compiles the kernels
            self.result["memory"].append(self.memory_of(shape, functools.partial(cases.chosen, case)))
            del case
            self.tidy()
        shape = self.sized(cases.SHAPES[0])
        args = cases.loss_arguments(make_case(shape, self.device))
        cases.trained(args)  # compiles the kernels
        row = self.memory_of(shape, functools.partial(cases.trained, args))
        self.result["memory"].append(row | {"name": f"{shape.name}, {LOSS}"})

    def memory_of(self, shape: Shape, call: Callable[[], Any]) -> Row:
        start = time.perf_counter()
        found = running.peak_memory(call, self.device, cases.MEMORY_BAR_MB)
        row = {**dataclasses.asdict(shape), **found, "seconds": round(time.perf_counter() - start, 3)}
        row |= {"bar_mb": round(cases.MEMORY_BAR_MB, 1), "goal_mb": round(cases.MEMORY_GOAL_MB, 1)}
        return row | {"met_goal": found["peak_above_mb"] <= cases.MEMORY_GOAL_MB}


def _error(relative: float, plain: float) -> Row:
    met = relative <= cases.RELATIVE_BAR
    return {"relative": relative, "plain": plain, "bar": cases.RELATIVE_BAR, "met": met}


def has_loss(shape: Shape) -> bool:
    """Returns whether the loss is measured at a shape."""
    return (shape.name, LOSS) in cases.TARGETS


def written(outputs: Any) -> bool:
    """Returns whether no element keeps what ``run_poisoned`` filled the outputs with."""
    return all(not bool((t.isnan() if t.is_floating_point() else t == -7).any()) for t in timing.tensors(outputs))


# ---- tables


def _beyond(r: Row) -> list[Row]:
    return [
        r | {"also": f"{report.time(r['beyond_scores_us'])} beyond the scores alone"} if "beyond_scores_us" in r else r
    ]


def _each(row: Row) -> list[Row]:
    """Returns a row for each tensor; the keys that are chosen are those of the scores."""
    rows = [r | ({} if r["tensor"] == "scores" else {"wrongly_chosen": None}) for r in report.each_error(row)]
    return [r | {"met": r["met"] and not r["wrongly_chosen"]} for r in rows]


TABLES: report.Makers = {
    "rows": Table(
        "Speed: causal, bf16 q and k, fp32 w (TFLOP/s: of visible pairs)",
        "case|S = T|D|topk||implementation|time|quartiles|TFLOP/s|bar|goal||x torch.compile|note",
        "{name}|{tokens}|{dim}|{topk}|{what}|{title}|{time}|{quartiles}|{tflops:.0f}|{bar_us:time}|{goal_us:time}|{verdict}"
        "|{times_compiled:.2f}|{note}",
        _beyond,
    ),
    "errors": Table(
        "Scores and losses of sampled queries against fp64, and the keys chosen",
        "case||queries|error|the formula's in fp32|bar|keys wrongly chosen|",
        "{name}|{tensor}|{queries}|{relative:.3g}|{plain:.3g}|{bar:.3g}|{wrongly_chosen}|{yes}",
        _each,
    ),
    "determinism": report.TWO_RUNS,
    "memory": Table(
        "Peak memory of one choice or loss beyond inputs and outputs",
        "case|S = T|heads|peak, MB|bar|goal||seconds of one call",
        "{name}|{tokens}|{heads}|{peak_above_mb:.0f}|{bar_mb:.0f}|{goal_mb:.0f}|{verdict}|{seconds:.3g}",
    ),
}


def table(result: Result) -> str:
    """Returns the whole run as Markdown."""
    lines = [*report.facts(result), report.timing_of(result)]
    return report.document("Index scores benchmark", lines, *report.sections_of(result, TABLES))


write = report.writer(table)
