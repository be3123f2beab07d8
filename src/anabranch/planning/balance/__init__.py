"""Which task has which keys, and where their replicas are (paper 002)."""
