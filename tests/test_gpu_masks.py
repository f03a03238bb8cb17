# SPDX-License-Identifier: Apache-2.0
"""Selection attention under a mask on a GPU: kernels, compiled code, CUDA graphs, memory, large tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_gpu import kernels_of
from test_gpu_lists import equal, no_synchronisation, relative

from mhc_inductor import selection_attention
from tests.oracles.masks import make_mask
from tests.oracles.mhc import rounding

pytestmark = pytest.mark.gpu
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"B": 1, "S": 256, "S_kv": 1024, "h": 16, "Dk": 128, "kind": "causal"},
    "one head": {"B": 2, "S": 500, "S_kv": 700, "h": 1, "Dk": 64, "kind": "random"},
    "fills": {"B": 2, "S": 300, "S_kv": 300, "h": 4, "Dk": 128, "kind": "fills", "mask": BF16},
    "biased": {"B": 2, "S": 200, "S_kv": 500, "h": 8, "Dk": 256, "kind": "biased", "mask": F32},
    "latent": {"B": 1, "S": 192, "S_kv": 700, "h": 128, "Dk": 576, "Dv": 512, "shared": True, "kind": "window"},
    "latent fills": {"B": 1, "S": 100, "S_kv": 300, "h": 128, "Dk": 576, "Dv": 512, "kind": "fills", "mask": F32},
    "wide": {"B": 2, "S": 100, "S_kv": 600, "h": 64, "Dk": 512, "kind": "sparse"},
}


def made(
    *, B: int, S: int, S_kv: int, h: int, Dk: int, kind: str, Dv: int | None = None, shared: bool = False,
    dtype: torch.dtype = BF16, mask: torch.dtype = torch.bool, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Returns leaves q, k (and v) and a sink, a mask that sequences share, and gradients of o and lse."""
    g = torch.Generator("cuda").manual_seed(seed)
    normal = lambda *shape, dtype=dtype: torch.randn(shape, generator=g, device="cuda").to(dtype)  # noqa: E731
    Dv = Dk if Dv is None else Dv
    case = {"q": normal(B, S, 1, h, Dk), "k": normal(B, 1, S_kv, Dk), "sink": normal(1, h, dtype=F32)}
    if not shared:
        case["v"] = normal(B, 1, S_kv, Dv)
    for t in case.values():
        t.requires_grad_()
    shown = make_mask(kind, (1, S, 1, S_kv), mask, torch.Generator().manual_seed(seed)).cuda()
    return {
        "leaves": case,
        "mask": shown,
        "dout": normal(B, S, 1, h, Dv),
        "dlse": normal(B, S, 1, h, dtype=F32),
        "Dv": Dv,
    }


def attend(q, k, v, mask, sink, Dv):
    return selection_attention(q, k, v, mask=mask, sink=sink, v_width=Dv, return_lse=True)


def train(case, fn=attend, leaves=None):
    """Returns o, lse and the gradients."""
    x = case["leaves"] if leaves is None else leaves
    o, lse = fn(x["q"], x["k"], x.get("v", x["k"]), case["mask"], x["sink"], case["Dv"])
    grads = torch.autograd.grad([o, lse], list(x.values()), [case["dout"].to(o.dtype), case["dlse"].to(lse.dtype)])
    return {"o": o.detach(), "lse": lse.detach(), **{f"d{n}": g for n, g in zip(x, grads, strict=True)}}


def exact(case, dtype=torch.float64):
    """Returns what the written-out formula gives in ``dtype``; rows without keys give 0."""
    leaves = {n: t.detach().to(dtype).requires_grad_() for n, t in case["leaves"].items()}

    def formula(q, k, v, mask, sink, Dv):
        t = torch.einsum("bsghd,bgtd->bsght", q, k) * q.shape[-1] ** -0.5
        mask = mask[:, :, :, None]
        t = (
            torch.where(mask, t, -torch.inf)
            if mask.dtype is torch.bool
            else t.to(torch.promote_types(dtype, F32)) + mask
        )
        empty = (t == -torch.inf).all(-1, keepdim=True)
        most = torch.where(empty, 0.0, t.detach().amax(-1, keepdim=True))
        lse = torch.where(empty[..., 0], 0.0, (torch.where(empty, 0.0, t - most)).logsumexp(-1) + most[..., 0])
        p = torch.cat((t, sink[None, None, :, :, None].expand(*t.shape[:4], 1)), -1).softmax(-1)[..., :-1]
        o = torch.einsum("bsght,bgtd->bsghd", p.to(q.dtype), v[..., :Dv])
        return o, torch.where(empty[..., 0], -torch.inf, lse)

    return train(case, formula, leaves)


