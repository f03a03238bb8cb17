# SPDX-License-Identifier: Apache-2.0
"""Routing an E79 loop keeps hooks, requires_grad, None gradients and shared memory as in eager."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from mhc_inductor.routing import route
from tests.formulas import laws
from tests.formulas.laws import Compiled, Leaves, Places, check, differences, e79, hooked, loop, normal, observe
from tests.formulas.spellings_e79 import AXES, Settings, plain
from tests.test_laws_autograd import RETURNS

T, B, N = 3, 2, 5
SCAN, TRAIN = {"e79_scan": 1}, ("train",)
CLIP = hooked(lambda g: g.clamp(-0.01, 0.01))


def leaves(dtype: torch.dtype = torch.float64) -> Leaves:
    return laws.e79_leaves(n=N, dtype=dtype)


def through_inductor(program: Callable[[Leaves], Any], mode: str = "train") -> None:
    """Asserts that ``backend="mhc_inductor"`` changes nothing a user can observe."""
    torch._dynamo.reset()
    got = observe(torch.compile(lambda p: program(p), backend="mhc_inductor"), leaves(), mode)
    assert not differences(got, observe(program, leaves(), mode), 1e-9)


def near(found: Compiled) -> str:
    return "; ".join(miss.reason for miss in found.report.near_misses)


# --- hooks ---------------------------------------------------------------------------------------------------

RESULTS: dict[str, Callable[[list[Tensor], Tensor, Tensor], Any]] = {
    "outs": lambda outs, S, M: torch.stack(outs),
    "S": lambda outs, S, M: S,
    "M": lambda outs, S, M: M,
    "all": lambda outs, S, M: (torch.stack(outs), S, M),
}


def _hooked(what: str, where: Sequence[int], returned: str, late: bool = False) -> Callable[[Leaves], Any]:
    """Hooks S, M or the output of some steps where the step ends or, ``late``, after the loop."""
    own = {f"out{t}": f"{what}{t + (what != 'out')}" for t in where}

    def program(p: Leaves) -> Any:
        values: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[[Tensor], Tensor]:
            def apply(t: Tensor) -> Tensor:
                values[name] = t
                if name in own and not late:
                    CLIP(values[own[name]])
                return t

            return apply

        result = RESULTS[returned](*e79(p, {name: keep(name) for name in (*own, *own.values())}))
        for name in own.values() if late else ():
            CLIP(values[name])
        return result

    return program


@pytest.mark.parametrize("returned", RESULTS)
@pytest.mark.parametrize("where", [(0,), (1,), (T - 1,), tuple(range(T))], ids=str)
@pytest.mark.parametrize("what", ["S", "M", "out"])
def test_a_hook_sees_the_whole_gradient(what: str, where: Sequence[int], returned: str) -> None:
    for late in (False, True):
        check(_hooked(what, where, returned, late), leaves(), modes=TRAIN, steps=False)


def test_a_hooked_state_that_its_own_step_reads_is_left_alone_and_named() -> None:
    """Hooks S' of a step, which that step's M' and output read: the hook sees their gradients too."""
    got = check(_hooked("S", (1,), "all"), leaves(), modes=TRAIN, routed={"e79_scan": 2})
    # Before 2.13 Dynamo represents the hook as a call that returns another tensor, so only its readers belong to the step.
    apart = "nothing is p = sigmoid(S' m^ + b_m)"
    expected = "S' of a step has a hook, and the step's M' or output reads S' too: the hook would miss their gradients"
    assert (apart if torch.__version__ < (2, 13) else expected) in near(got)


@pytest.mark.parametrize("what, returned", [("M", "all"), ("out", "all"), ("S", "S")])
def test_hooks_on_what_only_the_outside_reads_stay_on_the_results(what: str, returned: str) -> None:
    assert not near(check(_hooked(what, (T - 1,), returned), leaves(), modes=TRAIN, routed=SCAN))


def test_a_hook_between_two_steps_on_M_makes_two_scans() -> None:
    check(_hooked("M", (1,), "all"), leaves(), modes=TRAIN, routed={"e79_scan": 2})


@pytest.mark.parametrize("what", ["piece", "stack", "copy of S"])
@laws.law_of(leaves, modes=TRAIN)
def test_hooks_on_other_values_of_a_loop(p: Leaves, what: str) -> Any:
    outs, S, M = e79(p, {"S2": lambda S: (CLIP(S * 2.0), S)[1]} if what == "copy of S" else {})
    pieces = [out.unsqueeze(0) for out in outs]
    result = torch.cat(pieces)
    for t in {"piece": pieces[1:2], "stack": [result]}.get(what, []):
        CLIP(t)
    return result, S, M


@pytest.mark.parametrize("what, returned", [("S", "S"), ("S", "outs"), ("M", "S"), ("out", "all")])
def test_hooked_loops_compile(what: str, returned: str) -> None:
    through_inductor(_hooked(what, (T - 1,), returned))


