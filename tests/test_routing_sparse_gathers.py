# SPDX-License-Identifier: Apache-2.0
"""Attention over gathered keys, as inference references and single files write it; keys may count several times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mhc_inductor.options import RoutingOptions
from mhc_inductor.routing.operators.selection import profit
from tests.tools.attentions import as_exact, routed, stays
from tests.tools.capture import Captured, alike, eager, reasons, run

B, S, H, D, K, W, RATIO = 2, 13, 3, 8, 4, 3, 2
N = S // RATIO
INF = float("inf")
ENTRIES = "mhc_inductor.selection_entry_attention"
Form = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of q [B, S, H, D], keys [B, S, D], values [B, S, D], index scores [B, S, S] and sinks [H]."""


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(2)
    shapes = ((B, S, H, D), (B, S, D), (B, S, D), (B, S, S), (H,))
    return [torch.randn(*shape, generator=g).to(dtype) for shape in shapes]


def rows() -> Tensor:
    return torch.arange(S)[:, None]


def causal(scores: Tensor) -> Tensor:
    return scores + torch.full((S, S), -INF).triu(1)


def rows_of(kv: Tensor, at: Tensor) -> Tensor:
    """Keys [B, S, K, D] by indexing with the batch."""
    return kv[torch.arange(kv.shape[0])[:, None, None], at]


def gather_of(kv: Tensor, at: Tensor) -> Tensor:
    """The same by ``gather`` on an expanded tensor."""
    places = at.unsqueeze(-1).expand(-1, -1, -1, kv.shape[-1])
    return torch.gather(kv.unsqueeze(1).expand(-1, at.shape[1], -1, -1), 2, places)


def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None, sink: Tensor | None = None) -> Tensor:
    """Attends to gathered keys [B, S, K, D] that are kept [B, S, K]."""
    scores = torch.einsum("bshd,bskd->bshk", q, k) * 0.4
    if keep is not None:
        scores = scores.masked_fill(~keep.unsqueeze(2), -INF)
    if sink is not None:
        scores = torch.cat([scores, sink.view(1, 1, -1, 1).expand(*scores.shape[:3], 1)], -1)
        return torch.einsum("bshk,bskd->bshd", scores.softmax(-1)[..., :-1], v)
    return torch.einsum("bshk,bskd->bshd", scores.softmax(-1), v)


def taken(
    q: Tensor, k: Tensor, v: Tensor, at: Tensor, keep: Tensor | None = None, sink: Tensor | None = None
) -> Tensor:
    return attend(q, rows_of(k, at), rows_of(v, at), keep, sink)


def marked(q: Tensor, k: Tensor, at: Tensor, sink: Tensor | None = None, width: int = D) -> Tensor:
    """Attends to places of which -1 is none; V is the first columns of K."""
    kv = gather_of(k, at.clamp(min=0))
    return attend(q, kv, kv[..., :width] if width < D else kv, at != -1, sink)


