"""SECURITY.md names every socket that the code listens on, and a test or a setting in every row."""

from __future__ import annotations

import re
from pathlib import Path

import anabranch

PACKAGE = Path(anabranch.__file__).parent
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()
LISTENS = re.compile(
    r"\.listen\(|create_server\(|Listener\(|Server\(|server_started\(|--webui-port"
)


def rows() -> list[str]:
    lines = [line for line in PAGE.splitlines() if line.startswith("|")]
    return [
        line
        for line, after in zip(lines, [*lines[1:], ""], strict=True)
        if not line.startswith("|---") and not after.startswith("|---")
    ]


def test_every_listening_socket_is_on_the_page() -> None:
    listening = [
        str(file.relative_to(PACKAGE))
        for file in sorted(PACKAGE.rglob("*.py"))
        if LISTENS.search(file.read_text())
    ]
    assert len(listening) >= 5
    assert [name for name in listening if f"`{name}`" not in PAGE] == []


def test_every_row_names_a_test_or_a_setting_of_spark() -> None:
    assert len(rows()) >= 15
    for row in rows():
        tests = re.findall(r"`(tests/\S+\.py)`", row)
        assert tests or re.search(r"`spark\.\S+`", row), row


def test_the_tests_it_names_are_there() -> None:
    named = set(re.findall(r"`(tests/\S+?)`", PAGE))
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_limits_it_names_are_those_of_the_code() -> None:
    from anabranch.driver import endpoint, heartbeats
    from anabranch.node.process.heartbeat import NONCE_BYTES, PROOF_BYTES

    greeting = NONCE_BYTES + PROOF_BYTES + 1 + 255
    assert f"{heartbeats.MAX_UNKNOWN} unknown callers, each for {heartbeats.GREET_S:.0f} s" in PAGE
    assert f"and {greeting} bytes" in PAGE
    assert f"{endpoint.MAX_CALLERS} callers, {endpoint.GREET_S:.0f} s for each message" in PAGE
