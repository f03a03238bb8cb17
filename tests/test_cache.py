"""An upgraded package never replays what an older one compiled: two processes, one cache folder, two versions."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

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
        [sys.executable, "-c", STEP.format(backend=backend)],
        capture_output=True,
        text=True,
        env=env,
        cwd=package,
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

    # The "upgrade": forward and backward formulas give twice and three times what they gave.
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
