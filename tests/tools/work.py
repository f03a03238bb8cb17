# SPDX-License-Identifier: Apache-2.0
"""Counts the work of Python code: calls, which do not depend on the machine or on what else it does, as seconds do."""

from __future__ import annotations

import contextlib
import cProfile
import gc
from collections.abc import Iterator

import torch._inductor.lowering  # noqa: F401  # a million calls, which are not the pass's

MOST = 3_000_000
"""About as many calls as the pass makes in a second."""


class Work:
    """Counts the calls of functions, Python's and builtin ones."""

    def __init__(self) -> None:
        self.calls = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Adds the calls of the block. The garbage collector is off there: it would call finalizers of other code."""
        collects, profile = gc.isenabled(), cProfile.Profile()
        gc.disable()
        profile.enable()
        try:
            yield
        finally:
            profile.disable()
            if collects:
                gc.enable()
            self.calls += sum(entry.callcount for entry in profile.getstats())
