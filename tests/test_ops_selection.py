# SPDX-License-Identifier: Apache-2.0
"""Selection attention's ops and public functions: opcheck, gradients, validation, vmap, autocast, compilation."""

from __future__ import annotations

import math

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.func import grad, vmap
from torch.library import opcheck

import mhc_inductor
from mhc_inductor.ops import registry
from mhc_inductor.reference import selection as reference
from tests.oracles.mhc import relative
from tests.oracles.op_contract import check_outputs, op, strided, trainable
from tests.oracles.selection import (
    MISTAKES,
    NAMES,
    OUTPUTS,
    WANTED,
    block_picks,
    check,
    error,
    make_inputs,
    oracle,
    positional,
    run,
    selection_of,
    upstream,
)
from tests.tools.deterministic import deterministic_algorithms

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OPS = torch.ops.mhc_inductor
pytestmark = pytest.mark.usefixtures("one_thread")
PACKED = {"B": 1, "S": 9, "S_kv": 9, "lengths": (4, 0, 3)}


# --- samples of both ops ------------------------------------------------------------------------------------


def attention_sample(**kwargs):
    return positional(make_inputs(**{"kind": "empty", "dtype": F32, "S": 5, "h": 2, "Dk": 4, **kwargs}), 0.5)


def backward_sample(drop=(), **kwargs):
    args = attention_sample(**kwargs)
    o, lse = OPS.selection_attention(*args)
    ups = [None if k in drop else torch.randn_like(o) if k == 0 else torch.randn_like(lse) for k in range(2)]
    return (*ups, *args[:7], o, lse, *args[7:])


VARIANTS = {
    "plain": {},
    "sink": {"sink": True},
    "fp64": {"dtype": F64, "sink": True},
    "bf16_int64": {"dtype": BF16, "sink": True, "range_dtype": torch.int64},
    "bf16_sink": {"dtype": F16, "sink": True, "sink_dtype": BF16},
    "packed": PACKED,
    "packed_keys": {**PACKED, "S_kv": 11, "key_lengths": (6, 1, 4), "sink": True},
    "Dk_not_Dv": {"Dv": 3, "strided": True},
    "one_query": {"S": 1, "S_kv": 9},
    "no_ranges": {"r": 0},
    "segments": {"S_kv": 21, "segments": "mixed", "sink": True},
    "packed_segments": {**PACKED, "segments": "mixed", "segment_dtype": torch.int64},
}
SAMPLES = [
    *[pytest.param("selection_attention", attention_sample, v, id=f"forward-{k}") for k, v in VARIANTS.items()],
    *[
        pytest.param("selection_attention_backward", backward_sample, v, id=f"backward-{k}")
        for k, v in {**VARIANTS, "no_do": {"drop": (0,)}, "no_dlse": {"drop": (1,), "sink": True}}.items()
    ],
]


@pytest.mark.parametrize(("name", "sample", "variant"), SAMPLES)
def test_opcheck(name, sample, variant):
    args = sample(**variant)
    # The backward op raises when differentiated, by design.
    opcheck(op(name), args if name.endswith("_backward") else trainable(args))


@pytest.mark.parametrize(("name", "sample", "variant"), SAMPLES)
def test_outputs_are_fresh_contiguous_and_as_the_fake_says(name, sample, variant):
    check_outputs(name, sample(**variant), error)


def test_every_op_is_sampled():
    assert {p.values[0] for p in SAMPLES} == {
        name for name in registry.REFERENCE if name.startswith("selection_attention")
    }


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


@pytest.mark.parametrize("names", [("o",), ("lse",), OUTPUTS], ids="-".join)
@pytest.mark.parametrize("case", MISTAKES)
def test_gradients_against_fp64(case, names):
    inputs = make_inputs(dtype=F32, **MISTAKES[case])
    up = upstream(inputs, names)
    check(public(inputs, up), inputs, up)


@pytest.mark.parametrize("width", [1, 3, 600])
def test_any_width(width):
    inputs = make_inputs("odd", F32, S=3, Dk=width, Dv=width + 1)
    up = upstream(inputs)
    check(public(inputs, up), inputs, up)


