"""The formulas that the pass knows, one folder an operator. Those listed here run, in this order."""

from mhc_inductor.routing.operator import register
from mhc_inductor.routing.operators.selection.operator import SelectionOperator

register(SelectionOperator)
