"""Addresses without secrets: they stand in journals, names of files, messages and logs.

A URL with a password in it is refused; what is shown of an address that may be malformed keeps
nothing that could be a part of one.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from anabranch.errors import ConfigError

# user:password@, but not host:port/…@…; the password may hold anything, as people paste it.
_PASSWORD = re.compile(r"://[^:@/]*:(?!\d+/)[^@]*@")
_PARAMETER = re.compile(
    r"[?&;#][^=&;]*(password|passwd|pwd|secret|token|credential|signature|sig|key)[^=&;]*=",
    re.IGNORECASE,
)


def refuse_credentials(address: str, what: str, instead: str) -> None:
    """`what` was given the address; `instead` says where its credentials belong."""
    plain = unquote(address)
    if _PASSWORD.search(plain) or _PARAMETER.search(plain):
        raise ConfigError(
            f"{what} is {masked(address)!r}: it holds a password or a key, which would be written "
            f"to the journal and to logs; leave it out and {instead}"
        )


def masked(address: str) -> str:
    """The address without what may be secret: all before an @, and its parameters."""
    scheme, separator, rest = address.partition("://") if "://" in address else ("", "", address)
    plain, parameters, _ = rest.partition("?")
    if parameters and "@" in rest:
        return f"{scheme}{separator}***"  # either may be a part of the other
    at = "***@" if "@" in plain else ""
    return scheme + separator + at + plain.rpartition("@")[2] + ("?***" if parameters else "")
