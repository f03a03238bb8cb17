# SPDX-License-Identifier: Apache-2.0
"""Selection attention over lists of keys on a GPU: kernels, compiled code, CUDA graphs, memory, large tensors."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from test_gpu import kernels_of

import mhc_inductor
from mhc_inductor import selection_attention
from mhc_inductor.kernels import launch
from mhc_inductor.kernels.selection import lists_plan

pytestmark = pytest.mark.gpu
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
OPS = torch.ops.mhc_inductor
PLAIN = {"B": 1, "S": 256, "S_kv": 1024, "h": 16, "Dk": 128, "n": 200}
LATENT = {"B": 1, "S": 192, "S_kv": 700, "h": 128, "Dk": 576, "Dv": 512, "n": 130, "shared": True}
WIDE = {"B": 2, "S": 100, "S_kv": 600, "h": 64, "Dk": 512, "n": 77, "shared": True}
BIASED = {
    "bias": {**PLAIN, "bias": True},
    "bias_odd": {"B": 2, "S": 77, "S_kv": 301, "h": 3, "Dk": 80, "Dv": 48, "n": 130, "bias": True},
    "bias_latent": {**LATENT, "bias": True},
}
SHAPES = {"plain": PLAIN, "latent": LATENT, "wide": WIDE, "apart": {**WIDE, "shared": False}, **BIASED}


def made(
    *, B: int, S: int, S_kv: int, h: int, Dk: int, n: int, Dv: int | None = None, shared: bool = False,
    dtype: torch.dtype = BF16, seed: int = 0, bias: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Returns leaves q, k (and v), lists with repeats and -1, a sink, and gradients of o and lse.

    With ``bias``, each entry counts with a bias: of a row either normal ones, of which some are -inf, or the lowest number.
    """
    g = torch.Generator("cuda").manual_seed(seed)
    normal = lambda *shape, dtype=dtype: torch.randn(shape, generator=g, device="cuda").to(dtype)  # noqa: E731
    Dv = Dk if Dv is None else Dv
    case = {"q": normal(B, S, 1, h, Dk), "k": normal(B, 1, S_kv, Dk), "sink": normal(1, h, dtype=F32)}
    if not shared:
        case["v"] = normal(B, 1, S_kv, Dv)
    for t in case.values():
        t.requires_grad_()
    indices = torch.randint(-S_kv // 8, S_kv, (B, S, 1, n), generator=g, device="cuda")
    biases = normal(B, S, 1, n, dtype=F32)
    biases = torch.where(biases > 1.5, -torch.inf, biases)
    biases = torch.where(normal(B, S, 1, 1, dtype=F32) > 1, torch.finfo(F32).min, biases)
    return {
        "bias": biases if bias else None,
        "leaves": case,
        "indices": indices,
        "dout": normal(B, S, 1, h, Dv),
        "dlse": normal(B, S, 1, h, dtype=F32),
        "Dv": Dv,
    }


def attend(q, k, v, indices, sink, Dv, bias=None):
    return selection_attention(
        q, k, v, indices=indices, sink=sink, v_width=Dv, bias=bias, repeats=bias is not None, return_lse=True
    )


def arguments(case, leaves=None):
    x = case["leaves"] if leaves is None else leaves
    return x["q"], x["k"], x.get("v", x["k"]), case["indices"], x["sink"], case["Dv"], case["bias"]


def train(case, fn=attend, leaves=None):
    """Returns o, lse and the gradients."""
    x = case["leaves"] if leaves is None else leaves
    o, lse = fn(*arguments(case, x))
    grads = torch.autograd.grad([o, lse], list(x.values()), [case["dout"].to(o.dtype), case["dlse"].to(lse.dtype)])
    return {"o": o.detach(), "lse": lse.detach(), **{f"d{n}": g for n, g in zip(x, grads, strict=True)}}


def exact(case, dtype=torch.float64):
    """Returns what the reference computes in ``dtype``, on the GPU."""
    leaves = {n: t.detach().to(dtype).requires_grad_() for n, t in case["leaves"].items()}

    def entries(q, k, v, indices, sink, Dv, bias):
        at = indices[:, :, 0].clamp(min=0).long()
        keys, values = (t[torch.arange(len(t), device=t.device)[:, None, None], 0, at] for t in (k[:, 0:1], v[:, 0:1]))
        t = torch.einsum("bsghd,bsnd->bsghn", q, keys).to(torch.promote_types(dtype, F32)) * q.shape[-1] ** -0.5
        t = (t + bias.unsqueeze(3).to(t.dtype)).masked_fill(indices.unsqueeze(3) < 0, -torch.inf)
        p = torch.cat((t, sink[None, None, :, :, None].expand(*t.shape[:4], 1)), -1).softmax(-1)[..., :-1]
        most = t.detach().amax(-1, keepdim=True)
        lse = (t - most).logsumexp(-1) + most.squeeze(-1)
        return torch.einsum("bsghn,bsnd->bsghd", p.to(q.dtype), values[..., :Dv]), lse

    def formula(q, k, v, indices, sink, Dv, bias):
        if bias is not None:
            return entries(q, k, v, indices, sink, Dv, bias)
        mask = torch.zeros(*indices.shape[:3], k.shape[2] + 1, dtype=torch.bool, device=q.device)
        mask = mask.scatter(-1, indices.clamp(min=-1) % (k.shape[2] + 1), True)[..., :-1]
        t = torch.einsum("bsghd,bgtd->bsght", q, k) * q.shape[-1] ** -0.5
        t = t.masked_fill(~mask[:, :, :, None], -torch.inf)
        p = torch.cat((t, sink[None, None, :, :, None].expand(*t.shape[:4], 1)), -1).softmax(-1)[..., :-1]
        return torch.einsum("bsght,bgtd->bsghd", p.to(q.dtype), v[..., :Dv]), t.logsumexp(-1)

    return train(case, formula, leaves)


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


@contextlib.contextmanager
def no_synchronisation():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def equal(a, b):
    return [n for n in b if not torch.equal(a[n], b[n])]


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_fp64(shape, dtype):
    case = made(**{**SHAPES[shape], "dtype": dtype})
    got, want, plain = train(case), exact(case), exact(case, dtype)
    some = want["lse"] > -1e30  # rows of the lowest bias would hide the others
    for name in want:
        a, b, c = (t[name][some] if name == "lse" else t[name] for t in (got, want, plain))
        bar = 2 * relative(c, b) + 1e-6
        assert relative(a, b) <= bar, f"{name}: {relative(a, b):.3g} above {bar:.3g}"


@pytest.mark.parametrize("shape", SHAPES)
def test_only_our_kernels_run(shape):
    case = made(**SHAPES[shape])
    case["indices"] = case["indices"].int()
    names = kernels_of(lambda: train(case))
    ours = {n for n in names if n.startswith("selection_")}
    wgmma = torch.cuda.get_device_capability() == (9, 0) and SHAPES[shape].get("shared", False)
    assert f"selection_list_forward{'_wgmma' if wgmma else ''}" in ours
    assert f"selection_list_dq{'_wgmma' if wgmma else ''}" in ours
    assert f"selection_list_rows{'_wgmma' if wgmma and SHAPES[shape]['h'] > 64 else ''}" in ours
    others = [n for n in names if n not in ours and not any(w in n.lower() for w in ("memset", "fill", "copy"))]
    assert not others, others


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="for sm_90")
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    ("h", "Dk", "S_kv", "n"), [(128, 576, 700, 130), (100, 520, 300, 37), (127, 544, 90, 16), (65, 512, 900, 513)]
)
def test_the_wgmma_kernel_of_rows_gives_the_bits_of_the_plain_one(h, Dk, S_kv, n, dtype, monkeypatch):
    """Some lists are empty, and what no kernel writes is NaN."""
    case = made(B=2, S=9, S_kv=S_kv, h=h, Dk=Dk, Dv=512, n=n, shared=True, dtype=dtype)
    case["indices"][:, 0] = -1
    empty, call = launch.EagerBuilder.empty, lists_plan._wgmma_call

    def poisoned(self, shape, dtype):
        made = empty(self, shape, dtype)
        return made.fill_(float("nan")) if dtype.is_floating_point else made

    monkeypatch.setattr(launch.EagerBuilder, "empty", poisoned)
    got = train(case)
    assert not any(t.isnan().any() for t in got.values())
    monkeypatch.setattr(lists_plan, "_wgmma_call", lambda *a: dataclasses.replace(call(*a), rows_kernel=None))
    assert not equal(got, train(case))


