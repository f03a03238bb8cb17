# SPDX-License-Identifier: Apache-2.0
"""The kernels that join attention over parts of the keys, and split its gradients, against the formulas in fp64.

They run compiled on a GPU, elsewhere in the interpreter; all fresh memory is poisoned.
"""

from __future__ import annotations

import pytest
import torch

from mhc_inductor.distributed.softmax import join, part_gradients
from mhc_inductor.kernels.selection import join_plan

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MULTIPROCESSORS = 1
NAN, INF = float("nan"), float("inf")
SHAPES = [(2, 3, 2, 5, 64), (1, 9, 1, 3, 80), (1, 2, 1, 1, 1), (1, 1, 1, 2, 512), (0, 3, 2, 4, 16), (2, 40, 1, 4, 24)]
ROUNDING = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-23}


def made(shape, dtype, count, device, seed=0):
    """Returns (o, lse) of some parts; a sixth of the rows of each select nothing there, some rows nothing anywhere."""
    g = torch.Generator().manual_seed(seed)
    parts = []
    for _ in range(count):
        o, lse = torch.randn(shape, generator=g).to(dtype), 4 * torch.randn(shape[:-1], generator=g)
        empty = torch.rand(shape[:-1], generator=g) < 1 / 6
        empty.view(-1)[::11] = True
        parts.append((o.masked_fill(empty[..., None], 0).to(device), lse.masked_fill(empty, -INF).to(device)))
    return parts


def joined(call, parts, sink):
    """Joins parts by ``call``, the last one with the sink."""
    state = (*parts[0], None)
    for i, part in enumerate(parts[1:], 2):
        last = i == len(parts)
        state = call(*state, *part, sink if last else None, last)
    return state[:2]


def doubled(values):
    return [tuple(t.double() for t in part) for part in values]


def close(got, want, dtype):
    """Asserts an error of at most two roundings of the result, and of fp32's arithmetic on numbers of size 10."""
    assert torch.equal(got.isnan(), want.isnan())
    there = want.isfinite()
    assert torch.equal(got[~there & ~want.isnan()].double(), want[~there & ~want.isnan()])
    wrong = (got.double() - want)[there].abs() - 2 * ROUNDING[dtype] * want[there].abs()
    assert wrong.numel() == 0 or wrong.max() <= 2e-5, wrong.max()


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_are_joined(builder, device, shape, dtype):
    for count, sink in ((2, None), (2, torch.randn(shape[2:4], device=device)), (4, None)):
        parts = made(shape, dtype, count, device)
        want = joined(join, doubled(parts), None if sink is None else sink.double())
        o, lse = joined(lambda *args: join_plan.plan_selection_join(builder, *args), parts, sink)
        assert o.dtype is dtype and lse.dtype is F32
        close(o, want[0], dtype)
        close(lse, want[1], F32)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_of_a_part(builder, device, shape, dtype):
    g = torch.Generator().manual_seed(1)
    parts = made(shape, dtype, 2, device)
    sink = torch.randn(shape[2:4], generator=g).to(device)
    o, lse = joined(join, parts, sink)
    none = lse == -INF
    whole, total = (torch.where(none, 0.0, t) for t in (lse, torch.logaddexp(lse, sink)))
    dout = torch.randn(*shape[:-1], 2 * shape[-1], generator=g).to(device, dtype)[..., ::2]  # not contiguous
    dlse = torch.randn(shape[:-1], generator=g).to(device).masked_fill(none, 0)
    for part in parts:
        args = dout, dlse, o, whole, total, *part
        want = part_gradients(*(t.double() for t in args))
        share, grad = join_plan.plan_selection_part_gradients(builder, *args)
        assert share.dtype is dtype and grad.dtype is F32
        close(share, want[0], dtype)
        close(grad, want[1], F32)
        assert not share[part[1] == -INF].any() and not grad[part[1] == -INF].any()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_stays_so_at_any_weight(builder, device, bad):
    """Selected values of inf are inf in the result, also where their part has the weight 0."""
    parts = made((1, 4, 1, 2, 16), F32, 3, device)
    parts[1][0][0, 2, 0, 1, 3] = bad
    parts[1][1][0, 2, 0, 1] = -200.0
    want = joined(join, doubled(parts), None)[0]
    got = joined(lambda *args: join_plan.plan_selection_join(builder, *args), parts, None)[0]
    close(got, want, F32)
    assert not got[0, 2, 0, 1, 3].isfinite() and got.isfinite().sum() == got.numel() - 1


def test_two_runs_give_equal_bits_and_sums_are_made_in_place(builder, device):
    parts = made((2, 40, 1, 4, 24), BF16, 3, device)
    first, again = (joined(lambda *args: join_plan.plan_selection_join(builder, *args), parts, None) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    state = join_plan.plan_selection_join(builder, *parts[0], None, *parts[1], None, False)
    assert state[0].dtype is F32
    after = join_plan.plan_selection_join(builder, *state, *parts[2], None, False)
    assert after[0].data_ptr() == state[0].data_ptr()


def test_other_inputs_have_no_kernel(builder, device):
    t = torch.empty(1, 1, 1, 1, 2048, device=device)
    assert "dtype torch.float64" in join_plan.unsupported(builder, t.double())
    assert "Dv = 2048 is above 1024" in join_plan.unsupported(builder, t)
    assert join_plan.unsupported(builder, t[..., :1024]) is None