def test_more_heads_than_the_kernels_take():
    inputs = make_inputs("odd", BF16, S=2, h=70, G=1)
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


@pytest.mark.parametrize("name", WANTED)
def test_only_the_wanted_gradient(name):
    inputs = make_inputs("odd", F64, sink=True)
    up = upstream(inputs)
    every = public(inputs, up)
    one = {**inputs, name: inputs[name].detach().requires_grad_()}
    out = dict(zip(OUTPUTS, mhc_inductor.selection_attention(**one, return_lse=True), strict=True))
    sum((out[k] * up[k]).sum() for k in OUTPUTS).backward()
    assert error(one[name].grad, every[f"d{name}"]) < 1e-12
    assert all(inputs[k].grad is None for k in WANTED)


def test_double_backward_is_refused_never_zero():
    inputs = make_inputs("odd")
    q = inputs["q"].requires_grad_()
    (first,) = torch.autograd.grad(mhc_inductor.selection_attention(**inputs).square().sum(), q, create_graph=True)
    assert first.requires_grad
    with pytest.raises(RuntimeError, match=r"double backward is not supported.*"):
        first.square().sum().backward()


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


def test_ids_that_differ_beyond_32_bits_differ():
    inputs = make_inputs("all", F32, B=1, S=2, S_kv=4, r=1)
    inputs["segments_q"] = torch.tensor([[2**40, 2**40 + 2**32]])
    inputs["segments_k"] = torch.tensor([[2**40, 2**40 + 2**32, 2**40, -(2**31) + 2**32]])
    assert [selection_of(inputs, 0, s, 0) for s in range(2)] == [[0, 2], [1]]
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
@pytest.mark.parametrize(("s", "s_kv", "size"), [(9, 9, 4), (1, 21, 8), (3, 50, 7), (6, 2, 1), (4, 0, 5)])
def test_blocks_to_ranges(s, s_kv, size, causal):
    g = torch.Generator().manual_seed(s)
    picks = torch.randint(-1, s_kv // size + 2, (2, s, 2, 5), generator=g)
    picks[0, 0] = torch.tensor([2**40, -(2**62), -1, 0, 0])
    ranges = mhc_inductor.blocks_to_ranges(picks, size, s_kv, causal=causal)
    assert ranges.shape == (2, s, 2, 5, 2) and ranges.dtype is torch.int32
    assert int(ranges.min()) >= 0 and int(ranges.max()) <= s_kv if ranges.numel() else True
    picks = picks.clamp(max=s_kv)
    for (b, t, group), want in by_definition(picks, size, s_kv, causal).items():
        assert {p for a, z in ranges[b, t, group].tolist() for p in range(a, z)} == {p for p in want if p < s_kv}


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


@pytest.mark.parametrize(
    ("args", "kind", "message"),
    [
        ((torch.zeros(1, 2, 3), 4, 8), ValueError, "int32 or int64"),
        ((torch.zeros(1, 2, 3, dtype=torch.int64), 4, 8), ValueError, r"shape \[B, S, G, k\], got \[1, 2, 3\]"),
        ((torch.zeros(1, 2, 3, 1, dtype=torch.int64), 0, 8), ValueError, "block_size must be at least 1, got 0"),
        ((torch.zeros(1, 2, 3, 1, dtype=torch.int64), 4, -1), ValueError, "S_kv must be at least 0, got -1"),
        ((torch.zeros(1, 2, 3, 1, dtype=torch.int64), 4, 2**31), ValueError, r"S_kv must be below 2\*\*31"),
        ((torch.zeros(1, 2, 3, 1, dtype=torch.int64), 4.0, 8), TypeError, "block_size must be an int, got float"),
        ((torch.zeros(1, 2, 3, 1, dtype=torch.int64), True, 8), TypeError, "block_size must be an int, got bool"),
        (([[0]], 4, 8), TypeError, "block_indices must be a tensor, got list"),
    ],
)
def test_bad_blocks_are_named(args, kind, message):
    kind = TypeError if "int32" in message else kind
    with pytest.raises(kind, match="blocks_to_ranges: .*" + message):
        mhc_inductor.blocks_to_ranges(*args)


# --- torch.func, autocast, determinism ----------------------------------------------------------------------


def batches(name, sample, variant, batched):
    """Returns three samples, stacked in varying dimensions where ``batched(position)``, and the results one by one."""
    rows = []
    for k in range(3):
        torch.manual_seed(k)
        rows.append(list(sample(**{**variant, "seed": k})))
    in_dims = tuple(
        k % (a.dim() + 1) if isinstance(a, torch.Tensor) and batched(k) else None for k, a in enumerate(rows[0])
    )
    for row in rows[1:]:
        for k, dim in enumerate(in_dims):
            if dim is None:
                row[k] = rows[0][k]
    stacked = [
        a if d is None else torch.stack([r[k] for r in rows], d)
        for k, (a, d) in enumerate(zip(rows[0], in_dims, strict=True))
    ]
    out = [op(name)(*row) for row in rows]
    return stacked, in_dims, [torch.stack(column) for column in zip(*out, strict=True)]


BATCHED = {
    "all": lambda k: True,
    "even": lambda k: k % 2 == 0,
    "odd": lambda k: k % 2 == 1,
    "inputs": lambda k: k in (0, 1, 2, 3),
    "shared_sink": lambda k: k not in (4, 6),
}


@pytest.mark.parametrize("which", BATCHED)
@pytest.mark.parametrize(("name", "sample", "variant"), SAMPLES)
def test_vmap_equals_a_loop(name, sample, variant, which):
    stacked, in_dims, want = batches(name, sample, variant, BATCHED[which])
    if all(d is None for d in in_dims):
        pytest.fail("no argument has a batch")
    got = vmap(op(name), in_dims=in_dims)(*stacked)
    for g, w in zip(got, want, strict=True):
        if g.numel() or w.numel():
            assert g.dtype is w.dtype and error(g, w) < (2e-2 if g.dtype in (BF16, F16) else 1e-5)


def loss_of(q, k, v, sink, ranges):
    o, lse = mhc_inductor.selection_attention(q, k, v, ranges, sink=sink, return_lse=True)
    weight = lambda t: torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view_as(t)  # noqa: E731
    return (o * weight(o)).sum() + (lse * weight(lse)).sum()


@pytest.mark.parametrize("names", [("q",), ("k", "v"), ("sink",), WANTED], ids="-".join)
def test_grad_under_vmap_equals_a_loop(names):
    rows = [make_inputs("all", sink=True, seed=k) for k in range(3)]
    ranges = rows[0]["ranges"]
    dims = tuple(0 if k in names else None for k in WANTED)
    args = [torch.stack([r[n] for r in rows]) if d == 0 else rows[0][n] for n, d in zip(WANTED, dims, strict=True)]
    got = vmap(grad(loss_of, argnums=(0, 1, 2, 3)), in_dims=(*dims, None))(*args, ranges)
    for k in range(3):
        leaf = [(a if d is None else a[k]).detach().requires_grad_() for a, d in zip(args, dims, strict=True)]
        for g, w in zip(got, torch.autograd.grad(loss_of(*leaf, ranges), leaf), strict=True):
            assert relative(g[k], w) < 1e-12


def test_grad_of_vmap_sums_over_what_is_shared():
    q, k, v, ranges, sink, *_ = make_inputs("all", sink=True).values()
    qs = torch.randn(3, *q.shape, dtype=F64)
    for n, shared in enumerate((k, v, sink)):
        args = [k, v, sink]
        fn = lambda p, n=n: vmap(lambda t: loss_of(t, *args[:n], p, *args[n + 1 :], ranges))(qs).sum()  # noqa: B023, E731
        want = sum(grad(loss_of, argnums=n + 1)(t, *args, ranges) for t in qs)
        assert relative(grad(fn)(shared), want) < 1e-12


def test_jacrev_and_refused_second_derivative():
    inputs = make_inputs("all", B=1, S=2, G=1, h=1, Dk=2, S_kv=3)
    fn = lambda q: mhc_inductor.selection_attention(**{**inputs, "q": q})  # noqa: E731
    jac = torch.func.jacrev(fn)(inputs["q"])
    assert jac.shape == (1, 2, 1, 1, 2, 1, 2, 1, 1, 2)
    assert float(jac[0, 0, 0, 0, :, 0, 1].norm()) == 0 and float(jac[0, 1, 0, 0, :, 0, 1].norm()) > 0
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        grad(lambda q: grad(lambda t: fn(t).square().sum())(q).sum())(inputs["q"])


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_autocast_inserts_no_casts(dtype):
    inputs = make_inputs("odd", dtype, sink=True)
    up = upstream(inputs)
    plain = public(inputs, up)
    with torch.autocast("cpu", BF16):
        cast = public(inputs, up)
    assert all(plain[k].dtype is cast[k].dtype and torch.equal(plain[k], cast[k]) for k in plain)


def test_equal_inputs_give_equal_bits_and_are_not_written():
    inputs = make_inputs("odd", BF16, S=40, S_kv=40, h=16, sink=True)
    kept = {k: t.clone() for k, t in inputs.items() if t is not None}
    up = upstream(inputs)
    with deterministic_algorithms():
        one, two = public(inputs, up), public(inputs, up)
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert all(torch.equal(inputs[k], kept[k]) for k in kept)


def test_arguments_may_be_strided_and_overlapping():
    inputs = make_inputs("odd", F32, sink=True)
    up = upstream(inputs)
    want = public(inputs, up)
    got = public({k: strided(t) for k, t in inputs.items()}, up)
    assert all(error(got[k], want[k]) < 1e-5 for k in want)
    one = {
        **inputs,
        "k": inputs["k"][:1].expand(2, -1, -1, -1),
        "ranges": inputs["ranges"][:, :1].expand(-1, 7, -1, -1, -1),
    }
    whole = {k: None if t is None else t.contiguous() for k, t in one.items()}
    assert torch.equal(mhc_inductor.selection_attention(**one), mhc_inductor.selection_attention(**whole))


# --- compilation --------------------------------------------------------------------------------------------


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("backend", "case"),
    [("inductor", "packed_keys"), ("mhc_inductor", "plain"), ("mhc_inductor", "bf16_int64"), ("inductor", "segments")],
)
def test_compiled_equals_eager(backend, case, fresh):
    inputs = make_inputs(**{"kind": "empty", "dtype": F32, **VARIANTS[case]})
    up = upstream(inputs)
    attention = torch.compile(mhc_inductor.selection_attention, backend=backend, fullgraph=True)
    check(public(inputs, up, attention), inputs, up)
    with torch.no_grad():
        o = attention(**inputs)
    assert error(o, oracle(inputs)["o"]) < 1e-6 + torch.finfo(o.dtype).eps


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


