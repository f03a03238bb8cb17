# SPDX-License-Identifier: Apache-2.0
"""Fixes for Triton's interpreter where it differs from a GPU or is needlessly slow (seen in 3.6 to 3.9)."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

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


def fix_dot() -> None:
    """Fixes tl.dot of bf16: the interpreter stores bf16 as raw 16-bit integers and multiplies those."""
    interpreter.InterpreterBuilder.create_dot = _dot


def fix_sort() -> None:
    """Speeds up tl.sort: its xor sums run element by element in Python."""
    by_element = interpreter.ReduceOps.apply_impl

    def apply_impl(self, input):
        if self.combine_fn == tl.standard._xor_combine:
            data = np.bitwise_xor.reduce(input[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
            return self.to_tensor(data, input[0].dtype)
        return by_element(self, input)

    interpreter.ReduceOps.apply_impl = apply_impl


_cast = interpreter.InterpreterBuilder.cast_impl


def _widening_cast(builder, src, dst_type):
    if src.dtype.scalar != tl.bfloat16 or dst_type.scalar != tl.float32:
        return _cast(builder, src, dst_type)
    return interpreter.TensorHandle(_as_float32(src), tl.float32)


def _rounding_cast(builder, src, dst_type):
    if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
        return _widening_cast(builder, src, dst_type)
    rounded = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16().view(torch.int16).numpy().view(np.uint16)
    return interpreter.TensorHandle(rounded, tl.bfloat16)


def fix_rounding() -> None:
    """Fixes the cast from fp32 to bf16: the interpreter truncates where a GPU rounds to nearest."""
    interpreter.InterpreterBuilder.cast_impl = _rounding_cast
    interpreter.InterpreterBuilder.create_fp_trunc = _rounding_cast


_patch_lang = interpreter._patch_lang
_get_np_dtype = interpreter._get_np_dtype
_np_dtypes: dict[str, np.dtype] = {}


@functools.cache
def _langs_of(fn: Any) -> list[Any]:
    return [m for m in fn.__globals__.values() if inspect.ismodule(m) and m in (tl, tl.core)]


def _patch_once(fn: Any) -> interpreter._LangPatchScope:
    langs = _langs_of(fn)
    if langs and not any(tl.core.is_builtin(m.load) for m in langs):
        return interpreter._LangPatchScope()
    return _patch_lang(fn)


def _np_dtype(ty: tl.dtype) -> np.dtype:
    name = ty.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _get_np_dtype(ty)
    return _np_dtypes[name]


_block_type = tl.block_type.__init__
_tensor = tl.tensor.__init__
_block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
_sizes: dict[tuple[int, ...], dict[str, Any]] = {}


def _block_type_once(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    if element_ty.is_ptr():  # pointer types have no hash
        return _block_type(self, element_ty, shape)
    key = (element_ty, *shape)
    if key not in _block_types:
        _block_type(self, element_ty, shape)
        _block_types[key] = vars(self).copy()
    vars(self).update(_block_types[key])


def _tensor_of_known_size(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    key = (*type.shape,) if type.is_block() else ()
    if key not in _sizes:
        _tensor(self, handle, type)
        _sizes[key] = {k: v for k, v in vars(self).items() if k not in ("handle", "type", "dtype")}
    vars(self).update(_sizes[key], handle=handle, type=type, dtype=type.scalar)


def speed_up() -> None:
    """Halves the interpreter's time without changing results.

    A launch patches triton.language, and each call of a device function patches it again; each value of a kernel builds
    its type and shape anew; a cast from bf16 to fp32 is done bit by bit; integer sums are checked for overflow for an
    assertion that only runs with ``debug``.
    """
    interpreter._patch_lang = _patch_once
    interpreter._get_np_dtype = _np_dtype
    tl.block_type.__init__ = _block_type_once
    tl.tensor.__init__ = _tensor_of_known_size
    interpreter.InterpreterBuilder.cast_impl = _widening_cast
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _masked(plain: Any, at: int) -> Any:
    def run(builder: Any, *args: Any) -> Any:
        mask = interpreter.TensorHandle(args[at].data.astype(bool), tl.int1)
        return plain(builder, *args[:at], mask, *args[at + 1 :])

    return run


def fix_masks() -> None:
    """Fixes masks in Triton 3.9: the ``&`` of a block's and a number's comparison is an integer, refused as a mask."""
    builder = interpreter.InterpreterBuilder
    builder.create_masked_load = _masked(builder.create_masked_load, 1)
    builder.create_masked_store = _masked(builder.create_masked_store, 2)


_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def fix_numbers() -> None:
    """Fixes numbers in Triton 3.6: it takes ``int()`` of an array with one element, which numpy 2.4 refuses."""
    interpreter._patch_lang_tensor = _patch_tensor_and_index


def apply() -> None:
    """Applies every fix, in this process."""
    for fix in (fix_masks, fix_numbers, speed_up, fix_dot, fix_sort, fix_rounding):
        fix()
