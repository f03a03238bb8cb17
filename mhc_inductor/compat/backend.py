# SPDX-License-Identifier: Apache-2.0
"""Private torch APIs that the backend and the graph passes use.

- torch._C._current_graph_task_id: which backward runs on this thread
- torch._dynamo.backends.registry.register_backend: takes the backend's name
- torch._dynamo.guards.GuardBuilder.DUAL_LEVEL: the guard on the level of forward-mode AD
- torch._dynamo.guards.GuardBuilder.EQUALS_MATCH: the guard on a value
- torch._dynamo.output_graph.OutputGraph.compiler_fn: the backend of the graph that is being traced
- torch._dynamo.source.AttrSource: an attribute that a guard is on
- torch._dynamo.source.GlobalStateSource: what that guard is on
- torch._dynamo.symbolic_convert.InstructionTranslator.current_tx: the trace on this thread
- torch._dynamo.symbolic_convert.InstructionTranslator.import_source: a module that a guard reads
- torch._guards.GuardsContext.dynamo_guards: the guards of a trace
- torch._guards.TracingContext.fake_mode: the mode of the fake tensors that the backend gets
- torch._guards.TracingContext.try_get: the trace on this thread, once its backend runs
- torch._inductor.compile_fx.compile_fx: what the ordinary backend looks up at each compile
- torch._inductor.compile_fx.compile_fx_inner: compiles each graph of a model
- torch._inductor.config.get_config_copy: the names of all options
- torch._inductor.custom_graph_pass.CustomGraphPass: the base of cacheable passes
- torch._inductor.custom_graph_pass.CustomInferenceAwareGraphPass (from 2.12): the base of those that know inference
- torch._inductor.list_mode_options: the options of a mode
- torch.fx.experimental.symbolic_shapes.SYMPY_INTERP: what names mean in the guards of a cached graph
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from mhc_inductor.compat import shared
from mhc_inductor.compat.shared import give_names
from mhc_inductor.compat.shared import inductor_config as inductor_config
from mhc_inductor.scope import Change, calls_ops


def guard_dual_level() -> None:
    """Makes Dynamo compile the graph that it is tracing again where another level of forward-mode AD is open.

    Dynamo installs this guard only for a level that the traced code opens (torch 2.11 to 2.15). Without it, compiled
    code drops tangents. Torch 2.15 leaves a call with a tangent to eager mode where it would trace it, but still runs
    code that it compiled without one.
    """
    context = torch._guards.TracingContext.try_get()
    if context is None:
        return
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import GlobalStateSource

    context.guards_context.dynamo_guards.add(GlobalStateSource().make_guard(GuardBuilder.DUAL_LEVEL))


def _add_extremes() -> Callable[[], None]:
    from torch.fx.experimental import symbolic_shapes

    table = symbolic_shapes.SYMPY_INTERP
    ours = {
        "min": functools.partial(_extreme, min, torch.sym_min),
        "max": functools.partial(_extreme, max, torch.sym_max),
    }
    for name, fn in ours.items():
        table.setdefault(name, fn)

    def undo() -> None:
        for name, fn in ours.items():
            if table.get(name) is fn:
                del table[name]

    return undo


symbolic_extremes = Change(_add_extremes)
"""Context in which the guards of a cached graph evaluate ``min`` and ``max`` symbolically.

torch evaluates a cached graph's guards as Python code on symbolic sizes. Python's ``min`` and ``max`` compare the
sizes, which adds a guard: with a warm cache other sizes would recompile, which they do not with a cold one.
"""


def _extreme(plain: Callable[..., Any], symbolic: Callable[[Any, Any], Any], *values: Any) -> Any:
    """Returns the minimum or maximum of ``values``: symbolic if one of them is, else by the plain function."""
    if any(isinstance(v, (torch.SymInt, torch.SymFloat)) for v in values):
        return functools.reduce(symbolic, values)
    return plain(*values)


def compile_fx_module() -> Any:
    """Returns the module whose ``compile_fx`` the ordinary backend looks up at every compile, and ``compile_fx_inner``."""
    from torch._inductor import compile_fx

    return compile_fx


def compile_backend_inside(context: Callable[[], AbstractContextManager[None]]) -> None:
    """Makes Dynamo compile the graph that it is tracing on this thread inside ``context()``.

    Only the backend call of this graph is wrapped. Does nothing if Dynamo is not tracing. Relies on Dynamo reading
    OutputGraph.compiler_fn when it calls the backend, as torch 2.11 to 2.15 do.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        output: Any = InstructionTranslator.current_tx().output
    except AttributeError:
        return
    backend = output.compiler_fn
    if backend is None or hasattr(backend, "mhc_inductor_inside"):
        return

    def inside(*args: Any, **kwargs: Any) -> Any:
        with context():
            return backend(*args, **kwargs)

    # Error messages read the backend's __name__; a backend object may have no name.
    if hasattr(backend, "__name__"):
        inside.__name__ = backend.__name__
    # Dynamo reads compiler_fn to find out whether this is the eager backend.
    inside.compiler_fn = inspect.getattr_static(backend, "compiler_fn", backend)  # type: ignore[attr-defined]
    inside.mhc_inductor_inside = True  # type: ignore[attr-defined]
    output.compiler_fn = inside


