# SPDX-License-Identifier: Apache-2.0
"""Private torch APIs that the lowerings use: Inductor's IR and its code generation.

- torch._guards.detect_fake_mode: the fake mode in which a loop is traced
- torch._higher_order_ops.scan.scan_op: emits a loop; the public scan would start a compile
- torch._higher_order_ops.triton_kernel_wrap.identify_accessed_tensors (from 2.12): what a kernel reads and writes
- torch._higher_order_ops.triton_kernel_wrap.identify_mutated_tensors (until 2.11): the same
- torch._higher_order_ops.triton_kernel_wrap.kernel_side_table: the kernels of a graph
- torch._higher_order_ops.triton_kernel_wrap.triton_kernel_wrapper_mutation: a launch
- torch._inductor.async_compile.AsyncCompile.triton: compiles a kernel in a worker, by its source
- torch._inductor.async_compile.AsyncCompile.use_process_pool: whether the compile workers run
- torch._inductor.codegen.wrapper.PythonWrapperCodegen.define_kernel: gets the source of each generated kernel
- torch._inductor.graph.GraphLowering.aot_mode: whether AOTInductor compiles this graph
- torch._inductor.graph.GraphLowering.cpp_wrapper: whether the graph will run without Python
- torch._inductor.graph.GraphLowering.module: the graph's names
- torch._inductor.graph.GraphLowering.never_reuse_buffers: keeps buffers of loops apart in C++
- torch._inductor.graph.GraphLowering.operations: the launch that was just lowered
- torch._inductor.graph.SubgraphLowering.parent: the graph around a branch or a loop's body
- torch._inductor.ir.Buffer.freeze_layout: fixes the strides of a kernel's argument
- torch._inductor.ir.ExternKernel.realize_input: computes a kernel's argument, views excepted
- torch._inductor.ir.ExternKernel.require_contiguous_strides: copies an argument that is not contiguous
- torch._inductor.ir.IRNode.get_dtype: the dtype of a tensor
- torch._inductor.ir.IRNode.get_size: the shape of a tensor
- torch._inductor.ir.ReinterpretView: a view, whose strides are fixed
- torch._inductor.ir.TensorBox: a tensor that a lowering returns
- torch._inductor.ir.UserDefinedTritonKernel.codegen: writes a launch
- torch._inductor.ir.WhileLoop: a loop, whose buffers are not reused
- torch._inductor.lowering.fallback_handler: a lowering that calls the op
- torch._inductor.lowering.lowerings: the lowerings of empty, full and launches
- torch._inductor.lowering.register_lowering: takes a lowering of an op
- torch._inductor.pattern_matcher.CallFunctionVarArgs: finds a call that a loop replaces
- torch._inductor.pattern_matcher.Match.replace_by_example: puts a traced function in its place
- torch._inductor.runtime.hints.HeuristicType.FIXED: marks kernels of one configuration
- torch._inductor.runtime.triton_heuristics.cached_autotune: makes a kernel with that mark
- torch._inductor.runtime.triton_heuristics.config_from_dict: reads a kernel's configuration
- torch._inductor.runtime.triton_heuristics.user_autotune: marks a user's kernel, whatever its configurations
- torch._inductor.sizevars.SizeVarAllocator.guard_int: the value of a size, with a guard
- torch._inductor.sizevars.SizeVarAllocator.optimization_hint: the value of a size, without one
- torch._inductor.sizevars.SizeVarAllocator.statically_known_multiple_of: whether a size is a multiple
- torch._inductor.virtualized.V.graph: the graph that is being lowered
- torch._subclasses.fake_tensor.FakeTensorMode.allow_scalar_outputs: lets a loop have a counter without fullgraph
- torch.utils._sympy.functions.CeilDiv: a division of sizes that rounds up
"""

from __future__ import annotations

import ast
import copy
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mhc_inductor.compat.shared import COMPILED
from mhc_inductor.compat.shared import inductor_decompositions as inductor_decompositions
from mhc_inductor.scope import Change, calls_ops, replace


