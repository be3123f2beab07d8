"""Durable things: journal, source log, checkpoint files, sinks. Versioned, atomic, checked."""
