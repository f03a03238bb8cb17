# SPDX-License-Identifier: Apache-2.0
"""Selection attention as an attention implementation of transformers: ``attn_implementation="mhc_inductor"``.

transformers calls two functions by that name. The one for masks returns, in place of a ``[B, 1, S, S_kv]`` mask, the
range of keys of each query. The one for attention passes it to :func:`mhc_inductor.selection_attention`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mhc_inductor import versions
from mhc_inductor.api.selection import selection_attention
from mhc_inductor.integrations.mask_ranges import NAME, ranges_of_keys, unsupported

OLDEST = (5, 17)
"""The oldest transformers whose interface to masks this module knows."""


def register_attention() -> None:
    """Registers ``attn_implementation="mhc_inductor"`` with transformers, for all models of this process.

    Afterwards ``from_pretrained(..., attn_implementation="mhc_inductor")`` and ``set_attn_implementation`` take the
    name. Its attention is :func:`selection_attention` over one range of keys per query: causal, sliding, chunked,
    packed by ``position_ids`` or ``cu_seq_lens_q``, or bidirectional, with padding and sinks. No mask over queries and
    keys is built. A mask ``[B or 1, 1, S, S_kv]`` that the caller gives, bool or floating, is read as it is. A query
    without visible keys gives 0.

    Calling it again changes nothing. transformers is imported by this call, not before.

    Models then raise ValueError, with the name of an implementation that does it, for: dropout in training, softcap,
    a position bias, ``output_attentions``, head masks, masks per head, paged caches, and masks that are no range of
    keys for each query (``or_mask_function``, ``and_mask_function``, bidirectional blocks of images).

    Raises:
        ImportError: transformers is not installed, or is older than 5.17.

    Source: AttentionInterface and AttentionMaskInterface of transformers.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError("register_attention needs transformers: pip install 'transformers>=5.17'") from error
    if versions.minor(transformers.__version__) < OLDEST:
        raise ImportError(
            f"register_attention needs transformers {versions.written(OLDEST)} or newer, got {transformers.__version__}: "
            "pip install -U transformers"
        )
    transformers.AttentionInterface.register(NAME, attention)
    transformers.AttentionMaskInterface.register(NAME, ranges_of_keys)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Returns the attention of a layer: what transformers calls in each layer.

    Args:
        module: The layer; ``is_causal`` is read where neither a mask nor the argument says it.
        query: ``[B, H, S, Dk]``.
        key: ``[B, G, S_kv, Dk]``; each serves H / G heads in a row.
        value: ``[B, G, S_kv, Dv]``.
        attention_mask: What :func:`ranges_of_keys` returned, or a mask ``[B or 1, 1, S, S_kv]``, bool or floating. None
            for all keys, or a causal mask.
        dropout: Must be 0.
        scaling: Factor of the scores; None for 1/sqrt(Dk).
        is_causal: Whether attention without a mask is causal; None for the module's.
        s_aux: Sinks ``[H]``, or None.
        kwargs: ``cu_seq_lens_q`` and ``cu_seq_lens_k``, boundaries ``[N+1]`` of packed sequences; the rest as for other
            implementations.

    Returns:
        ``[B, S, H, Dv]`` in query's dtype, and None: no weights.

    Raises:
        ValueError: An option is not supported; the message names an implementation that supports it.
    """
    _check_options(dropout, kwargs)
    batch, s, groups, s_kv = query.shape[0], query.shape[2], key.shape[1], key.shape[2]
    q = query.unflatten(1, (groups, -1)).permute(0, 3, 1, 2, 4)
    options: dict[str, Any] = {"scale": scaling, "sink": None if s_aux is None else s_aux.reshape(groups, -1)}
    if attention_mask is not None and attention_mask.dtype is not torch.int32:
        if attention_mask.dim() != 4 or attention_mask.shape[1] != 1:
            raise unsupported(f"masks other than [B, 1, S, S_kv], got {list(attention_mask.shape)}")
        return selection_attention(q, key, value, mask=attention_mask.transpose(1, 2), **options).flatten(2, 3), None
    if attention_mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        attention_mask = _without_mask(query, s_kv, bool(causal))
    if list(attention_mask.shape[1:]) not in ([1, s, 2], [1, s + s_kv, 3]):
        raise unsupported(f"models that change the mask, which became {list(attention_mask.shape)}")
    ranges = attention_mask[:, 0, :s, None, None, :2].expand(batch, s, groups, 1, 2)
    hidden = attention_mask[:, 0, s:, 2].expand(batch, -1) if attention_mask.shape[3] == 3 else None
    options["segments_q"], options["segments_k"] = _segments(hidden, batch, s, s_kv, kwargs)
    return selection_attention(q, key, value, ranges, **options).flatten(2, 3), None


def _check_options(dropout: float, options: dict[str, Any]) -> None:
    """Raises ValueError for what the op does not compute."""
    if dropout:
        raise unsupported("dropout (set the model's attention_dropout to 0)")
    for name, others in (
        ("softcap", '"eager" or "flex_attention"'),
        ("position_bias", '"eager" or "sdpa"'),
        ("head_mask", '"eager"'),
    ):
        if options.get(name) is not None:
            raise unsupported(name, others)
    if options.get("output_attentions"):
        raise unsupported("output_attentions", '"eager"')
    if options.get("cache") is not None:
        raise unsupported("paged caches", '"sdpa"')
    for name, value in options.items():
        if name.endswith("indices") and value is not None:
            raise unsupported(f"{name}, the keys that an indexer chose")


def _without_mask(query: Tensor, s_kv: int, causal: bool) -> Tensor:
    """Returns the ranges ``[1, 1, S, 2]`` of a model that makes no mask: as sdpa does, causal from the first key on."""
    s = query.shape[2]
    start = torch.zeros(s, dtype=torch.int32, device=query.device)
    end = torch.arange(1, s + 1, dtype=torch.int32, device=query.device) if causal and s > 1 else start + s_kv
    return torch.stack((start, end), -1)[None, None]


def _segments(
    hidden: Tensor | None, batch: int, s: int, s_kv: int, options: dict[str, Any]
) -> tuple[Tensor | None, Tensor | None]:
    """Returns segment ids of queries and keys, of packed sequences and with -1 for hidden keys; None without either."""
    ends = options.get("cu_seq_lens_q")
    if ends is None:
        return (None, None) if hidden is None else (hidden.new_zeros(batch, s), hidden)
    if batch != 1:
        raise unsupported(f"cu_seq_lens_q with a batch of {batch}", '"flash_attention_2"')
    ends_k = options.get("cu_seq_lens_k")
    ids = [
        torch.searchsorted(e[1:], torch.arange(n, device=e.device, dtype=e.dtype), right=True, out_int32=True)[None]
        for e, n in ((ends, s), (ends if ends_k is None else ends_k, s_kv))
    ]
    return ids[0], ids[1] if hidden is None else torch.where(hidden > 0, -1, ids[1])