def graph_pass_base() -> type:
    """Returns the base class of cacheable graph passes.

    From torch 2.12 on it is the class whose passes are told whether the graph is for inference.
    """
    from torch._inductor import custom_graph_pass as module

    return getattr(module, "CustomInferenceAwareGraphPass", module.CustomGraphPass)


def run_pass(user_pass: Any, graph: Any, is_inference: bool) -> None:
    """Runs a user's graph pass as Inductor would."""
    from torch._inductor import custom_graph_pass as module

    aware = getattr(module, "CustomInferenceAwareGraphPass", ())
    if isinstance(user_pass, aware):
        user_pass(graph, is_inference)
    else:
        user_pass(graph)


def mode_options(mode: str | None) -> dict[str, Any]:
    """Returns the Inductor configuration that ``torch.compile(mode=...)`` stands for."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options().get(mode, {})) if mode and mode != "default" else {}


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options of ``torch.compile`` under Inductor's own names. Raises RuntimeError for an unknown name."""
    known = inductor_config().get_config_copy()
    result = {}
    for name, value in options.items():
        key = name.replace("-", "_")
        if key not in known:
            raise RuntimeError(f"unexpected option {name!r}: torch._inductor.list_options() has the known ones")
        result[key] = value
    return result


def register_backend(name: str, fn: Callable[..., Any]) -> None:
    """Registers ``fn`` as ``torch.compile(backend=name)``. An installed package is also found by its entry point."""
    from torch._dynamo.backends import registry

    registry.register_backend(compiler_fn=fn, name=name)


def guard_attribute(module: str, name: str) -> None:
    """Makes Dynamo compile the graph that it is tracing again where ``module.name`` has another value.

    The value is a string. Does nothing if Dynamo is not tracing on this thread.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource
    from torch._dynamo.symbolic_convert import InstructionTranslator

    context = torch._guards.TracingContext.try_get()
    if context is None:
        return
    try:
        tx: Any = InstructionTranslator.current_tx()
    except AttributeError:
        return
    guard = AttrSource(tx.import_source(module), name).make_guard(GuardBuilder.EQUALS_MATCH)
    context.guards_context.dynamo_guards.add(guard)


def in_backward() -> bool:
    """Returns whether autograd's engine is running a backward on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def graph_input(node: Any, like: Any) -> Any:
    """Makes ``node``, a new placeholder of a Dynamo graph, an input that is no parameter, and returns its fake value.

    Returns:
        A contiguous int32 tensor of the shape and device of ``like``, in the fake mode of the compile in progress.
    """
    context = torch._guards.TracingContext.try_get()
    mode = getattr(context, "fake_mode", None) or getattr(like, "fake_mode", None) or contextlib.nullcontext()
    with mode:
        value = torch.empty(tuple(like.shape), dtype=torch.int32, device=like.device)
    # AOTAutograd asks each placeholder for its source; None is an input that Dynamo did not find in the user's code.
    node._dynamo_source = None
    node.meta["example_value"] = value
    return value


def own_graph(gm: Any) -> None:
    """Gives a graph module a copy of its graph: Dynamo reads the inputs of the one that it made after the backend ran."""
    before = gm.graph
    graph = copy.deepcopy(before)
    give_names(zip(graph.nodes, (node.name for node in before.nodes), strict=True))
    for old, new in zip(before.find_nodes(op="placeholder"), graph.find_nodes(op="placeholder"), strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    gm.graph = graph


def keep_called(ops: Iterable[Any]) -> None:
    """Makes the decompositions of ``ops`` return NotImplemented inside ``scope.calling_ops``, which keeps an op whole."""

    def kept(formula: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return NotImplemented if calls_ops() else formula(*args, **kwargs)

    table = shared.inductor_decompositions()
    table.update({op: functools.partial(kept, table[op]) for op in ops})
