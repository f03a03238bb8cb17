# SPDX-License-Identifier: Apache-2.0
"""Law 5: hooks, aliases, requires_grad, and None instead of zero gradients stay as in the model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import mhc_inductor
from mhc_inductor.routing import interface
from mhc_inductor.routing.edit import Edit, Pairs
from mhc_inductor.routing.interface import Match
from tests.formulas import laws
from tests.formulas.gated_norm import GatedNorm, norm_formula
from tests.formulas.laws import FORMULAS, MHC, Leaves, block, check, e79, e79_leaves, mhc_leaves, normal, pre, sdpa
from tests.tools.capture import alike

SCAN, SELECTION, TRAIN = {"e79_scan": 1}, {"selection_attention": 1}, {"modes": ["train"]}
HOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "halve": laws.hooked(lambda g: g * 0.5),
    "clip": laws.hooked(lambda g: g.clamp(-0.05, 0.05)),
    "norm": laws.hooked(lambda g: g / (g.norm() + 1e-3)),
}
HOOKED = [
    *(("mhc", place, hook) for place in laws.MHC_PLACES for hook in ("halve", "clip")),
    *(("e79", f"{name}{t}", hook) for name in "SM" for t in (1, 2, 3) for hook in ("clip", "norm")),
    *(
        ("e79", place, hook)
        for place in ("out0", "out2", "k1", "v1", "delta1", "S0", "kvqm")
        for hook in ("clip", "norm")
    ),
    *(("selection", place, "clip") for place in ("q", "k", "scores", "masked", "weights", "o")),
]


@pytest.mark.parametrize(("family", "place", "hook"), HOOKED)
def test_a_hook_on_a_value_inside_a_formula(family: str, place: str, hook: str) -> None:
    laws.changed(family, {place: HOOKS[hook]}, fresh=True, **TRAIN)


def _kept(family: str, places: Sequence[str], now: str = "", late: str = "", returned: bool = False) -> None:
    """Checks a formula some of whose values get a hook where they are made, or after all of it, and are returned."""

    def program(p: Leaves) -> Any:
        kept: list[Tensor] = []

        def keep(t: Tensor) -> Tensor:
            kept.append(t)
            return HOOKS[now](t) if now else t

        out = FORMULAS[family][0](p, dict.fromkeys(places, keep))
        for t in kept if late else ():
            HOOKS[late](t)
        return (out, kept) if returned else out

    for autograd in (True, False) if late else (True,):
        check(program, FORMULAS[family][1](), named=[family], autograd=autograd, **TRAIN)


def _retained(t: Tensor) -> Tensor:
    if t.requires_grad:
        t.retain_grad()
    return t


HOOKS["retain"] = _retained


@pytest.mark.parametrize(
    ("places", "hook"),
    [(["h_in"], "clip"), (["h_post"], "clip"), (["res"], "clip"), (["x_out"], "clip"), (["h_in", "x_out"], "retain")],
    ids=str,
)
def test_a_hook_on_a_value_that_is_returned_and_used(places: list[str], hook: str) -> None:
    _kept("mhc", places, now=hook, returned=True)


@pytest.mark.parametrize("last", [True, False], ids=["the last state alone", "every state"])
@laws.law_of(e79_leaves, named=["e79"], **TRAIN)
def test_states_hooked_and_returned(p: Leaves, last: bool) -> Any:
    states: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        states.append(t)
        return HOOKS["clip"](t) if not last or len(states) == 3 else t

    return laws.loop(p, {f"S{t}": keep for t in (1, 2, 3)})[0].sum(), states


@pytest.mark.parametrize("which", [["S1"], ["S3"], ["M2"], ["S1", "S2", "S3"], ["out1"]], ids="+".join)
def test_states_hooked_after_the_loop(which: list[str]) -> None:
    """Hooks the states after the loop, as trainers of recurrences do to clip gradients."""
    _kept("e79", which, late="clip")


# z goes away with the formula: of these it alone fails where a hook is not looked for.
@pytest.mark.parametrize("place", ["h_in", "h_post", "res", pytest.param("z", marks=pytest.mark.every_case)])
def test_values_of_a_block_hooked_after_it(place: str) -> None:
    _kept("mhc", [place], late="clip")


# --- memory -------------------------------------------------------------------------------------------------

RETURNS: dict[str, Callable[[list[Tensor], Tensor, Tensor], Any]] = {
    "stack and last": lambda outs, S, M: (torch.stack(outs), outs[-1]),
    "stack and first": lambda outs, S, M: (torch.stack(outs), outs[0], S),
    "list": lambda outs, S, M: (*outs, S, M),
    "stack twice": lambda outs, S, M: (torch.stack(outs), torch.stack(outs)),
    "stack and its view": lambda outs, S, M: (lambda s: (s, s[-1]))(torch.stack(outs)),
    "stack along batch and last": lambda outs, S, M: (torch.stack(outs, 1), outs[-1]),
    "cat and last": lambda outs, S, M: (torch.cat(outs), outs[-1]),
    "states": lambda outs, S, M: (S, M, S + M),
    "state twice": lambda outs, S, M: (S, S, M),
    "two stacks": lambda outs, S, M: (torch.stack(outs), torch.stack(outs), torch.stack(outs, 1)),
    "cat and stack": lambda outs, S, M: (torch.cat(outs), torch.stack(outs)),
    "stack of views": lambda outs, S, M: (torch.stack([o[:, :2] for o in outs]), torch.stack(outs)),
    "stack of all of a view": lambda outs, S, M: (torch.stack([o[:, :] for o in outs]), torch.stack(outs)),
    "views": lambda outs, S, M: (outs[-1], outs[-1].view(-1), S, S.mT, torch.stack(outs)),
    "twice": lambda outs, S, M: (S, S, outs[0], outs[0]),
    "written last": lambda outs, S, M: (torch.stack(outs), outs[-1].mul_(2.0), outs[1] * 1.0),
    "written stack": lambda outs, S, M: (torch.stack(outs).mul_(2.0), outs[-1] * 1.0),
    "written view": lambda outs, S, M: (torch.stack(outs), outs[0][0].zero_(), outs[0] * 2.0),
}


# Of one sequence, the pass fails at "stack of views" and leaves the loop alone, which it reports.
CALLS = [(how, batch) for how in RETURNS for batch in (1, 2) if (how, batch) != ("stack of views", 1)]


@pytest.mark.parametrize(("how", "batch"), CALLS)
def test_outputs_of_a_loop_share_memory_as_before(how: str, batch: int) -> None:
    check(lambda p: RETURNS[how](*e79(p)), e79_leaves(batch=batch), routed=SCAN)


@laws.law_of(e79_leaves, named=["e79"])
def test_two_equal_loops_are_no_aliases(p: Leaves) -> Any:
    first, second = e79(p), e79(p)
    return torch.stack(first[0]), first[1], torch.stack(second[0]), second[1], first[2]


ALIASES: dict[str, tuple[str, Callable[[Leaves], Any]]] = {
    "two equal blocks": (
        "mhc",
        lambda p: (block(p["x"], p), block(p["x"], p), laws.head(p["x"], p), laws.head(p["x"], p)),
    ),
    "two equal attentions": ("selection", lambda p: (sdpa(p), sdpa(p))),
    "parts of a block": ("mhc", lambda p: (h := pre(p["x"], p), h[0].unsqueeze(0), h[2].transpose(-1, -2))),
}


@pytest.mark.parametrize("how", ALIASES)
def test_results_share_memory_as_before(how: str) -> None:
    family, program = ALIASES[how]
    check(program, FORMULAS[family][1](), named=[family])


@pytest.mark.parametrize("tokens", [1, 6])
def test_streams_returned_with_what_is_made_of_them(tokens: int) -> None:
    check(lambda p: (p["x"].view(-1), block(p["x"], p), p["x"]), mhc_leaves(tokens=tokens), routed=MHC)


# --- what requires grad, and what gets no gradient ----------------------------------------------------------


FROZEN = [
    *(("mhc", names) for names in ["phi", "alpha", "bias", "gamma", "x", "w", "phi alpha bias gamma", "x phi"]),
    *(("e79", names) for names in ["kvqm", "S M", "b_s", "kvqm b_s S M", "kvqm b_s b_m"]),
    *(("selection", names) for names in ["q", "k", "v", "q k", "k v"]),
]


@pytest.mark.parametrize(("family", "frozen"), FROZEN)
def test_frozen_inputs_get_no_gradient(family: str, frozen: str) -> None:
    program, leaves, _ = FORMULAS[family]
    routed = {"mhc": MHC, "e79": SCAN, "selection": SELECTION}[family]
    check(sdpa if family == "selection" else program, leaves(), routed=routed, frozen=frozen.split(), **TRAIN)


PARTS = {"pre": slice(0, 4), "post": slice(4, 8), "res": slice(8, 24)}


def _part_leaves(name: str) -> Leaves:
    leaves = {k: t for k, t in mhc_leaves().items() if k != "gamma"}
    whole = leaves.pop(name)
    cut = {k: slice(i, i + 1) for i, k in enumerate(PARTS)} if name == "alpha" else PARTS
    return {**leaves, **{f"{name}_{k}": whole[where].clone() for k, where in cut.items()}}


@pytest.mark.parametrize("name", ["phi", "bias", "alpha"])
@pytest.mark.parametrize("trained", ["pre", "post", "res"])
def test_one_part_of_a_parameter_trains(trained: str, name: str) -> None:
    """Concatenates phi, alpha or bias from three parts, two of them constants."""
    program = lambda p: block(p["x"], {**p, name: torch.cat([p[f"{name}_{k}"] for k in PARTS])})  # noqa: E731
    frozen = [f"{name}_{k}" for k in PARTS if k != trained] + ["x", "w", "phi", "bias", "alpha"]
    check(program, _part_leaves(name), named=["mhc"], modes=["train"], frozen=frozen)


def _separate(p: Leaves) -> tuple[Tensor, Tensor, Tensor]:
    """Computes three projections, each with its own parameters."""
    x = p["x"]
    v = x.flatten(-2)
    u = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6)
    h_pre = torch.sigmoid(p["alpha_pre"] * (u @ p["phi_pre"].t()) + p["bias_pre"]) + 1e-6
    h_post = 2 * torch.sigmoid(p["alpha_post"] * (u @ p["phi_post"].t()) + p["bias_post"])
    res = (p["alpha_res"] * (u @ p["phi_res"].t()) + p["bias_res"]).unflatten(-1, (4, 4))
    return (h_pre.unsqueeze(-1) * x).sum(-2), h_post, res


def _balanced(p: Leaves) -> tuple[Tensor, Tensor, Tensor]:
    h_in, h_post, res = _separate(p)
    return h_in, h_post, laws.sinkhorn(res)


def _separate_leaves() -> Leaves:
    leaves: Leaves = {"x": mhc_leaves()["x"]}
    for name in ("phi", "bias", "alpha"):
        leaves |= {k: t for k, t in _part_leaves(name).items() if k.startswith(f"{name}_")}
    return leaves


def test_parts_are_not_rounded_to_the_dtype_of_one() -> None:
    given = {**(p := _separate_leaves()), "bias_pre": p["bias_pre"].float()}
    fn = lambda *leaves: _balanced(dict(zip(given, leaves, strict=True)))  # noqa: E731
    alike(fn, [*given.values()], ops={"mhc_pre": 1}, grad=False, within=1e-12)


ONE = ["phi_pre", "phi_post", "phi_res", "bias_pre", "bias_res", "alpha_post", "x"]
ROLES = ["", "pre", "post", "res", "pre res", "pre post res"]


@pytest.mark.parametrize("trained", [*ONE, *ROLES, *(f"{roles} x" for roles in ROLES)])
def test_outputs_require_grad_only_where_a_part_of_theirs_trains(trained: str) -> None:
    """Trains one leaf, or phi, alpha and bias of some roles."""
    leaves, names = _separate_leaves(), trained.split()
    frozen = [k for k in leaves if k not in names and k.partition("_")[2] not in names]
    if trained in ONE:
        check(_separate, leaves, named=["mhc"], modes=["train"], frozen=frozen)
    else:
        check(_balanced, leaves, routed={"mhc_pre": 1}, frozen=frozen)


@pytest.mark.parametrize("trained", ["pre", "post", "res", "pre post res"])
@pytest.mark.parametrize("cut", ["pre", "post", "res", "post res"])
def test_parts_behind_a_detach_get_no_gradient(cut: str, trained: str) -> None:
    def program(p: Leaves) -> Tensor:
        made = dict(zip(ROLES[1:4], _balanced(p), strict=True))
        h_in, h_post, res = (t.detach() if role in cut.split() else t for role, t in made.items())
        return h_post.unsqueeze(-1) * torch.tanh(h_in).unsqueeze(-2) + res @ p["x"]

    for names in (trained.split(), [*trained.split(), "x"]):
        leaves = _separate_leaves()
        frozen = [k for k in leaves if k not in names and k.partition("_")[2] not in names]
        assert check(program, leaves, modes=["train"], frozen=frozen).ops["mhc_pre"] == 1


def test_truncated_backpropagation_over_coefficients() -> None:
    """Carries h_post of frozen parts from one chunk to the next: it must have no autograd graph."""
    p = {k: t.requires_grad_(k.endswith("_pre")) for k, t in _separate_leaves().items()}
    found = laws.Compiled(autograd=False)

    def step(x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        h_in, h_post, _ = _balanced({**p, "x": x})
        return (h_in * before.unsqueeze(-1).sum(-2)).sum(), h_post

    torch._dynamo.reset()
    compiled, carried = torch.compile(step, backend=found.backend), torch.ones(6, 4, dtype=torch.float64)
    for _ in range(3):
        loss, carried = compiled(p["x"], carried)
        assert not carried.requires_grad and found.ops["mhc_pre"]
        loss.backward()


@pytest.mark.parametrize("trained", ["b_s", "b_m", "M"])
def test_results_of_one_step_require_grad_only_where_a_part_of_theirs_trains(trained: str) -> None:
    """The outputs and S of a single step depend on no b_m."""
    leaves = e79_leaves(1)
    check(laws.loop, leaves, named=["e79"], modes=["train"], frozen=[k for k in leaves if k != trained])


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("used", [[0], [1], [2], [0, 1], [1, 2]], ids=str)
def test_parts_that_no_output_needs_get_no_gradient(used: list[int], separate: bool) -> None:
    formula = _separate if separate else lambda p: pre(p["x"], p)
    check(
        lambda p: [formula(p)[i] for i in used],
        _separate_leaves() if separate else mhc_leaves(),
        named=["mhc"],
        **TRAIN,
    )


class _Zeros(GatedNorm):
    """Gives zeros to the weight that the formula reads detached."""

    def emit(self, edit: Edit, match: Match) -> Pairs:
        x, detached, gate = map(edit.input, match.inputs)
        weight = edit.emit("add", detached, edit.emit("mul", detached.args[0], 0.0))
        call = edit.emit(self.op, x, weight, gate, match.data)
        return [(match.outputs[0], edit.as_like(call, match.outputs[0]))]


@pytest.mark.parametrize("trained", [False, True])
def test_an_op_gives_zeros_only_to_what_gets_a_gradient_anyway(trained: bool) -> None:
    def program(p: Leaves) -> Any:
        normed = norm_formula(p["x"], p["weight"].detach(), p["gate"], 1e-6)
        return normed, p["weight" if trained else "x"] * 2.0

    leaves = {"x": normal(6, 16, seed=1), "weight": normal(16, seed=2), "gate": normal(6, 16, seed=3)}
    interface.register(_Zeros)
    try:
        found = check(program, leaves, modes=["train"], unrouted="" if trained else "gated_norm")
    finally:
        interface.unregister(_Zeros.name)
    assert [one.op for one in found.report.routed] == ["gated_norm"] * trained


@pytest.mark.parametrize("used", ["outs", "S", "M", "first out", "S and M"])
def test_inputs_of_a_loop_that_no_output_needs_get_no_gradient(used: str) -> None:
    def program(p: Leaves) -> Any:
        outs, S, M = e79(p)
        return {"outs": torch.stack(outs), "S": S, "M": M, "first out": outs[0], "S and M": (S, M)}[used]

    check(program, e79_leaves(), named=["e79"], modes=["train"])
    check(program, e79_leaves(1), named=["e79"], modes=["train"])


def test_truncated_backpropagation_through_chunks() -> None:
    """Starts the second chunk from detached states of the first; each chunk has its own backward."""

    def chunk(kvqm: Tensor, S: Tensor, M: Tensor, b_s: Tensor, b_m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return laws.loop({"kvqm": kvqm, "S": S, "M": M, "b_s": b_s, "b_m": b_m})

    def train(call: Callable[..., Any], state_grad: bool) -> list[Tensor]:
        p = {k: t.clone().requires_grad_(k.startswith("b_")) for k, t in e79_leaves(6).items()}
        S, M, seen = p["S"], p["M"], []
        for part in p["kvqm"].split(3):
            out, S, M = call(part, S, M, p["b_s"], p["b_m"])
            out.square().sum().backward()
            seen += [out.detach(), S.detach()]
            S, M = S.detach().requires_grad_(state_grad), M.detach()
        return [*seen, *(g for t in p.values() if (g := t.grad) is not None)]

    for state_grad in (False, True):
        torch._dynamo.reset()
        compiled = laws.Compiled()
        got = train(torch.compile(chunk, backend=compiled.backend, dynamic=False), state_grad)
        want = train(chunk, state_grad)
        assert len(got) == len(want) and all(torch.allclose(a, b, 1e-9, 1e-12) for a, b in zip(got, want, strict=True))
        assert compiled.ops["e79_scan"]


def test_detached_streams_or_parameters() -> None:
    """Detaches the streams, and then the parameters, as truncated backpropagation does in its second chunk."""
    check(lambda p: block(p["x"].detach(), p), mhc_leaves(), routed=MHC, modes=["train"])
    check(lambda p: block(p["x"], {k: t.detach() for k, t in p.items()}), mhc_leaves(), routed=MHC, modes=["train"])


# --- checkpoint ---------------------------------------------------------------------------------------------


POLICIES: dict[str, tuple[str, ...] | None] = {
    "none": None,
    "matmuls": ("aten.mm", "aten.addmm", "aten.bmm"),
    "pre": ("mhc_pre",),
    "pre and post": ("mhc_pre", "mhc_post"),
    "nothing": (),
    "every op": tuple(op.name().removeprefix("mhc_inductor::") for op in mhc_inductor.ops_to_save()),
}


def checkpointed(fn: Callable[..., Any], policy: str, *given: Any) -> Any:
    """Calls ``fn(*given)`` under activation checkpointing with a policy."""
    names = POLICIES[policy]
    if names is None:
        return checkpoint(fn, *given, use_reentrant=False)

    def chosen(ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        save = str(op).removeprefix("mhc_inductor.").removesuffix(".default") in names
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    context = functools.partial(create_selective_checkpoint_contexts, chosen)
    return checkpoint(fn, *given, use_reentrant=False, context_fn=context)


@pytest.mark.parametrize("policy", POLICIES)
def test_checkpointed_blocks_give_the_same(policy: str) -> None:
    """Nothing is fused where a policy decides what is saved, and a near miss names ``ops_to_save``."""
    program = lambda p: checkpointed(lambda x: block(block(x, p), p), policy, p["x"])  # noqa: E731
    found = check(program, mhc_leaves(), routed={"mhc_pre": 2, "mhc_post": 2}, **TRAIN)
    assert [f.op for f in found.report.fused] == ["mhc_post_pre"] * (policy == "none")
    assert ("ops_to_save" in str(found.near)) == (policy != "none")


@pytest.mark.parametrize("policy", ["pre and post", "pre"])
def test_what_a_policy_saves_is_not_computed_again(policy: str) -> None:
    """Checks that the backward graph runs no forward of a saved op."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    counted: list[list[str]] = []

    def boxed(gm: torch.fx.GraphModule, _: Any) -> Any:
        counted.append([str(n.target) for n in gm.graph.nodes if str(n.target).startswith("mhc_inductor.")])
        return make_boxed_func(gm.forward)

    def backend(gm: torch.fx.GraphModule, example: Any) -> Any:
        laws.Compiled(autograd=False).backend(gm, example)
        inner = aot_autograd(fw_compiler=boxed, bw_compiler=boxed, partition_fn=min_cut_rematerialization_partition)
        return inner(gm, example)

    def program(p: Leaves) -> Any:
        return checkpointed(lambda x: block(block(x, p), p), policy, p["x"])

    torch._dynamo.reset()
    got = laws.observe(torch.compile(program, backend=backend, dynamic=False), mhc_leaves())
    assert not got.error, got.error
    forward, backward = counted
    again = [op for op in backward if "backward" not in op]
    saved = POLICIES[policy] or ()
    # A fused op in the backward recomputes its parts.
    fused = {"mhc_post_pre": ("mhc_post", "mhc_pre")}
    parts = [p for op in again for p in fused.get(op.split(".")[1], (op.split(".")[1],))]
    assert forward and not [part for part in parts if part in saved], (forward, backward)


