"""What is told of queries: which are live, which wait and why, how late each is, when it is back.

It decides nothing. What waits and what comes back is read off the controller after every event;
what a sink has shown, from the commands that were carried out: a query is live again when its sink
has shown all that it owed, not when that was computed. The log has a line per change, never one
per part of a replay.

How long a replay will take is learned from the replay itself: how fast what is left became less so
far, with the slices that ran and the rows that came in between.
"""

from __future__ import annotations

import logging
import math
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from anabranch.control.controller import Controller, Phase
from anabranch.control.policies.capacity import Return
from anabranch.control.policies.shortage import FULL, KnownLoads
from anabranch.driver.clock import Clock
from anabranch.model.commands import Command, ExposeLate, ExposeSlice, RecoverPartitions
from anabranch.model.placement import partitions_of
from anabranch.model.plan import Plan, Query
from anabranch.model.slices import SliceRecord

log = logging.getLogger("anabranch")
LIVE, CATCHING_UP, WAITING = "live", "catching up", "waiting"
USUAL_KEPT = 100  # slices, the newest: what a sink's latency usually is
USUAL_LEAST = 5  # before that many, nothing is usual
PARTS = 10  # of a replay, the newest: how fast it goes on
NAMED = 8  # queries in a line of the log


@dataclass(frozen=True, slots=True)
class QueryStatus:
    """A sink, with all that feeds it. It is live, or its rows come later: it is catching up, or
    waits for nodes. `seconds_behind` is the age of the first slice that it has not shown; 0, live.
    `relative_latency` is that of the newest slice with rows that it has shown, from the slice's
    beginning to then, as a multiple of what it is while nothing is wrong."""

    sink: str
    priority: int
    state: str = LIVE  # or catching up, or waiting
    slices_behind: int = 0
    seconds_behind: float = 0.0
    estimate_s: float | None = None  # until it is live, once that is known
    relative_latency: float | None = None  # None: not known yet


@dataclass(frozen=True, slots=True)
class CapacityStatus:
    """What all partitions need to keep up, and what the nodes have for them, in nodes' worth."""

    demand: float
    capacity: float


@dataclass(frozen=True, slots=True)
class _Seen:
    """A query as it was after the newest event."""

    state: str = LIVE
    slices: int = 0  # that it has not shown
    since_ms: int | None = None  # processing time of the first of them
    pace: tuple[float, float] | None = None  # `_Pace.known`

    def seconds(self, wall_ms: int) -> float:
        return 0.0 if self.since_ms is None else max(0.0, (wall_ms - self.since_ms) / 1000)

    def estimate_s(self, now_s: float) -> float | None:
        return None if self.pace is None else self.pace[1] * max(0.0, now_s - self.pace[0])


