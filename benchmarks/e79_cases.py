# SPDX-License-Identifier: Apache-2.0
"""Data and inputs of the E79 rows, the Python loop they are compared with, and the op behind the same signature.

Bars, goals and times of others are microseconds per time step. Source: the project's survey on one NVIDIA H200 (torch
2.11, triton 3.6), B = 32, T = 512, L2 flushed, medians. The authors' CUDA gradients are wrong compared with fp64, and
their fp32 kernel does not run at n = 128. Absolute times count only on such a GPU; on another device compare ratios
within one run. The loop is written independently of the package's reference; in fp64 it gives the values that outputs
are checked against.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import mhc_inductor

from . import accuracy
from .running import Target

BATCH, STEPS = 32, 512
SIZES = (32, 64, 96, 128)
BATCHES, BATCH_SIZES = (1, 32, 132, 264), (64, 128)
AUTHORS, EAGER, COMPILE = "the authors' CUDA", "Python loop", "torch.compile of the loop"
TARGETS: dict[tuple[str, int], Target] = {
    ("fwd", 32): Target(0.9, 0.50, {AUTHORS: 4.2, EAGER: 323}),
    ("fb", 32): Target(4.5, 2.2, {AUTHORS: 24.1, EAGER: 1639}),
    ("fwd", 64): Target(1.4, 0.80, {AUTHORS: 10.1, EAGER: 324, COMPILE: 120}),
    ("fb", 64): Target(7, 4, {AUTHORS: 49.2, EAGER: 1728}),
    ("fwd", 96): Target(4, 2.1, {AUTHORS: 17.7}),
    ("fb", 96): Target(20, 11, {AUTHORS: 203}),
    ("fwd", 128): Target(4, 2.0, {AUTHORS: 56.9, EAGER: 329}),
    ("fb", 128): Target(20, 11, {AUTHORS: 376, EAGER: 1750}),
}
"""``fwd``: the scan without gradients; ``fb``: the scan and the gradients of its output for every input."""
PEAK_BAR_MB = 200.0
"""Peak of training above inputs and outputs at T = 512, B = 32, n = 64."""
MEMORY_SHAPE = (64, 32, 512)  # n, B, T
FLAT_UP_TO = 132
"""Multiprocessors of an H200. With at most one sequence on each, the time should not depend on B."""
RELATIVE_BAR = 2e-5  # ||a - b|| / ||b|| against fp64; twice the fp32 loop's own error also passes
ROUNDING_MARGIN = 1.05  # allowed factor over the error norm of a correctly rounded result
CPU_SHAPE = (64, 8, 256)  # n, B, T
CPU_THREADS = 2
CPU_SPEEDUP_BAR = 3.0
"""Forward speedup over the eager loop at ``CPU_SHAPE`` on two threads."""
ROLLUP_SHAPE = (64, 2)  # n, B
ROLLUP_STEPS = (64, 512)
FURTHER: tuple[dict[str, Any], ...] = (
    {"dtype": torch.bfloat16},
    {"bias": "input"},
    {"dtype": torch.bfloat16, "bias": "input"},
)
"""The dtypes and bias modes that have no bars."""


def stated_mb(n: int, batch: int, steps: int, segment: int, input_bias: bool = False) -> float:
    """Returns training memory beyond inputs and outputs by the formula of kernels/e79/plan.py, in MB (10^6 bytes)."""
    padded = max(16, 1 << (n - 1).bit_length())
    checkpoints = 8 * batch * n * n * -(-steps // segment)
    gates = 28 * steps * batch * n
    scratch = 8 * batch * padded * padded * segment
    parts = 4 * steps * batch * (10 if input_bias else 7) * n
    return (checkpoints + gates + scratch + parts) / 1e6


# ---- cases

EPS = 1e-6
NAMES = ("kvqm", "b_s", "b_m", "S0", "M0")
OUTPUTS = ("out", "S", "M")
BIASES = ("none", "fixed", "input")
Named = dict[str, Tensor]
Scan = Callable[..., Any]
SCAN: Scan = mhc_inductor.e79_scan
"""The public function; on a GPU its op launches the kernels."""


@dataclasses.dataclass
class Case:
    """The tensors of one case: the inputs of the scan, and the loss gradients ``ups`` of outputs that have one."""

    inputs: dict[str, Tensor | None]
    ups: Named
    bias: str

    @property
    def kvqm(self) -> Tensor:
        return self.inputs["kvqm"]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Returns n, B and T."""
        steps, batch, width = self.kvqm.shape
        return width // 4, batch, steps

    def arguments(self) -> list[Tensor | None]:
        return [self.inputs[k] for k in NAMES]

    def map(self, fn: Callable[[str, Tensor], Tensor]) -> Case:
        inputs = {k: None if t is None else fn(k, t) for k, t in self.inputs.items()}
        return Case(inputs, {k: fn(f"d{k}", t) for k, t in self.ups.items()}, self.bias)

    def leaves(self, dtype: torch.dtype | None = None) -> Case:
        """Returns a copy of the case in fresh tensors, with the inputs as autograd leaves."""
        made = self.map(lambda _, t: t.detach().to(dtype or t.dtype, copy=True))
        for t in made.inputs.values():
            if t is not None:
                t.requires_grad_()
        return made

    def sequences(self, pick: list[int]) -> Case:
        """Returns the case reduced to the sequences ``pick`` of the batch."""
        return self.map(lambda name, t: picked(name, t, pick))

    def first(self, steps: int) -> Case:
        """Returns the case reduced to its first steps."""
        long = ("kvqm", "dout", *(("b_s", "b_m") if self.bias == "input" else ()))
        return self.map(lambda k, t: t[:steps].contiguous() if k in long else t)


