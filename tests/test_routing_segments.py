# SPDX-License-Identifier: Apache-2.0
"""Attention over several segments of keys: the scores of each are computed and masked on their own, then concatenated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mhc_inductor.report import Report
from tests.tools.attentions import as_exact, routed, stays
from tests.tools.capture import VERIFY, alike, difference, eager, interpreted, not_worse, reasons, run

INF = float("inf")
B, H, S, C, D, K = 2, 4, 6, 8, 16, 3
SCALE = 0.4
Form = Callable[..., Tensor]
"""Of q, k and v [B, H, S, D], kc and vc [B, H, C, D], indices [B, 1, S, K] into C, and sinks [H]."""


def given(
    queries: int = S, compressed: int = C, own: int | None = None, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    sizes = (queries, own or queries, own or queries, compressed, compressed)
    made = [torch.randn(B, H, n, D, generator=g).to(dtype) for n in sizes]
    at = torch.rand(B, 1, queries, compressed, generator=g).topk(K).indices
    return [*made, at, torch.randn(H, generator=g).to(dtype)]


def chosen(at: Tensor, keys: int) -> Tensor:
    """Returns which of the compressed keys each query sees; every third query sees none."""
    picked = torch.zeros(*at.shape[:3], keys, dtype=torch.bool).scatter(-1, at, True)
    return picked & (torch.arange(at.shape[2]) % 3 != 1)[:, None]


def window(queries: int, keys: int, width: int = 3) -> Tensor:
    """Returns which of the own keys each query sees: the last ones up to its own."""
    ago = torch.arange(queries)[:, None] - torch.arange(keys) + (keys - queries)
    return (ago >= 0) & (ago < width)


def both(q: Tensor, k: Tensor, kc: Tensor, at: Tensor, scale: float = 1.0, fill: float = -INF) -> tuple[Tensor, Tensor]:
    """Returns the scores of the compressed and of the own keys, masked."""
    a, b = q @ kc.mT * scale, q @ k.mT * scale
    return a.masked_fill(~chosen(at, kc.shape[2]), fill), b.masked_fill(~window(q.shape[2], k.shape[2]), fill)


def logit(sink: Tensor, q: Tensor) -> Tensor:
    return sink.view(1, -1, 1, 1).expand(B, -1, q.shape[2], 1)


def scaled_before(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, at: Tensor, sink: Tensor) -> Tensor:
    return torch.cat(both(q, k, kc, at, SCALE), -1).softmax(-1) @ torch.cat([vc, v], 2)


def scaled_after(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, at: Tensor, sink: Tensor) -> Tensor:
    w = (torch.cat(both(q, k, kc, at), -1) * SCALE).softmax(-1, dtype=torch.float32).to(q.dtype)
    return w @ torch.cat([vc, v], 2)


def two_products(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, at: Tensor, sink: Tensor) -> Tensor:
    n, w = kc.shape[2], torch.cat(both(q, k, kc, at, SCALE, torch.finfo(q.dtype).min), -1).softmax(-1)
    return w[..., :n] @ vc + w[..., n:] @ v


def own_first_and_split(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, at: Tensor, sink: Tensor) -> Tensor:
    a, b = both(q * SCALE, k, kc, at)
    w, wc = torch.cat([b, a], -1).softmax(-1).split([k.shape[2], kc.shape[2]], -1)
    o = torch.einsum("bhsc,bhcd->bhsd", wc, vc)
    o += torch.einsum("bhsc,bhcd->bhsd", w, v)
    return o


def added(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, at: Tensor, sink: Tensor) -> Tensor:
    seen, near = chosen(at, kc.shape[2]), window(q.shape[2], k.shape[2])
    a = torch.einsum("bhsd,bhcd->bhsc", q, kc) / 2.5 + torch.zeros(seen.shape).masked_fill(~seen, -INF)
    b = torch.where(near, torch.einsum("bhsd,bhcd->bhsc", q, k) / 2.5, -INF)
    return torch.cat([a, b], -1).softmax(-1) @ torch.cat([vc, v], 2)


def masked_together(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, at: Tensor, sink: Tensor) -> Tensor:
    keep = torch.cat([chosen(at, kc.shape[2]), window(q.shape[2], k.shape[2]).expand(B, 1, -1, -1)], -1)
    scores = torch.cat([q @ kc.mT, q @ k.mT], -1) * SCALE
    return scores.masked_fill(~keep, -INF).softmax(-1) @ torch.cat([vc, v], 2)


def with_sink(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, at: Tensor, sink: Tensor) -> Tensor:
    scores = torch.cat([*both(q, k, kc, at, SCALE), logit(sink, q)], -1)
    return (scores - scores.amax(-1, keepdim=True)).softmax(-1)[..., :-1] @ torch.cat([vc, v], 2)


def by_hand(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, at: Tensor, sink: Tensor) -> Tensor:
    scores = torch.cat(both(q, k, kc, at, SCALE), -1)
    e = (scores - scores.amax(-1, keepdim=True)).exp()
    wc, w = (e / e.sum(-1, keepdim=True)).split([kc.shape[2], k.shape[2]], -1)
    return wc @ vc + w @ v


def sink_first(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, at: Tensor, sink: Tensor) -> Tensor:
    w, n = torch.cat([logit(sink, q), *both(q, k, kc, at, SCALE)], -1).softmax(-1), kc.shape[2]
    return w[..., n + 1 :] @ v + w[..., 1 : n + 1] @ vc


def sink_around(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, at: Tensor, sink: Tensor) -> Tensor:
    scores = torch.cat([torch.cat(both(q, k, kc, at, SCALE), -1), logit(sink, q)], -1)
    return scores.softmax(-1)[..., :-1] @ torch.cat([vc, v], 2)


def three(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, at: Tensor, sink: Tensor) -> Tensor:
    (a, b), first, n = both(q, k, kc, at, SCALE), q @ kc[:, :, :1].cos().mT * SCALE, kc.shape[2]
    w = torch.cat([a, first, b], -1).softmax(-1)
    return w[..., :n] @ vc + (w[..., n : n + 1] @ vc[:, :, :1].sin() + w[..., n + 1 :] @ v)


def heads_last(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, at: Tensor, sink: Tensor) -> Tensor:
    """K and V of one head for two: grouped queries, expanded; in the layout [B, S, H, D]."""
    q, k, v, kc, vc = (x.transpose(1, 2).contiguous() for x in (q, *(y[:, ::2] for y in (k, v, kc, vc))))
    k, v, kc, vc = (x.repeat_interleave(2, 2) for x in (k, v, kc, vc))
    a, b = (torch.einsum("bshd,bthd->bhst", q, x) * SCALE for x in (kc, k))
    a, b = a.masked_fill(~chosen(at, kc.shape[1]), -INF), b.masked_fill(~window(q.shape[1], k.shape[1]), -INF)
    return torch.einsum("bhst,bthd->bshd", torch.cat([a, b], -1).softmax(-1), torch.cat([vc, v], 1))


def of_one_cache(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, at: Tensor, sink: Tensor) -> Tensor:
    """The own keys are the first ones of a longer cache; values are the keys."""
    cache = torch.cat([k, v.flip(2)], 2).sin()[:, :, : k.shape[2]]
    n, w = kc.shape[2], torch.cat(both(q, cache, kc, at, SCALE), -1).softmax(-1)
    return w[..., :n] @ kc + w[..., n:] @ cache


def sums(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, at: Tensor, sink: Tensor) -> Tensor:
    """Scores of two features each."""
    half = q.shape[-1] // 2
    a, b = (q[..., :half] @ x[..., :half].mT + q[..., half:] @ x[..., half:].mT for x in (kc, k))
    a = a.masked_fill(~chosen(at, kc.shape[2]), -INF)
    return torch.cat([a, b.masked_fill(~window(*b.shape[2:]), -INF)], -1).softmax(-1) @ torch.cat([vc, v], 2)


FORMS: dict[str, Form] = {
    f.__name__: f
    for f in (
        *(scaled_before, scaled_after, two_products, own_first_and_split, added, masked_together),
        *(with_sink, by_hand, sink_first, sink_around, three, heads_last, of_one_cache, sums),
    )
}


@pytest.mark.parametrize("name", FORMS)
def test_segments_are_one_attention(name: str) -> None:
    for grad in (True, False):
        routed(FORMS[name], given(), grad)


@pytest.mark.parametrize("name", sorted({*FORMS} - {"three", "added", "sums"}))
def test_segments_of_open_sizes(name: str) -> None:
    routed(FORMS[name], given(), dynamic=True)


@pytest.mark.parametrize("name", ["scaled_before", "own_first_and_split", "sink_first"])
def test_one_graph_serves_all_sizes(name: str) -> None:
    report, graphs = Report(), list[torch.fx.GraphModule]()
    torch._dynamo.reset()
    compiled = torch.compile(FORMS[name], backend=interpreted(report, graphs, VERIFY), dynamic=True)
    for queries, compressed in ((6, 8), (9, 13), (5, 4), (7, 7)):
        at = given(queries, compressed)
        assert torch.allclose(compiled(*at), FORMS[name](*at), atol=2e-6)
    assert [one.op for one in report.routed] == ["selection_attention"] and len(graphs) == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("three", "open sizes"),
        pytest.param("added", "are -inf and a score plus -inf", id="added-both filled and added"),
    ],
)
def test_segments_of_open_sizes_that_stay_are_named(name: str, reason: str) -> None:
    got = routed(FORMS[name], given(), ops={}, bound=0.0, dynamic=True)
    assert reason in reasons(got)


@pytest.mark.parametrize("name", ["scaled_before", "two_products", "with_sink", "of_one_cache"])
def test_one_new_key(name: str) -> None:
    """A step of decoding: one query, whose own key is the second segment."""
    routed(FORMS[name], given(queries=1))


@pytest.mark.parametrize("name", ["scaled_before", "two_products", "sums", "with_sink"])
def test_in_bf16_the_op_is_as_exact_as_the_formula(name: str) -> None:
    as_exact(name, FORMS[name], given(dtype=torch.bfloat16))


def test_under_autocast_the_op_reads_bf16() -> None:
    def fn(*given: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return scaled_after(*given)

    at = given()
    got, plain, exact = run(fn, at), run(fn, at, routed=False), eager(scaled_after, at)
    assert dict(got.ops) == {"selection_attention": 1}, reasons(got)
    not_worse("autocast", got, plain, exact)


def of_lists(fill: float, second: float | None = None, guarded: bool = False) -> Form:
    """Returns a form in which every third query sees no key; its segments are filled with ``fill`` and ``second``."""

    def fn(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, at: Tensor, sink: Tensor) -> Tensor:
        a, b = q @ kc.mT * SCALE, q @ k.mT * SCALE
        a = a.masked_fill(~chosen(at, kc.shape[2]), fill)
        b = b.masked_fill(~chosen(at.flip(-2), k.shape[2]), fill if second is None else second)
        w, n = torch.cat([a, b], -1).softmax(-1), kc.shape[2]
        w = w.nan_to_num() if guarded else w
        return w[..., :n] @ vc + w[..., n:] @ v

    return fn


MIN = torch.finfo(torch.float32).min


@pytest.mark.parametrize("broken", [None, "nan", "inf"])
@pytest.mark.parametrize(("fill", "guarded"), [(-INF, False), (-INF, True), (MIN, False)])
def test_rows_without_keys(fill: float, guarded: bool, broken: str | None) -> None:
    form, at = of_lists(fill, guarded=guarded), given(own=C)
    if broken is not None:
        at[0][0, 0, 3] = float(broken)
    got, want = run(form, at), eager(form, at)
    assert dict(got.ops) == {"selection_attention": 1}, reasons(got)
    if broken is None or not guarded:  # the op has no nan_to_num: NaN reaches the keys that are selected
        assert difference(got, want) < 2e-6


def test_two_fills_of_rows_without_keys_stay() -> None:
    got = routed(of_lists(-INF, MIN), given(own=C), ops={}, bound=0.0)
    assert "a query may see no key" in reasons(got)


# --- other formulas ----------------------------------------------------------------------------------------------


def changed(
    scores: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    product: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda w, vc, v: w @ torch.cat([vc, v], 2),
    weights: Callable[[Tensor], Tensor] = lambda s: s.softmax(-1),
) -> Form:
    """Returns :func:`scaled_before` with other masked scores of q, kc, k and indices, weights or products with V."""

    def fn(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, at: Tensor, sink: Tensor) -> Tensor:
        pair = both(q, k, kc, at, SCALE) if scores is None else scores(q, kc, k, at)
        return product(weights(torch.cat(pair, -1)), vc, v)

    return fn


def other_scores(first: Callable[..., Tensor] | None = None, second: Callable[..., Tensor] | None = None) -> Form:
    """Returns the form with other masked scores of the first or the second segment, of q, kc, k and indices."""

    def scores(q: Tensor, kc: Tensor, k: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        a, b = both(q, k, kc, at)
        return a if first is None else first(q, kc, k, at), b if second is None else second(q, kc, k, at)

    return changed(scores)


AFTER, APART = "one after another", "2 products with V"
PRODUCTS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str]] = {
    "overlapping slices": (lambda w, vc, v: w[..., :C] @ vc + w[..., C - 1 : C - 1 + S] @ v, AFTER),
    "a gap": (lambda w, vc, v: w[..., : C - 1] @ vc[:, :, 1:] + w[..., C:] @ v, AFTER),
    "one slice twice": (lambda w, vc, v: w[..., :S] @ vc[:, :, :S] + w[..., :S] @ v, AFTER),
    "the last key is left out": (lambda w, vc, v: w[..., :C] @ vc + w[..., C:-1] @ v[:, :, :-1], "more keys"),
    "a difference": (lambda w, vc, v: w[..., :C] @ vc - w[..., C:] @ v, APART),
    "a weighted sum": (lambda w, vc, v: torch.add(w[..., :C] @ vc, w[..., C:] @ v, alpha=2), APART),
    "weights masked again": (lambda w, vc, v: w[..., :C] @ vc + (w[..., C:] * window(S, S)) @ v, AFTER),
    "a product that is returned": (
        lambda w, vc, v: torch.cat([o := w[..., :C] @ vc, o + w[..., C:] @ v]),
        "used elsewhere",
    ),
}
LEFT: dict[str, tuple[Form, str]] = {
    "a scale on one segment": (other_scores(lambda q, kc, k, at: both(q, k, kc, at)[0] * 2.0), "scales"),
    "another query": (other_scores(None, lambda q, kc, k, at: both(q.flip(2), k, kc, at)[1]), "queries"),
    "another head's query": (other_scores(lambda q, kc, k, at: both(q.flip(1), k, kc, at)[0]), "queries"),
    "one of two products": (
        other_scores(None, lambda q, kc, k, at: (q @ k.mT + q.cos() @ k.mT).masked_fill(~window(S, S), -INF)),
        "different products",
    ),
    "a tanh on one segment": (other_scores(None, lambda q, kc, k, at: (q @ k.mT).tanh()), "changed by tanh"),
    **{name: (changed(product=product), reason) for name, (product, reason) in PRODUCTS.items()},
}


@pytest.mark.parametrize("name", LEFT)
def test_other_formulas_are_named(name: str) -> None:
    form, reason = LEFT[name]
    stays(form, given(), reason)


SAME: dict[str, Form] = {
    "segments in another order": changed(lambda q, kc, k, at: both(q, k, kc, at, SCALE)[::-1]),
    "values of the other segment": changed(product=lambda w, vc, v: w[..., :S] @ v + w[..., S:] @ vc),
    "a softmax of each": changed(
        product=lambda s, vc, v: s[..., :C].softmax(-1).nan_to_num() @ vc + s[..., C:].softmax(-1) @ v,
        weights=lambda s: s,
    ),
    "values of other tensors": changed(
        product=lambda w, vc, v: w[..., :2] @ vc[:, :, :2] + w[..., 2:] @ torch.cat([vc[:, :, 2:], v], 2)
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_what_else_a_program_may_mean(name: str) -> None:
    """Whether these are routed or not, they are what they say."""
    assert "verified" not in reasons(alike(SAME[name], given(), within=2e-6))
