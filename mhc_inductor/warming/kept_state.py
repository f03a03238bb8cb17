# SPDX-License-Identifier: Apache-2.0
"""A model's state, copied before a call that must leave no trace, and put back after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mhc_inductor import compat

_BASE = frozenset(vars(nn.Module()))
# Wrappers keep the state of their own machinery in attributes.
_WRAPPERS = ("torch.nn.parallel", "torch.distributed", "torch._dynamo")


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Reads and writes memory without autograd and inference mode, whose tensors refuse a write outside of it."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _plain(t: Tensor) -> Iterator[Tensor]:
    """Yields the tensors with memory that ``t`` is made of: itself, or those that its class wraps."""
    if compat.is_wrapper(t):
        for name in t.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from _plain(getattr(t, name))
    elif t.layout is torch.strided and t.device.type != "meta":
        yield t


class Memory:
    """A copy, in CPU memory, of all bytes that tensors lie in; tensors may overlap or share memory."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._kept: list[tuple[Tensor, Tensor]] = []
        seen = set()
        with _plainly():
            for t in (plain for outer in tensors for plain in _plain(outer)):
                storage = t.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    whole = torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage)
                    self._kept.append((whole, whole.to("cpu", copy=True)))

    def restore(self) -> None:
        """Writes the bytes back. Memory that was resized since is left alone: its owner manages it."""
        with _plainly():
            for whole, copy in self._kept:
                if whole.untyped_storage().nbytes() == copy.numel():
                    whole.copy_(copy)


class _Attributes:
    """What a module's attributes and buffers are, and what its lists and dicts hold."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers = dict(module._buffers)
        self._training = module.training
        self._own = None if type(module).__module__.startswith(_WRAPPERS) else self._read()
        self._holders = [(v, v.copy()) for v in (self._own or {}).values() if type(v) in (list, dict, set)]

    def _read(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self._module).items() if k not in _BASE}

    def tensors(self) -> Iterator[Tensor]:
        """Yields the buffers and the tensors in other attributes."""
        yield from (t for t in compat.tree_leaves([self._buffers, self._own]) if isinstance(t, Tensor))

    def restore(self) -> None:
        """Puts back what was replaced, deletes what was added."""
        module = self._module
        module.training = self._training
        if module._buffers != self._buffers or any(module._buffers[k] is not b for k, b in self._buffers.items()):
            module._buffers.clear()
            module._buffers.update(self._buffers)
        for holder, content in self._holders:
            holder.clear()
            holder.extend(content) if isinstance(holder, list) else holder.update(content)
        if self._own is not None:
            for key in self._read().keys() - self._own.keys():
                del vars(module)[key]
            vars(module).update(self._own)


class KeptState:
    """The state of a model and of example arguments: parameters, gradients, buffers, attributes, random numbers.

    Gradients are None until :meth:`finish`, as in the first step of a training.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [_Attributes(m) for m in model.modules()]
        self._parameters = list(model.parameters())
        self._weights = Memory(self._parameters)
        self._grads = [(p, p.grad) for p in self._parameters]
        self._grad_memory = Memory(g for _, g in self._grads if g is not None)
        self._others = Memory(t for m in self._modules for t in m.tensors())
        for p in self._parameters:
            p.grad = None

    @contextlib.contextmanager
    def one_call(self, arguments: Any) -> Iterator[None]:
        """Restores all but the parameters' values after the body, and the tensors among ``arguments``."""
        given = [t for t in compat.tree_leaves(arguments) if isinstance(t, Tensor)]
        leaves = [(t, t.grad) for t in given if t.is_leaf and t.requires_grad]
        memory = Memory([*given, *(g for _, g in leaves if g is not None)])
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
        try:
            with torch.random.fork_rng(devices=devices):
                for t, _ in leaves:
                    t.grad = None
                yield
        finally:
            for p in self._parameters:
                p.grad = None
            for t, grad in leaves:
                t.grad = grad
            for m in self._modules:
                m.restore()
            memory.restore()
            self._others.restore()

    def finish(self) -> None:
        """Puts the parameters and their gradients back."""
        self._weights.restore()
        self._grad_memory.restore()
        for p, grad in self._grads:
            p.grad = grad
