"""Streams that are tensors of their own, in a list: what is routed, and what is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tests.reference_models_mhc import EPS, WIDTH, N, P, _balanced, _gates, around, parameters, sublayer
from tests.test_routing_mhc_laws import reasons, same, streams

Layer = Callable[[Sequence[Tensor], P], list[Tensor]]
WRITTEN = (
    "mhc_post: each stream is a tensor of its own, and written as such; expected one tensor [..., n, D] of new streams"
)
LISTED = (
    "mhc_pre: each stream is a tensor of its own, and projection and norm are sums over these tensors; expected one"
)


def normed(v: Tensor) -> Tensor:
    return v * torch.rsqrt(v.square().mean(-1, keepdim=True) + EPS)


def apart(xs: Sequence[Tensor], z: Tensor, p: P) -> list[Tensor]:
    """Returns the new streams, each collapsed, mixed and written by itself."""
    pre, post, logits = _gates(z, p)
    matrix = _balanced(logits)
    f_out = sublayer(sum(pre[..., i : i + 1] * xs[i] for i in range(N)), p)  # type: ignore[arg-type]
    mixed = [sum(matrix[..., i, j : j + 1] * xs[j] for j in range(N)) for i in range(N)]
    return [post[..., i : i + 1] * f_out + mixed[i] for i in range(N)]


def projected(xs: Sequence[Tensor], p: P) -> Tensor:
    maps = p["phi"].split(WIDTH, -1)
    return sum(x @ w.T for x, w in zip(xs, maps, strict=True))  # type: ignore[return-value]


def summed_root(xs: Sequence[Tensor], p: P) -> list[Tensor]:
    squares = sum(x.square().sum(-1, keepdim=True) for x in xs)
    return apart(xs, projected(xs, p) * torch.rsqrt(squares / (N * WIDTH) + EPS), p)


def eps_outside(xs: Sequence[Tensor], p: P) -> list[Tensor]:
    squares = sum(x.square().sum(-1, keepdim=True) for x in xs)
    return apart(xs, projected(xs, p) / (torch.sqrt(squares / (N * WIDTH)) + EPS), p)


def normed_before(xs: Sequence[Tensor], p: P) -> list[Tensor]:
    inverse = torch.rsqrt(sum(x.square().mean(-1, keepdim=True) for x in xs) / N + EPS)
    return apart(xs, projected([x * inverse for x in xs], p), p)


STACKED: dict[str, Layer] = {
    "stack": lambda xs, p: apart(xs, normed(torch.stack([*xs], -2).flatten(-2)) @ p["phi"].T, p),
    "cat": lambda xs, p: apart(xs, normed(torch.cat([*xs], -1)) @ p["phi"].T, p),
    "no h_res": lambda xs, p: apart(
        xs, torch.cat([(normed(torch.cat([*xs], -1)) @ p["phi"][: 2 * N].T), xs[0][..., : N * N]], -1), p
    ),
}
NEVER_STACKED: dict[str, Layer] = {"rsqrt": summed_root, "eps outside": eps_outside, "normed before": normed_before}


@pytest.mark.parametrize(
    ("name", "dtype"), [("stack", torch.float32), ("cat", torch.float64), ("no h_res", torch.float32)], ids=str
)
def test_streams_stacked_for_the_projection(name: str, dtype: torch.dtype) -> None:
    p = {k: t.detach().to(dtype).requires_grad_() for k, t in parameters().items()}
    xs = tuple(streams(dtype=dtype).unbind(-2))
    got = same(lambda *a: STACKED[name](a, p), xs, p.items(), 1e-5 if dtype is torch.float32 else 1e-11)
    assert dict(got.ops) == {"mhc_coefficients": 1, **({"mhc_sinkhorn": 1} if name == "no h_res" else {})}, reasons(got)
    assert reasons(got) == [WRITTEN]


def test_layers_of_lists() -> None:
    p = parameters()
    got = same(lambda *a: STACKED["cat"](STACKED["stack"](a, p), p), tuple(streams().unbind(-2)), p.items())
    assert dict(got.ops) == {"mhc_coefficients": 2}, reasons(got)
    assert reasons(got) == [WRITTEN] * 2


def test_one_tensor_stacked_or_unbound_is_the_usual_formula() -> None:
    p, both = parameters(), {"mhc_pre": 1, "mhc_post": 1}
    got = same(lambda *a: around(torch.stack(a, -2), p, _balanced).unbind(-2), tuple(streams().unbind(-2)), p.items())
    assert dict(got.ops) == both, reasons(got)
    z = lambda x: normed(x.flatten(-2)) @ p["phi"].T  # noqa: E731
    got = same(lambda x: torch.stack(apart(x.unbind(-2), z(x), p), -2), (streams(),), p.items())
    assert dict(got.ops) == both, reasons(got)


@pytest.mark.parametrize("name", list(NEVER_STACKED))
def test_streams_that_are_never_stacked_are_named(name: str) -> None:
    """The iterations are still the op."""
    p = parameters()
    got = same(lambda *a: NEVER_STACKED[name](a, p), tuple(streams().unbind(-2)), p.items())
    assert dict(got.ops) == {"mhc_sinkhorn": 1}
    assert reasons(got) and all(reason.startswith(LISTED) for reason in reasons(got))


def test_weights_of_one_kind_only_or_of_other_widths_stay() -> None:
    p = parameters()
    xs = tuple(streams().unbind(-2))

    def pre_alone(*a: Tensor) -> Tensor:
        z = normed(torch.cat(a, -1)) @ p["phi"][:N].T
        pre = torch.sigmoid(z * p["alpha"][0] + p["bias"][:N])
        return sum(pre[..., i : i + 1] * a[i] for i in range(N))  # type: ignore[return-value]

    def uneven(*a: Tensor) -> list[Tensor]:
        parts = [a[0][..., : WIDTH // 2], a[0][..., WIDTH // 2 :], *a[1:]]
        z = normed(torch.cat(parts, -1)) @ p["phi"].T
        return apart(a, z, p)

    for fn in (pre_alone, uneven):
        got = same(fn, xs, p.items())
        assert not got.ops["mhc_coefficients"] and not got.ops["mhc_pre"]
        assert reasons(got)
