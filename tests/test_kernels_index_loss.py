# SPDX-License-Identifier: Apache-2.0
"""The kernels of an indexer's training loss through their launch plans, with poisoned buffers, against fp64.

They run compiled on a GPU, elsewhere in the interpreter.
"""

from __future__ import annotations

import pytest
import test_ops_index_loss as losses
import torch
from conftest import GPU, some

from mhc_inductor.kernels.index import loss_plan
from mhc_inductor.kernels.selection import lists_plan
from mhc_inductor.reference import index_loss as reference

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EPS = 2.0**-23
OUTPUTS, NAMES = ("loss", "dscores"), ("dq", "dk", "dw")
ALL = slice(None)


# Sizes for a GPU alone.
PLAIN = {"B": 2, "S": 70, "T": 700, "H": 16, "D": 128, "G": 1, "heads": 16, "Dk": 192, "n": 200, "dtype": BF16}
GROUPS = {"B": 1, "S": 129, "T": 1025, "H": 5, "D": 80, "G": 4, "heads": 3, "Dk": 66, "n": 77, "dtype": BF16}


def case(device, dtype=F32, **changes):
    """Returns arguments of the op, with factors for which neither distribution is all on one key."""
    args = losses.make(dtype=dtype, **changes)
    args = [t.to(device) if isinstance(t, torch.Tensor) else t for t in args]
    return [*args[:7], 0.5 * args[0].shape[3] ** -0.5, args[4].shape[4] ** -0.5]


def upstream(q):
    return torch.rand(q.shape[:2], generator=torch.Generator().manual_seed(3), dtype=F64).to(q.device, F32)


def wide(args):
    return [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in args]


def run(builder, args, up=None):
    """Returns (loss, dscores) and (dq, dk, dw)."""
    assert loss_plan.unsupported(builder, *(t for t in args if isinstance(t, torch.Tensor))) is None
    outs = loss_plan.plan_index_loss(builder, *args)
    backward = upstream(args[0]) if up is None else up, *args[:4], outs[1]
    assert loss_plan.unsupported(builder, *backward) is None
    return outs, loss_plan.plan_index_loss_backward(builder, *backward, args[7])


def check(builder, args, up=None):
    """Checks loss and gradients against fp64; returns them."""
    outs, grads = run(builder, args, up)
    wants, plains = reference.index_loss(*wide(args)), reference.index_loss(*args)
    for name, a, want, plain in zip(OUTPUTS, outs, wants, plains, strict=True):
        assert (a.shape, a.dtype) == (want.shape, F32) and a.is_contiguous(), name
        assert torch.equal(a.isnan(), want.isnan()) and torch.equal(a.isinf(), want.isinf()), name
        if not a.numel():
            continue
        error, formula = (float((t.double() - want).nan_to_num(0.0, 0.0, 0.0).abs().max()) for t in (a, plain))
        # Tensor cores round every partial sum towards zero; the interpreter does not.
        slack = 4 if GPU else 1
        most = float(want.nan_to_num(0.0, 0.0, 0.0).abs().max())
        assert error <= slack * (2 * formula + 4 * EPS * (1 + most)), (name, error, formula)
    back = upstream(args[0]) if up is None else up, *args[:4], outs[1], args[7]
    wants, plains = reference.index_loss_backward(*wide(back)), reference.index_loss_backward(*back)
    for name, a, want, plain, given in zip(NAMES, grads, wants, plains, args, strict=False):
        assert (a.shape, a.dtype) == (given.shape, given.dtype) and a.is_contiguous(), name
        assert torch.equal(a.isnan(), want.isnan()), name
        a, want, plain = (t.double().nan_to_num(0.0, 0.0, 0.0) for t in (a, want, plain))
        if want.norm():
            error, formula = (float((t - want).norm() / want.norm()) for t in (a, plain))
            # A product with bf16 keys or queries rounds its other factor to bf16, with fp16 ones to tf32.
            assert error <= 2 * formula + torch.finfo(given.dtype).eps + torch.finfo(args[0].dtype).eps + 1e-6, (
                name, error, formula,
            )  # fmt: skip
        else:
            assert not a.any(), name
    return *outs, *grads


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("case_of", losses.SIZES)
def test_sizes(builder, device, case_of, dtype, with_lse):
    args = case(device, dtype, **losses.SIZES[case_of] | {"with_lse": with_lse})
    if args[0].shape[1] == 1:  # the only query lists something
        args[3].random_(0, args[1].shape[1])
    check(builder, args)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(
    ("H", "D", "G", "heads", "Dk", "n"),
    some(
        [(64, 128, 1, 64, 576, 300), (128, 256, 2, 3, 66, 77), (33, 80, 1, 128, 512, 150), (1, 1, 4, 1, 1, 17)],
        [(5, 80, 1, 33, 40, 70), (3, 256, 2, 3, 66, 20), (70, 24, 1, 2, 300, 40), (1, 1, 3, 1, 1, 17)],
    ),
)
def test_heads_and_widths(builder, device, H, D, G, heads, Dk, n, dtype):
    sizes = {"H": H, "D": D, "G": G, "heads": heads, "Dk": Dk, "n": n}
    check(builder, case(device, dtype, B=1, S=40 if GPU else 3, T=500 if GPU else 90, **sizes))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_an_attention_and_weights_of_another_dtype(builder, device, dtype):
    other = BF16 if dtype is F32 else F32
    args = case(device, dtype, w_dtype=other)
    args[4:6] = (t.to(other) for t in args[4:6])
    check(builder, args)


@pytest.mark.parametrize("far", [-300.0, 300.0])
def test_listed_keys_that_have_little_of_the_attention(builder, device, far):
    """Checks an attention whose probabilities of the listed keys underflow, and one above 1."""
    args = case(device, with_lse=True)
    args[6] = (args[6] * 64).round() / 64  # so that the difference is exact
    want = losses.dense(*(t.cpu() if isinstance(t, torch.Tensor) else t for t in args))
    args[6] = args[6] - far
    loss = check(builder, args)[0].cpu()
    assert bool((loss.double() - want).abs().max() < 1e-4) and loss.any()


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_order_repeats_and_positions_out_of_range_change_nothing(builder, device, kind):
    args = case(device)
    want = check(builder, args)
    listed = torch.cat((args[3].flip(-1), args[3][..., 2:5], torch.full_like(args[3], 2**31 - 1)), -1).to(kind)
    args[3] = listed if kind is torch.int32 else listed - 2**40 * (listed < 0)
    got = check(builder, args)
    for i in (0, 2, 3, 4):  # sums over a list are in another order
        assert losses.error(got[i], want[i]) < 1e-6


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_key_that_fills_a_list(builder, device, dtype):
    args = case(device, dtype, n=90, T=20)
    args[3] = torch.where(args[3] >= 0, 7, -1).to(torch.int32)
    loss, dscores, *grads = check(builder, args)
    assert loss.abs().max() < 1e-6 and dscores.abs().max() < 1e-6
    assert not any(g.float().abs().max() > 1e-5 for g in grads)


def test_empty_lists(builder, device):
    args = case(device)
    args[3][0], args[3][1, 2:] = -1, 99
    loss, dscores, dq, _, dw = check(builder, args)
    for t in (loss, dscores, dq, dw):
        assert not t[0].any() and not t[1, 2:].any()
    assert loss[1, 1] > 0


@pytest.mark.parametrize(("B", "S", "T", "n"), [(0, 3, 4, 2), (2, 0, 4, 2), (2, 3, 0, 2), (2, 3, 4, 0), (1, 1, 1, 1)])
def test_sizes_of_none_and_one(builder, device, B, S, T, n):
    check(builder, case(device, B=B, S=S, T=T, n=n))


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 1, 2, 4, 5])
def test_nan_and_infinity_reach_what_they_reach_in_the_formula(builder, device, at, value, with_lse):
    args = case(device, with_lse=with_lse)
    args[3][:, 1:] = torch.tensor([4, 0, 4, 5, -1, 9, 3], dtype=torch.int32)
    args[3][0, 3], args[3][1, 4] = 6, -1  # of one key, and of none
    place = {0: (0, 2, 1, 3), 1: (0, 5, 2), 2: (0, 2, 1), 4: (0, 2, 1, 1, 2), 5: (0, 1, 5, 2)}[at]
    args[at] = args[at].clone()
    args[at][place] = value
    check(builder, args)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_an_lse_that_is_not_finite(builder, device, value):
    args = case(device, with_lse=True)
    args[6][0, 2], args[6][1, 3, 0, 1] = value, value
    check(builder, args)


