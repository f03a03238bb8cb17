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

import functools
import sys
import threading
from collections.abc import Mapping
from typing import Any

import torch

from mhc_inductor import compat
from mhc_inductor.ops.dims import LEAD, results, source_of
from mhc_inductor.ops.dims import TABLE as TABLE
from mhc_inductor.ops.dims import names as names

# One of the placements that a strategy gives to an argument or a result.
Placement = Any
Strategy = tuple[list[Placement], list[Placement | None]]


def _absent(op: str, result: str, given: Mapping[str, Any]) -> bool:
    """Returns whether a result is a placeholder of shape [0]: of an argument that is None, or of no checkpoints."""
    if result in ("checkpoints", "gates"):
        return bool(given["segment"] == 0)
    source = source_of(result)
    return source != result and source in given and given[source] is None


def _result_names(op: str, result: str, given: Mapping[str, Any], lead: int) -> tuple[str, ...] | None:
    """Returns the names of a result's dimensions, or None for a placeholder."""
    if _absent(op, result, given):
        return None
    source = given.get(result.removeprefix("d")) if result not in TABLE[op].dims else None
    if source is not None:
        return names(TABLE[op], result, source)
    words = TABLE[op].dims.get(result) or TABLE[op].dims[result.removeprefix("d")]
    rank = lead + len(words.split()) - 1 if words.startswith(LEAD) else None
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
    made = [_result_names(op, result, given, lead) for result in results(op)]
    split = family.independent.get(op, family.independent[""]).split()
    if split == [LEAD]:
        split = [str(i) for i in range(lead)]
    if given.get("cu_seqlens_q") is not None:
        split.remove("S")  # the boundaries count positions of the whole tensor

    def place(names: tuple[str, ...] | None, name: str, otherwise: Placement) -> Placement:
        if names is None:
            return Replicate()
        return Shard(names.index(name)) if name in names else otherwise

    def strategy(name: str, otherwise: Placement) -> Strategy:
        inputs = [place(tensors[k], name, Replicate()) if k in tensors else None for k in list(given)[: len(args)]]
        return [place(names, name, otherwise) for names in made], inputs

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
