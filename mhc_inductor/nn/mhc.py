# SPDX-License-Identifier: Apache-2.0
"""Modules with mHC residuals (arXiv 2512.24880): :class:`HyperConnection` around a sublayer, and :class:`HyperHead`.

::

    x = expand(embedding(tokens), n)                     # [..., D] -> [..., n, D]
    for block in blocks:                                 # HyperConnection(dim, n, sublayer)
        x = block(x)
    logits = lm_head(HyperHead(dim, n)(x))               # [..., n, D] -> [..., D]

Single-pass mHC (DeepSeek-V4.1) hands the weights of the next collapse on with the streams::

    x, h_pre = expand(embedding(tokens), n), None        # None: the first site takes the first stream
    for block in blocks:                                 # HyperConnection(dim, n, sublayer, single_pass=True)
        x, h_pre = block((x, h_pre))
    logits = lm_head(mhc_collapse(x, h_pre))             # [..., n, D] -> [..., D]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mhc_inductor.api.mhc import mhc_head, mhc_post, mhc_pre
from mhc_inductor.api.single_pass import mhc_coefficients, mhc_collapse
from mhc_inductor.nn.arguments import flags, sizes
from mhc_inductor.ops.checks import strided

# The conventions of other projects, as arguments: HyperConnection(dim, n, sublayer, **CONVENTIONS["liger"]).
CONVENTIONS: dict[str, dict[str, Any]] = {
    "deepseek_v4": {
        "transpose_res": True,
        "sinkhorn_form": "softmax",
        "post_mult": 2.0,
        "post_eps": 0.0,
        "norm_form": "inside",
    },
    "liger": {"transpose_res": False, "sinkhorn_form": "softmax", "post_eps": 0.0, "norm_form": "inside"},
    "transformer_engine": {
        "transpose_res": True,
        "sinkhorn_form": "exp",
        "sinkhorn_iters": 20,
        "norm_eps": 2.0**-23,
        "hc_eps": 0.0,
        "post_mult": 2.0,
        "post_eps": 0.0,
        "norm_form": "inside",
    },
}

_ALPHA = 0.01  # initial alpha of the paper
_DIAGONAL = 8.0  # logit on R's diagonal: each stream starts with exp(-8) = 3e-4 of each other one


def expand(x: Tensor, n: int = 4) -> Tensor:
    """Starts the residual streams as n equal copies of x.

    Args:
        x: Hidden states ``[..., D]``.
        n: Number of streams.

    Returns:
        The streams ``[..., n, D]``, contiguous, in x's dtype.

    Raises:
        ValueError: x has no dimension, or n is below 1.
        TypeError: x is not a tensor, or n is not an int.
    """
    strided("expand", "x", x)
    if not x.dim():
        raise ValueError("expand: x must have shape [..., D], got []")
    sizes("expand", n=n)
    return x.unsqueeze(-2).expand(*x.shape[:-1], n, x.shape[-1]).contiguous()


def _logit(p: float) -> float:
    p = min(max(p, 0.01), 0.99)
    return math.log(p / (1 - p))


class _Coefficients(nn.Module):
    """Holds the fp32 parameters of the coefficients: phi, alpha and bias, and gamma only with ``gamma=True``."""

    phi: nn.Parameter
    alpha: nn.Parameter
    bias: nn.Parameter
    gamma: nn.Parameter | None
    norm_form: str = "inside"  # of modules that were pickled before this option existed

    def __init__(self, dim: int, n: int, rows: int, kinds: int, gamma: bool, device: Any) -> None:
        super().__init__()
        self.dim, self.n = dim, n

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device))

        self.phi, self.alpha, self.bias = empty(rows, n * dim), empty(kinds), empty(rows)
        self.gamma = empty(n, dim) if gamma else None

    def reset_parameters(self) -> None:
        """Initialises phi, alpha and gamma so that all logits start near their biases."""
        # z = normalised v @ phi.T has variance 1: with alpha = 0.01 logits start within a few hundredths of the bias.
        nn.init.normal_(self.phi, std=(self.n * self.dim) ** -0.5)
        nn.init.constant_(self.alpha, _ALPHA)
        if self.gamma is not None:
            nn.init.ones_(self.gamma)

    @torch.no_grad()
    def _load(self, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None) -> None:
        if gamma is not None and self.gamma is None:
            raise ValueError("the state has a norm weight, this module has none: construct it with gamma=True")
        new = {"phi": phi, "alpha": alpha, "bias": bias}
        if self.gamma is not None:
            new["gamma"] = torch.ones_like(self.gamma) if gamma is None else gamma
        for name, value in new.items():  # check all before writing any
            if value.shape != getattr(self, name).shape:
                raise ValueError(f"{name} must have shape {list(getattr(self, name).shape)}, got {list(value.shape)}")
        for name, value in new.items():
            getattr(self, name).copy_(value)


def _take(state: Mapping[str, Tensor], prefix: str, *names: str) -> list[Tensor]:
    missing = [prefix + name for name in names if prefix + name not in state]
    if missing:
        raise KeyError(f"the state has no {', '.join(missing)}; it has {', '.join(sorted(state)) or 'nothing'}")
    return [state[prefix + name] for name in names]


class HyperConnection(_Coefficients):
    """Wraps a sublayer ``f: [..., D] -> [..., D]`` in n residual streams: ``[..., n, D] -> [..., n, D]``.

    ::

        h_in, h_post, h_res = mhc_pre(x, phi, alpha, bias, gamma, ...)
        x_out = mhc_post(x, f(h_in), h_post, h_res, transpose_res=transpose_res)

    With ``single_pass=True`` (DeepSeek-V4.1), a site collapses its streams with the weights that the site before it
    predicted, and takes and returns them with the streams::

        h_in = mhc_collapse(x, h_pre)                      # x[..., 0, :] where h_pre is None, at the first site
        next_pre, h_post, h_res = mhc_coefficients(x, phi, alpha, bias, gamma, ...)
        x_out = mhc_post(x, f(h_in), h_post, h_res, transpose_res=transpose_res)

    It starts near an ordinary residual connection: h_in is close to the mean of the streams, h_post to 1 and the mixing
    matrix to the identity, and alpha is 0.01 as in the paper. The parameters are fp32: ``phi[n*n+2n, n*D]``,
    ``alpha[3]``, ``bias[n*n+2n]`` and, with ``gamma=True``, ``gamma[n, D]``. After ``.bfloat16()`` the ops compute with
    them in fp32.

    The numbers and forms ``norm_eps``, ``hc_eps``, ``post_mult``, ``post_eps``, ``sinkhorn_iters``, ``sinkhorn_eps``,
    ``sinkhorn_form`` and ``norm_form`` are those of :func:`mhc_inductor.mhc_pre`. Iterations are ignored without residual.

    Args:
        dim: Width D of a stream, at least 16.
        n: Number of streams, from 2 to 8.
        sublayer: Any module; further arguments of :meth:`forward` are passed to it.
        transpose_res: Orientation of the residual mixing ``R @ x``: False for R = h_res (the paper, Liger), True for
            R = h_res.T (DeepSeek-V4, TransformerEngine). A trained model needs the orientation it was trained with.
        residual: False for a layer without residual coefficients: phi has 2n rows and R is the identity.
        gamma: Whether the RMS norm has a weight.
        single_pass: Whether :meth:`forward` takes and returns the pair of streams and weights.
        device: Device of the parameters.

    Raises:
        TypeError: sublayer is not a module, dim or n is not an int, or residual, gamma or single_pass is not a bool.
        ValueError: n or dim is out of range.

    Source: arXiv 2512.24880.
    """

    def __init__(
        self,
        dim: int,
        n: int = 4,
        sublayer: nn.Module | None = None,
        *,
        transpose_res: bool = False,
        residual: bool = True,
        gamma: bool = False,
        sinkhorn_iters: int = 20,
        sinkhorn_eps: float = 1e-6,
        sinkhorn_form: str = "softmax",
        norm_eps: float = 1e-6,
        hc_eps: float = 1e-6,
        post_mult: float = 2.0,
        post_eps: float = 0.0,
        single_pass: bool = False,
        device: Any = None,
        norm_form: str = "inside",
    ) -> None:
        if not isinstance(sublayer, nn.Module):
            raise TypeError(f"HyperConnection: sublayer must be a torch.nn.Module, got {type(sublayer).__name__}")
        _check_sizes("HyperConnection", dim, n)
        flags("HyperConnection", residual=residual, gamma=gamma, single_pass=single_pass)
        rows = n * n + 2 * n if residual else 2 * n
        super().__init__(dim, n, rows, 3 if residual else 2, gamma, device)
        self.sublayer = sublayer
        self.transpose_res, self.residual = transpose_res, residual
        self.sinkhorn_iters = sinkhorn_iters if residual else 0
        self.sinkhorn_eps, self.sinkhorn_form = sinkhorn_eps, sinkhorn_form
        self.norm_eps, self.hc_eps, self.post_mult, self.post_eps = norm_eps, hc_eps, post_mult, post_eps
        self.norm_form, self.single_pass = norm_form, single_pass
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises near the identity: h_in the mean of the streams, h_post 1, the mixing matrix the identity."""
        super().reset_parameters()
        n = self.n
        self.bias.zero_()
        self.bias[:n] = _logit(1 / n)
        self.bias[n : 2 * n] = _logit((1 - self.post_eps) / self.post_mult)
        if self.residual:  # without Sinkhorn iterations h_res is the mixing matrix itself
            self.bias[2 * n :].view(n, n).fill_diagonal_(_DIAGONAL if self.sinkhorn_iters else 1.0)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies the sublayer between the streams.

        Args:
            x: Residual streams ``[..., n, D]``; bf16, fp16, fp32 or fp64. With ``single_pass=True`` a pair: the streams,
                and the weights ``[..., n]`` that the site before returned, or None at the first site.
            *args: Passed to the sublayer after h_in.
            **kwargs: Passed to the sublayer.

        Returns:
            The new streams, in x's shape and dtype. With ``single_pass=True`` a pair: the new streams, and the weights
            ``[..., n]`` of the next collapse in fp32 (fp64 if the streams are fp64).

        Raises:
            ValueError: A shape, device or number does not fit; see :func:`mhc_inductor.mhc_pre` and
                :func:`mhc_inductor.mhc_post`.
            TypeError: A dtype or type does not fit.
        """
        # It calls no method of the module: a kernel of the hub (integrations/hub/) has this forward and no other member.
        if self.single_pass:
            return _single_pass(self, x, *args, **kwargs)
        h_in, h_post, h_res = mhc_pre(x, self.phi, self.alpha, self.bias, self.gamma, **_options(self))
        return mhc_post(x, self.sublayer(h_in, *args, **kwargs), h_post, h_res, transpose_res=self.transpose_res)

    def load_deepseek_v4(self, state: Mapping[str, Tensor], prefix: str = "") -> None:
        """Loads the parameters of a hyper-connection of DeepSeek-V4 in transformers (``attn_hc`` or ``ffn_hc``).

        Args:
            state: State dict with ``fn[m, n*D]``, ``base[m]`` and ``scale[3]``, m = n*n + 2n.
            prefix: Prefix of these names in the state dict.

        Raises:
            KeyError: A name is missing.
            ValueError: A shape does not fit, or this module was constructed with another convention than
                ``CONVENTIONS["deepseek_v4"]``.
        """
        self._require("deepseek_v4")
        fn, base, scale = _take(state, prefix, "fn", "base", "scale")
        self._load(fn, scale, base, None)

    def load_liger(self, state: Mapping[str, Tensor], prefix: str = "") -> None:
        """Loads the parameters of Liger's ``LigerMHC``.

        Args:
            state: State dict with ``phi[n*D, m]``, ``b[m]`` and the scalars ``alpha_pre``, ``alpha_post`` and
                ``alpha_res``, m = n*n + 2n.
            prefix: Prefix of these names in the state dict.

        Raises:
            KeyError: A name is missing.
            ValueError: A shape does not fit, or this module was constructed with another convention than
                ``CONVENTIONS["liger"]``.
        """
        self._require("liger")
        phi, b, *alphas = _take(state, prefix, "phi", "b", "alpha_pre", "alpha_post", "alpha_res")
        self._load(phi.t(), torch.stack([a.reshape(()) for a in alphas]), b, None)

    def load_transformer_engine(self, state: Mapping[str, Tensor], prefix: str = "") -> None:
        """Loads the parameters of a hyper-connection of TransformerEngine.

        TransformerEngine's streams are the last dimension, ``x[..., D, n]``: pass ``x.transpose(-1, -2)`` to this
        module.

        Args:
            state: State dict with ``phi[m, D*n]`` (or padded to 32 rows), ``alpha[3]``, ``beta[1, m]`` and optionally
                ``norm_weight[D*n]``, m = n*n + 2n.
            prefix: Prefix of these names in the state dict.

        Raises:
            KeyError: A name is missing.
            ValueError: A shape does not fit, the state has a norm weight and this module no gamma, or this module was
                constructed with another convention than ``CONVENTIONS["transformer_engine"]``.
        """
        self._require("transformer_engine")
        phi, alpha, beta = _take(state, prefix, "phi", "alpha", "beta")
        weight = state.get(prefix + "norm_weight")
        m, n, d = self.phi.shape[0], self.n, self.dim
        if phi.dim() != 2 or phi.shape[1] != n * d or phi.shape[0] not in (m, 32):
            raise ValueError(f"phi must have shape [{m}, {n * d}] or [32, {n * d}], got {list(phi.shape)}")
        phi = phi[:m].unflatten(1, (d, n)).transpose(1, 2).flatten(1)
        gamma = None if weight is None else weight.reshape(d, n).t()
        self._load(phi, alpha, beta.reshape(-1), gamma)

    def _require(self, project: str) -> None:
        for name, value in CONVENTIONS[project].items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"{project} has {name}={value!r}, this module {getattr(self, name)!r}: construct it with "
                    f"HyperConnection(..., **CONVENTIONS[{project!r}])"
                )

    def extra_repr(self) -> str:
        """Returns the sizes and conventions, for ``repr``."""
        text = f"dim={self.dim}, n={self.n}, transpose_res={self.transpose_res}"
        if self.single_pass:
            text += ", single_pass=True"
        if self.norm_form != "inside":
            text += f", norm_form={self.norm_form!r}"
        if not self.residual:
            return text + ", residual=False"
        return text + f", sinkhorn_iters={self.sinkhorn_iters}, sinkhorn_form={self.sinkhorn_form!r}"


def _options(site: Any) -> dict[str, Any]:
    names = ("norm_eps", "hc_eps", "post_mult", "post_eps", "sinkhorn_iters", "sinkhorn_eps", "sinkhorn_form")
    return {name: getattr(site, name) for name in (*names, "norm_form")}


def _single_pass(site: Any, pair: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
        got = "a tensor" if isinstance(pair, Tensor) else f"{type(pair).__name__}"
        raise TypeError(f"HyperConnection: with single_pass=True x must be a pair (streams, weights), got {got}")
    x, h_pre = pair
    h_in = x[..., 0, :] if h_pre is None else mhc_collapse(x, h_pre)
    next_pre, h_post, h_res = mhc_coefficients(x, site.phi, site.alpha, site.bias, site.gamma, **_options(site))
    f_out = site.sublayer(h_in, *args, **kwargs)
    return mhc_post(x, f_out, h_post, h_res, transpose_res=site.transpose_res), next_pre


class HyperHead(_Coefficients):
    """Collapses the streams before the LM head by :func:`mhc_inductor.mhc_head`: ``[..., n, D] -> [..., D]``.

    It starts close to the mean of the streams. The parameters are fp32: ``phi[n, n*D]``, ``alpha[1]``, ``bias[n]`` and,
    with ``gamma=True``, ``gamma[n, D]``. ``norm_eps``, ``hc_eps`` and ``norm_form`` are those of the function.

    Args:
        dim: Width D of a stream, at least 16.
        n: Number of streams, from 2 to 8.
        gamma: Whether the RMS norm has a weight.
        device: Device of the parameters.

    Raises:
        ValueError: n or dim is out of range.

    Source: the pre mapping of arXiv 2512.24880, as DeepSeek-V4 uses it before its LM head.
    """

    def __init__(
        self,
        dim: int,
        n: int = 4,
        *,
        gamma: bool = False,
        norm_eps: float = 1e-6,
        hc_eps: float = 1e-6,
        device: Any = None,
        norm_form: str = "inside",
    ) -> None:
        _check_sizes("HyperHead", dim, n)
        flags("HyperHead", gamma=gamma)
        super().__init__(dim, n, n, 1, gamma, device)
        self.norm_eps, self.hc_eps, self.norm_form = norm_eps, hc_eps, norm_form
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises close to the mean of the streams."""
        super().reset_parameters()
        self.bias.fill_(_logit(1 / self.n))

    def forward(self, x: Tensor) -> Tensor:
        """Collapses the streams.

        Args:
            x: Residual streams ``[..., n, D]``; bf16, fp16, fp32 or fp64.

        Returns:
            The collapsed streams ``[..., D]`` in x's dtype.

        Raises:
            ValueError: A shape, device or number does not fit; see :func:`mhc_inductor.mhc_head`.
            TypeError: A dtype or type does not fit.
        """
        options: dict[str, Any] = {"norm_eps": self.norm_eps, "hc_eps": self.hc_eps, "norm_form": self.norm_form}
        return mhc_head(x, self.phi, self.alpha, self.bias, self.gamma, **options)

    def load_deepseek_v4(self, state: Mapping[str, Tensor], prefix: str = "") -> None:
        """Loads the parameters of the head of DeepSeek-V4 in transformers.

        Args:
            state: State dict with ``hc_fn[n, n*D]``, ``hc_base[n]`` and ``hc_scale[1]``.
            prefix: Prefix of these names in the state dict.

        Raises:
            KeyError: A name is missing.
            ValueError: A shape does not fit, or this module was constructed with another norm_form.
        """
        if self.norm_form != "inside":
            raise ValueError(
                f"deepseek_v4 has norm_form='inside', this module {self.norm_form!r}: construct it with that"
            )
        fn, base, scale = _take(state, prefix, "hc_fn", "hc_base", "hc_scale")
        self._load(fn, scale, base, None)

    def extra_repr(self) -> str:
        """Returns the sizes, for ``repr``."""
        return f"dim={self.dim}, n={self.n}"


def _check_sizes(name: str, dim: int, n: int) -> None:
    sizes(name, dim=dim, n=n)
    if not 2 <= n <= 8:
        raise ValueError(f"{name}: n must be from 2 to 8 streams, got {n}")
    if dim < 16:
        raise ValueError(f"{name}: dim must be at least 16, got {dim}")
