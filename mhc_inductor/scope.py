# SPDX-License-Identifier: Apache-2.0
"""Temporary changes of torch and of how this package compiles, safe on any number of threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

_here = threading.local()


@contextlib.contextmanager
def calling_ops(on: bool) -> Iterator[None]:
    """Makes what this thread compiles inside the context call each op whole, if ``on`` is set here or further out."""
    before = calls_ops()
    _here.calls = on or before
    try:
        yield
    finally:
        _here.calls = before


def calls_ops() -> bool:
    """Returns whether code that this thread compiles calls each op, so that profilers and counters see it."""
    return getattr(_here, "calls", False)


class Change:
    """Context manager that applies a change when the first thread enters and undoes it when the last one leaves.

    The change is also undone when an exception leaves the context.
    """

    def __init__(self, make: Callable[[], Callable[[], None]]) -> None:
        """Stores ``make``, which applies the change and returns the function that undoes it."""
        self._make = make
        self._lock = threading.Lock()
        self._inside = 0
        self._undo: Callable[[], None] | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._undo = self._make()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._undo is not None:
                undo, self._undo = self._undo, None
                undo()


def replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Replaces attribute ``name`` of ``owner`` by ``wrap(attribute)``.

    Returns:
        A function that restores the attribute, unless someone else has replaced it since.
    """
    before = getattr(owner, name)
    ours = wrap(before)
    setattr(owner, name, ours)

    def undo() -> None:
        if getattr(owner, name) is ours:
            setattr(owner, name, before)

    return undo
