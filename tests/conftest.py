"""Makes `oracle` (beside this file) and the `examples` importable for tests of all kinds, and runs
check their invariants after every event."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parents[1]))

os.environ["ANABRANCH_VALIDATE"] = "1"

# How long an example takes says more about the machine than about the code.
settings.register_profile("anabranch", deadline=None, print_blob=True)
settings.load_profile("anabranch")
