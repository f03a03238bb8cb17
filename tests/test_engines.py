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

import mhc_inductor
from mhc_inductor.nn import HyperConnection
from tests.process_engines import DEPTH, RANKS, Layer, routing, streams, work

D, N = 16, 4


class Layers(nn.Module):
    """Layers in a ModuleDict, as in torchtitan's models."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(k): Layer(1.0 - 0.1 * k) for k in range(DEPTH)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class Ops(nn.Module):
    """Two blocks by the package's own modules, of all ops with a backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[HyperConnection(D, N, nn.Linear(D, D), transpose_res=True) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def step(model: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """Returns the output of a call and all gradients."""
    model.zero_grad()
    out = (model if call is None else call)(x)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def close(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def routed() -> int:
    return mhc_inductor.counters().get("routed mhc_pre", 0)


def test_four_threads_compile_at_once(quick: None) -> None:
    """Compiles two models of their own, and one that two threads share, forward and backward."""
    shared = Layers()
    models: list[nn.Module] = [Layer(), Ops(), shared, shared]
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
    # Layer once, Layers once or, where both threads trace it, twice.
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
            before, layer = routed(), Layer()
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


@pytest.mark.parametrize(("make", "forward"), [(Layers, "compiled"), (Ops, "compiled"), (Ops, "eager")])
def test_compiled_autograd_gives_equal_gradients(quick: None, make: Callable[[], nn.Module], forward: str) -> None:
    from torch._dynamo.compiled_autograd import _enable

    model = make()
    want, before = step(model, streams(1)), routed()
    call = torch.compile(model, backend="mhc_inductor") if forward == "compiled" else model
    seen = []

    def backend(gm: Any, inputs: Any) -> Any:
        seen.append(gm)
        return gm.forward

    with _enable(torch.compile(backend=backend)):
        close(step(model, streams(1), call), want)
    assert seen, "compiled autograd took the backward"
    assert routed() - before == (DEPTH if forward == "compiled" and make is Layers else 0)


@pytest.mark.parametrize("make", [Layers, Ops])
@pytest.mark.parametrize("forward", ["compiled", "eager"])
def test_activations_may_be_offloaded(quick: None, make: Callable[[], nn.Module], forward: str) -> None:
    """Checks that what the ops save goes through autograd's hooks for saved tensors."""
    model, saved = make(), []
    want = step(model, streams(1))
    call = torch.compile(model, backend="mhc_inductor") if forward == "compiled" else model
    with torch.autograd.graph.save_on_cpu():
        close(step(model, streams(1), call), want)

    def pack(t: Tensor) -> Tensor:
        saved.append(tuple(t.shape))
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        close(step(model, streams(1), call), want)
    # h_mix of mhc_pre, which is no input: 3 tokens, n * n + 2 * n numbers each.
    assert saved and (make is Layers or (3, N * N + 2 * N) in saved)


def test_layers_that_are_compiled_one_by_one_are_all_routed(quick: None) -> None:
    model, plain = Layers(), Layers()
    for layer in model.layers.values():
        layer.compile(backend="mhc_inductor", fullgraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), 1e-4) for m in (model, plain)]
    before, losses = routed(), []
    for k in range(3):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss = m(streams(k)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    assert losses[0::2] == pytest.approx(losses[1::2], rel=1e-5)
    # The layers share one code object, and so one graph.
    assert routed() - before in range(1, DEPTH + 1)


@pytest.mark.law("processes that are spawned")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.timeout(240)
def test_spawned_processes_run_a_pickled_model_and_train_in_many_buckets(tmp_path: Any) -> None:
    """Starts two processes, each of which compiles what it is given and a DDP model, and checks both."""
    model = Layer()
    compiled = torch.compile(model, backend=routing)
    with torch.no_grad():
        want = model(streams(9))
    torch.multiprocessing.spawn(work, (str(tmp_path / "store"), compiled, want), RANKS)