# Dynamo takes sizes that are equal at first for one symbol, and the 2 of a range is constant.
SIZES = ((5, 7, 9, 6), (3, 2, 30, 2), (2, 40, 40, 7))


@pytest.mark.parametrize("segments", [None, "mixed"])
@pytest.mark.parametrize("grads", [True, False])
def test_one_trace_serves_every_size(grads, segments, fresh):
    traces = []

    def backend(module, example):
        traces.append(module)
        return module

    attention = torch.compile(mhc_inductor.selection_attention, backend=backend, fullgraph=True, dynamic=True)
    for b, s, s_kv, r in SIZES:
        inputs = make_inputs("odd", F32, B=b, S=s, S_kv=s_kv, r=r, G=3, h=4, segments=segments)
        inputs["q"].requires_grad_(grads)
        assert torch.equal(attention(**inputs), mhc_inductor.selection_attention(**inputs))
    assert len(traces) == 1


@pytest.mark.parametrize("segments", [None, "mixed"])
def test_dynamic_sizes_with_gradients_compile_once(segments, fresh):
    attention = torch.compile(mhc_inductor.selection_attention, fullgraph=True, dynamic=True)
    for k, (b, s, s_kv, r) in enumerate(SIZES):
        with torch._dynamo.config.patch(error_on_recompile=k > 0):
            inputs = make_inputs("odd", F32, B=b, S=s, S_kv=s_kv, r=r, G=3, h=4, sink=True, segments=segments)
            up = upstream(inputs)
            got, want = public(inputs, up, attention), public(inputs, up)
            assert all(error(got[k], want[k]) < 1e-5 for k in want)


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


