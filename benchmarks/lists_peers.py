# SPDX-License-Identifier: Apache-2.0
"""The peers of attention over lists: dense SDPA, torch.compile, the selection op over ranges, and other packages.

A kernel of a package that does not come to an end costs a row and not the run: a process of its own makes the first
call, under a limit of time: ``python -m benchmarks.lists_peers NAME CASE WHAT``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import mhc_inductor

from . import lists_cases as cases
from .attention import Call, sdpa
from .lists_cases import Attend, Case, call

Made = tuple[Call, str]
"""A call, and a note on how it is made."""
BACKENDS = {
    SDPBackend.MATH: "math",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
}
_FEW = 128


def masked(case: Case, what: str) -> Made:
    """Returns SDPA over all keys with the lists as a mask, made before timing, and the backend that PyTorch chose."""
    mask = cases.mask_of(case.indices, case.shape.length)
    # A decoding model takes its heads as further queries; else each head gets keys of its own, without a copy.
    fold = case.shape.decodes

    def attend(q: Tensor, k: Tensor, v: Tensor | None, sink: Tensor | None) -> Tensor:
        values = k[..., : case.shape.v_dim] if v is None else v
        q, seen = (q.transpose(1, 2), mask.expand(-1, q.shape[2], -1, -1)) if fold else (q, mask)
        o = sdpa(q[:, :, None], k[:, None], values[:, None], seen, None if sink is None else sink[None])[:, :, 0]
        return o.transpose(1, 2) if fold else o

    return call(case, what, attend), f"backend {masked_backend(case, what)}"


def masked_backend(case: Case, what: str) -> str:
    """Returns the name of the backend that SDPA takes for this case with a mask."""
    leaves = {n: t.requires_grad_(what == "fb") for n, t in case.leaves().items()}
    q, k = leaves["q"][:, :_FEW, 0].transpose(1, 2), leaves["k"]
    v = leaves["v"] if "v" in leaves else k[..., : case.shape.v_dim]
    k, v = (t.expand(-1, q.shape[1], -1, -1) for t in (k, v))
    mask = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    choice = torch._fused_sdp_choice(q, k, v, attn_mask=mask)
    return next((name for backend, name in BACKENDS.items() if int(backend) == choice), "unknown")


def unmasked(case: Case, what: str) -> Made:
    """Returns SDPA without a mask, causal where queries and keys are as many, with the first backend that takes it."""
    causal = case.shape.queries == case.shape.length
    if not case.q.is_cuda:
        return call(case, what, _sdpa(case, None, causal, grouped=True)), ""
    backend, grouped = _backend(case, what, causal)
    how = "grouped heads" if grouped else "keys expanded to all heads"
    return call(case, what, _sdpa(case, backend, causal, grouped)), f"backend {BACKENDS[backend]}, {how}"


def _sdpa(case: Case, backend: SDPBackend | None, causal: bool, grouped: bool) -> Attend:
    """Returns SDPA by one backend; ``grouped``: with one head of keys for all, else with keys expanded to all heads."""

    def attend(q: Tensor, k: Tensor, v: Tensor | None, sink: Tensor | None = None) -> Tensor:
        values = k[..., : case.shape.v_dim] if v is None else v
        heads = 1 if grouped else q.shape[2]
        keys, values = (t[:, None].expand(-1, heads, -1, -1) for t in (k, values))
        with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
            o = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=causal, enable_gqa=grouped)
        return o.transpose(1, 2)

    return attend


def _backend(case: Case, what: str, causal: bool) -> tuple[SDPBackend, bool]:
    """Returns the first of cuDNN, flash and efficient that runs a few queries, grouped or not; else math."""
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        for grouped in (True, False):
            tensors = (case.q[:, :_FEW, 0], case.k[:, 0, :_FEW], case.values[:, 0, :_FEW])
            leaves = [t.detach().requires_grad_(what == "fb") for t in tensors]
            try:
                o = _sdpa(case, backend, causal, grouped)(*leaves)
                if what == "fb":
                    torch.autograd.grad(o, leaves, torch.ones_like(o))
                return backend, grouped
            except RuntimeError:
                continue
    return SDPBackend.MATH, False


# ---- torch.compile


def compiled(fn: Attend, dynamic: bool) -> Attend:
    return torch.compile(fn, dynamic=dynamic)


@functools.cache
def _causal(compiler: Callable[..., Attend]) -> Attend:
    """Returns one compiled function for all lengths: nearly all of its time goes into library calls either way."""
    return compiler(plain_causal, dynamic=True)


def gathered(q: Tensor, k: Tensor, v: Tensor | None, sink: Tensor | None, indices: Tensor, v_dim: int) -> Tensor:
    """Computes the plain formula over gathered keys, as a model would write it; indices ``[B, S, n]``."""
    at = indices.clamp(min=0).long()
    batch = torch.arange(q.shape[0], device=q.device)[:, None, None]
    keys = k[batch, at]
    values = keys[..., :v_dim] if v is None else v[batch, at]
    s = (q @ keys.mT * q.shape[-1] ** -0.5).masked_fill(indices[:, :, None] < 0, float("-inf"))
    if sink is not None:
        s = torch.cat((s, sink.to(s.dtype)[None, None, :, None].expand(*s.shape[:3], 1)), -1)
    p = s.softmax(-1, dtype=torch.float32).to(q.dtype)[..., : indices.shape[-1]]
    return p @ values


def compiled_gather(case: Case, what: str) -> Made:
    """Returns torch.compile of the formula over gathered keys."""
    torch.compiler.reset()  # after some recompiles of one function, Dynamo would run it uncompiled
    run = compiled(gathered, dynamic=False)
    indices, v_dim = case.indices[:, :, 0], case.shape.v_dim
    return call(case, what, lambda q, k, v, sink: run(q, k, v, sink, indices, v_dim)), ""


def plain_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes causal attention of all heads over all keys, as eager models write it; S = T."""
    s = torch.einsum("bshd,btd->bhst", q, k) * q.shape[-1] ** -0.5
    at = torch.arange(k.shape[1], device=q.device)
    s = s.masked_fill(at > at[:, None], float("-inf"))
    return torch.einsum("bhst,btd->bshd", s.softmax(-1, dtype=torch.float32).to(q.dtype), v)


