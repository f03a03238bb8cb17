# SPDX-License-Identifier: Apache-2.0
"""Launch plans of selection attention over lists of keys with a bias per entry: those of lists, with their biases.

Workspace: that of :mod:`.lists_plan`, and 4 B S G n bytes for the biases of the canonical lists.
"""

from __future__ import annotations

from typing import Any

from ..dtypes import without_kernel
from . import lists_plan
from .lists_plan import plan_keys, plan_lists_backward, plan_lists_forward


def unsupported(b: Any, *tensors: Any) -> str | None:
    """Returns why these inputs run the reference instead of the kernels, or None if they run the kernels."""
    # The bias stands after the indices, and has their shape.
    at = 1 + next(i for i, t in enumerate(tensors) if "int" in str(b.dtype(t)))
    return without_kernel(b, tensors[at]) or lists_plan.unsupported(b, *tensors[:at], *tensors[at + 1 :])


def plan_selection_entry_attention(
    b: Any, q: Any, k: Any, v: Any, indices: Any, bias: Any, sink: Any, scale: Any, v_width: Any, repeats: bool
) -> tuple[Any, Any]:
    """Launches ``selection_entry_attention``; returns (o, lse)."""
    lists = plan_keys(b, b.shape(k)[2], indices, None, None, None, None, bias, repeats)
    q, k, v = (t if t is None else b.strided(t) for t in (q, k, v))
    return plan_lists_forward(b, q, k, v, lists, sink, scale, b.static(v_width))


def plan_selection_entry_attention_backward(
    b: Any, dout: Any, dlse: Any, q: Any, k: Any, v: Any, indices: Any, bias: Any, sink: Any, o: Any, lse: Any, scale: Any,
    v_width: Any, repeats: bool,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Launches ``selection_entry_attention_backward``; returns (dq, dk, dv, dsink)."""
    lists = plan_keys(b, b.shape(k)[2], indices, None, None, None, None, bias, repeats)
    return plan_lists_backward(b, dout, dlse, q, k, v, lists, sink, o, lse, scale, v_width)
