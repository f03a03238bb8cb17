# SPDX-License-Identifier: Apache-2.0
"""A loop over time in plain Python becomes one E79 scan, however its steps are written, and no other loop does.

The graphs come from Dynamo and run without Inductor; a sample runs through all of ``backend="mhc_inductor"``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.scan import scan

import mhc_inductor
from mhc_inductor.report import Report
from mhc_inductor.routing import route
from tests.formulas.reference_models_e79 import DIM, REFERENCE_MODELS, STATE, CoupledCell
from tests.formulas.spellings_e79 import AXES, MUTATIONS, Loop, Settings, mutants, plain, singles, spellings
from tests.tools.capture import Captured, alike, difference, eager, looking, not_worse, reasons, run, through_inductor
from tests.tools.work import Work

CHUNK, RANDOM, SEED = 13, 65, 0
ONE = {"e79_scan": 1}
SCAN = "mhc_inductor.e79_scan"


def _exact(loop: Loop) -> Captured:
    """Runs the loop in fp64 on the same numbers."""
    grad = loop.settings.mode != "no_grad"
    wide = dataclasses.replace(loop, settings=dataclasses.replace(loop.settings, mode="train"))
    return eager(wide, [t.double() for t in loop.inputs()], (), grad)


def _run(loop: Loop, *, routed: bool = True, dynamo: bool = True) -> tuple[Captured, Captured]:
    given, grad = loop.inputs(), loop.settings.mode != "no_grad"
    options: Any = {"dynamic": None if loop.settings.symbolic else False, "symbolic": loop.batched, "dynamo": dynamo}
    return run(loop, given, (), grad, routed=routed, **options), eager(loop, given, (), grad)


def assert_one_scan(loop: Loop) -> None:
    got, unrouted = _run(loop)
    assert dict(got.ops) == ONE, f"{loop.name}: {reasons(got)}"
    (gm,) = got.graphs
    names = [str(getattr(node.target, "__name__", node.target)) for node in gm.graph.nodes]
    words = ("einsum", "matmul", "bmm", "sigmoid", "silu", "addcmul", "setitem")
    left = [name for name in names if any(word in name for word in words)]
    assert not left, f"{loop.name}: {left} of the loop are left"
    segment = got.nodes(SCAN)[0].args[5]
    assert (segment > 0) == (loop.settings.mode != "no_grad"), f"{loop.name}: segment {segment}"
    not_worse(loop.name, got, unrouted, _exact(loop))


SINGLES = singles()


@pytest.mark.parametrize("start", range(0, len(SINGLES), CHUNK))
def test_every_way_to_write_each_part_is_routed(start: int) -> None:
    for loop in SINGLES[start : start + CHUNK]:
        assert_one_scan(loop)


@pytest.mark.parametrize("start", (0, 5, 10))
def test_random_spellings_are_routed(start: int) -> None:
    """Tests one in five; tests/all_spellings.py tests all of them."""
    for loop in spellings(RANDOM, SEED)[start::15]:
        assert_one_scan(loop)


def test_the_random_spellings_hold_every_pick() -> None:
    loops = spellings(RANDOM, SEED)
    missing = [f"{a}.{p}" for a, parts in AXES.items() for p in parts if all(x.picks[a] != p for x in loops)]
    assert not missing


# --- what is not E79 ----------------------------------------------------------------------------------------

REASONS = {
    mutant: reason
    for reason, mutants in {
        "nothing is r = sigmoid(M k^ + b_s)": (
            "row gate of S transposed, r is softplus, gate has a temperature, m in a gate of S, "
            "S gated by itself, M decays S"
        ),
        "nothing is c = sigmoid(M.T k^ + b_s)": (
            "column gate of S not transposed, bias subtracted, a constant in a gate, bias of M in a gate of S, "
            "no column gate"
        ),
        "nothing is p = sigmoid(S' m^ + b_m)": (
            "row gate of M transposed, old S in the row gate of M, old S in both gates of M, g with k, old note's gate"
        ),
        "nothing is w = sigmoid(S'.T m^ + b_m)": (
            "column gate of M not transposed, old S in the column gate of M, w is tanh, k in a gate of M"
        ),
        "nothing is S' = r S c + delta (x) k^": (
            "gates of S change places, delta plus, delta negative, delta halved, r is doubled, write transposed, "
            "state transposed, write subtracted, write with m"
        ),
        "used outside the loop": "output from M",
        "not y * silu(y) with y = S' q": (
            "output from S transposed, output is silu, output is cubed, output is gelu, output is scaled, "
            "output gated by q"
        ),
        "nothing is g = delta - M m^": (
            "g without delta, g from v alone, g without M m, g with M transposed, g with S, g with S', g plus, "
            "delta without S k"
        ),
        "nothing is M' = p M w + g (x) m^": "g negative, M written with k",
        "nothing is delta = v - S k^": "delta from M, delta transposed, retrieved scaled",
        "nothing is k^ = k / (|k| + 1e-06)": (
            "k_normalised_by_F_normalize, k_with_another_eps, k_with_eps_under_the_root, k_with_eps_in_the_sum, "
            "k_with_the_mean_square, k_with_the_1_norm, k_not_normalised, k_with_the_norm_of_the_batch"
        ),
        "nothing is m^ = m / (|m| + 1e-06)": "m_not_normalised, m_without_eps",
    }.items()
    for mutant in mutants.split(", ")
}


@pytest.mark.parametrize("start", range(0, len(MUTATIONS), 6))
def test_a_mutant_is_not_routed_and_the_report_says_why(start: int) -> None:
    for loop in mutants()[start : start + 6]:
        got, unrouted = _run(loop, dynamo=False)
        assert not got.ops, f"{loop.name} is routed"
        assert REASONS[loop.mutant] in reasons(got), f"{loop.name}: {reasons(got)}"
        assert difference(got, unrouted) == 0.0, loop.name
        assert all(m.op == "e79_scan" and "spellings_e79.py" in m.source for m in got.report.near_misses)


@pytest.mark.parametrize("mutant", ["r is softplus", "g plus", "old S in both gates of M", "delta transposed"])
def test_one_odd_step_in_the_middle_ends_the_scan(mutant: str) -> None:
    """Checks that steps 0 and 1 are one scan, 3 and 4 another, step 2 stays, and the results are eager's."""
    loop = dataclasses.replace(plain(Settings(T=5)), mutant=mutant, where=2)
    got, unrouted = _run(loop)
    assert [node.args[0].meta["example_value"].shape[0] for node in got.nodes(SCAN)] == [2, 2]
    assert REASONS[mutant] in reasons(got)
    assert difference(got, unrouted) < 1e-5


