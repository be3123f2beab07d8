"""A run that a query feeds: who brings events on which thread, and who ends whom.

Batches come on the query's own thread, which waits in `on_batch` until the batch is finished and
offers it again for every slice it is cut into. Idle time, losses, arrivals, requests and stops come
on other threads. However the run ends, the query ends first, and one thread that waits for that
lets go of everything else.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from anabranch.driver.run import Run
from anabranch.errors import ClusterError
from anabranch.model.events import Idled, StopRequested

log = logging.getLogger("anabranch")


class Query(Protocol):
    """As Spark has it. It ends when a batch is refused, when it is stopped, and with its data."""

    def stop(self) -> None: ...

    def awaitTermination(self) -> Any:  # noqa: N802 - as Spark spells it
        """Raises what ended it, if not its own end."""
        ...


class StoppedError(Exception):
    """Ends the query from within: its batch must not be committed."""


class Reading:
    """A run, and the query that reads for it."""

    def __init__(
        self,
        run: Run,
        why: Callable[[Exception], str] = str,
        hush: Callable[[], None] = lambda: None,
    ) -> None:
        """`why` says in a line what a query's error means; `hush` is called before the query is
        ended by an exception of ours, whose trace nobody need see."""
        self.run = run
        self._why = why
        self._hush = hush
        self._ended = threading.Event()
        self._essential = threading.local()  # a thread that must not wait for the end of the run
        self.query: Query | None = None
        run.when_over = self._end_query

    def follow(self, query: Query) -> None:
        """From here on the run ends with this query, and this query with the run."""
        self.query = query
        watch = threading.Thread(
            target=self._watch, args=(query,), name="anabranch-watch", daemon=True
        )
        watch.start()
        if self.run.over:  # since before the query was known
            query.stop()

    def tick(self, interval_s: float) -> None:
        """From here on let time move when no batch comes."""
        clock = self.run.clock

        def tick() -> None:
            while not self._ended.wait(interval_s):
                if clock.seconds() - self.run.history.last_slice_at >= 1.5 * interval_s:
                    self.run.bring(Idled(clock.now_ms()), wait=False)

        threading.Thread(target=tick, name="anabranch-tick", daemon=True).start()

    def on_batch(self, rows: Any, number: int) -> None:
        """The query offers a batch; returning from here lets it commit its offsets."""
        self._essential.thread = True
        try:
            while not self.run.offer(number, rows):
                if self.run.over:
                    raise StoppedError
        except BaseException as e:  # it is kept, and ends the run
            self._hush()
            if isinstance(e, StoppedError):
                raise
            raise StoppedError from e
        finally:
            self._essential.thread = False

    def _watch(self, query: Query) -> None:
        """The query's end is the end of the data, a failure, or that of the run."""
        self._essential.thread = True
        problem: Exception | None = None
        try:
            query.awaitTermination()
        except Exception as e:  # also of the gateway, when the JVM is gone
            problem = e
        try:
            if problem is not None:
                self.run.abort(
                    ClusterError(f"reading {self.run.reads} failed: {self._why(problem)}")
                )
            else:
                self.run.take(StopRequested(self.run.clock.now_ms()))
        except BaseException as e:
            log.debug("the run ends with %r", e)  # it is kept
        finally:
            self.close()

    def _end_query(self) -> None:
        """The run is over; the query's own thread ends it by an exception instead."""
        if self.query is not None and not self._is_essential:
            with contextlib.suppress(Exception):  # Spark may be gone
                self.query.stop()

    @property
    def _is_essential(self) -> bool:
        return getattr(self._essential, "thread", False)

    def stop(self) -> None:
        """Finish the slice in hand, checkpoint, end. Returns when all is durable and let go of;
        asked for by an observer or a sink, when the run is about to end."""
        asked = self.run.stop()
        if asked and not self._is_essential:
            self._ended.wait()

    def await_termination(self, timeout: float | None = None) -> bool:
        return self._ended.wait(timeout)

    @property
    def active(self) -> bool:
        return not self._ended.is_set()

    def close(self) -> None:
        """Let go of everything; those who wait for the end go on only after that."""
        self.run.close()
        self._ended.set()
