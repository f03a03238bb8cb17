# SPDX-License-Identifier: Apache-2.0
"""Private torch APIs that the ops use.

- torch._C._functorch.is_gradtrackingtensor: whether torch.func.grad differentiates by a tensor
- torch._ops.OpOverload._schema: the types of an op's arguments
- torch._subclasses.fake_tensor.FakeTensor.fake_mode: the fake mode of an argument
- torch._subclasses.fake_tensor.FakeTensorMode.allow_non_fake_inputs: whether a real tensor next to a fake one works
- torch._subclasses.fake_tensor.fake_tensor_tls: the same, for this thread
- torch.distributed.tensor.DTensor._op_dispatcher: the owner of the sharding strategies
- torch.distributed.tensor._op_schema.OpSchema.get_mesh_from_args: looks at the first argument alone in 2.11
- torch.distributed.tensor._op_schema.RuntimeSchemaInfo.static_argnum: the first argument in the key of decisions
- torch.distributed.tensor._sharding_prop.ShardingPropagator.op_strategy_funcs: strategies by op
- torch.distributed.tensor._sharding_prop.ShardingPropagator.op_to_schema_info: keys of decisions by op
- torch.nested._internal.nested_tensor.NestedTensor: the type of jagged tensors, which the ops refuse
- torch.onnx._internal.exporter._flags: imported once torch.onnx.export has run
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from mhc_inductor.compat.shared import tracing as tracing


def onnx_exporting() -> bool:
    """Returns whether ``torch.onnx.export`` runs.

    The public function imports the exporter, so it is asked only where that is imported already.
    """
    return "torch.onnx._internal.exporter._flags" in sys.modules and torch.onnx.is_in_onnx_export()


def any_tracked(args: Sequence[Any]) -> bool:
    """Returns whether torch.func.grad or vjp differentiates with respect to one of the arguments."""
    tensors = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    return any(map(torch._C._functorch.is_gradtrackingtensor, tensors))


def register_autograd(
    qualname: str, backward: Callable[..., Any], setup: Callable[..., None], library: Any, guard: Callable[..., None]
) -> None:
    """Registers an op's backward formula, with a guard that runs before the op's autograd kernel.

    Relies on torch.library.register_autograd passing its kernel for the Autograd key to ``lib.impl``, as torch 2.11 to
    2.15 do.

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
    """Makes an op call ``refuse`` for jagged nested tensors where it is called below autograd."""
    from torch.nested._internal.nested_tensor import NestedTensor

    def rule(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse(*args)
        return NotImplemented

    torch.library.register_torch_dispatch(qualname, NestedTensor, rule, lib=library)


def real_among_fakes(args: Sequence[Any]) -> tuple[int, int] | None:
    """Returns the places of a real tensor and of a fake one whose mode takes no real ones, or None."""
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

    Two things that torch 2.11 lacks are added: its cache of decisions leaves an argument of None before the first
    integer out of the key, so every argument is made part of it; and the mesh is looked for in the first argument alone,
    so a strategy finds it in any. torch 2.12 to 2.15 do both.

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
