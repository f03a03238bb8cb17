# SPDX-License-Identifier: Apache-2.0
"""The builder that executes a launch plan eagerly, on torch tensors.

A plan (``kernels/<operator>/plan.py``) is written once against a builder. This builder allocates tensors and launches
kernels immediately; ``lowerings/builder.py`` turns the same calls into Inductor IR.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mhc_inductor.compat import matmul_precision

from . import COMPILED, background

_here = threading.local()


@contextlib.contextmanager
def batch_invariant() -> Iterator[None]:
    """Gives a query of attention or of an indexer the same bits whatever the number of queries, on this thread."""
    before, _here.invariant = getattr(_here, "invariant", False), True
    try:
        yield
    finally:
        _here.invariant = before


@dataclasses.dataclass(frozen=True)
class DeviceProps:
    """What plans may ask about a device."""

    sm_count: int
    """Number of multiprocessors."""
    backend: str
    """``cuda`` or ``hip``."""
    arch: int
    """Architecture as a number, 90 for sm_90."""


# Bytes of shared memory available to one program, by architecture.
_SHARED = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}
_SHARED_OTHER = {"cuda": 99 << 10, "hip": 64 << 10}


def shared_limit(backend: str, arch: int) -> int:
    """Returns the bytes of shared memory available to one program."""
    return _SHARED.get(arch, _SHARED_OTHER["cuda"]) if backend == "cuda" else _SHARED_OTHER["hip"]


@functools.cache
def device_props(index: int) -> DeviceProps:
    """Returns the properties of the CUDA or HIP device ``index``."""
    props = torch.cuda.get_device_properties(index)
    backend = "hip" if torch.version.hip else "cuda"
    return DeviceProps(props.multi_processor_count, backend, props.major * 10 + props.minor)


_OPTIONS = ("maxnreg", "launch_cooperative_grid")


@functools.cache
def _parameters(function: Any) -> tuple[list[tuple[str, str]], ...]:
    """Returns a kernel's arguments and its constants, each with the name of its value."""
    found: tuple[list[tuple[str, str]], ...] = ([], [])
    for p in inspect.signature(function).parameters.values():
        found["constexpr" in str(p.annotation)].append((p.name, p.name.removesuffix("_ptr")))
    return found


def launch(b: Any, kernel: Any, grid: Any, config: Any, *values: Mapping[str, Any], **more: Any) -> None:
    """Launches a kernel with those of the values that it has parameters for; of two with one name the last counts.

    Values named as options of Triton's compiler (``_OPTIONS``) are those.

    Args:
        b: The builder.
        kernel: The kernel.
        grid: Its programs: a number, or one for each of up to three dimensions.
        config: The numbers of warps and of stages, or a configuration that has them (without stages: 1). Its other
            fields are values, too.
        values: Tensors, sizes, scalars and constants by name; the parameter ``x_ptr`` takes the value ``x``.
        more: As ``values``.
    """
    sizes = config if isinstance(config, tuple) else (config.num_warps, getattr(config, "num_stages", 1))
    given = {} if sizes is config else dict(vars(config))
    for each in values:
        given.update(each)
    given.update(more)
    arguments, constants = _parameters(kernel.fn)
    args, constexprs = {p: given[name] for p, name in arguments}, {p: given[name] for p, name in constants}
    constexprs.update((name, given[name]) for name in _OPTIONS if name in given)
    grid = (*grid, 1, 1)[:3] if isinstance(grid, tuple) else (grid, 1, 1)
    b.launch(kernel, grid, args, constexprs, *sizes)


class Builder:
    """What all builders have: a device and names of dtypes."""

    f32, bf16, i16, i32, i64 = torch.float32, torch.bfloat16, torch.int16, torch.int32, torch.int64

    def __init__(self, device: torch.device, props: DeviceProps | None = None) -> None:
        self.device = device
        self._props = props

    @property
    def precision(self) -> str:
        """Returns torch's float32 matmul precision, which is part of Inductor's cache key and of Dynamo's guards."""
        return matmul_precision()


