# SPDX-License-Identifier: Apache-2.0
"""SparseIndexer: the choice, causality, decoding, its loss, compilation; SelectionAttention over lists of keys."""

from __future__ import annotations

import math

import pytest
import torch
from test_ops_index_loss import dense
from test_reference_selection import Largest

import mhc_inductor
from mhc_inductor.nn import SelectionAttention, SparseIndexer
from mhc_inductor.reference import index as index_reference
from mhc_inductor.reference import index_loss as loss_reference
from mhc_inductor.reference import selection as selection_reference
from tests.oracles.index import check_topk, make_inputs
from tests.oracles.selection import error

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
pytestmark = pytest.mark.usefixtures("one_thread")


def attention_inputs(B=2, S=12, T=12, G=2, heads=3, Dk=8, dtype=F32, seed=5):
    g = torch.Generator().manual_seed(seed)
    shapes = ((B, S, G, heads, Dk), (B, G, T, Dk), (B, G, T, Dk))
    return [torch.randn(shape, generator=g, dtype=F64).to(dtype) for shape in shapes]


# --- the choice ---------------------------------------------------------------------------------------------


def test_limits_masks_and_segments_are_passed_on():
    q, k, w = make_inputs(2, 6, 20)
    index = SparseIndexer(5, scale=0.3)
    limit = torch.randint(0, 21, (2, 6), generator=torch.Generator().manual_seed(1))
    check_topk(index(q, k, w, limit)[:, :, 0], (q, k, w), 5, 0.3, (limit, None, None, None))
    mask = torch.rand((6, 20), generator=torch.Generator().manual_seed(2)) < 0.5
    ids = torch.arange(6).expand(2, 6) % 2, torch.arange(20).expand(2, 20) % 3
    causal = (torch.arange(6) + 15).expand(2, 6)
    got = index(q, k, w, mask=mask, segments_q=ids[0], segments_k=ids[1])
    check_topk(got[:, :, 0], (q, k, w), 5, 0.3, (causal, mask.expand(2, 6, 20), *ids))


def test_decoding_chooses_as_the_whole_sequence_does():
    q, k, w = make_inputs(2, 12, 12, 3, 8, F64)
    index = SparseIndexer(4)
    whole = index(q, k, w)
    for t in range(12):
        step = index(q[:, t : t + 1], k[:, : t + 1], w[:, t : t + 1])
        assert torch.equal(step[:, 0, 0], whole[:, t, 0, : min(4, t + 1)])


def test_the_choice_feeds_every_group():
    q, k, w = make_inputs(2, 12, 12)
    aq, ak, av = attention_inputs()
    picks = SparseIndexer(4)(q, k, w)
    sink = torch.randn(2, 3)
    module = SelectionAttention(2, 3, sink=True, block_size=4)
    with torch.no_grad():
        module.sink.copy_(sink)
    o = module(aq, ak, av, indices=picks)
    wide = picks.expand(-1, -1, 2, -1).contiguous()
    assert torch.equal(o, module(aq, ak, av, indices=wide))
    listed = torch.zeros((2, 12, 13), dtype=torch.bool).scatter_(-1, picks[:, :, 0].long().remainder(13), True)
    listed = listed[..., :12].view(2, 12, 1, 1, 12)
    scores = torch.einsum("bsghd,bgtd->bsght", aq, ak) / math.sqrt(8)
    scores = torch.cat((scores.masked_fill(~listed, -torch.inf), sink.view(1, 1, 2, 3, 1).expand(2, 12, 2, 3, 1)), -1)
    want = torch.einsum("bsght,bgtd->bsghd", torch.softmax(scores.double(), -1)[..., :12], av.double())
    assert error(o, want) < 1e-6


