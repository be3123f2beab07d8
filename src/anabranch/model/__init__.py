"""Frozen values: ids, topology, plan, mapping, slices, events and commands."""