class EagerBuilder(Builder):
    """Executes a launch plan on torch tensors of one device."""

    @property
    def gluon(self) -> bool:
        """Returns whether Gluon kernels can be launched here."""
        return self.device.type == "cuda" and self.device_props().backend == "cuda"

    @property
    def deterministic(self) -> bool:
        """Returns whether torch's deterministic algorithms are on, or :func:`batch_invariant` is."""
        return torch.are_deterministic_algorithms_enabled() or getattr(_here, "invariant", False)

    def device_props(self) -> DeviceProps:
        """Returns what plans may ask about the device."""
        if self._props is not None:
            return self._props
        index = self.device.index
        return device_props(torch.cuda.current_device() if index is None else index)

    def shape(self, t: torch.Tensor) -> tuple[int, ...]:
        """Returns the sizes of ``t``."""
        return tuple(t.shape)

    def static(self, size: int) -> int:
        """Returns ``size`` as an int."""
        return size

    def dtype(self, t: torch.Tensor) -> torch.dtype:
        """Returns the dtype of ``t``."""
        return t.dtype

    def contiguous(self, t: torch.Tensor) -> torch.Tensor:
        """Returns ``t``, copied if it is not contiguous."""
        return t.contiguous()

    def aligned(self, t: torch.Tensor) -> torch.Tensor:
        """Returns ``t``, copied if it does not start at a multiple of 16 bytes."""
        return t if t.data_ptr() % 16 == 0 else t.clone()

    def starts_aligned(self, *tensors: torch.Tensor) -> bool:
        """Returns whether all tensors start at a multiple of 16 bytes."""
        return all(t.is_meta or t.data_ptr() % 16 == 0 for t in tensors)

    def strided(self, t: torch.Tensor) -> torch.Tensor:
        """Returns ``t`` with a last stride of 1, copied only if it is another; the other strides may be anything."""
        return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()

    def laid_out(self, t: torch.Tensor) -> torch.Tensor:
        """Returns ``t`` with fixed strides, whatever they are."""
        return t

    def strides(self, t: torch.Tensor) -> tuple[int, ...]:
        """Returns the strides in elements, 0 where a dimension has one element."""
        return tuple(0 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True))

    def is_multiple(self, size: int, of: int) -> bool:
        """Returns whether ``size`` is known to be a multiple of ``of``."""
        return size % of == 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocates an uninitialised tensor."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocates a tensor of zeros."""
        return torch.zeros(tuple(shape), dtype=dtype, device=self.device)

    def is_static(self, expr: Any) -> bool:
        """Returns whether ``expr`` is a known integer."""
        return isinstance(expr, int)

    def cdiv(self, a: int, b: int) -> int:
        """Returns a / b rounded up."""
        return -(-a // b)

    def min(self, a: int, b: int) -> int:
        """Returns the smaller of two sizes."""
        return min(a, b)

    def max(self, a: int, b: int) -> int:
        """Returns the larger of two sizes."""
        return max(a, b)

    def launch(
        self, kernel: Any, grid: tuple[int, ...], args: Mapping[str, Any], constexprs: Mapping[str, Any], num_warps: int,
        num_stages: int,
    ) -> None:  # fmt: skip
        """Launches ``kernel``, unless the grid is empty. ``args`` are tensors, scalars or None, by parameter name."""
        if any(g == 0 for g in grid):
            return
        if background.pending:
            background.finish(kernel)
        kernel[grid](**args, **constexprs, num_warps=num_warps, num_stages=num_stages, **COMPILED)


class Recorder(EagerBuilder):
    """Records the launches of a plan on meta tensors instead of executing them."""

    def __init__(self, props: DeviceProps) -> None:
        super().__init__(torch.device("meta"), props)
        self.launches: list[background.Launch] = []

    @property
    def gluon(self) -> bool:
        """Returns whether Gluon kernels can be launched on the recorded device."""
        return self.device_props().backend == "cuda"

    def launch(
        self, kernel: Any, grid: tuple[int, ...], args: Mapping[str, Any], constexprs: Mapping[str, Any], num_warps: int,
        num_stages: int,
    ) -> None:  # fmt: skip
        """Records one launch."""
        self.launches.append((kernel, dict(args), dict(constexprs), num_warps, num_stages))
