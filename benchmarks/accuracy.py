# SPDX-License-Identifier: Apache-2.0
"""Errors against fp64, next to those of the plain PyTorch formula, and checks of bitwise determinism."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import ours, running, targets
from .peers import HC_EPS, POST_EPS, POST_MULT, Inputs, make_inputs, plain_coefficients, plain_post

CHUNK = 1024
RECORD_DRAWS = 9
_SUMMED = ("dphi", "dalpha", "dbias", "dgamma")
Named = dict[str, torch.Tensor]


def _formula(i: Inputs) -> Named:
    """Returns the outputs and all gradients of the plain formula by autograd, in the dtypes of ``i``."""
    leaves = [t.requires_grad_() for t in i.leaves()]
    out = plain_coefficients(i.x, i.phi, i.alpha, i.bias, i.gamma, i.iters)
    if i.dx_out is not None:
        out["x_out"] = plain_post(i.x, i.f_out, out["h_post"], out["h_res"], i.transpose_res)
        losses = [(out["h_in"], i.dh_in), (out["x_out"], i.dx_out)]
    else:
        losses = [(out["h_in"], i.dh_in), (out["h_post"], i.dh_post), (out["h_res"], i.dh_res)]
    grads = torch.autograd.grad([a for a, _ in losses], leaves, [g for _, g in losses])
    names = ("dx", "dphi", "dalpha", "dbias", "df" if i.with_post else "dgamma")
    return {k: v.detach() for k, v in {**out, **dict(zip(names, grads, strict=True))}.items()}


def reference(i: Inputs) -> Named:
    """Returns all outputs and gradients in fp64, computed in chunks of tokens (leading dimension)."""
    total: dict[str, Any] = {}
    for start in range(0, i.x.shape[0], CHUNK):
        part = _formula(i.tokens(start, start + CHUNK).detached(torch.float64))
        for k, v in part.items():
            if k in _SUMMED:
                total[k] = total[k] + v if k in total else v
            else:
                total.setdefault(k, []).append(v)
    return {k: torch.cat(v) if isinstance(v, list) else v for k, v in total.items()}


def plain(i: Inputs) -> Named:
    """Returns the plain formula's outputs and gradients in the case's dtypes; ops are compared with their error."""
    return _formula(i.detached())


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns ||a - b|| / ||b|| in fp64; NaN if ``a`` holds a NaN, so that no bar is met."""
    b = b.double()
    return float((a.double() - b).norm() / b.norm())


def _bar(name: str, value: torch.Tensor, exact: torch.Tensor, roundings: int) -> float:
    if value.dtype in (torch.bfloat16, torch.float16):
        return targets.ROUNDING_MARGIN * roundings * relative(exact.to(value.dtype), exact)
    return targets.RELATIVE_BAR


def compare(got: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor], with_post: bool) -> dict[str, Any]:
    """Returns for every tensor its relative error, its bar, and whether the bar is met."""
    result = {}
    for name, value in got.items():
        # With post, dx is the sum of the gradients of two ops, each rounded once.
        bar = _bar(name, value, exact[name], 2 if name == "dx" and with_post else 1)
        error = relative(value, exact[name].reshape(value.shape))
        result[name] = {"relative": error, "bar": bar, "met": error <= bar}
    return result


def _worst(a: torch.Tensor, b: torch.Tensor) -> float:
    worst = float((a.double() - b.double().reshape(a.shape)).abs().max())
    return worst if math.isfinite(worst) else math.nan


def case(name: str, i: Inputs, compiled: bool) -> dict[str, Any]:
    """Returns the errors of one case against fp64: ops, plain formula and, if ``compiled``, the compiled step."""
    exact = reference(i)
    grads = i.detached()
    for t in grads.leaves():
        t.requires_grad_()
    implementations: dict[str, Any] = {"ops": lambda: ours.ops_fb(i.detached())}
    if compiled:
        implementations["compiled"] = lambda: ours.autograd_fb(True)(grads)
    implementations["plain formula"] = lambda: plain(i)
    result: dict[str, Any] = {
        "case": name,
        "shape": list(i.x.shape),
        "dtype": str(i.x.dtype).removeprefix("torch."),
    }
    result["errors"] = {}
    for kind, run in implementations.items():
        result["errors"][kind] = _errors(run, exact, i.with_post)
    return result


def _errors(run: Callable[[], Named], exact: Named, with_post: bool) -> dict[str, Any]:
    try:
        return compare(run(), exact, with_post)
    except Exception as e:  # one failing implementation must not discard the others' figures
        return {"error": running.message(e)}


