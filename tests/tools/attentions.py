# SPDX-License-Identifier: Apache-2.0
"""What tests assert of attention after routing: it is the op, it stays for a reason, or it is as exact as the formula."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.tools.capture import Captured, alike, difference, eager, not_worse, reasons, run

OP = "selection_attention"
ONE: Mapping[str, int] = {OP: 1}
BOUND = 2e-6


def routed(
    fn: Callable[..., Any],
    given: Sequence[Any],
    grad: bool = True,
    ops: Mapping[str, int] = ONE,
    bound: float = BOUND,
    **options: Any,
) -> Captured:
    """Runs ``fn`` routed and eagerly; asserts its ops, and values and gradients within ``bound``."""
    return alike(fn, given, ops=ops, grad=grad, within=bound, **options)


def stays(
    fn: Callable[..., Any], given: Sequence[Any], reason: str, bound: float = 0.0, ordinary: bool = False
) -> Captured:
    """Asserts that attention stays, and that its one near miss, of those that are not ``ordinary``, says ``reason``."""
    got, want = run(fn, given), eager(fn, given)
    assert not got.ops[OP] and difference(got, want) <= bound
    ours = [m for m in got.report.near_misses if m.op == OP and m.ordinary <= ordinary]
    assert [reason in m.reason for m in ours] == [True], reasons(got)
    return got


def as_exact(name: str, fn: Callable[..., Any], narrow: Sequence[Tensor]) -> None:
    """Asserts that the op on bf16 tensors is as near to fp64 as the formula."""
    got, plain = run(fn, narrow), run(fn, narrow, routed=False)
    assert dict(got.ops) == ONE, reasons(got)
    not_worse(name, got, plain, eager(fn, [t.double() if t.is_floating_point() else t for t in narrow]))


def same(
    fn: Callable[..., Any], given: Sequence[Any], atol: float = 1e-5, rtol: float = 1e-5, **options: Any
) -> Captured:
    """Runs ``fn`` routed and eagerly; asserts equal outputs and gradients, NaN included."""
    got = run(fn, given, **options)
    equal(got, eager(fn, given, grad=options.get("grad", True)), atol, rtol)
    return got


def equal(got: Captured, want: Captured, atol: float = 1e-5, rtol: float = 1e-5) -> None:
    """Asserts equal outputs and gradients, NaN included."""
    for a, b in zip((*got.outputs, *got.grads.values()), (*want.outputs, *want.grads.values()), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)
