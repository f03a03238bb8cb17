# SPDX-License-Identifier: Apache-2.0
"""Streams that are tensors of their own, in a list: what is routed, and what is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.formulas.reference_models_mhc import EPS, WIDTH, N, P, _balanced, _gates, around, parameters, sublayer
from tests.test_routing_mhc_laws import reasons, same, streams
from tests.tools.capture import Captured, alike

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


def squares(xs: Sequence[Tensor]) -> Tensor:
    return sum(x.square().sum(-1, keepdim=True) for x in xs) / (N * WIDTH)  # type: ignore[return-value]


def means(xs: Sequence[Tensor]) -> list[Tensor]:
    return [x.square().mean(-1, keepdim=True) for x in xs]


def normed_before(xs: Sequence[Tensor], p: P) -> list[Tensor]:
    inverse = torch.rsqrt(sum(means(xs)) / N + EPS)
    return apart(xs, projected([x * inverse for x in xs], p), p)


def z_of(x: Tensor, p: P) -> Tensor:
    return normed(x) @ p["phi"].T


def without_matrix(xs: Sequence[Tensor], p: P) -> list[Tensor]:
    pre, post, _ = _gates(z_of(torch.cat([*xs], -1), p), p)
    f_out = sublayer(sum(pre[..., i : i + 1] * xs[i] for i in range(N)), p)  # type: ignore[arg-type]
    return [post[..., i : i + 1] * f_out + xs[i] for i in range(N)]


def rounded(xs: Sequence[Tensor], p: P) -> list[Tensor]:
    """Coefficients and sums in fp32, of streams that are rounded to x's dtype each."""
    wide = [x.float() for x in xs]
    return [x.to(xs[0].dtype) for x in apart(wide, z_of(torch.cat([*xs], -1).float(), p), p)]


STACKED: dict[str, Layer] = {
    "stack": lambda xs, p: apart(xs, z_of(torch.stack([*xs], -2).flatten(-2), p), p),
    "cat": lambda xs, p: apart(xs, z_of(torch.cat([*xs], -1), p), p),
    "rows": lambda xs, p: apart(xs, z_of(torch.cat([x.unsqueeze(-2) for x in xs], -2).flatten(-2), p), p),
    "no h_res": lambda xs, p: apart(
        xs, torch.cat([(normed(torch.cat([*xs], -1)) @ p["phi"][: 2 * N].T), xs[0][..., : N * N]], -1), p
    ),
    "put together twice": lambda xs, p: list(
        around(torch.stack([*xs], -2), p, _balanced, z_of(torch.cat([*xs], -1), p)).unbind(-2)
    ),
    "no matrix": without_matrix,
    "rounded": rounded,
}
NEVER_STACKED: dict[str, Layer] = {
    "rsqrt": lambda xs, p: apart(xs, projected(xs, p) * torch.rsqrt(squares(xs) + EPS), p),
    "eps outside": lambda xs, p: apart(xs, projected(xs, p) / (torch.sqrt(squares(xs)) + EPS), p),
    "normed before": normed_before,
    "clamped norm": lambda xs, p: apart(xs, projected(xs, p) / squares(xs).sqrt().clamp(min=EPS), p),
}
BOTH = {"mhc_pre": 1, "mhc_post": 1}
ENDS: dict[str, Callable[[list[Tensor]], object]] = {
    "a list": lambda xs: xs,
    "a stack": lambda xs: torch.stack(xs, -2),
    "a cat": lambda xs: torch.cat(xs, -1),
    "a stack and a list": lambda xs: (torch.stack(xs, -2), xs[1], xs[2] * 2.0),
    "a sum": lambda xs: sum(xs),
    "written": lambda xs: [*xs, xs[1].mul_(2.0)],
}


