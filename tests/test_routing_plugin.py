# SPDX-License-Identifier: Apache-2.0
"""A third-party operator plugs into the pass: it is recognised, placed, explained, and refused where laws forbid it."""

from __future__ import annotations

import dataclasses
import operator
import pathlib
import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

import mhc_inductor
from mhc_inductor.routing import edit as editing
from mhc_inductor.routing import register, registered, unregister
from mhc_inductor.routing.interface import Match
from tests import gated_norm
from tests.capture import difference, eager, reasons, run

SPELLINGS = {
    "as written": lambda x, w, g: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w * silu(g),
    "pow and division": lambda x, w, g: silu(g) * (w * (x / (x.pow(2).mean(-1, True) + 1e-5).sqrt())),
    "sum": lambda x, w, g: w * x * ((x**2).sum(-1, True) / x.shape[-1] + 1e-5).rsqrt() * silu(g),
    "in place": lambda x, w, g: (x * 1.0).mul_(torch.rsqrt((x * x).mean(-1, True) + 1e-5)).mul_(w) * silu(g),
}
CHANGED = {
    "not the mean": (
        lambda x, w, g: x * torch.rsqrt((x * x).sum(-1, True) + 1e-5) * w * silu(g),
        "divided by the width",
    ),
    "twice": (lambda x, w, g: 2 * x * torch.rsqrt((x * x).mean(-1, True) + 1e-5) * w * silu(g), "multiplied by 2"),
}


@pytest.fixture(autouse=True)
def plugged() -> Iterator[None]:
    register(gated_norm.GatedNorm)
    yield
    unregister("gated_norm")


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3, 5, 16), torch.randn(16), torch.randn(3, 5, 16)]


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_become_the_op(name: str) -> None:
    got = run(SPELLINGS[name], inputs())
    assert [r.op for r in got.report.routed] == ["gated_norm"], reasons(got)
    assert difference(got, eager(SPELLINGS[name], inputs())) < 1e-6
    assert "eps = 1e-05" in got.report.routed[0].detail and "test_routing_plugin" in got.report.routed[0].source


@pytest.mark.parametrize("name", CHANGED)
def test_what_differs_is_named(name: str) -> None:
    fn, reason = CHANGED[name]
    got = run(fn, inputs())
    assert not got.report.routed and reason in reasons(got)
    assert difference(got, eager(fn, inputs())) == 0.0


def test_laws_hold_without_code_in_the_operator() -> None:
    def switched(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        with torch.no_grad():
            rstd = torch.rsqrt((x * x).mean(-1, True) + 1e-5)
        return x * rstd * w * silu(g)

    def written(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        h = x * 1.0
        y = h * torch.rsqrt((h * h).mean(-1, True) + 1e-5)
        h[:, 0].mul_(2.0)
        return y * w * silu(g), h

    got = run(switched, inputs())
    assert "gradients are switched" in reasons(got) and not got.report.routed
    assert difference(got, eager(switched, inputs())) == 0.0
    got = run(switched, inputs(), grad=False)
    assert got.report.routed and difference(got, eager(switched, inputs(), grad=False)) < 1e-6
    got = run(written, inputs(), grad=False)
    assert difference(got, eager(written, inputs(), grad=False)) < 1e-6


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="gated_norm"):
        register(gated_norm.GatedNorm)


def test_explain_names_the_operator(capsys: pytest.CaptureFixture[str]) -> None:
    report = mhc_inductor.explain(SPELLINGS["sum"], *inputs())
    assert [r.op for r in report.routed] == ["gated_norm"] and "gated_norm" in capsys.readouterr().out


def test_the_operator_is_short_and_documented() -> None:
    source = pathlib.Path(gated_norm.__file__)
    assert len(source.read_text().splitlines()) < 150
    page = (source.parent.parent / "docs" / "route_your_own.md").read_text()
    shown = max(re.findall(r"```python\n(.*?)```", page, re.DOTALL), key=len)
    assert shown.strip() in source.read_text()


@pytest.mark.parametrize("method", ["create", "_settled", "_replace", "sweep", "guard"])
def test_a_failing_edit_leaves_the_model_as_it_was(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every edit fail once, at each of its calls.

    The graph must compile unrouted, with the nodes that Dynamo made, and the report must say so.
    """
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
        got = run(SPELLINGS["in place"], inputs())
        assert difference(got, eager(SPELLINGS["in place"], inputs())) < 1e-6
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
        found = super().match(view, node)
        if isinstance(found, Match) and self.named:
            return dataclasses.replace(found, numbers=[self._late(view)])
        return found

    def emit(self, edit, match):
        pairs = [*super().emit(edit, match)]
        edit.emit(operator.mul, edit.current(self._late(edit.view)), 1.0)
        return pairs

    @staticmethod
    def _late(view):
        return next(n for n in view.nodes if n.target == "item")


@pytest.mark.parametrize("named", [False, True])
def test_a_number_that_comes_later(named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that a match names moves the op behind it; one that it does not name leaves the formula as it is."""

    def fn(x: Tensor, w: Tensor, g: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        normed = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w * silu(g)
        return normed, torch.full((2,), scale.item())

    monkeypatch.setattr(_LateScale, "named", named)
    unregister("gated_norm")
    register(_LateScale)
    try:
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            got = run(fn, [*inputs(), torch.tensor(2.0)], grad=False)
    finally:
        unregister("late_scale")
        register(gated_norm.GatedNorm)
    assert difference(got, eager(fn, [*inputs(), torch.tensor(2.0)], grad=False)) < 1e-6
    assert not got.report.problems and bool(got.report.routed) == named
    assert named or "computed after the place" in reasons(got)


def test_operators_run_in_the_order_of_registration() -> None:
    assert registered()[-1] is gated_norm.GatedNorm
