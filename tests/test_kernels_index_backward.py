# SPDX-License-Identifier: Apache-2.0
"""The kernels of the index scores' gradients through their launch plan, with poisoned buffers, against fp64.

They run compiled on a GPU, elsewhere in the interpreter.
"""

from __future__ import annotations

import pytest
import torch
from conftest import some

from mhc_inductor.kernels.index import backward_plan
from mhc_inductor.reference import index as reference
from tests.oracles import index as h

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NAMES = ("dq", "dk", "dw")


def check(builder, args, kind="everything", scale=0.7, size=1.0, g_dtype=F32):
    """Checks the gradients against fp64; returns them."""
    visible = h.visibility(kind, *args[:2])
    see = h.seen(*args[:2], visible)
    g = torch.randn(see.shape, generator=torch.Generator().manual_seed(9), dtype=F64).to(see.device, g_dtype) * size
    wild = torch.where(see, g, torch.nan)  # what stands at hidden keys is not used
    assert backward_plan.unsupported(builder, g, *args) is None
    got = backward_plan.plan_index_scores_backward(builder, wild, *args, scale, *visible)
    leaves = [t.double().requires_grad_() for t in args]
    exact = h.oracle(*leaves, scale, visible).masked_fill(~see, 0.0)
    wants = torch.autograd.grad(exact, leaves, g.double())
    plains = reference.index_scores_backward(g, *args, scale, *visible)
    for name, a, want, plain, given in zip(NAMES, got, wants, plains, args, strict=True):
        assert (a.shape, a.dtype) == (given.shape, given.dtype) and a.is_contiguous(), name
        if want.norm():
            error, formula = (float((t.double() - want).norm() / want.norm()) for t in (a, plain))
            # A product with bf16 keys or queries rounds its other factor to bf16, with fp16 ones to tf32.
            assert error <= 2 * formula + torch.finfo(args[0].dtype).eps + 1e-6, (name, error, formula)
        else:
            assert not a.any(), name
    return got


@pytest.mark.parametrize("kind", h.KINDS)
def test_what_hides_keys(builder, device, kind):
    check(builder, h.make_inputs(2, 70, 90, 2, 24, device=device), kind)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(
    ("S", "T", "H", "D"),
    some(
        [(300, 500, 64, 128), (70, 700, 3, 80), (1, 300, 5, 256), (200, 100, 128, 64), (40, 40, 1, 1)],
        [(40, 70, 2, 16), (3, 70, 3, 40), (70, 40, 1, 1)],
    ),
)
def test_heads_and_widths(builder, device, S, T, H, D, dtype):
    check(builder, h.make_inputs(1, S, T, H, D, dtype, device=device), "causal")


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_tiny_gradients_survive(builder, device, dtype):
    args = h.make_inputs(1, 40, 70, 2, 16, dtype, device=device)
    if dtype is F16:  # dq and dk are fp16 themselves: only dw, in fp32, has the range
        args = (*args[:2], args[2] * 1e9)
    check(builder, args, size=1e-9)


@pytest.mark.parametrize("w_dtype", [BF16, F32])
@pytest.mark.parametrize("g_dtype", [BF16, F32])
def test_dtypes_of_weights_and_gradients(builder, device, w_dtype, g_dtype):
    check(builder, h.make_inputs(1, 40, 60, 4, 16, BF16, w_dtype=w_dtype, device=device), g_dtype=g_dtype)


def test_parts_of_the_queries(builder, device, monkeypatch):
    """Tests more parts than tiles of queries per part, of which the last is not full."""
    monkeypatch.setattr(backward_plan, "PART_TILES", 1)
    check(builder, h.make_inputs(2, 333, 40, 1, 16, BF16, device=device), "limits")


@pytest.mark.parametrize("sizes", [(2, 40, 70, 3, 16), (1, 140, 70, 2, 16, BF16)], ids=str)
def test_two_runs_of_any_strides_are_equal(builder, device, sizes):
    q, k, w = h.make_inputs(*sizes, device=device)
    plain = check(builder, (q, k, w))
    odd = (q.transpose(1, 2).contiguous().transpose(1, 2), k.mT.contiguous().mT, w.mT.contiguous().mT)
    for a, b in zip(plain, check(builder, odd), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("B", "S", "T"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (1, 1, 1)])
def test_sizes_of_none_and_one(builder, device, B, S, T):
    check(builder, h.make_inputs(B, S, T, 1, 1, device=device))


def test_a_scale_of_zero(builder, device):
    for g in check(builder, h.make_inputs(1, 40, 60, 2, 16, device=device), scale=0.0):
        assert not g.any()
