# SPDX-License-Identifier: Apache-2.0
"""The mHC ops (arXiv 2512.24880) in the namespace ``torch.ops.mhc_inductor``.

This module has the schemas; a gradient is an op of its own. ``derived.py`` makes the rest of them.

h_pre, h_mix and inv_rms have no gradient: they exist for the backward op. Double backward raises RuntimeError.
"""

from __future__ import annotations

from mhc_inductor.ops.derived import define_ops
from mhc_inductor.ops.registry import call as call
from mhc_inductor.reference import mhc as reference

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

define_ops(SCHEMAS, reference)
