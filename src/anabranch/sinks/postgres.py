"""A PostgreSQL table: one transaction per slice, which also records the slice's number.

Beside the target, in the table `anabranch_sinks`, each sink of a job has a row for each table it
writes to. The writer of a slice locks the row first: a driver that has been replaced waits until
its successor has written down its generation, and then finds a greater one than its own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.errors import (
    AnabranchError,
    CheckpointLockedError,
    ConfigError,
    OperatorError,
    StorageError,
    TopologyError,
)
from anabranch.model.duration import parse_duration
from anabranch.model.reports import Staged
from anabranch.operators.rows.failing import LETTERS, Refused, letters, sift
from anabranch.sinks.postgres_address import parsed, psycopg_module
from anabranch.sinks.postgres_rows import (
    column_type,
    copy_text,
    fits,
    refuse_values,
    unfit_rows,
)
from anabranch.sinks.staged import Held, StagedSink
from anabranch.storage.files import explained, write_atomic
from anabranch.storage.versions import check_format

FORMAT = 1  # of the rows in anabranch_sinks
OLDEST_SERVER = 150_000  # NULLS NOT DISTINCT; older releases are out of support
PAUSE_S = (0.1, 2.0)  # between two attempts: the first, and the longest after doublings
# Of a connection, unless the address says otherwise: a server that vanished must be noticed.
CONNECTION = {"connect_timeout": "10", "tcp_user_timeout": "30000"}
LOCK_TIMEOUT = "30s"  # of an attempt; then it counts as one that found the server away
IDLE_TIMEOUT = "20s"  # a driver that hangs within a transaction must not keep its successor waiting
_LOCK = 0x616E6162  # advisory, while tables are created: CREATE … IF NOT EXISTS can collide
_ORDER = "_anabranch_row"
_ROW = "sink = %s AND target = %s"


@dataclass
class Postgres(StagedSink):
    """Inserts every slice into a PostgreSQL table in one transaction; needs `anabranch[postgres]`.

    With `keys`, rows replace those with the same values in these columns; of several in a slice
    the last counts. The transaction also records the slice's number in the table
    `anabranch_sinks` beside the target, so a slice that is exposed again changes nothing.
    Tables that are not there are created. A server that is away in the middle of a run is tried
    again for as long as `retry` says before the run ends. Rows that the server refuses (a
    constraint, a value it cannot parse) end the run, or are put aside with
    `on_error="dead_letter"`.
    """

    tells_rows: ClassVar[bool] = True

    address: str = field(repr=False)  # may hold a password; never sent to nodes
    table: str
    keys: Sequence[str] = ()
    retry: str | timedelta = "30s"

    def __post_init__(self) -> None:
        parts = self.table.split(".") if isinstance(self.table, str) else []
        if not 1 <= len(parts) <= 2 or not all(parts) or "\0" in self.table:
            raise ConfigError(
                f"the table of a Postgres sink is {self.table!r}; name it as table or schema.table"
            )
        self.keys = (self.keys,) if isinstance(self.keys, str) else tuple(self.keys)
        self._retry_s = parse_duration(self.retry).total_seconds()
        self._connection: Any = None
        self._schema = pa.schema([])  # until `check`

    # -- the life of a run ---------------------------------------------------------------------

    @property
    def target(self) -> str:
        return f"table {self.table}"

    def check(self, schema: pa.Schema) -> None:
        self._given = parsed(self.address)
        for column in schema:
            column_type(column)
        missing = [k for k in self.keys if k not in schema.names]
        if missing:
            raise TopologyError(
                f"the PostgreSQL sink has the key columns {missing}, but the stream has "
                f"{schema.names}",
                columns=missing,
            )
        self._schema = schema

    def stage(
        self, name: str, table: pa.Table, slice_no: int, generation: int, writer: str
    ) -> Staged:
        refuse_values(table, name)
        return super().stage(name, table, slice_no, generation, writer)

    def refused(self, table: pa.Table) -> list[Refused]:
        return unfit_rows(table)

    def begin(self, keep: Collection[str] = ()) -> None:
        super().begin(keep)
        with explained("remove", self._noted()):
            for leftover in self._noted().parent.glob(f".{self._noted().name}.*.tmp"):
                leftover.unlink(missing_ok=True)

    def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(Exception):
                self._connection.close()
            self._connection = None

    def _place(self) -> str:
        return f"the PostgreSQL table {self.table}"

    # -- whose it is ---------------------------------------------------------------------------

    def _look(self) -> Held | None:
        self._given = parsed(self.address)
        with self._explained("reach"), self._connect() as connection:
            if not all(self._exists(connection, t) for t in ("{table}", "{sinks}")):
                return None
            self._table_name = self._name_of_table(connection)
            row = self._row(connection)
            return None if row is None else self._recorded(row)

    def _claim(self, newest: int) -> Held:
        with self._explained("reach"):
            connection = self._connected()
            with connection.transaction():
                held = self._held(connection)
                self._refuse_behind(held, newest)
                connection.execute(
                    self._sql("UPDATE {sinks} SET generation = %s WHERE " + _ROW),
                    [self._generation, self.home.app_id, self._table_name],
                )
        return held

    def _held(self, connection: Any) -> Held:
        """What the row says, which stays locked: a dead driver's transaction either ends before,
        or never counts. Refused if another job or a newer driver wrote it."""
        row = self._row(connection, "FOR UPDATE")
        held, generation = self._recorded(row), row[1]
        if generation > self._generation:
            raise CheckpointLockedError(
                f"a newer driver of this job (generation {generation}) writes to {self._place()} "
                f"than this one (generation {self._generation}), which ends; look for who "
                "started it",
                table=self.table,
                generation=self._generation,
            )
        return held

    def _row(self, connection: Any, locking: str = "") -> Any:
        return connection.execute(
            self._sql(
                # A table from before there was a format has no such column.
                "SELECT job, generation, place, slice, exposure, checkpoint, "
                "coalesce((to_jsonb(s) ->> 'format')::int, 1) FROM {sinks} AS s "
                f"WHERE {_ROW} {locking}"
            ),
            [self.home.app_id, self._table_name],
        ).fetchone()

    def _recorded(self, row: Any) -> Held:
        job, _, place, slice_no, exposure, checkpoint, found = row
        check_format(self._place(), found, FORMAT)
        if job != self._job.job:
            self._refuse_other_job(
                f"topology {self.home.job!r} with the checkpoint directory {checkpoint}"
            )
        return Held(place, slice_no, exposure)

    # -- one slice -----------------------------------------------------------------------------

    def _deliver(self, slice_no: int, exposure: str, files: Sequence[Path]) -> None:
        """In one transaction; again, for a while, if the server is away. Whether an attempt whose
        end was not heard of has succeeded is what the recorded number says."""
        psycopg = psycopg_module()
        away_since: float | None = None
        pause, longest = PAUSE_S
        while True:
            try:
                with self._explained(f"write slice {slice_no} to"):
                    return self._write(slice_no, exposure, files)
            except StorageError as e:
                if not isinstance(e.__cause__, psycopg.OperationalError | psycopg.InterfaceError):
                    raise
                self.close()
                now = time.monotonic()
                away_since = now if away_since is None else away_since
                if now - away_since + pause > self._retry_s:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _write(self, slice_no: int, exposure: str, files: Sequence[Path]) -> None:
        connection = self._connected()
        with connection.transaction():
            if self._has(self._held(connection), slice_no, exposure):
                return
            self._refuse_missing(slice_no, files)
            if self.home.puts_aside:
                self._insert_sifted(connection, slice_no, files)
            else:
                self._insert(connection, self._batches(files))
            connection.execute(
                self._sql("UPDATE {sinks} SET slice = %s, exposure = %s WHERE " + _ROW),
                [slice_no, exposure, self.home.app_id, self._table_name],
            )

    def _insert(self, connection: Any, batches: Iterator[pa.RecordBatch]) -> None:
        target = "pg_temp.anabranch_slice" if self.keys else "{table}"
        with connection.cursor() as cursor:
            copy = self._sql(f"COPY {target} ({{columns}}) FROM STDIN (FORMAT csv)")
            with cursor.copy(copy) as writer:
                for text in copy_text(batches):
                    writer.write(text)
            if self.keys:
                cursor.execute(self._upsert())

    def _insert_sifted(self, connection: Any, slice_no: int, files: Sequence[Path]) -> None:
        """Insert all rows but those the server refuses, which are noted before the transaction
        ends: a reader that finds the slice in the table finds them too."""
        psycopg = psycopg_module()
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")  # not only when it ends

        def insert(table: pa.Table) -> pa.Table:
            try:
                with connection.transaction():  # a savepoint
                    self._insert(connection, iter(table.to_batches()))
                    if self.keys:
                        connection.execute("TRUNCATE pg_temp.anabranch_slice")
            except (psycopg.IntegrityError, psycopg.DataError) as e:
                raise OperatorError(_reason(e)) from e
            return table

        aside = []
        for batch in self._batches(files):
            table = pa.Table.from_batches([batch])
            _, refused = sift(insert, table)
            if refused:
                aside.append(letters(slice_no, self.home.sink, table, refused))
        with explained("remove", self._noted()):
            self._noted().unlink(missing_ok=True)
        if aside:
            out = pa.BufferOutputStream()
            pq.write_table(pa.concat_tables(aside), out)
            write_atomic(self._noted(), [out.getvalue()], sync=True)

    def _noted(self) -> Path:
        return self.home.root / "refused" / f"{self.home.sink}.parquet"

    def _refused_by_target(self, slice_no: int) -> pa.Table | None:
        if not self.home.puts_aside or not self._noted().exists():
            return None
        with explained("read", self._noted()):
            try:
                noted = pq.read_table(self._noted(), schema=LETTERS)
            except pa.ArrowException as e:
                raise StorageError(
                    f"{self._noted()}, which has rows that {self._place()} refused, is damaged: "
                    f"{e}; restore it from a copy",
                    path=str(self._noted()),
                ) from e
        return noted if noted.column("slice_number")[0].as_py() == slice_no else None

    def _upsert(self) -> Any:
        sql = psycopg_module().sql
        values = [n for n in self._schema.names if n not in self.keys]
        updates = [sql.SQL("{0} = excluded.{0}").format(sql.Identifier(n)) for n in values]
        action = (
            sql.SQL("UPDATE SET {}").format(sql.SQL(", ").join(updates))
            if updates
            else sql.SQL("NOTHING")
        )
        return self._sql(
            "INSERT INTO {table} ({columns}) SELECT DISTINCT ON ({keys}) {columns} "
            "FROM pg_temp.anabranch_slice ORDER BY {keys}, {order} DESC "
            "ON CONFLICT ({keys}) DO {action}",
            action=action,
        )

    # -- connection and tables -----------------------------------------------------------------

    def _connected(self) -> Any:
        """A connection whose tables are there and fit, kept from slice to slice."""
        if self._connection is None or self._connection.closed:
            connection = self._connect()
            try:
                self._prepare(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _connect(self) -> Any:
        psycopg = psycopg_module()
        connection = psycopg.connect(**{**CONNECTION, **self._given}, autocommit=True)
        if connection.info.server_version < OLDEST_SERVER:
            raise ConfigError(
                f"the server of {self._place()} is PostgreSQL "
                f"{connection.info.server_version // 10_000}; it must be 15 or newer"
            )
        return connection

    def _prepare(self, connection: Any) -> None:
        # A commit that the server may still forget would be lost with the staged files.
        connection.execute(
            "SELECT set_config('synchronous_commit', 'on', false) "
            "WHERE current_setting('synchronous_commit') = 'off'"
        )
        connection.execute(
            "SELECT set_config('lock_timeout', %s, false), "
            "set_config('idle_in_transaction_session_timeout', %s, false)",
            [LOCK_TIMEOUT, IDLE_TIMEOUT],
        )
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
            if self._exists(connection, "{table}"):
                self._refuse_other_columns(connection)
            else:
                connection.execute(self._create())
            self._add_row(connection)
            if self.keys:
                connection.execute(
                    self._sql(
                        "CREATE TEMPORARY TABLE anabranch_slice ON COMMIT DELETE ROWS AS "
                        "SELECT {columns} FROM {table} WITH NO DATA"
                    )
                )
                connection.execute(
                    self._sql("ALTER TABLE pg_temp.anabranch_slice ADD {order} bigserial")
                )

    def _add_row(self, connection: Any) -> None:
        """From the first slice on there is a row to lock."""
        if not self._exists(connection, "{sinks}"):
            connection.execute(
                self._sql(
                    "CREATE TABLE {sinks} (sink text, target text, job text NOT NULL, "
                    "generation bigint NOT NULL, place text NOT NULL, slice bigint NOT NULL, "
                    "exposure text, checkpoint text NOT NULL, "
                    f"format integer NOT NULL DEFAULT {FORMAT}, PRIMARY KEY (sink, target))"
                )
            )
        self._table_name = self._name_of_table(connection)
        slice_no = self._inherited(connection)
        connection.execute(
            self._sql(
                "INSERT INTO {sinks} VALUES (%s, %s, %s, 0, gen_random_uuid(), %s, %s, %s) "
                "ON CONFLICT DO NOTHING"
            ),
            [
                *(self.home.app_id, self._table_name, self._job.job, slice_no),
                *(None if slice_no else "", str(self.home.root)),
            ],
        )

    def _name_of_table(self, connection: Any) -> str:
        """By its own name: a user may write it with its schema or without."""
        oid = self._sql("{table}").as_string(connection)
        (name,) = connection.execute(
            "SELECT nspname || '.' || relname FROM pg_class c JOIN pg_namespace n "
            "ON n.oid = relnamespace WHERE c.oid = to_regclass(%s)",
            [oid],
        ).fetchone()
        return str(name)

    def _inherited(self, connection: Any) -> int:
        """The newest slice as it was recorded before jobs had identities."""
        if not self._job.inherits or not self._exists(connection, "{slices}"):
            return 0
        found = connection.execute(
            self._sql("SELECT slice FROM {slices} WHERE sink = %s"), [self.home.app_id]
        ).fetchone()
        return found[0] if found else 0

    def _create(self) -> Any:
        sql = psycopg_module().sql
        parts = [
            sql.SQL("{} " + column_type(c)).format(sql.Identifier(c.name)) for c in self._schema
        ]
        if self.keys:  # null is a key like any other
            parts.append(self._sql("UNIQUE NULLS NOT DISTINCT ({keys})"))
        return self._sql("CREATE TABLE {table} ({parts})", parts=sql.SQL(", ").join(parts))

    def _exists(self, connection: Any, name: str) -> bool:
        text = self._sql(name).as_string(connection)
        return bool(connection.execute("SELECT to_regclass(%s) IS NOT NULL", [text]).fetchone()[0])

    def _refuse_other_columns(self, connection: Any) -> None:
        oid = self._sql("{table}").as_string(connection)
        columns = {
            name: (kind, needed)
            for name, kind, needed in connection.execute(
                "SELECT attname, format_type(atttypid, atttypmod), attnotnull AND NOT atthasdef "
                "AND attidentity = '' FROM pg_attribute "
                "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped",
                [oid],
            )
        }
        wrong = [
            f"{c.name!r} is {columns[c.name][0]} for {c.type}"
            if c.name in columns
            else f"{c.name!r} ({column_type(c)}) is missing"
            for c in self._schema
            if c.name not in columns or not fits(c, columns[c.name][0])
        ]
        wrong += [
            f"{n!r} must not be null and the stream does not have it"
            for n, (_, needed) in columns.items()
            if needed and n not in self._schema.names
        ]
        if not wrong and self.keys and not self._is_unique(connection, oid):
            wrong = [
                f"no unique index is on exactly the keys {list(self.keys)}, with its columns NOT "
                "NULL or NULLS NOT DISTINCT"
            ]
        if wrong:
            raise ConfigError(
                f"{self._place()} does not fit the stream of the sink {self.home.sink!r}: "
                f"{'; '.join(wrong)}; change the table or the stream",
                table=self.table,
            )

    def _is_unique(self, connection: Any, oid: str) -> bool:
        """Whether ON CONFLICT finds an index on the keys, for which null is a key too."""
        found = connection.execute(
            "SELECT 1 FROM pg_index i WHERE indrelid = to_regclass(%s) AND indisunique "
            "AND indpred IS NULL AND indisvalid AND (SELECT array_agg(attname::text ORDER BY "
            "attname::text) FROM pg_attribute WHERE attrelid = indrelid AND attnum = ANY(indkey)) "
            "= %s AND indnatts = %s AND (indnullsnotdistinct OR NOT EXISTS (SELECT FROM "
            "pg_attribute WHERE attrelid = indrelid AND attnum = ANY(indkey) AND NOT attnotnull))",
            [oid, sorted(self.keys), len(self.keys)],
        ).fetchone()
        return found is not None

    # -- words ---------------------------------------------------------------------------------

    def _sql(self, text: str, **parts: Any) -> Any:
        """A statement with the sink's own names in it, quoted."""
        sql = psycopg_module().sql
        path = self.table.split(".")

        def names(columns: Sequence[str]) -> Any:
            return sql.SQL(", ").join(map(sql.Identifier, columns))

        return sql.SQL(text).format(
            table=sql.Identifier(*path),
            sinks=sql.Identifier(*path[:-1], "anabranch_sinks"),
            slices=sql.Identifier(*path[:-1], "anabranch_slices"),
            columns=names(self._schema.names),
            keys=names(self.keys),
            order=sql.Identifier(_ORDER),
            **parts,
        )

    @contextlib.contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        psycopg = psycopg_module()
        try:
            yield
        except AnabranchError:
            raise
        except (psycopg.Error, OSError, UnicodeError, pa.ArrowException) as e:
            raise StorageError(
                f"could not {action} {self._place()}: {_reason(e)}; nothing is lost: when this "
                "is mended, start again with the same checkpoint directory",
                table=self.table,
            ) from e


def _reason(error: Any) -> str:
    """What the server said, in one line. A password is not in it: `parsed` has let none go where
    it would be taken for a host, a port or a database."""
    detail = error.diag.message_detail if hasattr(error, "diag") else None
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return f"{reason} ({detail})" if detail else reason
