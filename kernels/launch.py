"""Launch plans run eagerly: the builder that executes a plan on torch tensors.

A plan (``kernels/<operator>/plan.py``) is written once against a builder. This one allocates tensors and launches
kernels at once; ``lowerings/builder.py`` turns the same calls into Inductor IR.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import beside


@dataclasses.dataclass(frozen=True)
class DeviceProps:
    """What a plan may ask about a device: multiprocessors, ``cuda`` or ``hip``, and the architecture (90 = sm_90)."""

    sm_count: int
    backend: str
    arch: int


# Bytes of shared memory that one program may have, by architecture.
_SHARED = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}
_SHARED_OTHER = {"cuda": 99 << 10, "hip": 64 << 10}


def shared_limit(backend: str, arch: int) -> int:
    """Bytes of shared memory that one program may have."""
    return _SHARED.get(arch, _SHARED_OTHER["cuda"]) if backend == "cuda" else _SHARED_OTHER["hip"]


@functools.cache
def device_props(index: int) -> DeviceProps:
    props = torch.cuda.get_device_properties(index)
    backend = "hip" if torch.version.hip else "cuda"
    return DeviceProps(props.multi_processor_count, backend, props.major * 10 + props.minor)


class EagerBuilder:
    """Executes a launch plan on torch tensors of one device."""

    f32 = torch.float32
    bf16 = torch.bfloat16
    i32 = torch.int32
    i64 = torch.int64

    def __init__(self, device: torch.device, props: DeviceProps | None = None) -> None:
        self.device = device
        self._props = props

    @property
    def gluon(self) -> bool:
        """Whether Gluon kernels can be launched here."""
        return self.device.type == "cuda" and self.device_props().backend == "cuda"

    @property
    def precision(self) -> str:
        return torch.get_float32_matmul_precision()

    def device_props(self) -> DeviceProps:
        if self._props is not None:
            return self._props
        index = self.device.index
        return device_props(torch.cuda.current_device() if index is None else index)

    def shape(self, t: torch.Tensor) -> tuple[int, ...]:
        return tuple(t.shape)

    def static(self, size: int) -> int:
        return size

    def dtype(self, t: torch.Tensor) -> torch.dtype:
        return t.dtype

    def contiguous(self, t: torch.Tensor) -> torch.Tensor:
        return t.contiguous()

    def aligned(self, t: torch.Tensor) -> torch.Tensor:
        """``t``, copied where it does not start at a multiple of 16 bytes."""
        return t if t.data_ptr() % 16 == 0 else t.clone()

    def strided(self, t: torch.Tensor) -> torch.Tensor:
        """``t`` with neighbours in its last dimension, copied only where they are not; the other strides are any."""
        return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()

    def strides(self, t: torch.Tensor) -> tuple[int, ...]:
        """Strides in elements, 0 where a dimension has one element."""
        return tuple(0 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True))

    def is_multiple(self, size: int, of: int) -> bool:
        """Whether ``size`` is known to be a multiple of ``of``."""
        return size % of == 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device=self.device)

    def is_static(self, expr: Any) -> bool:
        return isinstance(expr, int)

    def cdiv(self, a: int, b: int) -> int:
        return -(-a // b)

    def min(self, a: int, b: int) -> int:
        return min(a, b)

    def max(self, a: int, b: int) -> int:
        return max(a, b)

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: Mapping[str, Any],
        constexprs: Mapping[str, Any],
        num_warps: int,
        num_stages: int,
    ) -> None:
        if any(g == 0 for g in grid):
            return
        if beside.pending:
            beside.finish(kernel)
        kernel[grid](**args, **constexprs, num_warps=num_warps, num_stages=num_stages)


class Recorder(EagerBuilder):
    """Collects the launches of a plan, on meta tensors."""

    def __init__(self, props: DeviceProps) -> None:
        super().__init__(torch.device("meta"), props)
        self.launches: list[beside.Launch] = []

    @property
    def gluon(self) -> bool:
        return self.device_props().backend == "cuda"

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: Mapping[str, Any],
        constexprs: Mapping[str, Any],
        num_warps: int,
        num_stages: int,
    ) -> None:
        self.launches.append((kernel, dict(args), dict(constexprs), num_warps, num_stages))
