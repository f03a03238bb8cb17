# SPDX-License-Identifier: Apache-2.0
"""E79 (coupled memory-modulation matrix recurrence) in plain PyTorch: the specification.

:func:`e79_scan` and :func:`e79_scan_backward` have the name, the arguments and the outputs of the op
``torch.ops.mhc_inductor.<name>``. Tensors: ``kvqm[T, B, 4n]`` in the order k, v, q, m; states S and M ``[B, n, n]``.
The arithmetic is fp32 (fp64 if kvqm is fp64), and only results in an input's dtype are rounded, once. Nothing here uses
autograd, but autograd of the forward works too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhc_inductor.reference.precision import acc_dtype, as_given

EPS = 1e-6  # added to the norms of k and m


class _Step(NamedTuple):
    """The results of one step: the new states, y, and what its backward needs."""

    S: Tensor
    M: Tensor
    y: Tensor
    r: Tensor
    c: Tensor
    delta: Tensor
    p: Tensor
    w: Tensor
    g: Tensor


def mv(matrix: Tensor, vector: Tensor) -> Tensor:
    """Returns ``matrix[B, n, n] @ vector[B, n]``, ``[B, n]``."""
    return torch.matmul(matrix, vector.unsqueeze(-1)).squeeze(-1)


def outer(a: Tensor, b: Tensor) -> Tensor:
    """Returns the outer products of ``a[B, n]`` and ``b[B, n]``, ``[B, n, n]``."""
    return a.unsqueeze(-1) * b.unsqueeze(-2)


def gated(matrix: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Returns ``rows[:, None] * matrix * columns[None, :]``, batched."""
    return rows.unsqueeze(-1) * matrix * columns.unsqueeze(-2)


def unit(u: Tensor) -> Tensor:
    """Returns ``u / (|u| + 1e-6)`` over the last dimension."""
    return u / (torch.linalg.vector_norm(u, dim=-1, keepdim=True) + EPS)


def unit_backward(grad: Tensor, u: Tensor) -> Tensor:
    """Returns the gradient of :func:`unit` at u.

    ``i*grad - i^2 <grad, u> u/|u|`` with ``i = 1/(|u| + 1e-6)``; ``i*grad`` where u is 0.
    """
    norm = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
    scale = 1 / (norm + EPS)
    along = (grad * u).sum(-1, keepdim=True) * (u / torch.where(norm == 0, 1.0, norm))
    return scale * grad - scale * scale * along


