"""A PostgreSQL server of its own for tests, in a temporary directory, reached by a Unix socket.

It runs from the binaries Debian's `postgresql` package brings; without them, tests that need it
are skipped with the reason. The server refuses to run as root: then it runs as `nobody`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

START_S = 120.0  # on a starved machine


def find_binaries() -> Path | None:
    """The directory of initdb and postgres, on the path or where Debian puts them."""
    found = shutil.which("initdb")
    candidates = [Path(found).parent] if found else []
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((c for c in candidates if (c / "initdb").exists()), None)


class Server:
    """One database cluster; it may be stopped and started in between."""

    def __init__(self) -> None:
        binaries = find_binaries()
        if binaries is None:
            pytest.skip("no PostgreSQL server found: apt-get install postgresql to run this test")
        self._binaries = binaries
        self._as: dict[str, Any] = {}
        # A short path: a Unix socket's name has at most 107 characters.
        self.directory = Path(tempfile.mkdtemp(prefix="anabranch-pg-", dir="/tmp"))
        if os.getuid() == 0:
            self._as = {"user": "nobody", "group": "nogroup", "extra_groups": []}
            shutil.chown(self.directory, "nobody")
        self._process: subprocess.Popen[bytes] | None = None
        self._address = f"host={self.directory} user=postgres dbname="
        self.address = f"{self._address}postgres"
        self._databases = 0
        self._run("initdb", "-D", "data", "-U", "postgres", "-A", "trust", "--no-sync")
        self.start()

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [str(self._binaries / program), *arguments],
            cwd=self.directory,
            check=True,
            capture_output=True,
            **self._as,
        )

    def start(self) -> None:
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(str(self._binaries / "postgres"), "-D", "data", "-k", str(self.directory)),
                    *("-c", "listen_addresses=", "-c", "fsync=off", "-c", "max_connections=20"),
                ],
                cwd=self.directory,
                stdout=log,
                stderr=log,
                **self._as,
            )
        deadline = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None, (self.directory / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, "the PostgreSQL server did not start in time"
            time.sleep(0.05)

    def _answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.address).close()
        except psycopg.OperationalError:
            return False
        return True

    def stop(self) -> None:
        """At once, as after a crash: open transactions are lost, committed ones are not."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(60)
            self._process = None

    def renew(self) -> None:
        """From now on, a database with nothing in it."""
        self._databases += 1
        self.query(f"CREATE DATABASE other{self._databases}")
        self.address = f"{self._address}other{self._databases}"

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run one statement by itself, as any reader would; its rows, if it has any."""
        import psycopg

        with psycopg.connect(self.address, autocommit=True) as connection:
            cursor = connection.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []
