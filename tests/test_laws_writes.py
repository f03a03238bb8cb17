# SPDX-License-Identifier: Apache-2.0
"""Law 1: PyTorch decides what a call writes. Writes of every kind before, inside and after routed formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.formulas import laws
from tests.formulas.laws import MHC, Leaves, block, check, loop, mhc_leaves, normal, post, pre, sdpa, selection_leaves
from tests.formulas.laws_writes import PLAIN, UNRECORDED, WRITES, written

TWICE = {op: 2 for op in MHC}
THREE = ["imul", "packet", "relu_by_position"]


def _between(write: Callable[[Tensor], Tensor]) -> Callable[[Leaves], Any]:
    """Returns a program that writes the streams between two blocks and returns values from before and after."""

    def program(p: Leaves) -> Any:
        t = block(p["x"], p)
        before = t.sum()
        t = write(t)
        return block(t, p), before, t

    return program


@pytest.mark.parametrize("name", WRITES)
def test_streams_written_without_grad_between_two_blocks(name: str) -> None:
    check(_between(written(WRITES[name], False)), mhc_leaves(), named=["mhc"])


@pytest.mark.parametrize("name", WRITES)
def test_streams_of_a_checkpointed_block_written_without_grad(name: str) -> None:
    """Autocast's casts are kept for the backward, the streams themselves are not: the op would keep a copy of them."""

    def program(p: Leaves) -> Any:
        t = checkpoint(lambda x: block(x, p), p["x"] * 1.0, use_reentrant=False)
        t = written(WRITES[name], False)(t)
        return block(t, p), t

    tolerance = 0.1 if "mask" in name else 3e-2  # a mask of signs: a rounding moves an element by 0.5
    leaves, cast = mhc_leaves(dtype=torch.float32), lambda: torch.autocast("cpu", torch.bfloat16)
    check(program, leaves, named=["mhc"], around=cast, tolerance=tolerance)


@pytest.mark.parametrize("name", list(PLAIN)[::2])
def test_streams_written_with_grad_between_two_blocks(name: str) -> None:
    check(_between(written(PLAIN[name])), mhc_leaves(), named=["mhc"])


@pytest.mark.parametrize("name", UNRECORDED)
def test_streams_written_in_inference_mode_between_two_blocks(name: str) -> None:
    check(_between(written(UNRECORDED[name])), mhc_leaves(), named=["mhc"], modes=["inference"])


@pytest.mark.parametrize("name", WRITES)
def test_a_write_without_grad_after_a_block_leaves_it_routed(name: str) -> None:
    check(lambda p: written(WRITES[name], False)(block(p["x"], p)), mhc_leaves(), routed=MHC)


@pytest.mark.parametrize("name", ["imul", "relu_by_position", "packet", "out", "foreach", "setitem", "view_written"])
def test_a_write_without_grad_before_a_block_leaves_it_routed(name: str) -> None:
    check(lambda p: block(written(WRITES[name], False)(p["x"] * 1.5), p), mhc_leaves(), routed=MHC)


@pytest.mark.parametrize("name", ["imul", "leaky_relu_by_position", "packet", "out", "setitem", "custom_op_other"])
@laws.law_of(lambda: {**mhc_leaves(), "mean": normal(4, 16, seed=9)}, routed=MHC, frozen=["mean"])
def test_a_buffer_written_without_grad_after_a_block_leaves_it_routed(p: Leaves, name: str) -> Any:
    out = block(p["x"], p)
    with torch.no_grad():
        p["mean"].lerp_(out.mean(0), 0.1)
        WRITES[name](p["mean"])
    return out, p["mean"] + 1


PLACES = ["h_in", "f", "h_post", "res", "mixed", "z", "h_pre", "logits", "x_out", "inv", "v"]


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["imul", "leaky_relu_by_position"])
def test_values_inside_a_block_written(name: str, place: str, grad: bool) -> None:
    laws.changed("mhc", {place: written(WRITES[name], grad)})


NAMED = [
    *(
        ("mhc", place, name)
        for place in ("h_in", "h_post")
        for name in ["packet", "custom_op", "out_of_view", "foreach_copy", "allow_in_graph"]
    ),
    *(("e79", "S2", name) for name in ["packet", "custom_op", "out", "foreach", "allow_in_graph", "set_data"]),
    *(("selection", place, name) for place in ["q", "k", "v", "scores", "masked", "weights", "o"] for name in THREE),
]


@pytest.mark.parametrize(("family", "place", "name"), NAMED)
def test_values_inside_a_formula_written_without_grad(family: str, place: str, name: str) -> None:
    laws.changed(family, {place: written(WRITES[name], False)}, fresh=family != "e79")


