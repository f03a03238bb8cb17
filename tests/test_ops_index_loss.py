# SPDX-License-Identifier: Apache-2.0
"""The op of an indexer's training loss: the dense formula, gradients, opcheck, memory, validation, vmap, compilation."""

from __future__ import annotations

import pytest
import torch
from test_reference_selection import Largest
from torch.func import vmap
from torch.library import opcheck

from mhc_inductor import index_loss
from mhc_inductor.ops.index_loss import call
from mhc_inductor.reference import index_loss as reference
from tests.oracles.op_contract import check_outputs, op, trainable

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OPS = torch.ops.mhc_inductor
NAMES = ("q", "k", "w", "indices", "attention_q", "attention_k", "lse", "scale", "attention_scale")
pytestmark = pytest.mark.usefixtures("one_thread")


def lists(B, S, T, n, seed=2):
    """Returns random lists with repeats and positions out of range; query 0 of each sequence lists nothing."""
    indices = torch.randint(-3, T + 2, (B, S, n), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    indices[:, :1] = -1
    return indices


def make(B=2, S=5, T=9, H=3, D=8, G=2, heads=3, Dk=6, n=7, dtype=F32, *, w_dtype=None, with_lse=False, seed=0):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=g, dtype=F64).to(dtype)

    q, k, w = draw(B, S, H, D), draw(B, T, D), draw(B, S, H).to(w_dtype or dtype)
    aq, ak = draw(B, S, G, heads, Dk), draw(B, G, T, Dk)
    lse = (draw(B, S, G, heads).abs() + 3).float() if with_lse else None
    return q, k, w, lists(B, S, T, n), aq, ak, lse, 0.7, 0.6


def dense(q, k, w, indices, aq, ak, lse, scale, attention_scale):
    """Returns the loss [B, S] by the dense formula in fp64, over all T keys under a mask."""
    q, k, w, aq, ak = (t.double() for t in (q, k, w, aq, ak))
    B, S, T = q.shape[0], q.shape[1], k.shape[1]
    listed = torch.zeros((B, S, T + 1), dtype=torch.bool)
    listed.scatter_(-1, torch.where((indices < 0) | (indices >= T), T, indices).long(), True)
    listed = listed[..., :T]
    index = (w.unsqueeze(-1) * torch.relu(scale * torch.einsum("bshd,btd->bsht", q, k))).sum(2)
    r = torch.softmax(index.masked_fill(~listed, -1e9), -1)
    scores = (attention_scale * torch.einsum("bsghd,bgtd->bsght", aq, ak)).masked_fill(~listed[:, :, None, None], -1e9)
    p = torch.softmax(scores, -1) if lse is None else torch.exp(scores - lse.double().unsqueeze(-1))
    p = p.sum((2, 3)) * listed
    p = (p / p.sum(-1, keepdim=True).clamp(min=1e-300)).detach()
    return torch.where(p > 0, p * (p.clamp(min=1e-300).log() - r.clamp(min=1e-300).log()), 0.0).sum(-1)


def error(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def loss_of(args):
    return OPS.index_loss(*args)[0]


# --- the formula --------------------------------------------------------------------------------------------


SIZES = {
    "plain": {},
    "lse": {"with_lse": True},
    "one": {"B": 1, "S": 1, "T": 1, "H": 1, "D": 1, "G": 1, "heads": 1, "Dk": 1, "n": 1},
    "longer_lists_than_keys": {"T": 4, "n": 11},
    "decoding": {"S": 1, "T": 40, "n": 13},
}


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16])
@pytest.mark.parametrize("chunk", [2**22, 300])
def test_loss_and_gradients_are_the_dense_formulas(case, dtype, chunk, monkeypatch):
    monkeypatch.setattr(reference, "CHUNK", chunk)
    args = make(dtype=dtype, **SIZES[case])
    if case in ("one", "decoding"):  # the only query lists something
        args[3].random_(0, args[1].shape[1])
    wanted = [0, 1, 2]
    got_in = [a.detach().requires_grad_() if i in wanted else a for i, a in enumerate(args)]
    want_in = [a.detach().double().requires_grad_() if i in wanted else a for i, a in enumerate(args)]
    got, want = loss_of(got_in), dense(*want_in)
    assert got.dtype is (F64 if dtype is F64 else F32)
    small = 1e-12 if dtype is F64 and case != "lse" else 1e-5
    assert float((got.detach().double() - want.detach()).abs().max()) < small
    up = torch.rand(want.shape, generator=torch.Generator().manual_seed(3), dtype=F64)
    gots = torch.autograd.grad(got, got_in[:3], up.to(got.dtype))
    wants = torch.autograd.grad(want, want_in[:3], up)
    for i, a, b in zip(wanted, gots, wants, strict=True):
        assert (a.dtype, a.shape) == (args[i].dtype, args[i].shape)
        assert float((a.double() - b).norm()) < 2 * torch.finfo(a.dtype).eps * float(b.norm()) + small


