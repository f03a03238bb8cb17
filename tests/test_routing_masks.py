# SPDX-License-Identifier: Apache-2.0
"""The op sees what a mask says: fills, rows without keys, constants, factors, casts and indices out of range.

Each case is either equal to eager after routing, gradients and NaN included, or left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mhc_inductor.options import RoutingOptions
from mhc_inductor.routing.operators.selection.empty_rows import EmptyRows
from tests.tools import attentions
from tests.tools.capture import Captured, alike, eager, reasons, run

INF = float("inf")
MIN = torch.finfo(torch.float32).min
T = 16


def _given(seed: int = 0, S: int = T, dtype: torch.dtype = torch.float32, size: float = 1.0) -> tuple[Tensor, ...]:
    """Returns q, k, v [2, 2, S or T, 8], and ranges [2, 2, S, 2, 2] that are empty for every third query."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 2, n, 8, generator=g) for n in (S, T, T))
    start = torch.randint(0, T, (2, 2, S, 2), generator=g)
    ranges = torch.stack([start, (start + torch.randint(1, 5, start.shape, generator=g)).clamp(max=T)], -1)
    ranges[:, :, torch.arange(S) % 3 == 0] = 0
    return (size * q).to(dtype), k.to(dtype), v.to(dtype), ranges


def _inside(ranges: Tensor) -> Tensor:
    t = torch.arange(T)
    return ((t >= ranges[..., :1]) & (t < ranges[..., 1:])).any(-2)


def _causal() -> Tensor:
    return torch.arange(T) <= torch.arange(T)[:, None]


def _attention(mask: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Returns the function softmax(mask(scores, allowed)) @ V."""
    return lambda q, k, v, ranges: mask(q @ k.mT * 0.35, _inside(ranges)).softmax(-1) @ v


def _seeing(mask: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Returns an attention to the keys that a mask of the last argument shows."""
    return lambda q, k, v, x: (q @ k.mT * 0.35).masked_fill(~mask(x), -INF).softmax(-1) @ v


def _same(fn: Callable[..., Any], given: tuple[Tensor, ...], routed: bool | None = None, bar: float = 2e-6) -> Captured:
    """Asserts that the routed call equals the eager one in training and in inference, and returns it."""
    for grad in (True, False):
        got = alike(fn, given, grad=grad, within=bar)
        assert routed is None or bool(got.ops) == routed, (grad, reasons(got))
    return got


def _raise(fn: Callable[..., Any], given: tuple[Tensor, ...]) -> None:
    """Asserts that the routed call raises, as the eager one does."""
    for call in (run, eager):
        with pytest.raises((IndexError, RuntimeError)):
            call(fn, given, (), False)


# --- one fill (test_routing_selection.py has one of -inf or finfo.min, filled or added, in rows without keys) ----

ONE_FILL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "where -inf": lambda s, m: torch.where(m, s, -INF),
    "filled twice with -inf": lambda s, m: s.masked_fill(~m, -INF).masked_fill(~_causal(), -INF),
    "filled twice with finfo.min": lambda s, m: s.masked_fill(~m, MIN).masked_fill(~_causal(), MIN),
    "filled finfo.min, then scaled": lambda s, m: s.masked_fill(~m, MIN) * 0.5,
    "scaled from the left": lambda s, m: (torch.tensor(0.5) * s).masked_fill(~m, MIN),
    "filled -1e9": lambda s, m: s.masked_fill(~m, -1e9),
    "added -1e9": lambda s, m: s + (1.0 - m.float()) * -1e9,
    "subtracted 1e9": lambda s, m: s - (~m).float() * 1e9,
    "added min of two": lambda s, m: (
        s + torch.minimum(torch.zeros_like(s).masked_fill(~m, MIN), torch.zeros(T, T).masked_fill(~_causal(), MIN))
    ),
}


@pytest.mark.parametrize("masked", ONE_FILL)
def test_rows_without_keys_are_the_formulas(masked: str) -> None:
    """Compares zeros, means, NaN and their gradients, which are NaN exactly where the model's are."""
    _same(_attention(ONE_FILL[masked]), _given(), routed=True)


