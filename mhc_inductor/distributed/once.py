# SPDX-License-Identifier: Apache-2.0
"""Backward functions without a second derivative, which raise where one is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Grads = tuple[Tensor | None, ...]


def once(backward: Callable[..., Grads]) -> Callable[..., Grads]:
    """Makes the gradients of a Function's backward raise RuntimeError when they are differentiated.

    ``torch.autograd.function.once_differentiable`` does so only where the incoming gradient requires a gradient; else
    the second derivative would be silently zero.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, *grads: Tensor | None) -> Grads:
        create_graph = torch.is_grad_enabled()
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not create_graph:
            return results
        anchor = torch.empty((), requires_grad=True)
        given = iter(_Refused.apply(anchor, *(t for t in results if t is not None)))
        return tuple(None if t is None else next(given) for t in results)

    return wrapped


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(
            "mhc_inductor: double backward is not supported: mhc_inductor.distributed has no gradient of its own"
        )
