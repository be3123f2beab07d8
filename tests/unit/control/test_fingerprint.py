"""Which topology may go on from which checkpoint, and where its state is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import CheckpointMismatchError
from anabranch.model.slices import Cut, SliceRecord
from anabranch.upgrade.fit import (
    changes_replay,
    check_fit,
    clean_stop_needed,
    rechained,
)

WINDOW = {"class": "windows.Window", "size_us": 30_000_000, "slide_us": 30_000_000}


def fingerprint() -> dict[str, Any]:
    return {
        "topology": "t",
        "key_groups": 8,
        "sources": ["s"],
        "sinks": ["out"],
        "operators": {
            "sum": {
                "type": "KeyedAggregate",
                "keys": ["k"],
                "state": ["_group: uint16", "k: int64", "v.sum: int64"],
                "kernel": {
                    "class": "aggregates.KeyedAggregate",
                    "keys": ["k"],
                    "aggregates": {
                        "class": "dict",
                        "items": [["v", {"class": "aggregates.Sum", "column": "v"}]],
                    },
                },
                "inputs": ["…"],
            },
            "win": {
                "type": "WindowedAggregate",
                "keys": ["k"],
                "state": ["k: int64", "_pane: int64"],
                "kernel": {
                    "class": "windows.WindowedAggregate",
                    "window": WINDOW,
                    "lateness": {"class": "timedelta", "us": 0},
                    "function": {"class": "opaque"},
                },
                "inputs": ["…"],
            },
        },
        "chains": {"sum": ["sum"], "win": ["win"]},
        "parallelism": {"sum": 2, "win": 2},
        "log": {"0": "sum/0 combined (k: int64, v: int64)", "1": "win/0 combined (k: int64)"},
    }


def changed(*path: str, to: Any) -> dict[str, Any]:
    made = copy.deepcopy(fingerprint())
    at: Any = made
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = to
    return made


def without(operator: str) -> dict[str, Any]:
    made = fingerprint()
    del made["operators"][operator], made["chains"][operator], made["parallelism"][operator]
    return made


@pytest.mark.parametrize(
    "new",
    [
        fingerprint(),
        changed("sinks", to=["other"]),
        changed("parallelism", "sum", to=5),
        changed("chains", to={"win": ["win", "sum"]}),
        changed("operators", "more", to=fingerprint()["operators"]["sum"]),
        changed("operators", "sum", "state", to=["k: int64", "_group: uint16", "v.sum: int64"]),
        changed("operators", "win", "kernel", "function", to=None),
        changed("operators", "win", "kernel", "ttl", to=None),  # a later version's setting
    ],
)
def test_state_survives(new: dict[str, Any]) -> None:
    check_fit(fingerprint(), new, "d")


SUM = fingerprint()["operators"]["sum"]


@pytest.mark.parametrize(
    ("new", "sentence"),
    [
        ({"topology": "t"}, "written by another version of Anabranch; run the job with that"),
        (changed("topology", to="u"), "written by topology 't', this one is 'u'; undo the change"),
        (changed("sources", to=["s", "r"]), r"its sources were (s), now they are (s, r)"),
        (changed("key_groups", to=9), "it has 8 key groups, now 9 are asked for"),
        (without("sum"), "holds state of operator 'sum', which is not in the topology any more; "),
        (without("sum"), "put it back, or name it in drop_state"),
        (
            changed("operators", to={"total": SUM, "win": fingerprint()["operators"]["win"]}),
            "operator 'sum' is now called 'total', and state is found by name; rename it back",
        ),
        (
            changed("operators", "sum", "type", to="TopK"),
            "operator 'sum' has another type: KeyedAggregate before, TopK now",
        ),
        (
            changed("operators", "sum", "keys", to=["k", "l"]),
            "operator 'sum' has another key: (k) before, (k, l) now",
        ),
        (
            changed(
                "operators", "sum", "state", to=["_group: uint16", "k: large_string", "n: int64"]
            ),
            "operator 'sum' has another state: column 'n' (int64) is new; column 'v.sum' (int64) "
            "is gone; column 'k' was int64, is large_string",
        ),
        (
            changed("operators", "win", "kernel", "window", to={**WINDOW, "size_us": 60_000_000}),
            "operator 'win' has other settings: setting 'window.size_us' was 30 s, is 60 s",
        ),
        (
            changed("operators", "win", "kernel", "lateness", "us", to=5_000_000),
            "setting 'lateness' was 0 s, is 5 s",
        ),
        (
            changed(
                "operators",
                "sum",
                "kernel",
                "aggregates",
                "items",
                to=[["v", {"class": "aggregates.Sum", "column": "w"}]],
            ),
            "setting 'aggregates.v.column' was v, is w; undo the change, or give the operator a "
            "new name to start it empty and the old one to drop_state",
        ),
    ],
)
def test_state_would_not_survive(new: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointMismatchError) as refused:
        check_fit(fingerprint(), new, "d")
    assert sentence in refused.value.message


def test_dropping() -> None:
    check_fit(fingerprint(), without("sum"), "d", dropped=["sum", "never-there"])
    with pytest.raises(CheckpointMismatchError, match="holds state of operator 'sum'"):
        check_fit(fingerprint(), without("sum"), "d", dropped=["win"][:0])
    with pytest.raises(CheckpointMismatchError, match="'win' is to be dropped, but the topology"):
        check_fit(fingerprint(), fingerprint(), "d", dropped=["win"])


def record(number: int, chunks_left: int = 0) -> SliceRecord:
    return SliceRecord(number, "live", 1, not chunks_left, 1, chunks_left, None, 0, 1)


OTHER_LOG = changed("log", to={"0": "win/0 combined (k: int64)"})
NO_SINK = changed("sinks", to=["renamed"])


@pytest.mark.parametrize(
    ("new", "cut", "slices", "reason"),
    [
        (OTHER_LOG, 4, [record(4)], None),  # nothing is left to replay
        (OTHER_LOG, None, [], None),
        (fingerprint(), 4, [record(4), record(5)], None),
        (OTHER_LOG, 4, [record(4), record(5)], "other rows go from the sources"),
        (OTHER_LOG, None, [record(1)], "other rows go from the sources"),
        (OTHER_LOG, 4, [record(4, chunks_left=1)], "other rows go from the sources"),
        (changed("operators", "n", to=SUM), 4, [record(5)], "operator 'n' is new"),
        (NO_SINK, 4, [record(5)], "the sink 'out' is not in the topology any more"),
        (NO_SINK, 5, [record(5)], None),
    ],
)
def test_when_a_clean_stop_must_come_first(
    new: dict[str, Any], cut: int | None, slices: list[SliceRecord], reason: str | None
) -> None:
    found = clean_stop_needed(fingerprint(), new, Cut(cut) if cut else None, slices)
    assert (found is None) == (reason is None)
    assert reason is None or reason in (found or "")


def test_a_renamed_sink_does_not_change_a_replay() -> None:
    assert changes_replay(fingerprint(), NO_SINK) is None
    assert changes_replay(fingerprint(), OTHER_LOG) is not None


GROUPS = 6
OPERATORS = [f"o{i}" for i in range(6)]


@st.composite
def chained(draw: st.DrawFn) -> dict[str, list[str]]:
    """Some of the operators, each in one chain; a chain is named after its first."""
    chosen = draw(st.permutations(OPERATORS))[: draw(st.integers(1, 6))]
    chains: dict[str, list[str]] = {}
    for name in chosen:
        home = draw(st.sampled_from([name, *chains]))
        chains.setdefault(home, []).append(name)
    return chains


@given(st.data(), chained(), chained())
def test_every_operator_finds_the_files_of_each_key_group(
    data: st.DataObject, old: dict[str, list[str]], new: dict[str, list[str]]
) -> None:
    """For every operator that stayed and every group: what the old owner wrote, in its order and
    once; for a new one, nothing of its own."""
    groups, files = {}, {}
    for chain in old:
        parts = data.draw(st.integers(1, 3))
        spread = data.draw(st.lists(st.integers(0, parts - 1), min_size=GROUPS, max_size=GROUPS))
        groups[chain] = spread
        for index in range(max(spread) + 1):
            files[f"{chain}/{index}"] = [f"{chain}/{index}/{n}" for n in range(2)]
    moved = rechained(Cut(7, files, groups), old, new)
    assert moved.slice == 7
    home = {o: c for c, names in old.items() for o in names}
    for chain, operators in new.items():
        for operator in (o for o in operators if o in home):
            for group in range(GROUPS):
                found = moved.files[f"{chain}/{moved.groups[chain][group]}"]
                own = files[f"{home[operator]}/{groups[home[operator]][group]}"]
                assert [f for f in found if f in own] == own
        if not any(o in home for o in operators):
            assert chain not in moved.groups
    assert all(len(set(fs)) == len(fs) for fs in moved.files.values())
