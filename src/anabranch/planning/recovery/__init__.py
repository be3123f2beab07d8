"""In which order queries come back after a correlated failure (papers 001 and 004)."""
