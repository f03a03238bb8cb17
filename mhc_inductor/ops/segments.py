"""Segment ids: a key counts for a query only where their ids are equal."""

from __future__ import annotations

ANY_SEGMENT = -(2**31)
