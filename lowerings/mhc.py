# SPDX-License-Identifier: Apache-2.0
"""Lowerings of the mHC ops.

The forward of pre or of a fused op may be a Gluon kernel, which Inductor's Triton-kernel HOP cannot express. Then the
generated code calls the op, which launches it; code that must run without Python launches the plain Triton kernels.
"""

from __future__ import annotations

from typing import Any

from mhc_inductor import compat
from mhc_inductor.kernels.eager import OPS
from mhc_inductor.ops.registry import REFERENCE

from . import common
from .builder import OpBuilder

_WITH_GLUON = ("mhc_pre", "mhc_post_pre", "mhc_post_head", "mhc_single_pass")


def _calls_op(name: str, args: tuple[Any, ...]) -> bool:
    from mhc_inductor.kernels.mhc.fused_plan import runs_gluon
    from mhc_inductor.kernels.mhc.gluon import one_read

    if compat.lowerings.packaging():
        return False
    x, f_out = args[:2]
    b = OpBuilder(x.get_device())
    return one_read(b, x) is not None if name == "mhc_pre" else runs_gluon(b, x, f_out)


def register() -> None:
    """Registers all lowerings and decompositions. Called once, when the first graph is compiled."""
    for name in OPS:
        if name.startswith("mhc_"):
            common.register(name, REFERENCE[name], _calls_op if name in _WITH_GLUON else None)
