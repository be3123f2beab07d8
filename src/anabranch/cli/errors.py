"""How the command line ends when something is wrong: one sentence and exit status 1.

A stack trace is for whoever asks for it with `--verbose`; the sentence comes first even then.
"""

from __future__ import annotations

import traceback
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from anabranch.errors import AnabranchError, InvariantError

_VERBOSE = "anabranch.verbose"  # in the context's meta, which all commands of one call share


def _remember(context: typer.Context, verbose: bool) -> bool:
    if verbose:
        context.meta[_VERBOSE] = True
    return verbose


Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", callback=_remember, help="After an error, show its stack trace.", is_eager=True
    ),
]


class Commands(TyperGroup):
    """A group whose commands raise freely; the outermost one reports."""

    def invoke(self, ctx: Any) -> Any:
        if ctx.parent is not None:
            return super().invoke(ctx)
        try:
            return super().invoke(ctx)
        except AnabranchError as error:
            shown = error
        except typer.Abort:
            raise
        except Exception as error:
            if hasattr(error, "exit_code"):  # an exit, or a wrong option that Typer explains
                raise
            shown = InvariantError(f"unexpected {type(error).__name__}: {error}")
            shown.__cause__ = error
        report(shown, bool(ctx.meta.get(_VERBOSE)))
        raise typer.Exit(1)


def report(error: AnabranchError, verbose: bool) -> None:
    """Print the sentence to stderr; the rest only for bugs of ours and for those who ask."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold red]error:[/] {escape(error.message)}")
    if isinstance(error, InvariantError):
        console.print("This is a bug in Anabranch; please report it with the trace of --verbose.")
    if not verbose:
        return
    if detail := error.fields.get("detail"):  # of a user's function that raised on a node
        console.print(escape(str(detail)))
    console.print(escape("".join(traceback.format_exception(error))))
