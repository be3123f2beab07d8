"""A job one of whose nodes is behind a network link of its own: python -m cut_off_node ROOT.

The link is cut for longer and for shorter than the driver waits. Nothing in the namespace is
stopped: what is cut off goes on, writes to the same disk, and does not know.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jobs import wait_for
from test_node_kills import Running, disturbed

from anabranch.api.job import inside
from anabranch.model.ids import NodeId
from anabranch.spark import embedded
from anabranch.spark.embedded import EmbeddedCluster
from anabranch.spark.java import JavaInfo

TIMEOUT_S = 5


def shell(command: str) -> None:
    subprocess.run(command.split(), check=True)


class Link:
    """A network namespace, joined to this one by a pair of devices."""

    def __init__(self) -> None:
        self.name = f"cut{os.getpid()}"
        net = f"198.18.{os.getpid() % 250}"  # kept free for tests of networks
        self.ours, self.theirs = f"{net}.1", f"{net}.2"
        # The devices, as both `ip` and `tc` name them.
        self._here, self._there = f"dev {self.name}a", f"dev {self.name}b"
        self._inside = f"-n {self.name}"
        shell(f"ip netns add {self.name}")
        shell(f"ip link add {self.name}a type veth peer name {self.name}b netns {self.name}")
        shell(f"ip address add {self.ours}/30 {self._here}")
        shell(f"ip link set {self._here} up")
        shell(f"ip {self._inside} address add {self.theirs}/30 {self._there}")
        shell(f"ip {self._inside} link set {self._there} up")
        shell(f"ip {self._inside} link set dev lo up")

    def cut(self) -> None:
        """Every packet is dropped in silence: no connection is refused or reset."""
        self._queue("add", "pfifo limit 0")

    def mend(self) -> None:
        self._queue("del")

    def _queue(self, action: str, kind: str = "") -> None:
        shell(f"tc qdisc {action} {self._here} root {kind}")
        shell(f"tc {self._inside} qdisc {action} {self._there} root {kind}")

    def remove(self) -> None:
        shell(f"ip netns delete {self.name}")


@contextmanager
def linked() -> Iterator[Link]:
    link = Link()
    try:
        yield link
    finally:
        link.remove()


def add_node_behind(link: Link, cluster: EmbeddedCluster, root: Path) -> None:
    """A worker that is started by a Java which enters the namespace first."""
    java = root / "inside" / "bin" / "java"
    java.parent.mkdir(parents=True)
    real = cluster._java
    java.write_text(
        f'#!/bin/sh\nexec nsenter --net=/run/netns/{link.name} {real.executable} "$@"\n'
    )
    java.chmod(0o755)
    cluster._java, embedded.HOST = JavaInfo(java.parents[1], real.version), link.theirs
    try:
        cluster.add_node()
    finally:
        cluster._java, embedded.HOST = real, link.ours


def main() -> None:
    root = Path(sys.argv[1])
    with linked() as link:
        embedded.HOST = link.ours
        with EmbeddedCluster(nodes=2, memory_mb=512) as cluster:
            add_node_behind(link, cluster, root)
            running = Running(
                cluster, cluster.session("cut off"), root, node_timeout=f"{TIMEOUT_S}s"
            )
            cut_and_mend(running, link)
            running.end()


def cut_and_mend(running: Running, link: Link) -> None:
    running.on_all_nodes()
    far = behind(running, link)
    zombie = running.node_process(far)
    recovery = disturbed(running, link.cut, far)
    assert "silent" in recovery.reason, running.job.recoveries
    running.slices(5)
    assert far not in running.placement.nodes
    assert Path(f"/proc/{zombie}").exists()  # it has not heard of anything
    link.mend()
    wait_for(lambda: not Path(f"/proc/{zombie}").exists())
    running.on_all_nodes()  # its worker has another executor
    assert behind(running, link) != far

    before = len(running.job.recoveries)
    link.cut()
    time.sleep(TIMEOUT_S / 5)
    link.mend()
    running.slices(5)
    assert len(running.job.recoveries) == before  # too short to be a loss


def behind(running: Running, link: Link) -> NodeId:
    """The node behind the link, which has its share of the partitions."""
    hosts = inside(running.job).run.cluster.host_names
    (found,) = (n for n in running.placement.nodes if hosts[n] == link.theirs)
    return found


if __name__ == "__main__":
    main()
