# SPDX-License-Identifier: Apache-2.0
"""The softmax over keys that arrive in tiles. Logits are in log2 units, or in natural ones, which never overflow.

A program keeps the largest logit and the sum of weights of each of its rows: a tile multiplies what came before by
exp(old - new maximum), so that scores are never written to memory and every key is read once.
"""

import triton
import triton.language as tl


@triton.jit
def online_softmax(x, m, norm, NATURAL: tl.constexpr = False):
    """Returns the weights of the logits x[M, N], the factor of the old sums, and the new maximum and sum of weights.

    -inf means not selected. m and norm [M] are the maximum and the sum so far.
    """
    m_new = tl.maximum(m, tl.max(x, axis=1))
    # Nothing but -inf so far: exp2(-inf - 0) = 0.
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    # No helper for the two units: its debug labels alone change what the assembler spills.
    p = tl.exp(x - safe[:, None]) if NATURAL else tl.exp2(x - safe[:, None])
    alpha = tl.exp(m - safe) if NATURAL else tl.exp2(m - safe)
    return p, alpha, m_new, norm * alpha + tl.sum(p, axis=1)


@triton.jit
def with_sink(sink, m, norm, NATURAL: tl.constexpr = False):
    """Returns the factor of sums for the maximum m, and the sum of weights ``norm`` with the sink's weight added.

    ``sink`` is its logit, in natural units. Both results are for the maximum with the sink.
    """
    sink = sink.to(tl.float32) * (1.0 if NATURAL else 1.4426950408889634)
    top = tl.maximum(m, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    factor = tl.exp(m - top) if NATURAL else tl.exp2(m - top)
    return factor, norm * factor + (tl.exp(sink - top) if NATURAL else tl.exp2(sink - top))