_LOW = torch.finfo(torch.bfloat16).min
IN_BF16: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "filled -inf": lambda s, m: s.masked_fill(~m, -INF),
    "filled finfo.min": lambda s, m: s.masked_fill(~m, _LOW),
    "added finfo.min": lambda s, m: s + torch.zeros_like(s).masked_fill(~m, _LOW),
}


@pytest.mark.parametrize("masked", IN_BF16)
def test_rows_without_keys_in_bf16(masked: str) -> None:
    _same(_attention(IN_BF16[masked]), _given(dtype=torch.bfloat16), routed=True, bar=2e-2)


@pytest.mark.parametrize("fill", [-INF, MIN])
def test_rows_without_keys_of_sdpa(fill: float) -> None:
    """Routes a fill of -inf, and of finfo.min, whose rows give what the kernel of this call gives."""

    def fn(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor) -> Tensor:
        bias = torch.zeros(2, 2, T, T).masked_fill(~_inside(ranges), fill)
        return F.scaled_dot_product_attention(q, k, v, bias)

    _same(fn, _given(), routed=True)


# --- several fills ------------------------------------------------------------------------------------------

SEVERAL_FILLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "finfo.min, then -inf": lambda s, m: s.masked_fill(~m, MIN).masked_fill(~_causal(), -INF),
    "-inf, then finfo.min": lambda s, m: s.masked_fill(~m, -INF).masked_fill(~_causal(), MIN),
    "-1e9, then finfo.min": lambda s, m: s.masked_fill(~_causal(), -1e9).masked_fill(~m, MIN),
    "-1e4 and finfo.min": lambda s, m: s.masked_fill(~_causal(), -1e4).masked_fill(~m, MIN),
    "two added of -1e9": lambda s, m: s + (~m).float() * -1e9 + (~_causal()).float() * -1e9,
    "two added of -1e9 as one": lambda s, m: s + ((~m).float() * -1e9 + (~_causal()).float() * -1e9),
    "two added of finfo.min": lambda s, m: s + ((~m).float() * MIN + (~_causal()).float() * MIN),
    "added -inf, filled finfo.min": lambda s, m: (s + torch.where(_causal(), 0.0, -INF)).masked_fill(~m, MIN),
    "added and filled finfo.min": lambda s, m: (s + torch.where(_causal(), 0.0, MIN)).masked_fill(~m, MIN),
    "one mask of two fills": lambda s, m: s + torch.where(_causal(), torch.where(m, 0.0, -1e9), -INF),
}


@pytest.mark.parametrize("masked", SEVERAL_FILLS)
def test_masks_of_different_fills(masked: str) -> None:
    """Checks that mixed fills stay: in rows without keys they decide which keys count, so future keys could leak in."""
    got = _same(_attention(SEVERAL_FILLS[masked]), _given(), routed=False)
    assert "a query may see no key" in reasons(got) or "expected -inf" in reasons(got), reasons(got)


@pytest.mark.parametrize("masked", SEVERAL_FILLS)
def test_masks_of_different_fills_where_every_query_sees_a_key(masked: str) -> None:
    """Makes each query see its own key, so that no row is empty."""
    fn = _attention(lambda s, m: SEVERAL_FILLS[masked](s, m | (torch.arange(T) == torch.arange(T)[:, None])))
    _same(fn, _given(), routed="-1e4" not in masked)


@pytest.mark.parametrize("sides", [(2, 0), (0, 2)], ids=str)
@pytest.mark.parametrize("shown", [True, False])
def test_a_mask_is_padded(sides: tuple[int, int], shown: bool) -> None:
    kept = slice(sides[0], T - sides[1])

    def mask(scores: Tensor, allowed: Tensor) -> Tensor:
        return scores.masked_fill(~F.pad(allowed[..., kept], sides, value=shown), -INF)

    # Keys at the end that every query sees are no window and not the first ones.
    _same(_attention(mask), _given(), routed=sides == (2, 0) or not shown)


def test_a_mask_of_isin_is_left() -> None:
    fn = _seeing(lambda x: torch.isin(torch.arange(T).expand(T, T), x) | _causal())
    _same(fn, (*_given()[:3], torch.tensor([0, 5])), routed=False)


