# SPDX-License-Identifier: Apache-2.0
"""Routing an E79 loop keeps hooks, requires_grad, None gradients and shared memory as in eager."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from mhc_inductor.report import Report
from mhc_inductor.routing import route
from tests.formulas.spellings_e79 import AXES, Settings, plain
from tests.tools.capture import ops_of, tensors

T, B, N = 3, 2, 5
LOOP = plain(Settings(bias="none"))
NORM = AXES["norm"]["method"]


@dataclasses.dataclass
class Ran:
    """The results of one call, and what its caller can observe of autograd and memory."""

    outputs: list[Tensor]
    grads: list[Tensor | None]
    shared: set[tuple[int, int]]
    """Pairs that share a storage; indices count the outputs, then the inputs."""
    report: Report = dataclasses.field(default_factory=Report)
    ops: Counter[str] = dataclasses.field(default_factory=Counter)


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _call(fn: Callable[..., Any], given: Sequence[Tensor], trained: Sequence[bool]) -> Ran:
    leaves = [t.clone().requires_grad_(flag) for t, flag in zip(given, trained, strict=True)]
    outputs = tensors(fn(*leaves))
    every = [*outputs, *leaves]
    keys = [t.untyped_storage()._cdata for t in every]
    same = {(i, j) for i, j in itertools.combinations(range(len(every)), 2) if keys[i] == keys[j]}
    live = [o for o in outputs if o.requires_grad]
    wanted = [t for t in leaves if t.requires_grad]
    ups = [_numbers(*o.shape, seed=k) for k, o in enumerate(live)]
    grads = torch.autograd.grad(live, wanted, ups, allow_unused=True) if live and wanted else ()
    return Ran(outputs, list(grads), same)


def _routed(fn: Callable[..., Any], given: Sequence[Tensor], trained: Sequence[bool], compiled: bool) -> Ran:
    report, ops = Report(), Counter[str]()

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        report.extend(route(gm))
        ops.update(ops_of(gm))
        return gm.forward

    torch._dynamo.reset()
    got = _call(torch.compile(fn, backend="mhc_inductor" if compiled else backend), given, trained)
    return dataclasses.replace(got, report=report, ops=ops)


def assert_like_eager(
    fn: Callable[..., Any], *given: Tensor, trained: Sequence[bool] | None = None, compiled: bool = False
) -> Ran:
    """Asserts that the routed graph's outputs, gradients (and Nones), requires_grad and shared memory are eager's."""
    flags = [True] * len(given) if trained is None else list(trained)
    want, got = _call(fn, given, flags), _routed(fn, given, flags, compiled)
    reasons = "; ".join([m.reason for m in got.report.near_misses] + got.report.problems)
    assert [o.requires_grad for o in got.outputs] == [o.requires_grad for o in want.outputs], reasons
    assert [g is None for g in got.grads] == [g is None for g in want.grads], reasons
    assert got.shared == want.shared, reasons
    pairs = [*zip(got.outputs, want.outputs, strict=True), *zip(got.grads, want.grads, strict=True)]
    for a, b in pairs:
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert not got.report.problems, reasons
    return got


def _reasons(got: Ran) -> str:
    return "; ".join(m.reason for m in got.report.near_misses)


def _step(S: Tensor, M: Tensor, k: Tensor, v: Tensor, q: Tensor, m: Tensor, **bias: Any) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = LOOP.part("step")(
        LOOP, 0, S, M, NORM(k), v, q, NORM(m), bias.get("b_s"), bias.get("b_m")
    )
    return result


def _packed(S: Tensor, M: Tensor, kvqm: Tensor) -> tuple[Tensor, ...]:
    k, v, q, m = kvqm.chunk(4, -1)
    return _step(S, M, k, v, q, m)


def _kvqm(steps: int = T) -> Tensor:
    return _numbers(steps, B, 4 * N, seed=3)


def _state(seed: int) -> Tensor:
    return _numbers(B, N, N, seed=seed)


# --- hooks ---------------------------------------------------------------------------------------------------


def _clip(g: Tensor) -> Tensor:
    return g.clamp(-0.01, 0.01)


RETURNS: dict[str, Callable[[list[Tensor], Tensor, Tensor], Any]] = {
    "outs": lambda outs, S, M: torch.stack(outs),
    "S": lambda outs, S, M: S,
    "M": lambda outs, S, M: M,
    "all": lambda outs, S, M: (torch.stack(outs), S, M),
}


def _hooked(what: str, where: Sequence[int], returned: str, late: bool = False) -> Callable[..., Any]:
    def fn(kvqm: Tensor, S: Tensor, M: Tensor) -> Any:
        outs, seen = [], []
        for t in range(T):
            S, M, out = _packed(S, M, kvqm[t])
            outs.append(out)
            if t in where:
                seen.append({"S": S, "M": M, "out": out}[what])
                if not late:
                    seen[-1].register_hook(_clip)
        result = RETURNS[returned](outs, S, M)
        for tensor in seen if late else ():
            tensor.register_hook(_clip)
        return result

    return fn


@pytest.mark.parametrize("returned", RETURNS)
@pytest.mark.parametrize("where", [(0,), (1,), (T - 1,), tuple(range(T))], ids=str)
@pytest.mark.parametrize("what", ["S", "M", "out"])
def test_a_hook_sees_the_whole_gradient(what: str, where: Sequence[int], returned: str) -> None:
    for late in (False, True):
        assert_like_eager(_hooked(what, where, returned, late), _kvqm(), _state(1), _state(2))


def test_a_hooked_state_that_its_own_step_reads_is_left_alone_and_named() -> None:
    """Hooks S' of a step, which that step's M' and output read: the hook sees their gradients too."""
    got = assert_like_eager(_hooked("S", (1,), "all"), _kvqm(), _state(1), _state(2))
    assert got.ops == {"e79_scan": 2}, "the steps before and after the hook are scans"
    # Before 2.13 Dynamo represents the hook as a call that returns another tensor, so only its readers belong to the step.
    apart = "nothing is p = sigmoid(S' m^ + b_m)"
    expected = "S' of a step has a hook, and the step's M' or output reads S' too: the hook would miss their gradients"
    assert (apart if torch.__version__ < (2, 13) else expected) in _reasons(got)


