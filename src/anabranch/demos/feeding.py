"""Input of the demos: rows written as they would arrive, a Parquet file every half second."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.errors import StorageError

FILE_EVERY_S = 0.5


class Feeder:
    """A thread that writes files for `duration_s`. `due_by` says how many rows there are after so
    many seconds, `make` makes the next ones from their times (in µs). The last file's one row is
    at the end of the last window of `window_us`, and so closes it."""

    def __init__(
        self,
        directory: Path,
        duration_s: float,
        window_us: int,
        due_by: Callable[[float], int],
        make: Callable[[list[int]], pa.Table],
    ) -> None:
        self.rows = 0
        self.done = threading.Event()
        self.error: OSError | None = None
        self._directory = directory
        self._duration_s = duration_s
        self._window_us = window_us
        self._due_by = due_by
        self._make = make
        self._numbers = itertools.count(1)
        self._cut_short = threading.Event()
        self._thread = threading.Thread(target=self._work, name="feeder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """Write no more than the last file; returns when it is there."""
        self._cut_short.set()
        self._thread.join()

    def check(self) -> None:
        """Raises what kept it from writing."""
        if self.error is not None:
            raise StorageError(f"the demo cannot write its input: {self.error}") from self.error

    def _work(self) -> None:
        try:
            self._write_all()
        except OSError as e:
            self.error = e
        finally:
            self.done.set()

    def _write_all(self) -> None:
        start = last_us = time.time_ns() // 1_000
        began_us = time.monotonic_ns() // 1_000
        end = start + int(self._duration_s * 1e6)
        while last_us < end and not self._cut_short.wait(FILE_EVERY_S):
            # Event times go on evenly from the wall clock's at the start.
            now_us = min(end, start + time.monotonic_ns() // 1_000 - began_us)
            due = self._due_by((now_us - start) / 1e6) - self.rows
            step = max(1, (now_us - last_us) // max(1, due))
            self._write([min(last_us + i * step, now_us - 1) for i in range(due)])
            last_us = now_us
        self._write([-(-last_us // self._window_us) * self._window_us])

    def _write(self, times_us: list[int]) -> None:
        if not times_us:
            return
        name = f"{next(self._numbers):06d}.parquet"
        # Written under a name that Spark ignores, then renamed: it never reads half a file.
        hidden = self._directory / f".{name}"
        pq.write_table(self._make(times_us), hidden)
        hidden.rename(self._directory / name)
        self.rows += len(times_us)
