"""Sinks that wait for a chain: shown later, in order, each slice once, wherever the driver dies.

Two chains: "on" goes on while "off" waits from slice 2 to slice 4. The sink `a` is fed by the one,
`b` by the other, `u` by both.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import anabranch as ab
from anabranch.driver.holding import Holding
from anabranch.driver.showing import Showing
from anabranch.errors import CheckpointMismatchError, ConfigError, InvariantError
from anabranch.model.commands import WriteHead
from anabranch.model.placement import Placement
from anabranch.model.reports import Staged
from anabranch.model.slices import Late, SliceRecord
from anabranch.sinks import Home, Sink
from anabranch.storage.identity import Identity
from anabranch.storage.local import LocalStore
from effort import LONG
from sink_kinds import ByFunction, InDelta, InParquet, InPostgres, Kind, needs_server
from sink_steps import Killed, killed_at

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])
FEEDS = {"a": {"on"}, "b": {"off"}, "u": {"on", "off"}}
CODE = {"on": 0, "off": 1}  # what a chain's rows have as v; k is their slice
JOB = Identity("5eed")
FINGERPRINT: dict[str, Any] = {
    "topology": "t",
    "sources": [],
    "key_groups": 1,
    "sinks": list(FEEDS),
    "operators": {},
    "chains": {"on": [], "off": []},
    "parallelism": {"on": 1, "off": 1},
    "feeds": {sink: sorted(chains) for sink, chains in FEEDS.items()},
    "log": {},
}
SLICE, LATE = "slice", "late"
# By the newest slice and what "off" lacks first: what comes next. It ends with slice 5.
NEXT: dict[tuple[int, int | None], tuple[str, int]] = {
    (0, None): (SLICE, 1),
    (1, None): (SLICE, 2),
    (2, 2): (SLICE, 3),
    (3, 2): (LATE, 2),
    (3, 3): (SLICE, 4),
    (4, 3): (LATE, 3),
    (4, 4): (LATE, 4),
    (4, None): (SLICE, 5),
}
WAITED = (2, 3, 4)


def rows_of(sink: str, upto: int) -> Counter[tuple[int, int]]:
    return Counter((k, CODE[c]) for k in range(1, upto + 1) for c in FEEDS[sink])


def record(number: int, staged: dict[str, list[str]]) -> SliceRecord:
    paused = ("off",) if number in WAITED else ()
    return SliceRecord(number, "none", None, True, 0, 0, None, 0, 1, staged=staged, paused=paused)


class Life:
    """A driver on the directory, as far as it has to do with sinks."""

    def __init__(self, root: Path, sinks: dict[str, Sink]) -> None:
        self.sinks = sinks
        for name, sink in sinks.items():
            sink.bind(Home("t", name, root))
            sink.check(SCHEMA)
        self.holding = Holding(LocalStore(root), FINGERPRINT)
        self.records = {r.number: r for r in self.holding.past.slices}
        self.showing = Showing(sinks, self.holding, FEEDS)
        try:
            self.showing.take_over(JOB)
            self.head()
        except BaseException:
            self.close()
            raise

    def head(self) -> None:
        behind = dict(self.holding.behind.chains)
        records = tuple(self.records.values())
        placement = Placement(1, {}, {}, ())
        self.holding.write_head(
            WriteHead(None, None, records, placement, {}, {}, {}, behind=behind)
        )

    @property
    def next(self) -> tuple[str, int] | None:
        behind = self.holding.behind
        return NEXT.get((behind.newest, behind.chains.get("off")))

    def stage(self, number: int, chain: str) -> tuple[Staged, ...]:
        table = pa.table({"k": [number], "v": [CODE[chain]]}, SCHEMA)
        generation = self.holding.generation
        return tuple(
            self.sinks[sink].stage(sink, table, number, generation, f"part-{chain}-0")
            for sink, chains in FEEDS.items()
            if chain in chains
        )

    def step(self, upto: str = "shown") -> None:
        """The next step of the story; `upto` where its driver dies."""
        assert self.next is not None
        kind, number = self.next
        if kind == SLICE:
            staged = self.stage(number, "on")
            staged += self.stage(number, "off") if number not in WAITED else ()
            self.records[number] = record(number, files(staged))
            if upto != "staged":
                self.holding.write_slice(self.records[number])
            if upto == "shown":
                self.showing.show(self.records[number], staged)
            return
        staged = self.stage(number, "off")
        late = Late(number, ("off",), files(staged))
        self.records[number] = self.records[number].with_late(late)
        if upto != "staged":
            self.holding.write_late(late)
        if upto == "shown":
            self.showing.show_late(self.records[number], {"b", "u"}, staged)

    def go_on(self) -> None:
        while self.next is not None:
            self.step()

    def close(self) -> None:
        self.showing.close()
        self.holding.close()


def files(staged: tuple[Staged, ...]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for s in staged:
        if s.path is not None:
            found.setdefault(s.sink, []).append(s.path)
    return found


class Job:
    """Lives of one job, one after the other."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def life(self) -> Life:
        return Life(self.kind.root / "ck", {name: self.kind.sink(name) for name in FEEDS})

    def run(self) -> None:
        life = self.life()
        try:
            life.go_on()
        finally:
            life.close()

    def found(self, sink: str) -> Counter[tuple[int, int]]:
        return self.kind.rows(sink)

    def refuse_halves(self, where: object) -> None:
        """A reader of a sink finds all of its first slices and nothing else."""
        for sink in FEEDS:
            found = self.found(sink)
            assert any(found == rows_of(sink, n) for n in range(6)), (where, sink, found)

    def refuse_incomplete(self, where: object) -> None:
        for sink in FEEDS:
            assert self.found(sink) == rows_of(sink, 5), (where, sink)
        assert list(self.kind.root.rglob("*.staged")) == [], where


