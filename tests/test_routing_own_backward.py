# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn iterations in an autograd.Function: looked through where the backward is the derivative of the forward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import mhc_inductor
from mhc_inductor.routing.operators.mhc import own_backward
from tests.formulas.reference_models_mhc import ITERS, WIDTH, N, around, parameters
from tests.test_routing_mhc_laws import reasons, streams
from tests.tools.attentions import equal
from tests.tools.capture import Captured, alike, difference, eager, looking, run, through_inductor

EPS = 1e-6
LOOKED_THROUGH = {"mhc_pre": 1, "mhc_post": 1, "mhc_sinkhorn": 1}
OWN = "of an autograd.Function whose backward is their derivative"
DIFFERS = "mhc_sinkhorn: the backward of this autograd.Function is not the derivative of its forward: run in fp64, "
UNKNOWN = (
    "mhc_sinkhorn: the backward of this autograd.Function could not be compared with the derivative of its forward: "
    "it names positions, and the number of tokens may change"
)
Fn = Callable[..., Any]


def steps(form: str, logits: Tensor, eps: float = EPS) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
    """Yields (matrix, sums, divisor, dim) after each division."""
    of = (-1, -2) if form == "exp_eps of the whole" else -1
    m = logits.softmax(-1) + eps if form == "softmax" else torch.exp(logits - logits.amax(of, keepdim=True))
    for dim in [-2, *[-1, -2] * (ITERS - 1)] if form == "softmax" else [-1, -2] * ITERS:
        sums = m.sum(dim, keepdim=True)
        divisor = sums.clamp(min=eps) if form == "exp" else sums + eps
        m = m / divisor
        yield m, sums, divisor, dim


def iterations(form: str, logits: Tensor, eps: float = EPS) -> Tensor:
    return [m for m, *_ in steps(form, logits, eps)][-1]


def by_hand(form: str, logits: Tensor, grad: Tensor, eps: float = EPS) -> Tensor:
    """Returns the gradient by the closed form of each step."""
    for m, sums, divisor, dim in reversed([*steps(form, logits, eps)]):
        inner = (grad * m).sum(dim, keepdim=True)
        grad = (grad - (torch.where(sums >= eps, inner, 0.0) if form == "exp" else inner)) / divisor
    if form == "softmax":
        p = logits.softmax(-1)
        return p * (grad - (grad * p).sum(-1, keepdim=True))
    grad = grad * torch.exp(logits - (peak := logits.amax(-1, keepdim=True)))
    if form == "exp":
        return grad
    top = logits == peak  # the maximum does not cancel from sums with an eps
    return grad - top * grad.sum(-1, keepdim=True) / top.sum(-1, keepdim=True)


def by_autograd(form: str, logits: Tensor, grad: Tensor) -> Tensor:
    with torch.enable_grad():
        again = logits.detach().requires_grad_(True)
        return torch.autograd.grad(iterations(form, again), again, grad)[0]


def by_backward(form: str, logits: Tensor, grad: Tensor) -> Tensor:
    """Megatron-LM's: runs the iterations again, and their backward."""
    with torch.enable_grad():
        again = logits.detach().requires_grad_(True)
        iterations(form, again).backward(grad)
    assert again.grad is not None
    return again.grad


