# SPDX-License-Identifier: Apache-2.0
"""Attention whose logarithm of the sum of exponentials is read, too: it is the op's lse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.tools.attentions import equal
from tests.tools.capture import Captured, difference, eager, exact_or_left, left_by_proof, reasons, run

B, S, H, D, K = 2, 11, 3, 8, 4
INF = float("inf")
Result = Tensor | tuple[Tensor, ...]
Form = Callable[[Tensor, Tensor, Tensor], Result]
"""Of masked scores [B, H, S, T], values [B, T, D] or [B, S, K, D], and sinks [H]."""


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(5)
    shapes = ((B, S, H, D), (B, S, D), (B, S, D), (B, S, S), (H,))
    return [torch.randn(*shape, generator=g).to(dtype) for shape in shapes]


def attention(
    form: Form, gathered: bool = False, fill: float = -INF, empty: bool = False, added: bool = False
) -> Callable[..., Result]:
    """Returns an attention to chosen keys; ``empty``: a third of the queries sees none."""

    def fn(q: Tensor, k: Tensor, v: Tensor, x: Tensor, sink: Tensor) -> Result:
        later = torch.arange(S) > torch.arange(S)[:, None]
        at = x.masked_fill(later, -INF).topk(K).indices
        none = (torch.arange(S) % 3 == 1)[:, None] & torch.tensor(empty)
        if gathered:
            rows = torch.arange(k.shape[0])[:, None, None]
            hidden = ((at > torch.arange(S)[:, None]) | none).unsqueeze(1)
            scores = torch.einsum("bshd,bskd->bhsk", q, k[rows, at])
            v = v[rows, at]
        else:
            chosen = torch.zeros(k.shape[0], S, S, dtype=torch.bool).scatter(-1, at, True)
            hidden = (~chosen | later | none).unsqueeze(1)
            scores = torch.einsum("bshd,btd->bhst", q, k)
        if added:
            return form(scores + torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, fill), v, sink)
        return form(scores.masked_fill(hidden, fill), v, sink)

    return fn


def product(w: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhst,btd->bhsd", w, v) if v.dim() == 3 else torch.einsum("bhsk,bskd->bhsd", w, v)


def with_log(s: Tensor, v: Tensor, log: Callable[[Tensor], Tensor]) -> Result:
    return product(s.softmax(-1), v), log(s)


def kept_dim(s: Tensor, v: Tensor, z: Tensor) -> Result:
    lse = torch.logsumexp(s, -1, keepdim=True)
    return product((s - lse).exp(), v), lse


def divided(s: Tensor, v: Tensor, z: Tensor) -> Result:
    lse = s.logsumexp(-1, keepdim=True)
    return product((s - lse).exp(), v) / (1 + torch.exp(z.view(-1, 1, 1) - lse))


def and_sink(s: Tensor, z: Tensor) -> Tensor:
    return torch.cat([s, z.view(1, -1, 1, 1).expand(*s.shape[:-1], 1)], -1)


FORMS: dict[str, Form] = {
    "returned": lambda s, v, z: with_log(s, v, lambda x: x.logsumexp(-1)),
    "kept_dim": kept_dim,
    "transposed": lambda s, v, z: (
        product(s.softmax(-1), v).transpose(1, 2),
        s.logsumexp(3).transpose(1, 2).contiguous() * 2,
    ),
    # A sink that is counted afterwards.
    "corrected": lambda s, v, z: product(s.softmax(-1), v) * torch.sigmoid(s.logsumexp(-1) - z[:, None])[..., None],
    "divided": divided,
    # A sink in the softmax, and the logarithm without it.
    "sunk": lambda s, v, z: (product(and_sink(s, z).softmax(-1)[..., :-1], v), s.logsumexp(-1)),
    "twice": lambda s, v, z: (
        product(s.softmax(-1), v),
        s.logsumexp(-1) + 1,
        s.logsumexp(-1, keepdim=True) * 2,
    ),
}


def takes(got: Captured) -> bool:
    """Checks that no logarithm of scores is left in the routed graph."""
    names = [str(node.target) for gm in got.graphs for node in gm.graph.nodes]
    return got.ops["selection_attention"] == 1 and not any("logsumexp" in name for name in names)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_the_op_gives_the_logarithm(name: str, gathered: bool, dynamic: bool) -> None:
    fn = attention(FORMS[name], gathered)
    for grad in (True, False):
        got, want = run(fn, inputs(), grad=grad, dynamic=dynamic), eager(fn, inputs(), grad=grad)
        assert takes(got) and not got.report.problems, reasons(got)
        assert difference(got, want) < 2e-6


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_of_rows_without_keys_it_is_minus_infinity(name: str, gathered: bool, added: bool) -> None:
    fn = attention(FORMS[name], gathered, empty=True, added=added)
    got, want = run(fn, inputs()), eager(fn, inputs())
    if added:  # its gradient is NaN
        assert not got.ops["selection_attention"]
    else:
        assert takes(got), reasons(got)
    equal(got, want)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("name", ["returned", "kept_dim", "sunk"])
def test_a_row_of_finite_fills_has_another_logarithm(name: str, gathered: bool) -> None:
    """Where every query sees a key the fill does not matter."""
    got, want = (r(attention(FORMS[name], gathered, -1e9, True), inputs()) for r in (run, eager))
    assert not got.ops["selection_attention"] and difference(got, want) == 0.0 and reasons(got)
    if name != "sunk":  # a sink makes it not worth a proof that every query sees a key
        got, want = (r(attention(FORMS[name], False, -1e9), inputs()) for r in (run, eager))
        assert takes(got), reasons(got)
        assert difference(got, want) < 2e-6


@pytest.mark.parametrize("name", FORMS)
def test_in_bf16_the_op_is_as_exact_as_the_formula(name: str) -> None:
    fn, narrow = attention(FORMS[name]), inputs(torch.bfloat16)
    exact_or_left(name, fn, narrow, "selection_attention")


def merged(s: Tensor, v: Tensor, z: Tensor) -> Result:
    """Two parts of the keys that are joined by their logarithms, as in a ring."""
    half = s.shape[-1] // 2
    logs = [x.logsumexp(-1, keepdim=True) for x in (s[..., :half], s[..., half:])]
    total = torch.logaddexp(*logs)
    parts = [
        product((s[..., :half] - logs[0]).exp(), v[:, :half]),
        product((s[..., half:] - logs[1]).exp(), v[:, half:]),
    ]
    return sum(o * (log - total).exp() for o, log in zip(parts, logs, strict=True))


OTHER: dict[str, Form] = {
    "of queries": lambda s, v, z: with_log(s, v, lambda x: x.logsumexp(-2)),
    "of both": lambda s, v, z: with_log(s, v, lambda x: x.logsumexp((-1, -2))),
    "of other scores": lambda s, v, z: with_log(s, v, lambda x: (x * 2).logsumexp(-1)),
    "of scores less their maximum": lambda s, v, z: FORMS["returned"](s - s.amax(-1, keepdim=True), v, z),
    "of scores and a number": lambda s, v, z: FORMS["returned"](s + 1.5, v, z),
    "of scores and a sink": lambda s, v, z: (
        product((x := and_sink(s, z)).softmax(-1)[..., :-1], v),
        x.logsumexp(-1),
    ),
    "a maximum": lambda s, v, z: with_log(s, v, lambda x: x.amax(-1)),
}


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("name", OTHER)
def test_other_logarithms_stay(name: str, gathered: bool) -> None:
    fn = attention(OTHER[name], gathered)
    left_by_proof(fn, inputs(), "selection_attention")


def test_parts_that_are_joined_by_their_logarithms() -> None:
    """Whatever is routed of them, values and gradients stay."""
    got, want = run(attention(merged), inputs()), eager(attention(merged), inputs())
    equal(got, want)
