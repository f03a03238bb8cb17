# SPDX-License-Identifier: Apache-2.0
"""The index ops on a GPU: parity at real sizes, which kernels run, ties, CUDA graphs, compiled code, memory, loss."""

from __future__ import annotations

import pytest
import test_ops_index_loss as losses
import torch
import torch._dynamo.testing
from test_gpu import captured, kernels_of

import mhc_inductor
from mhc_inductor import index_scores, index_topk, log
from mhc_inductor.kernels.selection import lists_plan
from tests.oracles import index as h

pytestmark = pytest.mark.gpu
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NONE = (None,) * 4
DEVICE = "cuda"  # of the tests of the loss, which are the same on any device


def made(*sizes, dtype=BF16, kind="causal", **kwargs):
    args = h.make_inputs(*sizes, dtype, device="cuda", **kwargs)
    return args, h.visibility(kind, *args[:2])


def named(visible):
    return dict(zip(("limit", "mask", "segments_q", "segments_k"), visible, strict=True))


def both(args, visible, topk, scale=0.1):
    """Checks scores and choice against fp64."""
    want = h.oracle(*args, scale, visible)
    got = index_scores(*args, scale=scale, **named(visible))
    assert torch.equal(got == -torch.inf, want == -torch.inf)
    there = want > -torch.inf
    slack = 2 * h.formula_error(*args, scale) + 2.0**-23 * float(want[there].abs().max())
    assert float((got.double() - want)[there].abs().max()) <= slack
    h.check_topk(index_topk(*args, topk, scale=scale, **named(visible)), args, topk, scale, visible)


@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64])
@pytest.mark.parametrize("kind", ["causal", "everything"])
@pytest.mark.parametrize(
    ("sizes", "topk"),
    [
        ((2, 300, 700, 64, 128), 256),
        ((1, 129, 1025, 32, 64), 512),
        ((2, 3, 3000, 64, 128), 2048),
        ((3, 65, 77, 5, 80), 13),
    ],
)
def test_parity(sizes, topk, kind, dtype):
    torch.backends.cuda.matmul.allow_tf32 = False
    both(*made(*sizes, dtype=dtype, kind=kind), topk)


@pytest.mark.parametrize(("T", "topk"), [(16384, 2048), (16385, 4096), (40000, 2048), (131072, 512)])
@pytest.mark.parametrize("S", [5, 70])
def test_long_rows(S, T, topk):
    args, visible = made(1, S, T, 4, 64, kind="limits")
    both(args, visible, topk)


def test_the_choice_is_that_of_the_scores():
    """Checks 8192 queries against a stable sort of the op's own scores: ties are the lower index's."""
    args, visible = made(1, 8192, 8192, 2, 64)  # with 2 heads a quarter of the scores is exactly 0
    topk = 2048
    scores = index_scores(*args, **named(visible))
    chosen = index_topk(*args, topk, **named(visible))
    for first in range(0, 8192, 1024):
        rows = scores[0, first : first + 1024]
        order = rows.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
        want = torch.zeros_like(rows, dtype=torch.bool).scatter_(1, order, True) & (rows > -torch.inf)
        got = torch.zeros((1024, 8193), dtype=torch.bool, device="cuda")
        index = chosen[0, first : first + 1024].long()
        got.scatter_(1, torch.where(index < 0, 8192, index), True)
        assert torch.equal(got[:, :8192], want)


def test_which_kernels_run():
    args, visible = made(1, 300, 900, 8, 64)
    run = lambda: index_topk(*args, 64, **named(visible))  # noqa: E731
    run()
    assert [n for n in kernels_of(run) if n.startswith("index")] == ["index_tile_scores", "index_select"]


@pytest.mark.parametrize("S", [1, 300])
def test_two_runs_and_any_batch_are_equal(S):
    args, visible = made(3, S, 2000, 64, 128, kind="limits")
    whole = index_topk(*args, 512, **named(visible)), index_scores(*args, **named(visible))
    again = index_topk(*args, 512, **named(visible)), index_scores(*args, **named(visible))
    alone = [t[1:2].contiguous() for t in args]
    limit = visible[0][1:2]
    single = index_topk(*alone, 512, limit=limit), index_scores(*alone, limit=limit)
    for a, b, c in zip(whole, again, single, strict=True):
        assert torch.equal(a, b) and torch.equal(a[1:2], c)