def listed(
    layer: Callable[..., object], ops: Any, tokens: bool = False, p: P | None = None, **options: Any
) -> Captured:
    """Runs ``layer`` of streams in a list and parameters, with dynamic ``tokens`` or not, as ``alike`` does."""
    p, xs = p or parameters(), tuple(streams(dtype=options.pop("dtype", torch.float32)).unbind(-2))
    symbolic = [(at, 1) for at in range(N)] * tokens
    return alike(lambda *a: layer(a, p), xs, p.items(), ops, symbolic=symbolic, **options)


@pytest.mark.parametrize("grad", [True, False], ids=["train", "no_grad"])
@pytest.mark.parametrize("tokens", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", list(STACKED))
def test_streams_stacked_for_the_projection(name: str, tokens: bool, grad: bool) -> None:
    ops = {**BOTH, **({"mhc_sinkhorn": 1} if name == "no h_res" else {})}
    assert not reasons(listed(STACKED[name], ops, tokens, grad=grad))


@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-11), (torch.bfloat16, 3e-2)], ids=str)
def test_lists_of_other_dtypes(dtype: torch.dtype, within: float) -> None:
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    p = {k: t.detach().to(wide).requires_grad_() for k, t in parameters().items()}
    listed(STACKED["cat" if dtype is torch.float64 else "rounded"], BOTH, p=p, dtype=dtype, within=within)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("grad", [True, False], ids=["train", "no_grad"])
def test_what_is_made_of_the_new_streams(end: str, grad: bool) -> None:
    listed(lambda xs, p: ENDS[end](STACKED["cat"](xs, p)), BOTH, grad=grad)


STARTS: dict[str, Callable[[Sequence[Tensor]], Sequence[Tensor]]] = {
    "clones": lambda xs: [xs[0].clone() for _ in range(N)],
    "copies": lambda xs: [xs[0] * 1.0 for _ in range(N)],
    "unbound": lambda xs: torch.stack([*xs], 0).unbind(0),
    "chunks": lambda xs: torch.cat([*xs], -1).chunk(N, -1),
    "one tensor": lambda xs: [xs[0]] * N,
    "a tensor twice": lambda xs: [xs[0], xs[1], xs[0], xs[2]],
}


