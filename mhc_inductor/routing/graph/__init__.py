"""A Dynamo graph as ATen values, indices and expressions: nothing of an operator."""
