"""The mHC ops (arXiv 2512.24880), namespace ``torch.ops.mhc_inductor``.

Opaque and functional: nothing decomposes them before Inductor's lowering sees them. Here each gets its
schema, its fake, its gradient (a backward op of its own), its vmap rule, and the plain-PyTorch reference as
the implementation of every device. Kernels register over that, a device at a time, from
``mhc_inductor.kernels``.

No gradient flows into h_pre, h_mix and inv_rms: they exist for the backward op. Double backward raises
RuntimeError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mhc_inductor import compat
from mhc_inductor.ops import checks
from mhc_inductor.reference import mhc as reference
from mhc_inductor.reference.mhc import acc_dtype

_PARAMS = "Tensor phi, Tensor alpha, Tensor bias, Tensor? gamma"
_SINKHORN = "int sinkhorn_iters, float sinkhorn_eps, str sinkhorn_form"
_PRE_FLOATS = "float norm_eps, float hc_eps, float post_mult, float post_eps"
_GRADS = "(Tensor dx, Tensor dphi, Tensor dalpha, Tensor dbias, Tensor dgamma)"

_SAVED = "Tensor h_pre, Tensor h_mix, Tensor inv_rms, Tensor? dx_acc"
_POST = "Tensor x, Tensor f_out, Tensor h_post, Tensor? h_res, bool transpose_res"

SCHEMAS = {
    "mhc_pre": f"(Tensor x, {_PARAMS}, {_PRE_FLOATS}, {_SINKHORN}) -> "
    "(Tensor h_in, Tensor h_post, Tensor h_res, Tensor h_pre, Tensor h_mix, Tensor inv_rms)",
    "mhc_pre_backward": "(Tensor? dh_in, Tensor? dh_post, Tensor? dh_res, "
    f"Tensor x, {_PARAMS}, {_SAVED.replace('h_pre,', 'h_pre, Tensor h_post,')}, "
    f"{_PRE_FLOATS}, {_SINKHORN}) -> {_GRADS}",
    "mhc_sinkhorn": "(Tensor h_res, int iters, float eps, str form) -> Tensor",
    "mhc_sinkhorn_backward": "(Tensor grad, Tensor h_res, int iters, float eps, str form) -> Tensor",
    "mhc_post": f"({_POST}) -> Tensor",
    "mhc_post_backward": f"(Tensor g, {_POST}) -> (Tensor dx, Tensor df, Tensor dh_post, Tensor dh_res)",
    "mhc_head": f"(Tensor x, {_PARAMS}, float norm_eps, float hc_eps) -> "
    "(Tensor h_in, Tensor h_pre, Tensor h_mix, Tensor inv_rms)",
    "mhc_head_backward": f"(Tensor? dh_in, Tensor x, {_PARAMS}, {_SAVED}, float norm_eps, float hc_eps) -> {_GRADS}",
}
OPS = tuple(SCHEMAS)
REFERENCE: dict[str, Callable[..., Any]] = {name: getattr(reference, name) for name in OPS}

# Arguments that are parameters, shared by all tokens; every other tensor has the leading dimensions of x.
_PARAM_NAMES = frozenset({"phi", "alpha", "bias", "gamma"})

# A fragment: further operators define theirs in the same namespace.
LIBRARY = torch.library.Library("mhc_inductor", "FRAGMENT")


# --- shapes and dtypes of the outputs (fakes) ---------------------------------------------------------------


def _like(t: Tensor) -> Tensor:
    return t.new_empty(t.shape)


def _param_grads(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None) -> tuple[Tensor, ...]:
    dgamma = x.new_empty((0,)) if gamma is None else _like(gamma)
    return _like(x), _like(phi), _like(alpha), _like(bias), dgamma


def _mhc_pre_fake(x: Tensor, phi: Tensor, *_: Any) -> tuple[Tensor, ...]:
    lead, (n, d), m, acc = x.shape[:-2], x.shape[-2:], phi.shape[0], acc_dtype(x.dtype)
    k = 0 if m == 2 * n else n
    return (
        x.new_empty((*lead, d)),
        x.new_empty((*lead, n), dtype=acc),
        x.new_empty((*lead, k, k), dtype=acc),
        x.new_empty((*lead, n), dtype=acc),
        x.new_empty((*lead, m), dtype=acc),
        x.new_empty(lead, dtype=acc),
    )


def _mhc_pre_backward_fake(
    dh_in: Any,
    dh_post: Any,
    dh_res: Any,
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Any,
    *_: Any,
) -> tuple[Tensor, ...]:
    return _param_grads(x, phi, alpha, bias, gamma)


def _mhc_sinkhorn_fake(h_res: Tensor, *_: Any) -> Tensor:
    return _like(h_res)


def _mhc_sinkhorn_backward_fake(grad: Tensor, h_res: Tensor, *_: Any) -> Tensor:
    return _like(h_res)


def _mhc_post_fake(x: Tensor, *_: Any) -> Tensor:
    return _like(x)


def _mhc_post_backward_fake(
    g: Tensor, x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor | None, transpose_res: bool
) -> tuple[Tensor, ...]:
    return _like(x), _like(f_out), _like(h_post), x.new_empty((0,)) if h_res is None else _like(h_res)


def _mhc_head_fake(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    lead, (n, d), acc = x.shape[:-2], x.shape[-2:], acc_dtype(x.dtype)
    per_stream = (*lead, n)
    return (
        x.new_empty((*lead, d)),
        x.new_empty(per_stream, dtype=acc),
        x.new_empty(per_stream, dtype=acc),
        x.new_empty(lead, dtype=acc),
    )


def _mhc_head_backward_fake(
    dh_in: Any, x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Any, *_: Any
) -> tuple[Tensor, ...]:
    return _param_grads(x, phi, alpha, bias, gamma)


# --- gradients ----------------------------------------------------------------------------------------------


def _op(name: str) -> Any:
    return getattr(torch.ops.mhc_inductor, name).default


def call(name: str, *args: Any) -> Any:
    """Call op ``name``; inside torch.func, which refuses its gradient, by an equal Function."""
    if torch.compiler.is_compiling() or not compat.functorch_active():
        return _op(name)(*args)
    return _FUNCTIONS[name].apply(*args)


def _needed(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of the leading arguments, None where none is asked for, padded with None."""
    wanted = ctx.needs_input_grad
    kept = [g if need else None for g, need in zip(grads, wanted, strict=False)]
    return (*kept, *[None] * (len(wanted) - len(kept)))


