# SPDX-License-Identifier: Apache-2.0
"""Lowering shared by all operators: launch plans on a GPU, the reference formula elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch

from mhc_inductor import compat
from mhc_inductor.kernels.eager import compile_in_background, plan_of, why_not
from mhc_inductor.log import warn_once

from .builder import LoweringBuilder

KERNEL_DEVICES = ("cuda",)

# (name, args) -> whether the generated code calls the op instead of launching its plan.
CallsOp = Callable[[str, tuple[Any, ...]], bool]


def lower(name: str, op: Any, calls_op: CallsOp | None, whole: Collection[str], *args: Any, **kwargs: Any) -> Any:
    """Lowers op ``name`` to its launch plan, or to a call of the op if there is no kernel or ``calls_op`` holds."""
    args = _positional(op, args, kwargs)
    device = next(a for a in args if compat.lowerings.is_node(a)).get_device()
    if device.type == "cpu" and compat.packaging_formulas():
        raise RuntimeError(
            f"mhc_inductor: {name} would need Python in this package. If the program was loaded from a file, route it first: "
            "aoti_compile_and_package(mhc_inductor.route_exported(program)). Backward ops cannot be packaged for a CPU"
        )
    if device.type == "cpu":  # an op that was not decomposed: call its own implementation
        return compat.lowerings.fallback(op)(*args)
    builder = LoweringBuilder(device)
    reason = why_not(name, args, builder, compat.lowerings.is_node)
    if device.type not in KERNEL_DEVICES:
        reason = f"device {device.type} has no kernels"
    if reason is not None:
        warn_once(f"{name}: {reason}", f"compiled {name} calls the reference formula on {device}: {reason}")
        return compat.lowerings.fallback(op)(*args)
    if calls_op is not None and calls_op(name, args):
        compile_in_background(
            name,
            [
                compat.lowerings.meta_tensor(a) if compat.lowerings.is_node(a) else compat.lowerings.hint_of(a)
                for a in args
            ],
            device,
        )
        named = zip(op._schema.arguments, args, strict=True)
        args = tuple(builder.contiguous(a) if n.name in whole and a is not None else a for n, a in named)
        return compat.lowerings.fallback(op)(*args)
    return plan_of(name)(builder, *args)


def _positional(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the arguments by position, with the schema's defaults for those that the graph left out."""
    missing = op._schema.arguments[len(args) :]
    return (*args, *(kwargs.get(a.name, a.default_value) for a in missing))


FORMULAS: dict[Any, Callable[..., Any]] = {}
"""The formula of each op that a package without kernels holds in its place."""


def _decompose(formula: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Applies the formula on a device without kernels; else returns NotImplemented, which keeps the op whole."""
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    if tensors[0].device.type in KERNEL_DEVICES:
        return NotImplemented
    return formula(*args, **kwargs)


def register(
    name: str, formula: Callable[..., Any] | None, calls_op: CallsOp | None = None, whole: Collection[str] = ()
) -> None:
    """Registers the lowering of op ``name``, and ``formula`` as its decomposition on devices without kernels.

    ``whole``: arguments that a called op copies unless they are contiguous. Inductor writes them so to begin with.
    """
    op = getattr(torch.ops.mhc_inductor, name).default
    compat.lowerings.register_lowering(op, functools.partial(lower, name, op, calls_op, whole))
    if formula is not None:
        FORMULAS[op] = formula
        compat.lowerings.inductor_decompositions()[op] = functools.partial(_decompose, formula)
