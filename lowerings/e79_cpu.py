"""The E79 scan compiled for a CPU: a loop over time, whose body Inductor fuses into one C++ kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mhc_inductor import compat
from mhc_inductor.reference.e79 import biases, gated, initial, outer, vectors


def _row_sums(matrix: Tensor, vector: Tensor) -> Tensor:
    """Returns ``matrix @ vector`` as a sum: a matrix product would be a separate call between the fused parts."""
    return (matrix * vector.unsqueeze(-2)).sum(-1)


def _column_sums(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix * vector.unsqueeze(-1)).sum(-2)


def _step(S: Tensor, M: Tensor, x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Computes one step of :func:`mhc_inductor.reference.e79.e79_scan` on ``x[B, 6n]``; returns the new S, M, and y."""
    k, v, q, m, b_s, b_m = x.chunk(6, -1)
    r = torch.sigmoid(_row_sums(M, k) + b_s)
    c = torch.sigmoid(_column_sums(M, k) + b_s)
    delta = v - _row_sums(S, k)
    S = gated(S, r, c) + outer(delta, k)
    p = torch.sigmoid(_row_sums(S, m) + b_m)
    w = torch.sigmoid(_column_sums(S, m) + b_m)
    g = delta - _row_sums(M, m)
    M = gated(M, p, w) + outer(g, m)
    return S, M, _row_sums(S, q)


def e79_scan(
    kvqm: Tensor, b_s: Tensor | None, b_m: Tensor | None, S0: Tensor | None, M0: Tensor | None, segment: int
) -> Any:
    """Decomposes the op for Inductor; returns NotImplemented where the generated code should call the op.

    That is on other devices than a CPU, with checkpoints, and if a symbolic size is not a plain symbol.
    """
    shapes = [t.shape for t in (kvqm, b_s, b_m, S0, M0) if t is not None]
    sizes = list({str(size): size for shape in shapes for size in shape if not isinstance(size, int)}.values())
    # Inductor's loop cannot find the values of symbols inside an expression.
    if kvqm.device.type != "cpu" or segment != 0 or not all(compat.is_symbol(size) for size in sizes):
        return NotImplemented
    # Concatenated, because the loop would copy each view among its inputs in every step.
    x = torch.cat((*vectors(kvqm), biases(kvqm, b_s), biases(kvqm, b_m)), -1)
    S, M = initial(kvqm, S0), initial(kvqm, M0)
    if kvqm.shape[0] == 1:
        S, M, y = _step(S, M, x[0])
        y = y.unsqueeze(0)
    else:
        S, M, y = compat.scan(_step, (S, M), (x,), sizes)
    return (y * y * torch.sigmoid(y)).to(kvqm.dtype), S, M, S.new_empty((0,)), S.new_empty((0,))
