# SPDX-License-Identifier: Apache-2.0
"""Which results are equal in bits on a GPU: what a trainer and a server of one model may rely on (docs/determinism.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mhc_inductor
from benchmarks import mhc_calls as ours
from benchmarks.mhc_cases import PostPre, make_inputs
from mhc_inductor import index_topk, selection_attention
from mhc_inductor.kernels.launch import batch_invariant
from tests.formulas.reference_models_mhc import liger, parameters

pytestmark = pytest.mark.gpu
TOKENS = (1, 16, 64, 65, 256, 257)
F32 = torch.float32
Named = dict[str, Tensor]


def assert_first(few: Named, many: Named, tokens: int) -> None:
    """Asserts that ``few`` are the first tokens of ``many``."""
    assert few.keys() == many.keys()
    assert [k for k in few if not torch.equal(few[k], many[k][:tokens])] == []


def site(tokens: int = 600, dim: int = 2560, dtype: torch.dtype = torch.bfloat16) -> PostPre:
    torch.manual_seed(0)
    i = make_inputs((tokens,), 4, dim, torch.device("cuda"), dtype=dtype)
    out = ours.ops_pre(i)
    return PostPre.make(i, out["h_post"], out["h_res"]).single_pass()


def first(p: PostPre, tokens: int) -> PostPre:
    assert p.h_pre is not None
    found = PostPre.make(p.inputs.tokens(0, tokens), p.h_post[:tokens], p.h_res[:tokens])
    return dataclasses.replace(found, h_pre=p.h_pre[:tokens])


CALLS: dict[str, Callable[[PostPre], Named]] = {
    "pre": lambda p: ours.ops_pre(p.inputs),
    "post": lambda p: ours.ops_post(p.inputs, p.h_post, p.h_res),
    "post and pre, fused": ours.ops_post_pre,
    "single pass": ours.ops_single_pass,
}


@pytest.mark.parametrize("dim", [2560, 4096, 7168])
@pytest.mark.parametrize("name", CALLS)
def test_mhc_of_a_token_in_any_batch(name: str, dim: int) -> None:
    """Prefill and decoding, and every size of a batch: few tokens run other kernels, with the same sums."""
    p = site(dim=dim)
    many = CALLS[name](p)
    for tokens in TOKENS:
        assert_first(CALLS[name](first(p, tokens)), many, tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("call", [ours.ops_post_pre, ours.ops_single_pass], ids=["post and pre", "single pass"])
def test_a_fused_boundary_and_its_parts(call: Callable[..., Named], dtype: torch.dtype) -> None:
    """The streams are equal. In bf16 the fused kernel adds the columns of the projection in another order."""
    for tokens in (1, 600):
        p = site(tokens, dtype=dtype)
        fused, parts = call(p, fused=True), call(p, fused=False)
        assert torch.equal(fused["x_out"], parts["x_out"])
        for name, t in parts.items():
            apart = (fused[name].double() - t.double()).norm() / t.double().norm()
            assert apart <= (5e-3 if t.dtype == torch.bfloat16 else 1e-4) and (dtype != F32 or apart == 0), name


def test_inference_and_training_graphs() -> None:
    torch.manual_seed(0)
    p = {k: v.detach().cuda().requires_grad_() for k, v in parameters().items()}
    x = torch.randn(2, 40, 4, 32, device="cuda", dtype=torch.bfloat16)
    step = torch.compile(lambda x: liger(x, p), backend="mhc_inductor", fullgraph=True)
    trained = step(x)
    with torch.no_grad():
        served = step(x)
    assert trained.requires_grad and torch.equal(trained, served)


@pytest.mark.parametrize("n", [32, 64, 128])
def test_e79_in_one_call_or_step_by_step_and_in_any_batch(n: int) -> None:
    torch.manual_seed(0)
    kvqm = torch.randn(21, 33, 4 * n, device="cuda")
    whole, S, M = mhc_inductor.e79_scan(kvqm)
    few, s, m = mhc_inductor.e79_scan(kvqm[:17])
    outs = [few]
    for t in range(17, 21):
        out, s, m = mhc_inductor.e79_scan(kvqm[t : t + 1], S0=s, M0=m)
        outs.append(out)
    assert torch.equal(torch.cat(outs), whole) and torch.equal(s, S) and torch.equal(m, M)
    assert torch.equal(mhc_inductor.e79_scan(kvqm[:, 5:6])[0], whole[:, 5:6])


def lists(h: int, width: int, v_width: int, tokens: int = 300) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q = torch.randn(1, tokens, 1, h, width, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 1, 4096, width, device="cuda", dtype=torch.bfloat16)
    at = torch.rand(1, tokens, 1, 4096, device="cuda").topk(512).indices.sort(-1).values.int()
    return q, k, k[..., :v_width], at


@pytest.mark.parametrize("shape", [(16, 128, 128), (64, 512, 512), (128, 576, 512)], ids=str)
def test_attention_over_lists_of_a_query_in_any_number_if_batch_invariant(shape: tuple[int, int, int]) -> None:
    q, k, v, at = lists(*shape)

    def attend(tokens: int) -> Tensor:
        o = selection_attention(q[:, :tokens], k, v, indices=at[:, :tokens], v_width=shape[2])
        assert isinstance(o, Tensor)
        return o

    with batch_invariant():
        many = attend(300)
        for tokens in (1, 4, 16, 17):
            assert torch.equal(attend(tokens), many[:, :tokens]), tokens


def test_attention_over_ranges_and_index_of_a_query_in_any_number_if_batch_invariant() -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 300, 2, 8, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 2, 4096, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    # Five ranges of whole tiles of keys and three of any keys, so that neighbours select parts of a tile.
    starts = torch.randint(0, 32, (1, 300, 2, 8, 1), device="cuda", dtype=torch.int32) * 128
    starts[..., 5:, :] += torch.randint(0, 100, (1, 300, 2, 3, 1), device="cuda", dtype=torch.int32)
    ranges = torch.cat((starts, starts + 128), -1)
    index = (
        torch.randn(1, 300, 16, 128, device="cuda", dtype=torch.bfloat16),
        torch.randn(1, 4096, 128, device="cuda", dtype=torch.bfloat16),
        torch.randn(1, 300, 16, device="cuda"),
    )

    def both(tokens: int) -> tuple[Tensor, Tensor]:
        o = selection_attention(q[:, :tokens], k, v, ranges[:, :tokens])
        assert isinstance(o, Tensor)
        return o, index_topk(index[0][:, :tokens], index[1], index[2][:, :tokens], 256)

    with batch_invariant():
        many = both(300)
        for tokens in (1, 16, 17):
            for few, whole in zip(both(tokens), many, strict=True):
                assert torch.equal(few, whole[:, :tokens]), tokens


@pytest.mark.parametrize("h, width, v_width", [(16, 128, 128), (128, 576, 512)])
def test_the_option_of_a_compile(h: int, width: int, v_width: int) -> None:
    """Kernels in the generated code, and ops that it calls (latent rows run Gluon kernels, which the op launches)."""
    q, k, v, at = lists(h, width, v_width)

    def attend(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        o = selection_attention(q, k, k[..., :v_width] if h == 128 else v, indices=at, v_width=v_width)
        assert isinstance(o, Tensor)
        return o

    options = {"mhc_inductor.batch_invariant": True}
    step = torch.compile(attend, backend="mhc_inductor", options=options, dynamic=False, fullgraph=True)
    with torch.no_grad():
        many = step(q, k, v, at)
        assert torch.equal(step(q[:, :1].contiguous(), k, v, at[:, :1].contiguous()), many[:, :1])
