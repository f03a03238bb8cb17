# SPDX-License-Identifier: Apache-2.0
"""Inputs, an fp64 oracle and comparisons for the tests of E79, on any device.

The oracle is a loop written independently of ``mhc_inductor.reference`` (einsum, one product after the other) and gets
its gradients from autograd. Kernel tests reuse it: ``check(run_scan(inputs, up), inputs, up)``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from tests.oracles.mhc import OPS, held, relative, rounding, run_op  # noqa: F401  (OPS, relative: for other tests)

NAMES = ("kvqm", "b_s", "b_m", "S0", "M0")
OUTPUTS = ("out", "S", "M")
BIASES = ("none", "fixed", "input")
FP32_GRADIENTS = 2e-5  # relative; twice the fp32 loop's own error is also allowed

# Mistakes that shipped in this operator before; each case fails if its mistake returns.
MISTAKES: dict[str, dict[str, object]] = {
    "last_step_of_two": {"T": 2, "bias": "fixed"},
    "last_step_of_seventeen": {"T": 17, "bias": "none"},
    "W_m_and_m_from_17_steps_on": {"T": 33, "bias": "input"},
    "input_bias_per_step_and_sequence": {"T": 5, "B": 4, "bias": "input"},
    "fixed_bias_summed_over_steps_and_sequences": {"T": 5, "B": 4, "bias": "fixed"},
    "biases_of_different_modes": {"T": 4, "bias": ("input", "fixed")},
    "one_bias_only": {"T": 4, "bias": ("none", "input")},
    "gates_of_the_step_before_the_segment_ends": {"T": 7, "segment": 8},
    "gates_of_a_full_segment": {"T": 8, "segment": 8},
    "gates_of_the_step_after_the_segment": {"T": 9, "segment": 8},
    "gradients_of_final_states_only": {"T": 3, "bias": "input", "up": ("S", "M")},
    "gradient_of_final_M_only": {"T": 3, "up": ("M",)},
    "initial_states_without_output_gradient": {"T": 1, "up": ("S",)},
    "strides_of_n_that_is_no_power_of_two": {"T": 3, "n": 6},
}


def make_inputs(
    T: int,
    B: int = 2,
    n: int = 5,
    dtype: torch.dtype = torch.float64,
    *,
    bias: str | tuple[str, str] = "fixed",
    state: bool = True,
    gates: float = 0.0,
    bias_dtype: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Tensor | None]:
    """Returns standard normal kvqm, biases normal around ``gates``, and states 0.3 normal or None.

    Large ``gates`` put the gates near 1 or 0.
    """
    g = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    modes = (bias, bias) if isinstance(bias, str) else bias
    shapes = {"none": None, "fixed": (n,), "input": (T, B, n)}

    def normal(shape: tuple[int, ...] | None, to: torch.dtype, mean: float = 0.0, scale: float = 1.0) -> Tensor | None:
        if shape is None:
            return None
        return (mean + scale * torch.randn(shape, generator=g, dtype=torch.float64)).to(to).to(device)

    square = (B, n, n) if state else None
    return {
        "kvqm": normal((T, B, 4 * n), dtype),
        "b_s": normal(shapes[modes[0]], bias_dtype or dtype, gates, 0.5),
        "b_m": normal(shapes[modes[1]], bias_dtype or dtype, gates, 0.5),
        "S0": normal(square, wide, scale=0.3),
        "M0": normal(square, wide, scale=0.3),
    }


def loop(inputs: Mapping[str, Tensor | None], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Computes out, S and M by the definition, one step after the other, in ``dtype``, for autograd."""
    kvqm = inputs["kvqm"]
    assert kvqm is not None
    steps, batch, width = kvqm.shape
    n = width // 4
    zero = torch.zeros(batch, n, n, dtype=dtype, device=kvqm.device)
    S, M = (zero if inputs[s] is None else inputs[s].to(dtype) for s in ("S0", "M0"))
    outs = []
    for t in range(steps):
        k, v, q, m = (kvqm[t, :, i * n : (i + 1) * n].to(dtype) for i in range(4))
        k = k / (torch.linalg.norm(k, dim=-1, keepdim=True) + 1e-6)
        m = m / (torch.linalg.norm(m, dim=-1, keepdim=True) + 1e-6)
        b_s, b_m = (_bias(inputs[b], t, dtype) for b in ("b_s", "b_m"))
        r = torch.sigmoid(torch.einsum("bij,bj->bi", M, k) + b_s)
        c = torch.sigmoid(torch.einsum("bij,bi->bj", M, k) + b_s)
        delta = v - torch.einsum("bij,bj->bi", S, k)
        S = torch.einsum("bi,bij,bj->bij", r, S, c) + torch.einsum("bi,bj->bij", delta, k)
        p = torch.sigmoid(torch.einsum("bij,bj->bi", S, m) + b_m)
        w = torch.sigmoid(torch.einsum("bij,bi->bj", S, m) + b_m)
        g = delta - torch.einsum("bij,bj->bi", M, m)
        M = torch.einsum("bi,bij,bj->bij", p, M, w) + torch.einsum("bi,bj->bij", g, m)
        y = torch.einsum("bij,bj->bi", S, q)
        outs.append(y * torch.nn.functional.silu(y))
    return {"out": torch.stack(outs), "S": S, "M": M}