def picked(name: str, t: Tensor, pick: list[int]) -> Tensor:
    """Returns the sequences ``pick`` of a tensor (dimension 0 of states, else 1); unchanged if it has no batch."""
    if t.dim() < 3:
        return t
    return t[pick].contiguous() if name.removeprefix("d") in ("S", "M", "S0", "M0") else t[:, pick].contiguous()


def make_case(
    n: int,
    batch: int,
    steps: int,
    device: torch.device,
    *,
    bias: str = "fixed",
    dtype: torch.dtype = torch.float32,
    states: bool = False,
    ups: tuple[str, ...] = ("out",),
) -> Case:
    """Returns a random case: kvqm standard normal, biases normal around 1, states 0.3 normal or absent (zero)."""

    def normal(*shape: int, to: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=device).to(to)

    shape: tuple[int, ...] = (n,) if bias == "fixed" else (steps, batch, n)
    # A fixed bias is an fp32 parameter; an input-dependent one is a product in the inputs' dtype.
    kind = torch.float32 if bias == "fixed" else dtype
    biases = [None if bias == "none" else (1.0 + 0.5 * normal(*shape)).to(kind) for _ in range(2)]
    square = (batch, n, n)
    start = [0.3 * normal(*square) if states else None for _ in range(2)]
    inputs = dict(zip(NAMES, (normal(steps, batch, 4 * n, to=dtype), *biases, *start), strict=True))
    every = {"out": normal(steps, batch, n, to=dtype), "S": normal(*square), "M": normal(*square)}
    return Case(inputs, {k: every[k] for k in ups}, bias)


# ---- the formula


def cell(S: Tensor, M: Tensor, kvqm: Tensor, b_s: Tensor | float, b_m: Tensor | float) -> tuple[Tensor, ...]:
    """Returns (out, S, M) after one time step."""
    k, v, q, m = kvqm.chunk(4, -1)
    k = k / (k.norm(dim=-1, keepdim=True) + EPS)
    m = m / (m.norm(dim=-1, keepdim=True) + EPS)
    row = torch.sigmoid(torch.einsum("bij,bj->bi", M, k) + b_s)
    column = torch.sigmoid(torch.einsum("bij,bi->bj", M, k) + b_s)
    delta = v - torch.einsum("bij,bj->bi", S, k)
    S = row.unsqueeze(-1) * S * column.unsqueeze(1) + delta.unsqueeze(-1) * k.unsqueeze(1)
    row = torch.sigmoid(torch.einsum("bij,bj->bi", S, m) + b_m)
    column = torch.sigmoid(torch.einsum("bij,bi->bj", S, m) + b_m)
    rest = delta - torch.einsum("bij,bj->bi", M, m)
    M = row.unsqueeze(-1) * M * column.unsqueeze(1) + rest.unsqueeze(-1) * m.unsqueeze(1)
    y = torch.einsum("bij,bj->bi", S, q)
    return y * torch.nn.functional.silu(y), S, M


