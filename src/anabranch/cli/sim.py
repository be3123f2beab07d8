"""`anabranch sim`: the control plane under faults on simulated nodes, from seeds."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from anabranch.cli.errors import Verbose
from anabranch.errors import ConfigError
from anabranch.sim import Outcome, simulate

SHOWN_FAILURES = 3  # stories; all failing seeds are named
SUMMED = (
    "adjustments",
    "crashes",
    "hangs",
    "replaced",
    "driver crashes",
    "torn files",
    "late calls",
)


def sim(
    seed: Annotated[int | None, typer.Option(help="Run one seed and tell its story.")] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="A..B", help="Run the seeds from A to B, both included.")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Run the control plane on simulated nodes with crashes, hangs, delays and restarts.

    Every run is decided by its seed alone. Exit status 1 when a check fails.
    """
    if (seed is None) == (seeds is None):
        raise ConfigError("give one of --seed N and --seeds A..B")
    console = Console(highlight=False)
    if seed is not None:
        outcome = simulate(seed)
        _tell(console, outcome)
        console.print(_verdict(outcome), soft_wrap=True)
        raise typer.Exit(1 if outcome.violation else 0)
    if not _run(console, _parsed(seeds or "")):
        raise typer.Exit(1)


def _parsed(seeds: str) -> range:
    found = re.fullmatch(r"(\d+)\.\.(\d+)", seeds)
    if found is None or int(found[1]) > int(found[2]):
        raise ConfigError(f"--seeds is {seeds!r}; give a range such as 0..499")
    return range(int(found[1]), int(found[2]) + 1)


def _run(console: Console, seeds: range) -> bool:
    """All of them, failing or not; the stories of the first that fail."""
    counts: Counter[str] = Counter()
    failed: list[Outcome] = []
    slices = 0
    started = time.monotonic()
    shown = track(seeds, "seeds", console=console, transient=True)
    for seed in shown if console.is_terminal else seeds:
        outcome = simulate(seed)
        counts += outcome.counts
        slices += outcome.slices
        if outcome.violation:
            failed.append(outcome)
            console.print(_verdict(outcome), soft_wrap=True)
    for outcome in failed[:SHOWN_FAILURES]:
        _tell(console, outcome)
    summed = ", ".join(f"{counts[name]:,} {name}" for name in SUMMED)
    console.print(
        f"{len(seeds):,} seeds, {len(failed):,} failed; {slices:,} slices and "
        f"{counts['recoveries']:,} recoveries through {summed}; {time.monotonic() - started:.1f} s",
        soft_wrap=True,
    )
    return not failed


def _tell(console: Console, outcome: Outcome) -> None:
    console.print(f"[bold]seed {outcome.seed}[/], newest last:")
    for line in outcome.story:
        console.print(escape(line), soft_wrap=True)


def _verdict(outcome: Outcome) -> str:
    if outcome.violation:
        return f"[bold red]seed {outcome.seed} fails:[/] {escape(outcome.violation)}"
    return f"seed {outcome.seed} holds: {outcome.slices} slices in {outcome.steps} steps"