# --- requires_grad, and which gradients are None ------------------------------------------------------------

SHAPES = {**dict.fromkeys("kvqm", (T, B, N)), "b_s": (N,), "b_m": (N,), "S": (B, N, N), "M": (B, N, N)}


def _apart(steps: int, results: Sequence[str], bias: bool = True) -> Callable[[Leaves], Any]:
    """Returns a loop over k, v, q and m of their own, as tensors or, "k0" and so on, as one of each step."""
    spelling, norm = plain(Settings(bias="none")), AXES["norm"]["method"]

    def program(p: Leaves) -> Any:
        k, v, q, m = (p[name] if name in p else [p[f"{name}{t}"] for t in range(steps)] for name in "kvqm")
        S, M, outs, b = p["S"], p["M"], [], [p["b_s"], p["b_m"]] if bias else [None, None]
        for t in range(steps):
            S, M, out = spelling.part("step")(spelling, 0, S, M, norm(k[t]), v[t], q[t], norm(m[t]), *b)
            outs.append(out)
        made = {"outs": torch.stack(outs), "S": S, "M": M, "first": outs[0], "last": outs[-1]}
        made |= {"outs detached": made["outs"].detach(), "M detached": M.detach()}
        return [made[name] for name in results]

    return program


def _leaves_apart(each: bool = False) -> Leaves:
    made = {name: normal(*shape, seed=k) for k, (name, shape) in enumerate(SHAPES.items())}
    for name in "kvqm" if each else "":
        made |= {f"{name}{t}": row.clone() for t, row in enumerate(made.pop(name))}
    return made


WANTED = [("outs",), ("S",), ("M",), ("outs", "S", "M"), ("first", "last"), ("first", "M")]


@pytest.mark.parametrize("results", WANTED, ids="+".join)
@pytest.mark.parametrize("part", [*SHAPES, "all", "none"])
def test_outputs_require_grad_where_those_of_eager_do(part: str, results: Sequence[str]) -> None:
    frozen = [name for name in SHAPES if part not in (name, "all")]
    for steps in (1, T):
        check(_apart(steps, results), _leaves_apart(), modes=TRAIN, steps=False, frozen=frozen, routed=SCAN)


@pytest.mark.parametrize("results", WANTED, ids="+".join)
def test_steps_that_no_result_needs_get_no_gradient(results: Sequence[str]) -> None:
    """Makes each step's vectors separate leaves: those that no result needs have None gradients, not zeros."""
    check(_apart(T, results), _leaves_apart(each=True), modes=TRAIN, steps=False, routed=SCAN)


def test_what_is_detached_afterwards_asks_for_no_gradient() -> None:
    program = _apart(T, ("outs detached", "S", "M detached"), bias=False)
    check(program, _leaves_apart(), modes=TRAIN, steps=False, routed=SCAN)


