# SPDX-License-Identifier: Apache-2.0
"""Verification leaves the process as it is, and modes, hooks and devices around a compile do not see its runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from mhc_inductor.report import Report
from mhc_inductor.routing import Verifier, route
from mhc_inductor.routing.interface import Verdict
from mhc_inductor.routing.operators.mhc.sinkhorn import Chains
from mhc_inductor.routing.verify import Trial
from tests.formulas.laws import block, mhc_leaves
from tests.tools.capture import interpreted

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


def watched(
    name: str,
    during: str,
    check: Callable[..., Verdict],
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    patch: pytest.MonkeyPatch,
) -> Report:
    """Routes ``fn`` inside one of the contexts. Asserts that nothing of the process changes, and that nothing there is seen.

    The data of a check draws random numbers. The runs that find Sinkhorn iterations are watched as the check's are.
    """
    data, report, graphs = Trial.data, Report(), list[fx.GraphModule]()
    changed = list[Any]()  # an assertion inside a run would only leave the formula alone

    def watching(call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any) -> Any:
            before = state(), len(CALLED)
            result = call(*args)
            if before != (state(), len(CALLED)):
                changed.append((before, state(), CALLED[before[1] :]))
            return result

        return checked

    patch.setattr(Trial, "data", lambda *args: (torch.rand(()), data(*args))[1])
    patch.setattr(Chains, "_run", watching(Chains._run))
    check = watching(check)
    torch._dynamo.reset()
    if during == "a compile":
        with CONTEXTS[name]() if name != "fake" else contextlib.nullcontext():
            torch.compile(fn, backend=interpreted(report, [], check), dynamic=False)(*inputs)
    else:
        torch.compile(fn, backend=interpreted(report, graphs, routed=False), dynamic=False)(*inputs)
        with CONTEXTS[name]():
            report = route(graphs[0], check=check)
    assert not report.problems and not changed
    return report


@pytest.mark.parametrize("during", ["a compile", "no compile"])
@pytest.mark.parametrize("name", CONTEXTS)
def test_nothing_of_the_process_changes(name: str, during: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a formula draws random numbers; modes and hooks around the compile do not see the runs."""
    report = watched(name, during, Verifier(), site, [mhc_leaves()], monkeypatch)
    if (name, during) != ("inference", "no compile"):  # a graph with gradients is not routed there
        assert "mhc_post" in {r.op for r in report.routed} and not report.near_misses
