"""The formulas that the pass knows, one folder an operator."""
