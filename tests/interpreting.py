"""Triton's interpreter, mended where it differs from a GPU, or takes seconds for a row of tl.sort (seen in 3.6 and 3.7)."""

from __future__ import annotations

import numpy as np
import torch
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


def mend_sort() -> None:
    """tl.sort is made of xor sums, which the interpreter does element by element in Python."""
    by_element = interpreter.ReduceOps.apply_impl

    def apply_impl(self, input):
        if self.combine_fn == tl.standard._xor_combine:
            data = np.bitwise_xor.reduce(input[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
            return self.to_tensor(data, input[0].dtype)
        return by_element(self, input)

    interpreter.ReduceOps.apply_impl = apply_impl


_cast = interpreter.InterpreterBuilder.cast_impl


def _rounding_cast(builder, src, dst_type):
    if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
        return _cast(builder, src, dst_type)
    rounded = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16().view(torch.int16).numpy().view(np.uint16)
    return interpreter.TensorHandle(rounded, tl.bfloat16)


def mend_rounding() -> None:
    """The interpreter cuts fp32 off where a GPU rounds it to the nearest bf16."""
    interpreter.InterpreterBuilder.cast_impl = _rounding_cast
    interpreter.InterpreterBuilder.create_fp_trunc = _rounding_cast
