# SPDX-License-Identifier: Apache-2.0
"""Single-pass mHC by the package's own functions: what is fused into one op, what stays apart, and equal results."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mhc_inductor import mhc_coefficients, mhc_collapse, mhc_post
from mhc_inductor.nn import HyperConnection
from tests.tools.capture import Captured, difference, eager, run

D, N, T = 16, 4, 6


def raw_ops(got: Captured) -> Counter[str]:
    """Counts the ops in the graphs; a fused op counts as one."""
    names = [str(n.target) for gm in got.graphs for m in gm.modules() if hasattr(m, "graph") for n in m.graph.nodes]
    return Counter(name.split(".")[1] for name in names if name.startswith("mhc_inductor.mhc_"))


def check(fn, inputs, parameters=(), **wanted: int) -> Captured:
    got, plain = run(fn, inputs, parameters), eager(fn, inputs, parameters)
    assert difference(got, plain) < 4e-6  # either side's alpha is up to 2.5e-6 from fp64 (40 seeds)
    assert raw_ops(got) == Counter({f"mhc_{k}": v for k, v in wanted.items() if v})
    assert not got.report.problems
    return got


class Model(nn.Module):
    def __init__(self, depth: int = 3, between=lambda x, k: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            HyperConnection(D, N, nn.Linear(D, D), single_pass=True, transpose_res=True) for _ in range(depth)
        )
        self.between = between
        with torch.no_grad():
            for b in self.blocks:
                b.alpha.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        h_pre = None
        for k, block in enumerate(self.blocks):
            x, h_pre = block((x, h_pre))
            x = self.between(x, k)
        return mhc_collapse(x, h_pre)


def streams(*lead: int) -> Tensor:
    return torch.randn(*(lead or (2, T)), N, D, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("lead", [(2, T), (T,), (1, 1)])
def test_everything_between_two_sublayers_is_one_op(lead):
    model = Model()
    got = check(model, [streams(*lead)], [*model.named_parameters()], coefficients=1, single_pass=2, post=1, collapse=1)
    assert [f.op for f in got.report.fused] == ["mhc_single_pass"] * 2
    assert got.report.fused[0].parts == ("mhc_post", "mhc_collapse", "mhc_coefficients")


def test_dynamic_tokens():
    model = Model()
    got = run(model, [streams()], [*model.named_parameters()], dynamic=True)
    assert difference(got, eager(model, [streams()], [*model.named_parameters()])) < 1e-6
    assert raw_ops(got)["mhc_single_pass"] == 2


def test_floats_that_dynamo_leaves_dynamic_do_not_end_the_fusion_of_other_ops():
    """With dynamic=True the floats of a module become numbers of the graph that are read late: it was left unrouted."""
    torch.manual_seed(0)
    model = nn.Sequential(*[HyperConnection(D, N, nn.Linear(D, D), transpose_res=True) for _ in range(2)])
    got = run(model, [streams()], [*model.named_parameters()], dynamic=True)
    assert difference(got, eager(model, [streams()], [*model.named_parameters()])) < 1e-6
    assert [f.op for f in got.report.fused] == ["mhc_post_pre"] and not got.report.problems


def _engram(x: Tensor, k: int) -> Tensor:
    return x.index_add(0, torch.tensor([0]), x[:1])


def _once(x: Tensor, k: int) -> Tensor:
    return x + 0.1 if k == 0 else x


@pytest.mark.parametrize(("write", "fused"), [(_once, 1), (_engram, 0)], ids=["once", "everywhere"])
def test_another_write_to_the_streams_ends_the_fusion(write, fused):
    model, apart = Model(between=write), 3 - fused
    counts = {"coefficients": apart, "single_pass": fused, "post": apart, "collapse": apart}
    check(model, [streams()], [*model.named_parameters()], **counts)


def parameters(seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    m = N * N + 2 * N
    return [torch.randn(m, N * D, generator=g) * 0.1, torch.ones(3), torch.randn(m, generator=g) * 0.1]


def inputs() -> list[Tensor]:
    g = torch.Generator().manual_seed(2)
    x = streams(T)
    return [x, torch.randn(T, D, generator=g), torch.rand(T, N, generator=g), torch.rand(T, N, N, generator=g)]


def _twice(x, w, p):
    f = torch.tanh(mhc_collapse(x, w))
    h_pre, h_post, h_res = mhc_coefficients(x, *p, sinkhorn_iters=2)
    return mhc_post(x, f, h_post, h_res, transpose_res=False), h_pre


def _reads_the_collapse(x, w, p):
    h_in = mhc_collapse(x, w)
    return h_in, *mhc_coefficients(x, p[0], p[1] * h_in.mean(), p[2])


APART = {"post": 1, "coefficients": 1, "collapse": 1}
AFTER_A_POST = {
    "coefficients after the sublayer are computed earlier": (_twice, {"single_pass": 1, "post": 1}),
    "weights of the same streams": (
        lambda x, w, p: (mhc_collapse(x, (made := mhc_coefficients(x, *p))[0]), made[1]),
        APART,
    ),
    "weights that depend on the streams": (
        lambda x, w, p: (mhc_collapse(x, x.mean(-1)), *mhc_coefficients(x, *p)),
        APART,
    ),
    "coefficients that read the collapse": (_reads_the_collapse, APART),
    "a second collapse reads the streams": (
        lambda x, w, p: (mhc_collapse(x, w), mhc_collapse(x, w * 2), x, *mhc_coefficients(x, *p)),
        {"single_pass": 1, "collapse": 1},
    ),
    "parts in two grad modes": (
        lambda x, w, p: (*torch.no_grad()(mhc_coefficients)(x, *p), mhc_collapse(x, w)),
        APART,
    ),
}


@pytest.mark.parametrize("name", AFTER_A_POST)
def test_what_is_fused_after_a_post(name):
    (rest, counts), p = AFTER_A_POST[name], parameters()
    check(lambda x, f, w, r: rest(mhc_post(x, f, w, r, transpose_res=False), w, p), inputs(), **counts)


def test_a_write_to_the_streams_between_the_parts():
    p = parameters()

    def fn(x, f, w, r):
        x = mhc_post(x, f, w, r, transpose_res=False)
        h_in = mhc_collapse(x, w)
        x.mul_(2)
        return h_in, x, *mhc_coefficients(x, *p)

    got, plain = run(fn, inputs(), grad=False), eager(fn, inputs(), grad=False)
    assert difference(got, plain) < 1e-6
    assert raw_ops(got) == Counter({"mhc_post": 1, "mhc_collapse": 1, "mhc_coefficients": 1})


def test_a_hook_on_the_streams_sees_the_whole_gradient():
    p = parameters()

    def fn(x, f, w, r):
        x = mhc_post(x, f, w, r, transpose_res=False)
        x.register_hook(lambda g: g * 2)
        return mhc_collapse(x, w), *mhc_coefficients(x, *p)

    got, plain = run(fn, inputs()), eager(fn, inputs())
    assert difference(got, plain) < 1e-6


def test_checkpointed_sites():
    model = Model()

    def fn(x):
        h_pre = None
        for block in model.blocks:
            x, h_pre = checkpoint(lambda x, w, b=block: b((x, w)), x, h_pre, use_reentrant=False)
        return mhc_collapse(x, h_pre)

    got = run(fn, [streams()], [*model.named_parameters()])
    assert difference(got, eager(fn, [streams()], [*model.named_parameters()])) < 1e-6
    assert raw_ops(got)["mhc_coefficients"] == 3, "the parts of a fusion are in two regions"


def test_frozen_parameters_and_streams_keep_their_gradients():
    model = Model()
    for p in model.blocks[1].parameters(recurse=False):
        p.requires_grad_(False)
    check(model, [streams()], [*model.named_parameters()], coefficients=1, single_pass=2, post=1, collapse=1)
