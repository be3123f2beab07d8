"""Processes of another user of this machine, for tests of who is let in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NOBODY = 65534
as_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can start a process of another user"
)

# Another user may not be able to read our Python, so it becomes that user after its start.
_BECOME = f"""
import os, socket, sys
os.setgroups([])
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
"""


def stranger(
    script: str, *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.Popen[bytes]:
    """A Python of another user, in a directory it could perhaps not have entered by itself."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _BECOME + script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=cwd,
        env={**os.environ, **environment},
    )


def said(process: subprocess.Popen[bytes]) -> bytes:
    """Its next line."""
    assert process.stdout is not None
    return process.stdout.readline().strip()
