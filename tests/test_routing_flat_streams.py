# SPDX-License-Identifier: Apache-2.0
"""Streams kept flat, [s, b, n * D] or [b, s, n * D], whose last expand-and-mix nothing views as [..., n, D]."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.formulas.reference_models_mhc import ITERS, WIDTH, N, _balanced, _gates, normed, parameters, sublayer
from tests.test_routing_mhc_laws import same, streams
from tests.tools.capture import Captured, alike, reasons

Mix = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Returns x_out [a, b, n * D] of x [a, b, n, D], R [a, b, n, n], h_post [a, b, n] and f_out [a, b, D]."""


def batched(x: Tensor, matrix: Tensor, post: Tensor, f: Tensor) -> Tensor:
    a, b = x.shape[:2]
    mixed = torch.bmm(matrix.reshape(a * b, N, N), x.reshape(a * b, N, WIDTH)).view(a, b, N * WIDTH)
    return mixed + (post.unsqueeze(-1) * f.unsqueeze(2)).view(a, b, N * WIDTH)


def megatron(x: Tensor, matrix: Tensor, post: Tensor, f: Tensor) -> Tensor:
    """Expands a bias of the sublayer apart from its output."""
    a, b = x.shape[:2]
    out = (post.unsqueeze(-1) * f.unsqueeze(2)).view(a, b, -1)
    out = out + (post.unsqueeze(-1) * torch.linspace(-1, 1, WIDTH).view(1, 1, 1, WIDTH)).view(a, b, -1)
    return out + torch.matmul(matrix, x).view(a, b, -1)


def each(x: Tensor, matrix: Tensor, post: Tensor, f: Tensor) -> list[Tensor]:
    xs = x.flatten(-2).chunk(N, -1)
    mixed = [sum(matrix[..., o, i : i + 1] * xs[i] for i in range(N)) for o in range(N)]
    return [post[..., o : o + 1] * f + mixed[o] for o in range(N)]


MIXES: dict[str, Mix] = {
    "a batched product": batched,
    "two addends of the sublayer": megatron,
    "the transposed matrix": lambda x, r, h, f: (r.mT @ x).flatten(2) + (h.unsqueeze(-1) * f.unsqueeze(2)).flatten(2),
    "repeated": lambda x, r, h, f: (r @ x).flatten(-2) + h.repeat_interleave(WIDTH, -1) * f.repeat(1, 1, N),
    "outer product": lambda x, r, h, f: (r @ x).flatten(-2) + (h.unsqueeze(-1) @ f.unsqueeze(-2)).flatten(-2),
    "flat parts": lambda x, r, h, f: (r @ x).flatten(-2) + (h.unsqueeze(-1) * f.unsqueeze(-2)).flatten(-2),
    "two batched products": lambda x, r, h, f: (
        torch.bmm(r.flatten(0, 1), x.flatten(0, 1)) + torch.bmm(h.flatten(0, 1)[..., None], f.flatten(0, 1)[:, None])
    ).view(*x.shape[:2], -1),
    "einsum": lambda x, r, h, f: (
        torch.einsum("abij,abjd->abid", r, x).flatten(2) + torch.einsum("abi,abd->abid", h, f).flatten(2)
    ),
    "cat": lambda x, r, h, f: torch.cat(each(x, r, h, f), -1),
    "no matrix": lambda x, r, h, f: x.flatten(-2) + (h.unsqueeze(-1) * f.unsqueeze(-2)).flatten(-2),
}
OTHERS: dict[str, Mix] = {
    "weights in the order of columns": lambda x, r, h, f: (
        (r @ x).flatten(-2) + h.repeat(1, 1, WIDTH) * f.repeat(1, 1, N)
    ),
    "columns before streams": lambda x, r, h, f: (r @ x).flatten(-2) + (f.unsqueeze(-1) * h.unsqueeze(-2)).flatten(-2),
    "each column repeated": lambda x, r, h, f: (
        (r @ x).flatten(-2) + h.repeat_interleave(WIDTH, -1) * f.repeat_interleave(N, -1)
    ),
    "the mix has columns first": lambda x, r, h, f: (
        (r @ x).mT.flatten(-2) + (h.unsqueeze(-1) * f.unsqueeze(-2)).flatten(-2)
    ),
    "cat in another order": lambda x, r, h, f: torch.cat(each(x, r, h, f)[::-1], -1),
    "one stream twice": lambda x, r, h, f: torch.cat([*each(x, r, h, f)[:-1], each(x, r, h, f)[0]], -1),
    "one stream scaled": lambda x, r, h, f: torch.cat([2 * each(x, r, h, f)[0], *each(x, r, h, f)[1:]], -1),
    "the streams before it": lambda x, r, h, f: (
        (r @ x.roll(1, -2)).flatten(-2) + (h.unsqueeze(-1) * f.unsqueeze(-2)).flatten(-2)
    ),
    "shifted by a column": lambda x, r, h, f: (
        (r @ x).flatten(-2).roll(1, -1) + (h.unsqueeze(-1) * f.unsqueeze(-2)).flatten(-2)
    ),
    "the weights of the next token": lambda x, r, h, f: batched(x, r, h.roll(1, 1), f),
    "columns in a dim before streams": lambda x, r, h, f: x.mT @ r.mT + f.unsqueeze(-1) * h.unsqueeze(-2),
}
PARAMETERS = parameters()


