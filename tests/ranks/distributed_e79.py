# SPDX-License-Identifier: Apache-2.0
"""Checks of the E79 scan whose time steps are on several ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import mhc_inductor as mi
from tests.oracles import e79 as helpers
from tests.oracles.mhc import relative, rounding
from tests.ranks import distributed_tools as tools
from tests.ranks.distributed_tools import check, everywhere, here, joined, leaf, me, ranks, shares, total


def _pieces(
    made: Mapping[str, Any], ups: Sequence[Mapping[str, Tensor]], cut: Sequence[slice], dtype: torch.dtype
) -> Any:
    """Returns each piece's out, S and M in one process, and the gradients of all inputs; one loop after the other."""
    inputs = {n: None if t is None else t.detach().to(dtype).requires_grad_() for n, t in made.items()}
    states = {n: inputs[n] for n in ("S0", "M0")}
    pieces, total = [], torch.zeros((), dtype=dtype)
    for at, up in zip(cut, ups, strict=True):
        biases = {n: t[at] if t is not None and t.dim() == 3 else t for n, t in inputs.items() if n in ("b_s", "b_m")}
        done = helpers.loop({"kvqm": inputs["kvqm"][at], **biases, **states}, dtype)
        states = {"S0": done["S"], "M0": done["M"]}
        pieces.append({n: t.detach() for n, t in done.items()})
        total = total + sum((done[n] * u.to(dtype)).sum() for n, u in up.items())
    leaves = {n: t for n, t in inputs.items() if t is not None}
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return pieces, {
        f"d{n}": torch.zeros_like(t) if g is None else g for (n, t), g in zip(leaves.items(), grads, strict=True)
    }


def scanned(
    made: Mapping[str, Any], names: Sequence[str], cut: Sequence[slice], chunks: int | None, replicated: bool
) -> tuple[Any, Any, Any]:
    """Runs the function on this rank's steps; returns the pieces of all ranks, the gradients, and the ups."""
    ups = [helpers.upstream({**made, "kvqm": made["kvqm"][at]}, names, seed=i) for i, at in enumerate(cut)]
    at = cut[me()]
    biases = [leaf(made[n], (at,) if made[n] is not None and made[n].dim() == 3 else ()) for n in ("b_s", "b_m")]
    states = [leaf(made[n]) if replicated or me() == 0 else None for n in ("S0", "M0")]
    inputs = [leaf(made["kvqm"], (at,)), *biases, *states]
    out, S, M = mi.distributed.e79_scan(*inputs, group=tools.GROUP, chunks=chunks)
    torch.autograd.backward([{"out": out, "S": S, "M": M}[n] for n in names], [here(ups[me()][n]) for n in names])
    pieces = everywhere({"out": out.detach(), "S": S.detach(), "M": M.detach()})
    grads = {"dkvqm": joined(inputs[0].grad, 0)}
    for n, t in zip(("b_s", "b_m"), biases, strict=True):
        if t is not None:
            grads[f"d{n}"] = joined(t.grad, 0) if t.dim() == 3 else total(t.grad)
    for n, t in zip(("S0", "M0"), states, strict=True):
        every = everywhere(None if t is None else t.grad)
        if every[0] is not None:
            grads[f"d{n}"] = every[0]
        assert all(g is None or (replicated and not g.any()) for g in every[1:])
    return pieces, grads, ups


def check_scan(
    made: Mapping[str, Any],
    cut: Sequence[slice],
    chunks: int | None,
    names: Sequence[str] = ("out", "S", "M"),
    replicated: bool = False,
) -> None:
    pieces, grads, ups = scanned(made, names, cut, chunks, replicated)
    tools.on_first(lambda: _compare(made, pieces, grads, ups, cut))


def _compare(
    made: Mapping[str, Any],
    pieces: Sequence[Mapping[str, Tensor]],
    grads: Mapping[str, Tensor],
    ups: Sequence[Mapping[str, Tensor]],
    cut: Sequence[slice],
) -> None:
    want, plain = (_pieces(made, ups, cut, dtype) for dtype in (torch.float64, torch.float32))
    rows = [(f"{n} of rank {i}", t, want[0][i][n], plain[0][i][n]) for i, p in enumerate(pieces) for n, t in p.items()]
    assert grads.keys() == want[1].keys()
    rows += [(n, t, want[1][n], plain[1][n]) for n, t in grads.items()]
    for name, got, exact, formula in rows:
        low = 1.01 * rounding(got.dtype) if got.dtype in (torch.bfloat16, torch.float16) else 0.0
        # A GPU's exp and its sums in another order: the bound of the kernels' own tests.
        allowed = max(2 * relative(formula, exact), 1e-6 if tools.DEVICE.type == "cpu" else 1e-5) + low
        assert relative(got, exact) <= allowed, f"{name}: {relative(got, exact):.3g} above {allowed:.3g}"


@check
def scans() -> None:
    for bias, chunks in (("none", 1), ("fixed", 2), ("input", 4), (("fixed", "input"), None)):
        check_scan(helpers.make_inputs(9, 4, dtype=torch.float32, bias=bias), shares(9), chunks)
    made = helpers.make_inputs(9, 5, dtype=torch.float32, bias="fixed")
    parts = shares(9, *[1] * (ranks() - 1), 10 - ranks())
    for chunks in (2, 5):
        check_scan(made, parts, chunks, replicated=True)
    check_scan(helpers.make_inputs(9, 3, dtype=torch.bfloat16, bias="fixed"), parts[::1], 3)
    check_scan(helpers.make_inputs(9, 3, dtype=torch.float32, state=False), parts, None)
    for names in (("out",), ("S",), ("M",)):
        check_scan(made, shares(9), 2, names)


@check
def scans_in_fp64_and_without_gradients() -> None:
    made = helpers.make_inputs(9, 4, bias="fixed")
    at = shares(9)[me()]
    with torch.no_grad():
        out, S, _ = mi.distributed.e79_scan(
            made["kvqm"][at], *(made[n] for n in helpers.NAMES[1:]), group=tools.GROUP, chunks=4
        )
    outs, states = joined(out, 0), everywhere(S)
    want = helpers.oracle(made)
    assert not out.requires_grad
    assert helpers.relative(outs, want["out"]) < 1e-13 and helpers.relative(states[-1], want["S"]) < 1e-13
    frozen = {n: made[n] for n in helpers.NAMES[:3]}
    S0 = leaf(made["S0"])  # only the first rank's initial state needs a gradient: all ranks take part
    frozen["kvqm"] = frozen["kvqm"][at]
    out, _, _ = mi.distributed.e79_scan(**frozen, S0=S0 if me() == 0 else None, group=tools.GROUP)
    assert out.requires_grad
    out.backward(torch.ones_like(out))
    up = {"out": torch.ones(9, 4, 5, dtype=torch.float64)}

    def compare() -> None:
        exact = helpers.oracle({**made, "M0": None}, up)["dS0"]
        assert helpers.relative(S0.grad, exact) < 1e-12

    tools.on_first(compare)
