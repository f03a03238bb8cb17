"""The E79 scan compiled for a CPU: a loop over time, whose body Inductor fuses into one C++ kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mhc_inductor import compat
from mhc_inductor.reference.e79 import biases, gated, initial, outer, vectors

# A namespace of its own: what is in the package's is an op for users, with a gradient and a sharding.
_INTERNAL = torch.library.Library("mhc_inductor_internal", "FRAGMENT")


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

    That is on other devices than a CPU, with checkpoints, and if a symbolic size is not a plain symbol. A package, which
    runs without Python, has no backward, so that nothing reads its checkpoints: they are NaN.

    Raises:
        RuntimeError: in a package, if a symbolic size is not a plain symbol.
    """
    packaged = compat.packaging_formulas()
    shapes = [t.shape for t in (kvqm, b_s, b_m, S0, M0) if t is not None]
    sizes = list({str(size): size for shape in shapes for size in shape if not isinstance(size, int)}.values())
    # Inductor's loop cannot find the values of symbols inside an expression.
    plain = all(compat.is_symbol(size) for size in sizes)
    if packaged and not plain:
        raise RuntimeError(
            f"mhc_inductor: e79_scan in a package for a CPU has the size {next(s for s in sizes if not compat.is_symbol(s))}; "
            "its loop takes sizes that are dynamic by themselves or static: export the model with such sizes"
        )
    if not packaged and (kvqm.device.type != "cpu" or segment != 0 or not plain):
        return NotImplemented
    # Concatenated, because the loop would copy each view among its inputs in every step.
    x = torch.cat((*vectors(kvqm), biases(kvqm, b_s), biases(kvqm, b_m)), -1)
    S, M = initial(kvqm, S0), initial(kvqm, M0)
    if kvqm.shape[0] == 1:
        S, M, y = _step(S, M, x[0])
        y = y.unsqueeze(0)
    else:
        S, M, y = compat.scan(_step, (S, M), (x,), sizes)
        y = torch.ops.mhc_inductor_internal.loop_output.default(y) if compat.in_package() else y
    out = (y * y * torch.sigmoid(y)).to(kvqm.dtype)
    return out, S, M, *_unread(S, kvqm.shape[0], segment)


def _unread(S: Tensor, steps: Any, segment: int) -> tuple[Tensor, Tensor]:
    """Returns tensors in the shapes of the checkpoints and the gates."""
    if segment == 0:
        return S.new_empty((0,)), S.new_empty((0,))
    count = 2 * ((steps + segment - 1) // segment)
    return S.new_full((count, *S.shape), torch.nan), S.new_full((steps, S.shape[0], 7, S.shape[-1]), torch.nan)


def _kept(y: Any) -> Any:
    compat.keep_loop_outputs()
    return y


def register_loop_output() -> None:
    """Defines the op that stands behind a loop in a package: it returns its input, whose buffer is not reused."""
    _INTERNAL.define("loop_output(Tensor y) -> Tensor")
    _INTERNAL.impl("loop_output", torch.clone, "CompositeExplicitAutograd")
    torch.library.register_fake("mhc_inductor_internal::loop_output", torch.empty_like, lib=_INTERNAL)
    compat.register_lowering(torch.ops.mhc_inductor_internal.loop_output.default, _kept)
