"""Every private torch API this package uses, in one place (torch 2.11 to 2.15)."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch

# Documented, or in everybody's use, under private names: seen in torch 2.11 to 2.15.
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

from mhc_inductor.scope import Change, replace


def tracing() -> bool:
    """Whether a graph is being compiled: Dynamo or AOTAutograd runs on this thread."""
    return torch._guards.TracingContext.try_get() is not None


def functorch_active() -> bool:
    """Whether a functorch transform (vmap, grad, ...) is active."""
    return bool(torch._C._are_functorch_transforms_active())


def any_tangent(args: Sequence[Any]) -> bool:
    """Whether forward-mode AD differentiates by one of the arguments."""
    from torch.autograd import forward_ad

    if forward_ad._current_level < 0:
        return False
    return any(isinstance(a, torch.Tensor) and forward_ad.unpack_dual(a).tangent is not None for a in args)


def register_autograd(
    qualname: str, backward: Callable[..., Any], setup: Callable[..., None], library: Any, guard: Callable[..., None]
) -> None:
    """Register an op's gradient; ``guard(*args)`` runs before it, also where nothing requires a gradient.

    Seen in torch 2.11 to 2.15: register_autograd makes a kernel for the key Autograd, and gives it to ``lib.impl``.
    """

    class Guarded:
        def impl(self, name: str, kernel: Callable[..., Any], key: str, **kwargs: Any) -> None:
            @functools.wraps(kernel)
            def run(keyset: Any, *args: Any, **given: Any) -> Any:
                guard(*args)
                return kernel(keyset, *args, **given)

            library.impl(name, run, key, **kwargs)

    torch.library.register_autograd(qualname, backward, setup_context=setup, lib=cast("Any", Guarded()))


def schema_types(op: Any) -> tuple[tuple[str, str, bool], ...]:
    """Of an op's arguments: name, kind (Tensor, float, int, bool or str), whether None is one."""
    names = []
    for argument in op._schema.arguments:
        kind = str(argument.type)
        inner = kind.removeprefix("Optional[").removesuffix("]")
        names.append((argument.name, "int" if inner == "SymInt" else inner, inner != kind))
    return tuple(names)


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """The table of decompositions that Inductor gives to AOTAutograd, about to be added to."""
    from torch._inductor import decomposition

    # The first compile of the process made a copy of the table.
    decomposition.fast_random_decomps.cache_clear()
    return decomposition.decompositions


def register_lowering(op: Any, fn: Callable[..., Any]) -> None:
    """Make ``fn`` Inductor's lowering of ``op``."""
    from torch._inductor.lowering import register_lowering as register

    register(op, type_promotion_kind=None)(fn)


def fallback(op: Any) -> Callable[..., Any]:
    """A lowering that calls ``op`` from the generated code."""
    from torch._inductor.lowering import fallback_handler

    return fallback_handler(op, add_to_fallback_set=False)