@pytest.fixture
def parquet(tmp_path: Path) -> Job:
    return Job(InParquet(tmp_path))


def test_sinks_of_a_chain_that_waits_show_their_slices_later(parquet: Job) -> None:
    life, shown = parquet.life(), []
    while life.next is not None:
        life.step()
        shown.append(tuple(max(k for k, _ in parquet.found(sink)) for sink in FEEDS))
        assert shown[-1] == tuple(life.showing.shown(sink) for sink in FEEDS)
        parquet.refuse_halves(shown)
    assert [a for a, _, _ in shown] == [1, 2, 3, 3, 4, 4, 4, 5]
    assert [b for _, b, _ in shown] == [1, 1, 1, 2, 2, 3, 4, 5]
    assert [u for _, _, u in shown] == [1, 1, 1, 2, 2, 3, 4, 5]
    life.close()
    parquet.refuse_incomplete("")


STOPS = [(n, upto) for n in range(len(NEXT)) for upto in ("staged", "journalled", "shown")]


@pytest.mark.parametrize("again", [False, True], ids=["one death", "two deaths"])
@pytest.mark.parametrize(("steps", "upto"), STOPS)
def test_a_driver_that_dies_between_two_steps_is_followed_by_one_that_goes_on(
    parquet: Job, steps: int, upto: str, again: bool
) -> None:
    life = parquet.life()
    for _ in range(steps):
        life.step()
    life.step(upto)
    life.close()
    for _ in range(again):
        life = parquet.life()
        for sink in FEEDS:  # what a start makes good is what the journal says
            assert parquet.found(sink) == rows_of(sink, life.showing.shown(sink))
        life.close()
    parquet.run()
    parquet.refuse_incomplete((steps, upto))


