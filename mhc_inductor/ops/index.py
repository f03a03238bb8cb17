# SPDX-License-Identifier: Apache-2.0
"""The index ops in ``torch.ops.mhc_inductor``: scores of keys, their gradients, and the keys of the largest scores.

``index_topk`` has no gradient: its outputs are integers. That of the scores in ``index_topk_scores`` raises RuntimeError. Double backward raises RuntimeError. The ops run in chunks of
queries to bound their memory.
"""

from __future__ import annotations

from mhc_inductor.ops.derived import define_ops
from mhc_inductor.ops.registry import call as call
from mhc_inductor.reference import index as reference

_TENSORS = "Tensor q, Tensor k, Tensor w"
_VISIBLE = "Tensor? limit, Tensor? mask, Tensor? segments_q, Tensor? segments_k"
SCHEMAS = {
    "index_scores": f"({_TENSORS}, float scale, {_VISIBLE}) -> Tensor scores",
    "index_scores_backward": (
        f"(Tensor dscores, {_TENSORS}, float scale, {_VISIBLE}) -> (Tensor dq, Tensor dk, Tensor dw)"
    ),
    "index_topk": f"({_TENSORS}, SymInt topk, float scale, {_VISIBLE}) -> Tensor indices",
    "index_topk_scores": (f"({_TENSORS}, SymInt topk, float scale, {_VISIBLE}) -> (Tensor indices, Tensor scores)"),
}

define_ops(SCHEMAS, reference)
