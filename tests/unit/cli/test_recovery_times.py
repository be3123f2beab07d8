"""The prediction that a running job left, as `describe --checkpoint` shows it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from anabranch.cli.recovery_times import describe_recovery
from anabranch.errors import StorageError

sys.path.append(str(Path(__file__).parents[1] / "node"))


def test_a_job_with_a_bound_leaves_its_prediction(tmp_path: Path) -> None:
    from local_run import LocalRun
    from test_local_runs import Comparison
    from test_losses import DEEP

    with pytest.raises(StorageError, match="run the job with a recovery bound"):
        describe_recovery(tmp_path)
    comparison = Comparison(DEEP)
    run = LocalRun(comparison.topology(), tmp_path, 3, recovery_bound="2s")
    for n in range(25):
        comparison.feed(run, [{"s": [(k, n) for k in range(9)]}])
    shown = describe_recovery(tmp_path)
    assert [line.split()[2] for line in shown.splitlines()[1:]] == ["sum", "max", "count"]
    victim = run.cluster.nodes[0]
    run.cluster.kill(victim)
    comparison.feed(run, [{"s": [(1, 1)]}])
    assert run.history.recoveries[-1].predicted_s is not None
    assert "predicted:" in str(run.history.recoveries[-1])
    run.stop()
