"""``torch.compile(model, backend="mhc_inductor")``, and ``enable()`` for the ordinary Inductor backend."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from mhc_inductor import compat
from mhc_inductor.options import RoutingOptions, parse
from mhc_inductor.scope import Change, replace

_lock = threading.RLock()
_enabled: RoutingOptions | None = None
_registered = False
_here = threading.local()
# Of graphs, not in their meta: DDP's buckets share one dict.
_routed: weakref.WeakSet[torch.fx.GraphModule] = weakref.WeakSet()


def counters() -> dict[str, int]:
    """What the graph passes did since the process started: "routed mhc_pre", "fused mhc_post_pre", "near misses", ...

    Dynamo compiles a graph a second time where a float it left open becomes a constant; both count.
    """
    return dict(compat.counters())


def prepare() -> None:
    """Registers the lowerings, and stamps the compile that is going on with this package's fingerprint.

    Called by the ops' fake functions when a graph that holds one is traced, so that the ordinary backend launches the
    kernels too, and never replays code that another version of this package generated.
    """
    global _registered
    if not _registered:
        with _lock:
            if not _registered:
                from mhc_inductor.lowerings import e79, mhc, selection

                mhc.register()
                e79.register()
                selection.register()
                _registered = True
    # Not for torch._inductor.compile on a graph of one's own, without Dynamo: there enable() does it.
    compat.compile_backend_inside(_stamped)


def _patches(config_patches: Mapping[str, Any] | None) -> dict[str, Any]:
    """``config_patches`` with our passes chained behind the user's. Patches reach backward graphs on other threads."""
    from mhc_inductor.passes import PASSES, make_pass

    patches = dict(config_patches or {})
    for name, ours in PASSES.items():
        theirs = patches.get(name, getattr(compat.inductor_config(), name))
        if not getattr(theirs, "mhc_inductor", False):
            patches[name] = make_pass(theirs, ours)
    return patches


def _inside(inner_compile: Callable[..., Any]) -> Callable[..., Any]:
    """``inner_compile``, which may compile a backward graph when compile_fx has returned, inside our changes of torch."""

    @functools.wraps(inner_compile)
    def compile_fx_inner(*args: Any, **kwargs: Any) -> Any:
        with compat.symbolic_extremes:
            return inner_compile(*args, **kwargs)

    return compile_fx_inner


def _compile(plain: Callable[..., Any], *args: Any, config_patches: Mapping[str, Any] | None, **kwargs: Any) -> Any:
    """``plain``, which is compile_fx, with our pass and inside our changes of torch."""
    if len(args) > 2:
        args = (*args[:2], _inside(args[2]), *args[3:])
    else:
        kwargs["inner_compile"] = _inside(kwargs.get("inner_compile", compat.compile_fx_module().compile_fx_inner))
    with compat.symbolic_extremes:
        return plain(*args, config_patches=_patches(config_patches), **kwargs)


def _wrapped(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def compile_fx(model_: Any, *args: Any, config_patches: Any = None, **kwargs: Any) -> Any:
        # compile_fx calls itself again by its global name, with the patches in force.
        if (options := _enabled) is not None:
            _route(model_, options)
        elif not getattr(_here, "stamped", False):
            return plain(model_, *args, config_patches=config_patches, **kwargs)
        return _compile(plain, model_, *args, config_patches=config_patches, **kwargs)

    return compile_fx


_entry = Change(lambda: replace(compat.compile_fx_module(), "compile_fx", _wrapped))


@contextlib.contextmanager
def _stamped() -> Iterator[None]:
    """Inside, what this thread compiles by the ordinary backend gets our pass."""
    before, _here.stamped = getattr(_here, "stamped", False), True
    try:
        with _entry:
            yield
    finally:
        _here.stamped = before


def _pass() -> tuple[Callable[..., Any], Callable[[Any], None]]:
    from mhc_inductor.routing import route
    from mhc_inductor.routing.report import log_report

    return route, log_report


def _route(gm: Any, options: RoutingOptions) -> None:
    """Routes the formulas of a Dynamo graph, once."""
    if not isinstance(gm, torch.fx.GraphModule):
        return
    with _lock:
        if gm in _routed:
            return
        _routed.add(gm)
    route, log_report = _pass()
    log_report(route(gm, options, lower=True))


def enable(*, verify: bool = False, empty_rows: str = "exact") -> None:
    """Make the ordinary ``torch.compile(model)`` do what ``backend="mhc_inductor"`` does. Idempotent, any thread.

    Graphs compiled before stay as they are. The arguments are the options of :class:`~mhc_inductor.options.RoutingOptions`,
    those of the last call in force. Raises TypeError or ValueError for a value that an option does not take.
    """
    global _enabled
    options = RoutingOptions(verify, empty_rows)
    with _lock:
        prepare()
        if _enabled is None:
            _entry.__enter__()
        _enabled = options


def disable() -> None:
    """Take :func:`enable` back: later compiles route nothing, and torch is as it was.

    Lowerings stay registered: graphs that hold this package's ops keep their kernels.
    """
    global _enabled
    with _lock:
        if _enabled is not None:
            _enabled = None
            _entry.__exit__()


def is_enabled() -> bool:
    """Whether :func:`enable` is in force."""
    return _enabled is not None


def mhc_inductor(
    gm: Any, example_inputs: Any, *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Any:
    """The backend ``"mhc_inductor"``: Inductor with this package's lowerings and passes.

    ``mode`` and ``options`` are those of ``torch.compile`` for Inductor; options that begin with "mhc_inductor." are
    those of :class:`~mhc_inductor.options.RoutingOptions`. Raises RuntimeError for an unknown option.
    """
    prepare()
    routing, others = parse(options)
    patches = {**compat.mode_options(mode), **compat.check_options(others)}
    _route(gm, routing)
    return _compile(compat.compile_fx_module().compile_fx, gm, example_inputs, config_patches=patches)


def _installed() -> bool:
    found = importlib.metadata.entry_points(group="torch_dynamo_backends")
    return any(e.name == "mhc_inductor" for e in found)


if not _installed():
    compat.register_backend("mhc_inductor", mhc_inductor)
