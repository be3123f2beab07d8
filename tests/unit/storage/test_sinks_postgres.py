"""PostgreSQL tables, on a real server: one transaction per slice, read back by plain queries."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import pickle
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.node.local_run import LocalRun

import anabranch as ab
from anabranch.errors import ConfigError, StorageError, TopologyError
from anabranch.sinks import Home, postgres
from anabranch.sinks.notes import exposure_of
from anabranch.sinks.postgres_rows import fits
from anabranch.testing import play
from postgres_server import Server
from sink_starts import JOB, start

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.large_string())])
ROWS = pa.table({"k": [1, 2], "v": ["a", ""]}, SCHEMA)
_schemas = itertools.count()


@pytest.fixture
def table(server: Server) -> str:
    """The name of a table in a schema of its own."""
    schema = f"s{next(_schemas)}"
    server.query(f"CREATE SCHEMA {schema}")
    return f"{schema}.t"


Make = Callable[..., ab.Postgres]


@pytest.fixture
def make(server: Server, table: str, tmp_path: Path) -> Iterator[Make]:
    """Sinks of one job; each call is another life of its driver."""
    made: list[ab.Postgres] = []

    def make(*keys: str, schema: pa.Schema = SCHEMA, job: str = "job", **options: Any) -> Any:
        aside = options.pop("aside", False)
        sink = ab.Postgres(options.pop("address", server.address), table, keys=keys, **options)
        sink.bind(Home(job, "out", tmp_path, puts_aside=aside))
        sink.check(schema)
        made.append(sink)
        return sink

    yield make
    for sink in made:
        sink.close()


def stage(sink: ab.Postgres, slice_no: int, rows: pa.Table = ROWS, writer: str = "w") -> str:
    path = pickle.loads(pickle.dumps(sink)).stage("out", rows, slice_no, 1, writer).path
    assert path is not None
    return str(path)


def content(server: Server, table: str) -> list[tuple[Any, ...]]:
    return sorted(server.query(f"SELECT * FROM {table}"), key=repr)


# -- slices ------------------------------------------------------------------------------------


def test_slices_are_inserted_once(server: Server, table: str, make: Make, tmp_path: Path) -> None:
    sink = make()
    start(sink, 0)
    files = [stage(sink, 1, writer=w) for w in "ab"]
    assert content(server, table) == []
    for _ in range(2):
        sink.expose(1, files, [])
    sink.expose(2, [], [])
    again = make()
    start(again, 1, files)
    again.expose(3, [stage(again, 3)], [])
    assert content(server, table) == [(1, "a")] * 3 + [(2, "")] * 3
    sinks = table.replace(".t", ".anabranch_sinks")
    known = server.query(f"SELECT sink, target, job, generation, slice FROM {sinks}")
    assert known == [("anabranch/job/out", table, "5eed", 1, 3)]
    assert not (tmp_path / "staged" / "out").exists() or not any(
        (tmp_path / "staged/out").iterdir()
    )


def test_with_keys_the_last_row_of_a_key_stays(server: Server, table: str, make: Make) -> None:
    sink = make("k")
    start(sink, 0)
    first = pa.table({"k": [1, None, 1], "v": ["a", "b", "c"]}, SCHEMA)
    second = pa.table({"k": [None, 2], "v": ["d", None]}, SCHEMA)
    sink.expose(1, [stage(sink, 1, first, "a"), stage(sink, 1, second, "b")], [])
    assert content(server, table) == [(1, "c"), (2, None), (None, "d")]
    sink.expose(2, [stage(sink, 2, ROWS)], [])
    assert content(server, table) == [(1, "a"), (2, ""), (None, "d")]


def test_keys_alone_are_a_set(server: Server, table: str, make: Make) -> None:
    sink = make("k", "v")
    start(sink, 0)
    for number in (1, 2):
        sink.expose(number, [stage(sink, number)], [])
    assert content(server, table) == [(1, "a"), (2, "")]


rows = st.lists(st.tuples(st.none() | st.integers(0, 3), st.integers(-9, 9)), max_size=6)


@settings(max_examples=25)  # each is a few transactions
@given(st.booleans(), st.lists(st.lists(rows, max_size=3), max_size=5), st.integers())
def test_any_slices_with_repeats_and_restarts(
    server: Server,
    tmp_path_factory: pytest.TempPathFactory,
    keyed: bool,
    slices: list[list[Any]],
    seed: int,
) -> None:
    """The model is a dict, or a list; slices are repeated and drivers restarted at will."""
    chance, root = random.Random(seed), tmp_path_factory.mktemp("pg")
    table = f"any{next(_schemas)}"
    schema = pa.schema([("k", pa.int64()), ("v", pa.int64())])

    def life() -> ab.Postgres:
        sink = ab.Postgres(server.address, table, keys="k" if keyed else ())
        sink.bind(Home(table, "out", root))
        sink.check(schema)
        return sink

    sink, listed, newest, note = life(), [], {}, root / "shown/out/1"
    start(sink, 0)
    for number, writers in enumerate(slices, 1):
        tables = [
            pa.table({"k": [r[0] for r in w], "v": [r[1] for r in w]}, schema) for w in writers
        ]
        files = [stage(sink, number, t, f"w{i}") for i, t in enumerate(tables)]
        noted = note.read_text()
        for _ in range(chance.randint(1, 2)):
            sink.expose(number, files, [])
        if chance.random() < 0.3:
            sink.close()
            if chance.random() < 0.5:
                note.write_text(noted)  # killed between the table and the note
            sink = life()
            start(sink, number, files)
        listed += [r for w in writers for r in w]
        newest.update(r for w in writers for r in w)
    sink.close()
    wanted = list(newest.items()) if keyed else listed
    assert content(server, table) == sorted(wanted, key=repr)


# -- types -------------------------------------------------------------------------------------

TYPES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    **{
        f"i{bits}": (
            getattr(pa, f"int{bits}")(),
            st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1),
        )
        for bits in (8, 16, 32, 64)
    },
    **{
        f"u{bits}": (getattr(pa, f"uint{bits}")(), st.integers(0, 2**bits - 1))
        for bits in (8, 16, 32, 64)
    },
    "f32": (pa.float32(), st.floats(width=32)),
    "f64": (pa.float64(), st.floats()),
    "b": (pa.bool_(), st.booleans()),
    "s": (
        pa.large_string(),
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=6)
        | st.sampled_from(["", '"', "\\.", "\\N", "a,b\r\n", "NULL", "'"]),
    ),
    "y": (pa.large_binary(), st.binary(max_size=6)),
    "d": (pa.date32(), st.dates()),
    "t": (pa.timestamp("us"), st.datetimes()),
    "z": (
        pa.timestamp("us", "America/New_York"),
        st.datetimes(timezones=st.just(dt.UTC)),
    ),
    "c": (pa.time64("ns"), st.times()),
    "n": (pa.decimal128(20, 3), st.decimals(-(10**15), 10**15, places=3)),
}


def same(kind: pa.DataType, a: Any, b: Any) -> bool:
    if a is None or b is None or not pa.types.is_floating(kind):
        return bool(a == b)
    width = np.float32 if kind == pa.float32() else np.float64
    return bool(np.array_equal(width(a), width(b), equal_nan=True))


@settings(max_examples=30)
@given(st.lists(st.tuples(*(st.none() | values for _, values in TYPES.values())), max_size=5))
def test_every_type_comes_back_as_it_was(
    server: Server, tmp_path_factory: pytest.TempPathFactory, given_rows: list[tuple[Any, ...]]
) -> None:
    schema = pa.schema([(name, kind) for name, (kind, _) in TYPES.items()])
    data = pa.Table.from_pylist(
        [dict(zip(schema.names, row, strict=True)) for row in given_rows], schema
    )
    table = f"types{next(_schemas)}"
    sink = ab.Postgres(server.address, table)
    sink.bind(Home(table, "out", tmp_path_factory.mktemp("pg")))
    sink.check(schema)
    start(sink, 0)
    sink.expose(1, [stage(sink, 1, data)], [])
    sink.close()
    found = server.query(f"SELECT * FROM {table} ORDER BY ctid")
    assert len(found) == len(given_rows)
    for back, row in zip(found, given_rows, strict=True):
        for column, a, b in zip(schema, back, row, strict=True):
            assert same(column.type, a, b), (column, a, b)


def test_a_single_column_of_nulls_keeps_its_rows(server: Server, table: str, make: Make) -> None:
    schema = pa.schema([("v", pa.large_string())])
    sink = make(schema=schema)
    start(sink, 0)
    sink.expose(1, [stage(sink, 1, pa.table({"v": [None, "", None]}, schema))], [])
    assert content(server, table) == [("",), (None,), (None,)]


@pytest.mark.parametrize("kind", [pa.duration("us"), pa.large_list(pa.int64()), pa.null()])
def test_types_without_a_column_are_refused(make: Make, kind: pa.DataType) -> None:
    with pytest.raises(TopologyError, match=r"no type for column 'c'.*; cast or drop it"):
        make(schema=pa.schema([("c", kind)]))


@pytest.mark.parametrize(
    ("kind", "value", "what"),
    [
        (pa.large_string(), "a\0b", "the character NUL"),
        (pa.date32(), 10_000_000, "a time before year 1 or after year 9999"),
        (pa.timestamp("us", "UTC"), -(10**17), "a time before year 1 or after year 9999"),
    ],
)
def test_values_no_column_can_hold_never_reach_the_journal(
    make: Make, kind: pa.DataType, value: Any, what: str
) -> None:
    array = pa.array([value]).cast(pa.int32()).cast(kind) if kind == pa.date32() else None
    rows = pa.table({"c": array if array is not None else pa.array([value]).cast(kind)})
    sink = make(schema=rows.schema)
    with pytest.raises(StorageError, match=f"column 'c' of the sink 'out' has {what}"):
        stage(sink, 1, rows)


# -- tables that are there already -------------------------------------------------------------


@pytest.mark.parametrize(
    ("definition", "keys", "wrong"),
    [
        ("k bigint", (), "'v' (text) is missing"),
        ("k integer, v text", (), "'k' is integer for int64"),
        ("k bigint, v text, w int NOT NULL", (), "'w' must not be null"),
        ("k bigint, v text", ("k",), "no unique index is on exactly the keys ['k']"),
        ("k bigint UNIQUE, v text", ("k",), "no unique index"),  # null would repeat
        ("k bigint, v text, UNIQUE NULLS NOT DISTINCT (k, v)", ("k",), "no unique index"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    server: Server, table: str, make: Make, definition: str, keys: tuple[str, ...], wrong: str
) -> None:
    server.query(f"CREATE TABLE {table} ({definition})")
    with pytest.raises(ConfigError, match=f"does not fit the stream.*: .*{re.escape(wrong)}"):
        start(make(*keys), 0)


@pytest.mark.parametrize(
    ("definition", "keys"),
    [
        ("v varchar, extra int, k numeric, n int NOT NULL DEFAULT 3", ()),
        ("k bigint PRIMARY KEY, v text", ("k",)),
        ("v text, k bigint, UNIQUE NULLS NOT DISTINCT (k, v)", ("v", "k")),
    ],
)
def test_a_table_that_fits_is_used(
    server: Server, table: str, make: Make, definition: str, keys: tuple[str, ...]
) -> None:
    server.query(f"CREATE TABLE {table} ({definition})")
    sink = make(*keys)
    start(sink, 0)
    sink.expose(1, [stage(sink, 1)], [])
    assert server.query(f"SELECT k, v FROM {table} ORDER BY k") == [(1, "a"), (2, "")]


def test_columns_that_would_round_do_not_fit() -> None:
    def column(kind: pa.DataType, name: str) -> bool:
        return fits(pa.field("c", kind), name)

    assert column(pa.decimal128(10, 2), "numeric(12,3)")
    assert not column(pa.decimal128(10, 2), "numeric(12,1)")
    assert not column(pa.decimal128(10, 2), "numeric(10,3)")
    assert column(pa.decimal128(10, 2), "numeric")
    assert column(pa.int32(), "bigint")
    assert not column(pa.float64(), "real")
    assert not column(pa.timestamp("us"), "timestamp(0) without time zone")
    assert column(pa.large_string(), "uuid")


def test_names_of_any_kind(server: Server, make: Make, table: str) -> None:
    schema = pa.schema([('select "%s"', pa.int64()), ("Größe", pa.large_string())])
    sink = make('select "%s"', schema=schema)
    start(sink, 0)
    sink.expose(1, [stage(sink, 1, ROWS.rename_columns(schema.names))], [])
    assert content(server, table) == [(1, "a"), (2, "")]


def test_keys_must_be_columns(make: Make) -> None:
    with pytest.raises(TopologyError, match=r"key columns \['x'\], but the stream has"):
        make("x")


def test_a_checkpoint_that_is_behind_the_table_is_refused(make: Make, tmp_path: Path) -> None:
    sink = make()
    start(sink, 0)
    sink.expose(5, [stage(sink, 5)], [])
    for newest in (0, 4):
        with pytest.raises(ConfigError, match=r"has slice 5 of this job, whose .* ends with slice"):
            start(make(), newest)
    file = stage(sink, 4)
    with pytest.raises(ConfigError, match="has slice 5 of this job"):
        sink.expose(4, [file], [])
    assert (tmp_path / file).exists()
    start(make(job="another"), 0)


def test_what_another_version_recorded_is_refused_and_what_had_no_format_is_read(
    server: Server, table: str, make: Make
) -> None:
    start(make(), 0)
    sinks = f"{table.partition('.')[0]}.anabranch_sinks"
    server.query(f"UPDATE {sinks} SET format = 9")
    with pytest.raises(StorageError, match="has format 9, this version reads 1; run the job with"):
        start(make(), 0, run=2)
    server.query(f"ALTER TABLE {sinks} DROP COLUMN format")
    sink = make()
    start(sink, 0, run=3)
    sink.expose(1, [stage(sink, 1)], [])
    assert len(content(server, table)) == 2


# -- a server that refuses, or is away ---------------------------------------------------------


def test_a_refused_slice_is_kept_and_written_when_the_table_is_mended(
    server: Server, table: str, make: Make
) -> None:
    sink = make()
    start(sink, 0)
    sink.expose(1, [stage(sink, 1)], [])
    server.query(f"ALTER TABLE {table} ADD CHECK (k < 5)")
    file = stage(sink, 2, pa.table({"k": [3, 7], "v": ["x", "y"]}, SCHEMA))
    with pytest.raises(
        StorageError, match=r"could not write slice 2 to .* violates .* is lost"
    ) as e:
        sink.expose(2, [file], [])
    assert "\n" not in e.value.message
    assert content(server, table) == [(1, "a"), (2, "")]
    server.query(f"ALTER TABLE {table} DROP CONSTRAINT t_k_check")
    start(make(), 2, [file])
    assert content(server, table) == [(1, "a"), (2, ""), (3, "x"), (7, "y")]


def test_a_server_that_is_down_at_the_start_is_told_at_once(make: Make, tmp_path: Path) -> None:
    sink = make(address=f"host={tmp_path} password=secret", retry="1h")
    with pytest.raises(StorageError, match="could not reach the PostgreSQL table") as e:
        start(sink, 0)
    assert "\n" not in e.value.message
    assert "secret" not in e.value.message + repr(sink)
    assert b"secret" not in pickle.dumps(sink)


def test_a_server_that_stays_away_ends_the_run_and_a_restart_goes_on(
    server: Server, table: str, make: Make
) -> None:
    sink = make(retry="300ms")
    start(sink, 0)
    sink.expose(1, [stage(sink, 1)], [])
    file = stage(sink, 2)
    server.stop()
    try:
        with pytest.raises(StorageError, match=r"could not write slice 2 to .* nothing is lost"):
            sink.expose(2, [file], [])
    finally:
        server.start()
    start(make(), 2, [file])
    assert content(server, table) == [(1, "a")] * 2 + [(2, "")] * 2


def test_a_server_that_is_briefly_away_is_waited_for(
    server: Server, table: str, make: Make
) -> None:
    sink = make("k", retry="10m")
    start(sink, 0)
    sink.expose(1, [stage(sink, 1)], [])
    server.stop()
    starter = threading.Timer(0.5, server.start)
    starter.start()
    sink.expose(2, [stage(sink, 2, pa.table({"k": [2, 3], "v": ["b", "c"]}, SCHEMA))], [])
    starter.join()
    assert content(server, table) == [(1, "a"), (2, "b"), (3, "c")]


def test_pauses_double_and_end_in_time(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    now, pauses = [0.0], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    sink = make(retry="10s")
    start(sink, 0)
    file = stage(sink, 1)
    monkeypatch.setattr(postgres.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(postgres.time, "sleep", sleep)
    monkeypatch.setattr(sink, "_connected", _raise(psycopg.OperationalError("away")))
    with pytest.raises(StorageError, match=r"could not write slice 1 to .*: away; nothing is lost"):
        sink.expose(1, [file], [])
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]


def _raise(error: Exception) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


def test_a_dead_drivers_transaction_is_waited_for(server: Server, table: str, make: Make) -> None:
    """The old driver's commit arrives late: the new one sees it, or shuts it out."""
    sink = make()
    start(sink, 0)
    file = stage(sink, 1)
    sinks = table.replace(".t", ".anabranch_sinks")
    with psycopg.connect(server.address) as old:
        exposure = exposure_of(1, [file])
        old.execute(f"UPDATE {sinks} SET slice = 1, exposure = %s", [exposure])
        old.execute(f"INSERT INTO {table} VALUES (1, 'of the old driver')")
        new = threading.Thread(target=start, args=(make(), 1, [file], 2))
        new.start()
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        deadline = time.monotonic() + 60
        while server.query(waiting) == [(0,)]:
            assert time.monotonic() < deadline
        old.commit()
    new.join(60)
    assert content(server, table) == [(1, "of the old driver")]


