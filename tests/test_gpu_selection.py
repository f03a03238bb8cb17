# SPDX-License-Identifier: Apache-2.0
"""Selection attention on a GPU: which kernels run, compiled code, CUDA graphs, memory, large tensors, wide heads."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from test_gpu import kernels_of
from test_gpu_lists import no_synchronisation

import mhc_inductor
from benchmarks import selection_cases as cases
from benchmarks.accuracy import relative
from benchmarks.attention import gradients
from benchmarks.selection_cases import C1, Shape
from mhc_inductor import log, selection_attention
from tests.oracles import selection as h

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
MID = Shape("mid", 1024, 2, 16)
DECODE = Shape("decode", 1, 2, 16, keys=4096, batch=3)
TOKENS = Shape("tokens", 64, 2, 16, keys=1024, tokens=100)
ROUNDING = 2**-8
INPUTS = ("q", "k", "v", "ranges")


def made(shape=MID, select="corr", seed=0, **kwargs):
    torch.manual_seed(seed)
    return cases.make_case(shape, select, torch.device("cuda"), **kwargs)


def fills(name):
    """Returns whether a kernel zeroes the bitmaps: a memset or fill in eager mode, Inductor's kernel when compiled."""
    return "memset" in name.lower() or "fill" in name.lower() or name.startswith("triton_poi_fused_selection_attention")


def ours(names):
    """Returns the package's kernels among ``names``; raises for any other kernel that does more than zero a buffer."""
    others = [n for n in names if not n.startswith("selection_") and not fills(n)]
    assert not others, others
    return [n for n in names if not fills(n)]


def attend(q, k, v, ranges):
    return selection_attention(q, k, v, ranges, return_lse=True)


def train(fn, case, dlse=None):
    """Returns o, lse and the gradients of q, k and v; ``dlse`` is the optional gradient of lse."""
    leaves = case.leaves()
    o, lse = fn(*leaves.values(), case.ranges)
    outs, ups = ([o], [case.dout]) if dlse is None else ([o, lse], [case.dout, dlse])
    grads = torch.autograd.grad(outs, [*leaves.values()], ups)
    return {"o": o.detach(), "lse": lse.detach(), **{f"d{n}": g for n, g in zip(leaves, grads, strict=True)}}


def assert_equal(got, want):
    assert got.keys() == want.keys()
    differ = [k for k in want if not torch.equal(got[k], want[k])]
    assert not differ, differ


def assert_accurate(got, case):
    """Asserts errors of at most twice those of dense SDPA in the same dtype on the same selection, without a sink."""
    want = case.dense(torch.float64)
    bare = dataclasses.replace(case, sink=None)
    exact = want if case.sink is None else bare.dense(torch.float64)
    dense = bare.dense(case.q.dtype)
    for name in want:
        error, bar = relative(got[name], want[name]), 2 * relative(dense[name], exact[name])
        assert error <= bar, f"{name}: {error:.3g} above {bar:.3g}"


# ---- kernels and their results


@pytest.mark.parametrize(
    ("shape", "forward"),
    [(MID, "selection_forward"), (DECODE, "selection_gather"), (TOKENS, "selection_gather")],
    ids=lambda p: getattr(p, "name", None),
)
def test_the_op_runs_the_kernels_and_nothing_else(shape, forward):
    case = made(shape, sink=True)
    args = [case.q, case.k, case.v, case.ranges, case.sink, None, None]
    scale, saved = 128**-0.5, []
    names = ours(kernels_of(lambda: saved.append(torch.ops.mhc_inductor.selection_attention(*args, scale))))
    assert forward in names
    backward = torch.ops.mhc_inductor.selection_attention_backward
    names = ours(kernels_of(lambda: backward(case.dout, saved[0][1], *args, *saved[0], scale)))
    assert {n.split("_")[1] for n in names} >= {"delta", "dkv", "dsink"}, names
    assert any("dq" in n for n in names), names


