"""How the command line ends when something is wrong: one sentence and exit status 1.

Only what cannot be explained is called a bug: not the operating system's refusals, not Ctrl-C (exit
status 130), not a reader of our output that has gone (no word at all). A stack trace is for those
who ask for it with `--verbose`; the sentence comes first even then.
"""

from __future__ import annotations

import errno
import traceback
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from anabranch.errors import AnabranchError, InvariantError, StorageError

INTERRUPTED = "interrupted; started again, a job goes on where it was"
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
        except KeyboardInterrupt:
            Console(stderr=True, highlight=False, soft_wrap=True).print(INTERRUPTED)
            raise typer.Exit(130) from None
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # which ends the command without a word
            shown = _refused(error)
        except Exception as error:
            if hasattr(error, "exit_code"):  # an exit, or a wrong option that Typer explains
                raise
            shown = InvariantError(f"unexpected {type(error).__name__}: {error}")
            shown.__cause__ = error
        report(shown, bool(ctx.meta.get(_VERBOSE)))
        raise typer.Exit(1)


def _refused(error: OSError) -> AnabranchError:
    """What the operating system did not allow, where nothing of ours has said it better."""
    hint = {
        errno.ENOSPC: "free some space and start again",
        errno.EDQUOT: "free some space and start again",
        errno.EACCES: "check whose it is, and the rights of this user",
        errno.EPERM: "check whose it is, and the rights of this user",
        errno.EMFILE: "allow more open files (ulimit -n)",
    }.get(error.errno or 0, "correct that and start again")
    names = [str(n) for n in (error.filename, error.filename2) if n is not None]
    where = f" ({', '.join(names)})" if names else ""
    shown = StorageError(f"{error.strerror or error}{where}; {hint}")
    shown.__cause__ = error
    return shown


def report(error: AnabranchError, verbose: bool) -> None:
    """Print the sentence to stderr; the rest only for bugs of ours and for those who ask."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold red]error:[/] {escape(error.message)}")
    if isinstance(error, InvariantError):
        for line in error.fields.get("story", ()):  # it may never happen again
            console.print(f"  {escape(line)}")
        console.print("This is a bug in Anabranch; please report it with the trace of --verbose.")
    if not verbose:
        return
    if detail := error.fields.get("detail"):  # of a user's function that raised on a node
        console.print(escape(str(detail)))
    console.print(escape("".join(traceback.format_exception(error))))
