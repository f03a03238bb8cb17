# SPDX-License-Identifier: Apache-2.0
"""Settings of torch and Python that make processes of tests faster, and change nothing that a test sees."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch._dynamo.config
import torch._dynamo.guards
import torch._inductor.cpp_builder as cpp_builder
from torch._logging._internal import trace_log


def apply() -> None:
    # After each compile, Dynamo collects garbage, and flushes the CPU's caches to time the new guards: 50 ms that no
    # test needs.
    torch._dynamo.config.run_gc_after_compile = False
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[assignment]
    # -O1 takes two thirds of the time: Inductor forbids -O3 to contract and reorder arithmetic. Seen in torch 2.13.
    if flags := getattr(cpp_builder, "_get_optimization_cflags", None):
        less = lambda *a, **k: tuple([f.replace("O3", "O1") for f in part] for part in flags(*a, **k))  # noqa: E731
        cpp_builder._get_optimization_cflags = less  # type: ignore[assignment]
    # torch writes each graph into its structured log if that has a handler, and pytest gives one to every logger that
    # does not propagate: 4% of the time.
    if not os.environ.get("TORCH_TRACE"):
        trace_log.handlers.clear()
        trace_log.propagate = True
    rare_collections()


def roomy(function: Callable[..., Any], *args: Any) -> Any:
    """Returns ``function(*args)``, called where Python has 500 KB for the frames of what it calls.

    Python 3.11 and later keep frames in chunks of 16 KB, each of which is mapped where a call needs it and unmapped where
    that call returns. Dynamo's calls go up and down across the ends of chunks, 10,000 times a second: 10% of the time. This
    function's own frame asks for a little more than 512 KB, which makes its chunk 1 MB large; others fit into the rest.
    """
    return function(*args)


roomy.__code__ = roomy.__code__.replace(co_stacksize=66_000)


def rare_collections() -> None:
    """Makes the garbage collector run less often: at Python's defaults it takes a sixth of the time.

    Tracing allocates millions of objects and few cycles. They are not frozen: the pass asks for the number of frozen
    objects, which Python counts one by one.
    """
    gc.collect()
    gc.set_threshold(100_000, 50, 100)
