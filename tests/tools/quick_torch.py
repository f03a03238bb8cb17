# SPDX-License-Identifier: Apache-2.0
"""Settings of torch that make processes of tests faster, and change nothing that a test sees."""

from __future__ import annotations

import gc
from typing import Any

import torch._dynamo.config
import torch._dynamo.guards
import torch._inductor.cpp_builder as cpp_builder


def apply() -> None:
    # After each compile, Dynamo collects garbage, and flushes the CPU's caches to time the new guards: 50 ms that no
    # test needs.
    torch._dynamo.config.run_gc_after_compile = False
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[assignment]
    _optimise_less()
    rare_collections()


def _optimise_less() -> None:
    """Compiles C++ with -O1 in place of -O3, in two thirds of the time.

    The results are the same bits: Inductor's own options already forbid to contract, reorder and vectorise arithmetic.
    """
    flags = cpp_builder._get_optimization_cflags

    def of(*args: Any, **options: Any) -> tuple[list[str], list[str]]:
        compiling, linking = flags(*args, **options)
        return ["O1" if flag == "O3" else flag for flag in compiling], linking

    cpp_builder._get_optimization_cflags = of


def rare_collections() -> None:
    """Makes the garbage collector run less often: at Python's defaults it takes a sixth of the time.

    Tracing allocates millions of objects and few cycles. They are not frozen: the pass asks for the number of frozen
    objects, which Python counts one by one.
    """
    gc.collect()
    gc.set_threshold(100_000, 50, 100)
