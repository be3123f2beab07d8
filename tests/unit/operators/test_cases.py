"""The table of operators in the test driver."""

from __future__ import annotations

import pytest

import anabranch as ab
from anabranch.testing import play
from operator_cases import (
    STEPS,
    Case,
    Outputs,
    Row,
    operator_gives_what_its_model_says,
    topology,
)

test_operator_gives_what_its_model_says = operator_gives_what_its_model_says


@pytest.fixture
def outputs() -> Outputs:
    def run(case: Case) -> list[Row]:
        steps = play(topology([case], None, lambda name: ab.Memory()), STEPS)
        return [row for output in steps for row in output[f"{case.name}_out"].rows()]

    return run
