"""The address of a PostgreSQL server, understood or refused without a word of it being shown.

libpq quotes what it cannot parse, and a server that it does not find or a port that is none. Where
an address is malformed, a part of the password may have become just that.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

from anabranch.errors import ConfigError

_PORTS = re.compile(r"[0-9,]*")


def psycopg_module() -> Any:
    try:
        importlib.import_module("psycopg.conninfo")
        return importlib.import_module("psycopg")
    except ImportError as e:
        raise ConfigError(
            "a Postgres sink needs the package psycopg on the driver: pip install "
            "'anabranch[postgres]'"
        ) from e


def parsed(address: str) -> Mapping[str, Any]:
    """The parameters of a connection by their names."""
    psycopg = psycopg_module()
    try:
        found: dict[str, Any] = psycopg.conninfo.conninfo_to_dict(address)
    except (psycopg.Error, ValueError, TypeError):
        raise _malformed() from None
    if _misplaced(address, {k: str(v) for k, v in found.items()}):
        raise _malformed()
    return found


def _misplaced(address: str, found: Mapping[str, str]) -> bool:
    """Whether a password may have ended up where messages quote it."""
    if "://" in address:
        authority = address.partition("://")[2].partition("?")[0].rpartition("@")[0]
        if any(mark in authority for mark in "/@") or authority.count(":") > 1:
            return True
    quoted = [v for k, v in found.items() if k not in ("password", "sslpassword", "options")]
    return (
        "\0" in address  # where libpq stops to read
        or _PORTS.fullmatch(found.get("port", "")) is None
        or "@" in found.get("host", "")[1:]  # @name is a socket
        or any("://" in value for value in quoted)
    )


def _malformed() -> ConfigError:
    return ConfigError(
        "the address of a Postgres sink cannot be understood (it is not shown, for it may hold a "
        "password); write postgresql://user:password@host:port/database with special characters "
        "of the password as %XX, or host=… user=… password='…' dbname=… with values that have "
        "blanks in quotes"
    )
