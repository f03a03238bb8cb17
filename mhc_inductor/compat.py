"""All private torch APIs that this package uses, in one place (torch 2.11 to 2.15)."""

from __future__ import annotations

import ast
import contextlib
import contextvars
import copy
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch

# These names are private but documented or in wide use, and the same in torch 2.11 to 2.15.
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

from mhc_inductor.scope import Change, replace


def onnx_exporting() -> bool:
    """Returns whether ``torch.onnx.export`` runs.

    The public function imports the exporter, so it is asked only where that is imported already. The name of the module
    is that of 2.11 to 2.13.
    """
    return "torch.onnx._internal.exporter._flags" in sys.modules and torch.onnx.is_in_onnx_export()


def tracing() -> bool:
    """Returns whether Dynamo, AOTAutograd or AOTInductor is compiling a graph on this thread."""
    return torch._guards.TracingContext.try_get() is not None or in_package()


def functorch_active() -> bool:
    """Returns whether a functorch transform (vmap, grad, ...) is active."""
    return bool(torch._C._are_functorch_transforms_active())


def any_tangent(args: Sequence[Any]) -> bool:
    """Returns whether forward-mode AD differentiates with respect to one of the arguments."""
    from torch.autograd import forward_ad

    if not in_dual_level():
        return False
    return any(isinstance(a, torch.Tensor) and forward_ad.unpack_dual(a).tangent is not None for a in args)


def in_dual_level() -> bool:
    """Returns whether a level of forward-mode AD is open (torch 2.11 to 2.15)."""
    from torch.autograd import forward_ad

    return forward_ad._current_level >= 0


def guard_dual_level() -> None:
    """Makes Dynamo compile the graph that it is tracing again where another level of forward-mode AD is open.

    Dynamo has this guard but installs it nowhere (seen in torch 2.13); without it, compiled code drops tangents.
    """
    context = torch._guards.TracingContext.try_get()
    if context is None:
        return
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import GlobalStateSource

    guard = getattr(GuardBuilder, "DUAL_LEVEL", None)
    if guard is not None:
        context.guards_context.dynamo_guards.add(GlobalStateSource().make_guard(guard))


def any_tracked(args: Sequence[Any]) -> bool:
    """Returns whether torch.func.grad or vjp differentiates with respect to one of the arguments."""
    tensors = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    return any(map(torch._C._functorch.is_gradtrackingtensor, tensors))


def register_autograd(
    qualname: str, backward: Callable[..., Any], setup: Callable[..., None], library: Any, guard: Callable[..., None]
) -> None:
    """Registers an op's backward formula, with a guard that runs before the op's autograd kernel.

    Relies on torch.library.register_autograd passing its kernel for the Autograd key to ``lib.impl`` (torch 2.11 to
    2.15).

    Args:
        qualname: the op's qualified name.
        backward: the backward formula.
        setup: saves what ``backward`` needs.
        library: the library that the kernel is registered in.
        guard: is called with the op's positional arguments, also if none of them requires a gradient.
    """

    class Guarded:
        def impl(self, name: str, kernel: Callable[..., Any], key: str, **kwargs: Any) -> None:
            @functools.wraps(kernel)
            def run(keyset: Any, *args: Any, **given: Any) -> Any:
                guard(*args)
                return kernel(keyset, *args, **given)

            library.impl(name, run, key, **kwargs)

    torch.library.register_autograd(qualname, backward, setup_context=setup, lib=cast("Any", Guarded()))