def latent(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Tensor:
    at = causal(x).topk(K)[1]
    return marked(q, k, torch.where(at > rows(), -1, at), width=D // 2)


def with_sink(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Tensor:
    best, at = causal(x).topk(K)
    at = at.masked_fill(best == -INF, -1).int()
    kv = gather_of(k, at.clamp(0, S - 1).long())
    return attend(q, kv, kv, at.ge(0), sink)


def wrapped(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Tensor:
    best, at = causal(x).topk(K)
    at = torch.where(best > -INF, at, -1)
    return taken(q, k, v, at, at >= 0, sink)


def in_two_parts(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Tensor:
    at = causal(x).topk(K).indices
    kv, pe = gather_of(k, at), rows_of(v, at)
    scores = torch.einsum("bshd,bskd->bshk", q, kv) + torch.einsum("bshd,bskd->bshk", q.sin(), pe)
    scores = scores.masked_fill((at > rows()).unsqueeze(2), -INF)
    return torch.einsum("bshk,bskd->bshd", scores.softmax(-1), kv)


def heads_apart(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Tensor:
    place = x.topk(K).indices[:, None, :, :, None].expand(-1, H, -1, -1, D)
    k, v = (torch.stack([t, t.sin(), t.cos()], 1) for t in (k, v))
    keys, values = (t[:, :, None].expand(-1, -1, S, -1, -1).gather(3, place) for t in (k, v))
    weights = torch.einsum("bshd,bhskd->bhsk", q, keys).softmax(-1)
    return torch.einsum("bhsk,bhskd->bshd", weights, values)


def compressed(k: Tensor) -> Tensor:
    """One key for every RATIO."""
    return k[:, : N * RATIO].unflatten(1, (N, RATIO)).mean(2)


def window(length: int) -> Tensor:
    """Indices [S, W] of the last keys, -1 before the first one: those of DeepSeek-V4's reference."""
    base = torch.arange(length).unsqueeze(1)
    matrix = (base - W + 1).clamp(0) + torch.arange(min(length, W))
    return torch.where(matrix > base, -1, matrix)


def after(more: Tensor) -> Tensor:
    """Places of compressed keys after the others, -1 where a query's ratio has not come to them."""
    return torch.where(more >= torch.arange(1, S + 1).unsqueeze(1) // RATIO, -1, more + S)


def windows_and_choice(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Tensor:
    hidden = torch.arange(N).repeat(S, 1) >= torch.arange(1, S + 1).unsqueeze(1) // RATIO
    more = after((x[..., :N] + torch.where(hidden, -INF, 0)).topk(K, dim=-1)[1])
    at = torch.cat([window(S).unsqueeze(0).expand(k.shape[0], -1, -1), more], -1).int()
    kv = gather_of(torch.cat([k, compressed(k)], 1), at.clamp(min=0).long())
    return attend(q, kv, kv, at != -1, sink)


def windows_and_prefix(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Tensor:
    at = torch.cat([window(S), after(torch.arange(N).repeat(S, 1))], -1).unsqueeze(0).expand(k.shape[0], -1, -1)
    return marked(q, torch.cat([k, compressed(k)], 1), at, sink)


def flashmla(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Tensor:
    """One sequence, as in FlashMLA's reference: invalid indices are replaced by 0, and the product is a matmul."""
    at, q, kv = causal(x[0]).topk(K)[1], q[0], k[0]
    at = at.masked_fill(at > rows(), -1)
    invalid = (at < 0) | (at >= S)
    at = at.masked_fill(invalid, 0)
    kv = kv.index_select(0, at.flatten()).reshape(S, K, D)
    scores = (q @ kv.transpose(1, 2) * 0.3).masked_fill(invalid.unsqueeze(1), -INF)
    return scores.softmax(-1) @ kv[..., : D // 2]


def flat(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Tensor:
    at = causal(x).topk(K)[1]
    places = (at + torch.arange(B)[:, None, None] * S).view(-1)
    return attend(q, k.reshape(-1, D)[places].view(B, S, K, D), v.flatten(0, 1)[places].view(B, S, K, D), at <= rows())


def called(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Tensor:
    """One call of scaled_dot_product_attention for all queries, each with its own keys."""
    at = causal(x).topk(K)[1]
    keys, values = (rows_of(t, at).view(-1, 1, K, D).expand(-1, H, -1, -1) for t in (k, v))
    o = F.scaled_dot_product_attention(q.reshape(-1, H, 1, D), keys, values, (at <= rows()).view(-1, 1, 1, K))
    return o.view(q.shape)


def one_query(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Tensor:
    place = x[:, -1].topk(K).indices[:, None, :, None].expand(-1, H, -1, D)
    keys, values = (t.unsqueeze(1).expand(-1, H, -1, -1).gather(2, place) for t in (k, v))
    return F.scaled_dot_product_attention(q[:, -1:].transpose(1, 2), keys, values)


def decoding(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Tensor:
    kv = k.gather(1, x[:, -1].topk(K).indices.unsqueeze(-1).expand(-1, -1, D))
    return torch.einsum("bhk,bkd->bhd", torch.einsum("bhd,bkd->bhk", q[:, -1], kv).softmax(-1), kv)


def along_dim(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Tensor:
    at = causal(x).topk(K)[1]
    kv = torch.take_along_dim(k.unsqueeze(1), at.unsqueeze(-1), 2)
    return attend(q, kv, kv, at <= rows())


def finite_fill(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Tensor:
    at = causal(x).topk(K)[1].to(torch.int32)
    valid = at <= rows()
    kv = rows_of(k, torch.where(valid, at, 0).long())
    scores = torch.where(valid.unsqueeze(2), torch.einsum("bshd,bskd->bshk", q, kv), torch.finfo(q.dtype).min)
    return torch.einsum("bshk,bskd->bshd", scores.softmax(-1), kv)


def added(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Tensor:
    at = causal(x).topk(K)[1]
    kv, bias = rows_of(k, at), torch.zeros(at.shape).masked_fill(at > rows(), -INF)
    scores = torch.einsum("bshd,bskd->bshk", q, kv) + bias.unsqueeze(2)
    return torch.einsum("bshk,bskd->bshd", scores.softmax(-1), kv)


FORMS: dict[str, Form] = {
    "chosen": lambda q, k, v, x, sink: taken(q, k, v, at := causal(x).topk(K).indices, at <= rows()),
    "best_sorted": lambda q, k, v, x, sink: taken(q, k, v, x.argsort(-1, descending=True)[..., :K]),
    **{
        f.__name__: f
        for f in (
            *(latent, with_sink, wrapped, in_two_parts, heads_apart, windows_and_choice, windows_and_prefix),
            *(flashmla, flat, called, one_query, decoding, along_dim, finite_fill, added),
        )
    },
}


def through_entries(fn: Form, **options: Any) -> Captured:
    got = routed(fn, inputs(), **options)
    assert got.nodes(ENTRIES)
    return got


@pytest.mark.parametrize("name", FORMS)
def test_gathered_keys_become_lists(name: str) -> None:
    through_entries(FORMS[name])


@pytest.mark.parametrize("name", ["latent", "with_sink", "windows_and_choice"])
def test_in_bf16_the_op_is_as_exact_as_the_formula(name: str) -> None:
    as_exact(name, FORMS[name], inputs(torch.bfloat16))


@pytest.mark.parametrize("name", ["chosen", "latent", "with_sink"])
def test_dynamic_batch(name: str) -> None:
    routed(FORMS[name], inputs(), symbolic=[(i, 0) for i in range(4)])


def test_values_in_the_gathered_latent_are_read_once() -> None:
    got = run(latent, inputs())
    (call,) = got.nodes(ENTRIES)
    assert call.args[2] is None and call.args[-2] == D // 2
    assert not got.nodes("gather")


def test_a_gpu_compares_lists_with_the_way_of_gathered_keys_through_memory() -> None:
    """Full tiles of heads win; training with a single head does not by the bound. Dense attention plays no part."""
    many = profit.Sizes("cuda", torch.bfloat16, 4096, 4096, 64, 576, 2048, values=512, gathered=True)
    assert not profit.list_refusal(many) and not profit.list_refusal(many, training=True)
    one = dataclasses.replace(many, heads=1, width=128, values=128)
    assert not profit.list_refusal(one)
    assert profit.list_refusal(one, training=True).startswith("gathering the keys is faster")
    assert "dense attention is faster" in profit.list_refusal(dataclasses.replace(one, gathered=False))


# --- keys that may repeat: every place of a list counts --------------------------------------------------------


def given(x: Tensor) -> Tensor:
    return (x[..., :K] * 10).long()


def another_fill_hidden(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Tensor:
    at = causal(x).topk(K)[1]
    kv = rows_of(k, at := torch.where(at > rows(), 0, at))
    return attend(q, kv, kv, at != 1, sink)


def fills_visible(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Tensor:
    at = causal(x).topk(K)[1]
    kv = gather_of(k, torch.where(at > rows(), -1, at).clamp(min=0))
    return attend(q, kv, kv)


def added_to_the_sum(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Tensor:
    """The sink is added to a sum of exponentials that is written out."""
    at = causal(x).topk(K)[1]
    kv = rows_of(k, at)
    scores = torch.einsum("bshd,bskd->bshk", q, kv).masked_fill((at > rows()).unsqueeze(2), -INF)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    return torch.einsum("bshk,bskd->bshd", weights / (weights.sum(-1, keepdim=True) + (sink[:, None] - top).exp()), kv)


def outside(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Tensor:
    """Scores of more keys than there are: what is hidden is gathered at the last key."""
    at = torch.cat([causal(x), torch.full((k.shape[0], S, 2), -INF)], -1).topk(K)[1]
    kv = rows_of(k, at.clamp(max=S - 1))
    return attend(q, kv, kv, at <= rows())


def cut(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Tensor:
    """Chosen keys and a window, cut to the first places."""
    at = torch.cat([causal(x).topk(K).indices, window(S).clamp(min=0).expand(k.shape[0], -1, -1)], -1)[..., : K + 2]
    return taken(q, k, v, at, at <= rows(), sink)


def given_bias(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Tensor:
    """Numbers without a gradient that are added to the scores of the places."""
    at = given(x).clamp(0, S - 1)
    scores = torch.einsum("bshd,bskd->bshk", q, rows_of(k, at)) + x.detach()[..., None, -K:].sigmoid()
    scores = torch.cat([scores, sink.view(1, 1, -1, 1).expand(*scores.shape[:3], 1)], -1)
    return torch.einsum("bshk,bskd->bshd", scores.softmax(-1)[..., :-1], rows_of(v, at))


REPEATING: dict[str, Form] = {
    "given_indices": lambda q, k, v, x, sink: taken(q, k, v, given(x).clamp(0, S - 1)),
    "twice": lambda q, k, v, x, sink: taken(q, k, v, torch.cat([at := x.topk(K).indices, at], -1)),
    "repeated": lambda q, k, v, x, sink: taken(q, k, v, x.topk(K).indices.repeat_interleave(2, -1)),
    "overlapping": lambda q, k, v, x, sink: marked(
        q, k, torch.cat([window(S).unsqueeze(0).expand(k.shape[0], -1, -1), x.topk(K).indices], -1), sink
    ),
    "offset_too_small": lambda q, k, v, x, sink: taken(
        q, k, v, torch.cat([x[..., :N].topk(2)[1], x[..., :N].topk(K)[1] + N - 1], -1)
    ),
    "fills_visible": fills_visible,
    "another_fill_hidden": another_fill_hidden,
    "other_dim": lambda q, k, v, x, sink: taken(q, k, v, x.topk(S, dim=1).indices[..., :K]),
    "clamped_high": lambda q, k, v, x, sink: taken(q, k, v, x.topk(K).indices.clamp(max=S // 2)),
    # A lower bound above the upper one: the clamp gives -2 everywhere, which is the last key but one.
    "clamped_across": lambda q, k, v, x, sink: taken(q, k, v, given(x).clamp(3, -2)),
    "smallest_of_rows": lambda q, k, v, x, sink: taken(q, k, v, x.topk(K).indices // 2),
    "cut": cut,
    "given_bias": given_bias,
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", REPEATING)
def test_every_place_of_a_list_counts(name: str, dynamic: bool) -> None:
    through_entries(REPEATING[name], dynamic=dynamic)


def test_an_index_out_of_range_raises_as_in_eager() -> None:
    def given_far(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Tensor:
        at = x[..., :K].long()
        return attend(q, gather_of(k, at.clamp(min=0)), gather_of(v, at.clamp(min=0)))

    far = inputs()
    far[3][0, 3, 1] = S
    for fn in (given_far, lambda *a: run(given_far, a)):
        with pytest.raises((IndexError, RuntimeError)):
            fn(*far)


# --- whole blocks ------------------------------------------------------------------------------------------------

BLK, HEADS, GROUPS = 3, 4, 2


def blocks_inputs(length: int = 12) -> list[Tensor]:
    """Q [B, HEADS, S, D], k and v [B, GROUPS, S, D], and scores of blocks [B, GROUPS, S, blocks]."""
    g = torch.Generator().manual_seed(2)
    shapes = ((B, HEADS, length, D), *[(B, GROUPS, length, D)] * 2, (B, GROUPS, length, length // BLK))
    return [torch.randn(*shape, generator=g) for shape in shapes]


def best_blocks(x: Tensor) -> Tensor:
    own = torch.arange(x.shape[2])[:, None] // BLK
    return x.masked_fill(torch.arange(x.shape[3]) > own, -INF).topk(2).indices


def rows_of_blocks(k: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the batch and of the groups."""
    return torch.arange(k.shape[0])[:, None, None, None], torch.arange(GROUPS)[:, None, None]


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, at: Tensor, fill: float = -INF) -> Tensor:
    """Attends to the keys [B, GROUPS, S, 2 * BLK, D] of chosen blocks; NSA's selected branch."""
    keys = (at[..., None] * BLK + torch.arange(BLK)).flatten(-2)
    later = keys > torch.arange(q.shape[2])[:, None]
    grouped = q.unflatten(1, (GROUPS, -1))
    scores = torch.einsum("bghsd,bgsnd->bghsn", grouped, k).masked_fill(later.unsqueeze(2), fill)
    return torch.einsum("bghsn,bgsnd->bghsd", scores.softmax(-1), v).flatten(1, 2)


def gathered_blocks(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    at = best_blocks(x)

    def take(t: Tensor) -> Tensor:
        wide = t.unflatten(2, (-1, BLK)).unsqueeze(2).expand(-1, -1, q.shape[2], -1, -1, -1)
        return wide.gather(3, at[..., None, None].expand(-1, -1, -1, -1, BLK, D)).flatten(3, 4)

    return attend_blocks(q, take(k), take(v), at)


def indexed(*tensors: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """Returns the chosen blocks, and those of each tensor [B, GROUPS, S, 2, BLK, D]."""
    at, (rows, groups) = best_blocks(x), rows_of_blocks(tensors[0])
    return at, *(t.unflatten(2, (-1, BLK))[rows, groups, at] for t in tensors)


def indexed_blocks(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    at, k, v = indexed(k, v, x=x)
    return attend_blocks(q, k.flatten(3, 4), v.flatten(3, 4), at, -1e9)


def blocks_last(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """The dim of the place in a block stands before that of the blocks."""
    at, (rows, groups) = best_blocks(x), rows_of_blocks(k)
    k, v = (t.unflatten(2, (-1, BLK)).transpose(2, 3)[rows, groups, :, at].flatten(3, 4) for t in (k, v))
    return attend_blocks(q, k, v, at)


def one_block_sdpa(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    at, k, v = indexed(k, v, x=x)
    seen = (at[..., None] * BLK + torch.arange(BLK)).flatten(-2) <= torch.arange(q.shape[2])[:, None]
    grouped = q.unflatten(1, (GROUPS, -1)).transpose(2, 3)
    o = F.scaled_dot_product_attention(grouped, k.flatten(3, 4), v.flatten(3, 4), seen.unsqueeze(3))
    return o.transpose(2, 3).flatten(1, 2)


def wrong_block(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """The values' blocks stand in another order of their keys."""
    at, k, v = indexed(k, v, x=x)
    return attend_blocks(q, k.flatten(3, 4), v.flip(4).flatten(3, 4), at)


def keys_of_two_blocks(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """The dims of blocks and places are flattened the other way around: the mask hides other keys."""
    at, k, v = indexed(k, v, x=x)
    return attend_blocks(q, k.transpose(3, 4).flatten(3, 4), v.transpose(3, 4).flatten(3, 4), at, -1e9)


def longer_values(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """The values have more blocks than the keys."""
    at, k, v = indexed(k, torch.cat([v, v.sin()], 2), x=x)
    return attend_blocks(q, k.flatten(3, 4), v.flatten(3, 4), at, -1e9)


ROUTED_BLOCKS = (gathered_blocks, indexed_blocks, blocks_last, one_block_sdpa)
BLOCKS: dict[str, Callable[..., Tensor]] = {
    f.__name__: f for f in (*ROUTED_BLOCKS, wrong_block, keys_of_two_blocks, longer_values)
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_gathered_blocks(name: str, dynamic: bool) -> None:
    """Whatever is routed has the formula's values and gradients; the first four must be, one with a dynamic batch."""
    symbolic = [(i, 0) for i in range(4)] if dynamic else []
    got = alike(BLOCKS[name], blocks_inputs(), within=2e-6, symbolic=symbolic)
    if name in [*BLOCKS][: 1 if dynamic else 4]:
        assert got.ops["selection_attention"] == 1, reasons(got)


@pytest.mark.parametrize("far", [4, -5])
def test_a_block_out_of_range_raises_as_in_eager(far: int) -> None:
    """There are 4 blocks of 3 keys: a block that is a key, but no block."""

    def fn(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        at, (rows, groups) = x[..., :2].long(), rows_of_blocks(k)
        k, v = (t.unflatten(2, (-1, BLK))[rows, groups, at].flatten(3, 4) for t in (k, v))
        return attend_blocks(q, k, v, at, -1e9)

    assert run(fn, blocks_inputs()).ops["selection_attention"] == 1
    given = blocks_inputs()
    given[3][0, 1, 5, 0] = far
    for call in (lambda: fn(*given), lambda: run(fn, given)):
        with pytest.raises((IndexError, RuntimeError)):
            call()


# --- rows without keys ----------------------------------------------------------------------------------------


def empty(mask: Callable[[Tensor, Tensor], Tensor], zeroed: bool = False) -> Form:
    """Returns a form in which a query sees no key; ``mask`` gives the softmax's argument of scores and hidden places.

    ``zeroed``: the hidden places' weights are set to 0 after the softmax.
    """

    def fn(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Tensor:
        best, at = causal(x).masked_fill(rows() == 2, -INF).topk(K)
        none = (best == -INF).unsqueeze(2)
        weights = mask(torch.einsum("bshd,bskd->bshk", q, rows_of(k, at)), none).softmax(-1)
        weights = weights.masked_fill(none, 0.0) if zeroed else weights
        return torch.einsum("bshk,bskd->bshd", weights, rows_of(v, at))

    return fn


def hidden(fill: float, zeroed: bool = False) -> Form:
    return empty(lambda scores, none: scores.masked_fill(none, fill), zeroed)


def added_mask(fill: float) -> Form:
    """A mask that is added, after which the softmax's argument is scaled."""
    return empty(lambda scores, none: (scores + torch.zeros(none.shape).masked_fill(none, fill)) * 0.5)


LOWEST = torch.finfo(torch.float32).min
EMPTY: dict[str, Form] = {
    "-inf": hidden(-INF),
    "-1e9": hidden(-1e9),
    "finfo.min": hidden(LOWEST),
    "-inf added": added_mask(-INF),
    "finfo.min added": added_mask(LOWEST),
    "set to 0 later": hidden(-1e9, zeroed=True),
    "of more scores than keys": outside,
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", EMPTY)
def test_rows_without_keys_are_the_formulas(name: str, dynamic: bool) -> None:
    """NaN, the mean of the list or 0, with gradients to the keys of the list alone."""
    routed(EMPTY[name], inputs(), symbolic=[(i, 0) for i in range(4)] if dynamic else [])


@pytest.mark.parametrize("name", ["-inf", "-1e9", "-inf added", "finfo.min added"])
def test_rows_without_keys_are_zero_if_asked_for(name: str) -> None:
    zero = RoutingOptions(empty_rows="zero")
    got, want = run(EMPTY[name], inputs(), options=zero), eager(EMPTY[name], inputs())
    assert got.ops["selection_attention"] == 1, reasons(got)
    (mine,), (theirs,) = got.outputs, want.outputs
    assert theirs[:, 2].any() and not mine[:, 2].any()
    others = [s for s in range(S) if s != 2]
    assert torch.allclose(mine[:, others], theirs[:, others], atol=1e-5)


# --- left, with a reason ---------------------------------------------------------------------------------------


def test_left_with_a_reason() -> None:
    def other_values(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Tensor:
        at = x.topk(K).indices
        return attend(q, rows_of(k, at), rows_of(v, (at + 1) % S))

    stays(other_values, inputs(), "cannot tell to be equal", 2e-6)


def test_a_sink_in_a_sum_is_that_of_the_op() -> None:
    routed(added_to_the_sum, inputs())


def test_gathers_for_other_purposes_stay() -> None:
    """Keys of another cache entry, of pages, and windows by ``unfold`` are no lists of a choice."""

    def fn(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> tuple[Tensor, ...]:
        beams, pages = (x[:, 0, 0] > 0).long(), (x[0, 0] * 10).long() % B
        mask = torch.full((S, S), -INF).triu(1)
        one = (torch.einsum("bshd,btd->bsht", q, k.index_select(0, beams)) + mask[:, None]).softmax(-1)
        two = torch.einsum("bshd,td->bsht", q, k[pages].flatten(0, 1)).softmax(-1)
        near = F.pad(k, (0, 0, W - 1, 0)).unfold(1, W, 1)
        three = torch.einsum("bshd,bsdw->bshw", q, near).softmax(-1)
        return (torch.einsum("bsht,btd->bshd", one, v.index_select(0, beams)),
                torch.einsum("bsht,td->bshd", two, v[pages].flatten(0, 1)),
                torch.einsum("bshw,bsdw->bshd", three, near))  # fmt: skip

    got = alike(fn, inputs(), ops={}, within=0.0)
    assert all(m.ordinary for m in got.report.near_misses), reasons(got)
