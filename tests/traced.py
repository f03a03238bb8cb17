# SPDX-License-Identifier: Apache-2.0
"""Records a function's graph as Dynamo would write it, without Dynamo: for formulas whose calls are what is tested.

A call of PyTorch on tensors is a node, with the tensors that fake inputs give as its example value. Python runs as it
is: sizes are numbers and a loop is its steps. A function that changes modes is refused, and what an in-place step
returns goes by the name of the tensor that it writes.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from mhc_inductor.routing.effects import ambient

_OPERATORS = {
    **{f"__{name}__": getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")},
    **{f"__{name}__": getattr(operator, name) for name in ("matmul", "neg", "invert", "getitem", "setitem")},
    **{f"__{name}__": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"__i{name}__": getattr(operator, f"i{name}") for name in ("add", "sub", "mul", "truediv", "and", "or")},
    **{f"__{name}__": getattr(operator, f"{name}_") for name in ("and", "or")},
    "__xor__": operator.xor,
    "__abs__": torch.abs,
}
_REFLECTED = {"__radd__": "__add__", "__rsub__": "__sub__", "__rmul__": "__mul__", "__rtruediv__": "__truediv__"}
_REFLECTED |= {"__rdiv__": "__truediv__", "__rpow__": "__pow__", "__rmatmul__": "__matmul__", "__rand__": "__and__"}


class _Recorder(TorchFunctionMode):
    """Adds the calls inside the context to ``graph``; ``given`` holds the real tensors of its inputs, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.fakes = fx.Graph(), FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
        self.given: list[Tensor] = []
        self._modes = ambient()
        # By identity; the tensors are kept, so that no other gets their identity.
        self._fakes: dict[int, Tensor] = {}
        self._real: dict[int, Tensor] = {}
        self._shown: dict[int, tuple[Any, fx.Node]] = {}

    def fake(self, t: Tensor) -> Tensor:
        """Returns the fake tensor that stands for a real one."""
        if id(t) not in self._fakes:
            self._fakes[id(t)] = self.fakes.from_tensor(t)
            self._real[id(self._fakes[id(t)])] = t
        return self._fakes[id(t)]

    def _faked(self, value: Any) -> Any:
        return self.fake(value) if isinstance(value, Tensor) and not isinstance(value, FakeTensor) else value

    def node(self, value: Any) -> Any:
        """Returns the node that computes a tensor, or ``value`` if it is none. Real tensors become inputs."""
        if not isinstance(value, Tensor):
            return value
        value = self._faked(value)
        if id(value) not in self._shown:
            self.given.insert(0, self._real[id(value)])
            with self.graph.inserting_before(None):
                self._add(value, "placeholder", f"given_{len(self.given)}", (), {})
        return self._shown[id(value)][1]

    def _add(self, result: Any, op: str, target: Any, args: Any, kwargs: Any) -> None:
        node = self.graph.create_node(op, target, args, kwargs)
        node.meta |= {"example_value": result, "stack_trace": _line()}
        if isinstance(result, Tensor):
            self._shown.setdefault(id(result), (result, node))
        elif isinstance(result, (tuple, list)):
            for i, part in enumerate(result):
                self._add(part, "call_function", operator.getitem, (node, i), {})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if getattr(Tensor, f"__{name}__", None) is func:
            name = f"__{name}__"
        fakes, options = tree_map(self._faked, (args, kwargs or {}))
        with self.fakes:
            result = func(*fakes, **options)
            if isinstance(result, Tensor) and any(result is a for a in tree_flatten(args)[0]) and name[-1:] != "_":
                result = torch.ops.aten.alias(result)  # a cast to the dtype that a tensor has: another name in a graph
        tensors = [t for t in tree_flatten(result)[0] if isinstance(t, Tensor)]
        if not tensors and name != "__setitem__":
            return result  # that may be a change of modes, also back to what they were
        if ambient() != self._modes:
            raise NotImplementedError("the graph of a function that changes modes is Dynamo's to write")
        given, named = tree_map(self.node, (args, kwargs or {}))
        if name == "__get__":
            self._add(result, "call_function", getattr, (given[0], func.__self__.__name__), {})
        elif name in _REFLECTED:
            self._add(result, "call_function", _OPERATORS[_REFLECTED[name]], given[::-1], {})
        elif name in _OPERATORS:
            self._add(result, "call_function", _OPERATORS[name], given, named)
        elif getattr(Tensor, name, None) is func:
            self._add(result, "call_method", name, given, named)
        else:
            self._add(result, "call_function", func, given, named)
        return result


def _line() -> str:
    """Returns the line outside of torch and of this file that runs now, in the form of a traceback."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename == __file__ or "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    return f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}\n'


def traced(fn: Callable[..., Any], backend: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]) -> Any:
    """Returns ``fn`` as ``torch.compile(fn, backend=backend, dynamic=False)`` would, recorded anew by each call.

    Raises NotImplementedError if ``fn`` enters or leaves a mode, such as autocast.
    """

    def call(*args: Any) -> Any:
        recorder = _Recorder()
        given = tree_map(lambda a: recorder.fake(a) if isinstance(a, Tensor) else a, args)
        with recorder:
            leaves, spec = tree_flatten(fn(*given))
        recorder.graph.output(
            tuple(map(recorder.node, itertools.filterfalse(lambda t: not isinstance(t, Tensor), leaves)))
        )
        gm = fx.GraphModule(torch.nn.Module(), recorder.graph)
        results = iter(backend(gm, list(recorder.given))(*recorder.given))
        return tree_unflatten([next(results) if isinstance(t, Tensor) else t for t in leaves], spec)

    return call
