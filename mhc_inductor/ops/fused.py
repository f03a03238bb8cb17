# SPDX-License-Identifier: Apache-2.0
"""Fused mHC ops: ``post`` of one sublayer and the next ``pre`` (or ``head``) in one op, each with one backward op.

x_out is an ordinary output: its gradient enters the backward op as ``dx_out`` and is added there. h_pre, h_mix and
inv_rms have no gradient.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mhc_inductor.ops.derived import define_ops, gradient, saved
from mhc_inductor.ops.mhc import HEAD_OPTIONS, PARAMS, POST, PRE_OPTIONS
from mhc_inductor.ops.registry import Gradient, call, needed
from mhc_inductor.reference import fused as reference

_GRADS = (
    "(Tensor dx, Tensor df, Tensor dh_post, Tensor dh_res, Tensor dphi, Tensor dalpha, Tensor dbias, Tensor dgamma)"
)

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


def post_alone(op: str, count: int) -> Gradient:
    """Returns the gradient of a fused op, which is that of its post where no gradient of the ``count`` others arrives."""
    setup, backward = gradient(op)

    def grad(ctx: Any, dx_out: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if dx_out is None or any(g is not None for g in grads[:count]):
            return backward(ctx, dx_out, *grads)
        x, f_out, h_post, h_res, *rest = saved(ctx)
        transpose = next(value for value in rest if isinstance(value, bool))
        return needed(ctx, *call("mhc_post_backward", dx_out, x, f_out, h_post, h_res, transpose))

    return setup, grad


GRADIENTS = {"mhc_post_pre": post_alone("mhc_post_pre", 3), "mhc_post_head": post_alone("mhc_post_head", 1)}

define_ops(SCHEMAS, reference, gradients=GRADIENTS, fused=SCHEMAS)
