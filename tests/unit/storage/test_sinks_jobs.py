"""Whose slices a target holds: jobs of the same names, drivers that were replaced, targets that are
exchanged, and what the version before has left."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import deltalake
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import anabranch as ab
from anabranch.errors import AnabranchError, CheckpointLockedError, ConfigError, StorageError
from anabranch.sinks import Home, Sink, postgres
from anabranch.sinks.staged import StagedSink
from anabranch.storage.generations import Generation
from anabranch.storage.identity import Identity
from anabranch.storage.local import LocalStore
from effort import LONG
from oracle import Row
from sink_kinds import KINDS, ByFunction, InDelta, InParquet, InPostgres, Kind, needs_server
from sink_starts import JOB, start
from sink_steps import Killed, suspended_at

sys.path.insert(0, str(Path(__file__).parents[1] / "node"))
from local_run import LocalRun

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])
FIRST: list[Row] = [(1, 1), (2, 2)]
SECOND: list[Row] = [(3, 3)]
REMEMBER = [k for k in KINDS if k is not ByFunction]  # kinds whose targets know what they hold

pytestmark = [needs_server, pytest.mark.usefixtures("server")]


def job(root: Path, sink: Sink, name: str = "job") -> LocalRun:
    topology = ab.Topology(name)
    topology.source("s", None).to("out", sink)
    return LocalRun(topology, root)


def worked(root: Path, sink: Sink, *batches: list[Row], name: str = "job") -> None:
    """A run that takes the batches and is stopped."""
    run = job(root, sink, name)
    for rows in batches:
        run.feed([{"s": rows}])
    run.stop()


# -- jobs of the same names --------------------------------------------------------------------


@pytest.mark.parametrize("make", REMEMBER)
def test_the_target_of_a_job_of_the_same_names_is_refused(make: type[Kind], tmp_path: Path) -> None:
    """Before, its slices counted as already there, and all its rows were lost."""
    kind = make(tmp_path)
    worked(tmp_path / "one", kind.sink("t"), FIRST)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"belongs to another job, .*Give the sink 'out' ano"):
            job(tmp_path / "two", kind.sink("t"))
        assert not (tmp_path / "two").exists()  # found out before anything was claimed
    assert kind.rows("t") == Counter(FIRST)
    worked(tmp_path / "one", kind.sink("t"), SECOND)
    worked(tmp_path / "two", kind.sink("u"), FIRST)
    assert kind.rows("t") == Counter(FIRST + SECOND)
    assert kind.rows("u") == Counter(FIRST)


@pytest.mark.parametrize("make", [k for k in REMEMBER if k is not InParquet])
def test_jobs_of_other_names_share_a_table(make: type[Kind], tmp_path: Path) -> None:
    kind = make(tmp_path)
    worked(tmp_path / "one", kind.sink("t"), FIRST)
    worked(tmp_path / "two", kind.sink("t"), SECOND, name="another")
    worked(tmp_path / "one", kind.sink("t"), [(4, 4)])
    assert kind.rows("t") == Counter([*FIRST, *SECOND, (4, 4)])


def test_two_jobs_that_start_at_once_on_one_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find it unowned; one gets it."""
    first, second = (ab.Parquet(str(tmp_path / "t")) for _ in range(2))
    first.bind(Home("job", "out", tmp_path / "one"))
    second.bind(Home("job", "out", tmp_path / "two"))
    real = os.link

    def late(*args: Any) -> None:
        monkeypatch.undo()
        second.take_over(Identity("2"), 1, 0)
        real(*args)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(ConfigError, match=r"belongs to another job, topology 'job' .*/two"):
        first.take_over(Identity("1"), 1, 0)


def test_a_table_is_the_same_with_and_without_its_schema(tmp_path: Path) -> None:
    address = InPostgres.server.address
    worked(tmp_path / "one", ab.Postgres(address, "spelled"), FIRST)
    with pytest.raises(ConfigError, match="belongs to another job"):
        job(tmp_path / "two", ab.Postgres(address, "public.spelled"))
    worked(tmp_path / "one", ab.Postgres(address, "public.spelled"), SECOND)
    rows = InPostgres.server.query("SELECT k, v FROM spelled")
    assert Counter(rows) == Counter(FIRST + SECOND)


