# SPDX-License-Identifier: Apache-2.0
"""The reference of the index ops: gradients in fp64, and scores and choices against independent formulas."""

from __future__ import annotations

import pytest
import torch

from mhc_inductor.reference import index as reference
from tests.oracles import index as h

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
NONE = (None,) * 4


@pytest.mark.parametrize("kind", h.KINDS)
@pytest.mark.parametrize("dtype", [F64, F32, BF16])
def test_scores_are_the_formula(kind, dtype):
    args = h.make_inputs(dtype=dtype)
    visible = h.visibility(kind, *args[:2])
    got, want = reference.index_scores(*args, 0.3, *visible), h.oracle(*args, 0.3, visible)
    assert got.dtype is (F64 if dtype is F64 else F32)
    assert torch.equal(got == -torch.inf, want == -torch.inf)
    there = want > -torch.inf
    slack = 1e-14 if dtype is F64 else 2 * h.formula_error(*args, 0.3) + 1e-7
    assert (got - want)[there].abs().max() <= slack


@pytest.mark.parametrize("kind", h.KINDS)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("topk", [0, 1, 4, 9])
def test_choices_are_the_definition(kind, whole, topk):
    """Checks every choice in fp64, with ties where inputs are whole numbers."""
    args = h.make_inputs(2, 5, 9, 2, 4, F64, whole=whole)
    visible = h.visibility(kind, *args[:2])
    got = reference.index_topk(*args, topk, 0.5, *visible)
    assert torch.equal(got, h.first_of(h.oracle(*args, 0.5, visible), ~h.seen(*args[:2], visible), topk))
    assert got.dtype is torch.int32


@pytest.mark.parametrize("dtype", [F64, F32, BF16])
def test_nan_is_the_largest_and_hidden_keys_come_last(dtype):
    q, k, w = h.make_inputs(1, 3, 6, 1, 4, dtype)
    q, k, w = q.abs(), k.abs(), torch.full_like(w, -1)
    k[0, 4], k[0, 1] = torch.nan, torch.inf  # scores of NaN and -inf
    mask = torch.tensor([True, True, False, True, True, False]).view(1, 1, 6)
    for topk, want in ((1, [4]), (3, [0, 3, 4]), (4, [0, 1, 3, 4]), (6, [0, 1, 3, 4, -1, -1])):
        assert reference.index_topk(q, k, w, topk, 1.0, None, mask, None, None).tolist() == [[want] * 3]


def test_zeros_of_both_signs_tie():
    q, k, w = torch.ones(1, 1, 1, 1), -torch.ones(1, 6, 1), -torch.ones(1, 1, 1)
    scores = torch.tensor([0.0, -0.0, 0.0])
    assert len(set(reference.sortable(scores).tolist())) == 1
    assert reference.index_topk(q, k, w, 2, 1.0, *NONE).tolist() == [[[0, 1]]]


@pytest.mark.parametrize("dtype", [F32, F64])
def test_integers_sort_as_floats(dtype):
    x = torch.tensor([-torch.inf, -3.0, -1e-45, 0.0, 1e-45, 2.0, torch.inf, torch.nan], dtype=dtype)
    bits = reference.sortable(x)
    assert (bits[1:] >= bits[:-1]).all() and bits[0] > torch.iinfo(bits.dtype).min
    assert reference.sortable(-x[-1:]) == bits[-1]


@pytest.mark.parametrize("chunk", [1, 60, 200])
@pytest.mark.parametrize("kind", ["causal", "everything"])
def test_chunks_change_nothing(monkeypatch, chunk, kind):
    args = h.make_inputs(3, 7, 9, 2, 4, F64, whole=True)
    visible = h.visibility(kind, *args[:2])
    g = torch.randn(3, 7, 9, dtype=F64)
    calls = (
        lambda: (reference.index_scores(*args, 1.0, *visible),),
        lambda: (reference.index_topk(*args, 4, 1.0, *visible),),
        lambda: reference.index_scores_backward(g, *args, 1.0, *visible),
    )
    whole = [call() for call in calls]
    monkeypatch.setattr(reference, "CHUNK", chunk)
    for call, want in zip(calls, whole, strict=True):
        for got, t in zip(call(), want, strict=True):
            assert torch.allclose(got.double(), t.double(), atol=1e-12, equal_nan=True)


@pytest.mark.parametrize(
    ("batch", "queries", "per", "most", "tile"),
    [
        (3, 7, 5, 1, 1),
        (3, 7, 5, 35, 1),
        (3, 7, 5, 70, 1),
        (3, 7, 5, 12, 1),
        (2, 300, 5, 1000, 64),
        (0, 3, 1, 1, 1),
        (2, 0, 1, 1, 1),
    ],
)
def test_chunks_cover_every_query_once(batch, queries, per, most, tile):
    found = torch.zeros(batch, queries, dtype=torch.int)
    for b, s in reference.chunks(batch, queries, per, most, tile):
        size = (b.stop - b.start) * (s.stop - s.start)
        assert size * per <= max(most, tile * per) and (s.start % tile == 0)
        found[b, s] += 1
    assert (found == 1).all()


def test_gradients_of_hidden_keys_are_ignored():
    args = h.make_inputs(2, 5, 9, 3, 4, F64)
    visible = h.visibility("everything", *args[:2])
    see = h.seen(*args[:2], visible)
    g = torch.randn(2, 5, 9, dtype=F64)
    wild = torch.where(see, g, torch.nan)
    for a, b in zip(
        reference.index_scores_backward(g, *args, 0.7, *visible),
        reference.index_scores_backward(wild, *args, 0.7, *visible),
        strict=True,
    ):
        assert torch.equal(a, b)
