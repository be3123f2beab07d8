"""When to scale (paper 000, section 6, TP_Manager): from measurements to decisions.

More partitions, when every partition of a chain used more of its core than `upper` in two
measurements in a row, or when slices take longer than their interval: then it is the chain that
takes the largest part of them. Fewer, when they used less than `lower` for long and the slices
would still have room. A new parallelism aims between the two limits, so that neither is met next.
A node has one core: more partitions than nodes are of no use, so it may ask for nodes, too.

After a change, and at a start, comes a cool-down. A change after which the job is worse, or that
has brought nothing, is taken back and not tried again for ten cool-downs, the next time for twenty,
and so on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anabranch.control.policies.autoscale import IN_A_ROW, Autoscale
from anabranch.control.policies.load import DRAIN_LIMIT, Measurement
from anabranch.model.ids import NodeId
from anabranch.model.placement import Placement
from anabranch.model.plan import Plan
from anabranch.model.scaling import Decision

ROOM = 0.7  # of the interval: what slices may take after something shrinks
WORSE = 1.25  # slices take more than this times as long, though hardly more rows come:
SAME_RATE = 1.1  # at most this times as many
NO_BETTER = 0.9  # the busiest partition uses this share of what it used before, or more
MATTERS = 0.1  # of the time of a slice: a chain with less is not what makes it late
HOLD = 10  # cool-downs until something is tried again that was taken back; doubles each time …
MAX_DOUBLINGS = 6  # … up to here
REMEMBERED = 20  # decisions, across restarts


@dataclass(frozen=True, slots=True)
class _Trial:
    """A change on trial: how it was before, to be compared with how it is after."""

    decision: Decision
    before: Mapping[str, int]
    measured: Measurement
    nodes: tuple[NodeId, ...]
    version: int | None = None  # of the placement with the change


class Autoscaler:
    """Ask it after every measurement, unless a change is on its way."""

    def __init__(
        self,
        plan: Plan,
        config: Autoscale,
        slice_interval_ms: int,
        memory: Mapping[str, Any] | None = None,
    ) -> None:
        self._plan = plan
        self._config = config
        self._interval_s = slice_interval_ms / 1000
        # What must wait: until when, and how often it had to.
        self._holds: dict[str, tuple[int, int]] = {}
        self._remembered: Mapping[str, tuple[int, int]] = (memory or {}).get("holds", {})
        self._ahead_ms = 0  # the wall clock, of the one that intervals are measured by
        self._decided: list[dict[str, Any]] = list((memory or {}).get("decisions", []))
        self._calm_until_ms: int | None = None
        self._version = -1
        self._trial: _Trial | None = None
        self._last = ""  # what was said last

    @property
    def memory(self) -> dict[str, Any]:
        """What the next driver should know."""
        holds = {w: (until + self._ahead_ms, n) for w, (until, n) in self._holds.items()}
        return {"holds": holds, "decisions": self._decided[-REMEMBERED:]}

    def _remember(self, now_ms: int) -> None:
        """What earlier runs noted by the wall clock, which may have been set since: nothing waits
        for longer than it would have at first."""
        for what, (until, times) in self._remembered.items():
            longest = now_ms + self._hold_ms(times - 1)
            self._holds[what] = min(until - self._ahead_ms, longest), times
        self._remembered = {}

    def decide(
        self,
        measured: Sequence[Measurement],
        placement: Placement,
        nodes: Sequence[NodeId],
        now_ms: int,
        wall_ms: int,
    ) -> Decision | None:
        """What to do now, if anything. `measured` is all under this placement, the newest last;
        what others see later carries the time of the wall clock."""
        self._ahead_ms = wall_ms - now_ms
        self._remember(now_ms)
        if placement.version != self._version:
            self._version = placement.version
            self._rest(now_ms)
        decision = self._judge(measured, placement, nodes, now_ms)
        calm = self._calm_until_ms is not None and now_ms < self._calm_until_ms
        if decision is None and not calm and len(measured) >= IN_A_ROW:
            decision = self._change(measured, placement, nodes, now_ms)
        if decision is None:
            return None
        decision = replace(decision, dry_run=self._config.dry_run, at_ms=wall_ms)
        if decision.what == self._last and (decision.dry_run or decision.kind == "none"):
            return None  # said already
        self._last = decision.what
        self._decided.append(decision.to_json())
        self._rest(now_ms)
        if decision.parallelism and decision.kind != "back" and not decision.dry_run:
            before = {c: len(placement.partitions(c)) for c in decision.parallelism}
            self._trial = _Trial(decision, before, measured[-1], tuple(nodes))
        return decision

    def _rest(self, now_ms: int) -> None:
        self._calm_until_ms = now_ms + self._config.ms("cool_down")

    # -- is it better after a change? ------------------------------------------------------------

    def _judge(
        self,
        measured: Sequence[Measurement],
        placement: Placement,
        nodes: Sequence[NodeId],
        now_ms: int,
    ) -> Decision | None:
        """Take back what has made the job worse. The first measurement after a change counts as
        warming up; nodes that come or go make the comparison void."""
        trial = self._trial
        if trial is None:
            return None
        wanted = trial.decision.parallelism
        if trial.version is None:
            if any(len(placement.partitions(c)) != n for c, n in wanted.items()):
                return None  # not made yet
            trial = self._trial = replace(trial, version=placement.version)
        if trial.version != placement.version or set(trial.nodes) != set(nodes):
            self._trial = None
            return None
        if len(measured) < 1 + IN_A_ROW:
            return None
        self._trial = None
        why = self._worse(trial, list(measured)[-IN_A_ROW:])
        for chain in wanted:
            if why:
                self._hold(f"{trial.decision.kind} {chain}", now_ms)
            else:
                self._holds.pop(f"{trial.decision.kind} {chain}", None)
        if not why:
            return None
        what = f"back again: {self._said(placement, trial.before)}"
        return Decision(now_ms, "back", what, why, trial.before)

    def _worse(self, trial: _Trial, after: Sequence[Measurement]) -> str:
        """Why the change was a bad one; "" if it was not, or if more rows came."""
        before, newest = trial.measured, after[-1]
        if any(m.rate > SAME_RATE * before.rate for m in after):
            return ""
        slices = (
            f"slices take {newest.batch_s:.2f} s at {newest.rate:,.0f} rows/s after it, and took "
            f"{before.batch_s:.2f} s at {before.rate:,.0f} rows/s before"
        )
        if trial.decision.kind == "down":
            late = all(m.batch_s > self._interval_s for m in after)
            return f"{slices} (interval {self._interval_s:.2f} s)" if late else ""
        if all(m.batch_s > WORSE * before.batch_s for m in after):
            return slices
        was = max(self._busiest(before, c) for c in trial.before)
        still = min(max(self._busiest(m, c) for c in trial.before) for m in after)
        fewer = any(m.rate * SAME_RATE < before.rate for m in after)
        if still > self._config.upper and still >= NO_BETTER * was and not fewer:
            return (
                f"it has not helped: the busiest partition uses {still:.0%} of a core, and used "
                f"{was:.0%} before (a single key may be that busy)"
            )
        return ""

    @staticmethod
    def _busiest(measurement: Measurement, chain: str) -> float:
        return max((s for p, s in measurement.cpu.items() if p.chain == chain), default=0.0)

    def _hold(self, what: str, now_ms: int) -> None:
        _, times = self._holds.get(what, (0, 0))
        self._holds[what] = now_ms + self._hold_ms(times), times + 1

    def _hold_ms(self, times: int) -> int:
        """How long, given how often it had to wait before."""
        cool_downs: int = HOLD * 2 ** min(times, MAX_DOUBLINGS)
        return cool_downs * self._config.ms("cool_down")

    def _held(self, what: str, now_ms: int) -> bool:
        return now_ms < self._holds.get(what, (0, 0))[0]

    # -- what would be better now? ---------------------------------------------------------------

    def _change(
        self,
        measured: Sequence[Measurement],
        placement: Placement,
        nodes: Sequence[NodeId],
        now_ms: int,
    ) -> Decision | None:
        newest = list(measured)[-IN_A_ROW:]
        sizes = {c.name: len(placement.partitions(c.name)) for c in self._plan.node_chains}
        return (
            self._up(newest, placement, sizes, nodes, now_ms)
            or self._down(list(measured), placement, sizes, nodes, now_ms)
            or self._drain(list(measured), nodes, now_ms)
        )

    def _up(
        self,
        newest: Sequence[Measurement],
        placement: Placement,
        sizes: Mapping[str, int],
        nodes: Sequence[NodeId],
        now_ms: int,
    ) -> Decision | None:
        wanted, why = self._hot(newest, sizes, now_ms)
        if not wanted:
            wanted, why = self._late(newest, placement, sizes, nodes, now_ms)
        full = min(sum(m.nodes.values()) / len(nodes) for m in newest)
        if full > self._config.upper:
            why = why or f"{len(nodes)} nodes are busy at {full:.0%} (limit {self._limit})"
        if not why:
            return None
        more = self._more_nodes(wanted, full, nodes, now_ms)
        room = len(nodes) + more
        made = {c: min(n, room) for c, n in wanted.items() if min(n, room) > sizes[c]}
        if not made and not more:
            bounds = self._bounds(wanted, sizes, nodes)
            return Decision(now_ms, "none", "nothing can be done", f"{why}; {bounds}")
        if more:
            self._hold(f"more than {len(nodes)} nodes", now_ms)
        return Decision(now_ms, "up", self._said(placement, made, more), why, made, more)

    def _hot(
        self, newest: Sequence[Measurement], sizes: Mapping[str, int], now_ms: int
    ) -> tuple[dict[str, int], str]:
        """Chains all of whose partitions, on average, are above the limit."""
        wanted, reasons = {}, []
        for chain, size in sizes.items():
            shares = [m.of_chain(chain) / size for m in newest]
            if min(shares) <= self._config.upper or self._held(f"up {chain}", now_ms):
                continue
            cores = sum(m.of_chain(chain) for m in newest) / len(newest)
            wanted[chain] = self._bounded(math.ceil(cores / self._config.target))
            used = " and ".join(f"{s:.0%}" for s in shares)
            reasons.append(f"the partitions of {chain} used {used} of a core (limit {self._limit})")
        return wanted, "; ".join(reasons)

    def _late(
        self,
        newest: Sequence[Measurement],
        placement: Placement,
        sizes: Mapping[str, int],
        nodes: Sequence[NodeId],
        now_ms: int,
    ) -> tuple[dict[str, int], str]:
        """The chain that takes most of slices which take longer than their interval."""
        if any(m.batch_s <= self._interval_s for m in newest):
            return {}, ""
        first, last = newest[0], newest[-1]
        took = " and ".join(f"{m.batch_s:.2f} s" for m in newest)
        why = f"slices took {took} of an interval of {self._interval_s:.2f} s"
        if last.rows > SAME_RATE * first.rows:
            why += f" and batches grew from {first.rows:,.0f} to {last.rows:,.0f} rows"
        parts = {c: self._path_s(last, placement, c) for c in sizes}
        large = {c: s for c, s in parts.items() if s >= MATTERS * last.batch_s}
        if not large:
            return {}, f"{why}, but operators take little of it (the rest is reading and Spark)"
        free = [c for c in large if not self._held(f"up {c}", now_ms)]
        if not free:
            return {}, f"{why}, but more partitions of {', '.join(large)} did not help before"
        chain = max(free, key=lambda c: parts[c])
        why += f"; {chain} takes {parts[chain]:.2f} s of them"
        behind = last.batch_s / (ROOM * self._interval_s)
        size = min(sizes[chain], len(nodes))  # what counts is on how many nodes it runs
        return {chain: self._bounded(max(size + 1, math.ceil(size * min(2.0, behind))))}, why

    def _more_nodes(
        self, wanted: Mapping[str, int], full: float, nodes: Sequence[NodeId], now_ms: int
    ) -> int:
        most = self._config.max_nodes
        if most is None or self._held(f"more than {len(nodes)} nodes", now_ms):
            return 0
        by_load = math.ceil(full * len(nodes) / self._config.target)
        needed = max([by_load, *wanted.values()])
        return max(0, min(most, needed) - len(nodes))

    def _down(
        self,
        measured: Sequence[Measurement],
        placement: Placement,
        sizes: Mapping[str, int],
        nodes: Sequence[NodeId],
        now_ms: int,
    ) -> Decision | None:
        count = self._config.measurements("down_after")
        if len(measured) < count:
            return None
        quiet = measured[-count:]
        slowest = max(quiet, key=lambda m: m.batch_s)
        predicted, made, reasons = slowest.batch_s, dict[str, int](), []
        for chain, size in sizes.items():
            cores = max(m.of_chain(chain) for m in quiet)
            if cores / size >= self._config.lower or self._held(f"down {chain}", now_ms):
                continue
            path = self._path_s(slowest, placement, chain)
            least = self._bounded(max(1, math.ceil(cores / self._config.target)))
            for fewer in range(least, size):
                slower = path * (min(size, len(nodes)) / min(fewer, len(nodes)) - 1)
                if predicted + slower <= ROOM * self._interval_s:
                    predicted += slower
                    made[chain] = fewer
                    reasons.append(f"those of {chain} {cores / size:.0%}")
                    break
        if not made:
            return None
        seconds = sum(m.seconds for m in quiet)
        why = (
            f"for {seconds:.0f} s the partitions used little of a core (limit "
            f"{self._config.lower:.0%}): {', '.join(reasons)}; slices, at most "
            f"{slowest.batch_s:.2f} s, would take {predicted:.2f} s of {self._interval_s:.2f} s"
        )
        return Decision(now_ms, "down", self._said(placement, made), why, made)

    def _drain(
        self, measured: Sequence[Measurement], nodes: Sequence[NodeId], now_ms: int
    ) -> Decision | None:
        config, count = self._config, self._config.measurements("drain_after")
        left = len(nodes) - 1
        if config.max_nodes is None or left < config.min_nodes or len(measured) < count:
            return None
        idle = measured[-count:]
        total = max(sum(m.nodes.values()) for m in idle)
        if total / len(nodes) >= config.lower or total / left > min(config.target, DRAIN_LIMIT):
            return None
        slowest = max(m.batch_s for m in idle)
        if slowest * len(nodes) / left > ROOM * self._interval_s:
            return None
        node = min(nodes, key=lambda n: idle[-1].nodes.get(n, 0.0))
        seconds = sum(m.seconds for m in idle)
        why = (
            f"for {seconds:.0f} s the {len(nodes)} nodes were busy at {total / len(nodes):.0%} or "
            f"less (limit {config.lower:.0%})"
        )
        return Decision(now_ms, "down", f"drain node {node}", why, drain=node)

    def _path_s(self, measured: Measurement, placement: Placement, chain: str) -> float:
        """The CPU time of a chain in a batch on the node where it takes longest: its wave."""
        by_node: dict[NodeId, float] = {}
        for partition in placement.partitions(chain):
            node = placement.owners[partition].node
            by_node[node] = by_node.get(node, 0.0) + measured.cpu.get(partition, 0.0)
        return max(by_node.values(), default=0.0) * measured.seconds / max(1, measured.batches)

    def _bounded(self, parallelism: int) -> int:
        most = self._plan.graph.key_groups
        if self._config.max_parallelism is not None:
            most = min(most, self._config.max_parallelism)
        return max(self._config.min_parallelism, min(most, parallelism))

    @property
    def _limit(self) -> str:
        return f"{self._config.upper:.0%}"

    def _bounds(
        self, wanted: Mapping[str, int], sizes: Mapping[str, int], nodes: Sequence[NodeId]
    ) -> str:
        """Why nothing can be done about it."""
        config = self._config
        if any(n <= sizes[c] < len(nodes) for c, n in wanted.items()):
            return f"max_parallelism is {config.max_parallelism}"
        said = f"there are {len(nodes)} nodes, and more partitions than nodes are of no use"
        if config.max_nodes is None:
            return f"{said}; with max_nodes it could ask for more"
        if len(nodes) >= config.max_nodes:
            return f"{said}; max_nodes is {config.max_nodes}"
        return f"{said}; more were asked for"

    @staticmethod
    def _said(placement: Placement, made: Mapping[str, int], more: int = 0) -> str:
        parts: Iterable[str] = (
            f"{c} from {len(placement.partitions(c))} to {n} partitions" for c, n in made.items()
        )
        nodes = [f"{more} more node{'s' if more > 1 else ''}"] if more else []
        return "; ".join([*parts, *nodes])