@pytest.mark.parametrize("tokens", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("start", STARTS)
def test_what_the_first_streams_are(start: str, tokens: bool) -> None:
    got = listed(lambda xs, p: STACKED["cat"](STARTS[start](xs), p), BOTH, tokens)
    assert not reasons(got), reasons(got)


@pytest.mark.parametrize("tokens", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "names", [("stack", "cat"), ("cat", "cat", "stack"), ("rows", "rounded", "no matrix")], ids="-".join
)
def test_layers_of_lists(names: tuple[str, ...], tokens: bool) -> None:
    """The streams stay a list from layer to layer, and a head collapses the last one."""

    def fn(xs: Sequence[Tensor], p: P) -> Tensor:
        for name in names:
            xs = STACKED[name](xs, p)
        pre = torch.sigmoid(z_of(torch.cat([*xs], -1), p)[..., :N] * p["alpha"][0] + p["bias"][:N])
        return sum(pre[..., i : i + 1] * x for i, x in enumerate(xs))  # type: ignore[return-value]

    got = listed(fn, {"mhc_pre": len(names), "mhc_post": len(names), "mhc_head": 1}, tokens)
    assert not reasons(got)
    (graph,) = got.graphs
    # The first streams are put together once, by the model; all others are the ops' own.
    assert sum(n.target in (torch.stack, torch.cat) for n in graph.graph.nodes) == 1


Pair = tuple[int, int]


def site(
    xs: Sequence[Tensor],
    p: P,
    collapsed: Sequence[Tensor] | None = None,
    mixed: Sequence[Tensor] | None = None,
    element: Callable[[int, int], Pair] = lambda o, i: (o, i),
    h_post: Sequence[int] = range(N),
    without: Sequence[Pair] = (),
) -> list[Tensor]:
    """A site that may collapse and mix other streams than it projects, or with other coefficients."""
    pre, post, logits = _gates(z_of(torch.cat([*xs], -1), p), p)
    matrix = _balanced(logits)
    f_out = sublayer(sum(pre[..., i : i + 1] * x for i, x in enumerate(collapsed or xs)), p)  # type: ignore[arg-type]
    new = [post[..., o : o + 1] * f_out for o in h_post]
    for o, i in [(o, i) for o in range(N) for i in range(N) if (o, i) not in without]:
        row, column = element(o, i)
        new[o] = new[o] + matrix[..., row, column : column + 1] * (mixed or xs)[i]
    return new


TURNED: dict[str, Layer] = {"site": site, "transposed": lambda xs, p: site(xs, p, element=lambda o, i: (i, o))}


@pytest.mark.parametrize("name", TURNED)
def test_coefficients_of_every_element(name: str) -> None:
    got = listed(TURNED[name], BOTH)
    assert [r.detail for r in got.report.routed if r.op == "mhc_post"] == [
        "h_res" + " transposed" * (name == "transposed")
    ]


def written(xs: Sequence[Tensor], p: P) -> list[Tensor]:
    """A stream is written in place after the projection read it."""
    made = [x * 1.0 for x in xs]
    z = z_of(torch.cat(made, -1), p)
    made[1].mul_(1.5)
    return apart(made, z, p)


WRONG: dict[str, tuple[Layer, set[str]]] = {
    "one stream twice in the collapse": (lambda x, p: site(x, p, [x[0], x[1], x[1], x[3]]), set()),
    "two streams swapped in the collapse": (lambda x, p: site(x, p, [x[0], x[2], x[1], x[3]]), set()),
    "one stream scaled in the collapse": (lambda x, p: site(x, p, [x[0] * 1.5, *x[1:]]), set()),
    "one stream of another token": (lambda x, p: site(x, p, [x[0], x[1].roll(1, 1), *x[2:]]), set()),
    "one stream twice in the mix": (lambda x, p: site(x, p, None, [x[0], x[1], x[1], x[3]]), {"mhc_pre"}),
    "two streams swapped in the mix": (lambda x, p: site(x, p, None, [x[1], x[0], *x[2:]]), {"mhc_pre"}),
    "one stream rounded in the mix": (lambda x, p: site(x, p, None, [x[0].bfloat16().float(), *x[1:]]), {"mhc_pre"}),
    "one stream detached in the mix": (lambda x, p: site(x, p, None, [x[0].detach(), *x[1:]]), {"mhc_pre"}),
    "the projection of detached streams": (lambda x, p: site([t.detach() for t in x], p, x, x), set()),
    "one element transposed": (
        lambda x, p: site(x, p, element=lambda o, i: (i, o) if {o, i} == {1, 2} and o == 1 else (o, i)),
        {"mhc_pre"},
    ),
    "one element missing": (lambda x, p: site(x, p, without=[(2, 1)]), {"mhc_pre"}),
    "one row missing": (lambda x, p: site(x, p, without=[(2, i) for i in range(N)]), {"mhc_pre"}),
    "one stream transposed": (lambda x, p: site(x, p, element=lambda o, i: (i, o) if o == 1 else (o, i)), {"mhc_pre"}),
    "h_post of another stream": (lambda x, p: site(x, p, h_post=[0, 1, 1, 3]), {"mhc_pre"}),
    "h_post in another order": (lambda x, p: site(x, p, h_post=[1, 0, 2, 3]), {"mhc_pre"}),
    "the projection in another order": (lambda x, p: site(x[::-1], p, x, x), set()),
    "the projection of one other stream": (lambda x, p: site([*x[:3], x[3].tanh()], p, x, x), set()),
    "another tensor is two streams": (lambda x, p: site([x[0], x[1], x[1], x[3]], p, [x[0], x[1], x[2], x[3]]), set()),
    "one of two that are one": (
        lambda x, p: site([x[0], x[1], x[1], x[3]], p, None, [x[1], x[1], x[1], x[3]]),
        {"mhc_pre"},
    ),
    "a dtype of its own": (lambda x, p: site([x[0].bfloat16(), *x[1:]], p), set()),
    "written after the projection": (written, set()),
}
"""Layers with one mistake, and the ops of what is right all the same."""


@pytest.mark.parametrize("tokens", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", WRONG)
def test_lists_with_one_mistake(name: str, tokens: bool) -> None:
    layer, allowed = WRONG[name]
    got = listed(layer, None, tokens, within=1e-4)
    assert {*got.ops} - {"mhc_sinkhorn"} <= allowed, (dict(got.ops), reasons(got))
    assert reasons(got) or name == "the projection of detached streams"


def test_a_stream_that_is_written_after_the_layer() -> None:
    """In inference, where a layer may write its inputs once it has read them."""

    def fn(xs: Sequence[Tensor], p: P) -> list[Tensor]:
        made = [x * 1.0 for x in xs]
        out = STACKED["cat"](made, p)
        made[1].mul_(1.5)
        return [*out, made[1]]

    listed(fn, BOTH, grad=False)


def test_one_tensor_stacked_or_unbound_is_the_usual_formula() -> None:
    p = parameters()
    in_list = lambda *a: around(torch.stack(a, -2), p, _balanced).unbind(-2)  # noqa: E731
    same(in_list, tuple(streams().unbind(-2)), p.items(), BOTH)
    z = lambda x: normed(x.flatten(-2)) @ p["phi"].T  # noqa: E731
    same(lambda x: torch.stack(apart(x.unbind(-2), z(x), p), -2), (streams(),), p.items(), BOTH)


HEADS: dict[str, tuple[bool, Callable[[Sequence[Tensor], P], Tensor]]] = {
    "a sum over the list": (True, lambda xs, p: projected(xs, p) * torch.rsqrt(sum(means(xs)) / N + EPS)),
    "each stream normalised": (False, lambda xs, p: projected([normed(x) for x in xs], p)),
    "no norm": (False, projected),
    "static": (False, lambda xs, p: p["bias"]),
}
"""Whether a head with this norm is named."""


@pytest.mark.parametrize("name", list(HEADS))
def test_a_head_of_a_list_is_named_by_its_norm(name: str) -> None:
    """Checks what docs/operators/mhc.md says of a collapse alone: without the norm it is a weighted sum like any other."""
    p, (named, z) = parameters(), HEADS[name]

    def head(*a: Tensor) -> Tensor:
        pre = torch.sigmoid(z(a, p)[..., :N] * p["alpha"][0] + p["bias"][:N])
        return sum(pre[..., i : i + 1] * a[i] for i in range(N))  # type: ignore[return-value]

    got = same(head, tuple(streams().unbind(-2)), p.items())
    assert not got.ops and [r.startswith(LISTED) for r in reasons(got)] == [True] * named, reasons(got)


def test_streams_of_other_widths_stay() -> None:
    p = parameters()

    def uneven(*a: Tensor) -> list[Tensor]:
        parts = [a[0][..., : WIDTH // 2], a[0][..., WIDTH // 2 :], *a[1:]]
        return apart(a, z_of(torch.cat(parts, -1), p), p)

    got = same(uneven, tuple(streams().unbind(-2)), p.items())
    assert not got.ops["mhc_pre"] and reasons(got)


# --- lists and static weights that no norm's formula claims -------------------------------------------------

Sums = Callable[..., list[Tensor]]
STATIC = "mhc_pre: the weights of the streams are no projection of them, as in hyper-connections with static weights"


UNSEEN: dict[str, Layer] = {
    "each stream normalised": lambda xs, p: apart(xs, projected([normed(x) for x in xs], p), p),
    "of the mean stream": lambda xs, p: apart(xs, normed(sum(xs) / N) @ p["phi"][:, :WIDTH].T, p),  # type: ignore[arg-type]
    "of the first stream": lambda xs, p: apart(xs, normed(xs[0]) @ p["phi"][:, :WIDTH].T, p),
    "no norm": lambda xs, p: apart(xs, projected(xs, p), p),
    "means stacked": lambda xs, p: apart(
        xs, projected(xs, p) * torch.rsqrt(torch.stack(means(xs), -1).mean(-1) + EPS), p
    ),
    "means put together": lambda xs, p: apart(
        xs, projected(xs, p) * torch.rsqrt(torch.cat(means(xs), -1).mean(-1, keepdim=True) + EPS), p
    ),
}


@pytest.mark.parametrize("name", [*NEVER_STACKED, *UNSEEN])
def test_streams_that_are_never_stacked_are_named(name: str) -> None:
    """The iterations are still the op. A norm that is not found leaves the post to be named, not the pre."""
    p, layer = parameters(), {**NEVER_STACKED, **UNSEEN}[name]
    got = same(lambda *a: layer(a, p), tuple(streams().unbind(-2)), p.items(), {"mhc_sinkhorn": 1})
    listed = [reason.startswith(LISTED) for reason in reasons(got)]
    assert (reasons(got) == [WRITTEN]) if name in UNSEEN else (listed and all(listed)), reasons(got)


def given() -> tuple[Tensor, ...]:
    """Returns h_post, f_out and R, each with tokens."""
    g = torch.Generator().manual_seed(8)
    return tuple(torch.randn(2, 3, *shape, generator=g) for shape in ((N,), (WIDTH,), (N, N)))


def new_streams(x: Tensor | Sequence[Tensor], h: Tensor, f: Tensor, m: Tensor) -> list[Tensor]:
    xs = x.unbind(-2) if isinstance(x, Tensor) else x
    return [h[..., o, None] * f + sum(m[..., o, i, None] * t for i, t in enumerate(xs)) for o in range(N)]


def test_coefficients_from_elsewhere_and_a_list_of_streams_are_named() -> None:
    fn = lambda *a: new_streams(a[:N], *a[N:])  # noqa: E731
    got = same(fn, (*streams().unbind(-2), *given()), ops={})
    assert reasons(got) == [WRITTEN], reasons(got)


PUT: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "one after another": lambda xs: torch.cat(xs, -1),
    "in a dim": lambda xs: torch.cat([x.unsqueeze(-2) for x in xs], -2),
    "in the first dim": lambda xs: torch.cat([x.unsqueeze(0) for x in xs]),
}


@pytest.mark.parametrize("how", PUT)
def test_streams_put_together_by_cat_are_routed(how: str) -> None:
    got = same(lambda x, *a: PUT[how](new_streams(x, *a)), (streams(), *given()), ops={"mhc_post": 1})
    assert not reasons(got), reasons(got)


def test_cats_of_other_things_stay() -> None:
    """Parts of other widths, in another order, or with another matrix a stream."""
    h, f, m = given()
    new = lambda x, m=m: new_streams(x, h, f, m)  # noqa: E731
    others: list[Callable[[Tensor], Tensor]] = [
        lambda x: torch.cat([*new(x)[1:], new(x)[0][..., 8:]], -1),
        lambda x: torch.cat(new(x)[::-1], -1),
        lambda x: torch.cat([*new(x)[:2], *new(x, m.mT)[2:]], -1),
    ]
    for fn in others:
        same(fn, (streams(),), ops={})


def _weights() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(4)
    made = {"w": torch.rand(N, generator=g), "b": torch.rand(N, generator=g), "m": torch.rand(N, N, generator=g)}
    return {**{k: t.requires_grad_() for k, t in made.items()}, "weight": parameters()["weight"]}


def beside(x: Tensor, q: P) -> Tensor:
    return x + q["b"][:, None] * sublayer((q["w"][:, None] * x).sum(-2), q).unsqueeze(-2)


def softmaxed(x: Tensor, q: P) -> Tensor:
    f_out = sublayer(torch.einsum("n,bsnd->bsd", q["w"].softmax(0), x), q)
    return x + q["b"].sigmoid()[:, None] * f_out.unsqueeze(-2)


def mixed(x: Tensor, q: P) -> Tensor:
    return q["m"] @ x + q["b"][:, None] * sublayer(q["w"] @ x, q).unsqueeze(-2)


def in_one_matrix(x: Tensor, q: P) -> Tensor:
    """A parameter [n + 1, n] collapses and mixes the streams in one product."""
    mixed = torch.einsum("on,bsnd->bsod", torch.cat([q["w"][None], q["m"]]), x)
    return mixed[..., 1:, :] + q["b"].unsqueeze(-1) * sublayer(mixed[..., 0, :], q).unsqueeze(-2)


def softmaxes(x: Tensor, q: P) -> Tensor:
    f_out = sublayer(torch.einsum("n,bsnd->bsd", q["w"].softmax(-1), x), q)
    return _balanced(q["m"]) @ x + q["b"].softmax(-1).unsqueeze(-1) * f_out.unsqueeze(-2)


@pytest.mark.parametrize(("fn", "post"), [(beside, 0), (softmaxed, 0), (mixed, 1), (in_one_matrix, 1), (softmaxes, 1)])
def test_static_weights_are_named(fn: Callable[[Tensor, P], Tensor], post: int) -> None:
    q = _weights()
    got = same(lambda x: fn(x, q), (streams(),), q.items())
    assert got.ops["mhc_post"] == post and [r.startswith(STATIC) for r in reasons(got)] == [True], reasons(got)


@pytest.mark.parametrize("softmax", [False, True])
def test_a_collapse_alone_with_static_weights_is_not_named(softmax: bool) -> None:
    q = _weights()
    collapse = lambda x: ((q["w"].softmax(0) if softmax else q["w"])[:, None] * x).sum(-2)  # noqa: E731
    assert not reasons(same(collapse, (streams(),), q.items(), {}))


@pytest.mark.parametrize("mix", [False, True])
def test_static_weights_of_a_list_are_named(mix: bool) -> None:
    q = _weights()

    def fn(*xs: Tensor) -> list[Tensor]:
        f_out = sublayer(sum(q["w"][i] * x for i, x in enumerate(xs)), q)  # type: ignore[arg-type]
        rest = [sum(q["m"][o, i] * x for i, x in enumerate(xs)) for o in range(N)] if mix else xs
        return [r + q["b"][o] * f_out for o, r in enumerate(rest)]

    got = same(fn, tuple(streams().unbind(-2)), q.items())
    assert reasons(got) == [WRITTEN], reasons(got)


def test_sums_that_resemble_lists_are_not_named() -> None:
    """A mixture of experts, rotary embeddings, a mean of layers and a gated residual."""
    q = _weights()

    def experts(x: Tensor) -> Tensor:
        gates = (x @ q["weight"][:, :N]).softmax(-1)
        return x + sum(gates[..., i, None] * torch.nn.functional.silu(x * q["w"][i]) for i in range(N))

    def rotary(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        angle = torch.arange(x.shape[1])[:, None] / torch.arange(1, WIDTH // 2 + 1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def layers(x: Tensor) -> Tensor:
        each = [x.tanh(), x.sin(), x.cos(), x]
        return sum(q["w"].softmax(0)[i] * t for i, t in enumerate(each))  # type: ignore[return-value]

    def gated(x: Tensor) -> Tensor:
        y = x + q["w"][0] * torch.nn.functional.silu(x @ q["weight"])
        return y + q["w"][1] * torch.nn.functional.silu(y @ q["weight"])

    for fn in (experts, rotary, layers, gated):
        got = same(fn, (streams()[..., 0, :].contiguous(),), q.items(), {})
        assert not reasons(got), (fn, reasons(got))
