# SPDX-License-Identifier: Apache-2.0
"""Sharding strategies: how the ops run on DTensors (``torch.distributed.tensor``).

Each dimension of each argument and result has a name, in one table. Some names are independent: every entry along such a
dimension is computed without the others, so the dimension may be sharded on any mesh dimension. These are

- mHC: every leading dimension of x (batch, sequence, tokens);
- E79: B, the sequences of a batch;
- selection attention: B, S (queries), G (groups) and h (heads of a group); not S with cu_seqlens;
- index scores, their top-k and loss: B and S (queries);
- selection of blocks: B and G.

The rules that follow from the table, for a mesh dimension that shards a name:

- an argument or result with the name is sharded at that dimension; an argument without it is replicated;
- a gradient without it (of a parameter, a sink, an E79 bias ``[n]``; of keys, where queries or heads are sharded) is
  ``Partial("sum")``;
- placeholders of shape [0] are replicated.

An input with any other placement is redistributed by torch, which picks the cheapest arrangement: a shard of D, n, the
keys, T of E79 or the heads of an index becomes a shard of an independent dimension (one all-to-all, 1/ranks of the tensor
per rank) or is gathered (one all-gather, the whole tensor on every rank); a partial value is reduced. A dimension with
fewer entries than ranks is gathered too.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
from collections.abc import Mapping
from typing import Any

import torch

from mhc_inductor import compat

# One of the placements that a strategy gives to an argument or a result.
Placement = Any
Strategy = tuple[list[Placement], list[Placement | None]]

_LEAD = "..."


@dataclasses.dataclass(frozen=True)
class Family:
    """Operators that name their arguments alike.

    Attributes:
        dims: the names of each tensor's dimensions, by the tensor's name in the schemas. "..." stands for any number of
            leading dimensions. A tensor with fewer dimensions has the last of them. A gradient ``dX`` has those of X.
        independent: the names that may be sharded, by op; "" for the ops that are not listed.
        ops: the ops, each with the names of its results where its schema has none.
    """

    dims: Mapping[str, str]
    independent: Mapping[str, str]
    ops: Mapping[str, tuple[str, ...]]


def _both(*names: str) -> dict[str, tuple[str, ...]]:
    """Returns the ops ``names`` and their backward ops, which name their results in their schemas."""
    return {op: () for name in names for op in (name, f"{name}_backward")}


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
        independent={"": _LEAD},
        ops={
            **_both("mhc_pre", "mhc_head", "mhc_post_pre", "mhc_post_head", "mhc_coefficients", "mhc_single_pass"),
            "mhc_sinkhorn": ("h_res",),
            "mhc_sinkhorn_backward": ("dh_res",),
            "mhc_post": ("x_out",),
            "mhc_post_backward": (),
            "mhc_collapse": ("h_in",),
            "mhc_collapse_backward": (),
        },
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
            "blocks": "B S G n",
        },
        independent={"": "B S G h", "selection_blocks": "B G"},
        ops={
            **_both(
                *("selection_attention", "selection_list_attention"),
                *("selection_entry_attention", "selection_mask_attention"),
            ),
            "selection_blocks": (),
        },
    ),
    Family(
        dims={
            "q": "B S H D",
            "k": "B T D",
            "w": "B S H",
            "limit": "B S",
            "mask": "B S T",
            "segments_q": "B S",
            "segments_k": "B T",
            "scores": "B S n",
            "indices": "B S n",
            "attention_q": "B S G h Dk",
            "attention_k": "B G T Dk",
            "lse": "B S G h",
            "loss": "B S",
        },
        independent={"": "B S"},
        ops={**_both("index_scores", "index_loss"), "index_topk": (), "index_topk_scores": ()},
    ),
)

TABLE: dict[str, Family] = {op: family for family in FAMILIES for op in family.ops}
"""The family of each op in ``torch.ops.mhc_inductor``."""


def names(family: Family, name: str, tensor: Any = None, rank: int | None = None) -> tuple[str, ...]:
    """Returns the names of the dimensions of a tensor, of ``rank`` dimensions or of as many as ``tensor`` has.

    A dimension of a mask that broadcasts has no name.
    """
    text = family.dims[name] if name in family.dims else family.dims[name.removeprefix("d")]
    words = text.split()
    rank = len(tensor.shape) if tensor is not None else len(words) if rank is None else rank
    if words[0] == _LEAD:
        words = [*map(str, range(rank - len(words) + 1)), *words[1:]]
    words = words[max(0, len(words) - rank) :]
    if name == "mask" and tensor is not None:
        words = ["" if size == 1 else word for word, size in zip(words, tensor.shape, strict=True)]
    return tuple(words)


def _results(op: str) -> tuple[str, ...]:
    schema = getattr(torch.ops.mhc_inductor, op).default._schema
    return TABLE[op].ops[op] or tuple(r.name for r in schema.returns)


def _absent(op: str, result: str, given: Mapping[str, Any]) -> bool:
    """Returns whether a result is a placeholder of shape [0]: of an argument that is None, or of no checkpoints."""
    if result in ("checkpoints", "gates"):
        return bool(given["segment"] == 0)
    source = {"df": "f_out"}.get(result, result.removeprefix("d"))
    return source != result and source in given and given[source] is None


def _result_names(op: str, result: str, given: Mapping[str, Any], lead: int) -> tuple[str, ...] | None:
    """Returns the names of a result's dimensions, or None for a placeholder."""
    if _absent(op, result, given):
        return None
    source = given.get(result.removeprefix("d")) if result not in TABLE[op].dims else None
    if source is not None:
        return names(TABLE[op], result, source)
    words = TABLE[op].dims.get(result) or TABLE[op].dims[result.removeprefix("d")]
    rank = lead + len(words.split()) - 1 if words.startswith(_LEAD) else None
    return names(TABLE[op], result, rank=rank)


