"""What a run has done and how it went, for those who ask: slices, sums, recoveries, adjustments,
decisions, and remarks on all of that. It decides nothing; one thread at a time writes it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence

from anabranch.control.remarks import Remarks, Seen
from anabranch.driver.clock import Clock
from anabranch.driver.progress import Progress, Totals, summarise
from anabranch.driver.queries import Queries
from anabranch.model.commands import NoteBackups
from anabranch.model.events import NodesLost
from anabranch.model.ids import NodeId
from anabranch.model.placement import Placement
from anabranch.model.recovery import Adjustment, Cause, Recovery, RecoveryPlan
from anabranch.model.reports import NodeReport
from anabranch.model.scaling import Decision
from anabranch.model.slices import SlicePlan

log = logging.getLogger("anabranch")
PROGRESS_KEPT = 1_000


class History:
    """Of one run."""

    def __init__(
        self,
        watch: Remarks,
        clock: Clock,
        queries: Queries,
        dead_letters: str | None = None,
        cut: int = 0,
    ) -> None:
        """`cut` is the newest checkpoint of the runs before, by its slice."""
        self._watch = watch
        self._clock = clock
        self.queries = queries
        self._dead_letters = dead_letters or ""
        self._ran: Progress | None = None  # of the slice that is not shown yet
        self._checkpoint: tuple[int, float | None] = (cut, None)  # its slice, when it was complete
        self._known_lost_at: tuple[float, int] | None = None  # by both clocks
        self._recovery_began = self._restore_s = 0.0
        self._lost: tuple[NodeId, ...] = ()
        self._lost_reason = "start"
        self.last_slice_at = clock.seconds()
        self.progress: deque[Progress] = deque(maxlen=PROGRESS_KEPT)
        self.untold: deque[Progress] = deque()  # that no observer has heard of yet
        self.totals = Totals()
        self.recoveries: list[Recovery] = []
        self.adjustments: list[Adjustment] = []
        self.decisions: list[Decision] = []
        self.predicted: NoteBackups | None = None
        self.remarks: list[str] = []  # what the user should know of the job

    # -- slices --------------------------------------------------------------------------------

    def checkpointed(self, slice_no: int) -> None:
        """A restart begins after this slice."""
        if slice_no > self._checkpoint[0]:
            self._checkpoint = (slice_no, self._clock.seconds())

    def slice_ran(
        self,
        plan: SlicePlan,
        reports: Sequence[NodeReport],
        placement: Placement,
        began_s: float,
    ) -> None:
        """All nodes have reported; whether the slice has happened is to be seen."""
        now = self.last_slice_at = self._clock.seconds()
        slice_no, at = self._checkpoint
        checkpoint = slice_no, None if at is None else now - at
        ended_ms = self._clock.now_ms()
        waiting = self.queries.sinks_below(plan.paused)
        self._ran = summarise(
            plan, reports, now - began_s, ended_ms, placement, checkpoint, waiting
        )

    def slice_shown(self, refused: Mapping[str, int]) -> None:
        """It has happened, and its rows are out, but for those that targets refused."""
        assert self._ran is not None
        shown, self._ran = self._ran, None
        self.progress.append(shown)
        self.totals.add(shown)
        for sink, rows in refused.items():
            self.totals.refuse(sink, rows, self._dead_letters)
        self.untold.append(shown)
        self._remark(shown, refused)

    def late_shown(self, refused: Mapping[str, int]) -> None:
        """Rows of sinks that had waited are out, of a slice that happened before."""
        for sink, rows in refused.items():
            self.totals.refuse(sink, rows, self._dead_letters)

    def _remark(self, shown: Progress, refused: Mapping[str, int]) -> None:
        said = self._watch.observe(
            Seen(
                shown.ended_ms,
                shown.batch,
                shown.seconds,
                shown.checkpoint_slice,
                late=shown.late_by_operator,
                dead={**shown.dead_by_operator, **refused},
                state_rows={c: rows for c, (rows, _) in shown.state_by_operator.items()},
                cpu_s=shown.cpu_by_operator,
                sources_cpu_s=shown.cpu_s - sum(shown.cpu_by_operator.values()),
            )
        )
        for remark in said:
            log.warning("%s", remark)
        self.remarks += said

    # -- losses and changes --------------------------------------------------------------------

    def lost(self, event: NodesLost) -> None:
        """From now on the recovery counts."""
        log.warning("lost node %s: %s", ", ".join(event.nodes), event.reason)
        self._lost, self._lost_reason = event.nodes, event.reason
        self._known_lost_at = self._clock.seconds(), self._clock.wall_ms()

    def recovery_begins(self, plan: RecoveryPlan) -> None:
        if plan.part == 0:
            self._recovery_began, self._restore_s = self._clock.seconds(), 0.0
        if self._known_lost_at is None:  # a start, or a node process that was replaced
            self._known_lost_at = self._recovery_began, self._clock.wall_ms()

    def recovery_ended(self, plan: RecoveryPlan, reports: Sequence[NodeReport]) -> None:
        """Or a part of it."""
        if plan.part == 0:
            self._restore_s = max((r.restore_s for r in reports), default=0.0)
        if plan.more:
            return
        self._watch.interrupted()
        if not plan.restored and not self.queries.all_live:
            return  # all that was lost waits: it is told when the first of it comes back
        if plan.adjusts:
            self._adjusted(plan)
        else:
            self._recovered(plan)
        self._known_lost_at = None

    def _adjusted(self, plan: RecoveryPlan) -> None:
        paused = self._clock.seconds() - self.last_slice_at
        adjustment = Adjustment(plan.what, tuple(sorted(plan.restored)), plan.cut, paused)
        self.adjustments.append(adjustment)
        log.info("%s", adjustment)

    def _recovered(self, plan: RecoveryPlan) -> None:
        assert self._known_lost_at is not None
        now = self._clock.seconds()
        came = plan.cause is Cause.ROOM and not self._lost
        recovery = Recovery(
            nodes=self._lost,
            partitions=tuple(sorted(plan.restored)),
            promoted=tuple(sorted(plan.promoted)),
            shadows=len(plan.shadows),
            from_slice=plan.cut,
            to_slice=plan.next_slice - 1,
            reason=plan.cause.value if came else self._lost_reason,
            restore_s=self._restore_s,
            replay_s=now - self._recovery_began - self._restore_s,
            total_s=now - self._known_lost_at[0],
            known_ms=self._known_lost_at[1],
            predicted_s=self._predicted_for(plan) if self._lost else None,
        )
        self._lost, self._lost_reason = (), "its process was replaced"
        self.recoveries.append(recovery)
        log.info("%s", recovery)

    def _predicted_for(self, plan: RecoveryPlan) -> float | None:
        known = self.predicted.predicted_s if self.predicted is not None else {}
        return max((known[p] for p in plan.restored if p in known), default=None)

    # -- the rest ------------------------------------------------------------------------------

    def backups_chosen(self, choice: NoteBackups) -> None:
        """Say so when others back up than before."""
        if choice.why:
            who = "all operators keep" if choice.backups else "only sources keep"
            log.info("%s their output from now on: %s", who, choice.why)
            return
        before, self.predicted = self.predicted, choice
        if before is None or before.backups != choice.backups:
            log.info(
                "%d partitions back up; a lost node is predicted to be back within %.2f s%s",
                len(choice.backups),
                max(choice.predicted_s.values(), default=0.0),
                f" ({choice.problem})" if choice.problem else "",
            )

    def decided(self, decision: Decision) -> None:
        self.decisions.append(decision)
        log.info("%s", decision)

    def ended(self, newest: int) -> None:
        for total in self._watch.totals(self.totals.late, self.totals.dead):
            log.warning("%s", total)
        log.info("the run ended after slice %s", newest)
