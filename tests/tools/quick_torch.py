# SPDX-License-Identifier: Apache-2.0
"""Settings of torch that make processes of tests faster, and change nothing that a test sees."""

from __future__ import annotations

import gc

import torch._dynamo.config
import torch._dynamo.guards
import torch._inductor.cpp_builder as cpp_builder


def apply() -> None:
    # After each compile, Dynamo collects garbage, and flushes the CPU's caches to time the new guards: 50 ms that no
    # test needs.
    torch._dynamo.config.run_gc_after_compile = False
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[assignment]
    # -O1 takes two thirds of the time: Inductor forbids -O3 to contract and reorder arithmetic. Seen in torch 2.13.
    if flags := getattr(cpp_builder, "_get_optimization_cflags", None):
        less = lambda *a, **k: tuple([f.replace("O3", "O1") for f in part] for part in flags(*a, **k))  # noqa: E731
        cpp_builder._get_optimization_cflags = less  # type: ignore[assignment]
    rare_collections()


def rare_collections() -> None:
    """Makes the garbage collector run less often: at Python's defaults it takes a sixth of the time.

    Tracing allocates millions of objects and few cycles. They are not frozen: the pass asks for the number of frozen
    objects, which Python counts one by one.
    """
    gc.collect()
    gc.set_threshold(100_000, 50, 100)
