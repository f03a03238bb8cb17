# SPDX-License-Identifier: Apache-2.0
"""The selection attention ops (the selected branch of native sparse attention) in ``torch.ops.mhc_inductor``.

This module has the schemas of the attention and its backward op; ``derived.py`` makes the rest of them.

The second output, lse, has a gradient too; ranges, boundaries and segment ids have none. Double backward raises RuntimeError.
"""

from __future__ import annotations

from torch import Tensor

from mhc_inductor.kernels.cpu import selection as cpu
from mhc_inductor.ops.derived import define_ops
from mhc_inductor.ops.registry import call as call
from mhc_inductor.reference import selection as reference

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor ranges, Tensor? sink, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
_SEGMENTS = "Tensor? segments_q=None, Tensor? segments_k=None"
SCHEMAS = {
    "selection_attention": f"({_INPUTS}, float scale, {_SEGMENTS}) -> (Tensor o, Tensor lse)",
    "selection_attention_backward": (
        f"(Tensor? dout, Tensor? dlse, {_INPUTS}, Tensor o, Tensor lse, float scale, {_SEGMENTS}) -> "
        "(Tensor dq, Tensor dk, Tensor dv, Tensor dsink)"
    ),
}


def given(*segments: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the arguments for segments_q and segments_k: none where neither is a tensor."""
    return () if all(t is None for t in segments) else segments


define_ops(SCHEMAS, reference, cpu)