def empty(shape: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Any:
    """An uninitialised buffer in Inductor's IR."""
    from torch._inductor.lowering import lowerings

    return lowerings[torch.ops.aten.empty.memory_format](list(shape), dtype=dtype, device=device)


def zeros(shape: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Any:
    """A buffer of zeros in Inductor's IR."""
    from torch._inductor.lowering import lowerings

    return lowerings[torch.ops.aten.full.default](list(shape), 0, dtype=dtype, device=device)


def contiguous(t: Any) -> Any:
    """``t`` realised in contiguous layout."""
    from torch._inductor import ir

    # require_contiguous asks only for the order of strides: an expanded tensor would pass.
    return ir.ExternKernel.require_contiguous_strides(t)


def fixed_layout(t: Any) -> Any:
    """``t`` realised, or as a view of what is, with strides that no longer change; a copy only where no strides describe it."""
    from torch._inductor import ir

    t = ir.ExternKernel.realize_input(t)
    if not isinstance(t, ir.ReinterpretView):
        t.freeze_layout()
    return t if isinstance(t, ir.TensorBox) else ir.TensorBox(t)


def statically_multiple(expr: Any, of: int) -> bool:
    """Whether ``expr`` is a multiple of ``of`` for all values of its symbols."""
    from torch._inductor.virtualized import V

    return bool(V.graph.sizevars.statically_known_multiple_of(expr, of))


def is_node(t: Any) -> bool:
    """Whether ``t`` is a tensor of Inductor's IR."""
    from torch._inductor import ir

    return isinstance(t, ir.IRNode)


def hint_of(value: Any) -> Any:
    """``value``, or the present value of a symbolic size."""
    import sympy
    from torch._inductor.virtualized import V

    return int(V.graph.sizevars.optimization_hint(value)) if isinstance(value, sympy.Expr) else value


def meta_tensor(t: Any) -> torch.Tensor:
    """A contiguous tensor without memory, of the present shape of a tensor of Inductor's IR."""
    return torch.empty([hint_of(n) for n in t.get_size()], dtype=t.get_dtype(), device="meta")


def static_int(expr: Any) -> int:
    """``expr`` as an integer, guarded on where it is symbolic."""
    from torch._inductor.virtualized import V

    return int(V.graph.sizevars.guard_int(expr))


@functools.cache
def configured_kernel(kernel: Any, constexprs: tuple[tuple[str, Any], ...], num_warps: int, num_stages: int) -> Any:
    """``kernel`` with its one configuration, around a function of its own; cached, so that Inductor's table does not grow.

    Inductor tells the user kernels of a graph apart by the identity of their functions and not by their configurations:
    a second configuration of the same function would silently run the first one's code.
    """
    import types

    import triton

    fn = kernel.fn
    own = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    own.__module__, own.__qualname__ = fn.__module__, fn.__qualname__
    own.__annotations__, own.__doc__ = fn.__annotations__, fn.__doc__
    config = triton.Config(dict(constexprs), num_warps=num_warps, num_stages=num_stages)
    jitted = triton.jit(own)
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

    # identify_mutated_tensors: before torch 2.12
    name = "identify_accessed_tensors" if hasattr(module, "identify_accessed_tensors") else "identify_mutated_tensors"
    return replace(module, name, wrap)


remembered_accesses = Change(_remember_accesses)
"""Inside, Inductor asks once, not at every launch, which arguments a :func:`configured_kernel` reads and writes.

It compiles the kernel's source to Triton's IR to find out: two thirds of the time of lowering a model of such launches.
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
"""Inside, a warm compile cache keeps a dynamic graph dynamic where its guards hold a minimum or a maximum.

A cached graph's guards are evaluated on symbolic sizes, as Python code, whose ``min`` and ``max`` ask which of two sizes
is the smaller: a new guard, so that other sizes recompile, which a cold cache did not do.
"""


def _extreme(plain: Callable[..., Any], symbolic: Callable[[Any, Any], Any], *values: Any) -> Any:
    if any(isinstance(v, (torch.SymInt, torch.SymFloat)) for v in values):
        return functools.reduce(symbolic, values)
    return plain(*values)


def _as_analysed(value: Any) -> tuple[str, str]:
    """What the analysis of a kernel sees of an argument: a tensor's dtype, no symbolic size, any other value."""
    import sympy

    if is_node(value):
        return "tensor", str(value.get_dtype())
    return type(value).__name__, "" if isinstance(value, sympy.Expr) else repr(value)


def launch_kernel(kernel: Any, grid: tuple[Any, ...], tensors: Mapping[str, Any], constants: Mapping[str, Any]) -> None:
    """Emit one launch of a :func:`configured_kernel`, by Inductor's lowering of the Triton-kernel HOP."""
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
    """Generate the code of a launch; a kernel that it defines goes to Inductor's compile workers at once.

    Inductor does so with its own kernels, but begins with a user's only when the generated module is loaded.
    """
    define = wrapper.define_kernel

    def defined(name: str, body: str, *args: Any, **kwargs: Any) -> Any:
        submit_kernel(body)
        return define(name, body, *args, **kwargs)

    wrapper.define_kernel = defined
    try:
        codegen(wrapper)
    finally:
        del wrapper.define_kernel


def submit_kernel(body: str) -> None:
    """Start compiling the kernel of a generated ``async_compile.triton(name, source, ...)``, if workers are ready."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.virtualized import V

    if V.graph.cpp_wrapper or not AsyncCompile.use_process_pool():
        return
    call = ast.parse(body.strip(), mode="eval").body
    if isinstance(call, ast.Call):
        # The very strings of the generated code, by which Inductor finds a kernel that is being compiled.
        keywords = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
        AsyncCompile().triton(*(ast.literal_eval(a) for a in call.args), **keywords)


def packaging() -> bool:
    """Whether the graph being lowered becomes code that runs without Python (AOTInductor, or the C++ wrapper)."""
    from torch._inductor.virtualized import V

    return bool(V.graph.aot_mode or V.graph.cpp_wrapper)


def compile_fx_module() -> Any:
    """The module whose ``compile_fx`` the ordinary Inductor backend looks up at every compile."""
    from torch._inductor import compile_fx

    return compile_fx


def compile_backend_inside(context: Callable[[], AbstractContextManager[None]]) -> None:
    """Call the backend of the graph that Dynamo traces on this thread inside ``context()``: this graph's call, no other.

    Does nothing where Dynamo does not trace. Seen in torch 2.11 to 2.15: OutputGraph.compiler_fn, read when it is called.
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

    # Messages name the backend, which may be an object without a name.
    if hasattr(backend, "__name__"):
        inside.__name__ = backend.__name__
    # Dynamo asks whether it is the eager one.
    inside.compiler_fn = inspect.getattr_static(backend, "compiler_fn", backend)  # type: ignore[attr-defined]
    inside.mhc_inductor_inside = True  # type: ignore[attr-defined]
    output.compiler_fn = inside


def inductor_config() -> Any:
    """Inductor's configuration."""
    from torch._inductor import config

    return config


def graph_pass_base() -> type:
    """The base class of cacheable graph passes; of those that are told about inference, where torch has it (2.12 on)."""
    from torch._inductor import custom_graph_pass as module

    return getattr(module, "CustomInferenceAwareGraphPass", module.CustomGraphPass)


def run_pass(user_pass: Any, graph: Any, is_inference: bool) -> None:
    """Run a user's graph pass as Inductor would."""
    from torch._inductor import custom_graph_pass as module

    aware = getattr(module, "CustomInferenceAwareGraphPass", ())
    if isinstance(user_pass, aware):
        user_pass(graph, is_inference)
    else:
        user_pass(graph)


def mode_options(mode: str | None) -> dict[str, Any]:
    """The configuration that ``torch.compile(mode=...)`` stands for."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options().get(mode, {})) if mode and mode != "default" else {}


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of ``torch.compile`` under Inductor's own names; RuntimeError names an unknown one."""
    known = inductor_config().get_config_copy()
    result = {}
    for name, value in options.items():
        key = name.replace("-", "_")
        if key not in known:
            raise RuntimeError(f"unexpected option {name!r}: torch._inductor.list_options() has the known ones")
        result[key] = value
    return result


def counters() -> Any:
    """This package's counters among Dynamo's."""
    from torch._dynamo.utils import counters as dynamo_counters

    return dynamo_counters["mhc_inductor"]


def register_backend(name: str, fn: Callable[..., Any]) -> None:
    """Make ``torch.compile(backend=name)`` find ``fn`` (an installed package is also found by its entry point)."""
    from torch._dynamo.backends import registry

    registry.register_backend(compiler_fn=fn, name=name)


def fake_mode_of(tensors: Sequence[Any]) -> Any:
    """The fake mode of the first fake tensor, or None. Not Dynamo's current one: a compile has several."""
    from torch._subclasses.fake_tensor import FakeTensor

    return next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)


def no_new_guards(mode: Any) -> Any:
    """A context in which running operations on ``mode``'s fake tensors adds no guard to the compiled function."""
    from torch._dispatch.python import enable_python_dispatcher

    stack = contextlib.ExitStack()
    shape_env = getattr(mode, "shape_env", None)
    if shape_env is not None:
        stack.enter_context(shape_env.suppress_guards())
        # Sizes and numbers that depend on data (item) belong to the run, not to the graph. Seen in torch 2.11 to 2.15.
        stack.enter_context(shape_env.ignore_fresh_unbacked_symbols())
        # Composite operations in C++ would take the present size of a dynamic dimension for the only one.
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
    """ATen operations that the routing's analysis wants in simpler ones; used for no code."""
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
    """Add a text to the structured log (``TORCH_TRACE``), where tlparse shows it with the graph being compiled."""
    from torch._logging._internal import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=payload)


