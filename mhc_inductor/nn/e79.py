# SPDX-License-Identifier: Apache-2.0
"""Modules with the E79 recurrence: :class:`E79Cell` (projections and scan) and :class:`E79Layer` (a layer around it).

::

    layer = E79Layer(dim, n_state=64, conv=4)
    y, state = layer(x)                                  # [B, T, dim] -> [B, T, dim]
    y_next, state = layer(x_next, state)                 # continues the sequence
    y_one, state = layer.step(x_one, state)              # one step of decoding, [B, dim] -> [B, dim]
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhc_inductor.api.e79 import e79_scan
from mhc_inductor.nn.arguments import sizes
from mhc_inductor.ops.checks import strided

BIASES = ("none", "fixed", "input")

# Sigmoids of 0.88 and 0.92: fixed biases start with gates that keep a state for some tens of steps.
_S_GATE, _M_GATE = 2.0, 2.5


class E79Cell(nn.Module):
    """Projects the input and runs :func:`mhc_inductor.e79_scan`: ``x[T, B, dim] -> out[T, B, n]``.

    ::

        kvqm = x @ W_kvqm.T
        bias "none":   out, S, M = e79_scan(kvqm, None, None, S, M)
        bias "fixed":  out, S, M = e79_scan(kvqm, b_s_gate, b_m_gate, S, M)
        bias "input":  out, S, M = e79_scan(kvqm, x @ W_bs.T, x @ W_bm.T, S, M)

    Parameters: ``W_kvqm[4n, dim]`` in the order k, v, q, m; with "fixed" also ``b_s_gate[n]`` and ``b_m_gate[n]``; with
    "input" also ``W_bs[n, dim]`` and ``W_bm[n, dim]``.

    Args:
        dim: Width of x, at least 1.
        n_state: n, the number of rows and columns of both states, at least 1 (kernels run for n up to 128).
        bias: Biases of the gates: ``"none"``, ``"fixed"`` or ``"input"``.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        ValueError: dim or n_state is below 1, or bias is unknown.
        TypeError: dim or n_state is not an int.

    Source: the E79 model's recurrence.
    """

    b_s_gate: nn.Parameter | None
    b_m_gate: nn.Parameter | None
    W_bs: nn.Parameter | None
    W_bm: nn.Parameter | None

    def __init__(
        self, dim: int, n_state: int, bias: str = "none", *, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        sizes("E79Cell", dim=dim, n_state=n_state)
        if bias not in BIASES:
            raise ValueError(f"E79Cell: bias must be one of {BIASES}, got {bias!r}")
        self.dim, self.n_state, self.bias = dim, n_state, bias

        def empty(wanted: bool, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if wanted else None

        self.W_kvqm = nn.Parameter(torch.empty((4 * n_state, dim), device=device, dtype=dtype))
        self.b_s_gate, self.b_m_gate = (empty(bias == "fixed", n_state) for _ in range(2))
        self.W_bs, self.W_bm = (empty(bias == "input", n_state, dim) for _ in range(2))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises the parameters.

        For an x of variance 1, k, v, q, m and input-dependent biases get variance 1. Fixed biases start with the gates
        mostly open.
        """
        for weight in (self.W_kvqm, self.W_bs, self.W_bm):
            if weight is not None:
                nn.init.normal_(weight, std=self.dim**-0.5)
        if self.b_s_gate is not None and self.b_m_gate is not None:
            nn.init.constant_(self.b_s_gate, _S_GATE)
            nn.init.constant_(self.b_m_gate, _M_GATE)

    def forward(self, x: Tensor, S: Tensor | None = None, M: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Runs the cell over all time steps of x, from the states S and M.

        Args:
            x: Input ``[T, B, dim]``, T at least 1.
            S: Initial S ``[B, n, n]``, or None for zero.
            M: Initial M ``[B, n, n]``, or None for zero.

        Returns:
            ``(out, S, M)``: out ``[T, B, n]`` in the projections' dtype, and the final states ``[B, n, n]`` in fp32
            (fp64 if the projections are fp64).

        Raises:
            ValueError: A shape does not fit, or T is 0.
        """
        strided("E79Cell", "x", x)
        if x.dim() != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"E79Cell: x must have shape [T, B, dim] = [T, B, {self.dim}], got {list(x.shape)}")
        b_s, b_m = self.b_s_gate, self.b_m_gate
        if self.W_bs is not None and self.W_bm is not None:
            return e79_scan(F.linear(x, self.W_kvqm), F.linear(x, self.W_bs), F.linear(x, self.W_bm), S, M)
        return e79_scan(F.linear(x, self.W_kvqm), b_s, b_m, S, M)

    def extra_repr(self) -> str:
        """Returns the sizes and the bias mode, for ``repr``."""
        return f"dim={self.dim}, n_state={self.n_state}, bias={self.bias!r}"


class E79State(NamedTuple):
    """State that an :class:`E79Layer` carries from one call to the next."""

    S: Tensor
    """Content state ``[B, n, n]``, fp32 (fp64 for an fp64 layer)."""
    M: Tensor
    """Modulation state ``[B, n, n]``, fp32 (fp64 for an fp64 layer)."""
    tail: Tensor | None
    """The convolution's last inputs ``[B, inner, conv - 1]``, or None without a convolution."""

    def detach(self) -> E79State:
        """Returns the state detached from the graph, to truncate backpropagation here."""
        return E79State(self.S.detach(), self.M.detach(), None if self.tail is None else self.tail.detach())


class E79Layer(nn.Module):
    """A sequence layer ``x[B, T, dim] -> [B, T, dim]`` around :class:`E79Cell`.

    ::

        h = in_proj(x)                                   # [B, T, inner]
        h = conv1d(h)                                    # causal, depthwise; only with conv > 0
        out, S, M = cell(silu(h), S, M)                  # [B, T, n]
        y = out_proj(out)

    Args:
        dim: Width of x and of the result, at least 1.
        n_state: n, the number of rows and columns of both states, at least 1.
        bias: Biases of the gates, see :class:`E79Cell`.
        inner: Width between in_proj and the cell, at least 1; None for dim.
        conv: Width of the convolution; 0 for none.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        ValueError: A size is out of range, or bias is unknown.
        TypeError: A size is not an int.

    Source: the E79 model's recurrence.
    """

    def __init__(
        self,
        dim: int,
        n_state: int = 64,
        bias: str = "fixed",
        *,
        inner: int | None = None,
        conv: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        inner = dim if inner is None else inner
        sizes("E79Layer", dim=dim, n_state=n_state, inner=inner)
        sizes("E79Layer", least=0, conv=conv)
        self.dim, self.inner, self.conv = dim, inner, conv
        self.in_proj = nn.Linear(dim, inner, bias=False, device=device, dtype=dtype)
        self.conv1d = nn.Conv1d(inner, inner, conv, groups=inner, device=device, dtype=dtype) if conv else None
        self.cell = E79Cell(inner, n_state, bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(n_state, dim, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor, state: E79State | None = None) -> tuple[Tensor, E79State]:
        """Runs the layer over all time steps of x.

        Args:
            x: Input ``[B, T, dim]``, T at least 1.
            state: State that the previous call returned, or None at the start of the sequences.

        Returns:
            ``(y, state)``: y ``[B, T, dim]``, and the state that continues the sequences in the next call, with the
            same result as one call over both parts.

        Raises:
            ValueError: A shape does not fit, or T is 0.
        """
        strided("E79Layer", "x", x)
        if x.dim() != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"E79Layer: x must have shape [B, T, dim] = [B, T, {self.dim}], got {list(x.shape)}")
        h, tail = self._convolve(self.in_proj(x), None if state is None else state.tail)
        S, M = (None, None) if state is None else (state.S, state.M)
        out, S, M = self.cell(F.silu(h).transpose(0, 1), S, M)
        return self.out_proj(out.transpose(0, 1)), E79State(S, M, tail)

    def step(self, x: Tensor, state: E79State | None = None) -> tuple[Tensor, E79State]:
        """Runs one time step, for decoding.

        Args:
            x: Input ``[B, dim]`` of the step.
            state: State that the previous call returned, or None at the start of the sequences.

        Returns:
            ``(y, state)``: y ``[B, dim]``, and the state for the next step.

        Raises:
            ValueError: A shape does not fit.
        """
        strided("E79Layer", "x", x)
        if x.dim() != 2:
            raise ValueError(f"E79Layer: step takes x of shape [B, dim] = [B, {self.dim}], got {list(x.shape)}")
        y, state = self(x.unsqueeze(1), state)
        return y.squeeze(1), state

    def _convolve(self, h: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.conv1d is None:
            return h, None
        expected = (h.shape[0], self.inner, self.conv - 1)
        if tail is None:
            tail = h.new_zeros(expected)
        elif tail.shape != expected:
            raise ValueError(f"E79Layer: state.tail must have shape {list(expected)}, got {list(tail.shape)}")
        h = torch.cat((tail, h.transpose(1, 2)), -1)
        # A copy: a view would keep the whole sequence in memory.
        return self.conv1d(h).transpose(1, 2), h[..., h.shape[-1] - tail.shape[-1] :].clone()

    def extra_repr(self) -> str:
        """Returns the sizes, for ``repr``."""
        return f"dim={self.dim}, inner={self.inner}, conv={self.conv}"
