# SPDX-License-Identifier: Apache-2.0
"""Selection attention and blocks: scale, lse, segments, blocks, compilation. The contract is in ``test_ops_contract.py``."""

from __future__ import annotations

import math

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import mhc_inductor
from mhc_inductor.ops import registry
from mhc_inductor.reference import selection as reference
from tests.oracles.selection import (
    NAMES,
    OUTPUTS,
    WANTED,
    block_picks,
    check,
    error,
    make_inputs,
    oracle,
    selection_of,
    upstream,
)

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
I32 = torch.int32
OPS = torch.ops.mhc_inductor
pytestmark = pytest.mark.usefixtures("one_thread")


# --- values and gradients of the public function ------------------------------------------------------------


def public(inputs, up, attention=mhc_inductor.selection_attention, **options):
    """Returns selection_attention's outputs and autograd's gradients, under the oracle's names."""
    leaf = dict(inputs)
    for name in WANTED:
        if leaf[name] is not None:
            leaf[name] = leaf[name].detach().requires_grad_()
    out = dict(zip(OUTPUTS, attention(**leaf, return_lse=True, **options), strict=True))
    wanted = {k: leaf[k] for k in WANTED if leaf[k] is not None}
    grads = torch.autograd.grad([out[k] for k in up], list(wanted.values()), list(up.values()))
    return {k: t.detach() for k, t in out.items()} | {f"d{k}": g for k, g in zip(wanted, grads, strict=True)}


@pytest.mark.parametrize("width", [1, 3, 600])
def test_any_width(width):
    inputs = make_inputs("odd", F32, S=3, Dk=width, Dv=width + 1)
    up = upstream(inputs)
    check(public(inputs, up), inputs, up)


def test_the_scale_is_one_over_the_root_of_Dk_unless_given():
    inputs = make_inputs("odd", F64, Dk=9, Dv=4)
    plain = mhc_inductor.selection_attention(**inputs)
    assert error(plain, oracle(inputs)["o"]) < 1e-12
    assert torch.equal(plain, mhc_inductor.selection_attention(**inputs, scale=1 / 3))
    assert error(mhc_inductor.selection_attention(**inputs, scale=2), oracle(inputs, scale=2.0)["o"]) < 1e-12


def test_lse_is_over_the_selected_keys_only():
    inputs = make_inputs("odd", F32, sink=True)
    o, lse = mhc_inductor.selection_attention(**inputs, return_lse=True)
    without = mhc_inductor.selection_attention(**{**inputs, "sink": None}, return_lse=True)
    assert torch.equal(lse, without[1]) and lse.dtype is F32
    total = torch.logaddexp(lse, inputs["sink"])
    assert error(o, without[0] * torch.exp(lse - total)[..., None]) < 1e-6
    assert isinstance(mhc_inductor.selection_attention(**inputs), torch.Tensor)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_equal_to_gathered_dense_attention(dtype):
    """Compares with token-level selection by gather and scaled_dot_product_attention."""
    inputs = make_inputs("token", dtype, S=12, S_kv=64, r=16, Dk=16)
    keys = torch.stack([torch.randperm(64)[:16] for _ in range(2 * 12 * 2)]).view(2, 12, 2, 16)
    inputs["ranges"] = torch.stack((keys, keys + 1), -1)
    at = keys.transpose(1, 2).flatten(2)[..., None].expand(-1, -1, -1, 16)  # [B, G, S*16, D]
    k, v = (inputs[n].gather(2, at).unflatten(2, (12, 16)).transpose(1, 2) for n in ("k", "v"))
    want = torch.nn.functional.scaled_dot_product_attention(inputs["q"].double(), k.double(), v.double())
    assert error(mhc_inductor.selection_attention(**inputs), want) < 2 * torch.finfo(dtype).eps + 1e-6


# --- segment ids --------------------------------------------------------------------------------------------


