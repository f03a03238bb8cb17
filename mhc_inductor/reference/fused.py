# SPDX-License-Identifier: Apache-2.0
"""The fused mHC ops in plain PyTorch: ``post``, and ``pre`` or ``head`` of its result. The specification.

They are composed of the formulas of ``mhc.py``. The forwards give the same bits as the two separate ops. The backwards
differ from those in one respect: the gradient of x_out is not rounded between the two halves.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mhc_inductor.reference import mhc
from mhc_inductor.reference.mhc import Options, Saved, Site, collapse_dots, head_options
from mhc_inductor.reference.precision import as_given


@as_given
def mhc_post_pre(
    x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor | None, transpose_res: bool, *pre: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes :func:`mhc.mhc_post`, then :func:`mhc.mhc_pre` of its result, which is rounded to x's dtype first.

    The arguments up to transpose_res are those of :func:`mhc.mhc_post`, of the sublayer that computed f_out; ``pre`` are
    those of :func:`mhc.mhc_pre` after x, of the next sublayer.

    Returns:
        ``(x_out, h_in, next_post, next_res, h_pre, h_mix, inv_rms)``: the output of :func:`mhc.mhc_post`, then the
        outputs of :func:`mhc.mhc_pre`.

    Source: arXiv 2512.24880, equations 3 and 14 to 19.
    """
    x_out = mhc.mhc_post(x, f_out, h_post, h_res, transpose_res)
    return x_out, *mhc.mhc_pre(x_out, *pre)


@as_given
def mhc_post_pre_backward(
    dx_out: Tensor | None, dh_in: Tensor | None, dnext_post: Tensor | None, dnext_res: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    """Computes the gradients of :func:`mhc_post_pre`; a gradient of None counts as zero.

    ::

        g = dx_out + dx of mhc_pre_backward(x_out)         # [..., n, D], not rounded
        dx, df, dh_post, dh_res = mhc_post_backward(g)

    dx_out, dh_in, dnext_post and dnext_res are the gradients of the first four outputs. The other arguments: those of
    :func:`mhc.mhc_post`; x_out; phi, alpha, bias and gamma; h_pre, next_post, h_mix and inv_rms; the options. x_out,
    h_pre, next_post, h_mix and inv_rms are outputs of :func:`mhc_post_pre`.

    Returns:
        ``(dx, df, dh_post, dh_res, dphi, dalpha, dbias, dgamma)``, each in its input's shape and dtype. dh_res has
        shape [0] without h_res, dgamma without gamma.

    Source: derived from arXiv 2512.24880, equations 3 and 14 to 19.
    """
    *post, x_out = rest[:6]
    h_pre, _, *others = rest[10:14]
    dh = collapse_dots(dh_in, x_out), dnext_post, dnext_res
    g, *dparams = mhc.backward(dh, dh_in, x_out, Site(*rest[6:10]), Saved(h_pre, *others), dx_out, Options(*rest[14:]))
    return *mhc.mhc_post_backward(g, *post), *dparams


@as_given
def mhc_post_head(
    x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor | None, transpose_res: bool, *head: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes :func:`mhc.mhc_post`, then :func:`mhc.mhc_head` of its result, which is rounded to x's dtype first.

    The arguments up to transpose_res are those of :func:`mhc.mhc_post`, the others those of :func:`mhc.mhc_head`.

    Returns:
        ``(x_out, h_in, h_pre, h_mix, inv_rms)``: the output of :func:`mhc.mhc_post`, then those of
        :func:`mhc.mhc_head`.

    Source: arXiv 2512.24880, equation 3, and the head as in :func:`mhc.mhc_head`.
    """
    x_out = mhc.mhc_post(x, f_out, h_post, h_res, transpose_res)
    return x_out, *mhc.mhc_head(x_out, *head)


@as_given
def mhc_post_head_backward(dx_out: Tensor | None, dh_in: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """Computes the gradients of :func:`mhc_post_head`, by the formulas of :func:`mhc_post_pre_backward`.

    dx_out and dh_in, each of which may be None for zero, are the gradients of the first two outputs. The other arguments:
    those of :func:`mhc.mhc_post`; x_out; phi, alpha, bias and gamma; h_pre, h_mix and inv_rms; the options. x_out, h_pre,
    h_mix and inv_rms are outputs of :func:`mhc_post_head`.

    Returns:
        ``(dx, df, dh_post, dh_res, dphi, dalpha, dbias, dgamma)``, each in its input's shape and dtype. dh_res has
        shape [0] without h_res, dgamma without gamma.
    """
    *post, x_out = rest[:6]
    site, saved, o = Site(*rest[6:10]), Saved(*rest[10:13]), head_options(*rest[13:])
    g, *dparams = mhc.backward([collapse_dots(dh_in, x_out)], dh_in, x_out, site, saved, dx_out, o)
    return *mhc.mhc_post_backward(g, *post), *dparams