def test_gradcheck():
    q, k, w, *rest = make(S=3, dtype=F64)
    leaves = tuple(t.requires_grad_() for t in (q, k, w))
    assert torch.autograd.gradcheck(lambda *t: OPS.index_loss(*t, *rest)[0], leaves)


def test_a_query_without_keys_has_no_loss_and_no_gradient():
    args = [a.requires_grad_() if i < 3 else a for i, a in enumerate(make())]
    loss = loss_of(args)
    assert (loss[:, 0] == 0).all() and (loss[:, 1:] > 0).any() and loss.isfinite().all()
    dq, _, dw = torch.autograd.grad(loss.sum(), args[:3])
    assert not dq[:, 0].any() and not dw[:, 0].any() and dq[:, 1:].any()


def test_the_attention_gets_no_gradient():
    args = trainable(make(with_lse=True))
    loss_of(args).sum().backward()
    assert [a.grad is None for a in args[:7]] == [False, False, False, True, True, True, True]


def test_order_repeats_and_positions_out_of_range_change_nothing():
    args = list(make())
    want = loss_of(args)
    args[3] = torch.cat((args[3].flip(-1), args[3][..., 2:5], torch.full_like(args[3], 2**31 - 1)), -1)
    assert error(loss_of(args), want) < 1e-6
    args[3] = args[3].long() - 2**40 * (args[3] < 0)
    assert error(loss_of(args), want) < 1e-6


def test_nan_in_keys_that_are_not_listed_reaches_nothing():
    args = list(make(T=20))
    args[3] = args[3].clamp(max=9).masked_fill(args[3] == 0, -1)
    clean = [a.clone().requires_grad_() if i < 3 else a for i, a in enumerate(args)]
    for i, at in ((1, (slice(None), [0, *range(10, 20)])), (5, (slice(None), slice(None), [0, *range(10, 20)]))):
        args[i] = args[i].clone()
        args[i][at] = torch.nan
    args = [a.requires_grad_() if i < 3 else a for i, a in enumerate(args)]
    assert torch.equal(loss_of(args), loss_of(clean))
    for a, b in zip(*(torch.autograd.grad(loss_of(x).sum(), x[:3]) for x in (args, clean)), strict=True):
        assert torch.equal(a, b)


def test_nan_in_a_query_stays_with_its_row_and_the_keys_that_it_lists():
    args = list(make())
    args[0][0, 2, 1, 3] = torch.nan
    args[3][0, 2] = torch.tensor([4, -1, 4, 5, -1, 9, 4])
    args = [a.requires_grad_() if i < 3 else a for i, a in enumerate(args)]
    loss = loss_of(args)
    assert loss.isnan().nonzero().tolist() == [[0, 2]]
    dq, dk, _ = torch.autograd.grad(loss.sum(), args[:3])
    assert dq.isnan().any(-1).any(-1).nonzero().tolist() == [[0, 2]]
    assert dk.isnan().any(-1).nonzero().tolist() == [[0, 4], [0, 5]]


def test_memory_is_bounded(monkeypatch):
    """Checks that no tensor of S * T elements is made, nor one of S times heads times the listed keys."""
    args = [a.requires_grad_() if i < 3 else a for i, a in enumerate(make(B=1, S=600, T=600, G=1, heads=8, n=16))]
    want = loss_of(args)
    grads = torch.autograd.grad(want.sum(), args[:3])
    monkeypatch.setattr(reference, "CHUNK", 4000)
    with Largest() as largest:
        got = loss_of(args)
        again = torch.autograd.grad(got.sum(), args[:3])
    inputs = max(a.numel() for a in args if isinstance(a, torch.Tensor))
    assert largest.numel <= inputs < 600 * 8 * 16 < 600 * 600
    assert error(got, want) < 1e-6
    assert all(error(a, b) < 1e-5 for a, b in zip(again, grads, strict=True))


