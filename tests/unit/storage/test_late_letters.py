"""Rows that a database refuses while the sink of dead letters waits: each shown once, with its
slice, wherever the driver dies.

The sink `db` is fed by the chain "on", which goes on; to that of dead letters the chain "off" gives
rows, too, which waits from slice 2 to slice 4.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from test_late_sinks import FINGERPRINT, JOB, LATE, SCHEMA, SLICE, WAITED, files

import anabranch as ab
from anabranch.driver.holding import Holding
from anabranch.driver.showing import Showing
from anabranch.errors import StorageError
from anabranch.model.commands import WriteHead
from anabranch.model.placement import Placement
from anabranch.model.reports import Staged
from anabranch.model.slices import Late, SliceRecord
from anabranch.operators.rows.failing import LETTERS
from anabranch.sinks import Home, Sink
from anabranch.storage.local import LocalStore
from effort import LONG
from postgres_server import Server
from sink_kinds import needs_server
from sink_steps import Killed, killed_at

pytestmark = [needs_server, pytest.mark.usefixtures("server")]
FEEDS = {"db": {"on"}, "dead": {"on", "off"}}
OPERATORS = (1, 3, 5)  # slices with a row that an operator of "off" refuses
# "off" makes up for slice 3 by a line; slices 2 and 4 have nothing of it, and of 2 there is none.
NEXT = {
    **{(n, None): (SLICE, n + 1) for n in (0, 1, 4)},
    **{(n, 2): (SLICE, n + 1) for n in (2, 3)},
    (4, 2): (LATE, 3),
    (4, 4): (LATE, 4),
}


class Job:
    def __init__(self, root: Path, server: Server, told: bool = True) -> None:
        """`told`: also a late slice without rows is exposed."""
        self.told = told
        self.root, self.server = root, server
        self.table = "t" + "".join(c for c in str(root).lower() if c.isalnum())[-40:]
        server.query(f"CREATE TABLE {self.table} (k bigint, v bigint CHECK (v <> 7))")

    def run(self, steps: int = 99) -> None:
        db: Sink = ab.Postgres(self.server.address, self.table)
        dead: Sink = ab.Parquet(str(self.root / "dead"))
        db.bind(Home("t", "db", self.root / "ck", puts_aside=True))
        dead.bind(Home("t", "dead", self.root / "ck"))
        db.check(SCHEMA)
        dead.check(LETTERS)
        sinks = {"dead": dead, "db": db}
        holding: Holding | None = None
        try:
            holding = Holding(LocalStore(self.root / "ck"), FINGERPRINT)
            showing = Showing(sinks, holding, FEEDS, "dead")
            records = {r.number: r for r in holding.past.slices}
            showing.take_over(JOB)
            behind, given = dict(holding.behind.chains), tuple(records.values())
            placement = Placement(1, {}, {}, ())
            holding.write_head(WriteHead(None, None, given, placement, {}, {}, {}, behind=behind))
            while (
                steps and (at := (holding.behind.newest, holding.behind.chains.get("off"))) in NEXT
            ):
                self._step(*NEXT[at], holding, showing, sinks, records)
                steps -= 1
        finally:
            db.close()
            if holding is not None:
                holding.close()

    def _step(
        self,
        kind: str,
        number: int,
        holding: Holding,
        showing: Showing,
        sinks: dict[str, Sink],
        records: dict[int, SliceRecord],
    ) -> None:
        def stage(sink: str, table: pa.Table, chain: str) -> Staged:
            return sinks[sink].stage(sink, table, number, holding.generation, f"part-{chain}-0")

        letter = pa.table(
            {"slice_number": [number], "operator": ["op"], "reason": ["it"], "record": ["{}"]}
        ).cast(LETTERS)
        if kind == SLICE:
            table = pa.table({"k": [number] * 2, "v": [1, 7]}, SCHEMA)  # 7 is refused
            staged = [stage("db", table, "on")]
            if number not in WAITED and number in OPERATORS:
                staged.append(stage("dead", letter, "off"))
            paused = ("off",) if number in WAITED else ()
            records[number] = SliceRecord(
                number,
                "none",
                None,
                True,
                0,
                0,
                None,
                0,
                1,
                staged=files(tuple(staged)),
                paused=paused,
            )
            holding.write_slice(records[number])
            refused = showing.show(records[number], staged)
            assert refused == {"db": 1}
        else:
            staged = [stage("dead", letter, "off")] if number in OPERATORS else []
            late = Late(number, ("off",), files(tuple(staged)))
            records[number] = records[number].with_late(late)
            holding.write_late(late)
            if staged or self.told:
                assert showing.show_late(records[number], {"dead"}, staged) == {}

    def letters(self) -> Counter[tuple[int, int, str]]:
        """By the slice in which they are shown, their own slice, and the operator or sink."""
        found: Counter[Any] = Counter()
        for path in (self.root / "dead").glob("slice=*/*"):
            shown = int(path.parent.name.removeprefix("slice="))
            rows = pl.read_parquet(path, glob=False).rows()
            found.update((shown, number, operator) for number, operator, _, _ in rows)
        return found

    def refuse_incomplete(self, where: object) -> None:
        wanted = Counter([(n, n, "db") for n in range(1, 6)] + [(n, n, "op") for n in OPERATORS])
        assert self.letters() == wanted, where
        rows = self.server.query(f"SELECT k, v FROM {self.table}")
        assert Counter(rows) == Counter((n, 1) for n in range(1, 6)), where
        left = [p.name for p in (self.root / "ck" / "refused").iterdir()]
        assert left == ["db.parquet"], where
        assert list(self.root.rglob("*.staged")) == [], where


def test_letters_wait_for_their_slice(tmp_path: Path, server: Server) -> None:
    job = Job(tmp_path, server)
    job.run(3)
    kept = tmp_path / "ck" / "refused"
    assert sorted(p.name for p in kept.iterdir()) == ["2", "3", "db.parquet"]
    assert set(job.letters()) == {(1, 1, "db"), (1, 1, "op")}
    job.run(1)
    assert sorted(p.name for p in kept.iterdir()) == ["2", "3", "4", "db.parquet"]
    job.run(1)  # slices 2 and 3 are made up for
    assert sorted({shown for shown, _, _ in job.letters()}) == [1, 2, 3]
    assert sorted(p.name for p in kept.iterdir()) == ["4", "db.parquet"]
    job.run()
    job.refuse_incomplete("")


@pytest.mark.parametrize("told", [True, False])
def test_killed_at_every_step(
    told: bool, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = Job(tmp_path / "calm", server, told)
    with killed_at(monkeypatch, -1) as steps:
        calm.run()
    calm.refuse_incomplete("calm")
    for step in range(0, len(steps), 1 if LONG else 15):
        job = Job(tmp_path / f"{step}", server, told)
        with killed_at(monkeypatch, step), pytest.raises(Killed):
            job.run()
        job.run()
        job.refuse_incomplete((step, steps[step]))


def test_letters_that_cannot_be_read_are_told(tmp_path: Path, server: Server) -> None:
    job = Job(tmp_path, server)
    job.run(3)
    path = tmp_path / "ck" / "refused" / "2" / "db.parquet"
    kept = path.read_bytes()
    path.write_bytes(kept[:-9])
    with pytest.raises(StorageError, match=r"2/db.parquet, which has rows that a sink refused, is"):
        job.run()
    path.write_bytes(kept)
    job.run()
    job.refuse_incomplete("")
