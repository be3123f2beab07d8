"""Every socket on which a cluster of this machine listens, and what it says to a stranger."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from anabranch.spark import watchdog
from anabranch.spark.embedded import EmbeddedCluster
from anabranch.spark.session import close_callbacks

LISTENS = "0A"
LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
# An application's first word to each of Spark's kinds of servers, without the secret.
HELLOS = (
    b"GET / HTTP/1.0\r\n\r\n",
    b"r\nu\njava.lang.System\nrj\ne\n",  # Py4J, where Python calls the JVM: import a class
    b"c\np0\ncall\nsforged\nL1\ne\n",  # Py4J, where the JVM calls Python: here is a batch
    struct.pack("!QBQI", 25, 3, 1, 4) + b"junk",  # a remote call
)
REFUSALS = (b"403 Forbidden", b"Authentication error", b"Expected SaslMessage")


def sockets(pid: int) -> set[str]:
    """The kernel's numbers of the sockets a process has."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.update(re.findall(r"socket:\[(\d+)\]", str(fd.readlink())))
        except OSError:
            continue  # closed in the meantime
    return found


def listening(pid: int) -> Iterator[tuple[str, int]]:
    """Address (in the kernel's hexadecimal) and port of every TCP socket it listens on."""
    own = sockets(pid)
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            address, _, port = columns[1].partition(":")
            if columns[3] == LISTENS and columns[9] in own:
                yield address, int(port, 16)


def answers(port: int) -> list[bytes]:
    found = []
    for hello in HELLOS:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as caller:
            caller.sendall(hello)
            try:
                found.append(caller.recv(4_096))
            except OSError:
                found.append(b"")
    return found


@pytest.fixture
def processes(cluster: EmbeddedCluster, spark: SparkSession) -> dict[int, str]:
    """All of the cluster with what they are, and this one, with everything it ever listens on."""
    close_callbacks(spark)
    spark.sparkContext.parallelize([1], 1).map(lambda x: x).collect()
    pids = [os.getpid(), *watchdog.members(str(cluster.directory))]
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_text(errors="replace") for pid in pids}
    assert any("Master" in command for command in commands.values())
    assert any("CoarseGrainedExecutorBackend" in command for command in commands.values())
    return commands


def test_a_local_cluster_listens_on_this_machine_only_and_asks_who_calls(
    processes: dict[int, str], spark: SparkSession
) -> None:
    seen = 0
    callbacks = spark.sparkContext._gateway._callback_server.port  # type: ignore[union-attr]
    for pid, command in processes.items():
        for address, port in listening(pid):
            assert address in LOOPBACK, (address, command)
            said = answers(port)
            if port == callbacks:  # it hangs up without a word
                assert not any(said), said
            else:
                assert any(r in a for r in REFUSALS for a in said), (port, said, command)
            seen += 1
    assert seen >= 2 + 2 + 3 + 3  # master, worker, executors; gateway, driver, its blocks
    spark.sparkContext.parallelize([1], 1).map(lambda x: x).collect()  # nothing has come of it


def test_the_secret_of_a_local_cluster_is_in_no_command_line(
    cluster: EmbeddedCluster, processes: dict[int, str]
) -> None:
    file = cluster.directory / "conf" / "spark-defaults.conf"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(cluster.directory.stat().st_mode) == 0o700
    secrets = [line.split()[1] for line in file.read_text().splitlines() if "ecret" in line]
    assert len(secrets) == 2
    for secret in secrets:
        assert not any(secret in command for command in processes.values())


def test_sockets_of_python_workers_are_where_nobody_else_can_look(
    cluster: EmbeddedCluster, processes: dict[int, str]
) -> None:
    """Spark asks nobody who connects to them."""
    table = Path("/proc/net/unix").read_text().splitlines()[1:]
    bound = {columns[6]: columns[7] for columns in map(str.split, table) if len(columns) == 8}
    paths = [bound[s] for pid in processes for s in sockets(pid) if s in bound]
    files = [p for p in paths if not p.startswith("@")]
    assert files
    for path in files:
        parents = [p for p in Path(path).parents if stat.S_IMODE(p.stat().st_mode) & 0o077 == 0]
        assert parents, path


def test_a_stranger_cannot_call_back_into_the_driver(spark: SparkSession) -> None:
    """Spark hands every batch to the job this way: a call is a batch."""
    close_callbacks(spark)
    got: list[object] = []

    def take(batch: object, number: int) -> None:
        got.append(batch)

    stream = spark.readStream.format("rate").load()
    query = stream.writeStream.foreachBatch(take).trigger(availableNow=True).start()
    assert query.awaitTermination(120)
    assert query.exception() is None
    before = list(got)
    assert before  # the JVM itself is let in
    gateway = spark.sparkContext._gateway
    proxies = [p for p in gateway.gateway_property.pool.dict if p != "t"]  # type: ignore[union-attr]
    port = gateway._callback_server.port  # type: ignore[union-attr]
    for proxy in proxies:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as stranger:
            stranger.sendall(f"c\n{proxy}\ncall\nsforged\nL1\ne\n".encode())
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(100) == b""
    assert got == before