@pytest.mark.parametrize("policy", ["none", "matmuls"])
def test_checkpointed_loops_and_attentions_give_the_same(policy: str) -> None:
    again = lambda p: checkpointed(lambda kvqm: laws.loop({**p, "kvqm": kvqm}), policy, p["kvqm"])  # noqa: E731
    check(again, e79_leaves(), named=["e79"], modes=["train"])
    check(
        lambda p: checkpointed(lambda q: sdpa({**p, "q": q}), policy, p["q"]), laws.selection_leaves(), modes=["train"]
    )


def _hides(scores: Tensor, mask: Tensor) -> Tensor:
    """Hides some keys in two ways: only without gradients to q and k is it known what rows without keys give."""
    return laws.added(-torch.inf)(laws.filled(-torch.inf)(scores, mask), mask)


def _region(p: Leaves) -> Tensor:
    return laws.attention(p, fill=_hides, at={"weights": torch.nan_to_num})


def _regions(p: Leaves) -> Tensor:
    inner = functools.partial(checkpoint, _region, use_reentrant=False)
    return checkpoint(inner, p, use_reentrant=False)  # type: ignore[no-any-return]


BEFORE: dict[str, Callable[[Leaves], Tensor]] = {
    "nothing": lambda p: p["q"],
    "computed": lambda p: p["q"] * 2,
    "written": lambda p: p["q"].clone().mul_(2),
    "trained": lambda p: p["q"] * p["v"].mean(),
    "written, trained": lambda p: p["q"].clone().mul_(p["v"].mean()),
    "detached": lambda p: (p["q"] * p["v"].mean()).detach(),
}
"""What becomes of q before a checkpointed region."""


