# SPDX-License-Identifier: Apache-2.0
"""The softmax over keys that arrive in tiles. Logits are in log2 units, or in natural ones, which never overflow."""

import triton
import triton.language as tl


@triton.jit
def power(x, NATURAL: tl.constexpr):
    """Returns 2^x, or e^x of natural units."""
    if NATURAL:
        y = tl.exp(x)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def online_softmax(x, m, norm, NATURAL: tl.constexpr = False):
    """Returns the weights of the logits x[M, N], the factor of the old sums, and the new maximum and sum of weights.

    -inf means not selected. m and norm [M] are the maximum and the sum so far.
    """
    m_new = tl.maximum(m, tl.max(x, axis=1))
    # Nothing but -inf so far: exp2(-inf - 0) = 0.
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = power(x - safe[:, None], NATURAL)
    alpha = power(m - safe, NATURAL)
    return p, alpha, m_new, norm * alpha + tl.sum(p, axis=1)


@triton.jit
def with_sink(sink, m, norm, NATURAL: tl.constexpr = False):
    """Returns the factor of sums for the maximum m, and the sum of weights ``norm`` with the sink's weight added.

    ``sink`` is its logit, in natural units. Both results are for the maximum with the sink.
    """
    sink = sink.to(tl.float32)
    if not NATURAL:
        sink = sink * 1.4426950408889634
    top = tl.maximum(m, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    factor = power(m - top, NATURAL)
    return factor, norm * factor + power(sink - top, NATURAL)
