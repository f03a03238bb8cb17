# SPDX-License-Identifier: Apache-2.0
"""The option ``batch_invariant``: few queries run the kernels of many, in generated code and in ops that it calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mhc_inductor
from mhc_inductor import backend, compat, passes
from mhc_inductor.kernels.launch import EagerBuilder
from mhc_inductor.options import DEFAULT, RoutingOptions
from tests.test_codegen import compiled
from tests.tools.fakecuda import without_a_gpu
from tests.tools.generated import launches

OPS = torch.ops.mhc_inductor
NAME = "mhc_inductor.batch_invariant"
pytestmark = pytest.mark.usefixtures("no_caches")


def _launched(fn: Any, *shapes: tuple[tuple[int, ...], torch.dtype], invariant: bool = True, **call: Any) -> list[str]:
    """Returns the kernels that a compiled call launches on a simulated GPU."""
    call = call or {"backend": "mhc_inductor", "options": {NAME: invariant}}
    return launches(compiled(fn, *shapes, **call))


def _attention(q: Any, k: Any, v: Any, ranges: Any) -> Any:
    return OPS.selection_attention(q, k, v, ranges, None, None, None, 0.2)[0]


def _topk(q: Any, k: Any, w: Any) -> Any:
    return mhc_inductor.index_topk(q, k, w, 16, scale=0.1)


BF16 = torch.bfloat16
KEYS = ((2, 2, 640, 32), BF16)
DECODE = (((2, 1, 2, 4, 32), BF16), KEYS, KEYS, ((2, 1, 2, 4, 2), torch.int32))
INDEX = (((2, 1, 4, 64), BF16), ((2, 512, 64), BF16), ((2, 1, 4), torch.float32))


@without_a_gpu
def test_few_queries_run_the_kernels_of_many() -> None:
    few = {"selection_gather", "selection_combine"}
    assert few <= set(_launched(_attention, *DECODE, invariant=False))
    launched = _launched(_attention, *DECODE)
    assert "selection_forward" in launched and not few & set(launched)
    assert _launched(_topk, *INDEX, invariant=False) == ["index_row_scores", "index_select"]
    assert _launched(_topk, *INDEX) == ["index_tile_scores", "index_select"]


@without_a_gpu
def test_enable_has_it_too() -> None:
    mhc_inductor.enable(batch_invariant=True)
    try:
        assert _launched(_topk, *INDEX, backend="inductor") == ["index_tile_scores", "index_select"]
    finally:
        mhc_inductor.disable()
    assert not compat.batch_invariant()


@torch.library.custom_op("mhc_inductor_tests::seen", mutates_args=())
def seen(x: torch.Tensor) -> torch.Tensor:
    return x + float(EagerBuilder(torch.device("cpu")).deterministic)


@seen.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_ops_that_generated_code_calls_have_it() -> None:
    x = torch.zeros(3)

    def compiled(**call: Any) -> float:
        torch._dynamo.reset()
        return float(torch.compile(lambda x: seen(x) * 1, backend="mhc_inductor", **call)(x)[0])

    assert compiled() == compiled(options={NAME: False}) == 0
    assert compiled(options={NAME: True}) == 1
    assert not EagerBuilder(torch.device("cpu")).deterministic


def test_caches_tell_it_apart() -> None:
    """Backward graphs are compiled later: what they need travels in Inductor's configuration."""
    patches = [backend._patches(None, invariant) for invariant in (False, True)]
    for name in passes.PASSES:
        plain, invariant = (p[name] for p in patches)
        assert plain.uuid() != invariant.uuid()
        assert not plain.batch_invariant and invariant.batch_invariant


def test_only_a_bool_is_taken() -> None:
    assert RoutingOptions() == DEFAULT and not DEFAULT.batch_invariant
    with pytest.raises(TypeError, match="batch_invariant must be a bool, got int"):
        RoutingOptions(batch_invariant=1)  # type: ignore[arg-type]
