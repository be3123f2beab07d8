"""Which processes are taken for a cluster's own, to be killed with it."""

from __future__ import annotations

import os
import subprocess
import sys

from anabranch.spark.watchdog import MEMBER_VARIABLE, members
from strangers import as_root, said, stranger

DIRECTORY = "/nowhere/of-this-test"
WAIT = "print('ready', flush=True); input()"


@as_root
def test_a_process_of_another_user_is_no_member_whatever_it_says() -> None:
    says = {MEMBER_VARIABLE: DIRECTORY}
    own = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", WAIT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **says},
    )
    with own, stranger(WAIT, **says) as other:
        assert said(own) == said(other) == b"ready"
        assert members(DIRECTORY) == [own.pid]
        own.kill()
        other.kill()
