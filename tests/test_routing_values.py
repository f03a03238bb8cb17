"""How calls of a Dynamo graph become values: a template is reused only for a call that is the same."""

from __future__ import annotations

import torch

from mhc_inductor.routing.graph.values import Values


def _values(fn, *inputs):
    found = {}

    def backend(gm, _):
        found["graph"], found["values"] = gm.graph, Values(gm.graph, {}, {})
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend)(*inputs)
    calls = [node for node in found["graph"].nodes if node.op == "call_function"]
    return [found["values"].of(node) for node in calls]


def test_a_square_is_no_template_for_a_product():
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    square, product = _values(lambda a, b: (a * a, a * b), a, b)
    assert square.args[0] is square.args[1]
    assert product.args[0] is square.args[0] and product.args[1] is not product.args[0]


def test_a_product_is_no_template_for_a_square():
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    product, square = _values(lambda a, b: (a * b, b * b), a, b)
    assert product.args[0] is not product.args[1]
    assert square.args[0] is square.args[1] is product.args[1]
