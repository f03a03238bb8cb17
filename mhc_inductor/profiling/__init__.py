# SPDX-License-Identifier: Apache-2.0
"""What ops compute and move, and their names in the traces of profilers (docs/profiling.md)."""

from mhc_inductor.profiling.op_bytes import Bytes
from mhc_inductor.profiling.op_counts import count_ops, op_scopes
from mhc_inductor.report.counts import OpCount, OpCounts

__all__ = ["Bytes", "OpCount", "OpCounts", "count_ops", "op_scopes"]
