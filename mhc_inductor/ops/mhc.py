# SPDX-License-Identifier: Apache-2.0
"""The mHC ops (arXiv 2512.24880) in the namespace ``torch.ops.mhc_inductor``.

This module defines the schema, fake and gradient of each op; a gradient is an op of its own. ``registry.py`` registers
them.

h_pre, h_mix and inv_rms have no gradient: they exist for the backward op. Double backward raises RuntimeError.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mhc_inductor.ops.registry import Gradient, define, needed, refuse
from mhc_inductor.ops.registry import call as call
from mhc_inductor.reference import mhc as reference
from mhc_inductor.reference.mhc import acc_dtype

PARAMS = "Tensor phi, Tensor alpha, Tensor bias, Tensor? gamma"
SINKHORN = "int sinkhorn_iters, float sinkhorn_eps, str sinkhorn_form"
NORM = 'str norm_form="inside"'
PRE_OPTIONS = f"float norm_eps, float hc_eps, float post_mult, float post_eps, {SINKHORN}, {NORM}"
HEAD_OPTIONS = f"float norm_eps, float hc_eps, {NORM}"
_GRADS = "(Tensor dx, Tensor dphi, Tensor dalpha, Tensor dbias, Tensor dgamma)"

_SAVED = "Tensor h_pre, Tensor h_mix, Tensor inv_rms, Tensor? dx_acc"
POST = "Tensor x, Tensor f_out, Tensor h_post, Tensor? h_res, bool transpose_res"

SCHEMAS = {
    "mhc_pre": f"(Tensor x, {PARAMS}, {PRE_OPTIONS}) -> "
    "(Tensor h_in, Tensor h_post, Tensor h_res, Tensor h_pre, Tensor h_mix, Tensor inv_rms)",
    "mhc_pre_backward": "(Tensor? dh_in, Tensor? dh_post, Tensor? dh_res, "
    f"Tensor x, {PARAMS}, {_SAVED.replace('h_pre,', 'h_pre, Tensor h_post,')}, "
    f"{PRE_OPTIONS}) -> {_GRADS}",
    "mhc_sinkhorn": "(Tensor h_res, int iters, float eps, str form) -> Tensor",
    "mhc_sinkhorn_backward": "(Tensor grad, Tensor h_res, int iters, float eps, str form) -> Tensor",
    "mhc_post": f"({POST}) -> Tensor",
    "mhc_post_backward": f"(Tensor g, {POST}) -> (Tensor dx, Tensor df, Tensor dh_post, Tensor dh_res)",
    "mhc_head": f"(Tensor x, {PARAMS}, {HEAD_OPTIONS}) -> (Tensor h_in, Tensor h_pre, Tensor h_mix, Tensor inv_rms)",
    "mhc_head_backward": f"(Tensor? dh_in, Tensor x, {PARAMS}, {_SAVED}, {HEAD_OPTIONS}) -> {_GRADS}",
}

# --- shapes and dtypes of the outputs (fakes) ---------------------------------------------------------------


def like(t: Tensor) -> Tensor:
    """Returns an empty contiguous tensor with the shape, dtype and device of ``t``."""
    return t.new_empty(t.shape)


def param_grads(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None) -> tuple[Tensor, ...]:
    """Returns fake gradients of x, phi, alpha, bias and gamma; gamma's has shape [0] without gamma."""
    dgamma = x.new_empty((0,)) if gamma is None else like(gamma)
    return like(x), like(phi), like(alpha), like(bias), dgamma


def mhc_pre_fake(x: Tensor, phi: Tensor, *_: Any) -> tuple[Tensor, ...]:
    """Returns fake outputs of ``mhc_pre``: h_in, h_post, h_res, h_pre, h_mix, inv_rms."""
    lead, (n, d), m, acc = x.shape[:-2], x.shape[-2:], phi.shape[0], acc_dtype(x.dtype)
    k = 0 if m == 2 * n else n
    return (
        x.new_empty((*lead, d)),
        x.new_empty((*lead, n), dtype=acc),
        x.new_empty((*lead, k, k), dtype=acc),
        x.new_empty((*lead, n), dtype=acc),
        x.new_empty((*lead, m), dtype=acc),
        x.new_empty(lead, dtype=acc),
    )


def mhc_pre_backward_fake(
    dh_in: Any,
    dh_post: Any,
    dh_res: Any,
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Any,
    *_: Any,
) -> tuple[Tensor, ...]:
    """Returns fake gradients of x, phi, alpha, bias and gamma."""
    return param_grads(x, phi, alpha, bias, gamma)


