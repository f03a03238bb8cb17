# SPDX-License-Identifier: Apache-2.0
"""Other engines around compiled models: threads, fork, compiled autograd, offloaded activations, layers compiled apart."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mhc_inductor import counters
from mhc_inductor.routing.operators.index.operator import IndexOperator
from mhc_inductor.routing.operators.mhc.operator import Mhc
from mhc_inductor.routing.operators.selection.operator import SelectionOperator
from tests.formulas.engine_models import DEPTH, GROUPS, HEADS, KINDS, STATE, STREAMS, counted, gradients
from tests.tools.process_engines import routing, work


class Layers(nn.Module):
    """Layers in a ModuleDict, as in torchtitan's models."""

    def __init__(self, kind: str = "mHC") -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(k): layer for k, layer in enumerate(KINDS[kind].layers())})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def streams(seed: int) -> Tensor:
    return KINDS["mHC"].x(seed)


def step(model: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """Returns the output of a call and all gradients."""
    model.zero_grad()
    out = (model if call is None else call)(x)
    out.square().sum().backward()
    return [out.detach(), *(g.clone() for g in gradients(model).values())]


def close(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.fixture
def inserted(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts ops where the backend "mhc_inductor" keeps on a CPU what it recognised, because Inductor fuses that too."""
    for operator in (IndexOperator, Mhc, SelectionOperator):
        monkeypatch.setattr(operator, "faster_as_written", lambda *_: False)


def routed() -> int:
    return counters().get("routed mhc_pre", 0)


def test_four_threads_compile_at_once(quick: None) -> None:
    """Compiles two models of their own, and one that two threads share, forward and backward."""
    shared = Layers()
    models: list[nn.Module] = [KINDS["mHC"].layers()[0], KINDS["mHC"].model(written=False), shared, shared]
    compiled = {id(m): torch.compile(m, backend="mhc_inductor") for m in models}
    start, found, before = threading.Barrier(4), dict[int, Any](), routed()

    def work(k: int) -> None:
        try:
            start.wait(60)
            out = compiled[id(models[k])](streams(k))
            found[k] = [out.detach(), *torch.autograd.grad(out.square().sum(), list(models[k].parameters()))]
        except BaseException as error:
            found[k] = error

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not [e for e in found.values() if isinstance(e, BaseException)]
    for k, model in enumerate(models):
        close(found[k], step(model, streams(k)))
    # The layer once, Layers once or, where both threads trace it, twice.
    assert routed() - before in (1 + DEPTH, 1 + 2 * DEPTH)


def _autograd_may_fork() -> bool:
    """Returns whether a child of a process that compiled a backward, by torch alone, can run a backward.

    A torch built for CUDA starts the threads of autograd's devices when it traces a backward.
    """
    code = """
        import os, torch
        torch.compile(torch.sin, backend="aot_eager")(torch.ones(2, requires_grad=True))
        child = os.fork()
        if child == 0:
            try:
                torch.ones(2, requires_grad=True).sum().backward()
            except RuntimeError as error:
                os._exit(3 if "Autograd-and-Fork" in str(error) else 1)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert int(done.stdout) in (0, 3), done.stderr
    return int(done.stdout) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore")
def test_a_forked_process_runs_what_its_parent_compiled_and_compiles_anew(quick: None) -> None:
    model = Layers()
    compiled = torch.compile(model, backend="mhc_inductor")
    want = compiled(streams(1))
    backward = _autograd_may_fork()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert torch.equal(compiled(streams(1)), want)
            before, layer = routed(), KINDS["mHC"].layers()[0]
            fresh = torch.compile(layer, backend="mhc_inductor")
            if backward:
                close(step(layer, streams(1), fresh), step(layer, streams(1)))
            else:
                with pytest.raises(RuntimeError, match="Autograd-and-Fork"):
                    step(layer, streams(1))
                with torch.no_grad():
                    close([fresh(streams(1))], [layer(streams(1))])
            code = 0 if routed() == before + 1 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


ENGINES = pytest.mark.parametrize(
    ("written", "forward"), [(True, "compiled"), (False, "compiled"), (False, "eager")], ids=str
)
"""Formulas, the package's functions compiled, and these as they are."""


@ENGINES
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_autograd_gives_equal_gradients(inserted: None, kind: str, written: bool, forward: str) -> None:
    from torch._dynamo.compiled_autograd import _enable

    model, x = KINDS[kind].model(written), KINDS[kind].x()
    want, before = step(model, x), dict(counters())
    call = torch.compile(model, backend="mhc_inductor") if forward == "compiled" else model
    seen = []

    def backend(gm: Any, inputs: Any) -> Any:
        seen.append(gm)
        return gm.forward

    with _enable(torch.compile(backend=backend)):
        close(step(model, x, call), want)
    assert seen, "compiled autograd took the backward"
    assert not written or counted(kind, before) == KINDS[kind].expected()


@ENGINES
@pytest.mark.parametrize("kind", KINDS)
def test_activations_may_be_offloaded(inserted: None, kind: str, written: bool, forward: str) -> None:
    """Checks that what the ops save goes through autograd's hooks for saved tensors."""
    model, x, saved = KINDS[kind].model(written), KINDS[kind].x(), set()
    want, before = step(model, x), dict(counters())
    call = torch.compile(model, backend="mhc_inductor") if forward == "compiled" else model
    with torch.autograd.graph.save_on_cpu():
        close(step(model, x, call), want)

    def pack(t: Tensor) -> Tensor:
        saved.add(tuple(t.shape))
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        close(step(model, x, call), want)
    assert not written or counted(kind, before) == KINDS[kind].expected()
    assert SAVED[kind] in saved, saved


SAVED = {
    "mHC": (4, 6, STREAMS * STREAMS + 2 * STREAMS),
    "lists": (4, 8, GROUPS, HEADS // GROUPS),
    "E79": (2, 8, STATE, STATE),
}
"""The shape of a tensor that an op of each kind saves and that is no input of it: h_mix of mhc_pre, the logarithms of the
sums in attention, the states at the beginning of E79's segments."""


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_are_compiled_one_by_one_are_all_routed(inserted: None, kind: str) -> None:
    model, plain, before = Layers(kind), Layers(kind), dict(counters())
    for layer in model.layers.values():
        layer.compile(backend="mhc_inductor", fullgraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), 1e-4) for m in (model, plain)]
    losses = []
    for k in range(3):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss = m(KINDS[kind].x(k)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    assert losses[0::2] == pytest.approx(losses[1::2], rel=1e-12)
    # Layers that are alike share one code object, and so one graph.
    assert counted(kind, before) in [KINDS[kind].expected(times) for times in range(1, DEPTH + 1)]


def test_a_spawned_process_runs_pickled_models() -> None:
    models = {kind: made.model() for kind, made in KINDS.items()}
    with torch.no_grad():
        given = {k: (torch.compile(m, backend=routing), m(KINDS[k].x())) for k, m in models.items()}
    torch.multiprocessing.spawn(work, (given,))
