# SPDX-License-Identifier: Apache-2.0
"""The ops of selection attention over lists of keys with a bias per entry in ``torch.ops.mhc_inductor``.

``v`` of None means that the values are the first ``v_width`` columns of the keys, as in
:mod:`mhc_inductor.ops.selection_lists`. The biases have no gradient: one that requires a gradient raises RuntimeError, and
so does double backward.
"""

from __future__ import annotations

from typing import Any

from mhc_inductor.ops.derived import define_ops, gradient
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

_SETUP, _BACKWARD = gradient("selection_entry_attention")


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    if ctx.needs_input_grad[4]:
        raise RuntimeError("mhc_inductor: selection_attention has no gradient for bias; pass bias.detach()")
    _SETUP(ctx, inputs, output)


define_ops(SCHEMAS, reference, gradients={"selection_entry_attention": (_setup, _BACKWARD)})