@pytest.mark.parametrize("shape", [MID, DECODE], ids=lambda s: s.name)
def test_keys_that_are_not_selected_do_not_leak(shape):
    case = made(shape)
    clean = train(attend, case)
    last = case.shape.length // 64 - 1
    for block, value in ((3, float("nan")), (last // 2, float("inf"))):
        case.k[:, :, 64 * block : 64 * block + 64] = value
        case.v[:, :, 64 * block : 64 * block + 64] = value
    chosen = (case.blocks == 3) | (case.blocks == last // 2)
    reached = chosen.any(-1)
    assert not reached.all()
    case.dout[reached] = 0
    got = train(attend, case)
    for name in ("o", "lse", "dq"):
        assert relative(got[name][~reached], clean[name][~reached]) < ROUNDING, name


@pytest.mark.parametrize("shape", [MID, DECODE], ids=lambda s: s.name)
def test_strided_keys_are_not_copied(shape):
    case = made(shape)
    want = train(attend, case)
    for name in ("k", "v"):
        setattr(case, name, getattr(case, name).transpose(1, 2).contiguous().transpose(1, 2))
    assert not case.k.is_contiguous()
    got = {}
    ours(kernels_of(lambda: got.update(train(attend, case))))
    for name in want:
        assert relative(got[name], want[name]) < ROUNDING / 4, name


# ---- compiled


@pytest.mark.parametrize("dynamic", [False, True])
def test_which_kernels_compiled_code_runs(dynamic):
    torch._dynamo.reset()
    case = made()
    compiled = torch.compile(attend, backend="mhc_inductor", fullgraph=True, dynamic=dynamic)
    train(compiled, case)
    names = ours(kernels_of(lambda: train(compiled, case)))
    assert "selection_forward" in names and any("dkv" in n for n in names)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [MID, DECODE, TOKENS], ids=lambda s: s.name)
def test_the_host_never_waits(shape, compiled):
    torch._dynamo.reset()
    ends = torch.tensor([0, 500, 1024], device="cuda", dtype=torch.int32) if shape is MID else None
    step = lambda *a: selection_attention(*a, cu_seqlens_q=ends, return_lse=True)  # noqa: E731
    step = torch.compile(step, backend="mhc_inductor", fullgraph=True) if compiled else step
    case = made(shape)
    train(step, case)
    with no_synchronisation():
        train(step, case)


def plain(q, k, v, ranges):
    """Computes what a user writes: a mask from ranges, then dense attention with K and V repeated for the heads."""
    h = q.shape[3]
    at = torch.arange(k.shape[2], device=k.device)
    inside = (at >= ranges[..., 0, None]) & (at < ranges[..., 1, None])
    mask = inside.any(-2).transpose(1, 2).repeat_interleave(h, 1)
    rows = q.flatten(2, 3).transpose(1, 2)
    o = F.scaled_dot_product_attention(rows, k.repeat_interleave(h, 1), v.repeat_interleave(h, 1), attn_mask=mask)
    return o.transpose(1, 2).unflatten(2, (-1, h)), None


def test_a_plain_mask_runs_on_the_kernels():
    torch._dynamo.reset()
    # Long enough that selection is faster (routing/operators/selection/profit.py).
    case = made(Shape("plain", 512, 2, 16, keys=4096))

    def step(fn):
        leaves = case.leaves()
        return gradients(fn(*leaves.values(), case.ranges)[0], leaves, case.dout)

    compiled = torch.compile(plain, backend="mhc_inductor", fullgraph=True)
    before = mhc_inductor.counters().get("routed selection_attention", 0)
    got = step(compiled)
    assert mhc_inductor.counters()["routed selection_attention"] == before + 1
    assert_accurate(got, case)
    names = [n for n in kernels_of(lambda: step(compiled)) if n.startswith("selection_")]
    assert "selection_forward" in names and any("dkv" in n for n in names)


# ---- memory and size


def test_peak_memory_of_training():
    case = made(C1)
    leaves = case.leaves()
    case.both(leaves)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = case.both(leaves)
    torch.cuda.synchronize()
    given = sum(t.nbytes for t in (*leaves.values(), case.dout, case.ranges))
    peak = torch.cuda.max_memory_allocated() - before + given
    least = sum(t.nbytes for t in (*leaves.values(), case.dout, *out.values()))
    assert peak <= 1.2 * least, peak / least


def test_more_than_2_to_the_31_elements_of_q():
    groups, heads, dim, length, tail = 4, 16, 128, 256, 128
    S = 2**31 // (groups * heads * dim) + tail
    q = torch.zeros(1, S, groups, heads, dim, device="cuda", dtype=BF16)
    assert q.numel() > 2**31
    torch.manual_seed(0)
    dout = torch.zeros_like(q)
    for t in (q, dout):
        t[:, -tail:].normal_()
    k, v = (torch.randn(1, groups, length, dim, device="cuda", dtype=BF16) for _ in range(2))
    start = torch.randint(0, length, (1, S, groups, 2), device="cuda", dtype=torch.int32)
    case = cases.Case(C1, q, k, v, dout, None, "", torch.stack((start, start + 40), -1))
    got = train(attend, case)
    last = dataclasses.replace(
        case, q=q[:, -tail:].clone(), dout=dout[:, -tail:].clone(), ranges=case.ranges[:, -tail:].clone()
    )
    want = train(attend, last)
    for name, t in want.items():
        # The other queries have zero gradients, so dK and dV come from the last ones alone.
        part = got[name] if name in ("dk", "dv") else got[name][:, -tail:]
        assert relative(part, t) < ROUNDING, name
    assert not got["dq"][:, : S - tail].any()


@pytest.mark.parametrize("queries", [48, 2])
def test_more_than_2_to_the_31_elements_of_k_and_v(queries):
    groups, heads, dim, ends = 4, 16, 128, 512
    length = 2**31 // (groups * dim) + 64
    torch.manual_seed(0)
    views = []
    for _ in range(2):
        t = torch.zeros(1, length, groups, dim, device="cuda", dtype=BF16)
        assert t.numel() > 2**31
        for part in (t[:, :ends], t[:, -ends:]):
            part.normal_()
        views.append(t.transpose(1, 2))
    q, dout = (torch.randn(1, queries, groups, heads, dim, device="cuda", dtype=BF16) for _ in range(2))
    # Selects blocks at both ends; the second case has only the keys of these ends.
    block = torch.rand(1, queries, groups, 2 * ends // 64, device="cuda").argsort(-1)[..., :8]
    start = (block * 64).int()
    near = torch.stack((start, start + 50), -1)
    far = torch.where(near < ends, near, near + (length - 2 * ends))
    k, v = views
    got = train(attend, cases.Case(C1, q, k, v, dout, None, "", far))
    short = [torch.cat((t[:, :, :ends], t[:, :, -ends:]), 2).contiguous() for t in views]
    want = train(attend, cases.Case(C1, q, *short, dout, None, "", near))
    for name, t in want.items():
        part = torch.cat((got[name][:, :, :ends], got[name][:, :, -ends:]), 2) if name in ("dk", "dv") else got[name]
        assert relative(part, t) < ROUNDING, name
    assert not got["dk"][:, :, ends : length - ends].any()


# ---- segment ids, and the sizes of latent attention


def test_compiled_segments_serve_every_length():
    attention = torch.compile(selection_attention, fullgraph=True, dynamic=True)
    for n, (queries, keys) in enumerate(((100, 300), (70, 200), (190, 640))):
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            inputs = h.make_inputs("odd", BF16, S=queries, S_kv=keys, h=8, Dk=64, segments="mixed", device="cuda")
            assert torch.equal(attention(**inputs), selection_attention(**inputs))


@pytest.mark.parametrize("queries", [300, 1])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_sizes_of_latent_attention_run_on_the_kernels(dtype, queries):
    inputs = h.make_inputs(
        "odd", dtype, B=1, G=1, S=queries, S_kv=300, h=128, Dk=576, Dv=512, size=64, sink=True, device="cuda"
    )
    up, got = h.upstream(inputs), {}
    names = ours(kernels_of(lambda: got.update(h.run(inputs, up))))
    assert "selection_gather" in names and "selection_gather_dq" in names
    h.check(got, inputs, up)


def test_above_576_the_reference_runs_and_logs_it_once(caplog):
    log._said.clear()
    case = made(Shape("too wide", 64, 1, 2, dim=640, block=16, picks=4))
    with caplog.at_level("WARNING", logger="mhc_inductor"):
        got = case.both(case.leaves())
        case.forward()
    assert_accurate(got, case)
    said = [r.getMessage() for r in caplog.records if "D = 640 is above 576" in r.getMessage()]
    assert len([m for m in said if m.startswith("selection_attention runs")]) == 1, said
