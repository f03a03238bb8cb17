# SPDX-License-Identifier: Apache-2.0
"""Inputs, an fp64 oracle and comparisons for the tests of selection attention, on any device.

The oracle, also of attention over lists and under masks, is a loop over queries, written independently of
``mhc_inductor.reference``: it gathers the selected keys and calls softmax; gradients come from autograd. Kernel tests reuse
it: ``check(run(inputs, up), inputs, up)``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mhc_inductor import ANY_SEGMENT, selection_attention
from tests.oracles.mhc import held, relative, rounding, run_op

OPS = torch.ops.mhc_inductor
NAMES = ("q", "k", "v", "ranges", "sink", "cu_seqlens_q", "cu_seqlens_k")
SEGMENTS = ("segments_q", "segments_k")  # in inputs only where they are given
WANTED = ("q", "k", "v", "sink")
OUTPUTS = ("o", "lse")
FP32_ERROR = 1e-6  # relative error of an output; twice the fp32 loop's own error is also allowed
FP32_GRADIENTS = 2e-5

# Mistakes that shipped in this operator before.
MISTAKES: dict[str, dict[str, object]] = {
    "one_range": {"kind": "odd", "r": 1},
    "several_ranges": {"kind": "odd", "r": 5},
    "variable_lengths": {"kind": "odd", "B": 1, "S": 12, "S_kv": 12, "lengths": (5, 0, 4, 3)},
    "causal_flag_with_one_query": {"kind": "rand", "S": 1, "S_kv": 40},
    "a_few_queries_in_decoding": {"kind": "rand", "S": 3, "S_kv": 40},
    "groups_of_4": {"kind": "rand", "h": 4, "S": 20, "S_kv": 20},
    "group_of_1": {"kind": "rand", "h": 1, "S": 20, "S_kv": 20},
    "Dk_not_Dv": {"kind": "odd", "Dk": 12, "Dv": 5},
    "empty_rows": {"kind": "empty"},
    "duplicates_count_once": {"kind": "twice"},
    "a_sink": {"kind": "odd", "sink": True},
    "int64_beyond_32_bits": {"kind": "wide", "range_dtype": torch.int64},
    "segments": {"kind": "odd", "S": 20, "S_kv": 40, "size": 20, "segments": "mixed"},
    "segments_beyond_32_bits": {"kind": "odd", "S": 20, "size": 20, "segments": "mixed", "segment_dtype": torch.int64},
    "documents": {"kind": "all", "S": 40, "S_kv": 90, "r": 1, "segments": "documents"},
}


# --- ranges -------------------------------------------------------------------------------------------------


def block_picks(
    kind: str, B: int, S: int, G: int, S_kv: int, *, size: int = 64, k: int = 16, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Returns block ids ``[B, S, G, k]`` as in the benchmark, -1 for no block, and the queries' positions ``[S]``.

    A query selects block 0, its own and the previous one, and k - 3 random causal ones. "rand" draws them for each
    query; "corr" draws them for each run of 64 neighbours and redraws each pick with probability 0.25. The queries are
    the last S of the S_kv positions.
    """
    g = torch.Generator().manual_seed(seed)
    position = torch.arange(S) + S_kv - S
    own = (position // size).view(1, S, 1, 1)
    free = max(k - 3, 0)
    draw = torch.rand((B, S, G, free), generator=g)
    if kind == "corr":
        run = torch.arange(S) // 64
        shared = torch.rand((B, int(run[-1]) + 1 if S else 0, G, free), generator=g)[:, run]
        redrawn = torch.rand((B, S, G, free), generator=g) < 0.25
        draw = torch.where(redrawn, draw, shared)
    picks = (draw * (own + 1)).long()
    fixed = torch.cat((torch.zeros_like(own), own, own - 1), -1).expand(B, S, G, 3)
    return torch.cat((fixed, picks), -1)[..., :k], position


def make_ranges(
    kind: str,
    B: int,
    S: int,
    G: int,
    S_kv: int,
    r: int,
    *,
    size: int = 8,
    dtype: torch.dtype = torch.int32,
    seed: int = 0,
) -> Tensor:
    """Returns ``ranges[B, S, G, r, 2]``.

    "corr", "rand": causal blocks of ``size``; "odd": any start and end, from before the beginning to beyond the end,
    some inverted; "token": single keys; "twice": each range two or more times, overlapping; "empty": a third of the
    rows select nothing; "all", "none": all keys or no key; "wide": int64 values far beyond 32 bits.
    """
    g = torch.Generator().manual_seed(seed + 17)
    shape = (B, S, G, r)

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=g)

    if kind in ("corr", "rand"):
        picks, position = block_picks(kind, B, S, G, S_kv, size=size, k=r, seed=seed)
        start = picks.clamp(min=0) * size
        end = torch.minimum(start + size, position.view(1, S, 1, 1) + 1)
        end = torch.where(picks < 0, start, end)
    elif kind == "token":
        start = integers(0, S_kv)
        end = start + 1
    elif kind == "all":
        start, end = torch.zeros(shape, dtype=torch.int64), torch.full(shape, S_kv)
    elif kind == "none":
        start, end = integers(0, S_kv), torch.zeros(shape, dtype=torch.int64)
    else:
        start = integers(-size, S_kv + size)
        end = start + integers(-2, 2 * size)
        if kind == "twice":
            start, end = start[..., :1].expand(shape), (end[..., :1] + torch.arange(r) % 2).expand(shape)
        elif kind == "empty":
            gone = torch.rand((B, S, G, 1), generator=g) < 1 / 3
            start, end = torch.where(gone, 5, start), torch.where(gone, -5, end)
        elif kind == "wide":
            start = torch.where(start < 2, torch.iinfo(torch.int64).min, start)
            end = torch.where(end > S_kv, 2**32 + 1, end)
        else:
            assert kind == "odd", kind
    return torch.stack((start, end), -1).to(dtype)


