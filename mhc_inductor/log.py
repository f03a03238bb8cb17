"""The package's one logger, and warnings that are said once."""

from __future__ import annotations

import logging

logger = logging.getLogger("mhc_inductor")
_said: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """Log ``message`` at WARNING level the first time ``key`` is seen in this process."""
    if key not in _said:
        _said.add(key)
        logger.warning(message)