def _bias(bias: Tensor | None, t: int, dtype: torch.dtype) -> Tensor | float:
    if bias is None:
        return 0.0
    return (bias if bias.dim() == 1 else bias[t]).to(dtype)


def oracle(
    inputs: Mapping[str, Tensor | None], up: Mapping[str, Tensor] | None = None, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Returns the loop's out, S and M in ``dtype`` on the inputs' device, and with ``up`` every input's gradient."""
    leaf = {k: None if t is None else t.detach().to(dtype).requires_grad_() for k, t in inputs.items()}
    result = loop(leaf, dtype)
    named = {k: t.detach() for k, t in result.items()}
    if up:
        wanted = {k: t for k, t in leaf.items() if t is not None}
        grads = torch.autograd.grad(
            [result[k] for k in up],
            list(wanted.values()),
            [u.detach().to(dtype) for u in up.values()],
            allow_unused=True,
        )
        pairs = zip(wanted.items(), grads, strict=True)
        named |= {f"d{k}": torch.zeros_like(t) if g is None else g for (k, t), g in pairs}
    return named


def upstream(inputs: Mapping[str, Tensor | None], names: tuple[str, ...] = OUTPUTS, seed: int = 1) -> dict[str, Tensor]:
    """Returns a standard normal gradient for each of the named outputs, in its dtype."""
    g = torch.Generator().manual_seed(seed)
    kvqm = inputs["kvqm"]
    assert kvqm is not None
    steps, batch, width = kvqm.shape
    n, wide = width // 4, torch.float64 if kvqm.dtype is torch.float64 else torch.float32
    shapes = {"out": (steps, batch, n), "S": (batch, n, n), "M": (batch, n, n)}
    made = {k: torch.randn(shapes[k], generator=g, dtype=torch.float64) for k in OUTPUTS}
    return {k: made[k].to(kvqm.dtype if k == "out" else wide).to(kvqm.device) for k in names}


def run_scan(
    inputs: Mapping[str, Tensor | None], up: Mapping[str, Tensor] | None = None, segment: int = 8
) -> dict[str, Tensor]:
    """Runs e79_scan, and with ``up`` e79_scan_backward, and names the results as :func:`oracle` does."""
    named = run_op("e79_scan", inputs, up, {"segment": segment}, OPS)  # OPS of this module, which tests replace
    return {k: t for k, t in named.items() if k not in ("checkpoints", "gates")}


def _rounded(got: Tensor, want: Tensor) -> float:
    """Returns the relative error that rounding to got's dtype may leave, where results may be subnormal."""
    limits, size = torch.finfo(got.dtype), float(want.norm())
    subnormal = limits.smallest_normal * limits.eps / 2 * want.numel() ** 0.5
    return 1.01 * (rounding(got.dtype) + (subnormal / size if size else 0.0))


def check(
    got: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor | None],
    up: Mapping[str, Tensor] | None = None,
    tolerance: float = FP32_GRADIENTS,
) -> dict[str, float]:
    """Asserts that each result of :func:`run_scan` is close to fp64.

    The limit is ``tolerance`` or twice the fp32 loop's own error, plus one rounding where the result's dtype is low.
    """
    want = oracle(inputs, up)

    def limit(key: str) -> tuple[float, float]:
        return tolerance, _rounded(got[key], want[key]) if got[key].dtype.itemsize == 2 else 0.0

    return held(got, want, functools.cache(lambda: oracle(inputs, up, torch.float32)), limit)
