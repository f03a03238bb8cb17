# SPDX-License-Identifier: Apache-2.0
"""Near misses of attention are true: what is unknown is not called ordinary, and masked scores are never left silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mhc_inductor.report import NearMiss
from tests.tools import capture
from tests.tools.capture import difference, eager, reasons, run

INF = float("inf")
B, H, T, C, D, K = 3, 2, 8, 4, 6, 3
OPAQUE, ALONE = "whose contents routing cannot see", "positions or padding alone"


@torch.library.custom_op("near_misses::seen", mutates_args=())
def seen_by_op(x: Tensor) -> Tensor:
    return torch.ones(x.shape[0], 1, x.shape[2], x.shape[2], dtype=torch.bool).tril()


@seen_by_op.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], 1, x.shape[2], x.shape[2], dtype=torch.bool)


def given() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"q": (B, H, T, D), "k": (B, H, T, D), "v": (B, H, T, D), "kc": (B, H, C, D), "x": (B, T, T + C)}
    made = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    made["shown"] = torch.rand(B, 1, T, T, generator=g) > 0.4
    made["shown"] |= torch.eye(T, dtype=torch.bool)
    made["padding"] = torch.ones(B, T, dtype=torch.long).index_fill(1, torch.tensor([0]), 0)
    made["documents"] = torch.arange(T).div(3, rounding_mode="floor").expand(B, T).contiguous()
    return made


Program = Callable[..., Any]


def look(fn: Callable[[dict[str, Tensor]], Any], grad: bool = False) -> capture.Captured:
    """Runs a program of named tensors routed, and asserts that it gives what it gives eagerly."""
    names, tensors = zip(*given().items(), strict=True)

    def program(*given: Tensor) -> Any:
        return fn(dict(zip(names, given, strict=True)))

    got = run(program, tensors, (), grad)
    assert difference(got, eager(program, tensors, (), grad)) < 2e-6, reasons(got)
    assert not got.report.problems
    return got


def misses(got: capture.Captured) -> list[NearMiss]:
    return [m for m in got.report.near_misses if m.op == "selection_attention"]


def causal() -> Tensor:
    return torch.arange(T) <= torch.arange(T)[:, None]


# --- masks that nobody can know to be ordinary ----------------------------------------------------------------

BUFFER = torch.ones(T, T, dtype=torch.bool).tril()
UNKNOWN: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "an argument": lambda a: a["shown"],
    "an argument without a batch": lambda a: a["shown"][0, 0],
    "a slice of an argument": lambda a: torch.cat([a["shown"], a["shown"]], -1)[..., :T],
    "an argument and causal": lambda a: a["shown"] & causal(),
    "an argument compared": lambda a: a["shown"].long() != 0,
    "an argument of numbers compared": lambda a: torch.where(a["shown"], 1.0, 0.0) * 2 > 1,
    "an argument and padding": lambda a: a["shown"] & (a["padding"][:, None, None, :] != 0),
    "padding in four dims": lambda a: a["shown"][:, :, :1],
    "the result of an op": lambda a: seen_by_op(a["q"]),
    "a closed-over tensor": lambda a: BUFFER,
    "computed from activations": lambda a: a["q"].sum(-1)[..., None] >= a["q"].amax((-1, -2), True),
    "random": lambda a: (torch.rand(T, T) > 0.5) | causal(),
}
KNOWN: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "causal": lambda a: causal(),
    "padding": lambda a: a["padding"][:, None, None, :] != 0,
    "padding and causal": lambda a: (a["padding"][:, None, None, :] != 0) & causal(),
    "documents": lambda a: a["documents"][:, None, :, None] == a["documents"][:, None, None, :],
}


def filled(a: dict[str, Tensor], mask: Tensor) -> Tensor:
    return (a["q"] @ a["k"].mT * 0.4).masked_fill(~mask, -1e9)


def by_hand(s: Tensor) -> Tensor:
    e = (s - s.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


FORMS: dict[str, Callable[[dict[str, Tensor], Tensor], Tensor]] = {
    "filled": lambda a, m: filled(a, m).softmax(-1) @ a["v"],
    "added": lambda a, m: (a["q"] @ a["k"].mT + torch.zeros(m.shape).masked_fill(~m, -1e9)).softmax(-1) @ a["v"],
    "call": lambda a, m: F.scaled_dot_product_attention(a["q"], a["k"], a["v"], attn_mask=m),
    "by hand": lambda a, m: by_hand(filled(a, m)) @ a["v"],
    "changed": lambda a, m: F.softplus(filled(a, m)).softmax(-1) @ a["v"],
    "weights alone": lambda a, m: filled(a, m).softmax(-1),
    "after a capped mask": lambda a, m: filled(a, m).clamp(-50, 50).masked_fill(~causal(), -1e9).softmax(-1) @ a["v"],
    "renormalised": lambda a, m: (lambda p: p / p.sum(-1, keepdim=True))((a["q"] @ a["k"].mT).softmax(-1) * m) @ a["v"],
}


@pytest.mark.parametrize("form", FORMS)
def test_a_mask_of_unknown_contents_is_not_ordinary(form: str) -> None:
    for name, mask in UNKNOWN.items():
        got = look(lambda a, mask=mask: FORMS[form](a, mask(a)))
        assert [m.ordinary for m in misses(got)] == [False], f"{name}: {reasons(got)}"
        assert ALONE not in reasons(got), name
        assert OPAQUE in reasons(got) or form not in ("filled", "added", "call"), f"{name}: {reasons(got)}"


@pytest.mark.parametrize("form", FORMS)
def test_a_mask_of_positions_padding_or_documents_is_ordinary(form: str) -> None:
    for name, mask in KNOWN.items():
        got = look(lambda a, mask=mask: FORMS[form](a, mask(a)))
        assert [m.ordinary for m in misses(got)] == [True], f"{name}: {reasons(got)}"


def test_a_float_mask_in_four_dims_is_not_ordinary_after_a_causal_one() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        hidden = torch.zeros(T, T).masked_fill(~causal(), -INF)
        return (q @ k.mT + (bias + hidden)).softmax(-1) @ v

    a = given()
    got = run(fn, (a["q"], a["k"], a["v"], torch.zeros(B, 1, T, T)), (), False)
    assert [(m.ordinary, OPAQUE in m.reason) for m in misses(got)] == [(False, True)], reasons(got)


def test_one_query_under_a_given_mask_is_not_ordinary() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=shown)

    a = given()
    got = run(fn, (a["q"][:, :, :1], a["k"], a["v"], a["shown"][:1, 0, 0]), (), False)
    assert [m.ordinary for m in misses(got)] == [False], reasons(got)


# --- softmaxes over what is put together from masked scores -----------------------------------------------------


def listed(a: dict[str, Tensor], n: int = T) -> Tensor:
    x = a["x"][..., :n]
    return torch.zeros(x.shape, dtype=torch.bool).scatter(-1, x.topk(K).indices, True)[:, None]


def hidden(a: dict[str, Tensor], k: str = "k") -> Tensor:
    return (a["q"] @ a[k].mT * 0.4).masked_fill(~listed(a, a[k].shape[-2]), -1e9)


def plain(a: dict[str, Tensor], k: str = "k") -> Tensor:
    return a["q"] @ a[k].mT


def both(a: dict[str, Tensor]) -> Tensor:
    return torch.cat([a["kc"], a["k"]], -2)


def written(a: dict[str, Tensor]) -> Tensor:
    s = torch.empty(B, H, T, C + T)
    s[..., :C] = hidden(a, "kc")
    s[..., C:] = plain(a)
    return s


def stacked(a: dict[str, Tensor]) -> Tensor:
    return torch.stack([hidden(a), a["q"] @ a["v"].mT], -1).flatten(-2)


SCORES: dict[str, tuple[Callable[[dict[str, Tensor]], Tensor], str]] = {
    "masked, plain": (lambda a: torch.cat([hidden(a, "kc"), plain(a)], -1), "different scales"),
    "plain, masked": (lambda a: torch.cat([plain(a, "kc"), hidden(a)], -1), "different scales"),
    "written to slices": (written, "changed by slice_scatter"),
    "padded": (lambda a: F.pad(hidden(a, "kc"), (0, T), value=-1e9), "changed by constant_pad_nd"),
}


def halves(a: dict[str, Tensor], p: Tensor) -> Tensor:
    return p[..., :C] @ a["kc"] + p[..., C:] @ a["k"]


def chunks(a: dict[str, Tensor], p: Tensor) -> Tensor:
    one, two = p.split([C, T], -1)
    return one @ a["kc"] + two @ a["k"]


@pytest.mark.parametrize("softmax", [lambda s: s.softmax(-1), by_hand, lambda s: s.log_softmax(-1).exp()])
@pytest.mark.parametrize("scores", SCORES)
def test_scores_put_together_from_masked_ones_are_named(scores: str, softmax: Callable[[Tensor], Tensor]) -> None:
    made, why = SCORES[scores]
    for product in (lambda a, p: p @ both(a), halves, chunks):
        got = look(lambda a, product=product: product(a, softmax(made(a))))
        (miss,) = misses(got)
        assert not miss.ordinary and "test_near_misses_selection.py" in miss.source, reasons(got)
        assert why in miss.reason or "written out as exp(scores) / sum" in miss.reason, reasons(got)


OTHERS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "stacked": (lambda a: stacked(a).softmax(-1), "changed by stack"),
    "one of two": (lambda a: torch.where(listed(a), hidden(a), plain(a)).softmax(-1) @ a["v"], "changed by where"),
    "a sum": (lambda a: (hidden(a) + hidden(a)).softmax(-1) @ a["v"], "changed by add"),
    "a maximum": (lambda a: torch.maximum(hidden(a), plain(a) - 9).softmax(-1) @ a["v"], "changed by maximum"),
    "a temperature": (lambda a: (hidden(a) * a["x"][:, None, :, :1].sigmoid()).softmax(-1) @ a["v"],
                      "changed by mul"),
    "a divisor": (lambda a: (hidden(a) / a["x"][:, None, :, :1].exp()).softmax(-1) @ a["v"], "changed by div"),
    "softplus": (lambda a: F.softplus(hidden(a)).softmax(-1) @ a["v"], "changed by softplus"),
    "flipped": (lambda a: hidden(a).flip(-1).softmax(-1) @ a["v"].flip(-2), "changed by flip"),
    "gathered": (lambda a: hidden(a)[..., torch.tensor([3, 1, 0, 2])].softmax(-1) @ a["kc"], "changed by index"),
    "logsumexp": (lambda a: hidden(a).logsumexp(-1), "the logarithm of a softmax"),
    "log_softmax": (lambda a: F.log_softmax(hidden(a), -1), "the logarithm of a softmax"),
    "the mean of heads": (lambda a: hidden(a).mean(1, True).softmax(-1) @ a["v"], "changed by mean"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_masked_scores_that_are_changed_before_their_softmax_are_named(name: str) -> None:
    form, why = OTHERS[name]
    (miss,) = misses(got := look(form))
    assert why in miss.reason and not miss.ordinary and "test_near_misses_selection.py" in miss.source, reasons(got)


def test_one_softmax_and_its_logarithm_are_one_near_miss() -> None:
    def entropy(a: dict[str, Tensor]) -> Tensor:
        s = F.softplus(hidden(a))
        return -(s.log_softmax(-1) * s.softmax(-1)).sum(-1)

    assert len(misses(look(entropy))) == 1


def test_routers_losses_and_pools_are_not_mentioned() -> None:
    """Softmaxes over masked logits of a parameter, and products without a mask, are no attention."""
    weight = torch.nn.Parameter(torch.randn(D, 5, generator=torch.Generator().manual_seed(1)))

    def fn(a: dict[str, Tensor]) -> tuple[Tensor, ...]:
        logits = a["q"] @ weight
        kept = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, logits.topk(2).indices, True)
        cut = logits.masked_fill(~kept, -INF)
        return cut.softmax(-1), cut.log_softmax(-1), by_hand(plain(a)) @ a["v"], F.softplus(plain(a)).softmax(-1)

    got = look(fn)
    assert not got.report.near_misses, reasons(got)


# --- thresholds and gathers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("hide", ["filled", "added"])
def test_a_threshold_next_to_a_list_is_named_as_one(hide: str) -> None:
    def fn(a: dict[str, Tensor]) -> Tensor:
        x = a["x"][..., :T]
        low = (x < x.topk(K).values[..., -1:])[:, None]
        s = hidden(a)
        s = s.masked_fill(low, -1e9) if hide == "filled" else s + torch.zeros(low.shape).masked_fill(low, -1e9)
        return s.softmax(-1) @ a["v"]

    got = look(fn, grad=True)
    assert got.ops["selection_attention"] or "from values that topk" in misses(got)[0].reason, reasons(got)
    assert "is not a mask" not in reasons(got)


SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "clamped": lambda i: i.clamp(min=0),
    "clamped twice": lambda i: i.clamp(0, T - 1),
    "filled": lambda i: torch.where(i >= 0, i, 0),
}


@pytest.mark.parametrize("name", SAME)
def test_indices_that_a_clamp_leaves_as_they_are_are_the_same(name: str) -> None:
    def fn(a: dict[str, Tensor]) -> Tensor:
        rows, i = torch.arange(B)[:, None, None], a["x"][..., :T].topk(K).indices
        k, v = a["k"][:, 0][rows, i], a["v"][:, 0][rows, SAME[name](i)]
        return torch.einsum("bshk,bskd->bshd", torch.einsum("bhsd,bskd->bshk", a["q"], k).softmax(-1), v)

    assert look(fn, grad=True).ops["selection_attention"] == 1
