"""What the search finds: pres and heads, posts, Sinkhorn iterations."""

from __future__ import annotations

import dataclasses

from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.interface import Match, Mismatch
from mhc_inductor.routing.operators.mhc.formula import Affine, Coefficient
from mhc_inductor.routing.operators.mhc.mixing import Post
from mhc_inductor.routing.operators.mhc.norm import Norm, root_of
from mhc_inductor.routing.operators.mhc.sinkhorn import Chain


@dataclasses.dataclass(eq=False)
class Pre:
    """A pre, or a head where ``post`` and ``res`` are missing, and the values that its outputs replace."""

    norm: Norm
    n: int
    pre: Coefficient
    h_in: Value
    post: Coefficient | None = None
    posts: list[Value] = dataclasses.field(default_factory=list)
    """The values that are h_post, the first one first."""
    res: Affine | None = None
    h_res: Value | None = None
    chain: Chain | None = None
    mixed: Value | None = None
    steps: list[Value] = dataclasses.field(default_factory=list)
    fold: bool = False
    """Whether the iterations are part of the op: nothing else needs the logits."""
    foreign: Mismatch | None = None
    """Why the sinkhorn iterations of h_res are not the op's: they stay the model's, between pre and post."""

    @property
    def op(self) -> str:
        return "mhc_pre" if self.post is not None or self.res is not None else "mhc_head"

    @property
    def affines(self) -> dict[str, Affine]:
        """The projections of the coefficients by role: "pre", "post", "res"."""
        found = {"pre": self.pre.affine, "post": self.post.affine if self.post is not None else None, "res": self.res}
        return {role: affine for role, affine in found.items() if affine is not None}

    @property
    def outputs(self) -> dict[str, Value]:
        """The value of each role that the op gives."""
        given = {"pre": self.h_in, "post": self.posts[0] if self.post is not None else None}
        given["res"] = self.mixed if self.fold else self.h_res
        return {role: value for role, value in given.items() if value is not None}

    def match(self) -> Match:
        weights = [p.value for a in self.affines.values() for p in (a.phi, a.alpha, a.bias, a.gamma) if p is not None]
        detail = f"n = {self.n}, D = {self.norm.width // self.n}, norm_eps = {self.norm.eps:g}"
        detail += f", hc_eps = {self.pre.add:g}"
        if self.op == "mhc_pre" and self.fold and self.chain is not None:
            detail += f", {self.chain.iters} sinkhorn iterations ({self.chain.words})"
        return Match(self.op, [root_of(self.norm.x)[0], *weights], [*self.outputs.values()], detail, data=self)


@dataclasses.dataclass(eq=False)
class PostUse:
    """An expand-and-mix that follows ``pre``, or one whose coefficients are no routed pre's."""

    pre: Pre | None
    found: Post
    x_out: Value

    @property
    def own(self) -> bool:
        """Whether the matrix is what ``pre`` gives."""
        return self.pre is not None and self.found.matrix in (self.pre.mixed, self.pre.h_res)

    def match(self) -> Match:
        found, pre = self.found, self.pre
        # All values of h_post are one output of the pre.
        h_post = pre.posts[0] if pre is not None and found.h_post in pre.posts else found.h_post
        given = [root_of(found.x)[0], found.f_out, h_post, *found.added]
        given += [found.matrix] if found.matrix is not None else []
        detail = "residual x" if found.matrix is None else "h_res" if self.own else "the model's own matrix"
        return Match("mhc_post", given, [self.x_out], detail + " transposed" * found.transpose, data=self)


@dataclasses.dataclass(eq=False)
class Sinkhorn:
    """Sinkhorn iterations on logits that ``pre`` gives, or on others."""

    chain: Chain
    mixed: Value
    pre: Pre | None = None

    def match(self) -> Match:
        detail = f"{self.chain.iters} iterations ({self.chain.words})"
        return Match("mhc_sinkhorn", [self.chain.logits], [self.mixed], detail, data=self)