@pytest.mark.parametrize("region", [_region, _regions])
@pytest.mark.parametrize("before", BEFORE)
def test_inputs_of_a_region_without_gradients(before: str, region: Callable[[Leaves], Tensor]) -> None:
    program = lambda p: checkpoint(region, {**p, "q": BEFORE[before](p)}, use_reentrant=False)  # noqa: E731
    leaves, trained = laws.selection_leaves(empty=True), before.endswith("trained")
    how: dict[str, Any] = {"unrouted": "selection_attention"} if trained else {"routed": SELECTION}
    check(program, leaves, modes=["train"], frozen="qk", **how)
    check(program, leaves, modes=["train"], frozen="k" if before != "detached" else "q", unrouted="selection_attention")


def test_an_input_of_a_region_that_gets_a_gradient_inside() -> None:
    inside = lambda p: lambda q: _region({**p, "q": q * p["v"].mean()})  # noqa: E731
    program = lambda p: checkpoint(inside(p), p["q"], use_reentrant=False)  # noqa: E731
    check(program, laws.selection_leaves(empty=True), modes=["train"], frozen="qk", unrouted="selection_attention")


@pytest.mark.parametrize("trained", [False, True])
def test_a_mask_that_is_passed_to_a_region_is_named_as_trained_if_it_is(trained: bool) -> None:
    attend = lambda p: lambda q: laws.attention({**p, "q": q}, fill=lambda scores, _: scores + p["mask"])  # noqa: E731
    program = lambda p: checkpoint(attend(p), p["q"], use_reentrant=False)  # noqa: E731
    leaves = {**laws.selection_leaves(), "mask": normal(2, 4, 6, 12, seed=25)}
    found = check(program, leaves, modes=["train"], frozen=() if trained else ["mask"], unrouted="selection_attention")
    assert ("is trained" in found.near["selection_attention"]) == trained


