# SPDX-License-Identifier: Apache-2.0
"""mHC residuals, selection attention and lightning indexers on Triton kernels: the functions, and ``layers``.

The build makes this file the kernel's ``__init__.py``. Importing it anywhere else registers the CUDA kernels twice.
"""

from __future__ import annotations

from mhc_inductor.api import index_loss, index_scores, index_topk, mhc_head, mhc_post, mhc_pre, selection_attention
from mhc_inductor.integrations.hub import layers
from mhc_inductor.kernels import eager as _eager

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

_eager.register()
