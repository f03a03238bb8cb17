# SPDX-License-Identifier: Apache-2.0
"""The op of an indexer's training loss: the dense formula, gradients, NaN, memory, and the public function."""

from __future__ import annotations

import pytest
import torch
from test_reference_selection import Largest

from mhc_inductor import index_loss
from mhc_inductor.reference import index_loss as reference
from tests.oracles.index_loss import dense, make
from tests.oracles.samples import trainable
from tests.oracles.selection import error

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OPS = torch.ops.mhc_inductor
NAMES = ("q", "k", "w", "indices", "attention_q", "attention_k", "lse", "scale", "attention_scale")
pytestmark = pytest.mark.usefixtures("one_thread")


def loss_of(args):
    return OPS.index_loss(*args)[0]


# --- the formula --------------------------------------------------------------------------------------------


SIZES = {
    "plain": {},
    "lse": {"with_lse": True},
    "one": {"B": 1, "S": 1, "T": 1, "H": 1, "D": 1, "G": 1, "heads": 1, "Dk": 1, "n": 1},
    "longer_lists_than_keys": {"T": 4, "n": 11},
    "decoding": {"S": 1, "T": 40, "n": 13},
}


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16])
@pytest.mark.parametrize("chunk", [2**22, 300])
def test_loss_and_gradients_are_the_dense_formulas(case, dtype, chunk, monkeypatch):
    monkeypatch.setattr(reference, "CHUNK", chunk)
    args = make(dtype=dtype, **SIZES[case])
    if case in ("one", "decoding"):  # the only query lists something
        args[3].random_(0, args[1].shape[1])
    wanted = [0, 1, 2]
    got_in = [a.detach().requires_grad_() if i in wanted else a for i, a in enumerate(args)]
    want_in = [a.detach().double().requires_grad_() if i in wanted else a for i, a in enumerate(args)]
    got, want = loss_of(got_in), dense(*want_in)
    assert got.dtype is (F64 if dtype is F64 else F32)
    small = 1e-12 if dtype is F64 and case != "lse" else 1e-5
    assert float((got.detach().double() - want.detach()).abs().max()) < small
    up = torch.rand(want.shape, generator=torch.Generator().manual_seed(3), dtype=F64)
    gots = torch.autograd.grad(got, got_in[:3], up.to(got.dtype))
    wants = torch.autograd.grad(want, want_in[:3], up)
    for i, a, b in zip(wanted, gots, wants, strict=True):
        assert (a.dtype, a.shape) == (args[i].dtype, args[i].shape)
        assert float((a.double() - b).norm()) < 2 * torch.finfo(a.dtype).eps * float(b.norm()) + small


def test_a_query_without_keys_has_no_loss_and_no_gradient():
    args = [a.requires_grad_() if i < 3 else a for i, a in enumerate(make())]
    loss = loss_of(args)
    assert (loss[:, 0] == 0).all() and (loss[:, 1:] > 0).any() and loss.isfinite().all()
    dq, _, dw = torch.autograd.grad(loss.sum(), args[:3])
    assert not dq[:, 0].any() and not dw[:, 0].any() and dq[:, 1:].any()


def test_the_attention_gets_no_gradient():
    made = make(with_lse=True)
    args = [t.requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in made]
    loss_of(args).sum().backward()
    assert [a.grad is None for a in args[:7]] == [False, False, False, True, True, True, True]


def test_order_repeats_and_positions_out_of_range_change_nothing():
    args = list(make())
    want = loss_of(args)
    args[3] = torch.cat((args[3].flip(-1), args[3][..., 2:5], torch.full_like(args[3], 2**31 - 1)), -1)
    assert error(loss_of(args), want) < 1e-6
    args[3] = args[3].long() - 2**40 * (args[3] < 0)
    assert error(loss_of(args), want) < 1e-6


