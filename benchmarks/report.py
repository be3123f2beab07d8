"""How every benchmark ends: a readable table, then one line of JSON with its figures."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print `rows` under `columns`; floats with three significant digits."""
    out = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        out.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        out.add_row(*(f"{c:.3g}" if isinstance(c, float) else str(c) for c in row))
    Console(width=max(100, 14 * len(columns))).print(out)


def figures(values: Mapping[str, float | int | bool]) -> None:
    """Print the last line of the run: its figures as JSON."""
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}
    print(json.dumps(rounded), flush=True)


def machine() -> str:
    """One line on where the figures were measured, for docs/results."""
    return f"{platform.machine()}, Python {sys.version.split()[0]}, {platform.system()}"