def test_zeros_are_an_option() -> None:
    fn = _attention(SEVERAL_FILLS["finfo.min, then -inf"])
    given = _given()
    got = run(fn, given, options=RoutingOptions(empty_rows="zero"))
    unrouted = eager(fn, given)
    assert dict(got.ops) == {"selection_attention": 1}, reasons(got)
    seen = (_inside(given[3]) & _causal()).any(-1)
    assert torch.allclose(got.outputs[0][seen], unrouted.outputs[0][seen], atol=1e-5)
    assert not bool(got.outputs[0][~seen].any())


# --- fills that a score may reach ---------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [-1e4, -65504.0, -1e8])
@pytest.mark.parametrize("added", [True, False])
def test_fills_that_a_score_may_reach_are_left(fill: float, added: bool) -> None:
    def mask(s: Tensor, m: Tensor) -> Tensor:
        return s + (~m).float() * fill if added else s.masked_fill(~m, fill)

    got = _same(_attention(mask), _given(size=3e4), routed=False)
    assert "expected -inf" in reasons(got)


def test_a_mask_in_fp16_is_its_dtypes_lowest() -> None:
    low = torch.finfo(torch.float16).min
    fn = _attention(lambda s, m: s.masked_fill(~m, low))
    _same(fn, _given(dtype=torch.float16), routed=True, bar=2e-3)
    _same(_attention(lambda s, m: s.float().masked_fill(~m, low)), _given(), routed=False)


def test_finfo_min_of_another_dtype_is_rounded() -> None:
    """Rounds finfo(float32).min to bf16, where it is -inf."""
    fn = _attention(lambda s, m: s + torch.zeros(m.shape).masked_fill(~m, MIN).bfloat16())
    _same(fn, _given(dtype=torch.bfloat16), routed=True, bar=2e-2)


# --- constants, factors and casts ---------------------------------------------------------------------------

