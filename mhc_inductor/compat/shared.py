# SPDX-License-Identifier: Apache-2.0
"""Private torch APIs that two or more layers use, or the public functions.

- torch._C._are_functorch_transforms_active: whether a vmap or grad of torch.func is active
- torch._C._autograd._profiler_enabled: whether a profiler of torch records this thread
- torch._C._functorch.get_unwrapped: the tensor inside a wrapper of torch.func, for its storage
- torch._C._functorch.is_functorch_wrapped_tensor: tells such a wrapper
- torch._C._set_grad_enabled: the call that switches grad mode in graphs
- torch._dispatch.python.enable_python_dispatcher: keeps composite operations from specialising dynamic sizes
- torch._dynamo.OptimizedModule._orig_mod: the module that torch.compile was called with
- torch._dynamo.eval_frame._TorchDynamoContext._torchdynamo_orig_callable: the function that it was called with
- torch._dynamo.utils.counters: torch's counters, and this package's among them
- torch._guards.TracingContext.try_get: whether this thread compiles a graph
- torch._inductor.async_compile.AsyncCompile.use_process_pool: starts the compile workers, and says if they run
- torch._inductor.config: Inductor's options, by which passes reach what is being compiled
- torch._inductor.decomposition.decompositions: the table of decompositions
- torch._inductor.decomposition.fast_random_decomps: caches a copy of that table
- torch._inductor.virtualized.V.aot_compilation: whether AOTInductor compiles, before there is a graph to lower
- torch._ops.HigherOrderOperator: the type of calls that take graphs
- torch._ops.OpOverload: the type of calls of operations
- torch._subclasses.fake_tensor.FakeTensor.fake_mode: the fake mode of a graph's tensors
- torch.amp.autocast_mode._enter_autocast: the call that enters autocast in graphs
- torch.amp.autocast_mode._exit_autocast: the call that leaves it
- torch.autograd.forward_ad._current_level: whether a level of forward-mode AD is open
- torch.autograd.grad_mode._enter_inference_mode: the call that enters inference mode in graphs
- torch.autograd.grad_mode._exit_inference_mode: the call that leaves it
- torch.distributed.tensor.DTensor._local_tensor: the tensor of this rank, without a step of autograd
- torch.fx.Graph._graph_namespace: the names of a graph's nodes
- torch.fx.experimental.sym_node.SymNode.expr: the sympy expression of a size
- torch.fx.experimental.symbolic_shapes.ShapeEnv.ignore_fresh_unbacked_symbols: drops sizes that depend on data
- torch.fx.experimental.symbolic_shapes.ShapeEnv.suppress_guards: lets an analysis add no guard
- torch.fx.graph._Namespace.create_name: reserves a name in a graph
- torch.nn.Module._compiled_call_impl: whether a module was compiled in place
- torch.nn.attention._sdpa_kernel: the call that chooses kernels of scaled_dot_product_attention in graphs
- torch.utils._python_dispatch.TorchDispatchMode: sees the ops that a call runs
- torch.utils._python_dispatch.is_traceable_wrapper_subclass: tells tensors that wrap others
- torch.utils._pytree.tree_leaves: flattens arguments
- torch.utils._pytree.tree_map_only: replaces the tensors among arguments
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

COMPILED = {"enable_fp_fusion": True}
"""Options of every compilation of a kernel: Triton 3.10 fuses products and sums only if asked, which changes bits."""


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
    """Returns whether a level of forward-mode AD is open."""
    from torch.autograd import forward_ad

    return forward_ad._current_level >= 0


_without_ops: contextvars.ContextVar[bool] = contextvars.ContextVar("mhc_inductor_without_ops", default=False)


def in_package() -> bool:
    """Returns whether AOTInductor is compiling a package, which will run without Python.

    Before lowering there is no graph that :func:`packaging` could ask.
    """
    virtualized = sys.modules.get("torch._inductor.virtualized")
    return virtualized is not None and bool(virtualized.V.aot_compilation)


def tracing() -> bool:
    """Returns whether Dynamo, AOTAutograd or AOTInductor is compiling a graph on this thread."""
    return torch._guards.TracingContext.try_get() is not None or in_package()


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


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns Inductor's table of decompositions for AOTAutograd, for callers that add entries."""
    from torch._inductor import decomposition

    # The first compile of the process caches a copy of the table; drop it so that new entries are seen.
    decomposition.fast_random_decomps.cache_clear()
    return decomposition.decompositions


def counters() -> Any:
    """Returns this package's counters among Dynamo's."""
    from torch._dynamo.utils import counters as dynamo_counters

    return dynamo_counters["mhc_inductor"]


def graph_breaks() -> Counter[str]:
    """Returns the reasons for which Dynamo has broken graphs so far, and how often."""
    from torch._dynamo.utils import counters as dynamo_counters

    return Counter(dynamo_counters["graph_break"])


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


def uncompiled(fn: Any) -> Any:
    """Returns what ``torch.compile`` was called with if ``fn`` is its result, else ``fn``."""
    fn = getattr(fn, "_orig_mod", fn)
    return getattr(fn, "_torchdynamo_orig_callable", fn)


