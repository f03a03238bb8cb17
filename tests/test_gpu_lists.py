# SPDX-License-Identifier: Apache-2.0
"""Selection attention on a GPU, over lists and under masks: kernels, compiled code, CUDA graphs, memory; over ranges: bits."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from test_gpu import captured, kernels_of

from mhc_inductor import selection_attention
from mhc_inductor.kernels import launch
from mhc_inductor.kernels.selection import lists_plan
from tests.oracles import lists as h
from tests.oracles import masks
from tests.oracles import selection as ranges
from tests.oracles.selection import error

pytestmark = pytest.mark.gpu
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = "cuda"
PLAIN = {"B": 1, "S": 256, "S_kv": 1024, "h": 16, "Dk": 128, "n": 200}
LATENT = {"B": 1, "S": 192, "S_kv": 700, "h": 128, "Dk": 576, "Dv": 512, "n": 130, "shared": True}
WIDE = {"B": 2, "S": 100, "S_kv": 600, "h": 64, "Dk": 512, "n": 77, "shared": True}
BIAS = {"bias": "rows", "repeats": True}
LISTS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "latent": LATENT,
    "wide": WIDE,
    "apart": {**WIDE, "shared": False},
    "bias": {**PLAIN, **BIAS},
    "bias odd": {"B": 2, "S": 77, "S_kv": 301, "h": 3, "Dk": 80, "Dv": 48, "n": 130, **BIAS},
    "bias latent": {**LATENT, **BIAS},
}
MASKS: dict[str, dict[str, Any]] = {
    "mask": {"B": 1, "S": 256, "S_kv": 1024, "h": 16, "Dk": 128, "kind": "causal"},
    "mask, one head": {"B": 2, "S": 500, "S_kv": 700, "h": 1, "Dk": 64, "kind": "random"},
    "mask of fills": {"B": 2, "S": 300, "S_kv": 300, "h": 4, "Dk": 128, "kind": "fills", "mask_dtype": BF16},
    "mask of biases": {"B": 2, "S": 200, "S_kv": 500, "h": 8, "Dk": 256, "kind": "biased", "mask_dtype": F32},
    "mask, latent": {"B": 1, "S": 192, "S_kv": 700, "h": 128, "Dk": 576, "Dv": 512, "shared": True, "kind": "window"},
    "mask of fills, latent": {"B": 1, "S": 100, "S_kv": 300, "h": 128, "Dk": 576, "Dv": 512, "kind": "fills"},
    "mask, wide": {"B": 2, "S": 100, "S_kv": 600, "h": 64, "Dk": 512, "kind": "sparse"},
}
LONG = {"B": 1, "S": 4096, "S_kv": 4096, "G": 2, "h": 16, "Dk": 128, "kind": "corr", "size": 64, "r": 16}
RANGES: dict[str, dict[str, Any]] = {
    "ranges": LONG,
    "ranges, decoding": {**LONG, "B": 3, "S": 1},
    "ranges, tokens": {**LONG, "kind": "token", "S": 64, "S_kv": 1024, "r": 100},
}
KEYED = LISTS | MASKS
SHAPES = KEYED | RANGES
COMPILED = ["ranges", "plain", "latent", "bias", "mask", "mask of fills", "mask, latent"]


def made(shape: str, **changes: Any) -> dict[str, Any]:
    """Returns leaves q, k (and v) and a sink, lists with repeats and absent keys, a mask or ranges, and gradients."""
    options = {"dtype": BF16, "G": 1, "sink": True, "device": DEVICE, **SHAPES[shape], **changes}
    if shape in RANGES:
        case = ranges.make_inputs(**options)
    else:
        case = masks.make_inputs(shared_mask="B", **options) if shape in MASKS else h.make_inputs(**options)
    for name in h.WANTED:
        if case[name] is not None:
            case[name].requires_grad_()
    return {**case, "ups": (ranges if shape in RANGES else h).upstream(case)}


def attend(q, k, v, ranges, indices, mask, sink, v_width, bias):
    chosen = {"ranges": ranges, "indices": indices, "mask": mask, "bias": bias, "repeats": bias is not None}
    return selection_attention(q, k, v, **chosen, sink=sink, v_width=v_width, return_lse=True)


def arguments(case):
    v = case["k"] if case["v"] is None else case["v"]
    return case["q"], case["k"], v, *(case.get(n) for n in ("ranges", "indices", "mask", "sink", "v_width", "bias"))


def train(case, fn=attend):
    """Returns o, lse and the gradients."""
    o, lse = fn(*arguments(case))
    wanted = [n for n in h.WANTED if case[n] is not None]
    grads = torch.autograd.grad([o, lse], [case[n] for n in wanted], list(case["ups"].values()))
    return {"o": o.detach(), "lse": lse.detach(), **{f"d{n}": g for n, g in zip(wanted, grads, strict=True)}}


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
@pytest.mark.parametrize("shape", KEYED)
def test_against_fp64(shape, dtype):
    case = made(shape, dtype=dtype)
    h.check(train(case), case, case["ups"])


@pytest.mark.parametrize("shape", KEYED)
def test_only_our_kernels_run_and_the_host_never_waits(shape):
    case = made(shape)
    names = kernels_of(lambda: train(case))
    ours = {n for n in names if n.startswith("selection_")}
    if shape in MASKS:
        expected = {"selection_mask_tiles", "selection_mask_forward", "selection_mask_dq", "selection_mask_dkv"}
    else:
        wgmma = torch.cuda.get_device_capability() == (9, 0) and SHAPES[shape].get("shared", False)
        end = "_wgmma" if wgmma else ""
        rows = end if SHAPES[shape]["h"] > 64 else ""
        expected = {f"selection_list_forward{end}", f"selection_list_dq{end}", f"selection_list_rows{rows}"}
    assert ours >= expected
    others = [n for n in names if n not in ours and not any(w in n.lower() for w in ("memset", "fill", "copy"))]
    assert not others, others
    with no_synchronisation():
        train(case)


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="for sm_90")
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    ("h", "Dk", "S_kv", "n"), [(128, 576, 700, 130), (100, 520, 300, 37), (127, 544, 90, 16), (65, 512, 900, 513)]
)
def test_the_wgmma_kernel_of_rows_gives_the_bits_of_the_plain_one(h, Dk, S_kv, n, dtype, monkeypatch):
    """Some lists are empty, and what no kernel writes is NaN."""
    case = made("latent", B=2, S=9, S_kv=S_kv, h=h, Dk=Dk, n=n, dtype=dtype)
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
    """Few queries split their keys, which deterministic algorithms do not; over ranges they have kernels of their own."""
    case = made(shape)
    assert not equal(train(case), train(case))
    if shape in MASKS or case["q"].shape[1] == 1:
        return
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    first, rows = train(case), slice(5, 9 if shape in RANGES else 60)
    names = [n for n in ("q", "ranges", "indices", "bias") if case.get(n) is not None]
    part = {n: case[n].detach()[:, rows].contiguous() for n in names}
    part["q"].requires_grad_()
    got = train({**case, **part, "ups": {n: t[:, rows].contiguous() for n, t in case["ups"].items()}})
    assert all(torch.equal(got[n], first[n][:, rows]) for n in ("o", "lse", "dq"))


@pytest.mark.parametrize("shape", COMPILED)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_equals_eager(shape, dynamic):
    torch._dynamo.reset()
    case = made(shape)
    compiled = torch.compile(attend, backend="mhc_inductor", fullgraph=True, dynamic=dynamic)
    assert not equal(train(case, compiled), train(case))
    with torch.no_grad():
        args = arguments(case)
        assert all(torch.equal(a, b) for a, b in zip(compiled(*args), attend(*args), strict=True))


@pytest.mark.parametrize("shape", ["plain", "mask of fills", "ranges"])
def test_one_compile_serves_every_length(shape):
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="mhc_inductor", dynamic=True, fullgraph=True)
    for n, S in enumerate((256, 100, 33, 500)):
        case = made(shape, S=S, S_kv=2 * S + 7)
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            results = train(case, compiled), train(case)
        for name in results[0]:  # rows that see nothing but fills would hide the others
            got, want = (
                t[name] if name != "lse" else t[name].masked_fill(t[name] < -1e30, -torch.inf) for t in results
            )
            assert error(got, want) < (2**-8 if shape in RANGES else 2**-9)


@pytest.mark.parametrize("shape", [*COMPILED, "wide", "ranges, decoding"])
def test_a_training_step_captured_in_a_cuda_graph(shape):
    """The tiles of a mask are found again in each replay: the mask of the second is another."""
    case = made(shape)
    want = train(case)
    graph, got = captured(lambda: train(case))
    for t in got.values():
        t.fill_(float("nan"))
    graph.replay()
    assert not equal(got, want)
    other = made(shape, seed=5, **({"kind": "random"} if shape in MASKS else {}))
    with torch.no_grad():
        for name in (*h.WANTED, "ranges", "indices", "mask", "bias"):
            if case.get(name) is not None:
                case[name].copy_(other[name])
        for name, t in case["ups"].items():
            t.copy_(other["ups"][name])
    graph.replay()
    assert not equal(got, train(other))


@pytest.mark.parametrize("shape", ["latent", "bias latent", "ranges, decoding"])
def test_decoding_under_cuda_graphs(shape):
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="mhc_inductor", mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for seed in range(4):
            args = arguments(made(shape, B=4, S=1, seed=seed))
            torch.compiler.cudagraph_mark_step_begin()
            got = [t.clone() for t in compiled(*args)]
            assert all(torch.equal(a, b) for a, b in zip(got, attend(*args), strict=True))


@pytest.mark.parametrize("shape", ["plain", "latent"])
def test_decoding_with_lists_of_other_lengths(shape):
    """Checks split keys: 16 sequences, of which some see few keys or none."""
    case = made(shape, kind="random", B=16, S=1, S_kv=4096, n=1024)
    keep = torch.arange(1024, device=DEVICE) < torch.arange(16, device=DEVICE)[:, None, None, None] * 68
    case["indices"] = torch.where(keep, case["indices"], -1)
    got = train(case)
    assert not got["o"][0].any() and got["lse"][0].eq(float("-inf")).all() and not got["dq"][0].any()
    h.check(got, case, case["ups"])


@pytest.mark.parametrize("shape", ["plain", "latent"])
def test_unselected_keys_do_not_leak(shape):
    case = made(shape, kind="random")
    bad = torch.zeros(SHAPES[shape]["S_kv"], dtype=torch.bool, device=DEVICE)
    bad[100:140] = True
    case["indices"] = torch.where(bad[case["indices"].clamp(min=0)], -1, case["indices"])
    clean = train(case)
    with torch.no_grad():
        for t in (case["k"], case["v"]):
            if t is not None:
                t[:, :, bad] = float("nan")
    got = train(case)
    assert not equal(got, {n: clean[n] for n in ("o", "lse", "dq")})
    assert not got["dk"][:, :, bad].any() and torch.equal(got["dk"], clean["dk"])


@pytest.mark.parametrize("shape", [name for name in LISTS if "bias" in name])
def test_a_bias_of_nan_gives_its_score_no_gradient(shape):
    case = made(shape)
    case["bias"][:, ::3] = torch.nan
    got = train(case)
    assert got["o"][:, ::3].isnan().all() and not got["dq"][:, ::3].any() and got["dq"].isfinite().all()
    case["bias"][:, ::3] = -torch.inf
    without = train(case)
    kept = [s for s in range(case["indices"].shape[1]) if s % 3]
    assert all(torch.equal(got[n][:, kept], without[n][:, kept]) for n in ("o", "lse", "dq"))


def test_the_workspace_of_the_backward_is_bounded():
    S, h, D = 8192, 64, 512
    q, dout = (torch.randn(1, S, 1, h, D, device="cuda", dtype=BF16) for _ in range(2))
    k, sink = torch.randn(1, 1, S, D, device="cuda", dtype=BF16), torch.randn(1, h, device="cuda")
    leaves = [t.requires_grad_() for t in (q, k, sink)]
    indices = torch.randint(-S // 8, S, (1, S, 1, 1024), device="cuda")
    o = selection_attention(q, k, k, indices=indices, sink=sink)
    given = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = sum(t.nbytes for t in torch.autograd.grad([o], leaves, [dout]))
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
    case = made("plain", S_kv=256, lengths=(100, 0, 156), segments=True, index_dtype=torch.int64)
    got = torch.ops.mhc_inductor.selection_list_attention(*h.arguments(case, 0.1))
    h.check(dict(zip(h.OUTPUTS, got, strict=True)), case, scale=0.1)


@pytest.mark.parametrize("shape", ["plain", "mask"])
def test_sizes_above_the_kernels_run_the_reference_once_logged(shape, caplog):
    with caplog.at_level("WARNING", logger="mhc_inductor"):
        case = made(shape, S=3, S_kv=50, h=4, Dk=600)
        got = train(case)
    assert [r for r in caplog.records if "D = 600 is above 576" in r.getMessage()]
    assert error(got["o"], h.oracle(case)["o"]) < 2**-7


def test_tiles_that_no_query_sees_are_not_read():
    """A window of 256 in 8192 keys: the time is that of the window, far below that of all keys."""
    case = made("mask", S=8192, S_kv=8192, h=64, kind="none", mask_dtype=F32)
    position = torch.arange(8192, device="cuda")
    back = position[:, None] - position
    fill = torch.finfo(F32).min
    times = {}
    for width in (256, 8192):
        case["mask"] = torch.where((back >= 0) & (back < width), 0.0, fill)[None, :, None]
        train(case)
        times[width] = min(_milliseconds(lambda: train(case)) for _ in range(10))
    assert times[256] < times[8192] / 3, times


def _milliseconds(fn):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    fn()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def test_more_than_2_to_the_31_elements_of_the_mask():
    S = 2**16
    q = torch.zeros(1, S, 1, 1, 16, device="cuda", dtype=BF16)
    k = torch.randn(1, 1, S, 16, device="cuda").to(BF16)
    q[:, -3:] = torch.randn(1, 3, 1, 1, 16, device="cuda").to(BF16)
    mask = torch.zeros(1, S, 1, S, device="cuda", dtype=torch.bool)
    mask[:, :, :, -200:] = True
    mask[:, -3:, :, -150:] = False
    o = selection_attention(q, k, k, mask=mask)
    want = selection_attention(q[:, -3:], k, k, mask=mask[:, -3:])
    assert error(o[:, -3:], want) < 2**-8 and not o[:, :1].isnan().any()