# --- reference models in the style of other projects --------------------------------------------------------


def _reference_model(name: str, grad: bool, dtype: torch.dtype = torch.float32) -> tuple[Captured, Captured, Captured]:
    make, shape, _ = REFERENCE_MODELS[name]
    torch.manual_seed(0)
    module, x = make().to(dtype), torch.randn(shape).to(dtype)
    named = list(module.named_parameters())
    got, unrouted = run(module, (x,), named, grad), eager(module, (x,), named, grad)
    exact = module.double()
    return got, unrouted, eager(exact, (x.double(),), list(exact.named_parameters()), grad)


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", REFERENCE_MODELS)
def test_reference_models_are_routed_whole(name: str, grad: bool) -> None:
    got, unrouted, exact = _reference_model(name, grad)
    assert dict(got.ops) == {"e79_scan": REFERENCE_MODELS[name][2]}, reasons(got)
    assert len(got.graphs) == 1 and not got.report.near_misses
    assert not grad or all(g is not None and bool(g.any()) for g in got.grads.values()), "not missing on both sides"
    not_worse(name, got, unrouted, exact)


@pytest.mark.parametrize("name", ["fixed bias", "input bias", "layer", "batch first, fp32 inside"])
def test_reference_models_in_bf16(name: str) -> None:
    got, unrouted, exact = _reference_model(name, True, torch.bfloat16)
    assert dict(got.ops) == ONE, reasons(got)
    not_worse(name, got, unrouted, exact)


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("bias", ["none", "fixed", "input"])
def test_state_carried_from_call_to_call(bias: str, steps: int) -> None:
    torch.manual_seed(1)
    cell, x = CoupledCell(bias), torch.randn(steps, 2, DIM)
    state = [torch.randn(2, STATE, STATE) for _ in range(2)]
    (scan,) = alike(cell, (x, *state), cell.named_parameters()).nodes(SCAN)
    assert scan.args[3] is not None and scan.args[4] is not None


