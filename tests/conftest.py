"""Makes `oracle` (beside this file) and the `examples` importable for tests of all kinds, and runs
check their invariants after every event."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parents[1]))

os.environ["ANABRANCH_VALIDATE"] = "1"
os.environ.setdefault("POLARS_MAX_THREADS", "1")  # there is a worker per core

# How long an example takes says more about the machine than about the code.
settings.register_profile("anabranch", deadline=None, print_blob=True)
# What fails for one mutant says nothing about the next.
settings.register_profile("mutants", parent=settings.get_profile("anabranch"), database=None)
settings.load_profile("mutants" if "ANABRANCH_MUTANT" in os.environ else "anabranch")


def pytest_collection_finish() -> None:
    """What was imported and collected stays: a look at it in every collection of garbage is a tenth
    of the tests' time."""
    gc.collect()
    gc.freeze()
