"""How a job that balances its keys does so: the settings a user gives."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from anabranch.errors import ConfigError
from anabranch.model.duration import parse_duration


@dataclass(frozen=True, slots=True)
class Balance:
    """The load of a partition may differ from the mean of its operator's by `theta_max`, a share of
    that; once it does, keys move until it differs by no more than `theta_min` (paper 002)."""

    theta_max: float = 0.1
    theta_min: float = 0.05
    interval: str | timedelta = "5s"  # of a measurement
    cool_down: str | timedelta = "30s"
    dry_run: bool = False  # only say what it would do

    def __post_init__(self) -> None:
        both = self.theta_min, self.theta_max
        numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in both)
        if not numbers or not 0 < self.theta_min <= self.theta_max < 1:
            raise ConfigError(
                f"balance has theta_min={self.theta_min!r} and theta_max={self.theta_max!r}; give "
                "shares of the mean load with 0 < theta_min <= theta_max < 1"
            )
        for name in ("interval", "cool_down"):
            if self.ms(name) < 1:
                raise ConfigError(f"balance has {name}={getattr(self, name)}; give more than 0")

    def ms(self, name: str) -> int:
        return parse_duration(getattr(self, name)) // timedelta(milliseconds=1)
