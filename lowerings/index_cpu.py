# SPDX-License-Identifier: Apache-2.0
"""The index ops in packages for a CPU, which run without Python: one formula over all queries and keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mhc_inductor import compat
from mhc_inductor.reference import index as reference
from mhc_inductor.reference.precision import acc_dtype

_ALL = slice(None)


def _scores(q: Tensor, k: Tensor, w: Tensor, scale: float) -> Tensor:
    keys = k.to(acc_dtype(q.dtype))
    x = torch.relu(reference.products(q, keys) * scale)
    return torch.matmul(w.to(keys.dtype).unsqueeze(2), x).squeeze(2)


def index_scores(q: Tensor, k: Tensor, w: Tensor, scale: float, *visible: Any) -> Any:
    """Decomposes the op in a package; elsewhere returns NotImplemented: generated code calls the op, which takes chunks."""
    if not compat.packaging_formulas():
        return NotImplemented
    seen = reference.visible(_ALL, _ALL, k.shape[1], q.device, *visible)
    return torch.where(seen, _scores(q, k, w, scale), -torch.inf)


def index_topk(*args: Any) -> Any:
    """Decomposes the op as :func:`index_topk_scores` does."""
    found = index_topk_scores(*args)
    return found if found is NotImplemented else found[0]


def index_topk_scores(q: Tensor, k: Tensor, w: Tensor, topk: int, scale: float, *visible: Any) -> Any:
    """Decomposes the op in a package; elsewhere returns NotImplemented: generated code calls the op, which takes chunks."""
    if not compat.packaging_formulas():
        return NotImplemented
    seen = reference.visible(_ALL, _ALL, k.shape[1], q.device, *visible)
    return reference.chosen(_scores(q, k, w, scale), seen, topk)
