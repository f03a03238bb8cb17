# SPDX-License-Identifier: Apache-2.0
"""The public functions that call the ops."""

from mhc_inductor.api.checkpoint import ops_to_save
from mhc_inductor.api.e79 import e79_scan
from mhc_inductor.api.index import index_loss, index_scores, index_topk
from mhc_inductor.api.mhc import mhc_head, mhc_post, mhc_pre, mhc_sinkhorn
from mhc_inductor.api.selection import blocks_to_ranges, selection_attention
from mhc_inductor.api.single_pass import mhc_coefficients, mhc_collapse

__all__ = [
    "blocks_to_ranges",
    "e79_scan",
    "index_loss",
    "index_scores",
    "index_topk",
    "mhc_coefficients",
    "mhc_collapse",
    "mhc_head",
    "mhc_post",
    "mhc_pre",
    "mhc_sinkhorn",
    "ops_to_save",
    "selection_attention",
]
