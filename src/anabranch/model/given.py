"""Single values that users give: what they must be, wherever they are given."""

from __future__ import annotations

from typing import Any

from anabranch.errors import ConfigError


def whole_number(what: str, value: Any, hint: str = "") -> int:
    """A number of things, at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{what} is {value!r}; give a whole number{hint}")
    if value < 1:
        raise ConfigError(f"{what} is {value}; give at least 1{hint}")
    return value