def register_nested(qualname: str, refuse: Callable[..., None], library: Any) -> None:
    """Makes an op call ``refuse`` for jagged nested tensors where it is called below autograd (torch 2.11 to 2.15)."""
    from torch.nested._internal.nested_tensor import NestedTensor

    def rule(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse(*args)
        return NotImplemented

    torch.library.register_torch_dispatch(qualname, NestedTensor, rule, lib=library)


def real_among_fakes(args: Sequence[Any]) -> tuple[int, int] | None:
    """Returns the places of a real tensor and of a fake one whose mode takes no real ones, or None.

    Seen in torch 2.11 to 2.15.
    """
    plain = (torch.Tensor, torch.nn.Parameter)
    tensors = [t for t in args if isinstance(t, torch.Tensor)]
    kinds = {type(t) for t in tensors}
    if len(kinds) < 2 or kinds.isdisjoint(plain):
        return None
    from torch._subclasses.fake_tensor import FakeTensor, fake_tensor_tls

    fake = next((i for i, t in enumerate(args) if isinstance(t, FakeTensor)), None)
    if fake is None or args[fake].fake_mode.allow_non_fake_inputs or fake_tensor_tls.allow_non_fake_inputs_override:
        return None
    return next(i for i, t in enumerate(args) if type(t) in plain), fake


def register_sharding(op: Any, strategies: Callable[..., Any]) -> None:
    """Registers an op's sharding strategies for DTensor, by ``torch.distributed.tensor.experimental.register_sharding``.

    Two things that torch 2.11 lacks are added: its cache of decisions leaves an argument of None before the first integer
    out of the key, so every argument is made part of it; and the mesh is looked for in the first argument alone, so a
    strategy finds it in any (torch 2.13 does both).

    Args:
        op: the overload.
        strategies: called with the op's arguments; returns its acceptable placements.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import register_sharding as register

    register(op)(strategies)
    propagator = DTensor._op_dispatcher.sharding_propagator
    info = propagator.op_to_schema_info.get(op)
    if info is not None:
        info.static_argnum = 0
    strategy = propagator.op_strategy_funcs.get(op)
    if strategy is not None:
        propagator.op_strategy_funcs[op] = functools.partial(_with_mesh, strategy)


def _with_mesh(strategy: Callable[..., Any], schema: Any) -> Any:
    """Calls an op's strategy with a schema whose mesh is that of its first argument that has one."""
    if schema.args_schema and schema.args_schema[0] is None:
        mesh = next((a.mesh for a in schema.args_schema if hasattr(a, "mesh")), None)
        if mesh is not None:
            schema.get_mesh_from_args = lambda validate=True: mesh
    return strategy(schema)


def schema_types(op: Any) -> tuple[tuple[str, str, bool], ...]:
    """Returns (name, type, whether None is accepted) of each of an op's arguments.

    The type is Tensor, float, int, bool or str; SymInt counts as int.
    """
    names = []
    for argument in op._schema.arguments:
        kind = str(argument.type)
        inner = kind.removeprefix("Optional[").removesuffix("]")
        names.append((argument.name, "int" if inner == "SymInt" else inner, inner != kind))
    return tuple(names)


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns Inductor's table of decompositions for AOTAutograd, for callers that add entries."""
    from torch._inductor import decomposition

    # The first compile of the process caches a copy of the table; drop it so that new entries are seen.
    decomposition.fast_random_decomps.cache_clear()
    return decomposition.decompositions


def register_lowering(op: Any, fn: Callable[..., Any]) -> None:
    """Registers ``fn`` as Inductor's lowering of ``op``."""
    from torch._inductor.lowering import register_lowering as register

    register(op, type_promotion_kind=None)(fn)


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
    "@(lambda configs, **made: triton_heuristics.cached_autotune("
    "None, [*map(triton_heuristics.config_from_dict, configs)], "
    "heuristic_type=triton_heuristics.HeuristicType.FIXED, **made))("
)


def launched_statically(body: str) -> str:
    """Returns the generated source of a user kernel, marked as Inductor marks its own kernels of one configuration.

    Inductor launches those from a C function of torch, user kernels from a Python module that Triton generates and a C
    compiler builds, kernel by kernel: slower to compile and to launch (torch 2.11 to 2.15). Where torch cannot launch a
    kernel so, it falls back to Triton's launcher by itself.
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


_without_ops: contextvars.ContextVar[bool] = contextvars.ContextVar("mhc_inductor_without_ops", default=False)


def in_package() -> bool:
    """Returns whether AOTInductor is compiling a package, which will run without Python (torch 2.11 to 2.15).

    Before lowering there is no graph that :func:`packaging` could ask.
    """
    virtualized = sys.modules.get("torch._inductor.virtualized")
    return virtualized is not None and bool(virtualized.V.aot_compilation)


def packaging_formulas() -> bool:
    """Returns whether decompositions must leave no op: in a package, and inside :func:`without_ops`."""
    return _without_ops.get() or in_package()


@contextlib.contextmanager
def without_ops() -> Iterator[None]:
    """Makes decompositions leave no op while the body runs."""
    token = _without_ops.set(True)
    try:
        yield
    finally:
        _without_ops.reset(token)


def keep_loop_outputs() -> None:
    """Keeps Inductor from reusing the buffers that the loops lowered so far write in place.

    Its C++ wrapper declares such a buffer a second time where it reuses one (torch 2.11 to 2.13).
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    for operation in V.graph.operations:
        if isinstance(operation, ir.WhileLoop):
            V.graph.never_reuse_buffers.update(out.get_name() for out in operation.mutation_outputs)


