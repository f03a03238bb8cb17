# SPDX-License-Identifier: Apache-2.0
"""Background compilation of kernels on threads, while the rest of a model compiles.

The kernels that generated code launches are compiled by Inductor's workers. Without this module, the kernels of an op
that generated code calls would start to compile at its first call.
"""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from typing import Any

import torch

from mhc_inductor.log import logger

from . import COMPILED

# (kernel, arguments with meta tensors, constants, number of warps, number of stages)
Launch = tuple[Any, dict[str, Any], dict[str, Any], int, int]

pending: dict[Any, list[concurrent.futures.Future[None]]] = {}
"""The kernels that may still be compiling, with the futures of their compilations."""
_started: set[Any] = set()
_lock = threading.Lock()


@functools.cache
def _threads() -> concurrent.futures.Executor:
    return concurrent.futures.ThreadPoolExecutor(4, thread_name_prefix="mhc_inductor-compile")


def start(launch: Launch, device: torch.device) -> None:
    """Starts to compile the kernel of ``launch`` for ``device``, unless that was started before."""
    key = (device.index, *_specialisation(*launch))
    with _lock:
        if key not in _started:
            _started.add(key)
            pending.setdefault(launch[0], []).append(_threads().submit(_compile, device, *launch))


def finish(kernel: Any) -> None:
    """Waits until ``kernel`` is compiled. A failure is only logged: the launch compiles the kernel again and raises."""
    with _lock:
        futures = pending.pop(kernel, [])
    for future in futures:
        error = future.exception()
        if error is not None:
            logger.debug("%s was not compiled ahead of its launch: %s", kernel, error)


def _specialisation(
    kernel: Any, args: dict[str, Any], constexprs: dict[str, Any], num_warps: int, num_stages: int
) -> tuple[Any, ...]:
    """Returns a key that differs between launches that need different compilations of a kernel."""
    seen = tuple(
        (k, v.dtype) if isinstance(v, torch.Tensor) else (k, type(v), v == 1, isinstance(v, int) and v % 16 == 0)
        for k, v in args.items()
    )
    return kernel, seen, tuple(constexprs.items()), num_warps, num_stages


def _compile(
    device: torch.device,
    kernel: Any,
    args: dict[str, Any],
    constexprs: dict[str, Any],
    num_warps: int,
    num_stages: int,
) -> None:
    from triton.runtime.jit import MockTensor

    given = {k: MockTensor(v.dtype) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    with torch.cuda.device(device):
        kernel.warmup(grid=(1, 1, 1), **given, **constexprs, num_warps=num_warps, num_stages=num_stages, **COMPILED)
