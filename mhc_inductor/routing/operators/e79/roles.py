# SPDX-License-Identifier: Apache-2.0
"""Finds by numbers which vectors of a step are k, v, m and the biases, and which quantity of E79 is missing."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from mhc_inductor.routing.graph.expressions import chain, written
from mhc_inductor.routing.graph.index import DynamicWidth
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.operators.e79.elements import Elements
from mhc_inductor.routing.operators.e79.terms import Leaf

EPS = 1e-6
_CLOSE = 1e-8
"""The relative difference that a constant rounded to fp32 may make in fp64."""
_SKETCH = 4
"""Vectors are first compared by so many random sums of their elements."""
_AT_ONCE = 256
"""Quantities that are compared with all vectors at a time: a step with many vectors has ten thousands of them."""
QUANTITIES = {
    "delta": "delta = v - S k^",
    "k^": f"k^ = k / (|k| + {EPS:g})",
    "r": "r = sigmoid(M k^ + b_s)",
    "c": "c = sigmoid(M.T k^ + b_s)",
    "S'": "S' = r S c + delta (x) k^",
    "g": "g = delta - M m^",
    "m^": f"m^ = m / (|m| + {EPS:g})",
    "p": "p = sigmoid(S' m^ + b_m)",
    "w": "w = sigmoid(S'.T m^ + b_m)",
    "M'": "M' = p M w + g (x) m^",
}
"""What a step computes, by name, in the order in which it is looked for."""
_S, _M = ("delta", "k^", "r", "c", "S'"), ("g", "m^", "p", "w", "M'")


class Missing(Exception):
    """A quantity that no value of the step is, and the vector that comes nearest to it, ``error`` off."""

    def __init__(self, name: str, value: Value | None = None, error: float = 0.0) -> None:
        super().__init__(name)
        self.name, self.value, self.error = name, value, error


class Roles:
    """Finds roles among the vectors ``[token, n]`` of the elements that two new states are computed from."""

    def __init__(self, elements: Elements, states: tuple[Tensor, Tensor, Tensor]) -> None:
        self.elements = elements
        self.S, self.M, self.S_new = states
        leaves, data = zip(*elements.vectors.values(), strict=True)
        self.leaves: tuple[Leaf, ...] = leaves
        self.vectors = torch.stack(data)
        self.biases = torch.cat([torch.zeros_like(self.vectors[:1]), self.vectors])
        n, g = self.vectors.shape[-1], torch.Generator(device="cpu").manual_seed(1)
        self.sums = torch.randn(n, _SKETCH, generator=g, dtype=torch.float64, device="cpu")

    def find(self, S_made: Tensor, M_made: Tensor) -> dict[str, Leaf | None]:
        """Returns the input vectors of the step that makes these matrices. Raises Missing, Mismatch and DynamicWidth."""
        v, k, b_s, delta = self._half(_S, S_made, self.S, self.M, self.vectors)
        _, m, b_m, _ = self._half(_M, M_made, self.M, self.S_new, delta[None])
        found = {"k": k, "v": v, "m": m, "b_s": b_s, "b_m": b_m}
        return {"q": None, **{name: None if at is None else self.leaf(at, name) for name, at in found.items()}}

    def _half(
        self, names: tuple[str, ...], made: Tensor, state: Tensor, gating: Tensor, bases: Tensor
    ) -> tuple[int, int, int | None, Tensor]:
        """Returns how ``made`` is ``sigmoid(..) state sigmoid(..) + write (x) unit`` with ``write = base - state unit``.

        That is the number of the base, of the vector that the unit is made of, and of the bias, and what is written.
        Raises Missing and DynamicWidth.
        """
        units = self.vectors / (self.vectors.norm(dim=-1, keepdim=True) + EPS)
        writes, equal = self._writes(names[0], state, bases)
        found = (equal.any(1).nonzero().flatten() % len(writes)).tolist()
        for number in found:
            (base, k), write = divmod(number, len(units)), writes[number]
            off, vector = apart(units, self.vectors[k]).min(0)
            if off > _CLOSE:
                continue
            r, c = self._gates(gating, self.vectors[k])
            steps = r[..., None] * state * c[..., None, :] + write[..., None] * self.vectors[k][..., None, :]
            for at in equal_to(made.flatten(1), steps.flatten(2))[:1]:
                return base, int(vector), at - 1 if at else None, write
        k = found[0] % len(units)
        off = apart(units, self.vectors[k]).min()
        if off > _CLOSE and self.elements.dynamic is not None:
            raise DynamicWidth(self.elements.dynamic)
        if off > _CLOSE:
            raise Missing(names[1], self.leaves[k].ref.value, float(off))
        for name, gate in zip(names[2:], self._gates(gating, self.vectors[k]), strict=False):
            self._equal(name, gate)
        raise Missing(names[-1])

    def _gates(self, matrix: Tensor, unit: Tensor) -> list[Tensor]:
        """Returns the row gate and the column gate, each without a bias and then with every vector as the bias."""
        arguments = [(a @ unit[..., None])[..., 0] for a in (matrix, matrix.mT)]
        return [(argument + self.biases).sigmoid() for argument in arguments]

    def _writes(self, name: str, state: Tensor, bases: Tensor) -> tuple[Tensor, Tensor]:
        """Returns every base - state unit, and which vectors equal these, then their negatives. Raises Missing."""
        writes = (bases[:, None] - torch.einsum("tij,vtj->vti", state, self.vectors)).flatten(0, 1)
        return writes, self._equal(name, torch.cat([writes, -writes]))

    def _equal(self, name: str, expected: Tensor) -> Tensor:
        """Returns which of ``expected`` equals which vector of the step: [expected, vectors]. Raises Missing for none."""
        own, parts = self.vectors @ self.sums, (expected @ self.sums).split(_AT_ONCE)
        errors = torch.cat([apart(part[:, None], own) for part in parts])
        if errors.amin() > _CLOSE:
            at = int(errors.amin(0).argmin())
            raise Missing(name, self.leaves[at].ref.value, float(errors.amin()))
        return errors <= _CLOSE

    def output(self, made: Tensor) -> int | None:
        """Returns the number of q, if ``made`` is ``y * silu(y)`` with ``y = S' q``, else None."""
        y = torch.einsum("tij,vtj->vti", self.S_new, self.vectors)
        return next(iter(equal_to(made, y * y * y.sigmoid())), None)

    def leaf(self, at: int, name: str) -> Leaf:
        """Returns a vector as an input of the step. Raises Mismatch if it is rounded here and not there."""
        refs = [chain(self.leaves[k].ref) for k in equal_to(self.vectors[at], self.vectors)]
        if len({tuple(r.value.dtype for r in every if written(r.value)) for every in refs}) > 1:
            raise Mismatch(f"{name} is rounded in one place of the step and not in another", refs[0][0].value)
        return self.leaves[at]

    def present(self) -> list[str]:
        """Returns the names of the quantities that values of the step are, whatever the vectors in them are."""
        found = []
        gates = {"r": self.M, "c": self.M.mT, "p": self.S_new, "w": self.S_new.mT}
        for name, matrix in gates.items():
            arguments = torch.einsum("tij,vtj->vti", matrix, self.vectors)[:, None] + self.biases
            with contextlib.suppress(Missing):
                self._equal(name, arguments.sigmoid().flatten(0, 1))
                found.append(name)
        with contextlib.suppress(Missing):
            plus, minus = self._writes("delta", self.S, self.vectors)[1].chunk(2)
            found.append("delta")
            deltas = torch.cat([self.vectors[plus.any(0)], -self.vectors[minus.any(0)]])
            self._writes("g", self.M, deltas)
            found.append("g")
        return [name for name in QUANTITIES if name in found]


def apart(a: Tensor, b: Tensor) -> Tensor:
    """Returns the largest difference of arrays [.., token, elements], relative to the token's largest element."""
    size = torch.maximum(a.abs().amax(-1), b.abs().amax(-1)).clamp(min=1e-200)
    return ((a - b).abs().amax(-1) / size).amax(-1).nan_to_num(torch.inf)


def equal_to(a: Tensor, each: Tensor) -> list[int]:
    """Returns the numbers of those of ``each`` that equal ``a``."""
    return (apart(each, a) <= _CLOSE).nonzero().flatten().tolist()