def compiled_cpp(source: str, flags: Sequence[str]) -> Any:
    """Returns ``source`` as a loaded shared library (ctypes.CDLL), compiled or read from Inductor's cache on disk.

    Raises what Inductor raises where there is no compiler or it fails.
    """
    from torch._inductor.codecache import CppCodeCache

    # Spares three probe programs that look for vector instructions. torch 2.11 has no such parameter.
    known = "needs_vec_isa" in inspect.signature(CppCodeCache.load_async).parameters
    return CppCodeCache.load(source, "cpu", extra_flags=flags, **({"needs_vec_isa": False} if known else {}))


def compile_fx_module() -> Any:
    """Returns the module whose ``compile_fx`` the ordinary Inductor backend looks up at every compile."""
    from torch._inductor import compile_fx

    return compile_fx


def compile_backend_inside(context: Callable[[], AbstractContextManager[None]]) -> None:
    """Makes Dynamo compile the graph that it is tracing on this thread inside ``context()``.

    Only the backend call of this graph is wrapped. Does nothing if Dynamo is not tracing. Relies on Dynamo reading
    OutputGraph.compiler_fn when it calls the backend (torch 2.11 to 2.15).
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


def inductor_config() -> Any:
    """Returns Inductor's configuration module."""
    from torch._inductor import config

    return config


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


def counters() -> Any:
    """Returns this package's counters among Dynamo's."""
    from torch._dynamo.utils import counters as dynamo_counters

    return dynamo_counters["mhc_inductor"]


def register_backend(name: str, fn: Callable[..., Any]) -> None:
    """Registers ``fn`` as ``torch.compile(backend=name)``. An installed package is also found by its entry point."""
    from torch._dynamo.backends import registry

    registry.register_backend(compiler_fn=fn, name=name)


def fake_mode_of(tensors: Sequence[Any]) -> Any:
    """Returns the fake mode of the first fake tensor, or of the first one inside a DTensor, or None.

    Does not ask for Dynamo's current fake mode, because one compile has several.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    inside = [local_tensor(t) if is_dtensor(t) else t for t in tensors]
    return next((t.fake_mode for t in inside if isinstance(t, FakeTensor)), None)


def no_new_guards(mode: Any) -> Any:
    """Returns a context in which operations on ``mode``'s fake tensors add no guard to the compiled function."""
    from torch._dispatch.python import enable_python_dispatcher

    stack = contextlib.ExitStack()
    shape_env = getattr(mode, "shape_env", None)
    if shape_env is not None:
        stack.enter_context(shape_env.suppress_guards())
        # Data-dependent sizes and numbers (item) belong to this run, not to the graph. Seen in torch 2.11 to 2.15.
        stack.enter_context(shape_env.ignore_fresh_unbacked_symbols())
        # Composite operations in C++ would specialise a dynamic dimension to its present size.
        stack.enter_context(enable_python_dispatcher())
    return stack


