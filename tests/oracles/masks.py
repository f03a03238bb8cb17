# SPDX-License-Identifier: Apache-2.0
"""Inputs for the tests of selection attention under a mask; the oracle and comparisons are those of helpers_lists."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.oracles import lists as helpers_lists

KINDS = ("random", "causal", "window", "sparse", "empty", "all", "none", "biased", "fills")


def make_mask(kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype, g: torch.Generator) -> Tensor:
    """Returns a mask ``[B, S, G, S_kv]`` of bools, or one of floats that hides keys by -inf.

    "random": half of the keys; "sparse": one in ten; "causal"; "window": the last 3 of those; "empty": a third of the
    rows see nothing; "all"; "none". "biased" and "fills" are of floats: normal values next to -inf; finfo.min, also in
    all of a row, in place of -inf.
    """
    _, S, _, keys = shape
    draw = torch.rand(shape, generator=g)
    ahead = torch.arange(keys) - (keys - S) - torch.arange(S)[:, None, None]  # [S, 1, keys]
    shown = {
        "sparse": draw < 0.1,
        "causal": (ahead <= 0).expand(shape),
        "window": ((ahead <= 0) & (ahead > -3)).expand(shape),
        "all": draw >= 0,
        "none": draw < 0,
    }.get(kind, draw < 0.5)
    if kind in ("empty", "fills"):
        shown = shown & (torch.rand((*shape[:3], 1), generator=g) > 1 / 3)
    if dtype is torch.bool:
        return shown.clone()
    values = torch.randn(shape, generator=g) if kind == "biased" else torch.zeros(shape)
    values = values.to(dtype)
    fill = torch.finfo(dtype).min if kind == "fills" else -torch.inf
    return torch.where(shown, values, fill)


def make_inputs(
    kind: str = "empty",
    dtype: torch.dtype = torch.float64,
    *,
    mask_dtype: torch.dtype | None = None,
    shared_mask: str = "",
    device: str = "cpu",
    seed: int = 0,
    **sizes: Any,
) -> dict[str, Any]:
    """Returns inputs of the op: those of ``helpers_lists.make_inputs``, with a mask in place of the lists.

    Args:
        kind: One of :data:`KINDS`.
        dtype: That of q.
        mask_dtype: None for bool, or fp32 (fp64 if q is) for the kinds of floats.
        shared_mask: The dimensions, of "BG", that have a size of 1; "S" for a view that all queries share.
        device: Where the tensors are.
        seed: Of all draws.
        sizes: As for ``helpers_lists.make_inputs``.
    """
    lists = helpers_lists.make_inputs("none", dtype, n=0, device=device, seed=seed, **sizes)
    made = {name: lists[name] for name in ("q", "k", "v", "sink", "v_width")}
    if mask_dtype is None:
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        mask_dtype = wide if kind in ("biased", "fills") else torch.bool
    B, S, G = made["q"].shape[:3]
    shape = (1 if "B" in shared_mask else B, S, 1 if "G" in shared_mask else G, made["k"].shape[2])
    mask = make_mask(kind, shape, mask_dtype, torch.Generator().manual_seed(seed + 1)).to(device)
    made["mask"] = mask[:, :1].expand(shape) if "S" in shared_mask else mask
    return made