def test_hooks_on_what_only_the_outside_reads_stay_on_the_results() -> None:
    for what, returned in (("M", "all"), ("out", "all"), ("S", "S")):
        got = assert_like_eager(_hooked(what, (T - 1,), returned), _kvqm(), _state(1), _state(2))
        assert got.ops == {"e79_scan": 1} and not got.report.near_misses, _reasons(got)


def test_a_hook_between_two_steps_on_M_makes_two_scans() -> None:
    got = assert_like_eager(_hooked("M", (1,), "all"), _kvqm(), _state(1), _state(2))
    assert got.ops == {"e79_scan": 2}, _reasons(got)


@pytest.mark.parametrize("what", ["unit", "delta", "piece", "stack", "vector"])
def test_hooks_on_other_values_of_a_loop(what: str) -> None:
    def fn(kvqm: Tensor, S: Tensor, M: Tensor) -> Any:
        outs = []
        for t in range(T):
            k, v, q, m = kvqm[t].chunk(4, -1)
            u, w = NORM(k), NORM(m)
            d = v - torch.einsum("bij,bj->bi", S, u)
            r, c = torch.sigmoid(torch.einsum("bij,bj->bi", M, u)), torch.sigmoid(torch.einsum("bji,bj->bi", M, u))
            S = r[:, :, None] * S * c[:, None] + d[:, :, None] * u[:, None]
            p, w_ = torch.sigmoid(torch.einsum("bij,bj->bi", S, w)), torch.sigmoid(torch.einsum("bji,bj->bi", S, w))
            M = p[:, :, None] * M * w_[:, None] + (d - torch.einsum("bij,bj->bi", M, w))[:, :, None] * w[:, None]
            y = torch.einsum("bij,bj->bi", S, q)
            outs.append((y * torch.nn.functional.silu(y)).unsqueeze(0))
            if t == 1:
                {"unit": u, "delta": d, "piece": outs[-1], "vector": v}.get(what, S * 2.0).register_hook(_clip)
        result = torch.cat(outs)
        if what == "stack":
            result.register_hook(_clip)
        return result, S, M

    assert_like_eager(fn, _kvqm(), _state(1), _state(2))


@pytest.mark.parametrize("what, returned", [("S", "S"), ("S", "outs"), ("M", "S"), ("out", "all")])
def test_hooked_loops_compile(what: str, returned: str) -> None:
    assert_like_eager(_hooked(what, (T - 1,), returned), _kvqm(), _state(1), _state(2), compiled=True)


# --- requires_grad, and which gradients are None ------------------------------------------------------------