def register_lowering(op: Any, fn: Callable[..., Any]) -> None:
    """Registers ``fn`` as Inductor's lowering of ``op``; inside ``scope.calling_ops`` the generated code calls the op."""
    from torch._inductor.lowering import register_lowering as register

    def lower(*args: Any, **kwargs: Any) -> Any:
        return (fallback(op) if calls_ops() else fn)(*args, **kwargs)

    register(op, type_promotion_kind=None)(lower)


def fallback(op: Any) -> Callable[..., Any]:
    """Returns a lowering that calls ``op`` from the generated code."""
    from torch._inductor.lowering import fallback_handler

    return fallback_handler(op, add_to_fallback_set=False)


def empty(shape: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Any:
    """Returns an uninitialised buffer in Inductor's IR."""
    from torch._inductor.lowering import lowerings

    return lowerings[torch.ops.aten.empty.memory_format](list(shape), dtype=dtype, device=device)


def zeros(shape: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Any:
    """Returns a buffer of zeros in Inductor's IR."""
    from torch._inductor.lowering import lowerings

    return lowerings[torch.ops.aten.full.default](list(shape), 0, dtype=dtype, device=device)


def contiguous(t: Any) -> Any:
    """Returns ``t`` realised in contiguous layout."""
    from torch._inductor import ir

    # require_contiguous checks only the order of strides: an expanded tensor would pass.
    return ir.ExternKernel.require_contiguous_strides(t)


def fixed_layout(t: Any) -> Any:
    """Returns ``t`` realised, or as a view of a realised buffer, with strides that no longer change.

    Copies only if no strides describe the view.
    """
    from torch._inductor import ir

    t = ir.ExternKernel.realize_input(t)
    if not isinstance(t, ir.ReinterpretView):
        t.freeze_layout()
    return t if isinstance(t, ir.TensorBox) else ir.TensorBox(t)


def statically_multiple(expr: Any, of: int) -> bool:
    """Returns whether ``expr`` is a multiple of ``of`` for all values of its symbols."""
    from torch._inductor.virtualized import V

    return bool(V.graph.sizevars.statically_known_multiple_of(expr, of))


def is_node(t: Any) -> bool:
    """Returns whether ``t`` is a tensor of Inductor's IR."""
    from torch._inductor import ir

    return isinstance(t, ir.IRNode)


def hint_of(value: Any) -> Any:
    """Returns the present value of a symbolic size, and any other value unchanged."""
    import sympy
    from torch._inductor.virtualized import V

    return int(V.graph.sizevars.optimization_hint(value)) if isinstance(value, sympy.Expr) else value


def meta_tensor(t: Any) -> torch.Tensor:
    """Returns a contiguous meta tensor with the present shape and the dtype of a tensor of Inductor's IR."""
    return torch.empty([hint_of(n) for n in t.get_size()], dtype=t.get_dtype(), device="meta")


def ceil_div(a: Any, b: Any) -> Any:
    """Returns the expression a / b rounded up."""
    from torch.utils._sympy.functions import CeilDiv

    return CeilDiv(a, b)


def static_int(expr: Any) -> int:
    """Returns ``expr`` as an integer. Adds a guard if it is symbolic."""
    from torch._inductor.virtualized import V

    return int(V.graph.sizevars.guard_int(expr))


def kernel_mark() -> str:
    """Returns a word that no name in the graph being lowered contains: :func:`configured_kernel` puts it into names.

    In generated code, kernels share one scope with the graph's arguments, saved tensors and constants, which are named
    after nodes. FX writes the names of calls in lower case, but users choose those of arguments and modules.
    """
    from torch._inductor.virtualized import V

    graph: Any = V.graph
    while getattr(graph, "parent", None) is not None:  # the graph of a branch or of a loop's body
        graph = graph.parent
    if not hasattr(graph, "mhc_inductor_mark"):
        bodies = [m.graph for m in graph.module.modules() if isinstance(m, torch.fx.GraphModule)]
        named = (name for body in bodies for node in body.nodes for name in (node.name, node.target))
        names = {name for name in named if isinstance(name, str)}
        mark = "Kernel"
        while any(mark in name for name in names):
            mark += "s"
        graph.mhc_inductor_mark = mark
    return str(graph.mhc_inductor_mark)


@functools.cache
def configured_kernel(
    kernel: Any, constexprs: tuple[tuple[str, Any], ...], num_warps: int, num_stages: int, mark: str
) -> Any:
    """Returns a copy of ``kernel`` with one fixed configuration, built around a function object of its own.

    Inductor tells the user kernels of a graph apart by the identity of their functions, not by their configurations: a
    second configuration of the same function would silently run the first one's code. Results are cached, so that
    Inductor's kernel table does not grow. The copy's name ends in ``mark``: Inductor calls a variable of the generated
    code by that name and a number.
    """
    import types

    import triton

    fn = kernel.fn
    own = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    own.__module__, own.__qualname__ = fn.__module__, fn.__qualname__
    own.__annotations__, own.__doc__ = fn.__annotations__, fn.__doc__
    config = triton.Config(dict(constexprs), num_warps=num_warps, num_stages=num_stages)
    jitted = triton.jit(own)
    jitted.__name__ = f"{fn.__name__}_{mark}"
    jitted._unsafe_update_src(jitted.src.replace(f"def {fn.__name__}(", f"def {jitted.__name__}(", 1))
    jitted.mhc_inductor_accesses = {}
    return triton.autotune(configs=[config], key=[])(jitted)


def _remember_accesses() -> Callable[[], None]:
    from torch._higher_order_ops import triton_kernel_wrap as module

    def wrap(analyse: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(analyse)
        def remembered(kernel: Any, kwargs: Mapping[str, Any], *rest: Any) -> Any:
            known = getattr(kernel, "mhc_inductor_accesses", None)
            if known is None:
                return analyse(kernel, kwargs, *rest)
            key = tuple(sorted((k, *_as_analysed(v)) for k, v in kwargs.items()))
            if key not in known:
                known[key] = analyse(kernel, kwargs, *rest)
            return copy.copy(known[key])

        return remembered

    # Before torch 2.12 the function is called identify_mutated_tensors.
    name = "identify_accessed_tensors" if hasattr(module, "identify_accessed_tensors") else "identify_mutated_tensors"
    return replace(module, name, wrap)


remembered_accesses = Change(_remember_accesses)
"""Context in which Inductor analyses once per :func:`configured_kernel`, not per launch, what it reads and writes.

The analysis compiles the kernel's source to Triton's IR. It takes two thirds of the time of lowering a model with many
such launches.
"""


def _as_analysed(value: Any) -> tuple[str, str]:
    """Returns what a kernel's analysis depends on: a tensor's dtype, or the type and any non-symbolic value."""
    import sympy

    if is_node(value):
        return "tensor", str(value.get_dtype())
    return type(value).__name__, "" if isinstance(value, sympy.Expr) else repr(value)


def launch_kernel(kernel: Any, grid: tuple[Any, ...], tensors: Mapping[str, Any], constants: Mapping[str, Any]) -> None:
    """Emits one launch of a :func:`configured_kernel`, through Inductor's lowering of the Triton-kernel HOP."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation
    from torch._inductor import ir
    from torch._inductor.lowering import lowerings
    from torch._inductor.virtualized import V

    with remembered_accesses:
        lowerings[triton_kernel_wrapper_mutation](
            kernel_idx=kernel_side_table.add_kernel(kernel),
            constant_args_idx=kernel_side_table.add_constant_args(dict(constants)),
            grid=[grid],
            tma_descriptor_metadata={},
            kwargs=dict(tensors),
        )
    node = V.graph.operations[-1]
    if isinstance(node, ir.UserDefinedTritonKernel):
        node.codegen = functools.partial(_compile_early, node.codegen)  # type: ignore[method-assign]


def _compile_early(codegen: Callable[[Any], None], wrapper: Any) -> None:
    """Generates the code of a launch, and sends a kernel that it defines to Inductor's compile workers at once.

    Inductor does so with its own kernels, but starts on user kernels only when the generated module is loaded. The
    kernel itself, in a module of its own, keeps the name of its function, by which profiles show it.
    """
    define = wrapper.define_kernel

    def defined(name: str, body: str, *args: Any, **kwargs: Any) -> Any:
        body = _MARKED.sub(r"\1\2", launched_statically(body))
        submit_kernel(body)
        return define(name, body, *args, **kwargs)

    wrapper.define_kernel = defined
    try:
        codegen(wrapper)
    finally:
        del wrapper.define_kernel


_MARKED = re.compile(r"(async_compile\.triton\('|^def )(\w+)_Kernels*", re.MULTILINE)

_USER_AUTOTUNE = "@triton_heuristics.user_autotune("

_FIXED = (
    "@(lambda configs, triton_meta, **made: triton_heuristics.cached_autotune("
    "None, [*map(triton_heuristics.config_from_dict, configs)], "
    f"triton_meta={{**triton_meta, **{COMPILED}}}, "
    "heuristic_type=triton_heuristics.HeuristicType.FIXED, **made))("
)


def launched_statically(body: str) -> str:
    """Returns the generated source of a user kernel, marked as Inductor marks its own kernels of one configuration.

    Inductor launches those from a C function of torch, user kernels from a Python module that Triton generates and a C
    compiler builds, kernel by kernel: slower to compile and to launch. Where torch cannot launch a kernel so, it falls
    back to Triton's launcher by itself. Its option ``static_launch_user_defined_triton_kernels`` would do the same, but
    is not sent to the compile workers, which decide this (torch 2.11 to 2.15). FP fusion, of which Inductor says nothing
    for user kernels, is that of kernels launched eagerly (``kernels.COMPILED``).
    """
    return body.replace(_USER_AUTOTUNE, _FIXED, 1)


def submit_kernel(body: str) -> None:
    """Starts compiling the kernel of a generated ``async_compile.triton(name, source, ...)``, if workers are ready."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.virtualized import V

    if V.graph.cpp_wrapper or not AsyncCompile.use_process_pool():
        return
    call = ast.parse(body.strip(), mode="eval").body
    if isinstance(call, ast.Call):
        # Pass exactly the strings of the generated code: Inductor finds a kernel that is being compiled by them.
        keywords = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
        AsyncCompile().triton(*(ast.literal_eval(a) for a in call.args), **keywords)


def packaging() -> bool:
    """Returns whether the graph being lowered will run without Python (AOTInductor or the C++ wrapper)."""
    from torch._inductor.virtualized import V

    return bool(V.graph.aot_mode or V.graph.cpp_wrapper)


def keep_loop_outputs() -> None:
    """Keeps Inductor from reusing the buffers that the loops lowered so far write in place.

    Its C++ wrapper declares such a buffer a second time where it reuses one (torch 2.13 to 2.15; that of 2.11 and 2.12
    cannot write a loop with a counter).
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    for operation in V.graph.operations:
        if isinstance(operation, ir.WhileLoop):
            V.graph.never_reuse_buffers.update(out.get_name() for out in operation.mutation_outputs)


def scan(step: Callable[..., Any], state: Sequence[Any], inputs: Sequence[Any], sizes: Sequence[Any] = ()) -> Any:
    """Emits a scan over the first dimension into a graph that is traced below autograd.

    Args:
        step: ``step(*state, *inputs[t], *sizes)`` returns ``(*state, *outputs[t])``.
        state: the initial state.
        inputs: tensors whose first dimension is scanned.
        sizes: every symbol in the shapes.

    Returns:
        ``(*last state, *stacked outputs)``.
    """
    from torch._guards import detect_fake_mode
    from torch._higher_order_ops.scan import scan_op

    # Inductor lowers it to a while loop whose counter it reads as a scalar, which a graph compiled without fullgraph
    # forbids.
    mode = detect_fake_mode(tuple(inputs))
    if mode is not None:
        mode.allow_scalar_outputs = True
    # The public scan function would start a compile of its own here.
    return scan_op(step, list(state), list(inputs), tuple(sizes))


def replace_by_traced(node: Any, fn: Callable[..., Sequence[Any]]) -> None:
    """Replaces a node of a graph in Inductor by the nodes that ``fn`` runs on its arguments, by Inductor's pattern matcher.

    Args:
        node: a call whose results are read by getitems.
        fn: returns as many results as the call.
    """
    from torch._inductor.pattern_matcher import CallFunctionVarArgs

    nodes = node.all_input_nodes

    def run(*values: Any) -> Any:
        of = dict(zip(nodes, values, strict=True))
        return fn(*torch.fx.map_arg(node.args, of.__getitem__))

    match: Any = CallFunctionVarArgs(node.target).match(node)
    match.replace_by_example(run, nodes, run_functional_passes=False)
