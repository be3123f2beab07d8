"""A node that the network cuts off: alive, on the same disk, and out of the driver's reach."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from effort import LONG

HERE = Path(__file__).parent
TOOLS = ("ip", "tc", "nsenter", "unshare")


def may_cut_links() -> bool:
    """A network namespace needs its tools and the right to make one."""
    if not all(map(shutil.which, TOOLS)):
        return False
    made = subprocess.run(["unshare", "--net", "ip", "link", "set", "lo", "up"], check=False)
    return made.returncode == 0


@pytest.mark.skipif(not LONG, reason="a cluster of its own, for more than a minute")
def test_a_node_that_is_cut_off_is_replaced_and_fenced(tmp_path: Path) -> None:
    if not may_cut_links():
        pytest.skip("needs iproute2, util-linux and the right to make network namespaces")
    paths = [HERE, HERE.parent / "unit" / "node", HERE.parent, *filter(None, sys.path)]
    ran = subprocess.run(
        [sys.executable, "-m", "cut_off_node", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
