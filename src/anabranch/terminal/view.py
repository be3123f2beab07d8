"""The live view of a running job: tables in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from anabranch.driver.clock import now_ms, wall_ms
from anabranch.driver.queries import LIVE, CapacityStatus, QueryStatus
from anabranch.model.plan import Plan
from anabranch.terminal.meter import Meter

REFRESHES_PER_S = 4
LINE_EVERY_S = 5.0  # without a terminal
EVENTS_SHOWN = 3  # of each kind
QUERIES_SHOWN = 20  # those that are live last
STYLES = {"waiting": "bold yellow", "catching up": "yellow"}  # of states of queries


class View:
    """Shows a meter; `refresh` as often as you like, it draws when there is something new."""

    def __init__(self, console: Console, plan: Plan, meter: Meter) -> None:
        self._console = console
        self._plan = plan
        self._meter = meter
        self._live: Live | None = None
        self._line_due = 0.0
        self._printed_slice = 0
        self._printed = [0, 0, 0]

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Keep the view on the screen; it stays there, as it was last, afterwards."""
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, auto_refresh=False) as self._live:
            yield
        self._live = None

    def refresh(self) -> None:
        if self._live is not None:
            self._live.update(tables(self._plan, self._meter, now_ms(), wall_ms()), refresh=True)
            return
        meter = self._meter
        kinds: list[Sequence[object]] = [meter.decisions, meter.adjustments, meter.recoveries]
        for i, events in enumerate(kinds):
            for event in events[self._printed[i] :]:
                self._printed[i] += 1
                self._console.print(escape(str(event)), soft_wrap=True)
        newest = self._meter.newest
        if newest is None or newest.slice == self._printed_slice:
            return
        if time.monotonic() >= self._line_due:
            self._line_due = time.monotonic() + LINE_EVERY_S
            self._printed_slice = newest.slice
            self._console.print(line(self._meter, now_ms(), wall_ms()), soft_wrap=True)


def line(meter: Meter, now_ms: int, wall_ms: int) -> str:
    """The state of the job in one line."""
    newest, latency = meter.newest, meter.latency()
    if newest is None:
        return "waiting for the first rows"
    parts = [f"slice {newest.slice}", f"{meter.rate(now_ms):,.0f} rows/s"]
    if latency is not None:
        parts.append(f"latency {seconds(latency.last)} (median {seconds(latency.median)})")
    parts.append(f"state {newest.state_rows:,} rows, {megabytes(newest.state_bytes)}")
    lag = meter.lag_s(wall_ms)
    if lag is not None:
        parts.append(f"lag {seconds(lag)}")
    roles = Counter(role for role in meter.nodes.values() if role)
    idle = ", ".join(f"{count} {role}" for role, count in sorted(roles.items()))
    parts.append(f"{len(_nodes_of(meter))} nodes" + (f" ({idle})" if idle else ""))
    late = Counter(q.state for q in meter.queries if q.state != LIVE)
    if late:
        told = ", ".join(f"{count} {state}" for state, count in sorted(late.items()))
        parts.append(f"{len(meter.queries)} queries ({told})")
    return " · ".join(parts)


def tables(plan: Plan, meter: Meter, now_ms: int, wall_ms: int) -> RenderableType:
    """Everything: headline, operators, nodes, and queries where there is something to say."""
    if meter.newest is None:
        return Text(f"{plan.graph.name}: waiting for the first rows …")
    parts = [_headline(plan, meter, now_ms, wall_ms), _operators(plan, meter), _nodes(meter)]
    parts += queries(meter.queries, meter.capacity, meter.partial_plan, QUERIES_SHOWN)
    events = _events(meter)
    if events:
        parts.append(events)
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts))


def _headline(plan: Plan, meter: Meter, now_ms: int, wall_ms: int) -> RenderableType:
    newest, latency, lag = meter.newest, meter.latency(), meter.lag_s(wall_ms)
    assert newest is not None
    grid = Table.grid(padding=(0, 3))
    grid.add_row(
        Text(plan.graph.name, style="bold"),
        f"slice {newest.slice}",
        Text(f"{meter.rate(now_ms):,.0f} rows/s", style="bold green"),
        f"{meter.rows:,} rows",
    )
    if latency is not None:
        grid.add_row(
            "slice latency",
            f"last {seconds(latency.last)}",
            f"median {seconds(latency.median)}",
            f"p99 {seconds(latency.p99)}",
        )
    if newest.watermark_us is not None and lag is not None:
        when = datetime.fromtimestamp(newest.watermark_us / 1e6, UTC)
        late = f"{meter.late_rows:,} late rows"
        grid.add_row("watermark", f"{when:%Y-%m-%d %H:%M:%S}Z", f"lag {seconds(lag)}", late)
    kept = f"{megabytes(newest.backup_bytes)} of backups"
    if newest.checkpoint_age_s is None:
        grid.add_row("checkpoint", "none yet in this run", kept)
    else:
        age = f"{seconds(newest.checkpoint_age_s)} ago"
        grid.add_row("checkpoint", f"slice {newest.checkpoint_slice}", age, kept)
    return grid