def _rms_norm(x: Any, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
    if eps is None and x.dtype != torch.float32:
        return NotImplemented
    dims = [-1 - i for i in range(len(shape))]
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    rstd = torch.rsqrt((x * x).mean(dims, keepdim=True) + eps)
    y = x * rstd
    return y if weight is None else y * weight


def _fused_rms_norm(x: Any, shape: Sequence[int], weight: Any, eps: float | None) -> Any:
    y = _rms_norm(x, shape, weight, eps)
    return y if y is NotImplemented else (y, y)


def _addmm(bias: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    product = torch.matmul(a, b)
    return (bias if beta == 1 else bias * beta) + (product if alpha == 1 else product * alpha)


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    y = torch.matmul(x, weight.t())
    return y if bias is None else y + bias


def _vector_norm(x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if ord not in (1, 2) or dim is None:
        return NotImplemented
    if ord == 1:
        return x.abs().sum(dim, keepdim=keepdim)
    return torch.sqrt((x * x).sum(dim, keepdim=keepdim))


def _norm(x: Any, p: float | None, dim: Any, keepdim: bool = False) -> Any:
    return _vector_norm(x, 2 if p is None else p, dim, keepdim)


def _addcmul(x: Any, a: Any, b: Any, *, value: float = 1) -> Any:
    return x + (a * b if value == 1 else a * b * value)


def _addcdiv(x: Any, a: Any, b: Any, *, value: float = 1) -> Any:
    return x + (a / b if value == 1 else a / b * value)


@functools.cache
def analysis_decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns decompositions of ATen operations into simpler ones, for the routing analysis only.

    They are never used to generate code.
    """
    aten = torch.ops.aten
    table: dict[Any, Callable[..., Any]] = {
        aten.addmm.default: _addmm,
        aten.baddbmm.default: _addmm,
        aten.linear.default: _linear,
        aten.linalg_vector_norm.default: _vector_norm,
        aten.norm.ScalarOpt_dim: _norm,
        aten.addcmul.default: _addcmul,
        aten.addcdiv.default: _addcdiv,
        aten.rms_norm.default: _rms_norm,
    }
    fused = getattr(aten, "_fused_rms_norm", None)
    if fused is not None:
        table[fused.default] = _fused_rms_norm
    return table


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Adds a text to the structured log (``TORCH_TRACE``), where tlparse shows it with the graph being compiled."""
    from torch._logging._internal import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=payload)


@contextlib.contextmanager
def captured_apart() -> Iterator[dict[str, Any]]:
    """Isolates a capture from other compiles of the process.

    Inside, Dynamo ignores the recompile limits and the sizes that earlier compiles have seen, and records neither from
    this compile. Without it, functions that reached the recompile limit earlier would run uncompiled.

    Yields:
        Arguments for torch.compile that also isolate its code on the user's functions, where torch has them (seen in
        torch 2.13).
    """
    from torch._dynamo import config, pgo

    apart = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    limits = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), sys.maxsize)
    sizes: Any = pgo.get_code_state()
    before = dict(sizes)
    sizes.clear()
    try:
        with config.patch(limits):
            yield {"isolate_recompiles": True} if apart else {}
    finally:
        sizes.clear()
        sizes.update(before)


def uncompiled(fn: Any) -> Any:
    """Returns what ``torch.compile`` was called with if ``fn`` is its result, else ``fn``."""
    fn = getattr(fn, "_orig_mod", fn)
    return getattr(fn, "_torchdynamo_orig_callable", fn)


def has_compiled(module: torch.nn.Module) -> bool:
    """Returns whether a module or one inside it is compiled, by torch.compile or in place (torch 2.11 to 2.15)."""
    from torch._dynamo import OptimizedModule

    return any(isinstance(m, OptimizedModule) or m._compiled_call_impl is not None for m in module.modules())


def captured_graphs() -> int:
    """Returns how many graphs Dynamo has captured in this process since it was reset (torch 2.11 to 2.15)."""
    from torch._dynamo.utils import counters as dynamo_counters

    return int(dynamo_counters["stats"]["unique_graphs"])


def start_compile_workers() -> None:
    """Starts the processes that compile Triton kernels, if there is a GPU, without waiting (torch 2.11 to 2.15).

    A compile sends its kernels to them only once they run.
    """
    if torch.cuda.is_available():
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.use_process_pool()


def hides_writes(node: Any) -> bool:
    """Returns whether a Dynamo node is ``t.data``, through which autograd sees no write (torch 2.11 to 2.15)."""
    return node.target is getattr(torch._C._autograd, "_get_data_attr", None) and node.op == "call_function"


def mode_change(node: Any) -> tuple[str, Any] | None:
    """Returns how a node of a Dynamo graph changes the grad, inference or autocast mode, or None (torch 2.11 to 2.15).

    Returns:
        (kind, value). The kind is "grad", "enter_inference", "exit_inference", "enter_autocast" or "exit_autocast"; the
        value is the new state, or for an exit the node that entered.
    """
    if node.op != "call_function":
        return None
    kind = _mode_changes().get(node.target)
    if kind is None:
        return None
    if kind == "grad":
        return kind, bool(node.args[0])
    if kind == "enter_inference":
        return kind, bool(node.args[0]) if node.args else True
    if kind == "enter_autocast":
        device, dtype, enabled = (*node.args, None, None, None)[:3]
        return kind, (device, dtype, True if enabled is None else enabled, None)
    return kind, node.args[0] if node.args else None


