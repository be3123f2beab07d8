"""What planners are tried on: topologies and key frequencies."""
