"""What runs are to meet: every kind of fault, wherever it can strike, and what is done then."""

from __future__ import annotations

# Where a fault or the end of a driver may strike.
STEPS = ("source", "wave", "end", "replay", "recovery", "poll", "prepare", "commit", "idle")
COMMANDS = ("PreparePartitions", "WriteHead", "RecoverPartitions", "RunSlice", "WriteSlice")
FAULTS = (
    "crashes",
    "hangs",
    "replaced",
    "joins",
    "packets lost",
    "late calls",
    "torn files",
    "torn appends",
    "driver crashes",
    "driver crashes at a write",
    "drivers that pause",
    "writes refused",
    "writes of tasks refused",
    "overlapping attempts",
    "misplaced calls",
    "functions that raise",
    "calls back",
    "sinks that refuse",
    "misfits",
    "another parallelism",
    "leaps of the clock",
    "stops in a batch",
    *(f"faults at {step}" for step in (*STEPS, *COMMANDS)),
)
ANSWERS = (
    "recoveries",
    "restores failed",
    "shadows",
    "senders",
    "parts",
    "backups chosen anew",
    "backups begun",
    "backups ended",
    "requests accepted",
    "requests refused",
    "adjustments",
    "stages",
    "released",
    "decisions",
    "runs ended by StorageError",
    "runs ended by OperatorError",
    "runs ended by CheckpointLockedError",
    "runs ended by CheckpointMismatchError",
)