def test_without_the_package_the_sentence_says_how_to_get_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigError, match=r"pip install 'anabranch\[postgres\]'"):
        make()


def test_old_servers_are_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "OLDEST_SERVER", 999_999)
    with pytest.raises(ConfigError, match="it must be 15 or newer"):
        start(make(), 0)


def test_a_row_count_of_zero_is_a_slice_too(server: Server, table: str, make: Make) -> None:
    sink = make()
    start(sink, 0)
    sink.expose(1, [stage(sink, 1, SCHEMA.empty_table())], [])
    assert content(server, table) == []


def test_decimals_keep_their_scale(server: Server, table: str, make: Make) -> None:
    schema = pa.schema([("n", pa.decimal128(38, 10))])
    sink = make(schema=schema)
    start(sink, 0)
    value = Decimal("1234567890123456789012345678.0123456789")
    sink.expose(1, [stage(sink, 1, pa.table({"n": [value]}, schema))], [])
    assert server.query(f"SELECT n FROM {table}") == [(value,)]


# -- rows that are put aside -----------------------------------------------------------------------


def refused(letters: pa.Table | None) -> list[tuple[Any, ...]]:
    assert letters is not None
    return [
        (r["slice_number"], r["operator"], json.loads(r["record"])["k"])
        for r in letters.to_pylist()
    ]


