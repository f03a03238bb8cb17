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
from mhc_inductor.compat.shared import *  # noqa: F403
