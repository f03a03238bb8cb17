# SPDX-License-Identifier: Apache-2.0
"""What follows from an op's schemas and the table of dimensions: its fake function and its gradient.

The backward op of ``NAME`` is ``NAME_backward``. Its first arguments are gradients of the first outputs; the others are inputs
and outputs of the forward by their names, and ``dx_acc``, which is None here. It returns the gradients of inputs, each named
``d`` and the input's name. Outputs without a gradient exist for the backward op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhc_inductor.ops.batching import into_batch
from mhc_inductor.ops.dims import LEAD, TABLE, first_of, results, sizes_of, source_of
from mhc_inductor.ops.registry import Gradient, argument_names, call, define, needed, refuse
from mhc_inductor.reference.precision import acc_dtype

_ROUNDED = frozenset({"h_in", "x_out", "out", "o"})
_INT32 = frozenset({"indices", "blocks"})
"""Results in the dtype of the first tensor, and in int32; the others have the dtype of the arithmetic."""

_ACC_PLACEHOLDERS = frozenset({"b_s", "b_m", "S0", "M0", "sink"})
"""Arguments of which the absent gradient, of shape [0], has the dtype of the arithmetic; the others have the first tensor's."""

_SCALARS = {"topk": "n", "count": "n", "v_width": "V"}
"""The arguments that are sizes of results."""


def define_ops(
    schemas: Mapping[str, str],
    formulas: ModuleType,
    cpu: ModuleType | None = None,
    gradients: Mapping[str, Gradient] | None = None,
    vmap_rules: Mapping[str, Callable[..., Any]] | None = None,
    fused: Collection[str] = (),
) -> None:
    """Defines ops, with what follows from their schemas where nothing else is given.

    Args:
        schemas: The schema of each op, backward ops among them.
        formulas: The module with the implementation of each for every device.
        cpu: A module with implementations of some for a CPU.
        gradients: Gradients other than :func:`gradient`.
        vmap_rules: Rules other than the registry's for "...", and other than :func:`into_batch` for ops without.
        fused: The ops that stand for several others.
    """
    for name, schema in schemas.items():
        grad = (gradients or {}).get(name)
        if grad is None and f"{name}_backward" in schemas:
            grad = gradient(name)
        rule, on_cpu = (vmap_rules or {}).get(name), getattr(cpu, name, None)
        if rule is None and LEAD not in TABLE[name].dims[first_of(TABLE[name].dims)]:
            rule = functools.partial(into_batch, name)
        words = schema.rpartition("->")[2].strip(" ()").replace(",", " ").split()
        integers = bool(words[1:]) and _INT32.issuperset(w for w in words if w != "Tensor")
        formula = getattr(formulas, name)
        define(name, schema, formula, functools.partial(fake, name), grad, rule, integers, name in fused, on_cpu)


# --- fake functions -----------------------------------------------------------------------------------------


def fake(name: str, *args: Any) -> Any:
    """Returns empty results of op ``name``, with their shapes, dtypes and device."""
    names = argument_names(name)
    given = dict.fromkeys(names) | dict(zip(names, args, strict=False))
    like = given[first_of(names)]
    sizes = _sizes(name, given)
    made = tuple(_empty(name, result, given, like, sizes) for result in results(name))
    return made if len(made) > 1 else made[0]


def _sizes(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sizes of the dimensions that a call's arguments name; leading dimensions by their number."""
    family = TABLE[name]
    tensors = [(a, t) for a, t in given.items() if isinstance(t, Tensor) and a in family.dims and a != "mask"]
    sizes = sizes_of(family, tensors) | {size: given[a] for a, size in _SCALARS.items() if a in given}
    if "4n" in sizes:
        sizes["n"] = sizes["4n"] // 4
    if given.get("segment"):
        sizes["C"] = 2 * ((sizes["T"] + given["segment"] - 1) // given["segment"])
    return sizes


def _empty(name: str, result: str, given: Mapping[str, Any], like: Any, sizes: Mapping[str, Any]) -> Tensor:
    acc = acc_dtype(like.dtype)
    source = result if result in given else source_of(result)
    if source in given:
        t = given[source]
        if t is None:
            return like.new_empty((0,), dtype=acc if source in _ACC_PLACEHOLDERS else like.dtype)
        return t.new_empty(t.shape)
    if result in ("checkpoints", "gates") and given["segment"] == 0:
        return like.new_empty((0,), dtype=acc)
    dims = TABLE[name].dims
    words = (dims.get(result) or dims[source]).split()
    if result in ("h_res", "next_res"):  # empty without residual coefficients
        k = 0 if sizes["m"] == 2 * sizes["n"] else sizes["n"]
        sizes = {**sizes, "o": k, "n": k}
    if words[0] == LEAD:
        words = [*(w for w in sizes if w.isdigit()), *words[1:]]
    dtype = like.dtype if result in _ROUNDED else torch.int32 if result in _INT32 else acc
    return like.new_empty([sizes[w] if w in sizes else int(w) for w in words], dtype=dtype)


# --- gradients ----------------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """How the backward op of an op is called.

    Attributes:
        grads: Number of outputs with a gradient, the first ones.
        internal: Names of the other outputs.
        sources: For each further argument of the backward op, whether it is an output, and its position; None for dx_acc.
        required: Number of these arguments that have no default.
        gives: The position of the input of which each result is the gradient.
    """

    grads: int
    internal: tuple[str, ...]
    sources: tuple[tuple[bool, int] | None, ...]
    required: int
    gives: tuple[int, ...]


@functools.cache
def _plan(name: str) -> _Plan:
    inputs, outputs, backward = argument_names(name), results(name), f"{name}_backward"
    arguments = getattr(torch.ops.mhc_inductor, backward).default._schema.arguments
    names = tuple(a.name for a in arguments)
    grads = next(i for i, a in enumerate(names) if a in inputs)
    sources = tuple(
        (False, inputs.index(a)) if a in inputs else (True, outputs.index(a)) if a in outputs else None
        for a in names[grads:]
    )
    required = sum(not a.has_default_value() for a in arguments[grads:])
    gives = tuple(inputs.index(source_of(r)) for r in results(backward))
    return _Plan(grads, outputs[grads:], sources, required, gives)


def gradient(name: str) -> Gradient:
    """Returns setup_context and backward of autograd for op ``name``."""
    return functools.partial(_setup, name), functools.partial(_backward, name)


def _setup(name: str, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    plan, outputs = _plan(name), output if isinstance(output, tuple) else (output,)
    values = []
    for source in plan.sources:
        of, at = (outputs, source[1]) if source and source[0] else (inputs, source[1] if source else len(inputs))
        values.append(of[at] if at < len(of) else None)
    while len(values) > plan.required and values[-1] is None:  # what was left out, or is absent anyway
        values.pop()
    ctx.others = [None if isinstance(v, Tensor) else v for v in values]
    ctx.save_for_backward(*[v if isinstance(v, Tensor) else None for v in values])
    if plan.internal:
        ctx.mark_non_differentiable(*outputs[plan.grads :])
    ctx.set_materialize_grads(False)


def saved(ctx: Any) -> list[Any]:
    """Returns the backward op's arguments after the gradients. Once in a backward: checkpointed tensors are read once."""
    return [other if t is None else t for t, other in zip(ctx.saved_tensors, ctx.others, strict=True)]


def _backward(name: str, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    plan = _plan(name)
    refuse(name, plan.internal, grads[plan.grads :])
    given = grads[: plan.grads]
    if all(g is None for g in given) or not any(ctx.needs_input_grad[i] for i in plan.gives):
        return needed(ctx)
    found = call(f"{name}_backward", *given, *saved(ctx))
    by_input = dict(zip(plan.gives, found if isinstance(found, tuple) else (found,), strict=True))
    return needed(ctx, *(by_input.get(i) for i in range(len(ctx.needs_input_grad))))
