# SPDX-License-Identifier: Apache-2.0
"""Both sides of the rule that chooses between dense attention under a mask and lists of keys, and its other figures.

The two sides are one layer of DeepSeek-V3.2's attention from the same latent: ``dense`` expands it to every head's keys
and values and calls scaled_dot_product_attention under the lists as a mask; ``ops`` absorbs the maps into the queries
and the output and reads the latent by the lists. Then a large product, and what a softmax that is written out costs
beyond its two products. ``tests/test_routing_profit.py`` recomputes the rule's figures from the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mhc_inductor

from . import report, running, timing, variants
from .lists_cases import drawn, mask_of
from .report import Result, Row, Table, document, facts, sections_of
from .variants import Variant

PARTS = ("sides", "product", "written")
DENSE, PRODUCTS, WRITTEN = "dense", "products alone", "softmax written out"
BF16 = torch.bfloat16
Leaves = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Layer:
    """Sizes of latent attention: heads, their width without and with position, the latent's, and keys a query reads."""

    tokens: int
    heads: int = 32
    nope: int = 128
    rope: int = 64
    latent: int = 512
    selected: int = 2048

    @property
    def keys(self) -> int:
        return self.latent + self.rope

    def leaves(self, device: torch.device) -> Leaves:
        """Returns random bf16 queries ``[1, S, h, .]``, latents ``[1, S, .]`` and the maps ``[h, nope, latent]``."""
        sizes = {"q": (1, self.tokens, self.heads, self.nope), "q_rope": (1, self.tokens, self.heads, self.rope)}
        sizes |= {"latent": (1, self.tokens, self.latent), "k_rope": (1, self.tokens, self.rope)}
        sizes |= dict.fromkeys(("to_k", "to_v"), (self.heads, self.nope, self.latent))
        made = {k: torch.randn(*s, device=device) for k, s in sizes.items()}
        maps = {k: made[k] * self.latent**-0.5 for k in ("to_k", "to_v")}
        return {k: t.to(BF16).requires_grad_() for k, t in (made | maps).items()}

    def indices(self, device: torch.device) -> Tensor:
        """Returns for each query uniform random earlier positions, sorted, int32 ``[1, S, selected]``, -1 for none."""
        reach = torch.arange(1, self.tokens + 1, device=device)
        return drawn(reach, self.tokens, min(self.selected, self.tokens)).sort(-1).values.int()[None]

    def dense(self, a: Leaves, mask: Tensor) -> Tensor:
        """Returns o ``[1, S, h, nope]`` of attention under ``mask`` ``[1, 1, S, S]`` over the expanded latents."""
        k = torch.einsum("btc,hdc->bhtd", a["latent"], a["to_k"])
        k = torch.cat((k, a["k_rope"][:, None].expand(-1, self.heads, -1, -1)), -1)
        v = torch.einsum("btc,hdc->bhtd", a["latent"], a["to_v"])
        q = torch.cat((a["q"], a["q_rope"]), -1).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    def lists(self, a: Leaves, indices: Tensor) -> Tensor:
        """Returns the same from the latents themselves, by lists ``[1, S, n]``."""
        q = torch.cat((torch.einsum("bshd,hdc->bshc", a["q"], a["to_k"]), a["q_rope"]), -1)
        k = torch.cat((a["latent"], a["k_rope"]), -1)[:, None]
        o = mhc_inductor.selection_attention(
            q[:, :, None], k, k, indices=indices[:, :, None], scale=(self.nope + self.rope) ** -0.5, v_width=self.latent
        )
        return torch.einsum("bshc,hdc->bshd", o[:, :, 0], a["to_v"])


LAYERS = (Layer(4096), Layer(8192), Layer(16384))
SMALL = (Layer(32, 2, 16, 16, 32, 8),)
WRITTEN_SIZE, SMALL_SIZE = (2, 16, 2048, 2560, 128), (1, 2, 16, 24, 16)
"""Batch, heads, queries, keys and width of the softmax that is written out: a layer of DeepSeek-V4's benchmark."""


@dataclasses.dataclass
class Settings(running.Settings):
    parts: tuple[str, ...] = PARTS
    rounds: int = 12


def both(fn: Callable[[], Tensor], leaves: Leaves, training: bool) -> Callable[[], Any]:
    """Returns a call of ``fn``, with the gradients of all leaves if ``training``."""

    def step() -> tuple[Tensor, ...]:
        o = fn()
        return (o.detach(), *torch.autograd.grad(o, list(leaves.values()), torch.ones_like(o)))

    return step if training else torch.no_grad()(fn)