def every_step(kind: type[Kind], root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calm = Job(kind(root / "calm"))
    with killed_at(monkeypatch, -1) as steps:
        calm.run()
    calm.refuse_incomplete("calm")
    for step in range(0, len(steps), 1 if LONG else 17):
        job = Job(kind(root / f"{step}"))
        with killed_at(monkeypatch, step), pytest.raises(Killed):
            job.run()
        job.run()
        job.refuse_incomplete((step, steps[step]))


@pytest.mark.parametrize("kind", [InParquet, InDelta, ByFunction])
def test_killed_at_every_step(
    kind: type[Kind], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_step(kind, tmp_path, monkeypatch)


@needs_server
@pytest.mark.usefixtures("server")
def test_killed_at_every_step_of_postgres(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every_step(InPostgres, tmp_path, monkeypatch)


def test_a_start_keeps_what_is_shown_later_and_removes_what_nobody_named(parquet: Job) -> None:
    life = parquet.life()
    for _ in range(3):
        life.step()
    named = {f for r in life.records.values() if r.number in WAITED for f in r.staged["u"]}
    life.step("staged")  # of slice 2, but the journal does not know it
    life.close()
    for _ in range(2):
        life = parquet.life()
        life.close()
        left = list(parquet.kind.root.rglob("*.staged"))
        assert {Path(f).name for f in named} <= {p.name for p in left}
        # Beside them may lie what was staged late for the same slice; none is of a sink that is up.
        assert not [p for p in left if "/a/" in str(p)]
        assert not [p for p in left if "/b/" in str(p)]
    parquet.run()
    parquet.refuse_incomplete("")


def test_rows_without_files_are_kept_until_their_slice_is_complete(tmp_path: Path) -> None:
    memory = {name: ab.Memory() for name in FEEDS}
    life = Life(tmp_path / "ck", dict(memory))
    for _ in range(3):
        life.step()
    assert sorted(memory["a"].slices) == [1, 2, 3]
    assert sorted(memory["u"].slices) == sorted(memory["b"].slices) == [1]
    life.go_on()
    for name, sink in memory.items():
        found = Counter((r["k"], r["v"]) for r in sink.rows().to_pylist())
        assert found == rows_of(name, 5)
        assert list(sink.slices) == [1, 2, 3, 4, 5]
    assert not life.showing._kept
    life.close()


def test_rows_that_came_for_a_sink_that_waits_for_others_too_are_kept(tmp_path: Path) -> None:
    """A chain makes up for a slice before another one, to which the sink is bound as well."""
    memory = ab.Memory()
    memory.check(SCHEMA)
    holding = Holding(LocalStore(tmp_path), FINGERPRINT)
    showing = Showing({"u": memory}, holding, {"u": {"on", "off"}})
    showing.take_over(JOB)
    holding.write_head(WriteHead(None, None, (), Placement(1, {}, {}, ()), {}, {}, {}))
    waited = SliceRecord(1, "none", None, True, 0, 0, None, 0, 1, paused=("off", "on"))
    holding.write_slice(waited)
    showing.show(waited, ())

    def staged(chain: str) -> Staged:
        table = pa.table({"k": [1], "v": [CODE[chain]]}, SCHEMA)
        rows = memory.stage("u", table, 1, 1, f"part-{chain}-0")
        return Staged("u", rows.writer, rows.rows, data=rows.data, slice=1)

    for chain, sinks in (("on", set[str]()), ("off", {"u"})):
        for _ in range(2):  # a part of a recovery that is repeated stages the same rows again
            showing.show_late(waited, set(), (staged(chain),))
        holding.write_late(Late(1, (chain,)))
        showing.show_late(waited, sinks, (staged(chain),))
    assert memory.rows().column("v").to_pylist() == [CODE["off"], CODE["on"]]  # by writer
    holding.close()


def test_a_slice_that_has_rows_for_a_sink_is_not_skipped(parquet: Job) -> None:
    """Also after a restart. Slice 3 has rows of "on", whether "off" has any or not."""
    life = parquet.life()
    for _ in range(4):
        life.step()
    for again in range(2):
        if again:
            life.close()
            life = parquet.life()
        life.holding.behind.made_up(Late(3, ("off",)))
        with pytest.raises(
            InvariantError, match=r"'u' has not shown slice 3, and is to go on to 4"
        ):
            life.showing.show_late(record(4, {}), {"u"}, ())
    life.close()


def test_a_target_ahead_of_its_own_sink_is_refused(parquet: Job) -> None:
    """A copy of the directory has run; all targets are as far as the journal, but `b` is ahead."""
    life = parquet.life()
    for _ in range(5):
        life.step()
    life.close()
    root = parquet.kind.root
    shutil.copytree(root / "ck", root / "copy")
    life = parquet.life()
    for _ in range(2):
        life.step()
    life.close()
    shutil.rmtree(root / "ck")
    (root / "copy").rename(root / "ck")
    with pytest.raises(
        ConfigError, match=r"/b has slice 4 of this job, .* ends with slice 2: that"
    ):
        parquet.life()


# -- what a start refuses ----------------------------------------------------------------------


@pytest.fixture
def waiting(parquet: Job) -> Iterator[Job]:
    """Killed when "off" lacks the slices from 2 on."""
    life = parquet.life()
    for _ in range(3):
        life.step()
    life.close()
    yield parquet


def test_a_slice_that_is_shown_later_needs_its_sink(waiting: Job) -> None:
    root = waiting.kind.root
    sinks = {name: waiting.kind.sink(name) for name in FEEDS}
    with pytest.raises(ConfigError, match=r"slice 2 has rows for the sink 'u' that were not expo"):
        Life(root / "ck", {**sinks, "u": ab.Memory()})
    Life(root / "ck", {**sinks, "a": ab.Memory()}).close()
    waiting.run()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sinks": ["a", "b"]}, "sink 'u' is gone"),
        ({"sinks": ["a", "b", "u", "x"]}, "sink 'x' is new"),
        ({"chains": {"on": [], "other": []}}, "evaluated in other chains"),
        ({"parallelism": {"on": 2, "off": 1}}, "'on' had parallelism 1, now it has 2"),
        ({"feeds": {**FINGERPRINT["feeds"], "a": ["off"]}}, "sink 'a' gets its rows from other"),
        ({"log": {"0": "more"}}, "other rows go from the sources"),
    ],
)
def test_another_topology_is_refused_while_chains_wait(
    waiting: Job, change: dict[str, Any], reason: str
) -> None:
    store = LocalStore(waiting.kind.root / "ck")
    told = f"'off' could not go on: .*{reason}.*; .* gracefully"
    with pytest.raises(CheckpointMismatchError, match=told):
        Holding(store, {**FINGERPRINT, **change})
    waiting.run()
    waiting.refuse_incomplete("")


def test_what_feeds_a_sink_may_change_when_nothing_waits(waiting: Job) -> None:
    waiting.run()
    change = {"feeds": {**FINGERPRINT["feeds"], "a": ["off"]}}
    Holding(LocalStore(waiting.kind.root / "ck"), {**FINGERPRINT, **change}).close()
