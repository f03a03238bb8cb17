# SPDX-License-Identifier: Apache-2.0
"""Limits on the searches of the analysis. A search that exceeds one is given up and reported, never silently."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

from mhc_inductor.routing.graph.index import Unsupported
from mhc_inductor.routing.graph.values import Value, behind

LIMIT = 4096
"""Largest number of elements in one normal form."""
DEPTH = 128
"""Largest number of sums in one product, and of recursive calls of a search: Python's stack is limited too."""

_watched: contextvars.ContextVar[list[Unfollowed] | None] = contextvars.ContextVar("too large", default=None)


class Unfollowed(Unsupported):
    """Something that the analysis gave up on.

    Creating one is enough to report it: :func:`watch` collects every instance.
    """

    def __init__(self, reason: str, value: Value | None = None) -> None:
        super().__init__(reason)
        self.value = value
        found = _watched.get()
        if found is not None:
            found.append(self)


class TooLarge(Unfollowed):
    """A formula with more parts than a search allows."""

    def __init__(self, what: str, limit: int, value: Value | None = None) -> None:
        super().__init__(
            f"the formula around this line is too large to follow: it has more than {limit:,} {what}", value
        )


@contextlib.contextmanager
def watch() -> Iterator[list[Unfollowed]]:
    """Collects what was not followed inside the context, in the order in which it was met.

    Yields:
        A list that is filled when the context is left.
    """
    found: list[Unfollowed] = []
    met: list[Unfollowed] = []
    token = _watched.set(met)
    try:
        yield found
    finally:
        _watched.reset(token)
        found += dict.fromkeys(met)


class Steps:
    """Counts the elements that a search below ``value`` visits."""

    def __init__(self, what: str, value: Value, limit: int = LIMIT) -> None:
        self.what, self.value, self.limit, self.taken = what, value, limit, 0

    def take(self) -> None:
        """Counts one element. Raises TooLarge past ``limit``."""
        self.taken += 1
        if self.taken > self.limit:
            raise TooLarge(self.what, self.limit, self.value)


def remembered(known: dict[Any, Any], key: Any, find: Callable[[], Any], value: Value | None = None) -> Any:
    """Returns what ``find`` returned for ``key`` before, or raises the Unsupported that it raised.

    ``value`` is where the search is: a TooLarge that names no value is reported there.
    """
    found = known.get(key)
    if found is None:
        try:
            found = find()
        except Unsupported as error:
            if isinstance(error, TooLarge) and error.value is None:
                error.value = value
            found = error
        except RecursionError:  # the depth that this allows depends on the caller's stack
            found = Unfollowed("the formula around this line is too deep to follow", value)
        known[key] = found
    if isinstance(found, Unsupported):
        raise found.with_traceback(None)
    return found


def nearest(value: Value | None) -> Any:
    """Returns the node of ``value``, or of the nearest value that it is computed from and that has a node."""
    found = () if value is None else behind(value)
    return next((v.node for v in found if v.node is not None), None)