def checkpoint_policy(graph: Any) -> Any:
    """Returns the context function of the selective checkpoint with body ``graph``, or None (torch 2.11 to 2.15)."""
    module = graph.owning_module
    return None if module is None else module.meta.get("_checkpoint_context_fn")


@functools.cache
def _mode_changes() -> dict[Any, str]:
    from torch.amp import autocast_mode
    from torch.autograd import grad_mode

    return {
        torch._C._set_grad_enabled: "grad",
        torch.set_grad_enabled: "grad",
        grad_mode._enter_inference_mode: "enter_inference",
        grad_mode._exit_inference_mode: "exit_inference",
        autocast_mode._enter_autocast: "enter_autocast",
        autocast_mode._exit_autocast: "exit_autocast",
    }


@contextlib.contextmanager
def modes_kept() -> Iterator[None]:
    """Restores grad mode and the CPU's random state after the body."""
    grad, random = torch.is_grad_enabled(), torch.get_rng_state()
    try:
        yield
    finally:
        torch._C._set_grad_enabled(grad)
        torch.set_rng_state(random)


def may_mutate(operator: Any) -> bool:
    """Returns whether a higher-order operator without a body may write its arguments, as a Triton launch does."""
    name = str(operator)
    return "functional" not in name and "flex_attention" not in name


def reads_data(error: Exception) -> bool:
    """Returns whether a call on fake tensors failed because its result depends on their data (torch 2.11 to 2.15)."""
    from torch._subclasses.fake_tensor import DataDependentOutputException

    return isinstance(error, DataDependentOutputException)


def is_wrapper(t: Any) -> bool:
    """Returns whether a tensor's class wraps other tensors, as DTensor does (torch 2.11 to 2.15)."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return bool(is_traceable_wrapper_subclass(t))


def is_dtensor(t: Any) -> bool:
    """Returns whether a tensor is a DTensor. Imports nothing: where there is one, its module has been imported."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(t, kind)


def local_tensor(t: Any) -> Any:
    """Returns the tensor inside a DTensor, without the step of autograd that ``to_local`` makes (seen in torch 2.13)."""
    return t._local_tensor


def storage_key(t: Any) -> int:
    """Returns a key of the storage that a tensor shares with its views."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    try:
        return int(t.untyped_storage()._cdata)
    except NotImplementedError:  # this layout has no storage, so there are no views
        return id(t)


def hints(graph: Any) -> dict[str, int]:
    """Returns the present values, by name, of the symbols that are sizes in a Dynamo graph."""
    return {str(size.node.expr): int(size.node.hint) for size in _dynamic_sizes(graph) if size.node.expr.is_Symbol}


def present_sizes(graph: Any) -> dict[str, int]:
    """Returns the present values, by their text, of the symbols and expressions that are sizes in a Dynamo graph."""
    return {str(size.node.expr): int(size.node.hint) for size in _dynamic_sizes(graph)}


def _dynamic_sizes(graph: Any) -> Iterator[Any]:
    for node in graph.nodes:
        example = node.meta.get("example_value", node.meta.get("val"))
        sizes = example.shape if isinstance(example, torch.Tensor) else (example,)
        for size in sizes:
            if isinstance(size, torch.SymInt) and size.node.has_hint():
                yield size


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


def expression(size: Any) -> Any:
    """Returns the sympy expression of a torch.SymInt."""
    return size.node.expr


def hint(size: Any) -> int:
    """Returns the present value of a size."""
    return size if isinstance(size, int) else int(size.node.hint)


def same_size(a: Any, b: Any) -> bool:
    """Returns whether two sizes are the same number or the same expression, without adding a guard."""
    one, two = (s if isinstance(s, int) else expression(s) for s in (a, b))
    return bool(one == two)


def is_symbol(size: Any) -> bool:
    """Returns whether ``size`` is a single symbol, neither an integer nor a compound expression."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.is_Symbol)