def bad(**change):
    return {**make_inputs("odd", F32, S=3, S_kv=5, Dk=4, r=2, sink=True), **change}


def packed(**change):
    return {**make_inputs("odd", F32, B=1, S=4, S_kv=4, Dk=4, r=2, lengths=(2, 2)), **change}


def zeros(*shape, dtype=F32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


I32 = torch.int32
BAD = {
    "q_rank": (bad(q=zeros(2, 3, 6, 4)), ValueError, r"q must have shape \[B, S, G, h, Dk\], got \[2, 3, 6, 4\]"),
    "k_rank": (bad(k=zeros(2, 5, 4)), ValueError, r"k must have shape \[B, G, S_kv, Dk\], got \[2, 5, 4\]"),
    "k_width": (bad(k=zeros(2, 2, 5, 3)), ValueError, r"k must have shape \[B, G, S_kv, Dk\] = \[2, 2, 5, 4\]"),
    "k_groups": (bad(k=zeros(2, 5, 2, 4)), ValueError, r"k must have shape .* = \[2, 2, 2, 4\], got \[2, 5, 2, 4\]"),
    "v_rank": (bad(v=zeros(2, 2, 5, 4, 1)), ValueError, r"v must have shape \[B, G, S_kv, Dv\], got"),
    "v_length": (bad(v=zeros(2, 2, 6, 4)), ValueError, r"v must have shape \[B, G, S_kv, Dv\] = \[2, 2, 5, 4\]"),
    "v_width": (bad(v=zeros(2, 2, 5, 0)), ValueError, "Dv of at least 1"),
    "no_heads": (bad(q=zeros(2, 3, 2, 0, 4)), ValueError, "h of at least 1"),
    "no_width": (bad(q=zeros(2, 3, 2, 3, 0), k=zeros(2, 2, 5, 0)), ValueError, "Dk of at least 1"),
    "ranges_rank": (bad(ranges=zeros(2, 3, 2, 2, dtype=I32)), ValueError, r"ranges must have shape \[B, S, G, r, 2\]"),
    "ranges_pair": (bad(ranges=zeros(2, 3, 2, 2, 3, dtype=I32)), ValueError, r"= \[2, 3, 2, 2, 2\], got"),
    "ranges_groups_first": (bad(ranges=zeros(2, 2, 3, 2, 2, dtype=I32)), ValueError, r"= \[2, 3, 2, 2, 2\], got"),
    "ranges_dtype": (bad(ranges=zeros(2, 3, 2, 2, 2)), TypeError, "ranges must be int32 or int64, got torch.float32"),
    "ranges_int16": (bad(ranges=zeros(2, 3, 2, 2, 2, dtype=torch.int16)), TypeError, "ranges must be int32 or int64"),
    "mixed_dtypes": (bad(k=zeros(2, 2, 5, 4, dtype=BF16)), TypeError, "k must have q's dtype torch.float32, got"),
    "integers": (bad(q=zeros(2, 3, 2, 3, 4, dtype=I32)), TypeError, "q must be bfloat16, float16"),
    "sink_shape": (bad(sink=zeros(6)), ValueError, r"sink must have shape \[G, h\] = \[2, 3\], got \[6\]"),
    "sink_dtype": (bad(sink=zeros(2, 3, dtype=F64)), TypeError, "sink may be float64 only where q is"),
    "other_device": (bad(v=zeros(2, 2, 5, 4, device="meta")), ValueError, "v must be on q's device cpu, got meta"),
    "boundaries_of_a_batch": (bad(cu_seqlens_q=zeros(2, dtype=I32)), ValueError, "q must have a batch of 1"),
    "boundaries_of_keys_only": (
        packed(cu_seqlens_q=None, cu_seqlens_k=zeros(3, dtype=I32)),
        ValueError,
        "must be None",
    ),
    "boundaries_dtype": (packed(cu_seqlens_q=zeros(3)), TypeError, "cu_seqlens_q must be int32 or int64"),
    "boundaries_rank": (packed(cu_seqlens_q=zeros(1, 3, dtype=I32)), ValueError, r"shape \[N\+1\], got \[1, 3\]"),
    "no_boundaries": (packed(cu_seqlens_q=zeros(0, dtype=I32)), ValueError, r"shape \[N\+1\], got \[0\]"),
    "boundaries_of_keys": (packed(cu_seqlens_k=zeros(2, dtype=I32)), ValueError, "cu_seqlens_q's = "),
    "boundaries_for_other_keys": (
        packed(k=zeros(1, 2, 6, 4), v=zeros(1, 2, 6, 4)),
        ValueError,
        "cu_seqlens_k may be None only where",
    ),
    "segments_of_queries_only": (
        bad(segments_q=zeros(2, 3, dtype=I32), segments_k=None),
        ValueError,
        "segments_k must be given where segments_q is, got None",
    ),
    "segments_of_keys_only": (
        bad(segments_q=None, segments_k=zeros(2, 5, dtype=I32)),
        ValueError,
        "segments_q must be given where segments_k is, got None",
    ),
    "segments_of_queries": (
        bad(segments_q=zeros(2, 5, dtype=I32), segments_k=zeros(2, 5, dtype=I32)),
        ValueError,
        r"segments_q must have shape \[B, S\] = \[2, 3\], got \[2, 5\]",
    ),
    "segments_of_keys": (
        bad(segments_q=zeros(2, 3, dtype=I32), segments_k=zeros(1, 5, dtype=I32)),
        ValueError,
        r"segments_k must have shape \[B, S_kv\] = \[2, 5\], got \[1, 5\]",
    ),
    "segments_dtype": (
        bad(segments_q=zeros(2, 3, dtype=torch.int64), segments_k=zeros(2, 5)),
        TypeError,
        "segments_k must be int32 or int64, got torch.float32",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    inputs, kind, message = BAD[case]
    with pytest.raises(kind, match="selection_attention: .*" + message):
        mhc_inductor.selection_attention(**inputs)
    with pytest.raises(kind, match=message):
        OPS.selection_attention(*positional(inputs, 0.5))


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_by_the_fake(case, fresh):
    inputs, kind, message = BAD[case]
    if case != "other_device":
        with pytest.raises(kind, match=message):
            OPS.selection_attention(*positional({k: t if t is None else t.to("meta") for k, t in inputs.items()}, 0.5))
    if case in (
        "segments_of_keys_only",
        "segments_of_queries",
        "segments_dtype",
        "q_rank",
        "k_width",
        "ranges_dtype",
        "sink_shape",
        "other_device",
        "boundaries_of_keys",
    ):
        with pytest.raises(Exception, match=message):
            torch.compile(mhc_inductor.selection_attention, backend="aot_eager", fullgraph=True)(**inputs)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"scale": math.nan}, ValueError, "scale must be finite, got nan"),
        ({"scale": "1"}, TypeError, "scale must be a number, got str"),
        ({"scale": True}, TypeError, "scale must be a number, got bool"),
        ({"q": None}, TypeError, "q must be a tensor, got NoneType"),
        ({"ranges": [[0, 1]]}, TypeError, "ranges must be a tensor, got list"),
        ({"ranges": None}, TypeError, "ranges must be a tensor, got NoneType"),
        ({"sink": 0.0}, TypeError, "sink must be a tensor, got float"),
        ({"cu_seqlens_q": [0, 4]}, TypeError, "cu_seqlens_q must be a tensor, got list"),
        ({"segments_q": 1, "segments_k": 1}, TypeError, "segments_q must be a tensor, got int"),
    ],
    ids=str,
)
def test_other_bad_arguments_are_named(change, kind, message):
    with pytest.raises(kind, match=message):
        mhc_inductor.selection_attention(**{**bad(), **change})


