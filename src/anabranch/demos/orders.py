"""The orders of a shop, five queries on them, and the judge of what those show.

A row costs a wait, as a call to a service would, so nodes are full though the machine is not. The
judge shares nothing with the operators: plain Python over the raw files.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.api import Topology
from anabranch.demos.feeding import Feeder
from anabranch.operators.functions import KeyedSlice, SliceFunction, SliceResult
from anabranch.sinks import Parquet

ORDERS_PER_S = 100
FIRST_PER_S = 10
AT_MOST_S = 3_600  # of input, whatever happens
COLUMNS = {"card": 409, "product": 211, "customer": 307, "city": 101, "shop": 53}  # how many


@dataclass(frozen=True, slots=True)
class Totals:
    """A query: every order, with the running total of its card, product, … . It fills a `share` of
    all nodes."""

    sink: str
    key: str
    priority: int
    share: float
    spread: bool = True  # over all nodes; else it is on one of them


# Together half of the nodes: one holds two queries, two hold three or four, three hold all.
QUERIES = (
    Totals("alarms", "card", 8, 0.08),
    Totals("stock", "product", 4, 0.13),
    Totals("invoices", "customer", 2, 0.13),
    Totals("reports", "city", 1, 0.13),
    Totals("archive", "shop", 1, 0.05, spread=False),  # last: on a node with all others, too
)


def orders(source: Path, output: Path, nodes: int) -> Topology:
    """The orders, and five queries that each keep running totals by a key of their own."""

    def read(spark: Any) -> Any:
        keys = ", ".join(f"{name} long" for name in COLUMNS)
        return spark.readStream.schema(f"number long, {keys}, cents long").parquet(str(source))

    topology = Topology("orders", parallelism=nodes)
    stream = topology.source("orders", read)
    for query in QUERIES:
        function = _running_totals(query.share * nodes / ORDERS_PER_S)
        stream.key_by(query.key).process(
            f"by_{query.key}", function, parallelism=nodes if query.spread else 1
        ).to(query.sink, Parquet(str(output / query.sink)), priority=query.priority)
    return topology


def _running_totals(row_s: float) -> SliceFunction:
    """Its class is nested, so that it is sent to nodes by value."""

    class RunningTotals(SliceFunction):
        state = {"total": pl.Int64}  # noqa: RUF012 - as users write it
        output = {"number": pl.Int64, "total": pl.Int64}  # noqa: RUF012

        def process(self, given: KeyedSlice) -> SliceResult:
            time.sleep(row_s * given.rows.height)  # what a call to a service takes
            (key,) = given.keys
            known = given.state.select(key, before="total")
            rows = given.rows.sort("number").join(known, on=key, how="left", maintain_order="left")
            total = pl.col("before").fill_null(0) + pl.col("cents").cum_sum().over(key)
            new = rows.select(key, "number", total=total)
            newest = new.group_by(key, maintain_order=True).agg(pl.col("total").last())
            return SliceResult(output=new, state=newest)

    return RunningTotals()


class OrderWriter(Feeder):
    """The same orders every time: a few until the job has shown some, then at a constant rate."""

    def __init__(self, directory: Path) -> None:
        self.flows = threading.Event()
        until_s = 0.0

        def due_by(seconds: float) -> int:
            nonlocal until_s
            step_s, until_s = seconds - until_s, seconds
            return self.rows + round(
                step_s * (ORDERS_PER_S if self.flows.is_set() else FIRST_PER_S)
            )

        def make(times_us: list[int]) -> pa.Table:
            numbers = range(self.rows, self.rows + len(times_us))
            keys = {name: [n * 7_919 % many for n in numbers] for name, many in COLUMNS.items()}
            cents = [100 + n * 6_007 % 9_901 for n in numbers]
            return pa.table({"number": list(numbers), **keys, "cents": cents})

        super().__init__(directory, AT_MOST_S, 1, due_by, make)


@dataclass(frozen=True, slots=True)
class OrderRecount:
    """The output of one query against the truth, in orders."""

    sink: str
    orders: int
    lost: int
    duplicated: int  # or nobody's
    wrong: int  # with another key or total

    @property
    def exact(self) -> bool:
        return not (self.lost or self.duplicated or self.wrong)


def recount_orders(source: Path, output: Path) -> list[OrderRecount]:
    """Every order must be in every query, once, its total being the one before plus its cents."""
    raw = {row["number"]: row for f in source.glob("[0-9]*.parquet") for row in _rows(f)}
    found = []
    for query in QUERIES:
        times, wrong = Counter[int](), 0
        totals = Counter[int]()
        files = (output / query.sink).glob("slice=*/*.parquet")
        for file in sorted(files, key=lambda f: int(f.parent.name[6:])):
            for shown in _rows(file):
                number, key = shown["number"], shown[query.key]
                times[number] += 1
                order = raw.get(number)
                if order is not None:
                    right = order[query.key], totals[key] + order["cents"]
                    wrong += right != (key, shown["total"])
                totals[key] = shown["total"]
        real = len(raw.keys() & times.keys())
        extra = times.total() - real
        found.append(OrderRecount(query.sink, len(raw), len(raw) - real, extra, wrong))
    return found


def _rows(file: Path) -> list[dict[str, int]]:
    rows: list[dict[str, int]] = pq.ParquetFile(file).read().to_pylist()
    return rows
