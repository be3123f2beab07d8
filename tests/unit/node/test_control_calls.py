"""Requests to nodes beside the waves: what their errors do."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from anabranch.errors import ClusterError, InvariantError
from anabranch.node.process import client
from anabranch.spark import tasks


def asked(monkeypatch: pytest.MonkeyPatch, error: Exception) -> Any:
    def call(request: Any) -> Any:
        raise error

    monkeypatch.setattr(client, "call", call)
    (answer,) = tasks.control_frames(0, [pickle.dumps("poll")])
    return pickle.loads(answer)


def test_a_node_process_that_goes_away_is_for_spark_to_try_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found by `benchmarks.kills`: killed while state was loaded ahead, it ended the run."""
    with pytest.raises(ClusterError, match="went away"):
        asked(monkeypatch, ClusterError("the node process behind x.sock went away"))


def test_other_errors_travel_as_values(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = asked(monkeypatch, InvariantError("a driver of generation 1 spoke"))
    assert isinstance(answer, InvariantError)
    assert isinstance(asked(monkeypatch, ValueError("oh")), ValueError)
