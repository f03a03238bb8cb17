# SPDX-License-Identifier: Apache-2.0
"""What is kept of calls for later compiles: only what nothing but the call and PyTorch's settings decides."""

from __future__ import annotations

import contextlib
import gc
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.testing._internal.two_tensor import TwoTensor

from mhc_inductor import compat
from mhc_inductor.routing.effects import ambient
from mhc_inductor.routing.graph import known_calls
from mhc_inductor.routing.graph.known_calls import KnownCalls
from mhc_inductor.routing.graph.view import Knowledge, View
from tests.tools.capture import looking, run


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_calls, "_LASTING", {})


def _captured(fn: Callable[..., Any], *inputs: Tensor, dynamic: bool = False) -> fx.GraphModule:
    """Returns Dynamo's graph of ``fn``."""
    compiled, graphs = looking(fn, lambda gm: gm, dynamic=dynamic)
    compiled(*inputs)
    return graphs[0]


def _analysed(fn: Callable[..., Any], *inputs: Tensor, dynamic: bool = False) -> View:
    """Returns the view of the graph of ``fn``, all of whose values were asked for."""
    gm = _captured(fn, *inputs, dynamic=dynamic)
    with compat.routing.outside_compile():
        view = View(gm.graph, ambient(), Knowledge())
        for node in view.nodes:
            getattr(view.value(node), "func", None)
    return view


@contextlib.contextmanager
def _counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yields the names of calls that are run to find out what they do."""
    asked: list[str] = []
    find = KnownCalls.find

    def counting(self: KnownCalls, node: fx.Node, key: Any, ask: Callable[[], Any]) -> Any:
        def noted() -> Any:
            asked.append(node.name)
            return ask()

        return find(self, node, key, noted)

    with monkeypatch.context() as patch:
        patch.setattr(KnownCalls, "find", counting)
        yield asked


def _block(x: Tensor, w: Tensor) -> Tensor:
    return F.silu(x @ w).mul_(2).softmax(-1) + torch.arange(3)


X, W = torch.randn(2, 4), torch.randn(4, 3)


def test_a_later_compile_runs_no_call_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with _counted(monkeypatch) as asked:
        run(_block, (X, W))
        first = len(asked)
        asked.clear()
        again = run(_block, (X, W))
    assert first and not asked
    assert torch.equal(again.outputs[0], _block(X, W))


def test_other_sizes_dtypes_and_layouts_are_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    run(_block, (X, W))
    for inputs in ((X[:1], W), (X.double(), W.double()), (X, torch.randn(3, 4).t())):
        with _counted(monkeypatch) as asked:
            _analysed(_block, *inputs)
        assert asked


def test_a_tensor_of_another_class_is_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantised weight looks like a plain one in shape, dtype and device, and a call on it does something else."""
    x, w, other = torch.randn(2, 4), torch.randn(3, 4), torch.randn(3, 4)
    with _counted(monkeypatch) as plain:
        _analysed(F.linear, x, w)
    with _counted(monkeypatch) as asked:
        _analysed(F.linear, x, TwoTensor(w, other))
    assert len(asked) == len(plain) == 2


def _zeros(x: Tensor) -> Tensor:
    return x + torch.zeros(2, 4)


def test_the_default_dtype_is_part_of_the_question() -> None:
    def dtypes() -> set[torch.dtype]:
        return {v.dtype for n in _analysed(_zeros, X).nodes if (v := n.meta.get("example_value")) is not None}

    assert dtypes() == {torch.float32}
    torch.set_default_dtype(torch.float64)
    try:
        view = _analysed(_zeros, X)
        made = [view.value(n) for n in view.nodes if n.target is torch.zeros]
    finally:
        torch.set_default_dtype(torch.float32)
    assert [v.dtype for v in made if v is not None] == [torch.float64]


def test_dynamic_sizes_are_not_kept() -> None:
    gm = _captured(_block, X, W, dynamic=True)
    calls = [n for n in gm.graph.nodes if n.op.startswith("call_")]
    assert calls and not any(map(known_calls._lasts, (n for n in calls if n.all_input_nodes)))


@pytest.mark.parametrize("settings", [lambda: torch.device("meta"), lambda: torch.overrides.BaseTorchFunctionMode()])
def test_nothing_is_kept_where_modes_are_active(settings: Callable[[], Any]) -> None:
    with settings():
        assert KnownCalls("effect")._state is None


def test_a_function_of_somebody_else_is_not_kept() -> None:
    @torch.library.custom_op("known_calls::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    gm = _captured(lambda x: torch.ops.known_calls.twice(x) + x, X)
    kept = {n.target: known_calls._lasts(n) for n in gm.graph.nodes if n.op == "call_function"}
    assert kept.pop(operator.add)
    assert kept and not any(kept.values())


@pytest.mark.few_objects
def test_what_is_kept_holds_no_tensor_of_a_compile() -> None:
    view = _analysed(_block, X, W)
    mode = weakref.ref(compat.fake_mode_of([n.meta["example_value"] for n in view.nodes if n.op == "placeholder"]))
    assert mode() is not None and known_calls._LASTING
    del view
    torch._dynamo.reset()
    gc.collect()
    assert mode() is None


def test_at_most_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_calls, "MOST", 2)
    _analysed(_block, X, W)
    assert 0 < len(known_calls._LASTING) <= 2
