# SPDX-License-Identifier: Apache-2.0
"""Registers the operators of the routing pass, one folder per operator, in the order in which they run."""

from mhc_inductor.routing.interface import register
from mhc_inductor.routing.operators.e79 import E79Scan
from mhc_inductor.routing.operators.index.operator import IndexOperator
from mhc_inductor.routing.operators.mhc.fuse import Fusion
from mhc_inductor.routing.operators.mhc.operator import Mhc
from mhc_inductor.routing.operators.mhc.own_backward import SinkhornFunction
from mhc_inductor.routing.operators.selection.operator import SelectionOperator

register(SelectionOperator)
register(E79Scan)
register(SinkhornFunction)
register(Mhc)
register(IndexOperator)  # after selection, which reads the model's own topk
register(Fusion)
