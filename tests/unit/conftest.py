"""Unit tests never wait for the disk: what must reach it in which order is tested by crashing at
every step, not by the kernel's own fsync."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def quick_fsync() -> None:
    os.fsync = lambda fd: None
