# SPDX-License-Identifier: Apache-2.0
"""Softmaxes of selected keys that are written out, and forms that look like one and have other values or gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mhc_inductor.report import Report
from mhc_inductor.routing import route
from mhc_inductor.routing.effects import ambient
from mhc_inductor.routing.graph.view import Knowledge, View
from mhc_inductor.routing.operators.selection.search import Search
from tests.tools.attentions import equal, routed
from tests.tools.capture import eager, exact_or_left, left_by_proof, reasons, run

B, S, H, D, K = 2, 11, 3, 8, 4
INF = float("inf")
Form = Callable[[Tensor, Tensor], Tensor]
"""Of masked scores [B, S, H, T] and values [B, T, D]."""


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(4)
    return [torch.randn(*shape, generator=g).to(dtype) for shape in ((B, S, H, D), (B, S, D), (B, S, D), (B, S, S))]


def attention(form: Form, gathered: bool = False) -> Callable[..., Tensor]:
    def fn(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        causal = torch.full((S, S), -INF).triu(1)
        at = (x + causal).topk(K).indices
        if gathered:
            rows = torch.arange(k.shape[0])[:, None, None]
            scores = torch.einsum("bshd,bskd->bshk", q, k[rows, at])
            later = at > torch.arange(S)[:, None]
            return form(scores.masked_fill(later.unsqueeze(2), -INF).transpose(1, 2), v[rows, at])
        mask = torch.full((k.shape[0], S, S), -INF, dtype=q.dtype).scatter(-1, at, 0.0) + causal.to(q.dtype)
        return form(torch.einsum("bshd,btd->bhst", q, k) + mask[:, None], v[:, None].expand(-1, S, -1, -1))

    return fn


def power(s: Tensor) -> Tensor:
    return (s - s.amax(-1, keepdim=True)).exp()


def product(weights: Tensor, v: Tensor) -> Tensor:
    """Values [B, H, S, D] of weights [B, H, S, T] and values [B, S, T, D]."""
    return torch.einsum("bhst,bstd->bhsd", weights, v)


FORMS: dict[str, Form] = {
    "divided": lambda s, v: product((e := power(s)) / e.sum(-1, keepdim=True), v),
    "divided after the product": lambda s, v: product(e := power(s), v) / e.sum(-1, keepdim=True),
    "after, in another order": lambda s, v: (
        torch.einsum("bhst,bstd->bshd", e := power(s), v) / e.sum(-1).transpose(1, 2)[..., None]
    ),
    "a detached maximum": lambda s, v: product(e := (s - s.amax(-1, True).detach()).exp(), v) / e.sum(-1)[..., None],
    "less the logarithm of the sum": lambda s, v: product((s - s.logsumexp(-1, keepdim=True)).exp(), v),
    "of a log_softmax": lambda s, v: product(s.log_softmax(-1).exp(), v),
}
OTHER: dict[str, Form] = {
    "a detached sum": lambda s, v: product((e := power(s)) / e.sum(-1, keepdim=True).detach(), v),
    "a sum of what is detached": lambda s, v: product((e := power(s)) / e.detach().sum(-1, keepdim=True), v),
    "a detached sum, after": lambda s, v: product(e := power(s), v) / e.sum(-1, keepdim=True).detach(),
    "a detached logarithm": lambda s, v: product((s - s.logsumexp(-1, keepdim=True).detach()).exp(), v),
    "sums of other rows": lambda s, v: product(e := power(s), v) / e.sum(-1, keepdim=True).flip(2),
    "sums of other heads": lambda s, v: product(e := power(s), v) / e.sum(-1, keepdim=True).roll(1, 1),
    "sums of all heads": lambda s, v: product(e := power(s), v) / e.sum((1, 3), keepdim=True),
    "twice the sum": lambda s, v: product(e := power(s), v) / (2 * e.sum(-1, keepdim=True)),
    "a sum and a number": lambda s, v: product(e := power(s), v) / (e.sum(-1, keepdim=True) + 1e-3),
    "read before the division": lambda s, v: (p := product(e := power(s), v)) / e.sum(-1, keepdim=True) + p,
    "a sum that is read": lambda s, v: product(e := power(s), v) / (z := e.sum(-1, keepdim=True)) + z,
    "multiplied": lambda s, v: product(e := power(s), v) * e.sum(-1, keepdim=True),
    "logarithm of other rows": lambda s, v: product((s - s.logsumexp(-1, keepdim=True).flip(2)).exp(), v),
}


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_forms_of_a_softmax(name: str, gathered: bool) -> None:
    fn = attention(FORMS[name], gathered)
    routed(fn, inputs())


@pytest.mark.parametrize("name", FORMS)
def test_dynamic_batch(name: str) -> None:
    fn = attention(FORMS[name])
    routed(fn, inputs(), symbolic=[(i, 0) for i in range(4)])


def test_a_softmax_times_a_number_that_may_change() -> None:
    """The number is a symbol of the second graph: no search may fail there."""
    reports: list[Report] = []

    def backend(gm: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Tensor]:
        reports.append(route(gm))
        return gm.forward

    q, k, v, x = inputs()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda n: attention(lambda s, v: product(s.softmax(-1) * n, v))(q, k, v, x), backend=backend
    )
    for n in (2, 3, 5):
        want = attention(lambda s, v, n=n: product(s.softmax(-1) * n, v))(q, k, v, x)
        torch.testing.assert_close(compiled(n), want, atol=1e-5, rtol=1e-5)
    assert len(reports) == 2 and not any(r.problems for r in reports), [r.problems for r in reports]


@pytest.mark.parametrize("name", FORMS)
def test_in_bf16_the_op_is_as_exact_as_the_formula(name: str) -> None:
    exact_or_left(name, attention(FORMS[name]), inputs(torch.bfloat16), "selection_attention")


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("name", OTHER)
def test_other_formulas_stay(name: str, gathered: bool) -> None:
    left_by_proof(attention(OTHER[name], gathered), inputs(), "selection_attention")


@pytest.mark.parametrize("name", FORMS)
def test_all_sizes_open(name: str) -> None:
    """The search fixes sizes and begins again: what it read as a softmax is read anew."""
    routed(attention(FORMS[name]), inputs(), dynamic=True)


# --- with a sink in the sum ----------------------------------------------------------------------------------------

Sunk = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of masked scores [B, H, S, T], values [B, S, T, D] and sinks [1, H, 1, 1]."""