def own(forward: Fn, backward: Fn) -> Fn:
    """Returns the ``apply`` of a Function; its backward gets what the forward got, and the gradients."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Tensor) -> Any:
            ctx.save_for_backward(*given)
            return forward(*given)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return backward(*ctx.saved_tensors, *grads)

    return Own.apply


def function(backward: Fn, form: str) -> Fn:
    """Returns the ``apply`` of a Function of the iterations with this backward."""
    return own(functools.partial(iterations, form), functools.partial(backward, form))


def both(matrix: Fn, ops: Any = None, **options: Any) -> Captured:
    """Runs a site with these iterations as ``alike`` does."""
    p = parameters()
    fn = functools.partial(around, p=p, matrix=matrix)
    return alike(fn, (streams(),), p.items(), ops, dynamic=None, **options)


def stays(matrix: Fn) -> Captured:
    """Runs a site with these iterations, whose Function stays in the graph."""
    got = both(matrix)
    assert "autograd_function_apply" in str(got.graphs[0].graph), reasons(got)
    return got


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("form", ["softmax", "exp"])
def test_a_derivative_written_by_hand(form: str, dynamic: bool) -> None:
    got = both(function(by_hand, form), LOOKED_THROUGH, symbolic=(0, 1) if dynamic else ())
    assert [r.op for r in got.report.routed if r.detail.endswith(OWN)] == ["mhc_sinkhorn"]
    assert not got.report.near_misses and "autograd_function_apply" not in str(got.graphs[0].graph)


@pytest.mark.skipif(not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="Dynamo breaks the graph there")
@pytest.mark.parametrize("backward", [by_autograd, by_backward])
def test_a_backward_that_runs_the_iterations_again(backward: Fn) -> None:
    """Megatron's, where Dynamo traces it: then all leaf tensors are arguments of the Function's call."""
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        assert not both(function(backward, "softmax"), LOOKED_THROUGH).report.near_misses


def test_a_backward_that_breaks_the_graph_stays_right() -> None:
    got = both(function(by_backward, "softmax"))
    assert got.ops["mhc_pre"] == got.ops["mhc_post"] == 1


def test_where_the_backward_breaks_the_graph_the_report_says_what_dynamo_cannot_trace() -> None:
    p, balanced = parameters(), function(by_backward, "softmax")
    report = mhc_inductor.explain(lambda x: around(x, p, balanced), torch.randn(2, 3, N, WIDTH, requires_grad=True))
    (why,) = [m.reason for m in report.near_misses if "Dynamo breaks the graph" in m.reason]
    assert "Tensor.backward()" in why or "Dynamo does not support changes to a Tensor" in why  # torch 2.11
    assert [r.op for r in report.routed] == ["mhc_pre", "mhc_sinkhorn", "mhc_post"]


def test_wider_arithmetic_inside_and_the_transpose() -> None:
    """Checks bf16 logits that the Function computes in fp32, and iterations that begin with columns."""
    balanced = own(
        lambda logits: iterations("exp", logits.float()).to(logits.dtype),
        lambda logits, grad: by_hand("exp", logits.float(), grad.float()).to(logits.dtype),
    )
    both(lambda m: balanced(m.bfloat16()).float(), LOOKED_THROUGH, within=2e-2)

    def columns_first(logits: Tensor) -> Tensor:
        m = torch.exp(logits - logits.amax(-2, keepdim=True))
        for dim in [-2, -1] * ITERS:
            m = m / m.sum(dim, keepdim=True).clamp(min=EPS)
        return m

    turn = lambda t: t.transpose(-1, -2)  # noqa: E731
    turned = own(columns_first, lambda logits, grad: turn(by_hand("exp", turn(logits), turn(grad))))
    both(turned, LOOKED_THROUGH)


def test_layers_are_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    p, balanced, calls = parameters(), function(by_hand, "softmax"), list[object]()
    proof = own_backward._difference
    monkeypatch.setattr(own_backward, "_difference", lambda f: (calls.append(f), proof(f))[1])
    layers, ops = (lambda x: around(around(x, p, balanced), p, balanced)), {k: 2 * n for k, n in LOOKED_THROUGH.items()}
    alike(layers, (streams(),), p.items(), ops, dynamic=None)
    assert len(calls) == 1


def _constant_sums(form: str, logits: Tensor, grad: Tensor) -> Tensor:
    for *_, divisor, _ in reversed([*steps(form, logits)]):
        grad = grad / divisor
    p = logits.softmax(-1)
    return p * (grad - (grad * p).sum(-1, keepdim=True))


def _last_step_only(form: str, logits: Tensor, grad: Tensor) -> Tensor:
    m, _, divisor, dim = [*steps(form, logits)][-1]
    return (grad - (grad * m).sum(dim, keepdim=True)) / divisor


def _without_clamp(form: str, logits: Tensor, grad: Tensor) -> Tensor:
    """Differs only where a sum is below eps."""
    for m, _, divisor, dim in reversed([*steps(form, logits)]):
        grad = (grad - (grad * m).sum(dim, keepdim=True)) / divisor
    return grad * torch.exp(logits - logits.amax(-1, keepdim=True))


WRONG: dict[str, tuple[str, Callable[[str, Tensor, Tensor], Tensor]]] = {
    "straight through": ("softmax", lambda form, logits, grad: grad),
    "sums as constants": ("softmax", _constant_sums),
    "the last step only": ("softmax", _last_step_only),
    "no clamp": ("exp", _without_clamp),
    "twice": ("softmax", lambda *a: 2 * by_hand(*a)),
    "almost": ("softmax", lambda *a: (1 + 1e-7) * by_hand(*a)),
    "clipped": ("softmax", lambda form, logits, grad: by_hand(form, logits, grad.clamp(-100.0, 100.0))),
    "small ones dropped": (
        "softmax",
        lambda form, logits, grad: torch.where(grad.abs() < 1e-5, 0.0, by_hand(form, logits, grad)),
    ),
    "no NaN": ("softmax", lambda *a: by_hand(*a).nan_to_num()),
    "no infinity": (
        "softmax",
        lambda form, logits, grad: by_hand(form, logits, grad.nan_to_num(nan=torch.nan, posinf=1e9, neginf=-1e9)),
    ),
    "not of large logits": ("exp", lambda form, logits, grad: by_hand(form, logits, grad) * (logits.abs() < 80)),
    "transposed": ("softmax", lambda *a: by_hand(*a).mT),
    "zero": ("exp_eps", lambda form, logits, grad: torch.zeros_like(grad)),
    "softmax's": ("exp_eps", lambda form, logits, grad: by_hand("softmax", logits, grad)),
}
EXP_EPS = ("straight through", "twice", "transposed", "clipped", "no NaN", "the last step only")
"""Those of the softmax form that are tried of exp with an eps too, where the maximum has a gradient."""


AMOUNTS = {"twice": 1.0, "almost": 1e-7, "no NaN": float("inf"), "no infinity": float("inf")}
"""By how much some of them differ from the derivative, relative to it; infinite if NaN is in one of them only."""


@pytest.mark.parametrize(
    ("name", "form"), [*((name, form) for name, (form, _) in WRONG.items()), *((name, "exp_eps") for name in EXP_EPS)]
)
def test_another_backward_stays_and_is_named(name: str, form: str) -> None:
    """The forward's iterations are the op inside the Function; its gradient is the model's."""
    backward = WRONG[name][1]
    got = stays(function(backward, form))
    assert reasons(got)[0].startswith(DIFFERS + "gradients differ by "), reasons(got)
    said = float(reasons(got)[0].rpartition(" ")[2])
    assert said == pytest.approx(AMOUNTS.get(name, said), rel=0.06) and said > 0
    assert not [r for r in got.report.routed if r.detail.endswith(OWN)]


TWO = own(
    lambda t: (m := iterations("softmax", t), m.sum(-1, keepdim=True)),
    lambda t, grad, _: 2 * by_hand("softmax", t, grad),
)
"""Returns the matrix and its sums; the gradient is twice too large."""
SCALED = own(
    lambda t, scale: iterations("softmax", t * scale),
    lambda t, scale, grad: (2 * scale * by_hand("softmax", t * scale, grad), None),
)
"""Iterates on the scaled logits; the gradient is twice too large."""
BENT = own(
    lambda t: iterations("softmax", t.tanh()),
    lambda t, grad: by_hand("softmax", t.tanh(), grad) * (1 - t.tanh().square()),
)
"""Iterates on a function of the logits; the gradient is right."""
UNCOMPARED: dict[str, Fn] = {
    "two results": lambda t: (lambda m, sums: m + 0.1 * sums)(*TWO(t)),
    "a tensor of the graph": lambda t: SCALED(t, t.detach().abs().mean()),
    "right, of a changed argument": BENT,
}


@pytest.mark.parametrize("name", list(UNCOMPARED))
def test_a_backward_that_stays_unnamed(name: str) -> None:
    """Checks what docs/operators/mhc.md says of Functions of another kind: the finding says that the backward stays."""
    got, own = stays(UNCOMPARED[name]), "; inside an autograd.Function, whose own backward stays"
    assert not reasons(got) and {r.op for r in got.report.routed if r.detail.endswith(own)} == {"mhc_sinkhorn"}


def test_a_backward_that_cannot_be_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> object:
        raise RuntimeError("out of order")

    monkeypatch.setattr(own_backward, "interpreted", broken)
    said = reasons(stays(function(by_hand, "softmax")))[0]
    assert "could not be compared with the derivative of its forward: RuntimeError: out of order" in said


def test_compiled_with_gradients() -> None:
    balanced = function(by_hand, "softmax")
    logits = torch.randn(5, N, N)
    equal(through_inductor(lambda t: balanced(t), [logits], fullgraph=True), eager(balanced, [logits]), 1e-6)


def test_many_tokens_are_proved_on_fewer_or_where_the_size_is_in_the_body_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes, compared = list[object](), own_backward._compared
    monkeypatch.setattr(own_backward, "_compared", lambda f, few, n: (shapes.append((*few,)), compared(f, few, n))[1])
    for backward in (by_hand, lambda form, logits, grad: by_hand(form, logits, grad.reshape(2, 3, N, N))):
        both(function(backward, "softmax"), LOOKED_THROUGH)
    assert shapes == [own_backward._FEW, own_backward._FEW, (2, 3)]


def test_the_backward_of_exp_and_eps_is_not_named() -> None:
    """The op runs inside the Function, and the model's own backward stays."""
    got = stays(function(by_hand, "exp_eps"))
    assert not got.report.near_misses and got.ops["mhc_sinkhorn"], reasons(got)
    assert reasons(stays(function(WRONG["twice"][1], "exp_eps of the whole"))), "a maximum of the whole matrix"


