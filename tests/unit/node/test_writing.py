"""What a node says of the checkpoint files that it wrote, or could not write."""

from __future__ import annotations

from typing import Any, cast

from anabranch.errors import StorageError
from anabranch.model.ids import PartitionId
from anabranch.node.protocol.carried import Job, Sealed
from anabranch.node.protocol.writing import REPORTED_CHECKPOINTS, CheckpointWriter

P = PartitionId("sum", 0)


class Disk:
    """The part of a job that writes."""

    full = False

    def write_checkpoint(self, sealed: Sealed) -> tuple[str, int]:
        if self.full:
            raise StorageError("no space left")
        return f"{sealed.slice}.ckpt", 10


def sealed(slice_no: int, run: int = 1, content: Any = "rows") -> Sealed:
    return Sealed(run, P, slice_no, 1, True, 0, content)


def writer() -> tuple[CheckpointWriter, Disk, Job[Any]]:
    disk = Disk()
    made = CheckpointWriter(lambda work: work())
    made.begin(1)
    return made, disk, cast("Job[Any]", disk)


def test_a_file_that_cannot_be_written_is_said_again_and_again() -> None:
    made, disk, job = writer()
    disk.full = True
    made.submit(job, sealed(1))
    assert made.written() == ()
    for _ in range(2):
        (failure,) = made.failures()
        assert (failure.kind, failure.message) == ("storage", "no space left")
    made.begin(2)
    assert made.failures() == ()


def test_another_runs_files_and_failures_are_not_said() -> None:
    made, disk, job = writer()
    made.begin(2)
    made.write(job, sealed(1, run=1))
    disk.full = True
    made.write(job, sealed(2, run=1))
    assert (made.written(), made.failures()) == ((), ())


def test_only_the_newest_files_are_said_and_nothing_changed_is_no_file() -> None:
    made, _, job = writer()
    for slice_no in range(1, REPORTED_CHECKPOINTS + 3):
        made.write(job, sealed(slice_no, content=None if slice_no == 4 else "rows"))
    said = made.written()
    assert [w.slice for w in said] == list(range(3, REPORTED_CHECKPOINTS + 3))
    assert {w.slice for w in said if w.path is None} == {4} & {w.slice for w in said}
