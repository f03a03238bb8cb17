# SPDX-License-Identifier: Apache-2.0
"""Law 4 where scores and mask meet inside one call: rows without keys are those of the kernel that PyTorch chooses."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from mhc_inductor import explain
from mhc_inductor.routing.graph.expressions import aten
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.operators.selection.fills import Fills, Rows
from tests.formulas.laws import TIGHT, Leaves, check, normal, observe, sdpa, selection_leaves
from tests.tools.capture import difference, eager, reasons, run

WIDTHS = {"fused": 8, "math": 6}
"""Widths of V, by the kernel that a CPU takes for q and k of width 8."""
LOWEST = {dtype: torch.finfo(dtype).min for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
SWALLOWING = {
    "fp64 lowest": (torch.float64, LOWEST[torch.float64]),
    "fp32 lowest": (torch.float32, LOWEST[torch.float32]),
    "fp32 -1e9": (torch.float32, -1e9),
    "bf16 lowest": (torch.bfloat16, LOWEST[torch.bfloat16]),
}
"""Dtypes with fills that make all scores of a row equal."""
SURVIVED = {
    "fp64 -1e9": (torch.float64, -1e9),
    "bf16 -1e9": (torch.bfloat16, -1e9),
    "fp16 lowest": (torch.float16, LOWEST[torch.float16]),
}
"""Those under which scores still count, or which are not low enough to be a mask."""
ROUTED = {"selection_attention": 1}


def _leaves(dtype: torch.dtype = torch.float64, kernel: str = "fused") -> Leaves:
    leaves = selection_leaves(empty=True, dtype=dtype)
    batch, keys, groups, _ = leaves["v"].shape
    return {**leaves, "v": normal(batch, keys, groups, WIDTHS[kernel], seed=24, dtype=dtype)}


def _adding(fill: float, dtype: torch.dtype = torch.float64) -> Callable[[Tensor], Tensor]:
    """Returns a function that makes a float mask of a bool mask."""
    return lambda mask: torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, fill)


def _called(p: Leaves, fill: float | None = None) -> Tensor:
    return sdpa(p, given=_adding(LOWEST[p["q"].dtype] if fill is None else fill, p["q"].dtype))


def test_the_kernels_differ_in_rows_without_keys() -> None:
    """Shows what the other tests are about: a mean of V, with the gradients of a sum where the kernel is fused."""
    leaves = _leaves()
    empty = (leaves["ranges"][..., 0] >= leaves["ranges"][..., 1]).all(-1).all(-1)

    def rows(p: Leaves) -> Tensor:
        return _called(p)[empty]

    fused = observe(rows, leaves)
    with sdpa_kernel(SDPBackend.MATH):
        math = observe(rows, leaves)
    assert empty.any() and torch.allclose(fused.outputs[0], math.outputs[0])
    for name in "qkv":
        assert torch.allclose(fused.grads[name], math.grads[name] * leaves["v"].shape[1]), name  # type: ignore[arg-type,operator]


@pytest.mark.parametrize("kernel", WIDTHS)
@pytest.mark.parametrize("how", SWALLOWING)
def test_a_fill_that_swallows_the_scores(how: str, kernel: str) -> None:
    dtype, fill = SWALLOWING[how]
    check(lambda p: _called(p, fill), _leaves(dtype, kernel), routed=ROUTED)


@pytest.mark.parametrize("kernel", WIDTHS)
@pytest.mark.parametrize("how", SURVIVED)
def test_a_fill_that_the_scores_survive(how: str, kernel: str) -> None:
    dtype, fill = SURVIVED[how]
    check(lambda p: _called(p, fill), _leaves(dtype, kernel), unrouted="selection_attention")


FILLS = {
    **{k: SWALLOWING[k] for k in ("fp32 lowest", "fp32 -1e9", "bf16 lowest")},
    "fp16 lowest": SURVIVED["fp16 lowest"],
}
MEASURED: dict[Any, list[Rows | None]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: [*[Rows.MEAN_SUMMED] * 3, None],
    aten._scaled_dot_product_efficient_attention.default: [Rows.ZERO, Rows.MEAN_SUMMED, Rows.ZERO, None],
    aten._scaled_dot_product_cudnn_attention.default: [Rows.ZERO, Rows.MEAN_SUMMED, Rows.ZERO, None],
    aten.bmm.default: [*[Rows.MEAN_SCORES] * 3, None],
    aten._scaled_dot_product_fused_attention_overrideable.default: [None] * 4,
    None: [None] * 4,
}
"""What rows without keys give by kernel and fill, None where it is not one of these or not known."""
BACKENDS = {
    SDPBackend.EFFICIENT_ATTENTION: aten._scaled_dot_product_efficient_attention.default,
    SDPBackend.CUDNN_ATTENTION: aten._scaled_dot_product_cudnn_attention.default,
    SDPBackend.MATH: aten.bmm.default,
}


@pytest.mark.parametrize("kernel", MEASURED, ids=str)
def test_what_each_kernel_gives(kernel: Any) -> None:
    for (dtype, fill), want in zip(FILLS.values(), MEASURED[kernel], strict=True):
        call: Any = types.SimpleNamespace(func=kernel, dtype=dtype)
        fills, got = Fills(call), None
        fills.added([fill], dtype)
        with contextlib.suppress(Mismatch):
            got = fills.rows(call)
        assert got is want and fills.zero is None, (dtype, fill)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["fp32 lowest", "fp32 -1e9", "bf16 lowest"])
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_what_each_kernel_of_a_gpu_gives(backend: SDPBackend, how: str) -> None:
    (dtype, fill), keys = FILLS[how], 40
    q, k, v = (torch.randn(1, 2, n, 64, device="cuda").to(dtype).requires_grad_() for n in (4, keys, keys))
    mask = torch.full((1, 1, 4, keys), fill, device="cuda", dtype=dtype)
    try:
        with sdpa_kernel(backend):
            o = F.scaled_dot_product_attention(q, k, v, mask)
    except RuntimeError as error:
        assert "No available kernel" in str(error) and backend is SDPBackend.CUDNN_ATTENTION
        return
    (dv,) = torch.autograd.grad(o, v, torch.ones_like(o))
    rows = MEASURED[BACKENDS[backend]][[*FILLS].index(how)]
    mean, weight = {Rows.ZERO: (0, 0), Rows.MEAN_SUMMED: (1, 1), Rows.MEAN_SCORES: (1, 1 / keys)}[rows]  # type: ignore[index]
    assert torch.allclose(o, mean * v.mean(-2, keepdim=True).expand_as(o), atol=1e-2)
    assert torch.allclose(dv, torch.full_like(dv, 4 * weight), rtol=1e-2)


@pytest.mark.parametrize("kernel", WIDTHS)
@pytest.mark.parametrize("frozen", ["", "q", "k", "v", "qk"])
@pytest.mark.parametrize("nan", [False, True])
def test_gradients_that_are_asked_for(frozen: str, nan: bool, kernel: str) -> None:
    leaves = _leaves(kernel=kernel)
    if nan:
        leaves["q"][:, 2:4] = float("nan")
    check(_called, leaves, routed=ROUTED, frozen=frozen)


def _grouped(p: Leaves) -> Tensor:
    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k[:, ::2], v[:, ::2], mask, scale=0.5, enable_gqa=True)

    return sdpa(p, given=_adding(LOWEST[torch.float64]), call=call)


CALLS: dict[str, Callable[[Leaves], Tensor]] = {
    # Features that are not adjacent in memory, for which PyTorch takes no fused kernel.
    "strided": lambda p: _called({**p, "v": p["v"].mT.contiguous().mT}),
    "grouped": _grouped,
}


@pytest.mark.parametrize("how", CALLS)
def test_ways_to_call_it(how: str) -> None:
    check(CALLS[how], _leaves(), routed=ROUTED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1])
def test_dynamic_sizes(dim: int, dtype: torch.dtype) -> None:
    """Marks the batch, or the queries, as dynamic."""

    def attend(*given: Tensor) -> Tensor:
        return _called(dict(zip(leaves, given, strict=True)))

    leaves, batch = _leaves(dtype), [] if dim else [(1, 0), (2, 0)]
    got = run(attend, [*leaves.values()], dynamic=None, symbolic=[dim, (3, dim), *batch])
    assert got.ops == ROUTED, reasons(got)
    assert difference(got, eager(attend, [*leaves.values()])) < TIGHT[dtype]


def test_a_kernel_that_is_chosen_around_the_compile() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        check(_called, _leaves(), routed=ROUTED, around=lambda: sdpa_kernel(SDPBackend.MATH))


def test_an_exported_program_may_run_where_other_kernels_are_chosen() -> None:
    class Model(torch.nn.Module):
        def forward(self, leaves: Leaves) -> Tensor:
            return _called(leaves)

    report = explain(torch.export.export(Model(), (_leaves(),)))
    assert not report.routed and ["exported" in miss.reason for miss in report.near_misses] == [True], report


def _switched(p: Leaves) -> Tensor:
    torch.backends.cuda.enable_flash_sdp(False)
    o = _called(p)
    torch.backends.cuda.enable_flash_sdp(True)
    return o


def _chosen(p: Leaves, region: bool = False) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return checkpoint(lambda q: _called({**p, "q": q}), p["q"], use_reentrant=False) if region else _called(p)


def _autocast(p: Leaves) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return _called({**p, "v": p["v"].float()})


def _late(p: Leaves) -> Tensor:
    return torch.arange(p["k"].shape[1]) > torch.arange(p["q"].shape[1])[:, None] + 5


LOW = _adding(LOWEST[torch.float64])
UNKNOWN: dict[str, tuple[Callable[[Leaves], Tensor], torch.dtype]] = {
    "a kernel that is chosen": (_chosen, torch.float64),
    "kernels that are switched": (_switched, torch.float64),
    "a kernel that is chosen around a region": (lambda p: _chosen(p, region=True), torch.float64),
    "a mask that autocast rounds to -inf": (_autocast, torch.float32),
    "a mask that would be -inf in the dtype of q": (
        lambda p: sdpa(p, given=_adding(LOWEST[torch.float32], torch.float32)),
        torch.bfloat16,
    ),
    "two fills": (lambda p: sdpa(p, given=lambda m: LOW(m).masked_fill(_late(p), -torch.inf)), torch.float64),
    "a fill twice": (lambda p: sdpa(p, given=lambda m: LOW(m) + LOW(m)), torch.float64),
    "a mask that trains": (
        lambda p: sdpa(p, given=lambda m: LOW(m) + p["k"].sum(-1)[:, None, None, :, 0]),
        torch.float64,
    ),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_is_not_known_stays(what: str) -> None:
    program, dtype = UNKNOWN[what]
    check(program, _leaves(dtype), unrouted="selection_attention")
