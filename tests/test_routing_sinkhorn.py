# SPDX-License-Identifier: Apache-2.0
"""Routing finds the Sinkhorn iterations of H_res in every spelling, and finds no other iterations."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.formulas.reference_models_mhc import BOTH, ITERS, WIDTH, N, around, parameters
from tests.tools.capture import Captured, alike

Factor = Callable[[Tensor, Tensor], Tensor]


def _rows(matrix: Tensor, v: Tensor) -> Tensor:
    return (matrix * v).sum(-1, keepdim=True)


def _columns(matrix: Tensor, u: Tensor) -> Tensor:
    return (matrix * u).sum(-2, keepdim=True)


def _knopp(matrix: Tensor, rows: Factor = _rows, columns: Factor = _columns, start: float = 1.0) -> Tensor:
    """Updates the factors u [..., n, 1] and v [..., 1, n] in turn."""
    u, v = torch.ones_like(matrix[..., :1]), torch.full_like(matrix[..., :1, :], start)
    for _ in range(ITERS):
        u = 1 / rows(matrix, v)
        v = 1 / columns(matrix, u)
    return u * matrix * v


def _vectors(matrix: Tensor) -> Tensor:
    """Computes products with vectors, as optimal transport code does."""
    v = torch.ones(matrix.shape[:-1])
    for _ in range(ITERS):
        u = (matrix @ v.unsqueeze(-1)).squeeze(-1).reciprocal()
        v = (matrix.mT @ u.unsqueeze(-1)).squeeze(-1).reciprocal()
    return u.unsqueeze(-1) * matrix * v.unsqueeze(-2)


def _diagonals(matrix: Tensor) -> Tensor:
    u, v = torch.ones(matrix.shape[:-1]), torch.ones(matrix.shape[:-1])
    for _ in range(ITERS):
        u = 1.0 / torch.einsum("...ij,...j->...i", matrix, v)
        v = 1.0 / torch.einsum("...ij,...i->...j", matrix, u)
    return matrix * torch.einsum("...i,...j->...ij", u, v)


def _by_ones(matrix: Tensor) -> Tensor:
    ones = torch.ones(N, N)
    for _ in range(ITERS):
        matrix = matrix / (matrix @ ones)
        matrix = matrix / (ones @ matrix)
    return matrix


def _bounded(logits: Tensor) -> Tensor:
    """Bounds the sums by a tensor in one step and by a number in the other."""
    matrix = torch.exp(logits - logits.amax(-1, keepdim=True))
    for _ in range(ITERS):
        matrix = matrix / torch.maximum(matrix.sum(-1, keepdim=True), torch.tensor(1e-6))
        matrix = matrix / matrix.sum(-2, keepdim=True).clamp(min=1e-6)
    return matrix


def _first_columns(matrix: Tensor) -> Tensor:
    u = torch.ones_like(matrix[..., :1])
    for _ in range(ITERS):
        v = 1 / _columns(matrix, u)
        u = 1 / _rows(matrix, v)
    return u * matrix * v


def _divided(matrix: Tensor, dims: list[int], eps: float = 0.0) -> Tensor:
    for dim in dims:
        matrix = matrix / (matrix.sum(dim, keepdim=True) + eps)
    return matrix


SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "factors": lambda z: _knopp(z.exp()),
    "factors from 1 / n": lambda z: _knopp(z.exp(), start=1 / N),
    "factors after a maximum": lambda z: _knopp(torch.exp(z - z.amax((-2, -1), keepdim=True))),
    "factors by products": lambda z: _vectors(z.exp()),
    "factors in one": lambda z: _diagonals(z.exp()),
    "products with ones": lambda z: _by_ones(z.exp()),
    "a bound that is a tensor": _bounded,
    "rows after a softmax": lambda z: _divided(z.softmax(-1), [-1, -2] * ITERS),
}


def _stale(matrix: Tensor) -> Tensor:
    u, v = torch.ones_like(matrix[..., :1]), torch.ones_like(matrix[..., :1, :])
    for _ in range(ITERS):
        u, v = 1 / _rows(matrix, v), 1 / _columns(matrix, u)
    return u * matrix * v


def _one_late(matrix: Tensor) -> Tensor:
    """Uses v of the iteration before the last."""
    v = torch.ones_like(matrix[..., :1, :])
    for _ in range(ITERS):
        u, before = 1 / _rows(matrix, v), v
        v = 1 / _columns(matrix, u)
    return u * matrix * before


def _one_of_another(matrix: Tensor) -> Tensor:
    v = torch.ones_like(matrix[..., :1, :])
    for k in range(ITERS):
        u = 1 / _rows(matrix * matrix if k == 2 else matrix, v)
        v = 1 / _columns(matrix, u)
    return u * matrix * v


def _half(matrix: Tensor) -> Tensor:
    kept = _knopp(matrix)
    return kept / kept.sum(-1, keepdim=True)


OTHER: dict[str, Callable[[Tensor], Tensor]] = {
    "columns twice": lambda z: _knopp(z.exp(), _columns, _columns),
    "both factors of the step before": lambda z: _stale(z.exp()),
    "a factor of the step before": lambda z: _one_late(z.exp()),
    "a step of another matrix": lambda z: _one_of_another(z.exp()),
    "sums of the transpose": lambda z: _knopp(z.exp(), lambda m, v: _rows(m.mT, v)),
    "an eps in the sums": lambda z: _knopp(z.exp(), lambda m, v: _rows(m, v) + 1e-6),
    "twice the last factor": lambda z: _knopp(z.exp(), columns=lambda m, u: _columns(m, u) / 2),
    "factors from the logits": lambda z: _knopp(z.exp(), lambda m, v: _rows(m, v * z[..., :1, :].exp())),
    "a factor squared": lambda z: (m := z.exp()) / m.sum(-1, keepdim=True) * (1 / m.sum(-1, keepdim=True)),
    "of a softmax": lambda z: _knopp(z.softmax(-2) + 1e-3),
    "of no exp": lambda z: _knopp(z * z + 0.1),
    "half an iteration more": lambda z: _half(z.exp()),
    "rows after a softmax, and eps": lambda z: _divided(z.softmax(-1), [-1, -2] * ITERS, 1e-2),
    "rows after a softmax and eps": lambda z: _divided(z.softmax(-1) + 1e-2, [-1, -2] * ITERS),
    "rows twice, and eps": lambda z: _divided(z.exp(), [-1, -1, -2] * ITERS, 1e-2),
}


def _compiled(matrix: Callable[[Tensor], Tensor], iters: int, **more: int) -> Captured:
    """Runs a site with this matrix; asserts its ops, how many iterations mhc_pre has, and its values."""
    p = parameters()
    x = torch.randn(2, 6, N, WIDTH, generator=torch.Generator().manual_seed(1))
    got = alike(functools.partial(around, p=p, matrix=matrix), (x,), p.items(), {**BOTH, **more}, within=1e-4)
    assert [n.args[9] for n in got.nodes("mhc_pre")] == [iters]
    return got


@pytest.mark.parametrize("name", list(SAME))
def test_the_same_iterations_are_folded_into_the_op(name: str) -> None:
    assert not _compiled(SAME[name], ITERS).report.near_misses


@pytest.mark.parametrize("name", list(OTHER))
def test_other_iterations_stay_the_models(name: str) -> None:
    _compiled(OTHER[name], 0)


def test_factors_that_start_with_the_columns_are_iterations_of_the_transpose() -> None:
    _compiled(lambda z: _first_columns(z.exp()), 0, mhc_sinkhorn=1)


# --- the log domain ------------------------------------------------------------------------------------------------


def _steps(logits: Tensor, dims: tuple[int, int] = (-1, -2), iters: int = ITERS) -> Tensor:
    for _ in range(iters):
        for dim in dims:
            logits = logits - logits.logsumexp(dim, keepdim=True)
    return logits


def _potentials(logits: Tensor, iters: int = ITERS, late: int = 0, again: bool = False) -> Tensor:
    """Updates addends of rows and columns in turn; ``late`` uses the columns' of so many iterations before.

    ``again``: the last rows' addend is made of other logits.
    """
    u, vs = torch.zeros(logits.shape[:-1]), [torch.zeros(logits.shape[:-1])]
    for k in range(iters):
        own = 2 * logits if again and k == iters - 1 else logits
        u = -torch.logsumexp(own + vs[-1].unsqueeze(-2), -1)
        vs.append(-torch.logsumexp(logits + u.unsqueeze(-1), -2))
    return logits + u.unsqueeze(-1) + vs[-1 - late].unsqueeze(-2)


LOGS: dict[str, Callable[[Tensor], Tensor]] = {
    "steps": lambda z: _steps(z).exp(),
    "columns first": lambda z: _steps(z, (-2, -1)).exp(),
    "log-softmaxes": lambda z: functools.reduce(lambda t, k: t.log_softmax(-1 - k % 2), range(2 * ITERS), z).exp(),
    "a softmax at the end": lambda z: _steps(z, iters=ITERS - 1).log_softmax(-1).softmax(-2),
    "potentials": lambda z: _potentials(z).exp(),
    "potentials of a view": lambda z: _potentials(z.flatten(0, 1)).exp().unflatten(0, z.shape[:2]),
}
TURNED_LOGS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "half an iteration more": (lambda z: (t := _steps(z)).sub(t.logsumexp(-1, keepdim=True)).exp(), ITERS),
    "a potential of the step before": (lambda z: _potentials(z, late=1).exp(), ITERS - 1),
}
"""Iterations that end with rows. After the first rows, they are whole iterations of the transpose."""
OTHER_LOGS: dict[str, Callable[[Tensor], Tensor]] = {
    "one iteration": lambda z: _steps(z, iters=1).exp(),
    "one iteration of potentials": lambda z: _potentials(z, iters=1).exp(),
    "a potential of other logits": lambda z: _potentials(z, again=True).exp(),
    "a softmax of rows after rows": lambda z: (_steps(z, iters=ITERS - 1) * 2).log_softmax(-1).softmax(-1),
}


def _in_logs(
    matrix: Callable[[Tensor], Tensor], scale: float, tokens: list[int], grad: bool, iters: int | None
) -> None:
    """Runs a site with this matrix of scaled logits; asserts its values, and mhc_sinkhorn with ``iters`` if given."""
    p, own = parameters(), {} if iters is None else {"mhc_sinkhorn": 1}
    x = torch.randn(4, 24, N, WIDTH, generator=torch.Generator().manual_seed(1))
    fn = functools.partial(around, p=p, matrix=lambda z: matrix(scale * z))
    got = alike(fn, (x,), p.items() if grad else (), {**BOTH, **own}, grad, 1e-4, symbolic=tokens)
    assert iters is None or not got.report.near_misses
    made = {n.args[1] for n in got.nodes("mhc_sinkhorn")}
    assert made == ({iters} if own else set())


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("tokens", [[], [0]], ids=["static", "dynamic"])
@pytest.mark.parametrize("scale", [1.0, 60.0], ids=["", "logits of which exp is 0"])
@pytest.mark.parametrize("name", list(LOGS))
def test_the_first_iteration_in_the_log_domain_is_the_models(
    name: str, scale: float, tokens: list[int], grad: bool
) -> None:
    """The op takes exp first. A column that is 0 then has no finite quotient; after an iteration there is none."""
    _in_logs(LOGS[name], scale, tokens, grad, ITERS - 1)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("scale", [1.0, 60.0], ids=["", "logits of which exp is 0"])
@pytest.mark.parametrize("name", list(TURNED_LOGS))
def test_iterations_of_the_transpose_after_the_first_rows(name: str, scale: float, grad: bool) -> None:
    fn, iters = TURNED_LOGS[name]
    _in_logs(fn, scale, [0], grad, iters)


@pytest.mark.parametrize("scale", [1.0, 60.0], ids=["", "logits of which exp is 0"])
@pytest.mark.parametrize("name", list(OTHER_LOGS))
def test_other_iterations_in_the_log_domain_stay_the_models(name: str, scale: float) -> None:
    _in_logs(OTHER_LOGS[name], scale, [], True, None)


_NO_CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda matrix: matrix,
    "one": lambda matrix: matrix.float(),
    "two": lambda matrix: matrix.to(torch.float32).type(torch.float32),
    "a view between": lambda matrix: matrix.float().view(-1, N, N).float().view(matrix.shape),
}


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "traced"])
@pytest.mark.parametrize("casts", _NO_CASTS)
def test_a_post_reads_the_op_of_iterations_that_no_pre_takes(casts: str, dynamo: bool) -> None:
    """Casts to the dtype that the matrix has are other names of it: the op gives what the post reads, not the last."""

    def fn(logits: Tensor, x: Tensor, f_out: Tensor, h_post: Tensor) -> Tensor:
        matrix = torch.exp(logits - logits.amax(-1, keepdim=True))
        matrix = _NO_CASTS[casts](_divided(matrix, [-1, -2] * ITERS))
        return h_post[..., None] * f_out[..., None, :] + matrix @ x

    g = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 5, *sizes, generator=g) for sizes in ((N, N), (N, WIDTH), (WIDTH,), (N,))]
    got = alike(fn, given, ops={"mhc_sinkhorn": 1, "mhc_post": 1}, dynamo=dynamo)
    names = {getattr(node.target, "__name__", str(node.target)) for node in got.graphs[0].graph.nodes}
    left = names & {"exp", "sum", "truediv", "div"}
    assert not left, f"{left} of the iterations are left"
