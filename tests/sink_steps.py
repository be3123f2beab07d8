"""Kill or suspend a driver between any two steps of what it does with a sink.

A step is a file operation, an exchange with the PostgreSQL server or a call of delta-rs, by the
thread of the test. A kill is an exception that nothing catches, raised instead of the n-th step and
of all after it; a driver that is suspended goes on with that step after something else happened.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deltalake
import psycopg
import pytest


class Killed(BaseException):
    """Not an Exception: nothing in the product may catch it."""


@contextmanager
def killed_at(monkeypatch: pytest.MonkeyPatch, step: int) -> Iterator[list[str]]:
    """Raise Killed instead of the n-th step and all after it; lists those before."""
    done: list[str] = []

    def before(name: str) -> None:
        if len(done) == step:
            raise Killed(name)
        done.append(name)

    with monkeypatch.context() as patch:
        _guard(patch, before)
        yield done


@contextmanager
def suspended_at(
    monkeypatch: pytest.MonkeyPatch, step: int, meanwhile: Callable[[], None]
) -> Iterator[list[str]]:
    """Call `meanwhile` before the n-th step, once; lists the steps but those of `meanwhile`."""
    done: list[str] = []
    inside = False

    def before(name: str) -> None:
        nonlocal inside
        if inside:
            return
        if len(done) == step:
            inside = True
            meanwhile()
            inside = False
        done.append(name)

    with monkeypatch.context() as patch:
        _guard(patch, before)
        yield done


def _guard(patch: pytest.MonkeyPatch, before: Callable[[str], None]) -> None:
    main = threading.get_ident()

    def guard(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == main:
                before(name)
            return real(*args, **kwargs)

        return call

    for name in ("write", "fsync", "link", "unlink", "rmdir"):
        patch.setattr(os, name, guard(name, getattr(os, name)))
    for name in ("replace", "rename", "mkdir"):
        patch.setattr(Path, name, guard(name, getattr(Path, name)))
    patch.setattr(psycopg, "connect", guard("connect", psycopg.connect))
    patch.setattr(psycopg.Connection, "wait", guard("sql", psycopg.Connection.wait))
    patch.setattr(deltalake.DeltaTable, "__init__", guard("open", deltalake.DeltaTable.__init__))
    patch.setattr(deltalake, "write_deltalake", guard("commit", deltalake.write_deltalake))
    claim = guard("claim", deltalake.DeltaTable.create_write_transaction)
    patch.setattr(deltalake.DeltaTable, "create_write_transaction", claim)
