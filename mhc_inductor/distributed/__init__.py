# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: operators over a sequence that is split across the ranks of a process group.

The ranks' messages are those of :mod:`torch.distributed`, through any backend. mHC needs none: its operators treat each
token on its own, so that sequence shards call the local functions and modules, and only the gradients of the parameters
are summed over the ranks, as DDP and FSDP do.
"""

from mhc_inductor.distributed.e79 import e79_scan
from mhc_inductor.distributed.index import index_scores, index_topk
from mhc_inductor.distributed.selection import selection_attention

__all__ = ["e79_scan", "index_scores", "index_topk", "selection_attention"]