def has_compiled(module: torch.nn.Module) -> bool:
    """Returns whether a module or one inside it is compiled, by torch.compile or in place."""
    from torch._dynamo import OptimizedModule

    return any(isinstance(m, OptimizedModule) or m._compiled_call_impl is not None for m in module.modules())


def captured_graphs() -> int:
    """Returns how many graphs Dynamo has captured in this process since it was reset."""
    from torch._dynamo.utils import counters as dynamo_counters

    return int(dynamo_counters["stats"]["unique_graphs"])


def start_compile_workers() -> None:
    """Starts the processes that compile Triton kernels, if there is a GPU, without waiting.

    A compile sends its kernels to them only once they run.
    """
    if torch.cuda.is_available():
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.use_process_pool()


def mode_change(node: Any) -> tuple[str, Any] | None:
    """Returns how a node of a Dynamo graph changes the grad, inference or autocast mode, or the kernels of SDPA, or None.

    Returns:
        (kind, value). The kind is "grad", "enter_inference", "exit_inference", "enter_autocast", "exit_autocast" or
        "kernels"; the value is the new state, or for an exit the node that entered.
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


@functools.cache
def _mode_changes() -> dict[Any, str]:
    from torch.amp import autocast_mode
    from torch.autograd import grad_mode
    from torch.nn.attention import _sdpa_kernel

    chosen = [f for name, f in vars(torch.backends.cuda).items() if name.startswith("enable_") and "_sdp" in name]
    return {
        **dict.fromkeys((_sdpa_kernel, *chosen), "kernels"),
        torch._C._set_grad_enabled: "grad",
        torch.set_grad_enabled: "grad",
        grad_mode._enter_inference_mode: "enter_inference",
        grad_mode._exit_inference_mode: "exit_inference",
        autocast_mode._enter_autocast: "enter_autocast",
        autocast_mode._exit_autocast: "exit_autocast",
    }


def is_wrapper(t: Any) -> bool:
    """Returns whether a tensor's class wraps other tensors, as DTensor does."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return bool(is_traceable_wrapper_subclass(t))


def is_dtensor(t: Any) -> bool:
    """Returns whether a tensor is a DTensor. Imports nothing: where there is one, its module has been imported."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(t, kind)


def local_tensor(t: Any) -> Any:
    """Returns the tensor inside a DTensor, without the step of autograd that ``to_local`` makes."""
    return t._local_tensor


def storage_key(t: Any) -> int:
    """Returns a key of the storage that a tensor shares with its views."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    try:
        return int(t.untyped_storage()._cdata)
    except NotImplementedError:  # this layout has no storage, so there are no views
        return id(t)


def is_symbol(size: Any) -> bool:
    """Returns whether ``size`` is a single symbol, neither an integer nor a compound expression."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.is_Symbol)


def expression(size: Any) -> Any:
    """Returns the sympy expression of a torch.SymInt."""
    return size.node.expr


def give_names(named: Iterable[tuple[Any, str]]) -> None:
    """Gives nodes of one graph names that are unique among them, also such as FX avoids.

    A node that is copied or made anew under the name of a builtin, as an exported argument may have, gets a number after
    it: ``input`` becomes ``input_1``.
    """
    for node, name in named:
        if node.name != name:
            node.name = name
            node.graph._graph_namespace.create_name(name, None)  # no later node gets it


def profiler_runs() -> bool:
    """Returns whether a profiler of torch records what this thread does."""
    return bool(torch._C._autograd._profiler_enabled())


class _OpMode(TorchDispatchMode):
    """Hands each call of this package's ops to a function, and leaves others as they are."""

    supports_higher_order_operators = True

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self._run = run

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True: otherwise a compiled model would run uncompiled while the mode is on."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") != "mhc_inductor":
            return func(*args, **(kwargs or {}))
        return self._run(func._schema.name.partition("::")[2], func, args, kwargs or {})


def op_mode(run: Callable[[str, Any, tuple[Any, ...], dict[str, Any]], Any]) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which each call of an op is ``run(name, op, args, kwargs)``, on autograd's threads too."""
    return _OpMode(run)


def matmul_precision() -> str:
    """Returns "highest", "high" or "medium": what float32 products may round, by either of PyTorch's two settings.

    ``torch.set_float32_matmul_precision`` is one, ``torch.backends.cuda.matmul.fp32_precision`` the other. Transformers sets
    the other, after which PyTorch's getter of the first raises.
    """
    cuda = torch.backends.cuda.matmul.fp32_precision
    if cuda == "ieee":
        return "highest"
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high" if cuda == "tf32" else "highest"


PASS_OPTIONS = ("joint_custom_pre_pass", "post_grad_custom_pre_pass")
"""The Inductor options that take this package's passes."""


def batch_invariant() -> bool:
    """Returns whether a pass of what is being compiled has the option ``batch_invariant``, for its lowerings."""
    config = inductor_config()
    return any(getattr(getattr(config, name), "batch_invariant", False) for name in PASS_OPTIONS)


def inductor_config() -> Any:
    """Returns Inductor's configuration module."""
    from torch._inductor import config

    return config
