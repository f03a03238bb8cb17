# SPDX-License-Identifier: Apache-2.0
"""The E79 scan compiled for a CPU: a loop over time, whose body Inductor fuses into one C++ kernel."""

from __future__ import annotations

from collections.abc import Sequence
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


def e79_scan(*args: Any) -> Any:
    """Decomposes the op for Inductor if it is a single step, or in a package, which runs without Python.

    Else returns NotImplemented, which keeps the op: torch's caches refuse a graph with a loop, so :func:`expand` puts the
    loop there after they were asked.

    Raises:
        RuntimeError: in a package, if a symbolic size is not a plain symbol.
    """
    kvqm, segment = args[0], args[5]
    if compat.packaging_formulas():
        compound = next((size for size in _sizes(args) if not compat.is_symbol(size)), None)
        if compound is not None:
            raise RuntimeError(
                f"mhc_inductor: e79_scan in a package for a CPU has the size {compound}; "
                "its loop takes sizes that are dynamic by themselves or static: export the model with such sizes"
            )
        return _formula(*args)
    return _formula(*args) if kvqm.device.type == "cpu" and segment == 0 and kvqm.shape[0] == 1 else NotImplemented


def expand(graph: torch.fx.Graph) -> None:
    """Replaces ops by loops in a graph that Inductor is about to lower.

    The generated code calls those that stay: on other devices than a CPU, with checkpoints, and if a symbolic size is
    not a plain symbol.
    """
    op = torch.ops.mhc_inductor.e79_scan.default
    for node in graph.find_nodes(op="call_function", target=op):
        args = torch.fx.map_arg(node.args, lambda n: n.meta["val"])
        if args[0].device.type == "cpu" and args[5] == 0 and all(map(compat.is_symbol, _sizes(args))):
            compat.lowerings.replace_by_traced(node, _formula)


def _sizes(args: Sequence[Any]) -> list[Any]:
    """Returns the symbolic sizes among the arguments' shapes, each once."""
    sizes = (size for t in args if isinstance(t, Tensor) for size in t.shape if not isinstance(size, int))
    return list({str(size): size for size in sizes}.values())


def _formula(
    kvqm: Tensor, b_s: Tensor | None, b_m: Tensor | None, S0: Tensor | None, M0: Tensor | None, segment: int
) -> tuple[Tensor, ...]:
    """Computes the op by a loop, whose symbolic sizes must be plain symbols: Inductor's loop finds no other values.

    Checkpoints and gates are NaN: nothing reads them, since a package has no backward.
    """
    # Concatenated, because the loop would copy each view among its inputs in every step.
    x = torch.cat((*vectors(kvqm), biases(kvqm, b_s), biases(kvqm, b_m)), -1)
    S, M = initial(kvqm, S0), initial(kvqm, M0)
    if kvqm.shape[0] == 1:
        S, M, y = _step(S, M, x[0])
        y = y.unsqueeze(0)
    else:
        S, M, y = compat.lowerings.scan(_step, (S, M), (x,), _sizes((kvqm, b_s, b_m, S0, M0)))
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
    compat.lowerings.keep_loop_outputs()
    return y


def register_loop_output() -> None:
    """Defines the op that stands behind a loop in a package: it returns its input, whose buffer is not reused."""
    _INTERNAL.define("loop_output(Tensor y) -> Tensor")
    _INTERNAL.impl("loop_output", torch.clone, "CompositeExplicitAutograd")
    torch.library.register_fake("mhc_inductor_internal::loop_output", torch.empty_like, lib=_INTERNAL)
    compat.lowerings.register_lowering(torch.ops.mhc_inductor_internal.loop_output.default, _kept)
