# SPDX-License-Identifier: Apache-2.0
"""The backend, enable(), options, modes and passes, on the CPU."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import threading

import pytest
import torch
import torch._dynamo.testing
import torch._inductor.custom_graph_pass
from torch._inductor.utils import run_and_get_code

import mhc_inductor
from mhc_inductor import backend, mhc_post, mhc_pre, passes
from tests.oracles import mhc as h

# Excludes compiled code from other tests and from earlier runs on this machine.
pytestmark = pytest.mark.usefixtures("vectorised", "no_caches", "fresh")


def layer(x, phi, alpha, bias, gamma, w):
    h_in, h_post, h_res = mhc_pre(x, phi, alpha, bias, gamma, sinkhorn_iters=2)
    return mhc_post(x, torch.tanh(h_in @ w), h_post, h_res, transpose_res=True)


def leaves(tokens=6, width=32, seed=0):
    made = h.make_inputs((tokens,), 4, width, torch.float32, seed=seed)
    w = torch.randn(width, width, generator=torch.Generator().manual_seed(seed)) * width**-0.5
    return [made[k].requires_grad_() for k in ("x", "phi", "alpha", "bias", "gamma")] + [w.requires_grad_()]


def check_training(step, args):
    same = [a.detach().clone().requires_grad_() for a in args]
    out, want = step(*args), layer(*same)
    g = torch.randn_like(want)
    out.backward(g)
    want.backward(g)
    h.compare({"out": out}, {"out": want}, 2e-6)
    for got, ref in zip(args, same, strict=True):
        assert h.relative(got.grad, ref.grad) < 5e-6


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["mhc_inductor", "inductor"])
def test_cpu_training_is_fused_without_op_calls(name):
    args = leaves()
    _, codes = run_and_get_code(lambda: check_training(torch.compile(layer, backend=name, fullgraph=True), args))
    assert len(codes) == 2
    for code in codes:
        assert "torch.ops.mhc_inductor" not in code.split("def call(")[1]


def test_backend_is_listed_and_needs_no_enable():
    assert "mhc_inductor" in torch._dynamo.list_backends()


def test_import_is_cheap():
    code = (
        "import sys, torch; before = set(sys.modules); import mhc_inductor; "
        "print([m for m in ('torch._inductor.lowering', 'torch._inductor.ir') if m in set(sys.modules) - before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_ordinary_backend_without_enable_in_a_fresh_process():
    code = """
import torch, mhc_inductor
from torch._inductor.utils import run_and_get_code
f = torch.compile(lambda c: mhc_inductor.mhc_sinkhorn(c, 3) * 2)
out, codes = run_and_get_code(f, torch.eye(4).expand(5, 4, 4).contiguous())
assert "torch.ops.mhc_inductor" not in codes[0].split("def call(")[1]
print("ok")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "ok", done.stderr[-2000:]


def test_enable_and_disable_are_idempotent():
    for _ in range(2):
        mhc_inductor.enable()
        assert backend.enabled() is not None
    wrapped = backend.compat.backend.compile_fx_module().compile_fx
    mhc_inductor.enable()
    assert backend.compat.backend.compile_fx_module().compile_fx is wrapped
    check_training(torch.compile(layer), leaves())
    for _ in range(2):
        mhc_inductor.disable()
        assert backend.enabled() is None


def test_options_reach_inductor_and_unknown_ones_are_named():
    seen = []

    class Pass(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph):
            seen.append(len(graph.nodes))

        def uuid(self):
            return "theirs"

    options = {"post_grad_custom_pre_pass": Pass(), "max_autotune": False}
    check_training(torch.compile(layer, backend="mhc_inductor", options=options), leaves())
    assert len(seen) == 2, "the user's own pass runs in the forward and in the backward graph"
    with pytest.raises(Exception, match="no_such_option"):
        torch.compile(layer, backend="mhc_inductor", options={"no_such_option": 1})(*leaves())


def test_chained_pass_uuid():
    class Bare:
        def __call__(self, graph): ...

    ours = passes.make_pass(None, passes.post_grad).uuid()
    assert ours.startswith("mhc_inductor-")
    assert passes.make_pass(Bare(), passes.post_grad).uuid() is None, "a pass without a uuid forbids caching"
    assert (
        passes.make_pass([], passes.post_grad).uuid() == ours
        and passes.make_pass([Bare(), Bare()], passes.post_grad).uuid() is None
    )


def test_several_passes_of_the_users_run_before_ours():
    seen = []
    chained = passes.make_pass([lambda graph: seen.append(1), lambda graph: seen.append(2)], passes.post_grad)
    chained(torch.fx.Graph())
    assert seen == [1, 2]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes(mode):
    check_training(torch.compile(layer, backend="mhc_inductor", mode=mode, fullgraph=True), leaves())


def test_backward_on_another_thread():
    args, same = leaves(), leaves()
    out = torch.compile(layer, backend="mhc_inductor")(*args)
    errors = []

    def work():
        try:
            out.backward(torch.ones_like(out))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    want = layer(*same)
    want.backward(torch.ones_like(want))
    assert all(h.relative(a.grad, b.grad) < 5e-6 for a, b in zip(args, same, strict=True))


def test_graphs_without_the_ops_are_left_alone():
    step = torch.compile(lambda x: torch.sin(x) * 2, backend="mhc_inductor", fullgraph=True)
    x = torch.randn(5)
    assert torch.allclose(step(x), torch.sin(x) * 2)


def test_one_compile_serves_every_token_count():
    counter = torch._dynamo.testing.CompileCounterWithBackend("mhc_inductor")
    step = torch.compile(layer, backend=counter, dynamic=True, fullgraph=True)
    full = leaves(8192, 16)
    with torch.no_grad():
        want = layer(*full)
        step(full[0][:2], *full[1:])
        # Dynamo traces twice at first, to learn that the float arguments are constants.
        first = counter.frame_count
        for tokens in (3, 17, 600, 8192):
            assert h.relative(step(full[0][:tokens], *full[1:]), want[:tokens]) < 2e-6
        assert counter.frame_count == first
        step(full[0][:1], *full[1:])
        assert counter.frame_count <= 2 * first


def test_a_change_of_matmul_precision_recompiles():
    counter = torch._dynamo.testing.CompileCounterWithBackend("mhc_inductor")
    step = torch.compile(layer, backend=counter)
    args = leaves()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        step(*args)
        once = counter.frame_count
        torch.set_float32_matmul_precision("high")
        step(*args)
        assert counter.frame_count > once
    finally:
        torch.set_float32_matmul_precision(before)


LATE = """
import sys
sys.path.insert(0, {root!r})
import torch
torch.compile(lambda x: torch.sin(x) * 2)(torch.randn(8))  # Inductor copies its table of decompositions

import mhc_inductor
from torch._inductor.utils import run_and_get_code

x, f, h, r = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 16), torch.rand(2, 3, 4), torch.rand(2, 3, 4, 4)
post = torch.compile(lambda *a: mhc_inductor.mhc_post(*a, transpose_res=True), backend="mhc_inductor")
_, codes = run_and_get_code(post, x, f, h, r)
assert codes and not any("torch.ops.mhc_inductor" in code for code in codes), codes
"""


def test_cpu_formulas_are_fused_after_an_earlier_compile(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(LATE.format(root=str(pathlib.Path(__file__).parent.parent)))
    # Generates the code anew; g++ may reuse objects it built from the same code.
    env = {**os.environ, "TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
