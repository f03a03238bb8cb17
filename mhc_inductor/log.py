# SPDX-License-Identifier: Apache-2.0
"""The package's logger, and warnings that are logged once per process."""

from __future__ import annotations

import logging

logger = logging.getLogger("mhc_inductor")
_said: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """Logs ``message`` at WARNING level the first time ``key`` is seen in this process."""
    if key not in _said:
        _said.add(key)
        logger.warning(message)
