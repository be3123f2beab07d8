"""Sinks: where rows leave, whole slices at a time. See `base` for what one must do."""

from __future__ import annotations

from anabranch.sinks.base import Home, Sink, refuse_lost_slice, refuse_lost_slices
from anabranch.sinks.delta import Delta
from anabranch.sinks.foreach import ForEachSlice
from anabranch.sinks.memory import Console, Memory
from anabranch.sinks.parquet import Parquet
from anabranch.sinks.postgres import Postgres

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
    "refuse_lost_slices",
]