Two = Callable[[Tensor, Tensor], Tensor]
EQUAL_OR_LEFT: dict[str, Two] = {
    "half of a sum reaches 1": lambda a, b: (a.float() + b.float()) * 0.5 >= 1,
    "half of a sum is above 0.75": lambda a, b: (a.float() + b.float()) * 0.5 > 0.75,
    "half of a sum is above 0.25": lambda a, b: (a.float() + b.float()) * 0.5 > 0.25,
    "a quarter reaches a quarter": lambda a, b: (a.float() * 0.25 + b.float() * 0.5) >= 0.25,
    "a truncated half": lambda a, b: (0.5 * a.float()).int() > 0,
    "a truncated half as a mask": lambda a, b: (0.5 * (a.float() + b.float())).int().bool(),
    "one and a half, truncated": lambda a, b: (1.5 * a.float()).int() == 1,
    "a weighted product": lambda a, b: (0.5 * a.float()) * (2.0 * b.float()) >= 1,
    "a weighted product below 1": lambda a, b: (0.5 * a.float()) * b.float() >= 1,
    "a clamped double": lambda a, b: (2 * a.int()).clamp(max=1) > 1,
    "a clamped sum": lambda a, b: (a.int() + b.int()).clamp(max=1) == 1,
    "a sum clamped at 2": lambda a, b: (a.int() + b.int()).clamp(max=2) == 2,
    "where of halves": lambda a, b: torch.where(a, 0.5, 0.0) >= 1,
    "where of doubles": lambda a, b: torch.where(a, 2.0, 0.0) > 1,
    "where of both": lambda a, b: torch.where(a, 0.5, b.float()) >= 1,
    "filled with a half": lambda a, b: torch.zeros(a.shape).masked_fill(a, 0.5) >= 1,
    "filled with a half, to int": lambda a, b: torch.zeros(a.shape).masked_fill(a, 0.5).int() > 0,
    "equal to 2": lambda a, b: (a.int() + b.int()) == 2,
    "not 1": lambda a, b: a.int() != 1,
    "at most 1": lambda a, b: (a.int() + b.int()) <= 1,
    "at most 0": lambda a, b: (a.int() + b.int()) <= 0,
    "below a half": lambda a, b: ~((a.float() + b.float()) < 0.5),
    "a difference": lambda a, b: (a.int() - b.int()) > 0,
    "a difference in uint8": lambda a, b: (a.to(torch.uint8) - b.to(torch.uint8)) > 0,
    "256 times in uint8": lambda a, b: (a.to(torch.uint8) * 16 * 16) > 0,
    "200 and 100 in uint8": lambda a, b: (a.to(torch.uint8) * 200 + b.to(torch.uint8) * 56) > 0,
    "128 in int8": lambda a, b: (a.to(torch.int8) * 64 + b.to(torch.int8) * 64) > 0,
    "too small for a float": lambda a, b: (a.float() * 1e-30 * 1e-30) > 0,
    "a number that bf16 rounds": lambda a, b: (a.to(torch.bfloat16) * 1.001) > 1,
    "minimum of two": lambda a, b: torch.minimum(a.int(), b.int()) > 0,
    "minimum of doubles": lambda a, b: torch.minimum(2 * a.int(), b.int()) > 0,
    "maximum": lambda a, b: torch.maximum(a, b),
    "with alpha": lambda a, b: torch.add(a.int(), b.int(), alpha=2) >= 2,
    "rsub": lambda a, b: torch.rsub(a.int(), 1) == 0,
    "rsub with alpha": lambda a, b: torch.rsub(a.int(), 1, alpha=2) < 0,
    "xor": lambda a, b: a ^ b,
    "equal flags": lambda a, b: a == b,
    "nonzero fraction": lambda a, b: (a.float() * 0.3).bool(),
    "finfo.min against -inf": lambda a, b: torch.zeros(a.shape).masked_fill(~a, MIN) == -INF,
    "additive, against -inf": lambda a, b: torch.zeros(a.shape).masked_fill(~a, -INF) != -INF,
    "additive that cancels": lambda a, b: torch.where(a, 5.0, 0.0) + torch.where(b, -5.0, -10.0) == 0,
    "half truncated to 0 in int": lambda a, b: torch.full(a.shape, 0.5).int() + a.int() > 0,
    "cumulative": lambda a, b: a.int().cumsum(-1) * a.int() > 1,
    "2 ** 32, to int": lambda a, b: torch.zeros(a.shape).masked_fill(a, 2.0**32).int() != 0,
    "inf, to int": lambda a, b: a | (torch.zeros(a.shape).masked_fill(b, INF).int() == 0),
    "constants on the left": lambda a, b: (torch.zeros(()) < a.float()) & (torch.tensor(5) > torch.arange(T)),
    "positions against floats": lambda a, b: a & (torch.arange(T) < torch.full((T,), 5.0)),
    "clamped above": lambda a, b: torch.clamp_max(a.int() + b.int(), 1) == 1,
    "a count of another place": lambda a, b: (
        a | (torch.zeros(T, 2).scatter_add(1, torch.zeros(T, 1).long(), torch.ones(T, 1))[:, 1:] > 0)
    ),
    "scattered where it is": lambda a, b: a | torch.zeros(T, T, dtype=torch.bool).scatter(1, a[0, 0].long(), False),
    "the largest of one": lambda a, b: torch.where(a[..., None, :], INF, 0.0).amax(-2) == INF,
    "plus nothing, in int16": lambda a, b: (0 * b.int()).to(torch.int16) + a.to(torch.int16) > 0,
}


@pytest.mark.parametrize("name", EQUAL_OR_LEFT)
def test_constants_of_masks_matter(name: str) -> None:
    """Combines masks a and b of one range each; each query also sees its own position, so that no row is empty."""

    def seen(ranges: Tensor) -> Tensor:
        t = torch.arange(T)
        a, b = ((t >= ranges[..., i, :1]) & (t < ranges[..., i, 1:]) for i in (0, 1))
        return EQUAL_OR_LEFT[name](a, b) | (t == t[:, None])

    got = _same(_seeing(seen), _given())
    assert bool(got.ops) == (name in _ROUTED), f"{dict(got.ops)}: {reasons(got)}"


_ROUTED = {
    *("half of a sum is above 0.25", "a quarter reaches a quarter", "a clamped sum", "where of doubles"),
    *("below a half", "maximum", "nonzero fraction", "additive, against -inf", "half truncated to 0 in int"),
    *("one and a half, truncated", "rsub", "finfo.min against -inf", "constants on the left"),
    *("positions against floats", "clamped above", "plus nothing, in int16", "a count of another place"),
    *("scattered where it is", "the largest of one"),
}
"""The masks above that equal a, b or their union, which routing recognises through the constants."""


def _picks(values: Tensor) -> tuple[Tensor, ...]:
    q, k, v, _ = _given()
    return q, k, v, values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_counts_that_a_float_rounds(dtype: torch.dtype) -> None:
    """Counts 600 starts before 601 ends, which leaves a count of 0 or 1 that 8 bits cannot hold."""

    def seen(starts: Tensor) -> Tensor:
        change, one = torch.zeros(2, 2, T, T + 1, dtype=dtype), torch.ones(starts.shape, dtype=dtype)
        change = change.scatter_add(-1, starts, one).scatter_add(-1, (starts + 3).clamp(max=T), -one)
        return (change.cumsum(-1)[..., :T] > 0) | (torch.arange(T) == torch.arange(T)[:, None])

    starts = torch.randint(0, T, (2, 2, T, 600), generator=torch.Generator().manual_seed(0))
    _same(_seeing(seen), _picks(starts))


# --- casts of q, k and v ------------------------------------------------------------------------------------

CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "through bf16": lambda x: x.bfloat16().float(),
    "through float8": lambda x: x.to(torch.float8_e4m3fn).to(x.dtype),
    "through bf16 and float8": lambda x: x.bfloat16().to(torch.float8_e5m2).bfloat16().float(),
    "through int": lambda x: (4 * x).int().float(),
    "through int8 and a scale": lambda x: (16 * x).round().to(torch.int8).float() * 0.0625,
    "rounded between two factors": lambda x: (x * 1.7).bfloat16().float() * 0.3,
    "float8 between two factors": lambda x: (x * 1.7).to(torch.float8_e4m3fn).float() * 0.3,
    "wider": lambda x: x.double().float(),
}


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("cast", CASTS)
def test_roundings_of_inputs_are_the_models(cast: str, which: str) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor) -> Tensor:
        q, k, v = (CASTS[cast](x) if name == which else x for name, x in (("q", q), ("k", k), ("v", v)))
        return (q @ k.mT * 0.35).masked_fill(~_inside(ranges), MIN).softmax(-1) @ v

    attentions.routed(fn, _given())


@pytest.mark.parametrize("what", ["scores", "weights"])
def test_float8_in_between_is_left(what: str) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor) -> Tensor:
        s = (q @ k.mT * 0.35).masked_fill(~_inside(ranges), MIN)
        s = s.to(torch.float8_e5m2).float() if what == "scores" else s
        p = s.softmax(-1)
        p = p.to(torch.float8_e4m3fn).float() if what == "weights" else p
        return p @ v

    _same(fn, _given(), routed=False)


# --- indices out of range -----------------------------------------------------------------------------------

INDEXED: dict[str, Callable[[Tensor], Tensor]] = {
    "scatter": lambda x: torch.zeros(2, 2, T, T, dtype=torch.bool).scatter(-1, x, True),
    "scatter_add": lambda x: torch.zeros(2, 2, T, T).scatter_add(-1, x, torch.ones(x.shape)) > 0,
    "scatter_ of clamped": lambda x: torch.zeros(2, 2, T, T, dtype=torch.bool).scatter_(-1, x.clamp(min=0), True),
    "setitem": lambda x: _set((t := torch.arange)(2).view(2, 1, 1, 1), t(2).view(2, 1, 1), t(T)[:, None], x),
    "setitem after slices": lambda x: _set(slice(None), slice(None), torch.arange(T)[:, None], x[1, 1]),
    "blocks": lambda x: torch.zeros(2, 2, T, 4).scatter(-1, x, 1.0).repeat_interleave(4, -1) > 0,
}


def _set(*index: Any) -> Tensor:
    mask = torch.zeros(2, 2, T, T, dtype=torch.bool)
    mask[index] = True
    return mask


@pytest.mark.parametrize("name", INDEXED)
def test_indices_out_of_range_raise_as_before(name: str) -> None:
    fn, g = _seeing(INDEXED[name]), torch.Generator().manual_seed(0)
    picks = torch.randint(0, 4 if name == "blocks" else T, (2, 2, T, 3), generator=g)
    _same(fn, _picks(picks), routed=True)
    picks[1, 1, 5, 2] = T
    _raise(fn, _picks(picks))