@pytest.mark.parametrize("compiled", [False, True])
def test_truncated_backpropagation_with_one_part_trained(compiled: bool) -> None:
    """Starts the second chunk from states that did not require grad: its backward may not enter the first."""
    fn, given = _apart(2, ("outs", "S", "M"), bias=False), _leaves_apart()

    def chunk(p: Leaves, W: Tensor) -> Any:
        return fn({**p, "q": p["q"] @ W.T})

    def backend(gm: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        assert [r.op for r in route(gm).routed] == ["e79_scan"]
        return gm.forward

    def train(call: Callable[..., Any]) -> Tensor:
        W, S, M = normal(N, N, seed=7).requires_grad_(), given["S"], given["M"]
        for _ in range(2):
            out, S, M = call({**given, "S": S, "M": M}, W)
            assert not S.requires_grad and not M.requires_grad
            out.sum().backward()
        assert W.grad is not None
        return W.grad

    torch._dynamo.reset()
    got = train(torch.compile(chunk, backend="mhc_inductor" if compiled else backend))
    torch.testing.assert_close(got, train(chunk), atol=1e-5, rtol=1e-4)


# --- memory ------------------------------------------------------------------------------------------------------


def _views(p: Leaves, loops: int) -> Any:
    return [(outs[1:], S.mT, S[0], M) for outs, S, M in (loop(p) for _ in range(loops))]


EQUAL: dict[str, Callable[[Leaves], Any]] = {
    "stack and last": lambda p: RETURNS["stack and last"](*e79(p)),
    "two equal loops": lambda p: (*loop(p), *loop(p)),
    "views of two equal loops": lambda p: _views(p, 2),
    "views of three equal loops": lambda p: _views(p, 3),
    "only views of four equal loops": lambda p: [(o[1:], S.mT, M[:1]) for o, S, M in (loop(p) for _ in range(4))],
}


@pytest.mark.parametrize("mode", ["train", "no_grad"])
@pytest.mark.parametrize("name", EQUAL)
def test_compiled_results_share_memory_where_those_of_eager_do(name: str, mode: str) -> None:
    through_inductor(EQUAL[name], mode)


def _buffered(p: Leaves, without_grad: Sequence[int] = (), change: Callable[[Tensor], Tensor] = lambda t: t) -> Any:
    """Puts the outputs into a buffer, some steps' without gradients, and changes each afterwards."""
    buffer = p["kvqm"].new_zeros(T, B, N)

    def put(t: int) -> Callable[[Tensor], Tensor]:
        def apply(out: Tensor) -> Tensor:
            with torch.no_grad() if t in without_grad else contextlib.nullcontext():
                buffer[t] = out
            return change(out)

        return apply

    return buffer, e79(p, {f"out{t}": put(t) for t in range(T)})[1]


def test_a_buffer_whose_pieces_change_after_they_were_put_in_keeps_the_old_ones() -> None:
    check(lambda p: _buffered(p, change=lambda out: out.mul_(3.0)), leaves(), modes=["no_grad"])


@pytest.mark.parametrize("where", [[0], [T - 1], range(T)], ids=["0", "2", "all"])
def test_a_buffer_filled_without_gradients_has_none(where: Sequence[int]) -> None:
    check(lambda p: _buffered(p, where), leaves(), modes=TRAIN)


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "[T, B, 4, n]": (lambda x: x.unflatten(-1, (4, -1)), lambda x: x.flatten(-2)),
    "[4, T, B, n]": (lambda x: x.unflatten(-1, (4, -1)).movedim(2, 0), lambda x: x.movedim(0, 2).flatten(-2)),
    "[T * B, 4 n]": (lambda x: x.flatten(0, 1), lambda x: x.unflatten(0, (T, -1))),
    "[B * T, 4 n]": (lambda x: x.transpose(0, 1).flatten(0, 1), lambda x: x.unflatten(0, (-1, T)).transpose(0, 1)),
    "[T, 1, 4 n]": (lambda x: x[:, :1], lambda x: x.expand(-1, 2, -1)),
    "[T, 4 n]": (lambda x: x[:, 0], lambda x: x[:, None].expand(-1, 2, -1)),
}
"""Layouts of an input, and its views [T, B, 4 n]."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_input_of_any_layout_is_read_where_it_lies(layout: str) -> None:
    stored, seen = LAYOUTS[layout]
    p = leaves(torch.float32)
    p["kvqm"] = stored(p["kvqm"].detach()).contiguous().requires_grad_()
    check(lambda p: loop(p, {"kvqm": seen}), p, modes=TRAIN, routed=SCAN)


# --- near misses -------------------------------------------------------------------------------------------------


def _rounded(t: Tensor) -> Tensor:
    return t.bfloat16().to(t.dtype)


STAYS: dict[str, tuple[Places, str]] = {
    "gated states rounded": ({"kept": _rounded}, "nothing is S' = r S c + delta (x) k^"),
    "outer products rounded": ({"written": _rounded}, "nothing is delta = v - S k^"),
    "tanh gates": ({"gate": torch.tanh}, "nothing is r = sigmoid(M k^ + b_s)"),
    "hard gates": ({"gate": torch.nn.functional.hardsigmoid}, "nothing is r = sigmoid(M k^ + b_s)"),
    "no gates": ({"gate": torch.ones_like}, "nothing is r = sigmoid(M k^ + b_s)"),
    "k rounded, not in its norm": ({"above": _rounded}, "k is rounded in one place of the step and not in another"),
    "k rounded in its norm only": ({"below": _rounded}, "k is rounded in one place of the step and not in another"),
}


@pytest.mark.parametrize("name", STAYS)
def test_a_loop_that_stays_is_named(name: str) -> None:
    at, reason = STAYS[name]
    assert reason in near(check(lambda p: loop(p, at), leaves(torch.float32), modes=TRAIN, routed={}))


@pytest.mark.parametrize("at", [{}, {"above": _rounded, "below": _rounded}], ids=["same", "rounded"])
def test_a_rounding_of_all_of_k_stays_the_models(at: Places) -> None:
    """Runs without gradients, which eager rounds twice, through both casts, and the op once."""
    got = check(lambda p: loop(p, at), leaves(torch.float32), modes=["no_grad"])
    assert got.ops == SCAN or "is rounded to torch.bfloat16" in near(got)


def test_what_the_model_rounded_does_not_cancel() -> None:
    at = {f"v{t}": lambda v: v + v - _rounded(v) for t in range(T)}
    check(lambda p: loop(p, at), leaves(torch.float32), modes=TRAIN)


def test_a_search_for_outputs_that_stops_is_named() -> None:
    def program(p: Leaves) -> Any:
        extra: list[Tensor] = []

        def more(S: Tensor) -> Tensor:
            extra.extend((S * i).sum() for i in range(70))
            return S

        outs, _, _ = e79(p, {f"S{t + 1}": more for t in range(T)})
        return torch.stack([*extra, *(out.sum() for out in outs)])

    assert "stopped after 64 operations" in near(check(program, leaves(), modes=TRAIN))
