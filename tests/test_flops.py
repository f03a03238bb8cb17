# SPDX-License-Identifier: Apache-2.0
"""Flop formulas: ``FlopCounterMode`` counts an op as it counts the same products written with torch's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import mhc_inductor
from mhc_inductor import compat
from mhc_inductor.nn import E79Layer, HyperConnection
from mhc_inductor.ops import flops, registry
from mhc_inductor.routing import route
from tests.ranks import sharded_ops

B, S, T, N, D, STATE = 2, 3, 7, 4, 16, 6
M = N * N + 2 * N
OPS = sorted(registry.REFERENCE)
PRODUCTS_OF_REFERENCE = (
    "mhc_coefficients",
    "mhc_sinkhorn",
    "e79_scan",
    "selection_blocks",
    "index_scores",
    "index_topk",
    "index_topk_scores",
)
"""Ops whose reference writes each product, and no other, with ``matmul``."""


def counted(fn: Callable[..., Any], *args: Any) -> int:
    with FlopCounterMode(display=False) as mode:
        fn(*args)
    return mode.get_total_flops()


def trained(fn: Callable[..., Any], *args: Any) -> int:
    """Returns the flops of ``fn`` and of the gradients of all its arguments that can have one."""
    args = tuple(a.detach().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)

    def run() -> None:
        out = fn(*args)
        out = [t for t in (out if isinstance(out, tuple) else (out,)) if t.requires_grad]
        torch.autograd.backward(out, [torch.ones_like(t) for t in out])

    return counted(run)


# ---- every op


def test_every_op_has_a_formula():
    assert {op.removesuffix("_backward") for op in OPS} == {op.removesuffix("_backward") for op in flops.PRODUCTS}
    for op in OPS:
        assert getattr(torch.ops.mhc_inductor, op) in flop_registry, op


@pytest.mark.parametrize("op", OPS)
def test_every_op_is_counted(op):
    """All samples: a number above 0, but for Sinkhorn, a missing mix and no keys; fake tensors count no less."""
    for case, args in [(case, args) for name, case, args in sharded_ops.samples() if name == op]:
        real = counted(getattr(torch.ops.mhc_inductor, op), *args)
        no_mix = op in ("mhc_post", "mhc_post_backward") and sharded_ops.named(op, args)["h_res"] is None
        nothing = "sinkhorn" in op or no_mix or case.endswith(("no_ranges", "no_keys_listed", "no_keys_shown"))
        assert type(real) is int and (real > 0) != nothing, (case, real)
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
            bound = counted(getattr(torch.ops.mhc_inductor, op), *fake)
        assert bound >= real and (bound == real or "ranges" in registry._NAMES[op]), (case, real, bound)
        if op in PRODUCTS_OF_REFERENCE:
            assert real == counted(registry.REFERENCE[op], *args), case


# ---- formulas written with torch's operators, and their gradients


def coefficients(x: Tensor, phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    v = x.flatten(-2)
    z = F.linear(v, phi) * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6)
    return torch.sigmoid(z[..., :N]), torch.sigmoid(z[..., N : 2 * N]), z[..., 2 * N :].unflatten(-1, (N, N))


def pre(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    h_pre, h_post, h_res = coefficients(x, phi)
    return (h_pre.unsqueeze(-2) @ x).squeeze(-2) * 1, h_post, h_res


def post(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return h_res.mT @ x + h_post.unsqueeze(-1) * f.unsqueeze(-2)


def recurrence(kvqm: Tensor, S0: Tensor, M0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    state, gate, outs = S0, M0, []
    mv = lambda a, b: (a @ b.unsqueeze(-1)).squeeze(-1)  # noqa: E731
    for k, v, q, m in (step.chunk(4, -1) for step in kvqm):
        r, c = torch.sigmoid(mv(gate, k)), torch.sigmoid(mv(gate.mT, k))
        delta = v - mv(state, k)
        state = r.unsqueeze(-1) * state * c.unsqueeze(-2) + delta.unsqueeze(-1) * k.unsqueeze(-2)
        p, w = torch.sigmoid(mv(state, m)), torch.sigmoid(mv(state.mT, m))
        g = delta - mv(gate, m)
        gate = p.unsqueeze(-1) * gate * w.unsqueeze(-2) + g.unsqueeze(-1) * m.unsqueeze(-2)
        outs.append(F.silu(mv(state, q)))
    return torch.stack(outs), state, gate


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of q[B, S, G, h, D] over all keys, with a mask that counts nothing."""
    q = q.permute(0, 2, 1, 3, 4).flatten(2, 3)
    return ((q @ k.mT).masked_fill(~mask, -1e9).softmax(-1) @ v).unflatten(2, (S, -1))


def scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    products = (q.flatten(1, 2) @ k.mT).unflatten(1, q.shape[1:3])
    return (w.unsqueeze(-2) @ products.relu()).squeeze(-2)


def test_mhc_is_counted_as_its_formula():
    x, phi = torch.randn(B, S, N, D), torch.randn(M, N * D)
    f, h_post, h_res = torch.randn(B, S, D), torch.rand(B, S, N), torch.rand(B, S, N, N)
    parameters = torch.ones(3), torch.zeros(M)
    ours = lambda *args: mhc_inductor.mhc_pre(*args, sinkhorn_iters=3)  # noqa: E731
    mix = lambda *args: mhc_inductor.mhc_post(*args, transpose_res=True)  # noqa: E731
    projected, collapsed, mixed = 2 * B * S * M * N * D, 2 * B * S * N * D, 2 * B * S * N * N * D
    for count, times in ((counted, 1), (trained, 3)):
        assert count(ours, x, phi, *parameters) == count(pre, x, phi, *parameters) == times * (projected + collapsed)
        assert count(mix, x, f, h_post, h_res) == count(post, x, f, h_post, h_res) == times * mixed
        part = lambda x, w: mhc_inductor.mhc_collapse(x, w)  # noqa: E731
        assert count(part, x, h_post) == times * collapsed
    assert trained(lambda *args: ours(*args)[1:], x, phi, *parameters) == 3 * projected + collapsed, "h_in is not used"


def test_e79_is_counted_as_its_formula():
    args = torch.randn(5, B, 4 * STATE), *(torch.randn(B, STATE, STATE) for _ in range(2))
    ours = lambda kvqm, S0, M0: mhc_inductor.e79_scan(kvqm, None, None, S0, M0)  # noqa: E731
    for count, times in ((counted, 1), (trained, 3)):
        assert count(ours, *args) == count(recurrence, *args) == times * 7 * 2 * 5 * B * STATE * STATE


def _attention(heads: int = 2, groups: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, S, groups, heads, 8), torch.randn(B, groups, T, 8), torch.randn(B, groups, T, 12)


def test_attention_over_all_keys_is_counted_as_its_formula():
    q, k, v = _attention()
    ranges = torch.tensor([0, T]).expand(B, S, 2, 1, 2)
    indices = torch.arange(T).expand(B, S, 2, T)
    over_ranges = lambda q, k, v: mhc_inductor.selection_attention(q, k, v, ranges)  # noqa: E731
    over_list = lambda q, k, v: mhc_inductor.selection_attention(q, k, v, indices=indices)  # noqa: E731
    formula = lambda q, k, v: dense(q, k, v, torch.ones(1, dtype=torch.bool))  # noqa: E731
    for count, times in ((counted, 1), (trained, 3)):
        whole = times * 2 * B * S * 4 * T * (8 + 12)
        assert count(over_ranges, q, k, v) == count(over_list, q, k, v) == count(formula, q, k, v) == whole
    for selection in ({"ranges": ranges}, {"indices": indices}):
        lse = lambda q, k, v: mhc_inductor.selection_attention(q, k, v, **selection, return_lse=True)[1]  # noqa: B023, E731
        assert trained(lse, q, k, v) == 2 * B * S * 4 * T * (3 * 8 + 12), "no gradient reaches v"


