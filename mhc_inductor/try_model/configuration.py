# SPDX-License-Identifier: Apache-2.0
"""Finds a model's configuration and makes it small, without changing what decides which formulas are routed."""

from __future__ import annotations

import difflib
import json
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

STEPS = ("layers", "vocabulary", "experts", "widths")
"""What is made small. If a model refuses the result, one of them is left out, the last one first."""
_VOCABULARY = 1024
_WIDTHS = {"q_lora_rank": 64, "o_lora_rank": 64}
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")


def load(source: str, trust_remote_code: bool) -> Any:
    """Returns the configuration of a model type, a folder, a ``config.json`` or an id of the Hugging Face hub.

    Raises:
        ValueError: if there is none of that name, or the model needs code of its own that is not trusted.
        OSError: if the hub does not give it and the cache does not have it.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    there = pathlib.Path(source).exists()
    if not there and source in CONFIG_MAPPING:
        return AutoConfig.for_model(source)
    if not there and "/" not in source:
        near = ", ".join(difflib.get_close_matches(source, list(CONFIG_MAPPING), 3)) or "deepseek_v4, llama, ..."
        raise ValueError(f"{source!r} is no file, folder, id of the hub (OWNER/NAME) or model type (near: {near})")
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        said = str(error).strip().partition("\n")[0]
        if "trust_remote_code" in str(error):
            said = "the model has code of its own: read it, then pass --trust-remote-code to run it"
        if there or isinstance(error, ValueError):
            raise ValueError(f"the configuration of {source} cannot be read: {said}") from error
        raise OSError(
            f"{source} is no folder here, and the hub did not give its configuration, nor is it cached. Offline: give a "
            "folder, a config.json, or a model type such as deepseek_v4. Online: check the id; for a gated model, run "
            f"hf auth login. The hub's client said: {said}"
        ) from error


def parts(config: Any) -> Iterator[tuple[str, Any]]:
    """Yields the configuration and those inside it (text, vision), each with the prefix of its fields."""
    yield "", config
    yield from ((f"{n}.", getattr(config, n)) for n in config.sub_configs if getattr(config, n, None) is not None)


def fields(config: Any) -> dict[str, Any]:
    """Returns the fields of a configuration and of those inside it, by their names with prefixes."""
    return {prefix + name: value for prefix, part in parts(config) for name, value in part.to_dict().items()}


def given(config: Any, words: Iterable[str]) -> dict[str, Any]:
    """Returns the values of ``--set key=value`` by the configuration's own names; a value is JSON, or else text.

    Raises:
        ValueError: if a word has no "=", or the configuration no such field.
    """
    names = {name: name for name in fields(config)}
    for prefix, part in parts(config):
        own = {**{k: k for k in part.to_dict()}, **part.attribute_map}
        names |= {prefix + alias: prefix + name for alias, name in own.items()}
        if part is config.get_text_config():
            names = {alias: prefix + name for alias, name in own.items()} | names
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in names:
            near = ", ".join(difflib.get_close_matches(name, names, 3))
            why = f"{type(config).__name__} has no field {name!r}" + (f"; near: {near}" if near else "")
            raise ValueError(f"--set {word}: " + (why if equals else "expected key=value"))
        try:
            found[names[name]] = json.loads(text)
        except ValueError:
            found[names[name]] = text
    return found


def changed(config: Any, changes: dict[str, Any]) -> Any:
    """Returns a new configuration with other values in some fields, without a cache of keys and values."""
    new = config.to_dict()
    for key, value in changes.items():
        part, _, name = key.rpartition(".")
        (new[part] if part else new)[name] = value
    new = type(config).from_dict(new)
    for _, part in parts(new):
        part.use_cache = False
    return new


def without_chance(config: Any) -> dict[str, Any]:
    """Returns the changes that switch off dropout and jitter, so that the results of two calls can be compared."""
    return {k: 0.0 for k, v in fields(config).items() if re.search("drop|jitter", k) and isinstance(v, float) and v}


def special_tokens(config: Any) -> dict[str, Any]:
    """Returns the fields that name special tokens, each an id or a list of ids."""
    return {k: v for k, v in fields(config).items() if re.search(r"_token_(id|index)$", k) and v is not None}


def smaller(config: Any, user: dict[str, Any], steps: Iterable[str] = STEPS) -> dict[str, Any]:
    """Returns the changes that make a configuration small and leave what the ``user`` set.

    A layer of each kind stays, and so do the number of streams, topk, windows, and the number and sizes of heads and of
    their latent vectors: they decide what is routed. ``steps`` are those of :data:`STEPS` to take.
    """
    new: dict[str, Any] = {}
    for prefix, part in parts(config):
        before, found = part.to_dict(), dict[str, Any]()
        own = {k.removeprefix(prefix): v for k, v in user.items() if k.startswith(prefix)}
        if "layers" in steps:
            found |= _layers(before, own, part.attribute_map.get("num_hidden_layers", "num_hidden_layers"))
        if part is config.get_text_config():
            found |= _experts(before | own) if "experts" in steps else {}
            found |= _widths(before, part.attribute_map) if "widths" in steps else {}
            if "vocabulary" in steps:
                found["vocab_size"] = min(_VOCABULARY, before["vocab_size"])
                new |= _moved(special_tokens(config), own.get("vocab_size", found["vocab_size"]))
        new |= {prefix + k: v for k, v in found.items()}
    return {k: v for k, v in new.items() if k not in user}


def _layers(before: dict[str, Any], own: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the number of layers, and what has an entry for each layer, cut to those that stay.

    These are the first ones of each kind; the first of all where an entry is the number of another layer.
    """
    name = name if name in before else "depth"
    if not isinstance(count := before.get(name), int):
        return {}
    lists = {k: v for k, v in before.items() if isinstance(v, list) and len(v) == count}
    first = {v.index(x) for v in lists.values() for x in v if isinstance(x, str) or x in (0, 1)}
    fixed = own.get(name) or next((len(own[k]) for k in lists if k in own), None)
    if fixed or not lists or any(isinstance(x, int) and x > 1 for v in lists.values() for x in v):
        stay = [*range(fixed or min(count, max([1, before.get("first_k_dense_replace") or 0, *first]) + 1))]
    else:
        stay = sorted(first if len(first) > 1 else {0, min(1, count - 1)})
    cut: dict[str, Any] = {k: [v[i] for i in stay if i < count] for k, v in lists.items()}
    if table := before.get("per_layer_config"):  # by the number of the layer
        cut["per_layer_config"] = {str(stay.index(int(k))): v for k, v in table.items() if int(k) in stay}
    return {name: len(stay), **cut}


