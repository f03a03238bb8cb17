# SPDX-License-Identifier: Apache-2.0
"""Selection attention over a sequence that is split across the ranks of a process group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from mhc_inductor.api import selection as local
from mhc_inductor.distributed.agreement import Facts, agree, requires
from mhc_inductor.distributed.gather import gather, gather_ids
from mhc_inductor.distributed.groups import eagerly, members
from mhc_inductor.distributed.ring import ring_attention
from mhc_inductor.ops import checks

if TYPE_CHECKING:
    from typing_extensions import Unpack

_OP = "selection_attention"
Method = Literal["gather", "ring"]
_METHODS = ("gather", "ring")


@overload
def selection_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor | None = ...,
    *,
    return_lse: Literal[False] = ...,
    group: Any = ...,
    method: Method = ...,
    **options: Unpack[local.Options],
) -> Tensor: ...


@overload
def selection_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor | None = ...,
    *,
    return_lse: Literal[True],
    group: Any = ...,
    method: Method = ...,
    **options: Unpack[local.Options],
) -> tuple[Tensor, Tensor]: ...


@eagerly
def selection_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor | None = None,
    *,
    indices: Tensor | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
    segments_q: Tensor | None = None,
    segments_k: Tensor | None = None,
    v_width: int | None = None,
    return_lse: bool = False,
    group: Any = None,
    method: Method = "gather",
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes :func:`mhc_inductor.selection_attention` where each rank holds a part of the queries and of the keys.

    The keys of the ranks are joined in the order of the ranks, and ``ranges`` and ``indices`` count in the joined keys.
    Parts may have any lengths, 0 too. A rank's queries may be any: its ranges or indices say what they see, so that a
    causal model can give each rank an equal share of the work.

    ``"gather"`` joins K and V on every rank and calls the local op; the backward sends each rank's dK and dV to the
    ranks that hold the keys. ``"ring"`` passes the parts from rank to rank, attends to one while the next one travels,
    and joins the partial results by their lse; the backward passes K and V round again, and computes each part's forward
    again.

    With P equal parts, ``K = B * G * L * (Dk + Dv) * itemsize`` bytes each (without Dv if v is k), a rank sends, and
    receives as much: gather ``(P - 1) * K`` forward and ``(P - 1) * K`` backward (dK, dV), and it keeps the joined
    ``P * K`` for the backward; ring ``(P - 1) * K`` forward and ``2 * (P - 1) * K`` backward (K, V; dK, dV), and it
    keeps its own ``K``. Segment ids add 8 bytes a key.

    dK and dV of each rank's queries travel in k's dtype and are added in fp32 in the order of the ranks (ring: of the
    steps), so that two runs give equal bits. dq is this rank's own. dsink is the share of this rank's queries, like the
    gradient of any parameter that the ranks share: sum it over the ranks, as DDP and FSDP do.

    Every rank of the group must call the function, and reach its backward if any rank does. One all-gather of 20
    integers per call checks the arguments: if they are wrong on one rank, all ranks raise. It is read on the host; a
    group that has a CPU backend too (``"cpu:gloo,cuda:nccl"``) does not wait for the GPU. A rank that dies ends in an
    error of the group, at the latest after its timeout. Under torch.compile the function breaks the graph and runs
    eagerly, and ``fullgraph=True`` refuses it. Second derivatives raise RuntimeError.

    Args:
        q: This rank's queries ``[B, S, G, h, Dk]``; bf16, fp16, fp32 or fp64. S may differ between ranks.
        k: This rank's keys ``[B, G, L, Dk]`` in q's dtype. L may differ between ranks.
        v: This rank's values ``[B, G, L, Dv]`` in q's dtype. May be k itself, on all ranks.
        ranges: ``[start, end)`` pairs of positions in the joined keys, ``[B, S, G, r, 2]``, int32 or int64; on all
            ranks or none. None where indices are given.
        indices: Positions in the joined keys ``[B, S, G, n]``, int32 or int64; -1 for none.
        scale: Factor of the scores; None for 1/sqrt(Dk).
        sink: One logit per head, ``[G, h]``, the same on all ranks. None for no sink.
        segments_q: Segment ids ``[B, S]`` of this rank's queries; segments_k must be given too.
        segments_k: Segment ids ``[B, L]`` of this rank's keys.
        v_width: Dv, where the values are the first v_width columns of v. None for all.
        return_lse: Whether to return lse as well.
        group: A process group, a device mesh of one dimension, or None for the default group.
        method: ``"gather"`` or ``"ring"``.

    Returns:
        This rank's o ``[B, S, G, h, Dv]`` in q's dtype, or ``(o, lse)``, as the local function returns them.

    Raises:
        ValueError: A shape, device or value does not fit on some rank, differs between ranks where it must not, or
            gradients are switched off on some ranks only. Every rank raises the same message.
        TypeError: The same for types and dtypes.
        RuntimeError: There is no process group, or a rank does not answer.

    Source: as the local function; the ring, arXiv 2310.01889.
    """
    group = members(_OP, group)
    rest = (sink, None, None, segments_q, segments_k)

    def describe() -> Facts:
        if method not in _METHODS:
            raise ValueError(f"{_OP}: method must be 'gather' or 'ring', got {method!r}")
        factor, values = local.prepared(q, v, ranges, indices, scale, v_width, return_lse)
        name, args = local.op_of(q, k, values, ranges, indices, rest, factor)
        checks.check(name, *args)
        group.check_device(_OP, "q", q)
        return _facts(q, k, v, values, indices is not None, rest, factor, method)

    agreed = agree(_OP, group, describe)
    factor, values = local.prepared(q, v, ranges, indices, scale, v_width, return_lse)
    own = None if v is k else values
    if method == "ring" and group.size > 1:  # on one rank both are the local call
        listed = indices is not None
        inputs, selection, ids = (q, k, own, sink), indices if listed else ranges, (segments_q, segments_k)
        o, lse = ring_attention(inputs, selection, ids, factor, values.shape[3], listed, agreed, group)
    else:
        keys, others = gather((k, own), 2, agreed.needs[1:3], agreed.anchor(k.device, 1, 2), agreed, group)
        assert keys is not None
        o, lse = local.selection_attention(
            q,
            keys,
            keys if others is None else others,
            ranges,
            indices=indices,
            scale=factor,
            sink=sink,
            segments_q=segments_q,
            segments_k=gather_ids(segments_k, agreed, group),
            v_width=v_width if own is None else None,  # values of their own came without the other columns
            return_lse=True,
        )
    return (o, lse) if return_lse else o


def _facts(
    q: Tensor, k: Tensor, v: Tensor, values: Tensor, listed: bool, rest: Any, scale: float, method: str
) -> Facts:
    batch, _, groups, heads, width = q.shape
    same = {
        "method": method,
        "the selection": "indices" if listed else "ranges",
        "q's dtype": q.dtype,
        "q's B, G, h, Dk": [batch, groups, heads, width],
        "v's Dv": values.shape[3],
        "scale": scale,
        "whether v is k": v is k,
        "whether there is a sink": rest[0] is not None,
        "whether there are segments": rest[3] is not None,
    }
    return Facts(same, (k.shape[2],), requires(q, k, None if v is k else v, rest[0]))