def test_selection_attention_takes_lists_of_its_own_groups_segments_and_widths():
    aq, ak, av = attention_inputs()
    picks = torch.randint(-1, 12, (2, 12, 2, 6), generator=torch.Generator().manual_seed(0))
    ids = torch.arange(12).expand(2, 12) // 5
    got = SelectionAttention(2, 3, scale=0.4)(aq, ak, av, indices=picks, segments_q=ids, segments_k=ids, v_width=5)
    named = {"indices": picks, "scale": 0.4, "segments_q": ids, "segments_k": ids}
    want = mhc_inductor.selection_attention(aq, ak, av[..., :5].contiguous(), **named)
    assert got.shape == (2, 12, 2, 3, 5) and error(got, want) < 1e-6
    assert not torch.allclose(got, SelectionAttention(2, 3, scale=0.4)(aq, ak, av, indices=picks, v_width=5))
    ranges = torch.tensor([2, 9]).expand(2, 12, 2, 1, 2)
    got = SelectionAttention(2, 3)(aq, ak, av, ranges, segments_q=ids, segments_k=ids)
    want = mhc_inductor.selection_attention(aq, ak, av, ranges, segments_q=ids, segments_k=ids)
    assert torch.equal(got, want)


def test_a_selection_and_indices_exclude_each_other():
    aq, ak, av = attention_inputs()
    ranges, picks = torch.zeros(2, 12, 2, 1, 2, dtype=torch.int32), torch.zeros(2, 12, 2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="one of selection and indices must be given, got both"):
        SelectionAttention(2, 3)(aq, ak, av, ranges, indices=picks)
    with pytest.raises(TypeError, match="one of selection and indices must be given, got neither"):
        SelectionAttention(2, 3)(aq, ak, av)
    with pytest.raises(ValueError, match=r"indices must have shape \[B, S, G, k\]"):
        SelectionAttention(2, 3)(aq, ak, av, indices=picks.expand(2, 12, 2, 1)[:, :, [0, 1, 1]])


# --- the loss -----------------------------------------------------------------------------------------------


def test_the_loss_of_a_sink_and_of_more_keys_takes_their_lse():
    q, k, w = make_inputs(2, 12, 12)
    aq, ak, av = attention_inputs()
    sink, index = torch.randn(2, 3), SparseIndexer(4, scale=0.2)
    picks = index(q, k, w)
    ranges = torch.tensor([0, 12]).expand(2, 12, 2, 1, 2)
    _, lse = mhc_inductor.selection_attention(aq, ak, av, ranges, scale=0.3, return_lse=True)
    lse = torch.logaddexp(lse, sink)
    got = index.loss(q, k, w, picks, aq, ak, lse=lse, attention_scale=0.3, reduction="none")
    assert error(got, dense(q, k, w, picks[:, :, 0], aq, ak, lse, 0.2, 0.3)) < 1e-5
    assert error(got, index.loss(q, k, w, picks, aq, ak, attention_scale=0.3, reduction="none")) > 1e-3


@pytest.mark.parametrize(("S", "T"), [(12, 12), (3, 20), (1, 5), (5, 2)])
@pytest.mark.parametrize("visible", ["causal", "all", "limit"])
def test_the_loss_without_indices_is_the_dense_formulas_over_all_visible_keys(S, T, visible):
    q, k, w = (t.requires_grad_() for t in make_inputs(2, S, T, dtype=F64))
    aq, ak, _ = (t.requires_grad_() for t in attention_inputs(S=S, T=T, dtype=F64))
    g = torch.Generator().manual_seed(3)
    given = {"limit": torch.randint(0, T + 3, (2, S), generator=g)} if visible == "limit" else {}
    index = SparseIndexer(4, causal=visible != "all")
    limit = given.get("limit", (torch.arange(S) + T - S + 1 if index.causal else torch.full((S,), T)).expand(2, S))
    seen = torch.arange(T) < limit.unsqueeze(-1)
    rows = dense(q, k, w, torch.where(seen, torch.arange(T), -1), aq, ak, None, 8**-0.5, 8**-0.5)
    got = index.loss(q, k, w, None, aq, ak, reduction="none", **given)
    torch.testing.assert_close(got, rows, atol=1e-12, rtol=1e-9)
    mean = index.loss(q, k, w, None, aq, ak, **given)
    want = rows.sum() / seen.any(-1).sum().clamp(min=1)
    torch.testing.assert_close(mean, want, atol=1e-12, rtol=1e-9)
    up = torch.randn((2, S), generator=g, dtype=F64)
    for a, b in zip(torch.autograd.grad(got, (q, k, w), up), torch.autograd.grad(rows, (q, k, w), up), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-9)
    assert torch.autograd.grad(mean, (aq, ak), allow_unused=True) == (None, None)