def _refuse(op: str, names: tuple[str, ...], grads: tuple[Tensor | None, ...]) -> None:
    for name, grad in zip(names, grads, strict=True):
        if grad is not None:
            raise RuntimeError(f"mhc_inductor: {op} has no gradient for its output {name}, but one arrived")


def _pre_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, phi, alpha, bias, gamma, *ctx.options = inputs
    _, h_post, _, h_pre, h_mix, inv_rms = output
    ctx.save_for_backward(x, phi, alpha, bias, gamma, h_pre, h_post, h_mix, inv_rms)
    ctx.mark_non_differentiable(h_pre, h_mix, inv_rms)
    ctx.set_materialize_grads(False)


def _pre_grad(ctx: Any, dh_in: Any, dh_post: Any, dh_res: Any, *others: Any) -> tuple[Tensor | None, ...]:
    _refuse("mhc_pre", ("h_pre", "h_mix", "inv_rms"), others)
    if dh_in is None and dh_post is None and dh_res is None:
        return _needed(ctx)
    *grads, dgamma = call("mhc_pre_backward", dh_in, dh_post, dh_res, *ctx.saved_tensors, None, *ctx.options)
    return _needed(ctx, *grads, dgamma)


def _head_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, phi, alpha, bias, gamma, *ctx.options = inputs
    _, h_pre, h_mix, inv_rms = output
    ctx.save_for_backward(x, phi, alpha, bias, gamma, h_pre, h_mix, inv_rms)
    ctx.mark_non_differentiable(h_pre, h_mix, inv_rms)
    ctx.set_materialize_grads(False)


def _head_grad(ctx: Any, dh_in: Any, *others: Any) -> tuple[Tensor | None, ...]:
    _refuse("mhc_head", ("h_pre", "h_mix", "inv_rms"), others)
    if dh_in is None:
        return _needed(ctx)
    return _needed(ctx, *call("mhc_head_backward", dh_in, *ctx.saved_tensors, None, *ctx.options))


def _sinkhorn_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    h_res, *ctx.options = inputs
    ctx.save_for_backward(h_res)
    ctx.set_materialize_grads(False)


def _sinkhorn_grad(ctx: Any, grad: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return _needed(ctx)
    return _needed(ctx, call("mhc_sinkhorn_backward", grad, *ctx.saved_tensors, *ctx.options))


def _post_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.transpose_res = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _post_grad(ctx: Any, g: Any) -> tuple[Tensor | None, ...]:
    if g is None:
        return _needed(ctx)
    return _needed(ctx, *call("mhc_post_backward", g, *ctx.saved_tensors, ctx.transpose_res))


_GRADIENTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "mhc_pre": (_pre_setup, _pre_grad),
    "mhc_sinkhorn": (_sinkhorn_setup, _sinkhorn_grad),
    "mhc_post": (_post_setup, _post_grad),
    "mhc_head": (_head_setup, _head_grad),
}


def _double_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)


def _double_grad(name: str, ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        f"mhc_inductor: double backward is not supported: {name} has no gradient of its own "
        "(create_graph=True, or torch.func.grad of a grad); "
        "use the formulas of mhc_inductor.reference.mhc for second derivatives"
    )


# --- vmap ---------------------------------------------------------------------------------------------------


def _vmap(name: str, op: Callable[..., Any], info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    """A batch becomes a leading dimension, unless parameters or their gradients have it too."""
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
    check = getattr(checks, name)

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
        "vmap": lambda info, in_dims, *args: _vmap(name, functools.partial(call, name), info, in_dims, *args),
    }
    return type(f"{name}_function", (torch.autograd.Function,), {k: staticmethod(f) for k, f in methods.items()})


_FUNCTIONS: dict[str, type[torch.autograd.Function]] = {}

for _name, _schema in SCHEMAS.items():
    LIBRARY.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    _qualname = f"mhc_inductor::{_name}"
    implement(_name, REFERENCE[_name], "CompositeExplicitAutograd")
    torch.library.register_fake(_qualname, _checked(_name, _traced(globals()[f"_{_name}_fake"])), lib=LIBRARY)
    _setup, _grad = _GRADIENTS.get(_name) or (_double_setup, functools.partial(_double_grad, _name))
    torch.library.register_autograd(_qualname, _grad, setup_context=_setup, lib=LIBRARY)
    torch.library.register_vmap(_qualname, functools.partial(_vmap, _name, _op(_name)), lib=LIBRARY)
    _FUNCTIONS[_name] = _function(_name, _setup, _grad)
