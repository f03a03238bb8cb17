# SPDX-License-Identifier: Apache-2.0
"""Lists the checks of ``mhc_inductor.distributed`` by name; they are in the files ``distributed_*.py``.

A check splits inputs over the ranks, runs a function, joins the results again, and compares them on rank 0 with the fp64
oracles of one process. A failed check ends its rank, and the others with it.
"""

from __future__ import annotations

from tests.ranks import (
    distributed_costs,
    distributed_e79,
    distributed_errors,
    distributed_index,
    distributed_selection,
    distributed_tools,
)

# In this order: the last of the errors leaves no group behind.
SUBJECTS = (distributed_selection, distributed_e79, distributed_index, distributed_costs, distributed_errors)
CHECKS = {n: c for s in SUBJECTS for n, c in distributed_tools.CHECKS.items() if c.__module__ == s.__name__}