def test_a_projection_of_everything_goes_into_the_op_without_a_copy() -> None:
    loop = plain(Settings(final="none", bias="none"))
    got, _ = _run(loop)
    assert [node.op for node in got.graphs[0].graph.nodes if node.op.startswith("call_")] == ["call_function"] * 2
    assert got.nodes(SCAN)[0].args[0].op == "placeholder"
    assert got.nodes(SCAN)[0].args[3:5] == (None, None), "initial states of zeros are not handed over"


@pytest.mark.parametrize("slices", [*AXES["slices"]][:8])
def test_the_four_vectors_are_found_side_by_side(slices: str) -> None:
    got, _ = _run(plain(slices=slices))
    names = {str(getattr(n.target, "__name__", n.target)) for n in got.graphs[0].graph.nodes}
    assert not names & {"cat", "stack"}, f"{slices}: k, v, q and m are copied together: {names}"


def test_one_step_is_routed_for_decoding() -> None:
    cell = CoupledCell("fixed").eval()
    x, state = torch.randn(1, 3, DIM), [torch.randn(3, STATE, STATE) for _ in range(2)]
    assert alike(cell, (x, *state), ops=ONE, grad=False).nodes(SCAN)[0].args[5] == 0


# --- the loop's surroundings --------------------------------------------------------------------------------


