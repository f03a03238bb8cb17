"""Lowerings of the mHC ops: launch plans on a GPU, the reference formula elsewhere, for Inductor to fuse."""

from __future__ import annotations

import functools
from typing import Any

import torch

from mhc_inductor import compat
from mhc_inductor.kernels.eager import OPS, plan_of, why_not
from mhc_inductor.log import warn_once
from mhc_inductor.ops.registry import REFERENCE

from .builder import LoweringBuilder

KERNEL_DEVICES = ("cuda",)


def _lower(name: str, op: Any, *args: Any, **kwargs: Any) -> Any:
    args = _positional(op, args, kwargs)
    device = next(a for a in args if compat.is_node(a)).get_device()
    builder = LoweringBuilder(device)
    reason = why_not(name, args, builder, compat.is_node)
    if device.type not in KERNEL_DEVICES:
        reason = f"device {device.type} has no kernels"
    if reason is not None:
        warn_once(f"{name}: {reason}", f"compiled {name} calls the reference formula on {device}: {reason}")
        return compat.fallback(op)(*args)
    return plan_of(name)(builder, *args)


def _positional(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    names = [a.name for a in op._schema.arguments]
    return (*args, *(kwargs[n] for n in names[len(args) :]))


def _decompose(name: str, *args: Any, **kwargs: Any) -> Any:
    """The reference where no kernels are; elsewhere the op stays whole, for its lowering."""
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    if tensors[0].device.type in KERNEL_DEVICES:
        return NotImplemented
    return REFERENCE[name](*args, **kwargs)


def register() -> None:
    """Register every lowering and decomposition. Called once, when the first graph is compiled."""
    table = compat.inductor_decompositions()
    for name in OPS:
        op = getattr(torch.ops.mhc_inductor, name).default
        compat.register_lowering(op, functools.partial(_lower, name, op))
        table[op] = functools.partial(_decompose, name)
