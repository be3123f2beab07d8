"""What a user says of losses that leave too few nodes, and what the controller is told of it."""

from __future__ import annotations

from typing import Any

import pytest

import anabranch as ab
from anabranch.control.policies.strategies import Strategy
from anabranch.control.settings import RECOVERY_MODES, ControlConfig
from anabranch.driver.options import RunOptions
from anabranch.driver.preparing import control_config


def topology() -> ab.Topology:
    t = ab.Topology("t")
    rows = t.source("rows", None)
    rows.to("raw", ab.Memory())
    rows.key_by("k").aggregate("count", n=ab.count()).to("counts", ab.Memory(), priority=7)
    return t


def config(**options: Any) -> ControlConfig:
    return control_config(topology().parts(), RunOptions.of(options))


def test_the_default() -> None:
    given = config()
    assert (given.recovery, given.adaptive_backups, given.backups) == ("incremental", False, None)
    assert (ControlConfig().recovery, ControlConfig().adaptive_backups) == ("incremental", False)


@pytest.mark.parametrize("mode", RECOVERY_MODES)
def test_modes(mode: str) -> None:
    assert config(recovery=mode).recovery == mode


def test_adaptive_backups_begin_with_none() -> None:
    given = config(backups="adaptive")
    assert (given.adaptive_backups, given.backups) == (True, frozenset())
    given = config(backups="sources")
    assert (given.adaptive_backups, given.backups) == (False, frozenset())
    given = config(backups=["count"])
    assert (given.adaptive_backups, given.backups) == (False, frozenset({"count"}))


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "AR"},
        {"strategy": Strategy(whole=True)},
        {"recovery_bound": "2s"},
        {"parallel_recovery": 2},
    ],
    ids=str,
)
def test_what_chooses_backups_or_owners_itself(options: dict[str, Any]) -> None:
    for mode in RECOVERY_MODES:
        assert config(recovery=mode, **options).recovery == mode
    if "parallel_recovery" not in options:
        with pytest.raises(ab.ConfigError, match=r'backups is "adaptive", but .*; give one of the'):
            config(backups="adaptive", **options)
    assert config(backups="adaptive", strategy="ours").adaptive_backups


def test_priorities_reach_the_plan() -> None:
    plan = topology().plan()
    assert [(q.sink, q.priority, set(q.chains)) for q in plan.queries] == [
        ("raw", 1, set()),
        ("counts", 7, {"count"}),
    ]


def test_a_priority_is_no_part_of_what_state_depends_on() -> None:
    from anabranch.node.arrow.schemas import declared

    t = ab.Topology("t")
    rows = t.source("rows", None)
    rows.to("raw", ab.Memory())
    rows.key_by("k").aggregate("count", n=ab.count()).to("counts", ab.Memory())
    assert declared(t.plan()) == declared(topology().plan())