@pytest.mark.parametrize("change", [{"B": 0}, {"S": 0}, {"T": 0}, {"n": 0}])
def test_sizes_of_none(change):
    args = [a.requires_grad_() if i < 3 else a for i, a in enumerate(make(**change))]
    loss = loss_of(args)
    assert loss.shape == args[0].shape[:2] and not loss.any()
    for a, grad in zip(args, torch.autograd.grad(loss.sum(), args[:3]), strict=False):
        assert grad.shape == a.shape and not grad.any()


def test_runs_are_bit_equal():
    args = trainable(make(B=2, S=64, T=30, n=20))

    def run():
        return torch.autograd.grad(loss_of(args).sum(), args[:3])

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


# --- the contract -------------------------------------------------------------------------------------------


def backward_sample(**kwargs):
    args = make(**kwargs)
    loss, dscores = OPS.index_loss(*args)
    return torch.ones_like(loss), *args[:4], dscores, args[7]


VARIANTS = {
    "plain": {},
    "lse": {"with_lse": True},
    "fp64": {"dtype": F64},
    "bf16": {"dtype": BF16, "w_dtype": F32},
    "one_query": {"S": 1},
}
SAMPLES = [
    pytest.param(name, sample, v, id=f"{name}-{k}")
    for name, sample in (("index_loss", make), ("index_loss_backward", backward_sample))
    for k, v in VARIANTS.items()
]


@pytest.mark.parametrize(("name", "sample", "variant"), SAMPLES)
def test_opcheck(name, sample, variant):
    args = sample(**variant)
    if name == "index_loss":  # the backward op raises when differentiated, by design
        args = (*trainable(args[:3]), *args[3:])
    opcheck(op(name), args)


@pytest.mark.parametrize(("name", "sample", "variant"), SAMPLES)
def test_outputs_are_fresh_contiguous_and_as_the_fake_says(name, sample, variant):
    check_outputs(name, sample(**variant), error)