class Queries:
    """Of one run; made before its first event. One thread at a time writes it, any may read."""

    def __init__(self, plan: Plan, controller: Controller, clock: Clock) -> None:
        self._plan = plan
        self._queries = plan.queries
        self._controller = controller
        self._clock = clock
        self._ahead_ms = 0  # the wall clock, of the one that goes on evenly, with the newest event
        self._seen: Mapping[str, _Seen] = {q.sink: _Seen() for q in self._queries}
        self._due: dict[str, deque[int]] = {}  # by sink: slices that are to be shown late, at once
        self._late_since: dict[str, float] = {}
        self._latency = {q.sink: _Latency() for q in self._queries}
        self._disturbed = False  # has something been restored since the newest slice?
        self._pace = _Pace()
        self._choice: Return | None = None
        self._told: tuple[str, int] | None = None  # what is next, and on how many nodes
        self._measured: object = None
        self.capacity: CapacityStatus | None = None  # None: nothing is known
        self.partial_plan: str | None = None  # the newest, in words; None: nothing waits

    @property
    def statuses(self) -> tuple[QueryStatus, ...]:
        """Of all queries, as of now."""
        wall_ms, now_s, seen = self._wall_ms, self._clock.seconds(), self._seen
        return tuple(
            QueryStatus(
                q.sink,
                q.priority,
                at.state,
                at.slices,
                at.seconds(wall_ms),
                at.estimate_s(now_s),
                self._latency[q.sink].relative,
            )
            for q in self._queries
            for at in [seen[q.sink]]
        )

    @property
    def all_live(self) -> bool:
        return all(at.state == LIVE for at in self._seen.values())

    def sinks_below(self, chains: Collection[str]) -> tuple[str, ...]:
        """Sinks to which at least one of these chains gives rows."""
        return tuple(s for s, by in self._plan.evaluating.items() if not by.isdisjoint(chains))

    # -- what happens --------------------------------------------------------------------------

    @property
    def _wall_ms(self) -> int:
        return self._clock.now_ms() + self._ahead_ms

    def handled(self, commands: Sequence[Command], wall_ms: int) -> None:
        """The controller has handled an event, which causes these commands."""
        self._ahead_ms = wall_ms - self._clock.now_ms()
        for command in commands:
            if isinstance(command, ExposeLate):
                for sink in sorted(command.sinks & self._seen.keys()):
                    self._due.setdefault(sink, deque()).append(command.record.number)
        self._measure()
        if self._controller.waiting or self._due or not self.all_live:
            self._look()

    def done(self, command: Command) -> None:
        """A command has been carried out."""
        match command:
            case RecoverPartitions():
                self._disturbed = True
            case ExposeSlice():
                record, feeds = command.record, self._plan.evaluating
                shown = [
                    s for s in self._seen if feeds.get(s, frozenset()).isdisjoint(record.paused)
                ]
                self._note(record, shown, usual=not (record.paused or self._disturbed))
                self._disturbed = False
            case ExposeLate():
                self._note(command.record, command.sinks & self._seen.keys())
                due = command.sinks & self._due.keys()
                for sink in due:
                    self._due[sink].popleft()
                done = [s for s in due if not self._due[s]]
                for sink in done:
                    del self._due[sink]
                if done:
                    self._look()
            case _:
                pass

    def _note(self, record: SliceRecord, sinks: Iterable[str], usual: bool = False) -> None:
        if any(record.rows.values()):
            took_s = max(0.0, (self._wall_ms - record.processing_ms) / 1000)
            for sink in sinks:
                self._latency[sink].note(took_s, usual)

    def _measure(self) -> None:
        """What all partitions take, and what the nodes have, where that may be new."""
        controller, costs = self._controller, self._controller.ledgers.costs
        placement = controller.placement
        nodes = [n for n in controller.nodes if n not in controller.draining]
        at = (controller.newest, nodes, placement)
        if placement is None or at == self._measured:
            return
        self._measured, groups = at, placement.groups
        known = KnownLoads(costs.costs(placement).loads)
        if known.mean:
            every = [p for c in self._plan.node_chains for p in partitions_of(groups, c.name)]
            free = max(0.0, FULL - costs.source_share(max(1, len(nodes))))
            self.capacity = CapacityStatus(math.fsum(map(known.of, every)), len(nodes) * free)

    def _look(self) -> None:
        before = self._seen
        self._pace.look(self._controller, self._clock.seconds())
        pace = self._pace.known(self._records)
        self._seen = {q.sink: self._seen_of(q, pace) for q in self._queries}
        self.partial_plan = None if self.all_live else _with_next(self._why, self._next_up)
        self._tell(
            {s: at.state for s, at in before.items()},
            {s: at.state for s, at in self._seen.items()},
        )

    @property
    def _records(self) -> Sequence[SliceRecord]:
        return self._controller.ledgers.slices.records

    def _seen_of(self, query: Query, pace: tuple[float, float] | None) -> _Seen:
        ledgers, due = self._controller.ledgers, self._due.get(query.sink)
        lacks, records = query.chains & ledgers.behind.chains, self._records
        state = self._state(lacks, bool(due))
        if state == LIVE:
            return _Seen()
        newest = ledgers.newest_slice
        first = due[0] if due else ledgers.behind.shown(query.sink, newest) + 1
        at = bisect_left(records, first, key=lambda r: r.number)
        since_ms = records[at].processing_ms if at < len(records) else None
        coming = lacks and lacks <= self._controller.comeback.coming
        return _Seen(state, max(0, newest + 1 - first), since_ms, pace if coming else None)

    def _state(self, lacks: frozenset[str], due: bool) -> str:
        comeback = self._controller.comeback
        if not lacks:
            return CATCHING_UP if due else LIVE
        if comeback.absent:  # then all partitions go back together
            return CATCHING_UP if self._controller.phase is Phase.RECOVERING else WAITING
        chosen = comeback.choice.chains if comeback.choice and not comeback.awaiting else ()
        return CATCHING_UP if lacks <= frozenset(chosen) else WAITING

    # -- the log -------------------------------------------------------------------------------

    def _tell(self, before: Mapping[str, str], now: Mapping[str, str]) -> None:
        now_s, wall_ms = self._clock.seconds(), self._wall_ms
        late_s = {s: at.seconds(wall_ms) for s, at in self._seen.items()}
        for sink, state in now.items():
            if state != LIVE:
                self._late_since.setdefault(sink, now_s - late_s[sink])
            elif before[sink] != LIVE:
                since_s = self._late_since.pop(sink)
                log.info("query %s is live again, after %.1f s", sink, now_s - since_s)
        stop = [s for s, state in now.items() if _stops(before[s], state)]
        come = [s for s, state in now.items() if state == CATCHING_UP != before[s]]
        waits, news = any(now[s] == WAITING for s in stop), self._plan_is_news()
        why, next_up = self._why, self._next_up
        if waits:
            said = why if come else _with_next(why, next_up)
            log.warning("%s: %s", _saying(stop, "waits", "wait"), said)
        if come:
            said = _with_next("" if waits else f": {why}", next_up)
            log.info("%s%s", _saying(come, "comes back now", "come back now"), said)
        elif news and not stop and WAITING in now.values() and CATCHING_UP not in now.values():
            log.info("no query comes back yet: %s", _with_next(why, next_up))

    def _plan_is_news(self) -> bool:
        """Is there a partial plan that says something else than the one before?"""
        choice, next_up = self._controller.comeback.choice, self._next_up
        told = next_up[0] if next_up else "", len(self._controller.nodes)
        news = choice is not self._choice and told != self._told
        if choice is not self._choice:
            self._choice, self._told = choice, told
        return news

    @property
    def _why(self) -> str:
        """Of the newest partial plan."""
        comeback = self._controller.comeback
        if comeback.awaiting:
            return "there is no node"
        if comeback.absent or comeback.choice is None:
            return "everything comes back at once"
        return "the job ends" if comeback.stops else comeback.choice.why

    @property
    def _next_up(self) -> tuple[str, float] | None:
        comeback = self._controller.comeback
        if comeback.absent or comeback.awaiting or comeback.choice is None:
            return None
        next_up = comeback.choice.next_up
        return (next_up.query, next_up.missing) if next_up else None


