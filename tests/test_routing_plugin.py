# SPDX-License-Identifier: Apache-2.0
"""Operators of other packages: proposals become ops where numbers agree, and are refused, by name, where they do not."""

from __future__ import annotations

import dataclasses
import inspect
import operator
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import silu

import mhc_inductor
from mhc_inductor import compat
from mhc_inductor.routing import Graph, Proposal, interface, register, unregister
from mhc_inductor.routing import edit as editing
from mhc_inductor.routing.interface import Match, registered
from tests.formulas import gated_norm
from tests.tools import capture
from tests.tools.capture import Captured, alike, difference, eager, reasons, run

aten, example = torch.ops.aten, torch.ops.example
EPS = 1e-5


def normed(x: Tensor, eps: float = EPS) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


def in_place(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
    y = x * 1.0
    y.mul_(torch.rsqrt((x * x).mean(-1, True) + EPS)).mul_(w)
    y *= silu(g)
    return y


def flat(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
    return (normed(x.view(-1, 16)).view_as(x) * w[None, None]) * silu(g)


SPELLINGS: dict[str, tuple[str, Callable[..., Any]]] = {
    "norm": ("gated_norm", lambda x, w, g: normed(x) * w * silu(g)),
    "norm, power and division": (
        "gated_norm",
        lambda x, w, g: silu(g) * (w * (x / (x.pow(2).mean(-1, True) + EPS).sqrt())),
    ),
    "norm, sum": ("gated_norm", lambda x, w, g: w * x * ((x**2).sum(-1, True) / 16 + EPS).rsqrt() * silu(g)),
    "norm, in place": ("gated_norm", in_place),
    "norm, one call": ("gated_norm", lambda x, w, g: F.rms_norm(x, (16,), w, EPS) * g * torch.sigmoid(g)),
    "norm, through views": (
        "gated_norm",
        lambda x, w, g: (normed(x.transpose(0, 1)) * w).transpose(0, 1) * silu(g).unsqueeze(0).squeeze(0),
    ),
    "norm, of another width": ("gated_norm", lambda x, w, g: normed(x[..., :8]) * w[8:] * silu(g[..., 8:])),
    "swiglu": ("swiglu", lambda x, w, g: silu(x @ g[0].mT) * (x @ g[1].mT)),
    "swiglu, linear": ("swiglu", lambda x, w, g: F.linear(x, g[0]) * F.silu(F.linear(x, g[1]))),
    "swiglu, sigmoid": ("swiglu", lambda x, w, g: (x * torch.sigmoid(x)) * g),
    "swiglu, halves": ("swiglu", lambda x, w, g: silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1] + w[:8]),
    "swiglu, weighted": ("swiglu", lambda x, w, g: (silu(x) * g) * w.sum()),
    "softcap": ("softcap", lambda x, w, g: 3 * torch.tanh(x @ g.mT / 3)),
    "softcap, scaled": ("softcap", lambda x, w, g: ((x @ g.mT) * 0.25).div(3).tanh() * 3.0),
    "softcap, in place": ("softcap", lambda x, w, g: (x @ g.mT).div_(3).tanh() * 3),
}
SWIGLU = SPELLINGS["swiglu"][1]
MUTANTS: dict[str, Callable[..., Any]] = {
    "not the mean": lambda x, w, g: x * torch.rsqrt((x * x).sum(-1, True) + EPS) * w * silu(g),
    "squares of another tensor": lambda x, w, g: x * torch.rsqrt((x * g).mean(-1, True) + 9) * w * silu(g),
    "mean over another dimension": lambda x, w, g: x * torch.rsqrt((x * x).mean(1, True) + EPS) * w * silu(g),
    "mean over two dimensions": lambda x, w, g: x * torch.rsqrt((x * x).mean((1, 2), True) + EPS) * w * silu(g),
    "gate of a product": lambda x, w, g: normed(x) * w * silu(2 * g).sum(0),
    "softcap, two caps": lambda x, w, g: 3 * torch.tanh(x * g.sigmoid() / 3) * g,
    "clamped mean": lambda x, w, g: x * torch.rsqrt((x * x).mean(-1, True).clamp(min=1e-4)) * w * silu(g),
    "twice, in one factor": lambda x, w, g: normed(x) * (2 * w) * silu(g),
}


@pytest.fixture(autouse=True)
def plugged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registers the operators. Nothing else asks for a comparison in these tests."""
    monkeypatch.setattr(capture, "VERIFY", None)
    for name, find in gated_norm.GENERATORS.items():
        register(name, op=getattr(example, name))(find)
    yield
    for name in gated_norm.GENERATORS:
        unregister(name)


@pytest.fixture
def plug(plugged: None) -> Iterator[Callable[..., None]]:
    """Registers one operator in place of all others."""

    def add(find: Callable[[Graph], Any], op: Any = example.gated_norm) -> None:
        interface._REGISTERED.clear()
        register("own", op=op)(find)

    before = dict(interface._REGISTERED)
    yield add
    interface._REGISTERED.clear()
    interface._REGISTERED.update(before)


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=g).to(dtype) for s in ((3, 5, 16), (16,), (3, 5, 16))]


def ops(got: Captured) -> list[str]:
    return [r.op for r in got.report.routed]


def refused(fn: Callable[..., Any], words: str, given: list[Tensor] | None = None, **how: Any) -> Captured:
    """Asserts that nothing is routed, that the report says why, and that the values are those of the model."""
    given = inputs() if given is None else given
    got = alike(fn, given, within=0.0, **how)
    assert not ops(got) and words in reasons(got), (ops(got), reasons(got))
    return got


DYNAMIC = [(0, 0), (2, 0)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_become_the_op(name: str, grad: bool, dynamic: bool) -> None:
    (op, fn), how = SPELLINGS[name], {"dynamic": None, "symbolic": DYNAMIC} if dynamic else {}
    got = alike(fn, inputs(), grad=grad, within=2e-6, **how)
    assert ops(got) == [op], reasons(got)
    (routed,) = got.report.routed
    assert routed.error is not None and routed.error < 1e-6 and not routed.note and f"example.{op}" in routed.runs()
    assert op != "gated_norm" or "eps = 1e-05" in routed.detail


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MUTANTS)
def test_what_differs_stays(name: str, dynamic: bool) -> None:
    fn, how = MUTANTS[name], {"dynamic": None, "symbolic": DYNAMIC} if dynamic else {}
    got = run(fn, inputs(), **how)
    assert "gated_norm" not in ops(got) and "softcap" not in ops(got)
    assert difference(got, eager(fn, inputs())) < (2e-6 if ops(got) else 1e-30)


# --- wrong proposals ----------------------------------------------------------------------------------------


def of_norm(**changed: Callable[[Any, Any, Any], Any]) -> Callable[[Graph], Iterator[Proposal]]:
    """Returns a generator that proposes the gated norm with some of its arguments changed."""

    def find(g: Graph) -> Iterator[Proposal]:
        for out in g.products():
            n, s = out.norm(), out.factor(aten.silu)
            given = {"x": n, "w": out.rest(n, s), "gate": s.arg, "eps": n.eps}
            yield g.propose(out, **given | {name: change(n, s, out) for name, change in changed.items()})

    return find


WRONG = {
    "eps": {"eps": lambda n, s, out: 1.001 * n.eps},
    "no eps": {"eps": lambda n, s, out: 0.0},
    "the gate as x": {"x": lambda n, s, out: s.arg, "gate": lambda n, s, out: n},
    "the activated gate": {"gate": lambda n, s, out: s},
    "x as weight": {"w": lambda n, s, out: n},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_proposal_is_refused(name: str, dtype: torch.dtype, plug: Any) -> None:
    plug(of_norm(**WRONG[name]))
    got = refused(SPELLINGS["norm"][1], "verified on random data", inputs(dtype))
    (miss,) = got.report.near_misses
    assert miss.op == "own" and "test_routing_plugin" in miss.source


@pytest.mark.parametrize("first", [False, True])
def test_a_formula_that_was_compared_with_other_inputs_is_compared_again(first: bool, plug: Any) -> None:
    """Of two equal formulas, one is proposed with its inputs swapped."""

    def find(g: Graph) -> Iterator[Proposal]:
        swapped = first
        for out in g.products():
            gate, up = out.factor(aten.silu).arg, out.rest(out.factor(aten.silu))
            yield g.propose(out, gate=up if swapped else gate, up=gate if swapped else up)
            swapped = not swapped

    def fn(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Any:
        return silu(a) * b - silu(c) * d

    plug(find, example.swiglu)
    given = [*inputs()[::2], *inputs()[::2]]
    got = alike(fn, given, within=2e-6)
    assert ops(got) == ["own"] and "verified on random data" in reasons(got)


# --- proposals that agree by chance -------------------------------------------------------------------------


def without(op: Any) -> Callable[[Graph], Iterator[Proposal]]:
    """Returns a generator that proposes SwiGLU with the argument of ``op`` in place of what it returns."""

    def find(g: Graph) -> Iterator[Proposal]:
        for out in g.products():
            yield g.propose(out, gate=out.factor(aten.silu).arg, up=out.factor(op).arg)

    return find


CLAMP, NAN, SIDES = aten.clamp, "NaN or infinite at different places", "both sides of the formula"
CHANCE: dict[str, tuple[Any, Callable[..., Any], str]] = {
    "a limit that is far away": (CLAMP, lambda x, w, g: silu(x) * g.clamp(max=1e4), NAN),
    "in place": (CLAMP, lambda x, w, g: silu(x) * (g * 1.0).clamp_(max=1e4), NAN),
    "two limits, one far away": (CLAMP, lambda x, w, g: silu(x) * g.clamp(-1e5, 20), "output 0"),
    "limits within reach of large numbers": (CLAMP, lambda x, w, g: silu(x) * g.clamp(-20, 20), "output 0"),
    "a maximum": (aten.maximum, lambda x, w, g: silu(x) * torch.maximum(g, torch.full_like(g, -torch.inf)), "maximum"),
    "a limit that is never reached": (CLAMP, lambda x, w, g: silu(x) * g.clamp(min=-torch.inf), f"{SIDES}'s clamp"),
    "a comparison": (aten.add, lambda x, w, g: silu(x) * (g + (g > 1e5)), f"{SIDES}'s gt"),
    "two limits, the lower one far away": (CLAMP, lambda x, w, g: silu(x) * g.clamp(-1e5, 1e5), NAN),
    "NaN": (aten.nan_to_num, lambda x, w, g: silu(x) * g.nan_to_num(), "output 0"),
    "zeros": (aten.add, lambda x, w, g: silu(x) * (g + (g == 0)), "verified on random data"),
    "minus infinity as a number": (
        aten.nan_to_num,
        lambda x, w, g: silu(x) * g.nan_to_num(torch.nan, torch.inf, 0.0),
        "output 0",
    ),
}


@pytest.mark.parametrize("name", CHANCE)
def test_agreement_by_chance_is_not_enough(name: str, plug: Any) -> None:
    op, fn, words = CHANCE[name]
    plug(without(op), example.swiglu)
    refused(fn, words)


def test_integers_are_not_judged(plug: Any) -> None:
    def fn(x: Tensor, g: Tensor, i: Tensor) -> Tensor:
        return silu(x) * (g + i.clamp(min=7).sub(7))

    plug(without(aten.add), example.swiglu)
    x, _, g = inputs()
    refused(fn, "torch.int64", [x, g, torch.arange(16) % 7])


def test_a_factor_that_a_rounding_hides() -> None:
    refused(lambda x, w, g: 1.002 * silu(x) * g, "output 0", inputs(torch.bfloat16))


def test_a_constant_that_is_a_dynamic_size_by_chance() -> None:
    how: Any = {"dynamic": None, "symbolic": [(0, 2), (1, 0), (2, 2)]}
    refused(SPELLINGS["norm, sum"][1], "output 0", **how)
    got = run(SPELLINGS["norm"][1], inputs(), **how)
    assert ops(got) == ["gated_norm"], reasons(got)


def test_one_code_for_all_sizes() -> None:
    """Compiles once with dynamic sizes; other sizes have the model's values."""
    compiled, made = capture.looking(SPELLINGS["norm"][1], dynamic=True)
    for rows, width in ((3, 16), (7, 16), (64, 24)):
        x, w, g = torch.randn(2, rows, width), torch.randn(width), torch.randn(2, rows, width)
        torch.testing.assert_close(compiled(x, w, g), SPELLINGS["norm"][1](x, w, g))
    assert len(made) == 1 and [r.op for r in made[0].routed] == ["gated_norm"]


@pytest.mark.parametrize("numbers", [(0.0, 2.0, 0.0, 3.0), (5, 7, 5, 6)])
def test_a_number_that_changes_between_calls(numbers: tuple[float, ...], plug: Any) -> None:
    """An op that holds for the first number is not run for another one."""

    def fn(x: Tensor, g: Tensor, number: float) -> Tensor:
        return silu(x) * (g + (number - numbers[0]))

    plug(without(aten.add), example.swiglu)
    torch._dynamo.reset()
    x, _, g = inputs()
    with torch._dynamo.config.patch(specialize_float=False):
        compiled = torch.compile(
            fn, backend=capture.interpreted(report := mhc_inductor.routing.Report(), []), dynamic=True
        )
        for number in numbers:
            torch.testing.assert_close(compiled(x, g, number), fn(x, g, number))
    assert bool(report.routed) == isinstance(numbers[0], float)


# --- ops that do not work -----------------------------------------------------------------------------------


def _op(name: str, fn: Callable[..., Any], fake: bool = True, grad: bool = True, more: str = "") -> Any:
    schema = f"(Tensor gate, Tensor up{more}) -> Tensor"
    op = torch.library.custom_op(f"example::{name}", fn, mutates_args=(), schema=schema)
    if fake:
        op.register_fake(lambda gate, up, *_: torch.empty_like(gate))
    if grad:
        op.register_autograd(lambda ctx, d: (d, d))
    return getattr(example, name)


def _raise(gate: Tensor, up: Tensor) -> Tensor:
    raise OSError("no such kernel")


swiglu = gated_norm.swiglu_formula
FAILING = {
    "raises": (_op("plug_raises", _raise), "no such kernel"),
    "has no fake function": (_op("plug_no_fake", swiglu, fake=False), "fake"),
    "has no gradient": (_op("plug_no_grad", swiglu, grad=False), "no autograd formula"),
    "has a wrong gradient": (_op("plug_wrong_grad", swiglu), "the gradient of"),
    "returns another shape": (_op("plug_shape", lambda gate, up: swiglu(gate, up)[0].clone()), "invalid gradient"),
}


@pytest.mark.parametrize("name", FAILING)
def test_an_op_that_does_not_work_leaves_the_model(name: str, plug: Any) -> None:
    op, words = FAILING[name]
    plug(gated_norm.swiglu, op)
    refused(SWIGLU, words)


def test_arguments_that_the_op_does_not_have(plug: Any) -> None:
    def find(g: Graph) -> Iterator[Proposal]:
        for out in g.products():
            yield g.propose(out, gate=out.factor(aten.silu).arg, right=out.rest(out.factor(aten.silu)))

    plug(find, example.swiglu)
    refused(SWIGLU, "missing value for argument 'up'")


def test_a_generator_that_raises(plug: Any) -> None:
    """What it proposed before is kept, and the report says where it stopped."""

    def find(g: Graph) -> Iterator[Proposal]:
        yield from gated_norm.swiglu(g)
        raise KeyError("mine")

    plug(find, example.swiglu)
    got = run(SWIGLU, inputs())
    assert ops(got) == ["own"] and difference(got, eager(SWIGLU, inputs())) < 2e-6
    assert "KeyError: 'mine'" in got.report.problems[0] and "search failed" in got.report.problems[0]


@torch.library.custom_op("example::plug_writes", mutates_args=("gate",))
def _writes(gate: Tensor, up: Tensor) -> Tensor:
    return gate.mul_(up).clone()


@torch.library.custom_op("example::plug_two", mutates_args=())
def _two(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate * up, up * gate


@pytest.mark.parametrize("op", ["plug_writes", "plug_two"])
def test_what_an_op_must_be(op: str) -> None:
    with pytest.raises(ValueError, match="must return one new tensor and write none"):
        register("own", op=getattr(example, op))


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="gated_norm"):
        register("gated_norm", op=example.gated_norm)(gated_norm.gated_norm)


def test_what_cannot_be_compared_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, words in ((1000, "GB of memory"), (2000, "no higher precision")):
        monkeypatch.setattr(compat.routing, "free_memory", lambda device, free=free: free)
        refused(SWIGLU, words)


# --- what the op reads, and where it stands -----------------------------------------------------------------


def reads(got: Captured) -> list[torch.dtype]:
    """Returns the dtypes of the tensors that the one op in the graph reads."""
    (call,) = (n for n in got.graphs[0].graph.nodes if str(n.target).startswith("example."))
    return [n.meta["example_value"].dtype for n in call.all_input_nodes]


def test_casts_are_left_out_and_roundings_are_not() -> None:
    def upcast(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        return (normed(x.float()) * w.float() * silu(g.float())).to(x.dtype)

    def rounded(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        return normed(x) * w.bfloat16().float() * silu(g)

    def wide(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        return normed(x.float()) * w.float() * silu(g.float())

    for fn, dtype, want in (
        (upcast, torch.bfloat16, [torch.bfloat16] * 3),
        (rounded, torch.float32, [torch.float32] * 3),
        (wide, torch.bfloat16, [torch.float32] * 3),
    ):
        got = alike(fn, inputs(dtype), within=0.02 if dtype == torch.bfloat16 else 2e-6)
        assert ops(got) == ["gated_norm"] and reads(got) == want, reasons(got)


def test_autocast() -> None:
    def fn(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return silu(x @ g[0].mT) * (x @ g[1].mT)

    got = alike(fn, inputs(), within=0.02)
    assert ops(got) == ["swiglu"], reasons(got)


def hooked(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
    y = normed(x)
    y.register_hook(lambda d: 2 * d)
    return y * w * silu(g)


def switched(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
    with torch.no_grad():
        rstd = torch.rsqrt((x * x).mean(-1, True) + EPS)
    return x * rstd * w * silu(g)


def written(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    h = x * 1.0
    y = normed(h)
    h[:, 0].mul_(2.0)
    return y * w * silu(g), h


def written_late(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    h, k = x * 1.0, g * 1.0
    y = normed(h) * w * silu(k)
    h.add_(1.0)
    k.zero_()
    return y, h + k


def written_result(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    y = normed(x) * w * silu(g)
    z = y * 3
    y.mul_(2.0)
    return y, z


def views_of_result(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (y := normed(x) * w * silu(g)), y[0], y.view(-1)


def returned_parts(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (a := normed(x)) * w * (b := silu(g)), a, b


def written_input(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
    y = normed(x) * w * silu(g)
    x.detach().mul_(2.0)
    return y


BOTH, NO_GRAD = (False, True), (False,)  # a step in place on what autograd saves fails in eager, too
LAWS: list[tuple[Callable[..., Any], tuple[bool, ...]]] = [
    *((fn, BOTH) for fn in (switched, written_result, views_of_result, returned_parts)),
    *((fn, NO_GRAD) for fn in (written, written_late, written_input)),
    (hooked, (True,)),
]


@pytest.mark.parametrize(("fn", "grad"), [(fn, grad) for fn, grads in LAWS for grad in grads])
def test_laws_hold_without_code_in_the_operator(fn: Callable[..., Any], grad: bool) -> None:
    got = alike(fn, inputs(), grad=grad, within=2e-6)
    assert bool(ops(got)) == (fn not in (hooked, written, *([switched] if grad else []))), reasons(got)
    assert fn is not switched or not grad or "gradients are switched" in reasons(got)
    storages = [t.untyped_storage().data_ptr() for t in got.outputs]
    assert (len({*storages}) == 1) == (fn is views_of_result or len(storages) == 1)


def test_hooks_on_the_result_run() -> None:
    seen: list[float] = []

    def fn(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        y = normed(x) * w * silu(g)
        y.register_hook(lambda d: d * 2)
        return y * 1.5

    alike(fn, inputs(), within=2e-6)
    assert not seen


class Added(torch.nn.Module):
    """Adds a buffer, which is 0 so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(16))

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        return silu(x) * (g + self.bias)


def test_a_buffer_may_change(plug: Any) -> None:
    x, _, g = inputs()
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(Added(), (x, g), dynamic_shapes=({0: rows}, {0: rows}))
    plug(without(aten.add), example.swiglu)
    refused(model := Added(), "output 0", [x, g])
    assert "example.swiglu" not in str(mhc_inductor.route_exported(program).graph)
    plug(gated_norm.swiglu, example.swiglu)
    routed = mhc_inductor.route_exported(program)
    assert "example.swiglu" in str(routed.graph)
    torch.testing.assert_close(routed.module()(x[:2], g[:2]), model(x[:2], g[:2]))


# --- the pass -----------------------------------------------------------------------------------------------


def test_a_part_of_a_product_is_tried_where_the_product_is_refused(plug: Any) -> None:
    def fn(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        return ((silu(x) * g) * 2 * -1.0) * w.sum()

    plug(gated_norm.swiglu, example.swiglu)
    got = alike(fn, inputs(), within=2e-6)
    said = [m.reason[:41] for m in got.report.near_misses]
    assert ops(got) == ["own"] and said == ["verified on random data, output 0 differs"] * 2


def test_a_part_of_a_product_that_is_the_op_is_not_tried(plug: Any) -> None:
    def scaled(g: Graph) -> Iterator[Proposal]:
        for out in g.products():
            s = out.factor(aten.silu)
            yield g.propose(out, gate=s.arg, up=out.rest(s), scale=out.coef)

    def fn(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        return 2 * (silu(x) * g)

    plug(scaled, _op("plug_scaled", lambda gate, up, scale: silu(gate) * up * scale, more=", float scale"))
    got = alike(fn, inputs(), grad=False, within=2e-6)
    assert ops(got) == ["own"] and got.report.routed[0].detail == "scale = 2", reasons(got)


def test_work_is_linear_in_the_products() -> None:
    def powers(x: Tensor, n: int) -> Tensor:
        for _ in range(n):
            x = x * x.sigmoid() * silu(x) * 0.5
        return x

    times = []
    for n in (20, 80):
        got = run(lambda x, n=n: powers(x, n), inputs()[:1], grad=False)
        times.append(got.report.seconds)
    assert times[1] < 20 * times[0] + 1.0, times


def test_the_same_formula_is_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    plain = mhc_inductor.routing.verify.Trial.verdict
    monkeypatch.setattr(mhc_inductor.routing.verify.Trial, "verdict", lambda self: runs.append(self.key) or plain(self))

    def layers(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        for _ in range(3):
            x = normed(x) * w * silu(g) + 1.0
        return x

    assert ops(run(layers, inputs())) == ["gated_norm"] * 3 and len(runs) == 1
    runs.clear()
    assert ops(run(layers, inputs(), dynamic=None, symbolic=DYNAMIC)) == ["gated_norm"] * 3 and len(runs) == 3


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    """The backend itself, generated code included, without an option."""

    def fn(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        y = SPELLINGS["norm"][1](x, w, g)
        return SPELLINGS["softcap"][1](SPELLINGS["swiglu"][1](y, w, g), w, g[..., :5])

    got = capture.through_inductor(fn, inputs(), dynamic=dynamic)
    assert difference(got, eager(fn, inputs())) < 5e-6 and got.ops.keys() == {"gated_norm", "swiglu", "softcap"}


def test_explain_names_the_operator(capsys: pytest.CaptureFixture[str]) -> None:
    report = mhc_inductor.explain(SPELLINGS["norm"][1], *inputs())
    assert [r.op for r in report.routed] == ["gated_norm"] and "gated_norm" in capsys.readouterr().out
    (routed,) = report.routed
    assert routed.error is not None and routed.cost is not None
    assert [t.partition(":")[0] for t in routed.cost.tensors] == ["x", "w", "gate", "result"]
    report = mhc_inductor.explain(MUTANTS["not the mean"], *inputs())
    assert "differs from the formula's" in str(report) and "gated_norm" in capsys.readouterr().out


def test_the_operators_are_short_and_documented() -> None:
    page = (pathlib.Path(__file__).parents[1] / "docs" / "route_your_own.md").read_text()
    shown = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    for find in gated_norm.GENERATORS.values():
        source = inspect.getsource(find).strip()
        assert len(source.splitlines()) <= 20 and source in shown


def test_operators_run_in_the_order_of_registration() -> None:
    assert [make.name for make in registered()[-3:]] == [*gated_norm.GENERATORS]  # type: ignore[attr-defined]


# --- the protocol inside of the package ---------------------------------------------------------------------


@pytest.mark.parametrize("method", ["create", "_settled", "_replace", "sweep", "guard"])
def test_a_failing_edit_leaves_the_model_as_it_was(method: str, plug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every edit fail once, at each of its calls.

    The graph must compile unrouted, with the nodes that Dynamo made, and the report must say so.
    """
    interface._REGISTERED.clear()
    interface.register(gated_norm.GatedNorm)
    plain = getattr(editing.Edit, method)
    for at in range(8):
        calls = iter(range(1000))

        def failing(
            self: object, *args: object, calls: Iterator[int] = calls, at: int = at, **kwargs: object
        ) -> object:
            if next(calls) == at:
                raise RuntimeError("injected")
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(editing.Edit, method, failing)
        got = run(in_place, inputs())
        assert difference(got, eager(in_place, inputs())) < 1e-6
        if next(calls) <= at:
            break
        assert not got.report.routed and "injected" in got.report.problems[0]
        assert all(
            node.op != "call_function" or "gated_norm" not in str(node.target) for node in got.graphs[0].graph.nodes
        )
    assert at > 0


class _LateScale(gated_norm.GatedNorm):
    """Reads a number that the graph computes after the formula, and names it or does not."""

    name = "late_scale"
    named = False

    def match(self, view, node):
        self.late = next(n for n in view.nodes if n.target == "item")
        found: Match = super().match(view, node)
        return dataclasses.replace(found, numbers=[self.late]) if self.named else found

    def emit(self, edit, match):
        pairs = [*super().emit(edit, match)]
        edit.emit(operator.mul, edit.current(self.late), 1.0)
        return pairs


@pytest.mark.parametrize("named", [False, True])
def test_a_number_that_comes_later(named: bool, plug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that a match names moves the op behind it; one that it does not name leaves the formula as it is."""

    def fn(x: Tensor, w: Tensor, g: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return normed(x) * w * silu(g), torch.full((2,), scale.item())

    monkeypatch.setattr(_LateScale, "named", named)
    interface._REGISTERED.clear()
    interface.register(_LateScale)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        got = alike(fn, [*inputs(), torch.tensor(2.0)], grad=False, within=1e-6)
    assert bool(got.report.routed) == named
    assert named or "computed after the place" in reasons(got)
