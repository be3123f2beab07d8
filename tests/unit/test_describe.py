"""`anabranch describe` shows what a topology was given that decides what becomes of its rows."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

import anabranch as ab
from anabranch.model.duration import microseconds, parse_duration, spoken


class Balance(ab.SliceFunction):
    output = {"n": pl.Int64}  # noqa: RUF012 - as users write it

    def process(self, given: Any) -> ab.SliceResult:
        return ab.SliceResult()


def shop() -> ab.Topology:
    t = ab.Topology("shop")
    orders = t.source(
        "orders", None, time="ts", watermark="90s", idle_timeout="1m", on_error="dead_letter"
    )
    t.source("plain", None).map("upper", lambda f: f).to("raw", ab.Console())
    priced = (
        orders.filter("large", "amount > 1")
        .select("slim", pl.all())
        .enrich("priced", pl.DataFrame({"item": [1], "price": [2]}), on="item")
    )
    user = priced.key_by("user")
    user.aggregate("spent", ttl="1h", time="ts", n=ab.count(), total=ab.sum("amount")).to(
        "spent.out", ab.Memory()
    )
    sold = (
        priced.key_by("item")
        .window(ab.tumbling("30s"), time="ts", lateness="5s")
        .aggregate("sold", n=ab.count(), by=ab.count_distinct("user"))
    )
    paid = (
        priced.key_by("item")
        .window(ab.hopping("1m", "30s"), time="ts")
        .aggregate("paid", most=ab.max("amount"), parallelism=1)
    )
    visits = user.window(ab.session("30m"), time="ts").aggregate("visits", n=ab.count())
    visits.to("table", ab.Postgres("postgresql://me:hunter2@host/db", "visits", keys=["user"]))
    sold.late("too_late").to("late", ab.Delta("s3://bucket/late"), priority=3)
    sold.key_by("item").join_windows("both", paid.key_by("item"), left="n", right="most").to(
        "both.out", ab.Parquet("/data/both")
    )
    sold.key_by("window_end").top_k("best", 3, by="n").to("best.out", ab.Memory())
    user.deduplicate("firsts", within="1h", time="ts").to("firsts.out", ab.Memory())
    user.top_k("least", 3, by="amount", descending=False).to("least.out", ab.Memory())
    user.process("balance", Balance(), time="ts").to("balance.out", ab.ForEachSlice(print))
    t.dead_letters("dead", ab.Memory())
    return t


SHOWN = """\
topology shop: 26 operators, 2 waves after the source
wave 0  orders  (source tasks)
    source    orders  time ts, watermark 90s, idle after 1m
    stateless large  filter  ← orders
    sink      dead  Memory  ← orders
    stateless slim  select  ← large
    stateless priced  enrich on item with price  ← slim
    shuffle   priced → spent by user
    shuffle   priced → sold by item
    shuffle   priced → paid by item
    shuffle   priced → visits by user
    shuffle   priced → firsts by user
    shuffle   priced → least by user
    shuffle   priced → balance by user
wave 0  plain  (source tasks)
    source    plain
    stateless upper  map  ← plain
    sink      raw  Console  ← upper
wave 1  spent  (2 partitions)
    keyed     spent  by user  n = count(), total = sum(amount), ttl 1h of ts  ← priced
    sink      spent.out  Memory  ← spent
wave 1  sold  (2 partitions)
    keyed     sold  by item  tumbling 30s of ts, lateness 5s: n = count(), by = count_distinct(user)  ← priced
    stateless too_late  late rows  ← sold
    sink      late  Delta s3://bucket/late  ← too_late
    shuffle   sold → both by item
    shuffle   sold → best by window_end
wave 1  paid  (1 partition)
    keyed     paid  by item  hopping 1m every 30s of ts: most = max(amount)  ← priced
    shuffle   paid → both by item
wave 1  visits  (2 partitions)
    keyed     visits  by user  session 30m of ts: n = count()  ← priced
    sink      table  Postgres table visits  ← visits
wave 1  firsts  (2 partitions)
    keyed     firsts  by user  first rows within 1h of ts  ← priced
    sink      firsts.out  Memory  ← firsts
wave 1  least  (2 partitions)
    keyed     least  by user  top 3 by amount, smallest first  ← priced
    sink      least.out  Memory  ← least
wave 1  balance  (2 partitions)
    keyed     balance  by user  Balance of ts  ← priced
    sink      balance.out  ForEachSlice  ← balance
wave 2  both  (2 partitions)
    keyed     both  by item  join windows for n, most  ← sold, paid
    sink      both.out  Parquet /data/both  ← both
wave 2  best  (2 partitions)
    keyed     best  by window_end  top 3 by n, once per window  ← sold
    sink      best.out  Memory  ← best
query   raw  priority 1  source tasks only
query   spent.out  priority 1  needs spent
query   table  priority 1  needs visits
query   firsts.out  priority 1  needs firsts
query   least.out  priority 1  needs least
query   balance.out  priority 1  needs balance
query   late  priority 3  needs sold
query   both.out  priority 1  needs sold, paid, both
query   best.out  priority 1  needs sold, best"""  # noqa: E501 - as it is printed


def test_everything_is_shown() -> None:
    assert ab.describe(shop()) == SHOWN
    assert "hunter2" not in SHOWN


@pytest.mark.parametrize("text", ["0s", "1us", "250ms", "1s", "90s", "1m", "36h", "2d"])
def test_durations_are_shown_as_they_are_written(text: str) -> None:
    assert spoken(microseconds(parse_duration(text))) == text
