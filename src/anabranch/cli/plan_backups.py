"""`anabranch plan backups FILE`: which tasks must keep backups, so that recovery meets a bound.

The file is JSON:

    {
      "bound_s": 7,
      "tasks": ["source", {"name": "count", "reprocess_s": 4, "cost": 2.5}],
      "edges": [["source", "count"]],
      "existing": ["source"]
    }

`reprocess_s` and `cost` are 1 unless given; a `host` is given for all tasks or for none, and then
the plan must hold when a whole node is lost; `existing` names backups that run already, kept
where that costs nothing (algorithm `exact`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from anabranch.errors import PlanningError
from anabranch.planning.backups import BackupPlan, BackupProblem, evaluate
from anabranch.planning.backups_curve import tradeoff
from anabranch.planning.backups_exact import replan_backups
from anabranch.planning.backups_paper import (
    dag_backups,
    exhaustive_backups,
    line_backups,
    share_based_backups,
    tree_backups,
)
from anabranch.planning.graph import TaskGraph

HEURISTICS = {
    "line": line_backups,
    "tree": tree_backups,
    "dag": dag_backups,
    "exhaustive": exhaustive_backups,
    "share": share_based_backups,
}
TOP_KEYS = frozenset({"bound_s", "tasks", "edges", "existing"})
TASK_KEYS = frozenset({"name", "reprocess_s", "cost", "host"})


def plan_backups(
    file: Annotated[Path, typer.Argument(help="The topology, as JSON.", exists=True)],
    bound: Annotated[
        float | None, typer.Option(help="Recovery bound in seconds, instead of the file's.")
    ] = None,
    algorithm: Annotated[
        str, typer.Option(help="exact, dag, tree, line, share or exhaustive.")
    ] = "exact",
    picture: Annotated[
        Path | None, typer.Option(help="Where to draw the plan, as SVG; FILE.svg by default.")
    ] = None,
    curve: Annotated[
        bool, typer.Option(help="Also list the least cost for every recovery bound.")
    ] = False,
) -> None:
    """Find the cheapest backups that bring any lost task back within the bound."""
    console = Console()
    problem, existing = read_problem(file, bound)
    plan = _plan(problem, algorithm, existing)
    console.print(_plan_table(problem, plan, existing))
    console.print(_verdict(problem, plan))
    if curve:
        console.print(_curve_table(problem))
    target = picture or file.with_suffix(".svg")
    target.write_text(draw(problem, plan))
    console.print(f"Drawn in {escape(str(target))}")


def read_problem(file: Path, bound: float | None = None) -> tuple[BackupProblem, list[str]]:
    """The problem in `file` and the backups that run already; a bad file says where it is bad."""
    try:
        data = json.loads(file.read_text())
    except ValueError as error:
        raise PlanningError(f"{file} is not JSON: {error}.") from error
    if not isinstance(data, dict):
        raise PlanningError(f"{file} must hold one JSON object with tasks, edges and bound_s.")
    _only(data, TOP_KEYS, str(file))
    tasks = [_task(item, i) for i, item in enumerate(_list(data, "tasks"))]
    names = [task["name"] for task in tasks]
    edges = [_edge(item, i) for i, item in enumerate(_list(data, "edges"))]
    graph = TaskGraph(tuple(names), tuple(edges))
    hosts = {task["name"]: str(task["host"]) for task in tasks if "host" in task}
    limit = data.get("bound_s") if bound is None else bound
    if limit is None:
        raise PlanningError(f"{file} has no bound_s: add it, or give --bound.")
    problem = BackupProblem.of(
        graph,
        _number(limit, "bound_s"),
        {t["name"]: _number(t.get("reprocess_s", 1), f"reprocess_s of {t['name']}") for t in tasks},
        {t["name"]: _number(t.get("cost", 1), f"cost of {t['name']}") for t in tasks},
        hosts or None,
    )
    return problem, [str(name) for name in data.get("existing", [])]


def _list(data: Mapping[str, Any], key: str) -> list[Any]:
    if not isinstance(data.get(key), list):
        raise PlanningError(f"The file needs a list of {key}.")
    return list(data[key])


def _only(data: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    unknown = sorted(set(data) - known)
    if unknown:
        raise PlanningError(
            f"{where} has the unknown key {unknown[0]!r}: known are {', '.join(sorted(known))}."
        )


def _task(item: Any, position: int) -> dict[str, Any]:
    task = {"name": item} if isinstance(item, str) else item
    if not isinstance(task, dict) or not isinstance(task.get("name"), str):
        raise PlanningError(f"Task {position} must be a name or an object with a name: {item!r}.")
    _only(task, TASK_KEYS, f"Task {task['name']!r}")
    return task


def _edge(item: Any, position: int) -> tuple[str, str]:
    if not (isinstance(item, list) and len(item) == 2 and all(isinstance(x, str) for x in item)):
        raise PlanningError(f"Edge {position} must be a pair of task names: {item!r}.")
    return item[0], item[1]


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PlanningError(f"{what} must be a number: {value!r}.")
    return float(value)


def _plan(problem: BackupProblem, algorithm: str, existing: list[str]) -> BackupPlan:
    if algorithm == "exact":
        return replan_backups(problem, existing)
    if algorithm not in HEURISTICS:
        known = ", ".join(["exact", *HEURISTICS])
        raise PlanningError(f"Unknown algorithm {algorithm!r}: choose one of {known}.")
    return HEURISTICS[algorithm](problem)


def _plan_table(problem: BackupProblem, plan: BackupPlan, existing: list[str]) -> Table:
    latency = evaluate(problem, plan.backups).latency_s
    table = Table(title=f"Backups for recovery within {problem.bound_s:g} s", title_justify="left")
    for column in ("task", "backup", "reprocess s", "recovery s", "cost"):
        table.add_column(column, justify="left" if column in ("task", "backup") else "right")
    for v in problem.graph.order:
        name = problem.graph.tasks[v]
        kept = name in plan.backups
        word = ("kept" if name in existing else "new") if kept else ""
        if not kept and name in existing:
            word = "stop"
        cost = f"{problem.cost[v]:g}" if kept else ""
        table.add_row(escape(name), word, f"{problem.reprocess_s[v]:g}", f"{latency[name]:g}", cost)
    return table


def _verdict(problem: BackupProblem, plan: BackupPlan) -> str:
    count, tasks = len(plan.backups), len(problem.graph)
    proof = (
        "no plan costs less" if plan.optimal else f"any plan costs at least {plan.lower_bound:g}"
    )
    if plan.lower_bound <= 0 < plan.cost:
        proof = "not compared with the optimum (use --algorithm exact)"
    lost = "task" if problem.hosts is None else "node"
    return (
        f"{count} of {tasks} tasks keep backups, cost {plan.cost:g}: {proof}. "
        f"Any lost {lost} is back within {plan.worst_s:g} s."
    )


def _curve_table(problem: BackupProblem) -> Table:
    table = Table(title="Least cost by recovery bound", title_justify="left")
    for column in ("from bound s", "backups", "cost"):
        table.add_column(column, justify="right")
    for point in tradeoff(problem):
        plan = point.plan
        note = "" if plan.optimal else f" (at least {plan.lower_bound:g})"
        table.add_row(f"{point.bound_s:g}", str(len(plan.backups)), f"{plan.cost:g}{note}")
    return table


def draw(problem: BackupProblem, plan: BackupPlan) -> str:
    """The graph as SVG, upstream on the left; squares keep backups, as in paper 003."""
    graph = problem.graph
    latency = evaluate(problem, plan.backups).latency_s
    depth = [0] * len(graph)
    for v in graph.order:
        depth[v] = 1 + max((depth[u] for u in graph.upstream[v]), default=-1)
    columns: list[list[int]] = [[] for _ in range(max(depth) + 1)]
    for v in graph.order:
        columns[depth[v]].append(v)
    tallest = max(map(len, columns))
    gap = 64 if tallest <= 12 else 22
    height = 60 + gap * tallest
    at = {
        v: (70 + 130 * column, 50 + (i + 0.5) * gap * tallest / len(members))
        for column, members in enumerate(columns)
        for i, v in enumerate(members)
    }
    width = 140 + 130 * (len(columns) - 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 20}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="16" y="22" font-size="14">{len(plan.backups)} backups (squares), any lost '
        f"{'task' if problem.hosts is None else 'node'} back within {plan.worst_s:g} s "
        f"(bound {problem.bound_s:g} s)</text>",
    ]
    faint = 0.6 if len(graph.edges) <= 100 else 0.15
    for u, targets in enumerate(graph.downstream):
        for w in targets:
            (x1, y1), (x2, y2) = at[u], at[w]
            parts.append(
                f'<line x1="{x1:g}" y1="{y1:.1f}" x2="{x2:g}" y2="{y2:.1f}" '
                f'stroke="#556" stroke-opacity="{faint}"/>'
            )
    for v, (x, y) in at.items():
        name = graph.tasks[v]
        parts.append(_mark(x, y, name in plan.backups, f"{name}: back in {latency[name]:g} s"))
        if tallest <= 12:
            label = f"{_text(name)} {problem.reprocess_s[v]:g}/{latency[name]:g}"
            parts.append(f'<text x="{x:g}" y="{y + 24:.1f}" text-anchor="middle">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _mark(x: float, y: float, backup: bool, title: str) -> str:
    if backup:
        shape = f'<rect x="{x - 8:g}" y="{y - 8:.1f}" width="16" height="16" fill="#c2410c">'
        return f"{shape}<title>{_text(title)}</title></rect>"
    shape = f'<circle cx="{x:g}" cy="{y:.1f}" r="8" fill="#dbe4f0" stroke="#334">'
    return f"{shape}<title>{_text(title)}</title></circle>"


def _text(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
