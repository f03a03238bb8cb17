"""Plain PyTorch formulas of every operator: the specification that the kernels are tested against."""
