"""Which tasks keep their output, so that any lost task is back within a bound (paper 003)."""
