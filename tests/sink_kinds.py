"""Every durable sort of sink, and what a reader finds in it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path
from typing import Any

import deltalake
import polars as pl
import pyarrow as pa
import pytest

import anabranch as ab
from anabranch.sinks import Sink
from oracle import Row
from postgres_server import Server, find_binaries


class Kind(ABC):
    """A sort of sink, and what a reader finds in it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @abstractmethod
    def sink(self, name: str) -> Sink: ...

    @abstractmethod
    def rows(self, name: str) -> Counter[Any]: ...

    def wanted(self, rows: list[Row]) -> Counter[Any]:
        return Counter(rows)


class InParquet(Kind):
    def sink(self, name: str) -> Sink:
        return ab.Parquet(str(self.root / name))

    def rows(self, name: str) -> Counter[Any]:
        files = (self.root / name).glob("slice=*/*")
        return Counter(r for f in files for r in pl.read_parquet(f, glob=False).rows())


class InDelta(Kind):
    def sink(self, name: str) -> Sink:
        return ab.Delta(str(self.root / name))

    def rows(self, name: str) -> Counter[Any]:
        table = deltalake.DeltaTable(self.root / name).to_pyarrow_table()
        return Counter((r["k"], r["v"]) for r in table.to_pylist())


class ByFunction(Kind):
    """The function is idempotent by slice number: a repeated slice replaces its file."""

    def sink(self, name: str) -> Sink:
        (self.root / name).mkdir(parents=True, exist_ok=True)

        def keep(rows: pa.Table, slice_no: int) -> None:
            written = self.root / name / f"{slice_no}.tmp"
            written.write_text(json.dumps([(r["k"], r["v"]) for r in rows.to_pylist()]))
            written.replace(self.root / name / f"{slice_no}.json")

        return ab.ForEachSlice(keep, arrow=True)

    def rows(self, name: str) -> Counter[Any]:
        files = (self.root / name).glob("*.json")
        return Counter(tuple(r) for f in files for r in json.loads(f.read_text()))


class InPostgres(Kind):
    server: Server

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.schema = "s" + "".join(c for c in str(root) if c.isalnum())[-40:]
        self.server.query(f"CREATE SCHEMA {self.schema}")

    def sink(self, name: str) -> Sink:
        return ab.Postgres(self.server.address, f"{self.schema}.{name}")

    def rows(self, name: str) -> Counter[Any]:
        return Counter(self.server.query(f"SELECT k, v FROM {self.schema}.{name}"))


class ByKey(InPostgres):
    def sink(self, name: str) -> Sink:
        return ab.Postgres(self.server.address, f"{self.schema}.{name}", keys="k")

    def wanted(self, rows: list[Row]) -> Counter[Any]:
        return Counter(dict(rows).items())


KINDS = [InParquet, InDelta, ByFunction, InPostgres, ByKey]
needs_server = pytest.mark.skipif(find_binaries() is None, reason="no PostgreSQL server found")
