"""A Dynamo graph as ATen values, indices and expressions. Nothing here knows a specific operator."""
