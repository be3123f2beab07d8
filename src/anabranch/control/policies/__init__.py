"""How to choose: each policy turns what was measured into a choice, and keeps nothing else."""
