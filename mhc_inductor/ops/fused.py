# SPDX-License-Identifier: Apache-2.0
"""Fused mHC ops: ``post`` of one sublayer and the next ``pre`` (or ``head``) in one op, each with one backward op.

x_out is an ordinary output: its gradient enters the backward op as ``dx_out`` and is added there. h_pre, h_mix and
inv_rms have no gradient.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mhc_inductor.ops.mhc import HEAD_OPTIONS, PARAMS, POST, PRE_OPTIONS, like, mhc_head_fake, mhc_pre_fake, param_grads
from mhc_inductor.ops.registry import Gradient, call, define, needed, refuse
from mhc_inductor.reference import fused as reference

_GRADS = (
    "(Tensor dx, Tensor df, Tensor dh_post, Tensor dh_res, Tensor dphi, Tensor dalpha, Tensor dbias, Tensor dgamma)"
)
_INTERNAL = ("h_pre", "h_mix", "inv_rms")
# Index of phi in the arguments of both forwards.
_PHI = 5

SCHEMAS = {
    "mhc_post_pre": f"({POST}, {PARAMS}, {PRE_OPTIONS}) -> "
    "(Tensor x_out, Tensor h_in, Tensor next_post, Tensor next_res, Tensor h_pre, Tensor h_mix, Tensor inv_rms)",
    "mhc_post_pre_backward": "(Tensor? dx_out, Tensor? dh_in, Tensor? dnext_post, Tensor? dnext_res, "
    f"{POST}, Tensor x_out, {PARAMS}, Tensor h_pre, Tensor next_post, Tensor h_mix, Tensor inv_rms, "
    f"{PRE_OPTIONS}) -> {_GRADS}",
    "mhc_post_head": f"({POST}, {PARAMS}, {HEAD_OPTIONS}) -> "
    "(Tensor x_out, Tensor h_in, Tensor h_pre, Tensor h_mix, Tensor inv_rms)",
    "mhc_post_head_backward": "(Tensor? dx_out, Tensor? dh_in, "
    f"{POST}, Tensor x_out, {PARAMS}, Tensor h_pre, Tensor h_mix, Tensor inv_rms, {HEAD_OPTIONS}) -> {_GRADS}",
}


# --- shapes and dtypes of the outputs (fakes) ---------------------------------------------------------------


def _mhc_post_pre_fake(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return like(x), *mhc_pre_fake(x, args[_PHI - 1])


def _mhc_post_head_fake(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return like(x), *mhc_head_fake(x)


def _grads(
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
    *_: Any,
) -> tuple[Tensor, ...]:
    dx, *dparams = param_grads(x, phi, alpha, bias, gamma)
    dh_res = x.new_empty((0,)) if h_res is None else like(h_res)
    return dx, like(f_out), like(h_post), dh_res, *dparams


def _mhc_post_pre_backward_fake(dx_out: Any, dh_in: Any, dpost: Any, dres: Any, *args: Any) -> tuple[Tensor, ...]:
    return _grads(*args)


def _mhc_post_head_backward_fake(dx_out: Any, dh_in: Any, *args: Any) -> tuple[Tensor, ...]:
    return _grads(*args)


# --- gradients ----------------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, f_out, h_post, h_res, ctx.transpose_res, phi, alpha, bias, gamma, *ctx.options = inputs
    x_out, _, *coefficients, h_pre, h_mix, inv_rms = output
    # mhc_post_pre also saves next_post; its backward recomputes next_res.
    saved = (h_pre, *coefficients[:1], h_mix, inv_rms)
    ctx.save_for_backward(x, f_out, h_post, h_res, x_out, phi, alpha, bias, gamma, *saved)
    ctx.mark_non_differentiable(h_pre, h_mix, inv_rms)
    ctx.set_materialize_grads(False)


def _backward(op: str, ctx: Any, dx_out: Any, grads: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    x, f_out, h_post, h_res, *rest = ctx.saved_tensors
    post = (x, f_out, h_post, h_res, ctx.transpose_res)
    dparams: tuple[Any, ...] = ()
    if all(g is None for g in grads):
        if dx_out is None:
            return needed(ctx)
        dpost = call("mhc_post_backward", dx_out, *post)
    else:
        out = call(f"{op}_backward", dx_out, *grads, *post, *rest, *ctx.options)
        dpost, dparams = out[:4], out[4:]
    return needed(ctx, *dpost, None, *dparams)


def _post_pre_grad(ctx: Any, dx_out: Any, dh_in: Any, dpost: Any, dres: Any, *others: Any) -> tuple[Tensor | None, ...]:
    refuse("mhc_post_pre", _INTERNAL, others)
    return _backward("mhc_post_pre", ctx, dx_out, (dh_in, dpost, dres))


def _post_head_grad(ctx: Any, dx_out: Any, dh_in: Any, *others: Any) -> tuple[Tensor | None, ...]:
    refuse("mhc_post_head", _INTERNAL, others)
    return _backward("mhc_post_head", ctx, dx_out, (dh_in,))


_GRADIENTS: dict[str, Gradient] = {
    "mhc_post_pre": (_setup, _post_pre_grad),
    "mhc_post_head": (_setup, _post_head_grad),
}

for _name, _schema in SCHEMAS.items():
    define(_name, _schema, getattr(reference, _name), globals()[f"_{_name}_fake"], _GRADIENTS.get(_name), fused=True)
