"""What a run is given: its settings, and what earlier runs on the same directory left behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anabranch.control.policies.autoscale import Autoscale
from anabranch.control.policies.balance import Balance
from anabranch.control.policies.strategies import Strategy
from anabranch.model.costs import Costs
from anabranch.model.ids import PartitionId
from anabranch.model.placement import Layout
from anabranch.model.slices import Cut, SliceRecord

# All that fits at once, the rest with the nodes that come; all queries when there is room for all
# of them; all at once on whatever nodes are left.
RECOVERY_MODES = ("incremental", "blocking", "eager")


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """The run's settings that decisions depend on."""

    checkpoint_interval_ms: int = 10_000
    # Event-time delay per source that declares an event time.
    watermark_delays_us: Mapping[str, int] = field(default_factory=dict)
    # Of those, sources that hold the watermark back only for so long without rows.
    idle_timeouts_ms: Mapping[str, int] = field(default_factory=dict)
    # Chains that keep their output until no recovery needs it; None: all of them.
    backups: frozenset[str] | None = None
    # Instead of a fixed choice: back up what brings any lost node back within these seconds.
    recovery_bound_s: float | None = None
    slice_interval_ms: int = 1_000
    autoscale: Autoscale | None = None
    balance: Balance | None = None
    # A lost partition whose output goes to sinks only is rebuilt in this number of parts.
    parallel_recovery: int = 1
    strategy: Strategy = field(default_factory=Strategy)
    # When nodes are lost and the rest is not enough for all queries: one of RECOVERY_MODES.
    recovery: str = "incremental"
    # Only sources keep their output until several nodes are lost; then all do, for a while.
    adaptive_backups: bool = False


@dataclass(frozen=True, slots=True)
class Past:
    """What the journal of earlier runs on the same directory says; empty for a new one."""

    cut: Cut | None = None
    previous: Cut | None = None
    slices: tuple[SliceRecord, ...] = ()  # after the previous cut, in order
    epochs: Mapping[PartitionId, int] = field(default_factory=dict)
    groups: Layout = field(default_factory=dict)
    layouts: Mapping[int, Layout] = field(default_factory=dict)  # of slices that had another
    rescaled: frozenset[str] = frozenset()  # chains whose declared parallelism is another now
    placement_version: int = 0
    generation: int = 1  # of the driver that begins: no other one has it
    autoscaler: Mapping[str, Any] = field(default_factory=dict)  # its memory
    older: tuple[Cut, ...] = ()  # cuts before `previous`, the newest first, for chains that wait
    behind: Mapping[str, int] = field(default_factory=dict)  # the first slice that a chain lacks
    costs: Costs = field(default_factory=Costs)