def compiled_causal(case: Case, what: str) -> Made:
    """Returns torch.compile of dense causal attention."""
    run = _causal(compiled)
    return call(case, what, lambda q, k, v, sink: run(q, k, k[..., : case.shape.v_dim] if v is None else v)), ""


# ---- the op over ranges


def ranges(case: Case, what: str) -> Made:
    """Returns the selection op over a range of one key for each entry; the ranges are made before timing."""
    chosen = torch.stack((case.indices, case.indices + 1), -1)

    def attend(q: Tensor, k: Tensor, v: Tensor | None, sink: Tensor | None) -> Tensor:
        values = (k[..., : case.shape.v_dim] if v is None else v)[:, None]
        logits = None if sink is None else sink[None]
        return mhc_inductor.selection_attention(q[:, :, None], k[:, None], values, chosen, sink=logits)[:, :, 0]

    return call(case, what, attend), ""


# ---- other packages: they compile at their first call, which may take minutes

EXAMPLE = "MHC_INDUCTOR_TILELANG_EXAMPLE"
"""The environment variable with the path of TileLang's ``examples/deepseek_v32/sparse_mla_fwd_pipelined.py``."""
FIRST_CALL_S = 150.0
_failed: dict[tuple[str, str], str] = {}
"""Why the first call of a package at a case did not end, so that its gradients are not waited for, too."""


def missing(name: str) -> str | None:
    """Returns why a package's row cannot be measured here, or None."""
    package = {cases.TILELANG: "tilelang", cases.ATTN_GYM: "attn_gym"}[name]
    if importlib.util.find_spec(package) is None:
        return f"not installed: pip install {package}"
    if name == cases.TILELANG and not os.path.isfile(os.environ.get(EXAMPLE, "")):
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
    command = [sys.executable, "-m", "benchmarks.lists_peers", name, case.shape.name, what]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=FIRST_CALL_S)
    except subprocess.TimeoutExpired:
        _failed[at] = f"did not finish its first call in {FIRST_CALL_S:.0f} s"
    except subprocess.CalledProcessError as e:
        last = (e.stderr.strip().splitlines() or ["no message"])[-1]
        _failed[at] = f"its first call failed: {last[:200]}"
    if at in _failed:
        raise RuntimeError(_failed[at])


@functools.cache
def _example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tilelang_example", os.environ[EXAMPLE])
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


def packaged(name: str, case: Case, what: str, first: bool = True) -> Made:
    """Returns the call of another package; on a GPU once its ``first`` call came to an end in a process of its own."""
    if first and case.q.is_cuda:
        first_call(name, case, what)
    return call(case, what, _tilelang(case) if name == cases.TILELANG else _attn_gym(case)), ""


def make(name: str, case: Case, what: str) -> Made:
    """Returns the call of the peer of this name."""
    makers = {cases.RANGES: ranges, cases.GATHER: compiled_gather, cases.DENSE_MASKED: masked}
    makers |= {cases.PLAIN: compiled_causal, cases.DENSE_ALL: unmasked, cases.DENSE_CAUSAL: unmasked}
    makers |= {other: functools.partial(packaged, other) for other in cases.PACKAGES}
    return makers[name](case, what)


def main(name: str, case_name: str, what: str) -> None:
    """Makes one call of a package's attention, or of it and its gradients."""
    case = cases.make_case(cases.SHAPES[case_name], torch.device("cuda"))
    packaged(name, case, what, first=False)[0]()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
