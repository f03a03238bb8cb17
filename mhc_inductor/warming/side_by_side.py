# SPDX-License-Identifier: Apache-2.0
"""Compiles the entries of a warmup in several processes at once, which fill the caches on disk.

Dynamo compiles one graph at a time in a process: it holds a lock from the trace to the last kernel. So each process
here warms a copy of the model up for its share of the entries; the warmup itself then finds what they compiled in the
caches. A process that fails costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import multiprocessing
import multiprocessing.reduction
import pickle
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mhc_inductor import backend, compat
from mhc_inductor.log import logger

_DEVICES = ("cpu", "cuda")


class _Pickler(multiprocessing.reduction.ForkingPickler):
    """Pickles a model: tensors on a GPU as handles of their memory, tensors on a CPU by value.

    ForkingPickler would move tensors on a CPU to shared memory, away from what else views them.
    """

    def reducer_override(self, value: Any) -> Any:
        if (context := compat.processes.context_parts(value)) is not None:
            return compat.processes.context_of, context
        if isinstance(value, torch.TypedStorage):
            device = value._untyped_storage.device
        elif isinstance(value, (Tensor, torch.UntypedStorage)):
            device = value.device
        else:
            return NotImplemented
        return value.__reduce_ex__(4) if device.type == "cpu" else NotImplemented


def fill_caches(model: nn.Module, calls: Sequence[Any], backward: Any, processes: int) -> None:
    """Compiles what ``calls`` of ``model`` need into the caches on disk. Logs a warning where that cannot be."""
    processes = min(processes, len(calls))
    if not compat.processes.caches_graphs():
        logger.warning("warmup: entries are not compiled side by side: Inductor's cache of graphs is off")
        return
    stream = io.BytesIO()
    try:
        _Pickler(stream, 4).dump((_modes(), model, compat.processes.compiled_in_place(model), calls, backward))
    except Exception as error:
        logger.warning("warmup: entries are not compiled side by side, pickling failed: %s", error)
        return
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_work, args=(stream.getvalue(), k, processes)) for k in range(processes)]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
    failed = [worker.exitcode for worker in workers if worker.exitcode]
    if failed:
        logger.warning("warmup: %d of %d processes failed to compile side by side", len(failed), processes)


def _work(payload: bytes, number: int, processes: int) -> None:
    """Warms a copy of the model up for a share of the entries, in a process of its own."""
    from mhc_inductor.warming.warmup import warmup

    try:
        modes, model, in_place, calls, backward = pickle.loads(payload)
        _order_modules(modes["modules"])
        with _set(modes, processes):
            compat.processes.compile_in_place(model, in_place)
            warmup(model, calls[number::processes], backward=backward, progress=False)
    except Exception as error:
        sys.exit(f"a process of warmup(parallel={processes}): {type(error).__name__}: {error}")


def _order_modules(names: dict[str, None]) -> None:
    """Orders the imported modules as the parent's, others last.

    Keys of the cache name the first module in which pickle finds a constant of torch. Here that could be the script,
    which is ``__mp_main__`` and the first of all modules; in the parent pickle passes over ``__main__``.
    """
    for name in [*(n for n in names if n in sys.modules), *(sys.modules.keys() - names.keys())]:
        sys.modules[name] = sys.modules.pop(name)


def _modes() -> dict[str, Any]:
    """Returns what a compile depends on beyond the model and its arguments."""
    return {
        "modules": dict.fromkeys(sys.modules),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES},
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "precision": _precision(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "enabled": backend.enabled(),
        "device": torch.cuda.current_device() if torch.cuda.is_initialized() else None,
        "configs": compat.processes.saved_configs(),
    }


def _precision() -> tuple[str, str]:
    """Returns how float32 products round, as kernels and as Inductor's caches read it."""
    return compat.matmul_precision(), torch.backends.cuda.matmul.fp32_precision


@contextlib.contextmanager
def _set(modes: dict[str, Any], processes: int) -> Iterator[None]:
    """Sets what :func:`_modes` returned, for as long as the body runs where that has a context."""
    torch.set_default_dtype(modes["dtype"])
    torch.set_num_threads(modes["threads"])
    if modes["precision"] != _precision():
        precision, cuda = modes["precision"]
        torch.set_float32_matmul_precision(precision)
        torch.backends.cuda.matmul.fp32_precision = cuda
    strict, warn_only = modes["deterministic"]
    torch.use_deterministic_algorithms(strict, warn_only=warn_only)
    if modes["device"] is not None:
        torch.cuda.set_device(modes["device"])
    compat.processes.load_configs(modes["configs"], processes)
    if (options := modes["enabled"]) is not None:
        backend.enable(**dataclasses.asdict(options))
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(modes["inference"]))
        stack.enter_context(torch.set_grad_enabled(modes["grad"]))
        for device, (enabled, dtype) in modes["autocast"].items():
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        yield
