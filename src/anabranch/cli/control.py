"""`anabranch status`, `scale` and `nodes`: a running job, found by its checkpoint directory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from anabranch.cli.errors import Verbose
from anabranch.driver.endpoint import ask
from anabranch.driver.queries import CapacityStatus, QueryStatus
from anabranch.errors import ConfigError
from anabranch.terminal.view import megabytes, queries, seconds

LOOK_S = 0.2  # while waiting

JobArgument = Annotated[
    Path, typer.Argument(metavar="JOB", help="The checkpoint directory of a job that is running.")
]
Json = Annotated[bool, typer.Option("--json", help="As one line of JSON.")]
NoWait = Annotated[
    bool, typer.Option("--no-wait", help="Return once the job has accepted the request.")
]
Status = dict[str, Any]


def status(job: JobArgument, as_json: Json = False, verbose: Verbose = False) -> None:
    """Show what a running job does, and on which nodes."""
    found = ask(job, {"do": "status"})
    if as_json:
        typer.echo(json.dumps(found))
        return
    console = Console(highlight=False)
    _show_headline(console, found)
    if found["nodes"]:
        console.print(_operators(found))
        console.print(_nodes(found))
    for part in _queries(found):
        console.print(part, soft_wrap=isinstance(part, Text))
    for line in (*found["adjustments"], *found["recoveries"]):
        console.print(escape(line), soft_wrap=True)
    if found["decision"]:
        console.print(escape(found["decision"]), soft_wrap=True)


def scale(
    job: JobArgument,
    operator: Annotated[str, typer.Argument(help="A keyed operator.")],
    parallelism: Annotated[int, typer.Argument(help="How many partitions it is to have.")],
    no_wait: NoWait = False,
    verbose: Verbose = False,
) -> None:
    """Give an operator of a running job, and those fused with it, another parallelism."""
    ask(job, {"do": "scale", "operator": operator, "parallelism": parallelism})

    def is_scaled(now: Status) -> bool:
        chain = next(c for c in now["operators"] if operator in c["operators"])
        return bool(chain["partitions"] == parallelism and not now["adjusting"])

    what = f"{operator} at parallelism {parallelism}"
    _finish(job, what, no_wait, is_scaled)


def nodes(
    job: JobArgument,
    action: Annotated[str | None, typer.Argument(help="add or drain")] = None,
    what: Annotated[
        str | None, typer.Argument(metavar="N|NODE", help="How many to add, or which to drain.")
    ] = None,
    no_wait: NoWait = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """List the nodes of a running job; ask its cluster for more; empty one and give it back."""
    if action is None:
        found = ask(job, {"do": "status"})
        if as_json:
            typer.echo(json.dumps(found["nodes"]))
        else:
            Console(highlight=False).print(_nodes(found))
        return
    if action not in ("add", "drain") or what is None:
        raise ConfigError("give: anabranch nodes JOB, … JOB add N, or … JOB drain NODE")
    if action == "drain":
        ask(job, {"do": "drain", "node": what})
        _finish(
            job,
            f"node {what} drained and released",
            no_wait,
            lambda now: what not in [n["node"] for n in now["nodes"]],
        )
        return
    if not what.isdecimal():
        raise ConfigError(f"{what!r} nodes cannot be added; give a number")
    ask(job, {"do": "add_nodes", "count": int(what)})
    typer.echo(f"asked the cluster for {what} more; partitions move to them when they have joined")


def _finish(job: Path, what: str, no_wait: bool, done: Callable[[Status], bool]) -> None:
    """Wait until it is done, unless nobody wants to."""
    if no_wait:
        typer.echo(f"accepted: {what}")
        return
    while not done(now := ask(job, {"do": "status"})):
        time.sleep(LOOK_S)
    typer.echo(f"done: {what}")
    if now["adjustments"]:
        typer.echo(now["adjustments"][-1])


def _show_headline(console: Console, found: Status) -> None:
    doing = f" ({found['doing']})" if found["doing"] else ""
    parts = [found["topology"], found["phase"] + doing]
    if found["adjusting"]:
        parts.append("adjusting")
    if found["slice"] is not None:
        took = f"{seconds(found['slice_s'])} of {seconds(found['interval_s'])}"
        parts += [f"slice {found['slice']}", f"{found['rows_per_s']:,.0f} rows/s", f"took {took}"]
    console.print(escape(" · ".join(parts)), soft_wrap=True)


def _operators(found: Status) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("operators")
    for title in ("partitions", "CPU of each", "state rows", "state size"):
        table.add_column(title, justify="right")
    for chain in found["operators"]:
        share = None if chain["cpu"] is None else chain["cpu"] / max(1, chain["partitions"])
        table.add_row(
            escape(", ".join(chain["operators"])),
            str(chain["partitions"]),
            _percent(share),
            f"{chain['state_rows']:,}",
            megabytes(chain["state_bytes"]),
        )
    return table


def _queries(found: Status) -> list[RenderableType]:
    given, capacity = found["queries"], found["capacity"]
    known = None if capacity is None else CapacityStatus(**capacity)
    return queries([QueryStatus(**q) for q in given], known, found["partial_plan"])


def _nodes(found: Status) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for title in ("node", "host", "pid", "partitions", "CPU", "memory", ""):
        table.add_column(title, justify="right")
    for node in found["nodes"]:
        table.add_row(
            node["node"],
            node["host"],
            str(node["pid"] or ""),
            str(node["partitions"]),
            _percent(node["cpu"]),
            megabytes(node["memory_bytes"]),
            "draining" if node["draining"] else "",
        )
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