def flat(mix: Mix, chunks: bool = False) -> Callable[[Tensor], Tensor]:
    """Returns a site on flat streams, whose collapse reads them [a, b, n, D], or as ``chunks`` of the last dim."""

    def fn(s: Tensor) -> Tensor:
        pre, post, logits = _gates(normed(s) @ PARAMETERS["phi"].T, PARAMETERS)
        x = s.view(*s.shape[:2], N, WIDTH)
        each = [pre[..., i, None] * part for i, part in enumerate(s.chunk(N, -1))]
        h_in = sum(each) if chunks else (x * pre.unsqueeze(-1)).sum(2)
        return mix(x, _balanced(logits, ITERS), post, sublayer(h_in, PARAMETERS))

    return fn


def routed(fn: Callable[[Tensor], Tensor], tokens: list[int], sites: int) -> None:
    ops = {"mhc_pre": sites, "mhc_post": sites}
    got = alike(fn, (streams().flatten(-2),), PARAMETERS.items(), ops, symbolic=tokens)
    assert not got.report.near_misses and all(r.error is not None for r in got.report.routed)


@pytest.mark.parametrize(
    ("tokens", "chunks"),
    [([], False), ([0], False), ([1], False), ([0], True)],
    ids=["static", "dynamic", "dynamic second", "chunks"],
)
@pytest.mark.parametrize("name", MIXES)
def test_the_last_site(name: str, tokens: list[int], chunks: bool) -> None:
    routed(flat(MIXES[name], chunks), tokens, 1)


@pytest.mark.parametrize("tokens", [[], [0]], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ["a batched product", "cat"])
def test_every_site_and_what_reads_the_last(name: str, tokens: list[int]) -> None:
    site, out = flat(MIXES[name]), torch.randn(N * WIDTH, 8, generator=torch.Generator().manual_seed(3))
    routed(lambda s: site(site(s)) @ out, tokens, 2)


def test_in_inference_and_bf16() -> None:
    fn = flat(lambda x, r, h, f: batched(x.float(), r, h, f.float()).to(x.dtype))
    x = streams(dtype=torch.bfloat16).flatten(-2)
    alike(fn, (x,), ops={"mhc_pre": 1, "mhc_post": 1}, grad=False, within=1e-2)


@pytest.mark.parametrize("name", OTHERS)
def test_other_layouts_stay_the_models(name: str) -> None:
    got: Captured = same(flat(OTHERS[name]), (streams().flatten(-2),), PARAMETERS.items())
    # Streams that the model puts together in another way are each still one of the op's.
    assert got.ops["mhc_post"] == (name in ("cat in another order", "one stream scaled")), name
    assert got.ops["mhc_post"] or got.report.near_misses, name
    # Each column stays at its place within D: only the layout of x_out is another.
    assert name != "columns in a dim before streams" or "within D" not in reasons(got), reasons(got)
