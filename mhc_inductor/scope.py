"""Changes of torch that last only while they are needed, on any number of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Change:
    """Makes a change when the first thread enters and takes it back when the last one leaves, exception or not."""

    def __init__(self, make: Callable[[], Callable[[], None]]) -> None:
        """``make`` changes something, and returns the function that takes it back."""
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
    """Replaces attribute ``name`` by ``wrap`` of it. Returns what puts it back, unless someone else replaced it since."""
    before = getattr(owner, name)
    ours = wrap(before)
    setattr(owner, name, ours)

    def undo() -> None:
        if getattr(owner, name) is ours:
            setattr(owner, name, before)

    return undo
