"""What each operator does with one slice."""