def _moved(special: dict[str, Any], size: int) -> dict[str, Any]:
    """Returns the ids of special tokens; those that a smaller vocabulary does not have stand at its end."""
    outside = sorted({i for v in special.values() for i in (v if isinstance(v, list) else [v]) if i >= size})
    new = {old: size - 1 - at for at, old in enumerate(outside)}
    return {k: [new.get(i, i) for i in v] if isinstance(v, list) else new.get(v, v) for k, v in special.items()}


def _experts(of: dict[str, Any]) -> dict[str, Any]:
    """Returns a number of experts of which a token's are still chosen, in groups where the model has them."""
    token, groups = of.get("num_experts_per_tok") or 1, of.get("n_group") or 1
    size = max(2, -(-token // (of.get("topk_group") or groups)), -(-max(8, token + 2) // groups))
    return {name: min(of[name], size * groups) for name in _EXPERTS if of.get(name)}


def _widths(before: dict[str, Any], aliases: dict[str, str]) -> dict[str, Any]:
    """Returns smaller widths; the width of the model stays where the size of a head can only follow from it."""
    small = {**_WIDTHS, **{k: 256 for k in before if k.endswith("intermediate_size")}}
    hidden, heads = aliases.get("hidden_size", "hidden_size"), {}
    if "head_dim" in before and not before["head_dim"]:
        heads = {"head_dim": before[hidden] // before["num_attention_heads"]}
    if any((before | heads).get(k) for k in ("head_dim", "qk_nope_head_dim")):
        small[hidden] = 256
    return heads | {k: v for k, v in small.items() if isinstance(before.get(k), int) and before[k] > v}
