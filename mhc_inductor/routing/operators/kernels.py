# SPDX-License-Identifier: Apache-2.0
"""Names of the kernels that each op launches, for reports."""

from __future__ import annotations

_LOGITS_BACKWARD = ("mhc_pre_backward_dots", "mhc_pre_backward_coefficients")
_PARAMETERS_BACKWARD = ("mhc_pre_backward_dphi", "mhc_pre_backward_finish")
_PRE = (
    *("mhc_pre_weights", "mhc_pre_project", "mhc_pre_collapse"),
    *(*_LOGITS_BACKWARD, "mhc_pre_backward_dx", *_PARAMETERS_BACKWARD),
)
_POST_PRE = (
    *("mhc_post", "mhc_pre_weights", "mhc_pre_project", "mhc_pre_collapse"),
    *(*_LOGITS_BACKWARD, "mhc_pre_backward_dx", "mhc_post_backward", *_PARAMETERS_BACKWARD),
)
_COEFFICIENTS = ("mhc_pre_weights", "mhc_pre_project", "mhc_coefficients")
_COEFFICIENTS_BACKWARD = ("mhc_pre_backward_coefficients", "mhc_pre_backward_dx")
# With few tokens, mhc_pre_project splits phi itself; on sm_90, wide bf16 streams run the Gluon kernels of kernels/mhc.
KERNELS: dict[str, tuple[str, ...]] = {
    "mhc_pre": _PRE,
    "mhc_sinkhorn": ("mhc_sinkhorn", "mhc_sinkhorn_backward"),
    "mhc_post": ("mhc_post", "mhc_post_backward"),
    "mhc_head": _PRE,
    "mhc_post_pre": _POST_PRE,
    "mhc_post_head": _POST_PRE,
    "mhc_coefficients": (*_COEFFICIENTS, *_COEFFICIENTS_BACKWARD, *_PARAMETERS_BACKWARD),
    "mhc_collapse": ("mhc_collapse", "mhc_collapse_backward"),
    "mhc_single_pass": (
        *("mhc_post", *_COEFFICIENTS),
        *(*_COEFFICIENTS_BACKWARD, "mhc_post_backward", *_PARAMETERS_BACKWARD),
    ),
    # Where Gluon does not run, the op launches e79_forward and e79_backward instead of the Gluon kernels.
    "e79_scan": ("e79_forward_gluon", "e79_backward_gluon", "e79_finish", "e79_bias_sum"),
    # With few queries or many ranges per query, the op launches selection_gather, selection_combine and
    # selection_gather_dq.
    "selection_attention": (
        *("selection_pieces", "selection_finite", "selection_lists", "selection_forward"),
        *("selection_delta", "selection_dq"),
        *("selection_dkv_count", "selection_dkv_prefix", "selection_dkv", "selection_dkv_fix"),
    ),
}
"""The kernels that each op launches on a GPU: those of its forward, then those that only its backward launches."""

REFERENCE = ("reference formula, fused by Inductor",)
_LOOP = ("loop over time; fused by Inductor without gradients",)


def kernels_of(op: str, device_type: str) -> tuple[str, ...]:
    """Returns what ``op`` runs on a type of device: kernel names on a GPU, elsewhere a description of the formula."""
    if device_type == "cuda" and op in KERNELS:
        return KERNELS[op]
    return _LOOP if op == "e79_scan" else REFERENCE
