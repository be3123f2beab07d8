"""`anabranch plan balance FILE`: which keys change their task, so that all carry the same load.

The file is CSV with a header; one line per key:

    key,count,state,task,copies
    alice,120,4096,0,2
    bob,3,64,,1

`count` is how often the key occurred in the last interval, `state` the size of its state, `task`
the task it is active on now (empty, or the column absent: where the hash puts it), `copies` how
many copies it must have, the active one included (1 unless given). The new routing table is
written beside the picture, as CSV: key,active,replicas.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from anabranch.cli.drawing import ACCENT, FAINT, INK, picture, text, text_width
from anabranch.errors import PlanningError
from anabranch.planning.balance.baselines import plan_min_table, plan_mixed, plan_readj
from anabranch.planning.balance.ftlb import plan_ftlb
from anabranch.planning.balance.load import (
    BalancePlan,
    BalanceProblem,
    Limits,
    Planner,
    key_costs,
)
from anabranch.planning.balance.routing import (
    NONE,
    Floats,
    Sla,
    home_assignment,
    key_id,
    reassigned,
)

PLANNERS: dict[str, Planner] = {
    "ftlb": plan_ftlb,
    "mixed": plan_mixed,
    "min-table": plan_min_table,
    "readj": plan_readj,
}
COLUMNS = ("key", "count", "state", "task", "copies")
LEGEND = "grey: before · red: after · yellow: the mean and what θ_max allows around it"


@dataclass(frozen=True)
class KeyFile:
    """The columns of the file; `tasks` holds NONE where a key is where the hash puts it."""

    names: list[str]
    counts: Floats
    state: Floats
    tasks: list[int]
    copies: list[int]

    def problem(self, tasks: int, limits: Limits, alpha: float) -> BalanceProblem:
        ids = np.array([key_id(name) for name in self.names], dtype=np.uint64)
        sla = Sla(
            {str(n): n for n in {1, *self.copies}},
            {int(k): str(n) for k, n in zip(ids, self.copies, strict=True)},
            default="1",
        )
        home = home_assignment(ids, tasks, sla)
        placed = np.flatnonzero(np.array(self.tasks) != NONE).astype(np.int64)
        to = np.array(self.tasks, dtype=np.int64)[placed]
        wrong = placed[to >= tasks]
        if len(wrong):
            raise PlanningError(
                f"Key {self.names[wrong[0]]!r} is on task {self.tasks[wrong[0]]}, but there are "
                f"tasks 0 to {tasks - 1}: correct it, or raise --tasks."
            )
        current = reassigned(home, placed, to)
        return BalanceProblem(key_costs(self.counts, alpha), self.state, current, home, limits)


def plan_balance(
    file: Annotated[Path, typer.Argument(help="The keys, as CSV.", exists=True)],
    tasks: Annotated[int, typer.Option(help="How many tasks there are.")],
    theta_max: Annotated[
        float, typer.Option(help="Largest distance of a task's load from the mean, as a share.")
    ] = 0.1,
    table: Annotated[int, typer.Option(help="Most entries the routing table may have.")] = 3000,
    alpha: Annotated[float, typer.Option(help="A key's cost is its count to this power.")] = 1.0,
    replica_weight: Annotated[
        float, typer.Option(help="Load of a replica, as a share of its key's.")
    ] = 0.0,
    planner: Annotated[str, typer.Option(help=f"{', '.join(PLANNERS)}.")] = "ftlb",
    picture: Annotated[
        Path | None, typer.Option(help="Where to draw the loads, as SVG; FILE.svg by default.")
    ] = None,
) -> None:
    """Even out the load of tasks by moving as little state as possible."""
    if planner not in PLANNERS:
        raise PlanningError(f"Unknown planner {planner!r}: choose one of {', '.join(PLANNERS)}.")
    console = Console()
    keys = read_keys(file)
    limits = Limits(theta_max=theta_max, table=table, replica_weight=replica_weight)
    problem = keys.problem(tasks, limits, alpha)
    plan = PLANNERS[planner](problem)
    before, after = problem.loads(problem.current), problem.loads(plan.assignment)
    console.print(_load_table(before, after))
    console.print(_verdict(keys, problem, plan), highlight=False)
    target = picture or file.with_suffix(".svg")
    target.write_text(draw(before, after, theta_max))
    routes = target.with_suffix(".routes.csv")
    _write_routes(routes, keys, problem, plan)
    console.print(
        f"Drawn in {escape(str(target))}, routing table in {escape(str(routes))}", soft_wrap=True
    )


def read_keys(file: Path) -> KeyFile:
    """The keys in `file`; a bad line is named by its number."""
    with file.open(newline="") as lines:
        reader = csv.DictReader(lines)
        header = reader.fieldnames or []
        for column in ("key", "count", "state"):
            if column not in header:
                raise PlanningError(f"{file} has no column {column!r}: the first line names them.")
        for column in header:
            if column not in COLUMNS:
                raise PlanningError(
                    f"{file} has the unknown column {column!r}: known are {', '.join(COLUMNS)}."
                )
        rows = list(reader)
    names = [row["key"] for row in rows]
    if not names:
        raise PlanningError(f"{file} has no keys: add a line per key.")
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise PlanningError(f"{file} has the key {twice!r} twice: add up its lines.")
    line = enumerate(rows, start=2)
    parsed = [
        (
            _number(row["count"], f"count in line {i}"),
            _number(row["state"], f"state in line {i}"),
            _whole(row.get("task"), NONE, f"task in line {i}"),
            _whole(row.get("copies"), 1, f"copies in line {i}"),
        )
        for i, row in line
    ]
    counts, state, tasks, copies = zip(*parsed, strict=True)
    return KeyFile(names, np.array(counts), np.array(state), list(tasks), list(copies))


def _number(text: str | None, what: str) -> float:
    try:
        return float(text or "")
    except ValueError:
        raise PlanningError(f"{what} must be a number: {text!r}.") from None


def _whole(text: str | None, default: int, what: str) -> int:
    if not text:
        return default
    if not text.isdecimal():
        raise PlanningError(f"{what} must be a whole number >= 0: {text!r}.")
    return int(text)


def _load_table(before: Floats, after: Floats) -> Table:
    table = Table(title="Load per task", title_justify="left")
    for column in ("task", "before", "θ before", "after", "θ after"):
        table.add_column(column, justify="right")
    mean = float(before.mean()) or 1.0
    for task, (old, new) in enumerate(zip(before.tolist(), after.tolist(), strict=True)):
        was, now = abs(old / mean - 1), abs(new / mean - 1)
        table.add_row(str(task), f"{old:g}", f"{was:.3f}", f"{new:g}", f"{now:.3f}")
    return table


def _verdict(keys: KeyFile, problem: BalanceProblem, plan: BalancePlan) -> str:
    changed = int(np.count_nonzero(plan.assignment.active != problem.current.active))
    moved = len(plan.migration.keys)
    text = (
        f"{changed} keys change their active task; {moved} copies of state move, "
        f"{plan.migration.cost:g} in size; the routing table has {plan.table} entries."
    )
    if plan.met:
        return text
    hot = problem.oversized_key()
    if hot is not None:
        why = f"key {keys.names[hot]!r} alone exceeds what a task may carry: split it, or add load"
        return f"{text}\nThe limits are not met (θ {plan.theta:.3f}): {why} to the others."
    return (
        f"{text}\nThe limits are not met (θ {plan.theta:.3f}): raise --theta-max, --table or "
        "--tasks."
    )


def _write_routes(target: Path, keys: KeyFile, problem: BalanceProblem, plan: BalancePlan) -> None:
    new = plan.assignment
    with target.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["key", "active", "replicas"])
        for k in np.flatnonzero(new.differs(problem.home)).tolist():
            replicas = " ".join(str(t) for t in new.backups[k].tolist() if t != NONE)
            writer.writerow([keys.names[k], int(new.active[k]), replicas])


def _short(load: float) -> str:
    return f"{load:,.0f}" if load >= 100 else f"{load:.3g}"


def draw(before: Floats, after: Floats, theta_max: float) -> str:
    """Load of every task before and after as SVG bars, with the band of θ_max."""
    mean = float(before.mean()) or 1.0
    most = max(float(before.max()), float(after.max()))
    top = max(most, (1 + theta_max) * mean)
    step = max(8.0, min(60.0, 900 / len(before)))
    left = 24 + text_width(_short(top))
    width, base = left + step * len(before) + 16, 264

    def y(load: float) -> float:
        return base - 196 * load / top

    band = (y((1 + theta_max) * mean), y((1 - theta_max) * mean))
    parts = [
        text(16, 44, LEGEND, "start", f' fill="{INK}"'),
        f'<rect x="{left:.1f}" y="{band[0]:.1f}" width="{width - left - 8:.1f}" '
        f'height="{band[1] - band[0]:.1f}" fill="#fde68a"/>',
        f'<path d="M{left:.1f} {base}H{width - 8:.1f}" stroke="{INK}"/>',
        *(text(left - 6, y(load) + 4, _short(load), "end") for load in _ticks(mean, most)),
        text((left + width) / 2, base + 34, "task"),
    ]
    for task, (old, new) in enumerate(zip(before.tolist(), after.tolist(), strict=True)):
        x, bar = left + 4 + step * task, 0.4 * step
        for offset, load, colour in ((0.0, old, FAINT), (bar, new, ACCENT)):
            parts.append(
                f'<rect x="{x + offset:.1f}" y="{y(load):.1f}" width="{bar:.1f}" '
                f'height="{base - y(load):.1f}" fill="{colour}"><title>task {task}: {load:g}'
                "</title></rect>"
            )
        if step >= 16 or task % 10 == 0:
            parts.append(text(x + bar, base + 16, str(task)))
    return picture("Load per task", max(width, 32 + text_width(LEGEND)), base + 46, parts)


def _ticks(mean: float, most: float) -> list[float]:
    """The axis names zero, the mean, and the most where it is clear of the mean."""
    return [0.0, mean, most] if most > 1.1 * mean else [0.0, mean]
