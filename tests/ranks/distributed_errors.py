# SPDX-License-Identifier: Apache-2.0
"""Checks of wrong calls and of ranks that do not answer: an error on every rank, never a hang."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import mhc_inductor as mi
from tests.oracles import selection as helpers
from tests.ranks.distributed_selection import attended
from tests.ranks.distributed_tools import check, everywhere, me, message, ranks, shares


def _bad_calls() -> dict[str, tuple[Callable[..., Any], str]]:
    """Returns calls that are wrong on the last rank only, and what every rank must say."""
    cp, last, n = mi.distributed, me() == ranks() - 1, ranks() - 1
    q, k = torch.ones(1, 2, 1, 1, 4), torch.ones(1, 1, 3, 4)
    ranges = torch.zeros(1, 2, 1, 1, 2, dtype=torch.int32)
    x, w = torch.ones(2, 2, 8), torch.ones(1, 2, 1)
    index = torch.ones(1, 2, 1, 4), torch.ones(1, 3, 4), w

    def on_last(wrong: Any, right: Any) -> Any:
        return wrong if last else right

    def attend(q: Any = q, k: Any = k, v: Any = None, r: Any = ranges, **kwargs: Any) -> Any:
        return cp.selection_attention(q, k, k + 1 if v is None else v, r, **kwargs)

    def without_grad() -> Any:
        with torch.set_grad_enabled(not last):
            return attend(k=k.clone().requires_grad_())

    there = f"on rank {n} of the group:"
    same = "must be the same on every rank of the group, got"
    name = "ValueError: selection_attention:"
    scan = "ValueError: e79_scan:"
    return {
        "shape": (lambda: attend(k=on_last(k[0], k)), f"{name} {there} k must have shape [B, G, S_kv, Dk]"),
        "dtype": (lambda: attend(v=on_last(k.half(), k + 1)), f"Type{name[5:]} {there} v must have q's dtype"),
        "type": (lambda: attend(r=on_last("all", ranges)), f"Type{name[5:]} {there} ranges must be a tensor"),
        "method": (
            lambda: attend(method=on_last("rings", "ring")),
            f"{name} {there} method must be 'gather' or 'ring'",
        ),
        "methods": (lambda: attend(method=on_last("ring", "gather")), f"{name} method {same} gather on rank 0"),
        "sizes": (lambda: attend(*on_last((q[..., :2], k[..., :2]), (q, k))), f"{name} q's B, G, h, Dk {same}"),
        "scales": (lambda: attend(scale=on_last(0.5, 0.25)), f"{name} scale {same} 0.25 on rank 0"),
        "shared": (lambda: attend(v=on_last(k, k + 1)), f"{name} whether v is k {same} False on rank 0"),
        "selection": (
            lambda: attend(r=on_last(None, ranges), indices=on_last(ranges[..., 0], None)),
            f"{name} the selection {same} ranges on rank 0",
        ),
        "nothing": (lambda: attend(r=on_last(None, ranges)), f"Type{name[5:]} {there} ranges must be a tensor"),
        "broken": (lambda: attend(scale=on_last(_Broken(), 0.5)), ""),
        "no_grad": (without_grad, f"{name} gradients are needed, but switched off"),
        "functions": (on_last(lambda: cp.e79_scan(x), attend), "selection_attention on rank 0"),
        "steps": (lambda: cp.e79_scan(on_last(x[:0], x)), f"{scan} {there} kvqm[T, B, 4n] must have at least one"),
        "chunks": (
            lambda: cp.e79_scan(x, chunks=on_last(3, 2)),
            f"{scan} {there} chunks must be from 1 to B = 2, got 3",
        ),
        "chunk counts": (lambda: cp.e79_scan(x, chunks=on_last(1, 2)), f"{scan} chunks {same} 2 on rank 0"),
        "chunk type": (lambda: cp.e79_scan(x, chunks=on_last(1.0, 2)), f"Type{scan[5:]} {there} chunks must be an int"),
        "states": (
            lambda: cp.e79_scan(x, S0=on_last(torch.ones(2, 2, 2), None)),
            f"{scan} S0 must be given on the group's first rank",
        ),
        "mask": (
            lambda: cp.index_scores(*index, mask=torch.ones(1, 2, on_last(3, 3 * ranks()), dtype=torch.bool)),
            f"ValueError: index_scores: {there} mask must broadcast to [B, S, T] with T = {3 * ranks()}",
        ),
        "topk": (lambda: cp.index_topk(*index, 3 * ranks() + 1), "ValueError: index_topk: topk must be at most T"),
        "long topks": (lambda: cp.index_topk(*index, 10**120 + me()), f"ValueError: index_topk: topk {same} 1000"),
        "topks": (
            lambda: cp.index_topk(*index, on_last(-1, 2)),
            f"ValueError: index_topk: {there} topk must be at least 0",
        ),
    }


class _Broken:
    """A scale that no check can read."""

    def __eq__(self, other: object) -> bool:
        raise KeyError("broken")

    __hash__ = None  # type: ignore[assignment]


@check
def errors_on_every_rank() -> None:
    for name, (call, expected) in _bad_calls().items():
        texts = everywhere(message(call))
        if name == "functions":  # each rank's message begins with the function that it called
            texts = [text.split(": ", 2)[2] for text in texts]
        assert texts[0] != "no error" and len(set(texts)) == 1, (name, texts)
        assert expected in texts[0], (name, texts[0])


@check
def a_rank_does_not_answer() -> None:
    short = dist.new_group()
    call = functools.partial(mi.distributed.e79_scan, torch.ones(1, 1, 4), group=short)
    call()  # connects the ranks, which takes as long as it takes
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1), short)
    texts = everywhere("" if me() == ranks() - 1 else message(call))
    assert all("RuntimeError" in text and "imed out" in text for text in texts[:-1]), texts


@check
def a_rank_dies() -> None:
    """The others get an error, not a hang. The last check: the group is gone."""
    if me() == ranks() - 1:
        return  # the process ends
    made = helpers.make_inputs("odd", torch.float32)
    text = message(lambda: attended(made, None, "ring", shares(7), shares(12)))
    assert ": selection_attention: a message between the ranks of the group failed: " in text, text
