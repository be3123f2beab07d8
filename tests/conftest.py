"""Makes `oracle` (beside this file) and the `examples` importable for tests of all kinds."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
