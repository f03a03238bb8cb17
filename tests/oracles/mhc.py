# SPDX-License-Identifier: Apache-2.0
"""Inputs, fp64 oracles and comparisons for the tests of mHC, on any device.

The oracles are written independently of ``mhc_inductor.reference`` and get their gradients from autograd, so that a
mistake in the reference's closed forms shows. Kernel tests reuse them: ``compare(run_pre(inputs, up, o),
oracle_pre(inputs, up, o), tol)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mhc_inductor.ops.dims import results, source_of
from mhc_inductor.ops.registry import argument_names

OPS = torch.ops.mhc_inductor
PRE_OPTIONS: dict[str, Any] = {
    "norm_eps": 1e-6,
    "hc_eps": 1e-6,
    "post_mult": 2.0,
    "post_eps": 0.0,
    "sinkhorn_iters": 0,
    "sinkhorn_eps": 1e-6,
    "sinkhorn_form": "softmax",
}
HEAD_OPTIONS: dict[str, Any] = {"norm_eps": 1e-6, "hc_eps": 1e-6}
RECORD = {"lead": (2, 64), "n": 4, "width": 128}  # the specification's example shape

# Mistakes that shipped in this operator before; each case fails if its mistake returns.
MISTAKES: dict[str, dict[str, Any]] = {
    "block_wider_than_needed_D128": {"lead": (2, 3), "n": 4, "width": 128},
    "width_1280": {"lead": (3,), "n": 4, "width": 1280},
    "width_3000_no_multiple_of_a_block": {"lead": (3,), "n": 4, "width": 3000},
    "alpha_not_1_and_dbias_once": {"lead": (5,), "n": 4, "width": 48, "alpha": (0.3, 2.5, -1.7)},
    "all_streams_of_dx_n8": {"lead": (2,), "n": 8, "width": 40},
    "inv_rms_in_the_residual_third": {"lead": (4,), "n": 4, "width": 32, "x_scale": 7.0},
    "many_tokens_fp32_sums": {"lead": (512,), "n": 4, "width": 16},
}


def make_inputs(
    lead: tuple[int, ...],
    n: int,
    width: int,
    dtype: torch.dtype = torch.float64,
    *,
    full: bool = True,
    gamma: bool = True,
    head: bool = False,
    param_dtype: torch.dtype | None = None,
    alpha: tuple[float, ...] = (1.1, 0.9, 1.05),
    x_scale: float = 1.0,
    phi_std: float | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Tensor | None]:
    """Returns x, phi, alpha, bias and gamma: standard normal x and gamma, bias 0.1 normal.

    phi has standard deviation ``(n*width)**-0.5`` so that no sigmoid saturates; the specification's example has
    ``phi_std`` = 1.0.
    """
    g = torch.Generator().manual_seed(seed)
    m = n if head else n * n + 2 * n if full else 2 * n
    kinds = 1 if head else 3 if full else 2
    param = param_dtype or (dtype if dtype is torch.float64 else torch.float32)
    std = (n * width) ** -0.5 if phi_std is None else phi_std

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64) * scale

    made = {
        "x": normal(*lead, n, width, scale=x_scale).to(dtype),
        "phi": normal(m, n * width, scale=std).to(param),
        "alpha": torch.tensor(alpha[:kinds], dtype=torch.float64).to(param),
        "bias": normal(m, scale=0.1).to(param),
        "gamma": normal(n, width).to(param) if gamma else None,
    }
    return {k: None if t is None else t.to(device) for k, t in made.items()}


def make_post_inputs(
    lead: tuple[int, ...],
    n: int,
    width: int,
    dtype: torch.dtype = torch.float64,
    *,
    residual: bool = True,
    f_dtype: torch.dtype | None = None,
    h_dtype: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Tensor | None]:
    """Returns x, f_out, h_post and h_res of mhc_post; h_res is far from symmetric."""
    g = torch.Generator().manual_seed(seed)
    h = h_dtype or (dtype if dtype is torch.float64 else torch.float32)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    made = {
        "x": normal(*lead, n, width).to(dtype),
        "f_out": normal(*lead, width).to(f_dtype or dtype),
        "h_post": normal(*lead, n).to(h),
        "h_res": normal(*lead, n, n).to(h) if residual else None,
    }
    return {k: None if t is None else t.to(device) for k, t in made.items()}


def upstream(outputs: Mapping[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    """Returns a standard normal gradient for each output, in its dtype."""
    g = torch.Generator().manual_seed(seed)
    return {
        k: torch.randn(t.shape, generator=g, dtype=torch.float64).to(t.dtype).to(t.device) for k, t in outputs.items()
    }


def leaves(inputs: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Returns fp64 copies on the CPU that require gradients."""
    return {k: None if t is None else t.detach().cpu().double().requires_grad_() for k, t in inputs.items()}


