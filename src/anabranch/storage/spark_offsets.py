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

from anabranch.errors import StorageError
from anabranch.model.slices import SliceRecord


def refuse_misfit_offsets(root: Path, newest: SliceRecord | None) -> None:
    """The journal, which ends with `newest`, and Spark's offsets are one checkpoint, or rows would
    be skipped or read again without a word."""
    spark = root / "spark"
    offset, commit = newest_number(spark / "offsets"), newest_number(spark / "commits")
    refuse_misfit(str(spark), newest, offset, commit)


def refuse_misfit(
    spark: str, newest: SliceRecord | None, offset: int | None, commit: int | None
) -> None:
    """The same, for what Spark's logs in `spark` end with."""
    batch, ended = newest.batch if newest else None, newest is None or newest.batch_end
    wrong = misfit(batch, ended, offset, commit)
    if wrong is not None:
        raise StorageError(
            f"{wrong} ({spark}): the directory is not one that a job has left; restore it from "
            "a copy that was made while no job ran on it, or start with a new checkpoint "
            "directory",
            path=spark,
        )


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
