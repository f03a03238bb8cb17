# SPDX-License-Identifier: Apache-2.0
"""The dtypes for which kernels exist."""

from __future__ import annotations

from typing import Any

import torch

FLOATS = ("torch.float32", "torch.bfloat16", "torch.float16")


def without_kernel(b: Any, *tensors: Any) -> str | None:
    """Returns why tensors of these dtypes run the reference instead of the kernels, or None if they run the kernels."""
    for t in tensors:
        if str(b.dtype(t)) not in FLOATS:
            return f"dtype {b.dtype(t)} has no kernel"
    return None


def matmul_precision() -> str:
    """Returns "highest", "high" or "medium": what float32 products may round, by either of PyTorch's two settings.

    ``torch.set_float32_matmul_precision`` is one, ``torch.backends.cuda.matmul.fp32_precision`` the other. Transformers sets
    the other, after which PyTorch's getter of the first raises.
    """
    cuda = torch.backends.cuda.matmul.fp32_precision
    if cuda == "ieee":
        return "highest"
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high" if cuda == "tf32" else "highest"
