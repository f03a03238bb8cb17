# SPDX-License-Identifier: Apache-2.0
"""All private torch APIs that this package uses: a module for each layer, and here what several layers use.

Each module's docstring says in one line what a name is for. A name without versions is in torch 2.11 to 2.15;
``tests/test_compat.py`` looks each up in the torch at hand. Where a function works around a torch that does something
wrong, its docstring says which versions do.
"""

from __future__ import annotations

from mhc_inductor.compat import backend as backend
from mhc_inductor.compat import exported as exported
from mhc_inductor.compat import kernels as kernels
from mhc_inductor.compat import lowerings as lowerings
from mhc_inductor.compat import ops as ops
from mhc_inductor.compat import processes as processes
from mhc_inductor.compat import routing as routing
from mhc_inductor.compat.shared import COMPILED as COMPILED
from mhc_inductor.compat.shared import PASS_OPTIONS as PASS_OPTIONS
from mhc_inductor.compat.shared import HigherOrderOperator as HigherOrderOperator
from mhc_inductor.compat.shared import OpOverload as OpOverload
from mhc_inductor.compat.shared import any_tangent as any_tangent
from mhc_inductor.compat.shared import batch_invariant as batch_invariant
from mhc_inductor.compat.shared import captured_graphs as captured_graphs
from mhc_inductor.compat.shared import counters as counters
from mhc_inductor.compat.shared import expression as expression
from mhc_inductor.compat.shared import fake_mode_of as fake_mode_of
from mhc_inductor.compat.shared import functorch_active as functorch_active
from mhc_inductor.compat.shared import give_names as give_names
from mhc_inductor.compat.shared import graph_breaks as graph_breaks
from mhc_inductor.compat.shared import has_compiled as has_compiled
from mhc_inductor.compat.shared import in_dual_level as in_dual_level
from mhc_inductor.compat.shared import in_package as in_package
from mhc_inductor.compat.shared import is_dtensor as is_dtensor
from mhc_inductor.compat.shared import is_symbol as is_symbol
from mhc_inductor.compat.shared import is_wrapper as is_wrapper
from mhc_inductor.compat.shared import local_tensor as local_tensor
from mhc_inductor.compat.shared import matmul_precision as matmul_precision
from mhc_inductor.compat.shared import mode_change as mode_change
from mhc_inductor.compat.shared import no_new_guards as no_new_guards
from mhc_inductor.compat.shared import op_mode as op_mode
from mhc_inductor.compat.shared import packaging_formulas as packaging_formulas
from mhc_inductor.compat.shared import profiler_runs as profiler_runs
from mhc_inductor.compat.shared import start_compile_workers as start_compile_workers
from mhc_inductor.compat.shared import storage_key as storage_key
from mhc_inductor.compat.shared import tree_leaves as tree_leaves
from mhc_inductor.compat.shared import tree_map_only as tree_map_only
from mhc_inductor.compat.shared import uncompiled as uncompiled
from mhc_inductor.compat.shared import without_ops as without_ops
