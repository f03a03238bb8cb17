# SPDX-License-Identifier: Apache-2.0
"""Validation of the modules' arguments: every message names the module, the argument, and what came."""

from __future__ import annotations

from typing import Any

import torch


def sizes(module: str, least: int = 1, **values: Any) -> None:
    """Raises TypeError unless all are ints, and ValueError where one is below ``least``."""
    for name, value in values.items():
        # Neither operator.index, which fixes a symbolic size to its value, nor hasattr of one, which Dynamo cannot trace.
        whole = isinstance(value, (int, torch.SymInt)) or hasattr(value, "__index__")
        if isinstance(value, bool) or not whole:
            raise TypeError(f"{module}: {name} must be an int, got {type(value).__name__}")
        if value < least:
            raise ValueError(f"{module}: {name} must be at least {least}, got {value}")


def flags(module: str, **values: Any) -> None:
    """Raises TypeError unless all are bools."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{module}: {name} must be a bool, got {type(value).__name__}")