@contextlib.contextmanager
def outside_compile() -> Iterator[None]:
    """Runs the body on real tensors during a compile as a plain eager call would run (torch 2.11 to 2.15).

    Switches off fake and tracing modes, autocast, inference mode and compiled autograd. Restores the random state and
    all modes afterwards.
    """
    from torch._dynamo.compiled_autograd import _disable as plain_autograd
    from torch.utils._python_dispatch import _disable_current_modes

    on_gpus = torch.cuda.is_initialized()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=range(torch.cuda.device_count()) if on_gpus else []))
        stack.enter_context(torch._guards.tracing(None))
        stack.enter_context(_disable_current_modes())
        stack.enter_context(plain_autograd())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def free_memory(device: torch.device) -> int:
    """Returns how many bytes can be allocated on ``device`` now; for a CPU, what the kernel reports as available."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as file:
            found = (line.split() for line in file)
            return next(int(fields[1]) * 1024 for fields in found if fields[0] == "MemAvailable:")
    except (OSError, StopIteration):
        return 1 << 33  # not Linux: assume 8 GiB


def is_mode_region(node: Any) -> bool:
    """Returns whether a node of an exported graph calls a region under another grad mode, or under autocast."""
    from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled

    return node.op == "call_function" and node.target in (wrap_with_autocast, wrap_with_set_grad_enabled)


def mode_region(node: Any) -> tuple[tuple[Any, Any], tuple[Any, Any], Any, tuple[Any, ...]]:
    """Returns the parts of a call for which :func:`is_mode_region` holds (torch 2.11 to 2.15).

    Returns:
        (call that enters the mode, its arguments), (call that leaves it, its arguments; None for what the first call
        returned), the node that holds the region's graph, and the inputs of that graph.
    """
    from torch._higher_order_ops.wrap import wrap_with_set_grad_enabled
    from torch.amp import autocast_mode

    if node.target is wrap_with_set_grad_enabled:
        enabled, holder, *inputs = node.args
        change: Any = torch._C._set_grad_enabled
        return (change, (enabled,)), (change, (not enabled,)), holder, tuple(inputs)
    *mode, holder = node.args[:5]
    enter, leave = autocast_mode._enter_autocast, autocast_mode._exit_autocast
    return (enter, tuple(mode)), (leave, None), holder, tuple(node.args[5:])


def with_mode_regions(gm: Any, signature: Any) -> tuple[Any, Any]:
    """Returns an exported graph, and its signature, with regions made of calls that switch modes (torch 2.11 to 2.15)."""
    from torch._export.passes.replace_autocast_with_hop_pass import replace_autocast_with_hop_pass
    from torch._export.passes.replace_set_grad_with_hop_pass import replace_set_grad_with_hop_pass

    return replace_autocast_with_hop_pass(*replace_set_grad_with_hop_pass(gm, signature))


def give_names(named: Iterable[tuple[Any, str]]) -> None:
    """Gives nodes of one graph names that are unique among them, also such as FX avoids (torch 2.11 to 2.15).

    A node that is copied or made anew under the name of a builtin, as an exported argument may have, gets a number after
    it: ``input`` becomes ``input_1``.
    """
    for node, name in named:
        if node.name != name:
            node.name = name
            node.graph._graph_namespace.create_name(name, None)  # no later node gets it


def traced(fn: Callable[..., Any], inputs: Sequence[Any], mode: Any, composite: bool) -> Any:
    """Returns the graph of the ATen operations that ``fn`` runs on fake tensors and sizes. Adds no guards.

    Args:
        fn: a function of tensors and sizes.
        inputs: its arguments.
        mode: the fake mode of the tensors, or None.
        composite: keep composite operations, such as ``reshape``. Else the graph has core ATen operations only.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    table = None if composite else _core_decompositions()
    with torch.no_grad(), mode or contextlib.nullcontext(), no_new_guards(mode):
        return make_fx(fn, decomposition_table=table, tracing_mode="real", pre_dispatch=composite)(*inputs)


@functools.cache
def _core_decompositions() -> Mapping[Any, Callable[..., Any]]:
    from torch._decomp import core_aten_decompositions

    return core_aten_decompositions()


def for_training(program: Any) -> bool:
    """Returns whether an exported program still holds composite and in-place operations (torch 2.11 to 2.15)."""
    return any(verifier.dialect == "TRAINING" for verifier in program.verifiers)


def with_graph(program: Any, gm: Any, signature: Any, calls: Any) -> Any:
    """Returns an exported program with another graph, signature and module call graph, and the same parameters.

    torch checks the new program (torch 2.11 to 2.15).
    """
    return torch.export.ExportedProgram(
        root=gm,
        graph=gm.graph,
        graph_signature=signature,
        state_dict=program.state_dict,
        range_constraints=copy.deepcopy(program.range_constraints),
        module_call_graph=calls,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )
