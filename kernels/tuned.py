# SPDX-License-Identifier: Apache-2.0
"""Values of configurations from the device's own table, which ``python -m mhc_inductor tune`` measures.

Without a table every configuration is its closed form. A table can change the fields that are named here for a
configuration, which no bit of a result depends on, and only to the values that are named.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from mhc_inductor.tuning import table

F = TypeVar("F", bound=Callable[..., Any])
Choices = Mapping[str, tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Asked:
    """A configuration that a plan asked for: its closed form, and the values that its free fields may take."""

    default: Any
    choices: Choices


_asked: dict[str, Asked] | None = None


def tunable(name: str, **choices: tuple[Any, ...]) -> Callable[[F], F]:
    """Lets the device's table choose the named fields of what a configuration function returns."""

    def decorate(config: F) -> F:
        @functools.wraps(config)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            default, entries = config(*args, **kwargs), table.entries()
            if not entries and _asked is None:
                return default
            key = key_of(name, args, kwargs)
            if _asked is not None:
                _asked[key] = Asked(default, choices)
            return changed(default, entries.get(key, {}), choices)

        return chosen  # type: ignore[return-value]

    return decorate


def key_of(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Returns a configuration's key in the table. The device is left out: a table is of one."""
    words = [repr(a) for a in args if isinstance(a, (int, str))]
    return f"{name}({', '.join([*words, *(f'{k}={v!r}' for k, v in sorted(kwargs.items()))])})"


def changed(default: Any, entry: Mapping[str, Any], choices: Choices) -> Any:
    """Returns the configuration with an entry's values; names and values that may not be chosen are passed over."""
    allowed = {field: value for field, value in entry.items() if value in choices.get(field, ())}
    return dataclasses.replace(default, **allowed) if allowed else default


@contextlib.contextmanager
def recorded() -> Iterator[dict[str, Asked]]:
    """Yields a dictionary that collects the configurations which plans ask for inside the context, by key."""
    global _asked
    before, _asked = _asked, {}
    try:
        yield _asked
    finally:
        _asked = before
