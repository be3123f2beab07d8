"""May this topology go on from that checkpoint? If not, what differs; if so, how state moves.

State belongs to an operator's name. What decides is what state depends on: the sources (Spark's
offsets are kept by their order), the number of key groups, and for every stateful operator its
type, its key, the schema of its state and its settings. Code, stateless operators, sinks and
parallelism may change; a stateful operator may be added, and removed if the user says so. Chains
are only where operators run: `rechained` finds the state of operators that changed theirs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from anabranch.errors import CheckpointMismatchError
from anabranch.model.slices import Cut, SliceRecord

# Settings that are not compared: how long rows are kept decides only about later ones, and what a
# function declares as its state is compared column by column.
FREE_SETTINGS = frozenset({"retain", "ttl.after_us", "state", "state.ipc"})


def check_fit(
    old: Mapping[str, Any], new: Mapping[str, Any], directory: str, dropped: Collection[str] = ()
) -> None:
    """Raise CheckpointMismatchError with the first difference that state cannot survive.

    `dropped` names operators whose state the user gives up. `new` may be what a topology declares
    by itself, before the columns of its sources are known: then they are not compared.
    """
    difference = _difference(old, new, frozenset(dropped))
    if difference is not None:
        raise _mismatch(directory, *difference)


def _mismatch(directory: str, what: str, change: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"the checkpoint in {directory} does not fit this topology: {what}; {change}",
        directory=directory,
    )


_UNDO = "undo the change, or start with a new checkpoint directory"


def _difference(
    old: Mapping[str, Any], new: Mapping[str, Any], dropped: frozenset[str]
) -> tuple[str, str] | None:
    """What differs, and what to change."""
    later = {"feeds"} | (set() if "log" in new else {"log"})
    if old.keys() - later != new.keys() - later:
        return "it was written by another version of Anabranch", "run the job with that version"
    if old["topology"] != new["topology"]:
        was, now = old["topology"], new["topology"]
        return f"it was written by topology {was!r}, this one is {now!r}", _UNDO
    if old["sources"] != new["sources"]:
        was, now = _names(old["sources"]), _names(new["sources"])
        return f"its sources were {was}, now they are {now}", _UNDO
    if old["key_groups"] != new["key_groups"]:
        was, now = old["key_groups"], new["key_groups"]
        return f"it has {was} key groups, now {now} are asked for", _UNDO
    for name in sorted(dropped & new["operators"].keys()):
        return f"the state of {name!r} is to be dropped, but the topology has it", (
            "give the operator a new name to start it empty, or keep its state"
        )
    return _lost_state(old["operators"], new["operators"], dropped) or _changed_state(
        old["operators"], new["operators"]
    )


def _lost_state(
    before: Mapping[str, Any], now: Mapping[str, Any], dropped: frozenset[str]
) -> tuple[str, str] | None:
    for name in before:
        if name in now or name in dropped:
            continue
        drop = f"name it in drop_state to give its state up (drop_state=[{name!r}])"
        twins = [a for a in now if a not in before and _same(before[name], now[a])]
        if twins:
            what = f"operator {name!r} is now called {twins[0]!r}, and state is found by name"
            return what, f"rename it back, or {drop}"
        what = f"it holds state of operator {name!r}, which is not in the topology any more"
        return what, f"put it back, or {drop}"
    return None


def _same(was: Mapping[str, Any], is_: Mapping[str, Any]) -> bool:
    return all(was.get(k) == v for k, v in is_.items())


def _changed_state(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str] | None:
    for name in (n for n in before if n in now):
        was, is_ = before[name], now[name]
        what = None
        for field, label in (("type", "type"), ("keys", "key")):
            if what is None and was[field] != is_[field]:
                what = f"another {label}: {_names(was[field])} before, {_names(is_[field])} now"
        if what is None and "state" in is_:
            columns = _changes(_columns(was["state"]), _columns(is_["state"]))
            what = f"another state: {'; '.join(columns)}" if columns else None
        if what is None and (values := _changes(_settings(was), _settings(is_), "setting")):
            what = f"other settings: {'; '.join(values)}"
        if what is not None:
            return f"operator {name!r} has {what}", (
                "undo the change, or give the operator a new name to start it empty and the old "
                f"one to drop_state (drop_state=[{name!r}])"
            )
    return None


def _changes(was: Mapping[str, str], now: Mapping[str, str], noun: str = "column") -> list[str]:
    """Name by name: what was added, removed, changed."""
    return [
        *(f"{noun} {n!r} ({t}) is new" for n, t in now.items() if n not in was),
        *(f"{noun} {n!r} ({t}) is gone" for n, t in was.items() if n not in now),
        *(f"{noun} {n!r} was {was[n]}, is {t}" for n, t in now.items() if was.get(n, t) != t),
    ]


def _columns(state: Sequence[str]) -> dict[str, str]:
    return dict(_instants(column).split(": ", 1) for column in state)


def _instants(types: str) -> str:
    """Types without the zone that earlier versions took from Spark's session."""
    return re.sub(r"timestamp\[us, tz=[^\]]*\]", "timestamp[us, tz=UTC]", types)