@pytest.mark.parametrize("shape", SHAPES)
def test_two_runs_and_any_batch_give_equal_bits(shape, monkeypatch):
    """Few queries split their keys, which deterministic algorithms do not."""
    case = made(**SHAPES[shape])
    assert not equal(train(case), train(case))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    first = train(case)
    part = {n: t[:, 5:60].detach().requires_grad_() if n == "q" else t for n, t in case["leaves"].items()}
    cut = {**case, **{n: case[n][:, 5:60] for n in ("indices", "dout", "dlse")}}
    cut["bias"] = case["bias"] if case["bias"] is None else case["bias"][:, 5:60]
    got = train(cut, leaves=part)
    assert all(torch.equal(got[n], first[n][:, 5:60]) for n in ("o", "lse", "dq"))


@pytest.mark.parametrize("shape", ["plain", "latent", "bias"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_equals_eager(shape, dynamic):
    torch._dynamo.reset()
    case = made(**SHAPES[shape])
    compiled = torch.compile(attend, backend="mhc_inductor", fullgraph=True, dynamic=dynamic)
    assert not equal(train(case, compiled), train(case))
    with torch.no_grad():
        args = arguments(case)
        assert all(torch.equal(a, b) for a, b in zip(compiled(*args), attend(*args), strict=True))


def test_one_compile_serves_every_length():
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="mhc_inductor", dynamic=True, fullgraph=True)
    for n, S in enumerate((256, 100, 33, 500)):
        case = made(**{**PLAIN, "S": S, "S_kv": 2 * S + 7})
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            got, want = train(case, compiled), train(case)
        assert all(relative(got[name], want[name]) < 2**-9 for name in want)


@pytest.mark.parametrize("shape", ["plain", "latent", "wide", "bias"])
def test_a_training_step_captured_in_a_cuda_graph(shape):
    case = made(**SHAPES[shape])
    want = train(case)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        train(case)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = train(case)
    for t in got.values():
        t.fill_(float("nan"))
    graph.replay()
    assert not equal(got, want)
    other = made(**SHAPES[shape], seed=5)
    with torch.no_grad():
        for n, t in case["leaves"].items():
            t.copy_(other["leaves"][n])
        for n in ("indices", "dout", "dlse", *["bias"] * (case["bias"] is not None)):
            case[n].copy_(other[n])
    graph.replay()
    assert not equal(got, train(other))


@pytest.mark.parametrize("bias", [False, True])
def test_decoding_under_cuda_graphs(bias):
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="mhc_inductor", mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for seed in range(4):
            args = arguments(made(**{**LATENT, "B": 4, "S": 1, "bias": bias}, seed=seed))
            torch.compiler.cudagraph_mark_step_begin()
            got = [t.clone() for t in compiled(*args)]
            assert all(torch.equal(a, b) for a, b in zip(got, attend(*args), strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_host_never_waits(shape):
    case = made(**SHAPES[shape])
    train(case)
    with no_synchronisation():
        train(case)


@pytest.mark.parametrize("shape", ["plain", "latent"])
def test_decoding_with_lists_of_other_lengths(shape):
    """Checks split keys: 16 sequences, of which some see few keys or none."""
    case = made(**{**SHAPES[shape], "B": 16, "S": 1, "S_kv": 4096, "n": 1024})
    keep = torch.arange(1024, device="cuda") < torch.arange(16, device="cuda")[:, None, None, None] * 68
    case["indices"] = torch.where(keep, case["indices"], -1)
    got, want, plain = train(case), exact(case), exact(case, BF16)
    assert not got["o"][0].any() and got["lse"][0].eq(float("-inf")).all() and not got["dq"][0].any()
    for name in ("o", "dq", "dk"):
        # Rows without keys are NaN in the plain formula's lse gradients.
        a, b, c = (t[name][1:] for t in (got, want, plain))
        assert relative(a, b) <= 2 * relative(c, b) + 1e-6, name


@pytest.mark.parametrize("where", ["k", "latent"])
def test_unselected_keys_do_not_leak(where):
    shape = LATENT if where == "latent" else PLAIN
    case = made(**shape)
    bad = torch.zeros(shape["S_kv"], dtype=torch.bool, device="cuda")
    bad[100:140] = True
    listed = case["indices"].clamp(min=0)
    case["indices"] = torch.where(bad[listed], -1, case["indices"])
    clean = train(case)
    with torch.no_grad():
        for n in ("k", "v"):
            if n in case["leaves"]:
                case["leaves"][n][:, :, bad] = float("nan")
    got = train(case)
    assert not equal({n: got[n] for n in ("o", "lse", "dq")}, {n: clean[n] for n in ("o", "lse", "dq")})
    assert not got["dk"][:, :, bad].any() and torch.equal(got["dk"], clean["dk"])


@pytest.mark.parametrize("shape", BIASED)
def test_a_bias_of_nan_gives_its_score_no_gradient(shape):
    case = made(**BIASED[shape])
    case["bias"][:, ::3] = torch.nan
    got = train(case)
    assert got["o"][:, ::3].isnan().all() and not got["dq"][:, ::3].any() and got["dq"].isfinite().all()
    case["bias"][:, ::3] = -torch.inf
    without = train(case)
    kept = [s for s in range(case["indices"].shape[1]) if s % 3]
    assert all(torch.equal(got[n][:, kept], without[n][:, kept]) for n in ("o", "lse", "dq"))


def test_the_workspace_of_the_backward_is_bounded():
    case = made(B=1, S=8192, S_kv=8192, h=64, Dk=512, n=1024, shared=True)
    x = case["leaves"]
    o, _ = attend(x["q"], x["k"], x["k"], case["indices"], x["sink"], 512)
    given = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grads = torch.autograd.grad([o], list(x.values()), [case["dout"]])
    out = sum(t.nbytes for t in grads)
    # Rows in bf16 for all pairs would take 8 GiB.
    assert torch.cuda.max_memory_allocated() - given - out < 2 * 2**30


def test_more_than_2_to_the_31_elements(monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)  # any number of queries
    S, h, D = 2**31 // (64 * 512) + 64, 64, 512
    q = torch.zeros(1, S, 1, h, D, device="cuda", dtype=BF16)
    k = torch.randn(1, 1, 300, D, device="cuda").to(BF16)
    q[:, -3:] = torch.randn(1, 3, 1, h, D, device="cuda").to(BF16)
    indices = torch.randint(0, 300, (1, S, 1, 16), device="cuda", dtype=torch.int32)
    o = selection_attention(q, k, k, indices=indices)
    want = selection_attention(q[:, -3:], k, k, indices=indices[:, -3:])
    assert torch.equal(o[:, -3:], want)
    grad = torch.autograd.grad(
        selection_attention(q.requires_grad_(), k, k, indices=indices), q, torch.ones_like(o)
    )[0]  # fmt: skip
    last = q[:, -3:].detach().requires_grad_()
    out = selection_attention(last, k, k, indices=indices[:, -3:])
    assert torch.equal(grad[:, -3:], torch.autograd.grad(out, last, torch.ones_like(out))[0])


def test_segments_and_packed_sequences():
    ends = torch.tensor([0, 100, 100, 256], device="cuda", dtype=torch.int32)
    ids = torch.randint(0, 3, (1, 256), device="cuda")
    keys = torch.randint(0, 4, (1, 256), device="cuda")
    keys = torch.where(keys == 3, mhc_inductor.ANY_SEGMENT, keys)
    case = made(**{**PLAIN, "S_kv": 256})
    rest = (case["leaves"]["sink"].detach(), ends, None, ids, keys)
    x = [case["leaves"][n].detach() for n in "qkv"]
    got = OPS.selection_list_attention(*x, case["indices"], *rest, 0.1, 128)
    want = OPS.selection_list_attention(
        *(t.cpu().double() for t in x), *(t if t is None else t.cpu() for t in (case["indices"], *rest)), 0.1, 128
    )
    assert relative(got[0].cpu(), want[0]) < 2**-7
    some = want[1].isfinite()
    assert torch.equal(got[1].cpu().isfinite(), some) and relative(got[1].cpu()[some], want[1][some]) < 1e-5


def test_sizes_above_the_kernels_run_the_reference_once_logged(caplog):
    with caplog.at_level("WARNING", logger="mhc_inductor"):
        case = made(B=1, S=3, S_kv=50, h=4, Dk=600, n=20)
        got, want = train(case), exact(case)
    assert [r for r in caplog.records if "D = 600 is above 576" in r.getMessage()]
    assert relative(got["o"], want["o"]) < 2**-7
