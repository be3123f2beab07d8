"""Sinks: where rows leave, whole slices at a time. See `base` for what one must do."""

from __future__ import annotations

from anabranch.storage.sinks.base import Home, Sink, refuse_lost_slice
from anabranch.storage.sinks.delta import Delta
from anabranch.storage.sinks.foreach import ForEachSlice
from anabranch.storage.sinks.memory import Console, Memory
from anabranch.storage.sinks.parquet import Parquet
from anabranch.storage.sinks.postgres import Postgres

__all__ = [
    "Console",
    "Delta",
    "ForEachSlice",
    "Home",
    "Memory",
    "Parquet",
    "Postgres",
    "Sink",
    "refuse_lost_slice",
]
