"""Lowerings of the mHC ops.

The forward of pre or of a fused op may be a Gluon kernel, which Inductor's Triton-kernel HOP cannot express. Then the generated
code calls the op, which launches it; code that must run without Python launches the plain Triton kernels.
"""

from __future__ import annotations

from typing import Any

from mhc_inductor import compat
from mhc_inductor.kernels.eager import OPS
from mhc_inductor.ops.registry import REFERENCE

from . import common
from .builder import OpBuilder

_PRE = ("mhc_pre", "mhc_head")
_POST_PRE = ("mhc_post_pre", "mhc_post_head")


def _calls_op(name: str, args: tuple[Any, ...]) -> bool:
    from mhc_inductor.kernels.mhc.gluon import one_read, post_project

    if compat.packaging():
        return False
    x = args[0]
    b = OpBuilder(x.get_device())
    if name in _PRE:
        return one_read(b, x, None) is not None
    if name in _POST_PRE and one_read(b, x, args[1:4]) is not None:
        return True
    return post_project(b, x, args[1]) is not None


def register() -> None:
    """Registers all lowerings and decompositions. Called once, when the first graph is compiled."""
    for name in OPS:
        if name.startswith("mhc_"):
            common.register(
                name, REFERENCE[name], _calls_op if name in (*_PRE, *_POST_PRE, "mhc_single_pass") else None
            )
