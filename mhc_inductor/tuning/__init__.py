# SPDX-License-Identifier: Apache-2.0
"""The device's own table of launch configurations: ``python -m mhc_inductor tune`` measures it.

The closed forms in ``kernels/`` were measured on an H200. On another GPU a table may choose faster values for what no
bit of a result depends on: pipeline stages, and the sizes and warps of kernels that treat every element on its own.
:mod:`mhc_inductor.tuning.table` says where tables are and which one is read, :mod:`mhc_inductor.tuning.search` how one
is measured. ``MHC_INDUCTOR_TUNED=0`` switches tables off.
"""

from mhc_inductor.tuning.table import Found, found, use

__all__ = ["Found", "found", "use"]
