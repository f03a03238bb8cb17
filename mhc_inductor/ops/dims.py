# SPDX-License-Identifier: Apache-2.0
"""The table of the ops' tensors: the names of their dimensions, of which checks, sharding strategies and flops are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

LEAD = "..."
"""Stands for any number of leading dimensions."""


@dataclasses.dataclass(frozen=True)
class Family:
    """Operators that name their arguments alike.

    Attributes:
        dims: the names of each tensor's dimensions, by the tensor's name in the schemas. "..." stands for any number of
            leading dimensions. A tensor with fewer dimensions has the last of them. A gradient ``dX`` has those of X.
        independent: the names that may be sharded, by op; "" for the ops that are not listed.
        ops: the ops, each with the names of its results where its schema has none.
        texts: what messages call a dimension, or the shape of a tensor, where that is not its name, or its names.
        least: the dimensions that have at least one entry, by the tensor that brings them.
        same: the tensors that have the dtype of another one.
    """

    dims: Mapping[str, str]
    independent: Mapping[str, str]
    ops: Mapping[str, tuple[str, ...]]
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    least: Mapping[str, str] = dataclasses.field(default_factory=dict)
    same: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _both(*names: str) -> dict[str, tuple[str, ...]]:
    """Returns the ops ``names`` and their backward ops, which name their results in their schemas."""
    return {op: () for name in names for op in (name, f"{name}_backward")}


_INDEX = {
    "q": "B S H D",
    "k": "B T D",
    "w": "B S H",
    "limit": "B S",
    "mask": "B S T",
    "segments_q": "B S",
    "segments_k": "B T",
}

FAMILIES = (
    Family(
        dims={
            **dict.fromkeys(("x", "x_out", "x_acc", "g"), "... n D"),
            **dict.fromkeys(("f", "f_out", "h_in"), "... D"),
            **dict.fromkeys(("h_pre", "h_post", "next_pre", "next_post"), "... n"),
            **dict.fromkeys(("h_res", "next_res", "grad"), "... o n"),
            "h_mix": "... m",
            "inv_rms": "...",
            "phi": "m nD",
            "alpha": "k",
            "bias": "m",
            "gamma": "n D",
        },
        independent={"": LEAD},
        ops={
            **_both("mhc_pre", "mhc_head", "mhc_post_pre", "mhc_post_head", "mhc_coefficients", "mhc_single_pass"),
            "mhc_sinkhorn": ("h_res",),
            "mhc_sinkhorn_backward": ("dh_res",),
            "mhc_post": ("x_out",),
            "mhc_post_backward": (),
            "mhc_collapse": ("h_in",),
            "mhc_collapse_backward": (),
        },
        texts={
            "o": "n",
            "m": "rows of phi",
            "k": "one per kind of coefficient",
            **dict.fromkeys(("g", "x_out", "dx_out", "dx_acc"), "x's"),
            "grad": "h_res's",
            "dh_res": "h_res's",
            "dnext_res": "next_res's",
        },
        same={"x_out": "x"},
    ),
    Family(
        dims={
            "kvqm": "T B 4n",
            **dict.fromkeys(("b_s", "b_m", "out"), "T B n"),
            **dict.fromkeys(("S", "M", "S0", "M0"), "B n n"),
            "checkpoints": "C B n n",
            "gates": "T B 7 n",
        },
        independent={"": "B"},
        ops=_both("e79_scan"),
        texts={"C": "2 * ceil(T/segment)"},
        least={"kvqm": "T"},
    ),
    Family(
        dims={
            "q": "B S G h D",
            "k": "B G T D",
            "v": "B G T V",
            "ranges": "B S G r 2",
            **dict.fromkeys(("indices", "bias"), "B S G n"),
            "mask": "B S G T",
            "sink": "G h",
            **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "N"),
            "segments_q": "B S",
            "segments_k": "B T",
            **dict.fromkeys(("o", "out"), "B S G h V"),
            "lse": "B S G h",
        },
        independent={"": "B S G h"},
        ops=_both(
            *("selection_attention", "selection_list_attention"),
            *("selection_entry_attention", "selection_mask_attention"),
        ),
        texts={"D": "Dk", "V": "Dv", "T": "S_kv", "n": "k", "bias": "indices' shape [B, S, G, k]"},
        least={"q": "h D", "v": "V"},
        same={"k": "q", "v": "q"},
    ),
    Family(
        dims={"q": "B S G h D", "k": "B G T D", "lse": "B S G h", "blocks": "B S G n"},
        independent={"": "B G"},
        ops={"selection_blocks": ()},
        texts={"T": "N"},
    ),
    Family(
        dims={**_INDEX, "scores": "B S T"},
        independent={"": "B S"},
        ops=_both("index_scores"),
        least={"q": "H D"},
        same={"k": "q"},
    ),
    Family(
        dims={**_INDEX, **dict.fromkeys(("indices", "scores"), "B S n")},
        independent={"": "B S"},
        ops={"index_topk": (), "index_topk_scores": ()},
        least={"q": "H D"},
        same={"k": "q"},
    ),
    Family(
        dims={
            **_INDEX,
            **dict.fromkeys(("indices", "scores"), "B S n"),
            "attention_q": "B S G h Dk",
            "attention_k": "B G T Dk",
            "lse": "B S G h",
            "loss": "B S",
        },
        independent={"": "B S"},
        ops=_both("index_loss"),
        least={"attention_q": "G h Dk"},
        same={"k": "q", "attention_k": "attention_q"},
    ),
)

TABLE: dict[str, Family] = {op: family for family in FAMILIES for op in family.ops}
"""The family of each op in ``torch.ops.mhc_inductor``."""


def first_of(arguments: Iterable[str]) -> str:
    """Returns the tensor with which an op's others are compared: x, kvqm, q, or h_res of an op without x."""
    return next(name for name in arguments if name in ("x", "kvqm", "q", "h_res"))


def source_of(gradient: str) -> str:
    """Returns what a gradient is of: that of X is named dX, and df for f_out."""
    return "f_out" if gradient == "df" else gradient.removeprefix("d")


def results(op: str) -> tuple[str, ...]:
    """Returns the names of the results of a defined op."""
    schema = getattr(torch.ops.mhc_inductor, op).default._schema
    return TABLE[op].ops[op] or tuple(r.name for r in schema.returns)


def names(family: Family, name: str, tensor: Any = None, rank: int | None = None) -> tuple[str, ...]:
    """Returns the names of the dimensions of a tensor, of ``rank`` dimensions or of as many as ``tensor`` has.

    A dimension of a mask that broadcasts has no name.
    """
    text = family.dims[name] if name in family.dims else family.dims[name.removeprefix("d")]
    words = text.split()
    rank = len(tensor.shape) if tensor is not None else len(words) if rank is None else rank
    if words[0] == LEAD:
        words = [*map(str, range(rank - len(words) + 1)), *words[1:]]
    words = words[max(0, len(words) - rank) :]
    if name == "mask" and tensor is not None:
        words = ["" if size == 1 else word for word, size in zip(words, tensor.shape, strict=True)]
    return tuple(words)


def sizes_of(family: Family, tensors: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the size of every dimension that tensors name, the first ones first; leading dimensions by their number."""
    found: dict[str, Any] = {}
    for name, t in tensors:
        for word, size in zip(names(family, name, t), t.shape, strict=True):
            found.setdefault(word, size)
    return found
