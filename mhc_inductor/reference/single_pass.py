# SPDX-License-Identifier: Apache-2.0
"""Single-pass mHC (DeepSeek-V4.1) in plain PyTorch: the specification.

A site collapses its streams with the weights that the site before it predicted, so that everything between two
sublayers needs one pass over the streams. The functions are composed of the formulas of ``mhc.py``, whose conventions
hold here too; n streams of width D, m rows of phi.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mhc_inductor.reference import mhc
from mhc_inductor.reference.mhc import Gradients, Options, Saved, Site, collapse_dots, output
from mhc_inductor.reference.precision import acc_dtype, as_given


@as_given
def mhc_coefficients(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes the coefficients of :func:`mhc.mhc_pre`, which has the formulas and the arguments, without h_in.

    Returns:
        ``(h_pre, h_post, h_res, h_mix, inv_rms)``: h_pre and h_post ``[..., n]``, h_res ``[..., n, n]``
        (``[..., 0, 0]`` if phi has 2n rows), h_mix ``[..., m]`` and inv_rms ``[...]``, all in the arithmetic's dtype.
        The backward needs the last two.

    Source: arXiv 2512.24880, equations 14 to 19.
    """
    return mhc.coefficients(x, Site(phi, alpha, bias, gamma), Options(*options))


@as_given
def mhc_coefficients_backward(
    dh_pre: Tensor | None, dh_post: Tensor | None, dh_res: Tensor | None, x: Tensor, *rest: Any
) -> Gradients:
    """Computes the gradients of :func:`mhc_coefficients`; a gradient of None counts as zero.

    The formulas are those of :func:`mhc.mhc_pre_backward`, with dh_pre given and without dh_in; so are the arguments
    after x. h_pre, h_post, h_mix and inv_rms are outputs of :func:`mhc_coefficients`.

    Returns:
        ``(dx, dphi, dalpha, dbias, dgamma)``, each in its input's shape and dtype; dgamma has shape [0] without gamma.

    Source: derived from arXiv 2512.24880, equations 14 to 19.
    """
    h_pre, _, *others, dx_acc = rest[4:9]
    dh, saved = (dh_pre, dh_post, dh_res), Saved(h_pre, *others)
    return mhc.rounded(x, mhc.backward(dh, None, x, Site(*rest[:4]), saved, dx_acc, Options(*rest[9:])))


@as_given
def mhc_collapse(x: Tensor, h_pre: Tensor) -> Tensor:
    """Collapses the streams with given weights: ``h_in = sum_i h_pre[i] * x[i]``.

    Args:
        x: Residual streams ``[..., n, D]``.
        h_pre: Weights ``[..., n]``.

    Returns:
        h_in ``[..., D]`` in x's dtype.

    Source: the pre mapping of arXiv 2512.24880, equation 3.
    """
    return mhc.collapse(x, h_pre)


@as_given
def mhc_collapse_backward(dh_in: Tensor, x: Tensor, h_pre: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the gradients of :func:`mhc_collapse`: ``dx[i] = h_pre[i] * dh_in``, ``dh_pre[i] = <dh_in, x[i]>``.

    dh_in ``[..., D]`` is the gradient of h_in; x and h_pre are the arguments of :func:`mhc_collapse`.

    Returns:
        ``(dx, dh_pre)``, each in its input's shape and dtype.
    """
    acc = acc_dtype(x.dtype)
    dh_pre = collapse_dots(dh_in, x)
    assert dh_pre is not None
    dx = h_pre.to(acc).unsqueeze(-1) * dh_in.to(acc).unsqueeze(-2)
    return output(dx, x.dtype), output(dh_pre, h_pre.dtype)


@as_given
def mhc_single_pass(
    x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor | None, h_pre: Tensor, transpose_res: bool, *rest: Any
) -> tuple[Tensor, ...]:
    """Computes everything between two sublayers: post, collapse with known weights, and the next coefficients.

    ::

        x_out = mhc_post(x, f_out, h_post, h_res)          # rounded to x's dtype
        h_in  = mhc_collapse(x_out, h_pre)
        next_pre, next_post, next_res = mhc_coefficients(x_out, phi, alpha, bias, gamma)

    x, f_out, h_post, h_res and transpose_res are the arguments of :func:`mhc.mhc_post`, of the sublayer that computed f_out;
    h_pre ``[..., n]`` are the weights of the collapse, of that sublayer too; ``rest`` are the arguments of
    :func:`mhc_coefficients` after x, of the next sublayer.

    Returns:
        ``(x_out, h_in, next_pre, next_post, next_res, h_mix, inv_rms)``: x_out ``[..., n, D]`` and h_in ``[..., D]`` in
        x's dtype, then the outputs of :func:`mhc_coefficients`.

    Source: arXiv 2512.24880, equations 3 and 14 to 19, in the order of DeepSeek-V4.1.
    """
    x_out = mhc.mhc_post(x, f_out, h_post, h_res, transpose_res)
    return x_out, mhc.collapse(x_out, h_pre), *mhc_coefficients(x_out, *rest)


@as_given
def mhc_single_pass_backward(
    dx_out: Tensor | None,
    dh_in: Tensor | None,
    dnext_pre: Tensor | None,
    dnext_post: Tensor | None,
    dnext_res: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """Computes the gradients of :func:`mhc_single_pass`; a gradient of None counts as zero.

    ::

        g = dx_out + h_pre (x) dh_in + dx of mhc_coefficients_backward(x_out)      # [..., n, D], not rounded
        dh_pre[i] = <dh_in, x_out[i]>
        dx, df, dh_post, dh_res = mhc_post_backward(g)

    dx_out, dh_in, dnext_pre, dnext_post and dnext_res are the gradients of the first five outputs. The other arguments:
    those of :func:`mhc_single_pass` up to transpose_res; x_out; phi, alpha, bias and gamma; next_pre, next_post, h_mix and
    inv_rms; the options. x_out, next_pre, next_post, h_mix and inv_rms are outputs of :func:`mhc_single_pass`.

    Returns:
        ``(dx, df, dh_post, dh_res, dh_pre, dphi, dalpha, dbias, dgamma)``, each in its input's shape and dtype. dh_res
        has shape [0] without h_res, dgamma without gamma; dh_pre is zero without dh_in.

    Source: derived from arXiv 2512.24880, equations 3 and 14 to 19.
    """
    x, f_out, h_post, h_res, h_pre, transpose_res, x_out = rest[:7]
    weights = h_pre.to(acc_dtype(x.dtype))
    dh, saved = (dnext_pre, dnext_post, dnext_res), Saved(weights, *rest[13:15])
    g, *dparams = mhc.backward(dh, dh_in, x_out, Site(*rest[7:11]), saved, dx_out, Options(*rest[15:]))
    dots = collapse_dots(dh_in, x_out)
    dh_pre = weights.new_zeros(h_pre.shape) if dots is None else dots
    grads = mhc.mhc_post_backward(g, x, f_out, h_post, h_res, transpose_res)
    return *grads, output(dh_pre, h_pre.dtype), *dparams
