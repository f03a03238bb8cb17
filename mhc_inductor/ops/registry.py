# SPDX-License-Identifier: Apache-2.0
"""Registration of the ops: :func:`define` registers schema, reference, fake, gradient, vmap rule and validation.

The ops are opaque and functional: nothing decomposes one before Inductor's lowering sees it. The reference formula is
the implementation for every device; kernels are registered over it, one device at a time, from
``mhc_inductor.kernels``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from mhc_inductor import compat
from mhc_inductor.kernels import eager
from mhc_inductor.ops import checks, sharding
from mhc_inductor.ops.batching import one_by_one

# The vmap rule of one op: (op, info, in_dims, *args) -> (outputs, out_dims).
VmapRule = Callable[..., tuple[Any, Any]]

REFERENCE: dict[str, Callable[..., Any]] = {}
"""The reference formula of each op defined so far, by the op's name."""

FUSED: set[str] = set()
"""The ops that stand for several others. Only the routing pass puts them in, and never where a policy names the parts."""

BEFORE_TRACE: list[Callable[[], None]] = []
"""What runs before an op is traced into a graph. The backend registers its lowerings and passes so."""

# For each argument of each op: its name, its kind, and whether it may be None.
_TYPES: dict[str, tuple[tuple[str, str, bool], ...]] = {}
# For each op: the names of its arguments.
_NAMES: dict[str, tuple[str, ...]] = {}
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "Tensor": (Tensor,),
    "float": (int, float, torch.SymInt, torch.SymFloat),
    "int": (int, torch.SymInt),
    "bool": (bool,),
    "str": (str,),
}
_WORDS = {"Tensor": "a tensor", "float": "a number", "int": "an int", "bool": "a bool", "str": "a string"}
_RULES: dict[str, VmapRule] = {}

# Parameters, which all tokens share. Every other tensor has the leading dimensions of x.
_PARAM_NAMES = frozenset({"phi", "alpha", "bias", "gamma"})

# A fragment, since further operators define theirs in the same namespace.
LIBRARY = torch.library.Library("mhc_inductor", "FRAGMENT")

# The gradient of an op: autograd's setup_context and backward.
Gradient = tuple[Callable[..., None], Callable[..., Any]]


# --- gradients ----------------------------------------------------------------------------------------------


def _op(name: str) -> Any:
    return getattr(torch.ops.mhc_inductor, name).default


def argument_names(name: str) -> tuple[str, ...]:
    """Returns the names of the arguments of op ``name``."""
    return _NAMES[name]


def typed(name: str, *args: Any) -> None:
    """Raises TypeError unless the leading arguments of op ``name`` have the Python types of its schema.

    Used under torch.compile: the fake checks shapes and dtypes, but is reached only by arguments of the right types.
    """
    for (argument, kind, optional), value in zip(_TYPES[name], args, strict=False):
        if value is None and optional:
            continue
        # bool is a subclass of int but not accepted as a number
        if not isinstance(value, _PYTHON_TYPES[kind]) or (kind in ("float", "int") and isinstance(value, bool)):
            public = checks.public(name)
            raise TypeError(f"{public}: {argument} must be {_WORDS[kind]}, got {type(value).__name__}")


def refuse_trace(function: str) -> None:
    """Raises RuntimeError while torch.jit.trace runs: its graph would have the sizes of the example as constants."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        _refuse_consumer("torch.jit.trace, and torch.onnx.export(dynamo=False),", function)


def _refuse_consumer(consumer: str, function: str) -> NoReturn:
    raise RuntimeError(
        f"mhc_inductor: {consumer} cannot hold {function}. Take "
        "torch.export.export(model, args).run_decompositions(mhc_inductor.decompositions()) instead: that program "
        "holds the plain formula, and its module() can be traced and exported to ONNX"
    )


def call(name: str, *args: Any) -> Any:
    """Calls op ``name``; inside torch.func, which rejects the op's own gradient, calls an equivalent Function."""
    if torch.compiler.is_compiling():
        typed(name, *args)
    if torch.compiler.is_compiling() or not compat.functorch_active():
        return _op(name)(*args)
    return _FUNCTIONS[name].apply(*args)