PARTS = ("k", "v", "q", "m", "b_s", "b_m", "S", "M")
SHAPES = ((T, B, N),) * 4 + ((N,), (N,), (B, N, N), (B, N, N))


def _apart(steps: int, results: Sequence[str]) -> Callable[..., Any]:
    def fn(k: Tensor, v: Tensor, q: Tensor, m: Tensor, b_s: Tensor, b_m: Tensor, S: Tensor, M: Tensor) -> Any:
        outs = []
        for t in range(steps):
            S, M, out = _step(S, M, k[t], v[t], q[t], m[t], b_s=b_s, b_m=b_m)
            outs.append(out)
        made = {"outs": torch.stack(outs), "S": S, "M": M, "first": outs[0], "last": outs[-1], "none": k.sum()}
        return [made[name] for name in results]

    return fn


RESULTS = [("outs",), ("S",), ("M",), ("outs", "S", "M"), ("first", "last"), ("first", "M")]


@pytest.mark.parametrize("results", RESULTS, ids="+".join)
@pytest.mark.parametrize("part", [*PARTS, "all", "none"])
def test_outputs_require_grad_where_those_of_eager_do(part: str, results: Sequence[str]) -> None:
    given = [_numbers(*shape, seed=k) for k, shape in enumerate(SHAPES)]
    trained = [part in (name, "all") for name in PARTS]
    for steps in (1, T):
        got = assert_like_eager(_apart(steps, results), *given, trained=trained)
        assert got.ops == {"e79_scan": 1}, f"{steps} steps: {_reasons(got)}"


@pytest.mark.parametrize("results", RESULTS, ids="+".join)
def test_steps_that_no_result_needs_get_no_gradient(results: Sequence[str]) -> None:
    """Makes each step's vectors separate leaves: those that no result needs have None gradients, not zeros."""

    def loose(b_s: Tensor, b_m: Tensor, S: Tensor, M: Tensor, *rows: Tensor) -> Any:
        k, v, q, m = (rows[r * T : r * T + T] for r in range(4))
        outs = []
        for t in range(T):
            S, M, out = _step(S, M, k[t], v[t], q[t], m[t], b_s=b_s, b_m=b_m)
            outs.append(out)
        made = {"outs": torch.stack(outs), "S": S, "M": M, "first": outs[0], "last": outs[-1]}
        return [made[name] for name in results]

    rows = [_numbers(B, N, seed=10 + k) for k in range(4 * T)]
    got = assert_like_eager(loose, _numbers(N, seed=1), _numbers(N, seed=2), _state(3), _state(4), *rows)
    assert got.ops == {"e79_scan": 1}, _reasons(got)


def test_what_is_detached_afterwards_asks_for_no_gradient() -> None:
    def fn(k: Tensor, v: Tensor, q: Tensor, m: Tensor, S: Tensor, M: Tensor) -> Any:
        outs = []
        for t in range(T):
            S, M, out = _step(S, M, k[t], v[t], q[t], m[t])
            outs.append(out)
        return torch.stack(outs).detach(), S, M.detach()

    given = [_numbers(*shape, seed=k) for k, shape in enumerate(SHAPES[:4] + SHAPES[6:])]
    got = assert_like_eager(fn, *given)
    assert got.ops == {"e79_scan": 1}, _reasons(got)


