"""Whether an attention with a mask is worth routing: one closed form in static shapes."""

from __future__ import annotations


def worth(device: str, queries: int, keys: int, heads: int, selected: int | None) -> bool:
    """Whether the op replaces dense attention.

    ``selected`` is the most keys that a query can see, None where the ranges may have any length. Dense attention
    reads ``keys`` for every query. The op reads ``selected`` of them at a cost that grows as the heads of a group
    fill less of a tensor-core tile. Always on a CPU, where it multiplies with the selected keys only.
    """
    if device != "cuda":
        return True
    if selected is None:
        return keys >= 4096
    return keys >= 2 * selected * (2 if heads < 8 else 1)
