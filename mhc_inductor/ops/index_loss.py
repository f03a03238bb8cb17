# SPDX-License-Identifier: Apache-2.0
"""The op of an indexer's training loss.

Its second output is the gradient of the loss with respect to the listed scores, so that the backward gathers no keys of
the attention. Double backward raises RuntimeError.
"""

from __future__ import annotations

from mhc_inductor.ops.derived import define_ops
from mhc_inductor.ops.registry import call as call
from mhc_inductor.reference import index_loss as reference

SCHEMAS = {
    "index_loss": (
        "(Tensor q, Tensor k, Tensor w, Tensor indices, Tensor attention_q, Tensor attention_k, Tensor? lse, "
        "float scale, float attention_scale) -> (Tensor loss, Tensor dscores)"
    ),
    "index_loss_backward": (
        "(Tensor dloss, Tensor q, Tensor k, Tensor w, Tensor indices, Tensor dscores, float scale) "
        "-> (Tensor dq, Tensor dk, Tensor dw)"
    ),
}

define_ops(SCHEMAS, reference)  # the attention is the target: it has no gradient
