"""Whether the journal and Spark's own offsets, in one checkpoint directory, belong together.

Spark writes `offsets/N`, which say what its rows are, before it offers batch N, and `commits/N`
once the batch is finished, which is after its last slice was journalled. When it starts it takes
up the newest of its offsets, and reads that batch again unless it is committed. So whatever a
crash left, it offers next the batch after the journal's, or once more the journal's newest:

    newest commit ≤ newest batch in the journal ≤ newest offsets ≤ newest batch in the journal + 1

where a batch counts as committed, or as followed by another, only if its last slice is journalled.
A copy that was made file by file from a running job may have one without the other. From there rows
would be skipped without a word, so it is refused. Commits that lag are harmless.
"""

from __future__ import annotations

from pathlib import Path


def newest_number(directory: Path) -> int | None:
    """The newest entry of one of Spark's logs; None if there is none."""
    found = [int(p.name) for p in directory.glob("[0-9]*") if p.name.isdecimal()]
    return max(found, default=None)


def misfit(batch: int | None, ended: bool, offset: int | None, commit: int | None) -> str | None:
    """What does not fit together; None where all does.

    `batch` is the newest in the journal, `ended` says whether its last slice is journalled;
    `offset` and `commit` are the newest of Spark's. None stands for none.
    """
    if batch is None:
        journal, complete = "the journal has no batch", -1
    elif ended:
        journal, complete = f"the journal ends with batch {batch}", batch
    else:
        journal, complete = f"the journal ends in the middle of batch {batch}", batch - 1
    if offset is None and batch is not None:
        return f"{journal}, but Spark's offsets are gone"
    if commit is not None and commit > complete:
        return f"{journal}, but Spark has committed batch {commit}"
    if offset is not None and offset > complete + 1:
        return f"{journal}, but Spark's offsets go on to batch {offset}"
    if offset is not None and batch is not None and offset < batch:
        return f"{journal}, but Spark's offsets end with batch {offset}"
    if commit is not None and (offset is None or commit > offset):
        return f"Spark has committed batch {commit}, but its offsets end before"
    return None
