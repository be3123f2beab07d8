"""`anabranch sim`: the control plane under faults on simulated nodes, from seeds."""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from anabranch.cli.errors import Verbose
from anabranch.errors import ConfigError
from anabranch.sim import Outcome, simulate
from anabranch.sim.coverage import ANSWERS, FAULTS
from anabranch.sim.shrink import shrink
from anabranch.sim.sweep import Tally, sweep

SHOWN_FAILURES = 3  # stories; all failing seeds are named


def sim(
    seed: Annotated[int | None, typer.Option(help="Run one seed and tell its story.")] = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="I,J,…", help="With --seed: no faults but those with these numbers."),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="A..B", help="Run the seeds from A to B, both included.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that run seeds.")] = 1,
    resume: Annotated[
        Path | None,
        typer.Option(help="A file for the results: seeds that it has already are not run again."),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Run the control plane on simulated nodes with crashes, hangs, delays and restarts.

    Every run is decided by its seed alone. A seed that fails is run again with fewer and fewer
    faults and tells the story of the fewest. Exit status 1 when a check fails.
    """
    if (seed is None) == (seeds is None):
        raise ConfigError("give one of --seed N and --seeds A..B")
    console = Console(highlight=False)
    if seed is not None:
        outcome = simulate(seed, only=_numbers(only))
        if outcome.violation and only is None:
            _tell_least(console, outcome)
        else:
            _tell(console, outcome)
        console.print(_verdict(outcome), soft_wrap=True)
        raise typer.Exit(1 if outcome.violation else 0)
    if not _run(console, _parsed(seeds or ""), jobs, resume):
        raise typer.Exit(1)


def _numbers(only: str | None) -> frozenset[int] | None:
    if only is None:
        return None
    if not re.fullmatch(r"(\d+(,\d+)*)?", only):
        raise ConfigError(f"--only is {only!r}; give numbers of faults such as 3,17")
    return frozenset(int(n) for n in only.split(",") if n)


def _parsed(seeds: str) -> range:
    found = re.fullmatch(r"(\d+)\.\.(\d+)", seeds)
    if found is None or int(found[1]) > int(found[2]):
        raise ConfigError(f"--seeds is {seeds!r}; give a range such as 0..499")
    return range(int(found[1]), int(found[2]) + 1)


def _run(console: Console, seeds: range, jobs: int, file: Path | None) -> bool:
    """All of them, failing or not; the stories of the first that fail."""
    started = time.monotonic()
    told: set[int] = set()
    total = Tally()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("seeds", total=len(seeds))
        for total in sweep(seeds, jobs, file):
            progress.update(task, completed=total.seeds)
            for seed in sorted(total.failed.keys() - told):
                told.add(seed)
                console.print(_failure(seed, total.failed[seed]), soft_wrap=True)
    for seed in sorted(total.failed)[:SHOWN_FAILURES]:
        _tell_least(console, simulate(seed))
    console.print(_coverage(total))
    console.print(
        f"{total.seeds:,} seeds, {len(total.failed):,} failed; {total.slices:,} slices; "
        f"{time.monotonic() - started:.1f} s",
        soft_wrap=True,
    )
    return not total.failed


def _coverage(total: Tally) -> Table:
    table = Table(title="what the seeds have met")
    for name in ("", "times", "seeds"):
        table.add_column(name, justify="right" if name else "left")
    known = (*FAULTS, *ANSWERS)
    for what in (*known, *sorted(total.counts.keys() - set(known))):
        times, met = total.counts[what], total.met[what]
        style = None if times else "bold red"
        table.add_row(what, f"{times:,}", f"{met:,}", style=style)
    return table


def _tell_least(console: Console, failed: Outcome) -> None:
    """The story of a failing seed, with no more faults than it needs."""
    only, least = shrink(failed, partial(_again, failed.seed))
    numbers = ",".join(map(str, sorted(only)))
    _tell(console, least)
    console.print(
        f"{len(only)} of its {failed.faults} faults are enough: "
        f"anabranch sim --seed {failed.seed} --only {numbers or repr('')}",
        soft_wrap=True,
    )


def _again(seed: int, only: frozenset[int]) -> Outcome:
    return simulate(seed, only=only)


def _tell(console: Console, outcome: Outcome) -> None:
    console.print(f"[bold]seed {outcome.seed}[/], newest last:")
    for line in outcome.story:
        console.print(escape(line), soft_wrap=True)


def _verdict(outcome: Outcome) -> str:
    if outcome.violation:
        return _failure(outcome.seed, outcome.violation)
    return f"seed {outcome.seed} holds: {outcome.slices} slices in {outcome.steps} steps"


def _failure(seed: int, violation: str) -> str:
    return f"[bold red]seed {seed} fails:[/] {escape(violation)}"
