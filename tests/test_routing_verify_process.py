# SPDX-License-Identifier: Apache-2.0
"""Verification leaves the process as it is, and modes, hooks and devices around a compile do not see its runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from mhc_inductor.routing import Verifier, route
from mhc_inductor.routing.interface import Verdict
from mhc_inductor.routing.report import Report
from mhc_inductor.routing.verify import Trial
from tests.capture import interpreted
from tests.laws import block, mhc_leaves

CALLED = list[str]()
"""What the modes and hooks of the tests below saw."""


class Watching(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        CALLED.extend([str(func)] * isinstance(out, Tensor))
        return out


def _seen(t: Tensor) -> Tensor:
    CALLED.append("hook")
    return t


@contextlib.contextmanager
def _set(change: Callable[[Any], None], value: Any, back: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(back)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "fake": torch._subclasses.FakeTensorMode,
    "device": lambda: torch.device("meta"),
    "default device": lambda: _set(torch.set_default_device, "meta", None),
    "default dtype": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "half": lambda: _set(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "deterministic": lambda: _set(torch.use_deterministic_algorithms, True, False),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "function mode": Watching,
    "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(_seen, _seen),
}


def state() -> Any:
    """Returns what a check must leave as it is."""
    on_gpu = torch.cuda.is_initialized()
    return (
        [t.tolist() for t in (torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if on_gpu else ()))],
        (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()),
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory),
        (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(), torch.cuda.is_initialized()),
        torch._guards.TracingContext.try_get(),
    )


def site(leaves: dict[str, Tensor]) -> Tensor:
    return block(leaves["x"], leaves)


@pytest.mark.parametrize("during", ["a compile", "no compile"])
@pytest.mark.parametrize("name", CONTEXTS)
def test_nothing_of_the_process_changes(name: str, during: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a formula draws random numbers; modes and hooks around the compile do not see the runs."""
    verifier, data, report, graphs = Verifier(), Trial.data, Report(), list[fx.GraphModule]()
    monkeypatch.setattr(Trial, "data", lambda *args: (torch.rand(()), data(*args))[1])

    def check(*args: Any) -> Verdict:
        before = state(), len(CALLED)
        verdict = verifier(*args)
        assert before == (state(), before[1]) and len(CALLED) == before[1], CALLED[before[1] :]
        return verdict

    leaves = mhc_leaves()
    torch._dynamo.reset()
    if during == "a compile":
        with CONTEXTS[name]() if name != "fake" else contextlib.nullcontext():
            torch.compile(site, backend=interpreted(report, [], check), dynamic=False)(leaves)
    else:
        torch.compile(site, backend=interpreted(report, graphs, routed=False), dynamic=False)(leaves)
        with CONTEXTS[name]():
            report = route(graphs[0], check=check)
    assert not report.problems
    if (name, during) != ("inference", "no compile"):  # a graph with gradients is not routed there
        assert "mhc_post" in {r.op for r in report.routed} and not report.near_misses
