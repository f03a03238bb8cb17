# SPDX-License-Identifier: Apache-2.0
"""Validation of the mHC arguments, shared by the public functions, the ops and their fakes.

Since the fakes validate too, errors appear while tracing. Every message names the op, the argument, what was expected
and what came. Sizes are compared with ``torch._check_value``, which records for symbolic sizes that the comparison must
hold and adds no other guard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FORMS = ("softmax", "exp", "exp_eps")
NORM_FORMS = ("inside", "outside")
MIN_STREAMS, MAX_STREAMS, MIN_WIDTH = 2, 8, 16
_OPTIONAL = frozenset({"gamma", "h_res", "dh_in", "dh_post", "dh_res", "dx_acc", "dx_out", "dnext_post", "dnext_res"})
_OPTIONAL |= {"dh_pre", "dnext_pre"}
_OPTIONAL |= {"b_s", "b_m", "S0", "M0", "dout", "dS", "dM"}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTEGERS = (torch.int32, torch.int64)


def _text(sizes: Sequence[Any]) -> str:
    return "[" + ", ".join(str(s) for s in sizes) + "]"


def strided(op: str, name: str, t: Any) -> None:
    """Raises TypeError unless ``t`` is a tensor in dense memory: not nested, sparse or of another library's layout."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
    if t.is_nested:
        kind, instead = "nested", f"{name}.to_padded_tensor(0.0), or its values"
    elif t.layout is not torch.strided:
        kind, instead = str(t.layout), f"{name}.to_dense()"
    else:
        return
    raise TypeError(f"{op}: {name} must be a strided tensor, got a {kind} one; pass {instead}")


def _floating(op: str, **tensors: Tensor | None) -> None:
    """Checks that all are floating-point tensors on the first one's device, and fp64 only where the first is fp64."""
    first_name, first = next(iter(tensors.items()))
    for name, t in tensors.items():
        if t is None and name in _OPTIONAL:
            continue
        strided(op, name, t)
        assert isinstance(t, Tensor)
        if t.dtype not in _FLOATS:
            raise TypeError(f"{op}: {name} must be bfloat16, float16, float32 or float64, got {t.dtype}")
        assert isinstance(first, Tensor)
        if t.dtype is torch.float64 and first.dtype is not torch.float64:
            raise TypeError(f"{op}: {name} may be float64 only where {first_name} is; {first_name} is {first.dtype}")
        if t.device != first.device:
            raise ValueError(f"{op}: {name} must be on {first_name}'s device {first.device}, got {t.device}")


def _shape(op: str, name: str, t: Tensor, expected: Sequence[Any], meaning: str) -> None:
    def message() -> str:
        return f"{op}: {name} must have shape {meaning} = {_text(expected)}, got {_text(t.shape)}"

    if t.dim() != len(expected):
        raise ValueError(message())
    for got, want in zip(t.shape, expected, strict=True):
        torch._check_value(got == want, message)


def integers(op: str, name: str, t: Tensor, like: Tensor | None = None, like_name: str = "q") -> None:
    """Raises TypeError or ValueError unless ``t`` is an int32 or int64 tensor on the device of ``like``."""
    strided(op, name, t)
    if t.dtype not in _INTEGERS:
        raise TypeError(f"{op}: {name} must be int32 or int64, got {t.dtype}")
    if like is not None and t.device != like.device:
        raise ValueError(f"{op}: {name} must be on {like_name}'s device {like.device}, got {t.device}")


