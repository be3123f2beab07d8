"""`anabranch plan backups WHAT`: which tasks must keep backups, so that recovery meets a bound.

WHAT is a topology, whose tasks are its partitions and sources, or a file of JSON:

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
from collections.abc import Mapping, Sequence
from html import escape as escape_html
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from anabranch.cli.drawing import (
    ACCENT,
    INK,
    PALE,
    Box,
    Link,
    curve,
    lay_out,
    picture,
    text,
    text_width,
)
from anabranch.cli.loading import load_topology
from anabranch.errors import PlanningError
from anabranch.model.plan import Plan
from anabranch.planning.backups.curve import tradeoff
from anabranch.planning.backups.exact import replan_backups
from anabranch.planning.backups.paper import (
    dag_backups,
    exhaustive_backups,
    line_backups,
    share_based_backups,
    tree_backups,
)
from anabranch.planning.backups.plan import BackupPlan, BackupProblem, evaluate
from anabranch.planning.graph import TaskGraph
from anabranch.storage.files import explained

HEURISTICS = {
    "line": line_backups,
    "tree": tree_backups,
    "dag": dag_backups,
    "exhaustive": exhaustive_backups,
    "share": share_based_backups,
}
MARK = 16  # width of a task's mark
MAX_LABELLED = 16  # tasks in a column that still have room for their names
SHORT_LEGEND = "square: keeps a backup · circle: keeps none"
LEGEND = f"{SHORT_LEGEND} · below a name: seconds to reprocess / until it is back"
TOP_KEYS = frozenset({"bound_s", "tasks", "edges", "existing"})
TASK_KEYS = frozenset({"name", "reprocess_s", "cost", "host"})


def plan_backups(
    what: Annotated[
        str, typer.Argument(metavar="FILE|MODULE:ATTRIBUTE", help="Tasks as JSON, or a topology.")
    ],
    bound: Annotated[
        float | None, typer.Option(help="Recovery bound in seconds, instead of the file's.")
    ] = None,
    t: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPERATOR=SECONDS",
            help="Time to reprocess, of a topology's operator and what is fused with it; 1 if "
            "not given. May be repeated.",
        ),
    ] = None,
    algorithm: Annotated[
        str, typer.Option(help="exact, dag, tree, line, share or exhaustive.")
    ] = "exact",
    picture: Annotated[
        Path | None, typer.Option(help="Where to draw the plan; FILE.svg or TOPOLOGY.svg if not.")
    ] = None,
    curve: Annotated[
        bool, typer.Option(help="Also list the least cost for every recovery bound.")
    ] = False,
) -> None:
    """Find the cheapest backups that bring any lost task back within the bound."""
    console = Console()
    existing: list[str] = []
    if Path(what).exists() or ":" not in what:
        if t:
            raise PlanningError("--t is for a topology: give reprocess_s in the file.")
        file = Path(what)
        problem, existing = read_problem(file, bound)
    else:
        topology = load_topology(what).plan()
        file = Path(topology.graph.name)
        problem = problem_of(topology, bound, t or [])
    plan = _plan(problem, algorithm, existing)
    console.print(_plan_table(problem, plan, existing))
    console.print(_verdict(problem, plan))
    if curve:
        console.print(_curve_table(problem))
    target = picture or file.with_suffix(".svg")
    with explained("write", target):
        target.write_text(draw(problem, plan), encoding="utf-8")
    console.print(f"Drawn in {escape(str(target))}", soft_wrap=True)


def problem_of(plan: Plan, bound: float | None, seconds: Sequence[str]) -> BackupProblem:
    """A task per partition of every chain, since what is fused keeps no output in between, and
    one per source; streams between tasks as the shuffles go."""
    if bound is None:
        raise PlanningError("A topology has no recovery bound: give --bound.")
    reprocess = _reprocess_s(plan, seconds)
    tasks = {
        c.name: [f"{c.name}/{i}" if c.parallelism > 1 else c.name for i in range(c.parallelism)]
        for c in plan.chains
    }
    pairs = dict.fromkeys((e.source, e.target) for c in plan.chains for e in c.inputs)
    edges = [(u, v) for source, target in pairs for u in tasks[source] for v in tasks[target]]
    graph = TaskGraph(tuple(n for names in tasks.values() for n in names), tuple(edges))
    return BackupProblem.of(
        graph, bound, {n: reprocess.get(c, 1.0) for c, names in tasks.items() for n in names}
    )


def _reprocess_s(plan: Plan, seconds: Sequence[str]) -> dict[str, float]:
    """Per chain, what was given for its operators."""
    homes: dict[str, list[str]] = {}
    for chain in plan.chains:
        for name in chain.operators:
            homes.setdefault(name, []).append(chain.name)
    given: dict[str, float] = {}
    for item in seconds:
        name, _, value = item.rpartition("=")
        if name not in homes:
            known = ", ".join(homes)
            raise PlanningError(
                f"--t {item} must be OPERATOR=SECONDS, and the operators are: {known}."
            )
        try:
            took = float(value)
        except ValueError:
            raise PlanningError(f"--t {item}: {value!r} is not a number of seconds.") from None
        for chain_name in homes[name]:
            given[chain_name] = given.get(chain_name, 0.0) + took
    return given


def read_problem(file: Path, bound: float | None = None) -> tuple[BackupProblem, list[str]]:
    """The problem in `file` and the backups that run already; a bad file says where it is bad."""
    try:
        data = json.loads(file.read_text())
    except OSError as error:
        raise PlanningError(
            f"{file} cannot be read ({error.strerror}): name a file of JSON, or a topology as "
            "module:attribute."
        ) from error
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
    labelled = max(map(depth.count, depth)) <= MAX_LABELLED
    labels = {
        v: (name, f"{problem.reprocess_s[v]:g} / {latency[name]:g} s") if labelled else ()
        for v, name in enumerate(graph.tasks)
    }
    boxes = []
    for v in graph.order:
        width = max([MARK, *map(text_width, labels[v])])
        height = MARK + 13 * len(labels[v])
        boxes.append(Box(graph.tasks[v], depth[v], width, height, inset=(width - MARK) / 2))
    links = [Link(u, w, MARK / 2, MARK / 2) for u, w in graph.edges]
    layout = lay_out(boxes, links, left=32, top=70, gap=56, apart=14 if labelled else 6)
    few = len(links) <= 100
    end = ' marker-end="url(#arrow)"' if few else ""
    parts = [text(16, 44, LEGEND if labelled else SHORT_LEGEND, "start", f' fill="{INK}"')]
    parts += [
        f'<path class="stream" d="{curve(route)}" fill="none" stroke="{INK}" '
        f'stroke-opacity="{0.8 if few else 0.2}"{end}/>'
        for _, route in layout.routes
    ]
    for v, box in zip(graph.order, boxes, strict=True):
        x, y = layout.at[box.name][0] + box.width / 2, layout.at[box.name][1]
        title = f"{box.name}: back in {latency[box.name]:g} s"
        parts.append(_mark(x, y + MARK / 2, box.name in plan.backups, title))
        for line, words in enumerate(labels[v]):
            style = "" if line == 0 else f' fill="{INK}"'
            parts.append(text(x, y + MARK + 12 + 13 * line, words, style=style))
    lost = "task" if problem.hosts is None else "node"
    title = (
        f"{len(plan.backups)} of {len(graph)} tasks keep backups: any lost {lost} is back within "
        f"{plan.worst_s:g} s (bound {problem.bound_s:g} s)"
    )
    return picture(title, max(layout.width, 32 + text_width(LEGEND)), layout.height + 24, parts)


def _mark(x: float, y: float, backup: bool, title: str) -> str:
    half = MARK / 2
    shape = (
        f'rect x="{x - half:.1f}" y="{y - half:.1f}" width="{MARK}" height="{MARK}" fill="{ACCENT}"'
        if backup
        else f'circle cx="{x:.1f}" cy="{y:.1f}" r="{half:g}" fill="{PALE}" stroke="{INK}"'
    )
    return f"<{shape}><title>{escape_html(title)}</title></{shape.partition(' ')[0]}>"