def loop(
    kvqm: Tensor,
    b_s: Tensor | None = None,
    b_m: Tensor | None = None,
    S0: Tensor | None = None,
    M0: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Returns the scan by a plain Python loop over time, in fp32, or in fp64 if kvqm is fp64."""
    steps, batch, width = kvqm.shape
    n, wide = width // 4, torch.promote_types(kvqm.dtype, torch.float32)
    S, M = (kvqm.new_zeros(batch, n, n, dtype=wide) if s is None else s for s in (S0, M0))

    def at(bias: Tensor | None, t: int) -> Tensor | float:
        return 0.0 if bias is None else bias.to(wide) if bias.dim() == 1 else bias[t].to(wide)

    outs = []
    for t in range(steps):
        out, S, M = cell(S, M, kvqm[t].to(wide), at(b_s, t), at(b_m, t))
        outs.append(out)
    return torch.stack(outs).to(kvqm.dtype), S, M


# ---- calls


def forward(scan: Scan, case: Case) -> Named:
    """Returns out, S and M, computed without gradients."""
    with torch.no_grad():
        return dict(zip(OUTPUTS, scan(*case.arguments()), strict=True))


def both(scan: Scan, case: Case) -> Named:
    """Returns out, S, M and the gradient of every input of ``case``, whose inputs are leaves."""
    outs = dict(zip(OUTPUTS, scan(*case.arguments()), strict=True))
    wanted = {k: t for k, t in case.inputs.items() if t is not None}
    grads = torch.autograd.grad([outs[k] for k in case.ups], list(wanted.values()), list(case.ups.values()))
    named = {k: t.detach() for k, t in outs.items()}
    return named | {f"d{k}": g for k, g in zip(wanted, grads, strict=True)}


def call(scan: Scan, case: Case, what: str) -> Callable[[], Named]:
    """Returns a call of the scan, or of it and its gradients."""
    if what == "fwd":
        return lambda: forward(scan, case)
    leaves = case.leaves()
    return lambda: both(scan, leaves)


def chain(scan: Scan, case: Case, length: int) -> Callable[[], Any]:
    """Returns a call of ``length`` scans that pass on their states."""
    kvqm, b_s, b_m, S0, M0 = case.arguments()

    def run() -> Any:
        S, M, out = S0, M0, None
        with torch.no_grad():
            for _ in range(length):
                out, S, M = scan(kvqm, b_s, b_m, S, M)
        return out, S, M

    return run


def exact(case: Case, gradients: bool, dtype: torch.dtype = torch.float64) -> Named:
    """Returns the loop's outputs in ``dtype``, with the gradients if ``gradients``."""
    return call(loop, case.leaves(dtype), "fb" if gradients else "fwd")()


def compare(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], loops: Mapping[str, Tensor] | None
) -> dict[str, Any]:
    """Returns for every tensor its relative error, the fp32 loop's error, the bar, and whether it is met.

    The bar is 2e-5 or twice the fp32 loop's own error, whichever is larger, plus one rounding for bf16 and fp16.
    """

    def bar(name: str, value: Tensor, exact: Tensor, of: dict[str, float]) -> float:
        return max(RELATIVE_BAR, 2 * of.get("loop", 0.0)) + ROUNDING_MARGIN * accuracy.rounding(value, exact)

    return accuracy.errors(got, want, bar, **({} if loops is None else {"loop": loops}))