def _is_number(op: str, name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")


def number(op: str, name: str, value: float, least: float = -math.inf, hint: str = "", *, read: bool = True) -> None:
    """Raises TypeError or ValueError unless ``value`` is a finite number of at least ``least``.

    Args:
        op: Name of the op for messages.
        name: Name of the argument.
        value: The number. A symbol is guarded to have its value.
        least: Its lower bound.
        hint: What the message says after the bound.
        read: Whether symbols are read; False lets them pass, so that no guard is added.
    """
    _is_number(op, name, value)
    if not read and isinstance(value, (torch.SymInt, torch.SymFloat)):
        return
    got = float(value)
    if not (math.isfinite(got) and got >= least):
        bound = "" if least == -math.inf else f" and at least {least:g}"
        raise ValueError(f"{op}: {name} must be finite{bound}{hint}, got {got}")


def _eps(op: str, below: float = math.inf, **values: float) -> None:
    for name, value in values.items():
        _is_number(op, name, value)
        got = float(value)
        if not (math.isfinite(got) and 0 <= got < below):
            bound = "" if below == math.inf else f" and below {below}"
            raise ValueError(f"{op}: {name} must be finite, not negative{bound}, got {got}")


def _sinkhorn(op: str, iters: int, eps: float, form: str, prefix: str = "") -> None:
    if isinstance(iters, bool) or not isinstance(iters, (int, torch.SymInt)):
        raise TypeError(f"{op}: {prefix}iters must be an int, got {type(iters).__name__}")
    if iters < 0:
        raise ValueError(f"{op}: {prefix}iters must be 0 (raw logits) or more, got {iters}")
    _eps(op, below=1.0, **{f"{prefix}eps": eps})
    if form not in FORMS:
        raise ValueError(f"{op}: {prefix}form must be one of {FORMS}, got {form!r}")


def _norm(op: str, eps: float, form: str) -> None:
    _eps(op, norm_eps=eps)
    if form not in NORM_FORMS:
        raise ValueError(f"{op}: norm_form must be one of {NORM_FORMS} (where norm_eps is added), got {form!r}")


def _streams(op: str, name: str, n: int) -> None:
    if not MIN_STREAMS <= n <= MAX_STREAMS:
        raise ValueError(f"{op}: {name} must hold {MIN_STREAMS} to {MAX_STREAMS} streams (n), got {n}")


def _x(op: str, x: Tensor) -> tuple[int, int]:
    """Checks the shape of ``x[..., n, D]`` and returns (n, D)."""
    if x.dim() < 2:
        raise ValueError(f"{op}: x must have shape [..., n, D], got {_text(x.shape)}")
    n, d = x.shape[-2:]
    _streams(op, "x[..., n, D]", n)
    if d < MIN_WIDTH:
        raise ValueError(f"{op}: x must have a width D of at least {MIN_WIDTH}, got shape {_text(x.shape)}")
    return n, d


def _coefficients(
    op: str, x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, kinds: dict[str, int]
) -> None:
    """Checks the shapes of the parameters. ``kinds`` maps each allowed number of phi's rows, as text, to the number."""
    n, d = x.shape[-2:]
    allowed = " or ".join(f"[{text}, n*D] = [{rows}, {n * d}]" for text, rows in kinds.items())
    if phi.dim() != 2 or phi.shape[0] not in kinds.values() or phi.shape[1] != n * d:
        raise ValueError(f"{op}: phi must have shape {allowed}, got {_text(phi.shape)} (n = {n}, D = {d})")
    m = phi.shape[0]
    count = m // n if m <= 2 * n else 3
    _shape(op, "alpha", alpha, [count], "[one per kind of coefficient]")
    _shape(op, "bias", bias, [m], "[rows of phi]")
    if gamma is not None:
        _shape(op, "gamma", gamma, [n, d], "[n, D]")


def mhc_pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    post_mult: float,
    post_eps: float,
    sinkhorn_iters: int,
    sinkhorn_eps: float,
    sinkhorn_form: str,
    norm_form: str = "inside",
    *,
    op: str = "mhc_pre",
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``mhc_pre`` fit together."""
    _floating(op, x=x, phi=phi, alpha=alpha, bias=bias, gamma=gamma)
    n, _ = _x(op, x)
    _coefficients(op, x, phi, alpha, bias, gamma, {"n*n+2n": n * n + 2 * n, "2n": 2 * n})
    _norm(op, norm_eps, norm_form)
    _eps(op, hc_eps=hc_eps, post_mult=post_mult, post_eps=post_eps)
    if post_mult == 0:
        raise ValueError(f"{op}: post_mult must be above 0, got {post_mult}")
    _sinkhorn(op, sinkhorn_iters, sinkhorn_eps, sinkhorn_form, "sinkhorn_")
    if sinkhorn_iters > 0 and phi.shape[0] == 2 * n:
        raise ValueError(
            f"{op}: sinkhorn_iters must be 0 when phi has 2n = {2 * n} rows (no residual matrix), got {sinkhorn_iters}"
        )


def mhc_pre_backward(
    dh_in: Tensor | None,
    dh_post: Tensor | None,
    dh_res: Tensor | None,
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    h_pre: Tensor,
    h_post: Tensor,
    h_mix: Tensor,
    inv_rms: Tensor,
    dx_acc: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    post_mult: float,
    post_eps: float,
    sinkhorn_iters: int,
    sinkhorn_eps: float,
    sinkhorn_form: str,
    norm_form: str = "inside",
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``mhc_pre_backward`` fit together."""
    op = "mhc_pre_backward"
    mhc_pre(
        x, phi, alpha, bias, gamma, norm_eps, hc_eps, post_mult, post_eps,
        sinkhorn_iters, sinkhorn_eps, sinkhorn_form, norm_form, op=op,
    )  # fmt: skip
    _tokens(op, x, h_pre, h_mix, inv_rms, dh_in, dx_acc, phi.shape[0])
    _of_coefficients(op, x, phi, h_post=h_post, dh_post=dh_post, dh_res=dh_res)


def _tokens(
    op: str,
    x: Tensor,
    h_pre: Tensor,
    h_mix: Tensor,
    inv_rms: Tensor,
    dh_in: Tensor | None,
    dx_acc: Tensor | None,
    m: int,
    name: str = "h_pre",
) -> None:
    """Checks the per-token tensors that the backward ops take of pre, the head and their like; ``name`` is h_pre's."""
    lead, (n, d) = x.shape[:-2], x.shape[-2:]
    _floating(op, x=x, **{name: h_pre}, h_mix=h_mix, inv_rms=inv_rms, dh_in=dh_in, dx_acc=dx_acc)
    _shape(op, name, h_pre, [*lead, n], "[..., n]")
    _shape(op, "h_mix", h_mix, [*lead, m], "[..., m]")
    _shape(op, "inv_rms", inv_rms, [*lead], "[...]")
    if dh_in is not None:
        _shape(op, "dh_in", dh_in, [*lead, d], "[..., D]")
    if dx_acc is not None:
        _shape(op, "dx_acc", dx_acc, x.shape, "x's")


def mhc_sinkhorn(h_res: Tensor, iters: int, eps: float, form: str, *, op: str = "mhc_sinkhorn") -> None:
    """Raises ValueError or TypeError unless the arguments of ``mhc_sinkhorn`` fit together."""
    if not isinstance(h_res, Tensor):  # _floating lets a None h_res pass
        raise TypeError(f"{op}: h_res must be a tensor, got {type(h_res).__name__}")
    _floating(op, h_res=h_res)
    if h_res.dim() < 2:
        raise ValueError(f"{op}: h_res must have shape [..., n, n], got {_text(h_res.shape)}")
    n = h_res.shape[-1]
    torch._check_value(
        h_res.shape[-2] == n, lambda: f"{op}: h_res must have shape [..., n, n], got {_text(h_res.shape)}"
    )
    _streams(op, "h_res[..., n, n]", n)
    _sinkhorn(op, iters, eps, form)


def mhc_sinkhorn_backward(grad: Tensor, h_res: Tensor, iters: int, eps: float, form: str) -> None:
    """Raises ValueError or TypeError unless the arguments of ``mhc_sinkhorn_backward`` fit together."""
    op = "mhc_sinkhorn_backward"
    mhc_sinkhorn(h_res, iters, eps, form, op=op)
    _floating(op, h_res=h_res, grad=grad)
    _shape(op, "grad", grad, h_res.shape, "h_res's")


def mhc_post(
    x: Tensor,
    f_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    transpose_res: bool,
    *,
    op: str = "mhc_post",
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``mhc_post`` fit together."""
    _floating(op, x=x, f_out=f_out, h_post=h_post, h_res=h_res)
    n, d = _x(op, x)
    lead = x.shape[:-2]
    _shape(op, "f_out", f_out, [*lead, d], "[..., D]")
    _shape(op, "h_post", h_post, [*lead, n], "[..., n]")
    if h_res is not None:
        _shape(op, "h_res", h_res, [*lead, n, n], "[..., n, n]")
    if not isinstance(transpose_res, bool):
        raise TypeError(f"{op}: transpose_res must be a bool, got {type(transpose_res).__name__}")


def mhc_post_backward(
    g: Tensor, x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor | None, transpose_res: bool
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``mhc_post_backward`` fit together."""
    op = "mhc_post_backward"
    mhc_post(x, f_out, h_post, h_res, transpose_res, op=op)
    _floating(op, x=x, g=g)
    _shape(op, "g", g, x.shape, "x's")


def mhc_head(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    norm_form: str = "inside",
    *,
    op: str = "mhc_head",
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``mhc_head`` fit together."""
    _floating(op, x=x, phi=phi, alpha=alpha, bias=bias, gamma=gamma)
    n, _ = _x(op, x)
    _coefficients(op, x, phi, alpha, bias, gamma, {"n": n})
    _norm(op, norm_eps, norm_form)
    _eps(op, hc_eps=hc_eps)


def mhc_head_backward(
    dh_in: Tensor | None,
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    h_pre: Tensor,
    h_mix: Tensor,
    inv_rms: Tensor,
    dx_acc: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    norm_form: str = "inside",
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``mhc_head_backward`` fit together."""
    op = "mhc_head_backward"
    mhc_head(x, phi, alpha, bias, gamma, norm_eps, hc_eps, norm_form, op=op)
    _tokens(op, x, h_pre, h_mix, inv_rms, dh_in, dx_acc, phi.shape[0])


def mhc_post_pre(
    x: Tensor,
    f_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    transpose_res: bool,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    *options: Any,
    op: str = "mhc_post_pre",
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``mhc_post_pre`` fit together.

    ``options`` are those of ``mhc_pre``.
    """
    mhc_post(x, f_out, h_post, h_res, transpose_res, op=op)
    mhc_pre(x, phi, alpha, bias, gamma, *options, op=op)


def mhc_post_head(
    x: Tensor,
    f_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    transpose_res: bool,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    *options: Any,
    op: str = "mhc_post_head",
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``mhc_post_head`` fit together.

    ``options`` are those of ``mhc_head``.
    """
    mhc_post(x, f_out, h_post, h_res, transpose_res, op=op)
    mhc_head(x, phi, alpha, bias, gamma, *options, op=op)


def mhc_post_pre_backward(
    dx_out: Tensor | None,
    dh_in: Tensor | None,
    dnext_post: Tensor | None,
    dnext_res: Tensor | None,
    x: Tensor,
    f_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    transpose_res: bool,
    x_out: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    h_pre: Tensor,
    next_post: Tensor,
    h_mix: Tensor,
    inv_rms: Tensor,
    *options: Any,
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``mhc_post_pre_backward`` fit together."""
    op = "mhc_post_pre_backward"
    mhc_post_pre(x, f_out, h_post, h_res, transpose_res, phi, alpha, bias, gamma, *options, op=op)
    _between(op, x, x_out, dx_out)
    _tokens(op, x, h_pre, h_mix, inv_rms, dh_in, None, phi.shape[0])
    _of_coefficients(op, x, phi, next_post=next_post, dnext_post=dnext_post, dnext_res=dnext_res)


def mhc_post_head_backward(
    dx_out: Tensor | None,
    dh_in: Tensor | None,
    x: Tensor,
    f_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    transpose_res: bool,
    x_out: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    h_pre: Tensor,
    h_mix: Tensor,
    inv_rms: Tensor,
    *options: Any,
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``mhc_post_head_backward`` fit together."""
    op = "mhc_post_head_backward"
    mhc_post_head(x, f_out, h_post, h_res, transpose_res, phi, alpha, bias, gamma, *options, op=op)
    _between(op, x, x_out, dx_out)
    _tokens(op, x, h_pre, h_mix, inv_rms, dh_in, None, phi.shape[0])


def _between(op: str, x: Tensor, x_out: Tensor, dx_out: Tensor | None) -> None:
    """Checks the streams between the two halves of a fused op, and their gradient."""
    _floating(op, x=x, x_out=x_out, dx_out=dx_out)
    _shape(op, "x_out", x_out, x.shape, "x's")
    if x_out.dtype is not x.dtype:
        raise TypeError(f"{op}: x_out must have x's dtype {x.dtype}, got {x_out.dtype}")
    if dx_out is not None:
        _shape(op, "dx_out", dx_out, x.shape, "x's")


def mhc_coefficients(*args: Any, op: str = "mhc_coefficients") -> None:
    """Raises ValueError or TypeError unless the arguments of ``mhc_coefficients``, those of ``mhc_pre``, fit together."""
    mhc_pre(*args, op=op)


def mhc_coefficients_backward(
    dh_pre: Tensor | None,
    dh_post: Tensor | None,
    dh_res: Tensor | None,
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    h_pre: Tensor,
    h_post: Tensor,
    h_mix: Tensor,
    inv_rms: Tensor,
    dx_acc: Tensor | None,
    *options: Any,
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``mhc_coefficients_backward`` fit together."""
    op = "mhc_coefficients_backward"
    mhc_pre(x, phi, alpha, bias, gamma, *options, op=op)
    _tokens(op, x, h_pre, h_mix, inv_rms, None, dx_acc, phi.shape[0])
    _of_coefficients(op, x, phi, h_post=h_post, dh_pre=dh_pre, dh_post=dh_post, dh_res=dh_res)


def _of_coefficients(op: str, x: Tensor, phi: Tensor, **tensors: Tensor | None) -> None:
    """Checks coefficients and their gradients, which may be None; a name that ends in "res" is a matrix a token."""
    lead, n = x.shape[:-2], x.shape[-2]
    _floating(op, x=x, **tensors)
    k = 0 if phi.shape[0] == 2 * n else n
    for name, t in tensors.items():
        if t is not None and name.endswith("res"):
            _shape(op, name, t, [*lead, k, k], f"{name.removeprefix('d')}'s")
        elif t is not None:
            _shape(op, name, t, [*lead, n], "[..., n]")


def mhc_collapse(x: Tensor, h_pre: Tensor, *, op: str = "mhc_collapse") -> None:
    """Raises ValueError or TypeError unless the arguments of ``mhc_collapse`` fit together."""
    _floating(op, x=x, h_pre=h_pre)
    n, _ = _x(op, x)
    _shape(op, "h_pre", h_pre, [*x.shape[:-2], n], "[..., n]")


def mhc_collapse_backward(dh_in: Tensor, x: Tensor, h_pre: Tensor) -> None:
    """Raises ValueError or TypeError unless the arguments of ``mhc_collapse_backward`` fit together."""
    op = "mhc_collapse_backward"
    mhc_collapse(x, h_pre, op=op)
    if dh_in is None:  # _floating lets a None dh_in pass
        raise TypeError(f"{op}: dh_in must be a tensor, got NoneType")
    _floating(op, x=x, dh_in=dh_in)
    _shape(op, "dh_in", dh_in, [*x.shape[:-2], x.shape[-1]], "[..., D]")


def mhc_single_pass(
    x: Tensor,
    f_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    h_pre: Tensor,
    transpose_res: bool,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    *options: Any,
    op: str = "mhc_single_pass",
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``mhc_single_pass`` fit together.

    ``options`` are those of ``mhc_pre``.
    """
    mhc_post(x, f_out, h_post, h_res, transpose_res, op=op)
    mhc_collapse(x, h_pre, op=op)
    mhc_pre(x, phi, alpha, bias, gamma, *options, op=op)


def mhc_single_pass_backward(
    dx_out: Tensor | None,
    dh_in: Tensor | None,
    dnext_pre: Tensor | None,
    dnext_post: Tensor | None,
    dnext_res: Tensor | None,
    x: Tensor,
    f_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    h_pre: Tensor,
    transpose_res: bool,
    x_out: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    next_pre: Tensor,
    next_post: Tensor,
    h_mix: Tensor,
    inv_rms: Tensor,
    *options: Any,
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``mhc_single_pass_backward`` fit together."""
    op = "mhc_single_pass_backward"
    mhc_single_pass(x, f_out, h_post, h_res, h_pre, transpose_res, phi, alpha, bias, gamma, *options, op=op)
    _between(op, x, x_out, dx_out)
    _tokens(op, x, next_pre, h_mix, inv_rms, dh_in, None, phi.shape[0], name="next_pre")
    grads = {"dnext_pre": dnext_pre, "dnext_post": dnext_post, "dnext_res": dnext_res}
    _of_coefficients(op, x, phi, next_post=next_post, **grads)