def moderate(name, t):
    """Returns t, lse without rows that nothing or only fills are visible to: they are compared by themselves."""
    return torch.where(t > -1e30, t, 0.0) if name == "lse" else t


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_fp64(shape, dtype):
    case = made(**{**SHAPES[shape], "dtype": dtype})
    got, want, plain = train(case), exact(case), exact(case, dtype)
    assert torch.equal(got["lse"] > -1e30, want["lse"] > -1e30)
    assert torch.equal(got["lse"] == -torch.inf, want["lse"] == -torch.inf)
    for name, t in want.items():
        bar = 2 * relative(moderate(name, plain[name]), moderate(name, t)) + 1e-6
        bar += 4 * rounding(dtype) * (name == "dsink")  # it sums products with the rounded o, which cancel
        found = relative(moderate(name, got[name]), moderate(name, t))
        assert found <= bar, f"{name}: {found:.3g} above {bar:.3g}"


@pytest.mark.parametrize("shape", SHAPES)
def test_only_our_kernels_run_and_the_host_never_waits(shape):
    case = made(**SHAPES[shape])
    names = kernels_of(lambda: train(case))
    ours = {n for n in names if n.startswith("selection_")}
    assert ours >= {"selection_mask_tiles", "selection_mask_forward", "selection_mask_dq", "selection_mask_dkv"}
    others = [n for n in names if n not in ours and not any(w in n.lower() for w in ("memset", "fill", "copy"))]
    assert not others, others
    with no_synchronisation():
        train(case)


@pytest.mark.parametrize("shape", SHAPES)
def test_two_runs_give_equal_bits(shape):
    case = made(**SHAPES[shape])
    assert not equal(train(case), train(case))


@pytest.mark.parametrize("shape", ["plain", "fills", "latent"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_equals_eager(shape, dynamic):
    torch._dynamo.reset()
    case = made(**SHAPES[shape])
    compiled = torch.compile(attend, backend="mhc_inductor", fullgraph=True, dynamic=dynamic)
    assert not equal(train(case, compiled), train(case))


def test_one_compile_serves_every_length():
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="mhc_inductor", dynamic=True, fullgraph=True)
    for n, S in enumerate((256, 100, 33, 500)):
        case = made(**{**SHAPES["fills"], "S": S, "S_kv": 2 * S + 7})
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            got, want = train(case, compiled), train(case)
        assert all(relative(moderate(name, got[name]), moderate(name, want[name])) < 2**-9 for name in want)


@pytest.mark.parametrize("shape", ["plain", "fills", "latent"])
def test_a_training_step_captured_in_a_cuda_graph(shape):
    """The tiles are found again in each replay: the mask of the second is another."""
    case = made(**SHAPES[shape])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        train(case)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = train(case)
    other = made(**{**SHAPES[shape], "kind": "random"}, seed=5)
    with torch.no_grad():
        for n, t in case["leaves"].items():
            t.copy_(other["leaves"][n])
        for n in ("mask", "dout", "dlse"):
            case[n].copy_(other[n])
    for t in got.values():
        t.fill_(float("nan"))
    graph.replay()
    assert not equal(got, train(other))


def test_tiles_that_no_query_sees_are_not_read():
    """A window of 256 in 8192 keys: the time is that of the window, far below that of all keys."""
    case = made(B=1, S=8192, S_kv=8192, h=64, Dk=128, kind="none", mask=F32)
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
    assert relative(o[:, -3:], want) < 2**-8 and not o[:, :1].isnan().any()


def test_sizes_above_the_kernels_run_the_reference_once_logged(caplog):
    with caplog.at_level("WARNING", logger="mhc_inductor"):
        case = made(B=1, S=3, S_kv=50, h=4, Dk=600, kind="causal")
        got, want = train(case), exact(case)
    assert [r for r in caplog.records if "D = 600 is above 576" in r.getMessage()]
    assert relative(got["o"], want["o"]) < 2**-7
