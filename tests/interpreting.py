"""Triton's interpreter, mended where it differs from a GPU (seen in 3.6 and 3.7)."""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _as_float32(handle: interpreter.TensorHandle) -> np.ndarray:
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


def _dot(builder, a, b, acc, input_precision, max_num_imprecise_acc):
    product = np.matmul(_as_float32(a), _as_float32(b), dtype=acc.data.dtype)
    return interpreter.TensorHandle(product + acc.data, acc.dtype.scalar)


def mend_dot() -> None:
    """The interpreter keeps bf16 as raw 16-bit integers, and its tl.dot multiplies those integers."""
    interpreter.InterpreterBuilder.create_dot = _dot
