"""Operators in words, as `anabranch describe` shows them, and what else they show from outside."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from anabranch.model.duration import microseconds, spoken
from anabranch.operators.base import LateRows
from anabranch.operators.kernels.aggregates import Aggregate, KeyedAggregate
from anabranch.operators.kernels.dedup import Deduplicate
from anabranch.operators.kernels.distinct import CountDistinct
from anabranch.operators.kernels.enrich import Enrich
from anabranch.operators.kernels.join import WindowJoin
from anabranch.operators.kernels.process import KeyedProcess
from anabranch.operators.kernels.sessions import SessionAggregate
from anabranch.operators.kernels.stateless import Filter, FlatMap, Map, Select
from anabranch.operators.kernels.topk import TopK
from anabranch.operators.kernels.windows import Window, WindowedAggregate
from anabranch.operators.state.ttl import Ttl

_PLAIN = {
    Filter: "filter",
    Select: "select",
    Map: "map",
    FlatMap: "flat_map",
    LateRows: "late rows",
}


def described(kernel: object) -> str:
    """In the words of its author: windows, aggregates, the columns it goes by."""
    match kernel:
        case WindowedAggregate():
            window = f"{_window(kernel.window)} of {kernel.time}{_waits(kernel.lateness)}"
            return f"{window}: {_aggregates(kernel.aggregates)}"
        case SessionAggregate():
            gap = spoken(kernel.session.gap_us)
            window = f"session {gap} of {kernel.time}{_waits(kernel.lateness)}"
            return f"{window}: {_aggregates(kernel.aggregates)}"
        case KeyedAggregate():
            return f"{_aggregates(kernel.aggregates)}{_lives(kernel.ttl)}"
        case Deduplicate(within=None):
            return "first rows"
        case Deduplicate(within=timedelta() as within):
            return f"first rows within {spoken(microseconds(within))} of {kernel.time}"
        case TopK():
            order = "" if kernel.descending else ", smallest first"
            lives = ", once per window" if kernel.once else _lives(kernel.ttl)
            return f"top {kernel.k} by {kernel.by}{order}{lives}"
        case KeyedProcess():
            time = f" of {kernel.time}" if kernel.time else ""
            return f"{type(kernel.function).__name__}{time}{_lives(kernel.ttl)}"
        case WindowJoin():
            columns = ", ".join((*kernel.left, *kernel.right))
            return f"join windows for {columns}"
        case Enrich():
            return f"enrich on {', '.join(kernel.static.on)} with {', '.join(kernel.columns)}"
    return _PLAIN.get(type(kernel), "")


def keeps_for_ever(kernel: object) -> bool:
    """Whether a key stays in its state until its own code deletes it."""
    if isinstance(kernel, KeyedAggregate | TopK | KeyedProcess):
        return kernel.ttl is None
    return isinstance(kernel, Deduplicate) and kernel.within is None


def _window(window: Window) -> str:
    if window.size_us == window.slide_us:
        return f"tumbling {spoken(window.size_us)}"
    return f"hopping {spoken(window.size_us)} every {spoken(window.slide_us)}"


def _waits(lateness: timedelta) -> str:
    return f", lateness {spoken(microseconds(lateness))}" if lateness else ""


def _lives(ttl: Ttl | None) -> str:
    if ttl is None:
        return ""
    return f", ttl {spoken(ttl.after_us)}{f' of {ttl.time}' if ttl.time else ''}"


def _aggregates(aggregates: Mapping[str, Aggregate]) -> str:
    return ", ".join(f"{name} = {_aggregate(a)}" for name, a in aggregates.items())


def _aggregate(aggregate: Aggregate) -> str:
    kind = type(aggregate)
    function = "count_distinct" if kind is CountDistinct else kind.__name__.lower()
    return f"{function}({aggregate.column or ''})"