def vectors(kvqm: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Splits kvqm into (k^, v, q, m^), ``[T, B, n]`` each in the arithmetic's dtype, with k and m normalised."""
    k, v, q, m = kvqm.to(acc_dtype(kvqm.dtype)).chunk(4, -1)
    return unit(k), v, q, unit(m)


def biases(kvqm: Tensor, bias: Tensor | None) -> Tensor:
    """Returns a bias of any mode as ``[T, B, n]`` in the arithmetic's dtype, expanded as a view."""
    steps, batch, width = kvqm.shape
    acc = acc_dtype(kvqm.dtype)
    value = torch.zeros((), dtype=acc, device=kvqm.device) if bias is None else bias.to(acc)
    return value.expand(steps, batch, width // 4)


def initial(kvqm: Tensor, state: Tensor | None) -> Tensor:
    """Returns a state, or the gradient of one, ``[B, n, n]`` in the arithmetic's dtype; zeros for None."""
    n, acc = kvqm.shape[2] // 4, acc_dtype(kvqm.dtype)
    if state is None:
        return torch.zeros((kvqm.shape[1], n, n), dtype=acc, device=kvqm.device)
    return state.to(acc).contiguous()


def _step(S: Tensor, M: Tensor, k: Tensor, v: Tensor, q: Tensor, m: Tensor, b_s: Tensor, b_m: Tensor) -> _Step:
    r = torch.sigmoid(mv(M, k) + b_s)
    c = torch.sigmoid(mv(M.mT, k) + b_s)
    delta = v - mv(S, k)
    S = gated(S, r, c) + outer(delta, k)
    p = torch.sigmoid(mv(S, m) + b_m)
    w = torch.sigmoid(mv(S.mT, m) + b_m)
    g = delta - mv(M, m)
    M = gated(M, p, w) + outer(g, m)
    return _Step(S, M, mv(S, q), r, c, delta, p, w, g)


@as_given
def e79_scan(
    kvqm: Tensor, b_s: Tensor | None, b_m: Tensor | None, S0: Tensor | None, M0: Tensor | None, segment: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Runs the recurrence over ``t = 0 .. T-1`` from S = S0 and M = M0.

    ::

        k^ = k / (|k| + 1e-6) ;  m^ = m / (|m| + 1e-6)
        r = sigmoid(M k^ + b_s) ;  c = sigmoid(M.T k^ + b_s) ;  delta = v - S k^
        S' = r[:, None] * S * c[None, :] + outer(delta, k^)
        p = sigmoid(S' m^ + b_m) ;  w = sigmoid(S'.T m^ + b_m) ;  g = delta - M m^          # old M
        M' = p[:, None] * M * w[None, :] + outer(g, m^)
        out = y * silu(y),  y = S' q

    Args:
        kvqm: Projected input ``[T, B, 4n]``, k, v, q, m in this order.
        b_s: Bias of r and c: None (zero), ``[n]`` or ``[T, B, n]``.
        b_m: Bias of p and w: None (zero), ``[n]`` or ``[T, B, n]``.
        S0: Initial S ``[B, n, n]``, or None for zero.
        M0: Initial M ``[B, n, n]``, or None for zero.
        segment: Steps from one checkpoint to the next; 0 saves nothing for the backward.

    Returns:
        ``(out, S, M, checkpoints, gates)``: out ``[T, B, n]`` in kvqm's dtype, and the final S and M ``[B, n, n]``.
        checkpoints ``[2 * ceil(T/segment), B, n, n]`` holds S, then M, before the steps 0, segment, 2*segment, ...;
        gates ``[T, B, 7, n]`` holds r, p, delta, g, y, c, w of every step. Both have shape [0] with segment = 0.

    Source: the E79 model's recurrence.
    """
    S, M = initial(kvqm, S0), initial(kvqm, M0)
    ys, saved, gates = [], [], []
    steps = zip(*vectors(kvqm), biases(kvqm, b_s), biases(kvqm, b_m), strict=True)
    for t, args in enumerate(steps):
        if segment > 0 and t % segment == 0:
            saved += [S, M]
        step = _step(S, M, *args)
        S, M = step.S, step.M
        ys.append(step.y)
        if segment > 0:
            gates.append(torch.stack((step.r, step.p, step.delta, step.g, step.y, step.c, step.w), 1))
    y = torch.stack(ys)
    out = (y * y * torch.sigmoid(y)).to(kvqm.dtype)
    if segment == 0:
        return out, S, M, S.new_empty((0,)), S.new_empty((0,))
    return out, S, M, torch.stack(saved), torch.stack(gates)


@as_given
def e79_scan_backward(
    dout: Tensor | None, dS: Tensor | None, dM: Tensor | None, kvqm: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of :func:`e79_scan`; a gradient of None counts as zero.

    It goes from the last segment to the first: it recomputes the segment's states from the checkpoint and the gates,
    then undoes the steps from the last to the first. dS' and dM' are the gradients of a step's results, a and h, e and
    f those of the sigmoids' arguments::

        dy = dout * (2 y s + y^2 s (1-s)),  s = sigmoid(y) ;  dS' += dy q.T ;  dq = S'.T dy
        e = (dM' * M) w * p(1-p) ;  f = (dM' * M).T p * w(1-w) ;  dg = dM' m^
        dS' += e m^.T + m^ f.T ;  dm^ = dM'.T g - M.T dg + S'.T e + S' f ;  db_m = e + f
        a = (dS' * S) c * r(1-r) ;  h = (dS' * S).T r * c(1-c) ;  dv = dg + dS' k^
        dk^ = dS'.T delta - S.T dv + M.T a + M h ;  db_s = a + h
        dS = r dS' c - dv k^.T ;  dM = p dM' w - dg m^.T + a k^.T + k^ h.T

    and dk = dk^/(|k| + 1e-6) - <dk^, k> k / (|k| (|k| + 1e-6)^2), without the second term where k is 0; dm likewise.

    dout ``[T, B, n]``, dS and dM ``[B, n, n]`` are the gradients of out and of the final S and M. The others are the
    arguments of :func:`e79_scan`, with its outputs checkpoints and gates before the segment, which is at least 1.

    Returns:
        ``(dkvqm, db_s, db_m, dS0, dM0)``, each in its input's shape and dtype, of shape [0] where the input is None.

    Source: derived from the E79 model's recurrence.
    """
    b_s, b_m, S0, M0, checkpoints, gates, segment = rest
    acc, steps = acc_dtype(kvqm.dtype), kvqm.shape[0]
    k, _, q, m = vectors(kvqm)
    grad_s = initial(kvqm, dS)
    grad_m = initial(kvqm, dM)
    rows: list[tuple[Tensor, ...]] = []
    for j in reversed(range(checkpoints.shape[0] // 2)):
        first, last = j * segment, min((j + 1) * segment, steps)
        S, M = checkpoints[2 * j], checkpoints[2 * j + 1]
        before, after = [], []
        for t in range(first, last):
            before.append((S, M))
            after.append(_again(S, M, gates[t], k[t], m[t]))
            S, M = after[-1].S, after[-1].M
        for t in reversed(range(first, last)):
            done = after[t - first]
            dy = None if dout is None else _output_gradient(dout[t].to(acc), done.y)
            grad_s, grad_m, *row = _step_backward(grad_s, grad_m, dy, before[t - first], done, k[t], q[t], m[t])
            rows.append(tuple(row))
    dk, dv, dq, dm, db_s, db_m = (torch.stack(column[::-1]) for column in zip(*rows, strict=True))
    raw_k, _, _, raw_m = kvqm.to(acc).chunk(4, -1)
    dkvqm = torch.cat([unit_backward(dk, raw_k), dv, dq, unit_backward(dm, raw_m)], -1).to(kvqm.dtype)
    return (
        dkvqm,
        reduced(db_s, b_s),
        reduced(db_m, b_m),
        grad_s.new_empty((0,)) if S0 is None else grad_s.to(S0.dtype),
        grad_m.new_empty((0,)) if M0 is None else grad_m.to(M0.dtype),
    )


def _again(S: Tensor, M: Tensor, gates: Tensor, k: Tensor, m: Tensor) -> _Step:
    """Recomputes a step's new states from its saved gates ``[B, 7, n]``."""
    r, p, delta, g, y, c, w = gates.unbind(1)
    S, M = gated(S, r, c) + outer(delta, k), gated(M, p, w) + outer(g, m)
    return _Step(S, M, y, r, c, delta, p, w, g)


def _output_gradient(dout: Tensor, y: Tensor) -> Tensor:
    s = torch.sigmoid(y)
    return dout * (2 * y * s + y * y * s * (1 - s))


def reduced(grad: Tensor, bias: Tensor | None) -> Tensor:
    """Reduces a bias's gradient ``[T, B, n]`` to the bias's shape and dtype; returns shape [0] without a bias."""
    if bias is None:
        return grad.new_empty((0,))
    return (grad.sum((0, 1)) if bias.dim() == 1 else grad).to(bias.dtype)


def _step_backward(
    dS: Tensor,
    dM: Tensor,
    dy: Tensor | None,
    before: tuple[Tensor, Tensor],
    step: _Step,
    k: Tensor,
    q: Tensor,
    m: Tensor,
) -> tuple[Tensor, ...]:
    """Returns (dS, dM, dk^, dv, dq, dm^, db_s, db_m) from the gradients of a step's new states."""
    S, M = before
    if dy is None:
        dq = torch.zeros_like(q)
    else:
        dS, dq = dS + outer(dy, q), mv(step.S.mT, dy)
    product = dM * M
    e = mv(product, step.w) * step.p * (1 - step.p)
    f = mv(product.mT, step.p) * step.w * (1 - step.w)
    dg = mv(dM, m)
    dm = mv(dM.mT, step.g) - mv(M.mT, dg) + mv(step.S.mT, e) + mv(step.S, f)
    dS = dS + outer(e, m) + outer(m, f)
    product = dS * S
    a = mv(product, step.c) * step.r * (1 - step.r)
    h = mv(product.mT, step.r) * step.c * (1 - step.c)
    dv = dg + mv(dS, k)
    dk = mv(dS.mT, step.delta) - mv(S.mT, dv) + mv(M.mT, a) + mv(M, h)
    dM = gated(dM, step.p, step.w) - outer(dg, m) + outer(a, k) + outer(k, h)
    dS = gated(dS, step.r, step.c) - outer(dv, k)
    return dS, dM, dk, dv, dq, dm, a + h, e + f
