"""A run as people see it on a terminal: its start, its live view, its summary."""
