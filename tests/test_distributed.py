# SPDX-License-Identifier: Apache-2.0
"""Context parallelism and ops on DTensors on gloo groups of two to four processes: ``tests/ranks`` has what they run."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
    pytest.mark.xdist_group("distributed"),
]

from tests.ranks import distributed_checks, running, sharded_checks, sharded_models  # noqa: E402

ONLY_TWO = ("under_torch_compile", "double_backward_raises", "mhc_needs_no_messages", "bf16", "a_rank_dies")
ONLY_THREE = ("groups_and_meshes",)
RUNS = {
    "2 ranks": ((2,), [name for name in distributed_checks.CHECKS if name not in ONLY_THREE]),
    "3 ranks": ((3,), [name for name in distributed_checks.CHECKS if name not in ONLY_TWO]),
    "sharded by 2": ((2,), list(sharded_checks.ONE)),
    "sharded by 2 x 2": ((2, 2), list(sharded_checks.TWO)),
}


def _cases() -> list[object]:
    """Returns each check of each run. Each commit runs all but engines with another model than the one it takes there."""
    other = sharded_models.CHECKS.keys() - sharded_models.EACH_COMMIT
    return [
        pytest.param(run, name, marks=[] if name in other else pytest.mark.every_case)
        for run, (_, names) in RUNS.items()
        for name in names
    ]


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest) -> Callable[[str], dict[str, str]]:
    """Returns a function that returns what the ranks of a run said, by check: it runs the checks that are asked for."""
    asked = defaultdict(list)
    for item in request.session.items:
        if hasattr(item, "callspec") and item.module is request.module:
            asked[item.callspec.params["run"]].append(item.callspec.params["name"])
    return functools.cache(lambda run: running.run(RUNS[run][0], asked[run]))


@pytest.mark.parametrize(("run", "name"), _cases())
def test_ranks(run: str, name: str, said: Callable[[str], dict[str, str]]) -> None:
    told = said(run)[name]
    assert not told, told