@pytest.mark.parametrize("name", ["imul", "packet", "custom_op", "out", "foreach", "hardtanh_by_position", "setitem"])
@laws.law_of(mhc_leaves, named=["mhc"], modes=["no_grad", "inference"])
def test_streams_written_between_pre_and_post(p: Leaves, name: str) -> Any:
    """Writes the streams after pre has read them and before post reads them."""
    x = p["x"] * 1.0
    h_in, h_post, res = pre(x, p)
    WRITES[name](x)
    return post(x, torch.tanh(h_in @ p["w"]), h_post, res), x


@pytest.mark.parametrize("name", ["imul", "packet", "foreach"])
@pytest.mark.parametrize("leaf", ["phi", "bias", "x"])
@laws.law_of(mhc_leaves, named=["mhc"], modes=["no_grad"])
def test_parameters_written_between_two_blocks(p: Leaves, name: str, leaf: str) -> Any:
    first = block(p["x"], p)
    with torch.no_grad():
        WRITES[name](p[leaf])
    return first, block(p["x"], p)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("place", ["S1", "M2", "S3", "M3", "out0", "k1", "delta1", "kvqm", "S0"])
def test_values_of_a_loop_written(place: str, grad: bool) -> None:
    laws.changed("e79", {place: written(WRITES["imul"], grad)}, fresh=True)


@pytest.mark.parametrize("name", THREE)
@laws.law_of(laws.e79_leaves, routed={"e79_scan": 1})
def test_a_loop_with_writes_after_it_is_routed(p: Leaves, name: str) -> Any:
    out, S, M = loop(p)
    out = out + 0.0
    with torch.no_grad():
        WRITES[name](out)
    return out, S, M


@pytest.mark.parametrize("name", THREE)
@laws.law_of(selection_leaves, named=["selection"])
def test_queries_written_after_the_scores_read_them(p: Leaves, name: str) -> Any:
    """The op would stand after the write, which neither a view nor a product with a number lets it look through."""
    q = p["q"].tanh()

    def write(scores: Tensor) -> Tensor:
        WRITES[name](q)
        return scores

    return laws.attention({**p, "q": q}, at={"scores": write}), q


def test_the_mask_written_through_a_view() -> None:
    laws.changed("selection", {"mask": lambda mask: (mask.select(-1, 0).fill_(True), mask)[1]})


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize(
    "name", ["imul", "copy_", "setitem", "masked_fill_", "view_of_view", "relu_by_position", "detached"]
)
def test_streams_that_are_a_slice_of_another_tensor_written(name: str, grad: bool) -> None:
    """The other tensor is not read any more, is read or is written afterwards."""

    def program(p: Leaves, after: Callable[[Tensor], Any]) -> Any:
        wide = torch.cat([p["x"].cos(), p["x"]]) * 1.0
        t = written(WRITES[name], grad)(wide[p["x"].shape[0] :])
        return after(wide), block(t, p), t

    def zeroed(wide: Tensor) -> None:
        with torch.no_grad():
            wide.mul_(0.25)

    for after in (lambda wide: (), torch.sum, zeroed):
        check(lambda p, after=after: program(p, after), mhc_leaves(), named=["mhc"])


def _halves(x: Tensor, a: Tensor) -> Tensor:
    out = torch.empty_like(x)
    held = out[..., -4:]
    out[..., :-4] = x[..., :-4]
    one, two = x[..., -4:-2], x[..., -2:]
    held[..., :2] = one * a.cos() - two * a.sin()
    held[..., 2:] = two * a.cos() + one * a.sin()
    return out


def _pairs(x: Tensor, a: Tensor) -> Tensor:
    out = x.clone()
    held = out[..., -4:].unflatten(-1, (-1, 2))
    one, two = x[..., -4:].unflatten(-1, (-1, 2)).unbind(-1)
    held[..., 0] = one * a.cos() - two * a.sin()
    held[..., 1].copy_(two * a.cos() + one * a.sin())
    return out


def _elsewhere(x: Tensor, a: Tensor) -> Tensor:
    """Fills a buffer that is made of nothing that has gradients."""
    out = torch.zeros(x.shape, dtype=x.dtype)
    for part in out.unbind(-1)[::2]:
        part += (x * a.sum()).sum(-1)
    out.transpose(0, -1)[1].add_(x.transpose(0, -1)[1])
    return out


FILLED = {"halves": _halves, "pairs": _pairs, "elsewhere": _elsewhere}
"""Rotary embeddings, and another filling, written into a new tensor through views of it that are held."""


@pytest.mark.parametrize("name", FILLED)
def test_queries_and_keys_filled_through_held_views(name: str) -> None:
    program = lambda p: sdpa({**p, **{k: FILLED[name](p[k], p["angle"]) for k in "qk"}})  # noqa: E731
    check(program, {**selection_leaves(), "angle": normal(2, seed=8)}, routed={"selection_attention": 1})


