"""Lowerings of selection attention: its launch plans on a GPU; on a CPU one formula where it is small, else the op."""

from __future__ import annotations

from mhc_inductor.ops import selection_cpu

from . import common


def register() -> None:
    """Register every lowering. Called once, when the first graph is compiled."""
    common.register("selection_attention", selection_cpu.fused_attention)
    common.register("selection_attention_backward", selection_cpu.fused_attention_backward)
