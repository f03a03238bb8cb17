# SPDX-License-Identifier: Apache-2.0
"""Inputs, fp64 oracles and calls for the tests of single-pass mHC, in the manner of ``helpers_mhc``.

One set of inputs serves all three ops: x, f_out, h_post, h_res, h_pre, phi, alpha, bias, gamma. Gradients come from
autograd.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.oracles import mhc as h

UP = ("x_out", "h_in", "next_pre", "next_post", "next_res")
COEFFICIENTS = ("h_pre", "h_post", "h_res", "h_mix", "inv_rms")
SITE = ("x", "f_out", "h_post", "h_res", "h_pre")
PARAMS = ("phi", "alpha", "bias", "gamma")
Inputs = Mapping[str, Tensor | None]


def make_inputs(
    lead: tuple[int, ...], n: int, width: int, dtype: torch.dtype = torch.float64, **made: Any
) -> dict[str, Tensor | None]:
    """Returns the inputs of mhc_single_pass in the op's order, without transpose_res and options."""
    g = torch.Generator().manual_seed(made.get("seed", 0) + 200)
    fused = h.make_fused_inputs(lead, n, width, dtype, **made)
    weights = torch.randn(*lead, n, generator=g, dtype=torch.float64)
    weights = weights.to(torch.float64 if dtype is torch.float64 else torch.float32).to(made.get("device", "cpu"))
    return {k: weights if k == "h_pre" else fused[k] for k in (*SITE, *PARAMS)}


oracle, run = h.oracle_fused, h.run_fused


def oracle_coefficients(
    inputs: Inputs, up: Mapping[str, Tensor] | None = None, options: Mapping[str, Any] | None = None
) -> dict[str, Tensor]:
    """Computes mhc_coefficients of ``helpers_mhc.make_inputs`` in fp64, and with ``up`` the gradients."""
    t = h.leaves(inputs)
    after, _ = h._pre(t, options)
    result = {k: after[k] for k in COEFFICIENTS}
    if up:
        keys = [k for k in up if result[k].requires_grad]
        result |= h._grads([result[k] for k in keys], [up[k] for k in keys], t)
    return {k: a.detach() for k, a in result.items()}


def run_coefficients(
    inputs: Inputs, up: Mapping[str, Tensor] | None = None, options: Mapping[str, Any] | None = None
) -> dict[str, Tensor]:
    """Runs mhc_coefficients, and with ``up`` its backward; names the results as :func:`oracle_coefficients` does."""
    return h.run_op("mhc_coefficients", inputs, up, {**h.PRE_OPTIONS, **(options or {})})


def alone(tensors: Inputs, lead: tuple[int, ...]) -> Iterator[dict[str, Tensor | None]]:
    """Yields, for each token, the tensors of that token with one leading dimension of 1; parameters stay whole."""
    for i in range(math.prod(lead)):
        whole = {k for k, t in tensors.items() if k in PARAMS or t is None}
        yield {k: t if k in whole or t is None else t.flatten(0, len(lead) - 1)[i : i + 1] for k, t in tensors.items()}


def dalpha_terms(of_tokens: Iterable[Mapping[str, Tensor]], n: int) -> Tensor:
    """Returns the sums of the sizes of dalpha's terms, from the oracle's results for each token alone."""
    of_columns = sum((r["dbias"] * r["h_mix"][0] * r["inv_rms"][0]).abs() for r in of_tokens)
    assert isinstance(of_columns, Tensor)
    return torch.stack([part.sum() for part in (of_columns[:n], of_columns[n : 2 * n], of_columns[2 * n :])])


def compare_dalpha(got: Tensor, want: Tensor, terms: Tensor, tolerance: float, roundings: float) -> None:
    """Asserts that dalpha is right relative to the sizes of what it sums, since the sum itself may cancel.

    A dalpha of low precision may be ``roundings`` roundings of itself apart as well.
    """
    error, size = float((got.cpu().double() - want).norm()), float(terms.norm())
    low = 0.0 if got.dtype is torch.float32 else roundings * h.rounding(got.dtype) * float(want.norm())
    assert error <= tolerance * size + low, f"dalpha: {error / size:.3g} of its terms, above {tolerance:.3g}"


def _collapse_inputs(*sizes: Any, **made: Any) -> dict[str, Tensor | None]:
    found = h.make_post_inputs(*sizes, **made)
    return {"x": found["x"], "h_pre": found["h_post"]}


def _oracle_collapse(inputs: Inputs, up: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Computes mhc_collapse and its gradients in fp64."""
    t = h.leaves(inputs)
    assert t["x"] is not None and t["h_pre"] is not None
    h_in = torch.einsum("...i,...id->...d", t["h_pre"], t["x"])
    return {"h_in": h_in.detach(), **h._grads([h_in], [up["h_in"]], t)}


LAYER_UP = ("h_in", "h_post", "h_res")
FUSED_UP = ("x_out", "h_in", "next_post", "next_res")
_LAYER = lambda i, t, u, o: h.run_pre(i, u, o), lambda i, t, x, u, o: h.oracle_pre(i, u, o)
FORMULAS: Mapping[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], tuple[str, ...]]] = {
    "pre": (h.make_inputs, *_LAYER, LAYER_UP),
    "head": (functools.partial(h.make_inputs, head=True), *_LAYER, ("h_in",)),
    "post": (
        h.make_post_inputs,
        lambda i, t, u, o: h.run_post(i, t, u and u["x_out"]),
        lambda i, t, x, u, o: h.oracle_post(i, t, u["x_out"]),
        ("x_out",),
    ),
    "post_pre": (h.make_fused_inputs, h.run_fused, h.oracle_fused, FUSED_UP),
    "post_head": (functools.partial(h.make_fused_inputs, head=True), h.run_fused, h.oracle_fused, FUSED_UP[:2]),
    "single_pass": (make_inputs, run, oracle, UP),
    "coefficients": (
        h.make_inputs,
        lambda i, t, u, o: run_coefficients(i, u, o),
        lambda i, t, x, u, o: oracle_coefficients(i, u, o),
        COEFFICIENTS[:3],
    ),
    "collapse": (
        _collapse_inputs,
        lambda i, t, u, o: h.run_op("mhc_collapse", i, u),
        lambda i, t, x, u, o: _oracle_collapse(i, u),
        ("h_in",),
    ),
}
"""Of each op of mHC what makes its inputs, runs it and is its oracle, and its outputs with a gradient."""
