# SPDX-License-Identifier: Apache-2.0
"""The results of the search: pres and heads, coefficients, posts, collapses, and Sinkhorn iterations."""

from __future__ import annotations

import dataclasses

from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.interface import Match, Mismatch
from mhc_inductor.routing.operators.mhc.formula import Affine, Coefficient
from mhc_inductor.routing.operators.mhc.norm import Norm, parts_of, root_of
from mhc_inductor.routing.operators.mhc.sinkhorn import Chain


@dataclasses.dataclass(eq=False)
class Pre:
    """A pre, or a head where ``post`` and ``res`` are None, with the values that its outputs replace.

    Where other streams than these are collapsed with h_pre, as in a single pass, ``h_in`` is None and the op returns the
    coefficients alone.
    """

    norm: Norm
    n: int
    pre: Coefficient
    h_in: Value | None
    weights: list[Value] = dataclasses.field(default_factory=list)
    """All values that are h_pre, where it is an output; the op's output replaces the first."""
    post: Coefficient | None = None
    posts: list[Value] = dataclasses.field(default_factory=list)
    """All values that are h_post; the op's output replaces the first."""
    res: Affine | None = None
    h_res: Value | None = None
    chain: Chain | None = None
    mixed: Value | None = None
    steps: list[Value] = dataclasses.field(default_factory=list)
    fold: bool = False
    """Whether the op runs the Sinkhorn iterations too, as nothing else needs the logits."""
    foreign: Mismatch | None = None
    """Why the Sinkhorn iterations on h_res do not fit the op; they stay in the graph between pre and post."""

    @property
    def op(self) -> str:
        """The name of the op: mhc_pre, mhc_head without h_post and h_res, or mhc_coefficients without h_in."""
        if self.h_in is None:
            return "mhc_coefficients"
        return "mhc_pre" if self.post is not None or self.res is not None else "mhc_head"

    @property
    def collapsed(self) -> Value:
        """The value that the op's first output replaces: h_in, or h_pre where other streams are collapsed."""
        return self.weights[0] if self.h_in is None else self.h_in

    @property
    def affines(self) -> dict[str, Affine]:
        """The projections of the coefficients by role: "pre", "post", "res"."""
        found = {"pre": self.pre.affine, "post": self.post.affine if self.post is not None else None, "res": self.res}
        return {role: affine for role, affine in found.items() if affine is not None}

    @property
    def outputs(self) -> dict[str, Value]:
        """The values that the op's outputs replace, by role."""
        given = {"pre": self.collapsed, "post": self.posts[0] if self.post is not None else None}
        given["res"] = self.mixed if self.fold else self.h_res
        return {role: value for role, value in given.items() if value is not None}

    def match(self) -> Match:
        """Returns the match of this pre or head."""
        weights = [p.value for a in self.affines.values() for p in a.weights]
        detail = f"n = {self.n}, D = {self.norm.width // self.n}, norm_eps = {self.norm.eps:g}"
        detail += " outside the root" * (self.norm.form == "outside")
        detail += f", hc_eps = {self.pre.add:g}"
        if self.op != "mhc_head" and self.fold and self.chain is not None:
            detail += f", {self.chain.iters} sinkhorn iterations ({self.chain.words})"
        # Verification makes the streams' parts, which the formula reads, and puts them together as the graph does.
        x, parts, outputs = root_of(self.norm.x)[0], parts_of(self.norm.x).roots, [*self.outputs.values()]
        return Match(self.op, [x, *parts, *weights], outputs, detail, data=self, derived=[x] * bool(parts))


@dataclasses.dataclass(frozen=True)
class Post:
    """``x_out[o] = h_post[o] * f_out + sum_i R[o, i] * x[i]``, where R is ``matrix`` or its transpose.

    Where ``matrix`` is None, the residual is x[o] itself.
    """

    x: Value
    h_post: Value
    f_out: Value
    matrix: Value | None
    transpose: bool
    n: int
    width: int
    """The number of elements of a token's streams, n * D."""
    added: tuple[Value, ...] = ()
    """Vectors [D] that are added to f_out."""
    stream: int = -2
    """The stream dim of x_out."""
    x_stream: int = -2
    """The stream dim of x, where the streams have a dim of their own."""


@dataclasses.dataclass(eq=False)
class PostUse:
    """An expand-and-mix; ``pre`` computes its coefficients, or is None where no routed pre does."""

    pre: Pre | None
    found: Post
    x_out: Value
    """x_out as one tensor, or its first stream where only ``streams`` are in the graph."""
    streams: dict[int, Value] = dataclasses.field(default_factory=dict)
    """The streams of x_out that are tensors of their own, by their place."""

    @property
    def outputs(self) -> list[Value]:
        """The values that x_out replaces."""
        return [*dict.fromkeys((self.x_out, *self.streams.values()))]

    @property
    def own(self) -> bool:
        """Whether the matrix is h_res of ``pre``, with or without Sinkhorn iterations."""
        return self.pre is not None and self.found.matrix in (self.pre.mixed, self.pre.h_res)

    def match(self) -> Match:
        """Returns the match of this expand-and-mix."""
        found, pre = self.found, self.pre
        # The pre's one h_post output replaces every value that is h_post.
        h_post = pre.posts[0] if pre is not None and found.h_post in pre.posts else found.h_post
        x, parts = root_of(found.x)[0], parts_of(found.x).roots
        given = [x, *parts, found.f_out, h_post, *found.added]
        given += [found.matrix] if found.matrix is not None else []
        detail = "residual x" if found.matrix is None else "h_res" if self.own else "the model's own matrix"
        detail += " transposed" * found.transpose
        return Match("mhc_post", given, self.outputs, detail, data=self, derived=[x] * bool(parts))


@dataclasses.dataclass(frozen=True)
class CollapseUse:
    """A collapse ``h_in`` of n streams with weights that were computed before them, as in a single pass."""

    n: int
    d: int
    weight: Value
    x: Value
    stream: int
    """The stream dim of x, where the streams have a dim of their own."""
    h_in: Value

    def match(self) -> Match:
        """Returns the match of this collapse."""
        inputs, detail = [root_of(self.x)[0], self.weight], f"n = {self.n}, D = {self.d}, weights known before"
        return Match("mhc_collapse", inputs, [self.h_in], detail, data=self)


@dataclasses.dataclass(eq=False)
class Sinkhorn:
    """Sinkhorn iterations on the logits of ``pre``, or on other logits where it is None."""

    chain: Chain
    mixed: Value
    pre: Pre | None = None

    def match(self) -> Match:
        """Returns the match of these iterations."""
        detail = f"{self.chain.iters} iterations ({self.chain.words})"
        inputs = [*dict.fromkeys((self.chain.logits, self.chain.read))]
        return Match("mhc_sinkhorn", inputs, [self.mixed], detail, data=self, derived=inputs[:-1])
