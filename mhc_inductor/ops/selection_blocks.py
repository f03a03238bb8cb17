# SPDX-License-Identifier: Apache-2.0
"""The op that selects blocks of keys for native sparse attention (arXiv 2502.11089, section 3.3.2).

It loops over chunks of queries to bound its memory, which a graph with dynamic sizes cannot express. Therefore
generated code calls the op, and an AOTInductor package that holds it needs Python. It has no gradient: its outputs are
integers.
"""

from __future__ import annotations

from mhc_inductor.ops.derived import define_ops
from mhc_inductor.ops.registry import call as call
from mhc_inductor.reference import selection_blocks as reference

SCHEMAS = {
    "selection_blocks": (
        "(Tensor q, Tensor k, Tensor lse, float scale, int length, int stride, int block, int count, SymInt s_kv) "
        "-> Tensor blocks"
    )
}

define_ops(SCHEMAS, reference)