# -- what the version before has left ----------------------------------------------------------


class Before:
    """A target and a checkpoint directory as the version before left them after slice 4, whose
    staged files are still there or not."""

    INHERITS = Identity("01d", inherits=True)

    def __init__(self, kind: Kind) -> None:
        self.kind, self.root = kind, kind.root / "ck"

    def has(self, slice_no: int, staged: bool) -> list[str]:
        """The target has slices up to this one; the files that the journal names for slice 4."""
        kind, rows = self.kind, pa.table({"k": [4], "v": [4]}, SCHEMA)
        path = kind.root / "t"
        if isinstance(kind, InParquet):
            directory = path / "_staging" / "000000000004-1"
            for number in range(1, slice_no + 1):
                (path / f"slice={number}").mkdir(parents=True)
                one = pa.table({"k": [number], "v": [number]}, SCHEMA)
                pq.write_table(one, path / f"slice={number}" / "w.parquet")
            (path / "_newest").write_text(f"{slice_no}\n")
        else:
            directory = self.root / "staged" / "out" / "000000000004-1"
        if isinstance(kind, InDelta):
            transaction = deltalake.Transaction("anabranch/job/out", slice_no)
            properties = deltalake.CommitProperties(app_transactions=[transaction])
            values = list(range(1, slice_no + 1))
            table = pa.table({"k": values, "v": values}, SCHEMA)
            deltalake.write_deltalake(path, table, commit_properties=properties)
        if isinstance(kind, InPostgres):
            query = kind.server.query
            query(f"CREATE TABLE {kind.schema}.t (k bigint UNIQUE NULLS NOT DISTINCT, v bigint)")
            for number in range(1, slice_no + 1):
                query(f"INSERT INTO {kind.schema}.t VALUES ({number}, {number})")
            slices = f"{kind.schema}.anabranch_slices"
            query(f"CREATE TABLE {slices} (sink text PRIMARY KEY, slice bigint NOT NULL)")
            query(f"INSERT INTO {slices} VALUES ('anabranch/job/out', {slice_no})")
        if isinstance(kind, ByFunction):
            kind.sink("t")
            for number in range(1, slice_no + 1):
                (path / f"{number}.json").write_text(f"[[{number}, {number}]]")
            (self.root / "exposed").mkdir(parents=True)
            (self.root / "exposed" / "out").write_text(f"{slice_no}\n")
        file = directory / "w.9f86d081.parquet"
        if staged:
            directory.mkdir(parents=True)
            pq.write_table(rows, file)
        return [str(file.relative_to(self.root)) if self.root in file.parents else str(file)]

    def start(self, files: list[str], place: str = "t", job: Identity = INHERITS) -> Sink:
        sink = self.kind.sink(place)
        sink.bind(Home("job", "out", self.root))
        sink.check(SCHEMA)
        try:
            start(sink, 4, files, run=2, job=job)
        finally:
            sink.close()
        return sink


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize(("has", "staged"), [(4, False), (4, True), (3, True)])
def test_a_job_from_before_goes_on(
    make: type[Kind], has: int, staged: bool, tmp_path: Path
) -> None:
    before = Before(make(tmp_path))
    files = before.has(has, staged)
    sink = before.start(files)
    assert before.kind.rows("t") == Counter((n, n) for n in range(1, 5))
    before.start(files)
    table = pa.table({"k": [5], "v": [5]}, SCHEMA)
    start(sink, 4, files, run=3, job=Before.INHERITS)
    more = sink.stage("out", table, 5, 3, "w")
    assert more.path is not None
    sink.expose(5, [more.path], [])
    sink.close()
    assert before.kind.rows("t") == Counter((n, n) for n in range(1, 6))
    assert not any((tmp_path / "t" / name).exists() for name in ("_staging", "_newest"))
    assert not (tmp_path / "ck" / "exposed").exists()