@pytest.mark.parametrize("used", ["outs", "last outs", "biases"])
@laws.law_of(e79_leaves, named=["e79"], modes=["train"])
def test_results_of_a_loop_written_before_the_backward(p: Leaves, used: str) -> Any:
    p = {**p, "b_s": p["b_s"] * 2, "b_m": p["b_m"] * 2}
    outs, _, _ = e79(p)
    return {"outs": torch.stack(outs), "last outs": outs[1:], "biases": (p["b_s"], p["b_m"], *outs)}[used]


def test_a_bias_written_before_the_backward() -> None:
    program = lambda p: (block(p["x"], {**p, "bias": (bias := p["bias"] * 2)}), bias)  # noqa: E731
    check(program, mhc_leaves(), named=["mhc"], modes=["train"])


@laws.law_of(mhc_leaves, routed=MHC, modes=["train"])
def test_streams_that_only_the_op_keeps_are_written_before_the_backward(p: Leaves) -> Any:
    x = p["x"] * 1.0
    with torch.no_grad():
        h_in, h_post, h_res = pre(x, p)
    return x.detach(), laws.post(x, torch.tanh(h_in @ p["w"]), h_post, h_res)


@pytest.mark.parametrize("which", [1, 2])
@laws.law_of(mhc_leaves, named=["mhc"], frozen=["x", "w"], modes=["train"])
def test_coefficients_that_only_the_op_keeps_are_written_before_the_backward(p: Leaves, which: int) -> Any:
    """Writes h_post or h_res, which the formula does not keep for its backward, since f_out and x need no gradients."""
    x = p["x"]
    found = pre(x, p)
    out = laws.post(x, torch.tanh(found[0].detach() @ p["w"]), *found[1:])
    return found[which], out


