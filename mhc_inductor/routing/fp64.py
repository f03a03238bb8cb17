# SPDX-License-Identifier: Apache-2.0
"""Runs a formula in fp64, whatever dtypes its calls name."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from mhc_inductor import compat
from mhc_inductor.routing.graph.values import tensors_in

_CALL = 1 << 17
"""The elements that take about as long as a call without any."""
_done = threading.local()


def work() -> int:
    """Returns what this thread has computed in :class:`Exact`: elements of results, and some for each call.

    Unlike the time that it took, it is the same on every machine.
    """
    return getattr(_done, "work", 0)


PROMOTED = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that are replaced by fp64."""


class Exact(compat.routing.TorchDispatchMode):
    """Dispatch mode that computes in fp64, except that it keeps roundings of inputs that the model wrote.

    ``inputs`` maps the storage key of each input to the dtype that it has in the model.
    """

    def __init__(self, inputs: dict[int, torch.dtype]) -> None:
        super().__init__()
        self.inputs = inputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.view.dtype:
            raise NotImplementedError
        to = kwargs.get("dtype")
        if func is torch.ops.aten._to_copy.default and to in PROMOTED and self._rounds(args[0], to):
            return func(*args, **kwargs).double()
        kwargs = {name: _promoted(a) for name, a in kwargs.items()}
        out = func(*map(_promoted, args), **kwargs)
        _done.work = work() + _CALL + sum(t.numel() for t in tensors_in(out))
        if tensors_in([*args, *kwargs.values()]):
            return out
        return compat.tree_map_only(Tensor, lambda t: t.double() if t.dtype in PROMOTED else t, out)

    def _rounds(self, t: Tensor, to: torch.dtype) -> bool:
        """Returns whether casting ``t`` rounds an input of the formula."""
        was = self.inputs.get(compat.storage_key(t))
        return was is not None and was.is_floating_point and torch.finfo(to).eps > torch.finfo(was).eps


def _promoted(arg: Any) -> Any:
    return torch.float64 if isinstance(arg, torch.dtype) and arg in PROMOTED else arg
