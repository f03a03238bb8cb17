# SPDX-License-Identifier: Apache-2.0
"""Private torch APIs by which several processes compile one model.

- torch._dynamo.config: its settings
- torch._dynamo.eval_frame.OptimizeContext: how a module is compiled; its own pickling loses ``dynamic``
- torch._functorch.config: its settings
- torch._inductor.config: its settings
- torch.nn.Module._call_impl: what a module compiled in place compiles
- torch.nn.Module._compiled_call_impl: what it calls
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch


def _configs() -> list[Any]:
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    return [torch._dynamo.config, torch._functorch.config, torch._inductor.config]


def saved_configs() -> list[dict[str, Any]]:
    """Returns the settings of torch's compilers that can be sent to another process."""
    return [config.save_config_portable() for config in _configs()]


def load_configs(saved: list[dict[str, Any]], processes: int) -> None:
    """Sets what :func:`saved_configs` returned, and this process's share of the processes that compile kernels."""
    configs = _configs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of settings that no longer do anything
        for config, values in zip(configs, saved, strict=True):
            config.load_config({name: value for name, value in values.items() if getattr(config, name) != value})
    configs[-1].compile_threads = max(1, configs[-1].compile_threads // processes)


def caches_graphs() -> bool:
    """Returns whether Inductor stores compiled graphs on disk."""
    inductor = _configs()[2]
    return bool(inductor.fx_graph_cache and not inductor.force_disable_caches)


def context_parts(value: Any) -> tuple[Any, ...] | None:
    """Returns what :func:`context_of` makes a compiled module's context of again, or None if ``value`` is none."""
    from torch._dynamo.eval_frame import OptimizeContext

    if not isinstance(value, OptimizeContext):
        return None
    return value.callback, value._backend_ctx_ctor, value.first_ctx, value._dynamic, value.compiler_config


def context_of(callback: Any, constructor: Any, first: bool, dynamic: bool | None, config: Any) -> Any:
    """Returns the context that :func:`context_parts` took apart."""
    from torch._dynamo.eval_frame import OptimizeContext

    return OptimizeContext(callback, constructor, first, dynamic=dynamic, compiler_config=config)


def compiled_in_place(model: torch.nn.Module) -> dict[str, Any]:
    """Returns the contexts of modules that ``Module.compile`` compiled, by name: pickling a module leaves them out."""
    called = {name: m._compiled_call_impl for name, m in model.named_modules()}
    return {name: inspect.getclosurevars(fn).nonlocals["self"] for name, fn in called.items() if fn is not None}


def compile_in_place(model: torch.nn.Module, contexts: Mapping[str, Any]) -> None:
    """Compiles modules of ``model`` in place, as :func:`compiled_in_place` found them."""
    for name, context in contexts.items():
        module = model.get_submodule(name)
        module._compiled_call_impl = context(module._call_impl)
