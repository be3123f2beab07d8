"""What a node does: host partitions, apply slices to them, write their checkpoints.

Free of Spark: the node process serves it over a Unix socket to Spark's tasks, and tests drive it
directly.
"""