def sunk(
    top: Callable[[Tensor, Tensor], Tensor], total: Callable[[Tensor, Tensor, Tensor], Tensor], after: bool = False
) -> Sunk:
    """Returns the form of a top of scores and sinks, and of the sum that exponentials, sinks and the top give."""

    def form(s: Tensor, v: Tensor, z: Tensor) -> Tensor:
        m = top(s, z)
        e = (s - m).exp()
        d = total(e, z, m)
        return product(e, v) / d if after else product(e / d, v)

    return form


def highest(s: Tensor, z: Tensor) -> Tensor:
    return s.amax(-1, keepdim=True)


def counted(s: Tensor, z: Tensor) -> Tensor:
    return torch.maximum(s.amax(-1, keepdim=True), z)


def plus_sink(e: Tensor, z: Tensor, m: Tensor) -> Tensor:
    return e.sum(-1, keepdim=True) + (z - m).exp()


def read_sum(s: Tensor, v: Tensor, z: Tensor) -> Tensor:
    e = (s - (m := counted(s, z))).exp()
    return product(e, v) / ((t := e.sum(-1, keepdim=True)) + (z - m).exp()) + t


BARE = {
    "bare": sunk(highest, plus_sink),
    "bare, after": sunk(lambda s, z: s.max(-1, keepdim=True).values, plus_sink, True),
}
SUNK = BARE | {
    "counted": sunk(counted, plus_sink),
    "counted, after": sunk(lambda s, z: torch.maximum(z, highest(s, z)), plus_sink, True),
    "detached": sunk(lambda s, z: counted(s, z).detach(), lambda e, z, m: (z - m).exp() + e.sum(-1, keepdim=True)),
}
OTHER_SINKS = {
    "another sink in the maximum": sunk(lambda s, z: counted(s, z + 1), plus_sink),
    "a sink in the maximum alone": sunk(counted, lambda e, z, m: e.sum(-1, keepdim=True)),
    "less another top": sunk(highest, lambda e, z, m: plus_sink(e, z, m.detach())),
    "less nothing": sunk(highest, lambda e, z, m: e.sum(-1, keepdim=True) + z.exp()),
    "a detached exponential": sunk(highest, lambda e, z, m: e.sum(-1, keepdim=True) + (z - m).exp().detach()),
    "no exponential": sunk(highest, lambda e, z, m: e.sum(-1, keepdim=True) + (z - m)),
    "twice": sunk(counted, lambda e, z, m: torch.add(e.sum(-1, keepdim=True), (z - m).exp(), alpha=2), True),
    "subtracted": sunk(counted, lambda e, z, m: 9 + e.sum(-1, keepdim=True) - (z - m).exp()),
    "a sink a key": sunk(highest, lambda e, z, m: e.sum(-1, keepdim=True) + e.roll(1, -1)),
    "a sum that is read": read_sum,
}