@contextlib.contextmanager
def captured_apart() -> Iterator[dict[str, Any]]:
    """Inside, Dynamo neither goes by earlier compiles nor records this one: limits of recompiles, sizes seen before.

    Gives the arguments of torch.compile that keep its code apart on the user's functions too (seen in torch 2.13). Without
    them, functions that reached the limit of recompiles in earlier compiles run uncompiled.
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
    """What ``torch.compile`` was called with, if ``fn`` is its result; else ``fn``."""
    fn = getattr(fn, "_orig_mod", fn)
    return getattr(fn, "_torchdynamo_orig_callable", fn)


def hides_writes(node: Any) -> bool:
    """Whether a node of a Dynamo graph is ``t.data``, through which autograd sees no write. torch 2.11 to 2.15."""
    return node.target is getattr(torch._C._autograd, "_get_data_attr", None) and node.op == "call_function"


def mode_change(node: Any) -> tuple[str, Any] | None:
    """What a node of a Dynamo graph changes of the modes: (kind, new value, or the node that it closes). torch 2.11 to 2.15.

    Kinds: "grad", "enter_inference", "exit_inference", "enter_autocast", "exit_autocast".
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
    """What makes the contexts of a selectively checkpointed region, where ``graph`` is its body, or None. torch 2.11 to 2.15."""
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
    """Restores grad mode and the random state of the CPU, whatever the body does to them."""
    grad, random = torch.is_grad_enabled(), torch.get_rng_state()
    try:
        yield
    finally:
        torch._C._set_grad_enabled(grad)
        torch.set_rng_state(random)