@pytest.mark.parametrize("with_lse", [False, True])
def test_a_key_without_any_attention(builder, device, with_lse):
    args = case(device, with_lse=with_lse)
    args[4] = args[4].abs() + 0.1
    args[5][:, :, 5] = -torch.inf
    args[3][:, 1:] = torch.tensor([4, 0, 4, 5, -1, 9, 3], dtype=torch.int32)
    loss, dscores, *_ = check(builder, args)
    assert loss[:, 1:].isfinite().all() and dscores.isfinite().all()


def test_a_head_whose_scores_overflow_takes_no_part(builder, device):
    """Checks a head with scores of -inf, which fp64 would not have, against the formula in fp32."""
    args = case(device)
    args[5] = (args[5].abs() + 0.1) * 1e20
    args[4] = args[4] * 1e-20
    args[4][:, :, 0, 1] = -1e20
    outs, _ = run(builder, args)
    for a, want in zip(outs, reference.index_loss(*args), strict=True):
        assert want.isfinite().all() and losses.error(a, want) < 1e-5


@pytest.mark.parametrize("sizes", [{"T": 20}, *some([PLAIN, GROUPS], [])], ids=str)
def test_nan_in_keys_that_are_not_listed_reaches_nothing(builder, device, sizes):
    args = case(device, **sizes)
    args[3] = torch.where((args[3] >= 0) & (args[3] % 3 == 0), args[3] + 1, args[3])  # multiples of 3 are not listed
    loss, dscores, *grads = check(builder, args)
    args[1][:, ::3] = torch.nan
    args[5][:, :, ::3] = torch.nan
    for a, b in zip(run(builder, args), ((loss, dscores), grads), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not grads[1][:, ::3].any()


@pytest.mark.parametrize("scale", [0.0, -0.4])
def test_a_scale_that_is_not_positive(builder, device, scale):
    args = case(device)
    args[7] = scale
    assert check(builder, args)[3].any() == (scale != 0)


SMALL = {"S": 13, "n": 20, "with_lse": True}


@pytest.mark.parametrize(
    "sizes", [SMALL, {**SMALL, "dtype": BF16}, *some([PLAIN | {"n": 500}, GROUPS | {"n": 500}], [])], ids=str
)
def test_bits_depend_on_no_run_strides_chunk_or_batch(builder, device, sizes, monkeypatch):
    args = case(device, **sizes)
    want = check(builder, args)
    strided = [
        t.mT.contiguous().mT
        if i in (1, 3)
        else t
        if i > 6 or t is None
        else t.movedim(-2, 0).contiguous().movedim(0, -2)
        for i, t in enumerate(args)
    ]
    up = upstream(args[0]).mT.contiguous().mT
    assert all(torch.equal(a, b) for a, b in zip(check(builder, strided, up), want, strict=True))
    monkeypatch.setattr(lists_plan, "MOST_QUERIES", 5)
    names = len(builder.names)
    for a, b in zip(check(builder, args), want, strict=True):
        assert torch.equal(a, b)
    assert builder.names[names:].count("index_loss_gradients") == -(-args[0].shape[1] // 5)
    alone = [
        t[-1:, 4:7] if i in (0, 2, 3, 4, 6) and t is not None else t[-1:] if i < 6 else t for i, t in enumerate(args)
    ]
    (loss, dscores), (dq, _, dw) = run(builder, alone, upstream(args[0])[-1:, 4:7].contiguous())
    for a, b in zip((loss, dscores, dq, dw), (*want[:3], want[4]), strict=True):
        assert torch.equal(a, b[-1:, 4:7])


def test_what_has_no_kernel_is_named(builder, device):
    for changes, reason in (
        ({"n": 4097}, "n = 4097 keys a query are above 4096"),
        ({"D": 257}, "D = 257 is above 256"),
        ({"H": 129}, "H = 129 heads are above 128"),
        ({"Dk": 577}, "Dk = 577 is above 576"),
        ({"heads": 129}, "h = 129 heads a group are above 128"),
        ({"dtype": F64}, "dtype torch.float64 has no kernel"),
    ):
        args = [t for t in losses.make(B=1, S=1, **changes) if isinstance(t, torch.Tensor)]
        assert loss_plan.unsupported(builder, *args) == reason
        if not {"Dk", "heads"} & set(changes):
            up, g = torch.zeros(1, 1), torch.zeros(args[3].shape)
            assert loss_plan.unsupported(builder, up, *args[:4], g) == reason
