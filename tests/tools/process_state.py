# SPDX-License-Identifier: Apache-2.0
"""Prints as JSON what a compile leaves changed in torch and in the garbage collector.

``tests/test_process_state.py`` runs it in a separate process, because other tests change torch's state.
"""

from __future__ import annotations

import gc
import importlib
import json
import threading
from collections.abc import Callable
from typing import Any

import torch

MODULES = (
    "torch._inductor.compile_fx",
    "torch._inductor.codecache",
    "torch._inductor.decomposition",
    "torch._inductor.ir",
    "torch._inductor.lowering",
    "torch._inductor.scheduler",
    "torch._higher_order_ops.triton_kernel_wrap",
    "torch._functorch.aot_autograd",
    "torch._functorch._aot_autograd.autograd_cache",
    "torch._dynamo.convert_frame",
    "torch._dynamo.output_graph",
    "torch._dynamo.backends.inductor",
    "torch._dynamo.backends.registry",
    "torch.fx.experimental.symbolic_shapes",
)
CONFIGS = ("torch._inductor.config", "torch._dynamo.config", "torch._functorch.config")
OURS = "mhc_inductor"


def _functions(name: str) -> dict[str, int]:
    """Returns the identities of a module's functions and classes, and of its own classes' methods."""
    found: dict[str, int] = {}
    for key, value in vars(importlib.import_module(name)).items():
        if callable(value):
            found[f"{name}.{key}"] = id(value)
        if isinstance(value, type) and value.__module__ == name:
            found |= {f"{name}.{key}.{k}": id(v) for k, v in vars(value).items() if callable(v)}
    return found


def collector() -> list[Any]:
    """Returns the collector's thresholds, whether it is enabled, and how many callbacks it has."""
    return [*gc.get_threshold(), gc.isenabled(), len(gc.callbacks)]


def during_a_compile(backend: str) -> list[Any]:
    """Returns the collector's state while Inductor compiles a graph, as a library may save it to restore it later."""
    seen: list[list[Any]] = []
    with torch._inductor.config.patch(post_grad_custom_post_pass=lambda graph: seen.append(collector())):
        torch._dynamo.reset()
        torch.compile(lambda x: x.cos() * 3, backend=backend)(torch.randn(4))
    (state,) = seen
    return state


def _tables() -> dict[str, Any]:
    from torch._dynamo.backends.registry import list_backends
    from torch._dynamo.callback import callback_handler
    from torch._inductor import decomposition, lowering
    from torch.fx.experimental import symbolic_shapes

    def others(table: dict[Any, Any]) -> dict[str, int]:
        return {str(k): id(v) for k, v in table.items() if not str(k).startswith(OURS)}

    return {
        "lowerings": others(lowering.lowerings),
        "decompositions": others(decomposition.decompositions),
        "SYMPY_INTERP": {k: id(v) for k, v in symbolic_shapes.SYMPY_INTERP.items() if k != "__builtins__"},
        "backends": sorted(set(list_backends(exclude_tags=())) - {OURS}),
        "callbacks": len(callback_handler.start_callbacks) + len(callback_handler.end_callbacks),
        "gc": collector(),
        "gc frozen": gc.get_freeze_count(),
        "modes": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_float32_matmul_precision()],
    }


def snapshot() -> dict[str, Any]:
    """Returns the state as a flat mapping from names to values or identities."""
    state: dict[str, Any] = {}
    for name in MODULES:
        state |= _functions(name)
    for name in CONFIGS:
        config = importlib.import_module(name).get_config_copy()
        state |= {f"{name}.{k}": repr(v) for k, v in config.items()}
    for name, table in _tables().items():
        state |= {f"{name}.{k}": v for k, v in table.items()} if isinstance(table, dict) else {name: table}
    return state


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Returns the names whose value has changed.

    Names that are new in ``after`` count only in the tables; torch itself loads some functions late. The number of
    frozen objects may fall, as objects are freed, but neither rise nor fall to none.
    """
    tables = {k for k in after if k.startswith(("SYMPY_INTERP", "lowerings", "decompositions"))}

    def same(name: str) -> bool:
        old, new = before.get(name), after.get(name)
        if name == "gc frozen":
            return bool(new) is bool(old) and new <= old
        return old == new

    return sorted(k for k in before.keys() | tables if not same(k))


def main() -> None:
    import torch._inductor.async_compile  # imported first, since it changes some state once

    torch.compile(lambda x: x.sin() * 2)(torch.randn(4))
    threshold = (701, 11, 13)
    gc.set_threshold(*threshold)
    collectors = {"torch alone": during_a_compile("inductor")}
    before = snapshot()
    import mhc_inductor

    def post(x: Any, f: Any, h: Any, r: Any) -> Any:
        return mhc_inductor.mhc_post(x, f, h, r, transpose_res=True)

    def step(name: str, backend: str = "inductor", failing: bool = False, dynamic: bool = False) -> None:
        torch._dynamo.reset()
        args = [t.requires_grad_() for t in (torch.randn(2, 4, 16), torch.randn(2, 16), torch.rand(2, 4))]
        args.append(torch.rand(2, 4, 4).requires_grad_())

        def refuse(graph: Any) -> None:
            seen.append(changed(before, snapshot()))
            collectors[name] = collector()
            raise ValueError("planted")

        with torch._inductor.config.patch(post_grad_custom_post_pass=refuse if failing else None):
            try:
                out = torch.compile(post, backend=backend, dynamic=dynamic)(*args)
                thread = threading.Thread(target=lambda: out.sum().backward())
                thread.start()
                thread.join()
                assert args[0].grad is not None and not failing
            except Exception as error:
                assert failing and "planted" in str(error), error

    def enabled(name: str, failing: bool = False) -> None:
        mhc_inductor.enable()
        try:
            step(name, failing=failing)
        finally:
            mhc_inductor.disable()

    def watched(name: str) -> None:
        collectors[name] = during_a_compile(OURS)

    seen: list[list[str]] = []
    scenarios: dict[str, Callable[[str], None]] = {
        "import": lambda name: None,
        "backend": lambda name: step(name, OURS),
        "backend dynamic": lambda name: step(name, OURS, dynamic=True),
        "backend fails": lambda name: step(name, OURS, failing=True),
        "plain": step,
        "plain fails": lambda name: step(name, failing=True),
        "another backend": lambda name: step(name, "aot_eager"),
        "enable": enabled,
        "enable fails": lambda name: enabled(name, failing=True),
        "watched": watched,
    }
    left: dict[str, list[str]] = {}
    for name, run in scenarios.items():
        run(name)
        left[name] = changed(before, snapshot())
    print(json.dumps({"left": left, "inside": seen, "collectors": collectors}))


if __name__ == "__main__":
    main()