BAD_BACKWARD = {
    "dout": (0, zeros(2, 3, 2, 3, 5), ValueError, r"dout must have shape \[B, S, G, h, Dv\] = \[2, 3, 2, 3, 4\]"),
    "dlse": (1, zeros(2, 3, 2), ValueError, r"dlse must have shape \[B, S, G, h\] = \[2, 3, 2, 3\]"),
    "dout_dtype": (0, zeros(2, 3, 2, 3, 4, dtype=I32), TypeError, "dout must be bfloat16"),
    "ranges": (5, zeros(2, 3, 2, 2, 2), TypeError, "ranges must be int32 or int64"),
    "o": (9, zeros(2, 3, 2, 3), ValueError, r"o must have shape \[B, S, G, h, Dv\]"),
    "lse": (10, zeros(2, 3, 2, 4), ValueError, r"lse must have shape \[B, S, G, h\]"),
    "scale": (11, math.inf, ValueError, "scale must be finite, got inf"),
}


@pytest.mark.parametrize("case", BAD_BACKWARD)
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_bad_input_of_the_backward_op_is_named(case, where):
    position, value, kind, message = BAD_BACKWARD[case]
    inputs = bad()
    up = upstream(inputs)
    out = run(inputs)
    args = [up["o"], up["lse"], *inputs.values(), out["o"], out["lse"], 0.5]
    args[position] = value
    args = [a.to(where) if isinstance(a, torch.Tensor) else a for a in args]
    with pytest.raises(kind, match=f"selection_attention_backward: .*{message}"):
        OPS.selection_attention_backward(*args)


