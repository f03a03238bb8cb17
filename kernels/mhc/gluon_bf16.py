# SPDX-License-Identifier: Apache-2.0
"""Conversions between bf16 and fp32 that take one instruction (sm_80 and newer).

``rounded`` packs two neighbours of a thread in one ``cvt.rn.bf16x2``; ``widened`` shifts or masks, one instruction an
element. On tiles of any shape whose threads hold pairs of columns: the mHC kernels that mix streams in registers issue
these for every element of x, next to few other instructions.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def rounded(y):
    """Rounds fp32 to bf16, two neighbours of a thread per instruction."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [y], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def widened(h):
    """Widens bf16 to fp32, one instruction per element."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a; shl.b32 a, $2, 16; mov.b32 $0, a; and.b32 a, $2, 0xffff0000; mov.b32 $1, a; }", "=f,=f,r", [h],
        dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip
