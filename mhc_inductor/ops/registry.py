"""What every op is given: schema, reference, fake, gradient, vmap rule, validation, in one call of :func:`define`.

Opaque and functional: nothing decomposes an op before Inductor's lowering sees it. The reference formula is the
implementation of every device; kernels register over that, a device at a time, from ``mhc_inductor.kernels``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mhc_inductor import compat
from mhc_inductor.ops import checks

# An op's own vmap rule: (op, info, in_dims, *args) -> (outputs, out_dims).
VmapRule = Callable[..., tuple[Any, Any]]

REFERENCE: dict[str, Callable[..., Any]] = {}
"""The reference formula of each op defined so far."""

_CHECKS: dict[str, Callable[..., None]] = {}
# Of each op's arguments: name, kind, whether None is one.
_TYPES: dict[str, tuple[tuple[str, str, bool], ...]] = {}
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "Tensor": (Tensor,),
    "float": (int, float, torch.SymInt, torch.SymFloat),
    "int": (int, torch.SymInt),
    "bool": (bool,),
    "str": (str,),
}
_WORDS = {"Tensor": "a tensor", "float": "a number", "int": "an int", "bool": "a bool", "str": "a string"}
_RULES: dict[str, VmapRule] = {}

# Arguments that are parameters, shared by all tokens; every other tensor has the leading dimensions of x.
_PARAM_NAMES = frozenset({"phi", "alpha", "bias", "gamma"})

# A fragment: further operators define theirs in the same namespace.
LIBRARY = torch.library.Library("mhc_inductor", "FRAGMENT")

# An op's gradient: what autograd's setup_context and backward do.
Gradient = tuple[Callable[..., None], Callable[..., Any]]


# --- gradients ----------------------------------------------------------------------------------------------


def _op(name: str) -> Any:
    return getattr(torch.ops.mhc_inductor, name).default


def typed(name: str, *args: Any) -> None:
    """Raise TypeError unless the leading arguments of op ``name`` are of its schema's Python types.

    For what is compiled: shapes and dtypes are the fake's to check, which only tensors reach.
    """
    for (argument, kind, optional), value in zip(_TYPES[name], args, strict=False):
        if value is None and optional:
            continue
        # bool is an int, and no number here.
        if not isinstance(value, _PYTHON_TYPES[kind]) or (kind in ("float", "int") and isinstance(value, bool)):
            raise TypeError(f"{name}: {argument} must be {_WORDS[kind]}, got {type(value).__name__}")


def call(name: str, *args: Any) -> Any:
    """Call op ``name``; inside torch.func, which refuses its gradient, by an equal Function."""
    if torch.compiler.is_compiling():
        typed(name, *args)
    if torch.compiler.is_compiling() or not compat.functorch_active():
        return _op(name)(*args)
    return _FUNCTIONS[name].apply(*args)


def needed(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of the leading arguments, None where none is asked for, padded with None."""
    wanted = ctx.needs_input_grad
    kept = [g if need else None for g, need in zip(grads, wanted, strict=False)]
    return (*kept, *[None] * (len(wanted) - len(kept)))


def refuse(op: str, names: tuple[str, ...], grads: tuple[Tensor | None, ...]) -> None:
    for name, grad in zip(names, grads, strict=True):
        if grad is not None:
            raise RuntimeError(f"mhc_inductor: {op} has no gradient for its output {name}, but one arrived")


def _double_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)


def _double_grad(name: str, ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        f"mhc_inductor: double backward is not supported: {name} has no gradient of its own "
        "(create_graph=True, or torch.func.grad of a grad); "
        f"use the formulas of {REFERENCE[name].__module__} for second derivatives"
    )


def _refuse_tangents(name: str, *args: Any) -> None:
    """Raise NotImplementedError where forward-mode AD comes in: torch would drop the tangents without a word."""
    if compat.any_tangent(args):
        raise _no_tangents(name)


def _no_tangents(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"mhc_inductor: {name} has no forward-mode derivative (torch.autograd.forward_ad, torch.func.jvp, jacfwd, "
        f"hessian); use reverse mode, or the formulas of {REFERENCE[name].__module__}"
    )


def _no_jvp(name: str, ctx: Any, *tangents: Any) -> None:
    raise _no_tangents(name)


# --- vmap ---------------------------------------------------------------------------------------------------


def _vmap(name: str, op: Callable[..., Any], info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    """The op's own rule, or: a batch becomes a leading dimension, unless parameters or their gradients have it too."""
    if name in _RULES:
        return _RULES[name](op, info, in_dims, *args)
    names = [a.name for a in _op(name)._schema.arguments]
    batched = {k for k, dim in zip(names, in_dims, strict=True) if dim is not None}
    shared = _PARAM_NAMES.isdisjoint(names if name.endswith("_backward") else batched)
    if not shared:
        rows = [
            op(*[a if dim is None else a.select(dim, i) for a, dim in zip(args, in_dims, strict=True)])
            for i in range(info.batch_size)
        ]
        if isinstance(rows[0], Tensor):
            return torch.stack(rows), 0
        return tuple(torch.stack(column) for column in zip(*rows, strict=True)), (0,) * len(rows[0])

    def fold(key: str, a: Any, dim: int | None) -> Any:
        if not isinstance(a, Tensor) or key in _PARAM_NAMES:
            return a
        return a.expand(info.batch_size, *a.shape) if dim is None else a.movedim(dim, 0)

    out = op(*[fold(k, a, dim) for k, a, dim in zip(names, args, in_dims, strict=True)])
    if isinstance(out, Tensor):
        return out, 0
    # A placeholder of shape [0] (no h_res) has no batch.
    return out, tuple(None if t.dim() == 1 and t.shape[0] == 0 and info.batch_size else 0 for t in out)


# --- registration -------------------------------------------------------------------------------------------


def _checked(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` behind the validation of op ``name``."""
    check = _CHECKS[name]

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        check(*args)
        return fn(*args)

    return run


def _traced(fake: Callable[..., Any]) -> Callable[..., Any]:
    """``fake``, which also sees to the lowerings when a graph is being compiled, whatever the backend."""

    @functools.wraps(fake)
    def run(*args: Any) -> Any:
        if compat.tracing():
            from mhc_inductor import backend

            backend.prepare()
        return fake(*args)

    return run


def implement(name: str, fn: Callable[..., Any], dispatch_key: str) -> None:
    """Register ``fn``, behind the op's validation, as op ``name`` for a dispatch key such as "CUDA"."""
    LIBRARY.impl(name, _checked(name, fn), dispatch_key)


def _function(name: str, setup: Callable[..., None], grad: Callable[..., Any]) -> type[torch.autograd.Function]:
    """The op with the same gradient and vmap rule in the form that torch.func composes."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        setup(ctx, inputs, output)

    methods: dict[str, Callable[..., Any]] = {
        "forward": lambda *args: _op(name)(*args),
        "setup_context": setup_context,
        "backward": lambda ctx, *grads: grad(ctx, *grads),
        "jvp": functools.partial(_no_jvp, name),
        "vmap": lambda info, in_dims, *args: _vmap(name, functools.partial(call, name), info, in_dims, *args),
    }
    return type(f"{name}_function", (torch.autograd.Function,), {k: staticmethod(f) for k, f in methods.items()})


_FUNCTIONS: dict[str, type[torch.autograd.Function]] = {}


def define(
    name: str,
    schema: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    grad: Gradient | None,
    check: Callable[..., None] | None = None,
    vmap_rule: VmapRule | None = None,
    integers: bool = False,
) -> None:
    """Define op ``name``; without a gradient of its own (the backward ops) a second derivative raises RuntimeError.

    ``check`` validates the arguments (default: the function of that name in ``checks.py``); ``vmap_rule`` replaces the
    rule of ops on tokens with leading dimensions; outputs that are ``integers`` have no derivative to miss.
    """
    REFERENCE[name] = reference
    _CHECKS[name] = check or getattr(checks, name)
    if vmap_rule is not None:
        _RULES[name] = vmap_rule
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    qualname = f"mhc_inductor::{name}"
    _TYPES[name] = compat.schema_types(_op(name))
    implement(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(qualname, _checked(name, _traced(fake)), lib=LIBRARY)
    setup, backward = grad or (_double_setup, functools.partial(_double_grad, name))
    guard = (lambda *args: None) if integers else functools.partial(_refuse_tangents, name)
    compat.register_autograd(qualname, backward, setup, LIBRARY, guard)
    torch.library.register_vmap(qualname, functools.partial(_vmap, name, _op(name)), lib=LIBRARY)
    _FUNCTIONS[name] = _function(name, setup, backward)