def _given(backward: Fn, gives: bool = False) -> Fn:
    """Returns the ``apply`` of a Function that takes a tensor too, which its backward may read, or give a gradient."""
    return own(
        lambda logits, other: iterations("softmax", logits),
        lambda logits, other, grad: (backward(by_hand("softmax", logits, grad), other), grad.sum() if gives else None),
    )


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize(
    "other", [torch.tensor(1.0), torch.ones(N, N), torch.ones(N, N).bool()], ids=["number", "matrix", "mask"]
)
def test_a_backward_that_reads_another_tensor(other: Tensor, read: bool) -> None:
    """A tensor of the graph that is 1 now may be another number later."""
    p = parameters()
    given = _given(lambda grad, other: grad * other if read else grad)
    fn = lambda x, other: around(x, p, lambda logits: given(logits, other))  # noqa: E731
    got = run(fn, (streams(), other), [*p.items()])
    assert difference(got, eager(fn, (streams(), other), [*p.items()])) < 1e-5
    assert [r.op for r in got.report.routed if r.detail.endswith(OWN)] == ["mhc_sinkhorn"] * (not read), reasons(got)
    assert bool(reasons(got)) == read and all(r.startswith(DIFFERS + "gradients") for r in reasons(got)), reasons(got)


@pytest.mark.parametrize("used", [False, True])
def test_a_parameter_that_is_only_saved_gets_no_gradient(used: bool) -> None:
    """Zeros in place of None would let an optimiser's weight decay move it."""
    p = {**parameters(), "other": torch.tensor(1.0, requires_grad=True)}
    given = _given(lambda grad, other: grad)
    fn = lambda x: around(x, p, lambda logits: given(logits, p["other"])) * (p["other"] if used else 1)  # noqa: E731
    got = alike(fn, (streams(),), p.items(), dynamic=None)
    assert (got.grads["other"] is not None) == used
    assert [r.op for r in got.report.routed if r.detail.endswith(OWN)] == ["mhc_sinkhorn"], reasons(got)


