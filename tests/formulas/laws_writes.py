# SPDX-License-Identifier: Apache-2.0
"""All kinds of in-place writes to a tensor, for the tests of the laws of routing and for random programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LIBRARY = torch.library.Library("mhc_laws", "DEF")
_LIBRARY.define("halve_(Tensor(a!) t) -> ()")
_LIBRARY.define("halve_and_return_(Tensor(a!) t) -> Tensor(a!)")
_LIBRARY.define("halve_list_(Tensor(a!)[] ts) -> ()")


def _quietly(write: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Wraps ``write`` to return None, so that the program continues with the argument."""

    def apply(t: Any) -> None:
        write(t)

    return apply


_HALVES: dict[str, Callable[[Any], Any]] = {
    "halve_": _quietly(lambda t: t.mul_(0.5)),
    "halve_and_return_": lambda t: t.mul_(0.5),
    "halve_list_": _quietly(lambda ts: [t.mul_(0.5) for t in ts]),
}
for _name, _fn in _HALVES.items():
    _LIBRARY.impl(_name, _fn, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, (lambda t: t) if _name == "halve_and_return_" else (lambda t: None), "Meta")


@torch.library.custom_op("mhc_laws::custom_halve", mutates_args={"t"})
def custom_halve(t: Tensor) -> None:
    """Halves ``t`` in place. The op's name has no trailing underscore."""
    t.mul_(0.5)


@torch.library.custom_op("mhc_laws::custom_halve_other", mutates_args={"other"})
def custom_halve_other(t: Tensor, other: Tensor) -> Tensor:
    """Returns ``2 * t`` and halves ``other`` in place."""
    other.mul_(0.5)
    return t * 2


custom_halve.register_fake(lambda t: None)
custom_halve_other.register_fake(lambda t, other: torch.empty_like(t))


def _opaque(t: Tensor) -> Tensor:
    return t.mul_(0.5)


opaque = torch.compiler.allow_in_graph(_opaque)
Write = Callable[[Tensor], Any]
"""A function that writes its argument in place.

It returns the tensor to continue with, or None to continue with the argument.
"""


def _imul(t: Tensor) -> Tensor:
    t *= 0.5
    return t


def _iadd(t: Tensor) -> Tensor:
    t += t.detach() * 0.5
    return t


PLAIN: dict[str, Write] = {
    "imul": _imul,
    "iadd": _iadd,
    "mul_": lambda t: t.mul_(0.5),
    "mul_quietly": _quietly(lambda t: t.mul_(0.5)),
    "copy_": lambda t: t.copy_(t.detach() * 0.5 + 1),
    "zero_": lambda t: t.zero_(),
    "clamp_": lambda t: t.clamp_(min=-0.2),
    "setitem": lambda t: t.__setitem__(slice(0, 2), 0.25),
    "setitem_whole": lambda t: t.__setitem__(Ellipsis, t * 0.5),
    "setitem_mask": lambda t: t.__setitem__(t.detach() > 0, 0.5),
    "masked_fill_": lambda t: t.masked_fill_(t.detach() > 0, 0.5),
    "view_written": _quietly(lambda t: t.flatten()[1::2].mul_(0.5)),
    "select_written": _quietly(lambda t: t.select(-1, 0).add_(1.0)),
    "view_of_view": _quietly(lambda t: t.transpose(0, -1)[1:].unsqueeze(0).neg_()),
    "detached": _quietly(lambda t: t.detach().mul_(0.5)),
    "relu_by_position": lambda t: F.relu(t, True),
    "leaky_relu_by_position": lambda t: F.leaky_relu(t, 0.1, True),
    "hardtanh_by_position": lambda t: F.hardtanh(t, -0.3, 0.3, True),
    "elu_by_position": lambda t: F.elu(t, 1.0, True),
    "dropout_by_position": lambda t: F.dropout(t, 0.0, True, True).mul_(0.5),
    "silu_inplace": lambda t: F.silu(t, inplace=True),
    "threshold_by_position": lambda t: F.threshold(t, 0.1, 0.0, True),
    "relu_": lambda t: torch.relu_(t),
}
"""Writes that autograd records, used with and without ``no_grad``. It does not see "detached"."""

UNRECORDED: dict[str, Write] = {
    "out": lambda t: torch.mul(t, 0.5, out=t),
    "out_of_view": _quietly(lambda t: torch.mul(t[0], 0.5, out=t[0])),
    "foreach": _quietly(lambda t: torch._foreach_mul_([t], 0.5)),
    "foreach_copy": _quietly(lambda t: torch._foreach_copy_([t], [t * 0.25])),
    "packet": _quietly(lambda t: torch.ops.mhc_laws.halve_(t)),
    "overload": _quietly(lambda t: torch.ops.mhc_laws.halve_.default(t)),
    "packet_returning": lambda t: torch.ops.mhc_laws.halve_and_return_(t),
    "packet_list": _quietly(lambda t: torch.ops.mhc_laws.halve_list_([t])),
    "custom_op": _quietly(lambda t: custom_halve(t)),
    "custom_op_packet": _quietly(lambda t: torch.ops.mhc_laws.custom_halve(t)),
    "custom_op_view": _quietly(lambda t: torch.ops.mhc_laws.custom_halve(t.flatten())),
    "custom_op_overload": _quietly(lambda t: torch.ops.mhc_laws.custom_halve.default(t=t)),
    "custom_op_other": _quietly(lambda t: torch.ops.mhc_laws.custom_halve_other(t.detach() + 1, t)),
    "allow_in_graph": lambda t: opaque(t),
    "set_data": _quietly(lambda t: t.data.mul_(0.5)),
}
"""Writes used under ``no_grad`` only, or that refuse a tensor that requires grad."""

WRITES = {**PLAIN, **UNRECORDED}


def written(write: Write, grad: bool = True) -> Callable[[Tensor], Tensor]:
    """Returns a function that writes a tensor in place and returns it; under ``no_grad`` unless ``grad`` is True."""

    def apply(t: Tensor) -> Tensor:
        if grad:
            result = write(t)
        else:
            with torch.no_grad():
                result = write(t)
        return t if result is None else result

    return apply