def _median(values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else statistics.median(values)


def _parameter_gradients(i: Inputs, saved: Named, dtype: torch.dtype) -> Named:
    """Returns pre's parameter gradients (raw logits), written out from the forward's saved tensors, in ``dtype``."""
    assert i.gamma is not None and i.dh_post is not None and i.dh_res is not None
    n, wide = i.n, i.map(lambda _, t: t.to(dtype))
    h_pre, h_post, h_mix, inv_rms = (saved[k].to(dtype) for k in ("h_pre", "h_post", "h_mix", "inv_rms"))
    s = h_pre - HC_EPS
    h = h_post - POST_EPS
    d = [
        (wide.dh_in[..., None, :] * wide.x).sum(-1) * s * (1 - s),
        wide.dh_post * h * (1 - h / POST_MULT),
        wide.dh_res.flatten(-2),
    ]
    z = (h_mix * inv_rms[..., None]).split([n, n, n * n], -1)
    dz = torch.cat([wide.alpha[k] * d[k] for k in range(3)], -1)
    g = (dz * inv_rms[..., None]).flatten(0, -2).t() @ wide.x.flatten(-2).flatten(0, -2)
    return {
        "dphi": g * wide.gamma.flatten(),
        "dalpha": torch.stack([(a * b).sum() for a, b in zip(d, z, strict=True)]),
        "dbias": torch.cat(d, -1).flatten(0, -2).sum(0),
        "dgamma": (wide.phi * g).sum(0).view_as(wide.gamma),
    }


def record_case(device: torch.device) -> dict[str, Any]:
    """Returns the largest absolute errors of the parameter gradients at ``RECORD_SHAPE``, with gamma and raw logits.

    Measures the backward op alone: the fp64 values start from the same saved fp32 tensors. Loss gradients are standard
    normal. Each figure is the median of ``RECORD_DRAWS`` draws: in a single draw the last rounding of one sum decides.
    """
    found: dict[str, dict[str, list[float]]] = {"ops": {}, "plain formula": {}}
    for _ in range(RECORD_DRAWS):
        i = make_inputs(targets.RECORD_SHAPE[:2], *targets.RECORD_SHAPE[2:], device, npu=True, record=True)
        got = ours.ops_fb(i)
        exact = _parameter_gradients(i, got, torch.float64)
        for kind, values in {
            "ops": got,
            "plain formula": _parameter_gradients(i, got, torch.float32),
        }.items():
            for name in targets.RECORD_BARS:
                found[kind].setdefault(name, []).append(_worst(values[name], exact[name]))
    errors = {
        kind: {
            name: {
                "absolute": (worst := _median(all_)),
                "draws": all_,
                "bar_absolute": bar,
                "met": worst <= bar,
            }
            for (name, all_), bar in zip(of.items(), targets.RECORD_BARS.values(), strict=True)
        }
        for kind, of in found.items()
    }
    return {
        "case": "shape of record, backward alone",
        "shape": list(targets.RECORD_SHAPE),
        "dtype": "bfloat16",
        "errors": errors,
    }


def equal_bits(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Returns which tensors of two runs differ in a bit, and whether none does."""
    differ = [k for k in first if not same_bits(first[k], second[k])]
    return {"differ": differ, "met": not differ}


def against_dense(got: Named, want: Named, dense: Named, factor: float) -> dict[str, Any]:
    """Returns for every tensor its error against ``want``, dense attention's, the bar, and whether it is met.

    The bar is ``factor`` times the error of ``dense``, where that has the tensor.
    """
    errors: dict[str, Any] = {}
    for name, value in got.items():
        errors[name] = {"relative": relative(value, want[name])}
        if name in dense:
            other = relative(dense[name], want[name])
            met = errors[name]["relative"] <= factor * other
            errors[name] |= {"dense": other, "bar": factor * other, "met": met}
    return errors


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)))


def determinism(device: torch.device, dim: int, tokens: int) -> list[dict[str, Any]]:
    """Checks for equal bits in two runs and, on a GPU, of a token alone, in small batches and in the whole batch."""
    i = make_inputs((tokens,), targets.N, dim, device)
    first, second = ours.ops_fb(i), ours.ops_fb(i)
    differ = [k for k in first if not same_bits(first[k], second[k])]
    results = [{"check": "two runs", "shape": list(i.x.shape), "differ": differ, "met": not differ}]
    if device.type == "cpu":
        return results  # on a CPU, BLAS picks the summation order by the batch size
    at = tokens // 3
    for count in sorted({1, 2, 8, 64, 65, tokens // 2} & set(range(1, tokens - at + 1))):
        part = ours.ops_fb(i.tokens(at, at + count))
        differ = [k for k in first if k not in _SUMMED and not same_bits(part[k], first[k][at : at + count])]
        check = f"{count} of {tokens} tokens alone"
        results.append({"check": check, "shape": list(i.x.shape), "differ": differ, "met": not differ})
    return results
