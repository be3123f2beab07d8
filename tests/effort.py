"""How hard random tests try: more in `make test-long`."""

from __future__ import annotations

import os

LONG = os.environ.get("ANABRANCH_LONG_TESTS") == "1"


def examples(count: int) -> int:
    return 8 * count if LONG else max(5, count * 3 // 5)
