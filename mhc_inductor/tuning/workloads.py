# SPDX-License-Identifier: Apache-2.0
"""What ``python -m mhc_inductor tune`` runs: each operator forward and backward at the widths that models have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import mhc_inductor as mi
from mhc_inductor.tuning.search import Calls, Workload

KINDS = ("mhc", "selection", "lists", "index", "e79")
WIDTHS = (2560, 4096, 7168)
SIZES = (8192, 77, 1)
"""Tokens: the first is timed; equal bits are asked of all."""

Op = Callable[..., Any]


def workloads(kinds: Sequence[str], widths: Sequence[int], device: torch.device) -> list[Workload]:
    """Returns the workloads of these kinds; ``widths`` are D of mHC.

    Forwards come first: a configuration is measured where it is most of the time.
    """
    every = {
        "mhc": [(f"mHC {part}, D = {D}", functools.partial(_MHC[part], D)) for D in widths for part in _MHC],
        "selection": [
            (f"selection, {h} heads of {D}", functools.partial(_ranges, h, D)) for h, D in ((16, 128), (4, 128))
        ],
        "lists": [(f"lists, 64 heads of {D}", functools.partial(_lists, D)) for D in (128, 512, 576)],
        "index": [(f"index, 64 heads of {D}", functools.partial(_index, D)) for D in (64, 128)],
        "e79": [(f"E79, n = {n}", functools.partial(_e79, n)) for n in (16, 32, 64, 96, 128)],
    }
    return [
        Workload(f"{name}, {'training' if trains else 'forward'}", functools.partial(_calls, make, device, trains))
        for kind in kinds
        for trains in (False, True)
        for name, make in every[kind]
    ]


def _calls(make: Callable[[int, Any], tuple[Op, list[Tensor]]], device: torch.device, trains: bool) -> Calls:
    runs, timed = [], None
    for size in SIZES:
        op, inputs = make(size, _Draw(torch.Generator(device).manual_seed(size), device))
        runs.append(functools.partial(_trained, op, inputs))
        timed = timed or (runs[0] if trains else functools.partial(_forward, op, inputs))
    assert timed is not None
    return Calls(lambda: [t for run in runs for t in run()], timed)


@torch.no_grad()
def _forward(op: Op, inputs: Sequence[Tensor]) -> None:
    op(*inputs)


def _trained(op: Op, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns an op's outputs, and the gradients of their sum where an input can have one."""
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
    out = op(*leaves)
    outs = [t for t in ([out] if isinstance(out, Tensor) else out) if t is not None]
    wanted = [t for t in outs if t.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [torch.ones_like(t) for t in wanted])
    return [*(t.detach() for t in outs), *(t.grad for t in leaves if t.grad is not None)]


class _Draw:
    """Draws the inputs of a workload on its device."""

    def __init__(self, generator: torch.Generator, device: torch.device) -> None:
        self.generator, self.device = generator, device

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).mul_(scale).to(dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator, device=self.device, dtype=torch.int32)


# --- the operators, each as (tokens, draw) -> (call, inputs) -------------------------------------------------


def _pre(D: int, T: int, draw: _Draw) -> tuple[Op, list[Tensor]]:
    n, fp32 = 4, torch.float32
    m = n * n + 2 * n
    inputs = [draw.normal(T, n, D), draw.normal(m, n * D, scale=(n * D) ** -0.5, dtype=fp32)]
    return functools.partial(mi.mhc_pre, sinkhorn_iters=20), [
        *inputs,
        draw.normal(3, dtype=fp32),
        draw.normal(m, dtype=fp32),
    ]


def _post(D: int, T: int, draw: _Draw) -> tuple[Op, list[Tensor]]:
    n, fp32 = 4, torch.float32
    inputs = [draw.normal(T, n, D), draw.normal(T, D), draw.normal(T, n, dtype=fp32), draw.normal(T, n, n, dtype=fp32)]
    return functools.partial(mi.mhc_post, transpose_res=True), inputs


_MHC = {"pre": _pre, "post": _post}


def _ranges(h: int, D: int, S: int, draw: _Draw) -> tuple[Op, list[Tensor]]:
    keys = max(S, 64)
    start = draw.integers(keys, 1, S, 1, 16, 1) // 64 * 64
    q, k, v = draw.normal(1, S, 1, h, D), draw.normal(1, 1, keys, D), draw.normal(1, 1, keys, D)
    return mi.selection_attention, [q, k, v, torch.cat((start, start + 64), -1)]


def _lists(D: int, S: int, draw: _Draw) -> tuple[Op, list[Tensor]]:
    queries, keys = min(S, 1024), 4096
    q, kv = draw.normal(1, queries, 1, 64, D), draw.normal(1, 1, keys, D)
    width = min(D, 512)

    def attend(q: Tensor, kv: Tensor, indices: Tensor) -> Tensor:
        return mi.selection_attention(q, kv, kv, indices=indices, v_width=width)

    return attend, [q, kv, draw.integers(keys, 1, queries, 1, 512)]


def _index(D: int, S: int, draw: _Draw) -> tuple[Op, list[Tensor]]:
    queries, keys = min(S, 2048), max(S, 64)
    inputs = [draw.normal(1, queries, 64, D), draw.normal(1, keys, D), draw.normal(1, queries, 64)]
    return lambda q, k, w: mi.index_scores(q, k, w, scale=D**-0.5), inputs


def _e79(n: int, T: int, draw: _Draw) -> tuple[Op, list[Tensor]]:
    steps = min(T, 512)
    return mi.e79_scan, [draw.normal(steps, 32, 4 * n, dtype=torch.float32)]
