"""Write golden files of this version of the formats; CONTRIBUTING.md says when.

    .venv/bin/python tests/golden/make.py         a new numbered directory, with every job
    .venv/bin/python tests/golden/make.py --add   jobs that the newest directory does not have yet

What is in the files is written beside them as JSON. Whatever is there is never written again: every
later version has to read it.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "unit" / "node")]

from golden_jobs import JOBS, make  # noqa: E402
from taken_apart import as_text, take_apart  # noqa: E402


def versions() -> list[Path]:
    """The golden directories, oldest first."""
    found = [p for p in HERE.iterdir() if p.is_dir() and p.name.isdecimal()]
    return sorted(found, key=lambda p: int(p.name))


def write(target: Path, jobs: Iterable[str]) -> None:
    """Run the jobs and keep what they left; the names of this machine go."""
    for job in jobs:
        if (target / job).exists():
            raise SystemExit(f"{target / job} is there: golden files are never written again")
    with tempfile.TemporaryDirectory(prefix="anabranch-golden-") as place:
        root = Path(place) / "golden"
        make(root, jobs)
        for owner in root.rglob("generations/*/driver"):
            owner.write_text("process 1 on nowhere")
        for control in root.rglob("control.json"):
            control.write_text(json.dumps({**json.loads(control.read_text()), "host": "nowhere"}))
        for job in jobs:
            shutil.copytree(root / job, target / job)
            (target / f"{job}.json").write_text(as_text(take_apart(root / job)) + "\n")


if __name__ == "__main__":
    known = versions()
    if sys.argv[1:] == ["--add"]:
        write(known[-1], [job for job in JOBS if not (known[-1] / job).exists()])
    else:
        write(HERE / str(int(known[-1].name) + 1 if known else 1), tuple(JOBS))
