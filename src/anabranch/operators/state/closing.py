"""State that event time closes: windows, sessions, spans, rows that wait for a partner.

The watermark up to which it was closed is part of it: it is sealed with the rows, in the schema's
metadata, so that what was late before a restore is late after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import pyarrow as pa

from anabranch.operators.base import SliceTime

CLOSED_US = b"anabranch.closed_us"


class ClosingState(ABC):
    """Knows how far it is closed; a subclass says what is dropped then."""

    def __init__(self) -> None:
        self.closed_us: int | None = None

    def watermark(self, time: SliceTime) -> int | None:
        """That of a slice, or the one up to which this is closed: it never goes back."""
        return _latest(self.closed_us, time.watermark_us)

    def close(self, watermark_us: int | None) -> None:
        self.closed_us = _latest(self.closed_us, watermark_us)
        if self.closed_us is not None:
            self._drop(self.closed_us)

    @abstractmethod
    def _drop(self, closed_us: int) -> None:
        """Forget what this watermark has closed."""

    def sealed_at(self, table: pa.Table) -> int | None:
        """How far the state was closed that a table was sealed from, or this one is."""
        closed = (table.schema.metadata or {}).get(CLOSED_US)
        return _latest(self.closed_us, None if closed is None else int(closed))

    def _marked(self, table: pa.Table) -> pa.Table:
        """Sealed rows with how far the state is closed."""
        if self.closed_us is None:
            return table
        return table.replace_schema_metadata({CLOSED_US: str(self.closed_us).encode()})


def _latest(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)
