"""The driver's work that needs no Spark: preparing a job, and carrying out commands."""
