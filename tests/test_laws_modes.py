# SPDX-License-Identifier: Apache-2.0
"""Law 2: grad, inference and autocast modes hold where they are set: around, inside and between parts of a formula."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.formulas import laws
from tests.formulas.laws import MHC, Leaves, block, changed, check, e79, e79_leaves, loop, mhc_leaves, post, pre, sdpa

MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "enable_grad": torch.enable_grad,
}


def under(mode: str, change: Callable[[Tensor], Tensor] = torch.tanh) -> Callable[[Tensor], Tensor]:
    """Returns a callback that makes a new tensor under a mode."""

    def apply(t: Tensor) -> Tensor:
        with MODES[mode]():
            return change(t)

    return apply


@pytest.mark.parametrize("place", ["phi", "alpha", "bias", "gamma"])
@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_made_under_a_mode(place: str, mode: str) -> None:
    """Makes one parameter in a mode, so that it may not take part in autograd."""
    changed("mhc", {place: under(mode)}, routed=MHC)


@pytest.mark.parametrize("place", ["phi", "alpha", "bias", "gamma"])
def test_a_parameter_made_without_grad_after_the_formula_began(place: str) -> None:
    """Makes the parameter after the norm factor: the op must be placed after it, in the region with grad."""

    def program(p: Leaves) -> Any:
        late: dict[str, Tensor] = {}

        def make(inv: Tensor) -> Tensor:
            with torch.no_grad():
                late[place] = torch.tanh(p[place])
            return inv

        return block(p["x"], p, {"inv": make, place: lambda t: late.get(place, t)})

    check(program, {k: t for k, t in mhc_leaves().items() if k != "gamma" or place == "gamma"}, named=["mhc"])


@laws.law_of(mhc_leaves, routed={"mhc_pre": 1})
def test_an_input_made_without_grad_between_norm_and_projection(p: Leaves) -> Any:
    x = p["x"]
    v = x.flatten(-2)
    inv = torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6)
    with torch.no_grad():
        bias = p["bias"].roll(1)
    z = (v @ p["phi"].t()) * inv
    h_pre = torch.sigmoid(p["alpha"][0] * z[..., :4] + bias[:4]) + 1e-6
    h_post = 2 * torch.sigmoid(p["alpha"][1] * z[..., 4:8] + bias[4:8])
    res = p["alpha"][2] * z[..., 8:] + bias[8:]
    return (h_pre.unsqueeze(-1) * x).sum(-2), h_post, res


COPIED = [
    *(("mhc", place) for place in laws.MHC_PLACES),
    *(("e79", place) for place in ["kvqm", "b_s", "b_m", "S0", "M0", "k1", "delta1", "S1", "M2", "S3", "out1"]),
    *(("selection", place) for place in ["q", "k", "v", "mask", "scores", "weights", "o"]),
]


@pytest.mark.parametrize(("family", "place"), COPIED)
def test_a_value_inside_a_formula_goes_through_no_grad(family: str, place: str) -> None:
    changed(family, {place: under("no_grad", lambda t: t & True if t.dtype == torch.bool else t * 1.0)})


@pytest.mark.parametrize("place", ["inv", "h_post", "res", "h_in", "f", "z", "v"])
def test_a_value_inside_a_block_is_detached(place: str) -> None:
    changed("mhc", {place: lambda t: t.detach()})


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_a_block_wholly_under_a_mode_between_others(mode: str) -> None:
    """Tests a teacher: one block without grad between two that train."""

    def program(p: Leaves) -> Any:
        t = block(p["x"], p)
        with getattr(torch, mode)():
            target = block(p["x"].flip(0), p) * 1.0
        return block(t, p), target.clone()

    # AOTAutograd itself fails on inference_mode inside a graph, and leaves the process unusable.
    check(program, mhc_leaves(), routed={"mhc_pre": 3, "mhc_post": 3}, autograd=mode == "no_grad")


@laws.law_of(mhc_leaves, named=["mhc"])
def test_pre_without_grad_and_post_with_it(p: Leaves) -> Any:
    with torch.no_grad():
        h_in, h_post, res = pre(p["x"], p)
    return post(p["x"], torch.tanh(h_in @ p["w"]), h_post, res)


@laws.law_of(mhc_leaves, routed={"mhc_pre": 2, "mhc_post": 2})
def test_enable_grad_inside_no_grad(p: Leaves) -> Any:
    with torch.no_grad():
        first = block(p["x"], p)
        with torch.enable_grad():
            second = block(p["x"].flip(0), p)
    return first, second


def test_a_mask_made_without_grad_is_routed() -> None:
    program = lambda p: sdpa(p, lambda p: torch.no_grad()(laws.selected)(p))  # noqa: E731
    check(program, laws.selection_leaves(), routed={"selection_attention": 1})


def _first_without_grad(steps: int) -> Callable[[Leaves], Any]:
    """Returns a program that runs the first steps of a loop without grad, and the rest with grad."""

    def program(p: Leaves) -> Any:
        with torch.no_grad():
            first, S, M = e79({**p, "kvqm": p["kvqm"][:steps]})
        outs, S, M = e79({**p, "kvqm": p["kvqm"][steps:], "S": S, "M": M})
        return torch.stack(first), torch.stack(outs), S, M

    return program


def test_a_loop_step_by_step_under_other_modes() -> None:
    check(_first_without_grad(2), e79_leaves(5), named=["e79"])


def test_a_step_without_grad_and_one_with_it() -> None:
    check(_first_without_grad(1), e79_leaves(2), named=["e79"], modes=["train"])


# --- autocast -----------------------------------------------------------------------------------------------

NARROW = 4e-2  # bf16 products that eager rounds at other places


def _autocast(enabled: bool = True) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


def _linear_block(net: nn.Module) -> Callable[[Leaves], Any]:
    def program(p: Leaves) -> Any:
        h_in, h_post, res = pre(p["x"], p)
        return post(p["x"], net(h_in), h_post, res)

    return program


@pytest.mark.parametrize("where", ["around", "inside", "both", "disabled inside"])
@pytest.mark.parametrize("linear", [False, True], ids=["matmul", "nn.Linear"])
def test_autocast_leaves_a_block_routed(where: str, linear: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    base = _linear_block(net) if linear else lambda p: block(p["x"], p)

    def inside(p: Leaves) -> Any:
        with _autocast(where != "disabled inside"):
            return base(p)

    around = contextlib.nullcontext if where == "inside" else _autocast
    program = base if where == "around" else inside
    tolerance = 2e-4 if where == "disabled inside" else NARROW
    check(program, mhc_leaves(dtype=torch.float32), routed=MHC, around=around, tolerance=tolerance)


@laws.law_of(lambda: mhc_leaves(dtype=torch.float32), routed=MHC, around=_autocast, tolerance=NARROW)
def test_autocast_disabled_around_the_coefficients_only(p: Leaves) -> Any:
    with _autocast(False):
        h_in, h_post, res = pre(p["x"], p)
    return post(p["x"], torch.tanh(h_in @ p["w"]), h_post, res)


def test_autocast_around_a_loop_and_an_attention() -> None:
    check(loop, e79_leaves(dtype=torch.float32), named=["e79"], around=_autocast, tolerance=NARROW)
    check(sdpa, laws.selection_leaves(dtype=torch.float32), named=["selection"], around=_autocast, tolerance=NARROW)


def test_no_grad_around_the_compiled_call() -> None:
    check(lambda p: block(p["x"], p), mhc_leaves(), routed=MHC, around=torch.no_grad)


@laws.law_of(mhc_leaves, routed={"mhc_pre": 2, "mhc_post": 2})
def test_grad_switched_off_by_a_call_in_the_graph(p: Leaves) -> Any:
    """Calls ``torch.set_grad_enabled`` as a statement, not as a context manager."""
    first = block(p["x"], p)
    torch.set_grad_enabled(False)
    second = block(first, p)
    torch.set_grad_enabled(True)
    return first, second
