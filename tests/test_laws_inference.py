# SPDX-License-Identifier: Apache-2.0
"""Laws 2 and 12: formulas inside ``torch.inference_mode()``, entered in the compiled function, compile as they did.

AOTAutograd fails at views of tensors from outside of the mode, such as ``phi.T``, whoever makes them, and leaves the
process unusable: each case has a process of its own.
"""

from __future__ import annotations

import functools
import multiprocessing
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from mhc_inductor import versions
from mhc_inductor.routing import route
from mhc_inductor.routing.graph.values import example
from tests import test_routing_lists as lists
from tests.formulas import reference_models_e79 as e79
from tests.formulas.reference_models_selection import REFERENCE_MODELS
from tests.tools.capture import tensors

Program = tuple[Callable[..., Any], tuple[Tensor, ...]]


def _attention(name: str) -> Program:
    make, given = REFERENCE_MODELS[name]
    return make(), given


PROGRAMS: dict[str, Callable[[], Program]] = {
    # The others choose keys by scores of few heads, of which many are exactly 0: any choice among these is right.
    **{name: functools.partial(_attention, name) for name in REFERENCE_MODELS if not name.startswith("DeepSeek")},
    "lists": lambda: (
        lists._model("padded", "scattered", True, lists.written),
        lists.inputs(False, "left", lists.ENTRIES),
    ),
    "E79": lambda: (e79.Stack(), (torch.randn(3, 2, e79.DIM),)),
}


def _inside(fn: Callable[..., Any], *given: Tensor) -> Any:
    made = [t + 0 if t.is_floating_point() else t for t in given]
    with torch.inference_mode():
        return fn(*made)


def _inside_twice(fn: Callable[..., Any], *given: Tensor) -> Any:
    with torch.inference_mode():
        made = [t * 1 if t.is_floating_point() else t for t in given]
    with torch.inference_mode():
        return fn(*made)


def _decorated(fn: Callable[..., Any], *given: Tensor) -> Any:
    return torch.inference_mode()(lambda *t: fn(*t))(*given)


def _compiled(name: str, way: Callable[..., Any], routed: bool, answers: Any) -> None:
    """Puts the ops that were routed and the largest difference from eager into ``answers``, or what was raised."""
    torch.manual_seed(0)
    fn, given = PROGRAMS[name]()
    ops: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        if routed:
            before = set(gm.graph.nodes)
            ops.extend(r.op for r in route(gm).routed)
            made = (n for n in gm.graph.find_nodes(op="call_method", target="to") if n not in before)
            # Before torch 2.13 AOTAutograd fails at a view of a conversion that returned the outside tensor itself.
            assert all(example(n).dtype != example(n.args[0]).dtype for n in made)
        return aot_eager(gm, inputs)

    try:
        want = tensors(way(fn, *given))
        got = tensors(torch.compile(functools.partial(way, fn), backend=backend)(*given))
        answers.put((ops, max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True))))
    except Exception as error:
        answers.put((ops, re.sub(r"0x\w+", "", str(error)).partition("\n\n")[0]))


def _answer(*args: Any) -> tuple[list[str], float | str]:
    """Returns what :func:`_compiled` puts, in a process of its own."""
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    process = fork.Process(target=_compiled, args=(*args, answers))
    process.start()
    answer: tuple[list[str], float | str] = answers.get(timeout=120)
    process.join()
    return answer


@pytest.mark.parametrize("way", [_inside, _inside_twice, _decorated], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_formula_in_inference_mode_inside_a_compiled_function(name: str, way: Callable[..., Any]) -> None:
    """Checks that each is routed and gives the values of eager, or fails as without routing.

    AOTAutograd fails at ``linear`` with a weight from outside of the mode before torch 2.13.
    """
    ops, apart = _answer(name, way, True)
    assert ops
    if isinstance(apart, str):
        assert versions.minor(torch.__version__) < (2, 13), apart
        assert _answer(name, way, False) == ([], apart)
    else:
        assert apart < 2e-5
