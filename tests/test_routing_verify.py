# SPDX-License-Identifier: Apache-2.0
"""Verification: a formula runs next to its op before the op replaces it, and an op that differs is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn.functional import silu

import mhc_inductor
from mhc_inductor import compat
from mhc_inductor.options import RoutingOptions
from mhc_inductor.routing import Verifier, placement, route, unregister
from mhc_inductor.routing.edit import Edit
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Match, Mismatch, register
from tests.formulas.gated_norm import GatedNorm, define
from tests.formulas.gated_norm import norm_formula as formula
from tests.test_routing_verify_process import state
from tests.tools.capture import Captured, difference, eager, looking, reasons, run


def norm(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w * silu(g)


def in_place(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
    y = x * 1.0
    y.mul_(torch.rsqrt((x * x).mean(-1, True) + 1e-6)).mul_(w)
    y *= silu(g)
    return y


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=g).to(dtype) for s in ((3, 5, 16), (16,), (3, 5, 16))]


def call(
    fn: Callable[..., Any], given: list[Tensor], check: Verifier | None = None, grad: bool = True, dynamic: bool = False
) -> Captured:
    """Calls ``fn`` once, routed without code generation, and verified unless ``check`` is another Verifier."""
    how = {"dynamic": dynamic, "symbolic": [(0, 0), (2, 0)] if dynamic else []}
    return run(fn, given, (), grad, dynamo=True, check=check or Verifier(), **how)


class Sampled(GatedNorm):
    """Draws its own data, by :meth:`sample`, or compares results by :meth:`compare`."""

    sample: Any = None
    compare: Any = None

    def match(self, view: View, node: fx.Node) -> Any:
        found = super().match(view, node)
        return dataclasses.replace(found, sample=self.sample, compare=self.compare)


@pytest.fixture
def plug() -> Iterator[Callable[[Any], None]]:
    """Registers an operator, replacing any other of its name."""
    names: list[str] = []

    def add(operator: Any) -> None:
        while names:
            unregister(names.pop())
        register(operator, "gated_norm")
        names.append("gated_norm")

    add(GatedNorm)
    yield add
    while names:
        unregister(names.pop())


def ops(got: Captured) -> list[str]:
    return [r.op for r in got.report.routed]


# --- correct ops pass ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [norm, in_place])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("grad", [True, False])
def test_a_right_op_passes_with_a_small_error(plug: Any, fn: Any, dtype: torch.dtype, grad: bool) -> None:
    check = Verifier()
    got = call(fn, inputs(dtype), check, grad)
    assert ops(got) == ["gated_norm"], reasons(got)
    (routed,) = got.report.routed
    assert routed.error is not None and not routed.note and check.runs == 1
    assert routed.error < (1e-6 if dtype.itemsize > 2 else 0.03)
    assert routed.error > 0 or dtype == torch.float64


def test_dynamic_shapes_are_run_at_their_present_sizes(plug: Any) -> None:
    for fn in (norm, in_place):
        got = call(fn, inputs(), dynamic=True)
        assert ops(got) == ["gated_norm"] and got.report.routed[0].error is not None, reasons(got)
        assert any("s" in str(n.meta["example_value"].shape) for n in got.graphs[0].graph.nodes if n.name == "l_x_")


def test_strides_are_the_models(plug: Any) -> None:
    seen = []

    class Strided(Sampled):
        def sample(self, value: Value, shape: Any, dtype: Any, device: Any, generator: Any, case: int) -> None:
            seen.append((tuple(shape), dtype, case))

    plug(Strided)
    x, w, g = inputs()
    got = call(norm, [x.transpose(0, 1), w, g.transpose(0, 1)])
    assert ops(got) == ["gated_norm"] and got.report.routed[0].error is not None, reasons(got)
    assert ((5, 3, 16), torch.float32, 0) in seen and {case for *_, case in seen} == {0, 1}


def test_autocast_regions_are_run_as_they_are(plug: Any) -> None:
    def cast(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return norm(x, w, g)

    given = inputs()
    got = call(cast, given)
    assert ops(got) == ["gated_norm"] and got.report.routed[0].error is not None, reasons(got)
    assert difference(got, eager(cast, given)) < 0.02


def test_formulas_that_are_equal_run_once(plug: Any) -> None:
    def layers(x: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        for _ in range(3):
            x = norm(x, w, g) + 1.0
        return norm(torch.cat([x, x], -1), v, torch.cat([g, g], -1))

    check = Verifier()
    got = call(layers, [*inputs(), torch.randn(32)], check)
    assert ops(got) == ["gated_norm"] * 4 and check.runs == 2, reasons(got)
    assert len({r.error for r in got.report.routed}) == 2
    call(layers, [*inputs(), torch.randn(32)], check)
    assert check.runs == 2


# --- wrong ops are refused ----------------------------------------------------------------------------------


schema = "(Tensor x, Tensor weight, Tensor gate, float eps) -> Tensor"
define("gated_norm_half_gradient", formula, 3, schema, wrong=1)
plain_op = torch.ops.example.gated_norm.default


def _wrong(change: Callable[[Edit, list[fx.Node], float], fx.Node]) -> Any:
    class Wrong(GatedNorm):
        def emit(self, edit: Edit, match: Match) -> Iterable[tuple[Value, fx.Node]]:
            made = change(edit, [edit.input(v) for v in match.inputs], match.data)
            return [(match.outputs[0], edit.as_like(made, match.outputs[0]))]

    return Wrong


def _without_gradient(edit: Any, x: fx.Node) -> fx.Node:
    return edit.emit("add", edit.emit("detach", x), edit.emit("mul", x, 0.0))


WRONG = {
    "eps of 1e-5": (lambda edit, args, eps: edit.emit(plain_op, *args, 10 * eps), "output 0"),
    "no weight": (
        lambda edit, args, eps: edit.emit(plain_op, args[0], edit.emit(torch.ones_like, args[1]), args[2], eps),
        "output 0",
    ),
    "half of a gradient": (
        lambda edit, args, eps: edit.emit(torch.ops.example.gated_norm_half_gradient.default, *args, eps),
        "the gradient of l_w_",
    ),
    "a gradient of zeros": (
        lambda edit, args, eps: edit.emit(plain_op, args[0], _without_gradient(edit, args[1]), args[2], eps),
        "the gradient of l_w_",
    ),
    "another order of rows": (
        lambda edit, args, eps: edit.emit(plain_op, edit.emit("flip", args[0], [0]), *args[1:], eps),
        "output 0",
    ),
    "NaN": (
        lambda edit, args, eps: edit.emit("sub", made := edit.emit(plain_op, *args, eps), edit.emit(torch.log, made)),
        "NaN",
    ),
    "rounded": (
        lambda edit, args, eps: edit.to(edit.to(edit.emit(plain_op, *args, eps), torch.bfloat16), torch.float32),
        "output 0",
    ),
    "an op that fails": (
        lambda edit, args, eps: edit.emit(
            "add",
            edit.emit(plain_op, *args, eps),
            edit.emit("sum", edit.emit(torch.linalg.inv, edit.emit(torch.zeros, 2, 2))),
        ),
        "the op fails where the formula does not: _LinAlgError",
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("fn", [norm, in_place])
def test_a_wrong_op_is_refused(plug: Any, name: str, fn: Any) -> None:
    change, words = WRONG[name]
    plug(_wrong(change))
    got = call(fn, inputs())
    assert not got.report.routed and not got.report.problems
    (miss,) = got.report.near_misses
    assert miss.op == "gated_norm" and words in miss.reason and "verified on random data" in miss.reason
    assert "test_routing_verify" in miss.source
    assert difference(got, eager(fn, inputs())) == 0.0


def test_a_wrong_gradient_passes_in_inference(plug: Any) -> None:
    plug(_wrong(WRONG["half of a gradient"][0]))
    got = call(norm, inputs(), grad=False)
    assert ops(got) == ["gated_norm"] and got.report.routed[0].error < 1e-6


def test_a_wrong_constant_is_found_in_bf16(plug: Any) -> None:
    """Tests an epsilon off by 1e-5, far below one bf16 rounding of data of size 1."""
    plug(_wrong(WRONG["eps of 1e-5"][0]))
    got = call(norm, inputs(torch.bfloat16))
    assert not got.report.routed and "output 0" in reasons(got)


def test_a_refused_formula_is_refused_again_without_running(plug: Any) -> None:
    plug(_wrong(WRONG["no weight"][0]))
    check = Verifier()
    first, second = (reasons(call(norm, inputs(), check)) for _ in range(2))
    assert first == second and check.runs == 1


def test_a_rounding_of_an_input_is_the_models(plug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that an op which reads the weight from before the model's rounding is refused."""

    def rounded(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        return norm(x, w.bfloat16().float(), g)

    class Behind(GatedNorm):
        def match(self, view: View, node: fx.Node) -> Match:
            found = super().match(view, node)
            x, w, g = found.inputs
            return dataclasses.replace(found, inputs=[x, w.args[0].args[0], g])

    assert ops(call(rounded, inputs())) == ["gated_norm"]
    plug(Behind)
    got = call(rounded, inputs())
    assert not got.report.routed and "an intermediate result is rounded to torch.bfloat16" in reasons(got)
    # Without this check, verification finds the difference.
    monkeypatch.setattr(placement, "check_roundings", lambda *_: None)
    got = call(rounded, inputs())
    assert not got.report.routed and "output 0" in reasons(got)


# --- data ---


class Picked(GatedNorm):
    """A norm whose weights are picked from a table, so that an input is integer."""

    rows = 7
    samples = True

    def match(self, view: View, node: fx.Node) -> Any:
        found = super().match(view, node)
        x, weight, gate = found.inputs
        table, index = weight.args[0], weight.args[1]
        sample = self.sample if self.samples else None
        return dataclasses.replace(found, inputs=[x, table, index, gate], sample=sample, cases=3)

    def sample(self, value: Value, shape: Any, dtype: Any, device: Any, generator: Any, case: int) -> Tensor | None:
        if dtype != torch.int64:
            return None
        if case == 2:
            return torch.full(shape, self.rows - 1, dtype=dtype, device=device)
        return torch.randint(0, self.rows, shape, dtype=dtype, device=device, generator=generator)

    def emit(self, edit: Edit, match: Match) -> Iterable[tuple[Value, fx.Node]]:
        x, table, index, gate = map(edit.input, match.inputs)
        picked = edit.emit(torch.ops.aten.embedding.default, table, edit.emit("clamp", index, max=5))
        made = edit.emit("mul", x, edit.emit(torch.rsqrt, edit.emit("add", self._squares(edit, x), match.data)))
        made = edit.emit("mul", edit.emit("mul", made, picked), edit.emit(silu, gate))
        return [(match.outputs[0], edit.as_like(made, match.outputs[0]))]

    def _squares(self, edit: Edit, x: fx.Node) -> fx.Node:
        return edit.emit("mean", edit.emit("mul", x, x), -1, True)


def test_integers_come_from_the_operator(plug: Any) -> None:
    """Clamps the index at 5 in the op, which only the operator's own samples reach."""

    def picked(x: Tensor, table: Tensor, g: Tensor, index: Tensor) -> Tensor:
        return norm(x, torch.nn.functional.embedding(index, table), g)

    x, _, g = inputs()
    given = [x, torch.randn(7, 16), g, torch.randint(0, 2, (3, 5))]
    plug(Picked)
    got = call(picked, given)
    assert not got.report.routed and "output 0" in reasons(got)
    plug(type("Unsampled", (Picked,), {"samples": False}))
    assert ops(call(picked, given)) == ["gated_norm"]
    plug(type("Few", (Picked,), {"rows": 6}))
    assert ops(call(picked, given)) == ["gated_norm"]


def test_choices_are_compared_by_the_operator(plug: Any) -> None:
    seen = []

    class Chosen(Sampled):
        error: float | None = 0.0

        def compare(self, theirs: list[Tensor], mine: list[Tensor]) -> float | None:
            seen.append((theirs[0].shape, mine[0].shape))
            return self.error

        emit = _wrong(WRONG["no weight"][0]).emit

    plug(Chosen)
    got = call(norm, inputs())
    assert ops(got) == ["gated_norm"] and seen[0] == ((3, 5, 16), (3, 5, 16))
    plug(type("Off", (Chosen,), {"error": 0.25}))
    assert "selection is worse than the formula's by 0.25" in reasons(call(norm, inputs()))
    plug(type("Usual", (Chosen,), {"error": None}))
    assert "output 0" in reasons(call(norm, inputs()))


# --- formulas that cannot be run are reported ---------------------------------------------------------------


def test_what_does_not_fit_in_memory_is_not_run(plug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.routing, "free_memory", lambda device: 4000)
    got = call(norm, inputs())
    (routed,) = got.report.routed
    assert routed.error is None and "GB of memory" in routed.note
    assert routed.note in str(got.report)


def test_without_memory_for_fp64_the_formula_itself_is_the_measure(plug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.routing, "free_memory", lambda device: 16000)
    got = call(norm, inputs())
    (routed,) = got.report.routed
    assert routed.error is not None and routed.error < 1e-6 and "no higher precision" in routed.note
    plug(_wrong(WRONG["no weight"][0]))
    assert "output 0" in reasons(call(norm, inputs()))


def test_a_formula_that_does_not_run_alone_says_so(plug: Any) -> None:
    class Raising(Sampled):
        def sample(self, *args: Any) -> Tensor:
            raise IndexError("no such row")

    plug(Raising)
    (routed,) = call(norm, inputs()).report.routed
    assert routed.error is None and "IndexError: no such row" in routed.note


# --- nothing else changes ---


@pytest.mark.parametrize("wrong", [False, True])
def test_the_process_is_as_before(plug: Any, wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong:
        plug(_wrong(WRONG["no weight"][0]))
    states: list[Any] = []
    plain = Verifier.__call__

    def around(self: Verifier, *args: Any) -> Any:
        before = state()
        try:
            return plain(self, *args)
        except Mismatch:
            states.append("refused")
            raise
        finally:
            states.append(before == state())

    monkeypatch.setattr(Verifier, "__call__", around)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autograd.set_detect_anomaly(True, check_nan=False):
        call(norm, inputs())
    with torch.inference_mode():
        call(norm, inputs(), grad=False)
    assert states == (["refused", True] * 2 if wrong else [True] * 2)


def test_parameters_keep_no_gradient(plug: Any) -> None:
    weight = torch.nn.Parameter(torch.randn(16))
    x, _, g = inputs()
    torch._dynamo.reset()
    report = mhc_inductor.explain(lambda x: norm(x, weight, g), x.requires_grad_(), verify=True)
    assert report.routed[0].error is not None and weight.grad is None and x.grad is None


# --- ways to ask for verification ---------------------------------------------------------------------------


def test_explain_verifies(plug: Any, capsys: pytest.CaptureFixture[str]) -> None:
    report = mhc_inductor.explain(norm, *[t.requires_grad_() for t in inputs()], verify=True)
    assert 0 < report.routed[0].error < 1e-6
    assert (
        f"error {report.routed[0].error:.0e}, " in capsys.readouterr().out
        and f"relative error: {report.routed[0].error:.2g}" in str(report)
    )
    report = mhc_inductor.explain(norm, *inputs())
    assert report.routed[0].error is None and "relative error" not in capsys.readouterr().out
    plug(_wrong(WRONG["half of a gradient"][0]))
    report = mhc_inductor.explain(norm, *[t.requires_grad_() for t in inputs()], verify=True)
    assert not report.routed and "the gradient of l_args_1_" in report.near_misses[0].reason


@pytest.mark.parametrize("verify", [False, True])
def test_options_reach_verification(plug: Any, verify: bool) -> None:
    """Without verification a wrong op is routed."""
    plug(_wrong(WRONG["no weight"][0]))
    compiled, reports = looking(norm, lambda gm: route(gm, RoutingOptions(verify=verify)))
    compiled(*inputs())
    assert [(r.op, r.error) for r in reports[0].routed] == ([] if verify else [("gated_norm", None)])
