# SPDX-License-Identifier: Apache-2.0
"""The dtypes for which kernels exist."""

from __future__ import annotations

from typing import Any

FLOATS = ("torch.float32", "torch.bfloat16", "torch.float16")


def without_kernel(b: Any, *tensors: Any) -> str | None:
    """Returns why tensors of these dtypes run the reference instead of the kernels, or None if they run the kernels."""
    for t in tensors:
        if str(b.dtype(t)) not in FLOATS:
            return f"dtype {b.dtype(t)} has no kernel"
    return None