@pytest.mark.parametrize("make", REMEMBER)
def test_what_was_recorded_without_an_identity_is_not_a_new_jobs(
    make: type[Kind], tmp_path: Path
) -> None:
    before = Before(make(tmp_path))
    files = before.has(4, staged=False)
    if isinstance(before.kind, InPostgres):  # has room for both
        return
    with pytest.raises(ConfigError, match="belongs to another job"):
        before.start(files, job=JOB)


@pytest.mark.parametrize("make", KINDS)
def test_a_job_from_before_may_change_its_target(make: type[Kind], tmp_path: Path) -> None:
    before = Before(make(tmp_path))
    before.start(before.has(4, staged=False), place="u")
    assert before.kind.rows("u") == Counter()


# -- drivers that were replaced ----------------------------------------------------------------


class Drivers:
    """Drivers of one job, none of which knows of the others."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.root = kind, kind.root / "ck"
        self._value = itertools.count(1)

    def driver(self, newest: int = 0, files: list[str] | None = None) -> Any:
        sink: Any = self.kind.sink("t")
        sink.bind(Home("job", "out", self.root))
        sink.check(SCHEMA)
        start(sink, newest, files or [], Generation.claim(LocalStore(self.root), 0).number)
        return sink

    def stage(self, sink: Any, slice_no: int) -> list[str]:
        value = next(self._value)
        rows = pa.table({"k": [value], "v": [value]}, SCHEMA)
        staged = sink.stage("out", rows, slice_no, sink._run, "w")
        return [staged.path]


@pytest.mark.parametrize("make", KINDS)
def test_a_driver_that_was_replaced_shows_nothing_more(make: type[Kind], tmp_path: Path) -> None:
    drivers = Drivers(make(tmp_path))
    old = drivers.driver()
    old.expose(1, known := drivers.stage(old, 1), [])
    late = drivers.stage(old, 2)
    new = drivers.driver(1, known)
    # Where the target does not say so itself, files that are gone do; the driver tells why.
    with pytest.raises(
        (CheckpointLockedError, StorageError), match=r"generation 2|lost its staged"
    ):
        old.expose(2, late, [])
    new.expose(2, drivers.stage(new, 2), [])
    with pytest.raises((CheckpointLockedError, ConfigError, StorageError)):
        old.expose(2, late, [])
    assert drivers.kind.rows("t") == Counter([(1, 1), (3, 3)])
    new.expose(3, drivers.stage(new, 3), [])
    old.close()
    new.close()
    assert drivers.kind.rows("t") == Counter([(1, 1), (3, 3), (4, 4)])


@pytest.mark.parametrize("make", KINDS)
def test_a_driver_is_refused_as_soon_as_another_has_taken_over(
    make: type[Kind], tmp_path: Path
) -> None:
    """The new one has shown and removed nothing yet."""
    drivers = Drivers(make(tmp_path))
    old, new = drivers.driver(), drivers.kind.sink("t")
    late = drivers.stage(old, 1)
    new.bind(Home("job", "out", drivers.root))
    new.check(SCHEMA)
    claimed = make in (InParquet, ByFunction)  # the others know it themselves
    new.take_over(JOB, Generation.claim(LocalStore(drivers.root), 0).number if claimed else 2, 0)
    with pytest.raises(CheckpointLockedError, match=r"generation 2.*generation 1"):
        old.expose(1, late, [])
    old.close()
    new.close()
    assert drivers.kind.rows("t") == Counter()


@pytest.mark.parametrize("make", KINDS)
def test_a_driver_is_replaced_between_any_two_steps_of_showing_a_slice(
    make: type[Kind], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal has the slice, so the new driver shows it, too, and goes on; then the old one
    wakes up. In the middle of a transaction of PostgreSQL it has to end first."""

    def replaced_at(step: int) -> list[str]:
        drivers = Drivers(make(tmp_path / str(step + 1)))
        old, new = drivers.driver(), []
        old.expose(1, drivers.stage(old, 1), [])
        files = drivers.stage(old, 2)

        def replace() -> None:
            new.append(drivers.driver(2, files))
            new[0].expose(3, drivers.stage(new[0], 3), [])

        def meanwhile() -> None:
            with monkeypatch.context() as patch, contextlib.suppress(StorageError):
                patch.setattr(postgres, "LOCK_TIMEOUT", "50ms")
                replace()

        with (
            suspended_at(monkeypatch, step, meanwhile) as steps,
            contextlib.suppress(AnabranchError),
        ):
            old.expose(2, files, [])
        old.close()
        if not new:
            assert step < 0 or steps[step] == "sql"
            replace()
        new[0].close()
        assert drivers.kind.rows("t") == Counter([(1, 1), (2, 2), (3, 3)]), (step, steps)
        return steps

    everything = replaced_at(-1)
    assert len(everything) > 5
    for step in range(0, len(everything), 1 if LONG else 6):
        replaced_at(step)