class _Latency:
    """Of one sink: seconds from the beginning of a slice until it was shown."""

    def __init__(self) -> None:
        self._newest: float | None = None
        self._usual: deque[float] = deque(maxlen=USUAL_KEPT)

    def note(self, seconds: float, usual: bool) -> None:
        self._newest = seconds
        if usual:
            self._usual.append(seconds)

    @property
    def relative(self) -> float | None:
        usual = list(self._usual)
        median = statistics.median(usual) if len(usual) >= USUAL_LEAST else 0.0
        return self._newest / median if self._newest is not None and median else None


class _Pace:
    """How fast the replay in hand comes nearer to the newest slice."""

    def __init__(self) -> None:
        self._version = 0  # of the placement that it began with
        self._at = 0  # the slice it is at
        self._parts: deque[tuple[float, int]] = deque(maxlen=PARTS)  # began when, and what was left

    def look(self, controller: Controller, now_s: float) -> None:
        plan, frontier = controller.comeback.running, controller.frontier
        if plan is None:
            self._parts.clear()
            return
        if plan.placement.version != self._version:
            self._version, self._at = plan.placement.version, 0
            self._parts.clear()
        at = min((frontier.get(p, plan.first) for p in plan.restored), default=plan.first)
        if at != self._at:
            self._at = at
            self._parts.append((now_s, self._left(controller.ledgers.slices.records)))

    def known(self, records: Sequence[SliceRecord]) -> tuple[float, float] | None:
        """Since when it is measured, and how much is left, as a multiple of what was gained since
        then: so long it takes from now on. None: not known yet, or it does not come nearer."""
        if len(self._parts) < 2:
            return None
        # With the first part state is restored, so it counts only as long as there is one other.
        (began_s, much), left = self._parts[min(1, len(self._parts) - 2)], self._left(records)
        return None if left >= much else (began_s, left / (much - left))

    def _left(self, records: Sequence[SliceRecord]) -> int:
        """Rows, and slices, for those cost something too."""
        at = bisect_left(records, self._at, key=lambda r: r.number)
        return sum(1 + sum(r.rows.values()) for r in records[at:])


def _stops(before: str, now: str) -> bool:
    return (before == LIVE and now != LIVE) or (before == CATCHING_UP and now == WAITING)


def _with_next(why: str, next_up: tuple[str, float] | None) -> str:
    if next_up is None:
        return why
    query, missing = next_up
    lacks = f", which lacks {missing:.2f} of a node" if missing >= 0.005 else ""
    return f"{why}; next is {query}{lacks}"


def _saying(sinks: Sequence[str], one: str, many: str) -> str:
    if len(sinks) == 1:
        return f"query {sinks[0]} {one}"
    more = f" and {len(sinks) - NAMED} others" if len(sinks) > NAMED else ""
    return f"queries {', '.join(sinks[:NAMED])}{more} {many}"
