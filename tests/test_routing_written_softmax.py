# SPDX-License-Identifier: Apache-2.0
"""Softmaxes of selected keys that are written out, with sinks, and their logarithms: the op's o and lse, or left alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mhc_inductor.routing.operators.selection.search import Search
from tests.tools.attentions import routed, same
from tests.tools.capture import Captured, eager, exact_or_left, left_by_proof, looking, reasons, run, view_of

B, S, H, D, K = 2, 11, 3, 8, 4
INF = float("inf")
Result = Tensor | tuple[Tensor, ...]
Form = Callable[[Tensor, Tensor, Tensor], Result]
"""Of masked scores [B, H, S, T], values [B, S, T, D], T of K keys that are gathered, and sinks [1, H, 1, 1]."""


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(4)
    made = [torch.randn(*shape, generator=g).to(dtype) for shape in ((B, S, H, D), (B, S, D), (B, S, D), (B, S, S))]
    return [*made, torch.linspace(-2, 3, H, dtype=dtype)]


def attention(
    form: Form, gathered: bool = False, fill: float = -INF, empty: bool = False, added: bool = False
) -> Callable[..., Result]:
    """Returns an attention to chosen keys; ``empty``: a third of the queries sees none. ``added``: so is the mask."""

    def fn(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Result:
        place, rows = torch.arange(S), torch.arange(k.shape[0])[:, None, None]
        at = x.masked_fill(place > place[:, None], -INF).topk(K).indices
        none = (place % 3 == 1)[:, None] & torch.tensor(empty)
        if gathered:
            hidden = ((at > place[:, None]) | none).unsqueeze(1)
            scores, v = torch.einsum("bshd,bskd->bhsk", q, k[rows, at]), v[rows, at]
        else:
            chosen = torch.zeros(k.shape[0], S, S, dtype=torch.bool).scatter(-1, at, True)
            hidden = (~chosen | (place > place[:, None]) | none).unsqueeze(1)
            scores, v = torch.einsum("bshd,btd->bhst", q, k), v[:, None].expand(-1, S, -1, -1)
        if added:
            masked = scores + torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, fill)
        else:
            masked = scores.masked_fill(hidden, fill)
        return form(masked, v, sink.view(1, -1, 1, 1))

    return fn


def product(weights: Tensor, v: Tensor) -> Tensor:
    """Values [B, H, S, D] of weights [B, H, S, T] and values [B, S, T, D]."""
    return torch.einsum("bhst,bstd->bhsd", weights, v)


# --- a softmax --------------------------------------------------------------------------------------------------


def written(form: Form, gathered: bool = False) -> Callable[..., Result]:
    """Returns an attention whose mask is added, or of gathered keys, filled."""
    return attention(form, gathered, added=not gathered)


def power(s: Tensor) -> Tensor:
    return (s - s.amax(-1, keepdim=True)).exp()


FORMS: dict[str, Form] = {
    "divided": lambda s, v, z: product((e := power(s)) / e.sum(-1, keepdim=True), v),
    "divided after the product": lambda s, v, z: product(e := power(s), v) / e.sum(-1, keepdim=True),
    "after, in another order": lambda s, v, z: (
        torch.einsum("bhst,bstd->bshd", e := power(s), v) / e.sum(-1).transpose(1, 2)[..., None]
    ),
    "a detached maximum": lambda s, v, z: product(e := (s - s.amax(-1, True).detach()).exp(), v) / e.sum(-1)[..., None],
    "less the logarithm of the sum": lambda s, v, z: product((s - s.logsumexp(-1, keepdim=True)).exp(), v),
    "of a log_softmax": lambda s, v, z: product(s.log_softmax(-1).exp(), v),
}
OTHER: dict[str, Form] = {
    "a detached sum": lambda s, v, z: product((e := power(s)) / e.sum(-1, keepdim=True).detach(), v),
    "a sum of what is detached": lambda s, v, z: product((e := power(s)) / e.detach().sum(-1, keepdim=True), v),
    "a detached sum, after": lambda s, v, z: product(e := power(s), v) / e.sum(-1, keepdim=True).detach(),
    "a detached logarithm": lambda s, v, z: product((s - s.logsumexp(-1, keepdim=True).detach()).exp(), v),
    "sums of other rows": lambda s, v, z: product(e := power(s), v) / e.sum(-1, keepdim=True).flip(2),
    "sums of other heads": lambda s, v, z: product(e := power(s), v) / e.sum(-1, keepdim=True).roll(1, 1),
    "sums of all heads": lambda s, v, z: product(e := power(s), v) / e.sum((1, 3), keepdim=True),
    "twice the sum": lambda s, v, z: product(e := power(s), v) / (2 * e.sum(-1, keepdim=True)),
    "a sum and a number": lambda s, v, z: product(e := power(s), v) / (e.sum(-1, keepdim=True) + 1e-3),
    "read before the division": lambda s, v, z: (p := product(e := power(s), v)) / e.sum(-1, keepdim=True) + p,
    "a sum that is read": lambda s, v, z: product(e := power(s), v) / (z := e.sum(-1, keepdim=True)) + z,
    "multiplied": lambda s, v, z: product(e := power(s), v) * e.sum(-1, keepdim=True),
    "logarithm of other rows": lambda s, v, z: product((s - s.logsumexp(-1, keepdim=True).flip(2)).exp(), v),
}


def test_a_softmax_times_a_number_that_may_change() -> None:
    """The number is a symbol of the second graph: no search may fail there."""
    given = inputs()

    def times(n: int) -> Result:
        return written(lambda s, v, z: product(s.softmax(-1) * n, v))(*given)

    compiled, reports = looking(times)
    for n in (2, 3, 5):
        torch.testing.assert_close(compiled(n), times(n), atol=1e-5, rtol=1e-5)
    assert len(reports) == 2 and not any(r.problems for r in reports), [r.problems for r in reports]


# --- with a sink in the sum ----------------------------------------------------------------------------------------


def sunk(
    top: Callable[[Tensor, Tensor], Tensor], total: Callable[[Tensor, Tensor, Tensor], Tensor], after: bool = False
) -> Form:
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


SIZES: dict[str, dict[str, Any]] = {
    "present": {},
    "open batch": {"symbolic": [(i, 0) for i in range(4)]},
    "open": {"dynamic": True},
}


CASES = [
    *((name, *how) for name in FORMS for how in ((False, "present"), (True, "present"), (False, "open batch"))),
    *((name, False, "open") for name in FORMS),
    *itertools.product(SUNK, (False, True), ("present", "open")),
]


@pytest.mark.parametrize(("name", "gathered", "sizes"), CASES)
def test_forms_of_a_softmax(name: str, gathered: bool, sizes: str) -> None:
    """Where all sizes are open the search fixes sizes and begins again: what it read as a softmax is read anew."""
    routed(written((FORMS | SUNK)[name], gathered), inputs(), **SIZES[sizes])


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("name", SUNK)
def test_a_sink_where_queries_see_no_key(name: str, gathered: bool) -> None:
    """Rows are 0 if the maximum counts the sink, and NaN otherwise: with NaN gradients to the sink, too."""
    got = same(attention(SUNK[name], gathered, empty=True), inputs())
    assert got.ops["selection_attention"] == (gathered or name not in BARE), reasons(got)
    assert got.ops or "not counted in the maximum" in reasons(got)


@pytest.mark.parametrize("gathered", [False, True])
def test_nan_weights_that_become_0_give_sinks_gradients_of_nan(gathered: bool) -> None:
    """The op does not: the formula stays."""

    def form(s: Tensor, v: Tensor, z: Tensor) -> Tensor:
        m = highest(s, z)
        e = (s - m).exp()
        return product((e / plus_sink(e, z, m)).nan_to_num(), v)

    fn, given = attention(form, gathered, empty=True), inputs()
    got, want = run(fn, given), eager(fn, given)
    assert not got.ops["selection_attention"] and want.grads["input 4"].isnan().any()
    assert "not counted in the maximum" in reasons(got)


@pytest.mark.parametrize("name", ["divided", "divided after the product", "of a log_softmax"])
def test_what_one_operator_reads_as_a_softmax_another_sees_as_written(name: str) -> None:
    view = view_of(written(FORMS[name]), *inputs())

    def ops() -> list[object]:
        return [value.func for value in map(view.value, view.nodes) if value is not None]

    before = ops()
    assert len(Search(view).found) == 1 and ops() != before
    view.values.forget({})  # which the pass does before each operator
    assert ops() == before


# --- the logarithm of the sum ------------------------------------------------------------------------------------


def with_log(s: Tensor, v: Tensor, log: Callable[[Tensor], Tensor]) -> Result:
    return product(s.softmax(-1), v), log(s)


def kept_dim(s: Tensor, v: Tensor, z: Tensor) -> Result:
    lse = torch.logsumexp(s, -1, keepdim=True)
    return product((s - lse).exp(), v), lse


def divided(s: Tensor, v: Tensor, z: Tensor) -> Result:
    lse = s.logsumexp(-1, keepdim=True)
    return product((s - lse).exp(), v) / (1 + torch.exp(z - lse))


def and_sink(s: Tensor, z: Tensor) -> Tensor:
    return torch.cat([s, z.expand(*s.shape[:-1], 1)], -1)


LOGS: dict[str, Form] = {
    "returned": lambda s, v, z: with_log(s, v, lambda x: x.logsumexp(-1)),
    "kept_dim": kept_dim,
    "transposed": lambda s, v, z: (
        product(s.softmax(-1), v).transpose(1, 2),
        s.logsumexp(3).transpose(1, 2).contiguous() * 2,
    ),
    # A sink that is counted afterwards.
    "corrected": lambda s, v, z: product(s.softmax(-1), v) * torch.sigmoid(s.logsumexp(-1) - z[..., 0])[..., None],
    "divided by a sink": divided,
    # A sink in the softmax, and the logarithm without it.
    "sunk": lambda s, v, z: (product(and_sink(s, z).softmax(-1)[..., :-1], v), s.logsumexp(-1)),
    "twice": lambda s, v, z: (product(s.softmax(-1), v), s.logsumexp(-1) + 1, s.logsumexp(-1, keepdim=True) * 2),
}


def takes(got: Captured) -> bool:
    """Checks that no logarithm of scores is left in the routed graph."""
    return got.ops["selection_attention"] == 1 and not got.nodes("logsumexp")


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("name", LOGS)
def test_the_op_gives_the_logarithm(name: str, gathered: bool, dynamic: bool) -> None:
    for grad in (True, False):
        got = routed(attention(LOGS[name], gathered), inputs(), grad, dynamic=dynamic)
        assert takes(got), reasons(got)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("name", LOGS)
def test_of_rows_without_keys_it_is_minus_infinity(name: str, gathered: bool, added: bool) -> None:
    got = same(attention(LOGS[name], gathered, empty=True, added=added), inputs())
    assert not got.ops["selection_attention"] if added else takes(got), reasons(got)  # added, its gradient is NaN


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("name", ["returned", "kept_dim", "sunk"])
def test_a_row_of_finite_fills_has_another_logarithm(name: str, gathered: bool) -> None:
    """Where every query sees a key the fill does not matter."""
    assert reasons(routed(attention(LOGS[name], gathered, -1e9, True), inputs(), ops={}, bound=0.0))
    if name != "sunk":  # a sink makes it not worth a proof that every query sees a key
        got = routed(attention(LOGS[name], False, -1e9), inputs())
        assert takes(got), reasons(got)


IN_BF16 = {
    **{name: written(form) for name, form in FORMS.items()},
    **{name: written(form, True) for name, form in SUNK.items()},
    **{name: attention(form) for name, form in LOGS.items()},
}


@pytest.mark.parametrize("name", IN_BF16)
def test_in_bf16_the_op_is_as_exact_as_the_formula(name: str) -> None:
    exact_or_left(name, IN_BF16[name], inputs(torch.bfloat16), "selection_attention")


def merged(s: Tensor, v: Tensor, z: Tensor) -> Result:
    """Two parts of the keys that are joined by their logarithms, as in a ring."""
    half = s.shape[-1] // 2
    logs = [x.logsumexp(-1, keepdim=True) for x in (s[..., :half], s[..., half:])]
    total = torch.logaddexp(*logs)
    parts = [
        product((s[..., :half] - logs[0]).exp(), v[:, :, :half]),
        product((s[..., half:] - logs[1]).exp(), v[:, :, half:]),
    ]
    return sum(o * (log - total).exp() for o, log in zip(parts, logs, strict=True))


OTHER_LOGS: dict[str, Form] = {
    "of queries": lambda s, v, z: with_log(s, v, lambda x: x.logsumexp(-2)),
    "of both": lambda s, v, z: with_log(s, v, lambda x: x.logsumexp((-1, -2))),
    "of other scores": lambda s, v, z: with_log(s, v, lambda x: (x * 2).logsumexp(-1)),
    "of scores less their maximum": lambda s, v, z: LOGS["returned"](s - s.amax(-1, keepdim=True), v, z),
    "of scores and a number": lambda s, v, z: LOGS["returned"](s + 1.5, v, z),
    "of scores and a sink": lambda s, v, z: (product((x := and_sink(s, z)).softmax(-1)[..., :-1], v), x.logsumexp(-1)),
    "a maximum": lambda s, v, z: with_log(s, v, lambda x: x.amax(-1)),
}


STAYS = {
    **{name: functools.partial(written, form) for name, form in OTHER.items()},
    **{f"sink, {name}": functools.partial(written, form) for name, form in OTHER_SINKS.items()},
    **{f"logarithm, {name}": functools.partial(attention, form) for name, form in OTHER_LOGS.items()},
}


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("name", STAYS)
def test_other_formulas_stay(name: str, gathered: bool) -> None:
    left_by_proof(STAYS[name](gathered), inputs(), "selection_attention")


def test_parts_that_are_joined_by_their_logarithms() -> None:
    """Whatever is routed of them, values and gradients stay."""
    same(attention(merged), inputs())
