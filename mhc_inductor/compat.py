"""Every private torch API this package uses, in one place (torch 2.11 to 2.15)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def tracing() -> bool:
    """Whether a graph is being compiled: Dynamo or AOTAutograd runs on this thread."""
    return torch._guards.TracingContext.try_get() is not None


def functorch_active() -> bool:
    """Whether a functorch transform (vmap, grad, ...) is active."""
    return bool(torch._C._are_functorch_transforms_active())


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """The table of decompositions that Inductor gives to AOTAutograd."""
    from torch._inductor.decomposition import decompositions

    return decompositions


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


def is_node(t: Any) -> bool:
    """Whether ``t`` is a tensor of Inductor's IR."""
    from torch._inductor import ir

    return isinstance(t, ir.IRNode)


def static_int(expr: Any) -> int:
    """``expr`` as an integer, guarded on where it is symbolic."""
    from torch._inductor.virtualized import V

    return int(V.graph.sizevars.guard_int(expr))


_distinct: dict[int, Any] = {}


def _distinct_kernel(autotuner: Any) -> Any:
    """``autotuner`` around a function of its own.

    Inductor tells the user kernels of a graph apart by the identity of their functions and not by their configurations:
    a second configuration of the same function would silently run the first one's code.
    """
    import types

    import triton

    if id(autotuner) not in _distinct:
        fn = autotuner.fn.fn
        copy = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
        copy.__module__, copy.__qualname__ = fn.__module__, fn.__qualname__
        copy.__annotations__, copy.__doc__ = fn.__annotations__, fn.__doc__
        _distinct[id(autotuner)] = (autotuner, triton.autotune(configs=autotuner.configs, key=[])(triton.jit(copy)))
    return _distinct[id(autotuner)][1]


def launch_kernel(
    kernel: Any, configs: int, grid: tuple[Any, ...], tensors: Mapping[str, Any], constants: Mapping[str, Any]
) -> None:
    """Emit one launch of an autotuner-wrapped Triton kernel, by Inductor's lowering of the Triton-kernel HOP."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation
    from torch._inductor.lowering import lowerings

    lowerings[triton_kernel_wrapper_mutation](
        kernel_idx=kernel_side_table.add_kernel(_distinct_kernel(kernel)),
        constant_args_idx=kernel_side_table.add_constant_args(dict(constants)),
        grid=[grid] * configs,
        tma_descriptor_metadata={},
        kwargs=dict(tensors),
    )


def compile_fx_module() -> Any:
    """The module whose ``compile_fx`` the ordinary Inductor backend looks up at every compile."""
    from torch._inductor import compile_fx

    return compile_fx


def inductor_config() -> Any:
    """Inductor's configuration."""
    from torch._inductor import config

    return config


def graph_pass_base() -> type:
    """The base class of cacheable graph passes."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return CustomGraphPass


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
