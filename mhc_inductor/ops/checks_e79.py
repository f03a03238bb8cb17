# SPDX-License-Identifier: Apache-2.0
"""Validation of the E79 arguments, shared by the public function, the ops and their fakes (see ``checks.py``)."""

from __future__ import annotations

import torch
from torch import Tensor

from mhc_inductor.ops.checks import _floating, _shape, _text


def _segment(op: str, segment: int, least: int, meaning: str) -> None:
    if isinstance(segment, bool) or not isinstance(segment, (int, torch.SymInt)):
        raise TypeError(f"{op}: segment must be an int, got {type(segment).__name__}")
    torch._check_value(segment >= least, lambda: f"{op}: segment must be {meaning}, got {segment}")


def e79_inputs(
    kvqm: Tensor, b_s: Tensor | None, b_m: Tensor | None, S0: Tensor | None, M0: Tensor | None, *, op: str = "e79_scan"
) -> None:
    """Raises ValueError or TypeError unless the inputs of the scan fit together."""
    _floating(op, kvqm=kvqm, b_s=b_s, b_m=b_m, S0=S0, M0=M0)
    if kvqm.dim() != 3 or kvqm.shape[2] % 4 or kvqm.shape[2] < 4:
        raise ValueError(f"{op}: kvqm must have shape [T, B, 4n] with n of at least 1, got {_text(kvqm.shape)}")
    steps, batch, width = kvqm.shape
    n = width // 4
    torch._check_value(
        steps >= 1, lambda: f"{op}: kvqm[T, B, 4n] must have at least one time step, got {_text(kvqm.shape)}"
    )
    for name, bias in (("b_s", b_s), ("b_m", b_m)):
        if bias is None:
            continue
        if bias.dim() not in (1, 3):
            raise ValueError(
                f"{op}: {name} must have shape [n] = {_text([n])} or [T, B, n] = {_text([steps, batch, n])}, "
                f"got {_text(bias.shape)}"
            )
        if bias.dim() == 1:
            _shape(op, name, bias, [n], "[n]")
        else:
            _shape(op, name, bias, [steps, batch, n], "[T, B, n]")
    for name, state in (("S0", S0), ("M0", M0)):
        if state is not None:
            _shape(op, name, state, [batch, n, n], "[B, n, n]")


def e79_scan(
    kvqm: Tensor, b_s: Tensor | None, b_m: Tensor | None, S0: Tensor | None, M0: Tensor | None, segment: int
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``e79_scan`` fit together."""
    e79_inputs(kvqm, b_s, b_m, S0, M0)
    _segment("e79_scan", segment, 0, "0 (no checkpoints) or more")


def e79_scan_backward(
    dout: Tensor | None,
    dS: Tensor | None,
    dM: Tensor | None,
    kvqm: Tensor,
    b_s: Tensor | None,
    b_m: Tensor | None,
    S0: Tensor | None,
    M0: Tensor | None,
    checkpoints: Tensor,
    gates: Tensor,
    segment: int,
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``e79_scan_backward`` fit together."""
    op = "e79_scan_backward"
    e79_inputs(kvqm, b_s, b_m, S0, M0, op=op)
    _segment(op, segment, 1, "at least 1 (0 leaves no checkpoints to start from)")
    steps, batch, width = kvqm.shape
    n = width // 4
    _floating(op, kvqm=kvqm, checkpoints=checkpoints, gates=gates, dout=dout, dS=dS, dM=dM)
    segments = (steps + segment - 1) // segment
    _shape(op, "checkpoints", checkpoints, [2 * segments, batch, n, n], "[2 * ceil(T/segment), B, n, n]")
    _shape(op, "gates", gates, [steps, batch, 7, n], "[T, B, 7, n]")
    if dout is not None:
        _shape(op, "dout", dout, [steps, batch, n], "[T, B, n]")
    for name, grad in (("dS", dS), ("dM", dM)):
        if grad is not None:
            _shape(op, name, grad, [batch, n, n], "[B, n, n]")