def may_mutate(operator: Any) -> bool:
    """Whether a higher-order operator without a body may write its arguments (launches of Triton kernels do)."""
    name = str(operator)
    return "functional" not in name and "flex_attention" not in name


def reads_data(error: Exception) -> bool:
    """Whether a call on fake tensors failed because its result depends on their data. Seen in torch 2.11 to 2.15."""
    from torch._subclasses.fake_tensor import DataDependentOutputException

    return isinstance(error, DataDependentOutputException)


def is_wrapper(t: Any) -> bool:
    """Whether a tensor is of a class that wraps others (DTensor). Seen in torch 2.11 to 2.15."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return bool(is_traceable_wrapper_subclass(t))


def storage_key(t: Any) -> int:
    """An identity of the memory that a tensor and its views share."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    try:
        return int(t.untyped_storage()._cdata)
    except NotImplementedError:  # a layout without a storage, and so without views
        return id(t)


def hints(graph: Any) -> dict[str, int]:
    """The present values of the symbols in a Dynamo graph's input shapes."""
    found: dict[str, int] = {}
    for node in graph.nodes:
        example = node.meta.get("example_value", node.meta.get("val"))
        sizes = example.shape if isinstance(example, torch.Tensor) else (example,)
        for size in sizes:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.has_hint():
                found[str(size.node.expr)] = int(size.node.hint)
    return found


def scan(step: Callable[..., Any], state: Sequence[Any], inputs: Sequence[Any], sizes: Sequence[Any] = ()) -> Any:
    """``step(*state, *inputs[t], *sizes) -> (*state, *outputs[t])`` over the first dimension, in a graph being traced
    below autograd: (*last state, *stacked outputs). ``sizes``: every symbol in the shapes."""
    from torch._guards import detect_fake_mode
    from torch._higher_order_ops.scan import scan_op

    # Inductor makes it a while loop whose counter it reads as a scalar, which a graph compiled without fullgraph forbids.
    mode = detect_fake_mode(tuple(inputs))
    if mode is not None:
        mode.allow_scalar_outputs = True
    # The public function would start a compile of its own there.
    return scan_op(step, list(state), list(inputs), tuple(sizes))


def expression(size: Any) -> Any:
    """The sympy expression of a torch.SymInt."""
    return size.node.expr


def hint(size: Any) -> int:
    """A size's present value."""
    return size if isinstance(size, int) else int(size.node.hint)


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are one number or one expression, without a guard."""
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return bool(expression(a) == expression(b))


def is_symbol(size: Any) -> bool:
    """Whether ``size`` is one symbol, no expression of symbols and no integer."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.is_Symbol)


@contextlib.contextmanager
def outside_compile() -> Iterator[None]:
    """Runs the body on real tensors as a plain eager call would, from within a compile. torch 2.11 to 2.15.

    No fake or tracing mode, no autocast, no inference mode, no compiled autograd; random state, grad mode and all others
    are afterwards as they were.
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
    """The bytes that may be allocated on ``device`` now; on a CPU what the kernel says is available."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as file:
            found = (line.split() for line in file)
            return next(int(fields[1]) * 1024 for fields in found if fields[0] == "MemAvailable:")
    except (OSError, StopIteration):
        return 1 << 33  # no Linux: what any machine has