def test_a_wildcard_counts_for_keys_only():
    inputs = make_inputs("all", F32, B=1, S=3, S_kv=4, r=1)
    inputs["segments_q"] = torch.tensor([[5, mhc_inductor.ANY_SEGMENT, 6]])
    inputs["segments_k"] = torch.tensor([[5, mhc_inductor.ANY_SEGMENT, 7, 5]], dtype=I32)
    assert [selection_of(inputs, 0, s, 0) for s in range(3)] == [[0, 1, 3], [1], [1]]
    up = upstream(inputs)
    check(public(inputs, up), inputs, up)


def test_a_query_without_keys_of_its_segment_gives_zero():
    inputs = make_inputs("all", F32, S=4, S_kv=6, sink=True)
    inputs |= {"segments_q": torch.full((2, 4), 3), "segments_k": torch.zeros(2, 6, dtype=torch.int64)}
    got = public(inputs, upstream(inputs))
    assert (got.pop("lse") == -math.inf).all() and not any(t.any() for t in got.values())


def test_nan_in_keys_of_other_segments_does_not_leak():
    inputs = make_inputs("odd", F32, S=12, S_kv=40, size=20, segments="mixed")
    up = upstream(inputs)
    unseen = inputs["segments_k"] == 2
    inputs["segments_q"][inputs["segments_q"] == 2] = 1
    want = public(inputs, up)
    for where in ("k", "v"):
        inputs[where] = torch.where(unseen[:, None, :, None], math.nan, inputs[where])
    got = public(inputs, up)
    assert all(torch.equal(got[k], want[k]) for k in want)


def test_segments_are_packed_sequences():
    """Compares segments = the number of the sequence with cu_seqlens, whose ranges count from its own start."""
    lengths, S = (5, 3, 8), 16
    inputs = make_inputs("all", F64, B=1, S=S, S_kv=S, r=1, sink=True)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    segmented = mhc_inductor.selection_attention(**inputs, segments_q=ids, segments_k=ids)
    packed_inputs = {**inputs, "cu_seqlens_q": torch.tensor([0, 5, 8, 16])}
    assert error(segmented, mhc_inductor.selection_attention(**packed_inputs)) < 1e-12


# --- block_indices ------------------------------------------------------------------------------------------


def by_definition(picks, size, s_kv, causal):
    """Returns the keys of each query as sets."""
    batch, steps, groups, _ = picks.shape
    found = {}
    for b in range(batch):
        for s in range(steps):
            for g in range(groups):
                limit = s_kv - steps + s + 1 if causal else s_kv
                found[b, s, g] = {
                    p for i in picks[b, s, g].tolist() if i >= 0 for p in range(i * size, min((i + 1) * size, limit))
                }
    return found


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_lengths", [None, (9, 3, 0, 5)], ids=["same", "other"])
def test_blocks_of_packed_sequences(key_lengths, causal):
    lengths, size = (6, 0, 3, 4), 2
    keys = lengths if key_lengths is None else key_lengths
    S = 13 if key_lengths is None else 15  # two queries belong to no sequence
    cu_q, cu_k = (torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()]) for n in (lengths, keys))
    picks = torch.randint(-1, 5, (1, S, 2, 3), generator=torch.Generator().manual_seed(0))
    inputs = make_inputs("none", F32, B=1, S=S, S_kv=sum(keys), lengths=lengths, key_lengths=key_lengths)
    ranges = mhc_inductor.blocks_to_ranges(
        picks, size, sum(keys), causal=causal, cu_seqlens_q=cu_q, cu_seqlens_k=None if key_lengths is None else cu_k
    )
    inputs["ranges"] = ranges
    for n, (count, count_k) in enumerate(zip(lengths, keys, strict=True)):
        rows = slice(int(cu_q[n]), int(cu_q[n]) + count)
        want = by_definition(picks[:, rows], size, count_k, causal)
        for s in range(count):
            for g in range(2):
                got = selection_of(inputs, 0, rows.start + s, g)
                assert got == sorted(p + int(cu_k[n]) for p in want[0, s, g] if p < count_k)
    up = upstream(inputs)
    check(public(inputs, up), inputs, up)