@pytest.mark.parametrize("compiled", [False, True])
def test_truncated_backpropagation_with_one_part_trained(compiled: bool) -> None:
    """Starts the second chunk from states that did not require grad: its backward may not enter the first."""

    def chunk(x: Tensor, k: Tensor, v: Tensor, m: Tensor, W: Tensor, S: Tensor, M: Tensor) -> Any:
        outs = []
        for t in range(2):
            S, M, out = _step(S, M, k[t], v[t], x[t] @ W.T, m[t])
            outs.append(out)
        return torch.stack(outs), S, M

    x, k, v, m = (_numbers(2, B, N, seed=s) for s in range(4))

    def train(fn: Callable[..., Any]) -> Tensor:
        W = _numbers(N, N, seed=7).requires_grad_()
        S, M = _state(5), _state(6)
        for _ in range(2):
            out, S, M = fn(x, k, v, m, W, S, M)
            assert not S.requires_grad and not M.requires_grad
            out.sum().backward()
        assert W.grad is not None
        return W.grad

    torch._dynamo.reset()

    def backend(gm: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        assert [r.op for r in route(gm).routed] == ["e79_scan"]
        return gm.forward

    got = train(torch.compile(chunk, backend="mhc_inductor" if compiled else backend))
    torch.testing.assert_close(got, train(chunk), atol=1e-5, rtol=1e-4)


# --- memory ------------------------------------------------------------------------------------------------------


def _loop(kvqm: Tensor, S: Tensor, M: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    outs = []
    for t in range(T):
        S, M, out = _packed(S, M, kvqm[t])
        outs.append(out)
    return outs, S, M


ALIASES: dict[str, Callable[[list[Tensor], Tensor, Tensor], Any]] = {
    "stack and last": lambda outs, S, M: (torch.stack(outs), outs[-1], S),
    "each": lambda outs, S, M: (*outs, S, M),
    "two stacks": lambda outs, S, M: (torch.stack(outs), torch.stack(outs), torch.stack(outs, 1)),
    "cat and stack": lambda outs, S, M: (torch.cat(outs), torch.stack(outs)),
    "stack of views": lambda outs, S, M: (torch.stack([o[:, :2] for o in outs]), torch.stack(outs)),
    "stack of all of a view": lambda outs, S, M: (torch.stack([o[:, :] for o in outs]), torch.stack(outs)),
    "views": lambda outs, S, M: (outs[-1], outs[-1].view(-1), S, S.mT, torch.stack(outs)),
    "twice": lambda outs, S, M: (S, S, outs[0], outs[0]),
    "written last": lambda outs, S, M: (torch.stack(outs), outs[-1].mul_(2.0), outs[1] * 1.0),
    "written stack": lambda outs, S, M: (torch.stack(outs).mul_(2.0), outs[-1] * 1.0),
    "written view": lambda outs, S, M: (torch.stack(outs), outs[0][0].zero_(), outs[0] * 2.0),
}


@pytest.mark.parametrize("name", ALIASES)
def test_results_share_memory_where_those_of_eager_do(name: str) -> None:
    def fn(kvqm: Tensor, S: Tensor, M: Tensor) -> Any:
        return ALIASES[name](*_loop(kvqm, S, M))

    given = _kvqm(), _state(1), _state(2)
    for trained in (True, False):
        got = assert_like_eager(fn, *given, trained=[trained] * 3)
        assert got.ops == {"e79_scan": 1}, _reasons(got)


def _twice(kvqm: Tensor, S: Tensor, M: Tensor) -> Any:
    first, again = _loop(kvqm, S, M), _loop(kvqm, S, M)
    return torch.stack(first[0]), *first[1:], torch.stack(again[0]), *again[1:]


def _views(loops: int) -> Callable[..., Any]:
    def fn(kvqm: Tensor, S: Tensor, M: Tensor) -> Any:
        return [(torch.stack(outs)[1:], S.mT, S[0], M) for outs, S, M in (_loop(kvqm, S, M) for _ in range(loops))]

    return fn


def _only_views(kvqm: Tensor, S: Tensor, M: Tensor) -> Any:
    return [(torch.stack(outs)[1:], S.mT, M[:1]) for outs, S, M in (_loop(kvqm, S, M) for _ in range(4))]


EQUAL = {
    "two equal loops": _twice,
    "views of two equal loops": _views(2),
    "views of three equal loops": _views(3),
    "only views of four equal loops": _only_views,
}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("name", ["stack and last", *EQUAL])
def test_compiled_results_share_memory_where_those_of_eager_do(name: str, trained: bool) -> None:
    def fn(kvqm: Tensor, S: Tensor, M: Tensor) -> Any:
        return EQUAL[name](kvqm, S, M) if name in EQUAL else ALIASES[name](*_loop(kvqm, S, M))

    assert_like_eager(fn, _kvqm(), _state(1), _state(2), trained=[trained] * 3, compiled=True)


def test_a_buffer_whose_pieces_change_after_they_were_put_in_keeps_the_old_ones() -> None:
    def fn(kvqm: Tensor, S: Tensor, M: Tensor) -> Any:
        buffer = kvqm.new_zeros(T, B, N)
        for t in range(T):
            S, M, out = _packed(S, M, kvqm[t])
            buffer[t] = out
            out.mul_(3.0)
        return buffer, S

    assert_like_eager(fn, _kvqm(), _state(1), _state(2), trained=[False] * 3)


@pytest.mark.parametrize("where", [0, T - 1, "all"])
def test_a_buffer_filled_without_gradients_has_none(where: int | str) -> None:
    def fn(kvqm: Tensor, S: Tensor, M: Tensor) -> Any:
        buffer = kvqm.new_zeros(T, B, N)
        for t in range(T):
            S, M, out = _packed(S, M, kvqm[t])
            if where in (t, "all"):
                with torch.no_grad():
                    buffer[t] = out
            else:
                buffer[t] = out
        return buffer, S

    assert_like_eager(fn, _kvqm(), _state(1), _state(2))


# --- near misses -------------------------------------------------------------------------------------------------


def _same(t: Tensor) -> Tensor:
    return t


def _rounded(t: Tensor) -> Tensor:
    return t.bfloat16().float()


Change = Callable[[Tensor], Tensor]


def _cell(
    keep: Change = _same,
    write: Change = _same,
    gate: Change = torch.sigmoid,
    above: Change = _same,
    below: Change = _same,
    value: Change = _same,
) -> Callable[..., Any]:
    """Returns the loop with changed values.

    The changes apply to the gated states (``keep``), outer products (``write``), gates, k and m outside (``above``) and
    inside (``below``) their norms, and v (``value``).
    """

    def fn(kvqm: Tensor, S: Tensor, M: Tensor) -> Any:
        outs = []
        for t in range(T):
            k, v, q, m = kvqm[t].chunk(4, -1)
            k, m = (above(u) / (below(u).norm(dim=-1, keepdim=True) + 1e-6) for u in (k, m))
            delta = value(v) - torch.einsum("bij,bj->bi", S, k)
            r, c = gate(torch.einsum("bij,bj->bi", M, k)), gate(torch.einsum("bij,bi->bj", M, k))
            S = keep(r[..., None] * S * c[..., None, :]) + write(delta[..., None] * k[..., None, :])
            g = delta - torch.einsum("bij,bj->bi", M, m)
            r, c = gate(torch.einsum("bij,bj->bi", S, m)), gate(torch.einsum("bij,bi->bj", S, m))
            M = keep(r[..., None] * M * c[..., None, :]) + write(g[..., None] * m[..., None, :])
            y = torch.einsum("bij,bj->bi", S, q)
            outs.append(y * torch.nn.functional.silu(y))
        return torch.stack(outs), S, M

    return fn


STAYS = {
    "gated states rounded": (_cell(keep=_rounded), "nothing is S' = r S c + delta (x) k^"),
    "outer products rounded": (_cell(write=_rounded), "nothing is delta = v - S k^"),
    "tanh gates": (_cell(gate=torch.tanh), "nothing is r = sigmoid(M k^ + b_s)"),
    "hard gates": (_cell(gate=torch.nn.functional.hardsigmoid), "nothing is r = sigmoid(M k^ + b_s)"),
    "no gates": (_cell(gate=torch.ones_like), "nothing is r = sigmoid(M k^ + b_s)"),
    "k rounded, not in its norm": (_cell(above=_rounded), "k is rounded in one place of the step and not in another"),
    "k rounded in its norm only": (_cell(below=_rounded), "k is rounded in one place of the step and not in another"),
}


@pytest.mark.parametrize("name", STAYS)
def test_a_loop_that_stays_is_named(name: str) -> None:
    fn, reason = STAYS[name]
    got = assert_like_eager(fn, _kvqm(), _state(1), _state(2))
    assert not got.ops and reason in _reasons(got)


@pytest.mark.parametrize("change", [_same, _rounded])
def test_a_rounding_of_all_of_k_stays_the_models(change: Change) -> None:
    """Runs without gradients, which eager rounds twice, through both casts, and the op once."""
    got = assert_like_eager(_cell(above=change, below=change), _kvqm(), _state(1), _state(2), trained=[False] * 3)
    assert got.ops == {"e79_scan": 1} or "is rounded to torch.bfloat16" in _reasons(got)


def test_what_the_model_rounded_does_not_cancel() -> None:
    assert_like_eager(_cell(value=lambda v: v + v - _rounded(v)), _kvqm(), _state(1), _state(2))


def test_a_search_for_outputs_that_stops_is_named() -> None:
    def fn(kvqm: Tensor, S: Tensor, M: Tensor) -> Any:
        extra = []
        for t in range(T):
            S, M, out = _packed(S, M, kvqm[t])
            extra += [*((S * i).sum() for i in range(70)), out.sum()]
        return torch.stack(extra)

    assert "stopped after 64 operations" in _reasons(assert_like_eager(fn, _kvqm(), _state(1), _state(2)))