def test_without_indices_the_loss_is_that_of_a_choice_of_all_keys():
    """Checks it against lists as long as the keys, with the attention's whole sum given or not, in bf16, too."""
    aq, ak, av = attention_inputs()
    ranges = torch.stack((torch.zeros(12, dtype=torch.int64), torch.arange(1, 13)), -1).view(1, 12, 1, 1, 2)
    _, lse = mhc_inductor.selection_attention(aq, ak, av, ranges.expand(2, 12, 2, 1, 2), return_lse=True)
    for dtype in (F32, BF16):
        q, k, w = make_inputs(2, 12, 12, dtype=dtype)
        want = SparseIndexer(12).loss(q, k, w, SparseIndexer(64)(q, k, w), aq, ak)
        assert torch.equal(SparseIndexer(4).loss(q, k, w, None, aq, ak), want) and want.dtype is F32
        assert error(SparseIndexer(4).loss(q, k, w, None, aq, ak, lse=lse), want) < 1e-5


@pytest.mark.parametrize("alone", [True, False])
def test_the_loss_trains_the_index_and_nothing_else(alone):
    """Alone it warms up over all keys, and then chooses what the attention attends to."""
    torch.manual_seed(0)
    q, k, w = (t.requires_grad_() for t in make_inputs(2, 40, 40))
    aq, ak, _ = (t.requires_grad_() for t in attention_inputs(S=40, T=40))
    index, losses = SparseIndexer(8), []
    optimizer = torch.optim.Adam((q, k, w), lr=0.05)
    sparse = index.loss(q, k, w, index(q, k, w), aq, ak).item()
    for _ in range(60):
        loss = index.loss(q, k, w, None if alone else index(q, k, w), aq, ak)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0] and aq.grad is None and ak.grad is None
    assert index.loss(q, k, w, index(q, k, w), aq, ak) < 0.5 * sparse


def test_no_query_lists_a_key():
    q, k, w = (t.requires_grad_() for t in make_inputs())
    loss = SparseIndexer(3).loss(q, k, w, torch.full((2, 5, 1, 3), -1), *attention_inputs(S=5, T=9)[:2])
    loss.backward()
    assert loss == 0 and not q.grad.any() and not k.grad.any() and not w.grad.any()


def test_no_keys_at_all():
    q, k, w = make_inputs(2, 5, 0)
    index, (aq, ak, av) = SparseIndexer(3), attention_inputs(S=5, T=0)
    picks = index(q, k, w)
    assert picks.shape == (2, 5, 1, 0)
    assert index.loss(q, k, w, picks, aq, ak) == 0 and index.loss(q, k, w, None, aq, ak) == 0
    assert not SelectionAttention(2, 3)(aq, ak, av, indices=picks).any()


def test_memory_is_not_quadratic(monkeypatch):
    """Checks that choice, attention and loss, with gradients, make no tensor of S * T elements."""
    for module in (index_reference, loss_reference, selection_reference):
        monkeypatch.setattr(module, "CHUNK", 2**15)
    S = 1024
    q, k, w = (t.requires_grad_() for t in make_inputs(1, S, S))
    aq, ak, av = (t.requires_grad_() for t in attention_inputs(1, S, S, 1))
    index = SparseIndexer(16)
    with Largest() as largest:
        picks = index(q, k, w)
        o = SelectionAttention(1, 3)(aq, ak, av, indices=picks)
        (o.square().sum() + index.loss(q, k, w, picks, aq, ak)).backward()
    assert largest.numel < S * S // 8


def test_autocast_rounds_nothing_more():
    q, k, w = (t.requires_grad_() for t in make_inputs(2, 12, 12))
    aq, ak, _ = attention_inputs()
    index = SparseIndexer(4)
    want = index.loss(q, k, w, index(q, k, w), aq, ak)
    with torch.autocast("cpu", BF16):
        picks = index(q, k, w)
        got = index.loss(q, k, w, picks, aq, ak)
    assert got.dtype is F32 and torch.equal(got, want)
    low = index.loss(*(t.bfloat16() for t in (q, k)), w, picks, aq.bfloat16(), ak.bfloat16())
    low.backward()
    assert low.dtype is F32 and error(low.detach(), want.detach()) < 0.05 and q.grad.dtype is F32