def _cell(S: Tensor, M: Tensor, kvqm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    loop = plain(Settings(bias="none"))
    k, v, q, m = kvqm.chunk(4, -1)
    norm = AXES["norm"]["method"]
    return loop.part("step")(loop, 0, S, M, norm(k), v, q, norm(m), None, None)


def _states(kvqm: Tensor) -> tuple[Tensor, Tensor]:
    n = kvqm.shape[-1] // 4
    return kvqm.new_zeros(*kvqm.shape[:-1], n, n), kvqm.new_zeros(*kvqm.shape[:-1], n, n)


def _kvqm(steps: int = 4, batch: int = 2, n: int = 5) -> Tensor:
    return torch.randn(steps, batch, 4 * n, generator=torch.Generator().manual_seed(3))


def unrolled(kvqm: Tensor, steps: Any = None, after: Any = lambda t, S, M, out: (S, M), of: Any = lambda x: x) -> Any:
    """Runs the cell on ``of`` some steps; ``after`` may replace the states between two steps."""
    S, M = _states(of(kvqm[0]))
    outs = []
    for t in range(kvqm.shape[0]) if steps is None else steps:
        S, M, out = _cell(S, M, of(kvqm[t]))
        outs.append(out)
        S, M = after(t, S, M, out)
    return outs, S, M


def joined(kvqm: Tensor, steps: Iterable[int] | None = None, after: Any = lambda t, S, M, out: (S, M)) -> Any:
    outs, S, M = unrolled(kvqm, steps, after)
    return torch.stack(outs), S, M


def _backwards(kvqm: Tensor) -> Any:
    outs, S, M = unrolled(kvqm, reversed(range(4)))
    return torch.stack(outs[::-1]), S, M


def _two_loops(a: Tensor) -> Any:
    return torch.stack([*unrolled(a[:3])[0], *unrolled(a[3:])[0]])


def _checkpointed(kvqm: Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(lambda x: joined(x)[0], kvqm * 2.0, use_reentrant=False)


def _by_what_it_computes(kvqm: Tensor, gather: Callable[[list[Tensor]], Tensor] = torch.stack) -> Any:
    """Divides by the norms after the products, divides a state by 1 + exp(-z), and writes sigmoids as tanh."""
    S, M = _states(kvqm[0])
    outs = []
    for t in range(3):
        k, v, q, m = kvqm[t].chunk(4, -1)
        a, b = (1 / (u.norm(dim=-1, keepdim=True) + 1e-6) for u in (k, m))
        d = v - torch.einsum("...ij,...j->...i", S, k) * a
        z, c = torch.einsum("...ij,...j->...i", M, k) * a, torch.sigmoid(torch.einsum("...ij,...i->...j", M, k) * a)
        S = S / (1 + torch.exp(-z))[..., None] * c[..., None, :] + d[..., None] * (k * a)[..., None, :]
        p, w = (torch.tanh(torch.einsum(f"{e},...j->...i", S, m) * b / 2) for e in ("...ij", "...ji"))
        p, w = 0.5 + 0.5 * p, (1 + w) / 2
        g = d - torch.einsum("...ij,...j->...i", M, m * b)
        M = p[..., None] * M * w[..., None, :] + g[..., None] * (m * b)[..., None, :]
        y = torch.einsum("...ij,...j->...i", S, q)
        outs.append(y.square() / (1 + torch.exp(-y)))
    return gather(outs), S, M


def _gated(x: Tensor) -> Tensor:
    a, b = x[None].unbind()[0][:, :16].chunk(2, dim=1)
    return F.silu(input=a) * a * b


def _detached(t: int, S: Tensor, M: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    """Detaches the states inside the loop, as truncated backpropagation does."""
    return (S.detach(), M.detach()) if t == 2 else (S, M)


ROUTED: dict[str, tuple[Callable[[Tensor], Any], int, int]] = {
    "detached states": (functools.partial(joined, after=_detached), 6, 2),
    "backwards in time": (_backwards, 4, 1),
    **{
        f"steps {steps}": (functools.partial(joined, steps=steps), 5, 1)
        for steps in [(0, 2, 4), (1, 2, 3), (3, 1, 0, 2), (2, 2, 2)]
    },
    "two loops in one graph": (_two_loops, 7, 2),
    "in a checkpoint": (_checkpointed, 4, 1),
    "found by what it computes": (_by_what_it_computes, 3, 1),
    "without a batch": (lambda x: _by_what_it_computes(x[:, 0]), 3, 1),
    "arguments by name": (lambda x: torch.stack(tensors=[F.silu(o) for o in unrolled(x, of=_gated)[0]]), 3, 1),
    "q shared": (lambda x: _by_scan(x, None, *_states(x[0]), of=lambda u: (*u[:2], x[0, :, :5], u[3])), 3, 1),
    "one of several steps": (lambda x: unrolled(x.flatten(0, 1).tanh().unflatten(0, (3, -1)), (1,))[1], 3, 1),
}
"""Loops, the steps of their kvqm, and the scans that they become."""


@pytest.mark.parametrize("name", ROUTED)
def test_loops_that_are_routed(name: str) -> None:
    fn, steps, scans = ROUTED[name]
    alike(fn, (_kvqm(steps),), ops={"e79_scan": scans})


def test_outputs_side_by_side_along_one_of_two_batch_dimensions() -> None:
    for dim in (0, 1):
        fn = functools.partial(_by_what_it_computes, gather=functools.partial(torch.cat, dim=dim))
        alike(fn, (_kvqm(3, 6).unflatten(1, (2, 3)),), ops=ONE, symbolic=[dim + 1], dynamic=None)


def _states_kept(kvqm: Tensor, what: str) -> Any:
    kept = []
    outs, _, _ = unrolled(
        kvqm, after=lambda t, S, M, out: (kept.append({"S": S, "M": M, "both": S + M}[what]), (S, M))[1]
    )
    return torch.stack(kept), outs[-1]


def _without_grad(kvqm: Tensor) -> Any:
    S, M = _states(kvqm[0])
    for t in range(4):
        with torch.no_grad() if t == 2 else contextlib.nullcontext():
            S, M, out = _cell(S, M, kvqm[t])
    return S, M, out


def _input_changed(kvqm: Tensor) -> Any:
    kvqm = kvqm * 1.0
    return joined(kvqm, after=lambda t, S, M, out: (kvqm[3].mul_(2.0) if t == 1 else None, (S, M))[1])


FORBIDDEN: dict[str, tuple[Callable[[Tensor], Any], bool, str]] = {
    **{
        f"kept {what}": (functools.partial(_states_kept, what=what), True, "used outside the loop")
        for what in ("S", "M", "both")
    },
    "states that change places": (lambda k: joined(k, after=lambda t, S, M, out: (M, S)), True, "are swapped"),
    "an input changed in place": (_input_changed, False, "in place"),
    "a gradient stopped inside": (_without_grad, True, "gradients are switched"),
}
"""Loops that stay, whether they run with gradients, and the reason."""


@pytest.mark.parametrize("name", FORBIDDEN)
def test_loops_that_stay(name: str) -> None:
    fn, grad, reason = FORBIDDEN[name]
    assert reason in reasons(alike(fn, (_kvqm(),), ops={}, grad=grad, within=0.0))


def test_outputs_fed_back_make_a_scan_of_each_step() -> None:
    """Computes k from the previous output, so that no scan may cover two steps."""

    def fn(kvqm: Tensor) -> Any:
        S, M = _states(kvqm[0])
        x = kvqm[0]
        for _ in range(3):
            S, M, out = _cell(S, M, x)
            x = x + out.repeat(1, 4)
        return S, M, x

    got = alike(fn, (_kvqm(),))
    assert [node.args[0].meta["example_value"].shape[0] for node in got.nodes(SCAN)] == [1, 1, 1], reasons(got)
    assert "depends on its result" in reasons(got)


def test_a_state_changed_in_place_between_steps_forbids_the_scan() -> None:
    fn = lambda kvqm: joined(kvqm, after=lambda t, S, M, out: (S[0].zero_(), (S, M))[1])  # noqa: E731
    got = alike(fn, (_kvqm(),), grad=False, within=1e-6)
    assert all(n.args[0].meta["example_value"].shape[0] == 1 for n in got.nodes(SCAN)), "steps joined over a change"


def test_a_buffer_that_is_read_while_it_is_filled_stays_one() -> None:
    def fn(kvqm: Tensor) -> Any:
        S, M = _states(kvqm[0])
        buffer, seen = kvqm.new_zeros(4, 2, 5), []
        for t in range(4):
            S, M, buffer[t] = _cell(S, M, kvqm[t])
            seen.append(buffer.sum(0))
        return buffer, torch.stack(seen)

    got = alike(fn, (_kvqm(),), grad=False, within=1e-6)
    assert any("setitem" in str(node.target) for node in got.graphs[0].graph.nodes)


def test_an_ordinary_recurrence_is_no_near_miss() -> None:
    """Runs linear attention, a gated delta rule and a GRU, which have matrices and gates but do not resemble E79."""

    def fn(x: Tensor, w: Tensor) -> Any:
        S = x.new_zeros(2, 5, 5)
        h = x.new_zeros(2, 5)
        outs = []
        for t in range(3):
            k, v, q, g = x[t].chunk(4, -1)
            k = F.normalize(k, dim=-1)
            S = torch.sigmoid(g)[:, :, None] * S + (v - (S @ k[..., None])[..., 0])[:, :, None] * k[:, None]
            z = torch.sigmoid(h @ w)
            h = z * h + (1 - z) * torch.tanh(v)
            outs.append((S @ q[..., None])[..., 0] * F.silu(h))
        return torch.stack(outs), S

    assert alike(fn, (_kvqm(3), torch.randn(5, 5)), within=0.0).report.empty


# --- the higher-order scan, and the op itself ----------------------------------------------------------------


def _by_scan(kvqm: Tensor, b: Any, S: Tensor, M: Tensor, mutant: str = "", of: Any = tuple) -> Any:
    """Runs the cell as the body of a scan, with its vectors as four tensors."""
    norm = AXES["norm"]["method"]
    loop = dataclasses.replace(plain(), mutant=mutant)

    def body(state: tuple[Tensor, Tensor], x: tuple[Tensor, ...]) -> tuple[tuple[Tensor, Tensor], Tensor]:
        k, v, q, m = of(x)
        S, M, out = loop.part("step")(loop, 0, *state, norm(k), v, q, norm(m), b, b)
        return (S, M), out

    (S, M), out = scan(body, (S, M), kvqm.chunk(4, -1))
    return out, S, M


def _by_scan_with_projection(x: Tensor, w: Tensor, b: Tensor, S: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
    """Scans batch-first input backwards, with the projection in the body; returns only S."""
    norm = AXES["norm"]["sqrt"]
    loop = plain(rows="matmul", columns="row_vector")

    def body(state: dict[str, Tensor], x: tuple[Tensor, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        k, v, q, m = F.linear(x[0], w).chunk(4, dim=-1)
        S, M, out = loop.part("step")(loop, 0, state["S"], state["M"], norm(k), v, q, norm(m), x[1], None)
        return {"M": M, "S": S}, out

    final, out = scan(body, {"M": M, "S": S}, (x, b), dim=1, reverse=True)
    return out, final["S"]


def _given(T: int = 4, B: int = 2, n: int = STATE) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(4)
    shapes = (T, B, 4 * n), (n,), (B, n, n), (B, n, n)
    return tuple(torch.randn(shape, generator=g) for shape in shapes)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
def test_a_higher_order_scan_is_routed(grad: bool, dynamic: bool) -> None:
    got = alike(_by_scan, _given(), ops=ONE, grad=grad, dynamic=dynamic)
    (gm,) = got.graphs
    assert not [node for node in gm.graph.nodes if node.op == "get_attr"], "the body is left"
    assert got.nodes(SCAN)[0].args[0].op == "placeholder", "k, v, q and m are copied together"


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_projection_in_the_body_becomes_one_of_all_steps(dynamic: bool) -> None:
    _, _, S, M = _given()
    x, w = torch.randn(2, 5, DIM), torch.randn(4 * STATE, DIM) / DIM**0.5
    alike(_by_scan_with_projection, (x, w, torch.randn(2, 5, STATE), S, M), ops=ONE, dynamic=dynamic)


def test_a_scan_of_something_else_is_left_alone() -> None:
    kvqm, _, S, M = _given()
    fn = lambda kvqm, S, M: _by_scan(kvqm, None, S, M, "delta plus")  # noqa: E731
    got = alike(fn, (kvqm, S, M), ops={}, grad=False, within=1e-6)
    assert "nothing is S' = r S c + delta (x) k^" in reasons(got)


def test_explain_covers_all_three_entry_points() -> None:
    kvqm, b, S, M = _given()
    plainly = mhc_inductor.explain(functools.partial(plain(Settings(n=STATE))), kvqm, b, b).routed
    as_scan = mhc_inductor.explain(_by_scan, kvqm, b, S, M).routed
    as_op = mhc_inductor.explain(mhc_inductor.e79_scan, kvqm, b, b, S, M).routed
    found = [[(r.op, r.detail) for r in routed] for routed in (plainly, as_scan, as_op)]
    details = [f"n = {STATE}, 4 steps of an unrolled loop", f"n = {STATE}, the body of a scan", "called by the model"]
    assert found == [[("e79_scan", detail)] for detail in details]


# --- through Inductor ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("name", ["fixed bias", "layer", "batch first, fp32 inside"])
def test_compiled_with_inductor(name: str, mode: str) -> None:
    make, shape, count = REFERENCE_MODELS[name]
    torch.manual_seed(0)
    module, x = make(), torch.randn(shape)
    given = module, (x,), list(module.named_parameters()), mode == "training"
    got = through_inductor(*given)
    assert got.ops["e79_scan"] == count
    assert difference(got, eager(*given)) < 1e-4


def test_a_long_loop_compiles_with_bounded_work() -> None:
    """Routes 64 steps with gradients; plain Inductor takes some seconds per step."""
    steps = 64
    loop = plain(Settings(T=steps, n=8))
    (given, *rest) = loop.inputs()
    found, work = Report(), Work()

    def look(gm: torch.fx.GraphModule) -> None:
        with work.counted():
            found.extend(route(gm))

    looking(loop, look)[0](given, *rest)
    assert [r.op for r in found.routed] == ["e79_scan"] and found.nodes > 35 * steps
    assert work.calls < 150_000 * steps, f"{work.calls} calls to find {steps} steps"


def test_explain_names_the_loop(capsys: pytest.CaptureFixture[str]) -> None:
    report = mhc_inductor.explain(CoupledCell("input"), torch.randn(6, 2, DIM))
    (routed,) = report.routed
    assert routed.op == "e79_scan" and "reference_models_e79.py" in routed.source
    assert f"n = {STATE}, 6 steps" in routed.detail
    assert "e79_scan" in capsys.readouterr().out


def test_explain_says_why_not() -> None:
    loop = dataclasses.replace(plain(), mutant="k_normalised_by_F_normalize")
    report = mhc_inductor.explain(functools.partial(loop), *loop.inputs())
    assert not report.routed
    assert [m.op for m in report.near_misses] == ["e79_scan"]
    assert "nothing is k^ = k / (|k| + 1e-06)" in report.near_misses[0].reason
