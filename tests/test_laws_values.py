# SPDX-License-Identifier: Apache-2.0
"""Laws 3, 4 and 6: roundings of inputs, rows without keys with every fill, constants in masks, sizes taken as fixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from mhc_inductor.routing import interface
from mhc_inductor.routing.graph.index import DynamicWidth
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Match
from tests.formulas import laws
from tests.formulas.gated_norm import GatedNorm, norm_formula
from tests.formulas.laws import Compiled, Leaves, added, changed, check, filled, normal, observe, sdpa, selection_leaves

# --- roundings that the model wrote on an input -------------------------------------------------------------

ROUND: dict[str, Callable[[Tensor], Tensor]] = {
    "bf16": lambda t: t.bfloat16().to(t.dtype),
    "fp16": lambda t: t.half().to(t.dtype),
    "fp32": lambda t: t.float().to(t.dtype),
    "fp8_e4m3": lambda t: t.to(torch.float8_e4m3fn).to(t.dtype),
    "fp8_e5m2": lambda t: t.to(torch.float8_e5m2).to(t.dtype),
    "fake_quantised": lambda t: (t * 16).round() / 16,
    "straight_through": lambda t: t + (t.bfloat16().to(t.dtype) - t).detach(),
    "int8": lambda t: (t * 32).to(torch.int8).to(t.dtype) / 32,
    "scaled_fp8": lambda t: (t * 16).to(torch.float8_e4m3fn).to(t.dtype) * 0.0625,
    "fake": lambda t: torch.fake_quantize_per_tensor_affine(t.float(), 0.05, 0, -127, 127).to(t.dtype),
    "stays_bf16": lambda t: t.bfloat16(),
}


@pytest.mark.parametrize("place", ["phi", "x", "alpha", "bias", "gamma"])
@pytest.mark.parametrize("how", ["bf16", "fp8_e4m3"])
def test_an_input_of_a_block_stays_rounded(how: str, place: str) -> None:
    if place == "x":  # in fp64 routing may leave rounded streams to the formula, with a near miss
        changed("mhc", {place: ROUND[how]})
    changed(
        "mhc", {place: ROUND[how]}, more=laws.mhc_leaves(dtype=torch.float32) if place == "x" else {}, routed=laws.MHC
    )


@pytest.mark.parametrize(
    ("place", "how"),
    [
        *(("phi", how) for how in ROUND if how not in ("bf16", "fp8_e4m3", "stays_bf16")),
        *((p, how) for p in ("alpha", "bias", "gamma") for how in ("fp16", "int8", "scaled_fp8", "fake", "stays_bf16")),
    ],
)
def test_a_weight_stays_rounded(place: str, how: str) -> None:
    # A factor such as 1 / 16 may be a reason for a near miss.
    routed = {} if how in ("fake_quantised", "int8", "scaled_fp8") else {"routed": laws.MHC}
    changed("mhc", {place: ROUND[how]}, **routed)


@pytest.mark.parametrize("how", ["fp8_e4m3", "bf16", "fp16"])
@pytest.mark.parametrize("place", ["h_pre", "h_post", "res", "mixed"])
def test_intermediate_roundings_to_a_dtype_that_no_tensor_has_stay(place: str, how: str) -> None:
    found = changed("mhc", {place: ROUND[how]}, more=laws.mhc_leaves(dtype=torch.float32))
    assert "rounded to" in str(found.near)


@pytest.mark.parametrize("how", ["bf16", "fp8_e4m3"])
def test_streams_rounded_for_the_projection_only(how: str) -> None:
    """Rounds the streams for the projection only; the collapse reads them unrounded."""
    changed("mhc", {"v": ROUND[how]})


@pytest.mark.parametrize("how", ["bf16", "fp8_e4m3"])
@laws.law_of(laws.mhc_leaves, named=["mhc"])
def test_the_norm_of_rounded_streams(p: Leaves, how: str) -> Any:
    x = p["x"]
    v, low = x.flatten(-2), ROUND[how](x.flatten(-2))
    z = F.linear(v, p["phi"]) * torch.rsqrt(low.square().mean(-1, keepdim=True) + 1e-6)
    h_pre = torch.sigmoid(p["alpha"][0] * z[..., :4] + p["bias"][:4]) + 1e-6
    h_post = 2 * torch.sigmoid(p["alpha"][1] * z[..., 4:8] + p["bias"][4:8])
    return (h_pre.unsqueeze(-1) * x).sum(-2), h_post


@pytest.mark.parametrize("place", ["kvqm", "S0", "M0", "b_s"])
@pytest.mark.parametrize("how", ["bf16", "fp8_e4m3"])
def test_an_input_of_a_loop_stays_rounded(how: str, place: str) -> None:
    changed("e79", {place: ROUND[how]}, routed={"e79_scan": 1})


@pytest.mark.parametrize("place", ["S1", "M2"])
def test_a_state_rounded_between_steps(place: str) -> None:
    changed("e79", {place: ROUND["bf16"]})


@pytest.mark.parametrize("place", ["q", "k", "v"])
@pytest.mark.parametrize("how", ["bf16", "fp8_e4m3"])
def test_an_input_of_an_attention_stays_rounded(how: str, place: str) -> None:
    check(lambda p: sdpa({**p, place: ROUND[how](p[place])}), selection_leaves(), routed={"selection_attention": 1})
    changed("selection", {place: ROUND[how]})


# --- fills --------------------------------------------------------------------------------------------------

LOWEST = torch.finfo(torch.float64).min
FILLS = {"-1e4": -1e4, "-1e9": -1e9, "-30": -30.0, "lowest": LOWEST, "lowest_fp32": -3.4028234663852886e38}
INF = float("-inf")
Fill = Callable[[Tensor, Tensor], Tensor]
SPELLINGS: dict[str, Fill] = {
    **{f"filled {k}": filled(v) for k, v in FILLS.items()},
    "filled -inf": filled(INF),
    **{f"added {k}": added(v) for k, v in FILLS.items()},
    "added -inf": added(INF),
    "where": lambda s, m: torch.where(m, s, torch.tensor(LOWEST, dtype=s.dtype)),
    "multiplied": lambda s, m: s + (1.0 - m.to(s.dtype)) * LOWEST,
    "filled twice": lambda s, m: filled(INF)(filled(LOWEST)(s, m), m),
}


def _causal(p: Leaves, mask: Tensor) -> Tensor:
    S, T = p["q"].shape[1], p["k"].shape[1]
    return (torch.arange(T) <= (torch.arange(S) + T - S).unsqueeze(-1)).expand(mask.shape)


@pytest.mark.parametrize("how", SPELLINGS)
def test_every_fill_gives_what_the_formula_gives(how: str) -> None:
    """Compiles once for rows with keys and without, of large scores and of NaN: their values are no part of a graph."""
    every = [selection_leaves(empty=empty, scale=scale) for scale in (1.0, 1e5, 1.0) for empty in (False, True)]
    for leaves in every[4:]:
        leaves["q"][:, 2:4] = float("nan")
    program = lambda p: laws.attention(p, fill=SPELLINGS[how])  # noqa: E731
    check(program, every[0], others=every[1:], named=["selection"], tolerance=1e-7)


PAIRS: dict[str, tuple[Fill, Fill]] = {
    "lowest then -inf": (filled(LOWEST), filled(INF)),
    "-inf then lowest": (filled(INF), filled(LOWEST)),
    "-1e4 then lowest": (filled(-1e4), filled(LOWEST)),
    "lowest then -1e4": (filled(LOWEST), filled(-1e4)),
    "-1e9 twice, added": (added(-1e9), added(-1e9)),
    "lowest twice, added": (added(LOWEST), added(LOWEST)),
    "lowest added, -inf filled": (added(LOWEST), filled(INF)),
    "-1e9 filled, -1e9 added": (filled(-1e9), added(-1e9)),
}


@pytest.mark.parametrize("how", PAIRS)
def test_two_fills(how: str) -> None:
    """Applies the selection first and causality second: a row that selects nothing averages over its causal keys."""
    full, empty = (selection_leaves(empty=empty) for empty in (False, True))
    for leaves in (full, empty):  # one row selects future keys only
        leaves["ranges"][:, 1] = torch.tensor([9, 12])
    first, second = PAIRS[how]

    def program(p: Leaves) -> Any:
        def both(scores: Tensor, mask: Tensor) -> Tensor:
            return second(first(scores, mask), _causal(p, mask))

        return laws.attention(p, fill=both)

    check(program, full, others=[empty], named=["selection"], tolerance=1e-7)
    call = laws.in_one_graph(program, Compiled())
    for leaves in (full, empty):
        assert _leak(program, leaves) == _leak(call, leaves)


def _leak(call: Callable[[Leaves], Any], leaves: Leaves) -> list[bool]:
    """Returns for each query whether its output depends on values of later keys."""
    S, T = leaves["q"].shape[1], leaves["k"].shape[1]
    base = observe(call, leaves, "no_grad").outputs[0]
    seen = []
    for s in range(S - 1):
        later = {k: t.clone() for k, t in leaves.items()}
        later["v"][:, s + 1 + T - S :] += 1.0
        seen.append(laws.apart(observe(call, later, "no_grad").outputs[0][:, s], base[:, s]) > 0)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["filled", "added"])
def test_the_lowest_number_of_a_narrow_dtype(how: str, dtype: torch.dtype) -> None:
    fill = {"filled": filled, "added": added}[how](torch.finfo(dtype).min)
    leaves = selection_leaves(empty=True, dtype=dtype)
    check(lambda p: laws.attention(p, fill=fill), leaves, named=["selection"])


def test_sdpa_gives_zero_in_rows_without_keys() -> None:
    check(sdpa, selection_leaves(empty=True), routed={"selection_attention": 1})


# --- constants in masks -------------------------------------------------------------------------------------


def _pair(p: Leaves) -> tuple[Tensor, Tensor]:
    t, x = torch.arange(p["k"].shape[1]), p["ranges"]
    each = (t >= x[..., 0:1]) & (t < x[..., 1:2])
    return each[..., 0, :], each[..., 1, :]


MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "half of the sum at least 1": lambda a, b: (a.float() + b.float()) * 0.5 >= 1,
    "half of the sum at least a half": lambda a, b: (a.float() + b.float()) * 0.5 >= 0.5,
    "half of the sum above a half": lambda a, b: (a.float() + b.float()) * 0.5 > 0.5,
    "the mean at least 1": lambda a, b: torch.stack([a, b]).float().mean(0) >= 1,
    "the mean above 0": lambda a, b: torch.stack([a, b]).float().mean(0) > 0,
    "three fifths of the sum at least 1": lambda a, b: a.float() * 0.6 + b.float() * 0.6 >= 1,
    "a third at least a half": lambda a, b: (a.float() + b.float()) / 3 >= 0.5,
    "twice one and another above 1": lambda a, b: a.int() * 2 + b.int() > 1,
    "above one and a half": lambda a, b: a.int() + b.int() > 1.5,
    "at least 2": lambda a, b: a.int() + b.int() >= 2,
    "equal to 1": lambda a, b: a.int() + b.int() == 1,
    "half, truncated": lambda a, b: ((a.float() + b.float()) * 0.5).int().bool(),
    "nine tenths, truncated": lambda a, b: (torch.logical_or(a, b).float() * 0.9).long() > 0,
    "half, rounded down": lambda a, b: ((a.float() + b.float()) * 0.5).floor() > 0,
    "integer division": lambda a, b: (a.int() + b.int()) // 2 > 0,
    "truncated to int8": lambda a, b: ((a | b).int() * 256).to(torch.int8) > 0,
    "product with a half": lambda a, b: (a.float() * 0.5) * (b.float() * 0.5) > 0.2,
    "difference above 0": lambda a, b: a.float() - b.float() > 0,
    "negative factor": lambda a, b: -(a.float() + b.float()) < 0,
    "negative factor, below -1": lambda a, b: -(a.float() + b.float()) < -1,
    "not equal to 2": lambda a, b: (a.int() + b.int()) != 2,
    "below a tenth": lambda a, b: (a.float() + b.float()) < 0.1,
    "xor": lambda a, b: a ^ b,
}


@pytest.mark.parametrize("how", MASKS)
def test_constants_of_a_mask_matter(how: str) -> None:
    leaves = selection_leaves()
    # The ranges overlap in part, so that "or", "and" and "xor" differ.
    position = torch.arange(6).view(1, -1, 1) + 6
    leaves["ranges"][..., 0, 0], leaves["ranges"][..., 0, 1] = position - 5, position + 1
    leaves["ranges"][..., 1, 0], leaves["ranges"][..., 1, 1] = position - 3, position - 1
    check(lambda p: sdpa(p, lambda p: MASKS[how](*_pair(p))), leaves, named=["selection"])


COMPARED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "half a step": lambda t, x: (t + 0.5 >= x[..., 0:1]) & (t + 0.5 < x[..., 1:2]),
    "fractions": lambda t, x: (t * 0.5 >= x[..., 0:1] * 0.5 + 0.25) & (t < x[..., 1:2]),
    "a factor on one side": lambda t, x: (t * 2 >= x[..., 0:1]) & (t < x[..., 1:2]),
    "above minus a half": lambda t, x: (t > x[..., 0:1] - 0.5) & (t < x[..., 1:2]),
    "negative factor": lambda t, x: (-t <= -x[..., 0:1]) & (t < x[..., 1:2]),
    "truncated start": lambda t, x: (t >= (x[..., 0:1] * 0.5).int() * 2) & (t < x[..., 1:2]),
    "truncated towards 0": lambda t, x: (t >= ((x[..., 0:1] - 3) / 2).int()) & (t < x[..., 1:2]),
    "bytes": lambda t, x: (t >= (x[..., 0:1] * 100).to(torch.int8)) & (t < x[..., 1:2]),
    "as floats": lambda t, x: (t.float() >= x[..., 0:1].float()) & (t.float() < x[..., 1:2].float()),
}


@pytest.mark.parametrize("how", COMPARED)
def test_constants_of_a_comparison_matter(how: str) -> None:
    mask = lambda p: COMPARED[how](torch.arange(p["k"].shape[1]), p["ranges"]).any(-2)  # noqa: E731
    check(lambda p: sdpa(p, mask), selection_leaves(), named=["selection"])


RAISING: dict[str, Callable[[Tensor], Tensor]] = {
    "scatter": lambda x: torch.zeros(*x.shape[:3], 12, dtype=torch.bool).scatter(-1, x, True),
    "scatter_add": lambda x: torch.zeros(*x.shape[:3], 12).scatter_add(-1, x, torch.ones(x.shape)) > 0,
    "gather": lambda x: torch.arange(12).expand(2, 6, 2, 12).gather(-1, x).unsqueeze(-1).eq(torch.arange(12)).any(-2),
    "index": lambda x: torch.eye(12, dtype=torch.bool)[x].any(-2),
    "one_hot": lambda x: F.one_hot(x, 12).bool().any(-2),
    "one_hot of a sum": lambda x: F.one_hot(x + 1, 13)[..., 1:].bool().any(-2),
    "scatter of a sum": lambda x: torch.zeros(*x.shape[:3], 13, dtype=torch.bool).scatter(-1, x + 1, True)[..., 1:],
    "index of a sum": lambda x: torch.eye(13, dtype=torch.bool)[x + 1][..., 1:].any(-2),
    "embedding": lambda x: F.embedding(x, torch.eye(12)).bool().any(-2),
}


@pytest.mark.parametrize("how", RAISING)
def test_an_index_out_of_range_raises_as_in_eager(how: str) -> None:
    """Of 12 keys, 12 is past the end, -13 before the start, and -1 negative."""
    leaves = selection_leaves()
    leaves["ranges"] = leaves["ranges"][..., 0].clone()
    program = lambda p: sdpa(p, lambda p: RAISING[how](p["ranges"]))  # noqa: E731
    check(program, leaves, named=["selection"])
    calls = [program, *(laws.in_one_graph(program, Compiled(routes=routes)) for routes in (True, False))]
    for index in (12, -13, -1):
        leaves["ranges"][0, 0, 0, 0] = index
        want, got, plain = (observe(call, leaves, "no_grad") for call in calls)
        assert bool(got.error) == bool(want.error) or bool(got.error) == bool(plain.error), (got.error, want.error)
        if not want.error and not got.error:
            assert laws.apart(got.outputs[0], want.outputs[0]) < 1e-9


# --- sizes --------------------------------------------------------------------------------------------------


class _OfOneWidth(GatedNorm):
    """Takes the width as fixed."""

    def match(self, view: View, node: fx.Node) -> Match:
        width = view.values.of(node).shape[-1]
        if width.symbols:
            raise DynamicWidth(width)
        return super().match(view, node)


def test_another_size_than_the_one_that_was_taken_as_fixed_is_routed_anew() -> None:
    compiled = Compiled(autograd=False)
    interface.register(_OfOneWidth)
    torch._dynamo.reset()
    try:
        call = torch.compile(norm_formula, backend=compiled.backend, dynamic=True)
        for width in (16, 24):
            x, w, gate = normal(6, width, seed=1), normal(width, seed=2), normal(6, width, seed=3)
            assert laws.apart(call(x, w, gate, 1e-6), norm_formula(x, w, gate, 1e-6)) < 1e-9
    finally:
        interface.unregister(_OfOneWidth.name)
    assert [one.op for one in compiled.report.routed] == ["gated_norm"] * 2


# --- other cases --------------------------------------------------------------------------------------------


@laws.law_of(selection_leaves, named=["selection"])
def test_the_mask_used_as_a_number_too(p: Leaves) -> Any:
    mask = laws.selected(p)
    return sdpa(p, lambda _: mask) * laws.heads(mask, p).sum(-1).transpose(1, 2).unsqueeze(-1)


def test_scores_too_large_for_the_sums() -> None:
    leaves = selection_leaves(dtype=torch.float32)
    leaves["q"], leaves["v"] = leaves["q"] * 1e19, normal(2, 12, 2, 6, seed=8, scale=1e30, dtype=torch.float32)
    check(sdpa, leaves, named=["selection"], modes=["no_grad"])
