# SPDX-License-Identifier: Apache-2.0
"""The op returns chosen keys by position: an indexer whose keys are used by their rank stays, and says so.

Values that ``topk`` returns with them stay, too, but for marks of picks that are hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.tools.attentions import equal, same
from tests.tools.capture import Captured, alike, eager, reasons, run

B, S, H, D, K = 2, 20, 16, 8, 6
BATCH = torch.arange(B)[:, None, None]
CAUSAL = torch.ones(S, S, dtype=torch.bool).tril()


def scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """Returns scores [B, S, T]; 16 heads, so that no two of them are 0."""
    return (torch.einsum("bshd,btd->bsht", q, k).relu() * w[..., None]).sum(2)


def chosen(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    return scores(q, k, w).masked_fill(~CAUSAL, -torch.inf).topk(K, -1).indices


def given(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Returns q, k, w of an indexer, queries, keys and a mask; some rows see no key, most see fewer than K."""
    g = torch.Generator().manual_seed(2)
    shapes = ((B, S, H, D), (B, S, D), (B, S, H), (B, S, D), (B, S, D))
    made = [torch.randn(*shape, generator=g).to(dtype if n < 3 else torch.float32) for n, shape in enumerate(shapes)]
    seen = torch.rand(B, S, S, generator=g) < 0.25
    seen[0, :3] = False
    return [*made, seen]


