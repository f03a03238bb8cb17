# SPDX-License-Identifier: Apache-2.0
"""Values of ``topk`` that only mark picks of hidden keys: the op gives these values, and no score of other keys stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.test_routing_index_order import BATCH, CAUSAL, B, D, H, K, S
from tests.tools.capture import Captured, eager, reasons, run

INF, LOWEST = float("inf"), torch.finfo(torch.float32).min
Masked = Callable[[Tensor, Tensor], Tensor]
"""Of scores [B, S, S] and a mask [B, S, S]."""
Use = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of the values and indices that ``topk`` returns, [B, S, K], queries and keys [B, S, D]."""

MASKS: dict[str, Masked] = {
    "causal": lambda x, m: x.masked_fill(~CAUSAL, -INF),
    "data": lambda x, m: x.masked_fill(~m, -INF),
    "both": lambda x, m: torch.where(CAUSAL, x, -INF).masked_fill(~m, -INF),
    "added": lambda x, m: x + torch.zeros(x.shape).masked_fill(~m, -INF),
    "none": lambda x, m: x,
}


def _slots(i: Tensor, y: Tensor) -> Tensor:
    """Marks picks in a mask of T + 1 columns, of which the last is cut off."""
    n = y.shape[1]
    return torch.zeros(*i.shape[:2], n + 1, dtype=torch.bool).scatter(-1, i, True)[..., :n]


def _attended(v: Tensor, i: Tensor, x: Tensor, y: Tensor) -> Tensor:
    mask = torch.full((B, S, S + 1), -INF).scatter(-1, i.masked_fill(v == -INF, S), 0.0)[..., :S]
    return (x @ y.mT + mask).softmax(-1).nan_to_num() @ y


MARKS: dict[str, Use] = {
    "== -inf": lambda v, i, x, y: i.masked_fill(v == -INF, -1).sort(-1).values,
    "isinf": lambda v, i, x, y: torch.where(v.isinf(), -1, i).sort(-1).values,
    "isneginf": lambda v, i, x, y: torch.where(torch.isneginf(v), -1, i.int()).sort(-1).values,
    "> -inf": lambda v, i, x, y: torch.where(v > -INF, i, -1).sort(-1).values,
    "isfinite": lambda v, i, x, y: torch.where(v.detach().isfinite(), i, -1).sort(-1).values,
    "not isnan": lambda v, i, x, y: torch.where(~v.isnan() & (v != -INF), i, -1).sort(-1).values,
    "<= lowest": lambda v, i, x, y: torch.where(v.unsqueeze(1) <= LOWEST, -1, i[:, None]).sort(-1).values,
    "counted": lambda v, i, x, y: (v != -INF).sum(-1),
    "added up": lambda v, i, x, y: torch.zeros(B, S, S).scatter_add(-1, i, (v != -INF).float()),
    "one more slot": lambda v, i, x, y: _slots(i.masked_fill(v == -INF, y.shape[1]), y),
    "one more slot of a bias": _attended,
    "raw indices": lambda v, i, x, y: (y[BATCH, i] * (v > -INF)[..., None]).sum(2),
}


def scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """Returns scores [B, S, T]; 16 heads, so that no two of them are 0."""
    return (torch.einsum("bshd,btd->bsht", q.float(), k.float()).relu() * w.float()[..., None]).sum(2)


def formula(use: Use, masked: Masked) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns a function whose picks are used by ``use``, next to something with gradients."""

    def fn(q: Tensor, k: Tensor, w: Tensor, x: Tensor, y: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = masked(scores(q, k, w), m).topk(K, -1)
        return use(values, indices, x, y), (q * 2).sum() * w.mean() + k.sum()

    return fn


def given(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Returns q, k, w, queries, keys and a mask; some rows see no key, most see fewer than K."""
    g = torch.Generator().manual_seed(2)
    shapes = ((B, S, H, D), (B, S, D), (B, S, H), (B, S, D), (B, S, D))
    made = [torch.randn(*shape, generator=g).to(dtype if n < 3 else torch.float32) for n, shape in enumerate(shapes)]
    seen = torch.rand(B, S, S, generator=g) < 0.25
    seen[0, :3] = False
    return [*made, seen]


def same(got: Captured, want: Captured) -> None:
    """Asserts equal results and gradients, NaN included: rows without keys may give some."""
    assert got.grads.keys() == want.grads.keys()
    assert [o.requires_grad for o in got.outputs] == [o.requires_grad for o in want.outputs]
    grads = [(got.grads[name], grad) for name, grad in want.grads.items()]
    for a, b in [*zip(got.outputs, want.outputs, strict=True), *grads]:
        assert (a is None) == (b is None)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


