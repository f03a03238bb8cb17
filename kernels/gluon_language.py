# SPDX-License-Identifier: Apache-2.0
"""Names of Gluon that differ between Triton versions."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

# thread_barrier(): a barrier of all threads of the block; renamed in Triton 3.7.
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
_descriptor = gl.shared_memory_descriptor
# reinterpret(x, dtype, shape, layout): shared memory viewed as another tensor; public since Triton 3.9.
reinterpret = getattr(_descriptor, "reinterpret", None) or _descriptor._reinterpret
# async_load(shared memory, pointers): a copy from global memory by all threads; renamed in Triton 3.9.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
