# SPDX-License-Identifier: Apache-2.0
"""Inputs and comparisons for the tests of selection attention over lists of keys or masks, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.oracles.mhc import rounding
from tests.oracles.selection import OUTPUTS as OUTPUTS
from tests.oracles.selection import WANTED, error, oracle
from tests.oracles.selection import logsumexp as logsumexp
from tests.oracles.selection import upstream as upstream

NAMES = ("q", "k", "v", "indices", "mask", "sink", "cu_seqlens_q", "cu_seqlens_k", "segments_q", "segments_k")
ENTRIES = ("q", "k", "v", "indices", "bias", "sink")
ANY = -(2**31)
LOWEST = torch.finfo(torch.float32).min


def make_bias(kind: str, shape: Sequence[int], dtype: torch.dtype, g: torch.Generator) -> Tensor:
    """Returns ``bias[B, S, G, n]``.

    "normal"; "lowest": the lowest finite number; "rows": rows of either, of one or the other, with -inf, and of -inf.
    """
    lowest = torch.full(tuple(shape), max(LOWEST, torch.finfo(dtype).min), dtype=torch.float64)
    normal = torch.randn(tuple(shape), generator=g, dtype=torch.float64)
    if kind == "rows":
        one = torch.rand(tuple(shape), generator=g) < 0.4
        some = torch.where(one, -torch.inf, normal)
        kinds = torch.stack(
            (normal, lowest, torch.where(one, lowest, normal), some, torch.full_like(normal, -torch.inf))
        )
        draw = torch.randint(len(kinds), tuple(shape[:-1]), generator=g)[..., None].expand(tuple(shape))
        return kinds.gather(0, draw[None])[0].to(dtype)
    return {"normal": normal, "lowest": lowest}[kind].to(dtype)


def make_indices(kind: str, shape: Sequence[int], keys: int, dtype: torch.dtype, g: torch.Generator) -> Tensor:
    """Returns ``indices[B, S, G, n]``.

    "random": any distinct keys in any order; "sorted": the same, increasing; "odd": repeated ones, -1 and positions far
    outside among them; "empty": a third of the rows select nothing; "all": every key; "none".
    """
    *rows, n = shape
    draw = torch.rand((*rows, max(keys, n)), generator=g).argsort(-1)[..., :n]
    draw = torch.where(draw < keys, draw, -1)
    if kind == "sorted":
        draw = torch.where(draw < 0, keys + 5, draw).sort(-1).values
        draw = torch.where(draw < keys, draw, -1)
    elif kind == "odd":
        draw = torch.randint(-3, keys + 3, tuple(shape), generator=g)
        far = torch.rand(tuple(shape), generator=g) < 0.1
        draw = torch.where(far, torch.iinfo(dtype).max, draw)
    elif kind == "empty":
        draw = torch.where(torch.rand((*rows, 1), generator=g) < 1 / 3, -1, draw)
    elif kind == "none":
        draw = torch.full_like(draw, -1)
    else:
        assert kind in ("random", "all"), kind
    return draw.to(dtype)


def make_inputs(
    kind: str = "odd",
    dtype: torch.dtype = torch.float64,
    *,
    B: int = 2,
    S: int = 5,
    G: int = 2,
    h: int = 3,
    Dk: int = 8,
    Dv: int | None = None,
    S_kv: int | None = None,
    n: int = 9,
    sink: bool | float = False,
    shared: bool = False,
    segments: bool = False,
    lengths: Sequence[int] | None = None,
    key_lengths: Sequence[int] | None = None,
    strided: bool = False,
    index_dtype: torch.dtype = torch.int32,
    device: str = "cpu",
    seed: int = 0,
    bias: str | None = None,
    bias_dtype: torch.dtype | None = None,
    repeats: bool = False,
) -> dict[str, Any]:
    """Returns standard normal q, k, v and sink, and lists of a ``kind`` of :func:`make_indices`.

    ``sink``: all logits, or whether there are any. ``bias``: a kind of :func:`make_bias`, in ``bias_dtype`` or that of
    the sink; the arguments are then those of the op with a bias per entry.

    ``shared``: v is None, and Dv columns of k are the values. ``lengths``: packed sequences (B = 1), ``key_lengths``
    where their keys have other lengths. ``strided``: k and v are views of ``[B, S_kv, G, D]``.
    """
    g = torch.Generator().manual_seed(seed)
    S_kv = S if S_kv is None else S_kv
    Dv = Dk if Dv is None else Dv

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).to(device)

    def rows(D: int) -> Tensor:
        return normal(B, S_kv, G, D).transpose(1, 2) if strided else normal(B, G, S_kv, D)

    def boundaries(sizes: Sequence[int] | None) -> Tensor | None:
        return None if sizes is None else torch.tensor([0, *sizes]).cumsum(0).to(torch.int32).to(device)

    made: dict[str, Any] = {"q": normal(B, S, G, h, Dk), "k": rows(Dk), "v": None if shared else rows(Dv)}
    made["indices"] = make_indices(kind, (B, S, G, n), S_kv, index_dtype, g).to(device)
    made["sink"] = normal(G, h).to(torch.float64 if dtype is torch.float64 else torch.float32) if sink else None
    if isinstance(sink, float):
        made["sink"].fill_(sink)
    made["cu_seqlens_q"], made["cu_seqlens_k"] = boundaries(lengths), boundaries(key_lengths)
    made["segments_q"] = made["segments_k"] = None
    if segments:
        wide = 2**32 if index_dtype is torch.int64 else 1
        made["segments_q"] = (torch.randint(0, 3, (B, S), generator=g) * wide).to(index_dtype).to(device)
        ids = torch.randint(0, 4, (B, S_kv), generator=g)
        made["segments_k"] = torch.where(ids == 3, ANY, ids * wide).to(index_dtype).to(device)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    made["bias"] = None if bias is None else make_bias(bias, (B, S, G, n), bias_dtype or wide, g).to(device)
    made["v_width"], made["repeats"] = Dv, repeats
    return made


def name_of(made: Mapping[str, Any]) -> str:
    """Returns the op's name."""
    kind = "mask" if "mask" in made else "list" if made["bias"] is None else "entry"
    return f"selection_{kind}_attention"


