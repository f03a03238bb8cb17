"""The formulas that the pass knows, one folder an operator. Those listed here run, in this order."""

from mhc_inductor.routing.interface import register
from mhc_inductor.routing.operators.e79 import E79Scan
from mhc_inductor.routing.operators.mhc.fuse import Fusion
from mhc_inductor.routing.operators.mhc.operator import Mhc
from mhc_inductor.routing.operators.selection.operator import SelectionOperator

register(SelectionOperator)
register(E79Scan)
register(Mhc)
register(Fusion)