def test_cuda_graph():
    args, visible = made(1, 300, 900, 8, 64)
    graph, chosen = captured(lambda: index_topk(*args, 64, **named(visible)))
    fresh, _ = made(1, 300, 900, 8, 64, seed=5)
    for t, new in zip(args, fresh, strict=True):
        t.copy_(new)
    graph.replay()
    assert torch.equal(chosen, index_topk(*args, 64, **named(visible)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    torch._dynamo.reset()

    def step(q, k, w, limit, topk):
        chosen = index_topk(q, k, w, topk, limit=limit)
        return chosen, index_scores(q, k, w, limit=limit)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for n, (S, T) in enumerate(((300, 900), (411, 1200)) if dynamic else ((300, 900),)):
        args, visible = made(2, S, T, 8, 64)
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            got = compiled(*args, visible[0], T // 4)
        for a, b in zip(got, step(*args, visible[0], T // 4), strict=True):
            assert torch.equal(a, b)
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["everything", "row_mask", "segments"])
def test_compiled_with_masks(kind):
    torch._dynamo.reset()
    args, visible = made(2, 300, 900, 8, 64, kind=kind)

    def fn(*a):
        picks = torch.ops.mhc_inductor.index_topk_scores(*a[:3], 64, 1.0, *a[3:])
        return index_topk(*a[:3], 64, **named(a[3:])), index_scores(*a[:3], **named(a[3:])), *picks

    for a, b in zip(torch.compile(fn, fullgraph=True)(*args, *visible), fn(*args, *visible), strict=True):
        assert torch.equal(a, b)


def test_marks_of_hidden_picks_are_routed():
    """Values of topk that mark hidden picks, compiled, against the same formula in eager mode."""
    torch._dynamo.reset()
    (q, k, w), _ = made(2, 300, 900, 8, 64, dtype=F32)
    w[0, :9], k[1, 5, 0] = -torch.inf, torch.nan
    most = torch.tensor([0.04, 0.06])[:, None, None]  # NaN ties: no row of the first sequence sees 64 keys
    seen = (torch.rand(2, 300, 900, generator=torch.Generator().manual_seed(5)) < most).cuda()

    def fn(q, k, w):
        scores = (torch.einsum("bshd,btd->bsht", q, k).relu() * w[..., None]).sum(2)
        values, indices = scores.masked_fill(~seen, -torch.inf).topk(64, -1)
        return indices.masked_fill(values == -torch.inf, -1).sort(-1).values

    torch.backends.cuda.matmul.allow_tf32 = False
    got = torch.compile(fn, fullgraph=True, backend="mhc_inductor")(q, k, w)
    assert [r.op for r in mhc_inductor.explain(fn, q, k, w).routed] == ["index_topk_scores"]
    assert torch.equal(got, fn(q, k, w))


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("sizes", [(2, 300, 700, 64, 128), (1, 3, 3000, 5, 80), (1, 70, 90, 4, 256)])
def test_gradients(sizes, dtype):
    torch.backends.cuda.matmul.allow_tf32 = False
    args, visible = made(*sizes, dtype=dtype, kind="everything")
    see = h.seen(*args[:2], visible)
    g = torch.randn(see.shape, device="cuda", dtype=F64)
    grads = []
    for exact in (False, True):
        leaves = [(t.double() if exact else t).detach().requires_grad_() for t in args]
        out = h.oracle(*leaves, 0.1, visible) if exact else index_scores(*leaves, scale=0.1, **named(visible))
        grads.append(torch.autograd.grad(out.masked_fill(~see, 0.0), leaves, g.to(out.dtype)))
    for a, b in zip(*grads, strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 2 * torch.finfo(dtype).eps + 1e-5


def test_memory_is_bounded():
    S = 32768
    args = h.make_inputs(1, S, S, 4, 64, BF16, device="cuda")
    limit = (torch.arange(S, device="cuda", dtype=torch.int32) + 1)[None]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = index_topk(*args, 2048, limit=limit)
    used = torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()
    assert used <= 2**29, used


def test_more_than_the_kernels_take_runs_the_reference_and_is_logged_once(caplog):
    log._said.clear()
    args, visible = made(1, 8, 6000, 2, 16)
    with caplog.at_level("WARNING", logger="mhc_inductor"):
        for _ in range(2):
            h.check_topk(mhc_inductor.index_topk(*args, 5000, **named(visible)), args, 5000, 1.0, visible)
    assert len([r for r in caplog.records if "topk = 5000 is above 4096" in r.getMessage()]) == 1


def test_more_than_2_31_scores():
    """Checks offsets beyond 32 bits in the scores."""
    S, T = 40000, 60000
    q, k, w = h.make_inputs(1, S, T, 1, 16, BF16, device="cuda")
    scores = index_scores(q, k, w)
    assert scores.numel() > 2**31
    rows = slice(S - 3, S)
    want = h.oracle(q[:, rows], k, w[:, rows], 1.0, NONE)
    assert float((scores[:, rows] - want).abs().max()) < 1e-3
    h.check_topk(index_topk(q, k, w, 100)[:, rows].contiguous(), (q[:, rows], k, w[:, rows]), 100, 1.0, NONE)


# --- the loss -----------------------------------------------------------------------------------------------


LOSSES = {
    "plain": {"B": 2, "S": 70, "T": 700, "H": 16, "D": 128, "G": 1, "heads": 16, "Dk": 192, "n": 200},
    "groups": {"B": 1, "S": 129, "T": 1025, "H": 5, "D": 80, "G": 4, "heads": 3, "Dk": 66, "n": 77},
    "lse": {"B": 2, "S": 33, "T": 300, "H": 8, "D": 64, "G": 2, "heads": 8, "Dk": 128, "n": 130, "with_lse": True},
    "decoding": {"B": 3, "S": 1, "T": 3000, "H": 64, "D": 128, "G": 1, "heads": 16, "Dk": 576, "n": 512},
    "latent": {"B": 2, "S": 33, "T": 300, "H": 8, "D": 64, "G": 1, "heads": 64, "Dk": 576, "n": 130, "with_lse": True},
    "wide": {"B": 1, "S": 21, "T": 200, "H": 8, "D": 64, "G": 2, "heads": 100, "Dk": 512, "n": 77, "with_lse": True},
    "longer_lists_than_keys": {"B": 2, "S": 9, "T": 4, "H": 3, "D": 8, "G": 2, "heads": 3, "Dk": 6, "n": 11},
}


def loss_case(case="plain", dtype=BF16, **changes):
    """Returns arguments of the op, q, k and w as leaves; with more than one query, query 0 lists nothing."""
    args = [
        t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in losses.make(dtype=dtype, **LOSSES[case] | changes)
    ]
    if args[0].shape[1] == 1:
        args[3].random_(0, args[1].shape[1])
    # Factors for which neither distribution is all on one key.
    args[7:] = [0.3 * args[0].shape[3] ** -0.5, args[4].shape[4] ** -0.5]
    return [*(t.requires_grad_() for t in args[:3]), *args[3:]]


def trained(args, loss_of=losses.loss_of):
    """Returns the loss and the gradients of q, k and w, for a gradient of the loss that is not the same in all rows."""
    loss = loss_of(args)
    up = torch.rand(loss.shape, generator=torch.Generator().manual_seed(3), dtype=F64).to(loss)
    return loss.detach(), *torch.autograd.grad(loss, args[:3], up)


def assert_bits(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("most", [lists_plan.MOST_QUERIES, 20])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("case", LOSSES)
def test_loss_and_gradients(case, dtype, most, monkeypatch):
    monkeypatch.setattr(lists_plan, "MOST_QUERIES", most)
    torch.backends.cuda.matmul.allow_tf32 = False
    args = loss_case(case, dtype)
    exact = [t.detach().cpu() if isinstance(t, torch.Tensor) else t for t in args]
    exact[:3] = [t.double().requires_grad_() for t in exact[:3]]
    got, want = trained(args), trained(exact, lambda x: losses.dense(*x))
    assert got[0].dtype is F32 and got[0].device.type == DEVICE
    for a, b, like in zip(got, want, (got[0], *args[:3]), strict=True):
        assert (a.shape, a.dtype) == (b.shape, like.dtype)
        # Tensor cores round every partial sum towards zero.
        assert losses.error(a.cpu(), b) < (2 * torch.finfo(dtype).eps + 1e-5 if a is not got[0] else 4e-5)


LOSS_KERNELS = [
    "selection_list_keys", "index_list_heads", "index_list_heads", "index_loss_rows",
    "selection_list_keys", "index_loss_factors", "index_loss_gradients", "selection_list_slots", "selection_list_invert",
    "selection_list_sum",
]  # fmt: skip


@pytest.mark.parametrize(("case", "wgmma"), [("plain", 0), ("lse", 0), ("latent", 1), ("wide", 4)])
def test_which_kernels_the_loss_runs(case, wgmma):
    args = loss_case(case)
    expected = [*LOSS_KERNELS]
    if wgmma and torch.cuda.get_device_capability() == (9, 0):
        expected[2:3] = ["index_list_target_wgmma"] * wgmma
    up = torch.ones(args[0].shape[:2], device=DEVICE)
    run = lambda: torch.autograd.grad(losses.loss_of(args), args[:3], up)  # noqa: E731
    run()
    names = kernels_of(run)
    assert [n for n in names if n.startswith(("index_", "selection_"))] == expected
    others = [n for n in names if n not in expected]
    assert all("Fill" in n or "Memset" in n for n in others), others  # slots are 0 before


def test_the_loss_of_more_than_the_kernels_take_runs_the_reference_and_is_logged_once(caplog):
    log._said.clear()
    args = loss_case("plain", n=5000, S=3)
    with caplog.at_level("WARNING", logger="mhc_inductor"):
        for _ in range(2):
            trained(args)
    for op in ("index_loss", "index_loss_backward"):
        message = f"{op} runs the reference formula on cuda:0: n = 5000 keys a query are above 4096"
        assert [r.getMessage() for r in caplog.records].count(message) == 1


def test_memory_of_the_loss():
    """Checks the peak of the loss and its gradients beyond inputs and outputs, at DeepSeek-V3.2's widths."""
    args = loss_case(B=1, S=8192, T=8192, H=64, D=128, G=1, heads=64, Dk=576, n=2048, with_lse=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = trained(args)
    dscores = 4 * args[3].numel()  # the op's second output
    used = torch.cuda.max_memory_allocated() - before - dscores - sum(t.nbytes for t in out)
    assert used <= 2**30, used


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("with_lse", [False, True])
def test_loss_compiled(with_lse, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: losses.loss_of(t), fullgraph=True, dynamic=dynamic)
    for n, (S, T) in enumerate(((70, 700), (81, 900)) if dynamic else ((70, 700),)):
        args = loss_case(S=S, T=T, with_lse=with_lse)
        args[7:] = [0.02, 0.07]
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            got = trained(args, lambda x: compiled(*x))
        assert_bits(got, trained(args))
    torch._dynamo.reset()


def test_deterministic_algorithms_give_a_query_equal_bits_in_any_batch(monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    args, _ = made(2, 300, 2000, 64, 128)
    few = args[0][:, 5:9], args[1], args[2][:, 5:9]
    assert torch.equal(index_scores(*few), index_scores(*args)[:, 5:9])
    assert torch.equal(index_topk(*few, 512), index_topk(*args, 512)[:, 5:9])
    for kind in h.KINDS:  # a tile has more rows than a sequence has queries
        both(*made(40, 5, 200, 4, 64, kind=kind), 30)
