"""``torch.compile(model, backend="mhc_inductor")``, and ``enable()`` for the ordinary Inductor backend."""

from __future__ import annotations

import functools
import importlib.metadata
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mhc_inductor import compat
from mhc_inductor.collector import full_collections_deferred

_PASS = "post_grad_custom_pre_pass"
_ROUTED = "mhc_inductor_routed"
_lock = threading.RLock()
_enabled = False
_prepared = False


def counters() -> dict[str, int]:
    """What the graph passes did since the process started: "routed mhc_pre", "fused mhc_post_pre", "near misses", ...

    Dynamo compiles a graph a second time where a float it left open becomes a constant; both count.
    """
    return dict(compat.counters())


def prepare() -> None:
    """Register the lowerings and stamp every later Inductor compile with this package's fingerprint.

    Called by the ops' fake functions when a graph that holds one is traced, so that the ordinary backend launches the
    kernels too, and never replays code that another version of this package generated.
    """
    global _prepared
    if _prepared:
        return
    with _lock:
        if not _prepared:
            from mhc_inductor.lowerings import e79, mhc, selection

            mhc.register()
            e79.register()
            selection.register()
            compat.remember_accesses()
            compat.symbolic_extremes()
            _wrap_compile_fx()
            _prepared = True


def _patches(config_patches: Mapping[str, Any] | None) -> dict[str, Any]:
    """``config_patches`` with our pass chained behind the user's. Patches reach backward graphs on other threads."""
    from mhc_inductor.passes import make_pass

    patches = dict(config_patches or {})
    theirs = patches.get(_PASS, getattr(compat.inductor_config(), _PASS))
    if not getattr(theirs, "mhc_inductor", False):
        patches[_PASS] = make_pass(theirs)
    return patches


def _deferring(inner_compile: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(inner_compile, "mhc_inductor"):
        return inner_compile

    @functools.wraps(inner_compile)
    def compile_fx_inner(*args: Any, **kwargs: Any) -> Any:
        with full_collections_deferred():
            return inner_compile(*args, **kwargs)

    compile_fx_inner.mhc_inductor = True  # type: ignore[attr-defined]
    return compile_fx_inner


def _wrap_compile_fx() -> None:
    module = compat.compile_fx_module()
    plain = module.compile_fx

    @functools.wraps(plain)
    def compile_fx(model_: Any, example_inputs_: Any, *args: Any, config_patches: Any = None, **kwargs: Any) -> Any:
        # compile_fx calls itself again by its global name, with the patches in force.
        if not args:
            # A backward graph may be compiled later, when compile_fx has returned.
            kwargs["inner_compile"] = _deferring(kwargs.get("inner_compile", module.compile_fx_inner))
        with full_collections_deferred():
            if _enabled:
                _route(model_)
            return plain(model_, example_inputs_, *args, config_patches=_patches(config_patches), **kwargs)

    module.compile_fx = compile_fx


def _route(gm: Any) -> None:
    """Route the formulas of a Dynamo graph, once."""
    if not isinstance(gm, torch.fx.GraphModule) or _ROUTED in gm.meta:
        return
    from mhc_inductor.routing import route
    from mhc_inductor.routing.report import log_report

    gm.meta[_ROUTED] = True
    log_report(route(gm))


def enable() -> None:
    """Make the ordinary ``torch.compile(model)`` do what ``backend="mhc_inductor"`` does. Idempotent, any thread.

    Graphs compiled before stay as they are.
    """
    global _enabled
    with _lock:
        prepare()
        _enabled = True


def disable() -> None:
    """Take :func:`enable` back: later compiles route nothing.

    Lowerings stay registered: graphs that hold this package's ops keep their kernels.
    """
    global _enabled
    with _lock:
        _enabled = False


def is_enabled() -> bool:
    """Whether :func:`enable` is in force."""
    return _enabled


def mhc_inductor(
    gm: Any, example_inputs: Any, *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Any:
    """The backend ``"mhc_inductor"``: Inductor with this package's lowerings and passes.

    ``mode`` and ``options`` are those of ``torch.compile`` for Inductor. Raises RuntimeError for an unknown option.
    """
    prepare()
    _route(gm)
    patches = {**compat.mode_options(mode), **compat.check_options(options or {})}
    return compat.compile_fx_module().compile_fx(gm, example_inputs, config_patches=patches)


def _installed() -> bool:
    found = importlib.metadata.entry_points(group="torch_dynamo_backends")
    return any(e.name == "mhc_inductor" for e in found)


if not _installed():
    compat.register_backend("mhc_inductor", mhc_inductor)
