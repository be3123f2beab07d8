"""Jobs and faults of a certain kind, for bugs that few random runs would meet."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection
from dataclasses import replace
from functools import partial

from anabranch.control.policies.strategies import Strategy
from anabranch.control.settings import ControlConfig
from anabranch.model.graph import Graph, Kind, Operator
from anabranch.model.plan import compile_plan
from anabranch.sim import Outcome, simulate
from anabranch.sim.faults import Chances, RandomFaults
from anabranch.sim.workload import Workload, adapting, random_batches

NEVER = 10**9
CRASHES = Chances(struck=0.03, late=0.1, late_when_cut_short=0.5)


def line(
    *chains: str,
    backups: Collection[str] | None = None,
    interval_ms: int = 40,
    seed: int = 0,
    sources_shown: bool = False,
) -> Workload:
    """s → the chains one after the other → out, two partitions each, ten batches."""
    operators = [Operator("s", Kind.SOURCE)]
    for chain in chains:
        reads = ((operators[-1].name,),)
        operators.append(Operator(chain, Kind.KEYED, reads, keys=(chain,), parallelism=2))
    shown = {operators[-1].name, *(["s"] if sources_shown else [])}
    operators += [Operator(f"out_{name}", Kind.SINK, ((name,),)) for name in sorted(shown)]
    plan = compile_plan(Graph.checked("line", operators, key_groups=4))
    chosen = None if backups is None else frozenset(backups)
    dice = random.Random(seed)
    batches = random_batches(dice, ["s"]) + random_batches(dice, ["s"])
    numbered = tuple(
        {"s": tuple((k, 100 * b + i, t) for i, (k, _, t) in enumerate(batch["s"]))}
        for b, batch in enumerate(batches)
    )
    return Workload(seed, plan, ControlConfig(interval_ms, backups=chosen), numbered, None)


def fork(
    backups: Collection[str] | None = None, interval_ms: int = 40, odd: Collection[str] = ()
) -> Workload:
    """s → a → b and s → a → c, s → d; every one is shown, b and c together once more. Rows keep
    nodes so busy that all of it needs a few: chains wait when most are lost. Those that are `odd`
    are not deterministic."""
    operators = [Operator("s", Kind.SOURCE)]
    for chain, above in (("a", "s"), ("b", "a"), ("c", "a"), ("d", "s")):
        keyed = Operator(chain, Kind.KEYED, ((above,),), keys=(chain,), parallelism=2)
        operators.append(replace(keyed, deterministic=chain not in odd))
    for name, reads in (("a", ("a",)), ("d", ("d",)), ("bc", ("b", "c"))):
        operators.append(Operator(f"out_{name}", Kind.SINK, (reads,)))
    plan = compile_plan(Graph.checked("fork", operators, key_groups=4))
    job = line("a", backups=backups, interval_ms=interval_ms)
    config = replace(job.config, slice_interval_ms=20)
    return replace(job, plan=plan, config=config, row_s=0.01)


def divided(job: Workload) -> Workload:
    """Lost partitions are rebuilt as two."""
    return replace(job, config=replace(job.config, parallel_recovery=2))


def copied(job: Workload) -> Workload:
    """Every partition has a copy."""
    return replace(job, config=replace(job.config, strategy=Strategy(copies=True)))


def run(seed: int, job: Workload | None = None, chances: Chances | None = None) -> Outcome:
    if chances is None:
        return simulate(seed, job)
    return simulate(seed, job, partial(RandomFaults, chances=chances))


def digest(seeds: range) -> str:
    """Everything that happened in these runs."""
    told = [(simulate(s, lines=10_000).story, simulate(s).counts) for s in seeds]
    return hashlib.sha256(repr(told).encode()).hexdigest()


MOST = replace(
    CRASHES,
    strikes={"crash": 1.0, "most": 3.0, "join": 3.0, "driver": 0.3},
    struck=0.05,
    rejoined=0.5,
)
WAITING = (
    "a_chain_that_has_come_back_taken_for_covered",
    "chains_that_lost_nothing_wait_too",
    "a_part_ends_the_comeback",
    "cut_of_a_waiting_chain_dropped",
    "chain_gets_further_than_those_above",
    "chain_that_others_need_goes_on_without_them",
    "chains_replay_what_others_replay",
    "node_that_others_need_left_out",
)


def crowded(job: Workload, row_s: float = 0.01) -> Workload:
    """Rows keep nodes busy, as those of `fork`."""
    return replace(job, config=replace(job.config, slice_interval_ms=20), row_s=row_s)


# Chains wait and come back in most of their runs, when most nodes are lost.
SHORT = {
    "all back up": fork(),
    "one backs up": fork(backups=["a"]),
    "none backs up": fork(backups=[]),
    "an odd operator": fork(odd=["b"]),
    "an odd operator, none backs up": fork(backups=[], odd=["b"]),
    "few checkpoints": fork(backups=[], interval_ms=100),
    "twice the work": crowded(fork(backups=[]), 0.02),
    "from the second loss on": adapting(fork()),
    "a line": crowded(line("a", "b", "c")),
    "a line without backups": crowded(line("a", "b", "c", backups=[])),
}

ADAPTIVE = ("adaptive_backups_off_too_early", "backups_taken_as_kept_from_before_they_began")

# Plant → the kind of run it shows in; all others show in random ones.
DIRECTED: dict[str, tuple[Workload, Chances]] = {
    **dict.fromkeys(WAITING, (fork(), MOST)),
    **dict.fromkeys(ADAPTIVE, (adapting(fork()), MOST)),
    "shadows_dropped_between_parts": (fork(backups=[], interval_ms=100), MOST),
    "what_is_not_deterministic_taken_for_it": (fork(odd=["b"]), MOST),
    "backups_counted_from_before_they_began": (
        replace(line("a", "b", "c", interval_ms=NEVER), rechooses_backups=True),
        CRASHES,
    ),
    "batch_read_again_into_a_log_that_was_begun": (line("a"), replace(CRASHES, struck=0.08)),
    "silent_partition_not_tried_again": (
        line("a", "b", "c", interval_ms=NEVER),
        replace(CRASHES, strikes={"replace": 1.0}, struck=0.1, late=0.5, late_ms=30),
    ),
    "old_driver_accepted": (
        line("a", "b"),
        replace(CRASHES, strikes={"driver": 1.0}, struck=0.03, late=0.5, late_when_cut_short=1.0),
    ),
    "partitions_of_an_earlier_driver_kept": (
        line("a", "b"),
        replace(CRASHES, strikes={"driver": 1.0}),
    ),
    "epoch_of_a_removed_partition_used_again": (
        line("a", "b"),
        replace(CRASHES, struck=0.0, requests=0.9),
    ),
    "attempts_counted_per_slice": (
        replace(line("a", interval_ms=10), max_rows_per_slice=4),
        replace(CRASHES, struck=0.08, late_when_cut_short=1.0, late_ms=60),
    ),
    "torn_delta_of_a_shadow_stays_in_the_chain": (
        line("a", "b", "c", backups=[]),
        replace(CRASHES, torn=0.5, struck=0.02),
    ),
    "replaced_process_without_partitions_ignored": (
        line(sources_shown=True),
        replace(CRASHES, strikes={"replace": 1.0}),
    ),
    "copy_taken_for_made_though_it_was_cut_short": (
        copied(line("a", "b")),
        replace(CRASHES, torn=0.5, struck=0.02),
    ),
    "copies_that_took_over_not_forgotten": (copied(line("a", "b")), CRASHES),
    "promoted_copy_does_not_send_its_backups": (
        copied(line("a", "b", "c", interval_ms=200)),
        CRASHES,
    ),
    "operator_divided_whose_order_others_see": (
        divided(line("a", "b", "c", interval_ms=NEVER)),
        replace(CRASHES, struck=0.02),
    ),
    "staged_rows_of_two_attempts_in_one_place": (
        line(sources_shown=True),
        replace(CRASHES, struck=0.1, late_when_cut_short=1.0, late_ms=30),
    ),
    "older_cut_replayed_under_the_newer_layout": (
        line("a", "b", interval_ms=60),
        replace(CRASHES, torn=0.6, requests=0.5),
    ),
    "slice_sealed_that_has_problems": (
        line("a", "b", interval_ms=10),
        Chances(lost_packets=0.2),
    ),
    "torn_line_refused": (line("a"), Chances(stored=0.1)),
    "first_of_a_share_appears_before_the_others_are_written": (
        replace(line("a"), max_rows_per_slice=4),
        replace(CRASHES, struck=0.08, late_when_cut_short=0.1),
    ),
    "generation_taken_that_is_claimed": (
        line("a"),
        Chances(stored=0.1, storms={"crash": 1.0, "pause": 1.0}),
    ),
    "shadows_answer_as_partitions": (
        replace(line("a", "b", "c", interval_ms=NEVER), rechooses_backups=True),
        replace(CRASHES, struck=0.1),
    ),
    "promoted_copy_goes_on_with_deltas": (copied(line("a", "b")), CRASHES),
    "later_slices_of_a_share_not_finished": (
        replace(line("a"), max_rows_per_slice=4),
        replace(CRASHES, struck=0.08, late_when_cut_short=0.1),
    ),
    "missing_log_taken_for_an_empty_one": (
        replace(line("a"), max_rows_per_slice=4),
        replace(CRASHES, struck=0.08, late_when_cut_short=0.1),
    ),
}
