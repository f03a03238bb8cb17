# SPDX-License-Identifier: Apache-2.0
"""The softmax over keys that arrive in tiles."""

import triton
import triton.language as tl


@triton.jit
def online_softmax(x, m, norm, UNIT: tl.constexpr = 1.0):
    """Returns the weights of the logits x[M, N], the factor of the old sums, and the new maximum and sum of weights.

    -inf means not selected. m and norm [M] are the maximum and the sum so far. Logits and maximum times UNIT are in log2
    units.
    """
    m_new = tl.maximum(m, tl.max(x, axis=1))
    # Nothing but -inf so far: exp2(-inf - 0) = 0.
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2((x - safe[:, None]) * UNIT)
    alpha = tl.exp2((m - safe) * UNIT)
    return p, alpha, m_new, norm * alpha + tl.sum(p, axis=1)


@triton.jit
def with_sink(sink, m, norm):
    """Returns the factor of sums for the maximum m, and the sum of weights ``norm`` with the sink's weight added.

    ``sink`` is its logit, in natural units. Both results are for the maximum with the sink.
    """
    sink = sink.to(tl.float32) * 1.4426950408889634
    top = tl.maximum(m, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    factor = tl.exp2(m - top)
    return factor, norm * factor + tl.exp2(sink - top)
