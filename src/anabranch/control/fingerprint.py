"""May this topology go on from that checkpoint? If not, what differs.

State belongs to an operator's name. What decides is what state depends on: the sources (Spark's
offsets are kept by their order), the number of key groups, and for every stateful operator its
type, its key and the schema of its state. Stateless operators, sinks and parallelism may change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anabranch.errors import CheckpointMismatchError


def refuse_difference(old: Mapping[str, Any], new: Mapping[str, Any], directory: str) -> None:
    """Raise CheckpointMismatchError with the first difference that matters."""
    difference = _difference(old, new)
    if difference is not None:
        raise CheckpointMismatchError(
            f"the checkpoint in {directory} does not fit this topology: {difference}; undo the "
            "change, or start with a new checkpoint directory",
            directory=directory,
        )


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    if old["topology"] != new["topology"]:
        return f"it was written by topology {old['topology']!r}, this one is {new['topology']!r}"
    if old["sources"] != new["sources"]:
        return f"its sources were {_names(old['sources'])}, now they are {_names(new['sources'])}"
    if old["key_groups"] != new["key_groups"]:
        return f"it has {old['key_groups']} key groups, now {new['key_groups']} are asked for"
    before, now = old["operators"], new["operators"]
    gone = [n for n in before if n not in now]
    added = [n for n in now if n not in before]
    for name in gone:
        twin = next((a for a in added if now[a] == before[name]), None)
        if twin is not None:
            return f"operator {name!r} is now called {twin!r}, and state is found by name"
        return f"it holds state of operator {name!r}, which is not in the topology any more"
    for name, was in before.items():
        for what, label in (("type", "type"), ("keys", "key"), ("state", "state")):
            if was[what] != now[name][what]:
                return (
                    f"operator {name!r} has another {label}: "
                    f"{_names(was[what])} before, {_names(now[name][what])} now"
                )
    if added:
        return f"operator {added[0]!r} is new and would start without the rows before it"
    if old["chains"] != new["chains"]:
        return "a change of parallelism or key fuses its stateful operators differently"
    return None


def _names(value: Any) -> str:
    if isinstance(value, list):
        return "(" + ", ".join(map(str, value)) + ")"
    return str(value)
