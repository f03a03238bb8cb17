"""Kernels run on a GPU where there is one; elsewhere under Triton's interpreter, in one process of their own."""

from __future__ import annotations

import gc
import os
import pathlib
from collections.abc import Iterator
from typing import TypeVar

import pytest
import torch
import torch._dynamo.config
import torch._dynamo.guards
import torch._inductor.config
from torch._inductor.cpu_vec_isa import valid_vec_isa_list

pytest.register_assert_rewrite("op_contract")
GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# Without a GPU and outside the interpreter tests/test_interpreter.py runs these in processes with the interpreter on.
collect_ignore_glob = [] if GPU or INTERPRETED else ["test_kernels_*.py"]

if not GPU:
    torch.set_num_threads(1)  # tensors of a few elements: two threads wait for one another half of the time
    # Scalar C++ compiles in two thirds of the time. Inductor's vector code is tested where ``vectorised`` asks for it.
    # Without vector instructions none are tried out either: three programs, in each process and each new cache.
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"
    torch._inductor.config.cpp.simdlen = 1
    torch._inductor.config.cpp.vec_isa_ok = False

if INTERPRETED and not GPU:
    from interpreting import mend_masks, mend_speed

    mend_masks()
    mend_speed()

# Dynamo collects garbage after each compile, and flushes the CPU's caches to time the new guards: 50 ms that nothing here reads.
torch._dynamo.config.run_gc_after_compile = False
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[assignment]

T = TypeVar("T")


def some(every: T, few: T) -> T:
    """``every`` case on a GPU, a ``few`` of them that still show each property under the interpreter, which is slow."""
    return every if GPU else few


OPEN = pathlib.Path(__file__).with_name("open_laws.txt")
"""Law tests that fail today, each with its reason: the work that is left. One that passes must leave the list."""


def _mark_open(items: list[pytest.Item]) -> None:
    lines = [line.partition("  # ") for line in OPEN.read_text().splitlines() if line.startswith("tests/")]
    reasons = {test.strip(): reason for test, _, reason in lines}
    for item in items:
        if item.nodeid in reasons:
            item.add_marker(pytest.mark.xfail(reason=reasons[item.nodeid], strict=True))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_open(items)
    if GPU:
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]


def pytest_collection_finish() -> None:
    """Tracing makes objects by the million and few cycles: looking for those takes a sixth of all time as Python does it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def pytest_report_header() -> str:
    where = torch.cuda.get_device_name() if GPU else "Triton's interpreter, on the CPU; tests marked gpu are deselected"
    return f"mhc_inductor: kernels run on {where}"


@pytest.fixture
def device() -> str:
    return "cuda" if GPU else "cpu"


@pytest.fixture
def vectorised() -> Iterator[None]:
    """Compiled code as users get it on a CPU: with its vector instructions."""
    with torch._inductor.config.patch({"cpp.simdlen": None, "cpp.vec_isa_ok": None}):
        valid_vec_isa_list.cache_clear()
        yield
    valid_vec_isa_list.cache_clear()


@pytest.fixture
def no_caches() -> Iterator[None]:
    """Code is generated anew, for a GPU that may not be there too: padding of a product is decided by timing it."""
    import torch._functorch.config as functorch_config

    with (
        torch._inductor.config.patch(fx_graph_cache=False, shape_padding=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For files of tiny tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