def test_a_result_that_needs_a_gradient_for_a_saved_parameter_alone() -> None:
    """As in eager it needs one, which no input of the op does."""
    other = torch.tensor(1.0, requires_grad=True)
    given = _given(lambda grad, other: grad)
    compiled, reports = looking(lambda logits, other: given(logits, other))
    logits = torch.randn(5, N, N)
    assert compiled(logits, other).requires_grad == given(logits, other).requires_grad
    assert reports[0].routed and not any(r.detail.endswith(OWN) for r in reports[0].routed)


def test_a_backward_that_gives_another_tensor_a_gradient() -> None:
    p = {**parameters(), "other": torch.tensor(1.0, requires_grad=True)}
    given = _given(lambda grad, other: grad, gives=True)
    fn = lambda x: around(x, p, lambda logits: given(logits, p["other"]))  # noqa: E731
    got = alike(fn, (streams(),), p.items(), dynamic=None)
    assert reasons(got)[0].endswith("ValueError: its gradient does not go to the logits alone"), reasons(got)
    assert "autograd_function_apply" in str(got.graphs[0].graph) and got.grads["other"] is not None


class Plain(torch.autograd.Function):
    """Iterations without an eps, whose gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.scale = scale
        return iterations("softmax", logits, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.scale * by_hand("softmax", *ctx.saved_tensors, grad, 0.0), None


@pytest.mark.parametrize(
    ("scaled", "scales", "routed"),
    [(lambda s: s / 2.0, (3.0, 2.0, 5.0), True), (lambda s: s // 2, (6, 2, 9), False)],
    ids=["float", "int"],
)
def test_a_backward_that_reads_a_number_that_changes(scaled: Fn, scales: tuple[float, ...], routed: bool) -> None:
    """The scale is a symbol of the second graph. The proof holds for a float's present value, which a guard keeps."""
    logits = torch.randn(5, N, N, requires_grad=True)
    with torch._dynamo.config.patch(specialize_float=False):
        compiled, reports = looking(lambda t, s: Plain.apply(t, scaled(s)))
        for scale in scales:
            up = torch.randn(5, N, N)
            got = torch.autograd.grad(compiled(logits, scale), logits, up)
            torch.testing.assert_close(got, torch.autograd.grad(Plain.apply(logits, scaled(scale)), logits, up))
    own = [[r.op for r in report.routed if r.detail.endswith(OWN)] for report in reports]
    assert own == ([[], ["mhc_sinkhorn"], []] if routed else [[], []]), [
        m.reason for r in reports for m in r.near_misses
    ]


