"""The commands and their options."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from anabranch.api import describe as describe_topology
from anabranch.cli.control import nodes as nodes_command
from anabranch.cli.control import scale, status
from anabranch.cli.demo import run_demo
from anabranch.cli.describe import draw as draw_topology
from anabranch.cli.elastic_demo import SECONDS, run_elastic_demo
from anabranch.cli.errors import Commands, Verbose
from anabranch.cli.loading import load_topology
from anabranch.cli.plan_backups import plan_backups
from anabranch.cli.plan_balance import plan_balance
from anabranch.cli.plan_recovery import plan_recovery
from anabranch.cli.recovery_times import describe_recovery
from anabranch.cli.running import StopSignal, quiet_py4j, session_on, summarise, watch
from anabranch.cli.sim import sim
from anabranch.cli.state import state
from anabranch.control.autoscaler import Autoscale
from anabranch.errors import ConfigError
from anabranch.model.duration import parse_duration
from anabranch.storage.files import explained

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reliable, elastic, balanced stream processing on PySpark.",
)

plan = typer.Typer(cls=Commands, no_args_is_help=True, help="Plan ahead, without Spark.")
plan.command("backups")(plan_backups)
plan.command("recovery")(plan_recovery)
plan.command("balance")(plan_balance)
app.add_typer(plan, name="plan")
app.command()(sim)
app.command()(state)
app.command()(status)
app.command()(scale)
app.command("nodes")(nodes_command)

TopologyArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:ATTRIBUTE",
        help="A topology, or a function without arguments that returns one.",
    ),
]


@app.callback()
def root(verbose: Verbose = False) -> None:
    quiet_py4j()


@app.command()
def run(
    topology: TopologyArgument,
    checkpoint: Annotated[
        Path,
        typer.Option(help="Directory that this machine and all nodes reach; names the job's past."),
    ],
    nodes: Annotated[
        int, typer.Option(help="Nodes to start here, or executors to ask from --master.")
    ] = 3,
    slice: Annotated[str, typer.Option(help="How often a slice begins.")] = "1s",
    checkpoint_interval: Annotated[
        str, typer.Option(help="How often state is checkpointed.")
    ] = "10s",
    max_rows: Annotated[
        int | None, typer.Option(help="Cut larger batches into slices of this many rows.")
    ] = None,
    master: Annotated[
        str | None, typer.Option(help="A Spark cluster, instead of one started here.")
    ] = None,
    recovery_bound: Annotated[
        str | None,
        typer.Option(help="Choose backups so that a lost node is back within this time."),
    ] = None,
    autoscale: Annotated[
        bool, typer.Option("--autoscale", help="Let the job choose its parallelism.")
    ] = False,
    max_nodes: Annotated[
        int | None, typer.Option(help="… and the number of its nodes, up to this many.")
    ] = None,
    available_now: Annotated[
        bool, typer.Option("--available-now", help="End when the data there is now is processed.")
    ] = False,
    drop_state: Annotated[
        list[str] | None,
        typer.Option(help="Give up the state of this operator, which is gone. May be repeated."),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Run a topology and show what it does. Ctrl-C stops it gracefully, with a checkpoint."""
    loaded = load_topology(topology)
    compiled = loaded.plan()
    for duration in (slice, checkpoint_interval, recovery_bound or "1s"):
        parse_duration(duration)  # before a cluster is started for nothing
    if max_nodes is not None and not autoscale:
        raise ConfigError("--max-nodes is for --autoscale; give that, too")
    scaling = Autoscale(max_nodes=max_nodes) if autoscale else False
    console = Console(highlight=False)
    where = master or f"a cluster of {nodes} nodes on this machine"
    console.print(f"starting {loaded.name} on {where} …", soft_wrap=True)
    stop = StopSignal()
    with session_on(master, nodes, loaded.name) as spark, stop.installed():
        job = loaded.start(
            spark,
            checkpoint=checkpoint,
            slice=slice,
            checkpoint_interval=checkpoint_interval,
            max_rows_per_slice=max_rows,
            available_now=available_now,
            recovery_bound=recovery_bound,
            autoscale=scaling,
            drop_state=drop_state or (),
        )
        started = time.monotonic()
        meter = watch(job, compiled, console, lambda _: stop.requested.is_set())
        elapsed = time.monotonic() - started
    console.print(summarise(meter, elapsed), soft_wrap=True)
    console.print(f"checkpoint: {checkpoint.absolute()}", soft_wrap=True)


@app.command()
def describe(
    topology: TopologyArgument,
    svg: Annotated[Path | None, typer.Option(help="Also draw it, as SVG, in this file.")] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Of a job run with a recovery bound: show how soon it would be back."),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Show a topology: its chains by wave, their operators, keys and shuffles."""
    loaded = load_topology(topology)
    typer.echo(describe_topology(loaded))
    if checkpoint is not None:
        typer.echo(describe_recovery(checkpoint))
    if svg is not None:
        with explained("write", svg):
            svg.write_text(draw_topology(loaded.plan()), encoding="utf-8")
        typer.echo(f"drawn in {svg}")


@app.command()
def demo(
    seconds: Annotated[
        int | None, typer.Option(help="How long rows are generated; 60, or 80 with --elastic.")
    ] = None,
    nodes: Annotated[int, typer.Option(help="Nodes to start on this machine.")] = 3,
    elastic: Annotated[
        bool,
        typer.Option("--elastic", help="Let the rate rise and fall; the job scales itself."),
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Count words in windows of 30 seconds, kill a node half-way, recount from the raw files."""
    console = Console(highlight=False)
    if elastic:
        exact = run_elastic_demo(console, SECONDS if seconds is None else seconds, nodes)
    else:
        exact = run_demo(console, seconds=60 if seconds is None else seconds, nodes=nodes)
    if not exact:
        raise typer.Exit(1)
