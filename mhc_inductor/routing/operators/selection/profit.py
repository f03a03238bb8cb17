# SPDX-License-Identifier: Apache-2.0
"""Decides whether an attention under a mask is worth routing: closed-form rules on present shapes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

import torch

from mhc_inductor.peaks import MEMORY, PRODUCT_FLOPS
from mhc_inductor.routing.graph.index import Var, present_size, product_of
from mhc_inductor.routing.operators.selection.intervals import MOST_ENTRIES
from mhc_inductor.routing.operators.selection.matches import Found

UNKNOWN = 1024
"""Keys that a query is assumed to see if ranges may have any length: 16 blocks of 64, as in public models."""
FEW_QUERIES = 16
RANGE_KEY, FEW_QUERIES_KEY = 16.0, 2.0
"""Times as long as dense attention that the op over ranges takes for a key: with one head a group, and with few queries."""
MEASURED_ON = "estimated from one H200 in bf16"
MAX_RANGES, MAX_LIST = (64, 512, 512), (128, 576, 512)
"""The most heads a group, and the widest keys and values, that the kernels of ranges, and those of lists, take."""
FUSED_D = 256
"""The widest heads that torch's fused kernels take; they take no sink."""
ROWS = 64
"""Heads that one tensor-core tile of the list kernels holds. With fewer the tile is not full."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Present sizes of an attention.

    ``selected``: the most keys that a query can see, None if there is no bound. ``groups``: groups of heads that list
    their keys on their own, times the batch. ``values``: the width of V. ``fused``: the model calls
    scaled_dot_product_attention; otherwise it writes the softmax out. ``latent``: K and V are maps of one latent that
    the op reads in their place. ``gathered``: the model gathers each query's keys; otherwise it reads all keys.
    """

    device: str
    dtype: torch.dtype
    queries: int
    keys: int
    heads: int
    width: int
    selected: int | None
    groups: int = 1
    values: int = 0
    fused: bool = False
    latent: Latent | None = None
    gathered: bool = False

    @property
    def crowded(self) -> bool:
        """Returns whether lists leave out less than a quarter of the keys, as far as is known."""
        return self.selected is None or 4 * self.selected > 3 * self.keys


@dataclasses.dataclass(frozen=True)
class Latent:
    """Sizes of absorbed latent attention: heads, the latent's width, that of the part all heads share, the batch."""

    heads: int
    width: int
    shared: int
    batch: int


def sizes_of(one: Found, hints: Mapping[str, int], device: str, dtype: torch.dtype) -> Sizes:
    """Returns the present sizes of an attention that was found."""

    def now(digits: Iterable[Var]) -> int:
        return present_size(product_of(v.size for v in digits), hints)

    if one.entries is not None:
        selected: int | None = sum(each.count(hints) for each in one.entries)
    else:
        selected = 0
        for each in one.intervals:
            widths = [w for low, high in each.pairs() if (w := high.minus(low).value) is not None]
            if each.selects and selected is not None:
                selected = selected + min(widths) * now(each.bound) if widths else None
    groups = now([*one.batch, *one.groups])
    width, values = present_size(one.width, hints), now(one.feature)
    if one.entries is None:
        width = max(width, values)
    latent = None
    if one.absorbed is not None:
        latent = Latent(one.absorbed.heads, one.absorbed.width, one.absorbed.rope, now(one.absorbed.batch))
    return Sizes(
        device=device,
        dtype=dtype,
        queries=now(one.query),
        keys=now([one.t]),
        heads=now(one.heads),
        width=width,
        selected=selected,
        groups=groups,
        values=values,
        fused=one.fills.call is not None,
        latent=latent,
        gathered=one.gathered,
    )