def test_blocks_through_the_op():
    picks, _ = block_picks("corr", 2, 40, 2, 40, size=8, k=4)
    picks[:, 3] = -1
    picks[..., 3] = picks[..., 1]  # the same block twice
    inputs = make_inputs("none", F32, S=40, S_kv=40)
    inputs["ranges"] = mhc_inductor.blocks_to_ranges(picks, 8, 40)
    up = upstream(inputs)
    got = public(inputs, up)
    check(got, inputs, up)
    assert not got["o"][:, 3].any()
    one_key = mhc_inductor.blocks_to_ranges(torch.zeros(1, 1, 1, 1, dtype=torch.int64), 8, 40)
    assert one_key.tolist() == [[[[[0, 8]]]]]  # decoding: the query is the last of 40 positions


BLOCKS = {"block_indices": torch.zeros(1, 4, 2, 1, dtype=torch.int64), "block_size": 4, "S_kv": 8}
CU = torch.zeros(4, dtype=I32)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"block_indices": torch.zeros(1, 2, 3)}, TypeError, "int32 or int64"),
        ({"block_indices": torch.zeros(1, 2, 3).long()}, ValueError, r"shape \[B, S, G, k\], got \[1, 2, 3\]"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
        ({"S_kv": -1}, ValueError, "S_kv must be at least 0, got -1"),
        ({"S_kv": 2**31}, ValueError, r"S_kv must be below 2\*\*31"),
        ({"cu_seqlens_k": CU}, ValueError, "cu_seqlens_k must be None where cu_seqlens_q is"),
        ({"cu_seqlens_q": torch.zeros(3)}, TypeError, "cu_seqlens_q must be int32 or int64, got torch.float32"),
        ({"cu_seqlens_q": CU[:0]}, ValueError, r"cu_seqlens_q must have shape \[N\+1\], got \[0\]"),
        ({"cu_seqlens_q": CU[:3], "cu_seqlens_k": CU}, ValueError, r"cu_seqlens_q's shape \[3\], got \[4\]"),
    ],
)
def test_bad_blocks_are_named(change, kind, message):
    with pytest.raises(kind, match="blocks_to_ranges: .*" + message):
        mhc_inductor.blocks_to_ranges(**{**BLOCKS, **change})


# --- torch.func, autocast, determinism ----------------------------------------------------------------------


def test_jacrev():
    inputs = make_inputs("all", B=1, S=2, G=1, h=1, Dk=2, S_kv=3)
    fn = lambda q: mhc_inductor.selection_attention(**{**inputs, "q": q})  # noqa: E731
    jac = torch.func.jacrev(fn)(inputs["q"])
    assert jac.shape == (1, 2, 1, 1, 2, 1, 2, 1, 1, 2)
    assert float(jac[0, 0, 0, 0, :, 0, 1].norm()) == 0 and float(jac[0, 1, 0, 0, :, 0, 1].norm()) > 0


# --- compilation --------------------------------------------------------------------------------------------


def test_blocks_compile_with_the_op(fresh):
    @torch.compile(fullgraph=True, dynamic=True)
    def attend(q, k, v, picks):
        return mhc_inductor.selection_attention(q, k, v, mhc_inductor.blocks_to_ranges(picks, 8, k.shape[2]))

    for n, (s, s_kv) in enumerate(((20, 33), (5, 40), (41, 47))):
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            picks, _ = block_picks("rand", 2, s, 2, s_kv, size=8, k=4)
            inputs = make_inputs("none", F32, S=s, S_kv=s_kv)
            inputs["ranges"] = mhc_inductor.blocks_to_ranges(picks, 8, s_kv)
            got = attend(inputs["q"], inputs["k"], inputs["v"], picks)
            assert error(got, oracle(inputs)["o"]) < 1e-6


