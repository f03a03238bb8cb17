# SPDX-License-Identifier: Apache-2.0
"""What calls of PyTorch's own functions do: found by running each once, and kept for later compiles of the process."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.graph.values import example

MOST = 1 << 14
"""How many calls are kept for the process. Beyond, all are forgotten."""
_MODULES = (
    "torch",
    "torch.functional",
    "torch.nn.functional",
    "torch._C._linalg",
    "torch._C._nn",
    "torch._C._special",
    "_operator",
)
_NUMBERS = (int, float, bool, complex, str, type(None))


class KnownCalls:
    """Answers about calls for one compile, by a key of target, arguments and modes.

    An answer is kept for the process where nothing but the key and :func:`_state` decides it: the call is of PyTorch's own
    function, on plain fake tensors of fixed sizes. It must not hold tensors of a compile.
    """

    def __init__(self, question: str) -> None:
        self._question = question
        self._own: dict[Hashable, Any] = {}

    @functools.cached_property
    def _state(self) -> Hashable:
        return _state()

    def find(self, node: fx.Node, key: Hashable, ask: Callable[[], Any]) -> Any:
        """Returns the answer for ``node``, whose key is ``key``, if it is known; else what ``ask`` returns or raises."""
        if key in self._own:
            return self._own[key]
        lasting = (self._question, key, self._state)
        found = _LASTING.get(lasting)
        if found is None:
            found = ask()
            if self._state is not None and _lasts(node):
                if len(_LASTING) >= MOST:
                    _LASTING.clear()
                _LASTING[lasting] = found
        self._own[key] = found
        return found


_LASTING: dict[Hashable, Any] = {}


def _lasts(node: fx.Node) -> bool:
    """Returns whether a node calls PyTorch's own function on plain fake tensors of fixed sizes and on numbers."""
    return (node.op == "call_method" or _of_torch(node.target)) and all(
        _plain(leaf) for n in node.all_input_nodes for leaf in compat.tree_leaves(example(n))
    )


def _of_torch(target: Any) -> bool:
    """Returns whether a function is one of PyTorch's own, or of the module operator."""
    return isinstance(target, (types.BuiltinFunctionType, types.FunctionType)) and target.__module__ in _MODULES


def _plain(leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf) in _NUMBERS
    if not compat.routing.is_fake(leaf) or leaf.layout is not torch.strided:
        return False
    return all(type(size) is int for size in (*leaf.shape, *leaf.stride()))


def _state() -> Hashable:
    """Returns what of PyTorch's settings may change what a call does, or None where modes of the user are active."""
    if compat.routing.modes_active():
        return None
    cuda = torch.backends.cuda
    kernels = (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )
    numbers = torch.get_default_dtype(), compat.matmul_precision()
    strict = torch.are_deterministic_algorithms_enabled(), torch.is_inference_mode_enabled()
    return *kernels, *numbers, *strict, torch.get_default_device()
