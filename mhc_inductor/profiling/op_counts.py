# SPDX-License-Identifier: Apache-2.0
"""What a model's ops compute and move, and their names in a profiler's trace."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mhc_inductor import compat
from mhc_inductor.ops import flops
from mhc_inductor.profiling import op_bytes
from mhc_inductor.report.counts import OpCount, OpCounts


@contextlib.contextmanager
def count_ops() -> Iterator[OpCounts]:
    """Counts calls, FLOPs and bytes of each op that runs inside the context, backward ops too.

    Sees every call of ``torch.ops.mhc_inductor`` on this thread and in its backwards: of the functions, of modules, and
    of models compiled with ``options={"mhc_inductor.profile_scopes": True}``. Without that option compiled code launches
    the kernels of most ops itself, and on a CPU computes their formulas, which no counter sees: then :meth:`OpCounts.of`
    has the counts of a forward. Compile the model first, by a call outside of the context.

    The values of ranges and lists are read, which waits for the GPU: measure the time in another run.

    Yields:
        The counts, which grow with each call.
    """
    counts, lock = OpCounts(), threading.Lock()

    def run(op: str, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = call(*args, **kwargs)
        products = int(flops.count(op, *args, out_val=out, **kwargs))
        moved = op_bytes.count(op, *args, out_val=out, **kwargs)
        with lock:  # a backward runs on threads of its own
            counts.add(op, OpCount(1, products, int(moved.moved), int(moved.gathered)))
        return out

    with compat.op_mode(run):
        yield counts


@contextlib.contextmanager
def op_scopes(*, nvtx: bool = False) -> Iterator[None]:
    """Names each op that runs inside the context, with its shapes, in the trace of a profiler.

    A call of ``torch.ops.mhc_inductor.mhc_pre`` is then a scope ``mhc_pre x bfloat16[2, 4096, 4, 1024], ...`` around what
    torch itself records of the call (``mhc_inductor::mhc_pre``). Scopes are made only while a profiler of torch runs
    (``torch.profiler.profile``, ``torch.autograd.profiler.emit_nvtx``). Sees the calls that :func:`count_ops` sees.

    Args:
        nvtx: also push an NVTX range for each op, which Nsight Systems shows without a profiler of torch.

    Raises:
        RuntimeError: if ``nvtx`` is set and this torch was built without NVTX.
    """
    if nvtx:
        try:
            torch.cuda.nvtx.mark("mhc_inductor.op_scopes")
        except RuntimeError as error:
            raise RuntimeError(
                "op_scopes: nvtx=True needs a torch for CUDA; this one was built without NVTX"
            ) from error

    def run(op: str, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        profiled = compat.profiler_runs()
        if not (profiled or nvtx):
            return call(*args, **kwargs)
        name = f"{op} {_shapes(op, args)}"
        with contextlib.ExitStack() as scopes:
            if profiled:
                scopes.enter_context(torch.profiler.record_function(name))
            if nvtx:
                scopes.enter_context(torch.cuda.nvtx.range(name))
            return call(*args, **kwargs)

    with compat.op_mode(run):
        yield


def _shapes(op: str, args: tuple[Any, ...]) -> str:
    """Returns the tensors among the arguments as text: name, dtype and shape of each."""
    names = (a.name for a in getattr(torch.ops.mhc_inductor, op).default._schema.arguments)
    given = [(name, t) for name, t in zip(names, args, strict=False) if isinstance(t, Tensor)]
    return ", ".join(f"{name} {str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for name, t in given)
