# SPDX-License-Identifier: Apache-2.0
"""Checks of ``mhc_inductor.distributed`` that every rank of a gloo group runs; tests/test_distributed.py starts them.

A check splits inputs over the ranks, runs a function, joins the results again, and compares them on rank 0 with the fp64
oracles of one process. A failed check ends its rank, and the others with it. Checks are in ``distributed_*.py``.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Sequence

import torch
import torch.distributed as dist

from tests.ranks import (
    distributed_costs,
    distributed_e79,
    distributed_errors,
    distributed_index,
    distributed_selection,
    distributed_tools,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]
TIMEOUT = datetime.timedelta(minutes=5)
# In this order: the last of the errors leaves no group behind.
SUBJECTS = (distributed_selection, distributed_e79, distributed_index, distributed_costs, distributed_errors)
CHECKS = {n: c for s in SUBJECTS for n, c in distributed_tools.CHECKS.items() if c.__module__ == s.__name__}


def run_rank(rank: int, size: int, folder: str, names: Sequence[str]) -> None:
    """Runs the named checks as one rank; writes what failed, by check, to a file of this rank."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    torch.set_num_threads(1)
    import mhc_inductor

    assert "mhc_inductor.distributed" not in sys.modules, "it is imported where it is used"
    early = distributed_tools.message(lambda: mhc_inductor.distributed.e79_scan(torch.ones(2, 1, 4)))
    assert early.startswith("RuntimeError: e79_scan: torch.distributed has no process group; call torch."), early
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=TIMEOUT)
    found: dict[str, str] = {}
    for name in names:
        try:
            CHECKS[name]()
            found[name] = ""
        except BaseException:
            found[name] = traceback.format_exc()
        (pathlib.Path(folder) / f"rank{rank}.json").write_text(json.dumps(found))
        if found[name]:  # the other ranks wait for messages of this check, or are past it
            break
    os._exit(0)  # the group of a dead rank cannot be taken down
