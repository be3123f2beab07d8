"""`anabranch plan recovery FILE`: which partitions come back first, on nodes that arrive in turn.

The file is JSON:

    {
      "partitions": {
        "source/0": {"cpu": 20},
        "count/0": {"cpu": 35, "upstream": ["source/0"]}
      },
      "outputs": {"count/0": 5},
      "failed": ["count/0"],
      "nodes": [{"name": "node-1", "cpu": 100, "used": 10}],
      "cap": 0.8
    }

`cpu` is any one unit; `outputs` gives each output partition, and so its query, a priority (a list
means priority 1 for all); `failed` is everything unless given; `nodes` are in order of arrival, of
which recovery fills `cap` (0.8 unless given).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from anabranch.cli.drawing import ACCENT, CHARACTER, FAINT, INK, picture, text
from anabranch.errors import PlanningError
from anabranch.planning.recovery.exact import best_plan
from anabranch.planning.recovery.order import (
    CPU_CAP,
    Node,
    PartialPlan,
    Planner,
    plan_best_density,
    plan_dp,
    plan_operator_centric,
    plan_progressive,
    schedule_recovery,
)
from anabranch.planning.recovery.queries import RecoveryProblem, failure

LEGEND = "red: query by query · grey: operator by operator, as if the nodes were one"
MIN_NAME = 12  # characters that tell nodes apart; with room for fewer, their numbers do
TOP_KEYS = frozenset({"partitions", "outputs", "failed", "nodes", "cap"})
PARTITION_KEYS = frozenset({"cpu", "upstream"})
NODE_KEYS = frozenset({"name", "cpu", "used"})


@dataclass(frozen=True)
class RecoveryFile:
    """What the file says: the failure, the nodes in order of arrival, and how far to fill them."""

    problem: RecoveryProblem
    nodes: list[Node]
    cap: float


PLANNERS: dict[str, Planner] = {
    "exact": best_plan,
    "best-density": plan_best_density,
    "progressive": plan_progressive,
    "dp": plan_dp,
}


def plan_recovery(
    file: Annotated[Path, typer.Argument(help="The failure, as JSON.", exists=True)],
    planner: Annotated[str, typer.Option(help=f"{', '.join(PLANNERS)}.")] = "exact",
    picture: Annotated[
        Path | None, typer.Option(help="Where to draw the recovery, as SVG; FILE.svg by default.")
    ] = None,
) -> None:
    """Order the recovery of failed partitions so that the most important queries come first."""
    if planner not in PLANNERS:
        raise PlanningError(f"Unknown planner {planner!r}: choose one of {', '.join(PLANNERS)}.")
    console = Console()
    given = read_failure(file)
    plans = schedule_recovery(given.problem, given.nodes, PLANNERS[planner], given.cap)
    console.print(_plan_table(given.problem, plans))
    console.print(_verdict(given.problem, plans), highlight=False)
    target = picture or file.with_suffix(".svg")
    target.write_text(draw(given, plans))
    console.print(f"Drawn in {escape(str(target))}", soft_wrap=True)


def read_failure(file: Path) -> RecoveryFile:
    """The failure in `file`; a bad file says where it is bad."""
    try:
        data = json.loads(file.read_text())
    except ValueError as error:
        raise PlanningError(f"{file} is not JSON: {error}.") from error
    if not isinstance(data, dict):
        raise PlanningError(f"{file} must hold one JSON object with partitions, outputs and nodes.")
    _only(data, TOP_KEYS, str(file))
    partitions = data.get("partitions")
    if not isinstance(partitions, dict) or not partitions:
        raise PlanningError(f"{file} needs an object of partitions, by name.")
    costs: dict[str, float] = {}
    upstream: dict[str, list[str]] = {}
    for name, body in partitions.items():
        fields = _object(body, PARTITION_KEYS, f"Partition {name!r}")
        costs[name] = _number(fields.get("cpu"), f"cpu of partition {name!r}")
        upstream[name] = _names(fields.get("upstream", []), f"upstream of partition {name!r}")
    failed = _names(data.get("failed", list(partitions)), "failed")
    problem = failure(upstream, _priorities(data.get("outputs")), costs, failed)
    nodes = [_node(body, i) for i, body in enumerate(_list(data.get("nodes"), "nodes"))]
    return RecoveryFile(problem, nodes, _number(data.get("cap", CPU_CAP), "cap"))


def _priorities(outputs: Any) -> dict[str, int]:
    if isinstance(outputs, list):
        return dict.fromkeys(_names(outputs, "outputs"), 1)
    if isinstance(outputs, dict) and outputs:
        return outputs
    raise PlanningError("The file needs outputs: a list of partitions, or an object of priorities.")


def _node(body: Any, position: int) -> Node:
    fields = _object(body, NODE_KEYS, f"Node {position}")
    name = fields.get("name", f"node-{position + 1}")
    cpu = _number(fields.get("cpu"), f"cpu of node {name!r}")
    return Node(str(name), cpu, _number(fields.get("used", 0), f"used of node {name!r}"))


def _object(body: Any, known: frozenset[str], where: str) -> Mapping[str, Any]:
    if not isinstance(body, dict):
        raise PlanningError(f"{where} must be an object with {', '.join(sorted(known))}: {body!r}.")
    _only(body, known, where)
    return body


def _only(data: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    unknown = sorted(set(data) - known)
    if unknown:
        raise PlanningError(
            f"{where} has the unknown key {unknown[0]!r}: known are {', '.join(sorted(known))}."
        )


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise PlanningError(f"The file needs a list of {what}.")
    return value


def _names(value: Any, what: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
        raise PlanningError(f"{what} must be a list of partition names: {value!r}.")
    return value


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PlanningError(f"{what} must be a number: {value!r}.")
    return float(value)


def _plan_table(problem: RecoveryProblem, plans: list[PartialPlan]) -> Table:
    table = Table(title="Recovery as nodes arrive", title_justify="left")
    for column in ("node", "starts", "queries recovered", "priority so far"):
        table.add_column(column, justify="right" if column == "priority so far" else "left")
    for plan, value in zip(plans, _curve(problem, plans), strict=True):
        starts = ", ".join(f"{p} on {n}" for p, n in sorted(plan.placement.items()))
        table.add_row(
            escape(plan.arrived), escape(starts), escape(", ".join(plan.recovered)), str(value)
        )
    return table


def _curve(problem: RecoveryProblem, plans: list[PartialPlan]) -> list[int]:
    return list(itertools.accumulate(problem.value(plan.recovered) for plan in plans))


def _verdict(problem: RecoveryProblem, plans: list[PartialPlan]) -> str:
    back = sum(len(plan.recovered) for plan in plans)
    text = f"{back} of {len(problem.queries)} failed queries are back with {len(plans)} nodes"
    missing = set(problem.costs).difference(*(plan.placement for plan in plans))
    if not missing:
        return f"{text}; nothing is left to recover."
    return f"{text}; {len(missing)} partitions wait, {problem.cost(missing):g} CPU in sum."


def draw(given: RecoveryFile, plans: list[PartialPlan]) -> str:
    """Priority recovered over arriving nodes as SVG, beside the operator-centric order."""
    problem = given.problem
    room = itertools.accumulate(node.room(given.cap) for node in given.nodes)
    # What has come back stays, also where the order for more room would be another.
    centric = itertools.accumulate((plan_operator_centric(problem, r).priority for r in room), max)
    total = max(1, problem.value(problem.queries))
    count = max(1, len(plans))
    width, left, top, base = 640, 56, 66, 270

    def x(step: float) -> float:
        return left + (width - left - 24) * step / count

    def y(value: float) -> float:
        return top + (base - top) * (1 - value / total)

    parts = [
        text(16, 44, LEGEND, "start", f' fill="{INK}"'),
        f'<path d="M{left} {top - 8}V{base}H{width - 24}" fill="none" stroke="{INK}"/>',
        *(text(left - 8, y(v) + 4, str(v), "end") for v in sorted({0, total // 2, total})),
        text((left + width - 24) / 2, base + 34, "nodes in order of arrival"),
    ]
    every = -(-count // 12)
    fits = int((x(every) - x(0) - 6) / CHARACTER)
    for i in range(0, len(plans), every):
        name = plans[i].arrived if fits >= MIN_NAME else str(i + 1)
        short = name if len(name) <= fits else f"{name[: fits - 1]}…"
        parts.append(text(x(i + 0.5), base + 16, short))
    parts.append(_steps(list(centric), x, y, FAINT, "operator by operator", 4))
    parts.append(_steps(_curve(problem, plans), x, y, ACCENT, "query by query", 2))
    title = f"Priority recovered as {len(plans)} nodes arrive (of {total})"
    return picture(title, width, base + 46, parts)


def _steps(
    values: list[int],
    x: Callable[[float], float],
    y: Callable[[float], float],
    colour: str,
    name: str,
    thick: int,
) -> str:
    """A line that rises with each node; the one below is thicker, to be seen where both agree."""
    path = f"M{x(0):.1f} {y(0):.1f}" + "".join(
        f"V{y(value):.1f}H{x(i + 1):.1f}" for i, value in enumerate(values)
    )
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{thick}">'
        f"<title>{name}</title></path>"
    )