@pytest.mark.parametrize("keys", [(), ("k",)])
@pytest.mark.parametrize("deferred", ["", " DEFERRABLE INITIALLY DEFERRED"])
def test_rows_that_the_server_refuses_are_put_aside(
    server: Server, table: str, make: Make, keys: tuple[str, ...], deferred: str
) -> None:
    server.query(f"CREATE TABLE {table}_names (name text PRIMARY KEY)")
    server.query(f"INSERT INTO {table}_names VALUES ('a'), ('b')")
    server.query(
        f"CREATE TABLE {table} (k bigint NOT NULL CHECK (k < 5), "
        f"v text REFERENCES {table}_names{deferred}, UNIQUE NULLS NOT DISTINCT (k, v))"
    )
    if keys:
        server.query(f"CREATE UNIQUE INDEX ON {table} (k)")
    sink = make(*keys, aside=True)
    start(sink, 0)
    rows = pa.table({"k": [1, 9, None, 2, 3], "v": ["a", "a", "a", "nobody", "b"]}, SCHEMA)
    files = [stage(sink, 1, rows), stage(sink, 1, ROWS.slice(0, 0), "x")]
    letters = sink.expose(1, files, [])
    assert refused(letters) == [(1, "out", 9), (1, "out", None), (1, "out", 2)]
    reasons = letters.column("reason").to_pylist()
    assert "check constraint" in reasons[0]
    assert "null value in column" in reasons[1]
    assert "foreign key constraint" in reasons[2]
    assert content(server, table) == [(1, "a"), (3, "b")]
    # Another life of the driver finds the slice, and what was refused of it, and no more.
    again = make(*keys, aside=True)
    again.take_over(JOB, 2, 1)
    assert refused(again.expose(1, files, [])) == refused(letters)
    assert content(server, table) == [(1, "a"), (3, "b")]
    assert again.expose(2, [stage(again, 2, pa.table({"k": [4], "v": ["a"]}, SCHEMA))], []) is None
    assert again.expose(3, [], []) is None