@pytest.mark.parametrize("which", [0, 1, 2])
@laws.law_of(e79_leaves, named=["e79"], modes=["train"], steps=False)
def test_a_result_of_a_loop_written_through_its_data_before_the_backward(p: Leaves, which: int) -> Any:
    """Writes through ``.data``: eager's gradients see it where autograd kept the tensor, the op's own never do."""
    outs, S, M = e79(p)
    with torch.no_grad():
        (outs[-1], S, M)[which].data.mul_(0.5)
    return outs[-1], S, M


def _overwritten(t: Tensor, e: Tensor) -> Tensor:
    y = t * 0.5 + e
    with torch.no_grad():
        y.copy_(t)
    return y


STRAIGHT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "added": lambda t, e: t + (e - e.detach()),
    "multiplied": lambda t, e: t * ((e + 8.0) / (e + 8.0).detach()),
    "overwritten": _overwritten,
}


@pytest.mark.parametrize(
    ("family", "place"), [*(("mhc", place) for place in laws.MHC_PLACES), *(("selection", place) for place in "qkv")]
)
@pytest.mark.parametrize("how", STRAIGHT)
def test_a_gradient_without_a_value_passes_a_formula(how: str, family: str, place: str) -> None:
    """Straight-through estimators: no value depends on e, but e gets a gradient that is not zero."""
    at = lambda p: {place: lambda t: STRAIGHT[how](t, p["e"].mean())}  # noqa: E731
    laws.changed(family, at, more={"e": normal(6, seed=7)}, **TRAIN)
