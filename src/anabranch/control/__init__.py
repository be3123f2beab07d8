"""Pure decisions: events in, commands out. No Spark, no clock, no threads, no files."""
