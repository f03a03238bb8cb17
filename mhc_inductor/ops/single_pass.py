# SPDX-License-Identifier: Apache-2.0
"""The ops of single-pass mHC (DeepSeek-V4.1): coefficients, collapse with given weights, and all between two sublayers.

h_mix and inv_rms have no gradient: they exist for the backward ops. Double backward raises RuntimeError.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mhc_inductor.ops.derived import define_ops
from mhc_inductor.ops.fused import post_alone
from mhc_inductor.ops.mhc import PARAMS, POST, PRE_OPTIONS
from mhc_inductor.reference import single_pass as reference

_SITE = POST.replace(", bool", ", Tensor h_pre, bool")
_COEFFICIENTS = "Tensor h_pre, Tensor h_post, Tensor h_res, Tensor h_mix, Tensor inv_rms"
_PARAM_GRADS = "Tensor dphi, Tensor dalpha, Tensor dbias, Tensor dgamma"

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


_SETUP, _BACKWARD = post_alone("mhc_single_pass", 4)


def _single_pass_grad(ctx: Any, dx_out: Any, dh_in: Any, *grads: Any) -> tuple[Tensor | None, ...]:
    """Leaves out the gradients of what is not used: of h_pre without a gradient of h_in, of parameters without coefficients."""
    x, f_out, h_post, h_res, h_pre, flag, *rest = _BACKWARD(ctx, dx_out, dh_in, *grads)
    if all(g is None for g in grads[:3]):
        rest[:4] = [None] * 4
    return x, f_out, h_post, h_res, None if dh_in is None else h_pre, flag, *rest


GRADIENTS = {"mhc_single_pass": (_SETUP, _single_pass_grad)}

define_ops(SCHEMAS, reference, gradients=GRADIENTS, fused=[name for name in SCHEMAS if "single_pass" in name])
