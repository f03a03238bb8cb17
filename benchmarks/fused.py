# SPDX-License-Identifier: Apache-2.0
"""Inputs and fp64 values of the fused ops: post of one sublayer with pre of the next, and single-pass mHC."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from . import accuracy
from .peers import Inputs, plain_coefficients, plain_post

CHUNK = 1024
Named = dict[str, torch.Tensor]
_SUMMED = ("dphi", "dalpha", "dbias")


@dataclasses.dataclass
class PostPre:
    """One case of a fused op.

    ``inputs`` are those of the separate ops; ``h_post`` and ``h_res`` belong to the sublayer that made f_out;
    ``dnext_post`` and ``dnext_res`` are the gradients of the next sublayer's coefficients. In single-pass mHC,
    ``h_pre`` are the weights of the collapse and ``dnext_pre`` is the gradient of the next ones.
    """

    inputs: Inputs
    h_post: torch.Tensor
    h_res: torch.Tensor
    dnext_post: torch.Tensor
    dnext_res: torch.Tensor
    h_pre: torch.Tensor | None = None
    dnext_pre: torch.Tensor | None = None

    @classmethod
    def make(cls, i: Inputs, h_post: torch.Tensor, h_res: torch.Tensor) -> PostPre:
        return cls(i, h_post, h_res, torch.randn_like(h_post), torch.randn_like(h_res))

    def single_pass(self) -> PostPre:
        """Returns the same case with weights of the collapse."""
        return dataclasses.replace(self, h_pre=torch.rand_like(self.h_post), dnext_pre=torch.randn_like(self.h_post))


def _formula(p: PostPre, start: int, x_out: torch.Tensor, with_grads: bool) -> Named:
    """Returns a chunk of tokens in fp64. The next pre reads x_out as the op rounded it; gradients flow through."""
    here = slice(start, start + CHUNK)
    i = p.inputs.tokens(start, start + CHUNK).detached(torch.float64)
    h_post, h_res = (t[here].detach().double() for t in (p.h_post, p.h_res))
    given = () if p.h_pre is None else (p.h_pre[here].detach().double(),)
    leaves = [t.requires_grad_(with_grads) for t in (i.x, i.f_out, h_post, h_res, *given, i.phi, i.alpha, i.bias)]
    exact = plain_post(i.x, i.f_out, h_post, h_res, i.transpose_res)
    rounded = exact + (x_out[here].double() - exact).detach()
    after = plain_coefficients(rounded, i.phi, i.alpha, i.bias, None, i.iters)
    after["next_post"], after["next_res"] = after.pop("h_post"), after.pop("h_res")
    if p.h_pre is not None:
        after["next_pre"], after["h_in"] = after.pop("h_pre"), (given[0][..., None] * rounded).sum(-2)
    out = {"x_out": exact, **after}
    if with_grads:
        ups = {"h_in": i.dh_in, "next_post": p.dnext_post[here].double(), "next_res": p.dnext_res[here].double()}
        if p.dnext_pre is not None:
            ups["next_pre"] = p.dnext_pre[here].double()
        assert i.dx_out is not None
        grads = torch.autograd.grad([rounded, *(out[k] for k in ups)], leaves, [i.dx_out, *ups.values()])
        out.update(zip((*grads_of(p), *_SUMMED), grads, strict=True))
    return {k: v.detach() for k, v in out.items()}


THROUGH = ("dx", "df", "dh_post", "dh_res")
"""Gradients computed from that of x_out, which is rounded once to x's dtype, as it is between two ops."""


def grads_of(p: PostPre) -> tuple[str, ...]:
    """Returns the names of the gradients that are not summed over tokens, in the op's order."""
    return THROUGH if p.h_pre is None else (*THROUGH, "dh_pre")


def widen_bars(errors: dict[str, Any]) -> dict[str, Any]:
    """Returns ``errors`` with the bars of :data:`THROUGH` widened by one rounding, taken to be x_out's bar."""
    once = errors["x_out"]["bar"]
    for name in errors.keys() & set(THROUGH):
        e = errors[name]
        e["bar"] += once
        e["met"] = e["relative"] <= e["bar"]
    return errors


def check(p: PostPre, got: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Returns the errors of the outputs, and of gradients if ``got`` has them, and whether each meets its bar."""
    parts = [_formula(p, t, got["x_out"], "dx" in got) for t in range(0, p.h_post.shape[0], CHUNK)]
    exact = {k: sum(q[k] for q in parts) if k in _SUMMED else torch.cat([q[k] for q in parts]) for k in parts[0]}
    return widen_bars(accuracy.compare(got, exact, with_post=False))
