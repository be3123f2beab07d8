"""What keeps the code readable: files that are not long, plain words, one word per thing."""

from __future__ import annotations

import re
from pathlib import Path

import anabranch

PACKAGE = Path(anabranch.__file__).parent
ROOT = PACKAGE.parents[1]
MAX_LINES = 400
# Each is one thing that would be harder to read in two places.
LONGER = {
    "api/streams.py": 550,  # every operator a stream has
    "node/protocol/host.py": 450,  # what a node answers
    "sinks/postgres.py": 500,  # one protocol with one database
    "spark/embedded.py": 480,  # the life of one cluster
}
FORBIDDEN = {
    r"\bso many\b": "say which number",
    r"\b[Ww]hoever\b": "say who",
    r"\b[Ss]hall\b": "is, must, or is to",
    r"\bMappingOf\b|\bPartitionMapping\b": "where partitions live is a Placement",
    r"\bTODO\b|\bFIXME\b|\bXXX\b": "do it, or leave it",
}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_files_are_not_long() -> None:
    lines = {f.relative_to(PACKAGE).as_posix(): f.read_text().count("\n") for f in sources()}
    too_long = {f: n for f, n in lines.items() if n > LONGER.get(f, MAX_LINES)}
    assert too_long == {}
    assert [f for f in LONGER if lines.get(f, 0) <= MAX_LINES] == [], "take it off the list"


def test_words() -> None:
    wrong = [
        f"{file.relative_to(PACKAGE)}:{number} {found[0]!r}: {instead}"
        for file in sources()
        for number, line in enumerate(file.read_text().splitlines(), 1)
        for word, instead in FORBIDDEN.items()
        if (found := re.search(word, line))
    ]
    assert wrong == []


def test_every_room_is_on_the_map() -> None:
    """docs/architecture.md says what each package, and each module of the core, decides."""
    told = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {f.relative_to(PACKAGE).parts[0] for f in sources() if f.parent != PACKAGE}
    assert [r for r in sorted(rooms) if f"`{r}/" not in told] == []
    for path in re.findall(r"^\| `([a-z_/]+\.py)`", told, re.MULTILINE):
        assert (PACKAGE / path).is_file(), f"docs/architecture.md names {path}"
