# SPDX-License-Identifier: Apache-2.0
"""Selection attention and dense causal SDPA on a CPU, by length: blocks and lists of single keys, interleaved rounds.

Dense attention gets K and V repeated for every head beforehand. A ratio is the median of the rounds' own ratios, since
other work on the machine slows neighbouring calls alike.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import running, timing
from . import selection_cases as cases
from . import selection_targets as targets
from .selection_cases import Case
from .selection_targets import Shape

if TYPE_CHECKING:
    from .selection import Run

ROUNDS = 5
DENSE = "dense causal SDPA"
LONGEST_WITH_GRADIENTS = 16384
BF16, F32 = torch.bfloat16, torch.float32
CHECKED = 16
SELECTS = ("blocks", "tokens")


@dataclasses.dataclass
class Call:
    """One call to time: forward ("fwd") or forward and backward ("fb"), of the op on one case or of dense attention."""

    what: str
    variant: str
    case: Case
    run: Callable[[], Any]


def single_keys(shape: Shape) -> Tensor:
    """Returns ascending ranges of single causal keys, int32 ``[B, S, G, tokens, 2]``; all keys where there are fewer."""
    reach = cases.positions(shape, torch.device("cpu"))[:, None] + 1
    i = torch.arange(shape.tokens)
    low, high = i * reach // shape.tokens, (i + 1) * reach // shape.tokens
    low, width = low[None, :, None], (high - low).clamp(min=1)[None, :, None]
    draw = torch.rand((shape.batch, shape.queries, shape.groups, shape.tokens))
    at = (low + torch.minimum((draw * width).long(), width - 1)).int()
    return torch.stack((at, at + 1), -1)


def make_cases(shape: Shape, dtype: torch.dtype) -> list[Case]:
    """Returns cases of the same q, k and v: blocks of neighbours that share most of theirs, and single keys."""
    blocks = cases.make_case(dataclasses.replace(shape, tokens=0), "corr", torch.device("cpu"), dtype=dtype)
    blocks.select = f"{shape.picks} blocks of {shape.block}"
    single = dataclasses.replace(blocks, shape=shape, ranges=single_keys(shape), blocks=None)
    single.select = f"{shape.tokens} keys"
    return [blocks, single]


def dense(case: Case, what: str) -> Callable[[], Any]:
    """Returns a call of causal SDPA over all keys, with as many heads of keys as of queries."""
    h = case.shape.heads
    q, dout = (t.flatten(2, 3).transpose(1, 2).contiguous() for t in (case.q, case.dout))
    k, v = (t.repeat_interleave(h, 1) for t in (case.k, case.v))

    def attend(*leaves: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*leaves, is_causal=True)

    if what == "fwd":

        def forward() -> Tensor:
            with torch.no_grad():
                return attend(q, k, v)

        return forward
    leaves = [t.requires_grad_() for t in (q, k, v)]
    return lambda: torch.autograd.grad(attend(*leaves), leaves, dout)


def ours(case: Case, what: str) -> Callable[[], Any]:
    if what == "fwd":
        return lambda: cases.forward(case)
    leaves = case.leaves()
    return lambda: cases.both(case, leaves)


def calls(found: list[Case]) -> list[Call]:
    whats = ("fwd", "fb") if found[0].shape.queries <= LONGEST_WITH_GRADIENTS else ("fwd",)
    made = []
    for what in whats:
        made += [Call(what, "ops", case, ours(case, what)) for case in found]
        made.append(Call(what, DENSE, found[0], dense(found[0], what)))
    return made


def seconds(made: list[Call], rounds: int) -> list[list[float]]:
    """Returns the times of each call: one round after the other, after one untimed round."""
    times: list[list[float]] = [[] for _ in made]
    for at in range(rounds + 1):
        for call, samples in zip(made, times, strict=True):
            start = time.perf_counter()
            call.run()
            samples += [time.perf_counter() - start] if at else []
    return times


def rows(run: Run, found: list[Case]) -> list[dict[str, Any]]:
    """Times the calls of one shape and returns their rows, with ratios to dense and errors of sampled queries."""
    made = calls(found)
    times = seconds(made, min(ROUNDS, run.s.rounds))
    of_dense = {c.what: samples for c, samples in zip(made, times, strict=True) if c.variant == DENSE}
    result = []
    for call, samples in zip(made, times, strict=True):
        row = run.header(call.case, call)
        row |= timing.Timing([1e6 * s for s in samples]).as_json()
        if call.variant == DENSE:
            row["select"] = "all"
        else:
            ratios = [d / s for d, s in zip(of_dense[call.what], samples, strict=True)]
            row["times_dense"] = round(statistics.median(ratios), 3)
        result.append(row)
    for row, call in zip(result, made, strict=True):
        if call.variant == "ops" and call.what == "fwd":
            at = cases.sample(call.case.shape, CHECKED, run.device)
            got, want = cases.picked(call.case, cases.forward(call.case), at), cases.exact(call.case, at)
            row["o_error"] = cases.relative(got["o"], want["o"])
    return result


def errors(run: Run, shape: Shape, dtype: torch.dtype) -> None:
    """Records errors of the output and of all gradients against fp64, and those of dense SDPA with a mask."""
    for case in make_cases(shape, dtype):
        got, want = cases.both(case, case.leaves()), cases.masked_gradients(case, torch.float64)
        run.record(case, 1.0, got, want, cases.masked_gradients(case, dtype), shape.queries, "cpu_errors")


def measure(run: Run) -> None:
    """Fills the lists "cpu_dense" and "cpu_errors" of the result, on two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(targets.CPU_THREADS)
    try:
        for shape, dtype in targets.CPU_DENSE_SHAPES:
            run.report(f"{shape.name}, {shape.queries} tokens, {dtype}")
            run.result["cpu_dense"] += rows(run, make_cases(run.shape(shape), dtype))
            run.save(run.result)
            running.free(run.device)
        for dtype in (F32, BF16):
            errors(run, run.shape(targets.CPU_GRADIENTS), dtype)
    finally:
        torch.set_num_threads(before)
