# SPDX-License-Identifier: Apache-2.0
"""The dtypes of all formulas: fp32, or fp64 for fp64, whatever autocast says; results in an input's dtype are rounded once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the arithmetic: fp64 for fp64, else fp32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def as_given(fn: Callable[P, R]) -> Callable[P, R]:
    """Wraps ``fn`` so that it runs without autocast, because the formulas choose their own dtypes."""

    @functools.wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next(a for a in args if isinstance(a, Tensor)).device.type
        if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
            return fn(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return fn(*args, **kwargs)

    return wrapped
