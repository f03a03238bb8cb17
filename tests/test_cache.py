# SPDX-License-Identifier: Apache-2.0
"""Compile caches: an upgraded package never reuses code compiled by an older version, and cached code stays dynamic."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import mhc_inductor
from mhc_inductor import fingerprint
from tests.formulas import reference_models_mhc
from tests.oracles import e79 as helpers_e79
from tests.oracles import selection as helpers_selection
from tests.oracles.mhc import relative

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEP = """
import json, threading, torch
import mhc_inductor
from torch._dynamo.utils import counters

def f(x, w, h_post, h_res):
    return mhc_inductor.mhc_post(x, torch.tanh(x.mean(-2) @ w), h_post, h_res, transpose_res=False)

torch.manual_seed(0)
args = [torch.randn(6, 4, 16), torch.randn(16, 16), torch.rand(6, 4), torch.rand(6, 4, 4)]
for a in args:
    a.requires_grad_()
out = torch.compile(f, backend={backend!r})(*args)
thread = threading.Thread(target=lambda: out.sum().backward())
thread.start()
thread.join()
hits = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
print(json.dumps({{"out": out.sum().item(), "grad": args[2].grad.sum().item(), "hits": hits}}))
"""


def _run(package: pathlib.Path, cache: pathlib.Path, backend: str) -> dict[str, float]:
    env = {**os.environ, "PYTHONPATH": str(package), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", STEP.format(backend=backend)], capture_output=True, text=True, env=env, cwd=package
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["mhc_inductor", "inductor"])
def test_an_upgrade_is_recompiled_and_the_same_version_is_not(tmp_path, backend):
    package, cache = tmp_path / "package", tmp_path / "cache"
    for folder in ("mhc_inductor", "kernels", "lowerings"):
        shutil.copytree(ROOT / folder, package / folder, ignore=shutil.ignore_patterns("__pycache__"))
    first = _run(package, cache, backend)
    again = _run(package, cache, backend)
    assert again["hits"] > 0 and first["hits"] == 0
    assert (again["out"], again["grad"]) == (first["out"], first["grad"])

    # The "upgrade" multiplies the forward formula by two and the backward formula by three.
    ops = package / "mhc_inductor" / "reference" / "mhc.py"
    with ops.open("a") as file:
        file.write(
            "\n_post, _post_backward = mhc_post, mhc_post_backward\n"
            "def mhc_post(*args):\n    return _post(*args) * 2\n"
            "def mhc_post_backward(*args):\n    return tuple(g * 3 for g in _post_backward(*args))\n"
        )
    upgraded = _run(package, cache, backend)
    assert upgraded["out"] == pytest.approx(2 * first["out"], rel=1e-5)
    assert upgraded["grad"] == pytest.approx(3 * first["grad"], rel=1e-5)


def test_the_key_of_cached_code_is_of_every_source(tmp_path, monkeypatch):
    folders = [("mhc_inductor", tmp_path / "package"), ("kernels", tmp_path / "kernels")]
    monkeypatch.setattr(fingerprint, "_folders", lambda: folders)
    digest = fingerprint.sources.__wrapped__
    code = tmp_path / "package" / "ops" / "mhc.py"
    seen = set()
    for _, folder in folders:
        (folder / "ops").mkdir(parents=True)
        (folder / "ops" / "mhc.py").write_text("a = 1")
    seen.add(digest())
    code.write_text("a = 2")
    seen.add(digest())
    code.rename(code.with_name("e79.py"))
    seen.add(digest())
    assert len(seen) == 3 and digest() in seen


def _mhc(tokens: int, batch: int) -> tuple[Callable[..., object], Sequence[Tensor | None]]:
    # Parameters are detached: Inductor recompiles the C++ of their gradients, which are sums over tokens, for long
    # sums.
    p = {name: t.detach() for name, t in reference_models_mhc.parameters().items()}
    x = torch.randn(batch, tokens, reference_models_mhc.N, reference_models_mhc.WIDTH)
    return lambda x: reference_models_mhc.liger(reference_models_mhc.liger(x, p), p), (x,)


def _e79(steps: int, batch: int) -> tuple[Callable[..., object], Sequence[Tensor | None]]:
    inputs = helpers_e79.make_inputs(steps, batch, 4, torch.float32, bias="input")
    return lambda *given: mhc_inductor.e79_scan(*given)[0], tuple(inputs.values())


def _selection(queries: int, batch: int) -> tuple[Callable[..., object], Sequence[Tensor | None]]:
    inputs = helpers_selection.make_inputs("odd", torch.float32, B=batch, S=queries, S_kv=queries + 3, r=6, G=2, h=4)
    return mhc_inductor.selection_attention, tuple(inputs[k] for k in ("q", "k", "v", "ranges"))


def _gradients(fn: Callable[..., object], given: Sequence[Tensor | None]) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() if t is not None and t.is_floating_point() else t for t in given]
    out = fn(*leaves)
    assert isinstance(out, Tensor)
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), wanted)]


# The E79 scan keeps a checkpoint at most every 32 steps: sizes are above and below. The first size occurs only once.
@pytest.mark.parametrize("make", [_mhc, _e79, _selection])
def test_a_warm_cache_serves_the_sizes_that_a_cold_one_does(make):
    with fresh_cache():
        for cold in (True, False):
            torch._dynamo.reset()
            counters.clear()
            fn = make(41, 7)[0]
            compiled = torch.compile(fn, backend="mhc_inductor", fullgraph=True, dynamic=True)
            for k, (length, batch) in enumerate(((41, 7), (33, 2), (300, 4), (5, 3), (32, 2), (31, 5))):
                given = make(length, batch)[1]
                with torch._dynamo.config.patch(error_on_recompile=k > 0):
                    got = _gradients(compiled, given)
                want = _gradients(fn, given)
                assert all(relative(g, w) < 2e-5 for g, w in zip(got, want, strict=True))
            hits = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
            assert (hits == 0) is cold
    torch._dynamo.reset()
