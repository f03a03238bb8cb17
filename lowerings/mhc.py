"""Lowerings of the mHC ops.

Where the forward of a fused op is a Gluon kernel, which Inductor's Triton-kernel HOP cannot carry, the generated code calls
the op, which launches it; code that must run without Python launches the plain Triton kernels.
"""

from __future__ import annotations

from typing import Any

from mhc_inductor import compat
from mhc_inductor.kernels.eager import OPS
from mhc_inductor.ops.registry import REFERENCE

from . import common
from .builder import LoweringBuilder


class _Eager(LoweringBuilder):
    """What the op itself would be asked when it runs."""

    gluon = True


def _calls_op(name: str, args: tuple[Any, ...]) -> bool:
    from mhc_inductor.kernels.mhc.fused_plan import runs_gluon

    x, f_out = args[:2]
    return not compat.packaging() and runs_gluon(_Eager(x.get_device()), x, f_out)


def register() -> None:
    """Register every lowering and decomposition. Called once, when the first graph is compiled."""
    for name in OPS:
        if name.startswith("mhc_"):
            common.register(name, REFERENCE[name], _calls_op if name in ("mhc_post_pre", "mhc_post_head") else None)