def attend(x: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Attends to gathered keys [B, S, n, D]."""
    scores = torch.einsum("bsd,bsnd->bsn", x, keys)
    scores = scores if bias is None else scores + bias
    scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("bsn,bsnd->bsd", scores.softmax(-1), values)


def seen(i: Tensor) -> Tensor:
    return i <= torch.arange(S)[:, None]


Use = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of a choice [B, S, K], another choice, queries and keys [B, S, D]."""
RANK, UNKNOWN = "by their place", "their order may count"

BY_RANK: dict[str, tuple[Use, str]] = {
    "values of other keys": (lambda i, j, x, y: attend(x, y[BATCH, i], y[BATCH, i.flip(-1)], seen(i)), RANK),
    "values of another choice": (lambda i, j, x, y: attend(x, y[BATCH, i], y[BATCH, j]), RANK),
    "a bias of ranks": (lambda i, j, x, y: attend(x, y[BATCH, i], y[BATCH, i], bias=torch.arange(K) * 0.1), RANK),
    "an embedding of ranks": (lambda i, j, x, y: attend(x, y[BATCH, i] + y[0, :K], y[BATCH, i]), RANK),
    "the better half": (lambda i, j, x, y: attend(x, y[BATCH, i][:, :, :3], y[BATCH, i][:, :, :3]), RANK),
    "weights of ranks": (lambda i, j, x, y: torch.einsum("bsnd,n->bsd", y[BATCH, i], x[0, 0, :K]), RANK),
    "scattered ranks": (lambda i, j, x, y: x.new_zeros(B, S, S).scatter(-1, i, (torch.arange(K) + 1.0).expand(B, S, K)) @ y,
                        RANK),
    "running sums": (lambda i, j, x, y: (y[BATCH, i].cumsum(2) * y[BATCH, i]).sum(2), RANK),
    "rolled through all dims": (lambda i, j, x, y: (y[BATCH, i] * i.roll(1)[..., None]).sum(2), RANK),
    "a causal call": (
        lambda i, j, x, y: F.scaled_dot_product_attention(x[:, :, None].expand(-1, -1, K, -1), y[BATCH, i], y[BATCH, i],
                                                          is_causal=True), UNKNOWN),
    "sums of pairs": (lambda i, j, x, y: (y[BATCH, i].view(B, S, 2, 3, D).sum(3) * torch.tensor([[1.0], [2.0]])).sum(2),
                      UNKNOWN),
    "cut after a cat": (lambda i, j, x, y: y[BATCH, torch.cat([i, i * 0], -1)[..., :4]].sum(2), "some of the chosen keys"),
    "the nearer of two": (
        lambda i, j, x, y: (y[BATCH, i] * (i[..., None] - i[..., None, :]).abs().tril(-1).sum(-1, True)).sum(2), UNKNOWN),
}  # fmt: skip


def used(use: Use, within: float) -> Captured:
    def fn(q: Tensor, k: Tensor, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return use(chosen(q, k, w), chosen(q.flip(2), k, w), x, y)

    return alike(fn, given()[:5], within=within)


@pytest.mark.parametrize("name", BY_RANK)
def test_keys_that_are_used_by_their_rank_stay(name: str) -> None:
    use, reason = BY_RANK[name]
    got = used(use, 0.0)
    assert not got.ops["index_topk"] and reason in reasons(got), reasons(got)


def test_of_equal_scores_the_lower_position_is_taken() -> None:
    """A relu gives scores of exactly 0, of which torch.topk takes others: README.md says so."""
    q, k, w = (
        torch.randn(shape, generator=torch.Generator().manual_seed(3)) for shape in ((B, S, 1, D), (B, S, D), (B, S, 1))
    )
    w = w.abs()

    def fn(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        return torch.zeros(B, S, S).scatter(-1, chosen(q, k, w), 1.0)

    got, want = run(fn, [q, k, w], grad=False), eager(fn, [q, k, w], grad=False)
    assert got.ops["index_topk"] == 1, reasons(got)
    found = scores(q, k, w)
    full = torch.arange(S) >= K - 1  # queries that see at least K keys
    best = found.masked_fill(~CAUSAL, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[..., :K]
    assert torch.equal(got.outputs[0][:, full], torch.zeros(B, S, S).scatter(-1, best, 1.0)[:, full])
    mine, theirs = ((x.outputs[0] * found)[:, full].sort(-1).values for x in (got, want))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert not torch.equal(got.outputs[0][:, full], want.outputs[0][:, full]), "the scores are equal, the keys are not"


def _window(i: Tensor, j: Tensor, x: Tensor, y: Tensor) -> Tensor:
    near = (torch.arange(S)[:, None] - torch.arange(3)).expand(B, -1, -1)
    both = torch.cat([i, near], -1)
    return attend(x, y[BATCH, both.clamp(min=0)], y[BATCH, both.clamp(min=0)], torch.cat([seen(i), near >= 0], -1))


def _flat(i: Tensor, j: Tensor, x: Tensor, y: Tensor) -> Tensor:
    rows = y.reshape(B * S, D).index_select(0, (i + BATCH * S).reshape(-1)).view(B, S, K, D)
    return attend(x, rows, rows, seen(i))


def _called(i: Tensor, j: Tensor, x: Tensor, y: Tensor) -> Tensor:
    rows = y[BATCH, i].reshape(B * S, 1, K, D)
    mask = seen(i).reshape(B * S, 1, 1, K)
    return F.scaled_dot_product_attention(x.reshape(B * S, 1, 1, D), rows, rows, attn_mask=mask)


def _written(i: Tensor, j: Tensor, x: Tensor, y: Tensor) -> Tensor:
    mask = torch.zeros(B, S, S, dtype=torch.bool)
    mask[BATCH, torch.arange(S)[:, None], i] = True
    return ((x @ y.mT).masked_fill(~(mask & CAUSAL), -torch.inf).softmax(-1) ** 2) @ y


def _gathered(i: Tensor, x: Tensor, y: Tensor) -> Tensor:
    rows = torch.take_along_dim(y[:, None], i[..., None], 2)
    return attend(x, rows, rows, seen(i))


AS_A_SET: dict[str, Use] = {
    "rows": lambda i, j, x, y: attend(x, y[BATCH, i], y[BATCH, i], seen(i)),
    "rows of a table": lambda i, j, x, y: attend(x, *[torch.stack([F.embedding(i[b], y[b]) for b in range(B)])] * 2, seen(i)),
    "gathered": lambda i, j, x, y: _gathered(i, x, y),
    "rows of all sequences": _flat,
    "next to a window": _window,
    "a call": _called,
    "a mask": _written,
    "scores": lambda i, j, x, y: (
        torch.zeros(B, S, S).scatter(-1, i, (x @ y.mT).masked_fill(~CAUSAL, -torch.inf).gather(-1, i).softmax(-1)) @ y),
    "sorted again": lambda i, j, x, y: _gathered(i.sort(-1).values, x, y),
    "the farthest": lambda i, j, x, y: y.gather(1, i.amin(-1, True).expand(-1, -1, D)),
}  # fmt: skip


@pytest.mark.parametrize("name", AS_A_SET)
def test_keys_that_are_used_as_a_set_are_routed(name: str) -> None:
    got = used(AS_A_SET[name], 2e-6)
    assert got.ops["index_topk"] == 1, reasons(got)


@pytest.mark.parametrize("ranked", [False, True])
def test_a_fill_that_is_a_dynamic_number_of_keys_has_no_rank(ranked: bool) -> None:
    """Checks keys that DeepSeek-V4 replaces by their number, one column past the mask, where that number is dynamic."""

    def fn(q: Tensor, k: Tensor, w: Tensor, x: Tensor) -> Tensor:
        i, n = scores(q, k, w).topk(K, -1).indices, k.shape[1]
        past = torch.full_like(i, n)
        kept = torch.where(i < 9, i, past - torch.arange(K) if ranked else past)
        mask = x.new_full((B, S, n + 1), -torch.inf).scatter(-1, kept, 0.0)[..., :n]
        return (x @ k.mT + mask).softmax(-1) @ k

    g = torch.Generator().manual_seed(2)
    x = [torch.randn(*shape, generator=g) for shape in ((B, S, H, D), (B, S + 4, D), (B, S, H), (B, S, D))]
    got = alike(fn, x, within=2e-6, dynamic=None, symbolic=[(1, 1)])
    assert got.ops["index_topk"] == (not ranked), reasons(got)
    assert ("by their place" in reasons(got)) == ranked


def _checkpointed(i: Tensor, use: Callable[[Tensor], Tensor]) -> Tensor:
    return checkpoint(use, i, use_reentrant=False)


LEAVING: dict[str, Callable[[Tensor], Tensor]] = {
    "returned": lambda i: i,
    "returned as a view": lambda i: i.int().unsqueeze(1),
    "after a break": lambda i: (torch._dynamo.graph_break(), i[..., 0])[1],
    "read in a checkpointed region": lambda i: _checkpointed(i, lambda j: j[..., 0] * 2),
    "kept in a buffer": lambda i: KEPT.copy_(i),
}
KEPT = torch.zeros(B, S, K, dtype=torch.int64)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", LEAVING)
def test_keys_that_leave_the_graph_come_best_first(name: str, grad: bool) -> None:
    def fn(q: Tensor, k: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return LEAVING[name](chosen(q, k, w)), (q * 2).sum() * w.mean()

    got, want = run(fn, given()[:3], grad=grad), eager(fn, given()[:3], grad=grad)
    assert (got.ops["index_scores"], got.ops["index_topk"]) == (1, 0), reasons(got)
    visible = (slice(None), torch.arange(S) >= K - 1)
    ours, theirs = got.outputs[0].squeeze(1) if "view" in name else got.outputs[0], want.outputs[0]
    theirs = theirs.squeeze(1) if "view" in name else theirs
    assert torch.equal(ours[visible], theirs[visible])
    assert all(torch.equal(got.grads[n], want.grads[n]) for n in want.grads if want.grads[n] is not None)


def test_keys_that_leave_in_no_order_are_chosen_by_position() -> None:
    def fn(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        return scores(q, k, w).masked_fill(~CAUSAL, -torch.inf).topk(K, -1, sorted=False).indices

    got = run(fn, given()[:3], grad=False)
    assert (got.ops["index_scores"], got.ops["index_topk"]) == (0, 1), reasons(got)


# --- values of topk that only mark picks of hidden keys: the op gives them, and no score of other keys stays ------

INF, LOWEST = float("inf"), torch.finfo(torch.float32).min
Masked = Callable[[Tensor, Tensor], Tensor]
"""Of scores [B, S, S] and a mask [B, S, S]."""
Marking = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
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


MARKS: dict[str, Marking] = {
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


def formula(use: Marking, masked: Masked) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns a function whose picks are used by ``use``, next to something with gradients."""

    def fn(q: Tensor, k: Tensor, w: Tensor, x: Tensor, y: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = masked(scores(q.float(), k.float(), w.float()), m).topk(K, -1)
        return use(values, indices, x, y), (q * 2).sum() * w.mean() + k.sum()

    return fn


def marked(fn: Callable[..., Any], x: list[Tensor], **options: Any) -> Captured:
    """Asserts that the op marks picks, with equal results and gradients, NaN included: rows without keys may give some."""
    got = same(fn, x, **options)
    assert got.ops["index_topk_scores"] == 1 and not got.ops["index_scores"], reasons(got)
    return got


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("mark", MARKS)
def test_marks_of_hidden_picks_are_routed(mark: str, mask: str) -> None:
    got = marked(formula(MARKS[mark], MASKS[mask]), given())
    big = [n for n in got.nodes("topk") if "mhc_inductor" not in str(n.target)]
    assert not big, "torch.topk still reads scores of all keys"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mark", ["== -inf", "one more slot", "> -inf"])
def test_marks_with_dynamic_sizes(mark: str, dtype: torch.dtype) -> None:
    sizes = [*((n, 1) for n in range(6)), (5, 2)]
    marked(formula(MARKS[mark], MASKS["data"]), given(dtype), dynamic=None, symbolic=sizes)


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
    marked(formula(MARKS["<= lowest"], lambda x, m: torch.where(m, x, LOWEST)), given())


VALUES = "values of topk are used"
OTHERS: dict[str, tuple[Marking, Masked, str]] = {
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
    equal(got, want) if not hidden else torch.testing.assert_close(got.outputs[0][:, K:], want.outputs[0][:, K:])
