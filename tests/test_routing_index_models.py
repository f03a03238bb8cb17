# SPDX-License-Identifier: Apache-2.0
"""The indexers of transformers' models are routed: masks, padding, packing, sizes and modes; outputs as in eager."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.formulas.indexers import FAMILIES, HEADS, TOPK, Indexer, inputs
from tests.tools.capture import Captured, reasons, run

pytest.importorskip("transformers.models.deepseek_v4")
pytest.importorskip("transformers.models.glm5_next")

OWN_MASK = ("deepseek_v4", "glm5_next")
"""Models that compute their masks in the indexer."""
GLM = "glm5_next"


def routed(got: Captured, keys: int, family: str = "") -> None:
    """Asserts that one indexer is routed and no tensor with an element per head, query and key is left.

    GLM-5-Next's breaks the graph before it returns: its keys leave in an order.
    """
    op = "index_scores" if family == GLM else "index_topk"
    assert [r.op for r in got.report.routed] == [op], reasons(got)
    assert got.ops[op] == 1 and not got.report.problems
    for node in got.nodes():
        shape = [s for s in getattr(node.meta.get("example_value"), "shape", ()) if isinstance(s, int)]
        assert not (len(shape) == 4 and HEADS in shape and shape[-1] == keys), node


def chosen(fn: Any, x: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns what ``fn`` gives in eager, and the scores that it chose from."""
    scores: list[Tensor] = []
    own = torch.Tensor.topk

    def topk(self: Tensor, *args: Any, **options: Any) -> Any:
        scores.append(self.detach())
        return own(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", topk)
        out = fn(*x)
    return out, scores[0]


def same(got: Captured, fn: Any, x: list[Tensor], family: str, tolerance: float = 1e-5) -> None:
    """Asserts that each query has keys with the scores of those that eager chooses, distinct ones."""
    want, scores = chosen(fn, x)
    (mine,) = got.outputs
    assert mine.shape == want.shape and mine.dtype == want.dtype
    if family == GLM:
        if len(x) > 3 or tolerance > 1e-3:  # padded: pools start at the first real key
            equal = (mine.sort(-1).values == want.sort(-1).values).all(-1)
            assert float(equal.float().mean()) >= (1.0 if tolerance < 1e-3 else 0.5)
            return
        mine, want = (i[..., : TOPK // 2 * 2 : 2] // 2 for i in (mine, want))  # pools of two keys
    if family not in OWN_MASK:
        assert int(mine.min()) >= 0 and bool((mine.sort(-1).values.diff(dim=-1) > 0).all())
    a, b = (
        scores.double().gather(-1, i.long().clamp_min(0)).masked_fill(i < 0, -torch.inf).sort(-1).values
        for i in (mine, want)
    )
    assert torch.equal(a.isfinite(), b.isfinite())
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b[b > -1e30].abs().max()))


HOW: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{
        f"{kind} mask, {which}": (
            {} if which == "whole" else {which: True},
            {"kind": kind, "packed": which == "packed"},
        )
        for kind in ("bool", "float")
        for which in ("whole", "padded", "packed")
    },
    "dynamic sizes": ({}, {}),
    "dynamic length": ({"B": 1}, {}),
    "bf16": ({"dtype": torch.bfloat16}, {}),
    "autocast": ({}, {}),
}
"""What is run, as options of the inputs and of the indexer."""


def _cases() -> Iterator[Any]:
    """Returns cases (family, how), without those that a model does not have. Each commit runs one of most hows."""
    for (i, how), (j, family) in itertools.product(enumerate(HOW), enumerate(FAMILIES)):
        if not ("bool" in how and family in OWN_MASK) and not ("packed" in how and family == GLM):
            each = i % len(FAMILIES) == j and "padded" not in how and "length" not in how
            yield pytest.param(family, how, marks=pytest.mark.every_case if each else ())


@pytest.mark.parametrize(("family", "how"), [*_cases()])
def test_indexers_are_routed(family: str, how: str) -> None:
    given, made = HOW[how]
    x = inputs(**given)
    model = Indexer(family, **made).to(x[0].dtype)

    def autocast(*given: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(*given)

    options: dict[str, Any] = {}
    if "dynamic" in how:  # a graph break of GLM-5-Next forgets which sizes are marked
        marked = [(i, dim) for i in range(3) for dim in ((1,) if "length" in how else (0, 1))]
        options = {"dynamic": True} if family == GLM else {"dynamic": None, "symbolic": marked}
    fn = autocast if how == "autocast" else model
    got = run(fn, x, [*model.named_parameters()], "mask" in how and "packed" not in how, **options)
    routed(got, 24, family)
    same(got, fn, x, family, 0.05 if how == "autocast" else 1e-5)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in OWN_MASK])
def test_a_bool_mask_that_the_caller_passes(family: str) -> None:
    model = Indexer(family, "bool")
    own, x = model.inner, inputs()
    seen = torch.rand(2, 24, 24, generator=torch.Generator().manual_seed(2)) < 0.5
    rope = torch.randn(2, 24, 8)

    def fn(hidden: Tensor, lora: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        given = (hidden, (rope, rope)) if family == "mistral_large4" else (hidden, lora, (rope, rope))
        return own(*given, seen, positions).sort(-1).values

    got = run(fn, [*x, seen], grad=False)
    routed(got, 24, family)
    same(got, fn, [*x, seen], family)
