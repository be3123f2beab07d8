"""How a job that scales itself does so: the settings a user gives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

from anabranch.errors import ConfigError
from anabranch.model.duration import parse_duration
from anabranch.model.given import whole_number

IN_A_ROW = 2  # measurements that count as one observation; paper 000


@dataclass(frozen=True, slots=True)
class Autoscale:
    """How a job scales itself. CPU limits are shares of a core; None: no limit of its own.

    Nodes are asked for and given back only with `max_nodes`.
    """

    upper: float = 0.7
    lower: float = 0.3
    interval: str | timedelta = "5s"  # of a measurement
    cool_down: str | timedelta = "30s"
    down_after: str | timedelta = "30s"  # of measurements below `lower`
    drain_after: str | timedelta = "5m"
    min_parallelism: int = 1
    max_parallelism: int | None = None
    min_nodes: int = 1
    max_nodes: int | None = None
    dry_run: bool = False  # only say what it would do

    def __post_init__(self) -> None:
        if not 0 < self.lower < self.upper <= 1:
            raise ConfigError(
                f"autoscale has lower={self.lower} and upper={self.upper}; give shares of a core "
                "with 0 < lower < upper <= 1"
            )
        for least, most in (("min_parallelism", "max_parallelism"), ("min_nodes", "max_nodes")):
            low, high = getattr(self, least), getattr(self, most)
            for option, value in ((least, low), (most, high)):
                if value is not None:
                    whole_number(f"{option} of autoscale", value)
            if high is not None and high < low:
                raise ConfigError(
                    f"autoscale has {least}={low} and {most}={high}; give no less for "
                    f"{most} than for {least}"
                )
        for name in ("interval", "cool_down", "down_after", "drain_after"):
            if self.ms(name) < 1:
                raise ConfigError(f"autoscale has {name}={getattr(self, name)}; give more than 0")

    def ms(self, name: str) -> int:
        return parse_duration(getattr(self, name)) // timedelta(milliseconds=1)

    @property
    def target(self) -> float:
        """Half-way between the limits."""
        return (self.lower + self.upper) / 2

    def measurements(self, name: str) -> int:
        """How many measurements a time lasts."""
        return max(IN_A_ROW, math.ceil(self.ms(name) / self.ms("interval")))
