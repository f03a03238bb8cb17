# SPDX-License-Identifier: Apache-2.0
"""Context parallelism on gloo groups of two and three processes: ``distributed_checks.py`` has what the ranks run."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
    pytest.mark.xdist_group("distributed"),
]

from tests.ranks import distributed_checks  # noqa: E402

ONLY_TWO = ("under_torch_compile", "double_backward_raises", "mhc_needs_no_messages", "bf16", "a_rank_dies")
ONLY_THREE = ("groups_and_meshes",)
RUNS = {
    2: [name for name in distributed_checks.CHECKS if name not in ONLY_THREE],
    3: [name for name in distributed_checks.CHECKS if name not in ONLY_TWO],
}
LIMIT = 500  # seconds


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[int, list[dict[str, str]]]:
    """Returns, for each number of ranks, what failed on each rank, by check."""
    names = {
        item.callspec.params["name"]
        for item in request.session.items
        if hasattr(item, "callspec") and item.module is request.module and "name" in item.callspec.params
    }
    return {size: _started(size, [n for n in checks if n in names]) for size, checks in RUNS.items()}


def _started(size: int, names: list[str]) -> list[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        program = (
            "import sys; sys.path.insert(0, sys.argv[1]); from tests.ranks import distributed_checks as d; "
            "d.run_rank(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])"
        )
        here = str(pathlib.Path(__file__).parent.parent)
        commands = [[sys.executable, "-c", program, here, str(rank), str(size), folder, *names] for rank in range(size)]
        started = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
        try:
            output = [process.communicate(timeout=LIMIT)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        files = [pathlib.Path(folder) / f"rank{rank}.json" for rank in range(size)]
        return [json.loads(f.read_text()) if f.exists() else {"": o} for f, o in zip(files, output, strict=True)]


@pytest.mark.every_case  # most of the time goes into starting the processes
@pytest.mark.parametrize(("size", "name"), [(size, name) for size, names in RUNS.items() for name in names])
def test_ranks(size: int, name: str, results: dict[int, list[dict[str, str]]]) -> None:
    failed = {rank: found.get(name, f"did not run: {found}") for rank, found in enumerate(results[size])}
    assert not any(failed.values()), "\n".join(f"rank {rank}: {text}" for rank, text in failed.items() if text)
