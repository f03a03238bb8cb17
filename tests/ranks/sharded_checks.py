# SPDX-License-Identifier: Apache-2.0
"""Lists the checks of DTensors by name; each is a function of the mesh, in the files ``sharded_*.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.ranks import sharded_formulas, sharded_meshes, sharded_models, sharded_ops, sharded_training


def _by_name(*checks: Callable[[Any], None]) -> dict[str, Callable[[Any], None]]:
    return {check.__name__: check for check in checks}


ONE = (
    _by_name(
        sharded_ops.ops_are_sharded_without_communication,
        sharded_ops.other_placements_are_redistributed,
        sharded_training.mhc_trains,
        sharded_training.e79_trains,
        sharded_training.selection_trains,
        sharded_ops.absent_arguments_are_told_apart,
        sharded_training.fewer_tokens_than_ranks_are_gathered,
        sharded_training.wrong_calls_raise_on_every_rank,
        sharded_formulas.formulas_on_dtensors_are_routed,
        sharded_formulas.a_recurrence_on_dtensors_is_routed,
        sharded_formulas.attention_on_dtensors_is_routed,
        sharded_formulas.an_indexer_on_dtensors_is_routed,
        sharded_formulas.other_placements_of_results_stay_the_formulas,
        sharded_formulas.local_tensors_in_a_formula_are_followed,
        sharded_formulas.explain_verifies_formulas_on_dtensors,
        sharded_formulas.local_tensors_and_redistribution_are_kept,
    )
    | sharded_models.CHECKS
)
TWO = _by_name(
    sharded_meshes.whole_mesh_of_two_dimensions,
    sharded_meshes.whole_empty_shards,
    sharded_meshes.whole_a_dead_rank_ends_in_an_error,
)
CHECKS = ONE | TWO
