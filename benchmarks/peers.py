# SPDX-License-Identifier: Apache-2.0
"""The peers of the ops: the plain PyTorch formula, eager and compiled, and Liger's kernels.

The plain formula is written independently of the package's reference. It also computes the fp64 values that outputs are
checked against.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import torch

NORM_EPS = HC_EPS = SINKHORN_EPS = 1e-6
POST_MULT, POST_EPS = 2.0, 0.0
ITERS = 20


@dataclasses.dataclass
class Inputs:
    """The tensors of one case: the inputs of the two ops, and the loss gradients of their outputs."""

    x: torch.Tensor
    phi: torch.Tensor
    alpha: torch.Tensor
    bias: torch.Tensor
    gamma: torch.Tensor | None
    f_out: torch.Tensor
    dh_in: torch.Tensor
    dx_out: torch.Tensor | None
    dh_post: torch.Tensor | None
    dh_res: torch.Tensor | None
    iters: int
    transpose_res: bool = False

    @property
    def n(self) -> int:
        return self.x.shape[-2]

    @property
    def with_post(self) -> bool:
        return self.dx_out is not None

    def leaves(self) -> list[torch.Tensor]:
        """Returns the tensors that receive gradients: x, phi, alpha, bias, then gamma or f_out."""
        last = self.f_out if self.with_post else self.gamma
        return [t for t in (self.x, self.phi, self.alpha, self.bias, last) if t is not None]

    def map(self, fn: Any) -> Inputs:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Inputs(**{k: fn(k, v) if isinstance(v, torch.Tensor) else v for k, v in fields.items()})

    def tokens(self, start: int, stop: int) -> Inputs:
        """Returns the case reduced to a range of tokens (leading dimension of x)."""
        per_token = {"x", "f_out", "dh_in", "dx_out", "dh_post", "dh_res"}
        return self.map(lambda k, v: v[start:stop].contiguous() if k in per_token else v)

    def detached(self, dtype: torch.dtype | None = None) -> Inputs:
        """Returns a copy of the case in fresh leaves, in ``dtype`` if given."""
        return self.map(lambda _, v: v.detach().to(dtype or v.dtype).clone())


def make_inputs(
    lead: tuple[int, ...],
    n: int,
    dim: int,
    device: torch.device,
    *,
    npu: bool = False,
    record: bool = False,
    transpose_res: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Inputs:
    """Returns random inputs. ``npu``: with gamma and raw h_res; ``record``: phi and gamma standard normal."""
    m = n * n + 2 * n

    def normal(*shape: int, out: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(out)

    # Logits of unit size, as in a trained model; with ``record`` the sigmoids saturate.
    scale = 1.0 if record else (n * dim) ** -0.5
    gamma = normal(n, dim) if record else 1.0 + 0.1 * normal(n, dim)
    return Inputs(
        x=normal(*lead, n, dim, out=dtype),
        phi=normal(m, n * dim) * scale,
        alpha=torch.tensor([1.1, 0.9, 1.05], device=device),
        bias=0.1 * normal(m),
        gamma=gamma if npu else None,
        f_out=normal(*lead, dim, out=dtype),
        dh_in=normal(*lead, dim, out=dtype),
        dx_out=None if npu else normal(*lead, n, dim, out=dtype),
        dh_post=normal(*lead, n) if npu else None,
        dh_res=normal(*lead, n, n) if npu else None,
        iters=0 if npu else ITERS,
        transpose_res=transpose_res,
    )


def plain_sinkhorn(h_res: torch.Tensor, iters: int) -> torch.Tensor:
    if iters == 0:
        return h_res
    c = torch.softmax(h_res, -1) + SINKHORN_EPS
    c = c / (c.sum(-2, keepdim=True) + SINKHORN_EPS)
    for _ in range(iters - 1):
        c = c / (c.sum(-1, keepdim=True) + SINKHORN_EPS)
        c = c / (c.sum(-2, keepdim=True) + SINKHORN_EPS)
    return c


def plain_coefficients(
    x: torch.Tensor,
    phi: torch.Tensor,
    alpha: torch.Tensor,
    bias: torch.Tensor,
    gamma: torch.Tensor | None,
    iters: int,
) -> dict[str, torch.Tensor]:
    n = x.shape[-2]
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    v = x.to(work).flatten(-2)
    h_mix = (v if gamma is None else v * gamma.flatten()) @ phi.t()
    inv_rms = torch.rsqrt(v.square().mean(-1) + NORM_EPS)
    z = h_mix * inv_rms[..., None]
    h_pre = torch.sigmoid(alpha[0] * z[..., :n] + bias[:n]) + HC_EPS
    h_post = POST_MULT * torch.sigmoid(alpha[1] * z[..., n : 2 * n] + bias[n : 2 * n]) + POST_EPS
    h_res = (alpha[2] * z[..., 2 * n :] + bias[2 * n :]).unflatten(-1, (n, n))
    h_in = (h_pre[..., None] * x.to(work)).sum(-2).to(x.dtype)
    return {
        "h_in": h_in,
        "h_post": h_post,
        "h_res": plain_sinkhorn(h_res, iters),
        "h_pre": h_pre,
        "h_mix": h_mix,
        "inv_rms": inv_rms,
    }


def plain_pre(x, phi, alpha, bias, gamma, iters):  # type: ignore[no-untyped-def]
    c = plain_coefficients(x, phi, alpha, bias, gamma, iters)
    return c["h_in"], c["h_post"], c["h_res"]


def plain_post(
    x: torch.Tensor, f_out: torch.Tensor, h_post: torch.Tensor, h_res: torch.Tensor, transpose_res: bool
) -> torch.Tensor:
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    r = h_res.transpose(-1, -2) if transpose_res else h_res
    out = h_post[..., None] * f_out.to(work)[..., None, :] + torch.matmul(r, x.to(work))
    return out.to(x.dtype)


class Plain:
    """The three calls that rows measure, made with the plain formula, eager or compiled."""

    def __init__(self, compiled: bool) -> None:
        wrap = (lambda f: torch.compile(f, dynamic=False, fullgraph=True)) if compiled else (lambda f: f)
        self._pre, self._post, self._both = wrap(plain_pre), wrap(plain_post), wrap(self._forward)

    @staticmethod
    def _forward(x, phi, alpha, bias, gamma, f_out, iters, transpose_res):  # type: ignore[no-untyped-def]
        h_in, h_post, h_res = plain_pre(x, phi, alpha, bias, gamma, iters)
        return h_in, plain_post(x, f_out, h_post, h_res, transpose_res)

    def pre(self, i: Inputs) -> Any:
        return self._pre(i.x, i.phi, i.alpha, i.bias, i.gamma, i.iters)

    def post(self, i: Inputs, h_post: torch.Tensor, h_res: torch.Tensor) -> Any:
        return self._post(i.x, i.f_out, h_post, h_res, i.transpose_res)

    def fb(self, i: Inputs) -> Any:
        if not i.with_post:
            outs = self.pre(i)
            return outs, torch.autograd.grad(outs, i.leaves(), (i.dh_in, i.dh_post, i.dh_res))
        outs = self._both(i.x, i.phi, i.alpha, i.bias, i.gamma, i.f_out, i.iters, i.transpose_res)
        return outs, torch.autograd.grad(outs, i.leaves(), (i.dh_in, i.dx_out))


class Liger:
    """The three calls by liger-kernel's mHC functions: phi in bf16 and transposed, three scalar alphas, no gamma."""

    def __init__(self) -> None:
        from liger_kernel.transformers import functional

        self._f = functional
        self._params: dict[int, list[torch.Tensor]] = {}

    def _prepared(self, i: Inputs) -> list[torch.Tensor]:
        key = i.phi.data_ptr()
        if key not in self._params:
            phi = i.phi.detach().t().contiguous().to(torch.bfloat16)
            params = [phi, i.bias.detach().clone(), *(a.clone() for a in i.alpha.detach().unbind())]
            self._params[key] = [p.requires_grad_(i.phi.requires_grad) for p in params]
        return self._params[key]

    def pre(self, i: Inputs) -> Any:
        phi, bias, *alphas = self._prepared(i)
        h_pre, h_post, h_res = self._f.liger_mhc_coeffs(
            i.x, phi, bias, *alphas, tmax=i.iters, rms_eps=NORM_EPS, pre_eps=HC_EPS, sinkhorn_eps=SINKHORN_EPS
        )
        return self._f.liger_mhc_pre(i.x, h_pre), h_post, h_res

    def post(self, i: Inputs, h_post: torch.Tensor, h_res: torch.Tensor) -> Any:
        return self._f.liger_mhc_post_res(i.x, i.f_out, h_post, h_res)

    def fb(self, i: Inputs) -> Any:
        h_in, h_post, h_res = self.pre(i)
        x_out = self.post(i, h_post, h_res)
        leaves = [i.x, *self._prepared(i), i.f_out]
        return (h_in, x_out), torch.autograd.grad((h_in, x_out), leaves, (i.dh_in, i.dx_out))


def liger_missing() -> str | None:
    """Returns why Liger cannot be measured on this machine, or None."""
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed"
    try:
        from liger_kernel.transformers import functional
    except Exception as e:  # its import may raise anything
        return f"liger-kernel cannot be imported: {e}"
    return None if hasattr(functional, "liger_mhc_coeffs") else "this liger-kernel has no mHC functions"