@pytest.mark.parametrize("segments", [None, "mixed"])
@pytest.mark.parametrize(("s", "s_kv", "calls"), [(20, 33, False), (600, 900, True)])
def test_on_a_cpu_inductor_fuses_what_is_small(s, s_kv, calls, segments, fresh, vectorised):
    """Checks that up to 2**20 scores compile to one formula, in training too, and more scores to calls of the op."""
    inputs = make_inputs("odd", F32, S=s, S_kv=s_kv, sink=True, segments=segments)
    up = upstream(inputs)
    attention = torch.compile(mhc_inductor.selection_attention, fullgraph=True)
    got, codes = run_and_get_code(lambda: public(inputs, up, attention))
    assert len(codes) == 2
    called = ("selection_attention.default(", "selection_attention_backward.default(")
    assert [name in code for name, code in zip(called, codes, strict=True)] == [calls, calls]
    want = public(inputs, up)
    assert all(error(got[k], want[k]) < 1e-5 for k in want)


def test_compiled_keys_that_are_not_selected_do_not_leak(fresh):
    inputs = make_inputs("odd", F32, S=9, S_kv=20)
    inputs["ranges"] = inputs["ranges"].clamp(3, 15)
    up = upstream(inputs)
    want = public(inputs, up)
    for where in ("k", "v"):
        inputs[where] = inputs[where].clone()
        inputs[where][:, :, :3], inputs[where][:, :, 15:] = math.nan, math.inf
    got = public(inputs, up, torch.compile(mhc_inductor.selection_attention, fullgraph=True))
    assert all(error(got[k], want[k]) < 1e-5 for k in want)


def test_a_scale_of_dynamic_sizes_is_one_number(fresh):
    graphs = []

    def backend(module, example):
        graphs.append(module)
        return module

    q, k, v, ranges, *_ = make_inputs("odd", F32, B=3, G=4, h=5, S=6, S_kv=9).values()
    torch.compile(mhc_inductor.selection_attention, backend=backend, fullgraph=True, dynamic=True)(q, k, v, ranges)
    (node,) = [n for n in graphs[0].graph.nodes if n.target is OPS.selection_attention.default]
    assert node.args[-1] == 1 / math.sqrt(8)


def test_export(fresh):
    class Attend(torch.nn.Module):
        def forward(self, q, k, v, ranges):
            return mhc_inductor.selection_attention(q, k, v, ranges)

    inputs = make_inputs("odd", F32)
    args = [inputs[n] for n in NAMES[:4]]
    s = torch.export.Dim("s", min=2, max=1000)
    program = torch.export.export(Attend(), tuple(args), dynamic_shapes=({1: s}, None, None, {1: s}))
    assert "mhc_inductor.selection_attention.default" in program.graph_module.code
    other = make_inputs("odd", F32, S=11, S_kv=12)
    args = [other[n] for n in NAMES[:4]]
    assert torch.equal(program.module()(*args), mhc_inductor.selection_attention(*args))


# --- bad input ----------------------------------------------------------------------------------------------


def test_odd_ranges_are_accepted():
    inputs = make_inputs("odd", F32, S=3, S_kv=5, Dk=4, r=2, sink=True)
    inputs["ranges"] = torch.tensor([[5, 2], [-9, 99]], dtype=I32).expand(2, 3, 2, 2, 2)
    everything = {**inputs, "ranges": torch.tensor([[0, 5]], dtype=I32).expand(2, 3, 2, 1, 2)}
    assert error(mhc_inductor.selection_attention(**inputs), oracle(everything)["o"]) < 1e-6
    for ranges in (torch.zeros_like(inputs["ranges"]), inputs["ranges"].flip(-1) + 100):
        got = mhc_inductor.selection_attention(**{**inputs, "ranges": ranges}, return_lse=True)
        assert not got[0].any() and (got[1] == -math.inf).all()


def test_the_reference_is_the_specification():
    assert registry.REFERENCE["selection_attention"] is reference.selection_attention
    assert registry.REFERENCE["selection_attention_backward"] is reference.selection_attention_backward
