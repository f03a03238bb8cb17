# SPDX-License-Identifier: Apache-2.0
"""The ops of selection attention over lists of single keys in ``torch.ops.mhc_inductor``.

``v`` of None means that the values are the first ``v_width`` columns of the keys, which are then read once and get one
gradient. The second output, lse, has a gradient too; indices, boundaries and segment ids have none. Double backward
raises RuntimeError.
"""

from __future__ import annotations

from mhc_inductor.kernels.cpu import selection_lists as cpu
from mhc_inductor.ops.derived import define_ops
from mhc_inductor.reference import selection_lists as reference

_INPUTS = (
    "Tensor q, Tensor k, Tensor? v, Tensor indices, Tensor? sink, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? segments_q, Tensor? segments_k"
)
SCHEMAS = {
    "selection_list_attention": f"({_INPUTS}, float scale, SymInt v_width) -> (Tensor o, Tensor lse)",
    "selection_list_attention_backward": (
        f"(Tensor? dout, Tensor? dlse, {_INPUTS}, Tensor o, Tensor lse, float scale, SymInt v_width) -> "
        "(Tensor dq, Tensor dk, Tensor dv, Tensor dsink)"
    ),
}

define_ops(SCHEMAS, reference, cpu)