def with_sink(form: Sunk, gathered: bool, seen: bool = True) -> Callable[..., Tensor]:
    """Returns an attention in which, unless ``seen``, some queries see no key."""

    def fn(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Tensor:
        hidden = (torch.arange(S) % 3 == 1)[:, None]
        masked = (lambda s: s) if seen else (lambda s: s.masked_fill(hidden, -INF))
        return attention(lambda s, v: form(masked(s), v, sink.view(1, -1, 1, 1)), gathered)(q, k, v, x)

    return fn


def sinks(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [*inputs(dtype), torch.linspace(-2, 3, H, dtype=dtype)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("name", SUNK)
def test_a_sink_in_the_sum(name: str, gathered: bool, dynamic: bool) -> None:
    routed(with_sink(SUNK[name], gathered), sinks(), dynamic=dynamic)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("name", SUNK)
def test_a_sink_where_queries_see_no_key(name: str, gathered: bool) -> None:
    """Rows are 0 if the maximum counts the sink, and NaN otherwise: with NaN gradients to the sink, too."""
    fn, given = with_sink(SUNK[name], gathered, seen=False), sinks()
    got, want = run(fn, given), eager(fn, given)
    assert got.ops["selection_attention"] == (gathered or name not in BARE), reasons(got)
    assert got.ops or "not counted in the maximum" in reasons(got)
    equal(got, want)


@pytest.mark.parametrize("gathered", [False, True])
def test_nan_weights_that_become_0_give_sinks_gradients_of_nan(gathered: bool) -> None:
    """The op does not: the formula stays."""

    def form(s: Tensor, v: Tensor, z: Tensor) -> Tensor:
        m = highest(s, z)
        e = (s - m).exp()
        return product((e / plus_sink(e, z, m)).nan_to_num(), v)

    fn, given = with_sink(form, gathered, seen=False), sinks()
    got, want = run(fn, given), eager(fn, given)
    assert not got.ops["selection_attention"] and want.grads["input 4"].isnan().any()
    assert "not counted in the maximum" in reasons(got)


@pytest.mark.parametrize("name", SUNK)
def test_sinks_in_bf16(name: str) -> None:
    exact_or_left(name, with_sink(SUNK[name], True), sinks(torch.bfloat16), "selection_attention")


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("name", OTHER_SINKS)
def test_other_sinks_stay(name: str, gathered: bool) -> None:
    left_by_proof(with_sink(OTHER_SINKS[name], gathered), sinks(), "selection_attention")


@pytest.mark.parametrize("name", ["divided", "divided after the product", "of a log_softmax"])
def test_what_one_operator_reads_as_a_softmax_another_sees_as_written(name: str) -> None:
    views: list[View] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        views.append(View(gm.graph, ambient(), Knowledge()))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(attention(FORMS[name]), backend=backend, fullgraph=True)(*inputs())
    (view,) = views

    def ops() -> list[object]:
        return [value.func for value in map(view.value, view.nodes) if value is not None]

    written = ops()
    assert len(Search(view).found) == 1 and ops() != written
    view.values.forget({})  # which the pass does before each operator
    assert ops() == written
