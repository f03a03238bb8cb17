"""The formulas that the pass knows, one folder an operator. Those listed here run, in this order."""