def sinkhorn(logits: Tensor, iters: int, eps: float, form: str) -> Tensor:
    """Computes the iterations as the specification writes them, for autograd."""
    if iters == 0:
        return logits
    if form == "softmax":
        c = torch.softmax(logits, -1) + eps
        c = c / (c.sum(-2, keepdim=True) + eps)
        for _ in range(iters - 1):
            c = c / (c.sum(-1, keepdim=True) + eps)
            c = c / (c.sum(-2, keepdim=True) + eps)
        return c
    if form == "exp_eps":
        c = torch.exp(logits)
        for _ in range(iters):
            c = c / (c.sum(-1, keepdim=True) + eps)
            c = c / (c.sum(-2, keepdim=True) + eps)
        return c
    assert form == "exp"
    c = torch.exp(logits - logits.max(-1, keepdim=True).values)
    for _ in range(iters):
        c = c / torch.clamp(c.sum(-1, keepdim=True), min=eps)
        c = c / torch.clamp(c.sum(-2, keepdim=True), min=eps)
    return c


def _grads(outputs: list[Tensor], up: list[Tensor], inputs: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    wanted = {k: t for k, t in inputs.items() if t is not None}
    ups = [u.detach().cpu().double() for u in up]
    got = torch.autograd.grad(outputs, list(wanted.values()), ups, allow_unused=True)
    return {f"d{k}": torch.zeros_like(t) if g is None else g for (k, t), g in zip(wanted.items(), got, strict=True)}


def _coefficients(t: dict[str, Tensor | None], o: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns vec(x), h_mix and the factor of z."""
    x, phi, gamma = t["x"], t["phi"], t["gamma"]
    assert x is not None and phi is not None
    v = x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])
    if o.get("norm_form", "inside") == "inside":
        inv_rms = 1 / torch.sqrt((v**2).mean(-1) + o["norm_eps"])
    else:
        inv_rms = 1 / (v.norm(dim=-1) / v.shape[-1] ** 0.5 + o["norm_eps"])
    weighted = v if gamma is None else v * gamma.reshape(-1)
    return v, torch.einsum("...k,jk->...j", weighted, phi), inv_rms


def oracle_pre(
    inputs: Mapping[str, Tensor | None],
    up: Mapping[str, Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Returns the outputs of mhc_pre (mhc_head where phi has n rows) in fp64, with ``up`` also gradients and dh_mix, dinv, G."""
    t = leaves(inputs)
    result, v = _pre(t, options)
    if up:
        result |= _with_intermediates(result, up, t, v)
    return {k: a.detach() for k, a in result.items()}


def _pre(t: dict[str, Tensor | None], options: Mapping[str, Any] | None) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the outputs of mhc_pre, or of mhc_head where phi has n rows, and vec(x)."""
    o = {**PRE_OPTIONS, **(options or {})}
    x, alpha, bias = t["x"], t["alpha"], t["bias"]
    assert x is not None and alpha is not None and bias is not None
    n = x.shape[-2]
    v, h_mix, inv_rms = _coefficients(t, o)
    z = h_mix * inv_rms[..., None]
    h_pre = torch.sigmoid(alpha[0] * z[..., :n] + bias[:n]) + o["hc_eps"]
    out = {"h_in": torch.einsum("...i,...id->...d", h_pre, x)}
    if bias.shape[0] > n:
        out["h_post"] = o["post_mult"] * torch.sigmoid(alpha[1] * z[..., n : 2 * n] + bias[n : 2 * n]) + o["post_eps"]
        out["h_res"] = x.new_empty((*x.shape[:-2], 0, 0))
    if bias.shape[0] > 2 * n:
        logits = (alpha[2] * z[..., 2 * n :] + bias[2 * n :]).reshape(*x.shape[:-2], n, n)
        out["h_res"] = sinkhorn(logits, o["sinkhorn_iters"], o["sinkhorn_eps"], o["sinkhorn_form"])
    return {**out, "h_pre": h_pre, "h_mix": h_mix, "inv_rms": _saved_norm(v, inv_rms, o)}, v


def _saved_norm(v: Tensor, factor: Tensor, o: Mapping[str, Any]) -> Tensor:
    """Returns the op's output inv_rms: the factor of z, or the root itself where eps is added to it."""
    if o.get("norm_form", "inside") == "inside":
        return factor
    return v.detach().norm(dim=-1) / v.shape[-1] ** 0.5


def _with_intermediates(
    out: dict[str, Tensor], up: Mapping[str, Tensor], t: dict[str, Tensor | None], v: Tensor
) -> dict[str, Tensor]:
    h_mix, inv = out["h_mix"], out["inv_rms"]
    keys = [k for k in up if out[k].requires_grad]
    inside = {"inv_rms": inv} if inv.requires_grad else {}
    grads = _grads([out[k] for k in keys], [up[k] for k in keys], {**t, "h_mix": h_mix, **inside})
    flat = grads["dh_mix"].reshape(-1, h_mix.shape[-1])
    if inside:
        grads["dinv"] = grads.pop("dinv_rms")
    return {**grads, "G": flat.T @ v.reshape(-1, v.shape[-1])}


oracle_head = oracle_pre


def oracle_sinkhorn(h_res: Tensor, iters: int, eps: float, form: str, grad: Tensor | None = None) -> dict[str, Tensor]:
    """Computes mhc_sinkhorn in fp64: h_res and, with ``grad``, dh_res."""
    logits = h_res.detach().cpu().double().requires_grad_()
    out = sinkhorn(logits, iters, eps, form)
    result = {"h_res": out.detach()}
    if grad is not None:
        result["dh_res"] = torch.autograd.grad(out, logits, grad.detach().cpu().double())[0]
    return result


def oracle_post(
    inputs: Mapping[str, Tensor | None], transpose_res: bool, up: Tensor | None = None
) -> dict[str, Tensor]:
    """Computes mhc_post in fp64: x_out and, with ``up``, dx, df_out, dh_post, dh_res."""
    t = leaves(inputs)
    x, f_out, h_post, h_res = t["x"], t["f_out"], t["h_post"], t["h_res"]
    assert x is not None and f_out is not None and h_post is not None
    if h_res is None:
        mixed = x
    else:
        mixed = torch.einsum("...io,...id->...od" if transpose_res else "...oi,...id->...od", h_res, x)
    x_out = h_post[..., None] * f_out[..., None, :] + mixed
    result = {"x_out": x_out.detach()}
    return result | _grads([x_out], [up], t) if up is not None else result


def make_fused_inputs(
    lead: tuple[int, ...], n: int, width: int, dtype: torch.dtype = torch.float64, *, residual: bool = True, **made: Any
) -> dict[str, Tensor | None]:
    """Returns x, f_out, h_post, h_res of mhc_post, and phi, alpha, bias, gamma of the next mhc_pre or mhc_head."""
    device, seed = made.get("device", "cpu"), made.get("seed", 0)
    post = make_post_inputs(lead, n, width, dtype, residual=residual, device=device, seed=seed + 100)
    return {**post, **{k: t for k, t in make_inputs(lead, n, width, dtype, **made).items() if k != "x"}}


def oracle_fused(
    inputs: Mapping[str, Tensor | None],
    transpose_res: bool,
    x_out: Tensor,
    up: Mapping[str, Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Computes mhc_post_pre in fp64, and with ``up`` the gradients of all inputs.

    It is mhc_post_head where phi has n rows, and mhc_single_pass with the weights of the collapse, h_pre, among the inputs.
    ``x_out`` is the tensor that the op rounded: later steps read these values, and gradients pass through the rounding.
    """
    t = leaves(inputs)
    x, f_out, h_post, h_res, h_pre = (t.get(k) for k in ("x", "f_out", "h_post", "h_res", "h_pre"))
    assert x is not None and f_out is not None and h_post is not None
    order = "...io,...id->...od" if transpose_res else "...oi,...id->...od"
    exact = h_post[..., None] * f_out[..., None, :] + (x if h_res is None else torch.einsum(order, h_res, x))
    rounded = exact + (x_out.detach().cpu().double() - exact).detach()
    after, _ = _pre({**t, "x": rounded}, options)
    new = {"h_post": "next_post", "h_res": "next_res"}
    if h_pre is not None:
        new["h_pre"], after["h_in"] = "next_pre", torch.einsum("...i,...id->...d", h_pre, rounded)
    result = {"x_out": exact, **{new.get(k, k): v for k, v in after.items()}}
    if up:
        keys = [k for k in up if result[k].requires_grad]
        result |= _grads([rounded if k == "x_out" else result[k] for k in keys], [up[k] for k in keys], t)
    return {k: a.detach() for k, a in result.items()}


# --- the ops under test, with the oracles' names ------------------------------------------------------------


def run_op(
    name: str,
    inputs: Mapping[str, Any],
    up: Mapping[str, Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
    form: Any = None,
) -> dict[str, Tensor]:
    """Runs an op of ``form`` (default: what OPS is when called) on arguments by name, and with ``up`` its backward op.

    Names the results as the schema does, and a gradient ``d`` and its input.
    """
    form = form or OPS
    given = {"dx_acc": None, **inputs, **(options or {})}
    of = results(name)
    named = dict(
        zip(of, _tuple(getattr(form, name)(*(given[a] for a in argument_names(name) if a in given))), strict=True)
    )
    if not up:
        return named
    known, arguments = {**named, **given}, argument_names(f"{name}_backward")
    count = next(i for i, a in enumerate(arguments) if a in known)
    args = *(up.get(k) for k in of[:count]), *(known[a] for a in arguments[count:] if a in known)
    grads = zip(
        map(source_of, results(f"{name}_backward")), _tuple(getattr(form, f"{name}_backward")(*args)), strict=True
    )
    return named | {f"d{k}": g for k, g in grads if inputs.get(k) is not None}


def _tuple(out: Any) -> tuple[Tensor, ...]:
    return (out,) if isinstance(out, Tensor) else tuple(out)


def run_pre(
    inputs: Mapping[str, Tensor | None],
    up: Mapping[str, Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Runs mhc_pre or mhc_head, with ``up`` its backward too; names the results as :func:`oracle_pre` does."""
    return run_op("mhc_head" if _is_head(inputs) else "mhc_pre", inputs, up, {**PRE_OPTIONS, **(options or {})})


run_head = run_pre


def run_post(inputs: Mapping[str, Tensor | None], transpose_res: bool, up: Tensor | None = None) -> dict[str, Tensor]:
    """Runs mhc_post, and with ``up`` mhc_post_backward, and names the results as :func:`oracle_post` does."""
    return run_op("mhc_post", inputs, None if up is None else {"x_out": up}, {"transpose_res": transpose_res})


def run_fused(
    inputs: Mapping[str, Tensor | None],
    transpose_res: bool,
    up: Mapping[str, Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Runs the op that :func:`oracle_fused` computes, and with ``up`` its backward."""
    name = "mhc_post_head" if _is_head(inputs) else "mhc_single_pass" if "h_pre" in inputs else "mhc_post_pre"
    return run_op(name, inputs, up, {**PRE_OPTIONS, "transpose_res": transpose_res, **(options or {})})


def _is_head(inputs: Mapping[str, Tensor | None]) -> bool:
    assert inputs["x"] is not None and inputs["phi"] is not None
    return inputs["phi"].shape[0] == inputs["x"].shape[-2]


def relative(got: Tensor, want: Tensor) -> float:
    """Returns ``||got - want|| / ||want||`` in fp64; 0 for two empty tensors, infinity for NaN."""
    a, b = got.detach().cpu().double(), want.detach().cpu().double()
    assert a.shape == b.shape, f"{tuple(a.shape)} instead of {tuple(b.shape)}"
    if a.numel() == 0:
        return 0.0
    error, size = float((a - b).norm()), float(b.norm())
    if error != error:
        return float("inf")
    return error / size if size else error


def rounding(dtype: torch.dtype) -> float:
    """Returns half a unit in the last place, relative."""
    return torch.finfo(dtype).eps / 2


def compare(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float, roundings: float = 1.01
) -> dict[str, float]:
    """Asserts that every result is within ``tolerance``, plus ``roundings`` roundings where its dtype is low."""
    errors = {k: relative(got[k], want[k]) for k in got if k in want}
    assert errors, "nothing to compare"
    for key, error in errors.items():
        dtype = got[key].dtype
        low = roundings * rounding(dtype) if dtype in (torch.bfloat16, torch.float16) else 0.0
        assert error <= tolerance + low, f"{key}: relative error {error:.3g} above {tolerance + low:.3g}"
    return errors


def held(
    got: Mapping[str, Tensor],
    want: Mapping[str, Tensor],
    plain: Callable[[], Mapping[str, Tensor]],
    limit: Callable[[str], tuple[float, float]],
    error: Callable[[Tensor, Tensor], float] = relative,
) -> dict[str, float]:
    """Asserts that every result is within ``limit`` of fp64: a tolerance and what rounding to its dtype may leave.

    Twice the error of ``plain``, the same in fp32, is allowed too.
    """
    errors = {k: error(got[k], want[k]) for k in got}
    assert errors.keys() == want.keys(), f"{sorted(errors)} instead of {sorted(want)}"
    for key, found in errors.items():
        base, low = limit(key)
        if found > base + low:
            allowed = 2 * error(plain()[key], want[key]) + low
            assert found <= allowed, f"{key}: relative error {found:.3g} above {base + low:.3g} and {allowed:.3g}"
    return errors
