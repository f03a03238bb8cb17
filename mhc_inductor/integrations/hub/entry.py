# SPDX-License-Identifier: Apache-2.0
"""mHC residuals, selection attention and lightning indexers on Triton kernels: the functions, and ``layers``.

The build makes this file the kernel's ``__init__.py``.
"""

from __future__ import annotations

from mhc_inductor.api.index import index_loss, index_scores, index_topk
from mhc_inductor.api.mhc import mhc_head, mhc_post, mhc_pre
from mhc_inductor.api.selection import selection_attention
from mhc_inductor.integrations.hub import layers

__all__ = [
    "index_loss",
    "index_scores",
    "index_topk",
    "layers",
    "mhc_head",
    "mhc_post",
    "mhc_pre",
    "selection_attention",
]
