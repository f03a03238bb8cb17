"""Lowerings of selection attention.

On a GPU its launch plans; on a CPU one formula if the problem is small, else a call of the op.
"""

from __future__ import annotations

from mhc_inductor.ops import selection_cpu

from . import common


def register() -> None:
    """Registers all lowerings. Called once, when the first graph is compiled."""
    common.register("selection_attention", selection_cpu.fused_attention)
    common.register("selection_attention_backward", selection_cpu.fused_attention_backward)