def _settings(operator: Mapping[str, Any]) -> dict[str, str]:
    return {k: v for k, v in _flat(operator["kernel"], "") if k not in FREE_SETTINGS}


def _flat(data: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every comparable setting of a kernel (its form is in `upgrade.kernel_settings`)."""
    if isinstance(data, list):
        yield path, _names([v for v in data if not isinstance(v, dict)])
        for i, v in enumerate(data):
            if isinstance(v, dict):
                yield from _flat(v, f"{path}[{i}]")
    elif data is None:
        return  # like a setting that the version before did not have
    elif not isinstance(data, dict):
        yield path, f"{data / 1e6:g} s" if path.endswith("_us") else str(data)
    elif data["class"] == "timedelta":
        yield path, f"{data['us'] / 1e6:g} s"
    elif data["class"] == "dict":
        yield path, _names([k for k, _ in data["items"]])
        for k, v in data["items"]:
            yield from _flat(v, f"{path}.{k}")
    elif data["class"] != "opaque":
        if path:  # the kernel's own class is its type
            yield path, data["class"].rpartition(".")[2]
        for k, v in data.items():
            if k != "class":
                yield from _flat(v, f"{path}.{k}" if path else k)


def _names(value: Any) -> str:
    if isinstance(value, list):
        return "(" + ", ".join(map(str, value)) + ")"
    return str(value)


# -- what may only happen where nothing is left to replay ------------------------------------------


def clean_stop_needed(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    cut: Cut | None,
    slices: Sequence[SliceRecord],
) -> str | None:
    """Why the slices after the cut need the topology that logged them; None when they do not, or
    when there are none. A sink that is gone may not have shown the newest of them."""
    newest = slices[-1] if slices else None
    if newest is None or not (newest.number > (cut.slice if cut else 0) or newest.chunks_left):
        return None
    if reason := changes_replay(old, new):
        return reason
    gone = [n for n in old["sinks"] if n not in new["sinks"]]
    return f"the sink {gone[0]!r} is not in the topology any more" if gone else None


def changes_replay(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Why slices of the old topology cannot be replayed by the new one; None when they can.

    A new operator would begin with a few old rows. The source log holds rows by shuffle: if these
    are others now, it cannot feed them.
    """
    added = [n for n in new["operators"] if n not in old["operators"]]
    if added:
        return f"operator {added[0]!r} is new"
    if "log" in new and {k: _instants(v) for k, v in old["log"].items()} != new["log"]:
        return "other rows go from the sources to stateful operators"
    return None


def changes_late_slices(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Why chains that wait cannot make up for slices of the old topology in the new one; None when
    they can. What they lack is evaluated, staged and shown as it would have been in time."""
    for what, noun in (("operators", "operator"), ("sinks", "sink")):
        gone = [n for n in old[what] if n not in new[what]]
        added = [n for n in new[what] if n not in old[what]]
        if gone or added:
            return f"{noun} {[*gone, *added][0]!r} is {'gone' if gone else 'new'}"
    if reason := changes_replay(old, new):
        return reason
    if old["chains"] != new["chains"]:
        return "operators are evaluated in other chains"
    for chain, declared in new["parallelism"].items():
        if (before := old["parallelism"][chain]) != declared:
            return f"operator {chain!r} had parallelism {before}, now it has {declared}"
    fed: Mapping[str, list[str]] = new.get("feeds", {})
    for sink, chains in fed.items():
        if old.get("feeds", fed).get(sink) != chains:
            return f"the sink {sink!r} gets its rows from other operators"
    return None


# -- where the state of an operator is -------------------------------------------------------------


def rechained(cut: Cut, old: Mapping[str, Sequence[str]], new: Mapping[str, Sequence[str]]) -> Cut:
    """The cut as if the new chains had written it; `old` and `new` name each chain's stateful
    operators.

    A chain's files are those of the chains its operators come from. Where these were routed
    differently, the chain's state counts as one partition's: a restart picks rows by key group.
    """
    files: dict[str, list[str]] = {}
    groups: dict[str, list[int]] = {}
    for chain, operators in new.items():
        origins = [o for o in origins_of(operators, old) if o in cut.groups]
        routings = {tuple(cut.groups[o]) for o in origins}
        if not origins:
            continue
        parts = {o: range(max(cut.groups[o]) + 1) for o in origins}
        if len(routings) == 1:
            groups[chain] = list(cut.groups[origins[0]])
            for index in parts[origins[0]]:
                of = [f for o in origins for f in cut.files.get(f"{o}/{index}", [])]
                files[f"{chain}/{index}"] = of
        else:
            groups[chain] = [0] * len(cut.groups[origins[0]])
            files[f"{chain}/0"] = [
                f for o in origins for i in parts[o] for f in cut.files.get(f"{o}/{i}", [])
            ]
    return Cut(cut.slice, files, groups)


def origins_of(operators: Sequence[str], old: Mapping[str, Sequence[str]]) -> list[str]:
    """The old chains that held these operators, each once."""
    home = {name: chain for chain, names in old.items() for name in names}
    return list(dict.fromkeys(home[o] for o in operators if o in home))