@dataclasses.dataclass(frozen=True)
class Sides:
    """Both figures that the rule compares: the op over ``keys``, and ``other``, the attention that it would replace."""

    op: float
    dense: float
    keys: str
    unit: str
    sizes: str
    other: str = "dense attention"

    @property
    def op_wins(self) -> bool:
        """Returns whether the op replaces the other side."""
        return self.op <= self.dense

    def words(self) -> str:
        """Returns which side is faster, with both figures."""
        op, dense = (f"{x:.3g}" if x < 1000 else f"{x:.0f}" for x in (self.op, self.dense))
        if self.op_wins:
            return f"{self.keys} are faster: {op} {self.unit}, {self.other} {dense} {self.unit} ({self.sizes})"
        return f"{self.other} is faster: {dense} {self.unit}, {self.keys} {op} {self.unit} ({self.sizes})"


def range_sides(s: Sizes) -> Sides:
    """Returns what ranges and dense attention cost, in units of the time that dense attention takes for a key.

    Dense attention under a mask reads ``keys`` keys for every query, the op ``selected`` keys. Each of these costs
    the op ``RANGE_KEY / sqrt(h)`` times as much with h heads per group: 8 times with 4 heads and 4 times with 16. With
    few queries, where reading dominates, each costs twice as much. ``tests/test_routing_selection.py`` recomputes this
    from benchmarks/results/selection.json.
    """
    few = s.queries <= FEW_QUERIES
    each = FEW_QUERIES_KEY if few else RANGE_KEY / math.sqrt(max(1, s.heads))
    selected = UNKNOWN if s.selected is None else s.selected
    sizes = (
        f"{'an assumed ' if s.selected is None else ''}{selected} of {s.keys} keys a query, {each:.3g} units each with "
        f"{f'up to {FEW_QUERIES} queries' if few else f'{s.heads} heads a group'}; "
        f"a unit is a key in dense attention, {MEASURED_ON}"
    )
    return Sides(selected * each, s.keys, "ranges of keys", "units", sizes)


def refusal(s: Sizes) -> str:
    """Returns why the op over ranges does not replace dense attention, an empty string if it does.

    On a CPU the op always replaces dense attention.
    """
    if s.device != "cuda":
        return ""
    if reason := _beyond(s, MAX_RANGES):
        return reason
    sides = range_sides(s)
    return "" if sides.op_wins else sides.words()


# --- lists of keys ------------------------------------------------------------------------------------------

# Measured on one H200 in bf16; docs/operators/selection.md, "When it is routed", says where each figure comes from.
LIST_FLOPS = 375e12
"""Operations a second of the list kernels, forward, with full tiles (benchmarks/results/lists.json)."""
WIDE = 1024
LIST_TRAINING, WIDE_LIST_TRAINING = 7.7, 5.5
"""How many times as long forward and backward take; the second if a key and its value have WIDE elements or more."""
DENSE_FLOPS = 345e12
"""Operations a second of scaled_dot_product_attention under a mask, forward (benchmarks/results/rule.json)."""
DENSE_TRAINING = 5.2
WRITTEN = 6e-12
"""Seconds for each score of a softmax that is written out and compiled: its passes over memory (rule.json)."""
WRITTEN_TRAINING = 2.2


