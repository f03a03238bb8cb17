# SPDX-License-Identifier: Apache-2.0
"""The index ops: chosen scores, masks, sizes, gradients, memory. Their contract is in ``test_ops_contract.py``."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing

from mhc_inductor import index_scores, index_topk
from mhc_inductor.reference import index as reference
from tests.oracles import index as h
from tests.oracles.samples import sample
from tests.oracles.selection import error

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OPS = torch.ops.mhc_inductor
NONE = (None,) * 4
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", h.KINDS)
@pytest.mark.parametrize("dtype", [BF16, F32, F64])
def test_the_scores_of_chosen_keys_are_those_of_index_scores(kind, dtype):
    args = sample("index_topk_scores", kind=kind, dtype=dtype)
    q, k, w = (t.abs_() for t in args[:3])  # no product of 0, whose NaN would be chosen first
    w[0], q[1, 1, 1, 0], k[1, 0, 0] = -torch.inf, torch.nan, torch.inf
    chosen, scores = OPS.index_topk_scores(*args)
    assert torch.equal(chosen, OPS.index_topk(*args))
    want = OPS.index_scores(*args[:3], *args[4:]).gather(-1, chosen.long().clamp(min=0))
    torch.testing.assert_close(scores, want.masked_fill(chosen < 0, -torch.inf), equal_nan=True)
    assert (scores == -torch.inf)[chosen >= 0].any(), "a score of -inf hides no key"


# --- the public functions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (40,), (1,), (6, 40), (6, 1), (1, 6, 40), (2, 1, 40), (2, 6, 1), (2, 6, 40)])
def test_masks_broadcast(shape):
    args = h.make_inputs(2, 6, 40, 3, 8)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.6
    wide = mask.expand(2, 6, 40)
    assert torch.equal(index_scores(*args, mask=mask), index_scores(*args, mask=wide.contiguous()))
    assert torch.equal(index_topk(*args, 9, mask=mask), index_topk(*args, 9, mask=wide))
    h.check_topk(index_topk(*args, 9, mask=mask), args, 9, 1.0, (None, wide, None, None))


def test_the_scale_is_inside_the_relu_and_1_unless_given():
    args = h.make_inputs()
    assert torch.equal(index_scores(*args), index_scores(*args, scale=1))
    assert error(index_scores(*args, scale=2.0), 2 * index_scores(*args)) < 1e-6
    assert (index_scores(*args, scale=0.0) == 0).all()


@pytest.mark.parametrize(("B", "S", "T"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (1, 1, 1)])
def test_sizes_of_none_and_one(B, S, T):
    args = h.make_inputs(B, S, T, 1, 1)
    args = tuple(t.requires_grad_() for t in args)
    scores = index_scores(*args)
    assert scores.shape == (B, S, T)
    assert [g.shape for g in torch.autograd.grad(scores.sum(), args)] == [t.shape for t in args]
    assert index_topk(*args, min(T, 1)).shape == (B, S, min(T, 1))
    assert index_topk(*args, 0).shape == (B, S, 0) and not index_topk(*args, 0).requires_grad


@pytest.mark.parametrize(("H", "D", "topk"), [(130, 8, 3), (3, 300, 3), (1, 1, 40)])
def test_sizes_beyond_the_kernels(H, D, topk):
    args = h.make_inputs(1, 4, 40, H, D)
    h.check_topk(index_topk(*args, topk), args, topk, 1.0, NONE)


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
def test_gradients_against_fp64(dtype):
    args = h.make_inputs(2, 6, 20, 3, 8, dtype)
    visible = h.visibility("everything", *args[:2])
    g = torch.randn(2, 6, 20, dtype=F64, generator=torch.Generator().manual_seed(4))
    see = h.seen(*args[:2], visible)

    def run(args, scores):
        leaves = [a.detach().requires_grad_() for a in args]
        out = scores(*leaves).masked_fill(~see, 0.0)
        return torch.autograd.grad(out, leaves, g.to(out.dtype))

    got = run(args, lambda q, k, w: OPS.index_scores(q, k, w, 0.3, *visible))
    want = run([a.double() for a in args], lambda q, k, w: h.oracle(q, k, w, 0.3, visible))
    for t, a, b in zip(args, got, want, strict=True):
        assert a.dtype is t.dtype
        assert error(a, b) < 2 * torch.finfo(a.dtype).eps + (1e-13 if dtype is F64 else 1e-6)


# --- memory -------------------------------------------------------------------------------------------------


def test_products_are_held_in_chunks(monkeypatch):
    largest = []
    products = reference.products

    def watched(q, k):
        x = products(q, k)
        largest.append(x.numel())
        return x

    monkeypatch.setattr(reference, "products", watched)
    monkeypatch.setattr(reference, "CHUNK", 2000)
    args = h.make_inputs(2, 50, 40, 3, 8)
    index_scores(*args)
    index_topk(*args, 5)
    leaves = [a.requires_grad_() for a in args]
    index_scores(*leaves).sum().backward()
    assert max(largest) <= 2000 and sum(largest) >= 3 * 2 * 50 * 40 * 3
