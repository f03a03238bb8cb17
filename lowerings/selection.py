"""Lowerings of selection attention.

On a GPU its launch plans; on a CPU one formula if the problem is small, else a call of the op.

Two launches are made by the op itself, which the generated code calls: the forward over lists of keys where it is a
Gluon kernel, and its backward, which loops over chunks of queries to bound its memory.
"""

from __future__ import annotations

from typing import Any

from mhc_inductor import compat
from mhc_inductor.ops import selection_cpu, selection_lists_cpu

from . import common
from .builder import OpBuilder


def _runs_gluon(name: str, args: tuple[Any, ...]) -> bool:
    from mhc_inductor.kernels.selection.lists_gluon import list_kernels

    builder = OpBuilder(args[0].get_device())
    q, k, v = (t if t is None else builder.strided(t) for t in args[:3])
    return not compat.packaging() and list_kernels(builder, q, k, v, compat.static_int(args[-1])) is not None


def _always(name: str, args: tuple[Any, ...]) -> bool:
    return True


def register() -> None:
    """Registers all lowerings. Called once, when the first graph is compiled."""
    common.register("selection_attention", selection_cpu.fused_attention)
    common.register("selection_attention_backward", selection_cpu.fused_attention_backward)
    common.register("selection_list_attention", selection_lists_cpu.fused_attention, _runs_gluon)
    common.register("selection_list_attention_backward", selection_lists_cpu.fused_attention_backward, _always)
