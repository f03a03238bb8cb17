# SPDX-License-Identifier: Apache-2.0
"""Settings of torch that make processes of tests faster, and change nothing that a test sees."""

from __future__ import annotations

import gc

import torch._dynamo.config
import torch._dynamo.guards


def apply() -> None:
    # After each compile, Dynamo collects garbage, and flushes the CPU's caches to time the new guards: 50 ms that no
    # test needs.
    torch._dynamo.config.run_gc_after_compile = False
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[assignment]
    rare_collections()


def rare_collections() -> None:
    """Makes the garbage collector run less often: at Python's defaults it takes a sixth of the time.

    Tracing allocates millions of objects and few cycles. They are not frozen: the pass asks for the number of frozen
    objects, which Python counts one by one.
    """
    gc.collect()
    gc.set_threshold(100_000, 50, 100)