def strategies(op: str, *args: Any) -> list[Strategy]:
    """Returns the placements of results and arguments on one mesh dimension with which an op may run.

    Args:
        op: name of the op.
        args: the op's arguments; tensors are anything with a ``shape``. Trailing ones may be left out.

    Returns:
        For each strategy the placements of the results and those of the arguments, None for what is no tensor.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    family = TABLE[op]
    given = {a.name: None for a in getattr(torch.ops.mhc_inductor, op).default._schema.arguments}
    given.update(zip(given, args, strict=False))
    tensors = {k: names(family, k, given[k]) for k in list(given)[: len(args)] if hasattr(given[k], "shape")}
    lead = sum(word.isdigit() for word in next(iter(tensors.values()), ()))
    results = [_result_names(op, result, given, lead) for result in _results(op)]
    split = family.independent.get(op, family.independent[""]).split()
    if split == [_LEAD]:
        split = [str(i) for i in range(lead)]
    if given.get("cu_seqlens_q") is not None:
        split.remove("S")  # the boundaries count positions of the whole tensor

    def place(names: tuple[str, ...] | None, name: str, otherwise: Placement) -> Placement:
        if names is None:
            return Replicate()
        return Shard(names.index(name)) if name in names else otherwise

    def strategy(name: str, otherwise: Placement) -> Strategy:
        inputs = [place(tensors[k], name, Replicate()) if k in tensors else None for k in list(given)[: len(args)]]
        return [place(names, name, otherwise) for names in results], inputs

    return [strategy("", Replicate()), *(strategy(name, Partial("sum")) for name in split)]


_lock = threading.Lock()
_registered = False


def register_if_used() -> None:
    """Registers the strategies of all ops with DTensor, once ``torch.distributed.tensor`` has been imported.

    Called before each op. An op can meet a DTensor only after that import, which this package leaves to the user: it
    takes longer than importing this package.
    """
    global _registered
    if _registered or "torch.distributed.tensor" not in sys.modules:
        return
    with _lock:
        if not _registered:
            for op in TABLE:
                compat.ops.register_sharding(
                    getattr(torch.ops.mhc_inductor, op).default, functools.partial(strategies, op)
                )
            _registered = True
