# SPDX-License-Identifier: Apache-2.0
"""Attention over lists of keys by packages that pip installs: TileLang's example and attn-gym's ``gather_attn``.

Both compile at their first call, which may take minutes. A process of its own makes that call under a limit of time, so
that a kernel that does not come to an end costs a row and not the run: ``python -m benchmarks.lists_others NAME CASE WHAT``.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from types import ModuleType

import torch
from torch import Tensor

from . import lists_cases as cases
from . import lists_targets as targets
from .lists_cases import Attend, Case

EXAMPLE = "MHC_INDUCTOR_TILELANG_EXAMPLE"
"""The environment variable with the path of TileLang's ``examples/deepseek_v32/sparse_mla_fwd_pipelined.py``."""
FIRST_CALL_S = 150.0
_failed: dict[tuple[str, str], str] = {}
"""Why the first call of a package at a case did not end, so that its gradients are not waited for, too."""


def missing(name: str) -> str | None:
    """Returns why a package's row cannot be measured here, or None."""
    package = {targets.TILELANG: "tilelang", targets.ATTN_GYM: "attn_gym"}[name]
    if importlib.util.find_spec(package) is None:
        return f"not installed: pip install {package}"
    if name == targets.TILELANG and not os.path.isfile(os.environ.get(EXAMPLE, "")):
        return f"{EXAMPLE} does not name a file: the wheel has no examples"
    return None


def first_call(name: str, case: Case, what: str) -> None:
    """Makes the first call in a process of its own, which leaves compiled kernels in their packages' caches.

    Raises:
        RuntimeError: If it failed, or did not end within ``FIRST_CALL_S`` seconds.
    """
    at = (name, case.shape.name)
    if at in _failed:
        raise RuntimeError(_failed[at])
    command = [sys.executable, "-m", "benchmarks.lists_others", name, case.shape.name, what]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=FIRST_CALL_S)
    except subprocess.TimeoutExpired:
        _failed[at] = f"did not finish its first call in {FIRST_CALL_S:.0f} s"
    except subprocess.CalledProcessError as e:
        last = (e.stderr.strip().splitlines() or ["no message"])[-1]
        _failed[at] = f"its first call failed: {last[:200]}"
    if at in _failed:
        raise RuntimeError(_failed[at])


def attend(name: str, case: Case) -> Attend:
    """Returns the call of a package on q ``[B, S, h, Dk]``, k and v ``[B, T, D]``, sink ``[h]``."""
    return _tilelang(case) if name == targets.TILELANG else _attn_gym(case)


@functools.cache
def _example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tilelang_example", os.environ[EXAMPLE])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _tilelang(case: Case) -> Attend:
    """Returns the example's kernel, whose causal mask takes an index beyond the query's position for none."""
    s = case.shape
    first = torch.tensor([s.keys - s.queries], dtype=torch.int32, device=case.q.device)
    indices = torch.where(case.indices < 0, s.length, case.indices).int()
    tail = s.dim - s.v_dim
    kernel = _example().sparse_mla_fwd(
        s.batch, s.queries, s.length, s.heads, s.v_dim, tail, s.entries, 1, 1, None, True, False
    )

    def run(q: Tensor, k: Tensor, v: Tensor | None, sink: Tensor | None) -> Tensor:
        o: Tensor = kernel(q, k[:, :, None], indices, first)[0]
        return o

    return run


def _attn_gym(case: Case) -> Attend:
    """Returns ``gather_attn``: a window of the queries' own keys, and chosen ones of the pooled keys that follow them."""
    from attn_gym.sparse import gather_attn

    s, impl = case.shape, "fused" if case.q.is_cuda else "reference"
    chosen = case.indices[:, :, 0] - s.keys
    # The window's entries, and -1, become -1, which gather_attn ignores; the pooled ones are at most ``listed``.
    chosen = torch.where(chosen < 0, -1, chosen).sort(-1, descending=True).values[..., : s.listed].contiguous()

    def run(q: Tensor, k: Tensor, v: Tensor | None, sink: Tensor | None) -> Tensor:
        own, pooled = k[:, None, : s.keys], k[:, None, s.keys :]
        o = gather_attn(
            q.transpose(1, 2), own, pooled, chosen, sink, sliding_window_size=s.window, impl=impl, scale=s.dim**-0.5
        )
        return o.transpose(1, 2)

    return run


def main(name: str, case_name: str, what: str) -> None:
    """Makes one call of a package's attention, or of it and its gradients."""
    case = cases.make_case(targets.SHAPES[case_name], torch.device("cuda"))
    cases.call(case, what, attend(name, case))()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
