# SPDX-License-Identifier: Apache-2.0
"""SelectionAttention and NativeSparseAttention: the formula by queries, causality, decoding, gradients, compilation."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import mhc_inductor
from mhc_inductor.nn import NativeSparseAttention, SelectionAttention
from mhc_inductor.reference import selection_blocks
from tests.oracles.selection import choice, error, make_inputs, oracle

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
OPS = torch.ops.mhc_inductor
pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {
    "dim": 24,
    "heads": 6,
    "groups": 2,
    "head_dim": 8,
    "block_size": 8,
    "top_k": 4,
    "compress": 8,
    "stride": 4,
    "window": 6,
}


def layer_of(dtype=F64, seed=0, **change):
    torch.manual_seed(seed)
    return NativeSparseAttention(**{**SMALL, **change}, dtype=dtype)


# --- SelectionAttention -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sink", [False, True])
def test_selection_attention_on_ranges(sink):
    inputs = make_inputs("odd", F32)
    module = SelectionAttention(2, 3, sink=sink, scale=0.3)
    if sink:
        inputs["sink"] = module.sink.detach().normal_()
        assert module.sink.dtype is F32
    o = module(inputs["q"], inputs["k"], inputs["v"], inputs["ranges"])
    assert error(o, oracle(inputs, scale=0.3)["o"]) < 1e-6
    assert (module.sink is not None) == sink
    if sink:
        o.sum().backward()
        assert module.sink.grad.norm() > 0


def test_selection_attention_on_packed_sequences():
    inputs = make_inputs("odd", F32, B=1, S=12, S_kv=12, lengths=(5, 7))
    q, k, v, ranges, _, cu, _ = inputs.values()
    assert error(SelectionAttention(2, 3)(q, k, v, ranges, cu), oracle(inputs)["o"]) < 1e-6
    picks = torch.randint(-1, 3, (1, 12, 2, 4))
    inputs["ranges"] = mhc_inductor.blocks_to_ranges(picks, 4, 12, cu_seqlens_q=cu)
    assert error(SelectionAttention(2, 3, block_size=4)(q, k, v, picks, cu), oracle(inputs)["o"]) < 1e-6


def test_selection_attention_names_what_does_not_fit():
    for change in ({"groups": 0}, {"heads": 0}, {"block_size": 0}):
        with pytest.raises(ValueError, match=f"SelectionAttention: {next(iter(change))} must be at least 1, got 0"):
            SelectionAttention(**{"groups": 1, "heads": 1, **change})
    q, k, v, ranges, *_ = make_inputs("odd", F32).values()
    with pytest.raises(ValueError, match=r"= \[B, S, 3, 3, Dk\], got \[2, 7, 2, 3, 8\]"):
        SelectionAttention(3, 3)(q, k, v, ranges)
    assert "block_size=4" in repr(SelectionAttention(1, 1, block_size=4))


# --- the choice of blocks -----------------------------------------------------------------------------------


def chosen_blocks(q, k, lse, scale, length, stride, block, count, s_kv):
    """Applies equations 8 to 10 query by query.

    Returns each query's set of blocks, and the smallest margin of a last chosen block over the next one.
    """
    b, s, g, _, _ = q.shape
    found, margin = {}, math.inf
    for at in [(i, t, n) for i in range(b) for t in range(s) for n in range(g)]:
        i, t, n = at
        position = s_kv - s + t
        own = position // block
        score = torch.zeros(own + 1, dtype=F64)
        for c in range(k.shape[2]):
            if c * stride + length > position + 1:
                continue
            p = torch.exp(scale * q[i, t, n] @ k[i, n, c] - lse[i, t, n]).sum()
            for unit in range(c, c + length // stride):
                score[unit * stride // block] += p
        fixed = {0, own, max(own - 1, 0)}
        rest = sorted((j for j in range(own + 1) if j not in fixed), key=lambda j: -score[j])
        free = count - len(fixed)
        found[at] = fixed | set(rest[:free])
        if len(rest) > free > 0:
            margin = min(margin, float(score[rest[free - 1]] - score[rest[free]]))
    return found, margin


@pytest.mark.parametrize(("S", "S_kv", "N"), [(50, 50, 11), (3, 47, 10), (1, 64, 15), (5, 5, 0)])
@pytest.mark.parametrize("chunk", [2**24, 200])
def test_blocks_are_chosen_by_the_definition(S, S_kv, N, chunk, monkeypatch):
    monkeypatch.setattr(selection_blocks, "CHUNK", chunk)
    args = choice(S, S_kv, N)
    got = OPS.selection_blocks(*args)
    want, margin = chosen_blocks(*args)
    assert got.shape == (2, S, 2, 5) and got.dtype is torch.int32
    assert margin > 1e-6  # larger than the error of fp32 scores
    for at, blocks in want.items():
        named = [j for j in got[at].tolist() if j >= 0]
        assert len(named) == len(set(named)) and set(named) == blocks


# --- NativeSparseAttention against one query after the other ------------------------------------------------


def rotated(t, position, base):
    """Rotates each pair (t[n], t[n + D/2]) of the vector ``t[D]`` by its angle."""
    half = t.shape[-1] // 2
    out = t.clone()
    for n in range(half):
        angle = position * base ** (-n / half)
        a, b = t[..., n], t[..., n + half]
        out[..., n] = a * math.cos(angle) - b * math.sin(angle)
        out[..., n + half] = a * math.sin(angle) + b * math.cos(angle)
    return out


def naive(layer, x):
    """Computes the layer in fp64, query by query, with softmax over lists of keys; autograd reaches every parameter."""
    batch, steps, _ = x.shape
    groups, heads, width, value_width = layer.groups, layer.heads, layer.head_dim, layer.value_dim
    length, stride, block = layer.compress_k.length, layer.compress_k.stride, layer.block_size
    scale = width**-0.5
    q = (x @ layer.q_proj.weight.T).view(batch, steps, groups, heads, width)
    k = (x @ layer.k_proj.weight.T).view(batch, steps, 3, groups, width)
    v = (x @ layer.v_proj.weight.T).view(batch, steps, 3, groups, value_width)
    gates = torch.sigmoid(x @ layer.gate.weight.T + layer.gate.bias).view(batch, steps, 3, groups, heads)

    def turn(t, position):
        return t if layer.rope is None else rotated(t, position, layer.rope)

    def compressed(module, rows):
        hidden = torch.nn.functional.silu((rows + module.position).flatten() @ module.inner.weight.T)
        return rows.mean(0) + hidden @ module.outer.weight.T

    def attend(query, keys, values):
        if not keys:
            return query.new_zeros((heads, value_width)), None
        p = torch.softmax(scale * query @ torch.stack(keys).T, 1)
        return p @ torch.stack(values), p

    out = []
    for b in range(batch):
        for t in range(steps):
            mixed = []
            for g in range(groups):
                starts = range(0, t + 2 - length, stride)
                k_c = [compressed(layer.compress_k, k[b, i : i + length, 0, g]) for i in starts]
                v_c = [compressed(layer.compress_v, v[b, i : i + length, 0, g]) for i in starts]
                o_c, p = attend(q[b, t, g], k_c, v_c)
                own = t // block
                score = [0.0] * (own + 1)
                for i, start in enumerate(starts):
                    for unit in range(start, start + length, stride):
                        score[unit // block] += float(p[:, i].sum())
                fixed = {0, own, max(own - 1, 0)}
                rest = sorted((j for j in range(own + 1) if j not in fixed), key=lambda j: -score[j])
                chosen = fixed | set(rest[: max(layer.top_k - len(fixed), 0)])
                turned = turn(q[b, t, g], t)
                near = [s for j in sorted(chosen) for s in range(j * block, min((j + 1) * block, t + 1))]
                o_s, _ = attend(turned, [turn(k[b, s, 1, g], s) for s in near], [v[b, s, 1, g] for s in near])
                near = range(max(0, t + 1 - layer.window), t + 1)
                o_w, _ = attend(turned, [turn(k[b, s, 2, g], s) for s in near], [v[b, s, 2, g] for s in near])
                mixed.append(sum(gates[b, t, n, g, :, None] * o for n, o in enumerate((o_c, o_s, o_w))))
            out.append(torch.stack(mixed).flatten() @ layer.o_proj.weight.T)
    return torch.stack(out).view(batch, steps, -1)


CASES = {
    "plain": {},
    "rope": {"rope": 100.0},
    "value_dim": {"value_dim": 5},
    "one_stride": {"compress": 4, "stride": 4},
    "long_blocks_compressed": {"compress": 16, "stride": 4, "block_size": 4, "top_k": 5},
    "one_head_a_group": {"heads": 2},
}


@pytest.mark.parametrize(
    ("case", "steps"), [*[(c, 45) for c in CASES], *[("rope", n) for n in (1, 7, 8)], ("long_blocks_compressed", 15)]
)
def test_the_layer_query_by_query(case, steps):
    layer = layer_of(**CASES[case])
    x = torch.randn(1 if steps == 45 else 2, steps, 24, dtype=F64)
    assert error(layer(x).detach(), naive(layer, x).detach()) < 1e-10


def test_gradients_of_the_layer_reach_every_parameter():
    layer = layer_of(rope=100.0)
    x = torch.randn(1, 40, 24, dtype=F64, requires_grad=True)
    up = torch.randn(1, 40, 24, dtype=F64)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    got = torch.autograd.grad(layer(x), (x, *parameters), up)
    want = torch.autograd.grad(naive(layer, x), (x, *parameters), up)
    for name, g, w in zip(("x", *names), got, want, strict=True):
        assert w.norm() > 0 and error(g, w) < 1e-9, name
    assert len(names) == 4 + 2 + 2 * 3


def test_the_future_changes_nothing():
    layer = layer_of(rope=100.0)
    x = torch.randn(1, 40, 24, dtype=F64)
    y = layer(x)
    for t in (1, 7, 8, 23, 39):
        other = x.clone()
        other[:, t:] = torch.randn(1, 40 - t, 24, dtype=F64)
        assert error(layer(other)[:, :t], y[:, :t]) < 1e-12
        assert error(layer(x[:, :t]), y[:, :t]) < 1e-12
        assert not torch.allclose(layer(other)[:, t:], y[:, t:])


PARTS = [(20, *[1] * 25), (1, 3, 9, 32), (45,), (7, 1, 37)]


@pytest.mark.parametrize(
    ("case", "parts"), [*[("rope", p) for p in PARTS], *[(c, p) for c in CASES if c != "rope" for p in PARTS[1::2]]]
)
def test_the_cache_continues_a_sequence(case, parts):
    layer = layer_of(**CASES[case])
    x = torch.randn(2, 45, 24, dtype=F64)
    cache, out = None, []
    for part in x.split(parts, 1):
        y, cache = layer(part, cache, return_cache=True)
        out.append(y)
    assert error(torch.cat(out, 1), layer(x)) < 1e-10
    assert cache.k.shape[2] == 45 and cache.k_window.shape[2] == layer.window - 1
    assert cache.k_compressed.shape[2] == (45 - layer.compress_k.length) // layer.compress_k.stride + 1


def test_selected_blocks_hold_the_fixed_three_and_nothing_ahead():
    layer = layer_of()
    blocks = layer.selected_blocks(torch.randn(2, 45, 24, dtype=F64))
    assert blocks.shape == (2, 45, 2, 4)
    for t in range(45):
        own = t // 8
        for row in blocks[:, t].flatten(0, 1).tolist():
            named = [j for j in row if j >= 0]
            assert len(named) == min(4, own + 1) and {0, own, max(own - 1, 0)} <= set(named) and max(named) == own


def test_memory_is_not_quadratic(monkeypatch):
    """Checks that no tensor of S * S_kv elements is made, nor one of S times the compressed keys times heads."""
    from test_reference_selection import Largest

    from mhc_inductor.reference import selection as reference

    monkeypatch.setattr(reference, "CHUNK", 2**15)
    monkeypatch.setattr(selection_blocks, "CHUNK", 2**15)
    layer = layer_of(F32, heads=2, groups=1)
    steps = 1024
    x = torch.randn(1, steps, 24)
    with Largest() as largest:
        layer(x).sum().backward()
    assert largest.numel < steps * (steps // 4)  # the limit is S times the compressed keys, for one head


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_low_precision_trains(dtype):
    layer = layer_of(dtype, rope=1e4)
    x = torch.randn(2, 30, 24, dtype=dtype)
    y = layer(x)
    assert y.dtype is dtype and y.isfinite().all()
    y.float().square().mean().backward()
    assert all(p.grad.isfinite().all() and p.grad.norm() > 0 for p in layer.parameters())
    if dtype is F32:
        wide = copy.deepcopy(layer).double()
        assert error(y, wide(x.double())) < 1e-5


def test_autocast_runs_the_projections_in_bfloat16():
    layer = layer_of(F32)
    x = torch.randn(2, 30, 24)
    plain = layer(x)
    with torch.autocast("cpu", BF16):
        y = layer(x)
    assert y.dtype is BF16 and error(y, plain) < 0.1


def test_the_layer_compiles_once_for_every_length(fresh):
    layer = layer_of(F32, rope=1e4)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for n, steps in enumerate((30, 45, 101)):
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            x = torch.randn(2, steps, 24, requires_grad=True)
            up = torch.randn(2, steps, 24)
            parameters = (x, *layer.parameters())
            y = compiled(x)
            got = torch.autograd.grad(y, parameters, up)
            want_y = layer(x)
            want = torch.autograd.grad(want_y, parameters, up)
            assert error(y.detach(), want_y.detach()) < 1e-5
            assert all(error(g, w) < 1e-4 for g, w in zip(got, want, strict=True))


def test_decoding_compiles(fresh):
    layer = layer_of(F32).eval()
    step = torch.compile(layer, fullgraph=True, dynamic=True)
    x = torch.randn(1, 40, 24)
    with torch.no_grad():
        want = layer(x)
        _, cache = layer(x[:, :30], return_cache=True)
        for t in range(30, 40):
            y, cache = step(x[:, t : t + 1], cache, return_cache=True)
            assert error(y, want[:, t : t + 1]) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": 4}, "heads must be a multiple of groups = 4, got 6"),
        ({"compress": 6}, "compress must be a multiple of stride = 4, got 6"),
        ({"block_size": 9}, "block_size must be a multiple of stride = 4, got 9"),
        ({"top_k": 2}, "top_k must be at least 3"),
        ({"head_dim": 5, "rope": 10.0}, "head_dim must be even with rope, got 5"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"heads": 0}, "heads must be at least 1, got 0"),
    ],
)
def test_bad_sizes_are_named(change, message):
    with pytest.raises(ValueError, match="NativeSparseAttention: " + message):
        layer_of(**change)


def test_bad_input_of_the_layer_is_named():
    with pytest.raises(ValueError, match=r"x must have shape \[B, S, dim\] = \[B, S, 24\], got \[2, 5, 23\]"):
        layer_of()(torch.zeros(2, 5, 23, dtype=F64))
    assert "top_k=4" in repr(layer_of()) and "stride=4" in repr(layer_of())