def test_a_driver_that_hangs_in_a_transaction_does_not_keep_its_successor_waiting(
    tmp_path: Path,
) -> None:
    drivers = Drivers(InPostgres(tmp_path))
    old = drivers.driver()
    connection = old._connection
    (idle,) = connection.execute("SHOW idle_in_transaction_session_timeout").fetchone()
    assert idle == "20s"
    connection.execute("SET idle_in_transaction_session_timeout = '100ms'")
    with contextlib.suppress(psycopg.Error), connection.transaction():
        old._held(connection)
        new = drivers.driver()  # waits for the lock for longer than that
    new.expose(1, drivers.stage(new, 1), [])
    new.close()
    assert drivers.kind.rows("t") == Counter([(1, 1)])


def test_a_replaced_driver_that_is_in_the_middle_of_a_delta_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drivers = Drivers(InDelta(tmp_path))
    old, new = drivers.driver(), drivers.kind.sink("t")
    new.bind(Home("job", "out", drivers.root))
    new.check(SCHEMA)
    real = deltalake.write_deltalake

    def late(*args: Any, **kwargs: Any) -> None:
        monkeypatch.undo()
        new.take_over(JOB, 2, 0)  # the table alone knows of it
        real(*args, **kwargs)

    monkeypatch.setattr(deltalake, "write_deltalake", late)
    with pytest.raises(CheckpointLockedError, match="a newer driver of this job"):
        old.expose(1, drivers.stage(old, 1), [])
    assert drivers.kind.rows("t") == Counter()


def test_a_new_driver_writes_itself_down_while_an_old_one_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drivers = Drivers(InDelta(tmp_path))
    old = drivers.driver()
    files = drivers.stage(old, 1)
    real = deltalake.DeltaTable.create_write_transaction

    def late(*args: Any, **kwargs: Any) -> None:
        monkeypatch.undo()
        old.expose(1, files, [])
        real(*args, **kwargs)

    monkeypatch.setattr(deltalake.DeltaTable, "create_write_transaction", late)
    new = drivers.driver(1, files)
    new.expose(2, drivers.stage(new, 2), [])
    assert drivers.kind.rows("t") == Counter([(1, 1), (2, 2)])