def test_double_backward_raises():
    args = trainable(make())
    (dq,) = torch.autograd.grad(loss_of(args).square().sum(), args[0], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported: index_loss_backward"):
        dq.sum().backward()


def test_vmap():
    args = make(B=4)
    inputs = [t.unflatten(0, (2, 2)) if isinstance(t, torch.Tensor) else t for t in args]
    dims = tuple(0 if isinstance(t, torch.Tensor) else None for t in inputs)
    assert error(vmap(lambda *t: OPS.index_loss(*t)[0], in_dims=dims)(*inputs).flatten(0, 1), loss_of(args)) < 1e-6

    def grads(*t):
        return torch.func.grad(lambda q: call("index_loss", q, *t[1:])[0].sum())(t[0])

    leaf = args[0].clone().requires_grad_()
    (want,) = torch.autograd.grad(loss_of((leaf, *args[1:])).sum(), leaf)
    assert error(grads(*args), want) < 1e-6
    assert error(vmap(grads, in_dims=dims)(*inputs).flatten(0, 1), want) < 1e-6


def test_autocast_changes_nothing():
    args = trainable(make())
    want = torch.autograd.grad(loss_of(args).sum(), args[:3])
    with torch.autocast("cpu", BF16):
        loss = loss_of(args)
        got = torch.autograd.grad(loss.sum(), args[:3])
    assert loss.dtype is F32 and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


BAD = [
    ("q", torch.zeros(2, 5, 8), ValueError, r"q must have shape \[B, S, H, D\]"),
    ("k", torch.zeros(2, 9, 7), ValueError, r"k must have shape \[B, T, D\]"),
    ("k", torch.zeros(2, 9, 8, dtype=BF16), TypeError, "k must have q's dtype"),
    ("w", torch.zeros(2, 5, 4), ValueError, r"w must have shape \[B, S, H\]"),
    ("indices", torch.zeros(2, 5, 7), TypeError, "indices must be int32 or int64"),
    ("indices", torch.zeros(2, 5, 1, 7, dtype=torch.int32), ValueError, r"indices must have shape \[B, S, n\]"),
    ("indices", torch.zeros(2, 4, 7, dtype=torch.int32), ValueError, r"indices must have shape \[B, S, n\]"),
    ("attention_q", torch.zeros(2, 5, 6, 6), ValueError, r"attention_q must have shape \[B, S, G, h, Dk\]"),
    ("attention_q", torch.zeros(2, 4, 2, 3, 6), ValueError, r"attention_q must have shape \[B, S, G, h, Dk\]"),
    ("attention_k", torch.zeros(2, 3, 9, 6), ValueError, r"attention_k must have shape \[B, G, T, Dk\]"),
    ("attention_k", torch.zeros(2, 2, 9, 6, dtype=BF16), TypeError, "attention_k must have attention_q's dtype"),
    ("lse", torch.zeros(2, 5, 2), ValueError, r"lse must have shape \[B, S, G, h\]"),
    ("scale", float("nan"), ValueError, "scale must be finite"),
    ("attention_scale", float("inf"), ValueError, "attention_scale must be finite"),
]


@pytest.mark.parametrize(("name", "value", "kind", "message"), BAD)
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_bad_input_is_named(name, value, kind, message, where):
    args = dict(zip(NAMES, make(), strict=True)) | {name: value}
    with pytest.raises(kind, match="index_loss: " + message):
        OPS.index_loss(*[a.to(where) if isinstance(a, torch.Tensor) else a for a in args.values()])


# --- the public function ------------------------------------------------------------------------------------


def named(args):
    return dict(zip(NAMES, args, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("with_lse", [False, True])
def test_the_function_reduces_the_dense_formula(reduction, with_lse):
    args = trainable(make(with_lse=with_lse))
    got = index_loss(**named(args), reduction=reduction)
    exact = [a.detach().double().requires_grad_() if i < 3 else a for i, a in enumerate(args)]
    each = dense(*exact)
    listed = ((args[3] >= 0) & (args[3] < 9)).any(-1).sum()
    want = {"mean": each.sum() / listed, "sum": each.sum(), "none": each}[reduction]
    assert got.shape == want.shape and got.dtype is F32 and error(got, want) < 1e-5
    grads = torch.autograd.grad(got.sum(), args[:3])
    assert all(error(a, b) < 1e-5 for a, b in zip(grads, torch.autograd.grad(want.sum(), exact[:3]), strict=True))


def test_the_functions_scales_are_the_roots_of_the_widths():
    args = make()
    want = index_loss(*args[:6], scale=8**-0.5, attention_scale=6**-0.5)
    assert torch.equal(index_loss(*args[:6]), want)


def test_the_function_of_no_query_with_keys_is_0():
    args = list(make())
    args[3] = torch.full_like(args[3], -1)
    assert index_loss(*args[:6]) == 0


@pytest.mark.parametrize(
    ("name", "value", "kind", "message"),
    [
        *BAD,
        ("q", torch.zeros(()), ValueError, r"q must have shape \[B, S, H, D\]"),
        ("attention_q", torch.zeros(()), ValueError, r"attention_q must have shape \[B, S, G, h, Dk\]"),
        ("attention_k", None, TypeError, "attention_k must be a tensor, got NoneType"),
        ("scale", "1", TypeError, "scale must be a number, got str"),
        ("reduction", "all", ValueError, "reduction must be mean, sum or none, got 'all'"),
    ],
)
def test_bad_input_of_the_function_is_named(name, value, kind, message):
    with pytest.raises(kind, match="^index_loss: " + message):
        index_loss(**named(make()) | {name: value})


@pytest.mark.parametrize("name", ["scale", "attention_scale"])
def test_the_function_gives_its_scales_defaults_to_tensors_without_a_width(name):
    args = named(make()) | {name: None, "q": torch.zeros(()), "attention_q": torch.zeros(())}
    with pytest.raises(ValueError, match=r"^index_loss: q must have shape \[B, S, H, D\]"):
        index_loss(**args)


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_function_compiles_once_for_all_sizes(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: index_loss(*t), fullgraph=True, dynamic=dynamic, backend="mhc_inductor")
    for n, sizes in enumerate(({}, {"S": 7, "T": 12}) if dynamic else ({},)):
        args = trainable(make(**sizes))[:6]
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            got = torch.autograd.grad(compiled(*args), args[:3])
        assert all(
            error(a, b) < 1e-6 for a, b in zip(got, torch.autograd.grad(index_loss(*args), args[:3]), strict=True)
        )
    torch._dynamo.reset()