def test_compiles_once_for_every_length(fresh):
    index, attend = SparseIndexer(6), SelectionAttention(2, 3)

    def run(q, k, w, aq, ak, av):
        picks = index(q, k, w)
        return attend(aq, ak, av, indices=picks).square().mean() + index.loss(q, k, w, picks, aq, ak)

    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    for n, S in enumerate((12, 20, 33)):
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            args = [t.requires_grad_() for t in (*make_inputs(2, S, S), *attention_inputs(S=S, T=S))]
            got, want = compiled(*args), run(*args)
            assert error(got.detach(), want.detach()) < 1e-5
            for a, b in zip(torch.autograd.grad(got, args), torch.autograd.grad(want, args), strict=True):
                assert error(a, b) < 1e-5


@pytest.mark.parametrize("limited", [False, True])
def test_the_loss_over_all_keys_compiles_once_for_every_length(fresh, limited):
    index = SparseIndexer(6)
    compiled = torch.compile(index.loss, fullgraph=True, dynamic=True)
    for n, S in enumerate((12, 20, 33)):
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            args = [t.requires_grad_() for t in make_inputs(2, S, S + 3)]
            aq, ak, _ = attention_inputs(S=S, T=S + 3)
            limit = torch.arange(S).expand(2, S) if limited else None
            got, want = (f(*args, None, aq, ak, limit=limit) for f in (compiled, index.loss))
            assert error(got, want) < 1e-5
            for a, b in zip(torch.autograd.grad(got, args), torch.autograd.grad(want, args), strict=True):
                assert error(a, b) < 1e-5


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="SparseIndexer: topk must be at least 1, got 0"):
        SparseIndexer(0)
    with pytest.raises(TypeError, match="SparseIndexer: topk must be an int, got float"):
        SparseIndexer(2.0)
    q, k, w = make_inputs(2, 12, 12)
    aq, ak, _ = attention_inputs()
    index = SparseIndexer(4)
    with pytest.raises(ValueError, match=r"SparseIndexer: q must have shape \[B, S, H, D\], got \[2, 12, 8\]"):
        index(q[:, :, 0], k, w)
    with pytest.raises(TypeError, match="SparseIndexer: k must be a tensor, got NoneType"):
        index(q, None, w)
    picks = index(q, k, w)
    with pytest.raises(ValueError, match=r"indices must have shape \[B, S, 1, n\] or be None, got \[2, 12, 4\]"):
        index.loss(q, k, w, picks[:, :, 0], aq, ak)
    limit = torch.ones((2, 12), dtype=torch.int32)
    with pytest.raises(ValueError, match=r"SparseIndexer.loss: limit must be None where indices are given"):
        index.loss(q, k, w, picks, aq, ak, limit=limit)
    for value, error_type, said in (
        (limit[:, :5], ValueError, r"limit must have shape \[B, S\] = \[2, 12\], got \[2, 5\]"),
        (limit.float(), TypeError, "limit must be int32 or int64"),
        (5, TypeError, "limit must be a tensor"),
    ):
        with pytest.raises(error_type, match=f"SparseIndexer.loss: {said}"):
            index.loss(q, k, w, None, aq, ak, limit=value)
    with pytest.raises(ValueError, match=r"SparseIndexer.loss: q must have shape \[B, S, H, D\]"):
        index.loss(q[0], k, w, None, aq, ak)
    with pytest.raises(ValueError, match=r"index_loss: attention_k must have shape \[B, G, T, Dk\]"):
        index.loss(q, k, w, None, aq, ak[:, :, :5])
    with pytest.raises(ValueError, match="reduction must be mean, sum or none, got 'all'"):
        index.loss(q, k, w, picks, aq, ak, reduction="all")
    with pytest.raises(ValueError, match=r"index_loss: attention_k must have shape \[B, G, T, Dk\]"):
        index.loss(q, k, w, picks, aq, ak[:, :, :5])
    assert repr(index) == "SparseIndexer(topk=4, scale=None, causal=True)"