def test_leftovers_of_a_crash_go(make: Make, tmp_path: Path) -> None:
    (tmp_path / "refused").mkdir()
    leftover, of_another = (tmp_path / "refused" / f".{n}.parquet.12.tmp" for n in ("out", "x"))
    for path in (leftover, of_another):
        path.touch()
    start(make(aside=True), 0)
    assert not leftover.exists()
    assert of_another.exists()


def test_strings_that_the_server_cannot_parse(server: Server, table: str, make: Make) -> None:
    server.query(f"CREATE TABLE {table} (k bigint, v jsonb)")
    sink = make(aside=True)
    start(sink, 0)
    rows = pa.table({"k": [1, 2, 3], "v": ["{}", "{", None]}, SCHEMA)
    letters = sink.expose(1, [stage(sink, 1, rows)], [])
    assert refused(letters) == [(1, "out", 2)]
    assert [k for k, _ in content(server, table)] == [1, 3]


def test_a_transaction_that_fails_leaves_no_wrong_letters(
    server: Server, table: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.query(f"CREATE TABLE {table} (k bigint CHECK (k < 2), v text)")
    sink = make(aside=True)
    start(sink, 0)
    files = [stage(sink, 1)]
    with monkeypatch.context() as patch:
        patch.setattr(ab.Postgres, "_sql", _breaks_on(ab.Postgres._sql, "UPDATE {sinks} SET slice"))
        with pytest.raises(ZeroDivisionError):
            sink.expose(1, files, [])
    assert content(server, table) == []
    server.query(f"ALTER TABLE {table} DROP CONSTRAINT t_k_check")
    assert sink.expose(1, files, []) is None
    assert len(content(server, table)) == 2


def _breaks_on(method: Any, start: str) -> Any:
    def broken(self: Any, text: str, **parts: Any) -> Any:
        if text.startswith(start):
            raise ZeroDivisionError
        return method(self, text, **parts)

    return broken


def test_a_run_puts_rows_aside_once(
    server: Server, table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows the sink refuses where they are made, rows the server refuses, and a driver that dies
    between the table and the dead letters."""
    server.query(f"CREATE TABLE {table} (k bigint, v bigint CHECK (v < 7))")

    def topology() -> ab.Topology:
        made = ab.Topology("aside")
        rows = made.source("s", None)
        rows.to("out", ab.Postgres(server.address, table), on_error="dead_letter")
        made.dead_letters("dead", ab.Parquet(str(tmp_path / "dead")))
        return made

    run = LocalRun(topology(), tmp_path / "ck")
    run.feed([{"s": [(1, 6), (2, 7)]}, {"s": [(3, 8)]}])
    with monkeypatch.context() as patch:
        patch.setattr(ab.Parquet, "_deliver", lambda *_: 1 / 0)
        with pytest.raises(StorageError, match="'dead' could not show slice 2: ZeroDivisionError"):
            run.feed([{"s": [(4, 9), (5, 5)]}])
    run.kill()
    run = LocalRun(topology(), tmp_path / "ck")
    run.feed([{"s": [(6, 1)]}])
    run.stop()
    LocalRun(topology(), tmp_path / "ck").stop()
    assert content(server, table) == [(1, 6), (5, 5), (6, 1)]
    found = pq.read_table(tmp_path / "dead").to_pylist()
    assert sorted((r["slice_number"], json.loads(r["record"])["k"]) for r in found) == [
        (1, 2),
        (1, 3),
        (2, 4),
    ]
    assert all(r["slice"] == r["slice_number"] for r in found)


def test_values_no_column_can_hold_are_put_aside() -> None:
    topology = ab.Topology("nul")
    rows = topology.source("s", None)
    rows.to("out", ab.Postgres("nowhere", "t"), on_error="dead_letter")
    topology.dead_letters("dead", ab.Memory())
    (shown,) = play(topology, [{"s": [{"v": "a"}, {"v": "b\0"}, {"v": None}]}])
    assert shown["out"].rows() == [("a",), (None,)]
    assert shown["dead"].rows() == [
        (
            1,
            "out",
            "column 'v' has the character NUL, which PostgreSQL cannot take",
            '{"v": "b\\u0000"}',
        )
    ]


def test_other_sinks_take_all_rows_or_none() -> None:
    stream = ab.Topology("all").source("s", None)
    with pytest.raises(TopologyError, match=r"a Parquet sink takes all rows .* leave it out"):
        stream.to("out", ab.Parquet("/nowhere"), on_error="dead_letter")
