"""Something else happens between two storage operations of a piece of code."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

OPERATIONS: list[tuple[Any, str]] = [
    (os, "write"), (os, "fsync"), (os, "link"), (os, "open"),
    (Path, "replace"), (Path, "rename"), (Path, "mkdir"), (Path, "unlink"), (Path, "open"),
    (Path, "iterdir"), (Path, "glob"), (shutil, "rmtree"),
]  # fmt: skip


@contextmanager
def interrupted(
    monkeypatch: pytest.MonkeyPatch, operation: int, visit: Callable[[], None]
) -> Iterator[list[str]]:
    """Call `visit` before the n-th storage operation of this thread; lists those before it."""
    done: list[str] = []
    main, visiting = threading.get_ident(), False

    def guard(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal visiting
            if threading.get_ident() == main and not visiting:
                if len(done) == operation:
                    visiting = True
                    visit()
                    visiting = False
                done.append(name)
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for owner, name in OPERATIONS:
            patch.setattr(owner, name, guard(name, getattr(owner, name)))
        yield done
