# SPDX-License-Identifier: Apache-2.0
"""The ops of selection attention over lists of keys with a bias per entry in ``torch.ops.mhc_inductor``.

``v`` of None means that the values are the first ``v_width`` columns of the keys, as in
:mod:`mhc_inductor.ops.selection_lists`. The biases have no gradient: one that requires a gradient raises RuntimeError, and
so does double backward.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from mhc_inductor.ops import selection_lists
from mhc_inductor.ops.batching import into_batch
from mhc_inductor.ops.registry import Gradient, call, define, needed
from mhc_inductor.reference import selection_entries as reference

_INPUTS = "Tensor q, Tensor k, Tensor? v, Tensor indices, Tensor bias, Tensor? sink"
_OPTIONS = "float scale, SymInt v_width, bool repeats"
SCHEMAS = {
    "selection_entry_attention": f"({_INPUTS}, {_OPTIONS}) -> (Tensor o, Tensor lse)",
    "selection_entry_attention_backward": (
        f"(Tensor? dout, Tensor? dlse, {_INPUTS}, Tensor o, Tensor lse, {_OPTIONS}) -> "
        "(Tensor dq, Tensor dk, Tensor dv, Tensor dsink)"
    ),
}


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    return selection_lists.fake(*args[:-1])


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    *given, _bias, sink = args[:8]
    return selection_lists.backward_fake(*given, sink)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, scale, v_width, repeats = inputs
    if ctx.needs_input_grad[4]:
        raise RuntimeError("mhc_inductor: selection_attention has no gradient for bias; pass bias.detach()")
    ctx.options = scale, v_width, repeats
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return needed(ctx)
    saved = ctx.saved_tensors
    dq, dk, dv, dsink = call("selection_entry_attention_backward", dout, dlse, *saved, *ctx.options)
    return needed(ctx, dq, dk, None if saved[2] is None else dv, None, None, dsink)


_GRADIENTS: dict[str, Gradient] = {"selection_entry_attention": (_setup, _grad)}

for _name, _its_fake in (("selection_entry_attention", _fake), ("selection_entry_attention_backward", _backward_fake)):
    define(
        _name,
        SCHEMAS[_name],
        getattr(reference, _name),
        _its_fake,
        _GRADIENTS.get(_name),
        functools.partial(into_batch, _name),
    )
