"""Lowerings of the mHC ops."""

from __future__ import annotations

from mhc_inductor.kernels.eager import OPS
from mhc_inductor.ops.registry import REFERENCE

from . import common


def register() -> None:
    """Register every lowering and decomposition. Called once, when the first graph is compiled."""
    for name in OPS:
        if name.startswith("mhc_"):
            common.register(name, REFERENCE[name])
