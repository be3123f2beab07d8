"""FTLB: balance keys and keep their replicas, moving as little state as possible.

Decides which keys change their active task (002, algorithm 3, corrected). In order:

1. **Switch roles.** A key whose replica sits on a task with room becomes active there; no state
   moves. Dearest keys first, so that few table entries are used.
2. **Choose what to move.** From each overloaded task the keys with the least metric
   M(k) = (S(k)·dn(k)^-γ + μ·e(k)) / c(k)^β until it is down to its level: little state, much load,
   favouring replicated keys. e(k) is 1 when the move needs a new table entry, and μ is the price
   of an entry: the lowest that keeps the table in its limit, found by bisection. Keys already in
   the table whose return home costs less than μ are sent home.
3. **Place it.** Dearest key first: to its replica's task or its home if there is room, else to
   the least loaded task; if that overloads it, cheaper keys are evicted from it, else the next
   task is tried. What fits nowhere goes to the least loaded task, and the plan is not `met`.
4. **Move replicas**, where they weigh (ρ > 0) and a task is still overloaded; then 2 and 3 again.

Where this misses a limit, or one of the classic planners happens to move less, theirs is taken.
θ bounds both sides: tasks give down to a level low enough to lift those below (1 - θ)·L̄.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np

from anabranch.errors import PlanningError
from anabranch.planning.balance.baselines import plan_min_table, plan_mixed, plan_readj
from anabranch.planning.balance.load import BalancePlan, BalanceProblem, judged, least_first
from anabranch.planning.balance.role_switching import dearest, needs, switch_roles, water_level
from anabranch.planning.balance.routing import NONE, Assignment, Bools, Floats, Ints, reassigned

#: Evictions per plan; each looks at every key of a task.
EVICTIONS_MAX = 64
#: Steps of the bisection for the price of a table entry.
PRICE_STEPS = 10
#: Shares of the aimed θ tried in turn: a closer aim makes up for keys that do not divide well.
AIMS = (1.0, 0.7, 0.4, 0.15)
NEAR_MISS = 3.0


def plan_ftlb(problem: BalanceProblem, beta: float = 1.0, gamma: float = 1.0) -> BalancePlan:
    """A plan within θ_max and the table limit, or the nearest one found (`met` is false)."""
    if beta <= 0 or gamma < 0:
        raise PlanningError(f"beta is {beta}, gamma {gamma}; give beta > 0 and gamma >= 0")
    now = judged(problem, problem.current)
    if now.met or problem.tasks == 1 or problem.mean == 0:
        return now
    aim = replace(problem.limits, theta_max=problem.limits.aim, theta_min=None)
    return judged(problem, _best(replace(problem, limits=aim), beta, gamma).assignment)


def _best(problem: BalanceProblem, beta: float, gamma: float) -> BalancePlan:
    best = judged(problem, problem.current)
    for share in AIMS:
        for revert in (False, True):
            attempt = _Attempt(problem, share * problem.limits.theta_max, beta, gamma)
            if revert and not attempt.revert_free():
                continue
            best = min(best, attempt.run(), key=lambda p: _badness(problem, p))
            if best.met and not best.migration.cost:
                return best
        # A closer aim helps a near miss, not a table that is too small.
        if best.met or best.theta > NEAR_MISS * problem.limits.theta_max:
            break
    for classic in (plan_mixed, plan_min_table, plan_readj):
        best = min(best, classic(problem), key=lambda p: _badness(problem, p))
        if best.met and not best.migration.cost:
            break
    return best


def _badness(problem: BalanceProblem, plan: BalancePlan) -> tuple[bool, bool, float]:
    """Within the limits first; then the least migration, or the least imbalance."""
    over = plan.table > problem.limits.table
    return not plan.met, over, plan.migration.cost if plan.met else plan.theta


@dataclass(frozen=True)
class _Choice:
    """Keys to send home and keys to move elsewhere, at one price, with the table that results."""

    home: Ints
    moved: Ints
    table: int


class _Attempt:
    """One pass of the three steps at one aim."""

    def __init__(self, problem: BalanceProblem, aim: float, beta: float, gamma: float) -> None:
        self.problem = problem
        self.aim = aim * problem.mean
        self.upper = problem.mean + self.aim
        self.beta = beta
        self.gamma = gamma
        self.assignment = problem.current

    def run(self) -> BalancePlan:
        self.assignment, switched = switch_roles(self.problem, self.assignment, self.aim)
        self._move_active(switched)
        plan = judged(self.problem, self.assignment)
        if self.problem.limits.replica_weight and not plan.met:
            self._move_replicas()
            self._move_active(switched)
            plan = judged(self.problem, self.assignment)
        return plan

    def _move_active(self, switched: Bools) -> None:
        choice = self._choose(switched)
        if len(choice.home):
            self._send_home(choice.home)
        if len(choice.moved):
            keys, tasks = self._place(choice.moved)
            self.assignment = reassigned(self.assignment, keys, tasks)

    # -- step 1 ------------------------------------------------------------------------------

    def revert_free(self) -> bool:
        """Send home every key whose home still holds its state: empties the table for nothing."""
        away = np.flatnonzero(self.assignment.differs(self.problem.home)).astype(np.int64)
        free = away[self._homing_cost(away) == 0]
        self._send_home(free)
        return len(free) > 0

    # -- step 2 ------------------------------------------------------------------------------

    def _choose(self, switched: Bools) -> _Choice:
        """The cheapest price of a table entry whose choice keeps the table in its limit."""
        self.away = self.assignment.differs(self.problem.home)
        listed = np.flatnonzero(self.away & ~switched).astype(np.int64)
        homing = self._homing_cost(listed)
        limit = self.problem.limits.table
        self.loads = self.problem.loads(self.assignment)
        self.candidates: dict[int, Ints] = {}
        choice = self._at_price(0.0, listed, homing)
        if choice.table <= limit:
            return choice
        self._narrow(4 * max(limit, 250))
        high = max(float(self.problem.state.mean()), 1e-12)
        for _ in range(4 * PRICE_STEPS):
            choice = self._at_price(high, listed, homing)
            if choice.table <= limit:
                break
            high *= 8
        else:
            return self._cut(choice)
        low = high / 8
        for _ in range(PRICE_STEPS):
            middle = (low * high) ** 0.5
            trial = self._at_price(middle, listed, homing)
            if trial.table <= limit:
                choice, high = trial, middle
            else:
                low = middle
        return choice

    def _cut(self, choice: _Choice) -> _Choice:
        """No price suffices: do what the table allows, dearest keys first."""
        known = self.away[choice.moved]
        new = choice.moved[~known]
        spare = max(0, self.problem.limits.table - choice.table + len(new))
        kept = np.concatenate([choice.moved[known], dearest(new, self.problem.costs, spare)])
        return _Choice(choice.home, kept, self.problem.limits.table)

    def _narrow(self, size: int) -> None:
        """Keep the dearest `size` keys of each task: with a full table no others pay off."""
        for task in range(self.problem.tasks):
            keys = np.flatnonzero(self.assignment.active == task)
            self.candidates[task] = dearest(keys, self.problem.costs, size)

    def _at_price(self, price: float, listed: Ints, homing: Floats) -> _Choice:
        problem = self.problem
        home = listed[homing < price]
        active = self.assignment.active
        loads = self.loads.copy()
        if len(home):
            # Replicas are a detail here: their share of the load is settled in `judged`.
            cost = problem.costs[home]
            loads -= np.bincount(active[home], cost, problem.tasks)
            loads += np.bincount(problem.home.active[home], cost, problem.tasks)
        need, _ = needs(loads, problem.mean, self.aim)
        largest = self.upper - float(loads.min())
        sent = np.zeros(len(active), dtype=np.bool_)
        sent[home] = True
        moved = [
            self._cover(self._candidates(int(d), sent), float(need[d]), largest, price)
            for d in np.flatnonzero(need)
        ]
        keys = np.concatenate(moved) if moved else np.zeros(0, dtype=np.int64)
        table = int(self.away.sum()) - len(home) + int(np.count_nonzero(~self.away[keys]))
        return _Choice(home, keys, table)

    def _candidates(self, task: int, taken: Bools) -> Ints:
        """Keys active on `task` that are not `taken`."""
        mine = self.candidates.get(task)
        if mine is None:
            mine = np.flatnonzero(self.assignment.active == task).astype(np.int64)
        return mine[~taken[mine]]

    def _cover(self, keys: Ints, need: float, largest: float, price: float) -> Ints:
        """Keys of one task worth at least `need` load, for about the least price in all."""
        costs = self.problem.costs[keys]
        usable = (costs > 0) & (costs <= max(largest, need))
        keys, costs = keys[usable], costs[usable]
        price_of = self._price(keys, price)
        single = np.flatnonzero(costs >= need)
        small = np.flatnonzero(costs <= need)
        metric = price_of[small] / costs[small] ** self.beta
        order = small[least_first(metric, costs[small], need)]
        total = np.cumsum(costs[order])
        cut = int(np.searchsorted(total, need))
        chosen = order[: cut + 1]
        if cut < len(order):
            chosen = _trimmed(chosen, order[cut:], costs, price_of, need)
        elif not len(single):
            return keys[chosen]
        if len(single):
            lone = single[price_of[single].argmin()]
            if cut >= len(order) or price_of[lone] < price_of[chosen].sum():
                chosen = np.array([lone])
        return keys[chosen]

    def _price(self, keys: Ints, price: float) -> Floats:
        copies = 1 + (self.assignment.backups[keys] != NONE).sum(axis=1)
        state = self.problem.state[keys] * copies ** -float(self.gamma)
        total: Floats = state + np.where(self.away[keys], 0.0, price)
        return total

    def _homing_cost(self, keys: Ints) -> Floats:
        """State to copy so that each of `keys` is again where the hash puts it."""
        home = self.problem.home
        copies = np.zeros(len(keys))
        for column in (home.active, *home.backups.T):
            target = column[keys]
            copies += (target != NONE) & ~self.assignment.holds(keys, target)
        return copies * self.problem.state[keys]

    def _send_home(self, keys: Ints) -> None:
        active, backups = self.assignment.active.copy(), self.assignment.backups.copy()
        active[keys] = self.problem.home.active[keys]
        backups[keys] = self.problem.home.backups[keys]
        self.assignment = Assignment(active, backups, self.problem.tasks)

    # -- step 3 ------------------------------------------------------------------------------

    def _place(self, chosen: Ints) -> tuple[Ints, Ints]:
        problem, active = self.problem, self.assignment.active
        weight = problem.limits.replica_weight
        loads = problem.loads(self.assignment)
        loads -= np.bincount(active[chosen], problem.costs[chosen], problem.tasks)
        preferred = min(self.upper, water_level(loads, float(problem.costs[chosen].sum())))
        carried: list[float] = loads.tolist()
        queue = [(-float(problem.costs[k]), int(k)) for k in chosen]
        heapq.heapify(queue)
        placed: dict[int, int] = {}
        evictions = 0
        while queue:
            negative, key = heapq.heappop(queue)
            cost, origin = -negative, int(active[key])
            held = [int(t) for t in self.assignment.backups[key] if t != NONE]
            task = self._wanted(key, cost, held, carried, preferred)
            if task is None:
                order = sorted(range(problem.tasks), key=lambda t: carried[t])
                task = order[0]
                if carried[task] + cost > self.upper and evictions < EVICTIONS_MAX:
                    evictions += 1
                    task, evicted = self._evict(order, cost, carried, placed, queue)
                    for k in evicted.tolist():
                        carried[int(active[k])] -= float(problem.costs[k])
                        heapq.heappush(queue, (-float(problem.costs[k]), k))
            placed[key] = task
            carried[task] += cost
            if task in held:
                # The replica's own load leaves this task and appears where the key was active.
                carried[task] -= weight * cost
                carried[origin] += weight * cost
        keys = np.fromiter(placed.keys(), dtype=np.int64, count=len(placed))
        return keys, np.fromiter(placed.values(), dtype=np.int64, count=len(placed))

    def _wanted(
        self, key: int, cost: float, held: list[int], carried: list[float], preferred: float
    ) -> int | None:
        """A task where the key costs nothing to move or frees an entry, if it has room."""
        home = int(self.problem.home.active[key])
        for task in sorted(held, key=lambda t: carried[t]):
            if carried[task] + cost <= preferred:
                return task
        if home != self.assignment.active[key] and carried[home] + cost <= preferred:
            return home
        return None

    def _evict(
        self,
        order: list[int],
        cost: float,
        carried: list[float],
        placed: dict[int, int],
        queue: list[tuple[float, int]],
    ) -> tuple[int, Ints]:
        """The first task that can make room by giving up cheaper keys of its own, and those."""
        busy = np.zeros(len(self.problem.costs), dtype=np.bool_)
        busy[[*placed, *(k for _, k in queue)]] = True
        for task in order:
            need = carried[task] + cost - self.upper
            if need <= 0:
                return task, np.zeros(0, dtype=np.int64)
            mine = self._candidates(task, busy)
            # Only keys cheaper than the one placed (the cursor of algorithm 3): it must end.
            mine = mine[self.problem.costs[mine] < cost]
            evicted = self._cover(mine, need, cost, 0.0)
            if self.problem.costs[evicted].sum() >= need:
                return task, evicted
        return order[0], np.zeros(0, dtype=np.int64)

    # -- replicas that weigh -----------------------------------------------------------------

    def _move_replicas(self) -> None:
        """Take replicas off tasks that are still overloaded, each to the least loaded without it.

        Only where replicas weigh: a hot key next to many replicas cannot be helped otherwise.
        """
        problem, weight = self.problem, self.problem.limits.replica_weight
        active, backups = self.assignment.active, self.assignment.backups.copy()
        self.candidates = {}
        loads = problem.loads(self.assignment)
        for task in np.flatnonzero(loads > self.upper):
            held = np.flatnonzero((backups == task).any(axis=1)).astype(np.int64)
            need = float(loads[task] - self.upper) / weight
            room = (self.upper - float(loads.min())) / weight
            for key in dearest(self._cover(held, need, room, 0.0), problem.costs, len(held)):
                copies = {int(active[key]), *backups[key].tolist()}
                free = [t for t in range(problem.tasks) if t not in copies]
                if not free:
                    continue
                target = min(free, key=lambda t: loads[t])
                load = weight * float(problem.costs[key])
                if loads[target] + load <= self.upper:
                    backups[key][backups[key] == task] = target
                    loads[task] -= load
                    loads[target] += load
        self.assignment = Assignment(active, backups, problem.tasks)


def _trimmed(chosen: Ints, beyond: Ints, costs: Floats, price_of: Floats, need: float) -> Ints:
    """Replace the last key by the cheapest that still suffices, then drop what is not needed."""
    rest = need - float(costs[chosen[:-1]].sum())
    # The first key beyond suffices; sums in another order may differ in the last digit.
    enough = beyond[costs[beyond] >= min(rest, costs[beyond[0]])]
    last = enough[price_of[enough].argmin()]
    chosen = np.append(chosen[:-1], last)
    spare = float(costs[chosen].sum()) - need
    surplus = chosen[costs[chosen] <= spare]
    dropped = []
    for index in surplus[np.argsort(-price_of[surplus], kind="stable")].tolist():
        if costs[index] <= spare:
            spare -= float(costs[index])
            dropped.append(index)
    return np.setdiff1d(chosen, dropped)