def products(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, mask: Tensor) -> Tensor:
    """Returns the two products of attention, without a softmax between them."""
    return (q @ k.mT) @ v


def written(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, mask: Tensor) -> Tensor:
    """Returns attention with sinks ``[h]`` under an additive mask as models write it out."""
    s = (q @ k.mT) * q.shape[-1] ** -0.5 + mask
    s = torch.cat((s, sink[None, :, None, None].expand(*s.shape[:3], 1)), -1)
    p = torch.softmax(s - s.amax(-1, keepdim=True), -1, dtype=torch.float32)
    return p[..., :-1].to(v.dtype) @ v


class Run(variants.Run):
    operator, lists = "rule", ("rows",)

    def time(self, sizes: Row, found: list[Variant]) -> None:
        def finite(row: Row, out: Any) -> Row:
            return {"finite": all(bool(t.isfinite().all()) for t in timing.tensors(out))}

        self.timed("rows", "rule", found, lambda _: sizes, lambda row, t: row.update(t.in_ms()), finite)

    # ---- parts

    def sides(self) -> None:
        """Measures a layer from its latent both ways, by tokens."""
        for layer in SMALL if self.s.small else LAYERS:
            leaves, indices = layer.leaves(self.device), layer.indices(self.device)
            mask = mask_of(indices, layer.tokens)[:, None]
            calls = {DENSE: lambda: layer.dense(leaves, mask), "ops": lambda: layer.lists(leaves, indices)}  # noqa: B023
            got = [calls[name]().detach() for name in calls]
            error = float((got[1] - got[0]).float().norm() / got[0].float().norm())
            for name, call in calls.items():
                for what in ("fwd", "fb"):
                    variant = Variant(what, name, lambda: both(call, leaves, what == "fb"))  # noqa: B023
                    self.time(dataclasses.asdict(layer) | {"differ": error}, [variant])
            self.tidy()

    def product(self) -> None:
        """Measures one large product."""
        size = 64 if self.s.small else 8192
        a, b = (torch.randn(size, size, device=self.device, dtype=BF16) for _ in range(2))
        self.time({"size": size}, [Variant("product", "torch", lambda: lambda: a @ b)])

    def written(self) -> None:
        """Measures a softmax that is written out and compiled, and its two products alone."""
        batch, heads, queries, keys, width = size = SMALL_SIZE if self.s.small else WRITTEN_SIZE
        shapes: dict[str, tuple[int, ...]] = {"q": (batch, heads, queries, width), "sink": (heads,)}
        shapes |= dict.fromkeys("kv", (batch, 1, keys, width))
        made = {k: torch.randn(*shapes[k], device=self.device, dtype=BF16) for k in ("q", "k", "v", "sink")}
        mask = torch.zeros(batch, 1, queries, keys, device=self.device, dtype=BF16)
        mask.masked_fill_(torch.rand(mask.shape, device=self.device) < 0.5, float("-inf"))
        sizes = dict(zip(("batch", "heads", "queries", "keys", "width"), size, strict=True))
        for name, fn in ((PRODUCTS, products), (WRITTEN, written)):
            leaves = {k: t.detach().requires_grad_() for k, t in made.items() if name == WRITTEN or k != "sink"}
            given = made | leaves
            run = torch.compile(fn, dynamic=False)
            for what in ("fwd", "fb"):
                call = both(lambda: run(**given, mask=mask), leaves, what == "fb")  # noqa: B023
                self.time(sizes, [Variant(what, name, lambda: call)])  # noqa: B023


def _each(r: Row) -> list[Row]:
    size = next(f"{r[k]} {unit}" for k, unit in (("tokens", "tokens"), ("size", "cubed"), ("keys", "keys")) if k in r)
    time = f"{r['median_ms']:.4g}" if "median_ms" in r else f"failed: {r.get('error', '')}"
    return [r | {"of": size, "time_ms": time}]


_CELLS = "{of}|{what}|{variant}|{time_ms}|{differ:.2g}"
TABLES = {"rows": Table("Times in ms", "||variant|ms|the two sides differ by", _CELLS, _each)}


def table(result: Result) -> str:
    """Returns the whole run as Markdown."""
    lines = [*facts(result), f"{result['settings']['timing']}; medians"]
    return document("The rule's figures benchmark", lines, *sections_of(result, TABLES))


write = report.writer(table)
