# SPDX-License-Identifier: Apache-2.0
"""Deterministic algorithms for a part of a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Runs the body with deterministic algorithms."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