def _events(meter: Meter) -> Text:
    """The newest decisions, adjustments and recoveries, and what is going on."""
    lines = [(f"{d}\n", "cyan") for d in meter.decisions[-EVENTS_SHOWN:]]
    lines += [(f"{a}\n", "green") for a in meter.adjustments[-EVENTS_SHOWN:]]
    lines += [(f"{r}\n", "yellow") for r in meter.recoveries[-EVENTS_SHOWN:]]
    if meter.recovering:
        lines.append(("recovering …\n", "bold yellow"))
    elif meter.adjusting:
        lines.append(("adjusting …\n", "bold green"))
    return Text.assemble(*lines)


def _operators(plan: Plan, meter: Meter) -> Table:
    """In topological order; state is shown with the first operator of the chain that holds it."""
    newest = meter.newest
    assert newest is not None
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("operator")
    for title in ("rows in slice", "rows in all", "state rows", "state size"):
        table.add_column(title, justify="right")
    for op in plan.graph.operators:
        if op.name not in meter.rows_by_operator:
            continue  # a sink makes no rows
        state = newest.state_by_operator.get(op.name)
        table.add_row(
            op.name,
            f"{newest.rows_by_operator.get(op.name, 0):,}",
            f"{meter.rows_by_operator[op.name]:,}",
            f"{state[0]:,}" if state else "",
            megabytes(state[1]) if state else "",
        )
    table.add_row("sinks", f"{newest.rows_to_sinks:,}", f"{meter.rows_to_sinks:,}", "", "")
    if meter.totals.dead:
        newly, all_dead = (sum(d.values()) for d in (newest.dead_by_operator, meter.totals.dead))
        table.add_row(Text("dead letters", style="yellow"), f"{newly:,}", f"{all_dead:,}", "", "")
    return table


def _nodes(meter: Meter) -> Table:
    assert meter.newest is not None
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for title in ("node", "pid", "memory", "partitions", ""):
        table.add_column(title, justify="right")
    for node in _nodes_of(meter):
        role = meter.nodes.get(node, "")
        if node in meter.newest.nodes:
            pid, memory, partitions = meter.newest.nodes[node]
            table.add_row(node, str(pid), megabytes(memory), str(partitions), role)
        else:
            table.add_row(node, "", "", "0", role)
    return table


def queries(
    found: Sequence[QueryStatus],
    capacity: CapacityStatus | None,
    partial_plan: str | None,
    most: int | None = None,
) -> list[RenderableType]:
    """A table of queries, or of `most` of them, and what is said of them all; nothing for a job of
    one that is live."""
    late = any(q.state != LIVE for q in found)
    if len(found) < 2 and not late:
        return []
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("query")
    table.add_column("priority", justify="right")
    table.add_column("state")
    for title in ("behind", "live in") if late else ():
        table.add_column(title, justify="right")
    if most is not None and len(found) > most:
        shown = sorted(found, key=lambda q: (q.state == LIVE, -q.priority))[:most]
    else:
        shown = list(found)
    for query in shown:
        cells: list[RenderableType] = [
            escape(query.sink),
            str(query.priority),
            Text(query.state, STYLES.get(query.state, "")),
        ]
        if late:
            behind = "" if query.state == LIVE else seconds(query.seconds_behind)
            estimate = "" if query.estimate_s is None else f"~{seconds(query.estimate_s)}"
            cells += [behind, estimate]
        table.add_row(*cells)
    others = len(found) - len(shown)
    said = [f"and {others} others"] if others else []
    if capacity is not None:
        said.append(f"needed: {capacity.demand:.2f} nodes; there are {capacity.capacity:.2f}")
    if partial_plan is not None:
        said.append(partial_plan)
    return [table, *([Text("\n".join(said))] if said else [])]


def _nodes_of(meter: Meter) -> list[str]:
    """Those that ran the newest slice, and all others there are."""
    assert meter.newest is not None
    return list(dict.fromkeys([*meter.newest.nodes, *meter.nodes]))


def seconds(value: float) -> str:
    """A span of time as a person says it."""
    if abs(value) < 1:
        return f"{value * 1e3:.0f} ms"
    if abs(value) < 120:
        return f"{value:.1f} s"
    if abs(value) < 7_200:
        return f"{value / 60:.0f} min"
    return f"{value / 3_600:.0f} h" if abs(value) < 172_800 else f"{value / 86_400:.0f} days"


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
