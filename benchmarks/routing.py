# SPDX-License-Identifier: Apache-2.0
"""Measures the routing pass: seconds by depth of DeepSeek-V4, time per node, and share of a whole compile."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import deepseek_model, environment, report

BAR_SECONDS, BAR_SHARE, BAR_DEPTH = 6.0, 0.20, 43
"""Bars: 6 s of CPU time on a model of 43 layers, and 20 % of the compile time."""


@contextlib.contextmanager
def watched() -> Iterator[list[Any]]:
    """Yields a list that collects the report of every run of the pass inside the context.

    Patches every module of the package that holds a reference to ``route``.
    """
    original = importlib.import_module("mhc_inductor.routing").route
    reports: list[Any] = []

    def route(gm: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        found = original(gm, *args, **kwargs)
        reports.append(dataclasses.replace(found, seconds=time.perf_counter() - start))
        return found

    holders = [m for name, m in list(sys.modules.items()) if name.split(".")[0] == "mhc_inductor"]
    holders = [m for m in holders if getattr(m, "route", None) is original]
    for module in holders:
        module.route = route  # type: ignore[attr-defined]
    try:
        yield reports
    finally:
        for module in holders:
            module.route = original  # type: ignore[attr-defined]


def summary(reports: list[Any]) -> dict[str, Any]:
    """Returns sums over the reports: graphs, nodes, seconds, routed and fused ops, near misses."""
    return {
        "graphs": len(reports),
        "nodes": sum(r.nodes for r in reports),
        "seconds": sum(r.seconds for r in reports),
        "routed": dict(Counter(x.op for r in reports for x in r.routed)),
        "fused": dict(Counter(x.op for r in reports for x in r.fused)),
        "near_misses": sum(len(r.near_misses) for r in reports),
        "problems": [p for r in reports for p in r.problems],
    }


def _traced(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, Any]:
    """Measures the pass over the graphs of one forward, without compiling them."""
    from mhc_inductor.routing import route
    from mhc_inductor.routing.graph.copies import copied

    reports, nodes, seconds, cpu = [], 0, 0.0, 0.0

    def capture(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        nonlocal nodes, seconds, cpu
        nodes += len(gm.graph.nodes)
        unrouted = copied(gm)
        # Route Dynamo's own module, as in a compile: it generates Python code of a changed graph only when called.
        start, start_cpu = time.perf_counter(), time.thread_time()
        reports.append(route(gm))
        seconds += time.perf_counter() - start
        cpu += time.thread_time() - start_cpu
        return unrouted.forward

    torch._dynamo.reset()
    start = time.perf_counter()
    torch.compile(model, backend=capture)(input_ids=ids)
    whole = time.perf_counter() - start
    found = summary(reports) | {"nodes": nodes, "seconds": seconds, "microseconds_a_node": 1e6 * seconds / nodes}
    # On a busy machine the CPU time of the thread is more reliable than the wall clock.
    return found | {"cpu_seconds": cpu, "dynamo_seconds": whole - seconds}


def _compiled(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, Any]:
    """Measures the pass inside a whole compile, forward and backward, with cold caches."""
    torch._dynamo.reset()
    with watched() as reports, torch._inductor.config.patch(force_disable_caches=True):
        start = time.perf_counter()
        call = torch.compile(model, backend="mhc_inductor")
        call(input_ids=ids, labels=ids).loss.backward()
        whole = time.perf_counter() - start
    torch._dynamo.reset()
    return summary(reports) | {"compile_seconds": whole, "share": summary(reports)["seconds"] / whole}


def run(
    device: torch.device, depths: tuple[int, ...], compile_depth: int, step: Callable[[str], None]
) -> dict[str, Any]:
    """Measures the pass at each depth, and the whole compile at ``compile_depth`` (0: skipped)."""
    bars = {"seconds": BAR_SECONDS, "share": BAR_SHARE, "depth": BAR_DEPTH}
    result = environment.header("routing", device, rows=[], compile=None, bars=bars)
    for depth in sorted({*depths, *([compile_depth] if compile_depth else [])}):
        size = dataclasses.replace(deepseek_model.TINY, layers=depth)
        model = deepseek_model.build(size, device, torch.float32).train()
        ids = deepseek_model.tokens(size, device)
        if depth in depths:
            step(f"{depth} layers: Dynamo and the pass")
            result["rows"].append({"layers": depth} | _traced(model, ids))
        if depth == compile_depth:
            step(f"{depth} layers: whole compile, forward and backward")
            result["compile"] = {"layers": depth} | _compiled(model, ids)
    return result


def _each(r: dict[str, Any]) -> list[dict[str, Any]]:
    cpu = f"{r['cpu_seconds']:.2f}" + _verdict(r["layers"] >= BAR_DEPTH, r["cpu_seconds"] <= BAR_SECONDS)
    return [r | {"cpu": cpu}]


TABLE = report.Table(
    "",
    "layers|nodes|pass, s|of the CPU, s|µs a node|Dynamo, s|routed|fused",
    "{layers}|{nodes:,}|{seconds:.2f}|{cpu}|{microseconds_a_node:.0f}|{dynamo_seconds:.1f}|{routed}|{fused}",
    _each,
)


def table(result: dict[str, Any]) -> str:
    """Returns the run as Markdown."""
    v, last = result["versions"], ""
    if c := result["compile"]:
        last = (
            f"In a whole compile of {c['layers']} layers, forward and backward, cold: {c['seconds']:.2f} of "
            f"{c['compile_seconds']:.1f} s, {100 * c['share']:.1f} %{_verdict(True, c['share'] <= BAR_SHARE)}."
        )
    facts = (
        f"torch {v['torch']}, transformers {v['transformers']}, Python {v['python']}, "
        f"commit {report.commit_of(result)}, {result['date']}"
    )
    lines = [facts, f"{result['device']['name']}; DeepSeek-V4 of transformers, tiny width"]
    return report.document("Cost of the routing pass", lines, TABLE.markdown(result["rows"]), last)


def _verdict(bars_apply: bool, met: bool) -> str:
    return "" if not bars_apply else " (bar met)" if met else " (**bar not met**)"


write = report.writer(table)
