"""How a job is to run: what users may give, wherever they give it, and what is wrong with it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, TypedDict

from anabranch.control.policies.autoscale import Autoscale
from anabranch.control.policies.balance import Balance
from anabranch.control.policies.strategies import STRATEGIES, Strategy
from anabranch.control.settings import RECOVERY_MODES
from anabranch.errors import ConfigError
from anabranch.model.duration import Duration, parse_duration
from anabranch.model.given import whole_number
from anabranch.storage.checkpoint_store import LOCAL, check_url


class Given(TypedDict, total=False):
    """The same as keywords, for the signatures of what takes them."""

    slice: Duration
    checkpoint_interval: Duration
    max_rows_per_slice: int | None
    available_now: bool
    backups: str | Sequence[str]
    recovery_bound: Duration | None
    recovery: str
    node_timeout: Duration
    slice_timeout: Duration | None
    node_wait: Duration | None
    autoscale: Autoscale | bool
    balance: Balance | bool
    parallel_recovery: int
    drop_state: Sequence[str]
    state_url: str | None
    strategy: str | Strategy


@dataclass(frozen=True)
class RunOptions:
    """As users write them, checked when this is made; `Topology.start` says what each means. The
    properties are what they come to."""

    slice: Duration = "1s"
    checkpoint_interval: Duration = "10s"
    max_rows_per_slice: int | None = None
    available_now: bool = False
    backups: str | Sequence[str] = "all"
    recovery_bound: Duration | None = None
    recovery: str = "incremental"
    node_timeout: Duration = "5s"
    slice_timeout: Duration | None = None
    node_wait: Duration | None = None
    autoscale: Autoscale | bool = False
    balance: Balance | bool = False
    parallel_recovery: int = 1
    drop_state: Sequence[str] = ()
    state_url: str | None = None
    strategy: str | Strategy = "ours"

    @staticmethod
    def of(given: Mapping[str, Any]) -> RunOptions:
        """From keywords; refuses those there are not."""
        known = [f.name for f in fields(RunOptions)]
        for name in given:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
                raise ConfigError(f"there is no option {name!r}; {hint}", option=name)
        return RunOptions(**given)

    def __post_init__(self) -> None:
        if self.max_rows_per_slice is not None:
            whole_number("max_rows_per_slice", self.max_rows_per_slice, ", or None for no limit")
        whole_number("parallel_recovery", self.parallel_recovery)
        if not isinstance(self.autoscale, bool | Autoscale):
            raise ConfigError(
                f"autoscale is {self.autoscale!r}; give True, False or ab.Autoscale(...)"
            )
        if not isinstance(self.balance, bool | Balance):
            raise ConfigError(f"balance is {self.balance!r}; give True, False or ab.Balance(...)")
        if isinstance(self.strategy, str) and self.strategy not in STRATEGIES:
            raise ConfigError(f"strategy is {self.strategy!r}; there are {', '.join(STRATEGIES)}")
        if self.recovery not in RECOVERY_MODES:
            raise ConfigError(
                f"recovery is {self.recovery!r}; there are {', '.join(RECOVERY_MODES)}"
            )
        self._check_backups()
        if isinstance(self.drop_state, str):
            raise ConfigError(f"drop_state is {self.drop_state!r}; give a list of operator names")
        if self.state_url is not None:
            check_url(self.state_url)
        for option in ("slice", "checkpoint_interval", "node_timeout"):
            positive_ms(option, getattr(self, option))
        for option in ("recovery_bound", "slice_timeout", "node_wait"):
            self._optional_ms(option)

    def _check_backups(self) -> None:
        if isinstance(self.backups, str) and self.backups not in ("all", "sources", "adaptive"):
            raise ConfigError(
                f'backups is {self.backups!r}; give "all", "sources", "adaptive" or a list of '
                "operator names"
            )
        if not self.adaptive_backups:
            return
        if self.recovery_bound is not None:
            raise ConfigError(
                'backups is "adaptive", but with a recovery_bound the job chooses backups to keep '
                "it; give one of the two"
            )
        if not self.survival.is_ours:
            raise ConfigError(
                f'backups is "adaptive", but strategy {self.strategy!r} says itself what is kept; '
                "give one of the two"
            )

    def _optional_ms(self, option: str) -> int | None:
        value: Duration | None = getattr(self, option)
        return None if value is None else positive_ms(option, value)

    @property
    def slice_interval_ms(self) -> int:
        return positive_ms("slice", self.slice)

    @property
    def checkpoint_interval_ms(self) -> int:
        return positive_ms("checkpoint_interval", self.checkpoint_interval)

    @property
    def recovery_bound_ms(self) -> int | None:
        return self._optional_ms("recovery_bound")

    @property
    def node_timeout_ms(self) -> int:
        """Silent for so long, a node counts as lost."""
        return positive_ms("node_timeout", self.node_timeout)

    @property
    def slice_timeout_ms(self) -> int | None:
        return self._optional_ms("slice_timeout")

    @property
    def node_wait_ms(self) -> int | None:
        """Without any node, the run waits no longer than this."""
        return self._optional_ms("node_wait")

    @property
    def backing_up(self) -> frozenset[str] | None:
        """Operators that back up, from the start on; None: all."""
        if isinstance(self.backups, str):
            return None if self.backups == "all" else frozenset()
        return frozenset(self.backups)

    @property
    def adaptive_backups(self) -> bool:
        """Do operators back up only after several nodes were lost?"""
        return isinstance(self.backups, str) and self.backups == "adaptive"

    @property
    def autoscaling(self) -> Autoscale | None:
        return Autoscale() if self.autoscale is True else self.autoscale or None

    @property
    def balancing(self) -> Balance | None:
        return Balance() if self.balance is True else self.balance or None

    @property
    def survival(self) -> Strategy:
        """How a loss is survived; other systems' ways are for experiments."""
        return STRATEGIES[self.strategy] if isinstance(self.strategy, str) else self.strategy

    @property
    def checkpoints(self) -> str:
        """The place of checkpoint files."""
        return LOCAL if self.state_url is None else self.state_url.rstrip("/")


def positive_ms(option: str, value: Duration) -> int:
    milliseconds = parse_duration(value) // timedelta(milliseconds=1)
    if milliseconds < 1:
        raise ConfigError(f"{option} is {value}; give at least one millisecond")
    return milliseconds
