# SPDX-License-Identifier: Apache-2.0
"""Records a function's graph as Dynamo would write it, without Dynamo: for formulas whose calls are what is tested.

A call of PyTorch on tensors is a node, with the tensors that fake inputs give as its example value. Python runs as it
is: sizes are numbers and a loop is its steps. What Dynamo would write as more than calls of tensors is refused: changes of
modes such as autocast, hooks, checkpointed regions, ``autograd.Function``, higher-order operators and graph breaks.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor, fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from mhc_inductor import compat
from mhc_inductor.routing.effects import ambient

_READ = (bool, int, float, complex, str, tuple, torch.dtype, torch.device, torch.layout)
"""Types of what a call may tell of a tensor, such as its sizes."""


class Unrecorded(NotImplementedError):
    """Raised for a function whose graph only Dynamo writes."""


class _Recorder(TorchFunctionMode):
    """Adds the calls inside the context to ``graph``; ``given`` holds the real tensors of its inputs, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.fakes = fx.Graph(), FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
        self.given: list[Tensor] = []
        self._modes = ambient()
        # By the identity of fake tensors. Both keep them alive, so that no other tensor gets that identity.
        self._real: dict[int, tuple[Tensor, Tensor]] = {}
        self._nodes: dict[int, fx.Node] = {}

    def fake(self, value: Any) -> Any:
        """Returns the fake tensor that stands for a real one, the same each time; any other value as it is."""
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        made = self.fakes.from_tensor(value)
        self._real[id(made)] = made, value
        return made

    def node(self, value: Any) -> Any:
        """Returns the node that computes a tensor, or ``value`` if it is none. Real tensors become inputs."""
        if not isinstance(value, Tensor):
            return value
        value = self.fake(value)
        if id(value) not in self._nodes:
            self.given.insert(0, self._real[id(value)][1])
            with self.graph.inserting_before(None):
                self._add(value, "placeholder", f"given_{len(self.given)}", (), {})
        return self._nodes[id(value)]

    def _add(self, result: Any, op: str, target: Any, args: Any, kwargs: Any) -> None:
        node = self.graph.create_node(op, target, args, kwargs)
        node.meta |= {"example_value": result, "stack_trace": _line()}
        if isinstance(result, Tensor):
            self._nodes[id(result)] = node
        elif isinstance(result, (tuple, list)):
            for i, part in enumerate(result):
                self._add(part, "call_function", operator.getitem, (node, i), {})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fakes, options = tree_map(self.fake, (args, kwargs or {}))
        modes = ambient()
        with self.fakes:
            result = func(*fakes, **options)
            if isinstance(result, Tensor) and any(result is a for a in tree_flatten((fakes, options))[0]):
                result = torch.ops.aten.alias(result)  # a write, or a cast that changes nothing: a node of its own
        tensors = any(isinstance(t, Tensor) for t in tree_flatten(result)[0])
        if not tensors and func is not Tensor.__setitem__:
            if not isinstance(result, _READ) and ambient() == modes:
                raise Unrecorded(f"{func} is no call that computes tensors")
            return result
        if ambient() != self._modes:
            raise Unrecorded("a function that changes modes, such as autocast, cannot be recorded: use Dynamo")
        self._add(result, *_call(func, *tree_map(self.node, (args, kwargs or {}))))
        return result


def _call(func: Any, args: Any, kwargs: Any) -> tuple[str, Any, Any, Any]:
    """Returns (op, target, args, kwargs) of the node for a call: Python's operators are functions, as in Dynamo."""
    name = getattr(func, "__name__", "")
    if getattr(Tensor, f"__{name}__", None) is func:
        name = f"__{name}__"
    if name == "__get__":
        return "call_function", getattr, (args[0], func.__self__.__name__), {}
    reflected = "__truediv__" if name == "__rdiv__" else f"__{name[3:]}" if name.startswith("__r") else ""
    if hasattr(operator, reflected):
        return "call_function", getattr(operator, reflected), args[::-1], kwargs
    if name.startswith("__") and hasattr(operator, name):
        return "call_function", getattr(operator, name), args, kwargs
    method = getattr(Tensor, name, None) is func
    return ("call_method", name, args, kwargs) if method else ("call_function", func, args, kwargs)


def _line() -> str:
    """Returns the line outside of torch and of this file that runs now, in the form of a traceback."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename == __file__ or "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    return f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}\n'


@contextlib.contextmanager
def _calls_alone() -> Iterator[None]:
    """Refuses what computes tensors inside the context and is more than a call of them."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise Unrecorded(
            "an autograd.Function, a checkpointed region, a higher-order operator and a graph break make graphs of their own"
        )

    with contextlib.ExitStack() as stack:
        for holder, name in (
            (torch.autograd.Function, "apply"),
            (torch.autograd.graph.saved_tensors_hooks, "__enter__"),
            (compat.HigherOrderOperator, "__call__"),
            (torch._dynamo, "graph_break"),
            (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator"),  # also where no gradient is kept
        ):
            stack.enter_context(mock.patch.object(holder, name, refuse))
        yield


def recorded(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[fx.GraphModule, list[Tensor], list[Any], Any]:
    """Returns the graph of ``fn(*args)``, what its inputs get, and the results of ``fn``, flat, with their structure.

    Raises Unrecorded for a function that fails on fake tensors, or whose graph has more than calls of tensors.
    """
    if torch.is_inference_mode_enabled():
        raise Unrecorded("inputs of inference mode have no fake tensors: use Dynamo")
    recorder = _Recorder()
    fakes = [recorder.fake(a) for a in args]
    try:
        with recorder, _calls_alone():
            leaves, spec = tree_flatten(fn(*fakes))
    except Unrecorded:
        raise
    except Exception as error:
        raise Unrecorded(f"{type(error).__name__}: {error}") from error
    recorder.graph.output(tuple(recorder.node(t) for t in leaves if isinstance(t, Tensor)))
    return fx.GraphModule(torch.nn.Module(), recorder.graph), recorder.given, leaves, spec


def traced(fn: Callable[..., Any], backend: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]) -> Any:
    """Returns ``fn`` as ``torch.compile(fn, backend=backend, dynamic=False)`` would, recorded anew by each call.

    A call raises Unrecorded, before ``backend`` is called, if ``fn`` cannot be recorded.
    """

    def call(*args: Any) -> Any:
        gm, given, leaves, spec = recorded(fn, args)
        results = iter(backend(gm, list(given))(*given))
        return tree_unflatten([next(results) if isinstance(t, Tensor) else t for t in leaves], spec)

    return call
