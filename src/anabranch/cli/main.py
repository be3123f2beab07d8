"""The commands and their options."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from anabranch import __version__
from anabranch.api import describe as describe_topology
from anabranch.cli.control import nodes as nodes_command
from anabranch.cli.control import scale, status
from anabranch.cli.describe import draw as draw_topology
from anabranch.cli.errors import Commands, Verbose
from anabranch.cli.loading import load_topology
from anabranch.cli.plan_backups import plan_backups
from anabranch.cli.plan_balance import plan_balance
from anabranch.cli.plan_recovery import plan_recovery
from anabranch.cli.recovery_times import describe_recovery
from anabranch.cli.sim import sim
from anabranch.cli.state import state
from anabranch.control.policies.autoscale import Autoscale
from anabranch.demos.disaster import NODES as DISASTER_NODES
from anabranch.demos.disaster import SECONDS as DISASTER_SECONDS
from anabranch.demos.disaster import run_disaster_demo
from anabranch.demos.elastic import SECONDS as ELASTIC_SECONDS
from anabranch.demos.elastic import run_elastic_demo
from anabranch.demos.words import run_demo
from anabranch.driver.options import RunOptions
from anabranch.errors import ConfigError
from anabranch.spark.settings import pairs
from anabranch.spark.starting import DEFAULT_MEMORY, DEFAULT_NODES, spark_session
from anabranch.storage.files import directory, explained
from anabranch.terminal.meter import Meter
from anabranch.terminal.running import StopSignal, quiet_py4j, summarise, watch
from anabranch.terminal.starting import Startup

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"anabranch {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
    verbose: Verbose = False,
) -> None:
    quiet_py4j()


DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(RunOptions)}


@app.command()
def run(
    topology: TopologyArgument,
    checkpoint: Annotated[
        Path,
        typer.Option(help="Directory that this machine and all nodes reach; names the job's past."),
    ],
    nodes: Annotated[
        int, typer.Option(help="Nodes to start here, or executors to ask from --master.")
    ] = DEFAULT_NODES,
    master: Annotated[
        str | None, typer.Option(help="A Spark cluster, instead of one started here.")
    ] = None,
    memory: Annotated[str, typer.Option(help="Of each node, for Spark.")] = DEFAULT_MEMORY,
    packages: Annotated[
        list[str] | None,
        typer.Option(help="Of Maven, group:artifact:version. May be repeated."),
    ] = None,
    conf: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A setting of Spark. May be repeated."),
    ] = None,
    slice: Annotated[str, typer.Option(help="How often a slice begins.")] = DEFAULTS["slice"],
    checkpoint_interval: Annotated[
        str, typer.Option(help="How often state is checkpointed.")
    ] = DEFAULTS["checkpoint_interval"],
    max_rows_per_slice: Annotated[
        int | None,
        typer.Option(
            "--max-rows-per-slice",
            "--max-rows",
            help="Cut larger batches into slices of this many rows.",
        ),
    ] = DEFAULTS["max_rows_per_slice"],
    available_now: Annotated[
        bool, typer.Option("--available-now", help="End when the data there is now is processed.")
    ] = DEFAULTS["available_now"],
    backups: Annotated[
        list[str] | None,
        typer.Option(
            help="all, sources, adaptive, or an operator that keeps its output for recoveries; "
            "then it may be repeated.",
            show_default=DEFAULTS["backups"],
        ),
    ] = None,
    recovery_bound: Annotated[
        str | None,
        typer.Option(help="Choose backups so that a lost node is back within this time."),
    ] = DEFAULTS["recovery_bound"],
    recovery: Annotated[
        str,
        typer.Option(
            help="When too few nodes are left: incremental, blocking (all queries come back "
            "together) or eager (at once, on any node)."
        ),
    ] = DEFAULTS["recovery"],
    node_timeout: Annotated[
        str, typer.Option(help="A node that is silent for so long counts as lost.")
    ] = DEFAULTS["node_timeout"],
    slice_timeout: Annotated[
        str | None, typer.Option(help="A slice that takes longer ends the run.")
    ] = DEFAULTS["slice_timeout"],
    node_wait: Annotated[
        str | None,
        typer.Option(help="Without any node, wait for one no longer than this."),
    ] = DEFAULTS["node_wait"],
    autoscale: Annotated[
        bool, typer.Option("--autoscale", help="Let the job choose its parallelism.")
    ] = DEFAULTS["autoscale"],
    balance: Annotated[
        bool, typer.Option("--balance", help="Let the job move keys off busy partitions.")
    ] = DEFAULTS["balance"],
    max_nodes: Annotated[
        int | None, typer.Option(help="… and the number of its nodes, up to this many.")
    ] = None,
    parallel_recovery: Annotated[
        int, typer.Option(help="Partitions that a lost one is rebuilt as.")
    ] = DEFAULTS["parallel_recovery"],
    drop_state: Annotated[
        list[str] | None,
        typer.Option(help="Give up the state of this operator, which is gone. May be repeated."),
    ] = None,
    state_url: Annotated[
        str | None,
        typer.Option(help="Where the files of state go, such as s3://bucket/job."),
    ] = DEFAULTS["state_url"],
    strategy: Annotated[
        str, typer.Option(help="For experiments: how another system would survive a loss.")
    ] = DEFAULTS["strategy"],
    verbose: Verbose = False,
) -> None:
    """Run a topology and show what it does. Ctrl-C stops it gracefully, with a checkpoint."""
    console = Console(highlight=False)
    startup = Startup(console)
    startup.tell(f"loading {topology}")
    loaded = load_topology(topology)
    compiled = loaded.plan()
    directory(checkpoint, "--checkpoint")
    if max_nodes is not None and not autoscale:
        raise ConfigError("--max-nodes is for --autoscale; give that, too")
    session = spark_session(
        master,
        nodes=nodes,
        memory=memory,
        packages=packages or (),
        name=loaded.name,
        **pairs(conf or ()),
    )
    stop = StopSignal()
    with contextlib.ExitStack() as stack:

        def started() -> SparkSession:
            spark = stack.enter_context(session)
            stack.enter_context(stop.installed())
            return spark

        with startup.shown():
            job = loaded.start(
                started,
                checkpoint=checkpoint,
                slice=slice,
                checkpoint_interval=checkpoint_interval,
                max_rows_per_slice=max_rows_per_slice,
                available_now=available_now,
                backups=_backups(backups),
                recovery_bound=recovery_bound,
                recovery=recovery,
                node_timeout=node_timeout,
                slice_timeout=slice_timeout,
                node_wait=node_wait,
                autoscale=Autoscale(max_nodes=max_nodes) if autoscale else False,
                balance=balance,
                parallel_recovery=parallel_recovery,
                drop_state=drop_state or (),
                state_url=state_url,
                strategy=strategy,
            )
        began = time.monotonic()

        def is_over(meter: Meter) -> bool:
            if meter.newest is not None and not startup.is_done:
                startup.done()
                console.print(startup.summary("the first slice"), soft_wrap=True)
            return stop.requested.is_set()

        meter = watch(job, compiled, console, is_over)
        elapsed = time.monotonic() - began
    console.print(summarise(meter, elapsed), soft_wrap=True)
    console.print(f"checkpoint: {checkpoint.absolute()}", soft_wrap=True)


def _backups(given: list[str] | None) -> str | list[str]:
    """One word may be all, sources or adaptive; several are operators."""
    if not given:
        default: str = DEFAULTS["backups"]
        return default
    return given[0] if given in (["all"], ["sources"], ["adaptive"]) else given


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
        int | None,
        typer.Option(help="How long rows are generated; 60, 80 (--elastic) or 75 (--disaster)."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Nodes to start on this machine; 3, or 4 with --disaster.")
    ] = None,
    elastic: Annotated[
        bool,
        typer.Option("--elastic", help="Let the rate rise and fall; the job scales itself."),
    ] = False,
    disaster: Annotated[
        bool,
        typer.Option(
            "--disaster",
            help="Kill all nodes but one at once; queries come back as nodes do, by priority.",
        ),
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Count words in windows of 30 seconds, kill a node half-way, recount from the raw files."""
    if elastic and disaster:
        raise ConfigError("--elastic and --disaster are two demos; give one of them")
    console = Console(highlight=False)
    show: Callable[[Console, float, int], bool] = run_demo
    usual_s, usual_nodes = 60, 3
    if elastic:
        show, usual_s = run_elastic_demo, ELASTIC_SECONDS
    elif disaster:
        show, usual_s, usual_nodes = run_disaster_demo, DISASTER_SECONDS, DISASTER_NODES
    seconds = usual_s if seconds is None else seconds
    if not show(console, seconds, usual_nodes if nodes is None else nodes):
        raise typer.Exit(1)
