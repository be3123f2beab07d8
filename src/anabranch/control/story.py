"""What happened, for those who have to explain it: the newest events, what they moved, what came of
them; and the machines whose every move is told.

An event is told when it has caused something. Values are short strings, the story has an end:
telling it costs microseconds per event, also in a run that goes on for months.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from anabranch.errors import InvariantError
from anabranch.model.commands import (
    CatchUp,
    Command,
    PreparePartitions,
    RecoverPartitions,
    RunSlice,
    WriteHead,
    WriteSlice,
)
from anabranch.model.events import Event, NodesJoined, NodesLost, SliceRan
from anabranch.model.ids import PartitionId

KEPT = 300  # events that caused something
NAMED = 8  # partitions in one line

State = TypeVar("State", bound=Enum)


@dataclass(slots=True)
class Turn:
    """One event, the moves of machines, and the commands that came of it."""

    at_ms: int
    event: str
    moves: tuple[str, ...] = ()
    caused: tuple[str, ...] = ()
    times: int = 1  # in a row

    def __str__(self) -> str:
        again = f" ×{self.times}" if self.times > 1 else ""
        moves = f": {'; '.join(self.moves)}" if self.moves else ""
        caused = f" => {', '.join(self.caused)}" if self.caused else ""
        return f"{self.at_ms} ms {self.event}{again}{moves}{caused}"


class Story:
    """The newest turns, oldest first."""

    def __init__(self) -> None:
        self._turns: deque[Turn] = deque(maxlen=KEPT)
        self._turn: Turn | None = None  # in hand

    def begin(self, event: Event) -> None:
        self._turn = Turn(event.now_ms, _event(event))

    def move(self, machine: str, before: Enum, after: Enum, why: str) -> None:
        if self._turn is not None:
            reason = f" ({why})" if why else ""
            move = f"{machine} {before.name} → {after.name}{reason}"
            self._turn.moves = (*self._turn.moves, move)

    def end(self, caused: Iterable[str]) -> None:
        """Keep the turn in hand if anything came of it; polls in a row are one turn."""
        turn, self._turn = self._turn, None
        if turn is None:
            return
        turn.caused = tuple(caused)
        before = self._turns[-1] if self._turns else None
        if before is not None and not turn.moves and _same(turn, before):
            before.times += 1
            before.at_ms = turn.at_ms
        elif turn.moves or turn.caused:
            self._turns.append(turn)

    def told(self, about: str = "") -> tuple[str, ...]:
        """The story, oldest first; what names the entity `about` comes before the rest."""
        turns = [*self._turns, *([self._turn] if self._turn else [])]
        lines = [str(turn) for turn in turns]
        if not about:
            return tuple(lines)
        word = re.compile(rf"(?<!\w){re.escape(about)}(?!\w)")
        first = [line for line in lines if word.search(line)]
        rest = [line for line in lines if not word.search(line)]
        return (f"{about}:", *first, "all else:", *rest)


class Machine(Generic[State]):
    """Something that is in one of a few states. A move that its table does not have is a bug."""

    def __init__(
        self,
        name: str,
        first: State,
        legal: Mapping[State, frozenset[State]],
        story: Story,
    ) -> None:
        self.name = name
        self.state = first
        self._legal = legal
        self._story = story

    def _to(self, after: State, why: str = "") -> None:
        before = self.state
        if after not in self._legal[before]:
            reason = f" ({why})" if why else ""
            raise InvariantError(
                f"the {self.name} cannot go from {before.name} to {after.name}{reason}",
                machine=self.name,
            )
        self._story.move(self.name, before, after, why)
        self.state = after


def entity_of(error: InvariantError) -> str:
    """What the error is about, as the story names it."""
    fields = error.fields
    if "slice" in fields:
        return f"slice {fields['slice']}"
    return str(fields.get("machine", fields.get("partition", "")))


def described(commands: Sequence[Command]) -> list[str]:
    return [_command(c) for c in commands]


def _same(turn: Turn, before: Turn) -> bool:
    return (turn.event, turn.caused) == (before.event, before.caused) and not before.moves


def _event(event: Event) -> str:
    name = type(event).__name__
    match event:
        case SliceRan():
            return f"{name} slice {event.number}"
        case NodesJoined() | NodesLost():
            return f"{name} {', '.join(event.nodes)}"
        case _:
            parts = (getattr(event, f, None) for f in ("batch", "operator", "parallelism", "node"))
            return " ".join([name, *(str(p) for p in parts if p is not None)])


def _command(command: Command) -> str:
    name = type(command).__name__
    match command:
        case RunSlice():
            seals = ", seals" if command.plan.seal else ""
            return f"{name} slice {command.plan.number} ({command.plan.feed.value}{seals})"
        case WriteSlice():
            return f"{name} slice {command.record.number}"
        case RecoverPartitions() | CatchUp() | PreparePartitions():
            plan = command.plan
            which = _names(plan.restored)
            return (
                f"{name} ({plan.cause.value}, placement {plan.placement.version}, "
                f"from cut {plan.cut} to slice {plan.next_slice - 1}) {which}"
            )
        case WriteHead():
            cut = command.cut.slice if command.cut else 0
            return f"{name} (cut {cut}, placement {command.placement.version})"
        case _:
            return name


def _names(partitions: Iterable[PartitionId]) -> str:
    names = [str(p) for p in sorted(partitions)]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return " ".join(names[:NAMED]) + more
