# SPDX-License-Identifier: Apache-2.0
"""Calls of a Dynamo graph become values: a template is reused only for an identical call."""

from __future__ import annotations

import pytest
import torch

from mhc_inductor.routing.graph.expressions import step, whole
from mhc_inductor.routing.graph.known_calls import KnownCalls
from mhc_inductor.routing.graph.values import Values, example, tensors_in
from tests.tools.capture import alike, looking


def _graph(fn, *inputs, dynamic=False, writes=lambda node: False):
    """Returns the graph of ``fn``, and the state around the analysis: random numbers, guards, symbols, modes."""

    def state(env):
        held = () if env is None else (env.guards, env.pending_fresh_unbacked_symbols, env.var_to_range)
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        dtypes = torch.get_autocast_dtype("cpu"), torch.get_default_dtype()
        return torch.get_rng_state().tolist(), [len(one) for one in held], modes, dtypes

    def look(gm):
        values = Values(gm.graph, {}, KnownCalls("template"), writes)
        fakes = [t for node in gm.graph.nodes for t in tensors_in(example(node))]
        env = next((t.fake_mode.shape_env for t in fakes if hasattr(t, "fake_mode")), None)
        before = state(env)
        for node in gm.graph.nodes:
            value = values.of(node)
            for v in value if isinstance(value, tuple) else (value,):
                _ = v.func if v is not None else None
        return {"graph": gm.graph, "values": values, "before": before, "after": state(env)}

    compiled, found = looking(fn, look, dynamic=dynamic)
    compiled(*inputs)
    return found[-1]


def _values(fn, *inputs):
    found = _graph(fn, *inputs)
    return [found["values"].of(node) for node in found["graph"].nodes if node.op == "call_function"]


def test_a_square_and_a_product_are_no_templates_for_each_other():
    given = torch.randn(3, 4), torch.randn(3, 4)
    square, product = _values(lambda a, b: (a * a, a * b), *given)
    assert square.args[0] is square.args[1] is product.args[0] is not product.args[1]
    product, square = _values(lambda a, b: (a * b, b * b), *given)
    assert square.args[0] is square.args[1] is product.args[1] is not product.args[0]


@torch.library.custom_op("mhc_inductor_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@twice.register_fake
def _(x):
    return torch.empty_like(x)


RANDOM = {
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5, True),
    "rand": lambda x: x + torch.rand(3, 4),
    "randn_like": lambda x: x * torch.randn_like(x),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()) * x,
    "normal_": lambda x: torch.empty(3, 4).normal_() + x,
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 2),
    "randperm": lambda x: x[:, torch.randperm(4)],
    "custom op": lambda x: torch.ops.mhc_inductor_tests.twice(x),
    "attention with dropout": lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "rrelu": lambda x: torch.nn.functional.rrelu(x, training=True),
    "enough of modes": lambda x: _modes(x),
}


def _modes(x):
    with torch.no_grad():
        y = x * 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = x @ y.T
    with torch.autocast("cpu", enabled=False):
        return z + x @ x.T


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", RANDOM)
def test_looking_at_a_graph_changes_nothing(name, dynamic):
    found = _graph(RANDOM[name], torch.randn(3, 4, requires_grad=True), dynamic=dynamic)
    assert found["after"] == found["before"]


DEPENDS = {
    "nonzero": lambda x: x.nonzero() * 2,
    "mask": lambda x: x[x > 0] + 1,
    "unique": lambda x: torch.unique(x.round()) + 1,
    "repeat_interleave": lambda x: torch.repeat_interleave(x, (x[:, 0] > 0).long(), dim=0) * 2,
    "masked_select": lambda x: torch.masked_select(x, x > 0).sum(),
    "item": lambda x: x * x.sum().item(),
    "sizes": lambda x: x.view(-1, 2) + x.reshape(2, -1).T,
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", DEPENDS)
def test_sizes_that_depend_on_data_add_no_symbol_and_no_guard(name, dynamic):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        found = _graph(DEPENDS[name], torch.randn(4, 6), dynamic=dynamic)
    assert found["after"] == found["before"]


def test_a_call_that_raises_is_opaque_and_the_rest_is_not():
    def look(gm):
        first = next(node for node in gm.graph.nodes if node.op == "call_function")
        broken = list(first.args)
        first.args = (broken[0], "two")
        values = Values(gm.graph, {}, KnownCalls("template"), lambda node: False)
        found = [values.of(node).func for node in gm.graph.nodes if node.op.startswith("call")]
        first.args = tuple(broken)
        return found

    compiled, found = looking(lambda x: (x * 2).relu(), look)
    compiled(torch.randn(3))
    assert found == [[None, torch.ops.aten.relu.default]]


def test_a_custom_op_is_opaque_however_it_is_called():
    for call in (torch.ops.mhc_inductor_tests.twice, torch.ops.mhc_inductor_tests.twice.default, twice):
        found = _graph(lambda x, call=call: call(x) + 1, torch.randn(3, 4))
        kinds = [found["values"].of(node).func for node in found["graph"].nodes if node.op == "call_function"]
        assert kinds == [None, torch.ops.aten.add.Tensor]


def test_what_writes_is_asked():
    calls = []

    def writes(node):
        calls.append(node)
        return node.target is torch.relu

    found = _graph(lambda x: torch.relu(x) + torch.tanh(x), torch.randn(3, 4), writes=writes)
    kinds = {node.name: found["values"].of(node).func for node in found["graph"].nodes if node.op == "call_function"}
    assert kinds == {"relu": None, "tanh": torch.ops.aten.tanh.default, "add": torch.ops.aten.add.Tensor}
    assert calls


def test_a_node_that_holds_sizes_takes_the_place_of_no_tensor():
    fn = lambda x, weight, bias: torch.nn.functional.layer_norm(x, weight.size(), weight, bias)  # noqa: E731
    found = _graph(fn, torch.randn(4, 8), torch.randn(8), torch.randn(8), dynamic=True)
    (call,) = (node for node in found["graph"].nodes if node.op == "call_function")
    x, size, weight, bias = call.args
    assert size.op == "call_method"
    args = found["values"].of(call).args
    assert [args[0].node, args[2].node, args[3].node] == [x, weight, bias]


def test_a_cache_that_starts_empty_is_what_was_added_to_it():
    (piece,) = _values(lambda x: torch.cat([torch.tensor([]), x], dim=-2), torch.randn(2, 3, 4))[-1:]
    below = step(whole(piece))
    assert below is not None and below.value.node.op == "placeholder"


def test_a_mask_and_keys_from_an_empty_cache_are_routed():
    def fn(q, k, v, starts):
        k, v = torch.cat([torch.tensor([]), k], dim=-2), torch.cat([torch.tensor([]), v], dim=-2)
        at = torch.cat([torch.tensor([], dtype=torch.int64), torch.arange(32)])
        seen = (at >= starts[..., None]) & (at < starts[..., None] + 4)
        seen = torch.cat([torch.tensor([], dtype=torch.bool), seen], dim=-1)
        scores = (q @ k.transpose(-1, -2) * 0.25).masked_fill(~seen, float("-inf"))
        return torch.softmax(scores, -1) @ v

    q, k, v = (torch.randn(2, 32, 16) for _ in range(3))
    alike(fn, (q, k, v, torch.randint(0, 28, (2, 32))), ops={"selection_attention": 1})
