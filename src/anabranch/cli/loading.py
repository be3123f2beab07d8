"""From `module:attribute` on the command line to a topology."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType

import anabranch
from anabranch.api import Topology
from anabranch.errors import AnabranchError, ConfigError


def load_topology(reference: str) -> Topology:
    """The topology `reference` names, or a ConfigError that says what to change.

    Modules are looked for in the current directory first. The attribute may be a topology or a
    function without arguments that returns one.
    """
    name, colon, attribute = reference.partition(":")
    if not (name and colon and attribute):
        raise ConfigError(
            f"{reference!r} does not name a topology; write module:attribute, such as "
            "examples.word_count:topology",
            reference=reference,
        )
    found = _attribute(_import(name), attribute)
    if not isinstance(found, Topology) and callable(found):
        found = _call(found, reference)
    if not isinstance(found, Topology):
        raise ConfigError(
            f"{reference} is a {type(found).__name__}; name an anabranch.Topology, or a function "
            "without arguments that returns one",
            reference=reference,
        )
    return found


def _import(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except AnabranchError as e:
        raise type(e)(f"{e.message}{_line(e)}", **e.fields) from e
    except ModuleNotFoundError as e:
        missing = e.name or name
        if name == missing or name.startswith(missing + "."):
            raise ConfigError(
                f"there is no module {name!r} in {here} or among the installed packages; check "
                "the name, or go to the directory that holds it",
                module=name,
            ) from e
        raise ConfigError(
            f"the module {name!r} imports {missing!r}, which is not installed", module=name
        ) from e
    except Exception as e:
        raise ConfigError(
            f"the module {name!r} raised {type(e).__name__} when it was imported: {e}{_line(e)}",
            module=name,
        ) from e


def _line(error: Exception) -> str:
    """The line of the user's own code that led to it, for a message; nothing if there is none."""
    here, ours = Path.cwd(), Path(anabranch.__file__).parent
    frames = [(Path(f.filename), f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    mine = [
        (path.relative_to(here), line)
        for path, line in frames
        if path.is_relative_to(here)
        and not path.is_relative_to(ours)
        and "site-packages" not in path.parts
    ]
    return f" ({mine[-1][0]}, line {mine[-1][1]})" if mine else ""


def _attribute(module: ModuleType, name: str) -> object:
    if hasattr(module, name):
        return getattr(module, name)
    known = [n for n, v in vars(module).items() if isinstance(v, Topology)]
    hint = f"; its topologies are: {', '.join(known)}" if known else ""
    raise ConfigError(
        f"the module {module.__name__!r} has no attribute {name!r}{hint}", module=module.__name__
    )


def _call(function: object, reference: str) -> object:
    assert callable(function)
    try:
        return function()
    except AnabranchError as e:
        raise type(e)(f"{e.message}{_line(e)}", **e.fields) from e
    except Exception as e:
        told = f"{type(e).__name__}: {e}{_line(e)}"
        raise ConfigError(
            f"{reference} was called without arguments and raised {told}", reference=reference
        ) from e
