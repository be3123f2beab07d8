"""Durations as people write them: "500ms", "30s", "1m", "10 seconds"."""

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
_NAMES = {
    "microsecond": "us",
    "millisecond": "ms",
    "second": "s",
    "sec": "s",
    "minute": "m",
    "min": "m",
    "hour": "h",
    "day": "d",
}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)

Duration = str | timedelta


def parse_duration(text: str | timedelta) -> timedelta:
    """A number and a unit (us, ms, s, m, h, d); a timedelta is returned as it is."""
    if isinstance(text, timedelta):
        return text
    match = _FORM.fullmatch(text) if isinstance(text, str) else None
    written = match[2].lower() if match else ""
    unit = _UNITS.get(_NAMES.get(written.removesuffix("s"), written))
    if match is None or unit is None:
        raise ConfigError(
            f"{text!r} is not a duration; write a number and a unit (us, ms, s, m, h, d), "
            'such as "30s" or "10 seconds", or give a timedelta',
            duration=text,
        )
    return float(match[1]) * unit


def spoken(us: int) -> str:
    """Microseconds in the largest unit that leaves no fraction, as `parse_duration` takes them."""
    for unit, length in reversed(_UNITS.items()):
        count, rest = divmod(us, microseconds(length))
        if not rest and count:
            return f"{count}{unit}"
    return f"{us}us" if us else "0s"


def microseconds(duration: timedelta) -> int:
    return duration // timedelta(microseconds=1)
