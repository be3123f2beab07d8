"""Durations as people write them: "500ms", "30s", "1m"."""

from __future__ import annotations

import re
from datetime import timedelta

from anabranch.errors import ConfigError

_UNITS = {
    "us": timedelta(microseconds=1),
    "ms": timedelta(milliseconds=1),
    "s": timedelta(seconds=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(us|ms|s|m|h|d)\s*")


def parse_duration(text: str | timedelta) -> timedelta:
    """A number and a unit (us, ms, s, m, h, d); a timedelta is returned as it is."""
    if isinstance(text, timedelta):
        return text
    match = _FORM.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(
            f"{text!r} is not a duration; write a number and a unit (us, ms, s, m, h, d), "
            'such as "30s", or give a timedelta',
            duration=text,
        )
    return float(match[1]) * _UNITS[match[2]]


def microseconds(duration: timedelta) -> int:
    return duration // timedelta(microseconds=1)