def arguments(made: Mapping[str, Any], scale: float) -> tuple[Any, ...]:
    """Returns the op's positional arguments."""
    if made.get("bias") is not None:
        return (*(made[name] for name in ENTRIES), scale, made["v_width"], made["repeats"])
    return (*(made[name] for name in NAMES if name in made), scale, made["v_width"])


def backward_arguments(ups: Iterable[Tensor | None], args: Sequence[Any], o: Tensor, lse: Tensor) -> tuple[Any, ...]:
    """Returns the backward op's positional arguments, from the gradients of o and lse and the op's arguments."""
    scale = next(i for i, a in enumerate(args) if isinstance(a, float))
    return (*ups, *args[:scale], o, lse, *args[scale:])


def run(
    attention: Callable[..., Any], made: Mapping[str, Any], ups: Mapping[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """Returns the op's outputs and autograd's gradients, under the oracle's names."""
    wanted = [n for n in WANTED if made[n] is not None]
    leaf = {**made, **{n: made[n].detach().requires_grad_() for n in wanted}}
    out = dict(zip(OUTPUTS, attention(*arguments(leaf, scale)), strict=True))
    grads = torch.autograd.grad([out[n] for n in ups], [leaf[n] for n in wanted], list(ups.values()))
    return {n: t.detach() for n, t in out.items()} | {f"d{n}": g for n, g in zip(wanted, grads, strict=True)}


def check(
    got: Mapping[str, Tensor],
    made: Mapping[str, Any],
    ups: Mapping[str, Tensor] | None = None,
    scale: float | None = None,
    roundings: float = 1.05,
) -> None:
    """Asserts errors against fp64 of at most twice the fp32 loop's, plus the roundings of products and results."""
    want, plain = oracle(made, ups, scale=scale), oracle(made, ups, torch.float32, scale=scale)
    dtype = made["q"].dtype
    for name in got:
        a, b, c = (of[name].cpu().double() for of in (got, want, plain))
        if name == "lse":  # a row of the lowest bias would hide the others
            a, b, c = (t.masked_fill(t < -1e30, -torch.inf) for t in (a, b, c))
        base = 2e-5 if name.startswith("d") else 1e-6
        # dsink sums products with the rounded o, which cancel.
        many = {"o": 1, "lse": 0, "dsink": 4}.get(name, 2)
        low = 0.0 if dtype.itemsize >= 4 else many * roundings * rounding(dtype)
        allowed, found = max(base, 2 * error(c, b)) + low, error(a, b)
        assert found <= allowed, f"{name}: {found:.3g} above {allowed:.3g}"
    empty = (want["lse"] == -torch.inf).to(made["q"].device)
    assert (got["o"][empty] == 0).all() and (got["lse"][empty] == -torch.inf).all()
    if "dq" in got:
        assert (got["dq"][empty] == 0).all()