def mhc_sinkhorn_fake(h_res: Tensor, *_: Any) -> Tensor:
    """Returns the fake output of ``mhc_sinkhorn``."""
    return like(h_res)


def mhc_sinkhorn_backward_fake(grad: Tensor, h_res: Tensor, *_: Any) -> Tensor:
    """Returns the fake gradient of h_res."""
    return like(h_res)


def mhc_post_fake(x: Tensor, *_: Any) -> Tensor:
    """Returns the fake output of ``mhc_post``."""
    return like(x)


def mhc_post_backward_fake(
    g: Tensor, x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor | None, transpose_res: bool
) -> tuple[Tensor, ...]:
    """Returns fake gradients of x, f_out, h_post and h_res; that of h_res has shape [0] without h_res."""
    return like(x), like(f_out), like(h_post), x.new_empty((0,)) if h_res is None else like(h_res)


def mhc_head_fake(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    """Returns fake outputs of ``mhc_head``: h_in, h_pre, h_mix, inv_rms."""
    lead, (n, d), acc = x.shape[:-2], x.shape[-2:], acc_dtype(x.dtype)
    per_stream = (*lead, n)
    return (
        x.new_empty((*lead, d)),
        x.new_empty(per_stream, dtype=acc),
        x.new_empty(per_stream, dtype=acc),
        x.new_empty(lead, dtype=acc),
    )


def mhc_head_backward_fake(
    dh_in: Any, x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Any, *_: Any
) -> tuple[Tensor, ...]:
    """Returns fake gradients of x, phi, alpha, bias and gamma."""
    return param_grads(x, phi, alpha, bias, gamma)


# --- gradients ----------------------------------------------------------------------------------------------


def _pre_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, phi, alpha, bias, gamma, *ctx.options = inputs
    _, h_post, _, h_pre, h_mix, inv_rms = output
    ctx.save_for_backward(x, phi, alpha, bias, gamma, h_pre, h_post, h_mix, inv_rms)
    ctx.mark_non_differentiable(h_pre, h_mix, inv_rms)
    ctx.set_materialize_grads(False)


def _pre_grad(ctx: Any, dh_in: Any, dh_post: Any, dh_res: Any, *others: Any) -> tuple[Tensor | None, ...]:
    refuse("mhc_pre", ("h_pre", "h_mix", "inv_rms"), others)
    if dh_in is None and dh_post is None and dh_res is None:
        return needed(ctx)
    *grads, dgamma = call("mhc_pre_backward", dh_in, dh_post, dh_res, *ctx.saved_tensors, None, *ctx.options)
    return needed(ctx, *grads, dgamma)


def _head_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, phi, alpha, bias, gamma, *ctx.options = inputs
    _, h_pre, h_mix, inv_rms = output
    ctx.save_for_backward(x, phi, alpha, bias, gamma, h_pre, h_mix, inv_rms)
    ctx.mark_non_differentiable(h_pre, h_mix, inv_rms)
    ctx.set_materialize_grads(False)


def _head_grad(ctx: Any, dh_in: Any, *others: Any) -> tuple[Tensor | None, ...]:
    refuse("mhc_head", ("h_pre", "h_mix", "inv_rms"), others)
    if dh_in is None:
        return needed(ctx)
    return needed(ctx, *call("mhc_head_backward", dh_in, *ctx.saved_tensors, None, *ctx.options))


def _sinkhorn_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    h_res, *ctx.options = inputs
    ctx.save_for_backward(h_res)
    ctx.set_materialize_grads(False)


def _sinkhorn_grad(ctx: Any, grad: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return needed(ctx)
    return needed(ctx, call("mhc_sinkhorn_backward", grad, *ctx.saved_tensors, *ctx.options))


def _post_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.transpose_res = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _post_grad(ctx: Any, g: Any) -> tuple[Tensor | None, ...]:
    if g is None:
        return needed(ctx)
    return needed(ctx, *call("mhc_post_backward", g, *ctx.saved_tensors, ctx.transpose_res))


_GRADIENTS: dict[str, Gradient] = {
    "mhc_pre": (_pre_setup, _pre_grad),
    "mhc_sinkhorn": (_sinkhorn_setup, _sinkhorn_grad),
    "mhc_post": (_post_setup, _post_grad),
    "mhc_head": (_head_setup, _head_grad),
}


for _name, _schema in SCHEMAS.items():
    define(_name, _schema, getattr(reference, _name), globals()[f"{_name}_fake"], _GRADIENTS.get(_name))