@pytest.mark.parametrize("name", FILLED)
def test_streams_filled_through_held_views(name: str) -> None:
    leaves = {**mhc_leaves(), "angle": normal(2, seed=8)}
    check(lambda p: block(FILLED[name](p["x"], p["angle"]), p), leaves, routed=MHC)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", FILLED)
@laws.law_of(lambda: {**selection_leaves(), "angle": normal(2, seed=8)}, named=["selection"])
def test_queries_filled_again_between_two_attentions(p: Leaves, name: str, grad: bool) -> Any:
    out = FILLED[name](p["q"], p["angle"])
    held = out[..., 2:]
    first = sdpa({**p, "q": out})
    with torch.set_grad_enabled(grad):
        held[..., 0] = p["q"][..., 0] * 2.0
    return first, sdpa({**p, "q": out}), sdpa({**p, "q": held, "k": p["k"][..., 2:]}), out


@laws.law_of(lambda: {**selection_leaves(), "angle": normal(2, seed=8)}, named=["selection"])
def test_a_held_view_is_read_before_and_after_the_tensor_is_filled(p: Leaves) -> Any:
    out = p["q"] * 1.0
    held = out.view(*out.shape)
    first = sdpa({**p, "q": held})
    out[..., 2:].mul_(p["angle"].sum())
    return first, sdpa({**p, "q": held})


@pytest.mark.parametrize("name", THREE)
def test_an_attention_with_writes_after_it_is_routed(name: str) -> None:
    check(lambda p: written(WRITES[name], False)(sdpa(p) + 0.0), selection_leaves(), routed={"selection_attention": 1})


@laws.law_of(selection_leaves, named=["selection"])
def test_ranges_written_between_two_attentions(p: Leaves) -> Any:
    ranges = p["ranges"].clone()
    first = sdpa({**p, "ranges": ranges})
    torch._foreach_sub_([ranges], 1)
    return first, sdpa({**p, "ranges": ranges})


def test_in_place_activations_of_modules_in_the_sublayer() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(16, 16).double(), torch.nn.ReLU(True), torch.nn.Dropout(0.0, True))

    def program(p: Leaves) -> Any:
        h_in, h_post, res = pre(p["x"], p)
        return post(p["x"], F.leaky_relu(net(h_in), 0.1, True), h_post, res)

    check(program, mhc_leaves(), routed=MHC)


@pytest.mark.parametrize("write", ["detached", "select_written", "set_data", "packet_returning"])
def test_a_write_after_two_operators_replaced_what_it_writes(write: str) -> None:
    """Writes a view of a tensor whose producer is replaced twice, by an op and by the fused op."""
    leaves = mhc_leaves()

    def fn(p: Leaves) -> Any:
        x = block(p["x"], p)
        h, hp, r = pre(x, p)
        with torch.no_grad():
            WRITES[write](h)
        return post(x, torch.tanh(h @ p["w"]), hp, r), h

    check(fn, leaves)


@pytest.mark.parametrize("write", ["imul", "zero_", "packet", "set_data"])
@pytest.mark.parametrize("which", ["q", "k", "v"])
@laws.law_of(selection_leaves, named=["selection"])
def test_an_input_written_after_the_op_that_keeps_it(p: Leaves, which: str, write: str) -> Any:
    """Writes an input of sdpa: PyTorch keeps scaled copies for its backward, the op keeps the tensors themselves."""
    given = {**p, which: p[which] * 1.0}
    o = sdpa(given)
    with torch.no_grad():
        WRITES[write](given[which])
    return o, given[which] * 2


@laws.law_of(mhc_leaves, named=["mhc"])
def test_coefficients_that_autograd_does_not_keep_are_returned_and_written(p: Leaves) -> Any:
    x = p["x"].detach()
    h, hp, r = pre(x, p)
    return r, hp, post(x, torch.tanh(h @ p["w"]), hp, r.transpose(-1, -2))


def test_only_the_copy_of_a_refused_match_is_undone() -> None:
    """Copies x, a returned result of one op, as the input of another op, which a hook then forbids."""

    def program(p: Leaves) -> Any:
        p = {k: t.float() for k, t in p.items()}
        x = block(p["x"], p)
        h, hp, r = pre(x, p, {"logits": laws.hooked(lambda g: g.clamp(-0.5, 0.5))})
        return hp, x, h.transpose(0, 1), post(x, torch.tanh(h @ p["w"]), hp, r.transpose(-1, -2)).detach()

    assert not check(program, mhc_leaves(), named=["mhc"], tolerance=1e-4).report.problems
