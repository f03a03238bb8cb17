# SPDX-License-Identifier: Apache-2.0
"""Graphs that are recorded without Dynamo compute what the function does, and are what Dynamo writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from mhc_inductor.routing.effects import ambient
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.graph.view import Knowledge, View
from tests.tools import capture
from tests.tools.capture import difference, eager, run
from tests.tools.traced import Unrecorded, traced


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (2.0 - F.linear(x, self.weight)).chunk(2, -1)
        return torch.cat([first.float() ** 2, 1 / (second.mT.mT.abs() + 1)], -1)


def _written(x: Tensor) -> Tensor:
    made = torch.zeros(4, 8)
    made[1:, ::2] = x[1:, ::2]
    made += 1
    return made.mul_(x).masked_fill(torch.arange(8) >= 6, 0.5)


def _names(x: Tensor) -> tuple[dict[str, Tensor], float]:
    values, places = x.topk(2)
    return {"values": values, "places": places.to(torch.int64)}, 1.5


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {"layer": _Layer(), "writes": _written, "names": _names}


def _values(view: View) -> list[str]:
    """Returns the ATen call, shape and gradient of each tensor that the graph's results need, in order."""
    live = [n for n in view.nodes if n in view.live and n.op.startswith("call_")]
    found = [(v, view.needs_grad[n]) for n in live if isinstance(v := view.values.of(n), Value)]
    return [f"{v.func} {v.dtype} {[*map(str, v.shape)]} {grad}" for v, grad in found]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_graph_is_dynamos(name: str) -> None:
    fn, x, seen = FUNCTIONS[name], torch.randn(4, 8, requires_grad=True), list[list[str]]()

    def backend(gm: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        gm.graph.lint()
        seen.append(_values(View(gm.graph, ambient(), Knowledge())))
        return gm.forward

    torch._dynamo.reset()
    for compiled in (torch.compile(fn, backend=backend, dynamic=False), traced(fn, backend)):
        torch.testing.assert_close(compiled(x), fn(x), rtol=0, atol=0)
    assert seen[0] == seen[1] and len(seen[0]) > 1


def test_gradients_reach_inputs_and_parameters() -> None:
    layer, x = _Layer(), torch.randn(4, 8, requires_grad=True)
    given = [x, layer.weight]
    got, want = (torch.autograd.grad(fn(x).sum(), given) for fn in (traced(layer, lambda gm, _: gm.forward), layer))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_node_names_the_line_that_made_it() -> None:
    lines = list[str]()

    def backend(gm: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        lines.extend(node.meta["stack_trace"] for node in gm.graph.nodes if node.op != "output")
        return gm.forward

    traced(_Layer(), backend)(torch.randn(4, 8))
    assert lines and all("test_traced.py" in line and "in forward" in line for line in lines)


@pytest.mark.parametrize(
    "mode", [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)], ids=["grad", "autocast"]
)
def test_a_function_that_changes_modes_is_refused(mode: Callable[[], Any]) -> None:
    def fn(x: Tensor) -> Tensor:
        with mode():
            return x @ x.mT

    with pytest.raises(NotImplementedError, match="changes modes"):
        traced(fn, lambda gm, _: gm.forward)(torch.randn(4, 8))
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 3  # which no graph of the forward alone has


def _hooked(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda grad: grad * 3)
    return y


def _broken(x: Tensor) -> Tensor:
    y = x * 2
    torch._dynamo.graph_break()
    return y + 1


GRAPHS_OF_THEIR_OWN: dict[str, Callable[[Tensor], Any]] = {
    "Function": lambda x: _Doubled.apply(x),
    "hook": _hooked,
    "checkpoint": lambda x: checkpoint(torch.sin, x, use_reentrant=False),
    "reentrant checkpoint": lambda x: checkpoint(torch.sin, x, use_reentrant=True),
    "higher-order operator": lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
    "graph break": _broken,
    "number of the data": lambda x: x * x.sum().item(),
}


@pytest.mark.parametrize("name", GRAPHS_OF_THEIR_OWN)
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_what_is_more_than_calls_of_tensors_is_refused(name: str, grad: bool) -> None:
    called = list[fx.GraphModule]()
    with pytest.raises(Unrecorded), torch.set_grad_enabled(grad):
        traced(GRAPHS_OF_THEIR_OWN[name], lambda gm, _: called.append(gm) or gm.forward)(
            torch.randn(4, requires_grad=True)
        )
    assert not called


def test_what_cannot_be_recorded_is_written_by_dynamo_in_the_runs_of_each_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capture, "COMMIT", True)
    given = [torch.randn(4, 8)]
    for name in ("Function", "hook", "checkpoint"):
        got, want = run(GRAPHS_OF_THEIR_OWN[name], given), eager(GRAPHS_OF_THEIR_OWN[name], given)
        assert difference(got, want) == 0.0 and len(got.graphs) == 1


@pytest.mark.parametrize("asked", [{"dynamic": None}, {"symbolic": [0]}], ids=["dynamic", "symbolic"])
def test_dynamic_sizes_need_dynamo(asked: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="dynamic must be False and symbolic empty"):
        run(_Layer(), [torch.randn(4, 8)], dynamo=False, **asked)