FAR: dict[str, Fn] = {
    "clipped far out": lambda form, logits, grad: by_hand(form, logits, grad.clamp(-1e9, 1e9)),
    "very small ones dropped": lambda form, logits, grad: torch.where(
        grad.abs() < 1e-11, 0.0, by_hand(form, logits, grad)
    ),
    "of bounded logits": lambda form, logits, grad: by_hand(form, logits.clamp(-300.0, 1e5), grad),
    "from a position on": lambda form, logits, grad: torch.cat(
        [by_hand(form, logits, grad)[:, :2990], 0 * grad[:, 2990:]], 1
    ),
    "written from a position on": lambda form, logits, grad: (
        g := by_hand(form, logits, grad).clone(),
        g[:, 2990:].zero_(),
    )[0],
    "of the first positions": lambda form, logits, grad: by_hand(
        form, logits, torch.where((torch.arange(logits.shape[1]) < 2990)[:, None, None], grad, 0.0)
    ),
    "from the end on": lambda form, logits, grad: by_hand(
        form, logits, torch.cat([grad[:, : logits.shape[1] - 9], 0 * grad[:, logits.shape[1] - 9 :]], 1)
    ),
}


@pytest.mark.parametrize("symbolic", [(), (1,)], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", list(FAR))
def test_a_backward_that_differs_rarely(name: str, symbolic: tuple[int, ...]) -> None:
    """Only for gradients or logits of a certain size, or for some of many tokens, and maybe not for those of now."""
    p = parameters()
    for tokens in (3000, 2000) if symbolic else (3000,):
        fn = functools.partial(around, p=p, matrix=function(FAR[name], "softmax"))
        got = run(fn, (streams(1, tokens),), list(p.items()), dynamic=None, symbolic=symbolic)
        later = tokens < 2990 and "position" in name
        assert reasons(got)[0].startswith(UNKNOWN if later else DIFFERS + "gradients differ by "), reasons(got)
        assert "autograd_function_apply" in str(got.graphs[0].graph)


def test_a_backward_over_a_batch_of_one_is_compared_at_its_length() -> None:
    def late(form: str, logits: Tensor, grad: Tensor) -> Tensor:
        return torch.cat([by_hand(form, logits, grad)[:, :40], 0 * grad[:, 40:]], 1)

    p = parameters()
    got = run(functools.partial(around, p=p, matrix=function(late, "softmax")), (streams(1, 50),), list(p.items()))
    assert reasons(got)[0].startswith(DIFFERS + "gradients differ by "), reasons(got)
