# SPDX-License-Identifier: Apache-2.0
"""Checks of index scores and of hyper-connections on sequence shards."""

from __future__ import annotations

from typing import Any

import torch

import mhc_inductor as mi
from tests.oracles import index as helpers
from tests.oracles.mhc import relative
from tests.oracles.selection import error
from tests.ranks import distributed_tools as tools
from tests.ranks.distributed_tools import check, here, joined, leaf, me, shares, total, uneven


@check
def index_of_all_keys() -> None:
    g = torch.Generator().manual_seed(3)
    q, k, w = (torch.randn(size, generator=g) for size in ((2, 10, 3, 8), (2, 14, 8), (2, 10, 3)))
    limit = torch.randint(0, 15, (2, 10), generator=g)
    mask = torch.rand((2, 10, 14), generator=g) < 0.8
    ids = torch.randint(0, 2, (2, 10), generator=g), torch.randint(0, 2, (2, 14), generator=g)
    s, t = shares(10)[me()], uneven(14)[me()]
    up = torch.randn((2, 10, 14), generator=g)
    mine = [leaf(q, (tools.ALL, s)), leaf(k, (tools.ALL, t)), leaf(w, (tools.ALL, s))]
    own = {"limit": limit[:, s], "mask": mask[:, s], "segments_q": ids[0][:, s], "segments_k": ids[1][:, t]}
    own = {name: here(tensor) for name, tensor in own.items()}
    scores = mi.distributed.index_scores(*mine, scale=0.5, group=tools.GROUP, **own)
    scores.backward(here(up[:, s]))
    chosen = joined(mi.distributed.index_topk(*mine, 5, scale=0.5, group=tools.GROUP, **own), 1)
    got = [joined(scores, 1), joined(mine[0].grad, 1), joined(mine[1].grad, 1), joined(mine[2].grad, 1)]
    wide = [t.double().requires_grad_() for t in (q, k, w)]
    there = {"limit": limit, "mask": mask, "segments_q": ids[0], "segments_k": ids[1]}
    exact = mi.index_scores(*wide, scale=0.5, **there)
    exact.backward(up.double())
    hidden = ~helpers.seen(q, k, (limit, mask, *ids))
    assert torch.equal(got[0] == -torch.inf, hidden)
    want = [exact.detach(), *(t.grad for t in wide)]
    for a, b in zip(got, want, strict=True):
        assert error(a, b) < 1e-6
    there = {name: here(tensor) for name, tensor in there.items()}
    assert torch.equal(chosen, mi.index_topk(*map(here, (q, k, w)), 5, scale=0.5, **there).cpu())


@check
def mhc_needs_no_messages() -> None:
    """A hyper-connection on token shards: equal outputs, and gradients that sum to those of all tokens."""

    def built() -> Any:
        torch.manual_seed(0)
        site = mi.nn.HyperConnection(dim=16, n=4, sublayer=torch.nn.Linear(16, 16), gamma=True)
        torch.nn.init.normal_(site.phi, std=0.1)
        return site.double()

    x, up = (torch.randn(2, 12, 4, 16, generator=torch.Generator().manual_seed(i)).double() for i in (1, 2))
    s, site = uneven(12)[me()], built()
    mine = leaf(x, (tools.ALL, s))
    out = site(mine)
    out.backward(up[:, s])
    outs, dx = joined(out, 1), joined(mine.grad, 1)
    grads = {n: total(p.grad) for n, p in site.named_parameters()}
    whole, one = leaf(x), built()
    want = one(whole)
    want.backward(up)
    assert relative(outs, want) < 1e-14 and relative(dx, whole.grad) < 1e-14  # a product's sums depend on its size
    for n, p in one.named_parameters():
        assert relative(grads[n], p.grad) < 1e-13, n