def needed(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns one gradient per input: those given that are needed, else None, padded with None to all inputs."""
    wanted = ctx.needs_input_grad
    kept = [g if need else None for g, need in zip(grads, wanted, strict=False)]
    return (*kept, *[None] * (len(wanted) - len(kept)))


def refuse(op: str, names: tuple[str, ...], grads: tuple[Tensor | None, ...]) -> None:
    """Raises RuntimeError if a gradient arrived for one of the outputs ``names``, which have none."""
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


def _strided(name: str, *args: Any) -> None:
    """Raises TypeError if an argument of op ``name`` is no strided tensor."""
    for argument, value in zip(_NAMES[name], args, strict=False):
        if isinstance(value, Tensor):
            checks.strided(checks.public(name), argument, value)


def _guard(name: str, integers: bool, *args: Any) -> None:
    """Runs before each call of op ``name``: makes it known to DTensor, and checks what only autograd's level can see.

    Raises:
        TypeError: An argument is no strided tensor, or only some of the tensors are fake.
        NotImplementedError: An argument carries a forward-mode tangent, which torch would silently drop, or
            torch.func.grad or vjp differentiates the op itself, which it cannot.
    """
    sharding.register_if_used()
    _strided(name, *args)
    if (mixed := compat.ops.real_among_fakes(args)) is not None:
        real, fake = (_NAMES[name][at] for at in mixed)
        raise TypeError(
            f"{checks.public(name)}: {real} must be a fake tensor as {fake} is, got a real one; "
            f"pass {fake}.fake_mode.from_tensor({real}), or only real tensors"
        )
    if not integers and compat.any_tangent(args):
        raise _no_tangents(name)
    if torch.is_grad_enabled() and compat.functorch_active() and compat.ops.any_tracked(args):
        raise NotImplementedError(
            f"mhc_inductor: {name} cannot be differentiated by torch.func.grad, vjp or jacrev inside a compiled function; "
            "transform outside of torch.compile, or use torch.autograd"
        )


def _no_tangents(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"mhc_inductor: {name} has no forward-mode derivative (torch.autograd.forward_ad, torch.func.jvp, jacfwd, "
        f"hessian); use reverse mode, or the formulas of {REFERENCE[name].__module__}"
    )


def _no_jvp(name: str, ctx: Any, *tangents: Any) -> None:
    raise _no_tangents(name)


# --- vmap ---------------------------------------------------------------------------------------------------


def _vmap(name: str, op: Callable[..., Any], info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    """Applies the op's own vmap rule, or else makes the vmap dimension a leading dimension.

    If parameters or their gradients are batched too, the op is called once per entry instead.
    """
    if name in _RULES:
        return _RULES[name](op, info, in_dims, *args)
    names = [a.name for a in _op(name)._schema.arguments]
    # strict=False: arguments that have their default may be left out.
    batched = {k for k, dim in zip(names, in_dims, strict=False) if dim is not None}
    shared = _PARAM_NAMES.isdisjoint(names if name.endswith("_backward") else batched)
    if not shared:
        return one_by_one(op, info.batch_size, in_dims, args)

    def fold(key: str, a: Any, dim: int | None) -> Any:
        if not isinstance(a, Tensor) or key in _PARAM_NAMES:
            return a
        return a.expand(info.batch_size, *a.shape) if dim is None else a.movedim(dim, 0)

    out = op(*[fold(k, a, dim) for k, a, dim in zip(names, args, in_dims, strict=False)])
    if isinstance(out, Tensor):
        return out, 0
    # A placeholder of shape [0] (for a missing h_res) has no vmap dimension.
    return out, tuple(None if t.dim() == 1 and t.shape[0] == 0 and info.batch_size else 0 for t in out)


# --- registration -------------------------------------------------------------------------------------------


def _checked(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``fn`` with the validation of op ``name`` in front."""

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        checks.check(name, *args)
        return fn(*args)

    return run


def _traced(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``fake`` wrapped so that :data:`BEFORE_TRACE` runs when a graph is compiled, whatever the backend.

    An exporter to ONNX would otherwise find out at its end that it does not know the op.
    """

    @functools.wraps(fake)
    def run(*args: Any) -> Any:
        if compat.ops.onnx_exporting():
            _refuse_consumer("torch.onnx.export", name)
        sharding.register_if_used()  # inference mode skips the autograd kernel; DTensor calls this before it looks
        if compat.ops.tracing():
            for prepare in BEFORE_TRACE:
                prepare()
        return fake(*args)

    return run


def implement(name: str, fn: Callable[..., Any], dispatch_key: str) -> None:
    """Registers ``fn``, with the op's validation in front, as op ``name`` for a dispatch key such as "CUDA"."""
    LIBRARY.impl(name, _checked(name, fn), dispatch_key)


def _function(name: str, setup: Callable[..., None], grad: Callable[..., Any]) -> type[torch.autograd.Function]:
    """Builds an autograd.Function of the op, with the same gradient and vmap rule, which torch.func can compose."""

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
    vmap_rule: VmapRule | None = None,
    integers: bool = False,
    fused: bool = False,
    cpu: Callable[..., Any] | None = None,
) -> None:
    """Defines op ``name`` with its schema, reference implementation, fake, gradient, validation and vmap rule.

    Args:
        name: Name of the op in ``torch.ops.mhc_inductor``.
        schema: Arguments and results in the schema language, without the name.
        reference: Implementation for every device.
        fake: Computes outputs for fake tensors.
        grad: setup_context and backward of autograd. None for a backward op, whose differentiation raises RuntimeError.
        vmap_rule: Replaces the default rule, which is for ops on tokens with leading dimensions.
        integers: Whether the outputs are integers, so that forward-mode tangents may be ignored.
        fused: Whether the op stands for several others.
        cpu: Implementation on a CPU; None for the reference's.
    """
    REFERENCE[name] = reference
    if fused:
        FUSED.add(name)
    if vmap_rule is not None:
        _RULES[name] = vmap_rule
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    qualname = f"mhc_inductor::{name}"
    _TYPES[name] = compat.ops.schema_types(_op(name))
    _NAMES[name] = tuple(argument for argument, _, _ in _TYPES[name])
    checks.prepare(name, _TYPES[name])
    implement(name, reference, "CompositeExplicitAutograd")
    if cpu is not None:
        implement(name, cpu, "CPU")
    if name in eager.OPS:
        implement(name, functools.partial(eager.run, name, reference), "CUDA")
    for key in ("NestedTensorCPU", "NestedTensorCUDA"):  # not among the backends of the key above
        LIBRARY.impl(name, functools.partial(_strided, name), key)
    compat.ops.register_nested(qualname, functools.partial(_strided, name), LIBRARY)
    torch.library.register_fake(qualname, _checked(name, _traced(name, fake)), lib=LIBRARY)
    setup, backward = grad or (_double_setup, functools.partial(_double_grad, name))
    guard = functools.partial(_guard, name, integers)
    compat.ops.register_autograd(qualname, backward, setup, LIBRARY, guard)
    torch.library.register_vmap(qualname, functools.partial(_vmap, name, _op(name)), lib=LIBRARY)
    _FUNCTIONS[name] = _function(name, setup, backward)
