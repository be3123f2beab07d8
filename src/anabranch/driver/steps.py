"""The one loop of a run: an event, the commands it causes, the events that these cause, and so on.

That is a step. Steps never overlap, whatever threads bring the events: each has its turn, in the
order in which they asked, so that requests come between two slices however many are waiting. An
event that comes from within a step (a sink's function that stops the job) is handled when that
step is done. Observers are called between steps and cannot hurt the run: one may stop or scale
the job, one that raises is logged.

Whatever else leaves a step in the middle ends the run, be it ours, a stranger's or Ctrl-C: no
command is carried out after one that failed. So at most the newest slice is journalled and not
exposed, which the next driver makes up for.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from anabranch.control.controller import Controller, Phase
from anabranch.driver.clock import Clock
from anabranch.driver.effects import Effects
from anabranch.driver.history import History
from anabranch.driver.progress import Progress
from anabranch.errors import (
    AdjustmentError,
    AnabranchError,
    ClusterError,
    InvariantError,
    StorageError,
)
from anabranch.model.commands import Command, FinishBatch
from anabranch.model.events import DrainRequested, Event, NodesLost, ScaleRequested

log = logging.getLogger("anabranch")
RESTART = "start the job again with the same checkpoint directory, nothing committed is lost"
Observer = Callable[[Progress], None]


@dataclass(frozen=True)
class Step:
    """What the one who brought an event wants to know of its step."""

    finished_batch: int | None = None


class Steps:
    """Feeds the controller and carries out what it says; `error` is what ended the run, if not
    its own end."""

    def __init__(
        self, controller: Controller, effects: Effects, history: History, clock: Clock
    ) -> None:
        self._controller = controller
        self._effects = effects
        self._history = history
        self._clock = clock
        self.turns = Turns()
        self._later: deque[Event] = deque()  # from within the step in hand
        self._telling = threading.Lock()
        self._complained: set[Observer] = set()
        self.on_progress: list[Observer] = []
        self.error: AnabranchError | None = None

    @property
    def over(self) -> bool:
        """Has the run come to its end, good or bad?"""
        return self.error is not None or self._controller.phase is Phase.ENDED

    def take(self, event: Event, wait: bool = True) -> Step | None:
        """Handle an event in its turn. None if that has not happened: it comes from within a
        step, which ends first; or another thread's step is in hand, and this does not `wait`.

        Raises AdjustmentError when a request is refused, and the error that ends the run.
        """
        if self.turns.mine:
            self._later.append(event)
            return None
        if not self.turns.take(wait):
            return None
        try:
            try:
                step = self._step(event)
                while self._later:
                    self._step_later(self._later.popleft())
            finally:
                self.turns.give_back()
        finally:
            self._tell()
        return step

    def abort(self, error: AnabranchError) -> None:
        """End the run, unless it is over, once the step in hand is done; no other one begins."""
        self.turns.take()
        try:
            if not self.over:
                self.error = error
        finally:
            self.turns.give_back()

    def _step(self, event: Event) -> Step:
        if self.over:
            if isinstance(event, ScaleRequested | DrainRequested):
                raise AdjustmentError("the job has ended; start it again to change it")
            return Step()
        finished = None
        doing, todo = type(event).__name__, None
        try:
            self._effects.check()  # a driver that was replaced ends, also when it has nothing to do
            todo = deque(self._handle(event))
            while todo:
                command = todo.popleft()
                doing = type(command).__name__
                caused = self._effects.execute(command)
                self._history.queries.done(command)
                if caused is not None:
                    todo.extend(self._handle(caused))
                if isinstance(command, FinishBatch):
                    finished = command.batch
        except Exception as e:
            if todo is None and isinstance(e, AdjustmentError):
                raise  # a refusal: nothing has changed
            self.error = e if isinstance(e, AnabranchError) else _explained(e, doing)
            if isinstance(self.error, InvariantError):
                self.error.told(self._controller.story.told())
            if self.error is e:
                raise
            raise self.error from e
        except BaseException as e:
            self.error = _explained(e, doing)
            raise
        return Step(finished)

    def _handle(self, event: Event) -> list[Command]:
        if isinstance(event, NodesLost):
            self._effects.heard(event)
        wall_ms = self._clock.wall_ms()
        commands = self._controller.handle(event, wall_ms)
        self._history.queries.handled(commands, wall_ms)
        return commands

    def _step_later(self, event: Event) -> None:
        try:
            self._step(event)
        except AdjustmentError as e:  # who asked for it is not there any more
            log.warning("a request was refused: %s", e)

    def _tell(self) -> None:
        """Call the observers, one slice after the other; if a thread is at it, it tells all."""
        untold = self._history.untold
        while untold and self._telling.acquire(blocking=False):
            try:
                while untold:
                    progress = untold.popleft()
                    for observer in list(self.on_progress):
                        self._call(observer, progress)
            finally:
                self._telling.release()

    def _call(self, observer: Observer, progress: Progress) -> None:
        try:
            observer(progress)
        except Exception as e:
            if observer not in self._complained:
                self._complained.add(observer)
                log.warning(
                    "a function given to on_progress raised %r on slice %s; the run goes on, and "
                    "it is not said again",
                    e,
                    progress.slice,
                    exc_info=True,
                )
        except BaseException as e:  # sys.exit(), Ctrl-C
            self.abort(_explained(e, "a function given to on_progress"))
            raise


class Turns:
    """A lock that is handed over in the order in which it was asked for, so that a thread which
    gives it back and wants it again, as between two slices, lets the others go first."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._taken = False
        self._owner: int | None = None

    @property
    def waiting(self) -> int:
        """How many ask for a turn, besides the one that has it."""
        return len(self._waiting)

    @property
    def mine(self) -> bool:
        return self._owner == threading.get_ident()

    def take(self, wait: bool = True) -> bool:
        with self._guard:
            turn = threading.Event()
            if not self._taken:
                self._taken = True
                turn.set()
            elif not wait:
                return False
            else:
                self._waiting.append(turn)
        try:
            turn.wait()
        except BaseException:  # Ctrl-C
            with self._guard:
                still = turn in self._waiting
                if still:
                    self._waiting.remove(turn)
            if not still:
                self.give_back()
            raise
        self._owner = threading.get_ident()
        return True

    def give_back(self) -> None:
        with self._guard:
            self._owner = None
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._taken = False


def _explained(problem: BaseException, doing: str) -> AnabranchError:
    """One sentence for what is not ours; the exception itself stays attached as its cause."""
    told = type(problem).__name__ + (f": {problem}" if str(problem) else "")
    if isinstance(problem, Exception):
        kind = StorageError if isinstance(problem, OSError) else InvariantError
        return kind(f"the driver failed ({doing}): {told}; {RESTART}")
    return ClusterError(f"the driver was interrupted ({doing}): {told}; {RESTART}")
