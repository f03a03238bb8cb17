# SPDX-License-Identifier: Apache-2.0
"""The ops of single-pass mHC (DeepSeek-V4.1): coefficients, collapse with given weights, and all between two sublayers.

h_mix and inv_rms have no gradient: they exist for the backward ops. Double backward raises RuntimeError.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mhc_inductor.ops.mhc import PARAMS, POST, PRE_OPTIONS, like, mhc_pre_fake, param_grads
from mhc_inductor.ops.registry import Gradient, call, define, needed, refuse
from mhc_inductor.reference import single_pass as reference

_SITE = POST.replace(", bool", ", Tensor h_pre, bool")
_COEFFICIENTS = "Tensor h_pre, Tensor h_post, Tensor h_res, Tensor h_mix, Tensor inv_rms"
_PARAM_GRADS = "Tensor dphi, Tensor dalpha, Tensor dbias, Tensor dgamma"
_INTERNAL = ("h_mix", "inv_rms")

SCHEMAS = {
    "mhc_coefficients": f"(Tensor x, {PARAMS}, {PRE_OPTIONS}) -> ({_COEFFICIENTS})",
    "mhc_coefficients_backward": "(Tensor? dh_pre, Tensor? dh_post, Tensor? dh_res, "
    f"Tensor x, {PARAMS}, Tensor h_pre, Tensor h_post, Tensor h_mix, Tensor inv_rms, Tensor? dx_acc, {PRE_OPTIONS}) -> "
    f"(Tensor dx, {_PARAM_GRADS})",
    "mhc_collapse": "(Tensor x, Tensor h_pre) -> Tensor",
    "mhc_collapse_backward": "(Tensor dh_in, Tensor x, Tensor h_pre) -> (Tensor dx, Tensor dh_pre)",
    "mhc_single_pass": f"({_SITE}, {PARAMS}, {PRE_OPTIONS}) -> (Tensor x_out, Tensor h_in, "
    "Tensor next_pre, Tensor next_post, Tensor next_res, Tensor h_mix, Tensor inv_rms)",
    "mhc_single_pass_backward": "(Tensor? dx_out, Tensor? dh_in, "
    f"Tensor? dnext_pre, Tensor? dnext_post, Tensor? dnext_res, {_SITE}, Tensor x_out, {PARAMS}, "
    f"Tensor next_pre, Tensor next_post, Tensor h_mix, Tensor inv_rms, {PRE_OPTIONS}) -> "
    f"(Tensor dx, Tensor df, Tensor dh_post, Tensor dh_res, Tensor dh_pre, {_PARAM_GRADS})",
}


# --- shapes and dtypes of the outputs (fakes) ---------------------------------------------------------------


def _mhc_coefficients_fake(x: Tensor, phi: Tensor, *options: Any) -> tuple[Tensor, ...]:
    _, h_post, h_res, h_pre, h_mix, inv_rms = mhc_pre_fake(x, phi)
    return h_pre, h_post, h_res, h_mix, inv_rms


def _mhc_coefficients_backward_fake(
    dh_pre: Any, dh_post: Any, dh_res: Any, x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Any, *_: Any
) -> tuple[Tensor, ...]:
    return param_grads(x, phi, alpha, bias, gamma)


def _mhc_collapse_fake(x: Tensor, h_pre: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-2], x.shape[-1]))


def _mhc_collapse_backward_fake(dh_in: Tensor, x: Tensor, h_pre: Tensor) -> tuple[Tensor, ...]:
    return like(x), like(h_pre)


def _mhc_single_pass_fake(
    x: Tensor, f_out: Any, h_post: Any, h_res: Any, h_pre: Any, transpose_res: bool, phi: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return like(x), _mhc_collapse_fake(x, h_pre), *_mhc_coefficients_fake(x, phi)


def _mhc_single_pass_backward_fake(
    dx_out: Any,
    dh_in: Any,
    dnext_pre: Any,
    dnext_post: Any,
    dnext_res: Any,
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
    *_: Any,
) -> tuple[Tensor, ...]:
    dx, *dparams = param_grads(x, phi, alpha, bias, gamma)
    dh_res = x.new_empty((0,)) if h_res is None else like(h_res)
    return dx, like(f_out), like(h_post), dh_res, like(h_pre), *dparams


# --- gradients ----------------------------------------------------------------------------------------------


def _coefficients_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, phi, alpha, bias, gamma, *ctx.options = inputs
    h_pre, h_post, _, h_mix, inv_rms = output
    ctx.save_for_backward(x, phi, alpha, bias, gamma, h_pre, h_post, h_mix, inv_rms)
    ctx.mark_non_differentiable(h_mix, inv_rms)
    ctx.set_materialize_grads(False)


def _coefficients_grad(ctx: Any, dh_pre: Any, dh_post: Any, dh_res: Any, *others: Any) -> tuple[Tensor | None, ...]:
    refuse("mhc_coefficients", _INTERNAL, others)
    grads = (dh_pre, dh_post, dh_res)
    if all(g is None for g in grads):
        return needed(ctx)
    return needed(ctx, *call("mhc_coefficients_backward", *grads, *ctx.saved_tensors, None, *ctx.options))


def _collapse_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _collapse_grad(ctx: Any, dh_in: Any) -> tuple[Tensor | None, ...]:
    if dh_in is None:
        return needed(ctx)
    return needed(ctx, *call("mhc_collapse_backward", dh_in, *ctx.saved_tensors))


def _single_pass_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, f_out, h_post, h_res, h_pre, ctx.transpose_res, phi, alpha, bias, gamma, *ctx.options = inputs
    x_out, _, next_pre, next_post, _, h_mix, inv_rms = output
    saved = (next_pre, next_post, h_mix, inv_rms)
    ctx.save_for_backward(x, f_out, h_post, h_res, h_pre, x_out, phi, alpha, bias, gamma, *saved)
    ctx.mark_non_differentiable(h_mix, inv_rms)
    ctx.set_materialize_grads(False)


def _single_pass_grad(
    ctx: Any, dx_out: Any, dh_in: Any, dnext_pre: Any, dnext_post: Any, dnext_res: Any, *others: Any
) -> tuple[Tensor | None, ...]:
    refuse("mhc_single_pass", _INTERNAL, others)
    x, f_out, h_post, h_res, h_pre, *rest = ctx.saved_tensors
    coefficients = (dnext_pre, dnext_post, dnext_res)
    unused = all(g is None for g in coefficients)
    if unused and dh_in is None:
        if dx_out is None:
            return needed(ctx)
        return needed(ctx, *call("mhc_post_backward", dx_out, x, f_out, h_post, h_res, ctx.transpose_res))
    site = (x, f_out, h_post, h_res, h_pre, ctx.transpose_res)
    *dsite, dh_pre, dphi, dalpha, dbias, dgamma = call(
        "mhc_single_pass_backward", dx_out, dh_in, *coefficients, *site, *rest, *ctx.options
    )
    dparams = (None,) * 4 if unused else (dphi, dalpha, dbias, dgamma)
    return needed(ctx, *dsite, None if dh_in is None else dh_pre, None, *dparams)


_GRADIENTS: dict[str, Gradient] = {
    "mhc_coefficients": (_coefficients_setup, _coefficients_grad),
    "mhc_collapse": (_collapse_setup, _collapse_grad),
    "mhc_single_pass": (_single_pass_setup, _single_pass_grad),
}

for _name, _schema in SCHEMAS.items():
    define(
        _name,
        _schema,
        getattr(reference, _name),
        globals()[f"_{_name}_fake"],
        _GRADIENTS.get(_name),
        fused=_name.startswith("mhc_single_pass"),
    )
