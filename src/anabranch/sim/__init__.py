"""A deterministic simulator: the real controller on simulated nodes, virtual time and faults."""

from __future__ import annotations

from anabranch.sim.run import Outcome, simulate

__all__ = ["Outcome", "simulate"]
