# SPDX-License-Identifier: Apache-2.0
"""Progress bars: of one look everywhere, and live in a terminal and in a notebook. They need the package rich."""

from __future__ import annotations

import functools
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

PERIOD = 0.25
"""Seconds between two updates of a bar in a notebook."""


def bars(console: Console | None = None, *, width: int = 0, transient: bool = False, disable: bool = False) -> Progress:
    """Returns bars with description, bar, count, time and the field ``note`` of each task, if it has one.

    In a notebook they are one table below the cell, which changes in place and needs no ipywidgets. Where output goes to
    a file, only the last state is written.

    Args:
        console: where to draw; stderr if None.
        width: least width of the descriptions.
        transient: remove the bars at the end; in a notebook their last state stays.
        disable: draw nothing.

    Raises:
        ImportError: if rich is not installed.
    """
    from rich import console as consoles
    from rich import progress
    from rich.text import Text

    class Note(progress.ProgressColumn):
        def render(self, task: progress.Task) -> Text:
            return Text(str(task.fields.get("note", "")))

    console = consoles.Console(stderr=True) if console is None else console
    made = _in_notebook() if console.is_jupyter else progress.Progress
    columns = (progress.TextColumn(f"{{task.description:>{width}}}"), progress.BarColumn())
    more = (progress.MofNCompleteColumn(), progress.TimeElapsedColumn(), Note())
    return made(*columns, *more, console=console, transient=transient, disable=disable)


def shown() -> bool:
    """Returns whether somebody looks on: stderr is a terminal or a notebook, and rich is installed."""
    try:
        from rich.console import Console
    except ImportError:
        return False
    return sys.stderr.isatty() or Console().is_jupyter


@functools.cache
def _in_notebook() -> type[Progress]:
    """Returns rich's Progress with a display of its own: rich's one draws nothing in a notebook without ipywidgets."""
    from IPython.display import display
    from rich.progress import Progress

    class InNotebook(Progress):
        _handle: Any = None
        _last = 0.0

        def start(self) -> None:
            if not self.disable:
                self._handle = display(self.make_tasks_table(self.tasks), display_id=True)

        def refresh(self) -> None:
            if self._handle is not None:
                self._last = time.monotonic()
                self._handle.update(self.make_tasks_table(self.tasks))

        def stop(self) -> None:
            self.refresh()
            self._handle = None

        def update(self, *args: Any, **kwargs: Any) -> None:
            super().update(*args, **kwargs)
            self._now_and_then()

        def advance(self, *args: Any, **kwargs: Any) -> None:
            super().advance(*args, **kwargs)
            self._now_and_then()

        def _now_and_then(self) -> None:
            if time.monotonic() - self._last > PERIOD:
                self.refresh()

    return InNotebook