@pytest.mark.parametrize("step", ["link", "rename"])
@pytest.mark.parametrize(
    ("known", "kept"), [(True, [(1, 1)]), (False, [(2, 2)]), (True, []), (False, [])]
)
def test_a_replaced_driver_that_is_in_the_middle_of_a_parquet_slice(
    step: str, known: bool, kept: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the new driver knows the slice from the journal or makes it anew: its rows stay, and
    if a reader has deleted them, they do not come back."""
    drivers = Drivers(InParquet(tmp_path))
    old = drivers.driver()
    files = drivers.stage(old, 1)
    module: Any = os if step == "link" else Path
    real = getattr(module, step)

    def late(*args: Any) -> Any:
        monkeypatch.undo()
        if known:
            drivers.driver(1, files)
        else:
            new = drivers.driver()
            new.expose(1, drivers.stage(new, 1), [])
        if not kept:
            shutil.rmtree(tmp_path / "t" / "slice=1")
        return real(*args)

    monkeypatch.setattr(module, step, late)
    with pytest.raises((CheckpointLockedError, StorageError)):
        old.expose(1, files, [])
    assert drivers.kind.rows("t") == Counter(kept)


def test_a_slice_that_the_journal_does_not_know_is_replaced(tmp_path: Path) -> None:
    """A driver that had been replaced showed it after the new one had taken over."""
    drivers = Drivers(InParquet(tmp_path))
    new = drivers.driver()
    stray = tmp_path / "t" / "slice=1"
    stray.mkdir()
    pq.write_table(pa.table({"k": [9], "v": [9]}, SCHEMA), stray / "w.1-00000000.parquet")
    new.expose(1, drivers.stage(new, 1), [])
    assert drivers.kind.rows("t") == Counter([(1, 1)])
    assert list((tmp_path / "t" / ".anabranch" / "staged").iterdir()) == []


def test_a_replacement_that_comes_too_late_puts_back_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drivers = Drivers(InParquet(tmp_path))
    old = drivers.driver()
    files = drivers.stage(old, 1)
    stray = tmp_path / "t" / "slice=1"
    stray.mkdir()
    pq.write_table(pa.table({"k": [9], "v": [9]}, SCHEMA), stray / "w.2-00000000.parquet")
    monkeypatch.setattr(
        StagedSink,
        "_still_mine",
        lambda self: shutil.rmtree(drivers.root / "staged/out/1-1.ready"),  # by a new driver
    )
    with pytest.raises(StorageError, match="cannot expose"):
        old.expose(1, files, [])
    assert drivers.kind.rows("t") == Counter([(9, 9)])


@pytest.mark.parametrize("make", [k for k in REMEMBER if k is not InParquet])
def test_another_slice_of_the_same_number_is_told(make: type[Kind], tmp_path: Path) -> None:
    """Two copies of one checkpoint directory: rows that are in a table cannot be taken back."""
    drivers = Drivers(make(tmp_path))
    first = drivers.driver()
    shutil.copytree(tmp_path / "ck", tmp_path / "copy")
    first.expose(1, drivers.stage(first, 1), [])
    first.close()
    drivers.root = tmp_path / "copy"
    sink: Any = drivers.kind.sink("t")
    sink.bind(Home("job", "out", tmp_path / "copy"))
    sink.check(SCHEMA)
    sink.take_over(JOB, 2, 1)
    with pytest.raises(StorageError, match=r"has another slice 1 than the journal in .*/copy"):
        sink.expose(1, drivers.stage(sink, 1), [])
    sink.close()
    assert drivers.kind.rows("t") == Counter([(1, 1)])


# -- targets that are exchanged ----------------------------------------------------------------

MOVES = [(k, k) for k in KINDS] + list(itertools.pairwise([*KINDS, KINDS[0]]))
moves = pytest.mark.parametrize(
    ("before", "after"), MOVES, ids=[f"{a.__name__}-{b.__name__}" for a, b in MOVES]
)


@moves
def test_a_sink_moves_after_a_stop_and_back(
    before: type[Kind], after: type[Kind], tmp_path: Path
) -> None:
    """As docs/sinks.md allows it: what was shown stays, the rest goes to the new place."""
    old, new = before(tmp_path / "old"), after(tmp_path / "new")
    worked(tmp_path / "ck", old.sink("t"), FIRST)
    worked(tmp_path / "ck", new.sink("u"), SECOND)
    worked(tmp_path / "ck", old.sink("t"), [(4, 4)])
    worked(tmp_path / "ck", old.sink("t"))
    assert old.rows("t") == Counter([*FIRST, (4, 4)])
    assert new.rows("u") == Counter(SECOND)


@moves
@pytest.mark.parametrize("step", ["_deliver", "_write_note"])
def test_a_sink_that_may_lack_the_newest_slice_does_not_move(
    before: type[Kind], after: type[Kind], step: str, tmp_path: Path
) -> None:
    old, new = before(tmp_path / "old"), after(tmp_path / "new")
    run = job(tmp_path / "ck", old.sink("t"))

    def killed(*_: object) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        owner = type(old.sink("t")) if step == "_deliver" else StagedSink
        patch.setattr(owner, step, killed)
        with pytest.raises(Killed):
            run.feed([{"s": FIRST}])
    run.kill()
    if before is after is ByFunction:
        return  # a function may be exchanged: the job itself knows what it has had
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"start once with the sink as it was and stop"):
            job(tmp_path / "ck", new.sink("u"))
    worked(tmp_path / "ck", old.sink("t"))
    worked(tmp_path / "ck", new.sink("u"), SECOND)
    assert old.rows("t") == Counter(FIRST)
    assert new.rows("u") == Counter(SECOND)


# -- errors that are not ours ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sink", "why"),
    [
        (lambda path: ab.Parquet(""), "the path of a Parquet sink is ''"),
        (lambda path: ab.Parquet(f"{path}/a\0b"), "name a directory"),
        (lambda path: ab.Parquet(f"{path}/file"), "Not a directory"),
        (lambda path: ab.Parquet(f"{path}/file/x"), "Not a directory"),
        (lambda path: ab.Parquet(f"{path}/owned"), "Is a directory"),
        (lambda path: ab.Delta(" "), "the path of a Delta sink is ' '"),
        (lambda path: ab.Delta(f"{path}/file"), "could not open the Delta table"),
        (lambda path: ab.Delta(f"{path}/log"), "could not open the Delta table"),
        (lambda path: ab.Delta("nosuch://x"), "could not open the Delta table"),
        (lambda path: ab.Postgres("", ""), "name it as table or schema.table"),
        (lambda path: ab.Postgres("", "a..b"), "name it as table or schema.table"),
        (lambda path: ab.Postgres("", "a.b.c"), "name it as table or schema.table"),
        (lambda path: ab.Postgres("", "a\0b"), "name it as table or schema.table"),
        (lambda path: ab.Postgres(InPostgres.server.address, "nosuch.t"), "could not reach"),
    ],
)
def test_a_target_that_cannot_be_is_told(sink: Any, why: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "owned" / ".anabranch" / "owner").mkdir(parents=True)
    (tmp_path / "log" / "_delta_log").mkdir(parents=True)
    (tmp_path / "log" / "_delta_log" / f"{0:020d}.json").write_text("{torn")
    with pytest.raises((ConfigError, StorageError), match=why):
        job(tmp_path / "ck", sink(tmp_path))


@pytest.mark.parametrize(
    ("name", "directory"),
    [
        *(("shown", False), ("shown/out", False), ("shown/out/1", True)),
        *(("staged", False), ("staged/out", False), ("identity", True)),
    ],
)
def test_a_checkpoint_directory_with_something_else_in_a_name_is_told(
    name: str, directory: bool, tmp_path: Path
) -> None:
    path = tmp_path / "ck" / name
    path.parent.mkdir(parents=True)
    if directory:
        path.mkdir()
    else:
        path.touch()
    with pytest.raises(StorageError, match=str(tmp_path)):
        worked(tmp_path / "ck", ByFunction(tmp_path).sink("t"), FIRST)


def test_damaged_dead_letters_are_told(tmp_path: Path) -> None:
    sink = ab.Postgres(InPostgres.server.address, "damaged")
    sink.bind(Home("job", "out", tmp_path, puts_aside=True))
    sink.check(SCHEMA)
    start(sink)
    (tmp_path / "refused").mkdir()
    (tmp_path / "refused" / "out.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(StorageError, match="refused, is damaged"):
        sink.expose(1, [], [])
    sink.close()
