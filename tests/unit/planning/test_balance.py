"""Key balance: cost model, routing, LLFD and KSM, with their invariants and refusals."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import PlanningError
from anabranch.planning.balance.load import (
    BalanceProblem,
    Limits,
    judged,
    key_costs,
    llfd,
    migration,
)
from anabranch.planning.balance.routing import (
    NONE,
    Assignment,
    Destination,
    MixedRouting,
    Sla,
    hash_keys,
    home_assignment,
    key_id,
    reassigned,
    routing,
)
from anabranch.planning.workloads.key_histories import key_history, shifted, zipf_counts


def keys(count):
    return np.arange(count, dtype=np.uint64)


def assignment(active, backups=None, tasks=4):
    active = np.array(active, dtype=np.int64)
    rows = np.zeros((len(active), 0)) if backups is None else np.array(backups)
    return Assignment(active, rows.astype(np.int64), tasks)


def problem(costs, active, tasks=2, **limits):
    now = assignment(active, tasks=tasks)
    costs = np.array(costs, dtype=float)
    bounds = Limits(**({"theta_max": 0.1, "table": 10} | limits))
    return BalanceProblem(costs, costs, now, now, bounds)


# -- LLFD (algorithm 2) -----------------------------------------------------------------------


def test_llfd_on_the_known_vector():
    costs = np.array([3.0, 3, 2, 2, 2])
    loads = np.bincount(llfd(costs, np.zeros(2)), costs, 2)
    assert sorted(loads.tolist()) == [5, 7]


def test_llfd_starts_from_what_tasks_carry():
    assert llfd(np.array([1.0]), np.array([5.0, 3.0])).tolist() == [1]


@given(st.integers(2, 4), st.data())
@settings(max_examples=80, deadline=None)
def test_llfd_keeps_its_guarantee_when_perfect_balance_exists(tasks, data):
    # Cut one load into pieces on every task: perfect balance exists by construction.
    total = data.draw(st.integers(1, 60))
    pieces = []
    for _ in range(tasks):
        cuts = data.draw(st.lists(st.integers(0, total), max_size=3))
        edges = sorted({0, total, *cuts})
        pieces += [b - a for a, b in itertools.pairwise(edges)]
    costs = np.array(pieces, dtype=float)
    loads = np.bincount(llfd(costs, np.zeros(tasks)), costs, tasks)
    assert (loads.max() - total) / total <= (1 - 1 / tasks) / 3 + 1e-9


@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), st.integers(2, 3))
@settings(max_examples=60, deadline=None)
def test_llfd_is_within_four_thirds_of_brute_force(values, tasks):
    costs = np.array(values, dtype=float)
    best = min(
        np.bincount(choice, costs, tasks).max()
        for choice in itertools.product(range(tasks), repeat=len(values))
    )
    found = np.bincount(llfd(costs, np.zeros(tasks)), costs, tasks).max()
    assert found <= (4 / 3 - 1 / (3 * tasks)) * best + 1e-9


# -- cost model -------------------------------------------------------------------------------


def test_costs_are_a_power_of_the_count():
    assert key_costs(np.array([0.0, 2.0, 3.0]), alpha=2).tolist() == [0, 4, 9]


def test_loads_weigh_replicas():
    now = assignment([0, 1], [[1], [NONE]], tasks=3)
    costs = np.array([4.0, 2.0])
    weighed = BalanceProblem(
        costs, costs, now, now, Limits(theta_max=0.1, table=5, replica_weight=0.5)
    )
    assert weighed.loads(now).tolist() == [4, 4, 0]
    assert weighed.mean == pytest.approx(8 / 3)


def test_imbalance_counts_idle_tasks_too():
    idle = problem([1, 1, 1], [0, 1, 1], tasks=4)
    assert idle.imbalance(idle.current) == pytest.approx(5 / 3)  # 2 against a mean of 0.75
    low = problem([10, 10, 8], [0, 1, 2], tasks=3)
    assert low.imbalance(low.current) == pytest.approx(1 - 8 / (28 / 3))


def test_an_oversized_key_is_named():
    assert problem([10, 1, 1], [0, 1, 1]).oversized_key() == 0
    assert problem([1, 1], [0, 1]).oversized_key() is None


# -- KSM (algorithm 4) ------------------------------------------------------------------------


def test_only_state_that_was_not_there_migrates():
    before = assignment([0, 1, 2], [[1], [2], [3]])
    after = assignment([1, 3, 2], [[0], [2], [3]])  # switch, move, stay
    moved = migration(before, after, np.array([10.0, 20.0, 40.0]))
    assert (moved.keys.tolist(), moved.tasks.tolist(), moved.cost) == ([1], [3], 20.0)


def test_a_new_replica_is_a_migration_too():
    before = assignment([0], [[1]])
    after = assignment([0], [[2]])
    assert migration(before, after, np.array([5.0])).cost == 5


@given(st.integers(0, 1000), st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_migration_equals_the_set_difference(seed, replicas):
    rng = np.random.default_rng(seed)
    rows = [np.array([rng.permutation(5)[: replicas + 1] for _ in range(30)]) for _ in range(2)]
    before, after = (Assignment(r[:, 0].copy(), r[:, 1:].copy(), 5) for r in rows)
    state = rng.integers(1, 9, size=30).astype(float)
    expected = sum(
        state[k] * len(set(rows[1][k].tolist()) - set(rows[0][k].tolist())) for k in range(30)
    )
    assert migration(before, after, state).cost == pytest.approx(expected)


# -- routing (equation 1, algorithm 1) --------------------------------------------------------


def test_hash_has_golden_values():
    assert hash_keys(keys(3)).tolist() == [
        16294208416658607535,
        10451216379200822465,
        10905525725756348110,
    ]
    assert home_assignment(keys(10), 10, Sla({"normal": 1})).active.tolist() == [
        8, 9, 0, 4, 7, 3, 5, 8, 5, 7,
    ]  # fmt: skip
    assert key_id("a") == 4681665781835383343


def test_one_more_task_moves_only_keys_to_it():
    sla = Sla({"normal": 1})
    before = home_assignment(keys(20_000), 9, sla).active
    after = home_assignment(keys(20_000), 10, sla).active
    moved = before != after
    assert set(after[moved].tolist()) == {9}
    assert moved.mean() == pytest.approx(0.1, abs=0.01)


@given(st.integers(1, 6), st.data())
@settings(max_examples=30, deadline=None)
def test_homes_keep_copies_apart(tasks, data):
    copies = data.draw(st.integers(1, tasks))
    home = home_assignment(keys(200), tasks, Sla({"normal": copies}))
    held = np.column_stack([home.active, home.backups])
    assert all(len(set(row)) == copies for row in held.tolist())


def test_replicas_of_one_task_are_spread_over_all_others():
    home = home_assignment(keys(5000), 6, Sla({"normal": 2}))
    for task in range(6):
        others = np.bincount(home.backups[home.active == task, 0], minlength=6)
        assert others[task] == 0
        assert np.delete(others, task).min() > 100


def test_the_sla_decides_how_many_copies_a_key_has():
    sla = Sla({"normal": 1, "gold": 3}, {2: "gold"})
    home = home_assignment(keys(4), 5, sla)
    assert [(row != NONE).sum() + 1 for row in home.backups] == [1, 1, 3, 1]


def test_routing_has_entries_only_for_keys_the_hash_would_miss():
    sla = Sla({"normal": 2})
    home = home_assignment(keys(50), 4, sla)
    target = next(t for t in range(4) if t not in (home.active[7], home.backups[7, 0]))
    moved = reassigned(home, np.array([7]), np.array([target]))
    routes = routing(keys(50), moved, sla, limit=3)
    assert routes.table == {7: Destination(target, (int(home.backups[7, 0]),))}
    for key in range(50):
        went = routes.route(key)
        assert went.active == moved.active[key]
        assert went.backups == tuple(moved.backups[key].tolist())


def test_moving_to_the_replica_switches_roles():
    before = assignment([0], [[2]])
    after = reassigned(before, np.array([0]), np.array([2]))
    assert (after.active.tolist(), after.backups.tolist()) == ([2], [[0]])


# -- histories --------------------------------------------------------------------------------


def test_zipf_counts_have_the_skew_and_the_sum():
    counts = np.sort(zipf_counts(np.random.default_rng(0), 1000, 0.8, 5000.0))[::-1]
    assert counts.sum() == pytest.approx(5000)
    assert counts[0] / counts[9] == pytest.approx(10**0.8)


def test_a_shift_changes_some_task_by_f_and_keeps_the_frequencies():
    rng = np.random.default_rng(1)
    tasks_of = home_assignment(keys(2000), 5, Sla({"normal": 1})).active
    before = zipf_counts(rng, 2000, 0.8, 1000.0)
    after = shifted(rng, before, tasks_of, 5, 0.1)
    change = np.abs(np.bincount(tasks_of, after - before, 5)).max()
    assert change >= 0.1 * 1000 / 5
    assert np.sort(before) == pytest.approx(np.sort(after))


def test_state_is_the_sum_over_the_window():
    tasks_of = home_assignment(keys(500), 4, Sla({"normal": 1})).active
    rng = np.random.default_rng(2)
    steps = list(key_history(rng, tasks_of, 4, z=0.8, f=0.05, intervals=4, window=2))
    assert len(steps) == 4
    assert steps[3].state == pytest.approx(steps[2].counts + steps[3].counts)


# -- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: problem([-1, 1], [0, 1]), "key number 0 has cost -1.0"),
        (lambda: problem([1, np.nan], [0, 1]), "key number 1 has cost nan"),
        (lambda: key_costs(np.array([-2.0])), "count -2.0"),
        (lambda: key_costs(np.array([1.0]), alpha=0), "alpha"),
        (lambda: llfd(np.array([np.inf]), np.zeros(2)), "cost inf"),
        (lambda: Limits(theta_max=0, table=1), "theta_max is 0"),
        (lambda: Limits(theta_max=0.1, table=-1), "table limit"),
        (lambda: Limits(theta_max=0.1, table=1, theta_min=0.2), "theta_min"),
        (lambda: Limits(theta_max=0.1, table=1, replica_weight=2), "replica weight"),
        (lambda: assignment([4]), "no valid active task"),
        (lambda: assignment([0], [[0]]), "replica on its active task"),
        (lambda: assignment([0], [[1, 1]]), "two replicas on one task"),
        (lambda: assignment([0], [[9]]), "replica on no task"),
        (lambda: home_assignment(keys(3), 2, Sla({"normal": 3})), "3 copies, but there are 2"),
        (lambda: home_assignment(keys(3), 0, Sla({"normal": 1})), "at least 1"),
        (lambda: Sla({"normal": 0}), "0 copies"),
        (lambda: Sla({"normal": 1}, {1: "gold"}), "importance 'gold'"),
        (
            lambda: MixedRouting(2, Sla({"normal": 1}), {1: Destination(0, ())}, limit=0),
            "1 entries, its limit is 0",
        ),
        (lambda: zipf_counts(np.random.default_rng(0), 0, 1.0, 1.0), "0 keys"),
        (
            lambda: shifted(np.random.default_rng(0), np.ones(4), np.arange(4), 4, 0.5),
            "lower f",
        ),
    ],
)
def test_refusals_say_what_to_change(make, message):
    with pytest.raises(PlanningError, match=message):
        make()


def test_sizes_and_task_counts_must_agree():
    now = assignment([0, 1], tasks=2)
    limits = Limits(theta_max=0.1, table=1)
    with pytest.raises(PlanningError, match="one of each a key"):
        BalanceProblem(np.ones(3), np.ones(3), now, now, limits)
    with pytest.raises(PlanningError, match="number of tasks"):
        BalanceProblem(np.ones(2), np.ones(2), now, assignment([0, 1], tasks=3), limits)
    with pytest.raises(PlanningError, match="number of replicas"):
        BalanceProblem(np.ones(2), np.ones(2), now, assignment([0, 1], [[1], [0]], 2), limits)


def test_judging_the_present_costs_nothing():
    plan = judged(problem([1, 1], [0, 1]), assignment([0, 1], tasks=2))
    assert plan.met
    assert (plan.migration.cost, plan.table, plan.theta) == (0, 0, 0)