def make_segments(
    kind: str, B: int, S: int, S_kv: int, *, dtype: torch.dtype = torch.int32, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Returns segment ids ``[B, S]`` of the queries and ``[B, S_kv]`` of the keys; int64 ids differ above bit 32 only.

    "mixed": random ids, some keys for every segment, a query without any key of its segment; "documents": increasing
    ids, with keys of padding at the end, in the last entry of the batch one id and only keys for every segment.
    """
    g = torch.Generator().manual_seed(seed + 29)
    if kind == "mixed":
        ids_q, ids_k = (torch.randint(0, 3, (B, n), generator=g) for n in (S, S_kv))
        ids_q[:, -1:] = 7
        anyone = torch.rand((B, S_kv), generator=g) < 0.15
        anyone[:, -1:] &= S_kv > 1
    else:
        assert kind == "documents", kind
        ids_k = (torch.arange(S_kv) * 3 // max(S_kv, 1)).repeat(B, 1)
        ids_q = ids_k.new_zeros(B, S) if S_kv < S else ids_k[:, S_kv - S :].clone()
        ids_k[:, S_kv - S_kv // 8 :] = -1
        anyone = torch.zeros((B, S_kv), dtype=torch.bool)
        if B > 1:
            ids_q[-1], anyone[-1] = 1, True
    if dtype is torch.int64:
        ids_q, ids_k = (t * 2**32 + 2**40 for t in (ids_q, ids_k))
    return ids_q.to(dtype), torch.where(anyone, ANY_SEGMENT, ids_k).to(dtype)


# --- inputs -------------------------------------------------------------------------------------------------


def make_inputs(
    kind: str = "odd",
    dtype: torch.dtype = torch.float64,
    *,
    B: int = 2,
    S: int = 7,
    G: int = 2,
    h: int = 3,
    Dk: int = 8,
    Dv: int | None = None,
    S_kv: int | None = None,
    r: int = 4,
    size: int = 8,
    sink: bool = False,
    sink_dtype: torch.dtype | None = None,
    lengths: Sequence[int] | None = None,
    key_lengths: Sequence[int] | None = None,
    strided: bool = False,
    spread: float = 1.0,
    range_dtype: torch.dtype = torch.int32,
    segments: str | None = None,
    segment_dtype: torch.dtype = torch.int32,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Tensor | None]:
    """Returns standard normal q, k, v and sink, and ranges of a ``kind`` of :func:`make_ranges`.

    ``lengths``: packed sequences (B = 1), ``key_lengths`` where their keys have other lengths. ``strided``: k and v are
    views of ``[B, S_kv, G, D]``. ``spread``: standard deviation of the scores at scale 1/sqrt(Dk). ``segments``: a kind
    of :func:`make_segments`.
    """
    g = torch.Generator().manual_seed(seed)
    S_kv = S + 5 if S_kv is None else S_kv
    Dv = Dk if Dv is None else Dv
    wide = torch.float64 if dtype is torch.float64 else torch.float32

    def normal(shape: Iterable[int], to: torch.dtype, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(tuple(shape), generator=g, dtype=torch.float64)).to(to).to(device)

    def keys(width: int) -> Tensor:
        if strided:
            return normal((B, S_kv, G, width), dtype).transpose(1, 2)
        return normal((B, G, S_kv, width), dtype)

    def boundaries(sizes: Sequence[int] | None) -> Tensor | None:
        if sizes is None:
            return None
        return torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32, device=device)

    inputs = {
        "q": normal((B, S, G, h, Dk), dtype, spread),
        "k": keys(Dk),
        "v": keys(Dv),
        "ranges": make_ranges(kind, B, S, G, S_kv, r, size=size, dtype=range_dtype, seed=seed).to(device),
        "sink": normal((G, h), sink_dtype or wide) if sink else None,
        "cu_seqlens_q": boundaries(lengths),
        "cu_seqlens_k": boundaries(key_lengths),
    }
    if segments is None:
        return inputs
    ids = make_segments(segments, B, S, S_kv, dtype=segment_dtype, seed=seed)
    return inputs | {name: t.to(device) for name, t in zip(SEGMENTS, ids, strict=True)}


def choice(
    S: int = 50, S_kv: int = 50, N: int | None = None, dtype: torch.dtype = torch.float64, *, B: int = 2, G: int = 2,
    h: int = 3, D: int = 8, length: int = 8, stride: int = 4, block: int = 8, count: int = 5, seed: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """Returns the arguments of selection_blocks, of as many compressed keys as there are where ``N`` is None."""
    g = torch.Generator().manual_seed(seed)
    N = max(0, (S_kv - length) // stride + 1) if N is None else N
    q = torch.randn((B, S, G, h, D), generator=g, dtype=torch.float64).to(dtype)
    k = torch.randn((B, G, N, D), generator=g, dtype=torch.float64).to(dtype)
    seen = ((torch.arange(S) + S_kv - S + 1 - length).div(stride, rounding_mode="floor") + 1).clamp(0, N)
    ranges = torch.stack((seen * 0, seen), -1).view(1, S, 1, 1, 2).expand(B, S, G, 1, 2)
    _, lse = selection_attention(q, k, k, ranges, return_lse=True)
    return q, k, lse, D**-0.5, length, stride, block, count, S_kv


def positional(inputs: Mapping[str, Tensor | None], scale: float) -> tuple[Any, ...]:
    """Returns the inputs as the op takes them."""
    return (*(inputs[k] for k in NAMES), scale, *(inputs[k] for k in SEGMENTS if k in inputs))


# --- the oracle ---------------------------------------------------------------------------------------------


def selection_of(inputs: Mapping[str, Any], b: int, s: int, g: int) -> list[int]:
    """Returns the keys that one query sees by ranges, a list or a mask, by the definition."""
    if inputs.get("mask") is not None:
        shown = mask_row(inputs, b, s, g)
        return (shown if shown.dtype is torch.bool else shown != -torch.inf).nonzero().flatten().tolist()
    first, last = 0, inputs["k"].shape[2]
    cu = inputs["cu_seqlens_q"]
    if cu is not None:
        ends = cu.tolist()
        n = next((n for n in range(len(ends) - 1) if ends[n] <= s < ends[n + 1]), None)
        if n is None:
            return []
        keys = cu if inputs["cu_seqlens_k"] is None else inputs["cu_seqlens_k"]
        first, last = keys[n : n + 2].tolist()
    chosen: set[int] = set()
    if "ranges" in inputs:
        for start, end in inputs["ranges"][b, s, g].tolist():
            chosen.update(range(max(start, 0) + first, min(end + first, last)))
    else:
        chosen = {first + i for i in inputs["indices"][b, s, g].tolist() if 0 <= i < last - first}
    if inputs.get("segments_q") is not None:
        mine = (int(inputs["segments_q"][b, s]), ANY_SEGMENT)
        chosen = {i for i in chosen if int(inputs["segments_k"][b, i]) in mine}
    return sorted(chosen)


def mask_row(inputs: Mapping[str, Any], b: int, s: int, g: int) -> Tensor:
    """Returns what the mask says of each key to one query."""
    mask = inputs["mask"]
    return mask[b if mask.shape[0] > 1 else 0, s, g if mask.shape[2] > 1 else 0]


def entries_of(inputs: Mapping[str, Any], b: int, s: int, g: int) -> tuple[list[int], Tensor | None]:
    """Returns the keys of one query, several times each where every entry of a list counts, and what is added to scores."""
    if inputs.get("bias") is None:
        keys = selection_of(inputs, b, s, g)
        added = inputs.get("mask") is not None and inputs["mask"].is_floating_point()
        return keys, mask_row(inputs, b, s, g)[keys] if added else None
    found: dict[int, int] = {}
    bias = inputs["bias"][b, s, g]
    for place, (key, value) in enumerate(zip(inputs["indices"][b, s, g].tolist(), bias.tolist(), strict=True)):
        absent = not 0 <= key < inputs["k"].shape[2] or value == -torch.inf
        if not absent and (inputs["repeats"] or key not in found.values()):
            found[place] = key
    return [*found.values()], bias[[*found]]


def logsumexp(t: Tensor) -> Tensor:
    """Returns ``t.logsumexp(-1)``, whose own gradient is exp(t - lse) with an lse that may be rounded."""
    most = t.detach().amax(-1, keepdim=True)
    return (t - most).logsumexp(-1) + most.squeeze(-1)


def loop(
    inputs: Mapping[str, Any],
    dtype: torch.dtype = torch.float64,
    scale: float | None = None,
    queries: Iterable[int] | None = None,
) -> dict[str, Tensor]:
    """Computes o and lse in ``dtype``, one query after the other, for autograd.

    With ``queries``, computes only those; the others are zero.
    """
    q, k = (inputs[n].to(dtype) for n in ("q", "k"))
    v = k[..., : inputs["v_width"]] if inputs["v"] is None else inputs["v"].to(dtype)
    sink = None if inputs["sink"] is None else inputs["sink"].to(dtype)
    batch, steps, groups, heads, width = q.shape
    scale = width**-0.5 if scale is None else scale
    wanted = set(range(steps) if queries is None else queries)
    nothing = q.new_zeros((heads, v.shape[3])), q.new_full((heads,), -torch.inf)
    outs, lses = [], []
    for b, s, g in itertools.product(range(batch), range(steps), range(groups)):
        keys, added = entries_of(inputs, b, s, g) if s in wanted else ([], None)
        if not keys:
            outs.append(nothing[0])
            lses.append(nothing[1])
            continue
        scores = scale * q[b, s, g] @ k[b, g, keys].T
        scores = scores if added is None else scores + added.to(dtype)
        logits = scores if sink is None else torch.cat((scores, sink[g][:, None]), 1)
        outs.append(torch.softmax(logits, 1)[:, : len(keys)] @ v[b, g, keys])
        lses.append(logsumexp(scores))
    shape = (batch, steps, groups, heads)
    if not outs:
        return {"o": q.new_zeros((*shape, v.shape[3])), "lse": q.new_zeros(shape)}
    return {"o": torch.stack(outs).view(*shape, -1), "lse": torch.stack(lses).view(shape)}


def oracle(
    inputs: Mapping[str, Any],
    up: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
    scale: float | None = None,
    queries: Iterable[int] | None = None,
) -> dict[str, Tensor]:
    """Returns the loop's o and lse in ``dtype`` and, with ``up``, the gradients of q, k, v and sink.

    The loop runs on the CPU, which takes small products one by one sooner than a GPU.
    """
    device = inputs["q"].device
    leaf = {name: t.cpu() if isinstance(t, Tensor) else t for name, t in inputs.items()}
    wanted = {n: leaf[n].detach().to(dtype).requires_grad_() for n in WANTED if leaf[n] is not None}
    result = loop(leaf | wanted, dtype, scale, queries)
    named = {k: t.detach() for k, t in result.items()}
    if up:
        pairs = [(result[k], u.detach().cpu().to(dtype)) for k, u in up.items() if result[k].requires_grad]
        grads = [None] * len(wanted)
        if pairs:
            outs, ups = zip(*pairs, strict=True)
            grads = torch.autograd.grad(outs, list(wanted.values()), ups, allow_unused=True)
        named |= {
            f"d{k}": torch.zeros_like(t) if g is None else g for (k, t), g in zip(wanted.items(), grads, strict=True)
        }
    return {k: t.to(device) for k, t in named.items()}


def upstream(inputs: Mapping[str, Any], names: Iterable[str] = OUTPUTS, seed: int = 1) -> dict[str, Tensor]:
    """Returns a standard normal gradient for each of the named outputs, in its dtype."""
    g = torch.Generator().manual_seed(seed)
    q, width = inputs["q"], inputs["v_width"] if inputs["v"] is None else inputs["v"].shape[3]
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    made = {
        "o": torch.randn((*q.shape[:4], width), generator=g, dtype=torch.float64).to(q.dtype),
        "lse": torch.randn(q.shape[:4], generator=g, dtype=torch.float64).to(wide),
    }
    return {k: made[k].to(q.device) for k in names}


# --- the op, and comparisons --------------------------------------------------------------------------------


def run(
    inputs: Mapping[str, Tensor | None],
    up: Mapping[str, Tensor] | None = None,
    scale: float | None = None,
    form: Any = None,
) -> dict[str, Tensor]:
    """Runs selection_attention of ``form`` (default: the ops), and with ``up`` its backward.

    Names the results as :func:`oracle` does.
    """
    scale = inputs["q"].shape[-1] ** -0.5 if scale is None else scale
    return run_op("selection_attention", inputs, up, {"scale": scale}, form)


def error(got: Tensor, want: Tensor) -> float:
    """Returns ``||got - want|| / ||want||`` over the finite part; infinity if infinities or NaN differ in position."""
    got, want = got.double().cpu(), want.double().cpu()
    odd = ~want.isfinite()
    if got.shape != want.shape or not torch.equal(~got.isfinite(), odd):
        return float("inf")
    if not torch.equal(got[odd].nan_to_num(0.5), want[odd].nan_to_num(0.5)):
        return float("inf")
    return relative(got[~odd], want[~odd]) if want[~odd].norm() > 0 else float(got[~odd].norm())


def check(
    got: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor | None],
    up: Mapping[str, Tensor] | None = None,
    tolerance: float | None = None,
    scale: float | None = None,
) -> dict[str, float]:
    """Asserts that each result of :func:`run` is close to fp64.

    The limit is ``tolerance`` (default: :data:`FP32_ERROR`, for gradients :data:`FP32_GRADIENTS`) or twice the fp32
    loop's own error, plus one rounding where the result's dtype is low.
    """
    want = oracle(inputs, up, scale=scale)

    def limit(key: str) -> tuple[float, float]:
        base = tolerance if tolerance is not None else FP32_GRADIENTS if key.startswith("d") else FP32_ERROR
        if inputs["q"].dtype.itemsize == 2 and key.startswith("d"):
            base += rounding(inputs["q"].dtype)  # delta is computed from the rounded o
        return base, 1.01 * rounding(got[key].dtype) if got[key].dtype.itemsize == 2 else 0.0

    return held(got, want, functools.cache(lambda: oracle(inputs, up, torch.float32, scale)), limit, error)