def list_seconds(s: Sizes, training: bool) -> float:
    """Returns the estimated time of the op over lists of keys: a tile of 64 rows for every group and key.

    With a latent it is that of one group of all heads, and of the products with the absorbed maps.
    """
    maps, groups, heads, width = 0.0, s.groups, s.heads, s.width + s.values
    if s.latent is not None:
        groups, heads, width = s.latent.batch, s.latent.heads, 2 * s.latent.width + s.latent.shared
        maps = _maps(s, s.latent, s.queries, training)
    rows = ROWS * -(-heads // ROWS)
    lists = groups * s.queries * (s.selected or 0) * 2 * rows * width / LIST_FLOPS
    slower = WIDE_LIST_TRAINING if width >= WIDE else LIST_TRAINING
    return lists * (slower if training else 1.0) + maps


def _maps(s: Sizes, latent: Latent, tokens: int, training: bool) -> float:
    """Returns the time of the products of ``tokens`` vectors a sequence with the maps of the latent."""
    operations = 2 * latent.batch * tokens * latent.heads * latent.width * (s.width - latent.shared + s.values)
    return operations / PRODUCT_FLOPS * (3.0 if training else 1.0)


def dense_seconds(s: Sizes, training: bool) -> float:
    """Returns the estimated time of dense attention under a mask, and of expanding a latent to K and V."""
    scores = s.groups * s.queries * s.heads * s.keys
    products = scores * 2 * (s.width + s.values) / DENSE_FLOPS * (DENSE_TRAINING if training else 1.0)
    maps = 0.0 if s.latent is None else _maps(s, s.latent, s.keys, training)
    return products + maps + (0.0 if s.fused else scores * WRITTEN * (WRITTEN_TRAINING if training else 1.0))


def gathered_seconds(s: Sizes, training: bool) -> float:
    """Returns the least time of attention over keys that the model gathers: their way through memory, and its products.

    Every listed key is read, written and read again; gradients take the same way back at least once more.
    """
    each = s.groups * s.queries * (s.selected or 0)
    moved = each * s.width * torch.finfo(s.dtype).bits // 8 * 3 / MEMORY * (3.0 if training else 1.0)
    products = each * s.heads * 2 * (s.width + s.values) / DENSE_FLOPS * (DENSE_TRAINING if training else 1.0)
    return moved + products


def absorbs(s: Sizes) -> bool:
    """Checks whether reading the latent is estimated to be faster than each head's own keys, and a kernel takes it."""
    if s.latent is None or s.latent.width + s.latent.shared > MAX_LIST[1] or s.latent.width > MAX_LIST[2]:
        return False
    return list_seconds(s, True) < list_seconds(dataclasses.replace(s, latent=None), True)


def reads_masks(s: Sizes, sink: bool) -> bool:
    """Checks whether the op over a mask replaces attention that is written out: where torch has no fused kernel for it."""
    width = max(s.width, s.values) if s.latent is None else s.latent.width + s.latent.shared
    return not s.fused and (sink or width > FUSED_D)


def mask_refusal(s: Sizes) -> str:
    """Returns why no kernel takes these sizes for the op over a mask, an empty string if one does."""
    return _beyond(s) if s.device == "cuda" else ""


def list_sides(s: Sizes, training: bool = False) -> Sides:
    """Returns the estimated milliseconds of lists, and of dense attention or that over keys that the model gathers."""
    lists, dense = (f(s, training) * 1e3 for f in (list_seconds, gathered_seconds if s.gathered else dense_seconds))
    heads = s.heads if s.latent is None else s.latent.heads
    sizes = f"{s.selected} of {s.keys} keys a query, {heads} heads a group{', with gradients' if training else ''}"
    other = "gathering the keys" if s.gathered else "dense attention"
    return Sides(lists, dense, "lists of keys", "ms", f"{sizes}; {MEASURED_ON}", other)


def list_refusal(s: Sizes, training: bool = False) -> str:
    """Returns why the op over lists does not replace dense attention, an empty string if it does."""
    assert s.selected is not None
    if s.selected > MOST_ENTRIES:
        return f"lists of {s.selected} keys a query; the op takes up to {MOST_ENTRIES}"
    if s.device == "cuda" and (reason := _beyond(s)):
        return reason
    sides = list_sides(s, training)
    return "" if sides.op_wins else sides.words()


def _beyond(s: Sizes, most: tuple[int, int, int] = MAX_LIST) -> str:
    """Returns which size no kernel takes, an empty string if there is none."""
    if s.dtype is torch.float64:
        return "float64 has no kernel"
    at = s.latent
    sizes = (s.heads, s.width, s.values) if at is None else (at.heads, at.width + at.shared, at.width)
    if any(size > limit for size, limit in zip(sizes, most, strict=True)):
        return "{} heads a group of {} elements, values of {}; the kernels take up to {}, up to {} and up to {}".format(
            *sizes, *most
        )
    return ""
