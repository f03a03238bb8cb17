# SPDX-License-Identifier: Apache-2.0
"""Masks of transformers as one range of keys per query, without a mask over queries and keys.

Masks of transformers are functions of a sequence, a query's and a key's position. All that are known here show each
query one run of keys, whose ends are among a few positions. So a function is asked about these, not about all keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAME = "mhc_inductor"
"""The implementation's name among those of transformers."""
# Names, since Dynamo knows the __name__ of a function, but neither its __qualname__ nor its cells (torch 2.13).
_BIDIRECTIONAL = "bidirectional_mask_function"
_CAUSAL = "causal_mask_function"
_BOTH = "and_mask"
_INTERVALS = {
    _BIDIRECTIONAL,
    _CAUSAL,
    "and_masks.<locals>.and_mask",
    "sliding_window_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_overlay.<locals>.inner_mask",
    "chunked_overlay.<locals>.inner_mask",
    "packed_sequence_mask_function.<locals>.inner_mask",
    "remap_positions_for_packed_sequence.<locals>.inner_mask",
}
"""Functions of transformers.masking_utils that show each query one run of keys, and so do their intersections."""


def unsupported(what: str, others: str = '"eager" or "sdpa"') -> ValueError:
    """Returns the error for what is not supported, with the names of the implementations that support it."""
    return ValueError(f'attn_implementation="{NAME}" does not support {what}; use attn_implementation={others}')


def ranges_of_keys(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor:
    """Returns the keys that each query sees, as one range per query: what transformers calls for a mask.

    Args:
        batch_size: B.
        q_length: S.
        kv_length: S_kv.
        q_offset: Position of the first query.
        kv_offset: Position of the first key.
        mask_function: Whether query ``q`` of sequence ``b`` sees key ``k``, as ``f(b, head, q, k)`` of broadcast positions.
            None for a causal mask.
        attention_mask: ``[B, n]`` bool, False for padding, by position. None for no padding.
        local_size: Size of the window or chunk, or None.
        use_vmap: Whether the caller combined the mask with a function of its own.
        allow_is_causal_skip: Whether the caller takes something else than a mask over queries and keys.
        device: Device of the result.
        kwargs: What other implementations need.

    Returns:
        ``[B, 1, S, 2]`` int32: start and end (exclusive) of each query's range, as indices of keys. If padding is not one
        run at each side, or in a compiled graph, ``[B, 1, S + S_kv, 3]``: the rows of the queries, then one of each key,
        whose last number is 1 if the key is hidden.

    Raises:
        ValueError: The mask is not one of transformers' causal, sliding, chunked, packed or bidirectional ones, or the
            model computes with it.
    """
    name = _CAUSAL if mask_function is None else getattr(mask_function, "__name__", "another kind")
    _check_mask(name, mask_function, use_vmap)
    if name == _CAUSAL and q_length > 1 and not allow_is_causal_skip:  # asked for by models that read the mask
        raise unsupported("models that combine the mask with one of their own, as indexers do")
    query = (torch.arange(q_length, device=device) + q_offset).view(1, 1, -1, 1)
    key = torch.arange(kv_length, device=device) + kv_offset
    if mask_function is None or name == _CAUSAL:
        start, last = key[0].expand_as(query), query
    elif name == _BIDIRECTIONAL:
        start, last = key[0].expand_as(query), key[-1].expand_as(query)
    else:
        start, last = _ends(mask_function, batch_size, query, key, attention_mask, local_size)
    ranges = torch.cat((start, last + 1), -1) - kv_offset
    ranges = ranges.clamp(0, kv_length).to(torch.int32).expand(batch_size, 1, -1, 2)
    if attention_mask is None:
        return ranges
    missing = kv_length + kv_offset - attention_mask.shape[-1]  # the free part of a static cache
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return _padded(ranges, attention_mask.bool()[:, key])


def _padded(ranges: Tensor, visible: Tensor) -> Tensor:
    """Returns the ranges cut to the visible keys ``[B, S_kv]`` if these are one run, else with a row for each key."""
    if not torch.compiler.is_compiling():  # a compiled graph must not depend on the values
        runs = visible[:, 0] + (visible[:, 1:] > visible[:, :-1]).sum(-1)
        if bool((runs <= 1).all()):
            first = visible.to(torch.int32).argmax(-1)
            run = torch.stack((first, first + visible.sum(-1)), -1).to(torch.int32).view(-1, 1, 1, 2)
            return ranges.clamp(run[..., :1], run[..., 1:])
    rows = torch.nn.functional.pad((~visible).to(torch.int32)[:, None, :, None], (2, 0))
    return torch.cat((torch.nn.functional.pad(ranges, (0, 1)), rows), 2)


def _check_mask(name: str, mask_function: Callable[..., Tensor] | None, use_vmap: bool) -> None:
    """Raises ValueError unless each query's visible keys are one range whose ends :func:`_ends` finds."""
    if use_vmap:
        raise unsupported("or_mask_function and and_mask_function")
    if name not in (_CAUSAL, _BIDIRECTIONAL, _BOTH):
        raise unsupported(f"masks of {name}, which are no range of keys for each query")
    if not torch.compiler.is_compiling():
        for unknown in _unknown(mask_function):
            raise unsupported(f"masks of {unknown}, which are no range of keys for each query")


def _unknown(function: Any) -> list[str]:
    """Returns the names of functions inside a mask function that are not known to show one run of keys."""
    if isinstance(function, tuple):
        return [name for one in function for name in _unknown(one)]
    if not callable(function) or isinstance(function, Tensor):
        return []
    name = getattr(function, "__qualname__", type(function).__name__)
    if name not in _INTERVALS or function.__module__ != "transformers.masking_utils":
        return [name]
    return [name for cell in function.__closure__ or () for name in _unknown(cell.cell_contents)]


def _ends(
    mask_function: Callable[..., Tensor],
    batch_size: int,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    local_size: int | None,
) -> tuple[Tensor, Tensor]:
    """Returns the first and the last position ``[B, 1, S, 1]`` that each query sees; (1, 0) past the keys if none.

    Each end is one of a few positions, whichever of the masks it is. So the function is asked about these alone, and
    the outermost visible ones are the ends.
    """
    batch = torch.arange(batch_size, device=query.device).view(-1, 1, 1, 1)
    head = batch.new_zeros(1, 1, 1, 1)
    ends = [query, key[0].expand_as(query), key[-1].expand_as(query)]
    if local_size is not None:
        left = 0 if attention_mask is None else (attention_mask.cumsum(-1) == 0).sum(-1).view(-1, 1, 1, 1)
        ends += [query - local_size + 1, query - local_size, query + local_size]
        ends.append(query - (query - left) % local_size)  # the start of its chunk
    if attention_mask is None and query.shape[2] == key.shape[0]:  # perhaps packed
        # Not (query - 1).clamp(min=...): Inductor of torch 2.11 and 2.13 cannot divide its maximum by a chunk's size.
        before = torch.where(query > key[0], query - 1, key[0])
        joined = mask_function(batch, head, query, before)
        starts = torch.where(joined, key[0], query).expand(batch_size, -1, -1, -1)
        ends.append(starts.cummax(2).values)  # where its sequence begins
    asked = torch.cat([end.expand(batch_size, -1, -1, -1) for end in ends], -1).clamp(key[0], key[-1])
    seen = mask_function(batch, head, query, asked)
    first = torch.where(seen, asked, key[-1] + 1).amin(-1, keepdim=True)
    return first, torch.where(seen, asked, key[0] - 1).amax(-1, keepdim=True)