def test_attention_counts_the_keys_that_it_reads():
    q, k, v = _attention()
    counts = lambda *args, **kw: counted(lambda: mhc_inductor.selection_attention(q, k, v, *args, **kw))  # noqa: E731
    each = 2 * 2 * (8 + 12)  # two heads
    two = [(3, 5, 0, 2), (0, 4, 2, 5), (-3, 2, 6, 99), (5, 5, 4, 1), (1, 3, 1, 3), (0, 6, 1, 2)]
    for pair, keys in zip(two, (4, 5, 3, 0, 2, 6), strict=True):
        assert counts(torch.tensor(pair).view(2, 2).expand(B, S, 2, 2, 2)) == each * keys * B * S * 2, pair
    assert counts(torch.empty(B, S, 2, 0, 2, dtype=torch.long)) == 0
    blocks = mhc_inductor.blocks_to_ranges(torch.tensor([0, 2]).expand(B, S, 2, 2), 2, T, causal=False)
    assert counts(blocks) == each * 2 * 2 * B * S * 2, "k blocks of block_size keys"
    assert counts(indices=torch.tensor([1, 1, -1]).expand(B, S, 2, 3)) == each * 3 * B * S * 2, "entries of the list"
    q, k, v = q[:1], k[:1], v[:1]
    ends = {"cu_seqlens_q": torch.tensor([0, 2, 3]), "cu_seqlens_k": torch.tensor([0, 3, 7])}
    assert counts(torch.tensor([0, 9]).expand(1, S, 2, 1, 2), **ends) == each * (2 * 3 + 1 * 4) * 2, "own sequences"


def test_index_scores_are_counted_as_their_formula():
    args = torch.randn(B, S, 4, 8), torch.randn(B, T, 8), torch.rand(B, S, 4)
    one = 2 * B * S * T * 4 * (8 + 1)
    for count, times in ((counted, 1), (trained, 3)):
        assert count(mhc_inductor.index_scores, *args) == count(scores, *args) == times * one
    assert counted(mhc_inductor.index_topk, *args, 3) == one


# ---- where formulas are used


class Block(nn.Module):
    """mHC around a sublayer, in plain PyTorch, with every product a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.phi, self.inner = nn.Parameter(torch.randn(M, N * D) * 0.1), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h_pre, h_post, h_res = coefficients(x, self.phi)
        for _ in range(3):
            h_res = h_res.softmax(-1)
        return post(x, self.inner((h_pre.unsqueeze(-2) @ x).squeeze(-2)), 2 * h_post, h_res)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_routed_graph_counts_as_the_model(dynamic):
    """The graph of a compile, on its inputs and on the fake tensors that the compile sees, whose sizes may be symbolic."""
    model, x, found = Block(), torch.randn(B, S, N, D), []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        formula, ops = counted(gm, *inputs), [r.op for r in route(gm).routed]
        routed = counted(gm, *inputs)
        fakes = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        with compat.fake_mode_of([t for t in fakes if isinstance(t, Tensor)]):
            found.append((formula, ops, routed, int(counted(gm, *fakes))))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, dynamic=dynamic)(x)
    ((formula, ops, routed, on_fakes),) = found
    assert len(ops) >= 2 and formula == routed == on_fakes, (ops, formula, routed, on_fakes)
    assert dynamic or routed == counted(model, x)


def test_modules_are_told_apart():
    model = nn.Sequential(HyperConnection(D, N, nn.Linear(D, D)), nn.Flatten(-2), E79Layer(N * D, n_state=STATE))
    with FlopCounterMode(display=False, depth=3) as mode:
        model(torch.randn(B, S, N, D))[0].sum().backward()
    found = {name: {str(op): n for op, n in counts.items()} for name, counts in mode.get_flop_counts().items()}
    assert found["Sequential.0"]["mhc_inductor.mhc_pre"] * 2 == found["Sequential.0"]["mhc_inductor.mhc_pre_backward"]
    assert {"mhc_inductor.e79_scan", "mhc_inductor.e79_scan_backward"} <= found["Sequential.2"].keys()
    assert {op for op in found["Sequential.0"] if op.startswith("mhc_inductor")} == {
        op for op in found["Global"] if op.startswith("mhc_inductor.mhc")
    }


def test_a_memory_budget_sees_what_recomputation_costs():
    """With a budget torch's partitioner asks for the flops of each node: an op of 0 would always be recomputed."""
    from torch._functorch.partitioners import estimate_runtime

    graph = torch.fx.Graph()
    q, k, v = (graph.placeholder(name) for name in "qkv")
    ranges = graph.placeholder("ranges")
    node = graph.call_function(
        torch.ops.mhc_inductor.selection_attention.default, (q, k, v, ranges, None, None, None, 1.0)
    )
    with FakeTensorMode() as mode:
        for given, t in zip((q, k, v, ranges), (*_attention(), torch.zeros(B, S, 2, 1, 2).int()), strict=True):
            given.meta["val"] = mode.from_tensor(t)
        assert estimate_runtime(node) == 2 * B * S * 4 * T * (8 + 12)
