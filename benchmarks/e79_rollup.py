# SPDX-License-Identifier: Apache-2.0
"""Measures the compilation of a Python loop over time: with the plugin, which rolls it up, and without."""

from __future__ import annotations

import time
from typing import Any

import torch

from . import e79_cases, running, timing
from .e79_cases import Case, make_case
from .routing import summary, watched

LIMIT_S = 110.0


def measure(case: Case) -> dict[str, Any]:
    """Compiles the loop of ``case`` with gradients and cold caches; returns seconds, what was routed, and the error."""
    n, batch, steps = case.sizes
    row: dict[str, Any] = {"n": n, "B": batch, "T": steps}
    leaves = case.leaves()
    ours = torch._dynamo.lookup_backend("mhc_inductor")

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        # Dynamo has unrolled the loop by now.
        row.update(dynamo_s=time.perf_counter() - start, nodes=len(gm.graph.nodes))
        return ours(gm, example_inputs)

    torch.compiler.reset()
    with watched() as reports, torch._inductor.config.patch(force_disable_caches=True):
        start = time.perf_counter()
        call = torch.compile(e79_cases.loop, backend=backend, dynamic=False)
        got = e79_cases.both(call, leaves)
        row["compile_s"] = time.perf_counter() - start
    found = summary(reports)
    row |= {"routed": found["routed"], "pass_s": found["seconds"]}
    start = time.perf_counter()
    want = e79_cases.both(e79_cases.loop, leaves)
    row["loop_call_s"] = time.perf_counter() - start
    row["worst_difference"] = max(e79_cases.relative(got[k], want[k]) for k in want)
    torch.compiler.reset()
    return row


def compiled_loop(n: int, batch: int, steps: int, device: str, send: Any) -> None:
    """Times the loop's forward under plain torch.compile and sends the figures of a row. Runs in its own process."""
    where = torch.device(device)
    case = make_case(n, batch, steps, where)
    try:
        start = time.perf_counter()
        call = torch.compile(e79_cases.loop, dynamic=False)
        runnable = timing.Runnable(lambda: e79_cases.forward(call, case), where)
        compile_s = time.perf_counter() - start
        t = timing.interleaved({"loop": runnable}, where, timing.Flusher(where), 20)["loop"]
        send.send({**timing.Timing([s / steps for s in t.samples_us]).as_json(), "compile_s": round(compile_s, 1)})
    except Exception as e:
        send.send({"error": running.message(e)})
