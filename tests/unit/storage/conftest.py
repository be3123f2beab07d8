"""One PostgreSQL server for all tests of a process: making one takes a second and more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from postgres_server import Server
from sink_kinds import InPostgres


@pytest.fixture(scope="session")
def started() -> Iterator[Server]:
    server = Server()
    yield server
    server.remove()


@pytest.fixture(scope="module")
def server(started: Server) -> Server:
    """With a database of the module's own."""
    started.renew()
    InPostgres.server = started
    return started
