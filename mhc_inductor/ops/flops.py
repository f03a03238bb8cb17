# SPDX-License-Identifier: Apache-2.0
"""Flop formulas: what ``torch.utils.flop_counter.FlopCounterMode`` counts for the ops.

The convention is that of torch's own formulas, so that an op counts what its formula counts where both compute the same
products:

- A product of matrices of M x K and K x N is ``2 * M * N * K``, whatever the dtype. Sums over streams or heads with one
  weight each are products too. Everything else counts nothing: elementwise operations, outer products, norms, softmax,
  Sinkhorn iterations.
- The backward of a product is two products of the same size. A product is left out where no gradient arrives at its
  result. What a kernel computes again counts nothing.
- Attention over ranges counts the distinct keys in each query's ranges, from their values. Where these are unknown (fake
  tensors, other subclasses), it counts all keys, as torch counts a masked attention. Segment ids are not looked at.
- Attention over a list counts all entries of the list, also -1 and repeats; attention under a mask, index scores and
  top-k, and the selection of blocks, count all keys.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mhc_inductor.ops import dims
from mhc_inductor.reference.selection import clipped, key_bounds

# A product, as the names of the dimensions that it runs over, and the result whose gradient its backward needs ("": any).
Products = Mapping[str, str]

_COEFFICIENTS = {"... m nD": ""}
_COLLAPSE = {"... n D": "h_in"}
_MIX = {"... o n D": ""}
_LIST = {"B S G h n D": "", "B S G h n V": "out"}
_INDEX = {"B S H T D": "", "B S H T": ""}
_INDEX_OF_LIST = {"B S H n D": "", "B S H n": ""}

PRODUCTS: dict[str, Products] = {
    "mhc_pre": {**_COEFFICIENTS, **_COLLAPSE},
    "mhc_head": {**_COEFFICIENTS, **_COLLAPSE},
    "mhc_coefficients": _COEFFICIENTS,
    "mhc_collapse": _COLLAPSE,
    "mhc_sinkhorn": {},
    "mhc_post": _MIX,
    "mhc_post_pre": {**_MIX, **_COEFFICIENTS, **_COLLAPSE},
    "mhc_post_head": {**_MIX, **_COEFFICIENTS, **_COLLAPSE},
    "mhc_single_pass": {**_MIX, **_COEFFICIENTS, **_COLLAPSE},
    "e79_scan": {"6 T B n n": "", "T B n n": "out"},  # M k, M.T k, S k, S' m, S'.T m, M m; S' q
    "selection_attention": {"pairs h D": "", "pairs h V": "out"},
    "selection_list_attention": _LIST,
    "selection_entry_attention": _LIST,
    "selection_mask_attention": {"B S G h T D": "", "B S G h T V": "out"},
    "selection_blocks": {"B S G h T D": ""},
    "index_scores": _INDEX,
    "index_topk": _INDEX,
    "index_topk_scores": _INDEX,
    "index_loss": {**_INDEX_OF_LIST, "B S G h n Dk": ""},
    "index_loss_backward": _INDEX_OF_LIST,  # the attention is the target and has no gradient
}
"""The products of each op. A backward op has those of its forward, unless it is listed."""


def _sizes(op: str, given: Mapping[str, Any], results: tuple[Any, ...]) -> dict[str, int]:
    """Returns the size of every named dimension of a call."""
    family = dims.TABLE[op]
    tensors = [(name, t) for name, t in given.items() if isinstance(t, Tensor)]
    tensors.sort(key=lambda pair: pair[0] not in family.dims)  # gradients last: that of an absent h_res is empty
    return dims.sizes_of(family, (*tensors, *zip(dims.results(op), results, strict=True)))


def _pairs(sizes: Mapping[str, int], given: Mapping[str, Any]) -> int:
    """Returns the number of pairs of a query and a key in its ranges, over batch and groups."""
    tensors = [given[name] for name in ("ranges", "cu_seqlens_q", "cu_seqlens_k")]
    if any(t is not None and (type(t) is not Tensor or t.is_meta) for t in tensors):
        return prod(sizes[name] for name in ("B", "S", "G", "T"))
    ranges, *boundaries = tensors
    start, end = clipped(ranges, key_bounds(given["q"], given["k"], *boundaries))
    if not start.numel():
        return 0
    start, order = start.sort(-1)
    end = end.gather(-1, order).cummax(-1).values
    start[..., 1:] = torch.maximum(start[..., 1:], end[..., :-1])  # keys that an earlier range has
    return int((end - start).clamp(min=0).sum())


def count(op: str, *args: Any, out_val: Any, **kwargs: Any) -> int:
    """Returns the flops of one call, a symbolic number where the sizes are.

    Args:
        op: Name of the op.
        args: The op's arguments; trailing ones may be left out.
        out_val: The op's results.
        kwargs: Arguments by name.
    """
    names = [a.name for a in getattr(torch.ops.mhc_inductor, op).default._schema.arguments]
    given = {**dict.fromkeys(names), **dict(zip(names, args, strict=False)), **kwargs}
    sizes = _sizes(op, given, (out_val,) if isinstance(out_val, Tensor) else tuple(out_val))
    if "ranges" in given:
        sizes["pairs"] = _pairs(sizes, given)
    lead = prod(size for word, size in sizes.items() if word.isdigit())

    def size(word: str) -> int:
        return lead if word == "..." else int(word) if word.isdigit() else sizes.get(word, 0)

    backward = op.endswith("_backward")
    products = PRODUCTS[op] if op in PRODUCTS else PRODUCTS[op.removesuffix("_backward")]
    # The gradient of a result that the backward op does not name always arrives.
    counted = [words for words, result in products.items() if not backward or given.get(f"d{result}", op) is not None]
    return (4 if backward else 2) * sum(prod(map(size, words.split())) for words in counted)


def register() -> None:
    """Registers the formulas of all ops with torch."""
    for op in dims.TABLE:
        register_flop_formula(getattr(torch.ops.mhc_inductor, op), get_raw=True)(functools.partial(count, op))
