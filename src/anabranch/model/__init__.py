"""Frozen values: ids, topology, plan, placement, slices, events and commands."""