DYNAMIC = [(n, 1) for n in range(6)] + [(5, 2)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("mark", MARKS)
def test_marks_of_hidden_picks_are_routed(mark: str, mask: str) -> None:
    fn, x = formula(MARKS[mark], MASKS[mask]), given()
    got = run(fn, x)
    assert got.ops["index_topk_scores"] == 1 and not got.ops["index_scores"], reasons(got)
    same(got, eager(fn, x))
    big = [
        n
        for gm in got.graphs
        for n in gm.graph.nodes
        if "topk" in str(n.target) and "mhc_inductor" not in str(n.target)
    ]
    assert not big, "torch.topk still reads scores of all keys"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mark", ["== -inf", "one more slot", "> -inf"])
def test_marks_with_dynamic_sizes(mark: str, dtype: torch.dtype) -> None:
    fn, x = formula(MARKS[mark], MASKS["data"]), given(dtype)
    got = run(fn, x, dynamic=None, symbolic=DYNAMIC)
    assert got.ops["index_topk_scores"] == 1, reasons(got)
    same(got, eager(fn, x))


@pytest.mark.parametrize("mark", ["== -inf", "isinf", "isfinite", "> -inf", "not isnan", "one more slot", "counted"])
@pytest.mark.parametrize("mask", ["causal", "data"])
def test_scores_that_are_not_finite_keep_their_marks(mark: str, mask: str) -> None:
    """A visible key whose score is -inf is marked as hidden, one with NaN or inf as the comparison says."""
    fn, x = formula(MARKS[mark], MASKS[mask]), given()
    q, k, w = (t.abs_() for t in x[:3])  # no product of 0, which times inf is NaN
    w[0, 4:], k[1, 2, 0], q[0, 3, 1] = -INF, INF, torch.nan
    got, want = (do(fn, x, grad=False) for do in (run, eager))
    assert got.ops["index_topk_scores"] == 1, reasons(got)
    assert torch.equal(got.outputs[0], want.outputs[0])


def test_a_finite_fill_marks_hidden_picks() -> None:
    fn, x = formula(MARKS["<= lowest"], lambda x, m: torch.where(m, x, LOWEST)), given()
    got = run(fn, x)
    assert got.ops["index_topk_scores"] == 1, reasons(got)
    same(got, eager(fn, x))


VALUES, RANK = "values of topk are used", "by their place"
OTHERS: dict[str, tuple[Use, Masked, str]] = {
    "returned in order": (lambda v, i, x, y: i.masked_fill(v == -INF, -1), MASKS["causal"], VALUES),
    "values as weights": (lambda v, i, x, y: (y[BATCH, i] * v.softmax(-1)[..., None]).sum(2), MASKS["causal"], VALUES),
    "values next to marks": (lambda v, i, x, y: (v.relu() * (v > -INF)).sum(-1), MASKS["causal"], VALUES),
    "a threshold of data": (lambda v, i, x, y: torch.where(v > x[..., :1], i, -1).sort(-1).values, MASKS["causal"], VALUES),
    "a threshold of another call": (
        lambda v, i, x, y: torch.where(v > torch.rand(()) * 0, i, -1).sort(-1).values, MASKS["causal"], VALUES),
    "compared with themselves": (
        lambda v, i, x, y: torch.where(v > v.flip(-1), i, -1).sort(-1).values, MASKS["causal"], VALUES),
    "marks of other picks": (
        lambda v, i, x, y: torch.where((v == -INF).flip(-1), -1, i).sort(-1).values, MASKS["causal"], RANK),
    "marks of the best": (lambda v, i, x, y: torch.where(v[..., :1] > -INF, i, -1).sort(-1).values, MASKS["causal"], RANK),
    "moved": (lambda v, i, x, y: torch.where(v > 0.5, i, -1).sort(-1).values,
              lambda x, m: MASKS["causal"](x, m) + 0.5, VALUES),
    "halves": (lambda v, i, x, y: i.masked_fill(v == -INF, -1).sort(-1).values,
               lambda x, m: MASKS["causal"]((x * 1e4).half(), m), VALUES),
    "a fill that is added": (lambda v, i, x, y: torch.where(v <= LOWEST, -1, i).sort(-1).values,
                             lambda x, m: x + torch.zeros(x.shape).masked_fill(~m, LOWEST), VALUES),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_uses_of_values_keep_topk(name: str) -> None:
    use, masked, reason = OTHERS[name]
    fn, x = formula(use, masked), given()
    got, want = run(fn, x), eager(fn, x)
    assert not got.ops["index_topk_scores"] and reason in reasons(got), reasons(got)
    hidden = "returned" in name or "added" in name
    same(got, want) if not hidden else torch.testing.assert_close(got.outputs[0][:, K:], want.outputs[0][:, K:])
