# SPDX-License-Identifier: Apache-2.0
"""Private torch APIs that the routing pass uses.

- torch._C.DisableTorchFunction: switches torch function modes off
- torch._C._autograd._get_data_attr: the call that reads t.data in graphs
- torch._C._autograd._saved_tensors_hooks_set_tracing: switches hooks for saved tensors off
- torch._dynamo.compiled_autograd._disable: switches compiled autograd off
- torch._dynamo.config: the limits of recompiles
- torch._dynamo.pgo.get_code_state: the sizes that earlier compiles have seen
- torch._guards.tracing: switches the trace on this thread off
- torch._higher_order_ops.wrap.tag_activation_checkpoint: finds a policy in its body's meta
- torch._logging._internal.trace_structured_artifact: adds a text to the structured log
- torch._ops.OpOverloadPacket: the type of operations without an overload
- torch._subclasses.fake_tensor.DataDependentOutputException: a result that depends on data
- torch._subclasses.fake_tensor.FakeTensor: the type of plain fake tensors
- torch.fx.experimental.sym_node.SymNode.expr: the sympy expression of a size
- torch.fx.experimental.sym_node.SymNode.has_hint: whether a size has a present value
- torch.fx.experimental.sym_node.SymNode.hint: the present value of a size
- torch.utils._python_dispatch.TorchDispatchMode: sees the operations that a call runs
- torch.overrides._get_current_function_mode_stack: the torch function modes that are active
- torch.utils._python_dispatch._disable_current_modes: switches fake and tracing modes off
- torch.utils._python_dispatch._get_current_dispatch_mode_stack: the dispatch modes that are active
- torch.utils._pytree.tree_flatten: flattens arguments
- torch.utils._pytree.tree_unflatten: puts them together again
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_unflatten as tree_unflatten

from mhc_inductor.compat.shared import expression as expression


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
    return {
        aten.addmm.default: _addmm,
        aten.baddbmm.default: _addmm,
        aten.linear.default: _linear,
        aten.linalg_vector_norm.default: _vector_norm,
        aten.norm.ScalarOpt_dim: _norm,
        aten.addcmul.default: _addcmul,
        aten.addcdiv.default: _addcdiv,
        aten.rms_norm.default: _rms_norm,
        aten._fused_rms_norm.default: _fused_rms_norm,
    }


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Adds a text to the structured log (``TORCH_TRACE``), where tlparse shows it with the graph being compiled."""
    from torch._logging._internal import trace_structured_artifact

    trace_structured_artifact(name, "string", payload)


@contextlib.contextmanager
def captured_apart() -> Iterator[dict[str, Any]]:
    """Isolates a capture from other compiles of the process.

    Inside, Dynamo ignores the recompile limits and the sizes that earlier compiles have seen, and records neither from
    this compile. Without it, functions that reached the recompile limit earlier would run uncompiled.

    Yields:
        Arguments for torch.compile that also isolate its code on the user's functions (from torch 2.13 on).
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


def hides_writes(node: Any) -> bool:
    """Returns whether a Dynamo node is ``t.data``, through which autograd sees no write."""
    return node.op == "call_function" and node.target is torch._C._autograd._get_data_attr  # type: ignore[attr-defined]


def checkpoint_policy(graph: Any) -> Any:
    """Returns the context function of the ``tag_activation_checkpoint`` with body ``graph``, or None: not selective."""
    module = graph.owning_module
    return None if module is None else module.meta.get("_checkpoint_context_fn")


@contextlib.contextmanager
def modes_kept() -> Iterator[None]:
    """Restores grad mode and the CPU's random state after the body."""
    grad, random = torch.is_grad_enabled(), torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        torch.set_rng_state(random)


def is_fake(t: Any) -> bool:
    """Returns whether a tensor is a plain fake one."""
    from torch._subclasses.fake_tensor import FakeTensor

    return type(t) is FakeTensor


def modes_active() -> bool:
    """Returns whether torch function or dispatch modes are active, such as a default device."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return bool(_get_current_function_mode_stack() or _get_current_dispatch_mode_stack())


def may_mutate(operator: Any) -> bool:
    """Returns whether a higher-order operator without a body may write its arguments, as a Triton launch does."""
    name = str(operator)
    return "functional" not in name and "flex_attention" not in name


def reads_data(error: Exception) -> bool:
    """Returns whether a call on fake tensors failed because its result depends on their data."""
    from torch._subclasses.fake_tensor import DataDependentOutputException

    return isinstance(error, DataDependentOutputException)


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


def hint(size: Any, at: Mapping[str, int] | None = None) -> int:
    """Returns the present value of a size, or the one where symbols have the values of ``at``."""
    if isinstance(size, int) or not at:
        return size if isinstance(size, int) else int(size.node.hint)
    return int(size.node.expr.subs({symbol: at[str(symbol)] for symbol in size.node.expr.free_symbols}))


def same_size(a: Any, b: Any) -> bool:
    """Returns whether two sizes are the same number or the same expression, without adding a guard."""
    one, two = (s if isinstance(s, int) else expression(s) for s in (a, b))
    return bool(one == two)


@contextlib.contextmanager
def outside_compile() -> Iterator[None]:
    """Runs the body on real tensors during a compile as a plain eager call would run.

    Switches off fake and tracing modes, torch function modes (such as a default device), saved tensor hooks, autocast,
    inference mode and compiled autograd. Restores the random state and all modes afterwards.
    """
    from torch._dynamo.compiled_autograd import _disable as plain_autograd
    from torch.utils._python_dispatch import _disable_current_modes

    on_gpus = torch.cuda.is_initialized()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=range(torch.cuda.device_count()) if on_gpus else []))
        stack.enter_context(torch._guards.tracing(None))
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        hooks = torch._C._autograd._saved_tensors_hooks_set_tracing
        stack.callback(hooks, hooks(True))
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
