"""The command line: `anabranch run`, `describe`, `demo` and `plan`."""

from __future__ import annotations

from anabranch.cli.main import app

__all__ = ["app"]
