# SPDX-License-Identifier: Apache-2.0
"""Single-pass mHC by the package's functions and in plain PyTorch (DeepSeek-V4.1): what becomes one op, and equal results."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mhc_inductor import mhc_coefficients, mhc_collapse, mhc_post
from mhc_inductor.nn import HyperConnection
from tests.formulas.laws import hooked, sinkhorn
from tests.formulas.reference_models_mhc import _gates
from tests.tools.capture import Captured, alike

D, N, T = 16, 4, 6
Fn = Callable[..., Any]


def streams(*lead: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*(lead or (2, T)), N, D, generator=torch.Generator().manual_seed(1)).to(dtype)


def check(fn: Fn, inputs: list[Tensor], wanted: dict[str, int] | None, named: Any = (), **options: Any) -> Captured:
    """Asserts equal results, and the ops ``wanted`` in the graphs; a fused op counts as one."""
    # Either side's alpha is up to 2.5e-6 from fp64 (40 seeds).
    got = alike(fn, inputs, named, **{"within": 4e-6, **options})
    ops = Counter(str(n.target).split(".")[1] for n in got.nodes("mhc_inductor.mhc_"))
    assert wanted is None or ops == Counter({f"mhc_{k}": v for k, v in wanted.items() if v}), ops
    return got


# --- models -------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Sites in a row; a site's weights collapse the streams of the next one."""

    call: Fn = staticmethod(lambda step, *given: step(*given))
    between: Fn = staticmethod(lambda x, k: x)
    seen: Fn = staticmethod(lambda pre: pre)
    within = 4e-6

    def __init__(self, site: Fn, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sites = nn.ModuleList(site() for _ in range(depth))

    def forward(self, x: Tensor) -> Any:
        pre = self.first(x)
        for k in range(len(self.sites)):
            pre, x = self.call(self.step, pre, x, k)
            x = self.between(x, k)
        return self.collapse(pre, x)

    def counted(self, fused: int = 2) -> dict[str, int]:
        """Returns the ops in the graph, of which so many fuse the end of a site with the start of the next."""
        apart = len(self.sites) - fused
        return {"coefficients": apart, "single_pass": fused, "post": apart, "collapse": apart}


class Package(Model):
    """By the package's module. The first site reads the first stream."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__(lambda: HyperConnection(D, N, nn.Linear(D, D), single_pass=True, transpose_res=True), depth)
        with torch.no_grad():
            for site in self.sites:
                site.alpha.fill_(1.0)

    first: Fn = staticmethod(lambda x: None)
    collapse: Fn = staticmethod(lambda pre, x: mhc_collapse(x, pre))

    def step(self, pre: Tensor | None, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        x, pre = self.sites[k]((x, pre))
        return self.seen(pre), x


COLLAPSES: dict[str, Fn] = {
    "sum": lambda w, x: (w.unsqueeze(-1) * x).sum(-2).to(x.dtype),
    "einsum": lambda w, x: torch.einsum("...n,...nd->...d", w.to(x.dtype), x),
    "matmul": lambda w, x: torch.matmul(w.unsqueeze(-2).to(x.dtype), x).squeeze(-2),
    "streams": lambda w, x: sum(w[..., i, None] * x[..., i, :] for i in range(N)).to(x.dtype),
    "unbound": lambda w, x: sum(a[..., None] * b for a, b in zip(w.unbind(-1), x.unbind(-2), strict=True)).to(x.dtype),
    "flat": lambda w, x: (w.unsqueeze(-1) * x.flatten(-2).unflatten(-1, (N, D))).sum(dim=-2).to(x.dtype),
}
MIXES: dict[str, Fn] = {
    "matmul": lambda p, f, c, x: (p.unsqueeze(-1) * f.unsqueeze(-2) + torch.matmul(c.transpose(-1, -2), x.float())).to(
        x.dtype
    ),
    "einsum": lambda p, f, c, x: (
        torch.einsum("...n,...d->...nd", p, f.float()) + torch.einsum("...io,...id->...od", c, x.float())
    ).to(x.dtype),
}


class Site(nn.Module):
    """The parameters of one site, named as DeepSeek-V4's."""

    def __init__(self) -> None:
        super().__init__()
        m = N * N + 2 * N
        self.fn, self.base = nn.Parameter(torch.randn(m, N * D) * 0.1), nn.Parameter(torch.randn(m) * 0.1)
        self.scale, self.sublayer = nn.Parameter(torch.tensor([1.1, 0.9, 1.05])), nn.Linear(D, D)

    def coefficients(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = x.flatten(-2).float()
        z = F.linear(flat, self.fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
        pre, post, comb = _gates(z, {"alpha": self.scale, "bias": self.base})
        return pre, post, sinkhorn(comb, 4)


class Plain(Model):
    """In plain PyTorch. The first site reads the streams with weights that are 1 for the first and 0 for the others."""

    around: Fn = staticmethod(lambda k: contextlib.nullcontext())
    within = 1e-6

    def __init__(self, depth: int = 3, collapse: str = "sum", mix: str = "matmul") -> None:
        super().__init__(Site, depth)
        self.collapse, self.mix = COLLAPSES[collapse], MIXES[mix]

    def first(self, x: Tensor) -> Tensor:
        pre = torch.zeros(x.shape[:-1], dtype=torch.float32)
        pre[..., 0] = 1
        return pre

    def step(self, pre: Tensor, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        site = self.sites[k]
        h_in = self.collapse(pre, x)
        with self.around(k):
            pre, post, comb = site.coefficients(x)
        return self.seen(pre), self.mix(post, site.sublayer(h_in), comb, x)

    def counted(self, fused: int = 2) -> dict[str, int]:
        counts = super().counted(fused)
        return {**counts, "collapse": counts["collapse"] + 1}


# --- both models --------------------------------------------------------------------------------------------

both = pytest.mark.parametrize("make", [Package, Plain])


def checked(model: Model, x: Tensor, fused: int | None = 2, **options: Any) -> Captured:
    """Asserts equal results of a model, and its ops, of which ``fused`` are fused if given."""
    wanted = None if fused is None else model.counted(fused)
    return check(model, [x], wanted, [*model.named_parameters()], **{"within": model.within, **options})


@both
@pytest.mark.parametrize("lead", [(2, T), (T,), (1, 1), (2, 1, 3)])
def test_everything_between_two_sublayers_is_one_op(lead: tuple[int, ...], make: type[Any]) -> None:
    got = checked(make(), streams(*lead))
    assert [f.op for f in got.report.fused] == ["mhc_single_pass"] * 2
    assert got.report.fused[0].parts == ("mhc_post", "mhc_collapse", "mhc_coefficients")


@both
@pytest.mark.parametrize("options", [{"dynamic": True}, {"grad": False}, {"symbolic": [1]}], ids=str)
def test_modes(options: dict[str, Any], make: type[Any]) -> None:
    checked(make(), streams(), **options)


def _everywhere(x: Tensor, k: int) -> Tensor:
    return x.index_add(0, torch.tensor([0]), x[:1])


def _once(x: Tensor, k: int) -> Tensor:
    return x + 0.1 if k == 0 else x


@both
@pytest.mark.parametrize(("write", "fused"), [(_once, 1), (_everywhere, 0)], ids=["once", "everywhere"])
def test_another_write_to_the_streams_ends_the_fusion(write: Fn, fused: int, make: type[Any]) -> None:
    model = make()
    model.between = write
    checked(model, streams(), fused)


OTHERS: dict[str, dict[str, Fn]] = {
    "checkpointed sites": {"call": functools.partial(checkpoint, use_reentrant=False)},
    "a hook on the weights": {"seen": hooked(lambda g: g * 3)},
    "weights under no_grad": {"around": lambda k: torch.no_grad() if k == 1 else contextlib.nullcontext()},
}


@pytest.mark.parametrize(
    ("make", "how"), [*((Plain, how) for how in OTHERS), *((Package, how) for how in [*OTHERS][:2])]
)
def test_gradients_are_those_of_eager(make: type[Any], how: str) -> None:
    model = make()
    eye: Fn = lambda x: torch.eye(N)[0].expand(x.shape[:-1])  # noqa: E731
    for name, fn in {**({"first": eye} if make is Plain else {}), **OTHERS[how]}.items():
        setattr(model, name, fn)
    # The parts of a fusion of checkpointed sites are in two regions.
    checked(model, streams(), 0 if how == "checkpointed sites" and make is Package else None)


@both
@pytest.mark.parametrize("frozen", ["0", "1", "2", "own", "all"])
def test_frozen_parameters_have_no_gradient(frozen: str, make: type[Any]) -> None:
    model = make()
    own = [*model.sites[1].parameters(recurse=False)]
    for p in {"own": own, "all": model.sites[1].parameters()}.get(frozen) or [own[int(frozen)]]:
        p.requires_grad_(False)
    checked(model, streams())


# --- the package's functions --------------------------------------------------------------------------------


def test_floats_that_dynamo_leaves_dynamic_do_not_end_the_fusion_of_other_ops() -> None:
    """With dynamic=True the floats of a module become numbers of the graph that are read late: it was left unrouted."""
    torch.manual_seed(0)
    model = nn.Sequential(*[HyperConnection(D, N, nn.Linear(D, D), transpose_res=True) for _ in range(2)])
    got = alike(model, [streams()], model.named_parameters(), within=1e-6, dynamic=True)
    assert [f.op for f in got.report.fused] == ["mhc_post_pre"]


def parameters(seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    m = N * N + 2 * N
    return [torch.randn(m, N * D, generator=g) * 0.1, torch.ones(3), torch.randn(m, generator=g) * 0.1]


def inputs() -> list[Tensor]:
    g = torch.Generator().manual_seed(2)
    x = streams(T)
    return [x, torch.randn(T, D, generator=g), torch.rand(T, N, generator=g), torch.rand(T, N, N, generator=g)]


def _twice(x: Tensor, w: Tensor, p: list[Tensor]) -> tuple[Tensor, ...]:
    f = torch.tanh(mhc_collapse(x, w))
    h_pre, h_post, h_res = mhc_coefficients(x, *p, sinkhorn_iters=2)
    return mhc_post(x, f, h_post, h_res, transpose_res=False), h_pre


def _reads_the_collapse(x: Tensor, w: Tensor, p: list[Tensor]) -> tuple[Tensor, ...]:
    h_in = mhc_collapse(x, w)
    return h_in, *mhc_coefficients(x, p[0], p[1] * h_in.mean(), p[2])


APART = {"post": 1, "coefficients": 1, "collapse": 1}
AFTER_A_POST: dict[str, tuple[Fn, dict[str, int] | None]] = {
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
    "parts in two grad modes": (lambda x, w, p: (*torch.no_grad()(mhc_coefficients)(x, *p), mhc_collapse(x, w)), APART),
    "a write to the streams between the parts": (
        lambda x, w, p: (mhc_collapse(x, w), x.mul_(2), *mhc_coefficients(x, *p)),
        APART,
    ),
    "a hook on the streams, which sees the whole gradient": (
        lambda x, w, p: (x.register_hook(lambda g: g * 2), mhc_collapse(x, w), *mhc_coefficients(x, *p))[1:],
        None,
    ),
}


@pytest.mark.parametrize("name", AFTER_A_POST)
def test_what_is_fused_after_a_post(name: str) -> None:
    (rest, counts), p = AFTER_A_POST[name], parameters()
    fn = lambda x, f, w, r: rest(mhc_post(x, f, w, r, transpose_res=False), w, p)  # noqa: E731
    check(fn, inputs(), counts, grad="write" not in name)


# --- plain PyTorch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("collapse", COLLAPSES)
def test_every_site_is_routed_and_fused(collapse: str, mix: str) -> None:
    checked(Plain(collapse=collapse, mix=mix), streams())


def by_sum(p: Tensor, f: Tensor, c: Tensor, x: Tensor) -> Tensor:
    return (p[..., None] * f[..., None, :] + (c[..., None] * x[..., None, :]).sum(-3)).type_as(f)


@pytest.mark.parametrize("cast", ["to", "type_as"])
def test_bf16_streams_are_fused(cast: str) -> None:
    """The op's result is the cast of the sum, so that the next site reads it, and not a copy in fp32 rounded again."""
    model = Plain()
    for site in model.sites:
        site.sublayer.bfloat16()
    if cast == "type_as":
        model.mix = by_sum
    checked(model, streams(dtype=torch.bfloat16), within=2e-2)


def _filled(x: Tensor) -> Tensor:
    pre = x.new_zeros(x.shape[:-1])
    pre.select(-1, 0).fill_(1.0)
    return pre


FIRST: dict[str, Fn] = {
    "one_hot": lambda x: F.one_hot(torch.zeros(x.shape[:-2], dtype=torch.long), N).float(),
    "cat": lambda x: torch.cat([torch.ones(*x.shape[:-2], 1), torch.zeros(*x.shape[:-2], N - 1)], -1),
    "filled": _filled,
    "fewer": lambda x: F.pad(torch.ones(*x.shape[:-2], 1), (0, N - 1)),
}


@pytest.mark.parametrize("first", FIRST)
def test_first_weights(first: str) -> None:
    """A write to the first weights keeps nothing else from being routed: ``type_as`` reads no element of f_out."""
    model: Any = Plain()
    model.first, model.mix = FIRST[first], by_sum
    checked(model, streams())


CHANGES: dict[str, Fn] = {
    "scaled": lambda w, x: (2 * w.unsqueeze(-1) * x).sum(-2),
    "reversed": lambda w, x: (w.flip(-1).unsqueeze(-1) * x).sum(-2),
    "constant": lambda w, x: (w.unsqueeze(-1) * x + 0.5).sum(-2),
    "other tokens": lambda w, x: (w.roll(1, 0).unsqueeze(-1) * x).sum(-2),
    "three streams": lambda w, x: (w.unsqueeze(-1) * x)[..., :3, :].sum(-2),
    "squared": lambda w, x: (w.square().unsqueeze(-1) * x).sum(-2),
    "detached": lambda w, x: (w.detach().unsqueeze(-1) * x).sum(-2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_collapse_that_differs_stays(change: str) -> None:
    model = Plain()
    model.collapse = CHANGES[change]
    got = checked(model, streams(), None)
    # The first site's weights are not a sigmoid's: "scaled" and their like are weights of the model's own there.
    assert got.ops["mhc_collapse"] <= 1 and got.ops["mhc_pre"] == 0


def test_weights_that_the_model_returns() -> None:
    model: Any = Plain(depth=2)

    def forward(x: Tensor) -> tuple[Tensor, ...]:
        (a, b), given = model.sites, []
        pre, post, comb = a.coefficients(x)
        given += [pre, post, comb]
        x = model.mix(post, a.sublayer(x[..., 0, :]), comb, x)
        h_in = model.collapse(pre, x)
        pre, post, comb = b.coefficients(x)
        return model.mix(post, b.sublayer(h_in), comb, x), pre, *given, x

    alike(forward, [streams()], model.named_parameters(), within=1e-6)
