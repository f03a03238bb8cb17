# SPDX-License-Identifier: Apache-2.0
"""The builder that turns a launch plan into Inductor IR, whose generated code launches the kernels directly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from mhc_inductor import compat
from mhc_inductor.kernels.launch import Builder, DeviceProps, device_props


class LoweringBuilder(Builder):
    """Emits a launch plan as Inductor IR. Sizes are ints, or sympy expressions in a dynamic graph.

    The methods do what those of :class:`mhc_inductor.kernels.launch.EagerBuilder` do, on IR nodes instead of tensors.
    """

    gluon = False  # Inductor's Triton-kernel HOP emits a Gluon kernel as plain Triton, which fails

    @property
    def deterministic(self) -> bool:
        """Returns whether torch's deterministic algorithms are on, or the option ``batch_invariant`` is."""
        return torch.are_deterministic_algorithms_enabled() or compat.batch_invariant()

    def device_props(self) -> DeviceProps:
        """Returns what plans may ask about the device."""
        return self._props or device_props(self.device.index or 0)

    def shape(self, t: Any) -> tuple[Any, ...]:
        """Returns the sizes of ``t``: ints where they are known, else sympy expressions."""
        return tuple(int(s) if isinstance(s, (int, sympy.Integer)) else s for s in t.get_size())

    def static(self, size: Any) -> int:
        """Returns ``size`` as an int, and guards on it if it is symbolic."""
        return size if isinstance(size, int) else compat.lowerings.static_int(size)

    def dtype(self, t: Any) -> torch.dtype:
        """Returns the dtype of ``t``."""
        return t.get_dtype()

    def contiguous(self, t: Any) -> Any:
        """Returns ``t`` realised in contiguous layout."""
        return compat.lowerings.contiguous(t)

    def starts_aligned(self, *tensors: Any) -> bool:
        """Returns True: where a tensor starts is known when the code runs."""
        return True

    def strided(self, t: Any) -> Any:
        """Returns ``t`` with fixed strides; makes it contiguous if its last stride is not 1."""
        t = compat.lowerings.fixed_layout(t)
        return t if self.shape(t)[-1] == 1 or self.strides(t)[-1] == 1 else self.contiguous(t)

    def laid_out(self, t: Any) -> Any:
        """Returns ``t`` with fixed strides, whatever they are."""
        return compat.lowerings.fixed_layout(t)

    def strides(self, t: Any) -> tuple[Any, ...]:
        """Returns the strides in elements, 0 where a dimension has one element."""
        return tuple(0 if n == 1 else self._number(s) for n, s in zip(self.shape(t), t.get_stride(), strict=True))

    def is_multiple(self, size: Any, of: int) -> bool:
        """Returns whether ``size`` is a multiple of ``of`` for all values of its symbols."""
        return compat.lowerings.statically_multiple(size, of)

    def empty(self, shape: Sequence[Any], dtype: torch.dtype) -> Any:
        """Allocates an uninitialised buffer."""
        return compat.lowerings.empty(shape, dtype, self.device)

    def zeros(self, shape: Sequence[Any], dtype: torch.dtype) -> Any:
        """Allocates a buffer of zeros."""
        return compat.lowerings.zeros(shape, dtype, self.device)

    def is_static(self, size: Any) -> bool:
        """Returns whether ``size`` is a known integer."""
        return isinstance(size, (int, sympy.Integer))

    def cdiv(self, a: Any, b: Any) -> Any:
        """Returns a / b rounded up."""
        return -(-a // b) if self.is_static(a) and self.is_static(b) else compat.lowerings.ceil_div(a, b)

    def min(self, a: Any, b: Any) -> Any:
        """Returns the smaller of two sizes."""
        return self._number(sympy.Min(a, b))

    def max(self, a: Any, b: Any) -> Any:
        """Returns the larger of two sizes."""
        return self._number(sympy.Max(a, b))

    def _number(self, value: Any) -> Any:
        return int(value) if isinstance(value, sympy.Integer) else value

    def launch(
        self, kernel: Any, grid: tuple[Any, ...], args: Mapping[str, Any], constexprs: Mapping[str, Any], num_warps: int,
        num_stages: int,
    ) -> None:  # fmt: skip
        """Emits one launch of ``kernel``. ``args`` are tensors, sizes, scalars or None, by parameter name."""
        fixed = tuple(sorted(constexprs.items()))
        configured = compat.lowerings.configured_kernel(
            kernel, fixed, num_warps, num_stages, compat.lowerings.kernel_mark()
        )
        constants = {k: v for k, v in args.items() if not compat.lowerings.is_node(v) and not isinstance(v, sympy.Expr)}
        tensors = {k: v for k, v in args.items() if k not in constants}
        compat.lowerings.launch_kernel(configured, tuple(grid), tensors, constants)


class OpBuilder(LoweringBuilder):
    """A builder that answers as the eager builder would when the op runs: Gluon kernels are allowed."""

    gluon = True