def test_rows_without_keys_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op that leaves 0 where the formula gives NaN is refused."""
    fn = _seeing(lambda ranges: _inside(ranges) & _causal())
    assert run(fn, _given(), (), False).ops
    monkeypatch.setattr(EmptyRows, "put", lambda self, o, rows: o)
    got = run(fn, _given(), (), False)
    assert not got.ops and "NaN or infinite at different places" in reasons(got)


def test_a_topk_of_no_keys_shows_none() -> None:
    """Rows without keys give NaN: where no key is picked, no query is known to see one."""

    def fn(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor) -> Tensor:
        return _seeing(_best(0))(q, k, v, q @ k.mT)

    _same(fn, _given())


def _best(count: int) -> Callable[[Tensor], Tensor]:
    """Returns the mask of the first T keys, of which it shows those with the largest scores."""
    return lambda x: torch.zeros(2, 2, T, T, dtype=torch.bool).scatter(-1, x.topk(count, -1)[1], True)


def test_indices_of_topk_need_no_check() -> None:
    got = _same(_seeing(_best(3)), _picks(torch.randn(2, 2, T, T)), routed=True)
    assert "gather" not in str(got.graphs[0].graph)


def test_indices_of_a_topk_over_more_keys_raise_as_before() -> None:
    scores = torch.randn(2, 2, T, T + 1, generator=torch.Generator().manual_seed(0))
    scores[..., T] = -9.0
    _same(_seeing(_best(3)), _picks(scores), routed=True)
    scores[1, 1, 5, T] = 9.0
    _raise(_seeing(_best(3)), _picks(scores))


# --- near misses --------------------------------------------------------------------------------------------

Whole = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def _masked_scores(q: Tensor, k: Tensor, ranges: Tensor) -> Tensor:
    return (q @ k.mT * 0.35).masked_fill(~_inside(ranges), -INF)


def _scores(scores: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Whole:
    return lambda q, k, v, r: scores(q, k, v).masked_fill(~_inside(r), -INF).softmax(-1) @ v


# A soft cap, a bias, dropout, other sinks, inverted masks and weights that are returned are mutants of test_routing_selection.py;
# masks that are given are in test_near_misses_selection.py and test_routing_data_masks.py.
NEAR_MISSES: dict[str, tuple[Whole, str]] = {
    "clamp": (_scores(lambda q, k, v: (q @ k.mT).clamp(-5, 5)), "the scores are changed by clamp"),
    "weights only": (lambda q, k, v, r: _masked_scores(q, k, r).softmax(-1), "no products with V"),
    "weights in two products": (
        lambda q, k, v, r: ((p := _masked_scores(q, k, r).softmax(-1)) @ v, p @ k),
        "2 products with V",
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_softmaxes_over_selected_keys_that_stay_have_a_reason(name: str) -> None:
    fn, reason = NEAR_MISSES[name]
    got = run(fn, _given(), (), False)
    assert not got.ops and reason in reasons(got), reasons(got)
    assert all("test_routing_masks.py:" in m.source for m in got.report.near_misses)


def test_keys_put_together_in_place() -> None:
    """Assembles keys by ``new_empty`` and two slice copies, as models join a rotated part with the rest."""

    def fn(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor) -> tuple[Tensor, ...]:
        joined = k.new_empty(k.shape)
        joined[..., :4] = k[..., 4:]
        joined[..., 4:] = k[..., :4]
        return _seeing(_inside)(q, joined, v, ranges).unbind(1)

    got = _same(fn, _given())
    assert got.ops or got.report.near_misses


def test_indices_of_fewer_bits_raise_as_before() -> None:
    """A cast to int8 makes indices above 127 negative: that they are a topk's does not say that they are in range."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        picked = (q @ k.mT).topk(8, -1).indices.to(torch.int8).long()
        mask = torch.zeros(1, 1, 4, 300, dtype=torch.bool).scatter(-1, picked, True)
        return (q @ k.mT * 0.35).masked_fill(~mask, -INF).softmax(-1) @ v

    g = torch.Generator().manual_seed(0)
    _raise(fn, tuple(torch.randn(1, 1, n, 8, generator=g) for n in (4, 300, 300)))
