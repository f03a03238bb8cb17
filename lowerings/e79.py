# SPDX-License-Identifier: Apache-2.0
"""Lowerings of the E79 ops.

The fastest kernels are written in Gluon, which Inductor's Triton-kernel HOP cannot express, so the generated code calls
the op, which launches them. Where the code must run without Python, or where Gluon does not run, it launches the plain
Triton kernels.
"""

from __future__ import annotations

from typing import Any

from mhc_inductor import compat

from . import common, e79_cpu

OPS = ("e79_scan", "e79_scan_backward")


def _calls_op(name: str, args: tuple[Any, ...]) -> bool:
    from mhc_inductor.kernels.e79.plan import runs_gluon
    from mhc_inductor.kernels.launch import EagerBuilder

    kvqm = args[OPS.index(name) * 3]
    if compat.lowerings.packaging():
        return False
    steps, _, width = kvqm.get_size()
    # With one step, as in decoding, calling the op costs more than the kernel.
    if steps == 1:
        return False
    return runs_gluon(EagerBuilder(kvqm.get_device()), compat.lowerings.static_int(width) // 4, name)


def register() -> None:
    """Registers all lowerings. Called once, when the first graph is compiled."""
    e79_cpu.register_loop_output()
    common.register("e79_scan", e79_cpu.e79_scan, _calls_op, ("kvqm",))
    common.register("e79_scan_backward", None, _calls_op, ("dout",))
