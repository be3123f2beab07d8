"""Every error Anabranch raises.

AnabranchError
├── UserError                 a mistake in the job: the message says what to change
│   ├── TopologyError         the graph: names, cycles, keys, parallelism, column types
│   ├── ConfigError           an option or a setting of the Spark session
│   ├── CheckpointMismatchError  the checkpoint belongs to another topology
│   ├── AdjustmentError       a request to a running job that it cannot fulfil
│   ├── PlanningError         an optimisation problem that is ill-posed or has no solution
│   └── OperatorError         a user's function raised
├── EnvironmentFault          the machine, the cluster or the disk
│   ├── CheckpointLockedError another driver owns the directory
│   ├── StorageError          a read or a write failed
│   └── ClusterError          Java, Spark or a node is missing or broken
└── InvariantError            a bug in Anabranch: it stops and tells the story of the entity

All carry their fields as keyword arguments and survive pickling, since they travel between
node processes, Spark tasks and the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class AnabranchError(Exception):
    """Base of all errors; `fields` keeps what the message was built from."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.fields)


def _rebuild(cls: type[AnabranchError], message: str, fields: dict[str, Any]) -> AnabranchError:
    return cls(message, **fields)


class UserError(AnabranchError):
    """A mistake in the user's job; the message says what, where, and what to change."""


class TopologyError(UserError):
    """The topology cannot be built."""


class ConfigError(UserError):
    """An option, or a setting of the Spark session, cannot work."""


class CheckpointMismatchError(UserError):
    """The checkpoint was written by a topology that differs from this one."""


class AdjustmentError(UserError):
    """A running job was asked for a change that it cannot make."""


class PlanningError(UserError):
    """A planning problem is ill-posed (bad numbers, a cycle) or has no solution."""


class OperatorError(UserError):
    """A user's function raised while it processed a slice."""


class EnvironmentFault(AnabranchError):  # noqa: N818 - a fault of the world, not of the code
    """The world misbehaved."""


class CheckpointLockedError(EnvironmentFault):
    """Another driver runs on the same checkpoint directory."""


class StorageError(EnvironmentFault):
    """A durable read or write failed."""


class ClusterError(EnvironmentFault):
    """Java, Spark or a node is missing or broken."""


class InvariantError(AnabranchError):
    """Something that must never happen did: a bug in Anabranch, never a user's mistake. Where it
    is known, `fields["story"]` tells what happened before, and so does the printed error."""

    def told(self, story: Sequence[str]) -> InvariantError:
        """The same error with its story, unless it has one."""
        self.fields.setdefault("story", tuple(story))
        return self

    def __str__(self) -> str:
        story = self.fields.get("story", ())
        return "\n  ".join([self.message, *(["what happened:"] if story else []), *story])