def test_nan_in_keys_that_are_not_listed_reaches_nothing():
    args = list(make(T=20))
    args[3] = args[3].clamp(max=9).masked_fill(args[3] == 0, -1)
    clean = [a.clone().requires_grad_() if i < 3 else a for i, a in enumerate(args)]
    for i, at in ((1, (slice(None), [0, *range(10, 20)])), (5, (slice(None), slice(None), [0, *range(10, 20)]))):
        args[i] = args[i].clone()
        args[i][at] = torch.nan
    args = [a.requires_grad_() if i < 3 else a for i, a in enumerate(args)]
    assert torch.equal(loss_of(args), loss_of(clean))
    for a, b in zip(*(torch.autograd.grad(loss_of(x).sum(), x[:3]) for x in (args, clean)), strict=True):
        assert torch.equal(a, b)


def test_nan_in_a_query_stays_with_its_row_and_the_keys_that_it_lists():
    args = list(make())
    args[0][0, 2, 1, 3] = torch.nan
    args[3][0, 2] = torch.tensor([4, -1, 4, 5, -1, 9, 4])
    args = [a.requires_grad_() if i < 3 else a for i, a in enumerate(args)]
    loss = loss_of(args)
    assert loss.isnan().nonzero().tolist() == [[0, 2]]
    dq, dk, _ = torch.autograd.grad(loss.sum(), args[:3])
    assert dq.isnan().any(-1).any(-1).nonzero().tolist() == [[0, 2]]
    assert dk.isnan().any(-1).nonzero().tolist() == [[0, 4], [0, 5]]


def test_memory_is_bounded(monkeypatch):
    """Checks that no tensor of S * T elements is made, nor one of S times heads times the listed keys."""
    args = [a.requires_grad_() if i < 3 else a for i, a in enumerate(make(B=1, S=600, T=600, G=1, heads=8, n=16))]
    want = loss_of(args)
    grads = torch.autograd.grad(want.sum(), args[:3])
    monkeypatch.setattr(reference, "CHUNK", 4000)
    with Largest() as largest:
        got = loss_of(args)
        again = torch.autograd.grad(got.sum(), args[:3])
    inputs = max(a.numel() for a in args if isinstance(a, torch.Tensor))
    assert largest.numel <= inputs < 600 * 8 * 16 < 600 * 600
    assert error(got, want) < 1e-6
    assert all(error(a, b) < 1e-5 for a, b in zip(again, grads, strict=True))


@pytest.mark.parametrize("change", [{"B": 0}, {"S": 0}, {"T": 0}, {"n": 0}])
def test_sizes_of_none(change):
    args = [a.requires_grad_() if i < 3 else a for i, a in enumerate(make(**change))]
    loss = loss_of(args)
    assert loss.shape == args[0].shape[:2] and not loss.any()
    for a, grad in zip(args, torch.autograd.grad(loss.sum(), args[:3]), strict=False):
        assert grad.shape == a.shape and not grad.any()


# --- the public function ------------------------------------------------------------------------------------


def named(args):
    return dict(zip(NAMES, args, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("with_lse", [False, True])
def test_the_function_reduces_the_dense_formula(reduction, with_lse):
    args = trainable("index_loss", make(with_lse=with_lse))
    got = index_loss(**named(args), reduction=reduction)
    exact = [a.detach().double().requires_grad_() if i < 3 else a for i, a in enumerate(args)]
    each = dense(*exact)
    listed = ((args[3] >= 0) & (args[3] < 9)).any(-1).sum()
    want = {"mean": each.sum() / listed, "sum": each.sum(), "none": each}[reduction]
    assert got.shape == want.shape and got.dtype is F32 and error(got, want) < 1e-5
    grads = torch.autograd.grad(got.sum(), args[:3])
    assert all(error(a, b) < 1e-5 for a, b in zip(grads, torch.autograd.grad(want.sum(), exact[:3]), strict=True))


def test_the_functions_scales_are_the_roots_of_the_widths():
    args = make()
    want = index_loss(*args[:6], scale=8**-0.5, attention_scale=6**-0.5)
    assert torch.equal(index_loss(*args[:6]), want)


@pytest.mark.parametrize("name", ["scale", "attention_scale"])
def test_the_function_gives_its_scales_defaults_to_tensors_without_a_width(name):
    args = named(make()) | {name: None, "q": torch.zeros(()), "attention_q": torch.zeros(())}
    with pytest.raises(ValueError, match=r"^index_loss: q must have shape \[B, S, H, D\]"):
        index_loss(**args)
