# SPDX-License-Identifier: Apache-2.0
"""Scores that are the sum of products, as absorbed multi-head latent attention writes them, and masks that are put.

A sum of products is one product of concatenated vectors: one part of q and K without positions, one with rotary ones.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.test_routing_absorb import LATENT, NOPE, ROPE, Latent, data, same
from tests.tools.attentions import as_exact, routed, stays
from tests.tools.capture import alike

B, S, T, H, L, R, K = 2, 10, 19, 3, 8, 4, 4
INF = float("inf")
LISTS = "mhc_inductor.selection_list_attention"
Form = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of q's parts [B, S, H, L] and [B, S, H, R], the latent [B, T, L], rotary keys [B, T, R], indices [B, S, K], sinks [H]."""


def given(queries: int = S, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(7)
    shapes = ((B, queries, H, L), (B, queries, H, R), (B, T, L), (B, T, R))
    made = [torch.randn(*shape, generator=g).to(dtype) for shape in shapes]
    return [*made, torch.rand(B, queries, T, generator=g).topk(K).indices, torch.randn(H, generator=g).to(dtype)]


def causal(queries: int) -> Tensor:
    """Returns a mask to be added in which the first key is visible to every query, the last ones of T to its end."""
    return torch.full((queries, T), -INF).triu(1 + T - queries)


def listed(at: Tensor) -> Tensor:
    """Returns a mask to be added: 0 at the listed keys, -inf elsewhere, as DeepSeek-V3.2 writes it."""
    return torch.full((*at.shape[:2], T), -INF).scatter_(-1, at, 0)


def product(scores: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Softmaxes of scores [B, S, H, T] times values [B, T, L]."""
    return torch.einsum("bsht,btc->bshc", scores.softmax(-1, dtype=dtype).to(v), v)


def pair(qn: Tensor, qp: Tensor, c: Tensor, pe: Tensor) -> tuple[Tensor, Tensor]:
    return torch.einsum("bshc,btc->bsht", qn, c), torch.einsum("bshr,btr->bsht", qp, pe)


def decode(qn: Tensor, qp: Tensor, c: Tensor, pe: Tensor, at: Tensor, sink: Tensor) -> Tensor:
    a, b = pair(qn, qp, c, pe)
    scores = (a + b) * 0.3
    scores += listed(at).unsqueeze(2)
    return product(scores, c, torch.float32)


def rope_first(qn: Tensor, qp: Tensor, c: Tensor, pe: Tensor, at: Tensor, sink: Tensor) -> Tensor:
    scores = torch.einsum("bshr,btr->bsht", qp, pe) * 0.3 + torch.einsum("bshc,btc->bsht", qn * 0.3, c)
    return product(scores + (listed(at) + causal(qn.shape[1])).unsqueeze(2), c)


def heads_first(qn: Tensor, qp: Tensor, c: Tensor, pe: Tensor, at: Tensor, sink: Tensor) -> Tensor:
    q, r = qn.transpose(1, 2), qp.transpose(1, 2)
    scores = torch.add(q @ c[:, None].mT, r @ pe[:, None].transpose(-1, -2)).div(3.0)
    keep = torch.zeros(*at.shape[:2], T, dtype=torch.bool).scatter(-1, at, True)[:, None]
    return (scores.masked_fill(~keep, -INF).softmax(-1) @ c[:, None]).transpose(1, 2)


def three(qn: Tensor, qp: Tensor, c: Tensor, pe: Tensor, at: Tensor, sink: Tensor) -> Tensor:
    first, second = qn.split(L // 2, -1)
    parts = (first, c[..., : L // 2]), (qp, pe), (second, c[..., L // 2 :])
    return product(sum(torch.einsum("bshc,btc->bsht", q, k) for q, k in parts) + listed(at)[:, :, None], c)


def with_sink(qn: Tensor, qp: Tensor, c: Tensor, pe: Tensor, at: Tensor, sink: Tensor) -> Tensor:
    scores = (torch.einsum("bshc,btc->bhst", qn, c) + torch.einsum("bshr,btr->bhst", qp, pe)) * 0.3
    scores = scores + listed(at)[:, None]
    scores = torch.cat([scores, sink.view(1, H, 1, 1).expand(scores.shape[0], -1, scores.shape[2], -1)], -1)
    return torch.einsum("bhst,btc->bshc", scores.softmax(-1)[..., :-1], c)


def in_one_cache(qn: Tensor, qp: Tensor, c: Tensor, pe: Tensor, at: Tensor, sink: Tensor) -> Tensor:
    cache = torch.cat([c, pe], -1).sin()
    return product(sum(pair(qn, qp, cache[..., :L], cache[..., L:])) + listed(at)[:, :, None], cache[..., :L])


def one_product(qn: Tensor, qp: Tensor, c: Tensor, pe: Tensor, at: Tensor, sink: Tensor) -> Tensor:
    cache = torch.cat([c, pe], -1).sin()
    scores = torch.einsum("bshc,btc->bsht", torch.cat([qn, qp], -1), cache) + listed(at)[:, :, None]
    return product(scores, cache[..., :L])


def twice(qn: Tensor, qp: Tensor, c: Tensor, pe: Tensor, at: Tensor, sink: Tensor) -> Tensor:
    a, b = pair(qn, qp, c, pe)
    return product(b + b + a + listed(at)[:, :, None], c)


FORMS: dict[str, Form] = {
    f.__name__: f for f in (decode, rope_first, heads_first, three, with_sink, in_one_cache, one_product, twice)
}
FORMS["own_values"] = lambda qn, qp, c, pe, at, sink: product(
    pair(qn, qp, c, pe)[1] + pair(qn, qp, c, pe)[0] + listed(at)[:, :, None], (c * 2.0).cos()
)
INSIDE = {"decode", "rope_first", "heads_first", "with_sink", "in_one_cache", "one_product", "twice"}
"""The forms whose values are the first columns of a product's keys: the op reads them there."""


@pytest.mark.parametrize("name", FORMS)
def test_added_products_are_one(name: str) -> None:
    got = routed(FORMS[name], given())
    (call,) = got.nodes(LISTS)
    assert (call.args[2] is None) == (name in INSIDE) and call.args[-1] == L
    assert call.args[0].meta["example_value"].shape[-1] == L + R * (2 if name == "twice" else 1)


@pytest.mark.parametrize("name", ["decode", "rope_first", "three"])
def test_in_bf16_the_op_is_as_exact_as_the_formula(name: str) -> None:
    as_exact(name, FORMS[name], given(dtype=torch.bfloat16))


def test_dynamic_sizes_and_one_query() -> None:
    for queries in (S, 1):
        routed(decode, given(queries), dynamic=True)


class Added(Latent):
    """Multi-head latent attention before absorption: rotary scores are added to those of the projected keys."""

    def forward(self, x: Tensor, topk: Tensor, past: Tensor | None = None) -> Tensor:
        rows = x.shape[:2]
        c, rot = self.kv_a_proj(x).split([LATENT, ROPE], -1)
        kv = self.kv_b_proj(self.norm(c)).view(*rows, self.heads, -1).transpose(1, 2)
        k, v = kv[..., :NOPE], kv[..., NOPE:]
        q, r = self.queries(x).split([NOPE, ROPE], -1)
        scores = q @ k.mT + torch.einsum("bhsr,btr->bhst", r, rot.cos())
        mask = torch.zeros(*rows, rows[1], dtype=torch.bool).scatter(-1, topk, True).unsqueeze(1)
        o = (scores * 0.37).masked_fill(~mask, -INF).softmax(-1) @ v
        return self.o_proj(o.transpose(1, 2).flatten(2))


def test_added_products_of_a_latent_are_absorbed() -> None:
    torch.manual_seed(3)
    _, found = same(Added(lambda m, c, rot: (c, c)).to(torch.float64), data())
    assert (found.rope, found.width) == (ROPE, LATENT), found


# --- not one product -------------------------------------------------------------------------------------------


def relative(qn: Tensor, qp: Tensor, c: Tensor, pe: Tensor, at: Tensor, sink: Tensor) -> Tensor:
    rows = pe[0][(torch.arange(S)[:, None] - torch.arange(T)) % T]
    scores = torch.einsum("bshc,btc->bsht", qn, c) + torch.einsum("bshr,str->bsht", qp, rows)
    return product(scores + listed(at)[:, :, None], c)


def doubled(qn: Tensor, qp: Tensor, c: Tensor, pe: Tensor, at: Tensor, sink: Tensor) -> Tensor:
    scores = torch.einsum("bshc,btc->bsht", qn, c)
    for _ in range(20):
        scores = scores + scores
    return product(scores * 1e-6 + listed(at)[:, :, None], c)


def of_two(scores: Callable[[Tensor, Tensor], Tensor]) -> Form:
    return lambda qn, qp, c, pe, at, sink: product(scores(*pair(qn, qp, c, pe)) + listed(at)[:, :, None], c)


NOT_ONE: dict[str, tuple[Form, str]] = {
    "other factors": (of_two(lambda a, b: a * 0.3 - b * 0.3), "have different factors"),
    "keys of each query": (relative, "differ where V does not"),
    "capped": (of_two(lambda a, b: a.tanh() + b), "changed by add"),
    "doubled 20 times": (doubled, "changed by add"),
}


@pytest.mark.parametrize("name", NOT_ONE)
def test_other_sums_are_named(name: str) -> None:
    form, reason = NOT_ONE[name]
    stays(form, given(), reason)


# --- masks that are put in rows of a flat tensor ---------------------------------------------------------------


def put(rows: Callable[[Tensor], Tensor], at: Callable[[Tensor], Tensor]) -> Form:
    def fn(qn: Tensor, qp: Tensor, c: Tensor, pe: Tensor, indices: Tensor, sink: Tensor) -> Tensor:
        mask = torch.zeros(B * S, T, dtype=torch.bool)
        mask[rows(torch.arange(B * S)), at(indices)] = True
        scores = torch.einsum("bshc,btc->bhst", qn, c).masked_fill(~mask.view(B, 1, S, T), -INF)
        return torch.einsum("bhst,btc->bshc", scores.softmax(-1), c)

    return fn


PUT = {
    "view": put(lambda r: r[:, None], lambda i: i.view(B * S, K)),
    "flatten": put(lambda r: r.unsqueeze(-1).expand(-1, K), lambda i: i.flatten(0, 1)),
    "one list": put(lambda r: r.repeat_interleave(K), lambda i: i.reshape(-1)),
}


@pytest.mark.parametrize("name", PUT)
def test_masks_put_in_a_flat_tensor(name: str) -> None:
    routed(PUT[name], given())


def test_masks_put_in_another_order() -> None:
    """Rows in the order of the transposed indices; rows in their own order, with the lists of other queries."""
    for rows in (lambda r: r.view(B, S).t().reshape(-1, 1), lambda r: r[:, None]):
        form = put(rows, lambda i: i.transpose(0, 1).flatten(0, 1))
        alike(form, given(), within=2e-6)


def test_a_step_in_place_keeps_the_dtype_of_its_tensor() -> None:
    """A float32 mask and factor in steps on bf16 scores, which are returned: nothing is routed, nothing changes."""

    def fn(qn: Tensor, qp: Tensor, c: Tensor, pe: Tensor, at: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.einsum("bshc,btc->bsht", qn, c)
        scores += listed(at).unsqueeze(2)
        scores *= torch.full((), 1.0 + 2**-12)
        return torch.einsum("bsht,btc->bshc", scores.softmax(-1), c), scores

    got = alike(fn, given(dtype=torch.bfloat16), within=0.0)
    assert [o.dtype for o in got.outputs] == [torch.bfloat16] * 2


@pytest.mark.parametrize("first", [3, 6])
def test_keys_put_at_a_short_range_are_no_more_than_it(first: int) -> None:
    """The second part has six keys, of which the first three, or all, are visible to every query."""

    def fn(qn: Tensor, qp: Tensor, c: Tensor, pe: Tensor, at: Tensor, sink: Tensor) -> Tensor:
        one = torch.zeros(B, S, T, dtype=torch.bool).scatter(-1, at, True)
        two = torch.zeros(B, S, 6, dtype=torch.bool).scatter(-1, torch.arange(first).expand(B, S, first), True)
        mask, keys = torch.cat([one, two], -1), torch.cat([c, c[:, :6].cos()], 1)
        scores = torch.einsum("bshc,btc->bhst", qn, keys).masked_fill(~mask[:, None], -INF)
        return torch.einsum("bhst,btc->bshc", scores.softmax(-1), keys)

    routed(fn, given())
