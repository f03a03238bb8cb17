"""Launch plans in Inductor: the builder that turns a plan into IR whose generated code launches the kernels itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from mhc_inductor import compat
from mhc_inductor.kernels.launch import DeviceProps, device_props


class LoweringBuilder:
    """Emits a launch plan as Inductor IR. Sizes are ints, or sympy expressions where the graph is dynamic."""

    f32 = torch.float32
    bf16 = torch.bfloat16
    i32 = torch.int32
    i64 = torch.int64
    gluon = False  # Inductor's Triton-kernel HOP emits it as plain Triton, which fails

    def __init__(self, device: torch.device, props: DeviceProps | None = None) -> None:
        self.device = device
        self._props = props

    @property
    def precision(self) -> str:
        # Part of Inductor's own cache key, and of Dynamo's guards.
        return torch.get_float32_matmul_precision()

    def device_props(self) -> DeviceProps:
        return self._props or device_props(self.device.index or 0)

    def shape(self, t: Any) -> tuple[Any, ...]:
        return tuple(int(s) if isinstance(s, (int, sympy.Integer)) else s for s in t.get_size())

    def static(self, size: Any) -> int:
        return size if isinstance(size, int) else compat.static_int(size)

    def dtype(self, t: Any) -> torch.dtype:
        return t.get_dtype()

    def contiguous(self, t: Any) -> Any:
        return compat.contiguous(t)

    def strided(self, t: Any) -> Any:
        t = compat.fixed_layout(t)
        return t if self.shape(t)[-1] == 1 or self.strides(t)[-1] == 1 else self.contiguous(t)

    def strides(self, t: Any) -> tuple[Any, ...]:
        return tuple(0 if n == 1 else self._number(s) for n, s in zip(self.shape(t), t.get_stride(), strict=True))

    def is_multiple(self, size: Any, of: int) -> bool:
        return compat.statically_multiple(size, of)

    def empty(self, shape: Sequence[Any], dtype: torch.dtype) -> Any:
        return compat.empty(shape, dtype, self.device)

    def zeros(self, shape: Sequence[Any], dtype: torch.dtype) -> Any:
        return compat.zeros(shape, dtype, self.device)

    def is_static(self, size: Any) -> bool:
        return isinstance(size, (int, sympy.Integer))

    def cdiv(self, a: Any, b: Any) -> Any:
        from torch.utils._sympy.functions import CeilDiv

        return -(-a // b) if self.is_static(a) and self.is_static(b) else CeilDiv(a, b)

    def min(self, a: Any, b: Any) -> Any:
        return self._number(sympy.Min(a, b))

    def max(self, a: Any, b: Any) -> Any:
        return self._number(sympy.Max(a, b))

    def _number(self, value: Any) -> Any:
        return int(value) if isinstance(value, sympy.Integer) else value

    def launch(
        self,
        kernel: Any,
        grid: tuple[Any, ...],
        args: Mapping[str, Any],
        constexprs: Mapping[str, Any],
        num_warps: int,
        num_stages: int,
    ) -> None:
        configured = compat.configured_kernel(kernel, tuple(sorted(constexprs.items())), num_warps, num_stages)
        constants = {k: v for k, v in args.items() if not compat.is_node(v) and not isinstance(v, sympy.Expr)}
        tensors = {k: v for k, v in args.items() if k not in constants}
        compat.launch_kernel(configured, tuple(grid), tensors, constants)
