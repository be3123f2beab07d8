"""`anabranch state DIR [OPERATOR]`: what a job's checkpoint directory holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as pq
import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from anabranch.cli.errors import Verbose
from anabranch.errors import ConfigError
from anabranch.storage.files import explained
from anabranch.upgrade.state_reader import Checkpoint, inspect, read_state

SHOWN_ROWS = 20  # without --limit


def state(
    directory: Annotated[Path, typer.Argument(help="The checkpoint directory of a job.")],
    operator: Annotated[
        str | None, typer.Argument(help="A stateful operator, to see its rows.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help=f"At most this many rows; {SHOWN_ROWS} if shown here.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the rows to this Parquet file instead.")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """List what a checkpoint directory holds, or read an operator's state.

    Changes nothing and takes no lock: the job may be running.
    """
    console = Console(highlight=False)
    if limit is not None and limit < 0:
        raise ConfigError(f"--limit is {limit}; give a number of rows")
    if operator is None:
        if limit is not None or out is not None:
            raise ConfigError("--limit and --out are for the rows of an operator; name one, too")
        _list(console, inspect(directory))
        return
    rows = read_state(directory, operator)
    if out is not None:
        written = rows if limit is None else rows.slice(0, limit)
        with explained("write", out):
            pq.write_table(written, out)
        _print(console, f"{written.num_rows:,} rows of {operator} are in {out}")
        return
    shown = rows.slice(0, SHOWN_ROWS if limit is None else limit)
    console.print(_rows_table(shown))
    if shown.num_rows < rows.num_rows:
        _print(console, f"{shown.num_rows:,} of {rows.num_rows:,} rows; --limit or --out for more")


def _list(console: Console, found: Checkpoint) -> None:
    _print(console, f"topology {found.topology}, driver generation {found.generation}")
    if found.cut is None:
        _print(console, "no checkpoint has been completed yet")
    else:
        before = "none" if found.previous is None else f"slice {found.previous}"
        _print(console, f"newest checkpoint: slice {found.cut} (the one before: {before})")
        console.print(_operators_table(found))
    for name, lacks in found.behind.items():
        told = next((f" (state of slice {o.cut})" for o in found.operators if o.name == name), "")
        _print(console, f"{name} waits for nodes, and lacks the slices from {lacks} on{told}")
    if found.slices:
        first, last = found.slices[0].number, found.slices[-1].number
        rows = sum(sum(s.rows.values()) for s in found.slices)
        what = f"slices {first} to {last}" if last > first else f"slice {first}"
        _print(console, f"journalled after it: {what}, {rows:,} rows to replay")
    else:
        _print(console, "journalled after it: nothing to replay")


def _operators_table(found: Checkpoint) -> Table:
    table = Table()
    for column in ("operator", "type", "key", "partitions", "keys", "rows", "bytes"):
        left = column in ("operator", "type", "key")
        table.add_column(column, justify="left" if left else "right")
    for op in found.operators:
        key = escape(", ".join(op.key))
        numbers = f"{op.partitions}", f"{op.keys:,}", f"{op.rows:,}", decimal(op.bytes)
        table.add_row(escape(op.name), op.type, key, *numbers)
    return table


def _rows_table(rows: pa.Table) -> Table:
    table = Table()
    for field in rows.schema:
        numeric = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        table.add_column(escape(field.name), justify="right" if numeric else "left")
    for row in rows.to_pylist():
        table.add_row(*("[dim]null[/]" if v is None else escape(str(v)) for v in row.values()))
    return table


def _print(console: Console, sentence: str) -> None:
    console.print(escape(sentence), soft_wrap=True)