def test_odd_ranges_are_accepted():
    inputs = bad(ranges=torch.tensor([[5, 2], [-9, 99]], dtype=I32).expand(2, 3, 2, 2, 2))
    everything = {**inputs, "ranges": torch.tensor([[0, 5]], dtype=I32).expand(2, 3, 2, 1, 2)}
    assert error(mhc_inductor.selection_attention(**inputs), oracle(everything)["o"]) < 1e-6
    for ranges in (torch.zeros_like(inputs["ranges"]), inputs["ranges"].flip(-1) + 100):
        got = mhc_inductor.selection_attention(**{**inputs, "ranges": ranges}, return_lse=True)
        assert not got[0].any() and (got[1] == -math.inf).all()


def test_the_reference_is_the_specification():
    assert registry.REFERENCE["selection_attention"] is reference.selection_attention
    assert registry.REFERENCE["selection_attention_backward"] is reference.selection_attention_backward


@pytest.mark.parametrize(
    ("boundaries", "kind", "message"),
    [
        ((None, zeros(3, dtype=I32)), ValueError, "cu_seqlens_k must be None where cu_seqlens_q is"),
        ((zeros(3), None), TypeError, "cu_seqlens_q must be int32 or int64, got torch.float32"),
        ((zeros(0, dtype=I32), None), ValueError, r"cu_seqlens_q must have shape \[N\+1\], got \[0\]"),
        ((zeros(3, dtype=I32), zeros(4, dtype=I32)), ValueError, r"cu_seqlens_q's shape \[3\], got \[4\]"),
    ],
    ids=["keys_only", "dtype", "none", "other"],
)
def test_bad_boundaries_of_blocks_are_named(boundaries, kind, message):
    q, k = boundaries
    picks = torch.zeros(1, 4, 2, 1, dtype=torch.int64)
    with pytest.raises(kind, match="blocks_to_ranges: .*" + message):
        mhc_inductor.blocks_to_ranges(picks, 4, 8, cu_seqlens_q=q, cu_seqlens_k=k)
